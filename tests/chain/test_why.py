"""``kiln why``: one row of each fate, told from the raw file to the last step, by every name that it has."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from kiln_stages.training.order import epoch_order
from syrupy.assertion import SnapshotAssertion
from tiny_model import RUN, Kiln, raw_rows

from kiln_cli.identity import Domain, canonical_json, domain_sha256

Copy = Callable[..., Path]
ROWS = raw_rows()
SEED, EPOCHS = 42, 2  # of the project's config


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def why(kiln: Kiln, project: Path, name: object) -> list[dict[str, Any]]:
    done = kiln("why", project / RUN, str(name), "--json")
    assert done.code == 0, done.err
    value = json.loads(done.out)
    assert value["schema"] == "kiln.why.v1" and value["asked"] == str(name) and value["count"] >= len(value["rows"])
    rows: list[dict[str, Any]] = value["rows"]
    return rows


def only(kiln: Kiln, project: Path, name: object) -> dict[str, Any]:
    (row,) = why(kiln, project, name)
    return row


def line_of(example_id: str) -> int:
    """Line of the first raw row with an id; the file has no blank lines, so it is the row's number too."""
    return next(line for line, row in enumerate(ROWS, start=1) if row.example_id == example_id)


def raw_hash(line: int) -> str:
    return domain_sha256(Domain.RAW_TOOL_CALL_ROW, ROWS[line - 1].line)


def corpus(project: Path, split: str = "corpus") -> list[dict[str, Any]]:
    return pl.read_parquet(project / RUN / "admit" / f"{split}.parquet").to_dicts()


def dropped_for(reason: str) -> int:
    """Line of the first raw row that ought to be dropped for a reason."""
    return next(line for line, row in enumerate(ROWS, start=1) if row.reason == reason)


# ---- each fate


def test_a_trained_row_is_followed_to_its_steps(finished: Path, kiln: Kiln) -> None:
    """The steps are those that the seed's order gives, and the losses those of the log."""
    kept = corpus(finished)
    place = 3
    row = kept[place]
    found = only(kiln, finished, row["row_sha256"])
    raw_line = line_of(row["example_id"])
    offset = sum(len(raw.line) + 1 for raw in ROWS[: raw_line - 1])
    raw = found["raw"]
    assert found["example_id"] == row["example_id"]
    assert (raw["path"], raw["line"], raw["row_index"]) == ("raw.jsonl", raw_line, raw_line)
    assert (raw["offset"], raw["length"]) == (offset, len(ROWS[raw_line - 1].line) + 1)
    assert raw["row_sha256"] == raw_hash(raw_line)
    number = [example["example_id"] for example in lines(finished / RUN / "data/train.jsonl")].index(row["example_id"])
    assert found["prepare"] == {"outcome": "kept", "split": "train", "number": number + 1}
    spans = row["label_spans"]
    assert found["admit"] == {
        "outcome": "kept",
        "split": "corpus",
        "row_index": row["row_index"],
        "row_sha256": row["row_sha256"],
        "tokens": len(row["input_ids"]),
        "supervised_tokens": sum(end - start for start, end in zip(spans[::2], spans[1::2], strict=True)),
    }
    losses = {step["step"]: step["loss"] for step in lines(finished / RUN / "train/metrics.jsonl")}
    steps = [epoch * len(kept) + epoch_order(SEED, epoch, len(kept)).index(place) + 1 for epoch in range(EPOCHS)]
    assert found["train"]["outcome"] == "trained" and found["train"]["adapter"] == "tiny"
    assert found["train"]["steps"] == [
        {"epoch": epoch, "step": step, "loss": losses[step]} for epoch, step in enumerate(steps, start=1)
    ]


def test_every_kept_row_is_visited_once_an_epoch(finished: Path, kiln: Kiln) -> None:
    kept = corpus(finished)
    steps = [step["step"] for row in kept for step in only(kiln, finished, row["example_id"])["train"]["steps"]]
    assert sorted(steps) == list(range(1, EPOCHS * len(kept) + 1))


