"""The run config: TOML or JSON in, checked structs out. Every fault is gathered before any is reported.

Paths count from the config file's directory (``base_dir`` overrides it, which is how the copy in a run directory keeps
pointing at the same files). Unknown keys are refused. ``docs/config.md`` lists every key.
"""

from __future__ import annotations

import math
import os
import struct
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
import tomli_w
from msgspec import Meta

from kiln_cli import strict_json
from kiln_cli.counting import counted
from kiln_cli.distillation import DistillConfig
from kiln_cli.errors import KilnError
from kiln_cli.files import NAME_PATTERN, read_bounded
from kiln_cli.identity import Domain, domain_json_sha256
from kiln_cli.refused_keys import REFUSED_KEYS
from kiln_cli.request_form import from_decimal, in_request_terms, is_request, read_request
from kiln_cli.sections import CrossFault, Section, assign, decode, place, without_none
from kiln_cli.terminal import terminal
from kiln_cli.text import printable

SCHEMA = "kiln.config.v1"
# What a stage reads of a config; its evidence holds the digest of these sections.
PREPARE_SECTIONS = ("project", "datasets", "data")
ADMIT_SECTIONS = ("model", "admit")
DISTILL_SECTIONS = ("model", "admit", "distill")  # of the admission of a scored corpus
TRAIN_SECTIONS = ("project", "model", "train")
SCORED_WHOLE = "a scored corpus is one file of one shape, admitted whole or not at all"
# Defaults of [train] where the rows are scored by a teacher.
DISTILLATION_DEFAULTS: dict[str, Any] = {"loss": "teacher_top_k", "epochs": 1, "checkpoint_interval": 25}
SIZE_LIMIT = 4 * 1024 * 1024

