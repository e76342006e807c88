"""The hooks, on one page. A plugin implements any of them with ``@kiln_cli.hookimpl``; each returns named values.

Hooks are called once, at start. Names must be unique over all plugins: a duplicate stops kiln and names both
distributions. A misspelt hook stops kiln too. The order of plugins never reaches an artifact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kiln_cli.extensions import DropReason, Loss, Source, Template

PROJECT = "kiln_cli"
ENTRY_POINT_GROUP = "kiln_cli.plugins"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kiln_sources() -> Iterable[Source]:
    """Shapes of raw rows. ``[[datasets]] source = NAME`` and ``admit --source NAME`` select one."""
    raise NotImplementedError


@hookspec
def kiln_templates() -> Iterable[Template]:
    """Chat templates. ``[admit] template = NAME`` selects one."""
    raise NotImplementedError


@hookspec
def kiln_losses() -> Iterable[Loss]:
    """Training losses. ``[train] loss = NAME`` selects one."""
    raise NotImplementedError


@hookspec
def kiln_drop_reasons() -> Iterable[DropReason]:
    """Reasons for prepare to drop a row. All that are loaded are in force and show in the counts, zeroes included."""
    raise NotImplementedError
