"""``kiln corrections``: what a model answered and what it ought to have answered, kept until it was trained on.

The store is ``corrections/data.jsonl`` below the registry. ``kiln corrections admit`` admits those that are active;
when the training is complete, ``kiln train`` or ``kiln resume`` marks the ones that were kept.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import typer

from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins
from kiln_cli.terminal import table, terminal
from kiln_cli.text import block, printable
from kiln_stages import admit as admission
from kiln_stages.correcting.adding import Added, given_fields, given_file
from kiln_stages.correcting.adding import add as add_to_store
from kiln_stages.correcting.admitted import ACTIVE
from kiln_stages.correcting.correction import Correction
from kiln_stages.correcting.store import STATES, Line, Store, read_store, store_path
from kiln_stages.reading.sources import STDIN

SHOWN = 48  # characters of a text in a line of the list
TEXTS = ("user", "original", "ideal")

RegistryOption = Annotated[Path, typer.Option("--registry", help="The directory that the store lies in.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
REGISTRY = Path(".kiln")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the store: the correction on it, or why it is none. ``why``: of a state that needs a reason."""

    line: int
    state: str
    why: str = ""
    correction: Correction | None = None


class Listing(msgspec.Struct, frozen=True, kw_only=True):
    """``counts`` are of the whole store, by state; ``lines`` are those that were asked for."""

    schema: str = "kiln.corrections.v1"
    store: str
    counts: dict[str, int]
    byte_order_mark: bool
    lines: list[Listed]


def command() -> None:
    """Keep corrected answers, admit those that were not trained on yet, and see which were."""


