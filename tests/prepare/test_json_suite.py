"""The JSONTestSuite through prepare: as the ``answers`` text of a row, and as a whole line. Nothing aborts a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kiln_stages import prepare
from prepare.conftest import jsonl, project, raw, rejected
from tests_support import shared_path

from kiln_cli.plugins import Plugins

SUITE = "data/conformance/JSONTestSuite/test_parsing"
# Reasons that say that a text is no JSON.
PARSE = {"invalid_answers_json", "invalid_utf8", "invalid_row_json"}
# y_ files that the contract refuses all the same.
REFUSED = {
    "y_object_duplicated_key.json": "a key twice in one object (contract, table rows 31 and 47)",
    "y_object_duplicated_key_and_value.json": "the same",
}
# n_ files that hold nothing but white space: there is no text, so the field is missing and the line is blank.
BLANK = {"n_structure_no_data.json", "n_single_space.json"}
# What the contract decides of the i_ files, which parsers may read either way.
REFUSED_ANYWAY = {
    "i_number_huge_exp.json": "overflows to infinity (row 23)",
    "i_number_neg_int_huge_exp.json": "the same",
    "i_number_pos_double_huge_exp.json": "the same",
    "i_number_real_neg_overflow.json": "the same",
    "i_number_real_pos_overflow.json": "the same",
    "i_number_too_big_neg_int.json": "an integer outside -2^63..2^64-1 (row 36)",
    "i_number_too_big_pos_int.json": "the same",
    "i_number_very_big_negative_int.json": "the same",
    "i_object_key_lone_2nd_surrogate.json": "a lone surrogate (row 37)",
    "i_string_1st_surrogate_but_2nd_missing.json": "the same",
    "i_string_1st_valid_surrogate_2nd_invalid.json": "the same",
    "i_string_incomplete_surrogate_and_escape_valid.json": "the same",
    "i_string_incomplete_surrogate_pair.json": "the same",
    "i_string_incomplete_surrogates_escape_valid.json": "the same",
    "i_string_invalid_lonely_surrogate.json": "the same",
    "i_string_invalid_surrogate.json": "the same",
    "i_string_inverted_surrogates_U+1D11E.json": "the same",
    "i_string_lone_second_surrogate.json": "the same",
    "i_structure_500_nested_arrays.json": "128 or more nested (row 34)",
    "i_structure_UTF-8_BOM_empty_object.json": "a byte-order mark before a text (row 19)",
}


@pytest.fixture(scope="module")
def suite() -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in sorted(shared_path(SUITE).iterdir())}
    assert [sum(name.startswith(kind) for name in files) for kind in ("y_", "n_", "i_")] == [95, 187, 35]
    return files


def is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def screened(root: Path, lines: list[bytes], plugins: Plugins) -> dict[int, str | None]:
    """The reason of each line (from 1), blank ones left out; None where it is kept or unused."""
    data = b"\n".join(lines) + b"\n" + jsonl(*(raw(f"sound{n}") for n in range(3)))
    config = project(root, ({"path": "rows.jsonl", "source": "sommelier"},), files={"rows.jsonl": data})
    result = prepare.run(config, root / "run", plugins)
    drops = result.summary.kiln["en"]
    assert drops.rows_read + drops.blank_lines == len(lines) + 3
    assert drops.rows_read == drops.kept + drops.dropped + drops.unused
    found = {row["line"]: row["reason"] for row in rejected(root / "run")}
    return {number: found.get(number) for number, line in enumerate(lines, start=1) if line.strip(b" \t\r\x0c")}


def test_every_file_as_answers(tmp_path: Path, plugins: Plugins, suite: dict[str, bytes]) -> None:
    """What is no text cannot stand in a string, so it is the whole line instead."""
    lines = [
        json.dumps(raw(name, answers=data.decode()), ensure_ascii=number % 2 == 0).encode()
        if is_text(data)
        else data.replace(b"\n", b" ")
        for number, (name, data) in enumerate(suite.items())
    ]
    found = screened(tmp_path, lines, plugins)
    reasons = {name: found[number] for number, name in enumerate(suite, start=1)}
    expect_parse_reasons = {name for name in suite if name.startswith("n_")} - BLANK | set(REFUSED)
    assert {name for name in expect_parse_reasons if reasons[name] not in PARSE} == set()
    assert {name for name in suite if name.startswith("y_") and reasons[name] in PARSE} == set(REFUSED)
    assert {name: reasons[name] for name in BLANK} == dict.fromkeys(BLANK, "missing_answers")
    # A sound text that is no list of calls is dropped for its shape; none of the suite is one.
    sound = {name for name in suite if name.startswith("y_")} - set(REFUSED)
    assert {reasons[name] for name in sound} == {"invalid_answer_shape"}
    texts = {name for name, data in suite.items() if name.startswith("i_") and is_text(data)}
    assert {name for name in texts if reasons[name] in PARSE} == set(REFUSED_ANYWAY)
    assert {name for name, reason in reasons.items() if reason == "invalid_utf8"} == {
        name for name, data in suite.items() if not is_text(data)
    }


def test_every_file_as_a_line(tmp_path: Path, plugins: Plugins, suite: dict[str, bytes]) -> None:
    chosen = {name: data.removesuffix(b"\n") for name, data in suite.items()}
    # A raw LF ends a line; what that would make sound or break into several is left out.
    chosen = {name: data for name, data in chosen.items() if b"\n" not in data or not is_text(data)}
    lines = [b" ", *(data.replace(b"\n", b" ") for data in chosen.values())]
    found = screened(tmp_path, lines, plugins)
    for number, name in enumerate(chosen, start=2):
        reason = found.get(number, "blank")
        if name in BLANK:
            assert reason == "blank", name
        elif name.startswith("n_") or name in REFUSED:
            assert reason in PARSE, name
        elif name.startswith("y_"):
            assert reason in ("row_not_object", "unknown_schema"), name
        else:
            assert reason in PARSE | {"row_not_object", "unknown_schema"}, name
