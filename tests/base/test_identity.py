"""Canonical JSON, domain separation and the ordered corpus digest."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests_support import shared_path

from kiln_cli import identity, strict_json
from kiln_cli.identity import Domain, canonical_json, corpus_sha256, domain_sha256

V1 = "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"
V4 = "sha256:4ff148af7e2928000bd026ba7ccd86ab9a0dc663a58f43e193aeac8b03dfb479"

DOUBLES = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | DOUBLES | TEXT | st.sampled_from(["null", "1e5"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def contract_number(value: float) -> str:
    """The number rule of the contract, written from its words: shortest digits as 0.d1d2... x 10^k."""
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    if value == 0:
        return sign + "0.0"
    _, digit_tuple, exponent = Decimal(repr(abs(value))).as_tuple()
    digits = "".join(map(str, digit_tuple)).lstrip("0")
    assert isinstance(exponent, int)
    k = len(digits) + exponent
    digits = digits.rstrip("0")
    if -4 <= k <= 16:
        if k <= 0:
            return f"{sign}0.{'0' * -k}{digits}"
        whole, part = digits[:k].ljust(k, "0"), digits[k:]
        return f"{sign}{whole}.{part or '0'}"
    mantissa = digits[0] + ("." + digits[1:] if len(digits) > 1 else "")
    return f"{sign}{mantissa}e{k - 1:+d}"


# --- numbers


def test_numbers_of_vector_v10() -> None:
    numbers = [1e16, 1.5e20, 1e15, 1e-5, 1e-6, -0.0, 18446744073709551615]
    assert canonical_json(numbers) == b"[1e+16,1.5e+20,1000000000000000.0,0.00001,1e-6,-0.0,18446744073709551615]"


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, b"0.0"),
        (-0.0, b"-0.0"),
        (1.0, b"1.0"),
        (0.1, b"0.1"),
        (100.0, b"100.0"),
        (1e-5, b"0.00001"),
        (9.999e-6, b"9.999e-6"),
        (1e-6, b"1e-6"),
        (9999999999999998.0, b"9999999999999998.0"),
        (1e16, b"1e+16"),
        (-1.5e20, b"-1.5e+20"),
        (5e-324, b"5e-324"),
        (1.7976931348623157e308, b"1.7976931348623157e+308"),
        (2**53 + 1, b"9007199254740993"),
        (-(2**63), b"-9223372036854775808"),
        (2**64 - 1, b"18446744073709551615"),
        (True, b"true"),
    ],
)
def test_number(value: object, text: bytes) -> None:
    assert canonical_json(value) == text


@settings(max_examples=400, deadline=None)
@given(DOUBLES | st.builds(lambda m, e: m * 10.0**e, st.integers(-999, 999), st.integers(-12, 25)))
@example(1e16)
@example(9999999999999999.0)
@example(1e-5)
@example(9.9999e-6)
def test_doubles_follow_the_rule(value: float) -> None:
    assert canonical_json(value).decode() == contract_number(value)
    assert canonical_json({"a": [value]}).decode() == f'{{"a":[{contract_number(value)}]}}'


def test_the_doubles_of_rfc_8785_keep_their_bits() -> None:
    """Our text differs from the RFC's (1.0, not 1), but every double of its table comes back bit for bit."""
    table = shared_path("data/conformance/jcs/numbers.tsv").read_text().splitlines()[1:]
    assert len(table) == 27
    for line in table:
        bits, expected = line.split("\t")
        (value,) = struct.unpack(">d", bytes.fromhex(bits))
        if expected == "ERROR":
            with pytest.raises(ValueError):
                canonical_json(value)
            continue
        text = canonical_json(value)
        assert text.decode() == contract_number(value)
        assert struct.pack(">d", strict_json.parse(text)).hex() == bits


