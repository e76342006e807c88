"""``kiln export``: what a run came to as a directory that others open, with a card made of the evidence.

``--layout`` exports the admitted rows, ``--merged`` the base model with the adapter in its weights. Layout ``hf`` is a
data set directory of Hugging Face: ``datasets.load_dataset(DIR)`` finds the splits by the card.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import FS, AtomicFile, hash_file, open_input, publish_directory, read_bounded, write_file, writing
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import (
    DOCUMENT_LIMIT,
    RECEIPT_NAME,
    read_ingestion,
    read_manifest,
    read_successful_receipt,
    require_unchanged,
)
from kiln_cli.receipts import FileRef
from kiln_cli.stage_manifests import MANIFEST_NAMES, AdmitManifest
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.distilling.admitted import require_conversations
from kiln_stages.evidence.dataset_card import Split, dataset_card, shown_locator
from kiln_stages.exported_file import ExportedFile
from kiln_stages.training.packages import require_train_extra

if TYPE_CHECKING:  # torch is imported when a model is merged
    from kiln_stages.training.merging import Merged

LAYOUTS = ("hf",)
# Splits as admit names them and as trainers do; the receipt that tells of each.
SPLITS = (
    ("corpus", "train", "sft_ingestion.json"),
    ("heldout", "validation", "heldout_ingestion.json"),
)
BLOCK = 1024 * 1024


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory holds. ``unchanged``: it held exactly this before."""

    schema: str = "kiln.export.v1"
    layout: str
    directory: str
    files: list[ExportedFile]
    rows: dict[str, int]
    unchanged: bool
    absolute_locators: list[str]


