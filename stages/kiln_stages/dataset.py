"""``kiln dataset``: data sets by name, kept in a registry, split so that relatives stay together as rows are added.

``data.jsonl`` holds the rows, byte for byte, and is the truth; everything else in the directory is made of it. Rows are
added by ``add --append``: an existing name is never added to by mistake. ``docs/artifacts.md``, *named data sets*, has
the files and the rule of the split.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError, not_built
from kiln_cli.plugins import load_plugins
from kiln_cli.terminal import table, terminal
from kiln_cli.text import printable
from kiln_stages.datasets import changes, checking
from kiln_stages.datasets.changes import Change, SplitSize, split_sizes
from kiln_stages.datasets.entry import Entry, directory_of, names, read_entry, summary, way_out
from kiln_stages.datasets.moves import Move
from kiln_stages.datasets.partition import SPLITS, SplitConfig, partition
from kiln_stages.reading.mapping import parse_map
from kiln_stages.reading.sources import STDIN

FORMATS = ("sft_chat", "grpo_groups")
MOVES_SHOWN = 20

Registry = Annotated[Path, typer.Option("--registry", help="The directory that keeps them.")]
Name = Annotated[str, typer.Argument(help="The data set's name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Seed = Annotated[str | None, typer.Option("--seed", help="Of the split: 0 to 2^64-1; 0 if left out.")]
Train = Annotated[int | None, typer.Option("--train-percent", help="Of the rows; 80 if left out.")]
Validation = Annotated[int | None, typer.Option("--validation-percent", help="10 if left out; the rest is holdout.")]
GroupBy = Annotated[
    str | None, typer.Option("--group-by", help="JSON pointer; rows of one value stay together. '' ends it.")
]
DEFAULT = Path(".kiln")


def command() -> None:
    """Keep data sets by name, each split so that no group is in two splits."""


def add_command(
    name: Name,
    file: Annotated[Path, typer.Argument(help="Rows in any shape that admit reads; - is stdin.")],
    append: Annotated[bool, typer.Option("--append", help="Add the rows to a data set that is there.")] = False,
    format: Annotated[str, typer.Option("--format", help="sft_chat.")] = "sft_chat",
    source: Annotated[str, typer.Option("--source", help="The rows' shape; auto if left out.")] = "auto",
    mapping: Annotated[list[str] | None, typer.Option("--map", help="field=path, for rows of another shape.")] = None,
    seed: Seed = None,
    train_percent: Train = None,
    validation_percent: Validation = None,
    group_by: GroupBy = None,
    registry: Registry = DEFAULT,
    json: Json = False,
) -> None:
    """Make a data set of a file's rows, or add them to one."""
    if format == "grpo_groups":
        raise not_built("a data set of format grpo_groups", "sft_chat is the format of conversations")
    if format not in FORMATS:
        raise KilnError("KLN201", f"--format {printable(format)!r} is none of: {', '.join(FORMATS)}")
    change = changes.add(
        registry,
        name,
        None if str(file) == STDIN else file,
        load_plugins(),
        source=source,
        mapping=parse_map(mapping) if mapping else None,
        options=_options(seed, train_percent, validation_percent, group_by),
        append=append,
    )
    _tell(change, registry, json)


def split_command(
    name: Name,
    seed: Seed = None,
    train_percent: Train = None,
    validation_percent: Validation = None,
    group_by: GroupBy = None,
    registry: Registry = DEFAULT,
    json: Json = False,
) -> None:
    """Split a data set's rows as they are now; say which rows moved, and why."""
    _tell(changes.split(registry, name, _options(seed, train_percent, validation_percent, group_by)), registry, json)


def list_command(registry: Registry = DEFAULT, json: Json = False) -> None:
    """List the data sets of a registry."""
    found = [summary(registry, name) for name in names(registry)]
    if json:
        terminal.json_data({"schema": "kiln-cli.datasets.v1", "datasets": found})
    elif not found:
        terminal.say(f"{printable(registry)} holds no data set; `kiln dataset add NAME FILE` makes one")
    else:
        rows: list[list[object]] = [["name", "rows", *SPLITS, "state"]]
        rows += [
            [each.name, each.rows, *(each.split_rows.get(split, 0) for split in SPLITS), each.state] for each in found
        ]
        terminal.data(table(rows, indent=""))


def show_command(name: Name, registry: Registry = DEFAULT, json: Json = False) -> None:
    """Show a data set: settings, sizes of its splits, identities."""
    entry = read_entry(registry, name)
    sizes = split_sizes(partition([row.keys() for row in entry.split.rows], entry.split.config), entry.split.config)
    if json:
        terminal.json_data(
            {
                "schema": "kiln-cli.dataset-shown.v1",
                "settings": entry.settings,
                "identity": entry.identity,
                "sizes": sizes,
            }
        )
        return
    terminal.data(_shown(entry, sizes))


def verify_command(name: Name, registry: Registry = DEFAULT, json: Json = False) -> None:
    """Make everything again of the rows and compare. Exit code 1 where something differs."""
    found = checking.verify(registry, name)
    if json:
        terminal.json_data({"schema": "kiln-cli.dataset-verdict.v1", "dataset": name, "differences": found})
    else:
        for difference in found:
            terminal.data(f"{difference.file}: {difference.detail}")
    if found:
        terminal.json = False  # the differences are the one JSON object of this command
        raise KilnError(
            "KLN103",
            f"data set {printable(name)!r} is not what its rows make of it: "
            + counted(len(found), "difference", "differences"),
            hint=way_out(directory_of(registry, name), found[0].file),
        )
    terminal.say(f"data set {printable(name)}: every file is what data.jsonl and manifest.json give")


