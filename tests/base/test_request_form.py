"""The request of the public server read as a config: each key, what is refused, and the copy that a run keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests_support import shared_path

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.distillation import DistillConfig, EchoConfig
from kiln_cli.errors import KilnError
from kiln_cli.refused_keys import REFUSED_KEYS
from kiln_cli.request_form import DISTILL_KEYS, KEYS, REFUSED

Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(request, *assignments)``: the request as a file; extra keys of ``config`` by name."""

    def loads(request: object, *assignments: str) -> LoadedConfig:
        path = tmp_path / "request.json"
        path.write_text(request if isinstance(request, str) else json.dumps(request), encoding="utf-8")
        return load_config(path, assignments)

    return loads


@pytest.fixture
def refuse(load: Load) -> Callable[..., KilnError]:
    def refuses(request: object, *assignments: str) -> KilnError:
        with pytest.raises(KilnError) as caught:
            load(request, *assignments)
        assert caught.value.exit_code == 2
        return caught.value

    return refuses


def faults(error: KilnError) -> list[str]:
    assert error.code == "KLN203"
    assert isinstance(error.details, dict)
    found: list[str] = error.details["faults"]
    return found


def request(**config: Any) -> dict[str, Any]:
    return {"dataset_path": "rows.jsonl", "config": config}


def seed_request() -> str:
    """The API form of the seed page, byte for byte."""
    text = shared_path("seeds/sft-ingestion.txt").read_text()
    found = re.search(r"The API form is:\n\n(\{.*?\n\})\n", text, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_request_of_the_seed_page(load: Load, tmp_path: Path) -> None:
    found = load(seed_request())
    assert found.run.admit.file == "/data/corrections.jsonl"
    assert found.run.admit.invalid_row_policy == "skip"
    assert found.run.train.adapter == "support-bot"
    assert found.run.train.profile == "native_online_lora_v1"
    assert found.resolve(found.run.admit.file) == Path("/data/corrections.jsonl")
    assert found.examples is None
    assert found.base_dir == tmp_path


def test_a_request_and_a_config_of_the_same_settings_are_the_same(load: Load, tmp_path: Path) -> None:
    found = load(
        request(
            training_profile="native_online_lora_v1",
            output_name="bot",
            invalid_row_policy="skip",
            epochs=2,
            learning_rate=0.5,
            lora_rank=4,
            lora_alpha=32,
            allow_high_lora_scale=True,
            optimizer={"kind": "adam_w", "beta1": 0.5},
            checkpoint_interval=7,
            seed="18446744073709551615",
        ),
        "model.path=model",
    )
    (tmp_path / "kiln.toml").write_text(
        'schema = "kiln.config.v1"\n'
        "[project]\nseed = 18446744073709551615\n"
        '[model]\npath = "model"\n'
        '[admit]\nfile = "rows.jsonl"\ninvalid_row_policy = "skip"\n'
        '[train]\nadapter = "bot"\nepochs = 2\nlearning_rate = 0.5\nlora_rank = 4\nlora_alpha = 32.0\n'
        'allow_high_lora_scale = true\noptimizer = { kind = "adam_w", beta1 = 0.5 }\ncheckpoint_interval = 7\n'
    )
    same = load_config(tmp_path / "kiln.toml")
    assert found.run == same.run
    assert found.sha256("project", "model", "admit", "train") == same.sha256("project", "model", "admit", "train")


def test_every_key_is_one_of_a_config() -> None:
    """A key that stands for nothing would be taken and lost."""
    from kiln_cli.config import RunConfig

    known = {
        f"{section.name}.{field.name}"
        for section in msgspec.structs.fields(RunConfig)
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)
        for field in msgspec.structs.fields(section.type)
    }
    assert set(KEYS.values()) <= known
    assert len(set(KEYS.values())) == len(KEYS)


@pytest.mark.parametrize("seed", ["7", 7])
def test_seeds_are_numbers_or_decimal_text(load: Load, seed: object) -> None:
    assert load(request(seed=seed)).run.project.seed == 7


@pytest.mark.parametrize("seed", ["07", "-1", "1.0", "0x1", " 1", "", "9" * 21, "9" * 5000, 1.5, True])
def test_other_seeds_are_refused(refuse: Callable[..., KilnError], seed: object) -> None:
    (found,) = faults(refuse(request(seed=seed)))
    assert found.startswith("config.seed = ")


def test_a_seed_above_64_bits_is_refused(refuse: Callable[..., KilnError]) -> None:
    (found,) = faults(refuse(request(seed=str(2**64))))
    assert found.startswith("config.seed = ")
    assert "2^64-1" in found


