"""A recipe: trainings that build on one another, in one TOML or JSON file. Every fault is found before anything runs.

A recipe has the tables of a config for what its steps share, and a list of steps. A step's ``config`` has the keys of
the public server's request (``kiln_cli/request_form.py``). ``docs/recipes.md`` lists every key.
"""

from __future__ import annotations

import datetime
import difflib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kiln_cli.config import SCHEMA as CONFIG_SCHEMA
from kiln_cli.config import (
    LoadedConfig,
    NonEmpty,
    NotBlank,
    RunConfig,
    faulty,
    fill_in_distillation,
    parse_table,
    read_text,
)
from kiln_cli.errors import KilnError
from kiln_cli.files import NAME_PATTERN
from kiln_cli.identity import Domain, domain_json_sha256
from kiln_cli.refused_keys import REFUSED_KEYS
from kiln_cli.request_form import DISTILL_KEYS, KEYS, in_request_terms, read_config
from kiln_cli.sections import CrossFault, Section, assign, decode
from kiln_cli.text import printable
from kiln_stages.training.base_adapter import CONFIG as ADAPTER_CONFIG

SHARED = ("project", "model", "admit", "train")
# Kinds that the design or the public server names, and why there is no such step.
REFUSED_KINDS = {
    "evaluate": "evaluation is not built in this version",
    "distill_merge": "distillation is not built in this version; kind merge puts an adapter into the base model",
    "distill_pump": "distillation is not built in this version",
    "distill_refresh": "no version of the public server supports it, and neither does kiln",
    "distill_self": "distillation is not built in this version",
    "post_eval": "evaluation behind a training is not built in this version; its held-out loss is in the receipt",
}
YAML = "YAML reads one text as several types (`no` is false, `1e3` a text); write the recipe as TOML or JSON"
REFUSED_AT_TOP = {
    "config": "what all steps share stands in [project], [model], [admit] and [train], as in a config",
    **dict.fromkeys(("datasets", "data"), "each step has its rows under examples_from"),
}
REFUSED_IN_STEP = {
    "type": "the key is kind",
    "output_name": "the adapter has the name of its step",
}
REFUSED_IN_SFT = {
    "dataset_path": "the key is examples_from.file",
    **dict.fromkeys(("dataset", "dataset_split", "examples", "file"), "it stands under examples_from"),
    "teacher": "a step of kind opd learns a teacher's scores",
}
REFUSED_IN_OPD = {
    **dict.fromkeys(("examples_from", "file"), "the scored corpus is a file, and its key is dataset_path"),
    **dict.fromkeys(("dataset", "dataset_split", "examples"), "the scored corpus is a file: dataset_path"),
}
# Settings of a config that are each step's own, so that no table of the recipe has them.
OF_STEPS = {
    "admit.kind": "a step's own kind says what its rows are",
    "admit.file": "each step has its rows under examples_from",
    "admit.dataset": "each step has its rows under examples_from",
    "admit.dataset_split": "each step has its rows under examples_from",
    "train.adapter": "the adapter has the name of its step",
    "train.base_adapter": "a step has base_adapter; without it, it begins with the adapter of the step before",
}
# What an adapter must have in common with the one that it begins with.
IN_COMMON = ("lora_rank", "lora_alpha", "target_modules", "dtype")


class Train(msgspec.Struct, frozen=True, kw_only=True):
    """A training. ``base``: the step whose adapter it begins with; an adapter elsewhere stands in ``config``.
    ``examples``: rows of the recipe itself; None where ``config`` says where they are."""

    name: str
    kind: Literal["sft", "opd"]
    config: LoadedConfig
    examples: list[Any] | None
    base: str | None


class Merge(msgspec.Struct, frozen=True, kw_only=True):
    """The base model with the adapter of the step ``of`` in its weights."""

    name: str
    of: str
    kind: Literal["merge"] = "merge"


