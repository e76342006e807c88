"""The ``opd`` and ``echo`` blocks of a train receipt, and its token counts. No torch.

Who writes a receipt and who verifies one derive them alike: from the receipt of the corpus, the settings, the admitted
rows and the loss log.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.distillation import DistillConfig, EchoConfig
from kiln_cli.receipts import Alignment, Coverage, EchoBlock, OpdBlock
from kiln_stages.distilling.ingestion import ScoredIngestion
from kiln_stages.training.metrics import Measured, read_measured

KL, ENV_CE = "reverse_kl", "env_ce"
TEACHER_MASS, STUDENT_MASS = "teacher_mass_top_k", "student_mass_outside"


class RowLengths(NamedTuple):
    """Of one admitted row: its identity, and how many tokens it has of each sort. ``observed``: targets of ECHO;
    ``observation``: observation tokens before any was left out."""

    row_sha256: str
    tokens: int
    action: int
    observed: int
    observation: int


def token_counts(rows: Sequence[RowLengths], times: Sequence[int], echo: EchoConfig | None) -> dict[str, int]:
    """Tokens that the committed steps trained on and passed over, a row as often as it was visited (``times``).

    ``env_tokens`` are those that ECHO trained on: none without it, or with lambda 0.
    """
    action = before = after = total = 0
    for row, visits in zip(rows, times, strict=True):
        action += visits * row.action
        before += visits * row.observation
        after += visits * (row.observation if echo is None else row.observed)
        total += visits * row.tokens
    trained = after if echo is not None and echo.lambda_ else 0
    return {
        "action_tokens": action,
        "context_tokens": total - action - trained,
        "env_tokens": trained,
        "env_tokens_after_warning_filter": after,
        "env_tokens_before_warning_filter": before,
        "warning_tokens_filtered": before - after,
    }


def opd_block(
    ingestion: ScoredIngestion, settings: DistillConfig, counts: dict[str, int], log: Sequence[Measured]
) -> OpdBlock:
    """``log``: what the loss measured at each committed step."""
    return OpdBlock(
        training_mode=settings.training_mode,
        objective=settings.objective,
        loss_granularity=settings.loss,
        teacher_id=ingestion.teacher_alias,
        teacher_content_revision=ingestion.teacher_content_revision,
        teacher_identity=msgspec.to_builtins(ingestion.teacher_identity),
        top_k=ingestion.top_k,
        samples_per_prompt=settings.samples_per_prompt,
        action_tokens=counts["action_tokens"],
        env_tokens=counts["env_tokens"],
        echo_combined=any(ENV_CE in step.metrics for step in log),
        echo_lambda=None if settings.echo is None else settings.echo.lambda_,
        initial_opd_loss=log[0].metrics.get(KL) if log else None,
        final_opd_loss=log[-1].metrics.get(KL) if log else None,
        alignment=Alignment(proven=ingestion.alignment.proven, of=ingestion.alignment.of),
        tail_bucket=settings.tail_bucket,
        coverage=_coverage(log) if settings.coverage else None,
    )


def echo_block(settings: DistillConfig, log: Sequence[Measured]) -> EchoBlock:
    echo = settings.echo
    measured = [step.metrics[ENV_CE] for step in log if ENV_CE in step.metrics]
    block = EchoBlock(
        enabled=bool(measured),
        lambda_=None if echo is None else echo.lambda_,
        env_mask_mode=None if echo is None else echo.env_mask_mode,
        warning_filter=None if echo is None else echo.warning_filter,
        initial_env_ce=measured[0] if measured else None,
        final_env_ce=measured[-1] if measured else None,
    )
    return block if measured else msgspec.structs.replace(block, dropped_reason=_why_dropped(echo, log))


def read_log(path: Path) -> list[Measured]:
    """What the loss measured at each step of a loss log; a log that is not there has no step."""
    return read_measured(path) if path.exists() else []


def _why_dropped(echo: EchoConfig | None, log: Sequence[Measured]) -> str:
    if echo is None:
        return "not_configured"
    if not echo.lambda_:
        return "lambda_is_zero"
    return "no_observation_tokens" if log else "no_step"


def _coverage(log: Sequence[Measured]) -> Coverage | None:
    if not log or TEACHER_MASS not in log[0].metrics or STUDENT_MASS not in log[0].metrics:
        return None
    first, last = log[0].metrics, log[-1].metrics
    return Coverage(
        teacher_mass_top_k=(first[TEACHER_MASS], last[TEACHER_MASS]),
        student_mass_outside=(first[STUDENT_MASS], last[STUDENT_MASS]),
    )
