"""``kiln report``: one run on one page: rows, tokens, losses, speed, the verdict, and how to use the adapter."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kiln_cli.errors import KilnError
from kiln_cli.manifests import (
    RECEIPT_NAME,
    nonzero,
    read_document,
    read_manifest,
    read_successful_receipt,
    require_unchanged,
)
from kiln_cli.receipts import DROP_SUMMARY_SCHEMA, DropSummary, TrainReceipt
from kiln_cli.stage_manifests import DROP_SUMMARY, AdmitManifest, PrepareManifest
from kiln_cli.terminal import table, terminal
from kiln_cli.text import printable
from kiln_stages import verify_receipt
from kiln_stages.training.loss_curve import CURVE_NAME
from kiln_stages.training.metrics import steps_from_end

SHOWN = 8  # held-out losses on the page


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Another run of the same config beside this one: equal content means equal adapters, step for step."""

    run: str
    adapter_sha256: str
    loss_log_sha256: str | None
    equal: bool


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "kiln.report.v1"
    rows: list[tuple[str, int]]
    tokens: int
    supervised_tokens: int
    steps: int
    loss_name: str
    loss_before: float | None
    loss_after: float | None
    held_out_losses: list[tuple[int, float]]  # (step, nats/token), every [train] heldout_interval steps
    tokens_per_second: float | None
    verdict: str
    adapter: str
    adapter_sha256: str
    base_model: str
    loss_curve: str | None
    against: Against | None = None


def command(
    run_directory: Annotated[Path, typer.Argument(metavar="RUN", help="A run with a train receipt.")],
    against: Annotated[
        Path | None, typer.Option("--against", help="Another run; exit 1 if its adapter differs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show a finished run: rows, tokens, held-out loss, speed, verdict, and how to load the adapter."""
    report = run(run_directory, against)
    if json:
        terminal.json_data(report)
    else:
        terminal.data(page(report))
    if report.against is not None and not report.against.equal:
        terminal.json = False  # the report is the one JSON object of this command
        raise KilnError("KLN103", f"the adapters of {printable(run_directory)} and {printable(against)} differ")


def run(run_directory: Path, against: Path | None = None) -> Report:
    """Raises KilnError KLN206 where the run has no receipt or a manifest of it is missing."""
    receipt = read_successful_receipt(run_directory / RECEIPT_NAME)
    speed = receipt.produced.get("training_tokens_per_second")
    return Report(
        rows=_rows(run_directory),
        tokens=receipt.tokens(),
        supervised_tokens=receipt.token_counts.get("action_tokens", 0),
        steps=receipt.steps,
        loss_name=receipt.held_out_loss(),
        loss_before=receipt.held_out.loss_before if receipt.held_out else None,
        loss_after=receipt.held_out.loss_after if receipt.held_out else None,
        held_out_losses=_held_out_losses(run_directory),
        tokens_per_second=float(speed) if speed is not None else None,
        verdict=verify_receipt.run(run_directory).word(require_all=False),
        adapter=str(run_directory / receipt.adapters["output"]["path"]),
        adapter_sha256=receipt.adapters["output"]["content_sha256"],
        base_model=_model_path(run_directory, receipt),
        loss_curve=str(curve) if (curve := run_directory / "train" / CURVE_NAME).exists() else None,
        against=_compare(receipt, against) if against is not None else None,
    )


def page(report: Report) -> str:
    """The report as text."""
    rows: list[list[object]] = [[name, count] for name, count in report.rows]
    rows += [["tokens trained", report.tokens], ["  supervised", report.supervised_tokens], ["steps", report.steps]]
    if report.loss_before is not None and report.loss_after is not None:
        rows += [
            [f"{report.loss_name} before (nats/token)", report.loss_before],
            *([f"  after step {step:,}", loss] for step, loss in _shown(report.held_out_losses)),
            [f"{report.loss_name} after", report.loss_after],
        ]
    if report.tokens_per_second is not None:
        rows.append(["tokens per second", f"{report.tokens_per_second:.0f}"])
    lines = [table(rows, indent=""), *([f"loss curve: {report.loss_curve}"] if report.loss_curve else [])]
    lines += [f"receipt: {report.verdict}", f"adapter tensors: {report.adapter_sha256}"]
    if report.against is not None:
        lines.append(f"the same of {report.against.run}: {report.against.adapter_sha256}")
        lines.append("the two are equal, and so is every loss" if report.against.equal else "the two are DIFFERENT")
    lines += [
        "",
        "To load the adapter:",
        "  from peft import PeftModel",
        "  from transformers import AutoModelForCausalLM",
        f"  base = AutoModelForCausalLM.from_pretrained({report.base_model!r})",
        f"  model = PeftModel.from_pretrained(base, {report.adapter!r})",
    ]
    return "\n".join(lines)


def _held_out_losses(run_directory: Path) -> list[tuple[int, float]]:
    path = run_directory / "train" / "metrics.jsonl"
    steps = [step for step in steps_from_end(path) if step.held_out is not None]
    return [(step.step, step.held_out["mean_per_token"]) for step in reversed(steps) if step.held_out is not None]


def _shown(losses: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """All of a few losses; of many those at eight steps at equal distances, and the lowest of all."""
    if len(losses) <= SHOWN:
        return losses
    return sorted({*losses[:: -(-len(losses) // SHOWN)], min(losses, key=lambda pair: pair[1])})


def _model_path(run_directory: Path, receipt: TrainReceipt) -> str:
    """The model directory as seen from here: the receipt's path counts from the config's directory."""
    base = run_directory / str(receipt.produced.get("base_dir", "."))
    return os.path.normpath(base / str(receipt.model.get("path")))


def _rows(run_directory: Path) -> list[tuple[str, int]]:
    """The way of the rows: read, dropped by reason, split, rejected by reason, admitted."""
    admit = read_manifest(run_directory, AdmitManifest)
    rows: list[tuple[str, int]] = []
    if admit.previous is not None:
        path = run_directory / DROP_SUMMARY
        prepared = read_manifest(run_directory, PrepareManifest)
        require_unchanged(prepared.output(DROP_SUMMARY), path, "data_manifest.json")
        summary = read_document(path, DropSummary, DROP_SUMMARY_SCHEMA, field="schema_version")
        for language, drops in summary.kiln.items():
            counts = {**summary.languages[language].counts, **drops.counts}
            rows.append((f"raw rows read ({language})", drops.rows_read))
            rows += [(f"  dropped: {name}", count) for name, count in nonzero(counts).items()]
            rows += [("  unused", drops.unused), ("  kept in splits", drops.kept)]
    for split, offered in admit.counts.items():
        rows.append((f"rows offered to {split}", offered["rows_read"]))
        rows += [(f"  rejected: {name}", count) for name, count in nonzero(offered.get("reasons", {})).items()]
        rows.append(("  admitted", offered["rows_kept"]))
    return rows


def _compare(receipt: TrainReceipt, against: Path) -> Against:
    other = read_successful_receipt(against / RECEIPT_NAME)
    same_adapter = receipt.adapters["output"]["content_sha256"] == other.adapters["output"]["content_sha256"]
    return Against(
        run=printable(against),
        adapter_sha256=other.adapters["output"]["content_sha256"],
        loss_log_sha256=other.loss_log_sha256,
        equal=same_adapter and receipt.loss_log_sha256 == other.loss_log_sha256,
    )
