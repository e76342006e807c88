"""The phi-3 vocabulary of the shared data as a ``tokenizer.json``, the way its model's own file is made.

A GGUF file holds the pieces of a SentencePiece model with their scores. Two pieces merge where their text together is a
piece, the piece of the better score first. A space is ``▁``, and one is put before every stretch of text.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

_SCALARS = "BbHhIif?"  # types 0 to 7; 8 is a string, 9 an array, 10 to 12 are 64 bits wide
_WIDE = {10: "Q", 11: "q", 12: "d"}
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4


def phi3_tokenizer_json(path: Path) -> str:
    """The text of a ``tokenizer.json`` for the SentencePiece vocabulary of a GGUF file."""
    fields = _fields(path.read_bytes())
    pieces: list[str] = fields["tokenizer.ggml.tokens"]
    scores: list[float] = fields["tokenizer.ggml.scores"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    added = [
        {"id": number, "content": pieces[number], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": kind != _USER_DEFINED}
        for number, kind in enumerate(fields["tokenizer.ggml.token_type"])
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]  # fmt: skip
    prepend = {"type": "Prepend", "prepend": "▁"}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [prepend, spaces]},
            "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
            "model": {
                "type": "BPE",
                "fuse_unk": True,
                "byte_fallback": True,
                "unk_token": None,
                "vocab": vocabulary,
                "merges": _merges(vocabulary, scores),
            },
        },
        ensure_ascii=False,
    )


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    found = []
    for piece, number in vocabulary.items():
        pairs = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        pairs = [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[number], left, right) for left, right in pairs]
    found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in found]


def _fields(data: bytes) -> dict[str, Any]:
    """The key-value pairs at the head of a GGUF file."""
    magic, _, _, count = struct.unpack_from("<4sIQQ", data)
    assert magic == b"GGUF"
    at, fields = 24, {}
    for _ in range(count):
        key, at = _value(data, at, 8)
        (kind,) = struct.unpack_from("<I", data, at)
        fields[key], at = _value(data, at + 4, kind)
    return fields


def _value(data: bytes, at: int, kind: int) -> tuple[Any, int]:
    if kind == 8:
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length].decode("utf-8"), at + 8 + length
    if kind == 9:
        inner, length = struct.unpack_from("<IQ", data, at)
        at, values = at + 12, []
        for _ in range(length):
            value, at = _value(data, at, inner)
            values.append(value)
        return values, at
    form = "<" + (_WIDE[kind] if kind in _WIDE else _SCALARS[kind])
    return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
