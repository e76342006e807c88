"""Where the steps of a recipe run below its directory, and under which config once their base adapters have a place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_stages.admitting.given import Given, given_values, named_rows
from kiln_stages.correcting.admitted import ACTIVE
from kiln_stages.recipes.recipe_file import Merge, Recipe, Train

ADAPTER = Path("train") / "adapter"


class Training(NamedTuple):
    """A training in its run directory. ``config`` names the base adapter by path, whichever it is."""

    step: Train
    run: Path
    config: LoadedConfig
    recipe: str

    def rows(self) -> Given | None:
        """The rows that the recipe or the registry gives; None where a file of the config has them.

        Raises KilnError KLN204 for a row that has no JSON form, and as :func:`named_rows` does.
        """
        if self.step.examples is None:
            return named_rows(self.config)
        given = given_values(self.step.examples)
        return msgspec.structs.replace(given, source="recipe", locator=f"{self.recipe}/{self.step.name}")

    @property
    def keeps_its_rows(self) -> bool:
        """Whether what was admitted stays what it was though its source changes: corrections end when trained into."""
        return self.config.run.admit.dataset == ACTIVE

    def rows_text(self) -> str:
        admit = self.config.run.admit
        if self.step.examples is not None:
            return f"{len(self.step.examples)} of the recipe"
        if self.step.kind == "opd":
            return f"file {admit.file}, scored by {self.config.run.distill.teacher}"
        if admit.dataset is None:
            return f"file {admit.file}"
        return admit.dataset if self.keeps_its_rows else f"data set {admit.dataset}, {admit.dataset_split}"


class Merging(NamedTuple):
    """A step of kind merge: the run whose adapter is merged, and the directory of the model."""

    step: Merge
    run: Path
    target: Path


Placed = Training | Merging


def place_steps(recipe: Recipe, out: Path) -> list[Placed]:
    """The steps in order, each at ``out`` / its name."""
    return [
        Merging(step, out / step.of, out / step.name) if isinstance(step, Merge) else _training(recipe, step, out)
        for step in recipe.steps
    ]


def _training(recipe: Recipe, step: Train, out: Path) -> Training:
    config = step.config
    if step.base is not None:
        # Relative, however --out was given: the text goes into the receipt, where no machine's path belongs.
        path = os.path.relpath(out / step.base / ADAPTER, recipe.base_dir)
        config = config.replace("train", base_adapter=path)
    return Training(step, out / step.name, config, recipe.name)
