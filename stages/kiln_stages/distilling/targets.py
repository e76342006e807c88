"""The tokens of an example that a teacher scores: a conversation with its answer, or a trajectory, as ids and targets.

Who scores an example and who admits the scores find the targets here, so that both count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kiln_cli.chat import ChatRow, require_structure
from kiln_cli.distillation import EchoConfig
from kiln_cli.errors import RowFault
from kiln_stages.admitting.contract import Contract
from kiln_stages.admitting.row_views import RowView
from kiln_stages.distilling.trajectory import Segment, read_trajectory
from kiln_stages.labelling.labels import LabelFinder
from kiln_stages.labelling.rendering import Message, Spans


class Targets(msgspec.Struct, frozen=True, kw_only=True):
    """An example as tokens. ``action_targets``, ``observation_targets``: positions in ``input_ids``, ascending, none 0;
    each is predicted by the logits of the position before. ``observation_tokens``: all observation tokens, before
    warnings are trimmed. ``notes``: what the template leaves out lawfully."""

    text: str
    content_spans: Spans
    input_ids: list[int]
    action_targets: list[int]
    observation_targets: list[int]
    observation_tokens: int
    notes: tuple[str, ...] = ()


class TargetFinder:
    """Finds targets under a contract of admission: its template, tokenizer, view, and limit of tokens.

    ``echo`` says which part of an observation counts; without it none is a target, and they are counted as
    ``env_only`` does.
    """

    def __init__(self, contract: Contract, echo: EchoConfig | None = None) -> None:
        self._finder, self._tokenizer = contract.finder, contract.tokenizer
        self._max_tokens, self._control = contract.max_tokens, contract.settings.control_tokens
        self._view = RowView(contract.chat_mode, contract.settings.system_turn)
        self._plain = contract.finder if self._view == RowView() else LabelFinder(contract.finder.template)
        self._echo = echo

    def find(self, messages: Sequence[Message], response: str, segments: Sequence[Segment] = ()) -> Targets:
        """``messages`` are in normal form (``kiln_cli.chat``), without the answer. With segments the response is not
        looked at.

        Raises RowFault: the codes of ``admission.REASONS`` but ``no_supervised_tokens``, which is ``no_action_tokens``;
        ``no_preceding_position`` where the first token of all is a target; ``invalid_warning_prefix``.
        """
        require_structure(ChatRow([*messages, *({"role": one.role, "content": ""} for one in segments)]))
        try:
            found = self._trajectory(messages, segments) if segments else self._answer(messages, response)
        except RowFault as fault:
            if fault.reason not in ("no_supervised_tokens", "no_assistant_message"):
                raise
            raise RowFault("no_action_tokens", fault.detail, fault.pointer) from fault
        if self._max_tokens is not None and len(found.input_ids) > self._max_tokens:
            raise RowFault("over_length", f"{len(found.input_ids)} tokens, at most {self._max_tokens}")
        if found.action_targets[0] == 0:
            raise RowFault("no_preceding_position", "the first token of all is a target, and nothing predicts it")
        return found

    def token_texts(self, found: Targets) -> list[str]:
        """The text of each token; see :meth:`RowTokenizer.trace`."""
        return self._tokenizer.trace(found.text, found.content_spans, self._control)[1]

    def _answer(self, messages: Sequence[Message], response: str) -> Targets:
        answer: dict[str, Any] = {"role": "assistant", "content": response}
        rendered = self._finder.find([*messages, answer])
        encoded = self._tokenizer.encode(rendered.text, rendered.spans, rendered.content_spans, self._control)
        return Targets(
            text=rendered.text,
            content_spans=rendered.content_spans,
            input_ids=encoded.input_ids,
            action_targets=_positions(encoded.label_spans),
            observation_targets=[],
            observation_tokens=0,
            notes=rendered.notes,
        )

    def _trajectory(self, messages: Sequence[Message], segments: Sequence[Segment]) -> Targets:
        echo = self._echo or EchoConfig()
        prompt, _ = self._view(list(messages), None)
        seen = read_trajectory(self._plain, prompt, segments, echo.env_mask_mode)
        actions = [span for span in seen.actions if span[0] < span[1]]
        if not actions:
            raise RowFault("no_action_tokens", "no segment of kind action has any text", "/trajectory")
        wanted = seen.filtered if echo.warning_filter else seen.observations
        spans = [*seen.observations, *wanted]
        encoded, runs = self._tokenizer.encode_touching(seen.text, actions, seen.content_spans, spans, self._control)
        observed = _tokens(seen.observations, runs)
        actions_at = _positions(encoded.label_spans)
        if shared := observed.intersection(actions_at):
            detail = f"token {min(shared)} belongs to an action and to an observation"
            raise RowFault("mask_disagreement", detail, "/trajectory")
        targets = _tokens(wanted, runs[len(seen.observations) :]) - {0} if self._echo is not None else set()
        return Targets(
            text=seen.text,
            content_spans=seen.content_spans,
            input_ids=encoded.input_ids,
            action_targets=actions_at,
            observation_targets=sorted(targets),
            observation_tokens=len(observed),
            notes=seen.notes,
        )


def _positions(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [at for start, end in spans for at in range(start, end)]


def _tokens(spans: Spans, runs: Sequence[tuple[int, int]]) -> set[int]:
    """The tokens of spans that are not empty, by the run of tokens of each."""
    filled = (run for span, run in zip(spans, runs, strict=False) if span[0] < span[1])
    return {at for start, end in filled for at in range(start, end)}
