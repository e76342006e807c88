"""What a train receipt says of a distillation, against itself and against the files of its run. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec

from kiln_cli.config import RunConfig
from kiln_cli.counting import counted
from kiln_cli.distillation import resolve_top_k
from kiln_cli.errors import KilnError
from kiln_cli.receipts import EchoBlock, FileRef, OpdBlock, TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.ingestion import RECEIPT, ScoredIngestion, read_scored_ingestion
from kiln_stages.distilling.lengths import read_lengths
from kiln_stages.evidence.claims import Claim, check_file, claim, compare, differ, require
from kiln_stages.evidence.digests import Digest
from kiln_stages.evidence.distillation import RowLengths, echo_block, opd_block, read_log, token_counts
from kiln_stages.training.kinds import OPD

LOG = "train/metrics.jsonl"
CORPUS, HELD_OUT = "admit/corpus.parquet", "admit/heldout.parquet"


def distillation_faults(receipt: TrainReceipt, config: RunConfig) -> str:
    """What the ``opd`` and ``echo`` blocks contradict of the receipt's corpus, settings and counts. No file is read."""
    opd, echo = receipt.opd, receipt.echo
    if not isinstance(opd, OpdBlock) or not isinstance(echo, EchoBlock):
        return "opd and echo are not both there"
    ingestion, settings = scored_ingestion(receipt), config.distill
    identity = ingestion.teacher_identity
    # Without the loss log the blocks have no losses: those are taken over, and held against the log where it is.
    derived = opd_block(ingestion, settings, receipt.token_counts, [])
    told = {name: getattr(opd, name) for name in ("initial_opd_loss", "final_opd_loss", "echo_combined", "coverage")}
    faults = [
        compare("opd", opd, msgspec.structs.replace(derived, **told)),
        differ("opd.teacher_id", opd.teacher_id, settings.teacher),
        differ("training_data.path", receipt.training_data["path"], config.admit.file),
        differ("opd.top_k", opd.top_k, resolve_top_k(settings.top_k, identity.max_top_k, identity.vocab_size)),
        differ("echo.enabled", echo.enabled, opd.echo_combined),
        differ("loss", receipt.hyperparameters["loss"], config.train.loss),
        *_echo_faults(echo, config),
    ]
    if (opd.initial_opd_loss is None) != (opd.final_opd_loss is None):
        faults.append("one of opd.initial_opd_loss and opd.final_opd_loss is null")
    return "; ".join(filter(None, faults))


def _echo_faults(echo: EchoBlock, config: RunConfig) -> Iterator[str]:
    settings = echo_block(config.distill, [])
    for name in ("lambda_", "env_mask_mode", "warning_filter"):
        yield differ(f"echo.{name.rstrip('_')}", getattr(echo, name), getattr(settings, name))
    measured = [echo.initial_env_ce is not None, echo.final_env_ce is not None]
    yield differ("whether echo has cross-entropies", measured, [echo.enabled, echo.enabled])
    yield differ("whether echo.dropped_reason is there", isinstance(echo.dropped_reason, str), not echo.enabled)


def scored_ingestion(receipt: TrainReceipt) -> ScoredIngestion:
    """The receipt of the scored corpus. Raises msgspec.ValidationError where there is none."""
    return msgspec.convert(receipt.data.scored_ingestion, ScoredIngestion)


def scored_claims(run: Path, receipt: TrainReceipt, admit: AdmitManifest, digest: Digest) -> Iterator[Claim]:
    """The claims about what admission left of a scored corpus, and about the loss log that the blocks are made of."""
    yield claim(f"{RECEIPT} is the receipt's ingestion", partial(_check_ingestion_file, run, receipt))
    yield claim(
        "teacher, candidates and alignment are those of admit_manifest.json", partial(_check_admit, receipt, admit)
    )
    yield claim(
        "the corpus holds the rows and tokens of the receipt", partial(_check_corpus, run, receipt, admit, digest)
    )
    if receipt.status == "success":
        yield claim(
            f"held-out rows and tokens are those of {HELD_OUT}", partial(_check_held_out, run, receipt, admit, digest)
        )
    yield claim("opd and echo tell what the loss log says", partial(_check_blocks, run, receipt))


def _check_ingestion_file(run: Path, receipt: TrainReceipt) -> str:
    found = read_scored_ingestion(require(run / RECEIPT))
    return differ("its identity", found.identity(), scored_ingestion(receipt).identity())


def _check_admit(receipt: TrainReceipt, admit: AdmitManifest) -> str:
    return compare("opd", scored_corpus(admit), scored_ingestion(receipt).corpus())


def _check_corpus(run: Path, receipt: TrainReceipt, admit: AdmitManifest, digest: Digest) -> str:
    ingestion, rows = scored_ingestion(receipt), _lengths(run, admit.output(CORPUS), digest)
    if len(rows) != ingestion.examples:
        return (
            f"{counted(len(rows), 'row', 'rows')} in the corpus, "
            f"{counted(ingestion.examples, 'example', 'examples')} in the receipt"
        )
    times = OPD.times_trained(int(receipt.hyperparameters["seed"]), receipt.steps, len(rows))
    echo = msgspec.convert(receipt.config, RunConfig).distill.echo
    return compare("token_counts", receipt.token_counts, token_counts(rows, times, echo))


def _check_held_out(run: Path, receipt: TrainReceipt, admit: AdmitManifest, digest: Digest) -> str:
    held = receipt.held_out
    if "heldout" not in [ref.kind for ref in admit.outputs]:
        return differ("held_out", held, None)
    rows = _lengths(run, admit.output(HELD_OUT), digest)
    said = None if held is None else {"rows": held.rows, "supervised_tokens": held.supervised_tokens}
    return compare("held_out", said, {"rows": len(rows), "supervised_tokens": sum(row.action for row in rows)})


def _check_blocks(run: Path, receipt: TrainReceipt) -> str:
    log = read_log(run / LOG) if receipt.loss_log_sha256 is None else read_log(require(run / LOG))
    settings = msgspec.convert(receipt.config, RunConfig).distill
    expected = opd_block(scored_ingestion(receipt), settings, receipt.token_counts, log)
    return "; ".join(
        filter(None, [compare("opd", receipt.opd, expected), compare("echo", receipt.echo, echo_block(settings, log))])
    )


def _lengths(run: Path, ref: FileRef, digest: Digest) -> list[RowLengths]:
    path = require(run / ref.path)
    if text := check_file(ref, path, digest):  # first: polars aborts on some damage, in a noisy way
        raise KilnError("KLN207", f"{path.name}: {text}")
    return read_lengths(path)
