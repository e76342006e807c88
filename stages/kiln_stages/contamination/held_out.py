"""The rows that an admission holds out: opened, laid out to be met, and told of in its manifest.

What the manifest says of them is enough to see later that they are the same rows, read in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType

from kiln_cli.config import LoadedConfig
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import AdmitManifest, Contamination, HeldOutRows
from kiln_cli.text import printable
from kiln_stages.contamination.index import Index
from kiln_stages.contamination.reader import Reader
from kiln_stages.contamination.references import Reference, open_reference


class HeldOut:
    """What ``[admit] held_out`` names. ``index`` holds all its rows."""

    def __init__(self, references: list[Reference], near_threshold: float | None, *, drops: bool) -> None:
        self.index = Index([rows for reference in references for rows in reference.sets], near_threshold, "--held-out")
        self._references = references
        self._near_threshold = near_threshold
        self._drops = drops

    def details(self, met: Mapping[str, int]) -> Contamination:
        """What the manifest says. ``met``: rows to train on that met one of these, by rule."""
        return Contamination(
            rows=self._rows(),
            near_threshold=self._near_threshold,
            contaminated="dropped" if self._drops else "refused",
            met=dict(sorted(met.items())),
        )

    def require_same(self, recorded: Contamination | UnsetType) -> None:
        """Raises KilnError KLN207 with the first difference from what a manifest recorded."""
        written = [] if recorded is UNSET else recorded.rows
        for found, expected in zip_longest(self._rows(), written):
            if found != expected:
                named = (found or expected).given
                raise KilnError(
                    "KLN207",
                    f"the held-out rows of {printable(named)} are not those that admit_manifest.json names: "
                    f"{_shown(found)}, expected {_shown(expected)}",
                    hint="restore them, or run `kiln admit` again",
                )

    def require_same_meetings(self, recorded: Contamination | UnsetType, met: Mapping[str, int]) -> None:
        """Raises KilnError KLN207 where other rows meet these than a manifest recorded."""
        found = self.details(met)
        if found != recorded:
            raise KilnError(
                "KLN207",
                "admit_manifest.json does not say what meets the held-out rows: "
                f"{printable(msgspec.to_builtins(recorded) if recorded else 'nothing')}, found "
                f"{printable(msgspec.to_builtins(found))}",
                hint="run `kiln admit` again",
            )

    def _rows(self) -> list[HeldOutRows]:
        return [
            HeldOutRows(given=each.given, kind=each.kind, sets=[rows.identity() for rows in each.sets])
            for each in self._references
        ]


def open_held_out(config: LoadedConfig, scratch: Path, plugins: Plugins) -> HeldOut | None:
    """None where the config holds no rows out.

    Raises KilnError KLN206 for a held-out row that is no conversation: nothing could be said of it, and KLN107 for a
    set without rows. Else as :func:`open_reference` does, and KLN301 where near duplicates are asked for and rensa is
    not installed.
    """
    settings = config.run.admit
    if not settings.held_out:
        return None
    registry, near = config.resolve(settings.registry), settings.near_threshold is not None
    reader = Reader(plugins, config.base_dir, scratch, registry, near=near, settings=settings)
    references = [open_reference(given, reader) for given in settings.held_out]
    for rows in (rows for reference in references for rows in reference.sets):
        if not rows.keys:
            raise KilnError("KLN107", f"{rows.name} holds no rows, so that nothing is held out", hint="name other rows")
        if rows.misfits:
            first = rows.misfits[0]
            raise KilnError(
                "KLN206",
                f"{len(rows.misfits)} held-out rows of {rows.name} are no conversations and have no prompt to compare; "
                f"row {first.row_index} (line {first.line}): {first.detail}",
                hint="mend them, or take them out of the file",
            )
    return HeldOut(references, settings.near_threshold, drops=settings.drop_contaminated)


def open_held_out_again(
    config: LoadedConfig, scratch: Path, plugins: Plugins, manifest: AdmitManifest
) -> HeldOut | None:
    """As :func:`open_held_out`, for an admission that is done. Raises KilnError KLN207 where other rows are found."""
    found = open_held_out(config, scratch, plugins)
    if found is not None:
        found.require_same(manifest.details.held_out)
    return found


def _shown(rows: HeldOutRows | None) -> str:
    if rows is None:
        return "nothing"
    sets = (f"{counted(each.rows, 'row', 'rows')} of {each.name} by {each.by} ({each.sha256})" for each in rows.sets)
    return printable(f"{rows.kind}: {', '.join(sets)}")
