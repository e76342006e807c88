"""A teacher behind a server: a small HTTP server answers as vLLM does, right and wrong, and the key stays a secret."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.distilling import scoring_endpoint
from kiln_stages.distilling.identity import SERVED_PROTOCOL, TeacherIdentity
from kiln_stages.distilling.registry import read_registry
from rows_to_score import ROWS, lines_of, write_rows
from served_teacher import Change, Scores, ServedTeacher, log_softmax, serving
from tiny_model import Kiln

from kiln_cli import KilnError

CANARY = "sk-canary-0123456789"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, kiln: Kiln) -> tuple[Path, TeacherIdentity]:
    """A corpus that the tiny model scored here, and its identity."""
    home = tmp_path_factory.mktemp("local")
    assert kiln("teacher", "register", "tiny", "--model", tiny_model, "--registry", home).code == 0
    rows = write_rows(home / "rows.jsonl", ROWS)
    done = kiln("teacher", "score", rows, "--teacher", "tiny", "--out", home / "local.jsonl", "--registry", home)
    assert done.code == 0, done.err
    return home / "local.jsonl", read_registry(home).get("tiny").identity


@pytest.fixture
def identity(local: tuple[Path, TeacherIdentity]) -> TeacherIdentity:
    return msgspec.structs.replace(
        local[1], protocol=SERVED_PROTOCOL, served_model_id="served", implementation="vllm/1"
    )


@pytest.fixture
def served(tiny_model: Path, identity: TeacherIdentity, scores: Scores) -> Iterator[ServedTeacher]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    teacher = ServedTeacher(scores, lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    teacher.teachers = [
        {"spec": {"alias": "tiny@served"}, "off_policy_manifest": identity.manifest_line().decode("utf-8")},
        {"spec": {"alias": "other"}, "off_policy_manifest": None},
    ]
    with serving(teacher):
        yield teacher


@pytest.fixture(scope="module")
def scores(tiny_model: Path) -> Scores:
    import torch
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM.from_pretrained(
        tiny_model, dtype=torch.float32
    )  # no thread of the server loads it
    causal.eval()
    one_at_a_time = threading.Lock()

    def behind(ids: list[int]) -> list[list[float]]:
        with one_at_a_time, torch.no_grad():
            return [log_softmax(row) for row in causal(torch.tensor([ids])).logits[0].double().tolist()]

    return behind


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring_endpoint, "PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture
def home(tmp_path: Path, served: ServedTeacher, kiln: Kiln) -> Path:
    """A directory with a registry that has the served teacher, and rows to score."""
    done = kiln("teacher", "register", "tiny@served", "--endpoint", served.url, "--registry", tmp_path / ".kiln")
    assert done.code == 0, done.err
    write_rows(tmp_path / "rows.jsonl", ROWS)
    return tmp_path


def score(kiln: Kiln, home: Path, model: Path, *more: object) -> Any:
    return kiln(
        "teacher", "score", home / "rows.jsonl", "--teacher", "tiny@served", "--out", home / "out.jsonl",
        "--registry", home / ".kiln", "--model", model, *more,
    )  # fmt: skip


def test_the_identity_is_what_the_server_gives(home: Path, identity: TeacherIdentity, kiln: Kiln) -> None:
    teacher = read_registry(home / ".kiln").get("tiny@served")
    assert teacher.identity == identity and teacher.local is None
    assert teacher.endpoint is not None and teacher.endpoint.identity_from == "server"
    assert kiln("teacher", "verify", "tiny@served", "--registry", home / ".kiln").code == 0


def test_verify_asks_the_server_again(home: Path, served: ServedTeacher, identity: TeacherIdentity, kiln: Kiln) -> None:
    changed = msgspec.structs.replace(identity, implementation="vllm/2")
    served.teachers[0]["off_policy_manifest"] = changed.manifest_line().decode("utf-8")
    done = kiln("teacher", "verify", "tiny@served", "--registry", home / ".kiln")
    assert done.code == 1 and "implementation: pinned vllm/1, found vllm/2" in done.err


@pytest.mark.parametrize("form", ["manifest_line", "compact", "fingerprint"])
def test_the_identity_may_come_in_a_file(
    tmp_path: Path, served: ServedTeacher, identity: TeacherIdentity, kiln: Kiln, form: str
) -> None:
    given = getattr(identity, form)()
    path = tmp_path / "identity"
    path.write_bytes((given.encode() if isinstance(given, str) else given) + b"\n")
    arguments = ["teacher", "register", "mine", "--endpoint", served.url, "--identity", path]
    assert kiln(*arguments, "--registry", tmp_path).code == 0
    assert read_registry(tmp_path).get("mine").identity == identity
    assert served.headers == []  # the server was not asked
    done = kiln("teacher", "verify", "mine", "--registry", tmp_path)
    assert done.code == 1 and "KLN103" in done.err and "cannot be verified" in done.err


BAD_SERVERS: list[tuple[Any, str]] = [
    ([], "the server has no teacher 'tiny@served' with a manifest; it has: none"),
    ([{"spec": {"alias": "other"}, "off_policy_manifest": "x"}], "it has: other"),
    ("nonsense", "it has: none"),
    ([{"spec": {"alias": "tiny@served"}, "off_policy_manifest": "{}"}], "the server's manifest: schema is"),
]


@pytest.mark.parametrize("teachers, message", BAD_SERVERS, ids=[message[:30] for _, message in BAD_SERVERS])
def test_a_server_without_such_a_teacher_is_refused(
    tmp_path: Path, served: ServedTeacher, kiln: Kiln, teachers: Any, message: str
) -> None:
    served.teachers = teachers
    done = kiln("teacher", "register", "tiny@served", "--endpoint", served.url, "--registry", tmp_path)
    assert done.code == 2 and "KLN220" in done.err and message in done.err
    assert not (tmp_path / "teachers.json").exists()


def test_a_local_identity_is_none_of_a_server(
    tmp_path: Path, served: ServedTeacher, local: tuple[Path, TeacherIdentity], kiln: Kiln
) -> None:
    (tmp_path / "identity").write_bytes(local[1].compact())
    arguments = ("teacher", "register", "x", "--endpoint", served.url, "--identity", tmp_path / "identity")
    done = kiln(*arguments, "--registry", tmp_path)
    assert done.code == 2 and "KLN220" in done.err and "kiln-cli.transformers" in done.err


URLS = [
    "localhost:8000",
    "ftp://localhost",
    "http://",
    "http://u:p@localhost",
    "http://h/?q=1",
    "http://h:x",
    "http://h\n",
]


@pytest.mark.parametrize("url", URLS)
def test_what_is_no_plain_address_is_refused_and_no_password_shown(kiln: Kiln, tmp_path: Path, url: str) -> None:
    done = kiln("teacher", "register", "x", "--endpoint", url, "--registry", tmp_path)
    assert done.code == 2 and "KLN220" in done.err and "u:p" not in done.err


@pytest.mark.parametrize("send", ["ids", "text"])
def test_a_served_teacher_scores_as_the_same_model_does_here(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, local: tuple[Path, TeacherIdentity], send: str
) -> None:
    """K + 1 candidates come, a null for the first position, and other ranks: the rows are those of a local teacher."""
    done = score(kiln, home, tiny_model, "--send", send)
    assert done.code == 0, done.err
    ours, theirs = lines_of(home / "out.jsonl"), lines_of(local[0])
    assert ours[0]["teacher_identity"]["served_model_id"] == "served"
    for left, right in zip(ours[1:], theirs[1:], strict=True):
        assert {**left, "teacher_tokens": None} == {**right, "teacher_tokens": None}
        for a, b in zip(left["teacher_tokens"], right["teacher_tokens"], strict=True):
            assert (a["token_id"], a["token"]) == (b["token_id"], b["token"])
            assert abs(a["logprob"] - b["logprob"]) < 2e-5
            pairs = zip(a["top_logprobs"], b["top_logprobs"], strict=True)
            assert all(abs(one["logprob"] - other["logprob"]) < 2e-5 for one, other in pairs)
    for request in served.requests:
        assert request["model"] == "served" and request["prompt_logprobs"] == 32
        assert isinstance(request["prompt"], str if send == "text" else list)
        if send == "text":  # the template writes them
            assert request["add_special_tokens"] is False


def test_what_a_server_scored_is_admitted(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, tmp_path: Path
) -> None:
    assert score(kiln, home, tiny_model).code == 0
    done = kiln(
        "admit", "--file", home / "out.jsonl", "--kind", "opd", "--teacher", "tiny@served", "--model", tiny_model,
        "--registry", home / ".kiln", "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err


def test_answers_are_written_in_the_order_of_the_request(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln
) -> None:
    write_rows(home / "rows.jsonl", [{**ROWS[1], "id": str(number)} for number in range(12)])
    served.change = lambda request, answer: (time.sleep(0.02 * (len(served.requests) % 3)), answer)[1]
    assert score(kiln, home, tiny_model, "--requests", "4").code == 0
    assert [row["id"] for row in lines_of(home / "out.jsonl")[1:]] == [str(number) for number in range(12)]


def fainter(served: ServedTeacher, factor: float) -> Change:
    """Other scores at each request, as a server gives that computes rows together with others."""

    def change(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        for score in (score for entry in entries(answer)[1:] for score in entry.values()):
            score["logprob"] -= factor * len(served.requests)
        return answer

    return change


@pytest.mark.parametrize("cut", [None, 2, 3])
def test_rows_of_the_same_tokens_keep_the_scores_of_the_first(
    cut: int | None, home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, tmp_path: Path
) -> None:
    """The same conversation thrice, once as a trajectory whose targets lack the end of the turn."""
    question = [{"role": "user", "content": "Hi"}]
    steps = [{"role": "assistant", "content": "yes", "kind": "action"}]
    plain = {"messages": question, "teacher_response": "yes"}
    write_rows(home / "rows.jsonl", [{"messages": question, "trajectory": steps}, ROWS[2], plain, {**plain, "id": "c"}])
    served.change, out = fainter(served, 1e-4), home / "out.jsonl"
    if cut is not None:
        served.statuses = [200] * cut + [400]
        assert score(kiln, home, tiny_model, "--requests", "1").code == 2
        served.statuses = []
    done = score(kiln, home, tiny_model, "--requests", "1" if cut else "3", "--json")
    assert done.code == 0, done.err
    _, first, _, second, third = (row.get("teacher_tokens") for row in lines_of(out))
    told, most = json.loads(done.out)["settled"], len(third) + (len(first) if cut != 3 else 0)
    assert told == most if cut else 0 < told <= most  # requests at a time may get the same scores
    assert second[: len(first)] == first
    assert len(second) > len(first)
    assert third == second
    done = kiln(
        "admit", "--file", out, "--teacher", "tiny@served", "--model", tiny_model, "--registry", home / ".kiln",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert done.code == 0, done.err
    again = score(kiln, home, tiny_model)
    assert again.code == 0 and "unchanged" in again.err
    *before, last = out.read_text().splitlines()
    other = json.loads(last)
    other["teacher_tokens"][0]["top_logprobs"][-1]["logprob"] -= 0.5
    out.write_text("\n".join([*before, json.dumps(other, separators=(",", ":"))]) + "\n")
    refused = score(kiln, home, tiny_model)
    assert refused.code == 2
    assert "line 5: an earlier row has the same tokens and other scores" in refused.err


def entries(answer: dict[str, Any]) -> list[dict[str, dict[str, Any]]]:
    found: list[dict[str, dict[str, Any]]] = answer["choices"][0]["prompt_logprobs"]
    return found


def changed(act: Callable[[dict[str, Any]], None]) -> Change:
    def change(request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        act(answer)
        return answer

    return change


def best(entry: dict[str, dict[str, Any]], rank: int = 1) -> dict[str, Any]:
    return next(score for score in entry.values() if score["rank"] == rank)


def put(value: Any, rank: int = 3) -> Change:
    return changed(lambda answer: best(entries(answer)[-1], rank).update(logprob=value))


def drop_best(answer: dict[str, Any]) -> None:
    entry = entries(answer)[-1]
    entry.pop(next(name for name, each in entry.items() if each["rank"] == 2))


def another_token(answer: dict[str, Any]) -> None:
    entry = entries(answer)[-2]
    entry.pop(next(name for name, each in entry.items() if each["rank"] > 32))


def at(position: int, value: Any) -> Change:
    """Another entry at one position of ``prompt_logprobs``."""
    return changed(lambda answer: entries(answer).__setitem__(position, value))


def first_of_all(answer: dict[str, Any]) -> None:
    entries(answer)[0] = entries(answer)[1]


def other_id(answer: dict[str, Any]) -> None:
    answer["choices"][0]["prompt_token_ids"][4] = 1


def without_logprobs(answer: dict[str, Any]) -> None:
    del answer["choices"][0]["prompt_logprobs"]


NO_ENTRY: Any = None
ANOTHER = "kiln-teacher-v1.x.y"
# What a server may send, and what is said of it. The last token of the first row is scored.
REFUSED: list[tuple[str, Change, str, str]] = [
    ("d6 -9999 among the K", put(-9999.0), "KLN113", "logprob_sentinel"),
    ("d6 minus infinity", put(-math.inf), "KLN113", "logprob_not_finite"),
    ("d6 null", put(None), "KLN113", "logprob_not_finite"),
    ("d6 text", put("-inf"), "KLN113", "logprob_not_finite"),
    ("d6 positive", put(0.1), "KLN113", "logprob_positive"),
    ("d6 0.0 beside real mass", put(0.0), "KLN113", "mass_above_one"),
    ("d10 fewer than K", changed(drop_best), "KLN113", "too_few_candidates"),
    ("d5 no null first", changed(lambda answer: entries(answer).pop(0)), "KLN113", "prompt_logprobs_mismatch"),
    (
        "d5 null twice",
        changed(lambda answer: entries(answer).insert(0, NO_ENTRY)),
        "KLN113",
        "prompt_logprobs_mismatch",
    ),
    ("d5 null inside", at(3, None), "KLN113", "entry 3 is null"),
    ("d5 scores first", changed(first_of_all), "KLN113", "entry 0 has scores"),
    ("d7 another token", changed(another_token), "KLN113", "reencoded_ids"),
    ("d7 other ids", changed(other_id), "KLN113", "position 4 is 1 there"),
    (
        "another model",
        changed(lambda answer: answer.update(model="base")),
        "KLN220",
        "is base, the alias is pinned to s",
    ),
    ("another identity", changed(lambda answer: answer.update(system_fingerprint=ANOTHER)), "KLN220", ANOTHER),
    ("no logprobs", changed(without_logprobs), "KLN220", "prompt_logprobs is missing"),
    ("no choices", changed(lambda answer: answer.update(choices=[])), "KLN220", "choices is no list"),
    ("texts for ids", at(2, {"the": {"logprob": -1}}), "KLN220", "prompt_logprobs[2] has 'the'"),
    ("no object", at(2, [1]), "KLN220", "prompt_logprobs[2] is no object"),
    ("a list", lambda request, answer: [answer], "KLN220", "no JSON object"),
    ("no JSON", lambda request, answer: b"<html>", "KLN220", "the answer is no JSON"),
]


@pytest.mark.parametrize("change, code, message", [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_an_answer_that_cannot_be_used_is_refused(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, change: Change, code: str, message: str
) -> None:
    served.change = change
    done = score(kiln, home, tiny_model)
    assert code in done.err and message in done.err, done.err
    assert done.code == (1 if code == "KLN113" else 2)
    assert code != "KLN113" or "line 1: " in done.err
    assert not (home / "out.jsonl").exists()


def test_d6_a_stand_in_of_the_rows_own_token_is_no_score(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln
) -> None:
    """Report D6: behind the K candidates -9999 hurts nobody, and is not written either."""

    def act(answer: dict[str, Any]) -> None:
        for each in entries(answer)[-1].values():
            if each["rank"] > 32:
                each["logprob"] = -9999.0

    served.change = changed(act)
    done = score(kiln, home, tiny_model, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["chosen_unscored"] > 0
    assert b'"logprob":-9999' not in (home / "out.jsonl").read_bytes()


def test_d7_a_server_that_encodes_the_text_otherwise_is_refused_at_the_position(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln
) -> None:
    """Report D7: "café 😀" is several tokens a character; a server that makes other ids of the text scores nonsense."""
    encode = served.encode
    served.encode = lambda text: [each for each in encode(text) if each < 370] + [5]
    done = score(kiln, home, tiny_model, "--send", "text")
    assert done.code == 1 and "reencoded_ids: the server scored other tokens: position " in done.err


def test_d7_a_server_that_does_not_say_its_ids_is_refused(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln
) -> None:
    served.change = changed(lambda answer: answer["choices"][0].pop("prompt_token_ids"))
    done = score(kiln, home, tiny_model, "--send", "text")
    assert done.code == 2 and "KLN220" in done.err and "which tokens the server made of the text" in done.err
    assert score(kiln, home, tiny_model).code == 0  # of ids there is nothing to say


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, status: int
) -> None:
    served.statuses = [status, status, status]
    assert score(kiln, home, tiny_model, "--requests", "1").code == 0


def test_a_server_that_stays_away_keeps_what_was_scored(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln
) -> None:
    served.statuses = [200, 200, 503, 503, 503, 503]
    done = score(kiln, home, tiny_model, "--requests", "1")
    assert done.code == 4 and "KLN404" in done.err and "in 4 tries" in done.err
    kept = (home / "out.jsonl.partial" / "rows.jsonl").read_bytes()
    assert len(kept.splitlines()) == 3
    done = score(kiln, home, tiny_model, "--json")
    assert json.loads(done.out)["rows_found"] == 2
    assert (home / "out.jsonl").read_bytes().startswith(kept)


def test_an_error_does_not_wait_for_other_rows(home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln) -> None:
    """Requests that are under way end with the first row's error, as with Ctrl-C, however long the server would
    think. Which request is the first row's is learnt from a run that has one under way at a time."""
    thinking = threading.Event()
    served.change = lambda request, answer: b"no JSON"
    assert score(kiln, home, tiny_model, "--requests", "1").code == 2
    first_row = served.requests[0]["prompt"]

    def change(request: dict[str, Any], answer: dict[str, Any]) -> Any:
        if request["prompt"] == first_row:
            return b"no JSON"
        thinking.wait(60)
        return answer

    served.change = change
    began = time.monotonic()
    done = score(kiln, home, tiny_model, "--requests", "4")
    took = time.monotonic() - began
    thinking.set()
    assert done.code == 2 and "KLN220" in done.err
    assert took < 50


