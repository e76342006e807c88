"""The store of corrections: its rule, its states, and that a change touches nothing but what is meant."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.correcting.adding import Added, add, given_fields, given_file
from kiln_stages.correcting.store import Store, changing, read_store

from kiln_cli import KilnError
from kiln_cli.files import run_lock

HASH = "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"  # V1 of the contract: "a", then "b"


def fields(request_id: str = "r1", **more: Any) -> dict[str, Any]:
    whole = {"request_id": request_id, "agent": "bot", "adapter": None, "user": "a", "original": "c", "ideal": "b"}
    return whole | {"truncated": False, "created_at": "2026-01-02T03:04:05Z"} | more


def line(request_id: str = "r1", **more: Any) -> bytes:
    return json.dumps(fields(request_id, **more)).encode() + b"\n"


def put(path: Path, *given: dict[str, Any], retrain: bool = False) -> Added:
    return add(path, [given_fields(one) for one in given], retrain=retrain)


# --- the rule


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "active"),
        ({"truncated": True, "adapter": "x", "agent": ""}, "active"),
        ({"original": " b\u2003"}, "unfit"),
        ({"ideal": "\u00a0 \u0085\n"}, "unfit"),
        ({"user": "\v\f"}, "unfit"),
        ({"ideal": "\x1c"}, "active"),  # no White_Space, though Python strips it
        ({"ideal": "\u200b"}, "active"),
        ({"original": "b\x1f"}, "active"),
        ({"trained_into": None, "trained_at": None}, "active"),
        ({"trained_into": "x"}, "trained"),
        ({"trained_into": ""}, "trained"),
        ({"trained_into": "x", "trained_row_sha256": HASH}, "trained"),
        ({"trained_into": "x", "trained_row_sha256": HASH, "original": "b"}, "trained"),
        ({"trained_into": "x", "trained_row_sha256": HASH, "ideal": "b "}, "stale"),
        ({"trained_into": "x", "trained_row_sha256": HASH, "user": " a"}, "stale"),
        ({"trained_row_sha256": HASH, "ideal": "z"}, "active"),
    ],
)
def test_what_is_trained_on(changes: dict[str, Any], state: str) -> None:
    (found,) = Store(line(**changes)).lines
    assert found.state() == state


def test_the_row_is_the_texts_as_they_are() -> None:
    (found,) = Store(line(user=" a ", ideal="\nb")).active()
    assert found.row().messages == [{"role": "user", "content": " a "}, {"role": "assistant", "content": "\nb"}]
    (found,) = Store(line()).active()
    assert found.row().sha256() == HASH


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"not json\n", "syntax"),
        (b"[]\n", "expected an object"),
        (b'{"request_id":"r1","request_id":"r1"}\n', "duplicate_key"),
        (line(request_id=" "), "request_id is blank"),
        (line(user=1), "Expected `str`, got `int` - at `$.user`"),
        (line(truncated="no"), "Expected `bool`"),
        (line(adapter=[]), "Expected `str | null`"),
        (b'{"request_id":"r1"}\n', "missing required field"),
        (line().replace(b'"a"', b'"\\ud800"'), "lone_surrogate"),
        (line().replace(b'"a"', b'"\xff"'), "invalid_utf8"),
        (b"\xef\xbb\xbf".join([b"\n", line()]), "syntax"),
    ],
)
def test_a_line_that_is_no_correction_is_told(raw: bytes, why: str) -> None:
    found = Store(raw).lines[-1]
    assert found.state() == "malformed" and why in found.fault
    assert Store(raw).active() == []


def test_the_first_line_of_a_request_id_counts() -> None:
    store = Store(line(ideal="new") + line() + line("r2"))
    assert [one.state() for one in store.lines] == ["active", "repeated", "active"]
    assert [one.ideal for one in store.active()] == ["new", "b"]
    store = Store(line(trained_into="x") + line())
    assert store.active() == [], "an older line is not trained on in place of one that was"


# --- adding


def test_new_ones_go_to_the_top_and_known_ones_keep_their_place(tmp_path: Path) -> None:
    path = tmp_path / "corrections" / "data.jsonl"
    first = put(path, fields("r1"), fields("r2"))
    assert (first.added, first.changed, first.unchanged) == (["r1", "r2"], [], [])
    assert path.read_bytes() == b"".join(
        json.dumps(fields(name), separators=(",", ":"), ensure_ascii=False).encode() + b"\n" for name in ("r2", "r1")
    )
    again = put(path, {"request_id": "r1", "ideal": "better"}, fields("r3"), fields("r2"))
    assert (again.added, again.changed, again.unchanged) == (["r3"], ["r1"], ["r2"])
    ids = [(one.correction.request_id, one.correction.ideal) for one in read_store(path).lines if one.correction]
    assert ids == [("r3", "b"), ("r2", "b"), ("r1", "better")]


def test_a_new_one_needs_little_and_has_every_field(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    put(path, {"request_id": "r1", "user": "u", "ideal": "i"})
    written = json.loads(path.read_bytes())
    assert list(written) == list(fields())
    assert written | {"created_at": ""} == fields(agent="unknown", user="u", original="", ideal="i", created_at=""), (
        "trained_into and trained_at are left out while they are null"
    )


@pytest.mark.parametrize(
    ("given_one", "why"),
    [
        ({"user": "u", "ideal": "i"}, "request_id must be a string, found nothing"),
        ({"request_id": 1, "user": "u", "ideal": "i"}, "request_id must be a string, found a number"),
        ({"request_id": "\t", "user": "u", "ideal": "i"}, "request_id is blank"),
        ({"request_id": "r", "ideal": "i"}, "a new correction needs user"),
        ({"request_id": "r"}, "a new correction needs user and ideal"),
        ({"request_id": "r", "user": " ", "ideal": "i"}, "user is blank"),
        ({"request_id": "r", "user": "u", "ideal": 3}, "Expected `str`, got `int` - at `$.ideal`"),
        ({"request_id": "r0", "user": "\u2003"}, "user is blank"),
        ({"request_id": "r0", "original": []}, "at `$.original`"),
    ],
)
def test_one_that_is_refused_refuses_all(tmp_path: Path, given_one: dict[str, Any], why: str) -> None:
    path = tmp_path / "data.jsonl"
    put(path, fields("r0"))
    before = path.read_bytes()
    with pytest.raises(KilnError) as refused:
        put(path, fields("good"), given_one)
    assert refused.value.code == "KLN204" and why in refused.value.message
    assert path.read_bytes() == before


def test_the_marker_is_the_stores_own(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    forged = {"trained_into": "x", "trained_at": "t", "trained_row_sha256": HASH}
    done = put(path, fields("new", **forged))
    assert done.markers == ["new"]
    assert not [key for key in json.loads(path.read_bytes()) if key.startswith("trained")]
    path.write_bytes(line("r1", **forged))
    done = put(path, fields("r1", ideal="other", trained_into="y"))
    assert (done.changed, done.markers, done.stale) == (["r1"], ["r1"], ["r1"])
    assert json.loads(path.read_bytes()) == fields("r1", ideal="other", **forged)


def test_one_that_was_trained_on_is_active_again_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(line("r1", trained_into="x", more=1.50, trained_at="t", trained_row_sha256=HASH))
    assert put(path, {"request_id": "r1"}).unchanged == ["r1"]
    assert put(path, {"request_id": "r1"}, retrain=True).changed == ["r1"]
    assert path.read_bytes() == line("r1", more=1.50)
    assert put(path, {"request_id": "r1"}, retrain=True).unchanged == ["r1"]


def test_a_file_of_corrections(tmp_path: Path) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "store" / "data.jsonl"
    text = '{"extra" : 1.50, "request_id":"r1","user":"\\u0061","ideal":"b","deep":{"k":[ 1E3]}}'
    rows.write_text(f"\n{text}\r\n{json.dumps(fields('r2'))}")
    with given_file(rows, tmp_path) as corrections:
        assert add(path, corrections).added == ["r1", "r2"]
    second, first = path.read_text().splitlines()
    assert first.endswith('"extra":1.50,"deep":{"k":[ 1E3]}}') and '"user":"\\u0061"' in first
    assert json.loads(second) == fields("r2")
    rows.write_text(text.replace("\\u0061", "a"))
    with given_file(rows, tmp_path) as corrections:
        assert add(path, corrections).unchanged == ["r1"], "an escape written otherwise is no change"


@pytest.mark.parametrize(
    ("content", "code", "why"),
    [
        (b'{"request_id":"r1"\n[]\n', "KLN204", "line 1: syntax"),
        (b"\n \n", "KLN107", "holds no corrections"),
        (b'{"request_id":"r1","user":"u","ideal":"i"}\n{"user":"u"}\n', "KLN204", "line 2: request_id must be"),
    ],
)
def test_a_file_that_is_refused(tmp_path: Path, content: bytes, code: str, why: str) -> None:
    rows, path = tmp_path / "rows.jsonl", tmp_path / "store" / "data.jsonl"
    rows.write_bytes(content)
    with pytest.raises(KilnError) as refused, given_file(rows, tmp_path) as corrections:
        add(path, corrections)
    assert refused.value.code == code and why in refused.value.message
    assert not path.exists()


# --- what a change leaves alone

IDS = st.sampled_from(["r1", "r2", "r3", "r\u00e9"])
ENDS = st.sampled_from([b"\n", b"\r\n", b" \t\n", b"\f\n"])
MARKED = b'"trained_into" : "x" , '
EXTRA = st.sampled_from(
    ["", MARKED.decode(), '"x":1.50,', '"x" : {"k":[1E3 , "\\u0061"]},', '"\\u0078":"y",', '"n":-0,']
)


@st.composite
def stored_lines(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["correction", "correction", "correction", "junk", "blank"]))
    if kind == "blank":
        return draw(st.sampled_from([b"", b"  ", b"\t"])) + draw(ENDS)
    if kind == "junk":
        junk = draw(st.binary(min_size=1, max_size=12)).replace(b"\n", b"\x0b")
        return draw(st.sampled_from([junk, b'{"request_id":"r1"}', b'{"request_id":"r1","user":}'])) + draw(ENDS)
    text = json.dumps(fields(draw(IDS)), separators=draw(st.sampled_from([(",", ":"), (", ", " : ")])))
    return draw(st.sampled_from([b"", b" "])) + b"{" + draw(EXTRA).encode() + text[1:].encode() + draw(ENDS)


@st.composite
def stores(draw: st.DrawFn) -> bytes:
    data = draw(st.sampled_from([b"", b"\xef\xbb\xbf"])) + b"".join(draw(st.lists(stored_lines(), max_size=8)))
    return data if draw(st.booleans()) else data.removesuffix(b"\n")


@settings(max_examples=300)
@given(stores(), IDS, st.sampled_from(["add", "mark", "clear"]))
def test_every_line_but_the_one_that_is_meant_stays_byte_for_byte(data: bytes, request_id: str, change: str) -> None:
    store = Store(data)
    before = [one.raw for one in store.lines]
    assert store.data() == data
    target = store.get(request_id)
    if target is None and change == "clear":
        return
    if target is None:
        store.add(json.dumps(fields(request_id)))
        mark = b"\xef\xbb\xbf" if data.startswith(b"\xef\xbb\xbf") else b""
        assert store.data() == mark + json.dumps(fields(request_id)).encode() + b"\n" + data[len(mark) :]
        return
    at = store.lines.index(target)
    if change == "mark":
        store.set_members(target, {"trained_into": '"n"', "trained_at": '"t"'})
        old = before[at]
        closing = old.rindex(b"}")
        again = b"" if MARKED in old else b',"trained_into":"n"'
        added = old[:closing] + again + b',"trained_at":"t"' + old[closing:]
        assert target.raw == added.replace(MARKED, MARKED.replace(b"x", b"n"))
    elif change == "clear":
        assert store.clear_marker(target) == (MARKED in before[at])
        assert target.raw == before[at].replace(MARKED, b"")
    else:
        store.set_members(target, {"ideal": '"zz"'})
        assert target.raw == before[at].replace(b'"b"', b'"zz"')
    after = [one.raw for one in store.lines]
    assert after[:at] + after[at + 1 :] == before[:at] + before[at + 1 :]
    reread = Store(store.data())
    assert [one.state() for one in reread.lines] == [one.state() for one in store.lines]


def test_the_mode_of_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    put(path, fields("r1"))
    path.chmod(0o600)
    put(path, fields("r2"))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_is_refused_and_stays(tmp_path: Path) -> None:
    real, path = tmp_path / "real.jsonl", tmp_path / "store" / "data.jsonl"
    real.write_bytes(line())
    path.parent.mkdir()
    path.symlink_to(real)
    with pytest.raises(KilnError) as refused:
        put(path, fields("r2"))
    assert refused.value.code == "KLN204" and path.is_symlink() and real.read_bytes() == line()


def test_an_error_in_the_block_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    put(path, fields("r1"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="stop"), changing(path, "test") as store:
        store.add(json.dumps(fields("r2")))
        raise ValueError("stop")
    assert path.read_bytes() == before


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(KilnError) as missing:
        read_store(tmp_path / "none" / "data.jsonl")
    assert missing.value.code == "KLN204" and list(tmp_path.iterdir()) == []


# --- several processes

WRITERS, EACH = 8, 6


def _write(path: Path, writer: int) -> None:
    for number in range(EACH):
        put(path, fields(f"w{writer}-{number}"), {"request_id": "shared", "user": "u", "ideal": f"{writer}-{number}"})


def test_processes_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "corrections" / "data.jsonl"
    path.parent.mkdir()
    path.write_bytes(b"kept as it is\n")
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, number)) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    store = read_store(path)
    ids = [one.correction.request_id for one in store.lines if one.correction is not None]
    expected = {f"w{writer}-{number}" for writer in range(WRITERS) for number in range(EACH)} | {"shared"}
    assert len(ids) == len(expected) and set(ids) == expected
    assert store.lines[-1].raw == b"kept as it is\n"
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".kiln.lock", "data.jsonl"]


def _write_on(path: Path, writer: int, told: Connection) -> None:
    for number in itertools.count():
        put(path, fields(f"k{writer}-{number}"))
        told.send(f"k{writer}-{number}")


def test_writers_that_are_killed_tear_nothing(tmp_path: Path) -> None:
    """What a writer was told is added is there, each line is whole, and no other writer waits for a dead one."""
    path, random = tmp_path / "corrections" / "data.jsonl", Random(7)
    context = multiprocessing.get_context("fork")
    acknowledged: set[str] = set()
    for writer in range(12):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_write_on, args=(path, writer, theirs))
        process.start()
        theirs.close()
        acknowledged.add(ours.recv())
        time.sleep(random.uniform(0, 0.05))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError):
            while True:
                acknowledged.add(ours.recv())
    store = read_store(path)
    ids = {one.correction.request_id for one in store.lines if one.correction is not None}
    assert acknowledged <= ids and len(ids) == len(store.lines)
    put(path, fields("last"))
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".kiln.lock", "data.jsonl"]


def test_a_lock_that_is_held_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corrections" / "data.jsonl"
    monkeypatch.setattr("kiln_stages.correcting.store.WAIT_SECONDS", 0.05)
    with run_lock(path.parent, "kiln train"), pytest.raises(KilnError) as held:
        put(path, fields())
    assert held.value.code == "KLN401" and "`kiln train`" in held.value.message