class _Content(msgspec.Struct, frozen=True):
    """One file to be: bytes made here, or a file of the run to copy."""

    file: ExportedFile
    source: bytes | Path


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with admitted rows.")],
    layout: Annotated[
        str | None, typer.Option("--layout", help="The rows; hf: a data set directory of Hugging Face.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="The directory to make, if not RUN/export-hf.")] = None,
    merged: Annotated[
        Path | None, typer.Option("--merged", metavar="DIR", help="The trained model, in a directory to make.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Write the admitted rows as a data set, or the trained model, with a card made of the receipts."""
    if (layout is None) == (merged is None) or (merged is not None and out is not None):
        raise KilnError("KLN201", "give --layout, or --merged DIR alone", hint="kiln export RUN --layout hf")
    if merged is not None:
        result = run_merged(run_directory, merged)
        if json:
            terminal.json_data(result)
        terminal.say(result.account())
        return
    assert layout is not None, "one of the two is given"
    exported = run(run_directory, layout, out)
    if json:
        terminal.json_data(exported)
    for locator in exported.absolute_locators:
        terminal.warn(f"the receipt in kiln/ names its rows as they were given: {printable(locator)}")
    terminal.say(account(exported))


def run(run_directory: Path, layout: str = "hf", out: Path | None = None) -> Exported:
    """Makes the directory, whole or not at all.

    Raises KilnError: KLN201 for a layout that there is not, KLN206 where the run has no admitted rows, KLN207 where a
    file is not what ``admit_manifest.json`` vouches for, KLN216 where the directory holds anything else.
    """
    if layout not in LAYOUTS:
        raise KilnError("KLN201", f"no such layout: {printable(layout)!r}", hint=f"there are {', '.join(LAYOUTS)}")
    target = out if out is not None else run_directory / f"export-{layout}"
    manifest = read_manifest(run_directory, AdmitManifest)
    require_conversations(manifest, "kiln export --layout")
    splits = _splits(run_directory, manifest)
    contents = _contents(run_directory, manifest, splits)
    unchanged = _holds_already(target, contents)
    if not unchanged:
        publish_directory(target, lambda staging: _fill(staging, contents))
    return Exported(
        layout=layout,
        directory=str(target),
        files=[content.file for content in contents],
        rows={split.name: split.receipt.rows_kept for split in splits},
        unchanged=unchanged,
        absolute_locators=[
            str(split.receipt.source_locator)
            for split in splits
            if split.receipt.source_locator and shown_locator(split.receipt) != split.receipt.source_locator
        ],
    )


def run_merged(run_directory: Path, target: Path) -> Merged:
    """Makes the directory of the merged model, whole or not at all.

    Raises KilnError: KLN216 where ``target`` exists, KLN206/207 where the run has no adapter or its files are not the
    receipt's, KLN103 where the merged model's logits are not the adapter's, KLN301/302 for packages and the model.
    """
    require_train_extra("kiln export --merged")
    receipt = read_successful_receipt(run_directory / RECEIPT_NAME)
    config = load_config(run_directory / "config.resolved.toml")
    from kiln_stages.training.merging import export_merged

    return export_merged(run_directory, config, receipt, target)


def account(exported: Exported) -> str:
    rows = ", ".join(f"{name} {count:,}" for name, count in exported.rows.items())
    state = "unchanged" if exported.unchanged else "written"
    where = printable(exported.directory)
    return f"export: rows: {rows}\n{state}: {where}\nnext: datasets.load_dataset({where!r})"


def _splits(run_directory: Path, manifest: AdmitManifest) -> list[Split]:
    """The splits that admit wrote, each file held to its digest."""
    found = []
    written = {ref.path for ref in manifest.outputs}
    for admitted_as, name, receipt_name in SPLITS:
        if f"admit/{admitted_as}.parquet" not in written and admitted_as != "corpus":
            continue
        refs = [manifest.output(f"admit/{admitted_as}.parquet"), manifest.output(f"admit/{receipt_name}")]
        for ref in refs:
            require_unchanged(ref, run_directory / ref.path, MANIFEST_NAMES["admit"])
        receipt = read_ingestion(run_directory / "admit" / receipt_name)
        if refs[0].rows != receipt.rows_kept:
            raise KilnError(
                "KLN207",
                f"admit/{receipt_name} tells of {receipt.rows_kept} kept rows, {refs[0].path} has {refs[0].rows}",
                hint="run `kiln admit` again",
            )
        found.append(Split(name, admitted_as, f"data/{name}-00000-of-00001.parquet", refs[0], receipt))
    return found


def _contents(run_directory: Path, manifest: AdmitManifest, splits: list[Split]) -> list[_Content]:
    """Every file of the directory, by path."""
    documents = [MANIFEST_NAMES["admit"], *(f"admit/{name}" for split, _, name in SPLITS if _has(splits, split))]
    return [
        _made("README.md", dataset_card(manifest, splits)),
        *(_copied(split.path, split.file, run_directory) for split in splits),
        *(_made(f"kiln/{Path(path).name}", read_bounded(run_directory / path, DOCUMENT_LIMIT)) for path in documents),
    ]


def _has(splits: list[Split], admitted_as: str) -> bool:
    return any(split.admitted_as == admitted_as for split in splits)


def _made(path: str, data: bytes) -> _Content:
    return _Content(ExportedFile(path=path, sha256=sha256_hex(data), bytes=len(data)), data)


def _copied(path: str, ref: FileRef, run_directory: Path) -> _Content:
    return _Content(ExportedFile(path=path, sha256=ref.sha256, bytes=ref.bytes), run_directory / ref.path)


def _holds_already(target: Path, contents: list[_Content]) -> bool:
    """Whether the directory holds exactly this. An empty one is removed; in any other nothing is touched (KLN216)."""
    if not target.exists() and not target.is_symlink():
        return False
    if not target.is_dir():
        raise _occupied(target, "it is no directory")
    if not target.is_symlink() and not any(target.iterdir()):
        with writing(target):
            FS.remove_tree(target)
        return False
    entries = (path for path in target.rglob("*") if path.is_symlink() or not path.is_dir())
    found = {path.relative_to(target).as_posix() for path in entries}
    wanted = {content.file.path: content.file for content in contents}
    if surplus := sorted(found - wanted.keys()):
        raise _occupied(target, f"it holds {printable(surplus[0])}, which is not of this export")
    if absent := sorted(wanted.keys() - found):
        raise _occupied(target, f"it lacks {absent[0]}")
    for path, file in wanted.items():
        if hash_file(target / path) != (file.sha256, file.bytes):
            raise _occupied(target, f"its {path} differs: sha256 {hash_file(target / path)[0]}, expected {file.sha256}")
    return True


def _occupied(target: Path, why: str) -> KilnError:
    return KilnError(
        "KLN216", f"{printable(target)} is no earlier export of these rows: {why}", hint="name another with --out"
    )


def _fill(staging: Path, contents: list[_Content]) -> None:
    for content in contents:
        path = staging / content.file.path
        if isinstance(content.source, bytes):
            write_file(path, content.source)
        else:
            _copy(content.source, path, content.file)


def _copy(source: Path, path: Path, expected: ExportedFile) -> None:
    """Copies a file and hashes what passes: it may have changed since it was checked."""
    with open_input(source) as stream, AtomicFile(path) as out:
        while block := stream.read(BLOCK):
            out.write(block)
    if (out.sha256, out.size) != (expected.sha256, expected.bytes):
        raise KilnError(
            "KLN207",
            f"{printable(source)} changed while it was copied: sha256 is {out.sha256}, expected {expected.sha256}",
            hint="run again when nothing writes to it",
        )
