"""A recipe as a Makefile: the same steps as rules that call ``kiln admit``, ``train`` and ``export`` with config files.

It stands alone. Settings, and rows that the recipe itself holds, are written by rules of their own; such rows then come
from a file, which their receipts say. The rules are those of ``stages/stages.mk``, without raw rows and ``prepare``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import tomli_w

from kiln_cli.config import SCHEMA, LoadedConfig, RunConfig, fill_in_distillation
from kiln_cli.errors import KilnError
from kiln_cli.manifests import RECEIPT_NAME, relative_base
from kiln_cli.sections import without_none
from kiln_cli.text import printable
from kiln_stages.admitting.model_files import TOKENIZER_FILES
from kiln_stages.distilling.registry import FILE_NAME as TEACHERS
from kiln_stages.recipes.placing import Merging, Placed, Training, place_steps
from kiln_stages.recipes.recipe_file import Recipe
from kiln_stages.training.base_adapter import CONFIG as ADAPTER_CONFIG
from kiln_stages.training.base_adapter import MODEL as ADAPTER_MODEL

LONGEST_LINE = 100_000  # bytes of one line of a file: a system hands a shell no argument beyond 128 KiB
TOGETHER = 8_000  # bytes of lines that one command writes
HEAD = """\
# The steps of recipe {name}, made by `{command} --makefile`.
# Paths count from the directory where that was done. A training that was interrupted begins again here;
# `kiln recipe run`, or `kiln resume` of its directory, goes on with it instead.

KILN ?= kiln
SELF := $(lastword $(MAKEFILE_LIST))

.DELETE_ON_ERROR:
.PHONY: all FORCE
all: {targets}
"""
TRAINING = """
{run}/.stamps/admit: {config}{rows}
	$(KILN) admit {config} --out {run}
	@mkdir -p $(@D) && touch $@
{run}/admit_manifest.json: {run}/.stamps/admit
	@test -e $@ || $(KILN) admit {config} --out {run}
{run}/.stamps/train: {run}/admit_manifest.json {config}{base}
	$(KILN) train {config} --out {run} --fresh
	@mkdir -p $(@D) && touch $@
{run}/train_receipt.json: {run}/.stamps/train
	@grep -qs '"status": "success"' $@ || $(KILN) train {config} --out {run} --fresh
"""
MERGING = """
{target}/config.json: {run}/train_receipt.json
	@test ! -e {target} || {{ echo 'move {target} away: it is of another adapter' >&2; exit 2; }}
	$(KILN) export {run} --merged {target}
