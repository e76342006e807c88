"""``verify-receipt --deep``: rows, hashes, splits, tokens and labels derived once more from the raw data.

Digests say that nobody changed one part of the evidence without the others. They do not say that a label is the
template's: who forges one can make every digest behind it right again. So here prepare and admission are carried out a
second time, under the receipt's own settings, and what they give is laid beside what the run holds, row by row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.manifests import read_ingestion
from kiln_cli.plugins import Plugins, load_plugins, version
from kiln_cli.receipts import FileRef, IngestionReceipt, TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest, StageManifest
from kiln_cli.terminal import SILENT
from kiln_cli.text import printable
from kiln_stages import prepare
from kiln_stages.admitting.admission import TRAINED_SPLIT
from kiln_stages.admitting.contract import Contract, build_contract, load_terms
from kiln_stages.admitting.corpus import AdmittedRow, PackedRow, read_corpus
from kiln_stages.admitting.inputs import open_again
from kiln_stages.admitting.pipeline import Job, judged_parts, worker_count
from kiln_stages.admitting.recheck import ingestion_difference
from kiln_stages.admitting.tally import RECEIPTS, Tally
from kiln_stages.contamination.held_out import open_held_out_again
from kiln_stages.distilling.admission import CORPUS
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.recheck import require_same_scored_admission
from kiln_stages.distilling.rows import scored_sha256
from kiln_stages.evidence.claims import Claim, Status, Unavailable, claim, compare, differ, require
from kiln_stages.evidence.receipt_claims import run_config
from kiln_stages.reading.sources import STDIN
from kiln_stages.workers import Workers

PREPARED_AGAIN = "the raw rows can be prepared again"
SCORED_AGAIN = "targets, scores and counts are those that the scored corpus gives"
# What a missing file, model or plugin is refused with: then there is nothing to derive from.
_NOT_HERE = ("KLN204", "KLN212", "KLN301", "KLN302")
_COMPARED = ("config_sha256", "counts", "details", "inputs", "outputs")  # of a manifest, but for versions and times


def deep_claims(
    run: Path, receipt: TrainReceipt, admit: AdmitManifest, prepared: PrepareManifest | None
) -> Iterator[Claim]:
    """The claims of ``--deep``. ``prepared``: prepare's manifest, None where there is none or it is not here."""
    base_dir = Path(os.path.normpath(run / str(receipt.produced.get("base_dir", "."))))
    config, plugins = LoadedConfig(run=run_config(receipt), base_dir=base_dir), load_plugins()
    if prepared is not None:
        yield from _prepare_claims(run, config, plugins, prepared)
    elif admit.previous is not None:
        yield Claim(PREPARED_AGAIN, "not checkable here", f"{printable(admit.previous.path)} is not here")
    if scored_corpus(admit) is not None:
        yield from _scored_claims(run, config, plugins, admit)
    else:
        yield from _admit_claims(run, config, plugins, admit, receipt)


def _prepare_claims(run: Path, config: LoadedConfig, plugins: Plugins, manifest: PrepareManifest) -> Iterator[Claim]:
    with TemporaryDirectory(prefix="kiln-deep-") as scratch:
        again = Path(scratch)
        try:
            if any(dataset.path == STDIN for dataset in config.run.datasets):
                raise Unavailable("the raw rows came on standard input")
            found = prepare.run(config, again, plugins).manifest
        except (KilnError, Unavailable) as error:
            yield _undone(PREPARED_AGAIN, error, manifest)
            return
        for ref in manifest.outputs:
            yield claim(
                f"{printable(ref.path)} is what the raw rows give",
                partial(_check_derived, ref, run / ref.path, again / ref.path),
            )
        yield claim("data_manifest.json says what the raw rows give", partial(_check_manifest, manifest, found))


def _check_derived(ref: FileRef, written: Path, derived: Path) -> str:
    """The manifest's digest against the derived file; where they differ and the file is here, the first such line."""
    sha256, size = hash_file(derived)
    if (sha256, size) == (ref.sha256, ref.bytes):
        return ""
    place = _first_line(written.read_bytes(), derived.read_bytes()) if written.exists() else ""
    return place or f"sha256 is {ref.sha256}, the raw rows give {sha256}"


