"""``kiln verify-receipt``: every claim of a train receipt against the files, walked back to the raw bytes. No torch.

A claim holds, fails, or cannot be checked here because a file it needs is not here. Unsigned evidence that holds is
called *consistent*: nobody changed one part without the others. It does not say who made it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kiln_cli.config import TRAIN_SECTIONS, load_config
from kiln_cli.errors import KilnError, not_built
from kiln_cli.files import hash_file, read_bounded
from kiln_cli.identity import Domain, domain_json_sha256
from kiln_cli.manifests import RECEIPT_NAME, read_document, read_receipt
from kiln_cli.receipts import INGESTION_SCHEMA, IngestionReceipt, StageManifest, TrainReceipt
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.claims import (
    Claim,
    Status,
    Unavailable,
    check_file,
    claim,
    data_claims,
    differ,
    file_claims,
    manifest_claims,
    require,
)
from kiln_stages.metrics import loss_log_sha256, read_steps
from kiln_stages.tensors import adapter_content_sha256, base_model_sha256, read_tensors, weight_shards

ADAPTER_LIMIT = 1 << 40


class Verdict(msgspec.Struct, frozen=True):
    claims: list[Claim]

    def count(self, status: Status) -> int:
        return sum(line.status == status for line in self.claims)

    def word(self, require_all: bool) -> str:
        failed = self.count("fails") or (require_all and self.count("not checkable here"))
        return "does not verify" if failed else "consistent"


def command(
    target: Annotated[Path, typer.Argument(help="A run directory, or its train_receipt.json.")],
    deep: Annotated[bool, typer.Option("--deep", help="Derive rows and labels again from the data.")] = False,
    require_all: Annotated[bool, typer.Option("--require-all", help="Fail where a file is not here.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check every claim of a train receipt; offline, without a GPU. Exit code 1 where one fails."""
    verdict = run(target, deep=deep)
    word = verdict.word(require_all)
    if json:
        terminal.json_data({"schema": "kiln.verdict.v1", "verdict": word, "claims": verdict.claims})
    else:
        for line in verdict.claims:
            terminal.data(line.line())
        terminal.data(
            f"{word}: {verdict.count('holds')} claims hold, {verdict.count('fails')} fail, "
            f"{verdict.count('not checkable here')} not checkable here"
        )
    if word != "consistent":
        terminal.json = False  # the verdict is the one JSON object of this command
        failing = [line.name for line in verdict.claims if line.status != "holds"]
        raise KilnError("KLN103", f"{printable(target)} does not verify: {'; '.join(failing[:5])}")


def run(target: Path, *, deep: bool = False) -> Verdict:
    """Every claim, in the order of the chain. A damaged or unknown receipt is one failing claim, not an error.

    Raises KilnError KLN204 where there is no receipt at all, KLN211 for --deep.
    """
    if deep:
        raise not_built("verify-receipt --deep", "leave out --deep")
    path = target / RECEIPT_NAME if target.is_dir() else target
    if not path.exists():
        raise KilnError("KLN204", f"{printable(path)} does not exist", hint="name a run directory or a receipt")
    try:
        receipt = read_receipt(path)
    except KilnError as error:
        return Verdict([Claim("the receipt is a kiln train receipt in canonical form", "fails", error.message)])
    return Verdict(list(_Verification(path.parent, receipt).claims()))


