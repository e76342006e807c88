"""The shapes of stage manifests: what ``prepare`` and ``admit`` say that they read, did and wrote.

``docs/artifacts.md`` explains every field. Unknown fields are refused on read, so nothing rides along unverified.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from kiln_cli.errors import KilnError
from kiln_cli.plugins import LoadedPlugin
from kiln_cli.receipts import FileRef, ManifestRef

MANIFEST_SCHEMA = "kiln.manifest.v1"
MANIFEST_NAMES = {"prepare": "data_manifest.json", "admit": "admit_manifest.json"}
DROP_SUMMARY = "data/drop_summary.json"


class StageDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``config_sections``: the sections of the config that ``config_sha256`` of the manifest covers."""

    config_sections: list[str]


class Produced(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When, in how many seconds, and where: ``base_dir`` is the config's directory, relative to the run's."""

    at: str
    seconds: float
    base_dir: str


class StageManifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stage read, did and wrote; written last, so its presence means that the stage is done.

    ``content_sha256`` leaves out ``produced`` (times, host) and itself: it is what two runs are compared by.
    """

    STAGE: ClassVar[str]

    schema: str = MANIFEST_SCHEMA
    stage: str
    kiln_version: str
    plugins: list[LoadedPlugin]
    config_sha256: str
    previous: ManifestRef | None = None
    inputs: list[FileRef]
    outputs: list[FileRef]
    counts: dict[str, dict[str, Any]]
    details: StageDetails
    produced: Produced | None = None
    content_sha256: str = ""

    def output(self, path: str) -> FileRef:
        return _find(self.outputs, path, self.stage)

    def input(self, path: str) -> FileRef:
        return _find(self.inputs, path, self.stage)

    def base_dir(self) -> str:
        """The directory that inputs of base ``config`` count from, relative to the run directory."""
        return "." if self.produced is None else self.produced.base_dir


class RawDataset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A raw file, and how it was read. ``source_chosen``: why in that shape. ``root``: not a translation of another."""

    dataset_id: str
    language: str
    packing: str
    revision: str
    root: bool
    source: str
    source_chosen: str


class PrepareDetails(StageDetails, frozen=True, kw_only=True, forbid_unknown_fields=True):
    datasets: list[RawDataset]
    drop_reasons: list[str]
    seed: int


class PrepareManifest(StageManifest, kw_only=True, forbid_unknown_fields=True):
    STAGE: ClassVar[str] = "prepare"

    details: PrepareDetails


class RowsRead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the admitted rows come from and how they were read: enough to open them again.

    ``provenance``: what a named data set says of itself. ``map``: which field of a row is which of a conversation.
    """

    origin: str = msgspec.field(name="from")
    shape: str | None
    packing: str
    elements: bool
    locator: str | UnsetType = UNSET
    provenance: dict[str, Any] | UnsetType = UNSET
    map: dict[str, str] | UnsetType = UNSET


class TemplateUsed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The chat template, by name and by the digest of its text."""

    name: str
    sha256: str


class ToolsShown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tools come to the template, and by which prompt where they are text of the system turn."""

    mode: Literal["native", "system"]
    prompt: str | None
    prompt_sha256: str | None


class HeldOutSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that no row to train on may meet. ``by``: whether the rows were read, or only their hashes."""

    name: str
    by: str
    rows: int
    sha256: str
    bytes: int


class HeldOutRows(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of ``[admit] held_out`` as it was given, and the sets of rows that it names."""

    given: str
    kind: str
    sets: list[HeldOutSet]


class Contamination(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``met``: rows to train on that met a held-out one, by rule."""

    rows: list[HeldOutRows]
    near_threshold: float | None
    contaminated: Literal["dropped", "refused"]
    met: dict[str, int]


class AdmitDetails(StageDetails, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rows were made tokens under, and which rows. ``admitted_sha256``: digest of what each split is trained on.
    ``tokenizer``: SHA-256 (hex) of each file. ``max_tokens``: the most a row may have, None where nothing caps it.

    Of a scored corpus: ``opd`` (``kiln_stages.distilling.admitted.ScoredCorpus``), how the teacher's tokenizer compares
    with this one, and the size of the vocabulary.
    """

    rows: RowsRead
    admitted_sha256: dict[str, str]
    system_turn: str
    max_tokens: int | None
    template: TemplateUsed
    tokenizer: dict[str, str]
    tools: ToolsShown
    held_out: Contamination | UnsetType = UNSET
    opd: dict[str, Any] | UnsetType = UNSET
    teacher_tokenizer: str | UnsetType = UNSET
    vocabulary: int | UnsetType = UNSET


class AdmitManifest(StageManifest, kw_only=True, forbid_unknown_fields=True):
    STAGE: ClassVar[str] = "admit"

    details: AdmitDetails


MANIFESTS: tuple[type[StageManifest], ...] = (PrepareManifest, AdmitManifest)


def _find(refs: list[FileRef], path: str, stage: str) -> FileRef:
    for ref in refs:
        if ref.path == path:
            return ref
    raise KilnError("KLN206", f"the manifest of {stage} does not name {path}", hint=f"run `kiln {stage}` again")
