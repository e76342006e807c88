"""Reverse KL from a teacher's top-K log-probabilities, at action tokens, and ECHO: cross-entropy at observed ones.

The student's logits are needed at the teacher's K tokens alone, so neither N x V logits nor the rest of the output
weight is touched. Both sides are renormalised over these K tokens: what either thinks of other tokens is left out,
unless ``tail_bucket`` counts it as one more outcome. ``coverage`` measures how much that is.

Axes: N action tokens, n of them in a chunk, K teacher tokens at each, M observed tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from kiln_cli import Head, LossBatch, LossOut
from kiln_plugins.chunks import CHUNK, chunked_sum, widened
from kiln_plugins.cross_entropy import weighted_nll

SMALLEST_TAIL = 2.0**-24  # below it 1 - mass is rounding: both sides' tails are held at or above it


class Scores(NamedTuple):
    """What the teacher said of N positions, its most probable token first."""

    token_ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K] float32, over its whole vocabulary


def teacher_top_k(
    hidden: Tensor,
    project: Head,
    batch: LossBatch,
    *,
    echo_lambda: float = 0.0,
    tail_bucket: bool = False,
    coverage: bool = False,
    chunk: int = CHUNK,
) -> LossOut:
    """Mean over N action tokens of KL(student || teacher), plus ``echo_lambda`` x ECHO where there is something to add.

    Args:
        hidden: [N, H] in the model's dtype, gathered before the output projection.
        project: the model's own head, whole and at chosen tokens.
        batch: columns ``teacher_token_ids`` [N, K] int64 and ``teacher_logprobs`` [N, K] float32; ``observed`` for
            ECHO, which is 1 / ``observed.total`` x the sum of -log p over ``observed.targets``. Weights must be 1.
        echo_lambda: factor of ECHO; at 0 observed tokens are not looked at.
        tail_bucket: compare K + 1 outcomes without renormalising, the last of them being all other tokens.
        coverage: also measure, without training on it, what either side gives to the K tokens. Projects all logits.
        chunk: positions whose whole logits are made at a time, where they are needed at all.

    Returns:
        LossOut with ``loss``, a float32 scalar in nats a token. Metrics: ``reverse_kl``; ``env_ce`` where ECHO was
        added; ``teacher_mass_top_k`` and ``student_mass_outside`` with ``coverage``. Counts: ``action_tokens``,
        ``env_tokens`` (M) and ``env_tokens_before_filter``.

    Raises:
        ValueError: N is 0, or shapes disagree.
    """
    scores = _scores(hidden, batch)
    if tail_bucket:
        summed = partial(_sum_with_tail, project)
        kl = chunked_sum(summed, hidden, *scores, chunk=chunk) / len(hidden)
    else:
        kl = reverse_kl(project.at(hidden, scores.token_ids), scores.logprobs).mean()
    metrics = {"reverse_kl": kl.item()}
    counts = {"action_tokens": len(hidden)}
    if coverage:
        metrics |= _coverage(project, hidden, scores, chunk)
    loss, observed = kl, batch.observed
    if observed is not None and echo_lambda:
        counts |= {"env_tokens": len(observed.targets), "env_tokens_before_filter": observed.total}
        if len(observed.targets):
            ones = torch.ones(len(observed.targets), device=hidden.device)
            nll = chunked_sum(partial(weighted_nll, project), observed.hidden, observed.targets, ones, chunk=chunk)
            env_ce = nll / observed.total
            metrics["env_ce"] = env_ce.item()
            loss = kl + echo_lambda * env_ce
    return LossOut(loss=loss, metrics=metrics, counts=counts)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """student [n, K] logits, teacher [n, K] logprobs -> [n]: KL(student || teacher), both renormalised over the K.

    Temperature 1, float32 at least. The gradient with respect to logit v is p_v ((log p_v - log q_v) - KL).
    """
    log_p = torch.log_softmax(widened(student), dim=-1)
    log_q = torch.log_softmax(teacher.to(log_p.dtype), dim=-1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def _scores(hidden: Tensor, batch: LossBatch) -> Scores:
    scores = Scores(batch.columns["teacher_token_ids"], batch.columns["teacher_logprobs"])
    count = len(hidden)
    ids, logprobs = (tuple(column.shape) for column in scores)
    if not count or len(ids) != 2 or ids[0] != count or ids != logprobs or not ids[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)}, teacher_token_ids {ids} and teacher_logprobs {logprobs}; "
            "expected [N, H], [N, K] and [N, K] with N and K > 0"
        )
    return scores


def _sum_with_tail(project: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor, teacher: Tensor) -> Tensor:
    """hidden [n, H], ids and teacher [n, K] -> scalar: the sum of KL over K + 1 outcomes, the last being the rest.

    Neither side is renormalised. A tail below ``SMALLEST_TAIL`` counts as that, and has no gradient.
    """
    logits = widened(project(hidden))  # [n, V]
    log_p = logits.gather(-1, ids) - logits.logsumexp(dim=-1, keepdim=True)  # [n, K]
    log_q = teacher.to(log_p.dtype)
    p_tail, q_tail = _tail(log_p), _tail(log_q)  # [n]
    kept = (log_p.exp() * (log_p - log_q)).sum(dim=-1)  # [n]
    return (kept + p_tail * (p_tail.log() - q_tail.log())).sum()


def _tail(logprobs: Tensor) -> Tensor:
    """[n, K] -> [n]: the mass that these K outcomes leave."""
    return (1 - logprobs.exp().sum(dim=-1)).clamp(min=SMALLEST_TAIL)


@torch.no_grad()
def _coverage(project: Head, hidden: Tensor, scores: Scores, chunk: int) -> dict[str, float]:
    """Means over the N positions: the teacher's mass within its top K, and the student's mass outside of it."""

    def student_mass(rows: Tensor, ids: Tensor) -> Tensor:
        logits = widened(project(rows))  # [n, V]
        return (logits.gather(-1, ids).logsumexp(dim=-1) - logits.logsumexp(dim=-1)).exp().sum()

    parts = [slice(begin, begin + chunk) for begin in range(0, len(hidden), chunk)]
    within = torch.stack([student_mass(hidden[part], scores.token_ids[part]) for part in parts]).sum()
    return {
        "teacher_mass_top_k": widened(scores.logprobs).exp().sum(dim=-1).mean().item(),
        "student_mass_outside": 1 - within.item() / len(hidden),
    }