def remove_command(name: Name, registry: Registry = DEFAULT, json: Json = False) -> None:
    """Remove a data set with its rows; what was admitted from it keeps its own copy."""
    removed = changes.remove(registry, name)
    if json:
        terminal.json_data({"schema": "kiln-cli.dataset-removed.v1", "removed": str(removed)})
    terminal.say(f"removed: {printable(removed)}")


VERBS = {
    "add": add_command,
    "list": list_command,
    "show": show_command,
    "split": split_command,
    "verify": verify_command,
    "remove": remove_command,
}


def _options(
    seed: str | None, train_percent: int | None, validation_percent: int | None, group_by: str | None
) -> dict[str, Any]:
    given = {
        "seed": seed,
        "train_percent": train_percent,
        "validation_percent": validation_percent,
        "group_by": group_by,
    }
    return {name: value for name, value in given.items() if value is not None}


def _tell(change: Change, registry: Path, json: bool) -> None:
    if json:
        terminal.json_data(change)
    terminal.say(account(change))
    name = printable(change.settings.dataset_name)
    where = printable(shlex.quote(str(registry)))
    terminal.say(f"next: kiln admit --dataset {name} --registry {where} --model DIR --out RUN")


def account(change: Change) -> str:
    """What a change made of the data set, for people."""
    identity, config = change.identity, change.settings.split
    lines = [
        f"data set {printable(identity.dataset_name)}: {counted(identity.rows, 'row', 'rows')}, {change.added:,} added"
    ]
    if change.packing is not None:
        lines.append(f"rows: read as {change.packing}, in the shape {printable(change.settings.source)}")
    if change.byte_order_mark:
        lines.append("  a byte-order mark at the start of the file is stepped over")
    if change.blank_lines:
        lines.append(f"  blank lines: {change.blank_lines:,}, which are no rows")
    if change.again:
        lines.append("  these rows were the last ones of the data set already; they are not added again")
    if change.repeated:
        lines.append(f"  in the data set before, and kept beside it in the same split: {change.repeated:,}")
    if identity.malformed_rows:
        lines.append(f"  no JSON, and kept as given for admission to refuse: {identity.malformed_rows:,}")
    if came := change.taken_in + (change.gone or 0):
        lines.append(f"  rows of data.jsonl that no split knew of (an add was cut short, or it was edited): {came:+,}")
    if change.gone:
        lines.append(f"  rows that were split before and are not in data.jsonl any more: {change.gone:,}")
    lines += _split_lines(config, change.sizes, identity.rows)
    if change.ungrouped:
        lines.append(
            f"  without a value at {printable(config.group_by)}, which groups them with none: {change.ungrouped:,}"
        )
    return "\n".join([*lines, *_move_lines(change.moves), f"written: {printable(change.directory)}"])


def _split_lines(config: SplitConfig, sizes: dict[str, SplitSize], rows: int) -> list[str]:
    """Asked and got, in rows and percent: components are never cut to meet a size."""
    cells: list[list[object]] = [["split", "asked %", "asked", "got", "got %", "components"]]
    for split, size in sizes.items():
        asked = f"{rows * size.asked_percent / 100:.1f}".removesuffix(".0")
        cells.append([split, size.asked_percent, asked, size.rows, f"{100 * size.rows / rows:.1f}", size.components])
    by = f", grouped by {printable(config.group_by)}" if isinstance(config.group_by, str) else ""
    return [f"split: seed {config.seed}{by}", table(cells)]


def _move_lines(moves: list[Move] | None) -> list[str]:
    if moves is None:
        return ["moved: not known, since what stood in split.json before is not what was vouched for"]
    if not moves:
        return []
    lines = [f"moved into another split than before: {len(moves):,}"]
    lines += [
        f"  row {move.row_number}: {move.before} -> {move.after}: {move.reason}: {move.detail}"
        for move in moves[:MOVES_SHOWN]
    ]
    if len(moves) > MOVES_SHOWN:
        lines.append(f"  and {len(moves) - MOVES_SHOWN} more: --json has them all")
    return lines


def _shown(entry: Entry, sizes: dict[str, SplitSize]) -> str:
    identity, settings = entry.identity, entry.settings
    facts = [
        ["rows", f"{identity.rows:,}"],
        ["malformed rows", f"{identity.malformed_rows:,}"],
        ["components", f"{entry.split.counts['components']:,}"],
        ["format", settings.format],
        ["shape", " ".join([settings.source, *(f"{key}={path}" for key, path in settings.map.items())])],
        ["corpus_sha256", identity.corpus_sha256],
        ["normalized_corpus_sha256", identity.normalized_corpus_sha256],
        ["split_manifest_sha256", identity.split_manifest_sha256],
        ["directory", str(entry.directory)],
    ]
    lines = [f"data set {printable(settings.dataset_name)}", table(facts)]
    return "\n".join([*lines, *_split_lines(settings.split, sizes, identity.rows)])