@pytest.mark.parametrize(
    "key", ["output_name", "learning_rate", "seed", "checkpoint_interval", "base_adapter", "train_mtp"]
)
def test_defaults_written_as_null_say_nothing(load: Load, key: str) -> None:
    assert load(request(**{key: None})).run == load(request()).run


@pytest.mark.parametrize("policy", [True, 1, "Skip", "", "FAIL", None, 0, [], "skip "])
def test_the_policy_is_one_of_two_texts(refuse: Callable[..., KilnError], policy: object) -> None:
    (found,) = faults(refuse(request(invalid_row_policy=policy)))
    assert found.startswith("config.invalid_row_policy = ")
    assert found.endswith("expected one of: fail, skip")


def test_an_omitted_policy_is_fail(load: Load) -> None:
    assert (
        load(request()).run == load(request(invalid_row_policy="fail")).run == load({"dataset_path": "rows.jsonl"}).run
    )


@pytest.mark.parametrize(
    "sources, found",
    [
        ({}, "none"),
        ({"dataset_path": None, "examples": None}, "none"),
        ({"dataset_path": "a", "examples": []}, "examples and dataset_path"),
    ],
)
def test_exactly_one_source_of_rows(refuse: Callable[..., KilnError], sources: dict[str, Any], found: str) -> None:
    (text,) = faults(refuse({**sources, "config": {}}))
    assert text == f"examples or dataset_path or dataset: one must be given, found {found}"


def test_examples_are_kept_as_they_are(load: Load) -> None:
    rows = [{"messages": [{"role": "user", "content": "a"}]}, 5, None, {"ingestion": {"rows_kept": 9}}]
    found = load({"examples": rows, "config": {"output_name": "bot"}})
    assert found.examples == rows
    assert found.run.admit.file is None
    assert found.run.train.adapter == "bot"


def test_examples_must_be_an_array(refuse: Callable[..., KilnError]) -> None:
    assert faults(refuse({"examples": {"a": 1}})) == ["examples must be an array of rows, found an object"]
    assert faults(refuse({"examples": "x"})) == ["examples must be an array of rows, found a string"]


def test_examples_and_a_file_exclude_each_other(refuse: Callable[..., KilnError]) -> None:
    assert faults(refuse({"examples": []}, "admit.file=a")) == ["examples and admit.file exclude each other"]


def test_a_named_dataset_and_its_split_are_keys_of_admit(load: Load) -> None:
    found = load({"dataset": "mine", "dataset_split": "holdout"}).run.admit
    assert (found.file, found.dataset, found.dataset_split) == (None, "mine", "holdout")
    assert load({"dataset": "mine"}).run.admit.dataset_split == "train"


def test_a_split_goes_with_a_named_dataset(refuse: Callable[..., KilnError]) -> None:
    assert faults(refuse({**request(), "dataset_split": "train"})) == [
        "dataset_split is for dataset, which is not given"
    ]


def test_a_key_of_the_request_that_is_not_built(refuse: Callable[..., KilnError]) -> None:
    assert faults(refuse({**request(), "post_eval": "x"})) == [f"post_eval is refused: {REFUSED['post_eval']}"]


READ = {key.removeprefix("config.") for key in KEYS}


@pytest.mark.parametrize("key", sorted(REFUSED_KEYS.keys() - REFUSED.keys() - READ))
def test_keys_of_the_settings_that_are_not_built(refuse: Callable[..., KilnError], key: str) -> None:
    reason = {**REFUSED_KEYS, **REFUSED}[key]
    assert faults(refuse(request(**{key: True}))) == [f"config.{key} is refused: {reason}"]


def test_every_setting_of_the_contract_has_an_answer(load: Load, refuse: Callable[..., KilnError]) -> None:
    """The table of train.md, section 3: a key is read, or refused by name; none is no key at all."""
    listed = re.findall(
        r"^\| ([a-z_ /,]+) \|", shared_path("contracts/train.md").read_text().split("## 4.")[0], re.MULTILINE
    )
    names = [name for cell in listed for name in re.findall(r"[a-z_]+", cell)]
    assert len(names) == 20
    for name in names:
        if f"config.{name}" not in KEYS:
            assert "is refused: " in faults(refuse(request(**{name: "x"})))[0]


def test_unknown_keys_are_refused_with_the_nearest(refuse: Callable[..., KilnError]) -> None:
    error = refuse({"dataset_pth": "a", "dataset_path": "b", "config": {"epoch": 1, "dataset_path": "x"}, "model": "m"})
    assert faults(error) == [
        "dataset_pth is no key; did you mean 'dataset_path'?",
        "model is no key",
        "config.epoch is no key; did you mean 'epochs'?",
        "config.dataset_path is no key",
    ]


