"""Who scored a corpus: a teacher's identity, and the manifest line by which a corpus names it.

The form is the public Kiln server's, byte for byte: one compact JSON object whose keys stand in the order of the
fields below. A manifest says where scores come from; it does not prove it.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError
from kiln_cli.identity import Domain, domain_hasher, sha256_hex
from kiln_cli.text import printable

IDENTITY_SCHEMA = "kiln.teacher-identity.v1"
MANIFEST_SCHEMA = "kiln.off-policy-distillation-manifest.v1"
SERVED_PROTOCOL = "vllm.prompt-logprobs.numeric-token-ids.causal.v1"
# Ours: a public Kiln server takes no corpus of it.
LOCAL_PROTOCOL = "kiln-cli.transformers-prompt-logprobs.causal.v1"
LOGPROBS_MODE = "raw_logprobs"
NAME_BYTES = 256
DOCUMENT_BYTES = 4096
MANIFEST_BYTES = DOCUMENT_BYTES + 128  # the identity, and what the manifest puts around it
FINGERPRINT_PREFIX = "kiln-teacher-v1."
MAX_VOCABULARY = MAX_LENGTH = 2**24
MAX_TOP_K = 2**16
MAX_CANDIDATES = 10**6
_HEX = re.compile(r"[0-9a-f]{64}\Z")


class IdentityFault(ValueError):
    """Why a text is no teacher identity, or not the canonical line of one; the message names field and value."""


class AdapterIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A LoRA that the teacher wears. The hashes are 64 hex digits without a prefix."""

    name: str
    weights_sha256: str
    config_sha256: str


class TeacherIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a teacher's scores hang on. The order of the fields is that of the canonical JSON.

    Hashes are 64 hex digits without a prefix. ``max_model_len`` counts tokens; ``max_top_k`` candidates a position and
    ``max_prompt_logprob_candidates`` candidates a request are the most that may be asked for.
    """

    schema: str
    protocol: str
    served_model_id: str
    base_model_sha256: str
    tokenizer_vocab_sha256: str
    tokenizer_config_sha256: str
    adapter: AdapterIdentity | None
    vocab_size: int
    max_top_k: int
    max_model_len: int
    max_prompt_logprob_candidates: int
    logprobs_mode: str
    implementation: str
    inference_config_sha256: str

    def faults(self) -> Iterator[str]:
        """The rules that it breaks, each with the field and its value."""
        yield from _wrong_constant("schema", self.schema, IDENTITY_SCHEMA)
        yield from _wrong_constant("protocol", self.protocol, SERVED_PROTOCOL, LOCAL_PROTOCOL)
        yield from _wrong_constant("logprobs_mode", self.logprobs_mode, LOGPROBS_MODE)
        for field in ("base_model", "tokenizer_vocab", "tokenizer_config", "inference_config"):
            yield from _no_hash(f"{field}_sha256", getattr(self, f"{field}_sha256"))
        if self.adapter is not None:
            yield from _no_hash("adapter.weights_sha256", self.adapter.weights_sha256)
            yield from _no_hash("adapter.config_sha256", self.adapter.config_sha256)
            yield from _no_name("adapter.name", self.adapter.name)
        yield from _no_name("served_model_id", self.served_model_id)
        yield from _no_name("implementation", self.implementation)
        yield from _out_of_bounds("vocab_size", self.vocab_size, 1, MAX_VOCABULARY)
        yield from _out_of_bounds("max_top_k", self.max_top_k, 1, min(MAX_TOP_K, self.vocab_size))
        yield from _out_of_bounds("max_model_len", self.max_model_len, 1, MAX_LENGTH)
        fewest = min(self.max_top_k + 1, self.vocab_size)  # the sampled token may come on top of the top K
        candidates = self.max_prompt_logprob_candidates
        yield from _out_of_bounds("max_prompt_logprob_candidates", candidates, max(fewest, 1), MAX_CANDIDATES)
        size = len(self.compact())
        if size > DOCUMENT_BYTES:
            yield f"the identity has {size} bytes, expected at most {DOCUMENT_BYTES}"

    def require_sound(self) -> TeacherIdentity:
        """Itself. Raises IdentityFault with the first rule that it breaks."""
        for fault in self.faults():
            raise IdentityFault(fault)
        return self

    def compact(self) -> bytes:
        """The canonical JSON: compact, keys in the order of the fields."""
        return msgspec.json.encode(self)

    def content_revision(self) -> str:
        """SHA-256 of the canonical JSON, as bare hex and without a domain, as the public server has it."""
        return sha256_hex(self.compact())

    def fingerprint(self) -> str:
        """The identity and its revision as one word, which a server may send beside its scores."""
        encoded = base64.urlsafe_b64encode(self.compact()).rstrip(b"=").decode("ascii")
        return f"{FINGERPRINT_PREFIX}{encoded}.{self.content_revision()}"

    def manifest_line(self) -> bytes:
        """The first line of a corpus that this teacher scored, without a line feed."""
        return b'{"schema":"%s","teacher_identity":%s}' % (MANIFEST_SCHEMA.encode("ascii"), self.compact())

    def differences(self, other: TeacherIdentity) -> list[tuple[str, object, object]]:
        """Each field that differs: its name, the value here, the value there."""
        here, there = msgspec.to_builtins(self), msgspec.to_builtins(other)
        return [(field, here[field], there[field]) for field in here if here[field] != there[field]]


def is_manifest(value: object) -> bool:
    """Whether a parsed line calls itself a manifest."""
    return isinstance(value, dict) and value.get("schema") == MANIFEST_SCHEMA


def parse_manifest(line: bytes) -> TeacherIdentity:
    """The identity in a manifest line, given without its line feed and otherwise untrimmed.

    Raises IdentityFault where the line is no manifest, breaks a rule, or is not the canonical bytes of what it says.
    """
    if len(line) > MANIFEST_BYTES:
        raise IdentityFault(f"the manifest line has {len(line)} bytes, expected at most {MANIFEST_BYTES}")
    value = _parsed(line)
    if not is_manifest(value):
        raise IdentityFault(f"schema is {_shown(value.get('schema'))}, expected {MANIFEST_SCHEMA!r}")
    if unknown := sorted(value.keys() - {"schema", "teacher_identity"}):
        raise IdentityFault(f"unknown field {printable(unknown[0])!r} in the manifest")
    identity = to_identity(value.get("teacher_identity"))
    _require_canonical(line, identity.manifest_line())
    return identity


def parse_identity(text: bytes) -> TeacherIdentity:
    """An identity from any form that a server gives it in: a manifest line, the identity's JSON, or a fingerprint.

    White space around the text is no part of it. Raises IdentityFault.
    """
    text = text.strip()
    if text.startswith(FINGERPRINT_PREFIX.encode("ascii")):
        return _from_fingerprint(text.decode("ascii", "replace"))
    value = _parsed(text)
    return parse_manifest(text) if is_manifest(value) else to_identity(value)


def to_identity(value: object) -> TeacherIdentity:
    """A parsed JSON object as an identity that keeps the rules. Raises IdentityFault."""
    try:
        identity = msgspec.convert(value, TeacherIdentity)
    except msgspec.ValidationError as error:
        raise IdentityFault(f"teacher_identity: {printable(error)}") from None
    return identity.require_sound()


def vocabulary_sha256(tokenizer_json: str) -> str:
    """``sha256:`` digest of the vocabulary that the text of a ``tokenizer.json`` describes, added tokens included.

    Token texts are taken as that file writes them (a byte-level vocabulary says ``Ġ`` for a space). Domain
    ``kiln.tokenizer-vocab.v1``. Raises KilnError KLN302 where the text describes no vocabulary.
    """
    try:
        described = json.loads(tokenizer_json)
        vocabulary = described["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: a list of [text, score], numbered by place
            numbered = [(number, str(text)) for number, (text, _) in enumerate(vocabulary)]
        else:
            numbered = [(int(number), str(text)) for text, number in vocabulary.items()]
        numbered += [(int(token["id"]), str(token["content"])) for token in described.get("added_tokens") or []]
        return pairs_sha256((number, text.encode("utf-8")) for number, text in numbered)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise KilnError(
            "KLN302",
            f"tokenizer.json describes no vocabulary: {type(error).__name__}: {printable(error)}",
            hint="restore the model directory; for the default model run `python fixtures/fetch_model.py`",
        ) from None


def pairs_sha256(pairs: Iterable[tuple[int, bytes]]) -> str:
    """``sha256:`` digest of a vocabulary given as (id, bytes); order and repeats do not count."""
    entries = sorted(set(pairs))
    digest = domain_hasher(Domain.TOKENIZER_VOCAB)
    digest.update(len(entries).to_bytes(8, "little"))
    for number, text in entries:
        digest.update(number.to_bytes(4, "little") + len(text).to_bytes(8, "little") + text)
    return "sha256:" + digest.hexdigest()


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value = strict_json.parse_object(text)
    except strict_json.JsonFault as fault:
        raise IdentityFault(f"no JSON object: {printable(fault.detail)}") from None
    return value


def _from_fingerprint(text: str) -> TeacherIdentity:
    encoded, _, revision = text.removeprefix(FINGERPRINT_PREFIX).partition(".")
    try:
        document = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    except ValueError as error:
        raise IdentityFault(f"the fingerprint cannot be read: {printable(error)}") from None
    identity = to_identity(_parsed(document))
    if identity.fingerprint() != text:
        raise IdentityFault(f"the fingerprint says revision {printable(revision)}, found {identity.content_revision()}")
    return identity


def _require_canonical(found: bytes, expected: bytes) -> None:
    if found == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    at = next((i for i, (left, right) in pairs if left != right), min(len(found), len(expected)))
    shown, wanted = found[at : at + 20] or b"the end", expected[at : at + 20] or b"the end"
    raise IdentityFault(
        f"the manifest line is not in canonical form: at byte {at} it has {_text(shown)}, expected {_text(wanted)}"
    )


def _text(data: bytes) -> str:
    return repr(printable(data.decode("utf-8", "replace")))


def _shown(value: object) -> str:
    return printable(repr(value), limit=80)


def _wrong_constant(field: str, value: str, *allowed: str) -> Iterator[str]:
    if value not in allowed:
        yield f"{field} is {_shown(value)}, expected {' or '.join(map(repr, allowed))}"


def _no_hash(field: str, value: str) -> Iterator[str]:
    if _HEX.match(value) is None:
        yield f"{field} is {_shown(value)}, expected 64 lowercase hex digits without a prefix"


def _no_name(field: str, value: str) -> Iterator[str]:
    size = len(value.encode("utf-8"))
    if not 1 <= size <= NAME_BYTES:
        yield f"{field} has {size} bytes, expected 1..{NAME_BYTES}"


def _out_of_bounds(field: str, value: int, least: int, most: int) -> Iterator[str]:
    if not least <= value <= most:
        yield f"{field} is {value}, expected {least}..{most}"
