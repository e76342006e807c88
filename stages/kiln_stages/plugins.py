"""``kiln plugins``: what is loaded, from which distribution, in which order."""

from __future__ import annotations

from typing import Annotated

import typer

from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import table, terminal


def command(json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """List what the loaded plugins provide: sources, templates, losses and drop reasons."""
    plugins = load_plugins()
    if json:
        terminal.json_data({"schema": "kiln.plugins.v1", "plugins": plugins.loaded(), "provides": run(plugins)})
        return
    rows = [[entry["kind"], entry["name"], entry["distribution"], entry["doc"]] for entry in run(plugins)]
    terminal.data(table([["kind", "name", "from", "what"], *rows], indent=""))


def run(plugins: Plugins) -> list[dict[str, str]]:
    """One entry a value, in the order in which kiln uses them (drop reasons: the order of the checks)."""
    return [
        {
            "kind": registry.kind,
            "name": value.name,
            "doc": f"{value.doc} (opt-in)" if getattr(value, "opt_in", False) else value.doc,
            "distribution": str(registry.owner(value.name)),
        }
        for registry in (plugins.sources, plugins.templates, plugins.losses, plugins.drop_reasons)
        for value in registry
    ]
