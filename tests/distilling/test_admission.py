"""Admission of scored corpora: each rule with the line, the position and both values, and what a sound corpus gives."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.ingestion import read_scored_ingestion
from kiln_stages.distilling.rows import ScoredRows
from scored_corpus import ALIAS, TOP_K, Admit, Refuse, Scorer, corpus, line, local_identity, teacher_identity

from kiln_cli.errors import KilnError

Row = dict[str, Any]
Change = Callable[[Row], Any]
LAST = TOP_K - 1
TOP = "/teacher_tokens/1/top_logprobs"  # the candidates that the rules below are broken in


def entry(row: Row, at: int) -> Row:
    found: Row = row["teacher_tokens"][at]
    return found


def candidate(row: Row, at: int, number: int) -> Row:
    found: Row = entry(row, at)["top_logprobs"][number]
    return found


def setting(*path: Any, to: Any) -> Change:
    """A change of one value of a row, by its path."""

    def change(row: Row) -> None:
        *before, last = path
        at: Any = row
        for key in before:
            at = at[key]
        at[last] = to

    return change


def score(at: int, number: int, value: Any) -> Change:
    return setting("teacher_tokens", at, "top_logprobs", number, "logprob", to=value)


def without(*path: Any) -> Change:
    def change(row: Row) -> None:
        *before, last = path
        at: Any = row
        for key in before:
            at = at[key]
        del at[last]

    return change


def parts(error: KilnError) -> tuple[str, str, str]:
    """Code, pointer and detail of the fault that is told."""
    assert error.code == "KLN112"
    assert error.exit_code == 1
    assert isinstance(error.details, dict)
    (fault,) = error.details["faults"]
    return fault["code"], fault["pointer"], fault["detail"]


# ---- one rule at a time

# Each: what is done to the row in line 3, the code, where, and what the message has (both values).
RULES: dict[str, tuple[Change, str, str, list[str]]] = {
    "messages missing": (without("messages"), "invalid_json", "/messages", ["missing_field", "found nothing"]),
    "messages null": (setting("messages", to=None), "invalid_json", "/messages", ["expected an array, found null"]),
    "message without a role": (without("messages", 0, "role"), "invalid_json", "/messages/0/role", ["a string"]),
    "response missing": (without("teacher_response"), "invalid_json", "/teacher_response", ["missing_field"]),
    "response a number": (setting("teacher_response", to=5), "invalid_json", "/teacher_response", ["found a number"]),
    "tokens an object": (setting("teacher_tokens", to={}), "invalid_json", "/teacher_tokens", ["found an object"]),
    "a token a text": (setting("teacher_tokens", 1, to="x"), "invalid_json", "/teacher_tokens/1", ["found a string"]),
    "token_id a double": (
        setting("teacher_tokens", 1, "token_id", to=1.0),
        "invalid_json",
        "/teacher_tokens/1/token_id",
        ["an integer or null", "a number"],
    ),
    "candidate id a text": (
        setting("teacher_tokens", 1, "top_logprobs", 2, "token_id", to="7"),
        "invalid_json",
        f"{TOP}/2/token_id",
        ["an integer", "a string"],
    ),
    "candidate id a boolean": (
        setting("teacher_tokens", 1, "top_logprobs", 2, "token_id", to=True),
        "invalid_json",
        f"{TOP}/2/token_id",
        ["an integer", "a boolean"],
    ),
    "logprob a boolean": (score(1, 2, False), "invalid_json", f"{TOP}/2/logprob", ["a number"]),
    "logprob another text": (score(1, 2, "low"), "invalid_json", f"{TOP}/2/logprob", ["a number"]),
    "candidates an object": (
        setting("teacher_tokens", 1, "top_logprobs", to={}),
        "invalid_json",
        TOP,
        ["an array", "an object"],
    ),
    "segment kind": (
        setting("trajectory", to=[{"role": "user", "content": "x", "kind": "reward"}]),
        "invalid_json",
        "/trajectory/0/kind",
        ["action, observation, context", "'reward'"],
    ),
    "segment without content": (
        setting("trajectory", to=[{"role": "user", "kind": "action"}]),
        "invalid_json",
        "/trajectory/0/content",
        ["missing_field"],
    ),
    "warning below zero": (
        setting("trajectory", to=[{"role": "user", "content": "x", "warning_prefix_len": -1}]),
        "invalid_json",
        "/trajectory/0/warning_prefix_len",
        ["-1"],
    ),
    "no messages": (setting("messages", to=[]), "empty_messages", "/messages", ["no messages"]),
    "empty response": (setting("teacher_response", to=""), "empty_teacher_response", "/teacher_response", ["empty"]),
    "role": (setting("messages", 0, "role", to="critic"), "invalid_role", "/messages/0/role", ["'critic'", "user"]),
    "no actions": (
        setting("trajectory", to=[{"role": "user", "content": "x", "kind": "observation"}]),
        "no_action_tokens",
        "/trajectory",
        ["no segment of kind action"],
    ),
    "no tokens": (without("teacher_tokens"), "teacher_token_count_mismatch", "/teacher_tokens", ["found 0"]),
    "a token too few": (
        without("teacher_tokens", -1),
        "teacher_token_count_mismatch",
        "/teacher_tokens",
        ["first target without an entry"],
    ),
    "id of another token": (
        setting("teacher_tokens", 1, "token_id", to=9),
        "token_id_mismatch",
        "/teacher_tokens/1/token_id",
        ["token_id is 9", "the target is"],
    ),
    "too few candidates": (
        without("teacher_tokens", 1, "top_logprobs", LAST),
        "too_few_candidates",
        TOP,
        [f"at least {TOP_K}", f"found {TOP_K - 1}"],
    ),
    "no candidates": (without("teacher_tokens", 1, "top_logprobs"), "too_few_candidates", TOP, ["found 0"]),
    "id beyond the vocabulary": (
        setting("teacher_tokens", 1, "top_logprobs", 2, "token_id", to=151990),
        "token_id_out_of_vocab",
        f"{TOP}/2/token_id",
        ["token_id is 151990", "expected 0.."],
    ),
    "id below zero": (
        setting("teacher_tokens", 1, "top_logprobs", 2, "token_id", to=-1),
        "token_id_out_of_vocab",
        f"{TOP}/2/token_id",
        ["token_id is -1"],
    ),
    "beyond float32": (
        score(1, LAST, -1e39),
        "logprob_not_finite",
        f"{TOP}/{LAST}/logprob",
        ["-1e+39", "finite as a 32-bit float"],
    ),
    "an id twice": (
        setting("teacher_tokens", 1, "top_logprobs", 2, "token_id", to=6),
        "duplicate_candidate",
        f"{TOP}/2/token_id",
        ["token_id 6 stands at 1 and at 2"],
    ),
    "above zero": (score(1, 0, 0.1), "logprob_positive", f"{TOP}/0/logprob", ["0.1", "at most 0"]),
    "unsorted": (score(1, 2, -0.5), "logprobs_not_sorted", f"{TOP}/2/logprob", ["-0.5", "-1.386294"]),
    "mass above one": (score(1, 0, -0.1), "mass_above_one", TOP, ["1.4048", "1.0000038"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_row_that_breaks_a_rule_refuses_the_corpus(name: str, scorer: Scorer, refuse: Refuse, tmp_path: Path) -> None:
    change, code, pointer, told = RULES[name]
    row = scorer.example(response="It will rain.")
    change(row)
    error = refuse([scorer.example(), row, scorer.example("And then?", "Sun.")])
    assert parts(error)[:2] == (code, pointer)
    assert error.message.startswith(f"{tmp_path}/corpus.jsonl:3: ")
    assert all(text in error.message for text in told), error.message
    assert "\n" not in error.message


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b'{"messages":[}', "syntax"),
        (b'{"a":1,"a":2}', "duplicate_key"),
        (b'{"a":NaN}', "not_finite"),
        (b'{"a":-Infinity}', "not_finite"),
        (b'{"a":1e400}', "not_finite"),
        (b'{"a":1} x', "trailing_data"),
        (b'{"a":"\xff"}', "invalid_utf8"),
        (b'{"a":"\\ud800"}', "lone_surrogate"),
        (b"[" * 128 + b"]" * 128, "too_deep"),
        (b"[]", "row_not_object"),
        (b"null", "row_not_object"),
    ],
)
def test_a_line_that_is_no_object_refuses_the_corpus(data: bytes, told: str, scorer: Scorer, refuse: Refuse) -> None:
    code, _, detail = parts(refuse([scorer.example(), data]))
    assert code == "invalid_json"
    assert detail.startswith(told)


def test_a_line_may_be_longer_than_one_of_conversations(scorer: Scorer, admit: Admit) -> None:
    padded = scorer.example(metadata="x" * 17 * 1024 * 1024)
    assert admit([padded]).manifest.counts["corpus"]["rows_kept"] == 1


def test_a_line_beyond_the_cap_is_refused(scorer: Scorer, refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiln_stages.distilling.corpus.LINE_CAP", 50_000)
    monkeypatch.setattr("kiln_stages.distilling.examples.LINE_CAP", 50_000)
    code, _, detail = parts(refuse([scorer.example(metadata="x" * 100_000)]))
    assert (code, detail.split(":")[0]) == ("invalid_json", "line_too_long")


# ---- the order of the checks


def test_what_is_told_follows_the_order_of_the_contract(scorer: Scorer, refuse: Refuse, student: Path) -> None:
    """A later line's fault of an earlier kind comes first, wherever it stands."""
    broken = scorer.example()
    score(0, 0, 0.5)(broken)
    manifest = teacher_identity(student).manifest_line()
    assert parts(refuse([broken, manifest, b"{"]))[0] == "invalid_json"
    assert parts(refuse([broken, manifest]))[0] == "manifest_not_first"
    assert parts(refuse([broken, scorer.example()]))[0] == "logprob_positive"