Count = Annotated[int, Meta(ge=1, le=2**53 - 1)]
Fraction = Annotated[float, Meta(ge=0, lt=1)]
NotNegative = Annotated[float, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
Label = Annotated[str, Meta(pattern=r"^(tool|/.*)$")]
NotBlank = Annotated[str, Meta(pattern=r"\S")]
NonEmpty = Annotated[str, Meta(min_length=1)]


class ProjectConfig(Section, frozen=True, kw_only=True):
    name: NonEmpty = "kiln"
    seed: Annotated[int, Meta(ge=0)] = 42

    def faults(self) -> Iterable[CrossFault]:
        if self.seed >= 2**64:
            yield CrossFault(("seed",), f"seed = {self.seed} is above 2^64-1")


class ModelConfig(Section, frozen=True, kw_only=True):
    """``path``: a Hugging Face model directory. ``id``: how artifacts name the base model (its digest if not given)."""

    path: NonEmpty | None = None
    id: NonEmpty | None = None

    def faults(self) -> Iterable[CrossFault]:
        if self.id is not None and (self.id[0] in "/.~" or "\\" in self.id):
            yield CrossFault(
                ("id",),
                f"id = {printable(self.id)!r} is a path, which adapters and receipts would carry; give a name",
            )


class DatasetConfig(Section, frozen=True, kw_only=True):
    """One source of raw rows. ``id`` goes before the rows' own ids; the file's name without suffix if not given."""

    language: Annotated[str, Meta(pattern=r"^[a-z]{2}$")] = "en"
    path: NonEmpty
    source: NonEmpty = "auto"
    id: NonEmpty | None = None
    revision: NonEmpty | None = None
    source_id_column: NonEmpty | None = None

    @property
    def dataset_id(self) -> str:
        return self.id or _stem(self.path)


def _stem(path: str) -> str:
    """A file's name without the endings that say how it is packed: ``a/rows.fr.jsonl.gz`` is ``rows.fr``."""
    name = Path(path).name
    while (suffix := Path(name).suffix) in (".gz", ".zst", ".jsonl", ".ndjson", ".json", ".parquet"):
        name = name.removesuffix(suffix)
    return name or "rows"


class DataConfig(Section, frozen=True, kw_only=True):
    """``checks`` names opt-in drop reasons. ``ratios`` (train, validation, test) replaces the fixed counts by shares of
    the pool. ``group_by`` keeps rows with one label in one split, ``stratify_by`` gives each label its share; a label
    is "tool" (the function that a row calls first) or a JSON pointer into the raw row."""

    n_train: Count = 15_000
    n_validation: Count = 1_000
    n_test: Count = 1_000
    min_query_chars: Count = 10
    max_query_chars: Count = 2_000
    max_calls: Annotated[int, Meta(ge=1, le=64)] = 1
    checks: list[NonEmpty] = []
    near_duplicate_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.8
    ratios: Annotated[list[Positive], Meta(min_length=3, max_length=3)] | None = None
    group_by: Label | None = None
    stratify_by: Label | None = None
    release_failed_pair_digest: bool = False

    def faults(self) -> Iterable[CrossFault]:
        if self.ratios is not None and abs(sum(self.ratios) - 1.0) > 1e-9:
            yield CrossFault(("ratios",), f"ratios = {self.ratios} add up to {sum(self.ratios):g}, not to 1")
        if self.group_by is not None and self.stratify_by is not None:
            yield CrossFault(("group_by", "stratify_by"), "group_by and stratify_by exclude each other")
        if self.max_query_chars <= self.min_query_chars:
            yield CrossFault(
                ("max_query_chars", "min_query_chars"),
                f"max_query_chars = {self.max_query_chars} is not above min_query_chars = {self.min_query_chars}",
            )


class AdmitConfig(Section, frozen=True, kw_only=True):
    """``file``: chat rows to admit, in place of the run's prepared ones; ``dataset``: those of a split of a named data
    set in ``registry``, or ``corrections:active``. ``source`` names their shape and ``map`` gives fields of another one
    (field = path). ``strict`` refuses rows with fields that change nothing; ``compat`` reads rows
    as the public Kiln server does. ``held_out``: rows that no row to train on may meet, by file, receipt, run or
    split; ``near_threshold`` also finds near duplicates of them, and ``drop_contaminated`` leaves out and counts what
    is found, else the admission is refused. ``template``: "model" (the model's own), a registered name, or a path.
    ``max_tokens``: the model's positions if not given. ``date``: what a template that asks for the date is told.
    ``kind``: "sft" for conversations, "opd" for a corpus that a teacher scored, "auto": opd where ``file`` begins with
    a teacher's manifest line."""

    kind: Literal["auto", "sft", "opd"] = "auto"
    file: NonEmpty | None = None
    dataset: NonEmpty | None = None
    dataset_split: Literal["train", "validation", "holdout"] = "train"
    registry: NonEmpty = ".kiln"
    source: NonEmpty = "auto"
    map: dict[NonEmpty, NonEmpty] = {}
    strict: bool = False
    held_out: list[NonEmpty] = []
    near_threshold: Annotated[float, Meta(gt=0, le=1)] | None = None
    drop_contaminated: bool = False
    compat: Literal["kiln"] | None = None
    template: NonEmpty = "model"
    tools: Literal["auto", "native", "system"] = "auto"
    system_turn: Literal["keep", "fold"] = "keep"
    invalid_row_policy: Literal["fail", "skip"] = "fail"
    max_tokens: Annotated[int, Meta(ge=2)] | None = None
    control_tokens: Literal["text", "reject"] = "text"
    unknown_markers: Literal["refuse", "text"] = "refuse"
    date: Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")] | None = None

    def faults(self) -> Iterable[CrossFault]:
        if self.file is not None and self.dataset is not None:
            yield CrossFault(("file", "dataset"), "file and dataset exclude each other")
        if self.dataset == "corrections:active" and self.dataset_split != "train":
            yield CrossFault(
                ("dataset_split", "dataset"),
                f"dataset_split = {self.dataset_split!r} is for a named data set; corrections have no splits",
            )
        for name, given in (("near_threshold", self.near_threshold), ("drop_contaminated", self.drop_contaminated)):
            if given and not self.held_out:
                yield CrossFault((name, "held_out"), f"{name} = {given} is about held_out, which names no rows")
        if self.dataset is not None and (self.map or self.source != "auto"):
            yield CrossFault(
                ("dataset", "map", "source"),
                f"dataset = {printable(self.dataset)!r} has rows of one shape; leave map and source",
            )
        if self.map and self.source != "auto":
            yield CrossFault(("map", "source"), f"map and source = {self.source!r} exclude each other")
        if self.compat is not None and (self.map or self.source not in ("auto", "messages")):
            yield CrossFault(("compat", "map", "source"), "compat reads rows of messages alone")
        if self.kind == "opd":
            yield from self._scored_faults()
        if self.compat is not None and self.tools == "native":
            yield CrossFault(("compat", "tools"), "compat has no field for tools; leave out tools = 'native'")

    def _scored_faults(self) -> Iterable[CrossFault]:
        """What a scored corpus, which has one shape and is admitted whole, has no use for."""
        for name, only in (
            ("dataset", None),
            ("source", "auto"),
            ("map", {}),
            ("strict", False),
            ("compat", None),
            ("invalid_row_policy", "fail"),
            ("held_out", []),
        ):
            if (found := getattr(self, name)) != only:
                yield CrossFault((name, "kind"), f"{name} = {found!r} is not for kind = 'opd': {SCORED_WHOLE}")


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """One of torch's optimizers. Only the fields of its kind may be given."""

    kind: Literal["muon", "adam_w", "sgd"] = "muon"
    momentum: Fraction | None = None
    nesterov: bool | None = None
    ns_iters: Annotated[int, Meta(ge=1, le=20)] | None = None
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    eps: Positive | None = None
    weight_decay: NotNegative | None = None

    SHORT_FOR: ClassVar[str | None] = "kind"
    DEFAULTS: ClassVar[dict[str, dict[str, Any]]] = {
        "muon": {"momentum": 0.95, "nesterov": True, "ns_iters": 5, "weight_decay": 0.0},
        "adam_w": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0},
        "sgd": {},
    }

    def resolved(self) -> dict[str, Any]:
        """The hyper-parameters of this kind, defaults filled in."""
        given = {name: getattr(self, name) for name in self.DEFAULTS[self.kind]}
        return {name: self.DEFAULTS[self.kind][name] if value is None else value for name, value in given.items()}

    def faults(self) -> Iterable[CrossFault]:
        for field in msgspec.structs.fields(self):
            name = field.name
            if name != "kind" and getattr(self, name) is not None and name not in self.DEFAULTS[self.kind]:
                allowed = ", ".join(self.DEFAULTS[self.kind]) or "no fields"
                yield CrossFault(
                    (name, "kind"), f"{name} is no field of optimizer kind {self.kind!r} (it has: {allowed})"
                )


