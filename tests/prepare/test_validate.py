"""kiln validate: what a file is taken for, where each fault is said to be, and that nothing is written."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import prepare, validate
from kiln_stages.validate import FileReport
from prepare.conftest import ABSENT, LINE_REASONS, ROOT_REASONS, A, T, jsonl, project, raw, rejected
from tests_support import shared_path

from kiln_cli import app
from kiln_cli.errors import KilnError
from kiln_cli.manifests import document
from kiln_cli.plugins import Plugins

EN: dict[str, object] = {"path": "rows.jsonl"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files are named as a user in their directory names them."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def listing(root: Path) -> dict[str, tuple[int, int]]:
    return {path.as_posix(): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(root.rglob("*"))}


def one(plugins: Plugins, path: str | Path, **options: Any) -> FileReport:
    (report,) = validate.run([Path(path)], plugins, **options)
    return report


def dumped(row: dict[str, Any], **options: Any) -> bytes:
    return json.dumps(row, **options).encode()


# --- kinds


def test_kinds_are_recognised(here: Path, plugins: Plugins) -> None:
    config = project(here, (EN,), files={"rows.jsonl": jsonl(*(raw(n) for n in range(3)))})
    prepare.run(config, here / "run", plugins)
    xlam = {"query": "Valid query for row", "tools": T, "answers": A}
    (here / "xlam.jsonl").write_bytes(b"{broken\n\n" + jsonl(xlam))
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (here / "chat.jsonl").write_bytes(jsonl(chat))
    (here / "kiln.json").write_text('{\n"schema": "kiln.config.v1"\n}\n')
    kinds = {
        "kiln.toml": ("config", ".toml"),
        "kiln.json": ("config", "kiln.config.v1"),
        "rows.jsonl": ("raw", "sommelier"),
        "xlam.jsonl": ("raw", "xlam"),
        "chat.jsonl": ("sft", "messages"),
        "run/data/train.jsonl": ("prepared", "sommelier.prepared_example.v2"),
        "run/data_manifest.json": ("manifest", "kiln.manifest.v1"),
        "run": ("run", "directory"),
    }
    for name, (kind, why) in kinds.items():
        report = one(plugins, name)
        assert report.kind == kind, name
        assert why in report.why, name
        assert report.faults == (1 if name == "xlam.jsonl" else 0), name
        assert report.file == name
    assert one(plugins, "rows.jsonl", kind="raw").why == "given"


@pytest.mark.parametrize("data", [b"", b"\n", b" \t\r\n\n", b"[]\n", gzip.compress(b"")])
def test_files_without_rows(here: Path, plugins: Plugins, data: bytes) -> None:
    (here / "odd").write_bytes(data)
    report = one(plugins, "odd")
    assert (report.kind, report.rows, report.faults, report.findings) == ("empty", 0, 0, [])


@pytest.mark.parametrize("data", [b"nonsense\n", b'{"a":1}\n', b"7\n[]\n"])
def test_files_of_no_kind(here: Path, plugins: Plugins, data: bytes) -> None:
    (here / "odd").write_bytes(data)
    with pytest.raises(KilnError) as caught:
        one(plugins, "odd")
    assert (caught.value.code, caught.value.exit_code) == ("KLN212", 2)
    assert "odd" in caught.value.message and "--kind" in caught.value.hint


def test_a_kind_that_does_not_exist(plugins: Plugins) -> None:
    with pytest.raises(KilnError) as caught:
        one(plugins, "x", kind="rwa")
    assert caught.value.code == "KLN201"
    assert "rwa" in caught.value.message and "raw" in caught.value.message


def test_files_that_cannot_be_read(here: Path, plugins: Plugins) -> None:
    with pytest.raises(KilnError) as caught:
        one(plugins, "absent.jsonl")
    assert caught.value.code == "KLN204"
    (here / "empty").mkdir()
    with pytest.raises(KilnError) as caught:
        one(plugins, "empty")
    assert caught.value.code == "KLN212"


def test_standard_input_is_refused_by_name(plugins: Plugins) -> None:
    with pytest.raises(KilnError) as caught:
        one(plugins, "-")
    assert (caught.value.code, caught.value.exit_code) == ("KLN211", 2)
    assert "standard input" in caught.value.message


# --- places

PREFIXES = [b"", b"  \t", b"\x0c ", b"\xef\xbb\xbf", b"\xef\xbb\xbf \t"]
LEADS = {
    "plain": '"a":"b"',
    "not ascii": '"é":"天気 \U0001f600 e\u0301"',
    "tab": '\t"a"\t:\t"b"',
    "escaped tab": '"a":"\\t\\t"',
    "far": '"a":"' + "long " * 60 + '"',
    "far and wide": '"a":"' + "天気" * 60 + '"',
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("lead", LEADS)
def test_syntax_faults_have_their_byte(here: Path, plugins: Plugins, prefix: bytes, lead: str) -> None:
    before = f'{{{LEADS[lead]},"query":'.encode()
    line = prefix + before + b"nope, and more}"
    (here / "rows.jsonl").write_bytes(line + b"\n" + jsonl(raw(1)))
    (finding,) = one(plugins, "rows.jsonl", kind="raw", source="sommelier").findings
    assert (finding.reason, finding.line) == ("invalid_row_json", 1)
    assert line[finding.column - 1 :].startswith(b"nope")
    assert finding.text().startswith(f"rows.jsonl:1:{finding.column}: invalid_row_json: ")
    assert_caret(finding.excerpt, "nope, and more}")


def assert_caret(excerpt: str, at: str) -> None:
    """The caret stands below the first character of ``at``, as a terminal shows the two lines."""
    shown, caret = excerpt.split("\n")
    assert caret.strip() == "^"
    assert "\ufffd" not in shown
    column, index = 0, 0
    while column < caret.index("^"):
        column += 0 if shown[index] == "\u0301" else 2 if shown[index] in "天気\U0001f600" else 1
        index += 1
    assert column == caret.index("^")
    assert shown[index:].startswith(at), excerpt
    assert shown.startswith("    ") and "\t" not in shown


def test_a_broken_byte_has_its_place(here: Path, plugins: Plugins) -> None:
    line = b"  " + dumped(raw("é"), ensure_ascii=False).replace(b"Valid", b"V\xfflid")
    (here / "rows.jsonl").write_bytes(jsonl(raw(1)) + b"\n" + line)
    (finding,) = one(plugins, "rows.jsonl").findings
    assert (finding.reason, finding.line) == ("invalid_utf8", 3)
    assert line[finding.column - 1] == 0xFF
    shown, caret = finding.excerpt.split("\n")
    assert shown[caret.index("^") :].startswith("\ufffdlid query")


def test_what_stands_behind_the_row(here: Path, plugins: Plugins) -> None:
    line = dumped(raw(1)) + b" x"
    (here / "rows.jsonl").write_bytes(line)
    (finding,) = one(plugins, "rows.jsonl", kind="raw", source="sommelier").findings
    assert line[finding.column - 1 :] == b"x"
    assert_caret(finding.excerpt, "x")


@pytest.mark.parametrize("prefix", [b"", b" \t"])
@pytest.mark.parametrize("field", ["query", "tools", "answers", "source_id"])
def test_other_faults_have_their_field(here: Path, plugins: Plugins, prefix: bytes, field: str) -> None:
    """At the key, though the same text stands before it as a value, inside a string, or further inside."""
    decoys = {
        "value": field,
        "text": f'"{field}": 1',
        "inner": {field: 1, "list": [{field: 2}]},
        "é天\t": f"\U0001f600\t{field}",
    }
    row = {**decoys, **raw(1, **{field: 7})}
    line = prefix + dumped(row, ensure_ascii=False)
    (here / "rows.jsonl").write_bytes(jsonl(raw(2)) + line)
    (finding,) = one(plugins, "rows.jsonl").findings
    assert (finding.line, finding.pointer) == (2, f"/{field}")
    key = f'"{field}": 7'.encode()
    assert finding.column - 1 == line.rindex(key)
    assert_caret(finding.excerpt, key.decode())


def test_a_field_that_is_not_there_is_missed_at_the_start(here: Path, plugins: Plugins) -> None:
    (here / "rows.jsonl").write_bytes(jsonl(raw(1)) + b"  " + dumped(raw(2, query=ABSENT)))
    (finding,) = one(plugins, "rows.jsonl").findings
    assert (finding.line, finding.column, finding.reason) == (2, 3, "missing_query")


def test_foreign_text_is_made_harmless(here: Path, plugins: Plugins) -> None:
    name = "rows\x1b[31m\u202e.jsonl"
    row = raw(1, source_id="\x1b]8;;http://evil\x07\u202e", query="\x1b[2J")
    (here / name).write_bytes(jsonl(row, row) + dumped(row, ensure_ascii=False)[:-1] + b"\x1b\x9b")
    report = one(plugins, name)
    assert report.faults == 3
    text = "".join(finding.text() for finding in report.findings) + report.file
    assert text.replace("\n", "").isprintable()


# --- reasons


def test_the_reasons_are_those_of_prepare(here: Path, plugins: Plugins) -> None:
    lines = [
        dumped(raw(1)),
        b"\xff",
        b"{",
        b"[]",
        dumped(raw(1, schema_version="x")),
        dumped(raw(1, source_revision=ABSENT)),
        dumped(raw(2, source_id=None)),
        dumped(raw(1)),
        dumped(raw(1, query="")),
        dumped(raw(3, query="")),
        dumped(raw(3)),
        dumped(raw(4, tools=" ")),
        dumped(raw(5, answers=None)),
        dumped(raw(6, query="short")),
        b"",
        dumped(raw(7, query="x" * 2001)),
        dumped(raw(8, tools="[")),
        dumped(raw(9, tools="{}")),
        dumped(raw(10, answers="[")),
        dumped(raw(11, answers="[]")),
        dumped(raw(12, answers=f"[{A[1:-1]},{A[1:-1]}]")),
        dumped(raw(13, query="VALID query for row 1")),
        dumped(raw(1, query="a query of its own")),
        dumped(raw(14, query="a query of its own")),
        dumped(raw(15)),
    ]
    config = project(here, (EN,), files={"rows.jsonl": b"\n".join(lines)})
    prepare.run(config, here / "run", plugins)
    dropped = [(row["line"], row["reason"], row["pointer"]) for row in rejected(here / "run")]
    report = one(plugins, "rows.jsonl", max_faults=1000)
    found = sorted((finding.line, finding.reason, finding.pointer) for finding in report.findings)
    assert found == dropped
    assert {reason for _, reason, _ in dropped} == {*LINE_REASONS, *ROOT_REASONS} - {"line_too_long"}
    assert (report.rows, report.notes) == (24, 2)
    assert {finding.reason for finding in report.findings if finding.note} == {"multi_call_answer", "duplicate_query"}
    assert report.faults == len(dropped) - 2


def test_ids_that_rows_are_given_may_repeat(here: Path, plugins: Plugins) -> None:
    """A row without an id is known by its place; another row may have just that id."""
    rows = [{"query": f"Valid query for row {n}", "tools": T, "answers": A} for n in range(4)]
    rows[1]["id"] = 3
    config = project(here, (EN,), files={"rows.jsonl": jsonl(*rows)})
    prepare.run(config, here / "run", plugins)
    (row,) = rejected(here / "run")
    (finding,) = one(plugins, "rows.jsonl").findings
    assert (finding.line, finding.reason) == (row["line"], row["reason"]) == (3, "duplicate_example_id")


@pytest.mark.parametrize(
    "changes, note",
    [
        *[({"query": char * 12}, "invisible_query") for char in ("\u200b", "\ufeff", "\u180e")],
        ({"query": "a zero \x00 in a query"}, "null_character"),
        ({"tools": T.replace('"f"', '" "')}, "blank_tool_name"),
    ],
)
def test_oddities_that_prepare_keeps_are_noted(
    here: Path, plugins: Plugins, changes: dict[str, object], note: str
) -> None:
    """Contract, table rows 7, 13 and 25."""
    config = project(here, (EN,), files={"rows.jsonl": jsonl(raw(1), raw(2), raw(3, **changes))})
    prepare.run(config, here / "run", plugins)
    assert rejected(here / "run") == []
    report = one(plugins, "rows.jsonl")
    assert [(f.line, f.reason, f.note) for f in report.findings] == [(3, note, True)]
    assert (report.faults, report.notes) == (0, 1)


FAMILIES = {
    "bfcl_xlam_rows": (
        1848,
        {"query_too_short": 3, "query_too_long": 1, "multi_call_answer": 440, "duplicate_query": 110},
    ),
    "bfcl_jsonschema_rows": (360, {"query_too_long": 1, "multi_call_answer": 120, "duplicate_query": 3}),
    "bfcl_no_call_rows": (120, {"query_too_short": 2, "invalid_answer_shape": 118}),
    "sommelier_fixture/preparation_rows": (30, {}),
    "sommelier_fixture/preparation_rows.fr": (30, {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_real_rows(plugins: Plugins, name: str) -> None:
    rows, counts = FAMILIES[name]
    report = one(plugins, shared_path(f"data/function_calling/{name}.jsonl"), max_faults=10_000)
    assert (report.kind, report.rows) == ("raw", rows)
    assert Counter(finding.reason for finding in report.findings) == counts
    notes = counts.get("multi_call_answer", 0) + counts.get("duplicate_query", 0)
    assert (report.notes, report.faults) == (notes, sum(counts.values()) - notes)


def test_every_shared_file_of_rows_is_named() -> None:
    folder = shared_path("data/function_calling")
    found = {path.relative_to(folder).as_posix().removesuffix(".jsonl") for path in folder.rglob("*.jsonl")}
    assert found == set(FAMILIES)


@pytest.mark.parametrize("packing", ["array", "gzip", "gzip of an array"])
def test_packed_rows(here: Path, plugins: Plugins, packing: str) -> None:
    rows = [raw(1), raw(2, query="short"), raw(3), raw(4, query=raw(3)["query"])]
    data = json.dumps(rows, indent=1).encode() if "array" in packing else jsonl(*rows)
    (here / "rows").write_bytes(gzip.compress(data) if "gzip" in packing else data)
    report = one(plugins, "rows")
    assert (report.kind, report.rows, report.faults, report.notes) == ("raw", 4, 1, 1)
    assert [finding.reason for finding in report.findings] == ["query_too_short", "duplicate_query"]
    assert_caret(report.findings[0].excerpt, '"query": "short"')


def test_a_long_line(here: Path, plugins: Plugins) -> None:
    (here / "rows.jsonl").write_bytes(jsonl(raw(1)) + b"\xff" * (16 * 1024 * 1024 + 1) + b"\n" + jsonl(raw(2)))
    (finding,) = one(plugins, "rows.jsonl").findings
    assert (finding.line, finding.column, finding.reason, finding.excerpt) == (2, 0, "line_too_long", "")


# --- other kinds


def test_chat_rows(here: Path, plugins: Plugins) -> None:
    good = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    bad = {"messages": [{"role": "nobody", "content": "hi"}]}
    (here / "chat.jsonl").write_bytes(jsonl(good, bad, {"messages": []}) + b"{\n")
    report = one(plugins, "chat.jsonl")
    assert (report.kind, report.rows, report.faults) == ("sft", 4, 3)
    assert [(f.line, f.reason) for f in report.findings] == [
        (2, "invalid_role"),
        (3, "empty_messages"),
        (4, "invalid_json"),
    ]


def test_prepared_examples(here: Path, plugins: Plugins) -> None:
    config = project(here, (EN,), (3, 1, 1), files={"rows.jsonl": jsonl(*(raw(n) for n in range(5)))})
    prepare.run(config, here / "run", plugins)
    lines = (here / "run" / "data" / "train.jsonl").read_bytes().split(b"\n")
    broken = lines[1].replace(b'"split"', b'"slit"')
    (here / "some.jsonl").write_bytes(b"\n".join([lines[0], broken, lines[2][:-5], b""]))
    report = one(plugins, "some.jsonl")
    assert (report.kind, report.rows, report.faults) == ("prepared", 3, 2)
    assert [(f.line, f.reason) for f in report.findings] == [(2, "schema"), (3, "schema")]


def test_configs(here: Path, plugins: Plugins) -> None:
    (here / "kiln.toml").write_text('schema = "kiln.config.v1"\n[data]\nn_train = 0\nchecks = 5\n[train]\nepochz = 1\n')
    report = one(plugins, "kiln.toml")
    assert (report.kind, report.faults) == ("config", 3)
    details = [finding.detail for finding in report.findings]
    assert [detail.split()[0] for detail in details] == ["data.n_train", "data.checks", "train.epochz"]
    (here / "kiln.toml").write_text("schema = [\n")
    assert one(plugins, "kiln.toml").faults == 1


@pytest.mark.parametrize(
    "name",
    [
        "data/train.jsonl",
        "data/validation.jsonl",
        "data/test.jsonl",
        "data/rejected.jsonl",
        "data/drop_summary.json",
        "data_manifest.json",
        "config.resolved.toml",
    ],
)
@pytest.mark.parametrize("damage", ["changed", "absent"])
def test_a_damaged_run_names_the_artifact(here: Path, plugins: Plugins, name: str, damage: str) -> None:
    rows = jsonl(*(raw(n) for n in range(4)), raw(5, query="short"))
    config = project(here, (EN,), (2, 1, 1), files={"rows.jsonl": rows})
    prepare.run(config, here / "run", plugins)
    assert one(plugins, "run").faults == 0
    path = here / "run" / name
    if damage == "changed":
        data = path.read_bytes()
        changed = data.replace(b'"query"', b'"qweri"', 1) if b'"query"' in data else data.replace(b"42", b"43")
        changed = changed if changed != data else data.replace(b"query_too_short", b"query_too_shirt", 1)
        assert changed != data
        path.write_bytes(changed)
        report = one(plugins, "run")
        assert report.faults >= 1
        assert any(name in finding.reason or name in finding.detail for finding in report.findings), report.findings
    else:
        path.unlink()
        if name == "data_manifest.json":
            with pytest.raises(KilnError) as caught:
                one(plugins, "run")
            assert caught.value.code == "KLN212"
            return
        report = one(plugins, "run")
        assert any(Path(name).name in f"{finding.reason} {finding.detail}" for finding in report.findings)


def test_an_account_that_does_not_add_up(here: Path, plugins: Plugins) -> None:
    config = project(here, (EN,), files={"rows.jsonl": jsonl(*(raw(n) for n in range(5)))})
    prepare.run(config, here / "run", plugins)
    path = here / "run" / "data" / "drop_summary.json"
    summary = json.loads(path.read_bytes())
    summary["kiln"]["en"]["unused"] += 1
    path.write_bytes(document(summary))
    details = " ".join(finding.detail for finding in one(plugins, "run").findings)
    assert "en: rows_read is 5, expected 6" in details


# --- the command


def test_nothing_is_written(here: Path, plugins: Plugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(here / "temporary"))
    (here / "temporary").mkdir()
    config = project(here, (EN,), files={"rows.jsonl": jsonl(*(raw(n) for n in range(3)), raw(3, query="short"))})
    prepare.run(config, here / "run", plugins)
    (here / "rows.gz").write_bytes(gzip.compress((here / "rows.jsonl").read_bytes()))
    (here / "rows.json").write_text(json.dumps([raw(1), raw(2)], indent=1))
    names = ["rows.jsonl", "rows.gz", "rows.json", "kiln.toml", "run", "run/data/test.jsonl", "run/data_manifest.json"]
    before = listing(here)
    reports = validate.run([Path(name) for name in names], plugins)
    assert [report.faults for report in reports] == [1, 1, 0, 0, 0, 0, 0]
    after = listing(here)
    del before[str(here / "temporary")], after[str(here / "temporary")]
    assert after == before
    assert list((here / "temporary").iterdir()) == []


def test_exit_codes_and_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "good.jsonl").write_bytes(jsonl(raw(1), raw(2)))
    (here / "noted.jsonl").write_bytes(jsonl(raw(1), raw(2, query=raw(1)["query"])))
    (here / "bad.jsonl").write_bytes(jsonl(raw(1), raw(2, query="short")))
    assert app.run(["validate", "good.jsonl"]) == 0
    why = "raw (sommelier: schema_version is sommelier.raw_tool_call_row.v1)"
    assert capsys.readouterr().out == f"good.jsonl: {why}: 2 rows, 0 faults, 0 notes\n"
    assert app.run(["validate", "noted.jsonl"]) == 0
    assert "noted.jsonl:2:73: duplicate_query (note) at /query: the same query as in line 1" in capsys.readouterr().out
    assert app.run(["validate", "good.jsonl", "bad.jsonl", "noted.jsonl"]) == 1
    out, err = capsys.readouterr()
    lines = out.split("\n")
    assert lines[0].startswith("good.jsonl: raw")
    assert lines[1] == "bad.jsonl:2:73: query_too_short at /query: 5 characters, at least 10"
    assert lines[3] == " " * 24 + "^"
    assert err.startswith("kiln: KLN105: 1 fault in 3 files")
    assert app.run(["validate", "absent.jsonl"]) == 2
    assert capsys.readouterr().out == ""


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "bad.jsonl").write_bytes(jsonl(raw(1), raw(2, query="short")) + b"{\n")
    (here / "good.jsonl").write_bytes(jsonl(raw(1)))
    assert app.run(["validate", "bad.jsonl", "good.jsonl", "--json"]) == 1
    out, _ = capsys.readouterr()
    value = json.loads(out)
    assert set(value) == {"schema", "files"}
    assert value["schema"] == "kiln.validation.v1"
    bad, good = value["files"]
    assert set(bad) == {"file", "kind", "why", "rows", "faults", "notes", "findings"}
    assert (bad["file"], bad["kind"], bad["rows"], bad["faults"], bad["notes"]) == ("bad.jsonl", "raw", 3, 2, 0)
    assert (good["faults"], good["findings"]) == (0, [])
    for finding in bad["findings"]:
        assert set(finding) == {"file", "line", "column", "reason", "detail", "pointer", "excerpt", "note"}
    assert [(f["line"], f["column"], f["reason"]) for f in bad["findings"]] == [
        (2, 73, "query_too_short"),
        (3, 2, "invalid_row_json"),
    ]


def test_max_faults(here: Path, plugins: Plugins, capsys: pytest.CaptureFixture[str]) -> None:
    noted = [raw(n, query="the same query again") for n in range(30)]
    bad = [raw(n, query="short") for n in range(30, 60)]
    (here / "rows.jsonl").write_bytes(jsonl(*noted, *bad))
    for limit in (1, 3, 20):
        report = one(plugins, "rows.jsonl", max_faults=limit)
        # All are counted; those of the first rows are shown, and notes never crowd out faults.
        assert (report.faults, report.notes) == (30, 29)
        assert [f.line for f in report.findings if not f.note] == list(range(31, 31 + limit))
        assert [f.line for f in report.findings if f.note] == list(range(2, 2 + limit))
    assert app.run(["validate", "rows.jsonl", "--max-faults", "3"]) == 1
    out, _ = capsys.readouterr()
    assert out.count("query_too_short") == 3
    assert out.strip().endswith("30 faults, 29 notes (53 more not shown: --max-faults)")
    assert app.run(["validate", "rows.jsonl", "--max-faults", "0"]) == 2