def test_what_is_told_does_not_depend_on_the_pieces(
    scorer: Scorer, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiln_stages.distilling.admission.RANGE_BYTES", 2000)
    monkeypatch.setattr("kiln_stages.distilling.corpus.RANGE_BYTES", 2000)
    rows = [scorer.example(f"{number}?") for number in range(10)]
    broken = scorer.example()
    score(0, 0, 0.5)(broken)
    assert parts(refuse([broken, *rows, b"{"], workers=2))[0] == "invalid_json"
    assert ":12: example 11: logprob_positive" in refuse([*rows, broken], workers=2).message


def test_of_one_row_the_first_rule_is_told(scorer: Scorer, refuse: Refuse) -> None:
    """Each further rule is broken, too; taking the first one away shows the next."""
    row = scorer.example()
    setting("messages", 0, "role", to="critic")(row)
    setting("teacher_response", to="")(row)
    row["teacher_tokens"].append(copy.deepcopy(entry(row, 0)))
    setting("teacher_tokens", 2, "token_id", to=1)(row)
    without("teacher_tokens", 1, "top_logprobs", LAST)(row)
    score(0, LAST, -1e39)(row)
    setting("teacher_tokens", 0, "top_logprobs", 1, "token_id", to=0)(row)
    sound = scorer.example()
    found = []
    for mend in (
        setting("teacher_response", to=sound["teacher_response"]),
        setting("messages", to=sound["messages"]),
        without("teacher_tokens", -1),
        setting("teacher_tokens", 2, "token_id", to=entry(sound, 2)["token_id"]),
        score(0, LAST, candidate(sound, 0, LAST)["logprob"]),
        setting("teacher_tokens", 0, "top_logprobs", 1, "token_id", to=1),
    ):
        found.append(parts(refuse([row]))[0])
        mend(row)
    assert found == [
        "empty_teacher_response",
        "invalid_role",
        "teacher_token_count_mismatch",
        "token_id_mismatch",
        "logprob_not_finite",
        "duplicate_candidate",
    ]
    assert parts(refuse([row]))[0] == "too_few_candidates"


def test_ids_of_all_tokens_come_before_any_score(scorer: Scorer, refuse: Refuse) -> None:
    row = scorer.example()
    score(0, 0, 0.5)(row)
    setting("teacher_tokens", -1, "token_id", to=1)(row)
    assert parts(refuse([row]))[0] == "token_id_mismatch"


def test_every_fault_is_reported_where_all_are_asked_for(scorer: Scorer, refuse: Refuse) -> None:
    shifted = scorer.example()
    for at in range(3):
        setting("teacher_tokens", at, "token_id", to=1)(shifted)
    unsorted = scorer.example("Other?")
    score(1, 2, -0.5)(unsorted)
    score(2, 0, 0.5)(unsorted)
    told: list[tuple[int, int, str]] = []
    error = refuse(
        [scorer.example(), shifted, b"{", unsorted],
        on_fault=lambda path, fault: told.append((fault.line, fault.example, fault.code)),
    )
    assert parts(error)[0] == "invalid_json"
    assert told == [
        (3, 2, "token_id_mismatch"),
        (3, 2, "token_id_mismatch"),
        (3, 2, "token_id_mismatch"),
        (4, 0, "invalid_json"),
        (5, 3, "logprobs_not_sorted"),
        (5, 3, "logprob_positive"),
    ]


# ---- the manifest line and the teacher


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: b" " + text, "at byte 0 it has ' "),
        (lambda text: text + b" ", "expected 'the end'"),
        (lambda text: b"\xef\xbb\xbf" + text, "no JSON object"),
        (lambda text: text.replace(b'":"', b'": "', 1), "not in canonical form"),
        (lambda text: text.replace(b'"vocab_size":', b'"more":1,"vocab_size":'), "unknown field"),
        (lambda text: json.dumps(json.loads(text), separators=(",", ":"), sort_keys=True).encode(), "at byte"),
        (lambda text: text.replace(b'"raw_logprobs"', b'"logits"'), "logprobs_mode is 'logits'"),
        (lambda text: text.replace(b'"max_top_k":16', b'"max_top_k":0'), "max_top_k is 0"),
    ],
)
def test_a_manifest_line_is_canonical_to_the_byte(
    change: Callable[[bytes], bytes], told: str, scorer: Scorer, refuse: Refuse, student: Path
) -> None:
    manifest = change(teacher_identity(student).manifest_line())
    code, _, detail = parts(refuse([], data=manifest + b"\n" + line(scorer.example()) + b"\n"))
    assert code == "manifest_invalid"
    assert told in detail