def test_faults_speak_of_the_request(refuse: Callable[..., KilnError]) -> None:
    error = refuse(
        {
            "dataset_path": "",
            "config": {
                "training_profile": "batched",
                "output_name": ".hidden",
                "epochs": "3",
                "lora_rank": 4,
                "lora_alpha": 32,
                "optimizer": {"kind": "sgd", "beta1": 0.5},
            },
        }
    )
    assert sorted(fault.split(" ")[0] for fault in faults(error)) == [
        "config.epochs",
        "config.lora_alpha",
        "config.optimizer.beta1",
        "config.output_name",
        "config.training_profile",
        "dataset_path",
    ]


@pytest.mark.parametrize("config", [[], "x", 5, None, True])
def test_the_settings_must_be_an_object(refuse: Callable[..., KilnError], config: object) -> None:
    assert faults(refuse({"dataset_path": "a", "config": config}))[0].startswith("config must be an object, found ")


def test_supplied_evidence_is_ignored_and_said(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    forged = {"schema": "kiln.sft-ingestion.v1", "rows_kept": 1000}
    found = load({"dataset_path": "a", "ingestion": forged, "config": {"epochs": 2, "ingestion": forged}})
    assert found.run == load({"dataset_path": "a", "config": {"epochs": 2}}).run
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert "request.json: ingestion is ignored" in err[0]
    assert "request.json: config.ingestion is ignored" in err[1]


def seed_distillation() -> str:
    """The request of the seed page for distillation, byte for byte."""
    text = shared_path("seeds/opd-teacher-jsonl.txt").read_text()
    found = re.search(r'\n(\{\n  "dataset_path".*?\n\})\n', text, re.DOTALL)
    assert found is not None
    return found[1]


def distillation(**config: Any) -> dict[str, Any]:
    return {"dataset_path": "scored.jsonl", "teacher": "large", "config": {"training_mode": "off_policy", **config}}


def test_the_request_for_distillation_of_the_seed_page(load: Load, tmp_path: Path) -> None:
    found = load(seed_distillation())
    assert (found.run.admit.kind, found.run.admit.file) == ("opd", "/srv/kiln/data/teacher-data.jsonl")
    assert found.run.distill == DistillConfig(teacher="teacher-large@vllm")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.resolved.toml").write_bytes(found.resolved_toml(run))
    assert load_config(run / "config.resolved.toml").run == found.run


def test_every_key_for_distillation_is_one_of_a_config() -> None:
    from kiln_cli.config import RunConfig

    known = {
        f"{section.name}.{field.encode_name}"
        for section in msgspec.structs.fields(RunConfig)
        if isinstance(section.type, type) and issubclass(section.type, msgspec.Struct)
        for field in msgspec.structs.fields(section.type)
    }
    assert set(DISTILL_KEYS.values()) <= known
    assert len(set(DISTILL_KEYS.values())) == len(DISTILL_KEYS)


def test_settings_of_distillation_are_read(load: Load) -> None:
    found = load(
        distillation(
            top_k=20,
            echo={"lambda": 0.1, "env_mask_mode": "full_obs", "warning_filter": False},
            stable_opd={"mode": "off"},
            output_name="small",
            epochs=2,
            seed="7",
            optimizer="adam_w",
            max_cost_usd=None,
            sampler_segments=None,
            base_adapter=None,
            resume_checkpoint=None,
        )
    ).run
    assert found.distill.top_k == 20
    assert found.distill.echo == EchoConfig(lambda_=0.1, env_mask_mode="full_obs", warning_filter=False)
    assert (found.train.adapter, found.train.epochs, found.project.seed) == ("small", 2, 7)
    assert found.train.optimizer.kind == "adam_w"
    assert load(distillation(echo=None)).run.distill.echo is None


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"training_mode": "on_policy"}, "config.training_mode = 'on_policy' is not built in this version"),
        ({"objective": "cross_entropy"}, "config.objective = 'cross_entropy' is not built in this version"),
        ({"loss": "sampled_token"}, "config.loss = 'sampled_token' is not built in this version"),
        ({"loss": "full_vocab"}, "config.loss = 'full_vocab' is not built in this version"),
        ({"loss": "top_p"}, "config.loss = 'top_p': expected one of: teacher_top_k, sampled_token, full_vocab"),
        ({"top_k": 8}, "config.top_k = 8: the loss takes 16 or 32 candidates"),
        ({"top_k": 0}, "config.top_k = 0: expected"),
        ({"samples_per_prompt": 4}, "config.samples_per_prompt = 4 is refused"),
        ({"discount": 0.9}, "config.discount = 0.9 is refused"),
        ({"clip_epsilon": 0.2}, "config.clip_epsilon = 0.2 is refused"),
        ({"max_cost_usd": 5}, "config.max_cost_usd = 5.0 is refused"),
        ({"stable_opd": {"mode": "kl"}}, "config.stable_opd.mode = 'kl': expected one of: off"),
        ({"temperature": 0}, "config.temperature = 0: expected"),
        ({"top_p": 1.5}, "config.top_p = 1.5: expected"),
        ({"echo": {"lambda": -1}}, "config.echo.lambda = -1: expected"),
        ({"echo": {"lamda": 1}}, "config.echo.lamda is no key; did you mean 'lambda'?"),
        ({"echo": True}, "config.echo must be a table, found True"),
        ({"checkpoint_interval": 0}, "config.checkpoint_interval = 0: expected"),
        ({"auto_load": True}, "config.auto_load = true is refused"),
        ({"batch_size": 4}, "config.batch_size is refused"),
        ({"resume_checkpoint": "x"}, "config.resume_checkpoint is refused"),
    ],
)
def test_settings_of_distillation_that_are_refused(
    refuse: Callable[..., KilnError], config: dict[str, Any], told: str
) -> None:
    (found,) = faults(refuse(distillation(**config)))
    assert found.startswith(told)


