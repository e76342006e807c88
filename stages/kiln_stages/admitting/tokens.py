"""From rendered text to token ids and labelled tokens, with the proof that the labels are the spans.

A token is labelled when its characters overlap a trained span. For byte-level tokenizers every id stands for a fixed
run of bytes, so the bytes of the ids, joined, must be the text: that finds characters that no token holds, and the
running length gives each token's place without the tokenizer's word for it. The tokenizer's own offsets must then
count the same labels. For other tokenizers the offsets alone are used, and must cover the text.

Row text must never become a control token: ``<|im_start|>`` in a question would open a turn. Where row text holds the
text of one, the text is cut at the template's own control tokens and each stretch between them is encoded with control
tokens switched off, so the forged one comes out as ordinary tokens.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import tokenizers

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.text import printable

Spans = Sequence[tuple[int, int]]
Control = Literal["text", "reject"]


class RenderedText(Protocol):
    """What is encoded: ``labels.Rendered``, or anything with these three."""

    @property
    def text(self) -> str: ...
    @property
    def spans(self) -> tuple[tuple[int, int], ...]: ...
    @property
    def content_spans(self) -> tuple[tuple[int, int], ...]: ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and the labelled tokens as index ranges with an exclusive end, in order and disjoint."""

    input_ids: list[int]
    label_spans: list[tuple[int, int]]


class RowTokenizer:
    """The text of a ``tokenizer.json``, for rendered rows. It adds no token: what the template prints is encoded.

    Raises KilnError KLN302 where the text describes no tokenizer.
    """

    def __init__(self, tokenizer_json: str, bos_token: str | None = None) -> None:
        try:
            self._tokenizer = _loaded(tokenizer_json)
            self._without_control = _loaded(tokenizer_json)
            description = json.loads(tokenizer_json)
        except Exception as error:  # the tokenizers library raises bare Exception for a damaged description
            raise KilnError(
                "KLN302",
                f"tokenizer.json describes no tokenizer: {printable(error)}",
                hint="restore the model directory; for the default model run `python fixtures/fetch_model.py`",
            ) from error
        self._without_control.encode_special_tokens = True
        added = [token for token in description.get("added_tokens") or [] if token["content"]]
        control = [token for token in added if token["special"]]
        self._control_ids = {token["content"]: int(token["id"]) for token in control}
        self._greedy = {token["content"] for token in control if token["lstrip"] or token["rstrip"]}
        self._control = _any_of(self._control_ids)
        self._bos = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        self._bytes = _bytes_by_id(self._tokenizer, description, added)

    @property
    def is_byte_level(self) -> bool:
        """Whether every id stands for a fixed run of bytes."""
        return self._bytes is not None

    def encode(self, text: str, spans: Spans, content_spans: Spans = (), control: Control = "text") -> Encoded:
        """Ids and labelled tokens of ``text``.

        Raises RowFault: ``control_token_in_content`` (row text holds a control token's text, and ``control`` is
        ``"reject"`` or the tokenizer cannot take it as text), ``token_loss`` (a character no token holds),
        ``boundary_straddle`` (a token crosses the edge of a span), ``duplicate_bos``, ``no_supervised_tokens``,
        ``mask_disagreement`` (the two ways to count labels differ).
        """
        forged = self._forged(text, content_spans)
        if not forged:
            whole = self._tokenizer.encode(text, add_special_tokens=False)
            return self._labelled(text, spans, whole.ids, whole.offsets)
        return self._encode_forged(text, spans, forged, control)

    def encode_batch(self, rows: Sequence[RenderedText], control: Control = "text") -> list[Encoded | RowFault]:
        """As :meth:`encode`, for many rows at once; a row that fails gives its fault in its place."""
        out: list[Encoded | RowFault] = []
        encodings = self._tokenizer.encode_batch([row.text for row in rows], add_special_tokens=False)
        for row, whole in zip(rows, encodings, strict=True):
            try:
                forged = self._forged(row.text, row.content_spans)
                if forged:
                    out.append(self._encode_forged(row.text, row.spans, forged, control))
                else:
                    out.append(self._labelled(row.text, row.spans, whole.ids, whole.offsets))
            except RowFault as fault:
                out.append(fault)
        return out

    def _forged(self, text: str, content_spans: Spans) -> list[re.Match[str]]:
        """Control-token texts that row text is part of."""
        starts = [start for start, _ in content_spans]
        forged = []
        for match in self._control.finditer(text) if content_spans else ():
            at = bisect_left(starts, match.end()) - 1  # the last span that begins before the match ends
            if at >= 0 and content_spans[at][1] > match.start():
                forged.append(match)
        return forged

    def _encode_forged(self, text: str, spans: Spans, forged: list[re.Match[str]], control: Control) -> Encoded:
        name = printable(forged[0].group())
        if control == "reject":
            raise RowFault("control_token_in_content", f"row text holds the control token {name}")
        if self._bytes is None or self._greedy:
            raise RowFault(
                "control_token_in_content", f"row text holds {name}, which this tokenizer cannot take as plain text"
            )
        forged_at = {match.start() for match in forged}
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        position = 0
        real = [match.span() for match in self._control.finditer(text) if match.start() not in forged_at]
        for start, end in [*real, (len(text), len(text))]:
            stretch = self._without_control.encode(text[position:start], add_special_tokens=False)
            ids += stretch.ids
            offsets += [(left + position, right + position) for left, right in stretch.offsets]
            if start < end:
                ids.append(self._control_ids[text[start:end]])
                offsets.append((start, end))
            position = end
        return self._labelled(text, spans, ids, offsets)

    def _labelled(self, text: str, spans: Spans, ids: list[int], offsets: list[tuple[int, int]]) -> Encoded:
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise RowFault("duplicate_bos", "the text begins with two beginning-of-text tokens")
        if self._bytes is None:
            _require_cover(text, offsets)
            label_spans = _overlapping(offsets, spans)
            for (first, last), (start, end) in zip(label_spans, spans, strict=True):
                _require_edges(text, start, end, offsets[first][0], offsets[last - 1][1])
        else:
            label_spans = _by_bytes(text, spans, [self._bytes[token] for token in ids])
        counted = _count_by_offsets(spans, offsets)
        labelled = sum(last - first for first, last in label_spans)
        if counted != labelled:
            raise RowFault("mask_disagreement", f"{labelled} labelled tokens by length, {counted} by offset")
        if all(last <= 1 for _, last in label_spans):
            # A label is predicted from the token before it, so the first token of a row never counts.
            raise RowFault("no_supervised_tokens", "no token behind the first is labelled")
        return Encoded(ids, label_spans)


