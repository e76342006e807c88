"""What makes two things the same: canonical JSON and SHA-256 under a domain prefix.

SHA-256 is for everything that is evidence. xxHash serves only where being wrong costs speed alone (cache keys,
buckets) and does not appear here. Rules: ``docs/artifacts.md``, sections *canonical JSON* and *domains*.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from kiln_cli.strict_json import WideDouble


class Domain(StrEnum):
    """Prefixes that keep one kind of digest from being mistaken for another: a digest covers domain NUL bytes."""

    # Shared with the public Kiln server, so that hashes agree byte for byte.
    SFT_PARSED_ROW = "kiln.sft-parsed-row.v1"
    SFT_RAW_ROW = "kiln.sft-raw-row.v1"
    SFT_KEPT_CORPUS = "kiln.sft-kept-corpus.v1"
    BASE_MODEL_CONTENT = "kiln.base-model-content.v1"
    TOKENIZER_VOCAB = "kiln.tokenizer-vocab.v1"
    DATASET_CORPUS = "kiln.dataset-corpus.v1"
    DATASET_NORMALIZED_CORPUS = "kiln.dataset-normalized-corpus.v1"
    DATASET_SPLIT_ASSIGNMENT = "kiln.dataset-split-assignment.v1"
    # Ours.
    SFT_EXTENDED_ROW = "kiln-cli.sft-extended-row.v1"
    RAW_ELEMENT = "kiln-cli.raw-element.v1"
    RAW_TOOL_CALL_ROW = "kiln-cli.raw-tool-call-row.v1"
    EPOCH_ORDER = "kiln-cli.epoch-order.v1"
    LORA_INIT = "kiln-cli.lora-init.v1"
    CONFIG = "kiln-cli.config.v1"
    MANIFEST_CONTENT = "kiln-cli.manifest-content.v1"
    RECEIPT = "kiln-cli.receipt.v1"
    RECEIPT_CONTENT = "kiln-cli.receipt-content.v1"
    ADAPTER_CONTENT = "kiln-cli.adapter-content.v1"
    ADMITTED_CORPUS = "kiln-cli.admitted-corpus.v2"
    SCORED_ROW = "kiln-cli.scored-row.v1"
    SCORED_CORPUS = "kiln-cli.scored-corpus.v1"
    LOSS_LOG = "kiln-cli.loss-log.v1"
    TOOL_PROMPT_TEXT = "kiln-cli.tool-prompt-text.v1"
    RECIPE = "kiln-cli.recipe.v1"

    def prefix(self) -> bytes:
        return self.value.encode("ascii") + b"\x00"


HASH_PATTERN = re.compile(r"sha256:[0-9a-f]{64}\Z")

# The first pattern is fast and rules out most texts, the second most others.
_E_AND_DIGIT = re.compile(rb"e[0-9]")
_EXPONENT_MAYBE = re.compile(rb"(?:^|[:\[,])-?[0-9]+(?:\.[0-9]+)?e[0-9]")
# msgspec leaves out the plus of `1e+16`. Doubles from the strict parser are marked and written whole; for others a
# pattern finds the place, strings matched whole so that only numbers change. msgspec also writes null for NaN.
_EXPONENT = re.compile(rb'"(?:[^"\\]++|\\.)*+"|([0-9]e)(?=[0-9])')


def _write_wide(value: object) -> msgspec.Raw:
    if not isinstance(value, WideDouble):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return msgspec.Raw(_with_plus(msgspec.json.encode(float(value))))


def _with_plus(encoded: bytes) -> bytes:
    return _EXPONENT.sub(lambda match: match[1] + b"+" if match[1] else match[0], encoded)


_encode = msgspec.json.Encoder(order="sorted", enc_hook=_write_wide).encode


def canonical_json(value: Any) -> bytes:
    """``value`` as compact UTF-8 JSON: keys sorted by code point at every depth, doubles as serde_json prints them.

    Raises ValueError for NaN and infinities: they have no JSON form.
    """
    encoded: bytes = _encode(value)
    if b"null" in encoded:
        _require_finite(msgspec.to_builtins(value, enc_hook=float))
    suspect = _E_AND_DIGIT.search(encoded) and _EXPONENT_MAYBE.search(encoded)
    return _with_plus(encoded) if suspect else encoded


def canonical_parsed(value: Any) -> bytes:
    """As :func:`canonical_json`, for what the strict parser made: it holds no NaN, and its wide doubles are marked."""
    encoded: bytes = _encode(value)
    return encoded


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def domain_hasher(domain: Domain) -> hashlib._Hash:
    """A SHA-256 that has taken in the domain's prefix."""
    return hashlib.sha256(domain.prefix())


def domain_sha256(domain: Domain, data: bytes) -> str:
    """``sha256:`` and 64 hex digits over domain NUL data."""
    digest = domain_hasher(domain)
    digest.update(data)
    return "sha256:" + digest.hexdigest()


def domain_json_sha256(domain: Domain, value: Any) -> str:
    return domain_sha256(domain, canonical_json(value))


def corpus_sha256(row_hashes: Iterable[str], domain: Domain = Domain.SFT_KEPT_CORPUS) -> str:
    """The ordered aggregate of row hashes: each text behind its length as u64 big-endian; order and repeats count."""
    digest = domain_hasher(domain)
    for text in row_hashes:
        digest.update(length_prefixed(text.encode("ascii")))
    return "sha256:" + digest.hexdigest()


def length_prefixed(data: bytes) -> bytes:
    """u64 big-endian length, then the bytes: no two lists of parts share an encoding."""
    return len(data).to_bytes(8, "big") + data


def is_hash(text: object) -> bool:
    return isinstance(text, str) and HASH_PATTERN.match(text) is not None


def _require_finite(value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value!r} has no JSON form")
    if isinstance(value, dict):
        for item in value.values():
            _require_finite(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _require_finite(item)