Step = Train | Merge


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A checked recipe. ``sha256``: of all that it says, as parsed. ``assignments``: the ``--set`` texts that belong to
    it. ``warnings``: what is passed over."""

    name: str
    description: str | None
    path: Path
    base_dir: Path
    steps: list[Step]
    sha256: str
    assignments: list[str]
    warnings: list[str]

    def command_line(self, verb: str, out: str) -> str:
        """``kiln recipe VERB`` of this very recipe, as a shell takes it."""
        settings = "".join(f" --set {shlex.quote(text)}" for text in self.assignments)
        return f"kiln recipe {verb} {shlex.quote(str(self.path))}{settings} --out {shlex.quote(out)}"


class _Top(Section, frozen=True, kw_only=True):
    schema: Literal["kiln.recipe.v1"] = "kiln.recipe.v1"
    name: NotBlank
    description: str | None = None
    project: dict[str, Any] = msgspec.field(default_factory=dict)
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    admit: dict[str, Any] = msgspec.field(default_factory=dict)
    train: dict[str, Any] = msgspec.field(default_factory=dict)
    steps: Annotated[list[Any], Meta(min_length=1)]


class _ExamplesFrom(Section, frozen=True, kw_only=True):
    dataset: NotBlank | None = None
    dataset_split: Literal["train", "validation", "holdout"] | None = None
    examples: Annotated[list[Any], Meta(min_length=1)] | None = None
    file: NonEmpty | None = None

    def faults(self) -> Iterable[CrossFault]:
        given = [name for name in ("dataset", "examples", "file") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            yield CrossFault(
                ("dataset", "examples", "file"), f"dataset, examples or file: one must be given, found {found}"
            )
        if self.dataset_split is not None and self.dataset is None:
            yield CrossFault(("dataset", "dataset_split"), "dataset_split is for dataset, which is not given")

    def settings(self) -> dict[str, Any]:
        """The keys of ``[admit]`` that these stand for."""
        named = {"file": self.file, "dataset": self.dataset, "dataset_split": self.dataset_split}
        return {name: value for name, value in named.items() if value is not None}


class _Named(Section, frozen=True, kw_only=True):
    """A step's name becomes a directory beside the recipe's own files, and the name of an adapter."""

    kind: str
    name: NonEmpty

    def faults(self) -> Iterable[CrossFault]:
        if NAME_PATTERN.match(self.name) is None or self.name.endswith((".json", ".toml", ".jsonl")):
            yield CrossFault(
                ("name",),
                f"name = {printable(self.name)!r} is no name of a step (letters, digits, '.', '_', '-'; no leading "
                "dot, no ending of a file)",
            )


class _OfTraining(_Named, frozen=True, kw_only=True):
    """What every training has. Of a kind, ``KIND`` is its name, ``FORM`` the keys of its ``config``, ``FILE`` the key
    of its file of rows; ``file`` and ``examples`` are the rows where they are given so, and ``settings`` the tables of
    a config that say what the rows are."""

    base_adapter: NotBlank | None = None
    config: dict[str, Any] = msgspec.field(default_factory=dict)


class _SftFields(_OfTraining, frozen=True, kw_only=True):
    examples_from: _ExamplesFrom

    KIND: ClassVar[Literal["sft"]] = "sft"
    FORM: ClassVar[Mapping[str, str]] = KEYS
    FILE: ClassVar[str] = "examples_from.file"

    @property
    def file(self) -> str | None:
        return self.examples_from.file

    @property
    def examples(self) -> list[Any] | None:
        return self.examples_from.examples

    def settings(self) -> dict[str, dict[str, Any]]:
        return {"admit": self.examples_from.settings()}


class _OpdFields(_OfTraining, frozen=True, kw_only=True):
    dataset_path: NonEmpty
    teacher: NonEmpty

    KIND: ClassVar[Literal["opd"]] = "opd"
    FORM: ClassVar[Mapping[str, str]] = DISTILL_KEYS
    FILE: ClassVar[str] = "dataset_path"

    @property
    def file(self) -> str:
        return self.dataset_path

    @property
    def examples(self) -> None:
        return None

    def settings(self) -> dict[str, dict[str, Any]]:
        return {"admit": {"file": self.dataset_path}, "distill": {"teacher": self.teacher}}


class _MergeFields(_Named, frozen=True, kw_only=True):
    step: NonEmpty | None = None


_TrainFields = _SftFields | _OpdFields


class _Kind(NamedTuple):
    """The keys that a step of a kind has, and those that it is refused for a reason."""

    fields: type[_SftFields] | type[_OpdFields] | type[_MergeFields]
    refused: Mapping[str, str]


KINDS = {
    "sft": _Kind(_SftFields, {**REFUSED_KEYS, **REFUSED_IN_STEP, **REFUSED_IN_SFT}),
    "opd": _Kind(_OpdFields, {**REFUSED_KEYS, **REFUSED_IN_STEP, **REFUSED_IN_OPD}),
    "merge": _Kind(_MergeFields, REFUSED_IN_STEP),
}
TRAINING = "step of kind sft or opd"  # what leaves an adapter


def read_recipe(path: Path, assignments: Iterable[str] = ()) -> Recipe:
    """Reads and checks a recipe. ``assignments``: ``--set`` texts, as for a config.

    Raises KilnError KLN202 where the file is no TOML or JSON (YAML by name), KLN203 with every fault that it has.
    """
    if path.suffix in (".yaml", ".yml"):
        raise KilnError("KLN202", f"{printable(path)} is refused: {YAML}", hint="docs/recipes.md shows one in TOML")
    text = read_text(path)
    value = parse_table(path, text)
    settings = list(assignments)
    for assignment in settings:
        assign(value, assignment)
    reader = _Reader(path, value, settings)
    recipe = reader.read()
    if recipe is None:
        raise faulty(path, text, reader.faults, keys_in="docs/recipes.md")
    return recipe


class _Reader:
    """The steps in order; what is wrong anywhere is added to ``faults``, each behind the path of its key."""

    def __init__(self, path: Path, value: dict[str, Any], assignments: list[str]) -> None:
        self.path = path
        self.assignments = assignments
        self.base_dir = _base_dir(path)
        self.value = value
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.steps: dict[str, Step] = {}
        self.trainings: list[str] = []  # names of the trainings so far, sound or not
        self.shared = {name: table for name in SHARED if isinstance(table := value.get(name, {}), dict)}
        self.shared_faults: list[str] = []

    def read(self) -> Recipe | None:
        top = decode(_Top, self.value, {**REFUSED_KEYS, **REFUSED_AT_TOP}, self.faults)
        self._check_shared()
        steps = self.value.get("steps")
        for number, step in enumerate(steps if isinstance(steps, list) else []):
            self._read_step(f"steps[{number}]", step)
        self.faults += [f"{place} is a date; write it as text" for place in _dates(self.value, "")]
        if top is None or self.faults:
            return None
        return Recipe(
            name=top.name,
            description=top.description,
            path=self.path,
            base_dir=self.base_dir,
            steps=list(self.steps.values()),
            sha256=domain_json_sha256(Domain.RECIPE, self.value),
            assignments=self.assignments,
            warnings=self.warnings,
        )

    def _check_shared(self) -> None:
        for key, reason in OF_STEPS.items():
            table, _, name = key.partition(".")
            if name in self.shared.get(table, {}):
                self.shared[table] = {key: item for key, item in self.shared[table].items() if key != name}
                self.shared_faults.append(f"{key} is refused: {reason}")
        decode(RunConfig, {"schema": CONFIG_SCHEMA, **self.shared}, REFUSED_KEYS, self.shared_faults)
        self.faults += self.shared_faults

    def _read_step(self, at: str, value: object) -> None:
        if not isinstance(value, dict):
            self.faults.append(f"{at} must be a table, found {printable(repr(value))}")
            return
        if (fault := _kind_fault(at, value)) is not None:
            self.faults.append(fault)
            return
        kind = KINDS[value["kind"]]
        fields: _SftFields | _OpdFields | _MergeFields | None = decode(
            kind.fields, value, kind.refused, self.faults, at
        )
        step: Step | None = None
        if isinstance(fields, _MergeFields):
            step = self._merge(at, fields)
        elif fields is not None:
            step = self._training(at, fields)
        if issubclass(kind.fields, _OfTraining):
            self.trainings.append(str(value.get("name")))
        if step is None:
            return
        # Each has a directory, and some file systems take names that differ in case alone for one.
        same = next((name for name in self.steps if name.casefold() == step.name.casefold()), None)
        if same is not None:
            told = "has this name" if same == step.name else f"has the name {same!r}, which differs in case alone"
            self.faults.append(f"{at}.name = {step.name!r}: another step before it {told}")
        else:
            self.steps[step.name] = step

    def _merge(self, at: str, fields: _MergeFields) -> Merge | None:
        of = fields.step if fields.step is not None else self._last_training()
        if of is None:
            self.faults.append(f"{at}: no {TRAINING} stands before this one, so there is no adapter to merge")
        elif of not in self.trainings:
            self.faults.append(f"{at}.step = {printable(of)!r} is no {TRAINING} before this one")
        else:
            return Merge(name=fields.name, of=of)
        return None

    def _training(self, at: str, fields: _TrainFields) -> Train | None:
        before = len(self.faults)
        base, elsewhere = self._base(at, fields)
        if (file := fields.file) is not None and not Path(self.base_dir / file).exists():
            self.faults.append(f"{at}.{fields.FILE} = {printable(file)!r}: there is no such file")
        config = self._step_config(at, fields, elsewhere)
        if config is None or len(self.faults) > before:
            return None
        self._check_in_common(at, base, config)
        return Train(name=fields.name, kind=fields.KIND, config=config, examples=fields.examples, base=base)

    def _base(self, at: str, fields: _TrainFields) -> tuple[str | None, str | None]:
        """The step whose adapter this one begins with, or the directory of an adapter elsewhere."""
        wanted = fields.base_adapter
        if wanted is None:
            return self._last_training(), None
        if wanted in self.trainings:
            return wanted, None
        if not (Path(os.path.normpath(self.base_dir / wanted)) / ADAPTER_CONFIG).is_file():
            self.faults.append(
                f"{at}.base_adapter = {printable(wanted)!r} is neither a {TRAINING} before this one nor the "
                f"directory of an adapter ({ADAPTER_CONFIG} is not there)"
            )
        return None, wanted

    def _last_training(self) -> str | None:
        return self.trainings[-1] if self.trainings else None

    def _step_config(self, at: str, fields: _TrainFields, base_adapter: str | None) -> LoadedConfig | None:
        """The config that the step runs under: the shared tables, its own settings over them, and its name and rows."""
        given = dict(fields.config)
        if given.pop("output_name", None) not in (None, fields.name):
            self.warnings.append(f"{at}.config.output_name is passed over: the adapter is named {fields.name!r}")
        if given.pop("base_adapter", None) is not None:
            self.faults.append(f"{at}.config.base_adapter is refused: the step itself has base_adapter")
        request = read_config(given, REFUSED_KEYS, distils=fields.KIND == "opd")
        faults, own = request.faults, {"train": {"adapter": fields.name, "base_adapter": base_adapter}}
        value: dict[str, Any] = {"schema": CONFIG_SCHEMA}
        for tables in (self.shared, request.settings, fields.settings(), own):
            for name, table in tables.items():
                value[name] = {**value.get(name, {}), **table}
        fill_in_distillation(value)
        run = decode(RunConfig, value, REFUSED_KEYS, faults)
        self.warnings += [f"{at}.{key} is ignored: {reason}" for key, reason in request.ignored.items()]
        self.faults += [_in_step_terms(at, fields, fault) for fault in faults if fault not in self.shared_faults]
        if run is None:
            return None
        self.warnings += [_in_step_terms(at, fields, text) for text in run.distill.warnings()]
        return LoadedConfig(run=run, base_dir=self.base_dir, path=self.path)

    def _check_in_common(self, at: str, base: str | None, config: LoadedConfig) -> None:
        """A step that would be refused behind hours of the one before is refused now."""
        before = self.steps.get(base) if base is not None else None
        if not isinstance(before, Train):
            return
        for name in IN_COMMON:
            mine, theirs = getattr(config.run.train, name), getattr(before.config.run.train, name)
            if mine != theirs:
                self.faults.append(
                    f"{at}.config.{name} = {printable(mine)}: it begins with the adapter of step {before.name!r}, "
                    f"which has {printable(theirs)}"
                )


def _kind_fault(at: str, value: Mapping[str, Any]) -> str | None:
    kind = value.get("kind")
    if kind is None:
        return f"{at}.type is refused: the key is kind" if "type" in value else f"{at}.kind is missing"
    if isinstance(kind, str) and kind in KINDS:
        return None
    if isinstance(kind, str) and kind in REFUSED_KINDS:
        return f"{at}.kind = {kind!r} is refused: {REFUSED_KINDS[kind]}"
    near = difflib.get_close_matches(str(kind), [*KINDS, *REFUSED_KINDS], n=1)
    there_are = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(KINDS)}"
    return f"{at}.kind = {printable(repr(kind))} is no kind of step; {there_are}"


def _in_step_terms(at: str, fields: _TrainFields, fault: str) -> str:
    """A fault of the config that was made of a step, by the key of the step, or of a table that the steps share."""
    text = in_request_terms(fault, fields.FORM)
    if text == fault and text.startswith(tuple(f"{table}." for table in SHARED)):
        return f"{text} ({at})"
    if text.startswith("dataset_path"):
        text = fields.FILE + text.removeprefix("dataset_path")
    elif text.startswith("dataset"):
        text = f"examples_from.{text}"
    return f"{at}.{text}"


def _dates(value: object, at: str) -> Iterator[str]:
    """Where TOML has a date or a time, which no JSON value is."""
    if isinstance(value, (datetime.date, datetime.time)):
        yield at
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _dates(item, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _dates(item, f"{at}[{number}]")


def _base_dir(path: Path) -> Path:
    """What the recipe's paths count from: its directory, the real one where a link leads to it."""
    given = path.parent
    return given if given.resolve() == given.absolute() else given.resolve()