def _by_bytes(text: str, spans: Spans, parts: list[bytes]) -> list[tuple[int, int]]:
    """Labelled tokens from the bytes of each token, which together must be the text's own."""
    encoded = text.encode("utf-8")
    if b"".join(parts) != encoded:
        raise _loss(text, parts)
    ends = list(accumulate(map(len, parts)))
    ascii_only = len(encoded) == len(text)
    out = []
    for start, end in spans:
        left, right = start, end
        if not ascii_only:
            left = len(text[:start].encode("utf-8"))
            right = left + len(text[start:end].encode("utf-8"))
        first, last = bisect_right(ends, left), bisect_left(ends, right) + 1
        if b"".join(parts[first:last]) != encoded[left:right]:
            raise RowFault("boundary_straddle", f"a token crosses an edge of {_excerpt(text, start, end)}")
        out.append((first, last))
    return out


def _count_by_offsets(spans: Spans, offsets: list[tuple[int, int]]) -> int:
    lefts, rights = [left for left, _ in offsets], [right for _, right in offsets]
    return sum(bisect_left(lefts, end) - bisect_right(rights, start) for start, end in spans)


def _loaded(source: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the longest of ``texts`` at the leftmost place; for none of them, one that never matches."""
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


def _bytes_by_id(
    tokenizer: tokenizers.Tokenizer, description: dict[str, Any], added: list[dict[str, Any]]
) -> list[bytes] | None:
    """The bytes of every id, or None when the tokenizer is not plainly byte-level."""
    decoder = description.get("decoder") or {}
    if decoder.get("type") != "ByteLevel" or description.get("normalizer") is not None:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    plain = {token["content"] for token in added}
    alphabet = _byte_alphabet()
    for piece, number in vocabulary.items():
        if piece in plain:
            table[number] = piece.encode("utf-8")
        elif all(char in alphabet for char in piece):
            table[number] = bytes(alphabet[char] for char in piece)
        else:
            return None
    return table


def _byte_alphabet() -> dict[str, int]:
    """The character by which byte-level vocabularies write each byte: itself if printable, else from U+0100 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(byte): byte for byte in printed} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _overlapping(offsets: list[tuple[int, int]], spans: Spans) -> list[tuple[int, int]]:
    out = []
    for start, end in spans:
        hits = [i for i, (left, right) in enumerate(offsets) if left < end and right > start and left < right]
        if not hits:
            raise RowFault("no_supervised_tokens", f"no token lies in characters {start} to {end}")
        if hits[-1] - hits[0] + 1 != len(hits):
            raise RowFault("mask_disagreement", f"the tokens of characters {start} to {end} are not in one run")
        out.append((hits[0], hits[-1] + 1))
    return out


def _require_edges(text: str, start: int, end: int, left: int, right: int) -> None:
    """Tokens of a span may leave out white space at its edges, which such tokenizers trim, and nothing else."""
    if left < start or right > end:
        raise RowFault("boundary_straddle", f"a token crosses an edge of {_excerpt(text, start, end)}")


def _require_cover(text: str, offsets: list[tuple[int, int]]) -> None:
    edges = [(0, 0), *offsets, (len(text), len(text))]
    for (_, right), (left, _) in pairwise(edges):
        lost = text[right:left].strip()
        if lost:
            raise RowFault("token_loss", f"character {_named(lost[0])} encodes to no token")


def _loss(text: str, parts: list[bytes]) -> RowFault:
    """Which character is missing: the first place where the text and the tokens' bytes part."""
    joined, encoded = b"".join(parts), text.encode("utf-8")
    at = next((i for i, (a, b) in enumerate(zip(joined, encoded, strict=False)) if a != b), len(joined))
    char = encoded[:at].decode("utf-8", "ignore")
    lost = text[len(char)] if len(char) < len(text) else "?"
    return RowFault("token_loss", f"character {_named(lost)} at {len(char)} encodes to no token")


def _named(char: str) -> str:
    return f"U+{ord(char):04X}"


def _excerpt(text: str, start: int, end: int) -> str:
    return repr(printable(text[start:end], limit=40))
