"""Adding, splitting and removing: what stands in the registry, what is told, and what a kill at any moment leaves."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dataset_rows import A, B, C, chat, kiln, lines_of, write_rows
from kiln_stages.datasets import changes
from kiln_stages.datasets.checking import verify
from kiln_stages.datasets.entry import read_entry

from kiln_cli import files
from kiln_cli.errors import KilnError
from kiln_cli.files import Filesystem, run_lock
from kiln_cli.plugins import Plugins

CALLS = ("create", "write", "fsync", "close", "chmod", "replace", "rename_directory", "sync_directory", "unlink")


@pytest.fixture
def add(tmp_path: Path, plugins: Plugins) -> Callable[..., changes.Change]:
    """``add(rows, append=...)``: rows into data set ``d`` of the registry ``tmp_path / ".kiln"``."""

    def call(rows: list[Any], name: str = "d", **options: Any) -> changes.Change:
        return changes.add(tmp_path / ".kiln", name, write_rows(tmp_path / "rows.jsonl", rows), plugins, **options)

    return call


def splits(registry: Path, name: str = "d") -> dict[str, str]:
    """The split of each content."""
    return {row.content_sha256: row.split for row in read_entry(registry, name).split.rows}


# --- what is stored


def test_the_vector_lies_in_the_registry(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    change = add([A, B, C])
    directory = tmp_path / ".kiln" / "datasets" / "d"
    assert sorted(path.name for path in directory.iterdir()) == [
        "data.jsonl", "holdout.jsonl", "identity.json", "manifest.json",
        "split.json", "train.jsonl", "validation.jsonl",
    ]  # fmt: skip
    assert [json.loads((directory / f"{name}.jsonl").read_bytes()) for name in ("holdout", "train", "validation")] == [
        A, B, C,
    ]  # fmt: skip
    split = (directory / "split.json").read_bytes()
    assert not split.endswith(b"\n")
    assert [row["split"] for row in json.loads(split)["rows"]] == ["holdout", "train", "validation"]
    assert json.loads(split)["rows"][1]["group_id"] == "g1"
    assert json.loads(split)["rows"][2]["session_id"] == "s1"
    assert json.loads(split)["config"] == {"seed": "0", "train_percent": 80, "validation_percent": 10}
    assert change.identity.split_manifest_sha256 == f"sha256:{_sha256(split)}"
    assert verify(tmp_path / ".kiln", "d") == []


def _sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_row_stands_byte_for_byte(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    odd = [b'{ "messages" : [],\t"x":1.50}', b"not json", b'{"a":1,"a":2}', b"[]", b"\xff\xfe", b'{"messages":null}']
    change = add([b"\t " + odd[0] + b" \r", *odd[1:], b"", b"  "], source="messages")
    assert lines_of(tmp_path / ".kiln" / "datasets" / "d" / "data.jsonl") == odd
    assert (change.added, change.identity.rows, change.identity.malformed_rows) == (6, 6, 3)


@pytest.mark.parametrize("pack", ["gzip", "array", "object", "parquet", "stdin"])
def test_rows_come_packed_in_any_way(
    pack: str, tmp_path: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [chat("a", "b"), chat("c", "d")]
    path = tmp_path / "rows"
    if pack == "gzip":
        path.write_bytes(gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
    elif pack == "array":
        path.write_text(json.dumps(rows, indent=2))
    elif pack == "object":
        rows = rows[:1]
        path.write_text(json.dumps(rows[0], indent=2))
    elif pack == "parquet":
        pl = pytest.importorskip("polars")
        pl.DataFrame(rows).write_parquet(path)
    else:
        import io
        import sys

        given = io.TextIOWrapper(io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows)))
        monkeypatch.setattr(sys, "stdin", given)
    changes.add(tmp_path / ".kiln", "d", None if pack == "stdin" else path, plugins)
    assert [json.loads(text) for text in lines_of(tmp_path / ".kiln" / "datasets" / "d" / "data.jsonl")] == rows
    assert verify(tmp_path / ".kiln", "d") == []


@pytest.mark.parametrize("first", [b"[1]", b"\xef\xbb\xbf{}", b"{", b"\x1f\x8b\x08", b"PAR1"])
def test_rows_that_begin_as_another_kind_of_file_stay_rows(
    first: bytes, add: Callable[..., changes.Change], tmp_path: Path
) -> None:
    add([b"{}", first, b"{}"], source="messages")
    directory = tmp_path / ".kiln" / "datasets" / "d"
    for name in ("train", "validation", "holdout"):
        (directory / f"{name}.jsonl").unlink()
    changes.split(tmp_path / ".kiln", "d")
    data = directory / "data.jsonl"
    assert lines_of(data) == [b"{}", first, b"{}"]
    data.write_bytes(b"\n" + first + b"\n{}\n")  # first in data.jsonl, too
    assert changes.split(tmp_path / ".kiln", "d").identity.rows == 2
    found = [text for name in ("train", "validation", "holdout") for text in lines_of(directory / f"{name}.jsonl")]
    assert sorted(found) == sorted([first, b"{}"])
    assert verify(tmp_path / ".kiln", "d") == []


def test_a_row_above_the_cap_is_refused(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    with pytest.raises(KilnError, match="line 2 has 16777218 bytes") as refused:
        add([A, b"x" * (16 * 1024 * 1024 + 1)])
    assert refused.value.code == "KLN206"
    assert not (tmp_path / ".kiln" / "datasets" / "d").exists()


# --- growing


def test_an_existing_name_is_added_to_only_where_that_is_said(
    add: Callable[..., changes.Change], tmp_path: Path
) -> None:
    first = add([A])
    with pytest.raises(KilnError, match=r"exists and has 1 row\b") as refused:
        add([B])
    again = add([A])  # the same command once more changes nothing
    assert (again.again, again.added, again.identity) == (True, 0, first.identity)
    assert (refused.value.code, "--append" in refused.value.hint) == ("KLN201", True)
    assert read_entry(tmp_path / ".kiln", "d").identity.rows == 1
    with pytest.raises(KilnError, match="has no data set 'e'"):
        add([B], name="e", append=True)
    change = add([B, A, B], append=True)
    # A stood there before; the second B of the file did not.
    assert (change.added, change.repeated, change.identity.rows, change.taken_in) == (3, 1, 4, 0)
    again = add([B, A, B], append=True)
    assert (again.again, again.added, again.taken_in, again.identity) == (True, 0, 0, change.identity)
    assert add([A, B], append=True).again
    assert add([B, A], append=True).identity.rows == 6


def test_a_row_that_filled_a_split_goes_where_it_was_drawn(add: Callable[..., changes.Change]) -> None:
    """A draws bucket 99 by the vector, and is train as long as nothing else is."""
    assert [size.rows for size in add([A]).sizes.values()] == [1, 0, 0]
    change = add([chat(f"q{number}", "x") for number in range(30)], append=True)
    assert [(move.row_number, move.before, move.after, move.reason, move.detail) for move in change.moves or ()] == [
        (1, "train", "holdout", "repair", "bucket 99 gives holdout; it filled train, which was empty")
    ]


def test_growing_says_which_rows_moved_and_why(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A, B, C])
    before = splits(tmp_path / ".kiln")
    change = add([chat(f"q{number}", "x") for number in range(30)], append=True)
    after = splits(tmp_path / ".kiln")
    moved = {row for row in before if before[row] != after[row]}
    assert moved == {move.content_sha256 for move in change.moves or ()}
    assert moved
    assert {move.reason for move in change.moves or ()} == {"repair"}
    # A row that joins B and C: they are one component from now on.
    change = add([chat("bridge", "x", group_id="g1", session_id="s1")], append=True)
    assert change.moves
    assert {move.reason for move in change.moves} == {"union"}
    assert all("row 34 has the same" in move.detail for move in change.moves)
    after = splits(tmp_path / ".kiln")
    (together,) = {row.split for row in read_entry(tmp_path / ".kiln", "d").split.rows if row.row_number in (2, 3, 34)}
    assert {move.after for move in change.moves} == {together}


def test_rows_of_another_shape_are_another_data_set(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A])
    other = [{"instruction": "a", "output": "b"}]
    with pytest.raises(KilnError, match="has not the shape messages") as refused:
        add(other, append=True)
    assert refused.value.code == "KLN212"
    with pytest.raises(KilnError, match="the rows have the shape alpaca") as refused:
        add(other, append=True, source="alpaca")
    assert refused.value.code == "KLN212"
    assert read_entry(tmp_path / ".kiln", "d").identity.rows == 1
    assert add(other, append=True, source="messages").identity.rows == 2
    assert add([b"not json"], append=True).identity.rows == 3


def test_the_settings_of_the_split_are_changed_by_split_alone(add: Callable[..., changes.Change]) -> None:
    add([A, B], options={"seed": "7"})
    with pytest.raises(KilnError, match=r"is split by seed 7.*is told seed 8"):
        add([C], append=True, options={"seed": "8"})
    assert add([C], append=True, options={"seed": "7"}).identity.rows == 3


@pytest.mark.parametrize(
    "options",
    [
        {"seed": "-1"}, {"seed": "18446744073709551616"}, {"seed": "01"}, {"train_percent": 0}, {"train_percent": 100},
        {"train_percent": 90}, {"validation_percent": -1}, {"group_by": "doc"}, {"group_by": "/a~2"},
    ],
)  # fmt: skip
def test_settings_out_of_bounds(add: Callable[..., changes.Change], tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(KilnError, match="the split cannot be made so") as refused:
        add([A], options=options)
    assert refused.value.code == "KLN201"
    assert not (tmp_path / ".kiln" / "datasets" / "d").exists()


def test_split_again_by_other_settings(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    rows = [chat(f"q{number}", "x") for number in range(40)]
    before = add(rows)
    change = changes.split(tmp_path / ".kiln", "d", {"seed": "5", "validation_percent": 19})
    assert change.moves
    assert {move.reason for move in change.moves} == {"settings"}
    assert change.moves[0].detail == "seed 0 -> 5; validation_percent 10 -> 19"
    assert change.identity.corpus_sha256 == before.identity.corpus_sha256
    assert change.identity.split_manifest_sha256 != before.identity.split_manifest_sha256
    assert changes.split(tmp_path / ".kiln", "d").moves == []
    assert changes.split(tmp_path / ".kiln", "d", {"seed": "0", "validation_percent": 10}).identity == before.identity


def test_nothing_is_written_where_nothing_changes(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A, B, C])
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / ".kiln" / "datasets" / "d").iterdir()}
    changes.split(tmp_path / ".kiln", "d")
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


# --- by hand


def test_data_may_be_edited_by_hand(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A, B, C])
    data = tmp_path / ".kiln" / "datasets" / "d" / "data.jsonl"
    lines = lines_of(data)
    data.write_bytes(lines[2] + b"\n\n" + lines[0])  # B is gone, the order is another, the last line has no end
    with pytest.raises(KilnError, match=r"data\.jsonl changed after the last split"):
        read_entry(tmp_path / ".kiln", "d")
    change = changes.split(tmp_path / ".kiln", "d")
    assert (change.identity.rows, change.taken_in) == (2, -1)
    change = add([B], append=True)
    assert (change.identity.rows, change.taken_in) == (3, 0)
    assert lines_of(data) == [lines[2], lines[0], lines[1]]
    # Rows behind the last split, and another file added: both are taken in.
    data.write_bytes(data.read_bytes() + json.dumps(chat("new", "x")).encode())
    change = add([chat("newer", "x")], append=True)
    assert (change.added, change.taken_in, change.identity.rows, change.again) == (1, 1, 5, False)


def test_a_row_that_was_edited_in_its_place_is_one_that_went_and_one_that_came(
    add: Callable[..., changes.Change], tmp_path: Path
) -> None:
    assert add([A, A, B, C]).gone == 0
    directory = tmp_path / ".kiln" / "datasets" / "d"
    lines = lines_of(directory / "data.jsonl")

    def edit() -> None:
        write_rows(directory / "data.jsonl", [*lines[1:], chat("edited", "x")])

    edit()
    told = kiln("dataset", "split", "d", "--registry", tmp_path / ".kiln").err
    assert "that no split knew of (an add was cut short, or it was edited): +1\n" in told
    assert "rows that were split before and are not in data.jsonl any more: 1\n" in told
    change = changes.split(tmp_path / ".kiln", "d")
    assert (change.taken_in, change.gone) == (0, 0)
    write_rows(directory / "data.jsonl", lines[1:])
    change = changes.split(tmp_path / ".kiln", "d")
    assert (change.taken_in, change.gone) == (-1, 1)
    edit()
    (directory / "split.json").unlink()
    change = changes.split(tmp_path / ".kiln", "d")
    assert (change.taken_in, change.gone) == (1, None)


def test_a_directory_of_another_name_is_seen(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A])
    folder = tmp_path / ".kiln" / "datasets"
    shutil.copytree(folder / "d", folder / "e")
    with pytest.raises(KilnError, match="dataset_name is 'd', and the directory is 'e'"):
        read_entry(tmp_path / ".kiln", "e")


@pytest.mark.parametrize("append", [True, False])
def test_a_data_set_that_lost_its_rows_is_split_as_it_was(
    add: Callable[..., changes.Change], tmp_path: Path, append: bool
) -> None:
    rows = [A, B, C, *(chat(f"q{number}", "x", doc=number % 2) for number in range(6))]
    first = add(rows, options={"seed": "7", "train_percent": 50, "group_by": "/doc"})
    data = tmp_path / ".kiln" / "datasets" / "d" / "data.jsonl"
    data.unlink()
    with pytest.raises(KilnError, match=r"data\.jsonl is missing") as refused:
        changes.split(tmp_path / ".kiln", "d")
    assert refused.value.hint == "`kiln dataset add` the rows again"
    assert add(rows, append=append).identity == first.identity
    data.unlink()
    assert add(rows, append=append, options={"seed": "8"}).settings.split == msgspec.structs.replace(
        first.settings.split, seed="8"
    )


# --- names


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../a", "/a", ".a", "a b", "a\n", "a\0", "ä", "a" * 101, "a:train", "~", "a\\b"]
)
def test_what_is_no_name(add: Callable[..., changes.Change], tmp_path: Path, name: str) -> None:
    for call in (
        lambda: add([A], name=name),
        lambda: changes.split(tmp_path / ".kiln", name),
        lambda: changes.remove(tmp_path / ".kiln", name),
        lambda: read_entry(tmp_path / ".kiln", name),
        lambda: verify(tmp_path / ".kiln", name),
    ):
        with pytest.raises(KilnError, match="is no name") as refused:
            call()
        assert refused.value.code == "KLN201"
    assert not (tmp_path / ".kiln" / "datasets").exists()


def test_names_that_differ_in_case_alone(add: Callable[..., changes.Change]) -> None:
    add([A])
    with pytest.raises(KilnError, match="in case alone"):
        add([A], name="D")


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [A])
    done = kiln("dataset", "add", "d", rows, "--format", "grpo_groups", "--registry", tmp_path / ".kiln")
    assert (done.code, "KLN211" in done.err, "grpo_groups" in done.err) == (2, True, True)
    assert kiln("dataset", "add", "d", rows, "--format", "x", "--registry", tmp_path / ".kiln").code == 2


def test_a_file_that_is_not_there_or_empty_leaves_no_data_set(tmp_path: Path) -> None:
    done = kiln("dataset", "add", "d", tmp_path / "no.jsonl", "--registry", tmp_path / ".kiln")
    assert (done.code, "KLN204" in done.err) == (2, True)
    assert not (tmp_path / ".kiln").exists()
    empty = write_rows(tmp_path / "empty.jsonl", [b"", b" "])
    done = kiln("dataset", "add", "d", empty, "--registry", tmp_path / ".kiln")
    assert (done.code, "KLN107" in done.err) == (1, True)
    done = kiln("dataset", "add", "d", empty, "--source", "messages", "--registry", tmp_path / ".kiln")
    assert (done.code, "KLN107" in done.err) == (1, True)
    assert not (tmp_path / ".kiln" / "datasets" / "d").exists()


# --- removing


def test_what_is_removed_is_gone_and_may_come_again(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    first = add([A, B])
    assert changes.remove(tmp_path / ".kiln", "d") == tmp_path / ".kiln" / "datasets" / "d"
    assert [path.name for path in (tmp_path / ".kiln" / "datasets").iterdir()] == [".kiln.lock"]
    with pytest.raises(KilnError, match="has no data set 'd'; there are: none"):
        changes.remove(tmp_path / ".kiln", "d")
    assert add([A, B]).identity == first.identity


def test_a_link_to_a_data_set_is_not_removed(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A])
    folder = tmp_path / ".kiln" / "datasets"
    (folder / "e").symlink_to("d")
    with pytest.raises(KilnError, match="is a link") as refused:
        changes.remove(tmp_path / ".kiln", "e")
    assert refused.value.code == "KLN204"
    assert sorted(path.name for path in folder.iterdir()) == [".kiln.lock", "d", "e"]
    assert read_entry(tmp_path / ".kiln", "d").identity.rows == 1


# --- several processes


def test_one_change_at_a_time(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A])
    with run_lock(tmp_path / ".kiln" / "datasets", "kiln dataset split"):
        for call in (
            lambda: add([B], append=True),
            lambda: changes.split(tmp_path / ".kiln", "d"),
            lambda: changes.remove(tmp_path / ".kiln", "d"),
        ):
            with pytest.raises(KilnError, match="is in use by `kiln dataset split`") as refused:
                call()
            assert refused.value.code == "KLN401"
        assert read_entry(tmp_path / ".kiln", "d").identity.rows == 1  # readers take no lock


# --- kills


class Dying(Filesystem):
    """Kills its own process at the ``place``-th call that changes the disk."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __getattribute__(self, name: str) -> Any:
        if name in CALLS:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1
        return super().__getattribute__(name)