@pytest.mark.parametrize(
    "value",
    [
        {":1e5": 1e16, "a": [":1e5,", 1e16, "1e5"]},
        {'"1e5': 1e20, '\\"': 1e20, "\\": [1e20, '",1e5']},
        [1e16],
        [-1e16, 1.25e300, {"x": 5e-324}],
        "1e16",
        [",1e16", ":1.5e20,", '\\\\",2e30'],
    ],
)
def test_strings_that_look_like_numbers_stay(value: Any) -> None:
    """The plus of an exponent goes into numbers, never into strings or keys."""
    text = canonical_json(value)
    assert json.loads(text) == value
    assert text.count(b"e+") == sum(text.count(number) for number in (b"1e+16", b"1e+20", b"1.25e+300"))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_form(value: float) -> None:
    class Holder(msgspec.Struct):
        inner: Any

    for wrapped in (value, [value], {"a": {"b": [None, value]}}, Holder([{"x": value}]), (1, value)):
        with pytest.raises(ValueError, match="no JSON form"):
            canonical_json(wrapped)


# --- strings and keys


def test_string_escapes() -> None:
    controls = "".join(map(chr, range(0x20)))
    expected = json.dumps(controls, ensure_ascii=False)
    assert canonical_json(controls).decode() == expected
    assert "\\u001f" in expected
    assert canonical_json('"\\/\x7f\u2028é😀') == '"\\"\\\\/\x7f\u2028é😀"'.encode()


def test_keys_sort_by_code_point() -> None:
    """U+FB33 stands before U+1F602; by UTF-16 units, as RFC 8785 sorts, it would stand behind."""
    assert canonical_json({"\U0001f602": 1, "\ufb33": 2, "a": 3, "A": 4, "": 5}) == (
        '{"":5,"A":4,"a":3,"\ufb33":2,"\U0001f602":1}'.encode()
    )
    assert canonical_json([{"b": {"d": 1, "c": 2}, "a": 1e16}]) == b'[{"a":1e+16,"b":{"c":2,"d":1}}]'


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_without_doubles_the_form_is_that_of_the_standard_library(value: Any) -> None:
    def without_doubles(item: Any) -> Any:
        if isinstance(item, float):
            return str(item)
        if isinstance(item, list):
            return [without_doubles(inner) for inner in item]
        return {k: without_doubles(v) for k, v in item.items()} if isinstance(item, dict) else item

    value = without_doubles(value)
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical_json(value) == expected.encode()


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_canonical_form_is_a_fixed_point(value: Any) -> None:
    once = canonical_json(value)
    assert canonical_json(strict_json.parse(once)) == once


@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES)
def test_values_share_a_form_only_if_they_are_equal(one: Any, other: Any) -> None:
    def exact(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: exact(inner) for key, inner in item.items()}
        return [exact(inner) for inner in item] if isinstance(item, list) else (type(item), repr(item))

    assert (canonical_json(one) == canonical_json(other)) == (exact(one) == exact(other))


# --- the public files


@pytest.mark.parametrize("name", ["arrays", "french", "unicode", "values"])
def test_rfc_8785_files_where_the_forms_agree(name: str) -> None:
    source = shared_path(f"data/conformance/jcs/input/{name}.json").read_bytes()
    expected = shared_path(f"data/conformance/jcs/output/{name}.json").read_bytes().rstrip(b"\n")
    assert canonical_json(strict_json.parse(source)) == expected


def test_rfc_8785_file_that_differs_in_a_number() -> None:
    """``structures`` holds 56.0. The RFC writes 56; the contract keeps doubles apart from integers."""
    source = shared_path("data/conformance/jcs/input/structures.json").read_bytes()
    expected = shared_path("data/conformance/jcs/output/structures.json").read_bytes().rstrip(b"\n")
    ours = canonical_json(strict_json.parse(source))
    assert ours != expected
    assert ours == expected.replace(b'"\\n":56,', b'"\\n":56.0,')


