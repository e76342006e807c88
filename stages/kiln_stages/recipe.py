"""``kiln recipe``: several trainings from one file, each on top of the one before, and merged models of them.

``check`` finds every fault of the file, ``plan`` shows the steps and how far each is, ``run`` carries them out and
takes up where an earlier run stopped. Each training has a run directory of its own, ``DIR/STEP``, with all the evidence
of one, and its receipt names the receipt of the step before. ``plan --makefile`` prints the same work as a Makefile.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins, load_plugins
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.recipes.carrying_out import Options, RecipeEnd, StepEnd, carry_out
from kiln_stages.recipes.makefile import makefile
from kiln_stages.recipes.placing import Merging, Placed, place_steps
from kiln_stages.recipes.recipe_file import Recipe, read_recipe
from kiln_stages.recipes.record import MANIFEST_NAME
from kiln_stages.recipes.standing import Changed, Standing, Standings
from kiln_stages.training.packages import require_train_extra

File = Annotated[Path, typer.Argument(metavar="FILE", help="The recipe (TOML or JSON).")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="Override: section.key=value.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """``state`` is None where no directory was named; ``changes`` are those of a changed one: what, then, now."""

    name: str
    kind: str
    rows: str | None
    begins_with: str | None
    run: str
    state: str | None
    rows_kept: int | None = None
    changes: list[Changed] = []


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "kiln.recipe-plan.v1"
    recipe: str
    recipe_sha256: str
    steps: list[PlannedStep]


def command() -> None:
    """Run trainings that build on one another, from a recipe: check it, show its plan, carry it out."""


def check(file: File, assignments: Assignments = None, json: AsJson = False) -> None:
    """Read a recipe and name every fault that it has, with its line. Nothing is run."""
    recipe = _read(file, assignments)
    if json:
        terminal.json_data({"schema": "kiln.recipe-check.v1", "recipe": recipe.name, "recipe_sha256": recipe.sha256})
    terminal.say(f"recipe {printable(recipe.name)}: {counted(len(recipe.steps), 'step', 'steps')}, no fault")
    terminal.say(f"next: {recipe.command_line('plan', 'DIR')}")


def plan(
    file: File,
    out: Annotated[Path | None, typer.Option("--out", help="The recipe's directory; tells how far it is.")] = None,
    as_makefile: Annotated[bool, typer.Option("--makefile", help="Print a Makefile of the steps.")] = False,
    assignments: Assignments = None,
    json: AsJson = False,
) -> None:
    """Show the steps as they would run: rows, base adapter, run directory, and how far each is."""
    recipe = _read(file, assignments)
    if as_makefile:
        if out is None or json:
            raise KilnError("KLN201", "--makefile needs --out DIR, and no --json", hint="the rules hold its paths")
        terminal.verbatim(makefile(recipe, out))
        return
    found = make_plan(recipe, out, load_plugins())
    if json:
        terminal.json_data(found)
    else:
        terminal.data(page(found))
    done = all(step.state == "done" for step in found.steps)
    terminal.say(f"next: {_verify(out) if done and out is not None else recipe.command_line('run', str(out or 'DIR'))}")


def run_command(
    file: File,
    out: Annotated[Path, typer.Option("--out", help="The recipe's directory; each step has one in it.")],
    fresh: Annotated[bool, typer.Option("--fresh", help="Make changed steps again; move the old aside.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", min=1, help="Remove all checkpoints but the newest N.")
    ] = None,
    assignments: Assignments = None,
    json: AsJson = False,
) -> None:
    """Carry out the steps that are not done; a training that was cut short goes on from its checkpoint."""
    recipe = _read(file, assignments)
    total = len(recipe.steps)

    def report(end: StepEnd) -> None:
        terminal.say(f"step {end.number} of {total}, {end.name}: {end.what}")
        if end.account:
            terminal.say(end.account)
        if end.warning:
            terminal.warn(end.warning)

    end = run(recipe, out, load_plugins(), fresh=fresh, keep_last=keep_last, progress=terminal, report=report)
    if json:
        terminal.json_data(end)
    if end.manifest is None:
        terminal.say(f"next: {recipe.command_line('run', str(out))}")
        raise typer.Exit(128 + (end.signal or 0))
    terminal.say(f"{'unchanged' if end.unchanged else 'written'}: {printable(out / MANIFEST_NAME)}")
    terminal.say(f"next: {_verify(out)}")


VERBS = {"check": check, "plan": plan, "run": run_command}


def run(
    recipe: Recipe,
    out: Path,
    plugins: Plugins,
    *,
    fresh: bool = False,
    keep_last: int | None = None,
    progress: Progress = SILENT,
    report: Callable[[StepEnd], None] | None = None,
) -> RecipeEnd:
    """Carries out what is not done, and writes ``recipe_manifest.json`` last. ``report``: called as each step ends.

    Raises KilnError: KLN208 where a step was begun with something else than the recipe says, before anything runs
    (``fresh`` moves its work aside and makes it again); KLN301 without torch; and as admit, train, resume and export
    do, with the step named.
    """
    require_train_extra("kiln recipe run")
    options = Options(fresh=fresh, keep_last=keep_last, report=report or (lambda end: None))
    return carry_out(recipe, out, plugins, progress, options)


def make_plan(recipe: Recipe, out: Path | None, plugins: Plugins) -> Plan:
    """The steps, and with ``out`` how far each is there. Writes nothing and takes no lock.

    Raises KilnError KLN302 for missing model files and KLN206 for damaged ones of a step, both with ``out`` alone.
    """
    placed = place_steps(recipe, out if out is not None else Path("DIR"))
    standings = Standings(plugins).all(placed) if out is not None else {}
    steps = [_planned(one, standings.get(one.step.name)) for one in placed]
    return Plan(recipe=recipe.name, recipe_sha256=recipe.sha256, steps=steps)


def page(found: Plan) -> str:
    """The plan as a table, and what changed below it."""
    with_state = any(step.state is not None for step in found.steps)
    rows = [["step", "kind", "rows", "begins with", "directory", *(["state"] if with_state else [])]]
    for step in found.steps:
        kept = f" ({step.rows_kept:,} kept)" if step.rows_kept is not None else ""
        rows.append([step.name, step.kind, f"{step.rows or '-'}{kept}", step.begins_with or "-", step.run])
        if step.state is not None:
            rows[-1].append(step.state)
    changes = [
        f"step {step.name}: {what}: {printable(then)}, now {printable(now, 400)}"
        for step in found.steps
        for what, then, now in step.changes
    ]
    return "\n".join([f"recipe {printable(found.recipe)}", table(rows), *changes])


def _planned(placed: Placed, standing: Standing | None) -> PlannedStep:
    step = placed.step.of if isinstance(placed, Merging) else placed.step.base
    elsewhere = None if isinstance(placed, Merging) else placed.config.run.train.base_adapter
    return PlannedStep(
        name=placed.step.name,
        kind=placed.step.kind,
        rows=None if isinstance(placed, Merging) else placed.rows_text(),
        begins_with=f"adapter of {step}" if step is not None else elsewhere,
        run=str(placed.target if isinstance(placed, Merging) else placed.run),
        state=standing.state if standing is not None else None,
        rows_kept=standing.rows_kept if standing is not None else None,
        changes=list(standing.changes) if standing is not None else [],
    )


def _verify(out: Path) -> str:
    return f"kiln verify-receipt {shlex.quote(str(out))}"


def _read(file: Path, assignments: list[str] | None) -> Recipe:
    recipe = read_recipe(file, assignments or ())
    for text in recipe.warnings:
        terminal.warn(f"{printable(file)}: {text}")
    return recipe