def killed_at(place: int, call: Callable[[], object]) -> bool:
    """Whether a child process that makes the call is killed by its ``place``-th step on the disk."""
    child = os.fork()
    if child == 0:
        try:
            files.FS = Dying(place)
            call()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("repair", ["add", "split"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "append"])
def test_a_kill_at_any_moment_of_an_add(
    first: bool, repair: str, add: Callable[..., changes.Change], tmp_path: Path, plugins: Plugins
) -> None:
    """What is left is the data set of before, or one that readers refuse and the next command finishes. The rows are in
    it once, however often the add is run."""
    old = [] if first else [A, B]
    new = [C, *(chat(f"q{number}", "x") for number in range(4)), C]
    file = write_rows(tmp_path / "new.jsonl", new)
    place = refused = 0
    while True:
        registry = tmp_path / f"registry-{place}"
        if old:
            changes.add(registry, "d", write_rows(tmp_path / "old.jsonl", old), plugins)

        def again(registry: Path = registry) -> changes.Change:
            return changes.add(registry, "d", file, plugins, append=not first)

        killed = killed_at(place, again)
        whole = True
        try:
            assert read_entry(registry, "d").identity.rows in (len(old), len(old) + len(new))
        except KilnError as error:
            assert error.code in (("KLN206", "KLN207", "KLN212") if first else ("KLN207",)), error.message
            whole = False
            refused += 1
        if not killed:
            assert whole
            break
        data = registry / "datasets" / "d" / "data.jsonl"
        there = [json.loads(line) for line in lines_of(data)] if data.exists() else []
        assert there in (old, [*old, *new])
        if repair == "split" and there:
            assert changes.split(registry, "d").identity.rows == len(there)
        if repair == "add":
            assert again().again == (there != old)
            assert [json.loads(line) for line in lines_of(data)] == [*old, *new]
        if there or repair == "add":
            assert verify(registry, "d") == []
            assert not list(registry.rglob(".kiln-tmp-*"))
        place += 1
    assert place > 20
    assert refused > 10