def _first_line(left: bytes, right: bytes) -> str:
    if left == right:
        return ""
    pairs = zip_longest(left.splitlines(), right.splitlines())
    for number, (here, there) in enumerate(pairs, start=1):
        if here != there:
            shown = [b"nothing" if line is None else line for line in (here, there)]
            return f"line {number} is {_shown(shown[0])}, the raw rows give {_shown(shown[1])}"
    return "the line ends differ"


def _shown(line: bytes) -> str:
    return printable(line.decode("utf-8", "backslashreplace"))


def _check_manifest(written: PrepareManifest, found: PrepareManifest) -> str:
    parts = ((name, getattr(written, name), getattr(found, name)) for name in _COMPARED)
    return "; ".join(filter(None, (compare(name, here, there) for name, here, there in parts)))


def _scored_claims(run: Path, config: LoadedConfig, plugins: Plugins, manifest: AdmitManifest) -> Iterator[Claim]:
    """A scored corpus judged again as a whole: rows, tokens, targets and scores come out as admission wrote them."""
    try:
        found = require_same_scored_admission(config, run, plugins, manifest, SILENT)
    except KilnError as error:
        yield _undone(SCORED_AGAIN, error, manifest)
        return
    yield Claim(SCORED_AGAIN, "holds")
    yield claim(
        "corpus: its rows are those that the scored corpus gives",
        lambda: differ("rows", scored_sha256(require(run / CORPUS)), found.scored_corpus_sha256),
    )


def _admit_claims(
    run: Path, config: LoadedConfig, plugins: Plugins, manifest: AdmitManifest, receipt: TrainReceipt
) -> Iterator[Claim]:
    with ExitStack() as stack:
        try:
            contract = build_contract(config, load_terms(config, plugins))
            inputs = open_again(config, run, plugins, contract, manifest, stack)
            held_out = open_held_out_again(config, run, plugins, manifest)
        except KilnError as error:
            yield _undone("the rows can be admitted again", error, manifest)
            return
        yield claim("template, tokenizer and tools are the admitted ones", partial(_check_terms, manifest, contract))
        index = None if held_out is None else held_out.index
        job = Job(inputs, contract.admission(inputs[0].source_reasons, index))
        workers = stack.enter_context(Workers(job, worker_count(inputs, None)))
        for number, source in enumerate(inputs):
            try:
                tally, seen = _judge(run, job, number, workers)
            except KilnError as error:
                yield _undone(f"{source.split}: the rows can be judged again", error, manifest)
                continue
            ingestion = receipt.data.conversations() if source.split == "corpus" else None
            yield from _split_claims(run, config, manifest, tally, seen, ingestion)
            if held_out is not None and source.split == TRAINED_SPLIT:
                said = msgspec.to_builtins(manifest.details).get("held_out")
                found = msgspec.to_builtins(held_out.details(tally.met))
                yield claim("held-out rows meet the rows that the manifest says", partial(compare, "met", said, found))


def _check_terms(manifest: AdmitManifest, contract: Contract) -> str:
    found = msgspec.to_builtins(contract.details(manifest.details.tools.mode))
    said = msgspec.to_builtins(manifest.details)
    return compare("details", {name: said[name] for name in found}, found)


class Seen(NamedTuple):
    """The first row that is another one than the corpus has, by what differs; "" where none does."""

    missing: str  # why the corpus could not be laid beside it
    rows: str
    tokens: str
    labels: str


def _judge(run: Path, job: Job, number: int, workers: Workers) -> tuple[Tally, Seen]:
    """Judges the rows of one split again, each beside the row that the corpus has at its place."""
    tally = Tally(job.inputs[number], job.admission.reasons)
    path, missing = run / "admit" / f"{tally.split}.parquet", ""
    written: Iterator[AdmittedRow] = iter(())
    if path.exists():
        written = iter(read_corpus(path))
    else:
        missing = f"{path.name} is not here"
    faults = {"rows": "", "tokens": "", "labels": ""}
    for part in judged_parts(job, number, workers):
        tally.add(part)
        for row in part.kept:
            _note(faults, next(written, None), row)
    if (left := next(written, None)) is not None and not faults["rows"]:
        faults["rows"] = f"{_name(left)} stands behind the last row that is admitted"
    return tally, Seen(missing, **faults)


