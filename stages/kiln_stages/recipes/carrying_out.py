"""Carrying out a recipe: all rows are admitted before the first training begins, then one step follows another.

What is done stays untouched; a training that was cut short goes on from its latest checkpoint. Each step has a run
directory of its own, in which the stages work as they do for ``kiln admit``, ``train``, ``resume`` and ``export``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import FS, run_lock, write_file, writing
from kiln_cli.identity import sha256_hex
from kiln_cli.manifests import document, read_manifest
from kiln_cli.plugins import Plugins, version
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.terminal import Progress
from kiln_cli.text import printable
from kiln_stages import admit, export, resume, train
from kiln_stages.recipes.placing import Merging, Placed, Training, place_steps
from kiln_stages.recipes.recipe_file import Recipe
from kiln_stages.recipes.record import (
    MergeRecord,
    RecipeManifest,
    StepRecord,
    forget_recipe_manifest,
    merge_path,
    write_recipe_manifest,
)
from kiln_stages.recipes.standing import Standing, Standings
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.kinds import kind_named


class StepEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a step came out. ``account`` is for people, and so is ``warning``: why corrections were not marked.
    ``signal``: one that stopped it, or came when it was done."""

    name: str
    number: int  # from 1
    what: Literal["left as it is", "trained", "resumed", "stopped", "merged"]
    account: str
    warning: str = ""
    signal: int | None = None


