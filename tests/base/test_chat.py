"""Chat rows: the vectors of the contract, what does not fit the model, the fields of the extended domain."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln_cli import strict_json
from kiln_cli.chat import MISFITS, ChatRow, normalise, raw_row_sha256, require_structure
from kiln_cli.errors import RowFault
from kiln_cli.identity import corpus_sha256
from kiln_cli.lines import TRIMMED, LineReader

V1_TEXT = '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}'
V1 = "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"
EMPTY = "sha256:0edcdd22ce7caad9a25dec7f8df859a6f23b1507472900f3c2d49c71a68abaa8"
V6_TEXT = (
    '{"messages":[{"role":"user","content":"caf\\u00e9 \\u2603 \\ud83d\\ude00 / tab\\t"},'
    '{"role":"assistant","content":[{"type":"text","text":"o"},%s{"type":"output_text","text":"k"}]}]}'
)


def row(text: str | bytes) -> ChatRow:
    return normalise(strict_json.parse(text.encode() if isinstance(text, str) else text))


def fault(text: str | bytes) -> RowFault:
    with pytest.raises(RowFault) as caught:
        require_structure(row(text))
    return caught.value


def assistant(**fields: Any) -> str:
    return json.dumps({"messages": [{"role": "assistant", "content": "b", **fields}]})


# --- vectors


def test_v1() -> None:
    assert row(V1_TEXT).canonical() == (
        b'{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"}]}'
    )
    assert row(V1_TEXT).sha256() == V1
    require_structure(row(V1_TEXT))


def test_v2() -> None:
    line = (
        '  {"messages": [ {"content":"a","role":"user","weight":0}, '
        '{"content":["b"],"role":"assistant","name":null} ], "id":7}\r\n'
    )
    parsed = row(line.encode().strip(TRIMMED))
    assert parsed.sha256() == V1
    assert parsed.ignored == ("id", "messages[].weight")


@pytest.mark.parametrize("text", ['{"messages":[]}', "{}", '{"unknown":1,"other":[]}'])
def test_v3(text: str) -> None:
    assert row(text).sha256() == EMPTY
    assert fault(text).reason == "empty_messages"


def test_v4() -> None:
    text = (
        '{"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":'
        '[{"type":"function","id":"1","function":{"name":"calc","arguments":"{\\"x\\":1}"}}]}]}'
    )
    part = (
        rb'{"content":"","role":"assistant","tool_calls":[{"function":{"arguments":"{\"x\":1}","name":"calc"},'
        rb'"id":"1","type":"function"}]}'
    )
    assert part in row(text).canonical()
    assert row(text).sha256() == "sha256:4ff148af7e2928000bd026ba7ccd86ab9a0dc663a58f43e193aeac8b03dfb479"


def test_v5() -> None:
    text = '{"messages":[{"role":"developer","content":"x"}]}'
    assert row(text).sha256() == "sha256:ae5246df524bc691bbfb83da53832464adf17fd915790f019057d633e3fdd9c5"
    found = fault(text)
    assert (found.reason, found.pointer) == ("invalid_role", "/messages/0/role")
    assert "message 1" in found.detail
    assert "'developer'" in found.detail


def test_v6_without_the_image() -> None:
    assert row(V6_TEXT % "").sha256() == "sha256:11eb756e611bec8880ac7e5bd16f2644f7732550e8f47fbe016d5347cbe32703"


def test_v6_with_the_image_is_refused() -> None:
    """Upstream drops the image in silence; here the row is refused by name."""
    image = '{"type":"image_url","image_url":{"url":"x"}},'
    found = fault(V6_TEXT % image)
    assert found.reason == "invalid_json"
    assert found.detail.startswith("unsupported_content_part")
    assert found.pointer == "/messages/1/content/1"


def test_v7() -> None:
    text = (
        '{"messages":[{"role":"assistant","content":"","tool_calls":'
        '[{"n":1.0,"m":-3,"z":true,"y":null,"arguments":{"b":2,"a":1}}]}]}'
    )
    assert b'"n":1.0' in row(text).canonical()
    assert b'"y":null' in row(text).canonical()
    assert row(text).sha256() == "sha256:3c6a3adb5898cdfa8c1a9ca2fe6e28dd657db8f5c270a45c36dbf3b34ba6fcd1"


def test_v8() -> None:
    text = '{"messages":[{"role":"user","content":"a","tool_calls":[]}]}'
    assert row(text).sha256() == "sha256:6bdd0a543ecb0c2ac3f7abaf9c67b3b55e6a3df86e0f0e32b55e5e2e7306ccd4"


def test_v9() -> None:
    text = '{"messages":[{"role":"user"}]}'
    assert row(text).sha256() == "sha256:cf1d42b896d54054b8f1acc57e36eb5752bc73cde58596d50c2cd8a1015d8418"


def test_v10() -> None:
    text = (
        '{"messages":[{"role":"assistant","tool_calls":[{"n":[1e16,1.5e20,1e15,1e-5,1e-6,-0,18446744073709551615]}]}]}'
    )
    numbers = b"[1e+16,1.5e+20,1000000000000000.0,0.00001,1e-6,-0.0,18446744073709551615]"
    assert numbers in row(text).canonical()
    assert row(text).sha256() == "sha256:05d48e781b4b59be934ef2dfcfd15e8c0656145fa2bee40e0eebf0dafb68c4f8"


X_VECTORS = {
    "X1": (
        '{"messages":[{"content":"a","role":"user"},{"content":"b","role":"assistant"}],"tools":[{"function":'
        '{"description":"","name":"f","parameters":{"properties":{},"type":"object"}},"type":"function"}]}',
        197,
        "sha256:1cc4a34b7af110a596cc924de2381c8575e5906d2c067a40cb942baace1d14b5",
    ),
    "X2": (
        '{"messages":[{"content":"a","role":"user"},{"content":"x","role":"assistant","weight":0},'
        '{"content":"c","role":"user"},{"content":"b","role":"assistant"}]}',
        155,
        "sha256:afcdff64dcdc1fb08abf486bfc5dee6bf8395f91447035d57540d63562749165",
    ),
    "X3": (
        '{"messages":[{"content":"a","role":"user"},{"content":"b","reasoning_content":"r","role":"assistant"}]}',
        103,
        "sha256:e53d76a6ba8ede996f433908d60020c6829d52f6c842d74320d821952bc0456c",
    ),
    "X4": (
        '{"messages":[],"tools":[{"name":"f"}]}',
        38,
        "sha256:5008db03879b355cf5c2160c18597e1cea0068697ebb9348a514e834f9b35e28",
    ),
}


@pytest.mark.parametrize("name", X_VECTORS)
def test_x(name: str) -> None:
    text, size, digest = X_VECTORS[name]
    assert row(text).canonical() == text.encode()
    assert len(text.encode()) == size
    assert row(text).extended
    assert row(text).sha256() == digest
    assert digest == "sha256:" + hashlib.sha256(b"kiln-cli.sft-extended-row.v1\x00" + text.encode()).hexdigest()


def test_x2_from_its_input() -> None:
    text = (
        '{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"x","weight":0.0},'
        '{"role":"user","content":"c"},{"role":"assistant","content":"b","weight":1}]}'
    )
    assert row(text).sha256() == X_VECTORS["X2"][2]


def test_x4_from_its_input() -> None:
    text = '{"tools":[{"name":"f"}]}'
    assert row(text).sha256() == X_VECTORS["X4"][2]
    assert fault(text).reason == "empty_messages"


def test_n1() -> None:
    text = (
        '{"messages":[{"role":"user","content":"a","weight":0},'
        '{"role":"assistant","content":"b","weight":1,"reasoning_content":""}],"tools":[]}'
    )
    assert row(text).sha256() == V1
    assert not row(text).extended


@pytest.mark.parametrize(
    "raw, digest",
    [
        (b"not-json", "550db40f8208f3ee0e238a811627c3e4f4817581038b2868a4f6ac860d61d113"),
        (b"  not-json \t\r\n", "550db40f8208f3ee0e238a811627c3e4f4817581038b2868a4f6ac860d61d113"),
        (b'{"messages":null}', "8e453b82d749576159b1425b2978776e626b8d8f5db5035a9d1fceabc8363578"),
        (b'{"messages":[{"content":"x"}]}', "2297bf3ee3f8061ad107950b68cae6a7989faafc6da4fe7649870d634583a2e1"),
    ],
)
def test_r1_to_r3(raw: bytes, digest: str) -> None:
    text = raw.strip(TRIMMED)
    assert raw_row_sha256(text) == f"sha256:{digest}"
    with pytest.raises((RowFault, strict_json.JsonFault)):
        row(text)


def test_file_l1() -> None:
    data = (
        b'\n \t\r\n{}\r\n\x0c{"messages":[]}\x0c\n\x0b\n\xc2\xa0{}\n'
        b'\xef\xbb\xbf{}\n{"a":"\xe2\x80\xa8"}\n{}\r{}\n\xff\n' + V1_TEXT.encode()
    )
    assert len(data) == 139
    assert hashlib.sha256(data).hexdigest() == "ab3de120558da45ba924a55fd13a0e0b845103a8bb388b23676387f49092223a"
    outcomes, kept, index = [], [], 0
    reader = LineReader(io.BytesIO(data))
    for line in reader:
        if line.text == b"":
            continue
        index += 1
        assert line.text is not None
        try:
            parsed = normalise(strict_json.parse(line.text))
            require_structure(parsed)
        except strict_json.JsonFault:
            outcomes.append((index, line.number, "invalid_json"))
        except RowFault as found:
            outcomes.append((index, line.number, found.reason))
        else:
            outcomes.append((index, line.number, "kept"))
            kept.append(parsed.sha256())
    assert outcomes == [
        (1, 3, "empty_messages"),
        (2, 4, "empty_messages"),
        (3, 5, "invalid_json"),
        (4, 6, "invalid_json"),
        (5, 7, "invalid_json"),
        (6, 8, "empty_messages"),
        (7, 9, "invalid_json"),
        (8, 10, "invalid_json"),
        (9, 11, "kept"),
    ]
    assert reader.sha256 == hashlib.sha256(data).hexdigest()
    assert reader.blank == 2
    assert kept == [V1]
    assert corpus_sha256(kept) == "sha256:2b80f65f459b911c245099e6aa4f83390ac3eaa73e376f08fe6544ae271a6d40"


# --- what does not fit the model


@pytest.mark.parametrize(
    "text, pointer",
    [
        ("[]", ""),
        ("null", ""),
        ('"x"', ""),
        ("5", ""),
        ('{"messages":null}', "/messages"),
        ('{"messages":{}}', "/messages"),
        ('{"messages":"nothing"}', "/messages"),
        ('{"messages":[["user","hi"]]}', "/messages/0"),
        ('{"messages":["hi"]}', "/messages/0"),
        ('{"messages":[null]}', "/messages/0"),
        ('{"messages":[{"role":"user"},{"content":"x"}]}', "/messages/1/role"),
        ('{"messages":[{"role":null,"content":"x"}]}', "/messages/0/role"),
        ('{"messages":[{"role":7}]}', "/messages/0/role"),
        ('{"messages":[{"role":"user","content":5}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","content":true}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","content":{"type":"text","text":"x"}}]}', "/messages/0/content"),
        ('{"messages":[{"role":"user","name":7}]}', "/messages/0/name"),
        ('{"messages":[{"role":"tool","tool_call_id":[]}]}', "/messages/0/tool_call_id"),
        ('{"messages":[{"role":"assistant","tool_calls":{}}]}', "/messages/0/tool_calls"),
        ('{"messages":[{"role":"assistant","tool_calls":"nothing"}]}', "/messages/0/tool_calls"),
        ('{"messages":[],"tools":{}}', "/tools"),
        ('{"messages":[],"tools":"x"}', "/tools"),
        ('{"messages":[],"tools":false}', "/tools"),
    ],
)
def test_values_that_do_not_fit(text: str, pointer: str) -> None:
    found = fault(text)
    assert (found.reason, found.pointer) == ("invalid_json", pointer)
    assert found.detail.partition(": ")[0] in MISFITS


@pytest.mark.parametrize(
    "text, word",
    [
        ("[]", "row_not_object"),
        ('{"messages":{}}', "wrong_type"),
        ('{"messages":[{"content":"x"}]}', "missing_field"),
        ('{"messages":[{"role":"user","content":{"a":1}}]}', "content_not_string"),
        ('{"messages":[{"role":"user","content":[7]}]}', "unsupported_content_part"),
        ('{"messages":[{"role":"assistant","thinking":"a","reasoning":"b"}]}', "conflicting_fields"),
    ],
)
def test_the_detail_begins_with_a_finer_word(text: str, word: str) -> None:
    assert fault(text).detail.startswith(f"{word}: ")


def test_details_tell_a_string_from_nothing() -> None:
    assert "found a string" in fault('{"messages":"nothing"}').detail
    assert "found nothing" in fault('{"messages":[{"content":"x"}]}').detail
    assert "found null" in fault('{"messages":[{"role":null}]}').detail


@pytest.mark.parametrize(
    "part",
    [
        '{"type":"image_url","image_url":{}}',
        '{"type":"text"}',
        '{"type":"text","text":null}',
        '{"type":"text","text":["x"]}',
        '{"type":"Text","text":"x"}',
        '{"type":["text"],"text":"x"}',
        '{"text":"x"}',
        "{}",
        "5",
        "null",
        '["x"]',
    ],
)
def test_content_parts_other_than_text_are_refused(part: str) -> None:
    found = fault(f'{{"messages":[{{"role":"user","content":["a",{part}]}}]}}')
    assert found.reason == "invalid_json"
    assert found.detail.startswith("unsupported_content_part")
    assert found.pointer == "/messages/0/content/1"


def test_text_parts_join_without_a_separator() -> None:
    text = (
        '{"messages":[{"role":"user","content":["a",{"type":"text","text":"b"},{"type":"input_text","text":""},'
        '{"type":"output_text","text":"c","annotations":[]}]},{"role":"assistant","content":[]}]}'
    )
    assert [message["content"] for message in row(text).messages] == ["abc", ""]


@pytest.mark.parametrize("role", ["System", "developer", "function", "", " user", "user\n"])
def test_roles_are_taken_verbatim(role: str) -> None:
    text = json.dumps({"messages": [{"role": "user"}, {"role": role}]})
    assert (fault(text).reason, fault(text).pointer) == ("invalid_role", "/messages/1/role")


def test_the_first_bad_role_is_named() -> None:
    assert "message 2 has role 'x'" in fault('{"messages":[{"role":"tool"},{"role":"x"},{"role":"y"}]}').detail


@pytest.mark.parametrize("key", ["name", "tool_call_id"])
def test_empty_names_are_kept_and_null_ones_are_not(key: str) -> None:
    assert row(f'{{"messages":[{{"role":"user","{key}":""}}]}}').messages[0][key] == ""
    assert key not in row(f'{{"messages":[{{"role":"user","{key}":null}}]}}').messages[0]


# --- tool calls


def calling(arguments: str, *, inside: bool = True) -> str:
    call = f'{{"name":"f","arguments":{arguments}}}'
    call = f'{{"type":"function","function":{call}}}' if inside else call
    return f'{{"messages":[{{"role":"user","content":"a"}},{{"role":"assistant","tool_calls":[{call}]}}]}}'


@pytest.mark.parametrize(
    "arguments, detail",
    [
        (r'"{bad"', "no JSON: syntax: "),
        ('""', "no JSON: syntax: "),
        (r'"{\"a\":1,\"a\":2}"', "no JSON: duplicate_key: "),
        (r'"{\"a\":NaN}"', "no JSON: not_finite: "),
        ('"[1]"', "holds an array"),
        ('"null"', "holds null"),
        (r'"\"x\""', "holds a string"),
    ],
)
@pytest.mark.parametrize("inside", [True, False], ids=["in function", "on the call"])
def test_arguments_as_text_must_hold_an_object(arguments: str, detail: str, inside: bool) -> None:
    """Report T3. Such a row is parsed, so it has the hash of a parsed row."""
    found = fault(calling(arguments, inside=inside))
    assert found.reason == "tool_arguments_invalid_json"
    assert detail in found.detail
    place = "/messages/1/tool_calls/0" + ("/function" if inside else "")
    assert found.pointer == f"{place}/arguments"
    parsed = row(calling(arguments, inside=inside))
    digest = hashlib.sha256(b"kiln.sft-parsed-row.v1\x00" + parsed.canonical()).hexdigest()
    assert parsed.sha256() == f"sha256:{digest}"


@pytest.mark.parametrize("arguments", [r'"{\"a\":1}"', '"{}"', r'" {} \n"', '{"a":1}', "{}", "null", "[1]", "7"])
def test_other_arguments_are_opaque(arguments: str) -> None:
    require_structure(row(calling(arguments)))


def test_roles_come_before_arguments() -> None:
    assert fault(calling('"{bad"').replace('"user"', '"me"')).reason == "invalid_role"


def test_calls_of_another_kind_are_not_looked_into() -> None:
    require_structure(row('{"messages":[{"role":"assistant","tool_calls":["{bad",7,null,{"function":"{bad"}]}]}'))


# --- the extended fields


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_has_three_spellings(key: str) -> None:
    found = row(assistant(**{key: "r"}))
    assert found.messages[0]["reasoning_content"] == "r"
    assert found.extended
    assert found.sha256() == row(assistant(reasoning_content="r")).sha256()
    assert found.ignored == ()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("value", ["", None])
def test_empty_reasoning_changes_nothing(key: str, value: object) -> None:
    assert row(assistant(**{key: value})).sha256() == row(assistant()).sha256()


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("value", [0, False, [], {"text": "r"}])
def test_reasoning_of_another_type_is_refused(key: str, value: object) -> None:
    found = fault(assistant(**{key: value}))
    assert (found.reason, found.pointer) == ("invalid_json", f"/messages/0/{key}")


def test_two_spellings_of_the_reasoning() -> None:
    assert row(assistant(reasoning_content="r", thinking="r")).messages[0]["reasoning_content"] == "r"
    assert row(assistant(reasoning_content="", reasoning="r")).messages[0]["reasoning_content"] == "r"
    assert row(assistant(thinking="r", reasoning=None)).messages[0]["reasoning_content"] == "r"
    assert fault(assistant(reasoning_content="r", thinking="s")).reason == "invalid_json"
    assert fault(assistant(thinking="r", reasoning="s")).reason == "invalid_json"


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning", "weight"])
@pytest.mark.parametrize("role", ["user", "assistant", "tool"])
def test_null_stands_for_a_field_that_is_not_there(key: str, role: str) -> None:
    """As in the rows of a table, which have every column."""
    found = row(json.dumps({"messages": [{"role": role, "content": "b", key: None}]}))
    assert found.ignored == ()
    assert found.messages == [{"role": role, "content": "b"}]


def test_reasoning_of_other_roles_is_ignored_by_name() -> None:
    found = row('{"messages":[{"role":"user","content":"a","thinking":5}]}')
    assert not found.extended
    assert found.ignored == ("messages[].thinking",)


@pytest.mark.parametrize("weight", ["0", "0.0", "-0", "-0.0", "0e9"])
def test_weight_zero_is_kept_as_an_integer(weight: str) -> None:
    found = row(f'{{"messages":[{{"role":"assistant","content":"b","weight":{weight}}}]}}')
    assert b'"weight":0}' in found.canonical()
    assert found.sha256() == row(assistant(weight=0)).sha256()
    assert found.sha256() != row(assistant()).sha256()


@pytest.mark.parametrize(
    "weight", ["1", "1.0", "0.5", "-1", "1e-300", "18446744073709551615", "false", "true", '"0"', "null"]
)
def test_other_weights_change_nothing(weight: str) -> None:
    found = row(f'{{"messages":[{{"role":"assistant","content":"b","weight":{weight}}}]}}')
    assert found.sha256() == row(assistant()).sha256()
    assert not found.extended


@pytest.mark.parametrize("weight", ["false", '"0"'])
def test_weights_that_are_no_numbers_are_named(weight: str) -> None:
    found = row(f'{{"messages":[{{"role":"assistant","content":"b","weight":{weight}}}]}}')
    assert found.ignored == ("messages[].weight",)


def test_ignored_fields_are_named_once_and_in_order() -> None:
    text = (
        '{"id":1,"meta":{},"messages":[{"role":"user","x":1},{"role":"user","x":2,"function_call":{}}],'
        '"ingestion":{"rows_kept":1}}'
    )
    assert row(text).ignored == ("id", "ingestion", "messages[].function_call", "messages[].x", "meta")


def test_parallel_tool_calls_is_known() -> None:
    """OpenAI's switch of the request: a row with it is the row without it, and nothing is to be told."""
    found = row(V1_TEXT[:-1] + ',"parallel_tool_calls":false}')
    assert (found.sha256(), found.ignored) == (V1, ())