@pytest.mark.parametrize("reason", sorted({row.reason for row in ROWS if row.reason is not None}))
def test_a_dropped_row_has_its_reason_and_its_detail(finished: Path, kiln: Kiln, reason: str) -> None:
    line = dropped_for(reason)
    found = only(kiln, finished, f"line:{line}")
    (told,) = [drop for drop in lines(finished / RUN / "data/rejected.jsonl") if drop["line"] == line]
    prepare = found["prepare"]
    assert prepare["outcome"] == "dropped"
    assert prepare["reason"] == told["reason"] == reason
    assert prepare["detail"] == told["detail"] and prepare.get("pointer", "") == told["pointer"]
    assert found["raw"]["row_sha256"] == told["row_sha256"] == raw_hash(line)
    assert found["example_id"] == told["example_id"]
    assert found["admit"] is None and found["train"] is None


@pytest.mark.parametrize("copy, first", [("raw:110", "raw:0"), ("raw:111", "raw:1")])
def test_a_duplicate_names_the_row_that_stays(finished: Path, kiln: Kiln, copy: str, first: str) -> None:
    found = only(kiln, finished, copy)
    assert found["prepare"]["reason"] == "duplicate_query"
    line = line_of(first)
    assert found["prepare"]["first"] == {
        "path": "raw.jsonl",
        "row_index": line,
        "line": line,
        "example_id": first,
    }


def test_two_rows_of_one_id_are_both_told(finished: Path, kiln: Kiln) -> None:
    first, second = why(kiln, finished, "raw:0")
    assert first["prepare"]["outcome"] in ("kept", "unused")
    assert second["prepare"]["reason"] == "duplicate_example_id"
    assert second["prepare"]["first"]["line"] == first["raw"]["line"] == line_of("raw:0")


def test_a_sound_row_without_a_place_is_unused(finished: Path, kiln: Kiln) -> None:
    """Thirty sound rows, twenty-six places in the splits."""
    sound = {row.example_id for row in ROWS if row.reason is None}
    placed = {
        example["example_id"]
        for split in ("train", "validation", "test")
        for example in lines(finished / RUN / f"data/{split}.jsonl")
    }
    unused = sorted(sound - placed)
    assert len(unused) == 4
    found = [only(kiln, finished, f"line:{line_of(str(name))}") for name in unused]
    assert [row["example_id"] for row in found] == unused
    assert all(row["prepare"] == {"outcome": "unused"} and row["admit"] is None for row in found)


def test_a_row_refused_by_admission_has_its_code(finished: Path, kiln: Kiln) -> None:
    for told in lines(finished / RUN / "admit/rejected.jsonl"):
        found = only(kiln, finished, told["row_sha256"])
        assert found["example_id"] == told["example_id"]
        admit = found["admit"]
        assert admit["outcome"] == "rejected" and admit["split"] == told["split"]
        assert (admit["code"], admit["reason"]) == ("over_length", "tokenization_error")
        assert admit["detail"] == told["detail"] and admit["row_index"] == told["row_index"]
        assert found["train"] is None


def test_held_out_rows_and_test_rows_are_never_trained_on(finished: Path, kiln: Kiln) -> None:
    held = only(kiln, finished, corpus(finished, "heldout")[0]["row_sha256"])
    assert held["admit"]["split"] == "heldout" and held["train"] == {"outcome": "held out", "adapter": "tiny"}
    test = only(kiln, finished, lines(finished / RUN / "data/test.jsonl")[0]["example_id"])
    assert test["admit"] == {"outcome": "not offered"} and test["train"] is None