class Full(Filesystem):
    """A disk that is full from the ``place``-th call on."""

    def __init__(self, place: int) -> None:
        self.left = place

    def __getattribute__(self, name: str) -> Any:
        if name in ("create", "write", "fsync", "replace"):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().__getattribute__(name)


def test_a_disk_that_is_full_at_any_moment_of_an_add(
    add: Callable[..., changes.Change], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add([A, B])
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / ".kiln", kept)
    for place in range(1000):
        monkeypatch.setattr(files, "FS", full := Full(place))
        try:
            add([C], append=True)
            break
        except KilnError as error:
            assert error.code == "KLN402", error.message
        monkeypatch.setattr(files, "FS", Filesystem())
        assert not list(tmp_path.rglob(".kiln-tmp-*"))
        assert add([C], append=True).identity.rows == 3
        assert verify(tmp_path / ".kiln", "d") == []
        shutil.rmtree(tmp_path / ".kiln")
        shutil.copytree(kept, tmp_path / ".kiln")
    assert place > 10
    assert full.left >= 0


def test_what_is_added_piece_by_piece_is_as_if_added_at_once(
    add: Callable[..., changes.Change], tmp_path: Path
) -> None:
    rows = [chat(f"q{number}", "x", **({"group_id": f"g{number % 7}"} if number % 2 else {})) for number in range(24)]
    whole = add(rows, name="whole")
    grown = add(rows[:1], name="grown")
    for start in range(1, 24, 5):
        grown = add(rows[start : start + 5], name="grown", append=True)
    assert splits(tmp_path / ".kiln", "grown") == splits(tmp_path / ".kiln", "whole")
    assert grown.identity.corpus_sha256 == whole.identity.corpus_sha256


