"""Whether an admission has been done already: a quick look at everything that it depends on, and at what it left.

XXH3 is no evidence and none is made of it: a match saves the work, and training admits the rows again anyway. The
fingerprint covers the rows, the settings, the tokenizer's files, the template, the code of kiln and of the sources, the
versions of the libraries that decide ids or bytes, and the files that admission wrote.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import msgspec
import xxhash

import kiln_cli
import kiln_stages
from kiln_cli.config import ADMIT_SECTIONS, LoadedConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import open_input, read_bounded, write_file
from kiln_cli.identity import canonical_json
from kiln_cli.manifests import document, read_manifest
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest
from kiln_stages.admitting.contract import Terms
from kiln_stages.admitting.inputs import SPLITS
from kiln_stages.admitting.model_files import TOKENIZER_FILES

NAME = "admit/.fingerprint"
_LIMIT = 64 * 1024
_BLOCK = 1024 * 1024
# What decides ids, text and the bytes of a corpus, beside kiln's own code.
_LIBRARIES = ("tokenizers", "jinja2", "polars", "msgspec")


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """XXH3-128 (hex) of all that goes in, and of all that came out."""

    schema: str = "kiln.fingerprint.v1"
    inputs: str
    outputs: str


def of_inputs(
    config: LoadedConfig,
    out: Path,
    plugins: Plugins,
    terms: Terms,
    sections: tuple[str, ...] = ADMIT_SECTIONS,
    teacher: str | None = None,
) -> str | None:
    """``sections``: the tables of the config that are read; ``teacher``: the revision of the one who scored the rows.

    None where the rows are no files that can be looked at quickly (a saved data set, say), or some are held out."""
    if config.run.admit.held_out:
        return None
    model = terms.files.directory
    files = [model / name for name in (*TOKENIZER_FILES, "config.json") if (model / name).is_file()]
    file = config.run.admit.file
    held_out = config.run.distill.heldout_file if teacher is not None else None
    given = [config.resolve(name) for name in (file, held_out) if name is not None]
    rows = [out / name for name in SPLITS.values()] if file is None else given
    if not all(path.is_file() for path in rows):
        return None
    settings = {
        "previous": read_manifest(out, PrepareManifest).content_sha256 if file is None else None,
        "config": config.sha256(*sections),
        "teacher": teacher,
        "plugins": plugins.loaded(),
        "template": terms.choice.source,
        "libraries": {name: importlib.metadata.version(name) for name in _LIBRARIES},
    }
    return _digest([*files, *rows, *_code(plugins)], canonical_json(settings))


def recorded(out: Path, inputs: str) -> AdmitManifest | None:
    """The manifest of an earlier admission of the same inputs, if all that it wrote is still there and the same."""
    try:
        found = msgspec.json.decode(read_bounded(out / NAME, _LIMIT), type=Fingerprint)
        if found.inputs != inputs:
            return None
        manifest = read_manifest(out, AdmitManifest)
        return manifest if found.outputs == _of_outputs(out, manifest) else None
    except (KilnError, msgspec.DecodeError):
        return None  # nothing there, or damaged: the work is done again


def record(out: Path, inputs: str, manifest: AdmitManifest) -> None:
    """Written behind the manifest, for the next time."""
    write_file(out / NAME, document(Fingerprint(inputs=inputs, outputs=_of_outputs(out, manifest))))


def _of_outputs(out: Path, manifest: AdmitManifest) -> str:
    return _digest((out / ref.path for ref in manifest.outputs), manifest.content_sha256.encode("ascii"))


def _code(plugins: Plugins) -> list[Path]:
    """The source files of kiln and of the distributions whose sources convert rows."""
    names = {getattr(source.convert, "__module__", "").partition(".")[0] for source in plugins.sources}
    found = (sys.modules.get(name) for name in sorted(names - {""}))
    return [path for module in (kiln_cli, kiln_stages, *found) if module is not None for path in _files(module)]


def _files(module: ModuleType) -> list[Path]:
    """The files of a package, or the one of a module."""
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if folders:
        return [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [Path(module.__file__)] if module.__file__ else []


def _digest(files: Iterable[Path], more: bytes = b"") -> str:
    hasher = xxhash.xxh3_128(more)
    for path in files:
        one = xxhash.xxh3_128()
        with open_input(path) as stream:
            while block := stream.read(_BLOCK):
                one.update(block)
        hasher.update(one.digest())
    return hasher.hexdigest()