class TrainConfig(Section, frozen=True, kw_only=True):
    """Profile ``native_online_lora_v1``: one conversation, one step, a constant rate. Everything else is refused."""

    profile: Literal["native_online_lora_v1"] = "native_online_lora_v1"
    adapter: NonEmpty = "adapter"
    loss: NonEmpty = "cross_entropy"
    epochs: Count = 3
    learning_rate: Positive | None = None
    lora_rank: Count = 16
    lora_alpha: Positive = 32.0
    allow_high_lora_scale: bool = False
    target_modules: Annotated[list[NonEmpty], Meta(min_length=1)] | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_interval: Count | None = None
    heldout_interval: Count | None = None
    base_adapter: NotBlank | None = None
    adapter_smoke_test: bool = False
    adapter_smoke_prompts: Annotated[list[NotBlank], Meta(min_length=1)] | None = None
    detect_anomaly: bool = False
    grad_checkpoint_segments: Count | None = None
    allow_adapter_shape_conversion: bool = False
    auto_load: bool = False
    train_mtp: bool | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    threads: Count | None = None

    DEFAULT_RATES: ClassVar[dict[str, float]] = {"muon": 1e-3, "adam_w": 1e-4, "sgd": 1e-4}
    TEACHER_RATES: ClassVar[dict[str, float]] = {"muon": 2e-3, "adam_w": 1e-5, "sgd": 1e-5}  # of loss teacher_top_k
    ODD_RATE: ClassVar[float] = 50.0  # times the default, or the default divided by it: outside, a rate is warned of
    MUON_RANKS: ClassVar[dict[str, tuple[int, float]]] = {"cpu": (2, math.inf), "cuda": (2, 48)}
    SMOKE_PROMPTS: ClassVar[tuple[str, ...]] = (
        "The capital of France is",
        "Two plus two is",
        "Write a short greeting:",
    )
    # Keys of the public server that have one value here: the other one would ask for what kiln never does.
    ONLY_FALSE: ClassVar[dict[str, str]] = {
        "allow_adapter_shape_conversion": "an adapter is never converted; a base adapter must fit as it is",
        "auto_load": "there is no server here that could load the adapter",
        "train_mtp": "heads for several tokens at once are not trained",
    }

    @property
    def rate(self) -> float:
        return self.default_rate if self.learning_rate is None else self.learning_rate

    @property
    def default_rate(self) -> float:
        rates = self.TEACHER_RATES if self.loss == "teacher_top_k" else self.DEFAULT_RATES
        return rates[self.optimizer.kind]

    @property
    def smoke_prompts(self) -> list[str]:
        """The prompts of the smoke test; none without it."""
        return list(self.adapter_smoke_prompts or self.SMOKE_PROMPTS) if self.adapter_smoke_test else []

    def warnings(self) -> Iterable[str]:
        """What is allowed and unlikely to be meant."""
        default = self.default_rate
        if not default / self.ODD_RATE <= self.rate <= default * self.ODD_RATE:
            yield (
                f"train.learning_rate = {self.rate:g} is {self.rate / default:.3g} times the default {default:g} of "
                f"optimizer kind {self.optimizer.kind!r}"
            )

    def faults(self) -> Iterable[CrossFault]:
        if NAME_PATTERN.match(self.adapter) is None:
            yield CrossFault(
                ("adapter",),
                f"adapter = {printable(self.adapter)!r} is no name (letters, digits, '.', '_', '-'; no leading dot)",
            )
        if not _survives_float32(self.rate):
            yield CrossFault(
                ("learning_rate", "optimizer"), f"learning_rate = {self.rate} is zero or infinite as a 32-bit float"
            )
        yield from self._scale_faults()
        lowest, highest = self.MUON_RANKS[self.device]
        if self.optimizer.kind == "muon" and not lowest <= self.lora_rank <= highest:
            bounds = f"{lowest} or more" if highest == math.inf else f"{lowest} to {highest:g}"
            yield CrossFault(
                ("lora_rank", "optimizer", "device"),
                f"lora_rank = {self.lora_rank} is out of bounds for optimizer kind 'muon' on {self.device} ({bounds})",
            )
        if self.adapter_smoke_prompts is not None and not self.adapter_smoke_test:
            yield CrossFault(
                ("adapter_smoke_prompts", "adapter_smoke_test"),
                "adapter_smoke_prompts is for adapter_smoke_test = true, which is not set",
            )
        for name, reason in self.ONLY_FALSE.items():
            if getattr(self, name):
                yield CrossFault((name,), f"{name} = true is refused: {reason}")

    def _scale_faults(self) -> Iterable[CrossFault]:
        scale = self.lora_alpha / self.lora_rank
        if scale > 2.0 and not self.allow_high_lora_scale:
            yield CrossFault(
                ("lora_alpha", "lora_rank"),
                f"lora_alpha / lora_rank = {scale:g} is above 2 (allow_high_lora_scale = true permits it)",
            )
        elif not _survives_float32(scale):
            yield CrossFault(
                ("lora_alpha", "lora_rank"),
                f"lora_alpha / lora_rank = {scale:g} is zero or infinite as a 32-bit float",
            )


