"""``training_data`` of a train receipt: which rows were trained on, and of which named data set they are."""

from __future__ import annotations

from typing import Any

from kiln_cli.identity import is_hash
from kiln_cli.receipts import IngestionReceipt
from kiln_stages.evidence.claims import compare

NAMED = "named_dataset"
# What an admission of a named data set says of it (``details.rows.provenance`` of its manifest).
_OF_DATASET = ("dataset", "split", "dataset_corpus_sha256", "split_manifest_sha256")


def training_data(ingestion: IngestionReceipt, provenance: dict[str, Any] | None) -> dict[str, Any]:
    """Source, locator and digest of the kept rows; of a named data set its identities too.

    ``provenance``: what admit_manifest.json says of where the rows come from. ``rows`` are the kept ones.
    """
    locator = ingestion.source_locator if isinstance(ingestion.source_locator, str) else None
    found = {"path": locator, "sha256": ingestion.kept_corpus_sha256, "source": ingestion.source}
    if ingestion.source != NAMED:
        return found
    return {
        **found,
        **(provenance or {}),
        "admitted_corpus_sha256": ingestion.kept_corpus_sha256,
        "rows": ingestion.rows_kept,
    }


def training_data_faults(found: dict[str, Any], ingestion: IngestionReceipt, admit: dict[str, Any]) -> str:
    """What contradicts the ingestion receipt or the ``[admit]`` settings, ``""`` where nothing does.

    That a named data set is the one that was admitted, admit_manifest.json tells (``verify-receipt``).
    """
    if ingestion.source != NAMED:
        return compare("training_data", found, training_data(ingestion, None))
    provenance = {name: found.get(name) for name in _OF_DATASET}
    provenance |= {"dataset": admit.get("dataset"), "split": admit.get("dataset_split")}
    expected = training_data(ingestion, provenance)
    expected["path"] = f"{provenance['dataset']}:{provenance['split']}"
    faults = [compare("training_data", found, expected)]
    faults.append(compare("data.sft_ingestion.source_locator", ingestion.source_locator, expected["path"]))
    faults += [f"training_data.{name} is no hash" for name in _OF_DATASET[2:] if not is_hash(found.get(name))]
    return "; ".join(filter(None, faults))
