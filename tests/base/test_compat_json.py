"""Rows read as the public Kiln server reads them: vectors, corner cases, decimals against exact arithmetic."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests_support import shared_path

from kiln_cli import strict_json
from kiln_cli.chat import MISFITS, ChatRow, normalise, raw_row_sha256, require_structure
from kiln_cli.compat_json import compat_row
from kiln_cli.errors import RowFault
from kiln_cli.identity import canonical_json, canonical_parsed, corpus_sha256
from kiln_cli.lines import TRIMMED, LineReader

V1_TEXT = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
V1 = "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"
EMPTY = "sha256:0edcdd22ce7caad9a25dec7f8df859a6f23b1507472900f3c2d49c71a68abaa8"


def row(text: str | bytes) -> ChatRow:
    return compat_row(text.encode() if isinstance(text, str) else text)


def fault(text: str | bytes) -> RowFault:
    with pytest.raises(RowFault) as caught:
        require_structure(row(text))
    if caught.value.reason == "invalid_json":
        assert caught.value.detail.split(":")[0] in (*strict_json.JsonFault.KINDS, *MISFITS)
    return caught.value


# --- the vectors of the contract

VECTORS = {
    "V1": (V1_TEXT, V1),
    "V2": (
        '{"messages": [ {"content":"a","role":"user","weight":0}, '
        '{"content":["b"],"role":"assistant","name":null} ], "id":7}',
        V1,
    ),
    "V3": ('{"messages":[]}', EMPTY),
    "V3 of no field": ("{}", EMPTY),
    "V4": (
        '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":'
        '[{"type":"function","id":"1","function":{"name":"calc","arguments":"{\\"x\\":1}"}}]}]}',
        "sha256:4ff148af7e2928000bd026ba7ccd86ab9a0dc663a58f43e193aeac8b03dfb479",
    ),
    "V5": (
        '{"messages":[{"role":"developer","content":"x"}]}',
        "sha256:ae5246df524bc691bbfb83da53832464adf17fd915790f019057d633e3fdd9c5",
    ),
    "V6": (
        '{"messages":[{"role":"user","content":"caf\\u00e9 \\u2603 \\ud83d\\ude00 / tab\\t"},'
        '{"role":"assistant","content":[{"type":"text","text":"o"},{"type":"image_url","image_url":{"url":"x"}},'
        '{"type":"output_text","text":"k"}]}]}',
        "sha256:11eb756e611bec8880ac7e5bd16f2644f7732550e8f47fbe016d5347cbe32703",
    ),
    "V7": (
        '{"messages":[{"role":"assistant","content":"","tool_calls":'
        '[{"n":1.0,"m":-3,"z":true,"y":null,"arguments":{"b":2,"a":1}}]}]}',
        "sha256:3c6a3adb5898cdfa8c1a9ca2fe6e28dd657db8f5c270a45c36dbf3b34ba6fcd1",
    ),
    "V8": (
        '{"messages":[{"role":"user","content":"a","tool_calls":[]}]}',
        "sha256:6bdd0a543ecb0c2ac3f7abaf9c67b3b55e6a3df86e0f0e32b55e5e2e7306ccd4",
    ),
    "V9": (
        '{"messages":[{"role":"user"}]}',
        "sha256:cf1d42b896d54054b8f1acc57e36eb5752bc73cde58596d50c2cd8a1015d8418",
    ),
    "V10": (
        '{"messages":[{"role":"assistant","tool_calls":[{"n":[1e16,1.5e20,1e15,1e-5,1e-6,-0,18446744073709551615]}]}]}',
        "sha256:05d48e781b4b59be934ef2dfcfd15e8c0656145fa2bee40e0eebf0dafb68c4f8",
    ),
    # Upstream has no extended rows: what would make one is dropped.
    "X1 without its tools": (
        '{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"}],"tools":[{"function":'
        '{"description":"","name":"f","parameters":{"properties":{},"type":"object"}},"type":"function"}]}',
        V1,
    ),
    "X3 without its reasoning": (
        '{"messages":[{"content":"a","role":"user"},{"content":"b","reasoning_content":"r","role":"assistant"}]}',
        V1,
    ),
    "X4 without its tools": ('{"tools":[{"name":"f"}]}', EMPTY),
    "N1": (
        '{"messages":[{"role":"user","content":"a","weight":0},'
        '{"role":"assistant","content":"b","weight":1,"reasoning_content":""}],"tools":[]}',
        V1,
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vector(name: str) -> None:
    text, digest = VECTORS[name]
    assert row(text).sha256() == digest
    assert not row(text).extended


def test_canonical_forms_of_the_vectors() -> None:
    assert row(VECTORS["V2"][0]).canonical() == (
        b'{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"}]}'
    )
    numbers = b"[1e+16,1.5e+20,1000000000000000.0,0.00001,1e-6,-0.0,18446744073709551615]"
    assert numbers in row(VECTORS["V10"][0]).canonical()


def test_structural_reasons_of_the_vectors() -> None:
    assert fault(VECTORS["V3"][0]).reason == "empty_messages"
    assert fault(VECTORS["V5"][0]).reason == "invalid_role"


@pytest.mark.parametrize(
    "raw", [b"not-json", b"  not-json \t\r\n", b'{"messages":null}', b'{"messages":[{"content":"x"}]}']
)
def test_r1_to_r3_are_no_rows(raw: bytes) -> None:
    """Their hashes are those of the bytes, which test_chat holds; here they must not parse."""
    assert fault(raw.strip(TRIMMED)).reason == "invalid_json"
    assert raw_row_sha256(b"not-json") == "sha256:550db40f8208f3ee0e238a811627c3e4f4817581038b2868a4f6ac860d61d113"


def test_file_l1() -> None:
    data = (
        b'\n \t\r\n{}\r\n\x0c{"messages":[]}\x0c\n\x0b\n\xc2\xa0{}\n'
        b'\xef\xbb\xbf{}\n{"a":"\xe2\x80\xa8"}\n{}\r{}\n\xff\n' + V1_TEXT.encode()
    )
    assert hashlib.sha256(data).hexdigest() == "ab3de120558da45ba924a55fd13a0e0b845103a8bb388b23676387f49092223a"
    outcomes, kept = [], []
    for line in LineReader(io.BytesIO(data)):
        if line.text:
            try:
                parsed = compat_row(line.text)
                require_structure(parsed)
            except RowFault as found:
                outcomes.append((line.number, found.reason))
            else:
                outcomes.append((line.number, "kept"))
                kept.append(parsed.sha256())
    assert outcomes == [
        (3, "empty_messages"),
        (4, "empty_messages"),
        (5, "invalid_json"),
        (6, "invalid_json"),
        (7, "invalid_json"),
        (8, "empty_messages"),
        (9, "invalid_json"),
        (10, "invalid_json"),
        (11, "kept"),
    ]
    assert kept == [V1]
    assert corpus_sha256(kept) == "sha256:2b80f65f459b911c245099e6aa4f83390ac3eaa73e376f08fe6544ae271a6d40"


# --- keys


@pytest.mark.parametrize(
    "text",
    [
        '{"messages":[],"messages":[]}',
        '{"messages":[],"m\\u0065ssages":[]}',
        '{"messages":[{"role":"user","role":"user"}]}',
        '{"messages":[{"role":"user","content":"a","content":null}]}',
        '{"messages":[{"role":"user","tool_calls":null,"tool_calls":null}]}',
        '{"messages":[{"role":"user","name":"a","name":"b"}]}',
        '{"messages":[{"role":"user","tool_call_id":"a","tool_call_id":"b"}]}',
    ],
)
def test_a_known_key_stands_once(text: str) -> None:
    found = fault(text)
    assert (found.reason, found.detail.split(":")[0]) == ("invalid_json", "duplicate_key")


@pytest.mark.parametrize(
    "text",
    [
        '{"id":1,"id":2,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}',
        '{"messages":[{"role":"user","content":"a","x":1,"x":2},{"role":"assistant","content":"b"}]}',
        '{"messages":[{"role":"user","content":[{"type":"x","type":"text","text":"z","text":"a"}]},'
        '{"role":"assistant","content":"b"}]}',
    ],
)
def test_other_keys_may_stand_twice(text: str) -> None:
    assert row(text).sha256() == V1


def test_of_a_key_twice_in_a_call_the_last_counts() -> None:
    text = '{"messages":[{"role":"assistant","tool_calls":[{"a":1,"b":{"c":1,"c":2},"a":3}]}]}'
    assert row(text).messages[0]["tool_calls"] == [{"a": 3, "b": {"c": 2}}]


def test_dropped_fields_are_named() -> None:
    text = (
        '{"messages":[{"role":"assistant","content":["a",{"type":"image_url"}],"reasoning_content":"r","weight":0}],'
        '"tools":[{"name":"f"}],"id":1}'
    )
    assert row(text).ignored == (
        "id",
        "messages[].content[]",
        "messages[].reasoning_content",
        "messages[].weight",
        "tools",
    )


# --- structs as arrays


@pytest.mark.parametrize(
    "text, same",
    [
        ("[]", "{}"),
        ("[[]]", '{"messages":[]}'),
        ('[[["user","a"],["assistant","b"]]]', V1_TEXT),
        ('{"messages":[["user","a"],{"role":"assistant","content":"b"}]}', V1_TEXT),
        ('{"messages":[["user"]]}', '{"messages":[{"role":"user"}]}'),
        (
            '{"messages":[["tool",null,[{"a":1}],"n","i"]]}',
            '{"messages":[{"role":"tool","tool_calls":[{"a":1}],"name":"n","tool_call_id":"i"}]}',
        ),
        ('{"messages":[["tool","x",null,null,null]]}', '{"messages":[{"role":"tool","content":"x"}]}'),
    ],
)
def test_positional_structs(text: str, same: str) -> None:
    assert row(text).sha256() == row(same).sha256() == normalise(strict_json.parse(same.encode())).sha256()


def test_an_empty_array_is_an_empty_row() -> None:
    assert fault("[]").reason == "empty_messages"
    assert row("[]").sha256() == EMPTY


@pytest.mark.parametrize(
    "text, pointer",
    [
        ("null", ""),
        ("5", ""),
        ('"x"', ""),
        ("true", ""),
        ("[null]", "/messages"),
        ("[[],1]", ""),
        ('{"messages":null}', "/messages"),
        ('{"messages":{}}', "/messages"),
        ('{"messages":"x"}', "/messages"),
        ('{"messages":[null]}', "/messages/0"),
        ('{"messages":["user"]}', "/messages/0"),
        ('{"messages":[[]]}', "/messages/0/role"),
        ('{"messages":[["user","hi",null,null,null,null]]}', "/messages/0"),
        ('{"messages":[{"content":"x"}]}', "/messages/0/role"),
        ('{"messages":[{"role":null}]}', "/messages/0/role"),
        ('{"messages":[{"role":1}]}', "/messages/0/role"),
        ('{"messages":[{"role":"user","content":5}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","content":true}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","content":{"type":"text","text":"x"}}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","name":7}]}', "/messages/0/name"),
        ('{"messages":[{"role":"tool","tool_call_id":[]}]}', "/messages/0/tool_call_id"),
        ('{"messages":[{"role":"assistant","tool_calls":{}}]}', "/messages/0/tool_calls"),
        ('{"messages":[{"role":"assistant","tool_calls":"x"}]}', "/messages/0/tool_calls"),
    ],
)
def test_values_that_do_not_fit(text: str, pointer: str) -> None:
    found = fault(text)
    assert (found.reason, found.pointer) == ("invalid_json", pointer)


@pytest.mark.parametrize(
    "part",
    [
        '{"type":"image_url","image_url":{}}',
        '{"type":"text"}',
        '{"type":"text","text":null}',
        '{"type":"Text","text":"x"}',
        '{"type":["text"],"text":"x"}',
        '{"text":"x"}',
        "{}",
        "5",
        "1e300",
        "null",
        "false",
        '["x"]',
    ],
)
def test_content_parts_other_than_text_are_dropped(part: str) -> None:
    found = row(f'{{"messages":[{{"role":"user","content":["a",{part},{{"type":"input_text","text":"b"}}]}}]}}')
    assert found.messages == [{"role": "user", "content": "ab"}]
    assert found.ignored == ("messages[].content[]",)


# --- syntax, and what is dropped unseen

KEPT = '{"messages":[{"role":"assistant","tool_calls":[%s]}]}'
DROPPED = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}],"x":%s}'


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "value",
    [
        nested(500),
        nested(200_000),
        '{"a":' * 300 + "1" + "}" * 300,
        "1e999",
        "-1e999",
        "1" * 400,
        '"\\ud800"',
        '{"\\udc00":1}',
        '{"a":1,"a":2}',
    ],
)
def test_dropped_values_need_syntax_alone(value: str) -> None:
    assert row(DROPPED % value).sha256() == V1


@pytest.mark.parametrize(
    "value",
    [
        "1e999",
        "-1e999",
        "1" * 400,
        '"\\ud800"',
        '"\\ud83d\\u0041"',
        '"\\ude00\\ud83d"',
        '{"\\udc00":1}',
        '{"a":"\\ud800","a":1}',
    ],
)
def test_kept_values_must_be_sound(value: str) -> None:
    assert fault(KEPT % value).reason == "invalid_json"


@pytest.mark.parametrize(
    "value",
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "0x1",
        "-",
        "--1",
        "1 2",
        "tru",
        "nul",
        "True",
        "'a'",
        '"\t"',
        '"\\x"',
        '"\\u12g4"',
        '"\\u 123"',
        '"a',
        "[1,]",
        "[,]",
        '{"a":1,}',
        '{"a"}',
        '{"a":}',
        "{1:2}",
        "{a:1}",
        "[1",
        "/**/1",
        "1]",
        "\x0c1",
        "\x0b1",
        "\xa01",
        "\ufeff1",
        "",
    ],
)
@pytest.mark.parametrize("frame", [KEPT, DROPPED], ids=["kept", "dropped"])
def test_broken_syntax_fails_anywhere(value: str, frame: str) -> None:
    if frame is KEPT and value == "":
        frame = '{"messages":[{"role":"assistant","tool_calls":%s}]}'
    assert fault(frame % value).reason == "invalid_json"


def test_depth_of_kept_values() -> None:
    """127 arrays and objects pass: the row, messages, a message and tool_calls are four of them."""
    assert len(canonical_json(row(KEPT % nested(123)).messages)) > 246
    found = fault(KEPT % nested(124))
    assert (found.reason, found.pointer) == ("invalid_json", "/messages/0/tool_calls")
    content = '{"messages":[{"role":"user","content":[%s]}]}'
    assert row(content % nested(123)).messages[0]["content"] == ""
    assert fault(content % nested(124)).reason == "invalid_json"


def test_a_key_of_a_struct_must_be_sound_though_unknown() -> None:
    assert fault('{"\\ud800":1}').reason == "invalid_json"
    assert fault('{"messages":[{"role":"user","\\ud800":1}]}').reason == "invalid_json"


@pytest.mark.parametrize(
    "text", [b'{"a":"\xff"}', b"\xff", b'{"messages":[{"role":"us\xc3er"}]}', b'{"a":"\xed\xa0\x80"}']
)
def test_invalid_utf8_fails(text: bytes) -> None:
    found = fault(text)
    assert found.detail.startswith("invalid_utf8")
    assert found.offset == next(index for index, byte in enumerate(text) if byte > 127)


@pytest.mark.parametrize(
    "text, offset",
    [
        ("{} x", 2),
        ("{}{}", 2),
        ("{},", 2),
        ('{"messages":[]} null', 15),
        ("[] ]", 2),
        ("{}\x0b", 2),
        ("{}\xa0", 2),
        ("[]\u2028", 2),
        ('{"é":1}x', 8),
    ],
)
def test_text_behind_the_row_fails(text: str, offset: int) -> None:
    found = fault(text)
    assert (found.reason, found.detail.split(":")[0], found.offset) == ("invalid_json", "trailing_data", offset)


def test_faults_tell_the_byte() -> None:
    assert fault('{"é": tru}').offset == len('{"é": '.encode()) - 1


REFUSED_KEPT = {
    "i_number_huge_exp.json",
    "i_number_neg_int_huge_exp.json",
    "i_number_pos_double_huge_exp.json",
    "i_number_real_neg_overflow.json",
    "i_number_real_pos_overflow.json",
    "i_object_key_lone_2nd_surrogate.json",
    "i_string_1st_surrogate_but_2nd_missing.json",
    "i_string_1st_valid_surrogate_2nd_invalid.json",
    "i_string_incomplete_surrogate_and_escape_valid.json",
    "i_string_incomplete_surrogate_pair.json",
    "i_string_incomplete_surrogates_escape_valid.json",
    "i_string_invalid_lonely_surrogate.json",
    "i_string_invalid_surrogate.json",
    "i_string_inverted_surrogates_U+1D11E.json",
    "i_string_lone_second_surrogate.json",
    "i_structure_500_nested_arrays.json",
}


def test_the_json_suite_kept_and_dropped() -> None:
    """y_ files pass, n_ files fail; of the i_ files the dropped ones fail for their encoding alone."""
    outcomes: dict[str, tuple[bool, bool]] = {}
    for path in sorted(shared_path("data/conformance/JSONTestSuite/test_parsing").iterdir()):
        frames = (b'{"messages":[{"role":"user","tool_calls":[0,%b]}]}', b'{"x":%b}')
        found = []
        for frame in frames:
            try:
                compat_row(frame % path.read_bytes())
                found.append(True)
            except RowFault as caught:
                assert caught.reason == "invalid_json"
                found.append(False)
        outcomes[path.name] = (found[0], found[1])
    assert len(outcomes) == 95 + 187 + 35
    assert all(both == (True, True) for name, both in outcomes.items() if name.startswith("y_"))
    assert all(both == (False, False) for name, both in outcomes.items() if name.startswith("n_"))
    either = {name: both for name, both in outcomes.items() if name.startswith("i_")}
    assert {name for name, both in either.items() if both == (False, True)} == REFUSED_KEPT
    assert {name for name, both in either.items() if both == (True, True)} == {
        "i_number_double_huge_neg_exp.json",
        "i_number_real_underflow.json",
        "i_number_too_big_neg_int.json",
        "i_number_too_big_pos_int.json",
        "i_number_very_big_negative_int.json",
    }


# --- numbers


def number(text: str) -> Any:
    """The one number of a row, as kept."""
    return row(KEPT % text).messages[0]["tool_calls"][0]


@pytest.mark.parametrize(
    "text, value",
    [
        ("0", 0),
        ("-1", -1),
        ("9223372036854775808", 2**63),
        ("-9223372036854775808", -(2**63)),
        ("18446744073709551615", 2**64 - 1),
    ],
)
def test_integers_of_64_bits_stay_integers(text: str, value: int) -> None:
    found = number(text)
    assert (type(found), found) == (int, value)


@pytest.mark.parametrize(
    "text, printed",
    [
        ("-0", "-0.0"),
        ("-9223372036854775809", "-9.223372036854776e+18"),
        ("-18446744073709551615", "-1.8446744073709552e+19"),
        ("18446744073709551616", "1.8446744073709552e+19"),
        ("100000000000000000000", "1e+20"),
        ("-100000000000000000000", "-1e+20"),
        ("0e99999999999999999999", "0.0"),
        ("-0e99999999999999999999", "-0.0"),
        ("0.0e+400", "0.0"),
        ("1e-99999999999999999999", "0.0"),
        ("-1e-99999999999999999999", "-0.0"),
        ("1e-400", "0.0"),
        ("5e-324", "5e-324"),
        ("1e308", "1e+308"),
        ("1e0000000000000000000001", "10.0"),
    ],
)
def test_other_numbers_become_doubles(text: str, printed: str) -> None:
    found = number(text)
    assert isinstance(found, float)
    assert canonical_json(found).decode() == canonical_parsed(found).decode() == printed


def test_decimals_are_not_rounded_correctly() -> None:
    """One float operation on the digits may be off by a unit in the last place, and stays so."""
    for text, printed in (
        ("122.416294033786585", "122.4162940337866"),
        ("31.245270191439438", "31.24527019143944"),
        ("1234567890123456789e-30", "1.2345678901234567e-12"),
    ):
        assert canonical_json(number(text)).decode() == printed
        assert number(text) != float(text)


def test_digits_are_taken_up_again_behind_the_point() -> None:
    """The published reader drops the digits of an integer that a u64 cannot hold, and goes on behind the point with any
    that fit: 24 nines are dropped, and the 3 is taken."""
    text = "1844674407370955161" + "9" * 24 + ".3"
    resumed = nearest(Fraction(nearest(Fraction(18446744073709551613))) * Fraction(1e23))
    dropped = nearest(Fraction(nearest(Fraction(1844674407370955161))) * Fraction(1e24))
    assert number(text) == resumed != dropped


def nearest(value: Fraction) -> float:
    """The double nearest to a rational, ties to even: dividing two integers rounds correctly in Python."""
    return value.numerator / value.denominator


def served(text: str) -> float:
    """The rule in exact arithmetic: the digits as a u64, then one rounding of a product or quotient with the double
    nearest to 10^n, 308 powers at a time. OverflowError for an infinite result."""
    found = re.fullmatch(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", text)
    assert found is not None
    sign, whole, fraction, exponent = found[1], found[2], found[3] or "", int(found[4] or 0)
    digits = whole + fraction
    held = next(n for n in range(len(digits), 0, -1) if int(digits[:n]) <= 2**64 - 1)
    exponent += len(whole) - held
    value = Fraction(nearest(Fraction(int(digits[:held]))))
    while exponent < -308:
        value = Fraction(nearest(value / Fraction(1e308)))
        exponent += 308
    power = Fraction(nearest(Fraction(10) ** abs(exponent))) if abs(exponent) <= 308 else None
    if power is None:
        if value:
            raise OverflowError
        return -0.0 if sign else 0.0
    size = nearest(value * power if exponent >= 0 else value / power)
    return -size if sign else size


HARD = """
    0.1 0.2 0.3 1.1 2.675 9007199254740993.0 9007199254740992.5 123456789012345678.9 1234567890123456789.01234
    0.1234567890123456789012345 9.999999999999999999999999 99999999999999999999.9999 1.7976931348623157e308
    17976931348623157e292 0.17976931348623157e309 2.2250738585072014e-308 2.2250738585072011e-308
    4.9406564584124654e-324 2.4703282292062327e-324 2.4703282292062328e-324 1e-307 1e-308 1e-309
    1234567890123456789e-320 1.234567890123456789e-310 12345678901234567890123e-340 1e22 1e23 8.5e23 6.02214076e23
    1.6e-19 6.62607015e-34 0.00001 0.000001 1e15 1e16 1.5e20 3.141592653589793238462643 2.718281828459045235360287
    18446744073709551615.0 18446744073709551616.0 184467440737095516150.0 1844674407370955161.6
    1844674407370955161.5 0.18446744073709551616 100000000000000000000000.0 0.0000000000000000000000001 5e-324
    3e-324 2e-324 7.2057594037927933e16 4503599627370496.5 122.416294033786585
