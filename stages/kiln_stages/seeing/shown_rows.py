"""A row of a run as it was rendered and tokenized, made again and held to what admission wrote.

Nothing is shown that was not admitted: where template, tokenizer, rows or the outcome differ from the run's own
evidence, the row is refused (KLN207).
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.lines import LineReader
from kiln_cli.manifests import read_manifest
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.text import printable
from kiln_stages.admitting.admission import CONTAMINATED, RejectedDetail
from kiln_stages.admitting.contract import Contract, build_contract, load_terms
from kiln_stages.admitting.corpus import AdmittedRow
from kiln_stages.admitting.incoming import IncomingRow
from kiln_stages.admitting.inputs import open_again
from kiln_stages.admitting.pipeline import RowsInput
from kiln_stages.admitting.prepared_rows import ToolsMode
from kiln_stages.distilling.admitted import require_conversations
from kiln_stages.labelling.labels import Rendered
from kiln_stages.reading.ranges import Range, open_range
from kiln_stages.reading.sources import json_lines
from kiln_stages.seeing import trail
from kiln_stages.seeing.trail import Offered

Label = Literal["trained", "context"]
TRAINED: Label = "trained"
CONTEXT: Label = "context"


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One token. The texts of a row's tokens, joined, are the row's text; ``control``: it is a control token."""

    id: int
    text: str
    label: Label
    control: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a template and a tokenizer make of one row. A rejected row has its ``fault``, and as much of the rest as it
    came to; ``spans`` are characters of ``text``. ``proven``: the labels are."""

    text: str | None = None
    spans: tuple[tuple[int, int], ...] = ()
    tokens: list[Token] = []
    notes: tuple[str, ...] = ()
    fault: RejectedDetail | None = None
    proven: bool = False

    @property
    def supervised(self) -> int:
        return sum(token.label == TRAINED for token in self.tokens)


class Admitted(msgspec.Struct, frozen=True):
    """A run that was admitted, with what it was admitted under and its inputs opened again."""

    run: Path
    config: LoadedConfig
    manifest: AdmitManifest
    contract: Contract
    inputs: dict[str, RowsInput]

    def row(self, split: str, row_index: int) -> IncomingRow:
        return read_row(self.inputs[split], row_index)


def read_row(source: RowsInput, row_index: int) -> IncomingRow:
    """One row of an opened input, by its number."""
    size = os.fstat(source.plain.stream.fileno()).st_size
    stream = open_range(source.plain.stream.fileno(), Range(0, 0, size))
    records = json_lines(LineReader(stream, hashed=False), elements=source.plain.elements)
    (found,) = source.rows(record for record in records if record.row_index == row_index)
    return found


def open_admitted(run: Path, plugins: Plugins, stack: ExitStack) -> Admitted:
    """Raises KilnError KLN206 where the run was not admitted, KLN207 where something differs from its manifest, and as
    admission does for model files and templates that are missing."""
    manifest = read_manifest(run, AdmitManifest)
    require_conversations(manifest, "kiln inspect")
    config = load_config(run / "config.resolved.toml")
    contract = build_contract(config, load_terms(config, plugins))
    _require_same(manifest, contract)
    inputs = open_again(config, run, plugins, contract, manifest, stack)
    return Admitted(run, config, manifest, contract, {source.split: source for source in inputs})


def outcome_of(contract: Contract, source: RowsInput, incoming: IncomingRow) -> Outcome:
    """The row through the contract as admission does it, with the text of each token. Held-out rows play no part."""
    admission = contract.admission(source.source_reasons)
    (judged,) = admission.judge(source.split, [incoming])
    rendered = admission.render(incoming)
    verdict = judged.outcome if isinstance(judged.outcome, RejectedDetail) else judged.outcome.unpacked()
    if isinstance(rendered, RowFault):
        assert isinstance(verdict, RejectedDetail)
        return _unlabelled(contract, incoming, verdict)
    shown = Outcome(text=rendered.text, spans=rendered.spans, notes=rendered.notes)
    if isinstance(verdict, RejectedDetail) and verdict.code != "over_length":
        tokens = _overlapping(contract, rendered.text, rendered.spans)
        return msgspec.structs.replace(shown, tokens=tokens, fault=verdict)
    tokens = _labelled(contract, rendered, verdict)
    return msgspec.structs.replace(
        shown,
        tokens=tokens,
        notes=(*rendered.notes, *_forged(contract, rendered.text, tokens)),
        fault=verdict if isinstance(verdict, RejectedDetail) else None,
        proven=True,
    )


def require_same_outcome(admitted: Admitted, row: Offered, incoming: IncomingRow, outcome: Outcome) -> None:
    """Raises KilnError KLN207 where a row made again is not what admission wrote."""
    what = "code"
    met = row.fault is not None and row.fault.code == CONTAMINATED  # then the row itself is as good as a kept one
    was = row.fault.code if row.fault is not None and not met else "kept"
    now = outcome.fault.code if outcome.fault is not None else "kept"
    if was == now and incoming.sha256() != row.row_sha256:
        what, was, now = "hash", row.row_sha256, incoming.sha256()
    elif was == now == "kept" and not met:
        ids, spans = trail.tokens_of(admitted.run, admitted.manifest, row)
        trained = {place for start, end in spans for place in range(start, end)}
        made = [(token.id, token.label == TRAINED) for token in outcome.tokens]
        written = [(number, place in trained) for place, number in enumerate(ids)]
        if made != written:
            what, (was, now) = "tokens", _first_difference(written, made)
    if was != now:
        raise KilnError(
            "KLN207",
            f"{row.split} row {row.row_index} is not what was admitted: its {what} was {printable(was)}, "
            f"is now {printable(now)}",
            hint="kiln, a plugin or the config changed after `kiln admit`; run it again",
        )


def _first_difference(written: list[tuple[int, bool]], made: list[tuple[int, bool]]) -> tuple[str, str]:
    place = next((n for n, pair in enumerate(zip(written, made, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return counted(len(written), "token", "tokens"), counted(len(made), "token", "tokens")
    words = [f"{number} ({TRAINED if trained else CONTEXT})" for number, trained in (written[place], made[place])]
    return f"{words[0]} at {place}", words[1]


def tools_mode(contract: Contract, *, prepared: bool) -> ToolsMode:
    """How tools come to the template: those of prepared rows, or of chat rows."""
    return contract.prepared_mode if prepared else contract.chat_mode


def _require_same(manifest: AdmitManifest, contract: Contract) -> None:
    """Raises KilnError KLN207 naming the first thing that is not as the manifest says."""
    was = msgspec.to_builtins(manifest.details)
    found = contract.details(tools_mode(contract, prepared=manifest.previous is not None))
    for name, now in msgspec.to_builtins(found).items():
        if was[name] != now:
            raise KilnError(
                "KLN207",
                f"the {name} changed after admit_manifest.json was written: {_change(was[name], now)}",
                hint="restore it, or run `kiln admit` again",
            )


def _change(was: Any, now: Any) -> str:
    """Both values; of tables, those of the first key that differs."""
    if isinstance(was, dict) and isinstance(now, dict):
        key = next(key for key in sorted({*was, *now}) if was.get(key) != now.get(key))
        return f"{printable(key)} was {printable(was.get(key))}, is now {printable(now.get(key))}"
    return f"it was {printable(was)}, is now {printable(now)}"


def _unlabelled(contract: Contract, incoming: IncomingRow, fault: RejectedDetail) -> Outcome:
    """A row whose labels were not found, with its text if the template prints it."""
    if incoming.row is None:
        return Outcome(fault=fault)
    try:
        text = contract.finder.render(incoming.row.messages, incoming.row.tools)
    except RowFault:
        return Outcome(fault=fault)
    return Outcome(text=text, tokens=_overlapping(contract, text, ()), fault=fault)


def _labelled(contract: Contract, rendered: Rendered, verdict: AdmittedRow | RejectedDetail) -> list[Token]:
    """Tokens with proven labels; those of a row that is too long are proven here once more."""
    control = contract.settings.control_tokens
    if isinstance(verdict, RejectedDetail):
        encoded = contract.tokenizer.encode(rendered.text, rendered.spans, rendered.content_spans, control)
        wanted, label_spans = encoded.input_ids, encoded.label_spans
    else:
        wanted, label_spans = verdict.input_ids, verdict.label_spans
    ids, texts = contract.tokenizer.trace(rendered.text, rendered.content_spans, control)
    if ids != wanted:
        raise KilnError("KLN501", "a row was encoded twice and its ids differ")
    trained = {place for start, end in label_spans for place in range(start, end)}
    labels = (TRAINED if place in trained else CONTEXT for place in range(len(ids)))
    return _joined(contract, ids, texts, labels)


def _forged(contract: Contract, text: str, tokens: list[Token]) -> list[str]:
    """A note for each control token's text that is no control token: row text, taken as it is."""
    starts = list(itertools.accumulate((len(token.text) for token in tokens), initial=0))
    real = {start for start, token in zip(starts, tokens, strict=False) if token.control}
    return [
        f"{text[start:end]} at token {bisect_right(starts, start) - 1} is row text, not the control token"
        for start, end in contract.tokenizer.control_texts(text)
        if start not in real
    ]


def _overlapping(contract: Contract, text: str, spans: Iterable[tuple[int, int]]) -> list[Token]:
    """Tokens of a text whose labels are not proven: those that overlap a span."""
    ids, texts = contract.tokenizer.trace(text)
    labels: list[Label] = []
    start = 0
    for piece in texts:
        end = start + len(piece)
        labels.append(TRAINED if any(start < right and end > left for left, right in spans) else CONTEXT)
        start = end
    return _joined(contract, ids, texts, labels)


def _joined(contract: Contract, ids: list[int], texts: list[str], labels: Iterable[Label]) -> list[Token]:
    control = contract.tokenizer.control_ids
    return [
        Token(id=number, text=text, label=label, control=number in control)
        for number, text, label in zip(ids, texts, labels, strict=True)
    ]
