"""Admission carried out again, before a model is loaded: the same rows must be kept and refused, with the same tokens.

What admit left behind is never believed by itself. A receipt that was edited, aggregate and manifest recomputed, still
differs from what the rows give.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kiln_cli.config import LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.manifests import read_ingestion
from kiln_cli.plugins import Plugins
from kiln_cli.receipts import IngestionReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages.admitting.admission import TRAINED_SPLIT
from kiln_stages.admitting.contract import Terms, build_contract, load_terms
from kiln_stages.admitting.inputs import open_again
from kiln_stages.admitting.pipeline import Job, judged_parts, worker_count
from kiln_stages.admitting.tally import RECEIPTS, Tally
from kiln_stages.contamination.held_out import open_held_out_again
from kiln_stages.workers import Workers


def require_same_admission(
    config: LoadedConfig, out: Path, plugins: Plugins, manifest: AdmitManifest, progress: Progress
) -> IngestionReceipt:
    """Reads and judges every row again; returns the corpus's receipt.

    Raises KilnError KLN207 naming the first row whose outcome is another one, and as admission does for files, models
    and templates that are missing.
    """
    terms = load_terms(config, plugins)
    require_same_terms(terms, manifest)
    contract = build_contract(config, terms)
    with ExitStack() as stack:
        inputs = open_again(config, out, plugins, contract, manifest, stack)
        held_out = open_held_out_again(config, out, plugins, manifest)
        index = None if held_out is None else held_out.index
        job = Job(inputs, contract.admission(inputs[0].source_reasons, index))
        workers = stack.enter_context(Workers(job, worker_count(inputs, None)))
        receipts = []
        for number, source in enumerate(inputs):
            tally = Tally(source, job.admission.reasons)
            with progress.task(f"check admission: {source.split}", None, "rows") as task:
                for part in judged_parts(job, number, workers):
                    tally.add(part)
                    task.advance(part.rows)
            path = out / RECEIPTS[source.split]
            written = read_ingestion(path)
            found = tally.receipt(config.run.admit.invalid_row_policy)
            _require_equal(path, written, found)
            _require_tokens(out, manifest, tally)
            if held_out is not None and source.split == TRAINED_SPLIT:
                held_out.require_same_meetings(manifest.details.held_out, tally.met)
            receipts.append(found)
    return receipts[0]


def require_same_terms(terms: Terms, manifest: AdmitManifest) -> None:
    """Tokenizer files and template to the byte: others may give equal tokens, but the evidence names these.

    Raises KilnError KLN207 naming the first that differs.
    """
    here = {**terms.files.file_digests(), "the chat template": terms.choice.sha256}
    there = {**manifest.details.tokenizer, "the chat template": manifest.details.template.sha256}
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name):
            raise KilnError(
                "KLN207",
                f"{printable(name)} changed after admit_manifest.json vouched for it: sha256 is "
                f"{here.get(name, 'absent')}, expected {there.get(name, 'absent')}",
                hint="restore it, or run `kiln admit` again",
            )


def _require_equal(path: Path, written: IngestionReceipt, found: IngestionReceipt) -> None:
    if written == found:
        return
    raise KilnError(
        "KLN207",
        f"{printable(path)} does not say what its rows give: {ingestion_difference(written, found)}",
        hint="run `kiln admit` again; if the rows should not have changed, restore them first",
    )


def ingestion_difference(written: IngestionReceipt, found: IngestionReceipt) -> str:
    """The first difference, in words: of the rows if they differ, else of another field."""
    kept = _first_difference(written.kept_row_hashes, found.kept_row_hashes)
    if kept is not None:
        at, left, right = kept
        return f"kept row {at + 1} is {left}, found {right} ({_counts(written)}; found {_counts(found)})"
    rejected = _first_difference(written.rejected_rows, found.rejected_rows)
    if rejected is not None:
        at, left, right = rejected
        return f"rejected row {at + 1} is {_rejected(left)}, found {_rejected(right)}"
    fields = (name for name in written.__struct_fields__ if getattr(written, name) != getattr(found, name))
    name = next(fields)
    return f"{name} is {printable(repr(getattr(written, name)))}, found {printable(repr(getattr(found, name)))}"


def _first_difference(left: list[Any], right: list[Any]) -> tuple[int, Any, Any] | None:
    for at in range(max(len(left), len(right))):
        pair = [rows[at] if at < len(rows) else "missing" for rows in (left, right)]
        if pair[0] != pair[1]:
            return at, pair[0], pair[1]
    return None


def _counts(receipt: IngestionReceipt) -> str:
    return f"{receipt.rows_kept} kept, {receipt.rows_rejected} rejected"


def _rejected(row: Any) -> str:
    return row if isinstance(row, str) else f"row {row.row_index} ({row.row_sha256}, {printable(row.reason)})"


def _require_tokens(out: Path, manifest: AdmitManifest, tally: Tally) -> None:
    expected, found = manifest.details.admitted_sha256.get(tally.split), tally.admitted_sha256()
    if expected != found:
        raise KilnError(
            "KLN207",
            f"the rows of {printable(out)}/admit/{tally.split}.parquet now have other tokens or labels: "
            f"{found}, expected {expected}",
            hint="the tokenizer, the template or kiln changed after `kiln admit`; run it again",
        )