""".split()  # noqa: SIM905


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("sign", ["", "-"])
def test_decimals_by_the_rule(text: str, sign: str) -> None:
    found = number(sign + text)
    assert isinstance(found, float)
    assert found == served(sign + text)
    assert math.copysign(1.0, found) == (-1.0 if sign else 1.0)


@pytest.mark.parametrize(
    "text",
    ["1e309", "1.7976931348623158e308", "1.8e308", "0.2e309", "1" * 310, "18446744073709551615e290", "1e2147483648"],
)
def test_overflow_is_a_fault(text: str) -> None:
    found = fault(KEPT % text)
    assert found.reason == "invalid_json"
    assert "infinity" in found.detail


DECIMALS = st.builds(
    lambda digits, point, exponent: (
        (digits[:point].lstrip("0") or "0")
        + (f".{digits[point:]}" if digits[point:] else "")
        + (f"e{exponent}" if exponent is not None or not digits[point:] else "")
    ).replace("eNone", "e0"),
    st.text("0123456789", min_size=1, max_size=25),
    st.integers(0, 19),
    st.none() | st.integers(-345, 330),
)


@settings(max_examples=400, deadline=None)
@given(DECIMALS)
@example("1.0")
def test_any_decimal_follows_the_rule(text: str) -> None:
    try:
        expected = served(text)
    except OverflowError:
        assert "infinity" in fault(KEPT % text).detail
    else:
        assert number(text) == expected


# --- the same as the strict reading, where that reads the row and keeps no more

PLAIN = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
# The two rules for decimals agree up to 15 digits and powers of ten up to 22.
SHORT_DECIMALS = st.builds(lambda m, e: float(f"{m}e{e}"), st.integers(-(10**15) + 1, 10**15 - 1), st.integers(-22, 0))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | SHORT_DECIMALS | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=8,
)
PARTS = PLAIN | st.builds(
    lambda kind, text: {"type": kind, "text": text}, st.sampled_from(["text", "output_text"]), PLAIN
)
FIVE_FIELDS = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "x"])},
    optional={
        "content": st.none() | PLAIN | st.lists(PARTS, max_size=3),
        "name": st.none() | PLAIN,
        "tool_call_id": st.none() | PLAIN,
        "tool_calls": st.none() | st.lists(JSON, max_size=2),
        "unknown": JSON,
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(FIVE_FIELDS, max_size=3), st.booleans(), st.booleans())
def test_rows_of_the_five_fields_read_alike(messages: list[dict[str, Any]], escaped: bool, spaced: bool) -> None:
    text = json.dumps({"messages": messages}, ensure_ascii=escaped, indent=1 if spaced else None).encode()
    strict = normalise(strict_json.parse(text))
    compat = compat_row(text)
    assert compat.canonical() == strict.canonical()
    assert compat.sha256() == strict.sha256()
    assert compat.ignored == strict.ignored


@pytest.mark.parametrize("name", ["gsm8k_messages.jsonl", "openai_toy_chat.jsonl", "openai_drone_tools.jsonl"])
def test_real_rows_read_alike_but_for_what_is_dropped(name: str) -> None:
    """Rows of the five fields have one hash; a row with tools has the hash of the same row without them."""
    lines = shared_path(f"data/chat/{name}").read_bytes().split(b"\n")
    rows = [line for line in lines if line.strip()]
    assert rows
    for line in rows:
        strict, compat = normalise(strict_json.parse(line)), compat_row(line)
        assert not compat.extended
        assert compat.sha256() == ChatRow(strict.messages).sha256()
        assert ("tools" in compat.ignored) == bool(strict.tools)
        assert (compat.sha256() == strict.sha256()) == (not strict.extended)
