"""Claims about evidence: one line each that holds, fails, or cannot be checked because a file it needs is not here.

The claims about the manifests of a run and the files they vouch for serve ``verify-receipt`` and ``validate`` alike.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.manifests import Manifest, content_sha256, locate, manifest_path, parse_manifest, read_document
from kiln_cli.receipts import DROP_SUMMARY_SCHEMA, DropSummary, FileRef, ManifestRef
from kiln_cli.stage_manifests import DROP_SUMMARY, PrepareManifest, StageManifest
from kiln_cli.text import printable
from kiln_stages.evidence.digests import Digest
from kiln_stages.training.checkpoint_manifest import ABSENT, flatten

# "not checkable here": a file is missing. "not checked": it was not asked for (verify-receipt without --deep).
Status = Literal["holds", "fails", "not checkable here", "not checked"]
MARKS: dict[Status, str] = {"holds": "ok  ", "fails": "FAIL", "not checkable here": "n/a ", "not checked": "--  "}

# What a check meets in a document that has another form than it expects.
OF_ANOTHER_FORM = (msgspec.MsgspecError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError)


class Claim(msgspec.Struct, frozen=True):
    """``name`` says what is claimed, ``detail`` why it fails or cannot be checked."""

    name: str
    status: Status
    detail: str = ""

    def line(self) -> str:
        return f"{MARKS[self.status]}  {self.name}" + (f": {self.detail}" if self.detail else "")


NOT_CHECKED = Claim(
    "labels are the template's own, rows and splits those of the raw data",
    "not checked",
    "digests cannot tell; --deep derives them again",
)


class Unavailable(Exception):
    """A file that a claim needs is not here."""


def claim(name: str, check: Callable[[], str]) -> Claim:
    """Runs one check. It returns what is wrong, or ""; it raises Unavailable where a file is not here."""
    try:
        detail = check()
    except Unavailable as error:
        return Claim(name, "not checkable here", str(error))
    except KilnError as error:
        return Claim(name, "fails", error.message)
    except OF_ANOTHER_FORM as error:
        return Claim(name, "fails", f"cannot be read: {printable(f'{type(error).__name__}: {error}')}")
    return Claim(name, "fails" if detail else "holds", detail)


def differ(what: str, found: object, expected: object) -> str:
    """ "" where two values are equal, else both."""
    return "" if found == expected else f"{what} is {printable(found)}, expected {printable(expected)}"


def compare(what: str, found: object, expected: object) -> str:
    """ "" where two JSON values are equal in every leaf, else each leaf that is not, with both values."""
    left, right = dict(flatten(what, found)), dict(flatten(what, expected))
    names = [*left, *(name for name in right if name not in left)]
    texts = [differ(printable(name), left.get(name, ABSENT), right.get(name, ABSENT)) for name in names]
    return "; ".join(filter(None, texts))


def require(path: Path) -> Path:
    """The path, if there is something. Raises Unavailable."""
    if not path.exists():
        raise Unavailable(f"{printable(path.name)} is not here")
    return path


def check_file(ref: FileRef, path: Path, digest: Digest = hash_file) -> str:
    sha256, size = digest(require(path))
    if (sha256, size) == (ref.sha256, ref.bytes):
        return ""
    return f"sha256 is {sha256} ({size} bytes), expected {ref.sha256} ({ref.bytes} bytes)"


def manifest_claims(
    run: Path, kind: type[Manifest], ref: ManifestRef | None
) -> Generator[Claim, None, Manifest | None]:
    """The claims about a stage's manifest. As a generator's value: the manifest, where it is here and readable.

    ``ref`` is how later evidence names it; None where nothing does (the newest manifest of a run).
    """
    path = manifest_path(run, kind.STAGE)
    if not path.exists():
        yield Claim(f"{path.name} is a sound manifest", "not checkable here", f"{path.name} is not here")
        return None
    try:
        manifest = parse_manifest(path, kind)
    except KilnError as error:
        yield Claim(f"{path.name} is a sound manifest", "fails", error.message)
        return None
    found = content_sha256(manifest)
    yield claim(
        f"{path.name} has its own content_sha256", lambda: differ("content_sha256", manifest.content_sha256, found)
    )
    if ref is not None:
        yield claim(
            f"{path.name} is the one that later evidence names",
            lambda: differ("content_sha256", found, ref.content_sha256),
        )
    return manifest


def file_claims(run: Path, manifest: StageManifest, digest: Digest = hash_file) -> Iterator[Claim]:
    """Outputs of a stage, and its inputs, by digest; then the settings it ran under."""
    for ref in [*manifest.outputs, *manifest.inputs]:
        path = locate(ref, run, manifest)
        where = "" if ref.base == "run" else " (input)"
        yield claim(f"{printable(ref.path)}{where} has its digest", partial(check_file, ref, path, digest))
    yield claim(f"{manifest.stage} settings are those of config.resolved.toml", lambda: _check_config(run, manifest))


def data_claims(
    run: Path, ref: ManifestRef | None, digest: Digest = hash_file
) -> Generator[Claim, None, PrepareManifest | None]:
    """The whole of prepare's evidence: manifest, files, and the account of the rows. As a value: the manifest."""
    manifest = yield from manifest_claims(run, PrepareManifest, ref)
    if manifest is not None:
        yield from file_claims(run, manifest, digest)
        yield claim("rows read = kept + dropped + unused", lambda: _check_account(run))
    return manifest


def _check_config(run: Path, manifest: StageManifest) -> str:
    path = require(run / "config.resolved.toml")
    sections = manifest.details.config_sections
    return differ("digest", load_config(path).sha256(*sections), manifest.config_sha256)


def _check_account(run: Path) -> str:
    path = require(run / DROP_SUMMARY)
    summary = read_document(path, DropSummary, DROP_SUMMARY_SCHEMA, field="schema_version")
    faults = []
    for language, drops in summary.kiln.items():
        counted = sum(summary.languages[language].counts.values()) + sum(drops.counts.values())
        faults.append(differ(f"{language}: dropped", drops.dropped, counted))
        faults.append(differ(f"{language}: rows_read", drops.rows_read, drops.kept + drops.dropped + drops.unused))
    return "; ".join(filter(None, faults))
