"""Built-in losses. The functions themselves need torch and are imported only when a training uses them."""

from __future__ import annotations

from collections.abc import Iterable

from kiln_cli import Loss, hookimpl


@hookimpl
def kiln_losses() -> Iterable[Loss]:
    return [
        Loss(
            name="cross_entropy",
            doc="mean negative log-likelihood of the supervised tokens, in nats a token",
            target="kiln_plugins.cross_entropy:cross_entropy",
        ),
        Loss(
            name="teacher_top_k",
            doc="reverse KL from a teacher's top-K log-probabilities, with ECHO on observed tokens if asked",
            target="kiln_plugins.teacher_top_k:teacher_top_k",
            columns=("teacher_token_ids", "teacher_logprobs"),
        ),
    ]
