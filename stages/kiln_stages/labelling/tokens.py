"""From rendered text to token ids and labelled tokens, with the proof that the labels are the spans.

A token is labelled when its characters overlap a trained span. For byte-level and SentencePiece-like tokenizers every
id stands for a fixed run of bytes (``token_bytes``), so the bytes of the ids, joined, must be the text: that finds
characters that no token holds, and the running length gives each token's place without the tokenizer's word for it.
A second method must agree: the tokenizer's own decoder must make the span's text of the labelled ids, or, where ids
alone do not tell, the tokenizer's own offsets must name the same tokens. (Offsets cost a third of the encoding.) For
tokenizers without such bytes the offsets alone are used, and must cover the text.

Row text must never become a control token: ``<|im_start|>`` in a question would open a turn. Where row text holds the
text of one, the text is cut at the template's own control tokens and each stretch between them is encoded with control
tokens switched off, so the forged one comes out as ordinary tokens. Control tokens are those that the tokenizer marks
as special, those that its settings name (``eos_token``), and the markers that the template prints, however they are
marked.
"""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol

import msgspec
import tokenizers

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.text import printable
from kiln_stages.labelling.shared_head import SharedHead
from kiln_stages.labelling.strings import any_of
from kiln_stages.labelling.token_bytes import TokenBytes, token_bytes

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


class Encoded(msgspec.Struct, frozen=True):
    """Token ids, and the labelled tokens as index ranges with an exclusive end, in order and disjoint."""

    input_ids: list[int]
    label_spans: list[tuple[int, int]]


