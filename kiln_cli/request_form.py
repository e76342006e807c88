"""The request that the public Kiln server takes for a training on conversations (SFT), read as a run config.

A request is a JSON file without ``schema``: one source of rows at its top, the settings under ``config``. Each key
stands for one key of the config (``docs/config.md``, *the request form*); nothing else is taken.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from kiln_cli.errors import not_built
from kiln_cli.sections import unknown_key
from kiln_cli.strict_json import type_name

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
# Of the keys that this version refuses, those that only a request has. ``refused_keys.py`` has the others.
REFUSED = {
    "post_eval": "not built in this version",
}
_SOURCES = ("examples", "dataset_path", "dataset")
_OF_ROWS = ("dataset_path", "dataset", "dataset_split")
_TOP = (*_SOURCES, "dataset_split", "config")
# Keys whose default the server writes as null.
_NULLABLE = (
    *_SOURCES,
    "dataset_split",
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
)
# What tells a request for on-policy distillation from one for SFT.
_OF_OPD = ("teacher", "training_mode", "objective", "top_k")
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``settings``: the tables of a config. ``examples``: rows that the request brings along, of any JSON type.
    ``faults``: what is wrong with the request itself. ``ignored``: keys that are the server's to write."""

    settings: dict[str, Any]
    examples: list[Any] | None
    faults: list[str]
    ignored: list[str]


def is_request(value: Mapping[str, Any]) -> bool:
    return "schema" not in value and any(key in value for key in (*_TOP, "teacher"))


def read_request(value: Mapping[str, Any], refused: Mapping[str, str]) -> Request:
    """The config that a request stands for; ``refused`` as for ``sections.decode``.

    Raises KilnError KLN211 for a request that is one for distillation.
    """
    config = value.get("config", {})
    if any(key in table for table in (value, config) if isinstance(table, dict) for key in _OF_OPD):
        raise not_built("on-policy distillation (a request with teacher or training_mode)")
    reasons = {**refused, **REFUSED}
    ignored: list[str] = []
    faults = [unknown_key(key, _TOP, "", reasons) for key in _given(value, "", ignored) if key not in _TOP]
    given = [key for key in _SOURCES if value.get(key) is not None]
    if len(given) != 1:
        faults.append(f"{' or '.join(_SOURCES)}: one must be given, found {' and '.join(given) or 'none'}")
    examples = value.get("examples")
    if examples is not None and not isinstance(examples, list):
        faults.append(f"examples must be an array of rows, found {type_name(examples)}")
    settings: dict[str, Any] = {}
    if value.get("dataset_split") is not None and value.get("dataset") is None:
        faults.append("dataset_split is for dataset, which is not given")
    for key in _OF_ROWS:
        if value.get(key) is not None:
            _set(settings, KEYS[key], value[key])
    if isinstance(config, dict):
        _read_config(config, settings, reasons, faults, ignored)
    else:
        faults.append(f"config must be an object, found {type_name(config)}")
    return Request(settings=settings, examples=examples, faults=faults, ignored=ignored)


def from_decimal(value: object) -> object:
    """Seeds are written as decimal text, since 64 bits are more than a double holds; other values pass as they are."""
    return int(value) if isinstance(value, str) and _DECIMAL.fullmatch(value) else value


def in_request_terms(fault: str) -> str:
    """A fault of the config that was made of a request, with the request's key in front."""
    for theirs, ours in KEYS.items():
        if re.match(rf"{re.escape(ours)}(?![a-z_])", fault):
            return theirs + fault.removeprefix(ours)
    return fault


def _read_config(
    config: Mapping[str, Any],
    settings: dict[str, Any],
    refused: Mapping[str, str],
    faults: list[str],
    ignored: list[str],
) -> None:
    known = [key.removeprefix("config.") for key in KEYS if key.startswith("config.")]
    for key in _given(config, "config.", ignored):
        if key not in known:
            faults.append(unknown_key(key, known, "config", refused))
        elif key == "seed":
            _set(settings, KEYS["config.seed"], from_decimal(config[key]))
        else:
            _set(settings, KEYS[f"config.{key}"], config[key])


def _given(table: Mapping[str, Any], prefix: str, ignored: list[str]) -> list[str]:
    """The keys that say something: neither evidence, which is the server's to write, nor a default written as null."""
    if "ingestion" in table:
        ignored.append(f"{prefix}ingestion")
    return [key for key, item in table.items() if key != "ingestion" and (item is not None or key not in _NULLABLE)]


def _set(settings: dict[str, Any], path: str, value: object) -> None:
    table, _, key = path.partition(".")
    settings.setdefault(table, {})[key] = value