def test_rfc_8785_file_that_differs_in_key_order() -> None:
    """``weird`` holds a key beyond U+FFFF. The RFC sorts by UTF-16 units, the contract by code points."""
    source = shared_path("data/conformance/jcs/input/weird.json").read_bytes()
    expected = shared_path("data/conformance/jcs/output/weird.json").read_bytes().rstrip(b"\n")
    ours = canonical_json(strict_json.parse(source))
    assert ours != expected
    assert strict_json.parse(ours) == strict_json.parse(expected)
    assert list(strict_json.parse(ours)) == sorted(strict_json.parse(expected))


def test_transform_files_that_parse_stay_apart() -> None:
    """Distinct in, distinct out: no two files that hold different values share canonical bytes."""
    forms: dict[bytes, list[str]] = {}
    for path in sorted(shared_path("data/conformance/JSONTestSuite/test_transform").glob("*.json")):
        try:
            value = strict_json.parse(path.read_bytes())
        except strict_json.JsonFault:
            continue
        forms.setdefault(canonical_json(value), []).append(path.name)
    shared = [names for names in forms.values() if len(names) > 1]
    assert shared == [
        ["number_1.0.json", "number_1.000000000000000005.json"],  # one double: the second rounds to 1.0
        ["object_key_nfc_nfd.json", "object_key_nfd_nfc.json"],  # one object: the same two keys in another order
    ]
    assert len(forms) == 10


# --- domains and aggregates


def test_no_two_domains_are_equal() -> None:
    values = [domain.value for domain in Domain.__members__.values()]
    assert len(values) == len(set(values)) == len(Domain)
    assert all(value.isascii() and "\x00" not in value and value for value in values)


def test_domains_keep_equal_bytes_apart() -> None:
    digests = {domain_sha256(domain, b"same") for domain in Domain}
    assert len(digests) == len(Domain)
    assert domain_sha256(Domain.SFT_PARSED_ROW, b"x") == (
        "sha256:" + hashlib.sha256(b"kiln.sft-parsed-row.v1\x00x").hexdigest()
    )


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=20), st.binary(max_size=20))
def test_no_two_kinds_share_a_preimage(one: bytes, other: bytes) -> None:
    """No prefix begins another (the NUL ends it), so no data of one kind can pass for data of another."""
    for first in Domain:
        for second in Domain:
            if first is not second:
                assert first.prefix() + one != second.prefix() + other


def test_aggregates_of_the_contract() -> None:
    assert corpus_sha256([]) == "sha256:54c87e9636e281a072c595f200b5eb87cf441b43f953d4244cac77c3d2920779"
    assert corpus_sha256([V1]) == "sha256:2b80f65f459b911c245099e6aa4f83390ac3eaa73e376f08fe6544ae271a6d40"
    assert corpus_sha256([V1, V4]) == "sha256:344a512020487ddaaf0255592e5b47f0381fd51b80208da128158692ac8537b0"
    assert corpus_sha256([V1, V1]) == "sha256:09df9bcf3a59da9e284afb00ee6b8817a39f6abdb17fec887192da1c55568629"
    assert corpus_sha256([V4, V1]) != corpus_sha256([V1, V4])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=4), st.lists(st.text("ab", max_size=3), max_size=4))
def test_lengths_frame_the_parts(one: list[str], other: list[str]) -> None:
    """Moving a border between two parts changes the digest."""
    assert (corpus_sha256(one) == corpus_sha256(other)) == (one == other)


def test_length_prefix_is_big_endian() -> None:
    assert identity.length_prefixed(b"abc") == b"\0\0\0\0\0\0\0\x03abc"


@pytest.mark.parametrize(
    "text, good",
    [
        (V1, True),
        (V1.upper(), False),
        (V1[:-1], False),
        (V1 + "0", False),
        (V1 + "\n", False),
        (V1[7:], False),
        (None, False),
        (b"sha256:" + b"0" * 64, False),
        ("sha256:" + "g" * 64, False),
    ],
)
def test_hash_syntax(text: object, good: bool) -> None:
    assert identity.is_hash(text) is good
