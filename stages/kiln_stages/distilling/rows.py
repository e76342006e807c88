"""Scored rows on disk, ``admit/corpus.parquet`` of a distillation run: one Parquet row an example.

Columns: row_index, line (int64), row_sha256 (string), input_ids, action_targets (lists of int32), teacher_token_ids (a
list of ``top_k`` int32 a target), teacher_logprobs (the same in float32), observation_targets (list of int32),
observation_tokens (int64). A target is a position in ``input_ids``; the logits that predict it are those of the
position before, so 0 is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import AtomicFile
from kiln_cli.identity import Domain, domain_hasher, length_prefixed
from kiln_cli.text import printable
from kiln_stages.admitting.packed_numbers import (
    INT32_BYTES,
    cut_into_lists,
    flat_series,
    int32_lists,
    pack_float32,
    pack_int32,
    unpack_float32,
    unpack_int32,
)
from kiln_stages.admitting.parts_writer import PartsWriter

if TYPE_CHECKING:
    import polars as pl

SCORED_CORPUS_SCHEMA = "kiln.scored-corpus.v1"
COLUMNS = (
    "row_index",
    "line",
    "row_sha256",
    "input_ids",
    "action_targets",
    "teacher_token_ids",
    "teacher_logprobs",
    "observation_targets",
    "observation_tokens",
)


class ScoredRow(msgspec.Struct, frozen=True, kw_only=True):
    """One example ready to distil. n action targets, K candidates each.

    ``action_targets``: positions in ``input_ids`` of the tokens that the teacher scored, ascending, none 0;
    ``teacher_token_ids`` and ``teacher_logprobs`` [n, K]: its first K candidates there, best first, natural logarithms
    of probabilities over its whole vocabulary, rounded to float32. ``observation_targets``: positions whose
    cross-entropy ECHO sums, ascending; ``observation_tokens``: what ECHO divides by, all observation tokens before
    warnings are trimmed. ``row_sha256``: see :func:`row_identity`.
    """

    row_index: int
    line: int
    row_sha256: str
    input_ids: list[int]
    action_targets: list[int]
    teacher_token_ids: list[list[int]]
    teacher_logprobs: list[list[float]]
    observation_targets: list[int]
    observation_tokens: int


class PackedScoredRow(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A scored row on its way to disk, numbers as little-endian bytes of 32 bits each; [n, K] row after row."""

    row_index: int
    line: int
    row_sha256: str
    input_ids: bytes
    action_targets: bytes
    teacher_token_ids: bytes
    teacher_logprobs: bytes
    observation_targets: bytes
    observation_tokens: int

    @property
    def tokens(self) -> int:
        return len(self.input_ids) // INT32_BYTES

    @property
    def targets(self) -> int:
        return len(self.action_targets) // INT32_BYTES

    @property
    def top_k(self) -> int:
        return len(self.teacher_token_ids) // max(len(self.action_targets), 1)

    def with_identity(self, row_sha256: str) -> PackedScoredRow:
        return msgspec.structs.replace(self, row_sha256=row_sha256)

    def unpacked(self) -> ScoredRow:
        count = max(self.top_k, 1)
        ids, logprobs = unpack_int32(self.teacher_token_ids), unpack_float32(self.teacher_logprobs)
        return ScoredRow(
            row_index=self.row_index,
            line=self.line,
            row_sha256=self.row_sha256,
            input_ids=unpack_int32(self.input_ids),
            action_targets=unpack_int32(self.action_targets),
            teacher_token_ids=[ids[at : at + count] for at in range(0, len(ids), count)],
            teacher_logprobs=[logprobs[at : at + count] for at in range(0, len(logprobs), count)],
            observation_targets=unpack_int32(self.observation_targets),
            observation_tokens=self.observation_tokens,
        )