def test_a_carriage_return_is_no_part_of_a_line(scorer: Scorer, admit: Admit, student: Path) -> None:
    data = corpus(teacher_identity(student), [scorer.example()]).replace(b"\n", b"\r\n")
    assert admit([], data=data).manifest.counts["corpus"]["rows_kept"] == 1


def test_blank_lines_of_any_white_space_are_none(scorer: Scorer, admit: Admit, student: Path) -> None:
    blank = "\n \t\n\u00a0\u2028 \x0b\n\n".encode()
    row = "\u00a0".encode() + line(scorer.example()) + "\u2029".encode()
    manifest = teacher_identity(student).manifest_line()
    result = admit([], data=blank + manifest + b"\n" + blank + row)
    counts = result.manifest.counts["corpus"]
    assert (counts["rows_kept"], counts["blank_lines"]) == (1, 8)
    (found,) = ScoredRows(Path(result.manifest.inputs[0].path).parent / "run" / "admit" / "corpus.parquet")
    assert (found.row_index, found.line) == (1, 10)


def test_scores_without_a_manifest_are_refused_with_the_first(scorer: Scorer, refuse: Refuse) -> None:
    row = scorer.example()
    plain = copy.deepcopy(row)
    for token in plain["teacher_tokens"]:
        del token["top_logprobs"]
    error = refuse([], data=line(plain) + b"\n" + line(row) + b"\n")
    assert parts(error)[:2] == ("logprobs_without_manifest", "/teacher_tokens/0/top_logprobs/0/logprob")
    assert ":2: example 2:" in error.message
    entry(plain, 3)["logprob"] = -0.5
    error = refuse([], data=line(plain) + b"\n")
    assert parts(error)[:2] == ("logprobs_without_manifest", "/teacher_tokens/3/logprob")
    del entry(plain, 3)["logprob"]
    assert parts(refuse([], data=line(plain) + b"\n"))[0] == "manifest_missing"