def _note(faults: dict[str, str], written: AdmittedRow | None, found: PackedRow) -> None:
    """Takes down what of a row differs, unless an earlier row differs in the same."""
    row = found.unpacked()
    if faults["rows"]:
        return  # from here on each row stands beside another one
    if written is None or _place(written) != _place(row):
        there = "nothing" if written is None else _name(written)
        faults["rows"] = f"{there} stands where {_name(row)} is admitted"
        return
    if not faults["tokens"] and written.input_ids != row.input_ids:
        faults["tokens"] = f"{_name(row)}: {_first_token(written.input_ids, row.input_ids)}"
    if not faults["labels"] and written.labels() != row.labels():
        faults["labels"] = f"{_name(row)}: {_first_label(written, row)}"


def _place(row: AdmittedRow) -> tuple[int, int, str | None, str]:
    return row.row_index, row.line, row.example_id, row.row_sha256


def _name(row: AdmittedRow) -> str:
    example = "" if row.example_id is None else f", {printable(row.example_id)}"
    return f"row {row.row_index} (line {row.line}{example}, {printable(row.row_sha256)})"


def _first_token(written: list[int], found: list[int]) -> str:
    pairs = enumerate(zip_longest(written, found, fillvalue="none"))
    at, (here, there) = next((at, pair) for at, pair in pairs if pair[0] != pair[1])
    return f"token {at} is {here} in the corpus, the tokenizer gives {there}"


def _first_label(written: AdmittedRow, found: AdmittedRow) -> str:
    here, there = _trained(written), _trained(found)
    at = min(here ^ there)
    differ = counted(len(here ^ there), "token differs", "tokens differ")
    said, given = ("trained on", "context") if at in here else ("context", "trained on")
    return f"token {at} is {said} in the corpus and {given} by the template ({differ})"


def _trained(row: AdmittedRow) -> set[int]:
    return {at for start, end in row.label_spans for at in range(start, end)}


def _split_claims(
    run: Path,
    config: LoadedConfig,
    manifest: AdmitManifest,
    tally: Tally,
    seen: Seen,
    ingestion: IngestionReceipt | None,
) -> Iterator[Claim]:
    split = tally.split
    names = {
        "rows": f"{split}: rows, hashes and their order are those of the data",
        "tokens": f"{split}: token ids are the tokenizer's own",
        "labels": f"{split}: labels are the template's own",
    }
    for part, name in names.items():
        yield claim(name, partial(_check_seen, seen, part))
    yield claim(f"{split}: the digest of ids and labels follows from the data", partial(_check_digest, manifest, tally))
    yield claim(
        f"{split}: kept and refused rows are those of the data",
        partial(_check_ingestion, run, config, tally, ingestion),
    )
    yield claim(
        f"{split}: counts are those of the data",
        partial(compare, "counts", manifest.counts.get(split), tally.counts()),
    )


def _check_seen(seen: Seen, part: str) -> str:
    if seen.missing:
        raise Unavailable(seen.missing)
    found: str = getattr(seen, part)
    if not found and part != "rows" and seen.rows:
        raise Unavailable("the corpus holds other rows")
    return found


def _check_digest(manifest: AdmitManifest, tally: Tally) -> str:
    said = manifest.details.admitted_sha256.get(tally.split)
    return differ("admitted_sha256", said, tally.admitted_sha256())


def _check_ingestion(run: Path, config: LoadedConfig, tally: Tally, written: IngestionReceipt | None) -> str:
    """``written``: the receipt's own; for held-out rows the file beside the corpus."""
    if written is None:
        written = read_ingestion(require(run / RECEIPTS[tally.split]))
    found = tally.receipt(config.run.admit.invalid_row_policy)
    return "" if written == found else ingestion_difference(written, found)


def _undone(name: str, error: KilnError | Unavailable, manifest: StageManifest) -> Claim:
    """A stage that could not be carried out again: for want of what it needs, or because it refuses the rows now."""
    if isinstance(error, Unavailable):
        return Claim(name, "not checkable here", str(error))
    status: Status = "not checkable here" if error.code in _NOT_HERE else "fails"
    other = f" ({manifest.stage} ran under kiln {manifest.kiln_version}, this is {version()})"
    return Claim(name, status, error.message + (other if manifest.kiln_version != version() else ""))