class RecipeEnd(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest`` is None where a signal left steps to do. ``unchanged``: every step was done before."""

    schema: str = "kiln.recipe-run.v1"
    steps: list[StepEnd]
    manifest: RecipeManifest | None
    signal: int | None = None
    unchanged: bool = False


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """``fresh``: make changed steps again, the old work moved aside. ``keep_last``: as of ``kiln train``.
    ``report`` is called as each step ends."""

    fresh: bool = False
    keep_last: int | None = None
    report: Callable[[StepEnd], None] = lambda end: None


def carry_out(recipe: Recipe, out: Path, plugins: Plugins, progress: Progress, options: Options) -> RecipeEnd:
    """Raises KilnError KLN208 where a step was begun with something else than the recipe now says, before anything
    runs; and as the stages do, with the step named."""
    with run_lock(out, "kiln recipe run", nested=False):
        return _CarryingOut(recipe, out, plugins, progress, options).run()


class _CarryingOut:
    def __init__(self, recipe: Recipe, out: Path, plugins: Plugins, progress: Progress, options: Options) -> None:
        self.recipe, self.out, self.plugins, self.progress, self.options = recipe, out, plugins, progress, options
        self.placed = place_steps(recipe, out)
        self.standings = Standings(plugins)
        self.found: dict[str, Standing] = {}

    def run(self) -> RecipeEnd:
        for number, placed in enumerate(self.placed, start=1):
            self._look_at(number, placed)
        for number, placed in enumerate(self.placed, start=1):
            self._require_same(number, placed)
        unchanged = all(standing.state == "done" for standing in self.found.values())
        if not unchanged:
            forget_recipe_manifest(self.out)
            self._admit_all()
        ends = []
        for number, placed in enumerate(self.placed, start=1):
            self._look_at(number, placed)  # again: the steps before it may have changed what it begins with
            self._require_same(number, placed)
            with self._step(number, placed):
                ends.append(self._carry_out(number, placed))
            self.options.report(ends[-1])
            if (signal := ends[-1].signal) is not None and (ends[-1].what == "stopped" or number < len(self.placed)):
                return RecipeEnd(steps=ends, manifest=None, signal=signal)
        return RecipeEnd(steps=ends, manifest=self._write_manifest(), unchanged=unchanged)

    def _require_same(self, number: int, placed: Placed) -> None:
        """A step whose recipe changed is made again on demand only: what it would replace took hours, perhaps."""
        changes = self.found[placed.step.name].changes
        if not changes or self.options.fresh:
            return
        lines = "".join(
            f"\n  {printable(one.what)}: {printable(one.then)}, now {printable(one.now, 400)}" for one in changes
        )
        raise KilnError(
            "KLN208",
            f"step {placed.step.name!r} ({number} of {len(self.placed)}) was begun with something else:{lines}",
            hint=f"`{self._again()} --fresh` moves it aside and makes it again, and what depends on it; "
            "another --out begins anew",
        )

    def _admit_all(self) -> None:
        """A row or a loss that is refused stops the recipe here, not behind the trainings before its step."""
        from kiln_stages.training.inputs import loss_for

        for number, placed in enumerate(self.placed, start=1):
            if isinstance(placed, Training):
                with self._step(number, placed):
                    loss_for(kind_named(placed.step.kind), placed.config, self.plugins)
                    self._admit(placed)

    def _admit(self, training: Training) -> None:
        state = self.found[training.step.name].state
        if state == "changed":
            _move_training_aside(training.run)
        # Rows that nobody has trained on yet are taken as they are now.
        if state in ("to do", "changed") or (state == "admitted" and training.keeps_its_rows):
            admit.run(training.config, training.run, self.plugins, rows=training.rows(), progress=self.progress)

    def _look_at(self, number: int, placed: Placed) -> None:
        with self._step(number, placed):
            self.found[placed.step.name] = self.standings.of(placed, self.found)

    def _carry_out(self, number: int, placed: Placed) -> StepEnd:
        name = placed.step.name
        if self.found[name].state == "done":
            return self._left(number, placed)
        end = self._merge(number, placed) if isinstance(placed, Merging) else self._train(number, placed)
        self.found[name] = self.standings.of(placed, self.found)
        return end

    def _left(self, number: int, placed: Placed) -> StepEnd:
        """A step that is done. A process that died between its receipt and the store left corrections unmarked."""
        marking = None
        if isinstance(placed, Training) and placed.keeps_its_rows:
            from kiln_stages.correcting.marking import mark_trained

            receipt = self.found[placed.step.name].receipt
            assert receipt is not None, "it is done"
            with run_lock(placed.run, "kiln recipe run"):
                marking = mark_trained(placed.config, placed.run, read_manifest(placed.run, AdmitManifest), receipt)
        return StepEnd(
            name=placed.step.name,
            number=number,
            what="left as it is",
            account="\n".join(marking.lines()) if marking is not None else "",
            warning=marking.fault if marking is not None else "",
        )

    def _train(self, number: int, training: Training) -> StepEnd:
        name, run, config = training.step.name, training.run, training.config
        if self.found[name].state == "changed":
            _move_training_aside(run)
        keep, progress = self.options.keep_last, self.progress
        going_on = self.found[name].state == "unfinished" and bool(list_checkpoints(run / "train"))
        if going_on:
            result = resume.run(config, run, self.plugins, keep_last=keep, progress=progress)
        else:
            result = train.run(config, run, self.plugins, keep_last=keep, progress=progress)
        what: Literal["stopped", "resumed", "trained"] = "resumed" if going_on else "trained"
        return StepEnd(
            name=name,
            number=number,
            what=what if result.signal is None else "stopped",
            account=result.account(run),
            warning=result.marking.fault if result.marking is not None else "",
            signal=result.signal if result.signal is not None else result.late_signal,
        )

    def _merge(self, number: int, merging: Merging) -> StepEnd:
        """The directory of another adapter's model, or one that no record speaks of, is moved aside."""
        receipt = self.found[merging.step.of].receipt
        assert receipt is not None, "a merge comes behind its training"
        _move_model_aside(merging.target)
        merged = export.run_merged(merging.run, merging.target)
        record = MergeRecord(
            step=merging.step.of,
            adapter_content_sha256=receipt.adapters["output"]["content_sha256"],
            receipt_content_sha256=receipt.content_digest(),
            files=merged.files,
        )
        write_file(merge_path(merging.target), document(record))
        return StepEnd(name=merging.step.name, number=number, what="merged", account=merged.account())

    def _write_manifest(self) -> RecipeManifest:
        manifest = RecipeManifest(
            kiln_version=version(),
            recipe=self.recipe.name,
            recipe_sha256=self.recipe.sha256,
            steps=[_record(placed, self.found[placed.step.name]) for placed in self.placed],
        )
        write_recipe_manifest(self.out, manifest)
        return manifest

    @contextmanager
    def _step(self, number: int, placed: Placed) -> Iterator[None]:
        """An error within is the step's: it is named, and how to go on."""
        try:
            yield
        except KilnError as error:
            raise KilnError(
                error.code,
                f"step {placed.step.name!r} ({number} of {len(self.placed)}): {error.message}",
                hint=f"{error.hint + '; ' if error.hint else ''}then `{self._again()}` goes on with this step",
                details=error.details,
            ) from error

    def _again(self) -> str:
        return self.recipe.command_line("run", str(self.out))


def _record(placed: Placed, standing: Standing) -> StepRecord:
    if isinstance(placed, Merging):
        assert standing.record is not None, "every step is done"
        return StepRecord(
            name=placed.step.name,
            kind="merge",
            step=placed.step.of,
            adapter_content_sha256=standing.record.adapter_content_sha256,
            receipt_content_sha256=standing.record.receipt_content_sha256,
            files=standing.record.files,
        )
    assert standing.receipt is not None, "every step is done"
    return StepRecord(
        name=placed.step.name,
        kind=placed.step.kind,
        step=placed.step.base,
        adapter_content_sha256=standing.receipt.adapters["output"]["content_sha256"],
        receipt_content_sha256=standing.receipt.content_digest(),
    )


def _move_training_aside(run: Path) -> None:
    from kiln_stages.training.run_training import move_aside

    with run_lock(run, "kiln recipe run"):
        move_aside(run)


def _move_model_aside(target: Path) -> None:
    """``NAME`` and its record become ``NAME.<digest8>``, with a number where that is taken."""
    record = merge_path(target)
    with writing(target):
        if target.exists():
            digest = sha256_hex(record.read_bytes())[:8] if record.exists() else "unknown"
            taken, number = target.with_name(f"{target.name}.{digest}"), 2
            while taken.exists():
                taken, number = target.with_name(f"{target.name}.{digest}-{number}"), number + 1
            if record.exists():  # first: a record must not outlive the model that it speaks of
                FS.replace(record, merge_path(taken))
            FS.rename_directory(target, taken)
        elif record.exists():
            FS.unlink(record)
        FS.sync_directory(target.parent)
