"""The requests that the public Kiln server takes, read as a run config: a training on conversations (SFT), or
off-policy distillation (OPD).

A request is a JSON file without ``schema``: one source of rows at its top, the settings under ``config``. Each key
stands for one key of the config (``docs/config.md``, *the request form*). A request for SFT takes nothing else; in one
for distillation, which has a ``teacher``, the server passes over unknown keys, and they are warned of here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kiln_cli.sections import unknown_key
from kiln_cli.strict_json import type_name
from kiln_cli.text import printable

# For each key of a request the key of the config, both dotted.
KEYS = {
    "dataset_path": "admit.file",
    "dataset": "admit.dataset",
    "dataset_split": "admit.dataset_split",
    "config.invalid_row_policy": "admit.invalid_row_policy",
    "config.training_profile": "train.profile",
    "config.output_name": "train.adapter",
    "config.epochs": "train.epochs",
    "config.learning_rate": "train.learning_rate",
    "config.lora_rank": "train.lora_rank",
    "config.lora_alpha": "train.lora_alpha",
    "config.allow_high_lora_scale": "train.allow_high_lora_scale",
    "config.optimizer": "train.optimizer",
    "config.checkpoint_interval": "train.checkpoint_interval",
    "config.base_adapter": "train.base_adapter",
    "config.adapter_smoke_test": "train.adapter_smoke_test",
    "config.adapter_smoke_prompts": "train.adapter_smoke_prompts",
    "config.detect_anomaly": "train.detect_anomaly",
    "config.grad_checkpoint_segments": "train.grad_checkpoint_segments",
    "config.allow_adapter_shape_conversion": "train.allow_adapter_shape_conversion",
    "config.auto_load": "train.auto_load",
    "config.train_mtp": "train.train_mtp",
    "config.seed": "project.seed",
}
# The same for distillation.
DISTILL_KEYS = {
    "dataset_path": "admit.file",
    "teacher": "distill.teacher",
    "config.training_mode": "distill.training_mode",
    "config.objective": "distill.objective",
    "config.loss": "distill.loss",
    "config.top_k": "distill.top_k",
    "config.echo": "distill.echo",
    "config.samples_per_prompt": "distill.samples_per_prompt",
    "config.temperature": "distill.temperature",
    "config.top_p": "distill.top_p",
    "config.max_tokens": "distill.max_tokens",
    "config.sampler_segments": "distill.sampler_segments",
    "config.rollout_prompt_rendering": "distill.rollout_prompt_rendering",
    "config.stable_opd": "distill.stable_opd",
    "config.discount": "distill.discount",
    "config.clip_epsilon": "distill.clip_epsilon",
    "config.max_cost_usd": "distill.max_cost_usd",
    **{
        key: KEYS[key]
        for key in (
            "config.output_name",
            "config.epochs",
            "config.learning_rate",
            "config.lora_rank",
            "config.lora_alpha",
            "config.allow_high_lora_scale",
            "config.optimizer",
            "config.checkpoint_interval",
            "config.base_adapter",
            "config.detect_anomaly",
            "config.grad_checkpoint_segments",
            "config.auto_load",
            "config.seed",
        )
    },
}
# Of the keys that this version refuses, those that only a request has. ``refused_keys.py`` has the others.
REFUSED = {
    "post_eval": "not built in this version",
    "prompts": "distillation on answers that the student samples (on-policy) is not built in this version",
}
_SOURCES = ("examples", "dataset_path", "dataset")
_OF_ROWS = ("dataset_path", "dataset", "dataset_split")
_TOP = (*_SOURCES, "dataset_split", "config")
# Keys whose default the server writes as null.
_NULLABLE = (
    *_SOURCES,
    "dataset_split",
    "prompts",
    "post_eval",
    "output_name",
    "learning_rate",
    "seed",
    "checkpoint_interval",
    "resume_checkpoint",
    "base_adapter",
    "train_mtp",
    "grad_checkpoint_segments",
    "adapter_smoke_prompts",
    "echo",
    "sampler_segments",
    "max_cost_usd",
)
# What tells a request for distillation from one for SFT.
_OF_OPD = ("teacher", "training_mode", "objective", "top_k")
_EVIDENCE = "it is kiln that writes what was admitted"
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``settings``: the tables of a config. ``examples``: rows that the request brings along, of any JSON type.
    ``faults``: what is wrong with the request itself. ``ignored``: keys that change nothing, each with the reason."""

    settings: dict[str, Any]
    examples: list[Any] | None
    faults: list[str]
    ignored: dict[str, str]


