"""``kiln teacher``: registering, listing, verifying, and the manifest line, over a tiny model's files."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.distilling.identity import TeacherIdentity, parse_manifest
from kiln_stages.distilling.registry import FILE_NAME, Registry, Teacher, read_registry, register
from tiny_model import RUN, Kiln, write_tiny_model

from kiln_cli.errors import KilnError
from kiln_cli.files import run_lock

Copy = Callable[..., Path]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln) -> Teacher:
    registry = tmp_path_factory.mktemp("teachers")
    done = kiln("teacher", "register", "tiny", "--model", tiny_model, "--registry", registry)
    assert done.code == 0, done.err
    return read_registry(registry).get("tiny")


def registered(kiln: Kiln, registry: Path, *arguments: object) -> TeacherIdentity:
    done = kiln("teacher", "register", "tiny", "--registry", registry, *arguments)
    assert done.code == 0, done.err
    return read_registry(registry).get("tiny").identity


def test_a_model_directory_becomes_an_identity(teacher: Teacher, tiny_model: Path) -> None:
    identity = teacher.identity
    assert list(identity.faults()) == []
    assert identity.protocol == "kiln-cli.transformers-prompt-logprobs.causal.v1"
    assert identity.served_model_id == tiny_model.name and identity.adapter is None
    config = json.loads((tiny_model / "config.json").read_text())
    assert (identity.vocab_size, identity.max_model_len) == (config["vocab_size"], config["max_position_embeddings"])
    assert identity.max_top_k == 32
    assert teacher.local is not None and identity.implementation == f"transformers/{teacher.local.transformers}"


def test_the_hashes_are_over_what_the_contract_names(teacher: Teacher, tiny_model: Path) -> None:
    import hashlib

    from kiln_stages.training.tensors import base_model_sha256, weight_shards

    assert teacher.local is not None
    identity, place = teacher.identity, teacher.local
    assert "sha256:" + identity.base_model_sha256 == base_model_sha256(weight_shards(tiny_model))
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    template = settings.pop("chat_template", None)
    if (tiny_model / "chat_template.jinja").exists():
        template = (tiny_model / "chat_template.jinja").read_text()

    def canonical(value: Any) -> str:
        return hashlib.sha256(
            json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        ).hexdigest()

    assert identity.tokenizer_config_sha256 == canonical({"tokenizer_config": settings, "chat_template": template})
    inference = {name: getattr(place, name) for name in ("attention", "device_type", "dtype", "torch", "transformers")}
    assert identity.inference_config_sha256 == canonical(inference)


def test_a_trained_adapter_is_part_of_the_identity(finished: Path, kiln: Kiln, tmp_path: Path) -> None:
    adapter = finished / RUN / "train" / "adapter"
    identity = registered(kiln, tmp_path, "--model", finished / "model", "--adapter", adapter)
    receipt = json.loads((finished / RUN / "train_receipt.json").read_text())
    assert identity.adapter is not None and identity.adapter.name == "adapter"
    # The receipt of the training names the same tensors and the same config file.
    assert "sha256:" + identity.adapter.weights_sha256 == receipt["adapters"]["output"]["content_sha256"]
    files = {Path(ref["path"]).name: ref["sha256"] for ref in receipt["outputs"]}
    assert identity.adapter.config_sha256 == files["adapter_config.json"]
    assert kiln("teacher", "verify", "tiny", "--registry", tmp_path).code == 0


def test_manifest_prints_the_canonical_line_and_one_newline(
    teacher: Teacher, kiln_process: Kiln, kiln: Kiln, tmp_path: Path
) -> None:
    named = msgspec.structs.replace(teacher.identity, served_model_id='modèle "π"')
    other = msgspec.structs.replace(teacher, identity=named, content_revision=named.content_revision())
    register(tmp_path, other)
    for run in (kiln, kiln_process):
        done = run("teacher", "manifest", "tiny", "--registry", tmp_path)
        assert done.code == 0 and done.out.encode("utf-8") == named.manifest_line() + b"\n"
    assert parse_manifest(done.out.encode("utf-8").removesuffix(b"\n")) == named


def test_an_alias_is_not_pinned_anew_without_being_told(
    kiln: Kiln, tmp_path: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = registered(kiln, tmp_path, "--model", tiny_model)
    again = kiln("teacher", "register", "tiny", "--model", tiny_model, "--registry", tmp_path, "--json")
    assert again.code == 0 and json.loads(again.out)["unchanged"] is True
    other = write_tiny_model(tmp_path_factory.mktemp("other") / "model", seed=8)
    refused = kiln("teacher", "register", "tiny", "--model", other, "--registry", tmp_path)
    second = registered(kiln, tmp_path, "--model", other, "--replace")
    assert refused.code == 2 and "KLN219" in refused.err
    # Both values stand in the refusal, and only of the field that differs.
    assert f"base_model_sha256: pinned {first.base_model_sha256}, found {second.base_model_sha256}" in refused.err
    assert "tokenizer_vocab_sha256" not in refused.err
    assert first != second


def test_the_same_identity_may_move(kiln: Kiln, tmp_path: Path, project: Path, copy_of: Copy) -> None:
    registry = tmp_path / "registry"
    first = registered(kiln, registry, "--model", project / "model")
    moved = copy_of(project, "elsewhere", own_model=True) / "model"
    assert registered(kiln, registry, "--model", moved) == first
    assert read_registry(registry).get("tiny").local == msgspec.structs.replace(
        read_registry(registry).get("tiny").local, model=str(moved)
    )


def test_verify_names_each_field_with_both_values(kiln: Kiln, tmp_path: Path, project: Path, copy_of: Copy) -> None:
    model = copy_of(project, own_model=True) / "model"
    before = registered(kiln, tmp_path, "--model", model)
    assert kiln("teacher", "verify", "tiny", "--registry", tmp_path).code == 0
    (model / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    write_tiny_model(tmp_path / "other" / "model", seed=8)
    (model / "model.safetensors").write_bytes((tmp_path / "other" / "model" / "model.safetensors").read_bytes())
    done = kiln("teacher", "verify", "tiny", "--registry", tmp_path)
    listed = kiln("teacher", "verify", "tiny", "--registry", tmp_path, "--json")
    assert done.code == 1 and listed.code == 1
    found = {each["field"]: each for each in json.loads(listed.out)["differences"]}
    assert set(found) == {"base_model_sha256", "tokenizer_config_sha256"}
    for field, each in found.items():
        assert each["pinned"] == getattr(before, field) != each["found"]
        assert f"{field}: pinned {each['pinned']}, found {each['found']}" in done.err


def test_verify_names_the_version_behind_the_inference_digest(kiln: Kiln, tmp_path: Path, tiny_model: Path) -> None:
    registered(kiln, tmp_path, "--model", tiny_model)
    path = tmp_path / FILE_NAME
    teacher = read_registry(tmp_path).get("tiny")
    assert teacher.local is not None
    older = msgspec.structs.replace(teacher, local=msgspec.structs.replace(teacher.local, torch="2.0.0"))
    path.unlink()
    register(tmp_path, older)
    done = kiln("teacher", "verify", "tiny", "--registry", tmp_path)
    assert done.code == 1 and f"torch: pinned 2.0.0, found {teacher.local.torch}" in done.err


def test_relative_paths_count_from_the_registry(
    kiln: Kiln, tmp_path: Path, project: Path, copy_of: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = copy_of(project, "home", own_model=True)
    monkeypatch.chdir(home)
    assert kiln("teacher", "register", "tiny", "--model", "model").code == 0
    home.rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    place = read_registry(Path("moved/.kiln")).get("tiny").local
    assert place is not None and place.model == "../model"
    assert kiln("teacher", "verify", "tiny", "--registry", "moved/.kiln").code == 0


def test_list_shows_every_teacher(teacher: Teacher, kiln: Kiln, tmp_path: Path) -> None:
    assert "no teacher in" in kiln("teacher", "list", "--registry", tmp_path).err
    for alias in ("b", "a@local"):
        register(tmp_path, msgspec.structs.replace(teacher, alias=alias))
    lines = kiln("teacher", "list", "--registry", tmp_path).out.splitlines()
    assert [line.split()[0] for line in lines] == ["alias", "a@local", "b"]
    assert teacher.content_revision[:12] in lines[1]
    listed = json.loads(kiln("teacher", "list", "--registry", tmp_path, "--json").out)
    assert [each["alias"] for each in listed["teachers"]] == ["a@local", "b"]


def test_an_unknown_alias_is_told_with_those_there_are(teacher: Teacher, kiln: Kiln, tmp_path: Path) -> None:
    register(tmp_path, teacher)
    for verb in ("manifest", "verify"):
        done = kiln("teacher", verb, "tidy", "--registry", tmp_path)
        assert done.code == 2 and "KLN212" in done.err and "registered are: tiny" in done.err


@pytest.mark.parametrize("alias", ["", " a", "a b", "-a", ".a", "a\n", "a" * 257, "é"])
def test_what_is_no_alias_is_refused(teacher: Teacher, tmp_path: Path, alias: str) -> None:
    with pytest.raises(KilnError) as refused:
        register(tmp_path, msgspec.structs.replace(teacher, alias=alias))
    assert refused.value.code == "KLN201"
    assert not (tmp_path / FILE_NAME).exists()


def test_a_name_that_acts_on_a_terminal_is_refused(teacher: Teacher, tmp_path: Path) -> None:
    hostile = msgspec.structs.replace(teacher.identity, implementation="a\u202eb")
    with pytest.raises(KilnError) as refused:
        register(tmp_path, msgspec.structs.replace(teacher, identity=hostile))
    assert refused.value.code == "KLN201" and "\u202e" not in refused.value.message


WRONG_OPTIONS: list[tuple[list[str], str]] = [
    ([], "KLN201"),
    (["--model", "m", "--endpoint", "http://localhost:1"], "KLN201"),
    (["--model", "nowhere"], "KLN302"),
    (["--model", "MODEL", "--adapter", "nowhere"], "KLN204"),
    (["--model", "MODEL", "--max-top-k", "70000"], "KLN201"),
    (["--model", "MODEL", "--served-model-id", ""], "KLN201"),
]


@pytest.mark.parametrize("options, code", WRONG_OPTIONS, ids=lambda value: str(value)[:30])
def test_what_cannot_be_registered_is_refused(
    kiln: Kiln, tmp_path: Path, tiny_model: Path, options: list[str], code: str
) -> None:
    given = [str(tiny_model) if option == "MODEL" else option for option in options]
    done = kiln("teacher", "register", "tiny", "--registry", tmp_path / "r", *given)
    assert done.code != 0 and code in done.err
    assert not (tmp_path / "r").exists()


DAMAGES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (lambda value: value["teachers"][0].update(content_revision="0" * 64), "content_revision is 000"),
    (lambda value: value["teachers"][0]["identity"].update(vocab_size=1), "max_top_k is 32, expected 1..1"),
    (lambda value: value["teachers"][0].update(local=None), "expected one of local and endpoint"),
    (lambda value: value["teachers"].append(value["teachers"][0]), "one stands twice"),
    (lambda value: value["teachers"][0].update(key="secret"), "unknown field"),
    (lambda value: value.update(schema="kiln.teachers.v2"), "schema is"),
]


@pytest.mark.parametrize("damage, message", DAMAGES, ids=[message for _, message in DAMAGES])
def test_a_registry_that_contradicts_itself_is_refused(
    teacher: Teacher, tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    from kiln_cli.manifests import document

    register(tmp_path, teacher)
    value = json.loads((tmp_path / FILE_NAME).read_text())
    damage(value)
    (tmp_path / FILE_NAME).write_bytes(document(value))
    with pytest.raises(KilnError) as refused:
        read_registry(tmp_path)
    assert refused.value.code == "KLN206" and message in refused.value.message


def test_a_registry_is_written_under_a_lock_and_whole(teacher: Teacher, tmp_path: Path) -> None:
    with run_lock(tmp_path, "another"), pytest.raises(KilnError) as refused:
        register(tmp_path, teacher)
    assert refused.value.code == "KLN401" and "name another --registry" in refused.value.hint
    # What a killed registration left goes; what others have below is theirs.
    (tmp_path / "datasets").mkdir()
    for leftover in (tmp_path / ".kiln-tmp-1", tmp_path / "datasets" / ".kiln-tmp-2"):
        leftover.write_bytes(b"half")
    assert register(tmp_path, teacher) and not register(tmp_path, teacher)
    assert not (tmp_path / ".kiln-tmp-1").exists() and (tmp_path / "datasets" / ".kiln-tmp-2").exists()


def _register_many(registry: Path, teacher: Teacher, first: int) -> None:
    for number in range(first, first + 10):
        while True:
            try:
                register(registry, msgspec.structs.replace(teacher, alias=f"t{number:02}"))
                break
            except KilnError as error:
                assert error.code == "KLN401", error


def test_no_registration_is_lost_among_many(teacher: Teacher, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_register_many, args=(tmp_path, teacher, first)) for first in (0, 10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert sorted(read_registry(tmp_path).teachers) == [f"t{number:02}" for number in range(20)]


def test_paths_of_a_registry_resolve_to_where_they_were_given(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "r", {})
    assert registry.resolve("../model") == tmp_path / "model"
    assert registry.written(Path("/a/b")) == "/a/b" and registry.resolve("/a/b") == Path("/a/b")