def _survives_float32(value: float) -> bool:
    """Whether a positive number is still above zero and finite when it is rounded to 32 bits."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0]) > 0
    except OverflowError:
        return False


class RunConfig(Section, frozen=True, kw_only=True):
    schema: Literal["kiln.config.v1"]
    base_dir: NonEmpty | None = None
    project: ProjectConfig = ProjectConfig()
    model: ModelConfig = ModelConfig()
    datasets: list[DatasetConfig] = []
    data: DataConfig = DataConfig()
    admit: AdmitConfig = AdmitConfig()
    distill: DistillConfig = DistillConfig()
    train: TrainConfig = TrainConfig()

    def faults(self) -> Iterable[CrossFault]:
        languages = [dataset.language for dataset in self.datasets]
        for language in sorted({name for name in languages if languages.count(name) > 1}):
            yield CrossFault(("datasets",), f"datasets: language {language!r} stands more than once")
        roots = [dataset.language for dataset in self.datasets if dataset.source_id_column is None]
        if self.datasets and len(roots) != 1:
            found = f"{len(roots)} ({', '.join(roots)})" if roots else "none"
            yield CrossFault(
                ("datasets",), f"datasets: one source must be without source_id_column (the root), found {found}"
            )


Options = Mapping[str, Mapping[str, Any]]


class Overrides(NamedTuple):
    """What the command line lays over a config: ``--set`` texts, and settings by section."""

    assignments: Iterable[str]
    options: Options


class LoadedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A checked config and the directory that its relative paths count from.

    ``examples``: rows that a request brings along in place of a file (``request_form.py``), parsed and not looked at.
    """

    run: RunConfig
    base_dir: Path
    path: Path | None = None
    examples: list[Any] | None = None

    def resolve(self, path: str) -> Path:
        return Path(os.path.normpath(self.base_dir / path))

    def counted_from_base(self, path: Path) -> str:
        """A path of the command line, which counts from the working directory, as this config would write it."""
        if path.is_absolute() or self.base_dir == Path():
            return str(path)
        return os.path.relpath(path, self.base_dir)

    def replace(self, section: str, **settings: Any) -> LoadedConfig:
        """The same config with other settings in one section."""
        changed = msgspec.structs.replace(getattr(self.run, section), **settings)
        return msgspec.structs.replace(self, run=msgspec.structs.replace(self.run, **{section: changed}))

    def sha256(self, *sections: str) -> str:
        """Digest of what a stage reads of the config: a change elsewhere changes nothing for it."""
        value = msgspec.to_builtins(self.run)
        return domain_json_sha256(Domain.CONFIG, {name: value[name] for name in sections})

    def model_dir(self) -> Path:
        """Raises KilnError KLN203 where the config names no model."""
        if self.run.model.path is None:
            raise KilnError("KLN203", "[model] path is missing", hint="name a Hugging Face model directory there")
        return self.resolve(self.run.model.path)

    def resolved_toml(self, run: Path) -> bytes:
        """The config with every default written out, as a config that works from the run directory."""
        value = without_none(msgspec.to_builtins(self.run))
        value["base_dir"] = Path(os.path.relpath(self.base_dir.resolve(), run.resolve())).as_posix()
        return tomli_w.dumps(value).encode("utf-8")


