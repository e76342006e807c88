"""Which correction each row of an admission came from: held to the receipt, row by row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kiln_stages.correcting.admitted import ADMITTED, admitted_corrections, require_admitted

from kiln_cli import KilnError
from kiln_cli.identity import canonical_parsed
from kiln_cli.receipts import IngestionReceipt, RejectedRow

ONE, TWO, BAD = (f"sha256:{digit * 64}" for digit in "123")
RECEIPT = IngestionReceipt(
    source="corrections",
    invalid_row_policy="skip",
    rows_read=3,
    rows_kept=2,
    rows_rejected=1,
    kept_row_hashes=[ONE, TWO],
    rejected_rows=[RejectedRow(row_index=2, row_sha256=BAD, reason="tokenization_error")],
    kept_corpus_sha256=ONE,
)
Lines = list[bytes]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = admitted_corrections(["r1", "r2", "r3"], RECEIPT)
    (tmp_path / ADMITTED).parent.mkdir()
    (tmp_path / ADMITTED).write_bytes(b"".join(canonical_parsed(row) + b"\n" for row in rows))
    return tmp_path


def test_each_row_has_its_hash(run: Path) -> None:
    found = require_admitted(run, RECEIPT)
    assert [(row.request_id, row.row_sha256, row.kept) for row in found] == [
        ("r1", ONE, True),
        ("r2", BAD, False),
        ("r3", TWO, True),
    ]


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda lines: [*lines, lines[-1]], id="one more"),
        pytest.param(lambda lines: [*lines, *lines], id="many more"),
        pytest.param(lambda lines: lines[:-1], id="one less"),
        pytest.param(lambda lines: [], id="none"),
        pytest.param(lambda lines: lines[::-1], id="another order"),
        pytest.param(
            lambda lines: [lines[0], lines[1].replace(b"false", b"true"), lines[2]], id="a rejected one as kept"
        ),
        pytest.param(lambda lines: [lines[0].replace(b"1" * 64, b"2" * 64), *lines[1:]], id="another hash"),
    ],
)
def test_other_rows_than_the_receipts_are_refused(run: Path, forge: Callable[[Lines], Lines]) -> None:
    path = run / ADMITTED
    path.write_bytes(b"".join(forge(path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(KilnError, match="has other rows than the ingestion receipt") as refused:
        require_admitted(run, RECEIPT)
    assert refused.value.code == "KLN207"