def test_a_request_that_is_still_connecting_when_all_is_given_up_is_not_sent(
    served: ServedTeacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, connect = scoring_endpoint.Server(served.url), http.client.HTTPConnection.connect

    def late(self: http.client.HTTPConnection) -> None:
        server.give_up()
        connect(self)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", late)
    with pytest.raises(KilnError) as caught:
        server.ask("/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 1, "model": "served"})
    assert caught.value.code == "KLN404" and "given up" in caught.value.message
    assert served.requests == []


def test_a_server_that_is_not_there_is_told(home: Path, tiny_model: Path, kiln: Kiln, tmp_path: Path) -> None:
    done = kiln("teacher", "register", "x", "--endpoint", "http://127.0.0.1:9", "--registry", tmp_path / "r")
    assert done.code == 4 and "KLN404" in done.err and "ConnectionRefused" in done.err


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404])
def test_a_refusal_is_not_repeated_and_a_redirect_not_followed(
    home: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, status: int
) -> None:
    served.statuses = [status]
    done = score(kiln, home, tiny_model, "--requests", "1")
    assert done.code == 2 and "KLN220" in done.err and f"HTTP status {status}" in done.err
    assert len(served.requests) == 1


def everything_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


@pytest.mark.parametrize("place", ["env", "file"])
def test_the_key_reaches_the_server_and_nothing_else(
    tmp_path: Path, served: ServedTeacher, tiny_model: Path, kiln: Kiln, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    write_rows(home / "rows.jsonl", ROWS[:2])
    secret = tmp_path / "secret"
    secret.write_text(CANARY + "\n", encoding="utf-8")
    monkeypatch.setenv("TEACHER_KEY", CANARY)
    options = ["--key-env", "TEACHER_KEY"] if place == "env" else ["--key-file", str(secret)]
    served.key = CANARY
    done = [
        kiln("teacher", "register", "tiny@served", "--endpoint", served.url, "--registry", home / ".kiln", *options)
    ]
    done += [score(kiln, home, tiny_model)]
    assert all(sent["Authorization"] == f"Bearer {CANARY}" for sent in served.headers)
    assert "goes to it unencrypted" in done[0].err
    # A server that sends the key back, in an error of any kind, has it taken out.
    (home / "out.jsonl").unlink()
    for statuses in ([400], [503] * 4):
        served.statuses = list(statuses)
        arguments = ("teacher", "score", home / "rows.jsonl", "--teacher", "tiny@served", "--model", tiny_model)
        done += [
            kiln("--debug", *arguments, "--registry", home / ".kiln", "--out", home / "out.jsonl", "--requests", "1")
        ]
        assert done[-1].code != 0 and "[key]" in done[-1].err
    assert [each.code for each in done] == [0, 0, 2, 4]
    assert all(CANARY not in each.out + each.err for each in done)
    assert CANARY.encode() not in everything_below(home)
    assert ("TEACHER_KEY" if place == "env" else str(secret)) in (home / ".kiln" / "teachers.json").read_text()


@pytest.mark.parametrize("key", ["", "two words", "sécret", CANARY + "\x07"])
def test_a_key_that_cannot_be_one_is_refused_without_being_shown(
    home: Path, served: ServedTeacher, kiln: Kiln, tmp_path: Path, key: str
) -> None:
    (tmp_path / "secret").write_text(key, encoding="utf-8")
    arguments = ("teacher", "register", "y", "--endpoint", served.url, "--key-file", tmp_path / "secret")
    done = kiln(*arguments, "--registry", home / ".kiln")
    assert done.code == 2 and "KLN220" in done.err and "holds no key" in done.err
    assert not key or key not in done.err


def test_a_variable_that_is_not_set_is_named(home: Path, served: ServedTeacher, kiln: Kiln) -> None:
    arguments = ("teacher", "register", "y", "--endpoint", served.url, "--key-env", "NO_SUCH_KEY")
    done = kiln(*arguments, "--registry", home / ".kiln")
    assert done.code == 2 and "environment variable NO_SUCH_KEY holds no key" in done.err


def test_a_served_teacher_needs_the_students_tokenizer(home: Path, kiln: Kiln) -> None:
    done = kiln("teacher", "score", home / "rows.jsonl", "--teacher", "tiny@served", "--out", home / "o",
                "--registry", home / ".kiln")  # fmt: skip
    assert done.code == 2 and "--model is missing" in done.err


def test_a_row_longer_than_the_server_takes_is_refused_before_it_is_asked(
    home: Path, served: ServedTeacher, identity: TeacherIdentity, tiny_model: Path, kiln: Kiln
) -> None:
    short = msgspec.structs.replace(identity, max_model_len=20)
    served.teachers[0]["off_policy_manifest"] = short.manifest_line().decode("utf-8")
    assert kiln("teacher", "register", "tiny@served", "--endpoint", served.url, "--registry", home / ".kiln",
                "--replace").code == 0  # fmt: skip
    done = score(kiln, home, tiny_model)
    assert done.code == 1 and "over_length" in done.err and "the teacher takes 19" in done.err
    assert served.requests == []


@pytest.mark.parametrize("more", [0, -1])
@pytest.mark.parametrize("send", ["ids", "text"])
def test_a_row_of_more_candidates_than_a_request_may_have_is_refused_before_the_server_is_asked(
    home: Path, served: ServedTeacher, identity: TeacherIdentity, tiny_model: Path, kiln: Kiln, send: str, more: int
) -> None:
    """The longest row is just within the limit, or one candidate beyond it; the row's own token may be a 17th."""
    assert score(kiln, home, tiny_model, "--top-k", 16).code == 0
    longest = max(len(request["prompt"]) for request in served.requests)
    served.requests.clear()
    (home / "out.jsonl").unlink()
    most = (longest - 1) * 17 + more
    limited = msgspec.structs.replace(identity, max_prompt_logprob_candidates=most)
    served.teachers[0]["off_policy_manifest"] = limited.manifest_line().decode("utf-8")
    assert kiln("teacher", "register", "tiny@served", "--endpoint", served.url, "--registry", home / ".kiln",
                "--replace").code == 0  # fmt: skip
    done = score(kiln, home, tiny_model, "--top-k", 16, "--send", send)
    if not more:
        assert done.code == 0, done.err
        return
    assert done.code == 1 and "KLN113" in done.err
    told = f"too_many_candidates: {longest - 1} positions of up to 17 candidates are {most + 1:,}"
    assert f"{told}, the teacher gives at most {most:,} a request" in done.err
    assert served.requests == [] and not (home / "out.jsonl").exists()


def test_the_address_may_end_in_v1(home: Path, served: ServedTeacher, kiln: Kiln) -> None:
    arguments = ("teacher", "register", "tiny@served", "--endpoint", served.url + "/v1/", "--registry", home / ".kiln")
    assert kiln(*arguments).code == 0