def test_a_manifest_behind_an_example_is_not_first(scorer: Scorer, refuse: Refuse, student: Path) -> None:
    manifest = teacher_identity(student).manifest_line()
    error = refuse([], data=line(scorer.example()) + b"\n" + manifest + b"\n")
    assert parts(error)[0] == "manifest_not_first"
    assert ":2: manifest_not_first: it is not the first record" in error.message
    assert "another stands before it" in refuse([scorer.example(), manifest]).message


def test_the_identity_is_the_pinned_one_whole(scorer: Scorer, refuse: Refuse, student: Path) -> None:
    """A digest of a run's settings differs: alias, model and tokenizer are the same."""
    pinned = teacher_identity(student, inference_config_sha256="e" * 64)
    error = refuse([scorer.example()], pinned=pinned)
    assert parts(error)[0] == "teacher_identity_mismatch"
    assert f"inference_config_sha256: pinned {'e' * 64}, found {'d' * 64}" in error.message
    assert ALIAS in error.message


@pytest.mark.parametrize(("teacher", "code"), [(None, "KLN201"), ("other", "KLN212")])
def test_a_corpus_needs_a_teacher_by_name(teacher: str | None, code: str, scorer: Scorer, refuse: Refuse) -> None:
    error = refuse([scorer.example()], teacher=teacher)
    assert error.code == code
    assert "teacher" in error.message


def test_d2_another_tokenizer_is_refused_before_any_row_is_read(refuse: Refuse, student: Path) -> None:
    theirs = teacher_identity(student, tokenizer_vocab_sha256="b" * 64)
    error = refuse([b"this is no row"], identity=theirs)
    assert parts(error)[0] == "tokenizer_mismatch"
    assert "b" * 64 in error.message
    assert teacher_identity(student).tokenizer_vocab_sha256 in error.message


def test_d2_other_settings_of_the_tokenizer_are_refused_unless_ids_prove_the_tokens(
    scorer: Scorer, refuse: Refuse, admit: Admit, student: Path
) -> None:
    theirs = local_identity(student, tokenizer_config_sha256="c" * 64)
    error = refuse([b"this is no row"], identity=theirs)
    assert parts(error)[0] == "tokenizer_mismatch"
    assert "c" * 64 in error.message
    assert teacher_identity(student).tokenizer_config_sha256 in error.message
    allowed = "distill.other_tokenizer_config=true"
    unnamed = scorer.example()
    del entry(unnamed, 1)["token_id"]
    assert parts(refuse([unnamed], allowed, identity=theirs))[0] == "token_id_missing"
    result = admit([scorer.example()], allowed, identity=theirs)
    assert result.manifest.details.teacher_tokenizer == "other"


def test_a_server_digests_tokenizer_settings_by_its_own_rule(scorer: Scorer, admit: Admit, student: Path) -> None:
    result = admit([scorer.example()], identity=teacher_identity(student, tokenizer_config_sha256="c" * 64))
    assert result.manifest.details.teacher_tokenizer == "not comparable"


def test_a_teacher_with_too_few_candidates_is_refused(scorer: Scorer, refuse: Refuse, student: Path) -> None:
    code, _, detail = parts(refuse([scorer.example()], identity=teacher_identity(student, max_top_k=15)))
    assert code == "top_k_unavailable"
    assert "gives at most 15" in detail