def test_a_kill_at_any_moment_of_a_split(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A, B, C, *(chat(f"q{number}", "x") for number in range(8))])
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / ".kiln", kept)
    place = 0
    while killed_at(place, lambda: changes.split(tmp_path / ".kiln", "d", {"seed": "3"})):
        try:
            assert read_entry(tmp_path / ".kiln", "d").split.config.seed in ("0", "3")
        except KilnError as error:
            assert error.code == "KLN207"
        changes.split(tmp_path / ".kiln", "d")
        assert verify(tmp_path / ".kiln", "d") == []
        shutil.rmtree(tmp_path / ".kiln")
        shutil.copytree(kept, tmp_path / ".kiln")
        place += 1
    assert place > 10
    assert read_entry(tmp_path / ".kiln", "d").split.config.seed == "3"


def test_a_first_add_that_was_cut_short_with_other_rows(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A])
    (tmp_path / ".kiln" / "datasets" / "d" / "identity.json").unlink()
    (tmp_path / ".kiln" / "datasets" / "d" / "split.json").unlink()
    with pytest.raises(KilnError, match="an add of other rows was cut short") as refused:
        add([B])
    assert (refused.value.code, "kiln dataset split d" in refused.value.hint) == ("KLN206", True)
    listed = kiln("dataset", "list", "--registry", tmp_path / ".kiln")
    assert "half written" in listed.out
    assert changes.split(tmp_path / ".kiln", "d").taken_in == 1


@pytest.mark.parametrize("name", ["split.json", "identity.json"])
def test_moves_are_not_told_where_nobody_knows(add: Callable[..., changes.Change], tmp_path: Path, name: str) -> None:
    add([A, B, C])
    (tmp_path / ".kiln" / "datasets" / "d" / name).write_bytes(b"{}")
    assert changes.split(tmp_path / ".kiln", "d").moves is None
    assert changes.split(tmp_path / ".kiln", "d").moves == []


def test_a_reader_beside_a_change_is_told_to_wait(add: Callable[..., changes.Change], tmp_path: Path) -> None:
    add([A, B])
    (tmp_path / ".kiln" / "datasets" / "d" / "train.jsonl").write_bytes(b"half")
    with run_lock(tmp_path / ".kiln" / "datasets", "kiln dataset add"):
        with pytest.raises(KilnError, match="is being changed by `kiln dataset add`") as refused:
            read_entry(tmp_path / ".kiln", "d")
        assert refused.value.code == "KLN401"
    with pytest.raises(KilnError) as refused:
        read_entry(tmp_path / ".kiln", "d")
    assert refused.value.code == "KLN207"
