"""The config: every fault with its place, what is refused by name, and the copy that a run keeps."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.refused_keys import REFUSED_KEYS

HEAD = 'schema = "kiln.config.v1"\n'
SECTIONS = ("project", "model", "datasets", "data", "admit", "train")


@pytest.fixture
def load(make_run: Callable[..., Path]) -> Callable[..., LoadedConfig]:
    """``load(body)``: a config of the head and this text; further arguments are ``--set`` texts."""

    def loads(body: str = "", *assignments: str, name: str = "kiln.toml") -> LoadedConfig:
        root = make_run({name: body if name.endswith(".json") else HEAD + body})
        return load_config(root / name, assignments)

    return loads


@pytest.fixture
def refuse(load: Callable[..., LoadedConfig]) -> Callable[..., KilnError]:
    def refuses(*arguments: str, **options: str) -> KilnError:
        with pytest.raises(KilnError) as caught:
            load(*arguments, **options)
        assert caught.value.exit_code == 2
        return caught.value

    return refuses


def faults(error: KilnError) -> list[str]:
    assert error.code == "KLN203"
    assert isinstance(error.details, dict)
    found: list[str] = error.details["faults"]
    assert len(found) == len(error.message.split("\n")) - 1
    return found


def test_four_faults_are_four_lines(refuse: Callable[..., KilnError]) -> None:
    error = refuse(
        "[data]\n"
        "n_train = 0\n"
        "min_query_chars = 5\n"
        'max_query_chars = "many"\n'
        "\n"
        "[train]\n"
        "epochz = 3\n"
        "\n"
        "[[datasets]]\n"
        'language = "english"\n'
        'path = "rows.jsonl"\n'
    )
    assert len(faults(error)) == 4
    assert "kiln.toml has 4 faults:" in error.message
    lines = [line.strip() for line in error.message.split("\n")[1:]]
    places = {line.split("kiln.toml:")[1].split(":")[0]: line for line in lines}
    assert sorted(places, key=int) == ["3", "5", "8", "11"]
    assert "data.n_train = 0" in places["3"]
    assert "data.max_query_chars = 'many'" in places["5"]
    assert "train.epochz" in places["8"]
    assert "did you mean 'epochs'?" in places["8"]
    assert "datasets[0].language = 'english'" in places["11"]


def test_one_fault_is_called_one(refuse: Callable[..., KilnError]) -> None:
    assert "has 1 fault:" in refuse("[data]\nn_test = -1\n").message


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_what_general_trainers_have_is_refused_by_name(refuse: Callable[..., KilnError], key: str) -> None:
    error = refuse(f"[train]\n{key} = 1\n")
    assert faults(error) == [f"train.{key} is refused: {REFUSED_KEYS[key]}"]
    assert "kiln.toml:3:" in error.message


def test_the_refused_names_cover_what_people_look_for() -> None:
    assert {
        "batch_size",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "lr_scheduler_type",
        "warmup_ratio",
        "max_grad_norm",
        "lora_dropout",
        "packing",
        "max_steps",
        "group_by_length",
        "neftune_noise_alpha",
        "label_smoothing_factor",
        "cutoff_len",
        "sequence_len",
        "use_dora",
        "bf16",
        "gradient_checkpointing",
        "resume_from_checkpoint",
        "report_to",
    } <= set(REFUSED_KEYS)


@pytest.mark.parametrize(
    "body",
    [
        "[project]\nseed = -1\n",
        "[project]\nseed = 18446744073709551616\n",
        "[project]\nseed = true\n",
        '[project]\nname = ""\n',
        '[model]\nid = "/home/me/model"\n',
        '[model]\nid = "../model"\n',
        '[model]\nid = "~/model"\n',
        '[model]\nid = "C:\\\\model"\n',
        "[data]\nn_train = 6.0\n",
        '[data]\nn_train = "6"\n',
        "[data]\nn_train = true\n",
        "[data]\nmin_query_chars = 0\n",
        "[data]\nmin_query_chars = 10\nmax_query_chars = 10\n",
        "[data]\nmax_calls = 0\n",
        "[data]\nmax_calls = 65\n",
        "[admit]\nmax_tokens = 1\n",
        '[admit]\ninvalid_row_policy = "Skip"\n',
        "[admit]\ninvalid_row_policy = true\n",
        '[admit]\ninvalid_row_policy = ""\n',
        '[admit]\ndate = "2024-1-1"\n',
        "[admit]\ndate = 2024-01-01\n",
        '[train]\nprofile = "other"\n',
        "[train]\nepochs = 0\n",
        "[train]\nepochs = 100000000000000000000\n",
        "[train]\nlearning_rate = 0.0\n",
        "[train]\nlearning_rate = nan\n",
        "[train]\nlearning_rate = inf\n",
        "[train]\nlearning_rate = 1e-46\n",
        "[train]\nlora_rank = 4\nlora_alpha = 9\n",
        "[train]\nlora_alpha = inf\nallow_high_lora_scale = true\n",
        "[train]\nlora_rank = 1\nlora_alpha = 1\n",
        '[train]\nadapter = "../x"\n',
        '[train]\nadapter = "a\\u202eb"\n',
        "[train]\ntarget_modules = []\n",
        "[train]\noptimizer = 'lion'\n",
        "[train]\noptimizer = {kind = 'sgd', beta1 = 0.9}\n",
        "[train]\noptimizer = {kind = 'adam_w', beta1 = 1.0}\n",
        "[train]\noptimizer = {kind = 'adam_w', eps = inf}\n",
        "[train]\ncheckpoint_interval = 0\n",
        "[[datasets]]\nlanguage = 'en'\n",
        "[[datasets]]\npath = 'a'\nsource_id_column = 'x'\n",
        "[[datasets]]\npath = 'a'\n[[datasets]]\npath = 'b'\nlanguage = 'fr'\n",
        "data = 5\n",
        "other = 5\n",
    ],
)
def test_bounds(refuse: Callable[..., KilnError], body: str) -> None:
    assert len(faults(refuse(body))) == 1


@pytest.mark.parametrize(
    "body",
    [
        "",
        "[project]\nseed = 18446744073709551615\n",
        "[data]\nmin_query_chars = 9\nmax_query_chars = 10\n",
        '[model]\nid = "HuggingFaceTB/SmolLM2-135M-Instruct"\n',
        "[train]\nlora_rank = 16\nlora_alpha = 32\n",
        "[train]\nlora_rank = 16\nlora_alpha = 64\nallow_high_lora_scale = true\n",
        "[train]\nlora_rank = 1\nlora_alpha = 2\noptimizer = 'sgd'\n",
        "[train]\noptimizer = 'adam_w'\n",
    ],
)
def test_values_at_the_bounds_pass(load: Callable[..., LoadedConfig], body: str) -> None:
    load(body)


def test_defaults(load: Callable[..., LoadedConfig]) -> None:
    run = load().run
    assert (run.project.seed, run.data.n_train, run.data.n_validation, run.data.n_test) == (42, 15000, 1000, 1000)
    assert (run.data.min_query_chars, run.data.max_query_chars, run.data.max_calls) == (10, 2000, 1)
    assert run.admit.invalid_row_policy == "fail"


def test_optimizers_by_name_and_by_table_are_one(load: Callable[..., LoadedConfig]) -> None:
    short = load("[train]\noptimizer = 'adam_w'\n")
    long = load("[train.optimizer]\nkind = 'adam_w'\n")
    assert short.run == long.run
    assert short.run.train.optimizer.resolved() == {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0}
    assert short.run.train.rate == 1e-4
    assert load().run.train.rate == 1e-3


# --- files that are no config


@pytest.mark.parametrize(
    "name, text",
    [
        ("kiln.toml", b""),
        ("kiln.toml", b"schema = \n"),
        ("kiln.toml", b'schema = "kiln.config.v2"\n'),
        ("kiln.toml", b'schema = "kiln.config.v1"\n[data]\n[data]\n'),
        ("kiln.toml", b"\xff"),
        ("kiln.toml", b'schema = "kiln.config.v1"\nx = ' + b"[" * 5000),
        ("kiln.json", b"[]"),
        ("kiln.json", b"{}"),
        ("kiln.json", b'{"schema":"kiln.config.v1",}'),
        ("kiln.json", b'{"schema":"kiln.config.v1","train":{"epochs":1,"epochs":2}}'),
        ("kiln.json", b'{"schema":"kiln.config.v1","train":{"learning_rate":NaN}}'),
        ("kiln.json", b'{"schema":"kiln.config.v1","x":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    ],
)
def test_files_that_are_no_config(make_run: Callable[..., Path], name: str, text: bytes) -> None:
    with pytest.raises(KilnError) as caught:
        load_config(make_run({name: text}) / name)
    assert (caught.value.code, caught.value.exit_code) == ("KLN202", 2)
    assert name in caught.value.message


def test_a_config_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KilnError) as caught:
        load_config(tmp_path / "absent.toml")
    assert caught.value.code == "KLN204"


def test_json_and_toml_are_one(load: Callable[..., LoadedConfig]) -> None:
    body = '[project]\nname = "x"\n[[datasets]]\npath = "rows.jsonl"\n[train]\noptimizer = "sgd"\nlora_alpha = 8\n'
    body += "learning_rate = 1e30\n"
    value = tomllib.loads(HEAD + body)
    from_json = load(json.dumps(value), name="kiln.json")
    from_toml = load(body)
    assert from_json.run == from_toml.run
    assert from_json.sha256(*SECTIONS) == from_toml.sha256(*SECTIONS)


def test_json_faults_name_the_key(refuse: Callable[..., KilnError]) -> None:
    error = refuse(json.dumps({"schema": "kiln.config.v1", "data": {"n_trian": 5}}), name="kiln.json")
    assert faults(error) == ["data.n_trian is no key; did you mean 'n_train'?"]


# --- overrides


@pytest.mark.parametrize(
    "assignment, section, field, value",
    [
        ("train.epochs=5", "train", "epochs", 5),
        ("train.epochs = 5", "train", "epochs", 5),
        ("train.learning_rate=2e-4", "train", "learning_rate", 2e-4),
        ("project.name=plain text", "project", "name", "plain text"),
        ('project.name="5"', "project", "name", "5"),
        ("model.path=../a=b", "model", "path", "../a=b"),
        ("train.allow_high_lora_scale=true", "train", "allow_high_lora_scale", True),
        ("train.target_modules=['q_proj','v_proj']", "train", "target_modules", ["q_proj", "v_proj"]),
    ],
)
def test_set(load: Callable[..., LoadedConfig], assignment: str, section: str, field: str, value: Any) -> None:
    assert getattr(getattr(load("[train]\nepochs = 1\n", assignment).run, section), field) == value


def test_set_reaches_into_tables_and_lists(load: Callable[..., LoadedConfig]) -> None:
    loaded = load(
        "[[datasets]]\npath = 'a'\n",
        "datasets.0.path=b",
        "train.optimizer.kind=sgd",
        "train.epochs=1",
        "train.epochs=2",
    )
    assert loaded.run.datasets[0].path == "b"
    assert loaded.run.train.optimizer.kind == "sgd"
    assert loaded.run.train.epochs == 2


@pytest.mark.parametrize(
    "assignment", ["train", "train.epochs", "=5", "epochs=5", ".x=5", "train.=5", "schema.x=1", "train.x=\udcff"]
)
def test_set_that_is_not_understood(refuse: Callable[..., KilnError], assignment: str) -> None:
    error = refuse("", assignment)
    assert error.code == "KLN201"
    assert error.message.isprintable()


def test_set_is_checked_as_the_file_is(refuse: Callable[..., KilnError]) -> None:
    error = refuse("", "train.epochs=0", "train.nothing=1", "data.n_train=x")
    assert len(faults(error)) == 3


# --- what a run keeps

FULL = """
[project]
name = "demo"
seed = 7
[model]
path = "../models/tiny"
[[datasets]]
language = "en"
path = "raw/rows.jsonl"
revision = "r1"
[data]
n_train = 6
[admit]
invalid_row_policy = "skip"
date = "2024-01-02"
[train]
adapter = "a1"
learning_rate = 3e-4
optimizer = {kind = "adam_w", beta1 = 0.8}
"""


def test_the_resolved_config_loads_to_an_equal_one(load: Callable[..., LoadedConfig], tmp_path: Path) -> None:
    loaded = load(FULL, "train.epochs=2")
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_bytes(loaded.resolved_toml(run))
    again = load_config(run / "config.resolved.toml")
    assert again.run == loaded.run
    for section in SECTIONS:
        assert again.sha256(section) == loaded.sha256(section)
    assert again.resolve("raw/rows.jsonl").resolve() == loaded.resolve("raw/rows.jsonl").resolve()
    assert again.model_dir().resolve() == loaded.model_dir().resolve()
    assert again.resolved_toml(run) == loaded.resolved_toml(run)
    assert str(tmp_path).encode() not in loaded.resolved_toml(run)


def test_the_resolved_config_writes_defaults_out(load: Callable[..., LoadedConfig], tmp_path: Path) -> None:
    value = tomllib.loads(load().resolved_toml(tmp_path).decode())
    assert value["schema"] == "kiln.config.v1"
    assert value["data"]["n_validation"] == 1000
    assert value["train"]["optimizer"]["kind"] == "muon"


CHANGES = {
    "project": "project.seed=8",
    "model": "model.path=elsewhere",
    "datasets": "datasets.0.path=elsewhere",
    "data": "data.n_train=7",
    "admit": "admit.tools=system",
    "train": "train.optimizer.beta1=0.7",
}


@pytest.mark.parametrize("changed", SECTIONS)
def test_a_digest_covers_its_section_and_no_other(load: Callable[..., LoadedConfig], changed: str) -> None:
    before, after = load(FULL), load(FULL, CHANGES[changed])
    for section in SECTIONS:
        assert (before.sha256(section) != after.sha256(section)) == (section == changed), section
    assert before.sha256("project", "train") != before.sha256("project")


def test_digests_do_not_depend_on_place_or_spelling(
    load: Callable[..., LoadedConfig], make_run: Callable[..., Path]
) -> None:
    one = load(FULL)
    respelled = FULL.replace("3e-4", "0.0003").replace("seed = 7", "seed = 0x7  # comment")
    root = make_run({"deep/other.toml": HEAD + respelled}, "elsewhere")
    assert load_config(root / "deep" / "other.toml").sha256(*SECTIONS) == one.sha256(*SECTIONS)


def test_a_missing_model_is_named(load: Callable[..., LoadedConfig]) -> None:
    with pytest.raises(KilnError) as caught:
        load().model_dir()
    assert caught.value.code == "KLN203"


def test_foreign_text_in_faults_is_escaped(refuse: Callable[..., KilnError]) -> None:
    error = refuse('[data]\n"n\\u001b[31m\\u202e" = 1\nn_train = "\\u001b]8;;x\\u0007"\n')
    assert len(faults(error)) == 2
    assert all(line.isprintable() for line in error.message.split("\n"))