def test_tools_are_opaque_and_any_difference_counts() -> None:
    def digest(tools: str) -> str:
        return row(f'{{"messages":[{{"role":"user"}}],"tools":{tools}}}').sha256()

    assert digest("null") == digest("[]") == row('{"messages":[{"role":"user"}]}').sha256()
    assert len({digest(text) for text in ("[1]", "[1.0]", "[null]", '["1"]', "[[]]", "[]")}) == 6


# --- properties

MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
            "name": st.none() | st.text("ab", max_size=2),
            "tool_calls": st.none()
            | st.lists(st.dictionaries(st.text("ab", max_size=1), st.integers(0, 3)), max_size=2),
            "reasoning_content": st.none() | st.text("r", max_size=1),
            "weight": st.sampled_from([0, 1, 0.0, False]),
        },
    ),
    max_size=3,
)
ROWS = st.fixed_dictionaries(
    {"messages": MESSAGES}, optional={"tools": st.none() | st.lists(st.integers(0, 1), max_size=1)}
)


@settings(max_examples=150, deadline=None)
@given(ROWS)
def test_the_normal_form_is_a_fixed_point(value: dict[str, Any]) -> None:
    once = normalise(value)
    again = normalise(strict_json.parse(once.canonical()))
    assert again.canonical() == once.canonical()
    assert again.sha256() == once.sha256()


@settings(max_examples=150, deadline=None)
@given(ROWS, st.randoms())
def test_key_order_and_unknown_keys_change_nothing(value: dict[str, Any], random: Any) -> None:
    def shuffled(item: Any) -> Any:
        if isinstance(item, dict):
            keys = list(item)
            random.shuffle(keys)
            return {key: shuffled(item[key]) for key in keys}
        return [shuffled(inner) for inner in item] if isinstance(item, list) else item

    other = shuffled(value)
    other["metadata"] = {"a": 1}
    for message in other["messages"]:
        message["loss_weight"] = 3
    assert normalise(other).sha256() == normalise(value).sha256()


@settings(max_examples=200, deadline=None)
@given(ROWS, ROWS)
def test_rows_share_an_identity_only_if_their_normal_forms_are_equal(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = normalise(one), normalise(other)
    equal = (first.messages, first.tools) == (second.messages, second.tools)
    assert (first.sha256() == second.sha256()) == equal
