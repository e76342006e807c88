"""``kiln admit`` of a scored corpus from the command line: options, the request of the seed page, reports, rechecks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from dataset_rows import kiln
from kiln_stages.distilling.ingestion import RECEIPT, read_scored_ingestion
from kiln_stages.distilling.recheck import require_same_scored_admission
from scored_corpus import ALIAS, Scorer, corpus, line, register_teacher, teacher_identity
from tests_support import shared_path

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.manifests import document, read_manifest, read_receipt
from kiln_cli.plugins import load_plugins
from kiln_cli.stage_manifests import AdmitManifest
from kiln_cli.terminal import SILENT


@pytest.fixture
def project(tmp_path: Path, student: Path, scorer: Scorer) -> Path:
    """A directory with ``corpus.jsonl`` (two sound rows), ``model`` and a registry in ``.kiln``."""
    identity = teacher_identity(student)
    (tmp_path / "model").symlink_to(student)
    (tmp_path / "corpus.jsonl").write_bytes(corpus(identity, [scorer.example(), scorer.example("Other?")]))
    register_teacher(tmp_path / ".kiln", identity)
    return tmp_path


def options(project: Path, *more: str) -> list[str]:
    registry, model, run = project / ".kiln", project / "model", project / "run"
    return ["--registry", str(registry), "--model", str(model), "--out", str(run), *more]


def break_row(
    project: Path, scorer: Scorer, student: Path, faults: int = 2, *, file: str = "corpus.jsonl", sound: str = "A?"
) -> None:
    row = scorer.example("Third?")
    for at in range(faults):
        row["teacher_tokens"][at]["top_logprobs"][0]["logprob"] = 0.5
    (project / file).write_bytes(corpus(teacher_identity(student), [scorer.example(sound), row]))


@pytest.mark.parametrize("kind", [[], ["--kind", "opd"], ["--kind", "auto"]])
def test_a_corpus_is_recognised_by_its_manifest_line(kind: list[str], project: Path) -> None:
    done = kiln("admit", "--file", project / "corpus.jsonl", "--teacher", ALIAS, *options(project, *kind))
    assert done.code == 0, done.err
    assert f"scored by {ALIAS}" in done.err
    assert "token ids: 20 of 20 are named by the corpus and match" in done.err
    assert read_manifest(project / "run", AdmitManifest).details.opd["teacher"]["alias"] == ALIAS


def test_the_kind_can_be_said_to_be_another(project: Path) -> None:
    done = kiln("admit", "--file", project / "corpus.jsonl", "--kind", "sft", *options(project)[2:])
    assert done.code == 1
    assert "row 1 (line 1)" in done.err  # the manifest line is no conversation
    assert "empty_messages" in done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--kind", "opd", "--teacher", ALIAS, "--row", "{}"], "takes one file"),
        (["--kind", "opd", "--teacher", ALIAS, "--file", "-"], "takes one file"),
        (["--kind", "grpo", "--file", "corpus.jsonl"], "expected one of: auto, sft, opd"),
        (["--kind", "opd", "--file", "corpus.jsonl", "--invalid-row-policy", "skip"], "admitted whole or not at all"),
        (["--kind", "opd", "--file", "corpus.jsonl"], "needs the alias of its teacher"),
    ],
)
def test_forms_that_are_refused(
    arguments: list[str], told: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    done = kiln("admit", *arguments, "--model", "model", "--out", "run")
    assert done.code == 2
    assert told in done.err
    assert not (project / "run" / "admit_manifest.json").exists()


def test_a_report_lists_every_fault(project: Path, scorer: Scorer, student: Path) -> None:
    break_row(project, scorer, student, faults=3)
    arguments = ["admit", "--file", str(project / "corpus.jsonl"), "--teacher", ALIAS, *options(project, "--report")]
    done = kiln(*arguments)
    assert done.code == 1
    lines = done.out.splitlines()
    assert len(lines) == 3
    for at, text in enumerate(lines):
        assert f"corpus.jsonl:3: example 2: logprob_positive at /teacher_tokens/{at}/top_logprobs/0/logprob" in text
    assert "KLN112" in done.err
    assert "3 faults in all" in done.err
    as_json = kiln(*arguments, "--json")
    assert as_json.code == 1
    error = json.loads(as_json.out)["error"]
    assert error["code"] == "KLN112"
    assert [fault["pointer"] for fault in error["details"]["faults"]] == [
        f"/teacher_tokens/{at}/top_logprobs/0/logprob" for at in range(3)
    ]
    plain = kiln(*[text for text in arguments if text != "--report"], "--json")
    assert len(json.loads(plain.out)["error"]["details"]["faults"]) == 1


@pytest.mark.parametrize("held_out", ["refused", "of another teacher", "without an example", "missing", "sound"])
def test_a_report_goes_on_to_the_held_out_corpus(held_out: str, project: Path, scorer: Scorer, student: Path) -> None:
    """Both files can be mended at once. That an example is in both is told of files that hold, so not here."""
    break_row(project, scorer, student, faults=3)
    path, identity = project / "held_out.jsonl", teacher_identity(student)
    told, codes = "", []
    if held_out == "refused":
        break_row(project, scorer, student, file=path.name)
        told = f"{path}:3: example 2: logprob_positive at /teacher_tokens/0/"
        codes = ["logprob_positive"] * 2
    elif held_out == "of another teacher":
        path.write_bytes(corpus(teacher_identity(student, base_model_sha256="f" * 64), [scorer.example("B?")]))
        told, codes = f"{path}:1: teacher_identity_mismatch", ["teacher_identity_mismatch"]
    elif held_out == "without an example":
        path.write_bytes(corpus(identity, []))
        told = f"{path} holds no example"
    elif held_out == "missing":
        told = f"{path}: No such file"
    else:
        path.write_bytes(corpus(identity, [scorer.example("B?")]))
    arguments = ["admit", "--file", str(project / "corpus.jsonl"), "--teacher", ALIAS, *options(project)]
    arguments += ["--set", f"distill.heldout_file={path}"]
    done = kiln(*arguments, "--report")
    assert done.code == 1
    assert [line.split(":")[0] for line in done.out.splitlines()] == [
        *[str(project / "corpus.jsonl")] * 3,
        *[str(path)] * len(codes),
    ]
    assert done.err.startswith(f"kiln: KLN112: {project / 'corpus.jsonl'}:3: example 2: logprob_positive")
    assert told in done.err
    assert (str(path) in done.err) == (held_out != "sound")
    assert f"{3 + len(codes)} faults in all" in done.err
    faults = json.loads(kiln(*arguments, "--report", "--json").out)["error"]["details"]["faults"]
    assert [(fault["file"], fault["code"]) for fault in faults[3:]] == [(str(path), code) for code in codes]
    assert not list(project.glob("run/admit/*"))
    # Without a report reading ends with the first fault.
    assert str(path) not in kiln(*arguments).err


@pytest.mark.parametrize("form", ["identity", "no manifest", "no score"])
def test_a_report_lists_what_is_wrong_with_the_manifest_line(
    form: str, project: Path, scorer: Scorer, student: Path
) -> None:
    row, path = scorer.example(), project / "corpus.jsonl"
    if form == "identity":
        register_teacher(project / ".kiln", teacher_identity(student, inference_config_sha256="e" * 64))
        expected = [":1: teacher_identity_mismatch: "]
    elif form == "no manifest":
        path.write_bytes(line(row) + b"\n{\n")
        expected = [":1: manifest_missing: ", ":1: example 1: logprobs_without_manifest at ", ":2: invalid_json: "]
    else:
        path.write_bytes(line({**row, "teacher_tokens": []}) + b"\n{\n")
        expected = [":1: manifest_missing: ", ":2: invalid_json: "]
    arguments = ["admit", "--file", path, "--kind", "opd", "--teacher", ALIAS, *options(project, "--report")]
    done = kiln(*arguments)
    assert done.code == 1
    for text, wanted in zip(done.out.splitlines(), expected, strict=True):
        assert text.startswith(f"{path}{wanted}")
    assert (f"{len(expected)} faults in all" in done.err) == (len(expected) > 1)
    assert "--report" not in done.err
    faults = json.loads(kiln(*arguments, "--json").out)["error"]["details"]["faults"]
    assert {fault["file"] for fault in faults} == {str(path)}
    assert [fault["line"] for fault in faults] == [int(wanted.split(":")[1]) for wanted in expected]
    assert all(fault["code"] in wanted for fault, wanted in zip(faults, expected, strict=True))


def test_a_report_of_a_sound_corpus_admits_it(project: Path) -> None:
    done = kiln("admit", "--file", project / "corpus.jsonl", "--teacher", ALIAS, *options(project, "--report"))
    assert (done.code, done.out) == (0, "")
    assert (project / "run" / "admit_manifest.json").exists()


def test_a_report_is_for_scored_corpora(project: Path) -> None:
    done = kiln("admit", "--row", '{"messages":[]}', "--model", project / "model", "--out", project / "run", "--report")
    assert done.code == 2
    assert "--report is for scored corpora" in done.err


def seed_request(project: Path) -> dict[str, Any]:
    text = shared_path("seeds/opd-teacher-jsonl.txt").read_text()
    found = re.search(r'\n(\{\n  "dataset_path".*?\n\})\n', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1].replace("/srv/kiln/data/teacher-data.jsonl", str(project / "corpus.jsonl")))


def test_the_request_of_the_seed_page_is_admitted(project: Path, student: Path, scorer: Scorer) -> None:
    identity = teacher_identity(student, max_top_k=32)
    register_teacher(project / ".kiln", identity, "teacher-large@vllm")
    (project / "corpus.jsonl").write_bytes(corpus(identity, [scorer.example(top_k=32)]))
    request = project / "request.json"
    request.write_text(json.dumps(seed_request(project)))
    done = kiln("admit", request, "--model", project / "model", "--out", project / "run")
    assert done.code == 0, done.err
    receipt = read_scored_ingestion(project / "run" / RECEIPT)
    assert (receipt.teacher_alias, receipt.top_k, receipt.examples) == ("teacher-large@vllm", 32, 1)
    again = kiln("admit", project / "run" / "config.resolved.toml", "--out", project / "run")
    assert "unchanged" in again.err


def test_the_request_of_the_seed_page_is_trained(project: Path, student: Path, scorer: Scorer) -> None:
    identity = teacher_identity(student, max_top_k=32)
    register_teacher(project / ".kiln", identity, "teacher-large@vllm")
    (project / "corpus.jsonl").write_bytes(corpus(identity, [scorer.example(top_k=32), scorer.example("B?", top_k=32)]))
    request = project / "request.json"
    request.write_text(json.dumps(seed_request(project)))
    forms = ["--model", str(project / "model"), "--out", str(project / "run")]
    assert kiln("admit", request, *forms).code == 0
    done = kiln("train", request, "--adapter", "offline-distilled", *forms)
    assert done.code == 0, done.err
    receipt = read_receipt(project / "run" / "train_receipt.json")
    assert (receipt.adapter_name, receipt.steps) == ("offline-distilled", 2)
    assert kiln("verify-receipt", project / "run").code == 0
    refused = kiln("train", request, "--adapter", ".x", *forms)
    assert refused.code == 2
    assert "is no name" in refused.err


def test_ids_are_required_by_an_option(project: Path, scorer: Scorer, student: Path) -> None:
    row = scorer.example()
    del row["teacher_tokens"][2]["token_id"]
    (project / "corpus.jsonl").write_bytes(corpus(teacher_identity(student), [row]))
    arguments = ["admit", "--file", str(project / "corpus.jsonl"), "--teacher", ALIAS, *options(project)]
    done = kiln(*arguments)
    assert done.code == 0, done.err
    assert "--require-token-ids refuses them" in done.err
    done = kiln(*arguments, "--require-token-ids")
    assert done.code == 1
    assert "token_id_missing at /teacher_tokens/2/token_id" in done.err


# ---- admitted again


def recheck(project: Path) -> Any:
    run = project / "run"
    config = load_config(run / "config.resolved.toml")
    return require_same_scored_admission(config, run, load_plugins(), read_manifest(run, AdmitManifest), SILENT)


@pytest.fixture
def admitted(project: Path) -> Path:
    done = kiln("admit", "--file", project / "corpus.jsonl", "--teacher", ALIAS, *options(project))
    assert done.code == 0, done.err
    return project


def test_an_admission_can_be_repeated(admitted: Path) -> None:
    assert recheck(admitted) == read_scored_ingestion(admitted / "run" / RECEIPT)


def test_a_corpus_that_changed_is_told(admitted: Path) -> None:
    path = admitted / "corpus.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(KilnError) as caught:
        recheck(admitted)
    assert caught.value.code == "KLN207"
    assert "source_sha256 is sha256:" in caught.value.message


def test_a_teacher_of_the_same_name_that_is_another_is_told(admitted: Path, student: Path) -> None:
    register_teacher(admitted / ".kiln", teacher_identity(student, base_model_sha256="f" * 64))
    with pytest.raises(KilnError) as caught:
        recheck(admitted)
    assert caught.value.code == "KLN112"
    assert "teacher_identity_mismatch" in caught.value.message


def test_a_receipt_that_was_edited_is_told(admitted: Path) -> None:
    path = admitted / "run" / RECEIPT
    value = json.loads(path.read_text())
    value["alignment"]["proven"] -= 1
    path.write_bytes(document(value))
    with pytest.raises(KilnError) as caught:
        recheck(admitted)
    assert caught.value.code == "KLN207"
    assert "alignment is" in caught.value.message


def test_another_template_is_told(admitted: Path, student: Path) -> None:
    (admitted / "model").unlink()
    (admitted / "model").mkdir()
    for path in student.iterdir():
        (admitted / "model" / path.name).write_bytes(path.read_bytes())
    template = admitted / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "\n")
    with pytest.raises(KilnError) as caught:
        recheck(admitted)
    assert caught.value.code == "KLN207"
    assert "chat_template.jinja changed" in caught.value.message