class _Verification:
    """The receipt, the run directory it lies in, and the claims about both."""

    def __init__(self, directory: Path, receipt: TrainReceipt) -> None:
        self.run = directory
        self.receipt = receipt

    def claims(self) -> Iterator[Claim]:
        yield Claim("the receipt is a kiln train receipt in canonical form", "holds")
        for name, check in self._receipt_checks():
            yield claim(name, check)
        admit = yield from manifest_claims(self.run, "admit", self.receipt.previous)
        if admit is not None:
            yield from file_claims(self.run, admit)
            yield claim("admit/sft_ingestion.json is the receipt's ingestion", self._check_ingestion_file)
            yield claim("the corpus holds the rows of the ingestion receipt", self._check_corpus_rows)
            yield claim("tokenizer files are the admitted ones", lambda: self._check_tokenizer(admit))
            if admit.previous is not None:
                yield from data_claims(self.run, admit.previous)
        yield claim("train settings are those of config.resolved.toml", self._check_run_config)
        yield claim("base model weights are the ones trained on", self._check_base_model)
        yield from self._output_claims()

    def _receipt_checks(self) -> list[tuple[str, Callable[[], str]]]:
        receipt = self.receipt
        return [
            (
                "receipt_sha256 covers the receipt",
                lambda: differ("receipt_sha256", receipt.receipt_sha256, receipt.whole_digest()),
            ),
            (
                "content_sha256 covers what is compared",
                lambda: differ("content_sha256", receipt.content_sha256, receipt.content_digest()),
            ),
            ("status and failure fields agree", self._check_status),
            ("the ingestion receipt is sound", lambda: "; ".join(receipt.data.sft_ingestion.faults())),
            ("the receipt is bound to its ingestion", self._check_binding),
            ("examples and steps add up", self._check_counts),
            ("config_sha256 covers the receipt's config", self._check_receipt_config),
        ]

    def _check_status(self) -> str:
        failed = self.receipt.status == "failed"
        has_reason = bool(self.receipt.failure_reason)
        if failed == has_reason:
            return ""
        return f"status is {self.receipt.status}, failure_reason is {printable(repr(self.receipt.failure_reason))}"

    def _check_binding(self) -> str:
        receipt, ingestion = self.receipt, self.receipt.data.sft_ingestion
        locator = ingestion.source_locator if isinstance(ingestion.source_locator, str) else None
        pairs = [
            ("hyperparameters.mode", receipt.hyperparameters.get("mode"), "sft"),
            ("training_data.source", receipt.training_data.get("source"), ingestion.source),
            ("training_data.path", receipt.training_data.get("path"), locator),
            ("training_data.sha256", receipt.training_data.get("sha256"), ingestion.kept_corpus_sha256),
            ("data.examples_read", receipt.data.examples_read, ingestion.rows_read),
            ("data.examples_filtered", receipt.data.examples_filtered, ingestion.rows_rejected),
            (
                "config.admit.invalid_row_policy",
                receipt.config.get("admit", {}).get("invalid_row_policy"),
                ingestion.invalid_row_policy,
            ),
        ]
        return "; ".join(differ(name, found, expected) for name, found, expected in pairs if found != expected)

    def _check_receipt_config(self) -> str:
        sections = {name: self.receipt.config[name] for name in TRAIN_SECTIONS}
        found = domain_json_sha256(Domain.CONFIG, sections)
        return differ("config_sha256", self.receipt.config_sha256, found)

    def _check_run_config(self) -> str:
        path = require(self.run / "config.resolved.toml")
        return differ("digest", load_config(path).sha256(*TRAIN_SECTIONS), self.receipt.config_sha256)

    def _check_counts(self) -> str:
        if self.receipt.status == "failed":
            return ""
        expected = self.receipt.data.sft_ingestion.rows_kept * int(self.receipt.hyperparameters.get("epochs", 0))
        return "; ".join(
            differ(name, found, expected)
            for name, found in (
                ("data.examples_trained", self.receipt.data.examples_trained),
                ("steps", self.receipt.steps),
            )
            if found != expected
        )

    def _output_claims(self) -> Iterator[Claim]:
        for ref in self.receipt.outputs:
            yield claim(f"{printable(ref.path)} has its digest", partial(check_file, ref, self.run / ref.path))
        yield claim("adapter tensors have their content digest", self._check_adapter)
        yield claim("the loss log is the one of the receipt", self._check_loss_log)
        for checkpoint in self.receipt.checkpoints:
            path = self.run / "train" / checkpoint.name / "checkpoint_manifest.json"
            yield claim(
                f"{checkpoint.name} is the published one", partial(_check_sha256, path, checkpoint.manifest_sha256)
            )

    def _check_ingestion_file(self) -> str:
        path = require(self.run / "admit" / "sft_ingestion.json")
        found = read_document(path, IngestionReceipt, INGESTION_SCHEMA)
        return differ("its identity", found.identity(), self.receipt.data.sft_ingestion.identity())

    def _check_corpus_rows(self) -> str:
        import polars as pl

        path = require(self.run / "admit" / "corpus.parquet")
        try:
            found = pl.read_parquet(path, columns=["row_sha256"])["row_sha256"].to_list()
        except (pl.exceptions.PolarsError, OSError) as error:
            return printable(error)
        expected = self.receipt.data.sft_ingestion.kept_row_hashes
        if found == expected:
            return ""
        return f"{len(found)} rows in the corpus, {len(expected)} kept hashes in the receipt, and they differ"

    def _check_tokenizer(self, admit: StageManifest) -> str:
        directory = self._model_dir()
        digests: dict[str, str] = admit.details.get("tokenizer", {})
        return "; ".join(
            text for name, expected in digests.items() if (text := differ(name, _sha256(directory / name), expected))
        )

    def _check_base_model(self) -> str:
        shards: dict[str, Any] = self.receipt.model.get("base_weight_shards", {})
        directory = self._model_dir()
        try:
            found = base_model_sha256(weight_shards(directory))
        except KilnError as error:
            raise Unavailable(error.message) from None
        return differ("sha256", found, shards.get("sha256"))

    def _check_adapter(self) -> str:
        output: dict[str, Any] = self.receipt.adapters.get("output") or {}
        path = require(self.run / str(output.get("path")) / "adapter_model.safetensors")
        found = adapter_content_sha256(read_tensors(read_bounded(path, ADAPTER_LIMIT), path.name))
        return differ("content_sha256", found, output.get("content_sha256"))

    def _check_loss_log(self) -> str:
        path = require(self.run / "train" / "metrics.jsonl")
        return differ("sha256", loss_log_sha256(read_steps(path)), self.receipt.loss_log_sha256)

    def _model_dir(self) -> Path:
        path = self.receipt.model.get("path")
        directory = self.run / str(self.receipt.produced.get("base_dir", ".")) / str(path)
        if not path or not directory.is_dir():
            raise Unavailable("the model directory is not here")
        return directory


def _check_sha256(path: Path, expected: str) -> str:
    return differ("sha256", _sha256(path), expected)


def _sha256(path: Path) -> str:
    return hash_file(require(path))[0]