def test_before_training_and_before_admission(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    row = corpus(admitted)[0]
    assert only(kiln, admitted, row["row_sha256"])["train"] == {"outcome": "not run"}
    project = copy_of(admitted)
    (project / RUN / "admit_manifest.json").unlink()
    assert only(kiln, project, row["example_id"])["admit"] == {"outcome": "not run"}
    done = kiln("why", project / RUN, row["row_sha256"])
    assert done.code == 1 and "`kiln admit` has not run" in done.err


def test_a_training_that_was_cut_tells_what_is_still_to_come(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(finished)
    log = project / RUN / "train/metrics.jsonl"
    kept = len(corpus(project))
    whole = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(whole[:kept]) + whole[kept][:-20])
    steps = only(kiln, project, corpus(project)[0]["row_sha256"])["train"]["steps"]
    assert [step["loss"] is None for step in steps] == [False, True]
    torn = json.loads(whole[kept])["row_sha256"]  # the row of the step whose line is half written
    assert [step["loss"] is None for step in only(kiln, project, torn)["train"]["steps"]] == [False, True]
    text = kiln("why", project / RUN, corpus(project)[0]["row_sha256"]).out
    assert "adapter tiny: 1 of 2 visits" in text and text.rstrip().endswith("still to come")


# ---- each name


def test_a_row_answers_to_all_its_names(finished: Path, kiln: Kiln) -> None:
    row = corpus(finished)[0]
    line = line_of(row["example_id"])
    chat, raw, own = row["row_sha256"], raw_hash(line), row["example_id"].removeprefix("raw:")
    expected = only(kiln, finished, row["example_id"])
    names = [chat, raw, chat[7:], raw[7:], chat[:19], chat[7:19], raw[7:19].upper(), f"line:{line}", f"row:{line}"]
    for name in [*names, f"raw.jsonl:{line}"]:
        assert only(kiln, finished, name) == expected, name
    if int(own) == line:
        assert only(kiln, finished, own) == expected


def test_a_plain_number_that_may_mean_two_rows_is_refused(finished: Path, kiln: Kiln) -> None:
    """The row of id 7 does not stand in line 7."""
    assert line_of("raw:7") != 7
    done = kiln("why", finished / RUN, "7")
    assert done.code == 2
    assert "KLN201" in done.err and "'7' names 2 rows" in done.err
    assert f"raw.jsonl:{line_of('raw:7')} " in done.err and "raw.jsonl:7 " in done.err and "say line:7" in done.err
    assert only(kiln, finished, "48")["raw"]["line"] == 48  # the last line; no row has the id 48
    assert only(kiln, finished, "111")["raw"]["line"] == line_of("raw:111")  # an id beyond the last line


def test_a_beginning_that_fits_several_rows_is_refused(finished: Path, kiln: Kiln) -> None:
    assert only(kiln, finished, "raw:2")["example_id"] == "raw:2"  # a whole id, though others begin so
    done = kiln("why", finished / RUN, "raw:")
    named = sum(row.example_id is not None for row in ROWS)
    assert done.code == 2 and f"'raw:' names {named} rows" in done.err and f"and {named - 10} more" in done.err
    digits = [raw_hash(line)[7:8] for line in range(1, len(ROWS) + 1)]
    common = max(digits, key=digits.count)
    assert digits.count(common) > 1
    assert kiln("why", finished / RUN, f"sha256:{common}").code == 2


def test_a_name_of_no_row_is_exit_1_with_what_was_searched(finished: Path, kiln: Kiln) -> None:
    for name in ("raw:999", "sha256:" + "0" * 64, "line:49", "nothing", "other.jsonl:1"):
        done = kiln("why", finished / RUN, name)
        assert done.code == 1
        assert "KLN106" in done.err
        for place in ("raw.jsonl", "data/rejected.jsonl", "admit/"):
            assert place in done.err
    assert kiln("why", finished / RUN, " ").code == 2


# ---- evidence that changed


def test_a_raw_file_that_changed_is_not_read(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    """What evidence knows is told all the same, and the account says what is missing."""
    project = copy_of(finished)
    row = corpus(project)[0]
    with (project / "raw.jsonl").open("ab") as stream:
        stream.write(b"\n")
    found = only(kiln, project, row["row_sha256"])
    assert found["train"]["steps"] and found["prepare"]["outcome"] == "kept"
    assert "line" not in found["raw"] and "changed after prepare read it" in found["raw"]["fault"]
    assert only(kiln, project, "raw:110")["raw"]["line"] == line_of("raw:110")
    assert only(kiln, project, "raw:110")["prepare"]["first"]["row_index"] == line_of("raw:0")
    (project / "raw.jsonl").unlink()
    assert "No such file" in only(kiln, project, "raw:110")["raw"]["fault"]


@pytest.mark.parametrize("name", ["data/rejected.jsonl", "data/train.jsonl", "admit/corpus.parquet"])
def test_evidence_that_changed_is_refused(finished: Path, copy_of: Copy, kiln: Kiln, name: str) -> None:
    project = copy_of(finished)
    with (project / RUN / name).open("ab") as stream:
        stream.write(b"\n")
    done = kiln("why", project / RUN, corpus(finished)[0]["row_sha256"])
    assert done.code == 2 and "KLN207" in done.err and name in done.err


def test_a_log_of_another_row_is_refused(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    project = copy_of(finished)
    first, second = corpus(project)[:2]
    log = project / RUN / "train/metrics.jsonl"
    log.write_text(log.read_text().replace(first["row_sha256"], second["row_sha256"]))
    done = kiln("why", project / RUN, first["row_sha256"])
    assert done.code == 2 and "KLN207" in done.err
    assert first["row_sha256"] in done.err and second["row_sha256"] in done.err


def test_a_log_in_another_order_is_refused(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    """Two rows change places in the first epoch: each line names its own row, but the seed gives another order."""
    project = copy_of(finished)
    log = project / RUN / "train/metrics.jsonl"
    steps = [json.loads(line) for line in log.read_bytes().splitlines()]
    for name in ("row_index", "row_sha256"):
        steps[0][name], steps[1][name] = steps[1][name], steps[0][name]
    log.write_bytes(b"".join(canonical_json(step) + b"\n" for step in steps))
    done = kiln("why", project / RUN, steps[0]["row_sha256"])
    assert done.code == 2 and "KLN207" in done.err and "metrics.jsonl" in done.err


def test_stages_that_ran_on_something_else_are_not_told(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    """Prepare again with another seed: admission and training are of the old splits."""
    project = copy_of(finished)
    config = project / "kiln.toml"
    config.write_text(config.read_text().replace("seed = 42", "seed = 43"))
    assert kiln("prepare", config, "--out", project / RUN).code == 0
    kept = lines(project / RUN / "data/train.jsonl")[0]["example_id"]
    assert only(kiln, project, kept)["admit"]["outcome"] == "stale"
    assert kiln("admit", config, "--out", project / RUN).code == 0
    trained = only(kiln, project, corpus(project)[0]["row_sha256"])["train"]
    assert trained["outcome"] == "stale" and trained["adapter"] == "tiny"


# ---- a file of chat rows

CHATS = (
    b'{"messages":[{"role":"user","content":"One?"},{"role":"assistant","content":"1"}]}\n'
    b"\n"
    b"no json\n"
    b'{"messages":[{"role":"user","content":"Two?"},{"role":"assistant","content":"2"}]}\n'
    b'{"messages":[{"role":"user","content":"One?"},{"role":"assistant","content":"1"}]}\n'
)


@pytest.fixture
def chats(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Path:
    (tmp_path / "chats.jsonl").write_bytes(CHATS)
    done = kiln(
        "admit", "--file", tmp_path / "chats.jsonl", "--model", tiny_model, "--invalid-row-policy", "skip",
        "--out", tmp_path / RUN,
    )  # fmt: skip
    assert done.code == 0, done.err
    return tmp_path


def test_rows_of_a_file_have_no_prepare(chats: Path, kiln: Kiln) -> None:
    second = only(kiln, chats, "line:4")
    assert second["prepare"] is None and second["admit"]["outcome"] == "kept"
    start = CHATS.index(b'{"messages":[{"role":"user","content":"Two?"')
    assert (second["raw"]["line"], second["raw"]["row_index"], second["raw"]["offset"]) == (4, 3, start)
    assert second["raw"]["excerpt"].startswith('{"messages":[{"role":"user","content":"Two?"')
    assert only(kiln, chats, "row:3") == only(kiln, chats, second["admit"]["row_sha256"][:15]) == second
    broken = only(kiln, chats, "3")
    assert broken["admit"]["code"] == "invalid_json" and broken["raw"]["excerpt"] == "no json"


def test_equal_rows_share_a_hash_and_are_both_told(chats: Path, kiln: Kiln) -> None:
    first, last = why(kiln, chats, corpus(chats)[0]["row_sha256"][:20])
    assert (first["raw"]["line"], last["raw"]["line"]) == (1, 5)
    assert first["admit"]["row_sha256"] == last["admit"]["row_sha256"]


def test_rows_that_were_handed_over(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    """They are kept in the run, so they have lines there."""
    rows = [line for line in CHATS.decode().split("\n") if line.startswith("{")]
    done = kiln("admit", "--row", rows[0], "--row", rows[1], "--model", tiny_model, "--out", tmp_path / RUN)
    assert done.code == 0, done.err
    found = only(kiln, tmp_path, "line:2")
    assert found["raw"]["path"] == "admit/rows.jsonl" and found["raw"]["excerpt"] == rows[1]
    assert found["raw"]["offset"] == len(rows[0]) + 1 and found["admit"]["outcome"] == "kept"


def test_a_file_that_changed_since_it_was_admitted(chats: Path, kiln: Kiln) -> None:
    (chats / "chats.jsonl").write_bytes(CHATS + b"\n")
    found = only(kiln, chats, "row:3")
    assert "changed after admission" in found["raw"]["fault"] and "excerpt" not in found["raw"]
    assert found["raw"]["line"] == 4 and found["admit"]["outcome"] == "kept"


# ---- packed files, and several of them

TOOLS = json.dumps([{"name": "f", "description": "d", "parameters": {}}])
ANSWERS = json.dumps([{"name": "f", "arguments": {}}])
SPLITS = "[data]\nn_train = 2\nn_validation = 1\nn_test = 1\n"


def raw_row(number: int, query: str = "", **more: object) -> dict[str, object]:
    query = query or f"A sound question, number {number}"
    return {"id": number, "query": query, "tools": TOOLS, "answers": ANSWERS, **more}


def prepared(make_run: Callable[..., Path], kiln: Kiln, sources: str, files: dict[str, bytes]) -> Path:
    root = make_run({"kiln.toml": 'schema = "kiln.config.v1"\n' + SPLITS + sources, **files})
    done = kiln("prepare", root / "kiln.toml", "--out", root / RUN)
    assert done.code == 0, done.err
    return root


@pytest.mark.parametrize("packing", ["gzip", "array", "gzip, array"])
def test_rows_of_packed_files(make_run: Callable[..., Path], kiln: Kiln, packing: str) -> None:
    """Bytes are those of the unpacked file; an element of an array has no line. A whole id goes before a place."""
    texts = [json.dumps(raw_row(number), indent=1 if "array" in packing else None) for number in range(5)]
    plain = "[\n" + ",\n".join(texts) + "\n]\n" if "array" in packing else "\n".join(texts) + "\n"
    data = gzip.compress(plain.encode()) if "gzip" in packing else plain.encode()
    root = prepared(make_run, kiln, '[[datasets]]\npath = "r.data"\n', {"r.data": data})
    found = only(kiln, root, "r.data:3")
    raw = found["raw"]
    assert (
        raw["row_index"] == 4 and raw["packing"] == packing and raw.get("line") == (None if "array" in packing else 4)
    )
    start = plain.index(texts[3])
    assert raw["offset"] <= start < start + len(texts[3]) <= raw["offset"] + raw["length"]
    text = kiln("why", root / RUN, "r.data:3").out
    assert f"r.data, {'row' if 'array' in packing else 'line'} 4, bytes" in text and f"({packing})" in text


def test_rows_of_a_table_have_no_bytes(make_run: Callable[..., Path], kiln: Kiln) -> None:
    buffer = io.BytesIO()
    pl.DataFrame([raw_row(number) for number in range(5)]).write_parquet(buffer)
    root = prepared(make_run, kiln, '[[datasets]]\npath = "r.parquet"\n', {"r.parquet": buffer.getvalue()})
    assert only(kiln, root, "row:2")["example_id"] == "r:1"
    text = kiln("why", root / RUN, "row:2").out
    assert "r.parquet, row 2 (parquet)\n" in text and "bytes" not in text


def test_the_hash_of_a_chat_row_is_not_that_of_a_dropped_row_with_its_id(
    make_run: Callable[..., Path], tiny_model: Path, kiln: Kiln
) -> None:
    rows = [raw_row(number) for number in range(4)] + [raw_row(number, f"Another {number}") for number in range(4)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    root = prepared(
        make_run, kiln, f'[[datasets]]\npath = "r.jsonl"\n[model]\npath = "{tiny_model}"\n', {"r.jsonl": data}
    )
    assert kiln("admit", root / "kiln.toml", "--out", root / RUN).code == 0
    for kept in corpus(root):
        assert [row["prepare"]["outcome"] for row in why(kiln, root, kept["example_id"])] == ["kept", "dropped"]
        assert only(kiln, root, kept["row_sha256"])["prepare"]["outcome"] == "kept"


def test_pairs_are_told_with_their_root_rows(make_run: Callable[..., Path], kiln: Kiln) -> None:
    """Two languages: a row of either file is found, and a line of both is refused."""
    root_rows = [raw_row(number) for number in range(4)]
    pairs = [raw_row(10 + n, f"Une question sans faute, {n}", of=n) for n in (0, 1, 9)]
    pairs.append(raw_row(20, "Encore une question pour la meme", of=0))
    sources = '[[datasets]]\nlanguage = "en"\npath = "en.jsonl"\n[[datasets]]\nlanguage = "fr"\npath = "fr.jsonl"\n'
    files = {name: "".join(json.dumps(row) + "\n" for row in rows).encode() for name, rows in
             (("en.jsonl", root_rows), ("fr.jsonl", pairs))}  # fmt: skip
    root = prepared(make_run, kiln, sources + 'source_id_column = "of"\n', files)
    kept = only(kiln, root, "fr:10")
    assert kept["raw"]["path"] == "fr.jsonl" and kept["prepare"]["pair_of"] == "en:0"
    assert kept["prepare"]["split"] == only(kiln, root, "en:0")["prepare"]["split"]
    missing = only(kiln, root, "fr.jsonl:3")
    assert missing["prepare"]["reason"] == "missing_source_example" and "first" not in missing["prepare"]
    again = only(kiln, root, "fr:20")
    assert again["prepare"]["reason"] == "duplicate_source_example"
    assert again["prepare"]["first"] == {"path": "fr.jsonl", "row_index": 1, "line": 1, "example_id": "fr:10"}
    both = why(kiln, root, "line:3")
    assert [row["raw"]["path"] for row in both] == ["en.jsonl", "fr.jsonl"]


# ---- what people read


@pytest.mark.parametrize("name", ["raw:26", "raw:110", "raw:5", "raw:0", "line:29", "raw:8", "raw:1"])
def test_the_account(finished: Path, kiln: Kiln, snapshot: SnapshotAssertion, name: str) -> None:
    """``pytest --snapshot-update`` writes new texts; read the difference before you commit it."""
    text = kiln("why", finished / RUN, name).out
    losses = {f"loss {step['loss']:.4f}" for step in lines(finished / RUN / "train/metrics.jsonl")}
    for loss in losses:  # they differ between machines
        text = text.replace(loss, "loss N")
    assert text == snapshot


def test_each_command_names_the_other(finished: Path, kiln: Kiln) -> None:
    row = corpus(finished)[0]
    for command in ("why", "inspect"):
        done = kiln(command, finished / RUN, row["example_id"])
        (line,) = done.err.splitlines()
        _, _, following = line.partition(": kiln ")
        assert (
            kiln(*following.split()).code == 0 and following.split()[0] == {"why": "inspect", "inspect": "why"}[command]
        )
    assert kiln("why", finished / RUN, "raw:110").err == ""


def test_foreign_text_never_reaches_the_terminal(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    hostile = "a\x1b[31mred\x07\u202egnp"
    row = {"messages": [{"role": "user", "content": hostile}, {"role": "assistant", "content": hostile}], hostile: 1}
    path = tmp_path / "h.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n" + json.dumps({hostile: 1}) + "\n" + f"{hostile}\n")
    done = kiln("admit", "--file", path, "--model", tiny_model, "--out", tmp_path / RUN, "--invalid-row-policy", "skip")
    assert done.code == 0, done.err
    for name in ("line:1", "line:2", "line:3", hostile):
        done = kiln("why", tmp_path / RUN, name)
        assert all(line.isprintable() for line in (done.out + done.err).split("\n"))
