"""``kiln teacher score`` with a tiny model of its own: values, order, restarts, refusals."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.distilling import scoring_local
from kiln_stages.distilling.identity import parse_manifest
from kiln_stages.distilling.registry import read_registry
from kiln_stages.distilling.targets import TargetFinder
from rows_to_score import ACTION, ROWS, lines_of, write_rows
from tiny_model import RUN, Kiln, write_tiny_model

from kiln_cli.config import load_config
from kiln_cli.files import run_lock
from kiln_cli.plugins import Plugins


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln) -> Path:
    directory = tmp_path_factory.mktemp("scoring")
    assert kiln("teacher", "register", "tiny", "--model", tiny_model, "--registry", directory).code == 0
    return directory


@pytest.fixture(scope="module")
def request_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("request") / "rows.jsonl", ROWS)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory, registry: Path, request_file: Path, kiln: Kiln) -> Path:
    """The scored rows of an uncut run."""
    out = tmp_path_factory.mktemp("corpus") / "teacher.jsonl"
    done = score(kiln, registry, request_file, out)
    assert done.code == 0, done.err
    return out


def score(kiln: Kiln, registry: Path, request: Path, out: Path, *more: object) -> Any:
    return kiln("teacher", "score", request, "--teacher", "tiny", "--out", out, "--registry", registry, *more)


def test_the_corpus_begins_with_the_manifest_and_has_a_line_a_row(corpus: Path, registry: Path, kiln: Kiln) -> None:
    first, *rows = corpus.read_bytes().splitlines(keepends=True)
    assert first.decode("utf-8") == kiln("teacher", "manifest", "tiny", "--registry", registry).out
    assert parse_manifest(first[:-1]) == read_registry(registry).get("tiny").identity
    assert len(rows) == len(ROWS) and all(row.endswith(b"\n") for row in rows)
    written = [json.loads(row) for row in rows]
    assert [row.get("id") for row in written] == ["a", None, None, None]
    assert [row["teacher_response"] for row in written] == ["café 😀", "yes", "second", "ok"]
    assert written[0]["messages"] == ROWS[0]["messages"][:1] and written[1]["metadata"] == ROWS[1]["metadata"]
    assert written[3]["trajectory"] == ROWS[3]["trajectory"]
    assert not corpus.with_name("teacher.jsonl.partial").exists()


def test_targets_are_those_that_admission_computes(corpus: Path, tiny_model: Path, plugins: Plugins) -> None:
    config = load_config(None).replace("model", path=str(tiny_model))
    contract = build_contract(config, load_terms(config, plugins))
    finder = TargetFinder(contract)
    for row in lines_of(corpus)[1:]:
        if "trajectory" in row:
            continue
        messages = [*row["messages"], {"role": "assistant", "content": row["teacher_response"]}]
        rendered = contract.finder.find(messages)
        encoded = contract.tokenizer.encode(rendered.text, rendered.spans, rendered.content_spans)
        labelled = [q for first, last in encoded.label_spans for q in range(first, last)]
        found = finder.find(row["messages"], row["teacher_response"])
        assert found.action_targets == labelled
        assert [entry["token_id"] for entry in row["teacher_tokens"]] == [encoded.input_ids[q] for q in labelled]
        texts = "".join(entry["token"] for entry in row["teacher_tokens"])
        assert texts.endswith(row["teacher_response"] + "<|im_end|>\n")
    (trajectory,) = (row for row in lines_of(corpus)[1:] if "trajectory" in row)
    assert "".join(entry["token"] for entry in trajectory["teacher_tokens"]) == "get_weather(city)ok"


def reference(model: Path, input_ids: list[int], adapter: Path | None = None) -> Any:
    """[T, V] float64: the whole forward pass of transformers, and peft where there is an adapter."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    causal = causal if adapter is None else PeftModel.from_pretrained(causal, str(adapter)).eval()
    with torch.no_grad():
        return causal(torch.tensor([input_ids])).logits[0].double().log_softmax(-1)


