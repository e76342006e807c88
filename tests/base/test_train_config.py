"""Every setting of profile native_online_lora_v1 (train.md, section 3): default, what is allowed, what is refused.

The tables below were written from the contract's, not from the code. Values are TOML.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from tests_support import shared_path

from kiln_cli.config import LoadedConfig, OptimizerConfig, TrainConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.refused_keys import REFUSED_KEYS
from kiln_cli.request_form import KEYS, REFUSED

Load = Callable[..., LoadedConfig]


class Setting(NamedTuple):
    """A setting of the contract. ``key``: ours, where it has another name. Each value may need others beside it."""

    default: Any
    allowed: list[str]
    refused: list[str]
    key: str = ""
    table: str = "train"


SETTINGS = {
    "training_profile": Setting(
        "native_online_lora_v1",
        ['"native_online_lora_v1"'],
        ['"batched_lora_v1"', '"native_online_lora_v2"', '""', "1"],
        key="profile",
    ),
    "invalid_row_policy": Setting("fail", ['"fail"', '"skip"'], ['"Skip"', '""', "true", "0"], table="admit"),
    "epochs": Setting(3, ["1", "1000000"], ["0", "-1", "1.0", '"3"', "true"]),
    "learning_rate": Setting(
        None,
        ["1e-3", "1", "1e-40", "7.1e-46", "3.4028235e38"],
        ["0.0", "-1e-3", "nan", "inf", "-inf", "7.0e-46", "3.4028236e38", "1e39", '"0.1"', "true"],
    ),
    "lora_rank": Setting(16, ["16", "2", "48", "1000"], ["0", "-1", "16.0", '"16"', "true"]),
    "lora_alpha": Setting(32.0, ["32.0", "32", "0.5", "1e-30"], ["0.0", "-1.0", "32.1", "nan", "inf", "1e-50", '"32"']),
    "allow_high_lora_scale": Setting(False, ["true", "false"], ["1", '"true"']),
    "optimizer": Setting(
        OptimizerConfig(kind="muon"),
        ['"muon"', '"adam_w"', '"sgd"', '{kind = "sgd"}', "{}"],
        ['"adamw"', '"Muon"', '""', "1", "{kind = 1}", '{name = "sgd"}'],
    ),
    "seed": Setting(42, ["0", "18446744073709551615"], ["-1", "18446744073709551616", "1.0", "true"], table="project"),
    "checkpoint_interval": Setting(None, ["1", "25"], ["0", "-1", "2.0", "true"]),
    "resume_checkpoint": Setting(None, [], ['"latest"', '""']),
    "output_name": Setting(
        "adapter", ['"support-bot"', '"a.b_c-1"'], ['""', '" "', '".hidden"', '"../x"', '"a/b"', "1"], key="adapter"
    ),
    "detect_anomaly": Setting(False, ["true", "false"], ["1", '"true"']),
    "grad_checkpoint_segments": Setting(None, ["1", "12"], ["0", "-1", "2.0", "true"]),
    "base_adapter": Setting(None, ['"../runs/one/train/adapter"', '"x"'], ['""', '" "', '"\\t\\n"', "1", "true"]),
    "adapter_smoke_test": Setting(False, ["true", "false"], ["1", '"true"']),
    "adapter_smoke_prompts": Setting(None, ['["a"]', '["a", "b b"]'], ["[]", '[""]', '["a", " "]', '"a"', "[1]"]),
    "allow_adapter_shape_conversion": Setting(False, ["false"], ["true", "0", '"no"']),
    "auto_load": Setting(False, ["false"], ["true", "0"]),
    "train_mtp": Setting(None, ["false"], ["true", "0"]),
}

OPTIMIZERS: dict[tuple[str, str], Setting] = {
    ("muon", "momentum"): Setting(0.95, ["0.0", "0.999"], ["1.0", "-0.1", "nan", '"x"']),
    ("muon", "nesterov"): Setting(True, ["true", "false"], ["1"]),
    ("muon", "ns_iters"): Setting(5, ["1", "20"], ["0", "21", "5.0"]),
    ("muon", "weight_decay"): Setting(0.0, ["0.0", "0.1", "2.0"], ["-0.1", "inf", "nan"]),
    ("adam_w", "beta1"): Setting(0.9, ["0.0", "0.999"], ["1.0", "-0.1", "nan"]),
    ("adam_w", "beta2"): Setting(0.999, ["0.0", "0.9999"], ["1.0", "-0.1", "nan"]),
    ("adam_w", "eps"): Setting(1e-8, ["1e-30", "1.0"], ["0.0", "-1e-8", "inf", "nan"]),
    ("adam_w", "weight_decay"): Setting(0.0, ["0.0", "0.1"], ["-0.1", "inf", "nan"]),
}
# What some settings need beside them: the default alpha would be too much for rank 2, and prompts are for the test.
BESIDE = {"lora_rank": ["lora_alpha = 4.0"], "adapter_smoke_prompts": ["adapter_smoke_test = true"]}
FIELDS = {"momentum", "nesterov", "ns_iters", "beta1", "beta2", "eps", "weight_decay"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def loads(*lines: str) -> LoadedConfig:
        path = tmp_path / "kiln.toml"
        path.write_text("\n".join(('schema = "kiln.config.v1"', *lines)) + "\n", encoding="utf-8")
        return load_config(path)

    return loads


@pytest.fixture
def refuse(load: Load) -> Callable[..., list[str]]:
    """The faults of a config that must have some."""

    def refuses(*lines: str) -> list[str]:
        with pytest.raises(KilnError) as caught:
            load(*lines)
        assert (caught.value.code, caught.value.exit_code) == ("KLN203", 2)
        assert isinstance(caught.value.details, dict)
        found: list[str] = caught.value.details["faults"]
        return found

    return refuses


def lines_of(name: str, value: str) -> list[str]:
    setting = SETTINGS[name]
    return [f"[{setting.table}]", f"{setting.key or name} = {value}", *BESIDE.get(name, ())]


def contract_names() -> list[str]:
    text = shared_path("contracts/train.md").read_text().split("## 4.")[0]
    listed = re.findall(r"^\| ([a-z_ /,]+) \|", text, re.MULTILINE)
    return [name for cell in listed for name in re.findall(r"[a-z_]+", cell)]


def test_the_table_has_every_setting_of_the_contract() -> None:
    not_built = {key for key, reason in REFUSED_KEYS.items() if reason == "not built in this version"}
    assert set(contract_names()) - not_built == set(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_defaults(name: str, load: Load) -> None:
    setting = SETTINGS[name]
    assert getattr(getattr(load().run, setting.table), setting.key or name, None) == setting.default


@pytest.mark.parametrize("name, value", [(name, value) for name, one in SETTINGS.items() for value in one.allowed])
def test_allowed_values(name: str, value: str, load: Load) -> None:
    run = load(*lines_of(name, value)).run
    setting = SETTINGS[name]
    found = getattr(getattr(run, setting.table), setting.key or name)
    if isinstance(found, OptimizerConfig):
        assert found.kind in value or value == "{}"
    else:
        assert found == load_value(value)


@pytest.mark.parametrize("name, value", [(name, value) for name, one in SETTINGS.items() for value in one.refused])
def test_refused_values(name: str, value: str, refuse: Callable[..., list[str]]) -> None:
    (fault,) = refuse(*lines_of(name, value))
    setting = SETTINGS[name]
    assert fault.startswith(f"{setting.table}.{setting.key or name}")


@pytest.mark.parametrize("kind", ["muon", "adam_w", "sgd"])
def test_the_optimizers_have_the_contracts_fields_and_no_others(
    kind: str, load: Load, refuse: Callable[..., list[str]]
) -> None:
    own = {field for owner, field in OPTIMIZERS if owner == kind}
    defaults = {field: OPTIMIZERS[kind, field].default for field in own}
    assert load("[train]", f'optimizer = "{kind}"').run.train.optimizer.resolved() == defaults
    for field in FIELDS - own:
        (fault,) = refuse("[train.optimizer]", f'kind = "{kind}"', f"{field} = {'true' if field == 'nesterov' else 1}")
        assert fault.startswith(f"train.optimizer.{field}")
    assert refuse("[train.optimizer]", f'kind = "{kind}"', "amsgrad = true") == ["train.optimizer.amsgrad is no key"]


@pytest.mark.parametrize("kind, field", OPTIMIZERS)
def test_bounds_of_the_optimizers(kind: str, field: str, load: Load, refuse: Callable[..., list[str]]) -> None:
    setting = OPTIMIZERS[kind, field]
    for value in setting.allowed:
        found = load("[train.optimizer]", f'kind = "{kind}"', f"{field} = {value}").run.train.optimizer
        assert found.resolved()[field] == load_value(value)
    for value in setting.refused:
        (fault,) = refuse("[train.optimizer]", f'kind = "{kind}"', f"{field} = {value}")
        assert fault.startswith(f"train.optimizer.{field}"), value


@pytest.mark.parametrize(
    "device, kind, rank, allowed",
    [
        ("cpu", "muon", 1, False),
        ("cpu", "muon", 2, True),
        ("cpu", "muon", 49, True),
        ("cuda", "muon", 1, False),
        ("cuda", "muon", 2, True),
        ("cuda", "muon", 48, True),
        ("cuda", "muon", 49, False),
        ("cuda", "adam_w", 49, True),
        ("cpu", "adam_w", 1, True),
        ("cuda", "sgd", 1, True),
    ],
)
def test_muon_has_bounds_of_rank_by_device(
    device: str, kind: str, rank: int, allowed: bool, load: Load, refuse: Callable[..., list[str]]
) -> None:
    lines = ["[train]", f'device = "{device}"', f'optimizer = "{kind}"', f"lora_rank = {rank}", "lora_alpha = 1.0"]
    if allowed:
        assert load(*lines).run.train.lora_rank == rank
        return
    (fault,) = refuse(*lines)
    assert fault.startswith(f"train.lora_rank = {rank} is out of bounds")


@pytest.mark.parametrize("kind, rate", [("muon", 1e-3), ("adam_w", 1e-4), ("sgd", 1e-4)])
def test_the_default_rate_is_the_optimizers(kind: str, rate: float, load: Load) -> None:
    assert load("[train]", f'optimizer = "{kind}"').run.train.rate == rate


@pytest.mark.parametrize("kind, default", [("muon", 1e-3), ("adam_w", 1e-4), ("sgd", 1e-4)])
def test_only_a_rate_beyond_fifty_times_is_warned_of(kind: str, default: float, load: Load) -> None:
    for factor, warned in ((1, False), (50, False), (1 / 50, False), (50.01, True), (1 / 50.01, True)):
        train = load("[train]", f'optimizer = "{kind}"', f"learning_rate = {default * factor!r}").run.train
        assert bool(list(train.warnings())) == warned, factor
    assert not list(load("[train]", f'optimizer = "{kind}"').run.train.warnings())


def test_the_scale_of_an_adapter_is_capped_unless_allowed(load: Load, refuse: Callable[..., list[str]]) -> None:
    assert load("[train]", "lora_rank = 7", "lora_alpha = 14").run.train.lora_alpha == 14
    (fault,) = refuse("[train]", "lora_rank = 7", "lora_alpha = 14.01")
    assert "is above 2" in fault and "allow_high_lora_scale" in fault
    allowed = load("[train]", "lora_rank = 7", "lora_alpha = 1400.0", "allow_high_lora_scale = true").run.train
    assert allowed.lora_alpha / allowed.lora_rank == 200
    (fault,) = refuse("[train]", "lora_alpha = 1e300", "allow_high_lora_scale = true")
    assert "infinite as a 32-bit float" in fault


def test_prompts_are_for_the_smoke_test(load: Load, refuse: Callable[..., list[str]]) -> None:
    for other in ("", "adapter_smoke_test = false"):
        (fault,) = refuse("[train]", 'adapter_smoke_prompts = ["a"]', other)
        assert fault.startswith("train.adapter_smoke_prompts is for adapter_smoke_test = true")
    assert load().run.train.smoke_prompts == []
    built_in = load("[train]", "adapter_smoke_test = true").run.train.smoke_prompts
    assert len(built_in) == 3 and all(prompt.strip() for prompt in built_in)
    given = load("[train]", "adapter_smoke_test = true", 'adapter_smoke_prompts = ["a", "b"]').run.train.smoke_prompts
    assert given == ["a", "b"]


def test_seeds_are_decimal_text_in_json(tmp_path: Path) -> None:
    path = tmp_path / "kiln.json"
    for seed in ("18446744073709551615", 7):
        path.write_text(json.dumps({"schema": "kiln.config.v1", "project": {"seed": seed}}))
        assert load_config(path).run.project.seed == int(seed)
    for seed in ("18446744073709551616", "07", " 7", "x"):
        path.write_text(json.dumps({"schema": "kiln.config.v1", "project": {"seed": seed}}))
        with pytest.raises(KilnError, match=r"project\.seed = "):
            load_config(path)


def test_every_key_of_train_is_one_of_the_contract_or_ours() -> None:
    """A setting that slips in must be looked at here."""
    ours = {"loss", "target_modules", "heldout_interval", "dtype", "device", "threads"}
    keys = {field.name for field in msgspec.structs.fields(TrainConfig)}
    listed = {one.key or name for name, one in SETTINGS.items() if one.table == "train"}
    assert keys == ours | listed - {"resume_checkpoint"}


def test_every_setting_of_the_contract_has_an_answer_in_a_request() -> None:
    """The server's form: a key is read, or refused by name; none is no key at all."""
    for name in contract_names():
        assert f"config.{name}" in KEYS or name in REFUSED or name in REFUSED_KEYS, name


def load_value(text: str) -> Any:
    return tomllib.loads(f"x = {text}")["x"]
