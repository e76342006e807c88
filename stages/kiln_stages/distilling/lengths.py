"""How many tokens of each sort the rows of a scored corpus have, read without their numbers."""

from __future__ import annotations

from pathlib import Path

from kiln_cli.errors import KilnError
from kiln_cli.files import open_input
from kiln_cli.text import printable
from kiln_stages.evidence.distillation import RowLengths

LISTS = ("input_ids", "action_targets", "observation_targets")


def read_lengths(path: Path) -> list[RowLengths]:
    """The rows in order. Raises KilnError KLN206 where the file is no scored corpus."""
    import polars as pl

    with open_input(path) as stream:
        try:
            frame = pl.read_parquet(
                stream,
                columns=["row_sha256", "input_ids", "action_targets", "observation_targets", "observation_tokens"],
            ).select(
                "row_sha256",
                *(
                    pl.col(name).list.len().cast(pl.Int64)
                    for name in ("input_ids", "action_targets", "observation_targets")
                ),
                "observation_tokens",
            )
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise KilnError(
                "KLN206",
                f"{printable(path)} is no scored corpus: {printable(error)}",
                hint="run `kiln admit` again",
            ) from None
    return [RowLengths(*row) for row in frame.iter_rows()]
