"""Lists of 32-bit numbers as bytes, little-endian: a row goes through several hands, and lists are slow to hand on."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars as pl

INT32_BYTES = 4
FLOAT32_BYTES = 4


def pack_int32(numbers: Sequence[int]) -> bytes:
    return _to_bytes(array("i", numbers))


def unpack_int32(data: bytes) -> list[int]:
    values = array("i", data)
    _order(values)
    return values.tolist()


def pack_float32(numbers: Sequence[float]) -> bytes:
    """Each number rounded to the nearest float32."""
    return _to_bytes(array("f", numbers))


def unpack_float32(data: bytes) -> list[float]:
    values = array("f", data)
    _order(values)
    return values.tolist()


def int32_lists(parts: list[bytes]) -> pl.Series:
    """A column of lists of int32 from their bytes: one long list, cut. Far cheaper than list by list."""
    import polars as pl

    if not any(parts):
        return pl.Series([[] for _ in parts], dtype=pl.List(pl.Int32))
    return cut_into_lists(flat_series(parts, pl.Int32()), [len(part) // INT32_BYTES for part in parts])


def flat_series(parts: list[bytes], dtype: pl.DataType) -> pl.Series:
    """All numbers of ``parts``, which hold at least one, as one series of a 32-bit type."""
    import polars as pl

    data = b"".join(parts)
    length = len(data) // INT32_BYTES
    whole = pl.Series([data]).bin.reinterpret(dtype=pl.Array(dtype, length), endianness="little")
    return whole.explode()


def cut_into_lists(values: pl.Series, lengths: list[int]) -> pl.Series:
    """``values`` cut into consecutive lists of these lengths, which add up to its own."""
    import polars as pl

    sizes = pl.Series("length", lengths, dtype=pl.Int64)
    places = pl.DataFrame([(sizes.cum_sum() - sizes).alias("start"), sizes])
    whole = pl.lit(values.implode())
    return places.select(whole.list.slice("start", "length").alias("values")).to_series()


def _to_bytes(values: array[int] | array[float]) -> bytes:
    _order(values)
    return values.tobytes()


def _order(values: array[int] | array[float]) -> None:
    """From this machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        values.byteswap()