class _Reading:
    """A request as it is read: keys are taken one by one, and what is found is gathered."""

    def __init__(self, keys: Mapping[str, str], refused: Mapping[str, str], *, tolerant: bool) -> None:
        self._keys = keys
        self._refused = {**refused, **REFUSED}
        self._tolerant = tolerant
        self.settings: dict[str, Any] = {}
        self.faults: list[str] = []
        self.ignored: dict[str, str] = {}

    def take(self, key: str, value: object) -> None:
        """A key of the request, dotted, that stands for one of the config."""
        table, _, name = self._keys[key].partition(".")
        self.settings.setdefault(table, {})[name] = from_decimal(value) if key == "config.seed" else value

    def look_at(self, table: Mapping[str, Any], known: Iterable[str], at: str) -> list[str]:
        """The known keys of ``table`` that say something; the others become faults, or are ignored where that is the
        request's way. A default written as null says nothing, and evidence is not the sender's to write."""
        found = []
        names = list(known)
        for key, item in table.items():
            path = f"{at}.{key}" if at else key
            if key == "ingestion":
                self.ignored[path] = _EVIDENCE
            elif item is None and key in _NULLABLE:
                continue
            elif key in names:
                found.append(key)
            elif self._tolerant and key not in self._refused:
                self.ignored[path] = "it" + unknown_key(key, names, at, {}).removeprefix(printable(path))
            else:
                self.faults.append(unknown_key(key, names, at, self._refused))
        return found

    def read_config(self, config: object) -> None:
        if not isinstance(config, dict):
            self.faults.append(f"config must be an object, found {type_name(config)}")
            return
        known = [key.removeprefix("config.") for key in self._keys if key.startswith("config.")]
        for key in self.look_at(config, known, "config"):
            self.take(f"config.{key}", config[key])

    def request(self, examples: list[Any] | None = None) -> Request:
        return Request(settings=self.settings, examples=examples, faults=self.faults, ignored=self.ignored)


def is_request(value: Mapping[str, Any]) -> bool:
    return "schema" not in value and any(key in value for key in (*_TOP, "teacher"))


def read_request(value: Mapping[str, Any], refused: Mapping[str, str]) -> Request:
    """The config that a request stands for; ``refused`` as for ``sections.decode``."""
    tables = (value, value.get("config"))
    distils = any(key in table for table in tables if isinstance(table, dict) for key in _OF_OPD)
    return _read_distillation(value, refused) if distils else _read_sft(value, refused)


def read_config(config: object, refused: Mapping[str, str], *, distils: bool = False) -> Request:
    """What stands under ``config`` of a request for SFT or distillation, alone: the rows come from elsewhere.

    An unknown key is a fault in either.
    """
    reading = _Reading(DISTILL_KEYS if distils else KEYS, refused, tolerant=False)
    if distils:
        _begin_distillation(reading)
    reading.read_config(config)
    return reading.request()


def _read_sft(value: Mapping[str, Any], refused: Mapping[str, str]) -> Request:
    reading = _Reading(KEYS, refused, tolerant=False)
    reading.look_at(value, _TOP, "")
    given = [key for key in _SOURCES if value.get(key) is not None]
    if len(given) != 1:
        reading.faults.append(f"{' or '.join(_SOURCES)}: one must be given, found {' and '.join(given) or 'none'}")
    examples = value.get("examples")
    if examples is not None and not isinstance(examples, list):
        reading.faults.append(f"examples must be an array of rows, found {type_name(examples)}")
    if value.get("dataset_split") is not None and value.get("dataset") is None:
        reading.faults.append("dataset_split is for dataset, which is not given")
    for key in _OF_ROWS:
        if value.get(key) is not None:
            reading.take(key, value[key])
    reading.read_config(value.get("config", {}))
    return reading.request(examples)


def _read_distillation(value: Mapping[str, Any], refused: Mapping[str, str]) -> Request:
    reading = _Reading(DISTILL_KEYS, refused, tolerant=True)
    for key in reading.look_at(value, ("dataset_path", "teacher", "config"), ""):
        if key != "config":
            reading.take(key, value[key])
    for key in ("dataset_path", "teacher"):
        if value.get(key) is None:
            reading.faults.append(f"{key} is missing")
    _begin_distillation(reading)
    reading.read_config(value.get("config", {}))
    return reading.request()


def _begin_distillation(reading: _Reading) -> None:
    """The server's default mode is the one that is not built here, so the mode must be said."""
    reading.settings.setdefault("admit", {})["kind"] = "opd"
    reading.settings.setdefault("distill", {})["training_mode"] = "on_policy"


def from_decimal(value: object) -> object:
    """Seeds are written as decimal text, since 64 bits are more than a double holds; other values pass as they are."""
    return int(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value


def in_request_terms(fault: str, keys: Mapping[str, str] = KEYS | DISTILL_KEYS) -> str:
    """A fault of the config that was made of a request, with the request's key in front."""
    for theirs, ours in keys.items():
        if re.match(rf"{re.escape(ours)}(?![a-z_])", fault):
            return theirs + fault.removeprefix(ours)
    return fault