class RowTokenizer:
    """The text of a ``tokenizer.json``, for rendered rows. It adds no token: what the template prints is encoded.

    Raises KilnError KLN302 where the text describes no tokenizer.
    """

    def __init__(self, tokenizer_json: str, bos_token: str | None = None, special_texts: Iterable[str] = ()) -> None:
        try:
            self._tokenizer = _loaded(tokenizer_json)
            description = json.loads(tokenizer_json)
            added = [token for token in description.get("added_tokens") or [] if token["content"]]
            unmarked = [token for token in added if token["content"] in set(special_texts) and not token["special"]]
            for token in unmarked:
                token["special"] = True
            self._with_marked = json.dumps(description) if unmarked else tokenizer_json
        except Exception as error:  # the tokenizers library raises bare Exception for a damaged description
            raise KilnError(
                "KLN302",
                f"tokenizer.json describes no tokenizer: {printable(error)}",
                hint="restore the model directory; for the default model run `python fixtures/fetch_model.py`",
            ) from error
        control = {token["content"]: int(token["id"]) for token in added if token["special"]}
        self._control_ids = frozenset(control.values())
        self._control = any_of(control)
        self._bos = None if bos_token is None else self._tokenizer.token_to_id(bos_token)
        self._bytes = token_bytes(self._tokenizer, description)
        self._ids_tell = self._bytes is not None and self._bytes.ids_tell and self._decodes(added)
        self._head = SharedHead(self._tokenizer, self._control, [token["content"] for token in added])

    @functools.cached_property
    def _without_control(self) -> tokenizers.Tokenizer:
        """The tokenizer that takes the texts of control tokens as any other; made for the first row that needs it."""
        tokenizer = _loaded(self._with_marked)
        tokenizer.encode_special_tokens = True
        return tokenizer

    @property
    def has_token_bytes(self) -> bool:
        """Whether every id stands for a fixed run of bytes."""
        return self._bytes is not None

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return self._control_ids

    def control_texts(self, text: str) -> list[tuple[int, int]]:
        """Where ``text`` holds the text of a control token, forged or not."""
        return [match.span() for match in self._control.finditer(text)]

    def pieces(self, text: str) -> list[str]:
        """The tokens of a text by itself, as the vocabulary writes them."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).tokens)

    def encode(self, text: str, spans: Spans, content_spans: Spans = (), control: Control = "text") -> Encoded:
        """Ids and labelled tokens of ``text``.

        Raises RowFault: ``control_token_in_content`` (row text holds a control token's text, and ``control`` is
        ``"reject"`` or the tokenizer cannot take it as text), ``token_loss`` (a character no token holds),
        ``boundary_straddle`` (a token crosses the edge of a span), ``duplicate_bos``, ``no_supervised_tokens``,
        ``mask_disagreement`` (the two ways to find labelled tokens differ, or a label is the beginning-of-text token).
        """
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        told = self._by_decoding(text, spans, content_spans, whole.ids)
        return told or self._labelled(text, spans, content_spans, *self._placed(text, content_spans, whole, control))

    def encode_touching(
        self, text: str, spans: Spans, content_spans: Spans, touched: Spans, control: Control = "text"
    ) -> tuple[Encoded, list[tuple[int, int]]]:
        """As :meth:`encode`, and for each of the spans ``touched`` the run of tokens that hold any byte of it."""
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = self._placed(text, content_spans, whole, control)
        encoded = self._labelled(text, spans, content_spans, ids, offsets)
        parts = self._bytes.parts(text, ids, offsets) if self._bytes is not None else []
        if b"".join(parts) != text.encode("utf-8"):
            return encoded, _ranges_by_offsets(touched, offsets)
        ends = list(accumulate(map(len, parts)))
        edges = [tuple(len(text[:at].encode("utf-8")) for at in span) for span in touched]
        # From the first token that ends behind the start of a span to the last that begins before its end.
        return encoded, [(bisect_right(ends, start), bisect_left(ends, end) + 1) for start, end in edges]

    def encode_batch(self, rows: Sequence[RenderedText], control: Control = "text") -> list[Encoded | RowFault]:
        """As :meth:`encode`, for many rows at once; a row that fails gives its fault in its place."""
        texts = [row.text for row in rows]
        if not self._ids_tell:
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
            return [self._by_both(row, whole, control) for row, whole in zip(rows, encodings, strict=True)]
        head, ids = self._head.of(texts)
        rests = [text[len(head) :] for text in texts]
        encodings = self._tokenizer.encode_batch_fast(rests, add_special_tokens=False)  # sets no offsets
        return [self._by_ids(row, ids + rest.ids, control) for row, rest in zip(rows, encodings, strict=True)]

    def _by_both(self, row: RenderedText, whole: tokenizers.Encoding, control: Control) -> Encoded | RowFault:
        text, spans, content_spans = row.text, row.spans, row.content_spans
        try:
            return self._labelled(text, spans, content_spans, *self._placed(text, content_spans, whole, control))
        except RowFault as fault:
            return fault

    def _by_ids(self, row: RenderedText, ids: list[int], control: Control) -> Encoded | RowFault:
        text, spans, content_spans = row.text, row.spans, row.content_spans
        try:
            told = self._by_decoding(text, spans, content_spans, ids)
            return told or self.encode(text, spans, content_spans, control)
        except RowFault as fault:
            return fault

    def _by_decoding(self, text: str, spans: Spans, content_spans: Spans, ids: list[int]) -> Encoded | None:
        """Labels by the lengths of ids, held against the tokenizer's own decoder; None where offsets must be asked.

        Raises RowFault ``mask_disagreement`` where the labelled ids do not decode to their spans.
        """
        table = self._bytes if self._ids_tell else None
        if table is None or self._forged(text, content_spans) or table.normal_form(text) != text:
            return None
        try:
            self._require_one_beginning(ids)
            label_spans = _by_bytes(text, spans, table.parts(text, ids, ()))
            encoded = self._supervised(ids, label_spans)
        except RowFault:
            return None  # where offsets are at hand the reason is found
        for (first, last), (start, end) in zip(label_spans, spans, strict=True):
            told = self._tokenizer.decode(ids[first:last], skip_special_tokens=False)
            if told != text[start:end]:
                detail = f"labelled tokens decode to {_quoted(told)}, the trained text is {_quoted(text[start:end])}"
                raise RowFault("mask_disagreement", detail)
        return encoded

    def _decodes(self, added: list[dict[str, Any]]) -> bool:
        """Whether the decoder gives every added token back; one of letters like ``é`` may be taken for bytes."""
        decode = self._tokenizer.decode
        return all(decode([int(token["id"])], skip_special_tokens=False) == token["content"] for token in added)

    def trace(self, text: str, content_spans: Spans = (), control: Control = "text") -> tuple[list[int], list[str]]:
        """The ids of ``text`` as :meth:`encode` makes them, and the text of each; joined, the texts are ``text``.

        A character that several tokens share is the first one's; one that no token holds goes with a neighbour, and is
        lost where the text has no token at all.
        Raises RowFault ``control_token_in_content``.
        """
        whole = self._tokenizer.encode(text, add_special_tokens=False)
        ids, offsets = self._placed(text, content_spans, whole, control)
        parts = self._bytes.parts(text, ids, offsets) if self._bytes is not None else []
        ends = _ends_by_bytes(text, parts) if b"".join(parts) == text.encode("utf-8") else _ends_by_offsets(offsets)
        edges = [0, *ends[:-1], len(text)] if ends else []
        return ids, [text[start:end] for start, end in pairwise(edges)]

    def _placed(
        self, text: str, content_spans: Spans, whole: tokenizers.Encoding, control: Control
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a text in which no forged control token is one."""
        forged = self._forged(text, content_spans)
        if not forged:
            return whole.ids, whole.offsets
        if control == "reject":
            name = printable(forged[0].group())
            raise RowFault("control_token_in_content", f"row text holds the control token {name}")
        return self._without_forged(text, forged, whole.ids, whole.offsets)

    def _forged(self, text: str, content_spans: Spans) -> list[re.Match[str]]:
        """Control-token texts that row text is part of."""
        starts = [start for start, _ in content_spans]
        forged = []
        for match in self._control.finditer(text) if content_spans else ():
            at = bisect_left(starts, match.end()) - 1  # the last span that begins before the match ends
            if at >= 0 and content_spans[at][1] > match.start():
                forged.append(match)
        return forged

    def _without_forged(
        self, text: str, forged: list[re.Match[str]], ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids and offsets of a text whose stretches between real control tokens are encoded as plain text.

        The same cuts with control tokens on must give the ids of the whole text, or cutting itself changes ids.
        """
        starts = [match.start() for match in forged]
        real = [
            (left, right, number)
            for number, (left, right) in zip(ids, offsets, strict=True)
            if number in self._control_ids and bisect_left(starts, left) == bisect_left(starts, right)
        ]
        plain: list[int] = []
        places: list[tuple[int, int]] = []
        again: list[int] = []
        position = 0
        for left, right, number in [*real, (len(text), len(text), None)]:
            stretch = text[position:left]
            again += self._tokenizer.encode(stretch, add_special_tokens=False).ids
            part = self._without_control.encode(stretch, add_special_tokens=False)
            plain += part.ids
            places += [(start + position, end + position) for start, end in part.offsets]
            if number is not None:
                again.append(number)
                plain.append(number)
                places.append((left, right))
            position = right
        kept = [number for number in plain if number in self._control_ids]
        if self._bytes is None or again != ids or kept != [number for _, _, number in real]:
            name = printable(forged[0].group())
            raise RowFault(
                "control_token_in_content", f"row text holds {name}, which this tokenizer cannot take as plain text"
            )
        return plain, places

    def _labelled(
        self, text: str, spans: Spans, content_spans: Spans, ids: list[int], offsets: list[tuple[int, int]]
    ) -> Encoded:
        self._require_one_beginning(ids)
        if self._bytes is None:
            _require_cover(text, offsets)
            label_spans = _by_offsets(text, spans, offsets)
        else:
            label_spans = _by_token_bytes(self._bytes, text, spans, content_spans, ids, offsets)
        told = _ranges_by_offsets(spans, offsets)
        if told != label_spans:
            raise RowFault("mask_disagreement", f"labelled tokens are {label_spans} by length, {told} by offset")
        return self._supervised(ids, label_spans)

    def _require_one_beginning(self, ids: list[int]) -> None:
        if self._bos is not None and ids[:2] == [self._bos, self._bos]:
            raise RowFault("duplicate_bos", "the text begins with two beginning-of-text tokens")

    def _supervised(self, ids: list[int], label_spans: list[tuple[int, int]]) -> Encoded:
        if self._bos is not None and any(self._bos in ids[first:last] for first, last in label_spans):
            raise RowFault("mask_disagreement", "the beginning-of-text token is among the labelled tokens")
        if all(last <= 1 for _, last in label_spans):
            # A label is predicted from the token before it, so the first token of a row never counts.
            raise RowFault("no_supervised_tokens", "no token behind the first is labelled")
        return Encoded(ids, label_spans)


def _by_token_bytes(
    table: TokenBytes, text: str, spans: Spans, content_spans: Spans, ids: list[int], offsets: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    parts, read = table.parts(text, ids, offsets), table.normal_form(text)
    if read == text:
        try:
            return _by_bytes(text, spans, parts)
        except RowFault as fault:
            if fault.reason != "boundary_straddle" or not table.drops_first_space:
                raise
        return _by_bytes(text, _with_first_spaces(text, spans, content_spans, parts), parts)
    # The tokenizer composes accents: its tokens hold that form of the text, and offsets say where in the text.
    if b"".join(parts) != read.encode("utf-8"):
        raise _loss(read, parts)
    return _by_offsets(text, spans, offsets)


def _with_first_spaces(text: str, spans: Spans, content_spans: Spans, parts: list[bytes]) -> list[tuple[int, int]]:
    """Spans that no token edge fits, with the one space of the template's before them.

    Such a tokenizer spells that space with the word behind it, and decodes the word without it.
    """
    out = []
    for start, end in spans:
        try:
            _by_bytes(text, [(start, end)], parts)
        except RowFault:
            given = any(left < start <= right for left, right in content_spans)
            start -= text[start - 1 : start] == " " and not given
        out.append((start, end))
    return out


def _by_offsets(text: str, spans: Spans, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    label_spans = _overlapping(offsets, spans)
    for (first, last), (start, end) in zip(label_spans, spans, strict=True):
        _require_edges(text, start, end, offsets[first][0], offsets[last - 1][1])
    return label_spans


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
        while first and not parts[first - 1]:
            first -= 1  # a space that the tokenizer put before the text is written with the text
        if (ends[first - 1] if first else 0) != left or ends[last - 1] != right:
            early = ends[first] - len(parts[first]) < left
            crossing = parts[first if early else last - 1].decode("utf-8", "replace")
            raise _straddle(crossing, "start" if early else "end", text[start:end])
        out.append((first, last))
    return out


def _ends_by_bytes(text: str, parts: list[bytes]) -> list[int]:
    """Where the characters of each token end; a character is the token's that holds its first byte."""
    if text.isascii():
        return list(accumulate(map(len, parts)))
    starts = list(accumulate((len(char.encode("utf-8")) for char in text), initial=0))[:-1]
    return [bisect_left(starts, end) for end in accumulate(map(len, parts))]


def _ends_by_offsets(offsets: list[tuple[int, int]]) -> list[int]:
    return list(accumulate((right for _, right in offsets), max))


def _ranges_by_offsets(spans: Spans, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The tokens that overlap each span by the tokenizer's word, as index ranges."""
    lefts, rights = [left for left, _ in offsets], [right for _, right in offsets]
    return [(bisect_right(rights, start), bisect_left(lefts, end)) for start, end in spans]


def _loaded(source: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer.from_str(source)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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
        crossing = text[left : start + 1] if left < start else text[end - 1 : right]
        raise _straddle(crossing, "start" if left < start else "end", text[start:end])


def _straddle(crossing: str, edge: str, trained: str) -> RowFault:
    detail = f"the token {_quoted(crossing)} crosses the {edge} of the trained text {_quoted(trained)}"
    return RowFault("boundary_straddle", detail)


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


def _quoted(text: str) -> str:
    return repr(printable(text, limit=40))