def load_config(path: Path | None, assignments: Iterable[str] = (), options: Options | None = None) -> LoadedConfig:
    """Reads and checks a config, or a request in its place; None: a config with nothing in it, whose paths count from
    the working directory.

    ``assignments`` are ``section.key=value`` texts that override it; ``options``, settings by section, override both.
    Raises KilnError KLN202 where the file is no config at all, KLN203 with every fault that it has, and KLN211 for a
    request of a kind that is not built.
    """
    overrides = Overrides(assignments, options or {})
    if path is None:
        return _load_nothing(overrides)
    text = read_text(path)
    value = parse_table(path, text)
    if path.suffix == ".json" and is_request(value):
        return _load_request(path, text, value, overrides)
    if (found := value.get("schema")) != SCHEMA:
        raise KilnError(
            "KLN202",
            f"{printable(path)} has schema {printable(repr(found))}, expected {SCHEMA!r}",
            hint=f'begin the file with schema = "{SCHEMA}"; a JSON file may be a request with dataset_path instead',
        )
    if path.suffix == ".json":
        _read_seed(value)
    faults: list[str] = []
    run = _overridden(value, overrides, faults)
    if faults or run is None:
        raise faulty(path, text, faults)
    base = path.parent if run.base_dir is None else path.parent / run.base_dir
    return LoadedConfig(run=msgspec.structs.replace(run, base_dir=None), base_dir=base, path=path)


