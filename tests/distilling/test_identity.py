"""Teacher identities and vocabularies against worked vectors, and every rule with a breach of it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.distilling.identity import (
    IDENTITY_SCHEMA,
    LOCAL_PROTOCOL,
    SERVED_PROTOCOL,
    AdapterIdentity,
    IdentityFault,
    TeacherIdentity,
    pairs_sha256,
    parse_identity,
    parse_manifest,
    vocabulary_sha256,
)
from tests_support import packed_text

from kiln_cli.errors import KilnError

SMOLLM2 = "sha256:467a035c48d80b23ca482a9eb342365957a429fde577a1142d114581600d5a1e"
VECTOR = TeacherIdentity(
    schema=IDENTITY_SCHEMA,
    protocol=SERVED_PROTOCOL,
    served_model_id="t",
    base_model_sha256="a" * 64,
    tokenizer_vocab_sha256="b" * 64,
    tokenizer_config_sha256="c" * 64,
    adapter=None,
    vocab_size=64,
    max_top_k=32,
    max_model_len=1024,
    max_prompt_logprob_candidates=1000,
    logprobs_mode="raw_logprobs",
    implementation="x",
    inference_config_sha256="d" * 64,
)


def changed(**fields: Any) -> TeacherIdentity:
    return msgspec.structs.replace(VECTOR, **fields)


def test_the_identity_is_as_the_vector_has_it() -> None:
    assert len(VECTOR.compact()) == 642
    assert VECTOR.content_revision() == "afc14b4af8518372c0b823e298d9084cd5feccbe8dccd42563592d1cb040fad4"
    assert list(VECTOR.faults()) == []


def test_the_manifest_is_as_the_vector_has_it() -> None:
    line = VECTOR.manifest_line()
    assert len(line) == 715
    assert hashlib.sha256(line).hexdigest() == "796546017436ed3c91ae07914cf8ac04904fec8603564f21ac2235413cfe9d05"
    assert parse_manifest(line) == VECTOR


def test_a_vocabulary_is_as_the_vector_has_it() -> None:
    wanted = "sha256:0e7ed7c4b2c375344d31b534f7cbb119b528114f1301f09d6642801b100710ff"
    assert pairs_sha256([(1, b"b"), (0, b"a"), (1, b"b")]) == wanted
    # The forms that `tokenizer.json` has: a map, a list with scores, and added tokens that repeat the vocabulary.
    for vocabulary in ({"b": 1, "a": 0}, [["a", -1.0], ["b", -2.0]]):
        text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 1, "content": "b"}]})
        assert vocabulary_sha256(text) == wanted
    other = json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 1, "content": "b"}]})
    assert vocabulary_sha256(other) == wanted


def test_the_vocabulary_of_smollm2_is_as_computed_elsewhere() -> None:
    assert vocabulary_sha256(packed_text("data/tokenizers/smollm2/tokenizer.json.gz")) == SMOLLM2


@pytest.mark.model
def test_the_fetched_model_has_that_vocabulary() -> None:
    path = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct" / "tokenizer.json"
    assert vocabulary_sha256(path.read_text(encoding="utf-8")) == SMOLLM2


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": {"a": -1}}}'])
def test_a_text_without_a_vocabulary_is_refused(text: str) -> None:
    with pytest.raises(KilnError) as refused:
        vocabulary_sha256(text)
    assert refused.value.code == "KLN302"


BREACHES = [
    ({"schema": "kiln.teacher-identity.v2"}, "schema is 'kiln.teacher-identity.v2'"),
    ({"protocol": "other"}, "protocol is 'other'"),
    ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode is 'processed_logprobs', expected 'raw_logprobs'"),
    ({"base_model_sha256": "A" * 64}, "base_model_sha256 is 'AAAA"),
    ({"tokenizer_vocab_sha256": "sha256:" + "b" * 64}, "tokenizer_vocab_sha256 is 'sha256:"),
    ({"tokenizer_config_sha256": "c" * 63}, "tokenizer_config_sha256 is"),
    ({"inference_config_sha256": "d" * 64 + "\n"}, "inference_config_sha256 is"),
    ({"adapter": AdapterIdentity("", "a" * 64, "b" * 64)}, "adapter.name has 0 bytes, expected 1..256"),
    ({"adapter": AdapterIdentity("x", "a", "b" * 64)}, "adapter.weights_sha256 is 'a'"),
    ({"adapter": AdapterIdentity("x", "a" * 64, "")}, "adapter.config_sha256 is ''"),
    ({"served_model_id": ""}, "served_model_id has 0 bytes"),
    ({"served_model_id": "é" * 128 + "x"}, "served_model_id has 257 bytes, expected 1..256"),
    ({"implementation": "x" * 257}, "implementation has 257 bytes"),
    ({"vocab_size": 0, "max_top_k": 1}, "vocab_size is 0, expected 1..16777216"),
    ({"vocab_size": 2**24 + 1}, "vocab_size is 16777217"),
    ({"max_top_k": 0}, "max_top_k is 0, expected 1..64"),
    ({"max_top_k": 65}, "max_top_k is 65, expected 1..64"),
    ({"vocab_size": 2**20, "max_top_k": 65537}, "max_top_k is 65537, expected 1..65536"),
    ({"max_model_len": 0}, "max_model_len is 0"),
    ({"max_model_len": 2**24 + 1}, "max_model_len is 16777217"),
    ({"max_prompt_logprob_candidates": 32}, "max_prompt_logprob_candidates is 32, expected 33..1000000"),
    ({"max_prompt_logprob_candidates": 10**6 + 1}, "max_prompt_logprob_candidates is 1000001"),
    ({"max_top_k": 64, "max_prompt_logprob_candidates": 63}, "is 63, expected 64..1000000"),
]


@pytest.mark.parametrize("fields, message", BREACHES, ids=lambda value: str(value)[:40])
def test_a_broken_rule_is_named_with_its_value(fields: dict[str, Any], message: str) -> None:
    broken = changed(**fields)
    assert any(message in fault for fault in broken.faults()), list(broken.faults())
    with pytest.raises(IdentityFault):
        parse_manifest(broken.manifest_line())
    with pytest.raises(IdentityFault):
        parse_identity(broken.compact())


def test_what_stands_at_a_bound_passes() -> None:
    most = {"served_model_id": "é" * 128, "vocab_size": 2**24, "max_top_k": 2**16, "max_model_len": 2**24}
    for fields in (
        {**most, "max_prompt_logprob_candidates": 10**6},
        {"max_top_k": 64, "max_prompt_logprob_candidates": 64},  # of 64 tokens no 65th can be sampled
        {"max_prompt_logprob_candidates": 33},
        {"protocol": LOCAL_PROTOCOL, "adapter": AdapterIdentity("x" * 256, "a" * 64, "b" * 64)},
    ):
        assert list(changed(**fields).faults()) == []


def test_an_identity_of_more_than_4096_bytes_is_refused() -> None:
    control = "\x01" * 256  # six bytes each as JSON
    broken = changed(
        served_model_id=control, implementation=control, adapter=AdapterIdentity(control, "a" * 64, "b" * 64)
    )
    assert [fault for fault in broken.faults() if "expected at most 4096" in fault]


LINE = VECTOR.manifest_line()
OTHER_BYTES = [
    (b" " + LINE, "not in canonical form: at byte 0"),
    (LINE + b" ", "not in canonical form: at byte 715 it has ' ', expected 'the end'"),
    (LINE.replace(b'":"t"', b'": "t"'), "not in canonical form"),
    (LINE.replace(b'"t"', b'"\\u0074"'), "not in canonical form"),
    (LINE.replace(b'"vocab_size":64,"max_top_k":32', b'"max_top_k":32,"vocab_size":64'), "not in canonical form"),
    (LINE.replace(b'"vocab_size":64', b'"vocab_size":64.0'), "Expected `int`, got `float`"),
    (LINE.replace(b'"vocab_size":64', b'"vocab_size":64,"vocab_size":64'), "no JSON object"),
    (LINE.replace(b'"adapter":null,', b""), "missing required field `adapter`"),
    (LINE.replace(b'"adapter":null', b'"adapter":null,"more":1'), "unknown field `more`"),
    (LINE[:-1] + b',"more":1}', "unknown field 'more' in the manifest"),
    (LINE.replace(b"manifest.v1", b"manifest.v2"), "schema is"),
    (LINE[:-1], "no JSON object"),
    (b'{"schema":"kiln.off-policy-distillation-manifest.v1"}', "teacher_identity: Expected `object`, got `null`"),
    (b"[" * 5000, "has 5000 bytes"),
]


@pytest.mark.parametrize("line, message", OTHER_BYTES, ids=lambda value: str(value)[:40])
def test_a_line_that_is_not_the_canonical_one_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(IdentityFault) as refused:
        parse_manifest(line)
    assert message in str(refused.value)


def test_an_identity_is_read_in_each_form_that_a_server_has() -> None:
    for text in (LINE, VECTOR.compact(), VECTOR.fingerprint().encode("ascii")):
        assert parse_identity(b"\n" + text + b"\n") == VECTOR
    pretty = json.dumps(json.loads(VECTOR.compact()), indent=2).encode("utf-8")
    assert parse_identity(pretty) == VECTOR  # only the line in a corpus must be canonical


def test_a_fingerprint_is_the_identity_and_its_revision() -> None:
    prefix, encoded, revision = VECTOR.fingerprint().split(".")
    assert prefix == "kiln-teacher-v1" and revision == VECTOR.content_revision() and "=" not in encoded
    largest = changed(served_model_id="\x01" * 256, implementation="\x01" * 256)
    assert len(largest.fingerprint()) <= 6144
    for damaged in (f"{prefix}.{encoded}.{'0' * 64}", f"{prefix}.{encoded}", f"{prefix}.{encoded}A.{revision}"):
        with pytest.raises(IdentityFault):
            parse_identity(damaged.encode("ascii"))


def test_differences_name_each_field_with_both_values() -> None:
    other = changed(vocab_size=65, implementation="y")
    assert VECTOR.differences(VECTOR) == []
    assert VECTOR.differences(other) == [("vocab_size", 64, 65), ("implementation", "x", "y")]


def test_strings_are_written_as_the_public_server_writes_them() -> None:
    name = 'é"\\/\x01\x08\x0c\n\r\t\x7f\u2028😀'
    written = changed(served_model_id=name).compact()
    assert 'é\\"\\\\/\\u0001\\b\\f\\n\\r\\t\x7f\u2028😀'.encode() in written