def require_reference(row: dict[str, Any], model: Path, plugins: Plugins, adapter: Path | None = None) -> None:
    """Every candidate and score of a row is what a full-vocabulary pass gives."""
    import torch

    config = load_config(None).replace("model", path=str(model))
    finder = TargetFinder(build_contract(config, load_terms(config, plugins)))
    found = finder.find(row["messages"], row["teacher_response"])
    full = reference(model, found.input_ids, adapter)
    for q, entry in zip(found.action_targets, row["teacher_tokens"], strict=True):
        ids = torch.tensor([each["token_id"] for each in entry["top_logprobs"]])
        given = torch.tensor([each["logprob"] for each in entry["top_logprobs"]], dtype=torch.float64)
        assert torch.allclose(given, full[q - 1][ids], rtol=0, atol=2e-5)
        assert float(full[q - 1].topk(len(ids)).values[-1]) <= float(given[-1]) + 2e-5
        assert abs(entry["logprob"] - float(full[q - 1][entry["token_id"]])) < 2e-5


def test_scores_are_those_of_a_full_vocabulary_pass(corpus: Path, tiny_model: Path, plugins: Plugins) -> None:
    for row in lines_of(corpus)[1:4]:
        require_reference(row, tiny_model, plugins)


def test_a_teacher_with_an_adapter_scores_as_peft_does(
    finished: Path, kiln: Kiln, tmp_path: Path, plugins: Plugins
) -> None:
    model, adapter = finished / "model", finished / RUN / "train" / "adapter"
    registered = kiln("teacher", "register", "tiny", "--model", model, "--adapter", adapter, "--registry", tmp_path)
    assert registered.code == 0, registered.err
    out = tmp_path / "teacher.jsonl"
    assert score(kiln, tmp_path, write_rows(tmp_path / "rows.jsonl", ROWS[:1]), out).code == 0
    require_reference(lines_of(out)[1], model.resolve(), plugins, adapter)


def test_an_adapter_of_another_model_is_refused(
    finished: Path, kiln: Kiln, tmp_path: Path, copy_of: Callable[..., Path]
) -> None:
    from kiln_stages.training.tensors import encode_tensors, read_tensors

    adapter = copy_of(finished) / RUN / "train" / "adapter"
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(encode_tensors(read_tensors(path.read_bytes())[:-1]))
    kiln("teacher", "register", "tiny", "--model", finished / "model", "--adapter", adapter, "--registry", tmp_path)
    done = score(kiln, tmp_path, write_rows(tmp_path / "rows.jsonl", ROWS[:1]), tmp_path / "out.jsonl")
    assert done.code == 2 and "KLN221" in done.err and "1 of its tensors" in done.err


def test_what_is_written_keeps_the_rules_of_admission(corpus: Path) -> None:
    import math

    from kiln_stages.distilling.candidates import narrow
    from kiln_stages.distilling.scores import MASS_LIMIT

    for row in lines_of(corpus)[1:]:
        for entry in row["teacher_tokens"]:
            pairs = [(each["token_id"], narrow(each["logprob"])) for each in entry["top_logprobs"]]
            assert len(pairs) == 32 == len({number for number, _ in pairs})
            assert pairs == sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            assert all(-9999 < logprob <= 0 for _, logprob in pairs)
            assert math.fsum(math.exp(logprob) for _, logprob in pairs) <= MASS_LIMIT


def test_what_is_written_is_admitted(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    """Every row, a trajectory too, with every id proven, by the command that is printed."""
    said = score(kiln, registry, request_file, corpus).err
    command = re.search(r"^next: kiln (admit .*) --out RUN$", said, re.MULTILINE)
    assert command is not None, said
    done = kiln(*command[1].split(), "--require-token-ids", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "run" / "admit_manifest.json").read_text())["counts"]["corpus"]
    assert rows["rows_kept"] == len(ROWS)


def test_the_same_bytes_come_out_again_and_in_another_process(
    corpus: Path, registry: Path, request_file: Path, kiln_process: Kiln, tmp_path: Path
) -> None:
    out = tmp_path / "again.jsonl"
    done = score(kiln_process, registry, request_file, out)
    assert done.code == 0, done.err
    assert out.read_bytes() == corpus.read_bytes()


def test_positions_times_vocabulary_is_never_held(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kiln_stages.training.model import LanguageModel

    seen: list[int] = []
    project = LanguageModel.project

    def recorded(self: LanguageModel, rows: Any) -> Any:
        logits = project(self, rows)
        seen.append(logits.numel())
        return logits

    vocabulary = read_registry(registry).get("tiny").identity.vocab_size
    monkeypatch.setattr(LanguageModel, "project", recorded)
    monkeypatch.setattr(scoring_local, "LOGITS_AT_ONCE", 5 * vocabulary)
    out = tmp_path / "teacher.jsonl"
    assert score(kiln, registry, request_file, out).code == 0
    assert max(seen[1:]) <= 5 * vocabulary  # the first is the probe's
    assert len(seen) > len(ROWS)
    for ours, theirs in zip(lines_of(out)[1:], lines_of(corpus)[1:], strict=True):
        for left, right in zip(ours["teacher_tokens"], theirs["teacher_tokens"], strict=True):
            assert left["token_id"] == right["token_id"] and abs(left["logprob"] - right["logprob"]) < 1e-5


def cut_run(corpus: Path, out: Path, size: int) -> None:
    """What a run that was killed left: the first bytes of the corpus, under another name."""
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True)
    (partial / "rows.jsonl").write_bytes(corpus.read_bytes()[:size])