def pack(row: ScoredRow) -> PackedScoredRow:
    return PackedScoredRow(
        row_index=row.row_index,
        line=row.line,
        row_sha256=row.row_sha256,
        input_ids=pack_int32(row.input_ids),
        action_targets=pack_int32(row.action_targets),
        teacher_token_ids=pack_int32([number for ids in row.teacher_token_ids for number in ids]),
        teacher_logprobs=pack_float32([number for values in row.teacher_logprobs for number in values]),
        observation_targets=pack_int32(row.observation_targets),
        observation_tokens=row.observation_tokens,
    )


def spans(places: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open ranges of ascending places, as few as there can be."""
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


def row_identity(row: PackedScoredRow) -> str:
    """The identity of a scored row: all that is trained on, and nothing else.

    SHA-256 under ``kiln-cli.scored-row.v1`` of ``input_ids``, ``action_targets``, ``teacher_token_ids``,
    ``teacher_logprobs`` and ``observation_targets``, each as little-endian 32-bit numbers behind its length, then
    ``observation_tokens`` as u64 big-endian. Two rows that train alike share it, whatever their ``id``.
    """
    hasher = domain_hasher(Domain.SCORED_ROW)
    for part in (
        row.input_ids,
        row.action_targets,
        row.teacher_token_ids,
        row.teacher_logprobs,
        row.observation_targets,
    ):
        hasher.update(length_prefixed(part))
    hasher.update(row.observation_tokens.to_bytes(8, "big"))
    return "sha256:" + hasher.hexdigest()


class ScoredCorpusDigest:
    """The identity of a scored corpus: the identities of its rows in order, each text behind its length."""

    def __init__(self) -> None:
        self._hasher = domain_hasher(Domain.SCORED_CORPUS)

    def update(self, row_sha256: str) -> None:
        self._hasher.update(length_prefixed(row_sha256.encode("ascii")))

    def text(self) -> str:
        return "sha256:" + self._hasher.hexdigest()


def scored_sha256(path: Path) -> str:
    """The identity of a scored corpus on disk. Raises KilnError KLN206 as :class:`ScoredRows` does."""
    digest = ScoredCorpusDigest()
    for row in ScoredRows(path):
        digest.update(row.row_sha256)
    return digest.text()


class ScoredWriter(PartsWriter[PackedScoredRow]):
    """Writes scored rows one by one in bounded memory; afterwards ``file`` describes the corpus."""

    part_rows = 1024
    part_bytes = 8 * 1024 * 1024
    group_rows = 32  # a row of 2,048 targets weighs half a megabyte

    def weight(self, row: PackedScoredRow) -> int:
        return len(row.teacher_token_ids) + len(row.teacher_logprobs) + len(row.input_ids)

    def frame(self, rows: Sequence[PackedScoredRow]) -> pl.DataFrame:
        import polars as pl

        counts = [row.targets for row in rows]
        columns = {
            "row_index": [row.row_index for row in rows],
            "line": [row.line for row in rows],
            "row_sha256": [row.row_sha256 for row in rows],
            "input_ids": int32_lists([row.input_ids for row in rows]),
            "action_targets": int32_lists([row.action_targets for row in rows]),
            "teacher_token_ids": _matrices([row.teacher_token_ids for row in rows], counts, pl.Int32()),
            "teacher_logprobs": _matrices([row.teacher_logprobs for row in rows], counts, pl.Float32()),
            "observation_targets": int32_lists([row.observation_targets for row in rows]),
            "observation_tokens": [row.observation_tokens for row in rows],
        }
        return pl.DataFrame(columns, schema=_schema())


def write_scored(path: Path, rows: Iterable[ScoredRow]) -> AtomicFile:
    """Writes rows that are all at hand."""
    with ScoredWriter(path) as writer:
        for row in rows:
            writer.write(pack(row))
    assert writer.file is not None
    return writer.file


class ScoredRows(Sequence[ScoredRow]):
    """The rows of a scored corpus by number, read as they are asked for: what is held is one row group.

    Raises KilnError KLN204 where the file is missing, and KLN206 where it is no scored corpus; a row whose identity
    is not what its numbers give, or whose lists do not fit each other, is KLN206 when it is read.
    """

    def __init__(self, path: Path) -> None:
        import polars as pl

        if not path.is_file():
            raise KilnError("KLN204", f"{printable(path)} does not exist", hint="run `kiln admit` again")
        self._path = path
        try:
            self._frame = pl.scan_parquet(path)
            schema = dict(self._frame.collect_schema())
            self._count = int(self._frame.select(pl.len()).collect().item())
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _no_corpus(path, str(error)) from None
        if schema != _schema():
            raise _no_corpus(path, f"its columns are {schema}")
        self._group = -1
        self._rows: list[ScoredRow] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(self._count))]
        number = at + self._count if at < 0 else at
        if not 0 <= number < self._count:
            raise IndexError(at)
        group, place = divmod(number, ScoredWriter.group_rows)
        if group != self._group:
            self._rows, self._group = self._read(group), group
        return self._rows[place]

    def __iter__(self) -> Iterator[ScoredRow]:
        return (self[number] for number in range(self._count))

    def _read(self, group: int) -> list[ScoredRow]:
        import polars as pl

        size = ScoredWriter.group_rows
        try:
            frame = self._frame.slice(group * size, size).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise _no_corpus(self._path, str(error)) from None
        return [self._row(columns) for columns in frame.iter_rows(named=True)]

    def _row(self, columns: dict[str, Any]) -> ScoredRow:
        try:
            row = msgspec.convert(columns, ScoredRow)
            fault = _fault(row)
        except msgspec.ValidationError as error:
            raise _no_corpus(self._path, f"row {columns['row_index']}: {error}") from None
        if fault is not None:
            raise _no_corpus(self._path, f"row {row.row_index} ({printable(row.row_sha256)}): {fault}")
        return row


def _fault(row: ScoredRow) -> str | None:
    """What contradicts what in a row, if anything does."""
    targets, count = row.action_targets, len(row.input_ids)
    if not len(targets) == len(row.teacher_token_ids) == len(row.teacher_logprobs):
        return (
            f"{len(targets)} targets, {len(row.teacher_token_ids)} lists of ids, {len(row.teacher_logprobs)} of scores"
        )
    for name, places in (("action_targets", targets), ("observation_targets", row.observation_targets)):
        if any(left >= right for left, right in zip([0, *places], [*places, count], strict=True)):
            return f"{name} are no ascending positions in 1..{count - 1}"
    sizes = {len(items) for lists in (row.teacher_token_ids, row.teacher_logprobs) for items in lists}
    if len(sizes) > 1:
        return f"targets have {sorted(sizes)} candidates"
    if (found := row_identity(pack(row))) != row.row_sha256:
        return f"its numbers give {found}"
    return None


def _matrices(parts: list[bytes], counts: list[int], dtype: pl.DataType) -> pl.Series:
    """A column of lists of lists: of each part ``counts`` lists of one length, the same in all parts."""
    import polars as pl

    if not any(parts):
        return pl.Series([[] for _ in parts], dtype=pl.List(pl.List(dtype)))
    flat = flat_series(parts, dtype)
    return cut_into_lists(flat.reshape((sum(counts), -1)).arr.to_list(), counts)


def _schema() -> dict[str, Any]:
    import polars as pl

    numbers, tokens = pl.Int64(), pl.List(pl.Int32())
    ids, logprobs = pl.List(pl.List(pl.Int32())), pl.List(pl.List(pl.Float32()))
    types = (numbers, numbers, pl.String(), tokens, tokens, ids, logprobs, tokens, numbers)
    return dict(zip(COLUMNS, types, strict=True))


def _no_corpus(path: Path, why: str) -> KilnError:
    message = f"{printable(path)} is no scored corpus: {printable(why)}"
    return KilnError("KLN206", message, hint="run `kiln admit` again")
