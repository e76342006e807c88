"""The ingestion receipt: what is refused on read, and the checks in the contract's order (sft rows, 1.6)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kiln_cli.errors import KilnError
from kiln_cli.identity import corpus_sha256
from kiln_cli.manifests import document, read_ingestion
from kiln_cli.receipts import IngestionReceipt

A, B, C = ("sha256:" + digit * 64 for digit in "abc")
SOUND: dict[str, Any] = {
    "schema": "kiln.sft-ingestion.v1",
    "source": "dataset_path",
    "source_locator": "/data/corrections.jsonl",
    "invalid_row_policy": "skip",
    "rows_read": 4,
    "rows_kept": 2,
    "rows_rejected": 2,
    "kept_row_hashes": [A, A],
    "rejected_rows": [
        {"row_index": 2, "row_sha256": B, "reason": "empty_messages"},
        {"row_index": 4, "row_sha256": C, "reason": "invalid_json"},
    ],
    "kept_corpus_sha256": corpus_sha256([A, A]),
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**copy.deepcopy(SOUND), **fields}


def rejected(*rows: tuple[int, str]) -> list[dict[str, Any]]:
    return [{"row_index": index, "row_sha256": digest, "reason": "invalid_role"} for index, digest in rows]


def faults(value: dict[str, Any]) -> list[str]:
    return list(msgspec.convert(value, IngestionReceipt).faults())


def refused(value: dict[str, Any], tmp_path: Path) -> str:
    path = tmp_path / "sft_ingestion.json"
    path.write_bytes(document(value))
    with pytest.raises(KilnError) as caught:
        read_ingestion(path)
    assert caught.value.code == "KLN206"
    return caught.value.message


def test_a_sound_receipt_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sft_ingestion.json"
    path.write_bytes(document(SOUND))
    assert msgspec.to_builtins(read_ingestion(path)) == SOUND
    assert faults(SOUND) == []


# One after the other: what breaks a check, and what the receipt is told for it. All that follow are broken as well.
BROKEN = [
    ({"schema": "kiln.sft-ingestion.v2"}, "schema is 'kiln.sft-ingestion.v2'"),
    ({"source": "upload"}, "source is 'upload'"),
    ({"source_locator": " \t "}, "source_locator is blank"),
    ({"rows_read": 9}, "rows_read is 9, not"),
    ({"rows_kept": 0}, "no row is kept"),
    ({"rows_kept": 5}, "rows_kept is 5, and there are 2"),
    ({"rows_rejected": 7}, "rows_rejected is 7, and there are 3"),
    ({"kept_row_hashes": [A, A.upper()]}, "kept_row_hashes[1] is no hash"),
    ({"rejected_rows": rejected((2, B), (2, C), (9, "x"))}, "rejected_rows[1].row_index is 2, not in 3..5"),
    ({"rejected_rows": rejected((2, B), (3, C), (9, "x"))}, "rejected_rows[2].row_index is 9, not in 4..5"),
    ({"rejected_rows": rejected((2, B), (3, C), (5, "x"))}, "rejected_rows[2].row_sha256 is no hash"),
    ({"kept_corpus_sha256": "sha256:short"}, "kept_corpus_sha256 is no hash"),
    ({"kept_corpus_sha256": B}, f"kept_corpus_sha256 is {B}, the kept hashes give {corpus_sha256([A, A])}"),
]  # fmt: skip
# The same fields, sound together.
MENDED: dict[str, Any] = changed(rows_read=5, rows_rejected=3, rejected_rows=rejected((2, B), (3, C), (5, A)))


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_the_first_check_that_fails_is_told(number: int, tmp_path: Path) -> None:
    value = copy.deepcopy(MENDED)
    for fields, _ in reversed(BROKEN[number:]):
        value.update(copy.deepcopy(fields))
    if number > 3:
        value["rows_read"] = value["rows_kept"] + value["rows_rejected"]
    if number > 7:
        assert value["rows_read"] == 5
    text = BROKEN[number][1]
    assert faults(value)[0].startswith(text)
    if number:
        assert text in refused(value, tmp_path)
    else:  # the schema is looked at before anything else of a document is
        assert "schema is 'kiln.sft-ingestion.v2'" in refused(value, tmp_path)


def test_each_check_is_reached_by_a_receipt_that_breaks_it_alone() -> None:
    singles = [
        changed(schema="kiln.sft-ingestion.v2"),
        changed(source="Inline"),
        changed(source_locator=""),
        changed(rows_read=5),
        changed(
            rows_read=2, rows_kept=0, kept_row_hashes=[], kept_corpus_sha256=corpus_sha256([]),
            rejected_rows=rejected((1, A), (2, B)),
        ),
        changed(rows_kept=3, rows_read=5),
        changed(rows_rejected=3, rows_read=5),
        changed(rejected_rows=rejected((0, A), (2, B))),
        changed(rejected_rows=rejected((4, A), (2, B))),
        changed(rejected_rows=rejected((2, A), (5, B))),
        changed(rejected_rows=rejected((2, A), (4, "sha256:" + "A" * 64))),
        changed(kept_corpus_sha256=corpus_sha256([A])),
    ]  # fmt: skip
    for value in singles:
        assert len(faults(value)) == 1, value


def test_a_kept_hash_that_is_none_is_told_without_an_aggregate() -> None:
    assert faults(changed(kept_row_hashes=[A, "sha256:é"])) == ["kept_row_hashes[1] is no hash"]


@pytest.mark.parametrize("source", ["inline", "dataset_path", "named_dataset", "corrections", "recipe", "rust_api"])
def test_the_six_sources_are_valid_on_read(source: str) -> None:
    assert faults(changed(source=source)) == []


def test_a_receipt_may_lack_its_locator_and_nothing_else(tmp_path: Path) -> None:
    assert faults({key: value for key, value in SOUND.items() if key != "source_locator"}) == []
    for key in SOUND.keys() - {"source_locator"}:
        value = {other: SOUND[other] for other in SOUND if other != key}
        refused(value, tmp_path)


@pytest.mark.parametrize("value", [
    {**SOUND, "note": 1},
    {**SOUND, "ingestion": {}},
    changed(rejected_rows=[{"row_index": 2, "row_sha256": B, "reason": "invalid_json", "detail": "x"},
                           {"row_index": 4, "row_sha256": C, "reason": "invalid_json"}]),
])  # fmt: skip
def test_unknown_fields_are_refused_also_in_rejected_rows(value: dict[str, Any], tmp_path: Path) -> None:
    assert "unknown field" in refused(value, tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("invalid_row_policy", "Skip"),
        ("invalid_row_policy", "skip\n"),
        ("invalid_row_policy", ""),
        ("invalid_row_policy", True),
        ("invalid_row_policy", None),
        ("source_locator", None),
        ("rows_read", -4),
        ("rows_read", "4"),
        ("rows_read", True),
        ("rows_kept", 2.0),
        ("kept_row_hashes", None),
        ("rejected_rows", {}),
    ],
)
def test_values_of_another_type_are_refused(field: str, value: object, tmp_path: Path) -> None:
    assert f"$.{field}" in refused(changed(**{field: value}), tmp_path)


@pytest.mark.parametrize("reason", ["no_supervised_tokens", "", "Invalid_json", "invalid_json\n", None, 1])
def test_reasons_are_the_four(reason: object, tmp_path: Path) -> None:
    rows = [
        {"row_index": 2, "row_sha256": B, "reason": reason},
        {"row_index": 4, "row_sha256": C, "reason": "invalid_json"},
    ]
    assert "$.rejected_rows[0].reason" in refused(changed(rejected_rows=rows), tmp_path)


def test_that_reasons_fit_the_policy_is_not_asked() -> None:
    """Upstream does not ask whether ``fail`` has rejected rows; a receipt of its own must stay readable."""
    assert faults(changed(invalid_row_policy="fail")) == []


def test_the_identity_is_over_sorted_compact_json() -> None:
    import hashlib
    import json

    text = json.dumps(SOUND, sort_keys=True, separators=(",", ":"))
    receipt = msgspec.convert(SOUND, IngestionReceipt)
    assert receipt.identity() == "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    for field, value in {"invalid_row_policy": "fail", "rejected_rows": rejected((2, B), (4, A))}.items():
        assert msgspec.convert(changed(**{field: value}), IngestionReceipt).identity() != receipt.identity()