def test_a_run_cut_at_any_byte_goes_on_to_the_same_bytes(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    whole = corpus.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == 0x0A]
    cuts = {0, 1, ends[0] - 1, ends[0], ends[0] + 1, ends[1] - 1, ends[2], ends[3] + 50, ends[-1] - 1, ends[-1]}
    for size in sorted(cuts):
        out = tmp_path / str(size) / "teacher.jsonl"
        cut_run(corpus, out, size)
        done = score(kiln, registry, request_file, out, "--json")
        assert done.code == 0, done.err
        assert out.read_bytes() == whole
        found = max(0, sum(end <= size for end in ends) - 1)
        result = json.loads(done.out)
        assert (result["rows_found"], result["rows"]) == (found, len(ROWS))
        assert not out.with_name("teacher.jsonl.partial").exists()


def test_what_a_run_stopped_at_is_kept(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, calls = scoring_local.LocalScorer.score, []

    def interrupted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return scored(self, *arguments)

    monkeypatch.setattr(scoring_local.LocalScorer, "score", interrupted)
    out = tmp_path / "teacher.jsonl"
    assert score(kiln, registry, request_file, out).code == 130
    assert not out.exists()
    assert len((tmp_path / "teacher.jsonl.partial" / "rows.jsonl").read_bytes().splitlines()) == 3
    monkeypatch.setattr(scoring_local.LocalScorer, "score", scored)
    assert score(kiln, registry, request_file, out).code == 0
    assert out.read_bytes() == corpus.read_bytes()


def test_a_finished_corpus_is_left_as_it_is(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    out = Path(shutil.copy2(corpus, tmp_path / "teacher.jsonl"))
    before = out.stat().st_mtime_ns
    (tmp_path / "teacher.jsonl.partial").mkdir()  # a run was killed between its last two acts
    done = score(kiln, registry, request_file, out)
    assert done.code == 0 and "unchanged" in done.err
    assert out.stat().st_mtime_ns == before and not (tmp_path / "teacher.jsonl.partial").exists()


def flipped(data: bytes, old: bytes, new: bytes) -> bytes:
    assert old in data
    return data.replace(old, new, 1)


OTHERS: list[tuple[Callable[[bytes], bytes], str]] = [
    (lambda data: flipped(data, b'"vocab_size":', b'"vocab_size": '), "line 1: it is not the manifest line"),
    (lambda data: flipped(data, b'"id":"a"', b'"id":"b"'), "line 2: other_row"),
    (lambda data: flipped(data, b'"teacher_response":"yes"', b'"teacher_response":"yet"'), "line 3: other_row"),
    (lambda data: flipped(data, b'"logprob":-', b'"logprob":'), "line 2: logprob_positive"),
    (lambda data: flipped(data, b'"top_logprobs":[{"logprob":-', b'"top_logprobs":[{"logprob":'), "logprob_positive"),
    (lambda data: flipped(data, b'"token":"', b'"token":"x'), "line 2: other_entry"),
    (lambda data: data + data.splitlines(keepends=True)[-1], "line 6: the request has no such row"),
    (lambda data: data + b"{}", "line 6: it is missing or cut"),
    (lambda data: data[: data.rindex(b"\n", 0, -1) + 1], "line 5: it is missing or cut"),
]


@pytest.mark.parametrize("change, message", OTHERS, ids=[message for _, message in OTHERS])
def test_a_file_that_is_no_answer_to_the_request_is_not_touched(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path,
    change: Callable[[bytes], bytes], message: str,
) -> None:  # fmt: skip
    out = tmp_path / "teacher.jsonl"
    out.write_bytes(change(corpus.read_bytes()))
    before = out.read_bytes()
    done = score(kiln, registry, request_file, out)
    assert done.code == 2 and "KLN207" in done.err and message in done.err, done.err
    assert out.read_bytes() == before


def test_other_settings_do_not_go_on_with_what_was_scored(
    corpus: Path, registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    out = tmp_path / "teacher.jsonl"
    cut_run(corpus, out, len(corpus.read_bytes()) - 10)
    done = score(kiln, registry, request_file, out, "--top-k", "16")
    assert done.code == 2 and "KLN207" in done.err and "32 candidates, not 16" in done.err


def test_two_runs_do_not_write_one_corpus(registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path) -> None:
    out = tmp_path / "teacher.jsonl"
    with run_lock(tmp_path / "teacher.jsonl.partial", "another"):
        done = score(kiln, registry, request_file, out)
    assert done.code == 4 and "KLN401" in done.err and not out.exists()


REFUSED: list[tuple[Any, str]] = [
    ("[]", "row_not_object"),
    ("{", "invalid_json"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no_response at /messages"),
    ({"messages": [], "teacher_response": "x"}, "empty_messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "empty_messages"),
    ({"messages": [{"role": "user", "content": "x"}], "teacher_response": ""}, "empty_response"),
    ({"messages": [{"role": "user", "content": "x"}], "teacher_response": 1}, "invalid_json at /teacher_response"),
    ({"teacher_response": "x"}, "invalid_json at /messages"),
    ({"messages": [{"role": "sir", "content": "x"}], "teacher_response": "y"}, "invalid_role"),
    ({"messages": [{"role": "user", "content": "x"}], "teacher_response": "y", "id": 7}, "invalid_json at /id"),
    ({**ROWS[0], "tools": [{"name": "f"}]}, "unsupported_field at /tools"),
    (
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "tool_calls": [{}]}]},
        "unsupported_field at /messages/1: an answer to score is text alone; it has tool_calls",
    ),
    ({"messages": [{"role": "user", "content": "x"}], "trajectory": [{**ACTION, "kind": "act"}]}, "/trajectory/0/kind"),
    ({"messages": [{"role": "user", "content": "x"}], "trajectory": [{**ACTION, "kind": "context"}]}, "no_action_tok"),
    ({"messages": [{"role": "user", "content": "x " * 600}], "teacher_response": "y"}, "over_length"),
    ({"schema": "kiln.off-policy-distillation-manifest.v1"}, "already_scored"),
]


@pytest.mark.parametrize("row, message", REFUSED, ids=[message for _, message in REFUSED])
def test_a_row_that_cannot_be_scored_is_named_before_any_is(
    registry: Path, kiln: Kiln, tmp_path: Path, row: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring_local, "LocalScorer", None)  # nothing is loaded
    text = row if isinstance(row, str) else json.dumps(row)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n\n" + text + "\n", encoding="utf-8")
    done = score(kiln, registry, path, tmp_path / "out.jsonl")
    assert done.code == 1 and "KLN113" in done.err and "line 3: " in done.err and message in done.err, done.err
    assert not (tmp_path / "out.jsonl").exists()


def test_all_rows_that_cannot_be_scored_are_counted(registry: Path, kiln: Kiln, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": []} for _ in range(25)])
    done = score(kiln, registry, path, tmp_path / "out.jsonl", "--json")
    assert "25 rows of" in done.err and "and 5 more" in done.err
    assert len(json.loads(done.out)["error"]["details"]["faults"]) == 20


def test_an_empty_request_is_refused(registry: Path, kiln: Kiln, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\n \n")
    done = score(kiln, registry, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert done.code == 1 and "KLN107" in done.err


def test_fields_that_no_scored_row_has_are_counted(registry: Path, kiln: Kiln, tmp_path: Path) -> None:
    rows = [{**ROWS[1], "loss_weight": 2, "teacher_tokens": [{"token": "x"}]}, {**ROWS[1], "loss_weight": 1}]
    done = score(kiln, registry, write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "out.jsonl", "--json")
    assert json.loads(done.out)["ignored_fields"] == {"loss_weight": 2, "teacher_tokens": 1}
    assert "field loss_weight of 2 rows is not in the corpus" in done.err
    assert "loss_weight" not in (tmp_path / "out.jsonl").read_text()


def test_d2_rows_of_another_tokenizer_are_refused_with_both_hashes(
    registry: Path, request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    """Report D2: ids of one vocabulary mean nothing to a teacher of another."""
    student = write_tiny_model(tmp_path / "student")
    text = (student / "tokenizer.json").read_text(encoding="utf-8")
    (student / "tokenizer.json").write_text(text.replace("<|endoftext|>", "<|theend|>"), encoding="utf-8")
    done = score(kiln, registry, request_file, tmp_path / "out.jsonl", "--model", student)
    teacher = read_registry(registry).get("tiny").identity
    assert done.code == 2 and "KLN221" in done.err and teacher.tokenizer_vocab_sha256 in done.err
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_more_candidates_than_the_teacher_gives_are_refused(
    request_file: Path, kiln: Kiln, tmp_path: Path, tiny_model: Path
) -> None:
    assert (
        kiln("teacher", "register", "tiny", "--model", tiny_model, "--max-top-k", "16", "--registry", tmp_path).code
        == 0
    )
    done = score(kiln, tmp_path, request_file, tmp_path / "out.jsonl")
    assert done.code == 2 and "--top-k is 32, the teacher gives at most 16" in done.err
    assert score(kiln, tmp_path, request_file, tmp_path / "out.jsonl", "--top-k", "16").code == 0
    assert {len(entry["top_logprobs"]) for entry in lines_of(tmp_path / "out.jsonl")[1]["teacher_tokens"]} == {16}
    assert score(kiln, tmp_path, request_file, tmp_path / "o", "--top-k", "8").code == 2


def test_a_teacher_whose_files_changed_scores_nothing(
    project: Path, copy_of: Callable[..., Path], request_file: Path, kiln: Kiln, tmp_path: Path
) -> None:
    model = copy_of(project, own_model=True) / "model"
    assert kiln("teacher", "register", "tiny", "--model", model, "--registry", tmp_path).code == 0
    other = write_tiny_model(tmp_path / "other", seed=8)
    shutil.copy(other / "model.safetensors", model / "model.safetensors")
    done = score(kiln, tmp_path, request_file, tmp_path / "out.jsonl")
    assert done.code == 1 and "KLN103" in done.err and "base_model_sha256: pinned" in done.err
    assert not (tmp_path / "out.jsonl").exists()


def test_the_config_says_by_which_template_rows_are_scored(
    project: Path, registry: Path, kiln: Kiln, tmp_path: Path
) -> None:
    """The rows are to be admitted by it, so its template makes their ids."""
    config = project / "kiln.toml"
    (project / "mine.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
        encoding="utf-8",
    )
    config.write_text(config.read_text().replace("[admit]\n", '[admit]\ntemplate = "mine.jinja"\n'))
    out = tmp_path / "teacher.jsonl"
    done = score(kiln, registry, write_rows(tmp_path / "rows.jsonl", ROWS[1:2]), out, "--config", config)
    assert done.code == 0, done.err
    assert "".join(entry["token"] for entry in lines_of(out)[1]["teacher_tokens"]) == "yes<|im_end|>"


def test_the_registry_is_the_configs(project: Path, kiln: Kiln, tmp_path: Path) -> None:
    assert kiln("teacher", "register", "tiny", "--model", project / "model", "--registry", project / ".kiln").code == 0
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[1:2])
    done = kiln(
        "teacher", "score", rows, "--teacher", "tiny", "--out", tmp_path / "o", "--config", project / "kiln.toml"
    )
    assert done.code == 0, done.err


def test_a_student_with_other_tokenizer_settings_is_told_what_admission_will_want(
    project: Path, copy_of: Callable[..., Path], registry: Path, kiln: Kiln, tmp_path: Path
) -> None:
    student = copy_of(project, own_model=True) / "model"
    (student / "chat_template.jinja").write_text(
        (student / "chat_template.jinja").read_text() + "{# other #}", encoding="utf-8"
    )
    rows = write_rows(tmp_path / "rows.jsonl", ROWS[1:2])
    done = score(kiln, registry, rows, tmp_path / "o", "--model", student)
    assert done.code == 0 and "other_tokenizer_config = true" in done.err
    assert "other_tokenizer_config" not in score(kiln, registry, rows, tmp_path / "p").err


def test_local_scoring_never_imports_what_opens_sockets(
    registry: Path, request_file: Path, tmp_path: Path, kiln_process: Kiln
) -> None:
    import subprocess
    import sys

    arguments = ["teacher", "score", str(request_file), "--teacher", "tiny", "--out", str(tmp_path / "t.jsonl")]
    script = (
        "import sys\nfrom kiln_cli.app import run\n"
        f"code = run({[*arguments, '--registry', str(registry)]!r})\n"
        "print(int(code), 'kiln_stages.distilling.scoring_endpoint' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["0", "False"], done.stderr
