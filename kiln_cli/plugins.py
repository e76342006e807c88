"""Finding plugins: built-ins from an explicit list, then installed distributions, then one check that all hooks exist.

Third parties declare an entry point in the group ``kiln_cli.plugins``. They are loaded in the order of (distribution,
name), so two machines agree. ``KILN_PLUGINS=a,b`` limits them to these distributions, ``KILN_PLUGINS=none`` to none.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import pluggy

from kiln_cli import hookspecs
from kiln_cli.errors import KilnError
from kiln_cli.extensions import DropReason, Loss, Source, Template
from kiln_cli.registry import Named, Owner, Registry
from kiln_cli.text import printable

DISTRIBUTION = "kiln-toolkit"
BUILT_IN = (
    "kiln_plugins.sources",
    "kiln_plugins.tool_call_sources",
    "kiln_plugins.chat_sources",
    "kiln_plugins.instruction_sources",
    "kiln_plugins.row_quality",
    "kiln_plugins.call_checks",
    "kiln_plugins.dedupe",
    "kiln_plugins.near_duplicates",
    "kiln_plugins.templates",
    "kiln_plugins.losses",
)

N = TypeVar("N", bound=Named)


class LoadedPlugin(msgspec.Struct, frozen=True, kw_only=True):
    """What one distribution brought: goes into every manifest and receipt, and is compared on resume."""

    distribution: str
    version: str
    sources: list[str] = []
    templates: list[str] = []
    losses: list[str] = []
    drop_reasons: list[str] = []


class Plugins:
    """Everything loaded, by kind."""

    def __init__(self, manager: pluggy.PluginManager, owners: dict[str, Owner]) -> None:
        self.sources: Registry[Source] = _collect("source", manager, owners, "kiln_sources", Source)
        self.templates: Registry[Template] = _collect("template", manager, owners, "kiln_templates", Template)
        self.losses: Registry[Loss] = _collect("loss", manager, owners, "kiln_losses", Loss)
        reasons = list(_values(manager, owners, "kiln_drop_reasons", DropReason))
        self.drop_reasons: Registry[DropReason] = Registry("drop reason", reasons, order=lambda reason: reason.order)
        self.owners = sorted(set(owners.values()))

    def in_force(self, checks: Iterable[str]) -> list[DropReason]:
        """The drop reasons of a run in declared order: all but opt-in ones that ``checks`` does not name.

        Raises KilnError KLN212 for a check that no plugin declares.
        """
        wanted = {self.drop_reasons.get(name).name for name in checks}
        return [reason for reason in self.drop_reasons if not reason.opt_in or reason.name in wanted]

    def loaded(self) -> list[LoadedPlugin]:
        def of(owner: Owner, registry: Registry[N]) -> list[str]:
            return [name for name in registry.names() if registry.owner(name) == owner]

        return [
            LoadedPlugin(
                distribution=owner.distribution,
                version=owner.version,
                sources=of(owner, self.sources),
                templates=of(owner, self.templates),
                losses=of(owner, self.losses),
                drop_reasons=of(owner, self.drop_reasons),
            )
            for owner in self.owners
        ]


def load_plugins() -> Plugins:
    """Raises KilnError KLN210 for a duplicate name, an unknown hook, or a plugin that fails to import."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    owners: dict[str, Owner] = {}
    built_in = Owner(DISTRIBUTION, version())
    for module in BUILT_IN:
        manager.register(importlib.import_module(module), module)
        owners[module] = built_in
    for entry_point, owner in _third_parties():
        name = f"{owner.distribution}:{entry_point.name}"
        try:
            manager.register(entry_point.load(), name)
        except Exception as error:
            raise KilnError(
                "KLN210",
                f"plugin {name} of {owner} fails to load: {printable(f'{type(error).__name__}: {error}')}",
                hint="mend or uninstall it, or leave it out: KILN_PLUGINS=none",
            ) from error
        owners[name] = owner
    _require_known_hooks(manager, owners)
    return Plugins(manager, owners)


def version() -> str:
    """The installed version of kiln; "0+checkout" in a bare checkout."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"


def _third_parties() -> list[tuple[importlib.metadata.EntryPoint, Owner]]:
    wanted = os.environ.get("KILN_PLUGINS")
    allowed = None if wanted is None else {_normal(name) for name in wanted.split(",") if name.strip()} - {"none"}
    found: list[tuple[importlib.metadata.EntryPoint, Owner]] = []
    for distribution in importlib.metadata.distributions():
        entry_points = distribution.entry_points.select(group=hookspecs.ENTRY_POINT_GROUP)
        if entry_points and (allowed is None or _normal(distribution.name) in allowed):
            owner = Owner(distribution.name, distribution.version)
            found.extend((entry_point, owner) for entry_point in entry_points)
    absent = (allowed or set()) - {_normal(owner.distribution) for _, owner in found}
    if absent:
        raise KilnError(
            "KLN210",
            f"KILN_PLUGINS names {', '.join(sorted(map(printable, absent)))}, which no installed plugin is called",
            hint="install it, or leave the name out",
        )
    unique = {(owner, entry_point.name): (entry_point, owner) for entry_point, owner in found}
    return [unique[key] for key in sorted(unique)]


def _normal(name: str) -> str:
    """A distribution's name as package indexes compare it: case, hyphens, dots and underscores do not matter."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _values(
    manager: pluggy.PluginManager, owners: dict[str, Owner], hook: str, kind: type[N]
) -> Iterator[tuple[Owner, N]]:
    implementations = {found.plugin_name: found for found in getattr(manager.hook, hook).get_hookimpls()}
    for name, owner in owners.items():  # the order of loading, never pluggy's
        found = implementations.get(name)
        for value in _call(found, hook, owner) if found is not None else ():
            if not isinstance(value, kind):
                raise KilnError(
                    "KLN210",
                    f"{hook} of {owner} returned {printable(repr(value))}, expected {kind.__name__} values",
                    hint=f"return an iterable of kiln_cli.{kind.__name__}",
                )
            yield owner, value


def _call(implementation: pluggy.HookImpl, hook: str, owner: Owner) -> list[object]:
    """What a hook returns. Whatever a plugin does wrong here names the plugin."""
    try:
        returned: Any = implementation.function()
        return list(returned)
    except Exception as error:
        raise KilnError(
            "KLN210",
            f"{hook} of {owner} fails: {printable(f'{type(error).__name__}: {error}')}",
            hint="mend or uninstall it, or leave it out: KILN_PLUGINS=none",
        ) from error


def _collect(kind: str, manager: pluggy.PluginManager, owners: dict[str, Owner], hook: str, of: type[N]) -> Registry[N]:
    return Registry(kind, _values(manager, owners, hook, of))


def _require_known_hooks(manager: pluggy.PluginManager, owners: dict[str, Owner]) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("kiln_")]
    for name, owner in owners.items():
        plugin = manager.get_plugin(name)
        for attribute in dir(plugin):
            marked = manager.parse_hookimpl_opts(plugin, attribute)
            if marked is not None and attribute not in known:
                near = difflib.get_close_matches(attribute, known, n=1)
                raise KilnError(
                    "KLN210",
                    f"{owner} implements hook {printable(attribute)!r}, which does not exist",
                    hint=f"did you mean {near[0]!r}?" if near else f"the hooks are: {', '.join(known)}",
                )
    manager.check_pending()
