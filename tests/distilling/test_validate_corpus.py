"""``kiln validate`` of scored corpora and of a registry of teachers: by themselves, without a student."""

from __future__ import annotations

from pathlib import Path

import pytest
from kiln_stages.validate import FileReport, run
from scored_corpus import Scorer, corpus, line, register_teacher, teacher_identity
from tests_support import shared_path

from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins


def report(path: Path, kind: str | None = None) -> FileReport:
    return run([path], load_plugins(), kind=kind, max_faults=100)[0]


def reasons(found: FileReport) -> list[tuple[int, str, str]]:
    return [(one.line, one.reason, one.pointer) for one in found.findings]


def test_a_sound_corpus_has_no_fault(tmp_path: Path, scorer: Scorer, student: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(corpus(teacher_identity(student), [scorer.example(), b"", scorer.example("Other?")]))
    found = report(path)
    assert (found.kind, found.rows, found.faults) == ("opd", 2, 0)
    assert "manifest line" in found.why


def test_every_fault_has_its_line(tmp_path: Path, scorer: Scorer, student: Path) -> None:
    identity = teacher_identity(student)
    bad = scorer.example()
    bad["teacher_tokens"][1]["top_logprobs"][0]["logprob"] = 0.5
    bad["teacher_tokens"][2]["top_logprobs"][3]["token_id"] = identity.vocab_size
    empty = {**scorer.example(), "messages": [], "teacher_response": "", "teacher_tokens": []}
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(corpus(identity, [scorer.example(), b"{", bad, identity.manifest_line(), empty]))
    assert reasons(report(path)) == [
        (3, "invalid_json", ""),
        (4, "logprob_positive", "/teacher_tokens/1/top_logprobs/0/logprob"),
        (4, "token_id_out_of_vocab", "/teacher_tokens/2/top_logprobs/3/token_id"),
        (5, "manifest_not_first", ""),
        (6, "empty_messages", "/messages"),
        (6, "empty_teacher_response", "/teacher_response"),
        (6, "no_teacher_tokens", "/teacher_tokens"),
    ]


def test_a_manifest_line_is_held_to_its_form(tmp_path: Path, scorer: Scorer, student: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(b" " + corpus(teacher_identity(student), [scorer.example()]))
    assert reasons(report(path)) == [(1, "manifest_invalid", "")]


def test_a_corpus_without_a_manifest_is_told_by_its_rows(tmp_path: Path, scorer: Scorer) -> None:
    found = report(shared_path("data/opd/smollm2_teacher_rows.jsonl"))
    assert (found.kind, found.rows, found.faults) == ("opd", 12, 13)
    assert {reason for _, reason, _ in reasons(found)} == {"manifest_missing", "logprobs_without_manifest"}
    path = tmp_path / "rows.jsonl"
    path.write_bytes(line(scorer.example()) + b"\n")
    assert report(path, "opd").faults == 2


def test_a_registry_is_held_against_itself(tmp_path: Path, student: Path) -> None:
    register_teacher(tmp_path, teacher_identity(student))
    path = tmp_path / "teachers.json"
    assert (report(path).kind, report(path).rows, report(path).faults) == ("teachers", 1, 0)
    path.write_bytes(path.read_bytes().replace(b'"raw_logprobs"', b'"logits"'))
    found = report(path)
    assert found.faults == 1
    assert "logprobs_mode is 'logits'" in found.findings[0].detail
    copy = tmp_path / "copy.json"
    copy.write_bytes(path.read_bytes())
    with pytest.raises(KilnError, match="no registry's name"):
        report(copy)
