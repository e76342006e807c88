"""The card of an export: what it says is the evidence's, and foreign text in it is text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kiln_stages.evidence.dataset_card import Split, dataset_card
from syrupy.assertion import SnapshotAssertion

from kiln_cli.identity import corpus_sha256
from kiln_cli.plugins import LoadedPlugin
from kiln_cli.receipts import FileRef, IngestionReceipt, ManifestRef, RejectedRow
from kiln_cli.stage_manifests import AdmitDetails, AdmitManifest, RowsRead, TemplateUsed, ToolsShown


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


def receipt(locator: str, kept: int, refused: int) -> IngestionReceipt:
    hashes = [digest("a")] * kept
    return IngestionReceipt(
        source="dataset_path",
        source_locator=locator,
        invalid_row_policy="skip",
        rows_read=kept + refused,
        rows_kept=kept,
        rows_rejected=refused,
        kept_row_hashes=hashes,
        rejected_rows=[
            RejectedRow(row_index=kept + number + 1, row_sha256=digest("b"), reason="tokenization_error")
            for number in range(refused)
        ],
        kept_corpus_sha256=corpus_sha256(hashes),
    )


def counts(split: IngestionReceipt, **reasons: int) -> dict[str, Any]:
    return {
        "rows_read": split.rows_read,
        "rows_kept": split.rows_kept,
        "rows_rejected": split.rows_rejected,
        "reasons": {"invalid_json": 0, "over_length": 0, **reasons},
        "tokens": 1200 * split.rows_kept,
        "supervised_tokens": 500 * split.rows_kept,
        "longest_row": 1500,
        "ignored_fields": {"id|<b>`x`": 2},
        "template_notes": {},
    }


def evidence(locator: str = "chats.jsonl", kept: int = 3) -> tuple[AdmitManifest, list[Split]]:
    corpus, held_out = receipt(locator, kept, 2), receipt("held.jsonl", 1, 0)
    manifest = AdmitManifest(
        stage="admit",
        kiln_version="0.1.0",
        plugins=[LoadedPlugin(distribution="kiln-toolkit", version="0.1.0", sources=[], templates=[], losses=[],
                              drop_reasons=[])],
        config_sha256=digest("c"),
        previous=ManifestRef(path="data_manifest.json", content_sha256=digest("d")),
        inputs=[],
        outputs=[],
        counts={"corpus": counts(corpus, over_length=1, mask_disagreement=1), "heldout": counts(held_out)},
        details=AdmitDetails(
            config_sections=["model", "admit"],
            rows=RowsRead(origin="prepared", shape=None, packing="lines", elements=False),
            admitted_sha256={"corpus": digest("e"), "heldout": digest("f")},
            system_turn="keep",
            max_tokens=2048,
            template=TemplateUsed(name="my template.jinja", sha256=digest("1")),
            tokenizer={"tokenizer.json": "2" * 64},
            tools=ToolsShown(mode="system", prompt="kiln-cli.tool-prompt.v1", prompt_sha256=digest("3")),
        ),
        content_sha256=digest("4"),
    )  # fmt: skip
    files = [
        FileRef(path=f"admit/{name}.parquet", base="run", kind=name, sha256=letter * 64, bytes=12345, rows=rows)
        for name, letter, rows in (("corpus", "5", kept), ("heldout", "6", 1))
    ]
    return manifest, [
        Split("train", "corpus", "data/train-00000-of-00001.parquet", files[0], corpus),
        Split("validation", "heldout", "data/validation-00000-of-00001.parquet", files[1], held_out),
    ]


def card(*arguments: Any) -> str:
    return dataset_card(*evidence(*arguments)).decode("utf-8")


def test_the_card(snapshot: SnapshotAssertion) -> None:
    assert card() == snapshot


def test_the_card_of_rows_that_were_not_prepared_and_have_no_held_out_split(snapshot: SnapshotAssertion) -> None:
    manifest, splits = evidence()
    manifest.previous = None
    tools = ToolsShown(mode="native", prompt=None, prompt_sha256=None)
    manifest.details = msgspec.structs.replace(manifest.details, max_tokens=None, tools=tools)
    manifest.counts["corpus"]["ignored_fields"] = {}
    assert dataset_card(manifest, splits[:1]).decode("utf-8") == snapshot


@pytest.mark.parametrize(
    ("locator", "shown"),
    [
        ("chats.jsonl", "`chats.jsonl`"),
        ("../data/chats.jsonl", "`../data/chats.jsonl`"),
        ("/home/someone/secret project/chats.jsonl", "`chats.jsonl`"),
        ("a`b|<script>\n.jsonl", "`a'b\\|<script>\\n.jsonl`"),
    ],
)
def test_locators_are_text_without_directories_of_the_machine(locator: str, shown: str) -> None:
    text = card(locator)
    assert f"| source | {shown} |" in text
    assert "someone" not in text and "secret" not in text


def test_every_table_row_has_the_cells_of_its_head() -> None:
    width = 0
    for line in card("a|b.jsonl").splitlines():
        cells = line.replace("\\|", "").count("|")
        width = 0 if not cells else width or cells
        assert cells == width, line


@pytest.mark.parametrize(
    ("kept", "size"),
    [(1, "n<1K"), (998, "n<1K"), (999, "1K<n<10K"), (9_999, "10K<n<100K"), (99_999, "100K<n<1M"), (10**6, "1M<n<10M")],
)
def test_the_size_is_the_hubs_name_for_all_rows_of_all_splits(kept: int, size: str) -> None:
    """One row is held out: 999 rows of train are a thousand in all."""
    manifest, splits = evidence()
    first = splits[0]._replace(receipt=msgspec.structs.replace(splits[0].receipt, rows_kept=kept))
    text = dataset_card(manifest, [first, splits[1]]).decode("utf-8")
    assert f"size_categories:\n- {size}\n" in text
