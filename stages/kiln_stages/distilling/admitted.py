"""What the admission of a scored corpus says to the stages behind it: ``details.opd`` of admit_manifest.json."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from kiln_cli.errors import KilnError, not_built
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.text import printable
from kiln_stages.distilling.identity import TeacherIdentity


class ScoredBy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The teacher, as it was pinned at admission. ``content_revision``: 64 hex digits, of the identity."""

    alias: str
    content_revision: str
    identity: TeacherIdentity


class Alignment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many of the scored tokens name the id of their target: the others are aligned by their number alone."""

    proven: int
    of: int


class ScoredCorpus(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``path``: where the corpus lay, as it was given. ``sha256``: ``sha256:`` and the digest of the file's bytes,
    without a domain. ``top_k``: candidates that were kept of each target, resolved from the settings.
    ``rows_sha256``: of the rows in order, as :class:`kiln_stages.distilling.rows.ScoredCorpusDigest` has it."""

    path: str
    sha256: str
    teacher: ScoredBy
    top_k: int
    alignment: Alignment
    rows_sha256: str


def require_conversations(admit: AdmitManifest, command: str) -> None:
    """Raises KilnError KLN211 for a command that is not built for the rows of a scored corpus."""
    if admit.details.opd is not UNSET:
        raise not_built(
            f"{command} for a scored corpus",
            "`kiln validate`, `kiln status`, `kiln report` and `kiln verify-receipt` tell of a distillation",
        )


def scored_corpus(admit: AdmitManifest) -> ScoredCorpus | None:
    """None for an admission of conversations. Raises KilnError KLN206 for details of another form."""
    if admit.details.opd is UNSET:
        return None
    try:
        return msgspec.convert(admit.details.opd, ScoredCorpus)
    except msgspec.ValidationError as error:
        raise KilnError(
            "KLN206",
            f"admit_manifest.json: details.opd: {printable(error)}",
            hint="run `kiln admit` again",
        ) from None