"""


def makefile(recipe: Recipe, out: Path) -> str:
    """The text. Raises KilnError KLN201 for what a Makefile cannot hold: a path with white space, a very long row."""
    placed = place_steps(recipe, out)
    head = HEAD.format(
        name=printable(recipe.name),
        command=printable(recipe.command_line("plan", str(out))),
        targets=" ".join(map(_target, placed)),
    )
    return head + "".join(map(_rules, placed))


def _target(placed: Placed) -> str:
    return _path(placed.target / "config.json" if isinstance(placed, Merging) else placed.run / "train_receipt.json")


def _rules(placed: Placed) -> str:
    if isinstance(placed, Merging):
        return MERGING.format(target=_path(placed.target), run=_path(placed.run))
    config, made = placed.config, ""
    file = None if config.run.admit.file is None else config.resolve(config.run.admit.file)
    if placed.step.examples is not None:
        given = placed.rows()
        assert given is not None and given.texts is not None, "the recipe holds its rows"
        file = _beside(placed, "rows.jsonl")
        config = config.replace("admit", file=os.path.relpath(file, config.base_dir))
        made = _file_rule(file, (text.decode("utf-8") for text in given.texts))
    made += _file_rule(_beside(placed, "toml"), _settings(config, placed.run.parent).splitlines())
    return made + TRAINING.format(
        run=_path(placed.run),
        config=_path(_beside(placed, "toml")),
        rows="".join(f" {name}" for name in _watched(placed, file)),
        base="".join(f" {_path(path)}" for path in _base(placed)),
    )


def _base(training: Training) -> list[Path]:
    """What is written last of the adapter that the step begins with, or the files of one that no step makes."""
    if training.step.base is not None:
        return [training.run.parent / training.step.base / RECEIPT_NAME]
    if (path := training.config.run.train.base_adapter) is not None:
        return [training.config.resolve(path) / name for name in (ADAPTER_CONFIG, ADAPTER_MODEL)]
    return []


def _watched(training: Training, file: Path | None) -> Iterator[str]:
    """What admission looks again for where it is newer; with FORCE it looks each time. ``file``: of the rows."""
    if training.keeps_its_rows:
        return  # they end when they are trained into, and cannot be admitted a second time
    config = training.config
    tokenizer = [config.model_dir() / name for name in TOKENIZER_FILES]
    template = config.base_dir / config.run.admit.template  # one of the model or of a plugin is no file
    yield from (_path(path) for path in [*tokenizer, template] if path.is_file())
    if file is not None:
        yield _path(file)
    if training.step.kind == "opd":  # its teacher may have been pinned anew
        yield _path(config.resolve(config.run.admit.registry) / TEACHERS)
    # A data set, a file within a directory and what is held out may have changed, and no time of a file says so.
    if file is None or file.is_dir() or config.run.admit.held_out:
        yield "FORCE"


def _beside(training: Training, ending: str) -> Path:
    return training.run.with_name(f"{training.step.name}.{ending}")


def _settings(config: LoadedConfig, directory: Path) -> str:
    """The config as TOML, for a file in ``directory``; what is as it is by default is left out."""
    value = _beyond(msgspec.to_builtins(config.run), _defaults(config))
    base = {"schema": SCHEMA, "base_dir": relative_base(directory, config.base_dir)}
    return tomli_w.dumps({**base, **without_none(value)})


def _defaults(config: LoadedConfig) -> dict[str, Any]:
    """What a reader of the config takes for granted, which depends on the kind of its rows."""
    value: dict[str, Any] = {"schema": SCHEMA, "admit": {"kind": config.run.admit.kind}}
    fill_in_distillation(value)
    del value["admit"]  # the kind itself must be said
    defaults: dict[str, Any] = msgspec.to_builtins(msgspec.convert(value, RunConfig))
    return defaults


def _beyond(value: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What of ``value`` is not as in ``default``, table by table."""
    found = {}
    for key, item in value.items():
        other = default.get(key)
        differing = _beyond(item, other) if isinstance(item, dict) and isinstance(other, dict) else item
        if item != other:
            found[key] = differing
    return found


def _file_rule(path: Path, lines: Iterable[str]) -> str:
    """A rule that writes these lines to a file, which is there whole or not at all."""
    commands = "".join(
        "\t@printf '%s\\n'" + "".join(f" \\\n\t    {text}" for text in part) + " >> $@.tmp\n"
        for part in _parts(path, lines)
    )
    return f"\n{_path(path)}: $(SELF)\n\t@mkdir -p $(@D) && rm -f $@.tmp\n{commands}\t@mv $@.tmp $@\n"


def _parts(path: Path, lines: Iterable[str]) -> Iterator[list[str]]:
    """The lines as words of a shell in a Makefile, as many together as a command takes."""
    part: list[str] = []
    for number, line in enumerate(lines, start=1):
        if len(line.encode("utf-8")) > LONGEST_LINE:
            raise KilnError(
                "KLN201",
                f"line {number} of {printable(path)} has {len(line.encode('utf-8')):,} bytes, more than the "
                f"{LONGEST_LINE:,} that a rule can write",
                hint="put the rows into a file and name it under examples_from",
            )
        quoted = "'" + line.replace("'", "'\\''").replace("$", "$$") + "'"
        if part and sum(map(len, part)) + len(quoted) > TOGETHER:
            yield part
            part = []
        part.append(quoted)
    yield part


def _path(path: Path) -> str:
    """A path as a target and as a word of a shell. Raises KilnError KLN201 where it cannot be both."""
    text = str(path)
    if any(char.isspace() or char in "$#:%\\'\"`*?[]()&;|<>=!~" for char in text):
        raise KilnError(
            "KLN201",
            f"{printable(text)!r} cannot stand in a Makefile: it has white space or a character that Make or a shell "
            "takes for its own",
            hint="rename it, or use `kiln recipe run`",
        )
    return text