def test_the_number_of_candidates_is_resolved(scorer: Scorer, admit: Admit, refuse: Refuse, student: Path) -> None:
    large = teacher_identity(student, max_top_k=33)
    rows = [scorer.example(top_k=33)]
    for asked, resolved in ((100, 32), (32, 32), (31, 16), (16, 16)):
        result = admit(rows, f"distill.top_k={asked}", identity=large)
        corpus_of = scored_corpus(result.manifest)
        assert corpus_of is not None
        assert corpus_of.top_k == resolved
        beyond = (33 - resolved) * len(rows[0]["teacher_tokens"])
        assert result.manifest.counts["corpus"]["candidates_beyond_top_k"] == beyond
    assert parts(refuse([scorer.example(top_k=16)], identity=large))[0] == "too_few_candidates"


def test_a_corpus_without_an_example_is_refused(refuse: Refuse) -> None:
    error = refuse([])
    assert error.code == "KLN107"
    assert refuse([], data=b"\n \n").code == "KLN107"


# ---- what a sound corpus gives


def test_a_sound_corpus_is_kept_whole(scorer: Scorer, admit: Admit, tmp_path: Path, student: Path) -> None:
    rows = [scorer.example(), scorer.example("And tomorrow?", "Sun.")]
    result = admit(rows)
    data = (tmp_path / "corpus.jsonl").read_bytes()
    receipt = read_scored_ingestion(tmp_path / "run" / "admit" / "scored_ingestion.json")
    assert receipt.source_sha256 == "sha256:" + hashlib.sha256(data).hexdigest()
    assert receipt.source_bytes == len(data)
    assert receipt.teacher_identity == teacher_identity(student)
    assert (receipt.examples, receipt.top_k, receipt.duplicate_rows) == (2, TOP_K, 0)
    found = list(ScoredRows(tmp_path / "run" / "admit" / "corpus.parquet"))
    assert [row.line for row in found] == [2, 3]
    for row, given in zip(found, rows, strict=True):
        entries = given["teacher_tokens"]
        assert [row.input_ids[at] for at in row.action_targets] == [token["token_id"] for token in entries]
        assert row.teacher_token_ids == [[one["token_id"] for one in token["top_logprobs"]] for token in entries]
        wanted = [[one["logprob"] for one in token["top_logprobs"]] for token in entries]
        assert all(
            math.isclose(here, there, rel_tol=2**-23)
            for pair in zip(row.teacher_logprobs, wanted, strict=True)
            for here, there in zip(*pair, strict=True)
        )
    corpus_of = scored_corpus(result.manifest)
    assert corpus_of is not None
    assert (corpus_of.sha256, corpus_of.rows_sha256) == (receipt.source_sha256, receipt.scored_corpus_sha256)
    assert result.manifest.inputs[0].sha256 == receipt.source_sha256.removeprefix("sha256:")


