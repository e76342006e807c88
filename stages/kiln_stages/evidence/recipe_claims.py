"""What a recipe's manifest says, against the receipts and models that lie beside it.

It binds steps to one another and to their evidence. Whether the evidence of a training holds is told by the claims of
its own receipt.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import NAME_PATTERN, hash_file
from kiln_cli.manifests import RECEIPT_NAME, parse_receipt
from kiln_cli.text import printable
from kiln_stages.evidence.claims import Claim, claim, compare, differ, require
from kiln_stages.exported_file import ExportedFile
from kiln_stages.recipes.record import (
    MANIFEST_NAME,
    RecipeManifest,
    StepRecord,
    merge_path,
    read_merge,
    read_recipe_manifest,
)


def read_manifest_of(out: Path) -> tuple[RecipeManifest | None, Claim]:
    """The manifest of a recipe's directory where it is sound, and the claim that it is."""
    name = f"{MANIFEST_NAME} is a recipe's manifest in canonical form, with its own content_sha256"
    try:
        manifest = read_recipe_manifest(out)
    except KilnError as error:
        return None, Claim(name, "fails", error.message)
    if manifest is None:
        return None, Claim(name, "not checkable here", f"{MANIFEST_NAME} is not here")
    strange = [step.name for step in manifest.steps if NAME_PATTERN.match(step.name) is None]
    if strange:
        return None, Claim(name, "fails", f"{printable(strange[0])!r} is no name of a step")
    return manifest, Claim(name, "holds")


def recipe_claims(out: Path, manifest: RecipeManifest) -> Iterator[Claim]:
    """The claims about each step, in order."""
    steps: dict[str, StepRecord] = {}
    for step in manifest.steps:
        if step.kind == "merge":
            yield claim(f"{step.name} is the model of step {printable(step.step)}", partial(_check_merge, step, steps))
            yield claim(f"{step.name}.merge.json says the same", partial(_check_record, out, step))
            for file in step.files:
                path = out / step.name / file.path
                yield claim(f"{step.name}/{printable(file.path)} has its digest", partial(_check_file, path, file))
        else:
            yield claim(f"{step.name} has the receipt and adapter of the manifest", partial(_check_receipt, out, step))
            if step.step is not None:
                name = f"{step.name} began with the adapter of step {printable(step.step)}"
                yield claim(name, partial(_check_base, out, step, steps))
        steps[step.name] = step


def _check_receipt(out: Path, step: StepRecord) -> str:
    receipt = parse_receipt(require(out / step.name / RECEIPT_NAME))
    output = receipt.adapters["output"] or {}
    return (
        differ("its content_sha256", receipt.content_digest(), step.receipt_content_sha256)
        or differ("its adapter", output.get("content_sha256"), step.adapter_content_sha256)
        or differ("its kind of training", receipt.hyperparameters.get("mode"), step.kind)
    )


def _check_base(out: Path, step: StepRecord, before: dict[str, StepRecord]) -> str:
    base = parse_receipt(require(out / step.name / RECEIPT_NAME)).adapters["base"] or {}
    made_by = before[str(step.step)]
    found = {
        "adapter": base.get("content_sha256"),
        "receipt": (base.get("receipt") or {}).get("content_sha256"),
    }
    expected = {"adapter": made_by.adapter_content_sha256, "receipt": made_by.receipt_content_sha256}
    return compare("base", found, expected)


def _check_merge(step: StepRecord, before: dict[str, StepRecord]) -> str:
    of = before[str(step.step)]
    return differ("the adapter", step.adapter_content_sha256, of.adapter_content_sha256) or differ(
        "the receipt", step.receipt_content_sha256, of.receipt_content_sha256
    )


def _check_record(out: Path, step: StepRecord) -> str:
    require(merge_path(out / step.name))
    record = msgspec.to_builtins(read_merge(out / step.name))
    expected = msgspec.to_builtins(step)
    return compare("record", record, {key: expected.get(key, record["schema"]) for key in record})


def _check_file(path: Path, file: ExportedFile) -> str:
    found = hash_file(require(path))
    return differ("sha256 and bytes", list(found), [file.sha256, file.bytes])