def test_a_request_for_distillation_says_its_mode(refuse: Callable[..., KilnError]) -> None:
    for config in ({}, {"top_k": 32}):
        (found,) = faults(refuse({"dataset_path": "a", "teacher": "t", "config": config}))
        assert found.startswith("config.training_mode = 'on_policy' is not built")


def test_a_request_for_distillation_names_corpus_and_teacher(refuse: Callable[..., KilnError]) -> None:
    found = faults(refuse({"prompts": [], "post_eval": {}, "config": {"training_mode": "off_policy"}}))
    assert found == [
        f"prompts is refused: {REFUSED['prompts']}",
        f"post_eval is refused: {REFUSED['post_eval']}",
        "dataset_path is missing",
        "teacher is missing",
    ]


def test_unknown_keys_of_a_request_for_distillation_are_ignored_and_said(
    load: Load, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = load(distillation()).run
    found = load({**distillation(topk=3, ingestion={}), "note": "x"}).run
    assert found == plain
    err = capsys.readouterr().err.splitlines()
    assert [line.partition("request.json: ")[2] for line in err] == [
        "note is ignored: it is no key",
        "config.topk is ignored: it is no key; did you mean 'top_k'?",
        "config.ingestion is ignored: it is kiln that writes what was admitted",
    ]


@pytest.mark.parametrize(
    "text", ['{"dataset_path":"a","dataset_path":"b"}', '{"dataset_path":"a"', "[]", "5", "{}", '{"a":1}']
)
def test_what_is_no_request(refuse: Callable[..., KilnError], text: str) -> None:
    assert refuse(text).code == "KLN202"


def test_a_file_with_a_schema_is_a_config(refuse: Callable[..., KilnError]) -> None:
    error = refuse({"schema": "kiln.config.v1", "dataset_path": "a"})
    assert [fault.split(";")[0] for fault in faults(error)] == ["dataset_path is no key"]


def test_a_request_in_toml_is_none(tmp_path: Path) -> None:
    path = tmp_path / "request.toml"
    path.write_text('dataset_path = "rows.jsonl"\n')
    with pytest.raises(KilnError) as caught:
        load_config(path)
    assert caught.value.code == "KLN202"


def test_assignments_apply_to_the_settings(load: Load) -> None:
    found = load(request(epochs=2), "train.epochs=5", "model.path=here")
    assert found.run.train.epochs == 5
    assert found.model_dir() == found.base_dir / "here"


def test_the_resolved_copy_is_a_config_that_works_from_the_run(load: Load, tmp_path: Path) -> None:
    found = load(request(output_name="bot", seed="9"), "model.path=model")
    run = tmp_path / "deep" / "run"
    run.mkdir(parents=True)
    (run / "config.resolved.toml").write_bytes(found.resolved_toml(run))
    again = load_config(run / "config.resolved.toml")
    assert again.run == found.run
    assert again.run.admit.file is not None
    assert again.resolve(again.run.admit.file).resolve() == (tmp_path / "rows.jsonl").resolve()
