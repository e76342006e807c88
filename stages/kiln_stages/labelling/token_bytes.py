"""The bytes that each token id stands for, so that the ids of a text, joined, can be held against the text.

Two kinds of tokenizer are read. Byte-level ones write every byte as one character. SentencePiece-like ones write a
space as ``▁`` and a byte that no piece holds as ``<0x0A>``, and many put a space of their own before a stretch of text,
which is taken off again here. Other tokenizers have no such table: ``token_bytes`` gives None.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

_SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# Where a tokenizer puts a space of its own: before every stretch between added tokens, or at most before those that do
# not begin with one.
Prefix = Literal["none", "every", "bare"]


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """``table[id]`` is the id's bytes. ``added`` ids stand for themselves; ``greedy`` ones take white space along."""

    table: list[bytes]
    added: frozenset[int]
    greedy: frozenset[int]
    prefix: Prefix
    composes: bool
    byte_level: bool

    @property
    def ids_tell(self) -> bool:
        """Whether the ids of a text tell the bytes of each token without offsets, and a decoder puts nothing in."""
        return self.byte_level and self.prefix == "none" and not self.greedy

    @property
    def drops_first_space(self) -> bool:
        """Whether the space before a word is a matter of spelling: ``▁Hi`` alone decodes to ``Hi``."""
        return not self.byte_level and self.prefix != "none"

    def parts(self, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each token of ``text``, without what the tokenizer itself put in."""
        parts = [self.table[number] for number in ids]
        if self.greedy and not self.greedy.isdisjoint(ids):
            for at, number in enumerate(ids):
                if number in self.greedy:
                    taken = text[slice(*offsets[at])].encode("utf-8")
                    parts[at] = taken if taken.strip() == parts[at] else parts[at]
        if self.prefix != "none":
            self._take_off_prefixes(text.encode("utf-8"), ids, parts)
        return parts

    def normal_form(self, text: str) -> str:
        """The text as the tokenizer reads it."""
        return unicodedata.normalize("NFC", text) if self.composes and not text.isascii() else text

    def _take_off_prefixes(self, encoded: bytes, ids: Sequence[int], parts: list[bytes]) -> None:
        position, fresh = 0, True
        for at, number in enumerate(ids):
            if number in self.added:
                fresh = True
            else:
                bare = self.prefix == "every" or not encoded.startswith((b" ", _SPACE.encode()), position)
                if fresh and bare and parts[at].startswith(b" "):
                    parts[at] = parts[at][1:]
                fresh = False
            position += len(parts[at])


def token_bytes(tokenizer: tokenizers.Tokenizer, description: dict[str, Any]) -> TokenBytes | None:
    """The table of a tokenizer and its ``tokenizer.json``, or None where an id has no bytes of its own."""
    prefix: Prefix | None
    byte_level = (description.get("decoder") or {}).get("type") == "ByteLevel"
    if byte_level:
        prefix, read = _byte_level_prefix(description), _read_byte_level
    else:
        prefix, read = _sentencepiece_prefix(description), _read_sentencepiece
    if prefix is None:
        return None
    added = [token for token in description.get("added_tokens") or [] if token["content"]]
    plain = {token["content"] for token in added}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for piece, number in vocabulary.items():
        told = piece.encode("utf-8") if piece in plain else read(piece)
        if told is None:
            return None
        table[number] = told
    greedy = frozenset(int(token["id"]) for token in added if token["lstrip"] or token["rstrip"])
    composes = (description.get("normalizer") or {}).get("type") == "NFC"
    return TokenBytes(table, frozenset(int(token["id"]) for token in added), greedy, prefix, composes, byte_level)


def _byte_level_prefix(description: dict[str, Any]) -> Prefix | None:
    if (description.get("normalizer") or {"type": "NFC"})["type"] != "NFC":
        return None
    spaced = any(step.get("add_prefix_space") for step in _steps(description.get("pre_tokenizer"), "pretokenizers"))
    return "bare" if spaced else "none"


def _sentencepiece_prefix(description: dict[str, Any]) -> Prefix | None:
    """How a tokenizer that writes spaces as ``▁`` and nothing else otherwise puts its own before a text."""
    model = description.get("model") or {}
    normalizers = _steps(description.get("normalizer"), "normalizers")
    before = _steps(description.get("pre_tokenizer"), "pretokenizers")
    if model.get("type") != "BPE" or not _is_plain_decoder(description.get("decoder")):
        return None
    metaspace = [step for step in before if step["type"] == "Metaspace"]
    replaces = [step for step in normalizers if _replaces(step, " ", _SPACE)]
    prepends = [step for step in normalizers if step["type"] == "Prepend" and step.get("prepend") == _SPACE]
    if metaspace == before and len(before) == 1 and not normalizers and before[0].get("replacement") == _SPACE:
        schemes: dict[str, Prefix] = {"never": "none", "always": "bare", "first": "bare"}
        return schemes.get(before[0].get("prepend_scheme", "always"))
    if not before and len(replaces) == 1 and len(normalizers) == 1 + len(prepends) and len(prepends) < 2:
        return "every" if prepends else "none"
    return None


def _is_plain_decoder(decoder: dict[str, Any] | None) -> bool:
    steps = _steps(decoder, "decoders")
    kept = [step for step in steps if not _replaces(step, _SPACE, " ")]
    return len(kept) == len(steps) - 1 and all(step["type"] in ("ByteFallback", "Fuse", "Strip") for step in kept)


def _replaces(step: dict[str, Any], old: str, new: str) -> bool:
    return step["type"] == "Replace" and step.get("pattern") == {"String": old} and step.get("content") == new


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a component, one by itself or a sequence of them."""
    if part is None:
        return []
    return list(part.get(inner, ())) if part.get("type") == "Sequence" else [part]


def _read_byte_level(piece: str) -> bytes | None:
    try:
        return piece.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _read_sentencepiece(piece: str) -> bytes | None:
    byte = _BYTE.fullmatch(piece)
    return bytes([int(byte.group(1), 16)]) if byte else piece.replace(_SPACE, " ").encode("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte: itself if printable, else from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


# Each character of the alphabet as the one of its byte; others below U+0100 as one that Latin-1 has not.
_TO_LATIN1 = str.maketrans(
    dict.fromkeys(map(chr, range(256)), "\uffff") | {char: chr(byte) for char, byte in _byte_alphabet().items()}
)
