"""The hostile-JSON contract: the public suite, the limits, duplicate keys, and the two paths against each other."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import shared_path

from kiln_cli import strict_json
from kiln_cli.strict_json import JsonFault, parse

PARSING = "data/conformance/JSONTestSuite/test_parsing"
TRANSFORM = "data/conformance/JSONTestSuite/test_transform"

# The suite calls these valid; the contract refuses a key that stands twice.
REFUSED_Y = {
    "y_object_duplicated_key.json": "duplicate_key",
    "y_object_duplicated_key_and_value.json": "duplicate_key",
}
# The suite leaves these open; the contract decides each. None: accepted.
VERDICTS_I = {
    "i_number_double_huge_neg_exp.json": None,
    "i_number_huge_exp.json": "not_finite",
    "i_number_neg_int_huge_exp.json": "not_finite",
    "i_number_pos_double_huge_exp.json": "not_finite",
    "i_number_real_neg_overflow.json": "not_finite",
    "i_number_real_pos_overflow.json": "not_finite",
    "i_number_real_underflow.json": None,
    "i_number_too_big_neg_int.json": "integer_out_of_range",
    "i_number_too_big_pos_int.json": "integer_out_of_range",
    "i_number_very_big_negative_int.json": "integer_out_of_range",
    "i_object_key_lone_2nd_surrogate.json": "lone_surrogate",
    "i_string_1st_surrogate_but_2nd_missing.json": "lone_surrogate",
    "i_string_1st_valid_surrogate_2nd_invalid.json": "lone_surrogate",
    "i_string_UTF-16LE_with_BOM.json": "invalid_utf8",
    "i_string_UTF-8_invalid_sequence.json": "invalid_utf8",
    "i_string_UTF8_surrogate_U+D800.json": "invalid_utf8",
    "i_string_incomplete_surrogate_and_escape_valid.json": "lone_surrogate",
    "i_string_incomplete_surrogate_pair.json": "lone_surrogate",
    "i_string_incomplete_surrogates_escape_valid.json": "lone_surrogate",
    "i_string_invalid_lonely_surrogate.json": "lone_surrogate",
    "i_string_invalid_surrogate.json": "lone_surrogate",
    "i_string_invalid_utf-8.json": "invalid_utf8",
    "i_string_inverted_surrogates_U+1D11E.json": "lone_surrogate",
    "i_string_iso_latin_1.json": "invalid_utf8",
    "i_string_lone_second_surrogate.json": "lone_surrogate",
    "i_string_lone_utf8_continuation_byte.json": "invalid_utf8",
    "i_string_not_in_unicode_range.json": "invalid_utf8",
    "i_string_overlong_sequence_2_bytes.json": "invalid_utf8",
    "i_string_overlong_sequence_6_bytes.json": "invalid_utf8",
    "i_string_overlong_sequence_6_bytes_null.json": "invalid_utf8",
    "i_string_truncated-utf-8.json": "invalid_utf8",
    "i_string_utf16BE_no_BOM.json": "invalid_utf8",
    "i_string_utf16LE_no_BOM.json": "invalid_utf8",
    "i_structure_500_nested_arrays.json": "too_deep",
    "i_structure_UTF-8_BOM_empty_object.json": "syntax",
}
VERDICTS_TRANSFORM = {
    "number_-9223372036854775808.json": None,
    "number_-9223372036854775809.json": "integer_out_of_range",
    "number_1.0.json": None,
    "number_1.000000000000000005.json": None,
    "number_1000000000000000.json": None,
    "number_10000000000000000999.json": None,
    "number_1e-999.json": None,
    "number_1e6.json": None,
    "number_9223372036854775807.json": None,
    "number_9223372036854775808.json": None,
    "object_key_nfc_nfd.json": None,
    "object_key_nfd_nfc.json": None,
    "object_same_key_different_values.json": "duplicate_key",
    "object_same_key_same_value.json": "duplicate_key",
    "object_same_key_unclear_values.json": "duplicate_key",
    "string_1_escaped_invalid_codepoint.json": "lone_surrogate",
    "string_1_invalid_codepoint.json": "invalid_utf8",
    "string_2_escaped_invalid_codepoints.json": "lone_surrogate",
    "string_2_invalid_codepoints.json": "invalid_utf8",
    "string_3_escaped_invalid_codepoints.json": "lone_surrogate",
    "string_3_invalid_codepoints.json": "invalid_utf8",
    "string_with_escaped_NULL.json": None,
}


def verdict(text: bytes) -> str | None:
    """The kind of the fault, or None where the text is accepted. Any other exception fails the test."""
    try:
        parse(text)
    except JsonFault as fault:
        assert fault.kind in JsonFault.KINDS
        assert fault.detail
        return fault.kind
    return None


def at_stack_depth(depth: int, text: bytes) -> str | None:
    """The verdict when the caller stands ``depth`` frames deep."""
    here, frame = 0, sys._getframe()
    while frame is not None:
        here, frame = here + 1, frame.f_back

    def dive(left: int) -> str | None:
        return dive(left - 1) if left > 0 else verdict(text)

    return dive(depth - here)


def suite(prefix: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(shared_path(PARSING).glob(f"{prefix}_*.json"))}


# --- the public suite


def test_suite_accepts_what_is_valid() -> None:
    files = suite("y")
    assert len(files) == 95
    assert {name: kind for name, text in files.items() if (kind := verdict(text))} == REFUSED_Y


def test_suite_values_equal_the_standard_library() -> None:
    for name, text in suite("y").items():
        if name not in REFUSED_Y and text != b"[-0]":
            assert repr(parse(text)) == repr(json.loads(text)), name
    assert repr(parse(b"[-0]")) == "[-0.0]"  # the standard library gives 0


def test_suite_refuses_what_is_invalid() -> None:
    files = suite("n")
    assert len(files) == 187
    assert [name for name, text in files.items() if verdict(text) is None] == []


def test_suite_file_that_is_left_out_of_the_copy() -> None:
    """n_structure_open_array_object.json is 250 kB of ``[{"":`` and is made here."""
    assert verdict(b'[{"":' * 50_000 + b"\n") == "too_deep"


def test_suite_open_cases_are_decided() -> None:
    assert {name: verdict(text) for name, text in suite("i").items()} == VERDICTS_I


def test_suite_transform_cases_are_decided() -> None:
    found = {path.name: verdict(path.read_bytes()) for path in shared_path(TRANSFORM).glob("*.json")}
    assert found == VERDICTS_TRANSFORM


# --- limits


@pytest.mark.parametrize("opening, closing", [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("stack", [0, 900])
def test_depth(opening: bytes, closing: bytes, stack: int) -> None:
    """127 nested pass and 128 do not, whatever the depth of the caller."""
    for depth, expected in ((1, None), (127, None), (128, "too_deep"), (129, "too_deep"), (100_000, "too_deep")):
        assert at_stack_depth(stack, opening * depth + b"1" + closing * depth) == expected, depth


def test_depth_from_a_deep_caller_through_the_slow_path() -> None:
    text = b"[" * 127 + b"-0" + b"]" * 127
    assert at_stack_depth(900, text) is None
    assert at_stack_depth(900, b'{"a":1,"a":' + b"[" * 126 + b"]" * 126 + b"}") == "duplicate_key"


def test_depth_counts_no_brackets_in_strings_and_no_siblings() -> None:
    assert parse(b'"' + b"[" * 500 + b'"') == "[" * 500
    assert parse(b'["\\"' + b"[{" * 500 + b'"]') == ['"' + "[{" * 500]
    assert parse(b"[" + b"[]," * 500 + b"[]]") == [[]] * 501


@pytest.mark.parametrize("pair", [(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")])
@pytest.mark.parametrize("string", [b'""', b'"]["', b'"[[[[}}}}"', b'"\\"]\\\\"', b'"{]"'])
def test_depth_of_a_row_of_many_small_objects(pair: tuple[bytes, bytes], string: bytes) -> None:
    """Such a row has more colons than it may nest; strings of brackets neither hide depth nor make it up."""
    many = b",".join(b'{"k":%s,"n":[%s]}' % (string, string) for _ in range(200))
    levels = len(pair[0].replace(b'"a":', b""))
    for depth, expected in ((120, None), (126, None), (128, "too_deep"), (250, "too_deep")):
        times = depth // levels
        text = b'{"x":[%s],"y":%s%s%s}' % (many, pair[0] * times, string, pair[1] * times)
        assert verdict(text) == expected, depth
    hidden = b'{"x":[%s],"y":%s%s}' % (many, b'["]",' * 200 + b"1", b',"["]' * 200)
    assert verdict(hidden) == "too_deep"


def test_depth_of_a_text_that_never_closes() -> None:
    assert verdict(b"[" * 128) == "too_deep"
    assert verdict(b"[" * 127) == "syntax"
    assert verdict(b'["' + b"[" * 1000) == "syntax"


@pytest.mark.parametrize(
    "text, value",
    [
        (b"0", "0"),
        (b"-0", "-0.0"),
        (b"[-0]", "[-0.0]"),
        (b"-0.0", "-0.0"),
        (b"-0e5", "-0.0"),
        (b"-1", "-1"),
        (b"1.0", "1.0"),
        (b"1e2", "100.0"),
        (b"0.1000", "0.1"),
        (b"9007199254740993", "9007199254740993"),
        (b"18446744073709551615", "18446744073709551615"),
        (b"-9223372036854775808", "-9223372036854775808"),
        (b"1e-400", "0.0"),
        (b"1.7976931348623157e308", "1.7976931348623157e+308"),
        (b"123456789012345678901234567890.0", "1.2345678901234568e+29"),
        (b'"-0"', "'-0'"),
        (b'"1234567890123456789012345"', "'1234567890123456789012345'"),
    ],
)
def test_numbers_that_pass(text: bytes, value: str) -> None:
    assert repr(parse(text)) == value


@pytest.mark.parametrize(
    "text, kind",
    [
        (b"NaN", "not_finite"),
        (b"[NaN]", "not_finite"),
        (b"Infinity", "not_finite"),
        (b'{"d":-Infinity}', "not_finite"),
        (b"1e400", "not_finite"),
        (b"-1e999", "not_finite"),
        (b"18446744073709551616", "integer_out_of_range"),
        (b"-9223372036854775809", "integer_out_of_range"),
        (b"[" + b"9" * 5000 + b"]", "integer_out_of_range"),
        (b"-" + b"9" * 5000, "integer_out_of_range"),
        (b"01", "syntax"),
        (b"-01", "syntax"),
        (b"+1", "syntax"),
        (b".5", "syntax"),
        (b"1.", "syntax"),
        (b"0x10", "syntax"),
        (b"-", "syntax"),
    ],
)
def test_numbers_that_do_not(text: bytes, kind: str) -> None:
    assert verdict(text) == kind


def test_a_double_of_5000_digits_rounds() -> None:
    assert parse(b"0." + b"3" * 5000) == 0.3333333333333333
    assert verdict(b"9" * 5000 + b".0") == "not_finite"


@pytest.mark.parametrize(
    "text",
    [b'"\\ud800"', b'["\\udc00"]', b'{"\\ud800":1}', b'"\\ud83d"', b'"\\ude00\\ud83d"', b'{"a":{"b":["\\ud800x"]}}'],
)
def test_lone_surrogates_are_refused(text: bytes) -> None:
    assert verdict(text) == "lone_surrogate"


def test_surrogate_pairs_and_nul_are_text() -> None:
    assert parse(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert parse(b'"a\\u0000b"') == "a\x00b"


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x09, 0x0A, 0x0D, 0x1F])
def test_raw_controls_are_refused(byte: int) -> None:
    assert verdict(b'["a' + bytes([byte]) + b'"]') == "syntax"
    assert verdict(b'{"a' + bytes([byte]) + b'":-0}') == "syntax"


def test_delete_and_c1_controls_are_text() -> None:
    assert parse('"\x7f\x80\x9f\u2028"'.encode()) == "\x7f\x80\x9f\u2028"


@pytest.mark.parametrize(
    "text, offset",
    [
        (b'"a\xffb"', 2),
        (b'"\xc0\xaf"', 1),
        (b'"\xed\xa0\x80"', 1),
        (b'"\xf4\x90\x80\x80"', 1),
        (b'"\xe2\x82', 1),
    ],
)
def test_bytes_that_are_no_utf8_name_their_place(text: bytes, offset: int) -> None:
    with pytest.raises(JsonFault) as caught:
        parse(text)
    assert (caught.value.kind, caught.value.offset) == ("invalid_utf8", offset)
    assert f"0x{text[offset]:02x}" in caught.value.detail


@pytest.mark.parametrize("text", [b"", b" ", b"nul", b"{'a':1}", b"[1,]", b'{"a":1,}', b"//", b"[1", b"01", b"1 2"])
def test_syntax(text: bytes) -> None:
    assert verdict(text) == "syntax"


@pytest.mark.parametrize(
    "text, column", [(b"{}{}", 3), (b"{} x", 4), (b"[1]]", 4), (b'"a":1', 4), ('{"é":1}\t{}'.encode(), 9)]
)
def test_what_stands_behind_the_value(text: bytes, column: int) -> None:
    """Columns count characters from 1, offsets bytes from 0."""
    with pytest.raises(JsonFault, match=f"at column {column}$") as caught:
        parse(text)
    assert caught.value.kind == "trailing_data"
    assert caught.value.offset == len(text.decode()[: column - 1].encode())


@pytest.mark.parametrize(
    "text, found",
    [
        (b'{"a":1,}', "at column [78], found '[,}]'$"),
        (b'{"a"', "at column 5, found the end of the text$"),
        (b"?", "'[?]'"),
    ],
)
def test_syntax_faults_say_what_was_found(text: bytes, found: str) -> None:
    with pytest.raises(JsonFault, match=found):
        parse(text)


@pytest.mark.parametrize("space", ["\ufeff", "\xa0", "\x0b", "\x0c", "\u2028", "\x85", "\x00"])
def test_only_four_characters_are_white_space(space: str) -> None:
    assert parse(b" \t\r\n{} \t\r\n") == {}
    assert verdict(space.encode() + b"{}") == "syntax"
    assert verdict(b"{}" + space.encode()) == "trailing_data"


def test_syntax_faults_name_the_byte() -> None:
    with pytest.raises(JsonFault) as caught:
        parse('{"é": ?}'.encode())
    assert caught.value.offset == len('{"é": '.encode())


def test_a_long_string_beside_many_brackets_costs_no_memory() -> None:
    """The scan for depth looks at every string; it must not keep ways back through one of megabytes."""
    import subprocess

    code = (
        "import re\nfrom kiln_cli import strict_json\n"
        "text = b'[\"' + b'a' * (8 << 20) + b'\"' + b',[]' * 200 + b']'\n"
        "strict_json.parse(text)\n"
        # Not getrusage: that peak is inherited from the process that started this one.
        "print(int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200


def test_parse_object_names_the_type() -> None:
    assert strict_json.parse_object(b'{"a":1}') == {"a": 1}
    for text, name in ((b"[]", "an array"), (b"null", "null"), (b"true", "a boolean"), (b"1", "a number")):
        with pytest.raises(JsonFault, match=f"expected an object, found {name}"):
            strict_json.parse_object(text)


def test_numbers_of_parse_object_are_plain_at_any_depth() -> None:
    found = strict_json.parse_object(b'{"a":[1e16,{"b":-1e300}],"c":1e30}')
    assert found == {"a": [1e16, {"b": -1e300}], "c": 1e30}
    assert msgspec.to_builtins(found) == found


# --- duplicate keys


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":1,"a":2}',
        b'{"a":1,"b":2,"a":1}',
        b'{"a":1,"\\u0061":2}',
        b'{"\\u003a":1,":":2}',
        b'{"\\u003A":1,":":2}',
        b'{"a":"\\u003a","a":":"}',
        b'{"a":":","a":"\\u003a:"}',
        b'{"":1,"":2}',
        b'[{"x":{"a":[],"a":[]}}]',
        b'{"a\\/b":1,"a/b":2}',
        b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2}',
        b'{"a":{"b":1},"a":{"b":1}}',
    ],
)
def test_duplicate_keys_are_refused(text: bytes) -> None:
    assert verdict(text) == "duplicate_key"


@pytest.mark.parametrize(
    "text, value",
    [
        (b'{"a":{"a":{"a":1}}}', {"a": {"a": {"a": 1}}}),
        (b'[{"a":1},{"a":1}]', [{"a": 1}, {"a": 1}]),
        (b'{"a":"\\u003a"}', {"a": ":"}),
        (b'{"a:b":":::","c":"\\u003a\\u003A"}', {"a:b": ":::", "c": "::"}),
        (b'{"a":1,"A":2," a":3}', {"a": 1, "A": 2, " a": 3}),
        ('{"\u00e9":1,"e\u0301":2}'.encode(), {"\u00e9": 1, "e\u0301": 2}),
    ],
)
def test_what_only_looks_like_a_duplicate_passes(text: bytes, value: Any) -> None:
    assert parse(text) == value


# --- properties over made-up texts

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from([":", "a", "a:", '"', "\\", "{"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


class Pairs(list):  # type: ignore[type-arg]
    """An object as a list of pairs, so that a key can stand twice."""


TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4).map(lambda value: Pairs(value.items()))
    ),
    max_leaves=12,
)


def spell(draw: st.DrawFn, text: str) -> str:
    """A JSON string in one of its many spellings."""
    out = []
    for char in text:
        style = draw(st.integers(0, 3))
        if char in '"\\' or ord(char) < 0x20:
            out.append(json.dumps(char)[1:-1])
        elif style == 0 and ord(char) < 0x10000:
            out.append(f"\\u{ord(char):04x}" if draw(st.booleans()) else f"\\u{ord(char):04X}")
        else:
            out.append(char)
    return '"' + "".join(out) + '"'


def write(draw: st.DrawFn, value: Any) -> str:
    """JSON text of a tree, with white space and escapes at random."""
    gap = draw(st.sampled_from(["", "", " ", "\n", "\t\r"]))
    if isinstance(value, Pairs):
        return "{" + gap + ",".join(f"{spell(draw, k)}{gap}:{write(draw, v)}{gap}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + gap + ",".join(write(draw, item) + gap for item in value) + "]"
    return spell(draw, value) if isinstance(value, str) else json.dumps(value)


def plain(value: Any) -> Any:
    if isinstance(value, Pairs):
        return {key: plain(item) for key, item in value}
    return [plain(item) for item in value] if isinstance(value, list) else value


def objects(value: Any) -> list[Pairs]:
    found = [value] if isinstance(value, Pairs) else []
    items = [item for _, item in value] if isinstance(value, Pairs) else value if isinstance(value, list) else []
    return found + [inner for item in items for inner in objects(item)]


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_round_trip_against_the_standard_library(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert repr(parse(text.encode())) == repr(value)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_spelling_gives_the_value(data: st.DataObject) -> None:
    tree = data.draw(TREES)
    assert repr(parse(write(data.draw, tree).encode())) == repr(plain(tree))


@pytest.mark.parametrize(
    "text, pointer, depth",
    [
        ('{"messages":[],"messages":[1]}', "/messages", 1),
        ('{"messages":[{"role":"user"},{"content":"a","content":"b"}]}', "/messages/1/content", 3),
        ('{"a~/b":{"k":1,"x":{"y":1,"y":1},"k":2}}', "/a~0~1b/k", 2),  # the outermost comes first
        ('{"a":NaN,"b":{"c":18446744073709551616,"c":1}}', "", 0),  # another fault is met first
    ],
)
def test_a_key_written_twice_has_a_place(text: str, pointer: str, depth: int) -> None:
    with pytest.raises(JsonFault) as caught:
        parse(text.encode())
    assert caught.value.pointer == pointer
    if depth:
        key = pointer.rpartition("/")[2]
        assert caught.value.detail.startswith(f"key {key!r} stands twice in the ")
        assert caught.value.detail.endswith(f"(depth {depth})")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_key_written_twice_anywhere_is_refused(data: st.DataObject) -> None:
    tree = [data.draw(TREES), Pairs([(data.draw(TEXT), data.draw(SCALARS))])]
    target = data.draw(st.sampled_from([found for found in objects(tree) if found]))
    key = data.draw(st.sampled_from([key for key, _ in target]))
    target.insert(data.draw(st.integers(0, len(target))), (key, data.draw(TREES)))
    assert verdict(write(data.draw, tree).encode()) == "duplicate_key"


def outcome(parser: Any, text: bytes) -> str:
    try:
        return repr(parser(text))
    except JsonFault as fault:
        return fault.kind


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_fast_path_agrees_with_the_slow_one(data: st.DataObject) -> None:
    """Valid texts, texts with duplicates, and texts with a byte changed, dropped or put in."""
    tree = data.draw(TREES)
    for found in objects(tree):
        if found and data.draw(st.integers(0, 3)) == 0:
            found.append(data.draw(st.sampled_from(list(found))))
    text = bytearray(write(data.draw, tree).encode())
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.integers(0, len(text) - 1)) if text else 0
        text[place : place + data.draw(st.integers(0, 1))] = data.draw(
            st.sampled_from(
                [b"", b"0", b"-", b"e9", b'"', b":", b",", b"{", b"]", b"\\", b"\\u003a", b"\x00", b"NaN", b" "]
            )
        )
    try:
        bytes(text).decode()
    except UnicodeDecodeError:
        assert verdict(bytes(text)) == "invalid_utf8"
        return
    assert outcome(parse, bytes(text)) == outcome(lambda found: strict_json._parse_exactly(found, True), bytes(text))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_random_bytes_raise_nothing_else(text: bytes) -> None:
    verdict(text)