def add(
    request_id: Annotated[str | None, typer.Option("--request-id", help="What the correction goes by.")] = None,
    user: Annotated[str | None, typer.Option("--user", help="The user's message.")] = None,
    original: Annotated[str | None, typer.Option("--original", help="What was answered.")] = None,
    ideal: Annotated[str | None, typer.Option("--ideal", help="What ought to have been answered.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="Who answered; unknown if left out.")] = None,
    adapter: Annotated[str | None, typer.Option("--adapter", help="The adapter that answered.")] = None,
    truncated: Annotated[
        bool | None, typer.Option("--truncated/--not-truncated", help="Whether the original was cut off.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="Corrections as JSON objects instead; - is stdin.")
    ] = None,
    retrain: Annotated[bool, typer.Option("--retrain", help="Drop the marker: train on it again.")] = False,
    registry: RegistryOption = REGISTRY,
    json: JsonOption = False,
) -> None:
    """Add corrections, or change those whose request id is known."""
    fields: dict[str, Any] = {"request_id": request_id, "agent": agent, "adapter": adapter, "user": user}
    fields |= {"original": original, "ideal": ideal, "truncated": truncated}
    given = any(value is not None for value in fields.values())
    if given == (file is not None):
        both = "the fields of a correction and --file exclude each other" if given else "nothing is given to add"
        raise KilnError("KLN201", both, hint="give --request-id, --user and --ideal, or --file FILE")
    if file is None and request_id is None:
        raise KilnError("KLN201", "--request-id is missing", hint="it is what the correction goes by")
    path = store_path(registry)
    if file is None:
        done = add_to_store(path, [given_fields(fields)], retrain=retrain)
    else:
        with given_file(None if str(file) == STDIN else file, path.parent) as corrections:
            done = add_to_store(path, corrections, retrain=retrain)
    if json:
        terminal.json_data(done)
    terminal.say(account(done))


def list_(
    state: Annotated[
        Literal["active", "trained", "stale", "unfit", "repeated", "malformed"] | None,
        typer.Option("--state", help="Only the lines in this state."),
    ] = None,
    registry: RegistryOption = REGISTRY,
    json: JsonOption = False,
) -> None:
    """List the store, line by line.

    active: to be trained on. trained: it was. stale: it was, and was edited since. unfit: there is nothing in it to
    train on. repeated: an earlier line has the same request id. malformed: no correction; the line is kept as it is.
    """
    path = store_path(registry)
    found = listing(read_store(path), path, state)
    if json:
        terminal.json_data(found)
        return
    if found.lines:
        terminal.data(table([_cells(line) for line in found.lines], indent=""))
    counts = ", ".join(f"{count} {name}" for name, count in found.counts.items() if count)
    mark = "; a byte-order mark at its start is stepped over" if found.byte_order_mark else ""
    terminal.say(f"{printable(path)}: {counts or 'no corrections'}{mark}")


def show(
    request_id: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="The request id of a correction.")],
    registry: RegistryOption = REGISTRY,
    json: JsonOption = False,
) -> None:
    """Show a correction with its whole texts."""
    path = store_path(registry)
    store = read_store(path)
    line = store.get(request_id)
    if line is None:
        raise KilnError(
            "KLN106", f"{printable(path)} has no correction {printable(request_id)!r}", hint="`kiln corrections list`"
        )
    if json:
        terminal.json_data(listed(line, store))
    else:
        terminal.data(page(listed(line, store)))


def admit(
    out: Annotated[Path, typer.Option("--out", help="The run directory.")],
    config: Annotated[Path | None, typer.Argument(help="The run config.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="The model directory.")] = None,
    registry: Annotated[Path | None, typer.Option("--registry", help="The directory that the store lies in.")] = None,
    template: Annotated[str | None, typer.Option("--template", help="A template by name, or a file.")] = None,
    policy: Annotated[str | None, typer.Option("--invalid-row-policy", help="fail or skip.")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Processes; as many as cores.")] = None,
    assignments: Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")] = None,
    json: JsonOption = False,
) -> None:
    """Admit the active corrections.

    It is `kiln admit` with `[admit] dataset = "corrections:active"`.
    """
    options: dict[str, Any] = {"dataset": ACTIVE, "registry": registry}
    options |= {"template": template, "invalid_row_policy": policy}
    loaded = admission.config_of_options(config, model, options, assignments or [], handed_over=True)
    plugins = load_plugins()
    result = admission.run(loaded, out, plugins, workers=workers, progress=terminal)
    admission.tell(result, loaded, out, plugins, None, json=json)


VERBS = {"add": add, "list": list_, "show": show, "admit": admit}


def listing(store: Store, path: Path, state: str | None = None) -> Listing:
    """The lines of a store, or those in one state. Blank lines are none."""
    lines = [listed(line, store) for line in store.lines if line.state() in STATES and state in (None, line.state())]
    return Listing(store=str(path), counts=store.counts(), byte_order_mark=store.had_bom, lines=lines)


def listed(line: Line, store: Store) -> Listed:
    return Listed(line=line.number, state=line.state(), why=_why(line, store), correction=line.correction)


def account(done: Added) -> str:
    """What became of the corrections that were given, for people."""
    counts = [(len(ids), word) for ids, word in ((done.added, "added"), (done.changed, "changed"))]
    counts.append((len(done.unchanged), "unchanged"))
    lines = ["corrections: " + ", ".join(f"{count} {word}" for count, word in counts)]
    if done.markers:
        lines.append(f"left out of {len(done.markers)}: trained_into, which training alone writes")
    if done.stale:
        ids = printable(", ".join(done.stale))
        lines.append(f"trained on before, with other texts: {ids}; --retrain makes them active again")
    lines += [f"not to be trained on: {printable(name)}: {why}" for name, why in done.unfit.items()]
    registry = Path(done.store).parents[1]
    elsewhere = "" if registry == REGISTRY else f" --registry {shlex.quote(str(registry))}"
    lines.append(f"written: {printable(done.store)}")
    return "\n".join([*lines, f"next: kiln corrections admit CONFIG --out RUN{elsewhere}"])


def page(found: Listed) -> str:
    """A correction with its whole texts, each below its name."""
    correction = found.correction
    assert correction is not None
    facts: list[tuple[str, object]] = [
        ("request id", correction.request_id),
        ("state", found.state + (f": {found.why}" if found.why else "")),
        ("line", found.line),
        ("agent", correction.agent),
        ("adapter", correction.adapter or "none"),
        ("created at", correction.created_at),
        ("truncated", "yes" if correction.truncated else "no"),
    ]
    if correction.trained_into is not None:
        facts.append(("trained into", f"{correction.trained_into}, {correction.trained_at or 'at an unknown time'}"))
    head = table([[f"{name}:", str(value)] for name, value in facts], indent="")
    texts = [f"{name}:\n{_indented(getattr(correction, name))}" for name in TEXTS]
    return "\n".join([head, *texts])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in block(text).split("\n"))


def _cells(line: Listed) -> list[object]:
    found = line.correction
    if found is None:
        return [line.state, f"line {line.line}", line.why]
    into = f"into {found.trained_into}" if found.trained_into is not None else ""
    texts = f"{printable(found.user, SHOWN)} -> {printable(found.ideal, SHOWN)}"
    return [line.state, found.request_id, found.agent, into, line.why or texts]


def _why(line: Line, store: Store) -> str:
    correction, state = line.correction, line.state()
    if correction is None or state == "malformed":
        return line.fault
    if state == "repeated":
        first = store.get(correction.request_id)
        return f"line {first.number} has the same request id and counts" if first is not None else ""
    if state == "stale":
        return "edited after it was trained on; `kiln corrections add --retrain` makes it active again"
    return correction.unfit() if state == "unfit" else ""