def _read_seed(value: dict[str, Any]) -> None:
    """A JSON config may write its seed as decimal text, since 64 bits are more than a reader's double holds."""
    project = value.get("project")
    if isinstance(project, dict) and "seed" in project:
        project["seed"] = from_decimal(project["seed"])


def _load_nothing(overrides: Overrides) -> LoadedConfig:
    faults: list[str] = []
    run = _overridden({"schema": SCHEMA}, overrides, faults)
    if faults or run is None:
        raise faulty(Path("the command line"), "", faults)
    return LoadedConfig(run=run, base_dir=Path())


def _load_request(path: Path, text: str, value: dict[str, Any], overrides: Overrides) -> LoadedConfig:
    request = read_request(value, REFUSED_KEYS)
    faults = request.faults
    run = _overridden({"schema": SCHEMA, **request.settings}, overrides, faults)
    if not faults and run is not None and request.examples is not None:
        given = [name for name in ("file", "dataset") if getattr(run.admit, name) is not None]
        faults += [f"examples and admit.{name} exclude each other" for name in given]
    if faults or run is None:
        raise faulty(path, text, [in_request_terms(fault) for fault in faults])
    for key, reason in request.ignored.items():
        terminal.warn(f"{printable(path)}: {printable(key)} is ignored: {reason}")
    return LoadedConfig(run=run, base_dir=path.parent, path=path, examples=request.examples)


def _overridden(value: dict[str, Any], overrides: Overrides, faults: list[str]) -> RunConfig | None:
    for assignment in overrides.assignments:
        assign(value, assignment)
    for section, settings in overrides.options.items():
        table = value.setdefault(section, {}) if settings else None
        if isinstance(table, dict):  # else decoding names the fault
            table.update(settings)
    fill_in_distillation(value)
    return decode(RunConfig, value, REFUSED_KEYS, faults)


def fill_in_distillation(value: dict[str, Any]) -> None:
    """Where the rows are scored ones, ``[train]`` keys that are left out have other defaults than for conversations."""
    admit, distill, train = (value.get(name, {}) for name in ("admit", "distill", "train"))
    if not all(isinstance(table, dict) for table in (admit, distill, train)):
        return  # decoding names the fault
    if admit.get("kind") == "opd" or (distill.get("teacher") is not None and admit.get("kind", "auto") == "auto"):
        given = {key: item for key, item in train.items() if item is not None}
        value["train"] = {**DISTILLATION_DEFAULTS, **given}


def faulty(path: Path, text: str, faults: list[str], keys_in: str = "docs/config.md") -> KilnError:
    """The error that lists every fault with its place."""
    located = [f"  {place(path, text, fault)} {fault}" for fault in faults]
    return KilnError(
        "KLN203",
        f"{printable(path)} has {counted(len(faults), 'fault', 'faults')}:\n" + "\n".join(located),
        hint=f"mend each line above; {keys_in} lists every key",
        details={"faults": faults},
    )


def read_text(path: Path) -> str:
    """A config's text. Raises KilnError KLN202 where it is no UTF-8, KLN204 or KLN206 as :func:`read_bounded` does."""
    data = read_bounded(path, SIZE_LIMIT)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KilnError("KLN202", f"{printable(path)} is no UTF-8: {error.reason} at byte {error.start}") from None


def parse_table(path: Path, text: str) -> dict[str, Any]:
    """TOML, or JSON where the name says so; what is no table is an empty one. Raises KilnError KLN202."""
    try:
        value = strict_json.plain(strict_json.parse(text.encode())) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise KilnError(
            "KLN202", f"{printable(path)} cannot be parsed: {printable(error)}", hint="mend the syntax at that place"
        ) from None
    return value if isinstance(value, dict) else {}