def test_the_outcome_does_not_depend_on_the_pieces(
    scorer: Scorer, admit: Admit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [scorer.example(f"Question {number}?", f"Answer {number}.") for number in range(30)]
    whole = admit(rows, workers=1)
    written = (tmp_path / "run" / "admit" / "corpus.parquet").read_bytes()
    monkeypatch.setattr("kiln_stages.distilling.admission.RANGE_BYTES", 4000)
    monkeypatch.setattr("kiln_stages.distilling.corpus.RANGE_BYTES", 4000)
    (tmp_path / "run" / "admit" / ".fingerprint").unlink()
    cut = admit(rows, workers=2)
    assert cut.unchanged
    assert cut.manifest.content_sha256 == whole.manifest.content_sha256
    assert (tmp_path / "run" / "admit" / "corpus.parquet").read_bytes() == written


def test_an_admission_that_is_done_is_not_done_again(
    scorer: Scorer, admit: Admit, student: Path, tmp_path: Path
) -> None:
    admit([scorer.example()])
    before = (tmp_path / "run" / "admit_manifest.json").stat().st_mtime_ns
    assert admit([scorer.example()]).unchanged
    assert (tmp_path / "run" / "admit_manifest.json").stat().st_mtime_ns == before
    assert not admit([scorer.example(), scorer.example("More?")]).unchanged


def test_trajectories_are_admitted_with_their_observations(scorer: Scorer, admit: Admit, tmp_path: Path) -> None:
    steps = [
        {"role": "assistant", "content": '{"city":"Bern"}', "kind": "action", "tool_call_id": "c1"},
        {"role": "tool", "content": "WARN\nrain", "kind": "observation", "warning_prefix_len": 5},
        {"role": "assistant", "content": "It rains.", "kind": "action"},
    ]
    row = scorer.example(trajectory=steps)
    assert admit([row]).manifest.counts["corpus"]["observation_tokens"] > 0
    (found,) = ScoredRows(tmp_path / "run" / "admit" / "corpus.parquet")
    assert found.observation_targets == []
    admit([row], "distill.echo.lambda=0.1")
    (echoed,) = ScoredRows(tmp_path / "run" / "admit" / "corpus.parquet")
    assert 0 < len(echoed.observation_targets) < echoed.observation_tokens == found.observation_tokens
    assert echoed.action_targets == found.action_targets
    assert echoed.row_sha256 != found.row_sha256


def test_alignment_counts_what_the_corpus_names(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    row = scorer.example()
    for at in (0, 3):
        del entry(row, at)["token_id"]
    entry(row, 4)["token_id"] = None
    count = len(row["teacher_tokens"])
    result = admit([row])
    corpus_of = scored_corpus(result.manifest)
    assert corpus_of is not None
    assert (corpus_of.alignment.proven, corpus_of.alignment.of) == (count - 3, count)


def test_ids_may_be_required(scorer: Scorer, refuse: Refuse) -> None:
    row = scorer.example()
    del entry(row, 3)["token_id"]
    code, pointer, detail = parts(refuse([row], "distill.require_token_ids=true"))
    assert (code, pointer) == ("token_id_missing", "/teacher_tokens/3/token_id")
    assert "the target is" in detail


def test_unknown_fields_change_nothing_and_are_counted(scorer: Scorer, admit: Admit) -> None:
    plain = admit([scorer.example()]).manifest
    row = scorer.example(note=1, id="x", metadata={"any": [1]})
    row["messages"][0]["mood"] = "calm"
    entry(row, 0)["rank"] = 1
    candidate(row, 0, 0)["text"] = "a"
    found = admit([row]).manifest
    assert found.counts["corpus"]["ignored_fields"] == {
        "messages[].mood": 1,
        "note": 1,
        "teacher_tokens[].rank": 1,
        "teacher_tokens[].top_logprobs[].text": 1,
    }
    assert found.details.admitted_sha256 == plain.details.admitted_sha256


def test_a_candidate_behind_those_that_are_read_is_not_looked_at(scorer: Scorer, admit: Admit) -> None:
    row = scorer.example()
    entry(row, 0)["top_logprobs"] += [{"token_id": -5, "logprob": 9.0}, {"token_id": 0, "logprob": -1e300}]
    assert admit([row]).manifest.counts["corpus"]["candidates_beyond_top_k"] == 2


# ---- scores that are said twice


def test_equal_scores_may_be_repeated(scorer: Scorer, admit: Admit) -> None:
    result = admit([scorer.example(id="a"), scorer.example("Other?"), scorer.example(id="b")])
    counts = result.manifest.counts["corpus"]
    assert (counts["rows_kept"], counts["duplicate_rows"]) == (3, 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_other_scores_of_the_same_tokens_are_a_conflict(
    workers: int, scorer: Scorer, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiln_stages.distilling.admission.RANGE_BYTES", 2000)
    monkeypatch.setattr("kiln_stages.distilling.corpus.RANGE_BYTES", 2000)
    other = scorer.example()
    score(2, 5, -4.2)(other)
    rows = [scorer.example(), *(scorer.example(f"{number}?") for number in range(10)), scorer.example(), other]
    error = refuse(rows, workers=workers)
    assert parts(error)[:2] == ("conflicting_duplicate", "/teacher_tokens/2/top_logprobs/5")
    assert ":14: example 13:" in error.message
    assert "as in line 2" in error.message
    assert "-4.19999" in error.message
    assert "-4.15888" in error.message


def test_scores_that_are_equal_in_float32_are_equal(scorer: Scorer, admit: Admit) -> None:
    near = scorer.example()
    value = candidate(near, 0, 0)["logprob"]
    score(0, 0, value * (1 + 1e-12))(near)
    assert admit([scorer.example(), near]).manifest.counts["corpus"]["duplicate_rows"] == 1


def test_minus_zero_is_not_zero_where_bits_count(scorer: Scorer, refuse: Refuse) -> None:
    rows = []
    for zero in (0.0, -0.0):
        row = scorer.example()
        score(0, 0, zero)(row)
        for rank in range(1, TOP_K):
            score(0, rank, -40.0 - rank)(row)
        rows.append(row)
    assert parts(refuse(rows))[0] == "conflicting_duplicate"


def test_other_targets_of_the_same_tokens_conflict_only_where_they_meet(
    scorer: Scorer, admit: Admit, refuse: Refuse
) -> None:
    """The same conversation, of which one row scores two answers and the other the second alone."""

    def row(kind: str) -> Row:
        steps = [
            {"role": "assistant", "content": "one", "kind": kind},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "two", "kind": "action"},
        ]
        return scorer.example(trajectory=steps)

    both, last = row("action"), row("context")
    shared = len(last["teacher_tokens"])
    last["teacher_tokens"] = copy.deepcopy(both["teacher_tokens"][-shared:])
    assert admit([both, last]).manifest.counts["corpus"]["duplicate_rows"] == 0
    score(0, 3, -2.9)(last)
    assert parts(refuse([both, last]))[0] == "conflicting_duplicate"


def test_a_row_is_held_against_every_earlier_row_of_its_tokens(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    """Each answer is scored by a row of its own, the second later than the first; then both by one row."""

    def row(first: str, second: str) -> Row:
        steps = [
            {"role": "assistant", "content": "one", "kind": first},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": "two", "kind": second},
        ]
        return scorer.example(trajectory=steps)

    both, first, second = row("action", "action"), row("action", "context"), row("context", "action")
    scores = both["teacher_tokens"]
    first["teacher_tokens"] = copy.deepcopy(scores[: len(first["teacher_tokens"])])
    second["teacher_tokens"] = copy.deepcopy(scores[-len(second["teacher_tokens"]) :])
    admit([first, second, both])
    score(1, 3, -2.9)(both)
    error = refuse([first, second, both])
    assert parts(error)[:2] == ("conflicting_duplicate", "/teacher_tokens/1/top_logprobs/3")
    assert "as in line 2" in error.message


# ---- nothing of a row but its tokens and scores goes anywhere


def test_id_and_metadata_reach_no_artifact(scorer: Scorer, admit: Admit, tmp_path: Path) -> None:
    row = scorer.example(id="CANARY-ID", metadata={"CANARY-KEY": ["CANARY-VALUE", 271828182845]})
    admit([row])
    written = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"corpus.parquet", "scored_ingestion.json", "admit_manifest.json"}
    for path in written:
        data = path.read_bytes()
        assert b"CANARY" not in data, path
        assert b"271828182845" not in data, path


@pytest.mark.parametrize("change", [change for change, *_ in RULES.values()], ids=RULES)
def test_id_and_metadata_reach_no_message(change: Change, scorer: Scorer, refuse: Refuse) -> None:
    row = scorer.example(response="It will rain.", id="CANARY-ID", metadata={"CANARY-KEY": "CANARY-VALUE"})
    change(row)
    error = refuse([row])
    assert "CANARY" not in f"{error.message} {error.hint} {error.details}"


# ---- reports of users of other tools


def test_d1_sizes_of_output_layers_do_not_decide(scorer: Scorer, admit: Admit, refuse: Refuse, student: Path) -> None:
    """The teacher's output layer has more rows than the student's; the tokenizer is the same."""
    larger = teacher_identity(student, vocab_size=152064)
    assert admit([scorer.example()], identity=larger).manifest.details.vocabulary == scorer.vocabulary
    row = scorer.example()
    setting("teacher_tokens", 2, "top_logprobs", 4, "token_id", to=151990)(row)
    code, pointer, _ = parts(refuse([row], identity=larger))
    assert (code, pointer) == ("token_id_out_of_vocab", "/teacher_tokens/2/top_logprobs/4/token_id")
    smaller = teacher_identity(student, vocab_size=scorer.vocabulary - 10)
    assert admit([scorer.example()], identity=smaller).manifest.details.vocabulary == scorer.vocabulary - 10


@pytest.mark.parametrize("case", ["null first", "first dropped"])
def test_d5_a_row_of_scores_that_is_shifted_is_refused(case: str, scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    row = scorer.example()
    count = len(row["teacher_tokens"])
    assert admit([row]).manifest.counts["corpus"]["action_tokens"] == count
    if case == "null first":
        row["teacher_tokens"].insert(0, None)
        found, first = count + 1, "entry 0 names no token"
    else:
        del row["teacher_tokens"][0]
        found, first = count - 1, "entry 0 is"
    code, _, detail = parts(refuse([row]))
    assert code == "teacher_token_count_mismatch"
    assert f"expected {count} entries, one for each target, found {found}" in detail
    assert first in detail


def test_d5_a_shift_of_equal_length_is_refused_by_ids(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    row = scorer.example()
    entries = row["teacher_tokens"]
    row["teacher_tokens"] = [*entries[1:], entries[0]]
    assert parts(refuse([row]))[:2] == ("token_id_mismatch", "/teacher_tokens/0/token_id")
    for token in row["teacher_tokens"]:
        del token["token_id"]
    result = admit([row])  # nothing but the number of tokens can be known here
    corpus_of = scored_corpus(result.manifest)
    assert corpus_of is not None
    assert corpus_of.alignment.proven == 0
    assert parts(refuse([row], "distill.require_token_ids=true"))[0] == "token_id_missing"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("-Infinity", "invalid_json"),
        ("NaN", "invalid_json"),
        ("null", "logprob_not_finite"),
        ('"-inf"', "logprob_not_finite"),
        ('"-Infinity"', "logprob_not_finite"),
        ("-9999.0", "logprob_sentinel"),
        ("0.1", "logprob_positive"),
    ],
)
def test_d6_what_stands_for_minus_infinity_is_told_from_a_score(
    value: str, code: str, scorer: Scorer, refuse: Refuse
) -> None:
    row = scorer.example()
    number = 0 if value == "0.1" else LAST
    score(0, number, "MARK")(row)
    assert parts(refuse([line(row).replace(b'"MARK"', value.encode())]))[0] == code


def test_d6_zero_beside_others_and_a_score_that_may_stand_for_none(
    scorer: Scorer, admit: Admit, refuse: Refuse
) -> None:
    certain = scorer.example()
    score(0, 0, 0.0)(certain)
    assert parts(refuse([certain]))[0] == "mass_above_one"
    suspect = scorer.example()
    score(0, LAST, -100.0)(suspect)
    assert admit([suspect]).manifest.counts["corpus"]["suspect_logprobs"] == 1


def test_d7_ids_made_of_token_texts_are_refused_by_position(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    """The answer has characters of several tokens; encoding each token's text alone gives other ids."""
    row = scorer.example(response="café 😀")
    assert admit([row], "distill.require_token_ids=true").manifest.counts["corpus"]["rows_kept"] == 1
    split = next(at for at, token in enumerate(row["teacher_tokens"]) if token["token"] == "é")
    again = scorer.targets([{"role": "user", "content": "x"}], "�")
    setting("teacher_tokens", split, "token_id", to=again.input_ids[again.action_targets[0]])(row)
    assert parts(refuse([row]))[:2] == ("token_id_mismatch", f"/teacher_tokens/{split}/token_id")
    for token in row["teacher_tokens"]:
        del token["token_id"]
    assert parts(refuse([row], "distill.require_token_ids=true"))[0] == "token_id_missing"


def test_d8_scores_of_another_mask_are_refused_with_both_counts(scorer: Scorer, refuse: Refuse) -> None:
    """The teacher scored think text that the student's row does not have."""
    row = scorer.example(response="Rain.")
    thinking = scorer.example(response="<think>\nClouds, so\n</think>\n\nRain.")
    row["teacher_tokens"] = thinking["teacher_tokens"]
    expected = len(scorer.example(response="Rain.")["teacher_tokens"])
    code, _, detail = parts(refuse([row]))
    assert code == "teacher_token_count_mismatch"
    assert f"expected {expected} entries, one for each target, found {len(thinking['teacher_tokens'])}" in detail
    assert "entry 0 is '<'" in detail
    assert "the target is 'R'" in detail


def test_d10_the_sampled_token_beside_the_top_is_kept_out(
    scorer: Scorer, admit: Admit, refuse: Refuse, student: Path, tmp_path: Path
) -> None:
    """Servers add the prompt's own token behind the top K where it is not among them, or send it first."""
    row = scorer.example()
    own = {"token_id": 200, "logprob": -15.5}
    entry(row, 0)["top_logprobs"].append(own)
    admit([row])
    (found,) = ScoredRows(tmp_path / "run" / "admit" / "corpus.parquet")
    assert 200 not in found.teacher_token_ids[0]
    entry(row, 0)["top_logprobs"].insert(0, entry(row, 0)["top_logprobs"].pop())
    code, pointer, _ = parts(refuse([row]))
    assert (code, pointer) == ("logprobs_not_sorted", "/teacher_tokens/0/top_logprobs/1/logprob")


# ---- float32


def test_numbers_are_rounded_to_float32_before_any_rule(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    tiny = scorer.example()
    for at, rank in itertools.product(range(len(tiny["teacher_tokens"])), range(TOP_K)):
        score(at, rank, 1e-60 if rank == 0 else -40.0 - rank)(tiny)
    admit([tiny])  # zero in float32, so not above it
    equal = scorer.example()
    score(0, 1, candidate(equal, 0, 2)["logprob"] - 1e-12)(equal)
    admit([equal])  # below the one behind it as a double, equal to it in float32


def test_mass_may_exceed_one_by_its_tolerance_and_no_more(scorer: Scorer, admit: Admit, refuse: Refuse) -> None:
    def row(mass: float) -> Row:
        made = scorer.example()
        for rank in range(TOP_K):
            score(0, rank, math.log(mass / TOP_K))(made)
        return made

    admit([row(1 + 3e-6)])
    for mass in (1 + 1e-5, 1 + 5e-6):
        assert parts(refuse([row(mass)]))[0] == "mass_above_one"


def test_receipts_of_scored_corpora_contradict_themselves_by_name(scorer: Scorer, admit: Admit, tmp_path: Path) -> None:
    admit([scorer.example()])
    sound = read_scored_ingestion(tmp_path / "run" / "admit" / "scored_ingestion.json")
    assert list(sound.faults()) == []
    for change, told in (
        ({"source": "inline"}, "source is 'inline'"),
        ({"source_locator": " "}, "source_locator is blank"),
        ({"source_sha256": "x"}, "source_sha256 is no hash"),
        ({"teacher_content_revision": "f" * 64}, "teacher_content_revision is ffff"),
        ({"top_k": 20}, "top_k is 20"),
        ({"examples": 0}, "no example"),
        ({"action_tokens": 10**6}, "action"),
        ({"duplicate_rows": 1}, "duplicate_rows is 1 of 1"),
    ):
        faults = list(msgspec.structs.replace(sound, **change).faults())
        assert any(told in fault for fault in faults), change
