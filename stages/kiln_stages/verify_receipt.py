"""``kiln verify-receipt``: every claim of a train receipt against the files, walked back to the raw bytes. No torch.

A claim holds, fails, or cannot be checked here because a file it needs is not here. What no digest can say (that labels
are the template's own) is *not checked* unless ``--deep`` derives it again. Unsigned evidence that holds is called
*consistent*: nobody changed one part without the others. It does not say who made it; with a signature by a key of the
reader's own list (``--allowed-signers``) it is called *authentic*.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from operator import mul
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer

from kiln_cli.config import TRAIN_SECTIONS, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file, open_input, read_bounded
from kiln_cli.identity import Domain, domain_json_sha256
from kiln_cli.manifests import (
    DOCUMENT_LIMIT,
    RECEIPT_NAME,
    locate,
    manifest_path,
    parse_receipt,
    read_document,
    read_manifest,
)
from kiln_cli.receipts import INGESTION_SCHEMA, FileRef, IngestionReceipt, TrainReceipt
from kiln_cli.stage_manifests import AdmitManifest, PrepareManifest, StageManifest
from kiln_cli.terminal import terminal
from kiln_cli.text import printable
from kiln_stages.admitting.corpus import CONTEXT_LABEL, row_whose_labels_differ
from kiln_stages.admitting.model_files import tokenizer_identity
from kiln_stages.evidence.chain_claims import chain_claims
from kiln_stages.evidence.claims import (
    NOT_CHECKED,
    Claim,
    Status,
    Unavailable,
    check_file,
    claim,
    compare,
    data_claims,
    differ,
    file_claims,
    manifest_claims,
    require,
)
from kiln_stages.evidence.digests import Digest, Digests
from kiln_stages.evidence.distillation_claims import scored_claims
from kiln_stages.evidence.output_claims import output_claims
from kiln_stages.evidence.receipt_claims import kind_of, receipt_claims
from kiln_stages.evidence.recipe_claims import read_manifest_of, recipe_claims
from kiln_stages.evidence.signature import signature_path
from kiln_stages.evidence.signature import signer as signed_by
from kiln_stages.evidence.training_data import NAMED, training_data
from kiln_stages.evidence.words import explanation
from kiln_stages.recipes.record import MANIFEST_NAME as RECIPE_MANIFEST_NAME
from kiln_stages.training.checkpoint import NAME, read_checkpoint_manifest
from kiln_stages.training.tensors import base_model_sha256, weight_files, weight_shards

SHOWN = 5  # claims that the closing error names


class Verdict(msgspec.Struct, frozen=True):
    """``failed_training``: reason and message of a receipt that tells of a failure, None of a success."""

    claims: list[Claim]
    failed_training: str | None = None
    signer: str | None = None  # the allowed signer whose signature was checked

    def named(self, status: Status) -> list[str]:
        return [line.name for line in self.claims if line.status == status]

    def against(self, require_all: bool) -> list[str]:
        """The claims that stand against the receipt, failing ones first."""
        return self.named("fails") + (self.named("not checkable here") if require_all else [])

    def word(self, require_all: bool) -> str:
        """Never a stronger word than was shown: authentic takes a signer that the reader listed."""
        if self.against(require_all):
            return "does not verify"
        return "consistent" if self.signer is None else "authentic"


def _explain(wanted: bool) -> None:
    if wanted:
        terminal.data(explanation())
        raise typer.Exit()


def command(
    target: Annotated[Path, typer.Argument(help="A run directory, its train_receipt.json, or a recipe's directory.")],
    deep: Annotated[bool, typer.Option("--deep", help="Derive rows and labels again from the data.")] = False,
    allowed_signers: Annotated[
        Path | None, typer.Option("--allowed-signers", help="Demand a signature of one of these keys (ssh-keygen).")
    ] = None,
    require_all: Annotated[bool, typer.Option("--require-all", help="Fail where a file is not here.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", callback=_explain, is_eager=True, help="Say what the words mean, and stop.")
    ] = False,
) -> None:
    """Check every claim of a train receipt; offline, without a GPU. Exit code 1 where one fails."""
    verdict = run(target, deep=deep, allowed_signers=allowed_signers)
    word, against = verdict.word(require_all), verdict.against(require_all)
    if json:
        terminal.json_data(
            {
                "schema": "kiln.verdict.v1",
                "verdict": word,
                "failed_training": verdict.failed_training,
                "signer": verdict.signer,
                "claims": verdict.claims,
            }
        )
    else:
        for line in verdict.claims:
            terminal.data(line.line())
        if verdict.failed_training:
            terminal.data(f"the training FAILED: {printable(verdict.failed_training)}")
        shown = f"{word} ({verdict.signer})" if word == "authentic" else word
        terminal.data(
            f"{shown}: {counted(len(verdict.named('holds')), 'claim holds', 'claims hold')}, "
            f"{len(verdict.named('fails'))} fail, "
            f"{len(verdict.named('not checkable here'))} not checkable here, "
            f"{len(verdict.named('not checked'))} not checked"
        )
    if against:
        terminal.json = False  # the verdict is the one JSON object of this command
        more = f"; and {len(against) - SHOWN} more" if len(against) > SHOWN else ""
        raise KilnError("KLN103", f"{printable(target)} does not verify: {'; '.join(against[:SHOWN])}{more}")


def run(target: Path, *, deep: bool = False, allowed_signers: Path | None = None) -> Verdict:
    """Every claim, in the order of the chain. A damaged or unknown receipt is one failing claim, not an error.

    ``deep``: rows, splits, tokens and labels are derived again too. ``allowed_signers``: a signature by one of these
    keys is one more claim. For the directory of a recipe: its manifest, then every claim of each training. Raises
    KilnError KLN204 where there is no receipt or no list of keys, KLN301 where the signature is to be checked and
    ssh-keygen is not installed, KLN201 where a signature is asked for of a recipe.
    """
    if target.is_dir() and (target / RECIPE_MANIFEST_NAME).exists():
        return _run_recipe(target, deep, allowed_signers)
    path = target / RECEIPT_NAME if target.is_dir() else target
    if not path.exists():
        raise KilnError("KLN204", f"{printable(path)} does not exist", hint="name a run directory or a receipt")
    try:
        receipt = parse_receipt(path)
    except KilnError as error:
        return Verdict([Claim("the receipt is a kiln train receipt in canonical form", "fails", error.message)])
    failed = f"{receipt.failure_reason}: {receipt.failure_message}" if receipt.status == "failed" else None
    signature, signer = _signature_claim(path, allowed_signers)
    with Digests() as digests:
        claims = [*_Verification(path.parent, receipt, deep, digests).claims(), *signature]
    return Verdict(claims, failed, signer)


def _run_recipe(out: Path, deep: bool, allowed_signers: Path | None) -> Verdict:
    if allowed_signers is not None:
        raise KilnError(
            "KLN201",
            f"{printable(out)} is a recipe's directory, and signatures are of receipts",
            hint="name the directory of a step",
        )
    manifest, sound = read_manifest_of(out)
    if manifest is None:
        return Verdict([sound])
    claims = [sound, *recipe_claims(out, manifest)]
    for step in manifest.steps:
        if step.kind != "merge" and (out / step.name / RECEIPT_NAME).exists():  # else a claim has said so
            found = run(out / step.name, deep=deep).claims
            claims += [msgspec.structs.replace(one, name=f"{step.name}: {one.name}") for one in found]
    return Verdict(claims)


def _signature_claim(path: Path, allowed: Path | None) -> tuple[list[Claim], str | None]:
    """The claim about the signature, if there is one or one is asked for, and whose it is where it holds."""
    name, beside = "the receipt is signed by an allowed signer", signature_path(path)
    if allowed is None:
        unchecked = Claim(name, "not checked", f"{beside.name} is here; --allowed-signers FILE says whose keys count")
        return ([unchecked] if beside.exists() else []), None
    if not beside.exists():
        return [Claim(name, "fails", f"it is not signed: {beside.name} is not here")], None
    try:
        found = signed_by(read_bounded(path, DOCUMENT_LIMIT), beside, allowed)
    except KilnError as error:
        if error.code != "KLN218":
            raise
        return [Claim(name, "fails", error.message)], None
    return [Claim(name, "holds", f"by {found}")], found


class _Verification:
    """The receipt, the run directory it lies in, and the claims about both: first the receipt alone, then the files
    of the stages before, back to the raw rows, then what the training read and left."""

    def __init__(self, directory: Path, receipt: TrainReceipt, deep: bool, digests: Digests) -> None:
        self.run = directory
        self.receipt = receipt
        self.deep = deep
        self.digests = digests

    def claims(self) -> Iterator[Claim]:
        self._read_ahead()
        yield Claim("the receipt is a kiln train receipt in canonical form", "holds")
        yield from receipt_claims(self.receipt)
        admit = yield from manifest_claims(self.run, AdmitManifest, self.receipt.previous)
        prepare = None
        if admit is not None:
            yield from self._admit_claims(admit)
            if admit.previous is not None:
                prepare = yield from data_claims(self.run, admit.previous, self.digests)
                if prepare is not None:
                    yield from self._stage_claims(prepare)
        yield from self._deep_claims(admit, prepare)
        yield claim("train settings are those of config.resolved.toml", self._check_run_config)
        yield claim("base model weights are the ones trained on", self._check_base_model)
        yield claim("the model's config.json is the one trained on", self._check_model_config)
        yield from output_claims(self.run, self.receipt, self.digests)
        yield from chain_claims(self.run, self.receipt)

    def _read_ahead(self) -> None:
        """Begins to hash what the claims will ask for, the largest first, as far as receipt and manifests name it."""
        paths = [self.run / ref.path for ref in self.receipt.outputs]
        for kind in (PrepareManifest, AdmitManifest):
            try:
                manifest = read_manifest(self.run, kind)
            except KilnError:
                continue  # a claim will say what is wrong with it
            paths += [locate(ref, self.run, manifest) for ref in [*manifest.outputs, *manifest.inputs]]
        with suppress(Unavailable):
            paths += weight_files(self._model_dir())
        sizes = {path: path.stat().st_size for path in paths if path.is_file()}
        self.digests.ahead(sorted(sizes, key=lambda path: sizes[path], reverse=True))

    def _deep_claims(self, admit: AdmitManifest | None, prepare: PrepareManifest | None) -> Iterator[Claim]:
        """What digests cannot say: it takes the stages to be run again, or is named as not checked."""
        if not self.deep:
            yield NOT_CHECKED
        elif admit is None:
            yield Claim(NOT_CHECKED.name, "not checkable here", "admit_manifest.json is not here")
        else:
            from kiln_stages.evidence.deep_claims import deep_claims

            yield from deep_claims(self.run, self.receipt, admit, prepare)

    def _stage_claims(self, manifest: StageManifest) -> Iterator[Claim]:
        """The receipt against a stage's manifest."""
        path = manifest_path(self.run, manifest.stage)
        yield claim(f"{path.name} is the file trained under, times included", lambda: self._check_manifest_file(path))
        yield claim(
            f"{manifest.stage} settings in the receipt are those of {path.name}",
            lambda: self._check_stage_config(manifest),
        )

    def _admit_claims(self, admit: AdmitManifest) -> Iterator[Claim]:
        yield from self._stage_claims(admit)
        yield from file_claims(self.run, admit, self.digests)
        yield claim("inputs are the admitted rows", lambda: self._check_inputs(admit))
        if isinstance(self.receipt.data.sft_ingestion, IngestionReceipt):
            yield from self._conversation_claims(admit)
        else:
            yield from scored_claims(self.run, self.receipt, admit, self.digests)
        yield claim("tokenizer and template are the admitted ones", lambda: self._check_tokenizer(admit))
        yield claim("tokenizer files are the admitted ones", lambda: self._check_tokenizer_files(admit))
        yield claim("another file names the same kiln and plugins", lambda: self._check_plugins(admit))

    def _conversation_claims(self, admit: AdmitManifest) -> Iterator[Claim]:
        yield claim("admit/sft_ingestion.json is the receipt's ingestion", self._check_ingestion_file)
        if self.receipt.data.conversations().source == NAMED:
            yield claim("training_data is the data set of admit_manifest.json", lambda: self._check_dataset(admit))
        yield claim("the corpus holds the rows and tokens of the receipt", lambda: self._check_corpus(admit))
        if self.receipt.status == "success":
            name = "held-out rows and tokens are those of admit/heldout.parquet"
            yield claim(name, lambda: self._check_held_out(admit))

    def _check_manifest_file(self, path: Path) -> str:
        expected: dict[str, str] = self.receipt.produced.get("manifest_files", {})
        return differ("sha256", _sha256(path), expected.get(path.name))

    def _check_stage_config(self, manifest: StageManifest) -> str:
        sections = manifest.details.config_sections
        found = domain_json_sha256(Domain.CONFIG, {name: self.receipt.config[name] for name in sections})
        return differ("digest", found, manifest.config_sha256)

    def _check_inputs(self, admit: AdmitManifest) -> str:
        admitted = [ref for ref in admit.outputs if ref.kind in ("corpus", "heldout")]
        return differ("inputs", _paths(self.receipt.inputs), _paths(admitted)) or compare(
            "inputs", {ref.path: ref for ref in self.receipt.inputs}, {ref.path: ref for ref in admitted}
        )

    def _check_ingestion_file(self) -> str:
        path = require(self.run / "admit" / "sft_ingestion.json")
        found = read_document(path, IngestionReceipt, INGESTION_SCHEMA)
        return differ("its identity", found.identity(), self.receipt.data.conversations().identity())

    def _check_dataset(self, admit: AdmitManifest) -> str:
        provenance = admit.details.rows.provenance or None
        expected = training_data(self.receipt.data.conversations(), provenance)
        return compare("training_data", self.receipt.training_data, expected)

    def _check_corpus(self, admit: AdmitManifest) -> str:
        receipt, found = self.receipt, _read_rows(self.run, admit.output("admit/corpus.parquet"), self.digests)
        if found.hashes != (hashes := receipt.data.conversations().kept_row_hashes):
            rows, kept = counted(len(found.hashes), "row", "rows"), counted(len(hashes), "kept hash", "kept hashes")
            return f"{rows} in the corpus, {kept} in the receipt, and they differ"
        times = kind_of(receipt).times_trained(int(receipt.hyperparameters["seed"]), receipt.steps, len(found.hashes))
        action = sum(map(mul, times, found.supervised))
        expected = {"action_tokens": action, "context_tokens": sum(map(mul, times, found.tokens)) - action}
        return compare("token_counts", receipt.token_counts, expected)

    def _check_held_out(self, admit: AdmitManifest) -> str:
        held = self.receipt.held_out
        if "heldout" not in [ref.kind for ref in admit.outputs]:
            return differ("held_out", held, None)
        found = _read_rows(self.run, admit.output("admit/heldout.parquet"), self.digests)
        said = None if held is None else {"rows": held.rows, "supervised_tokens": held.supervised_tokens}
        return compare("held_out", said, {"rows": len(found.hashes), "supervised_tokens": sum(found.supervised)})

    def _check_tokenizer(self, admit: AdmitManifest) -> str:
        expected = {"files": admit.details.tokenizer, "template": msgspec.to_builtins(admit.details.template)}
        return compare("tokenizer", {name: self.receipt.tokenizer[name] for name in expected}, expected)

    def _check_tokenizer_files(self, admit: AdmitManifest) -> str:
        directory = self._model_dir()
        digests = admit.details.tokenizer
        faults = [differ(name, _sha256(directory / name), expected) for name, expected in digests.items()]
        faults.append(compare("tokenizer", self.receipt.tokenizer, tokenizer_identity(directory, admit.details)))
        return "; ".join(filter(None, faults))

    def _check_plugins(self, admit: AdmitManifest) -> str:
        """Kiln may have been upgraded, or a plugin added, since admit ran; then a checkpoint can bear the receipt out.
        A distribution of one version brings one set of things."""
        receipt = self.receipt
        here = {plugin.distribution: plugin for plugin in receipt.plugins}
        there = {plugin.distribution: plugin for plugin in admit.plugins}
        same = [name for name in here if name in there and here[name].version == there[name].version]
        if text := compare("plugins", {name: here[name] for name in same}, {name: there[name] for name in same}):
            return text
        versions = {name: plugin.version for name, plugin in here.items()}
        found = [receipt.kiln.get("package_version"), versions]
        admitted = compare(
            "plugins", found, [admit.kiln_version, {name: plugin.version for name, plugin in there.items()}]
        )
        if not admitted:
            return ""
        for path in (self.run / "train" / each.name for each in receipt.checkpoints if NAME.match(each.name)):
            if path.exists():
                bound = read_checkpoint_manifest(path)[0].auxiliary_state
                return compare("plugins", found, [bound["kiln_train_version"], bound["plugins"]])
        raise Unavailable(f"admit ran under others, and no checkpoint is here: {admitted}")

    def _check_run_config(self) -> str:
        path = require(self.run / "config.resolved.toml")
        return differ("digest", load_config(path).sha256(*TRAIN_SECTIONS), self.receipt.config_sha256)

    def _check_base_model(self) -> str:
        shards: dict[str, Any] = self.receipt.model.get("base_weight_shards", {})
        directory = self._model_dir()
        try:
            found = base_model_sha256(weight_shards(directory, self.digests))
        except KilnError as error:
            raise Unavailable(error.message) from None
        return differ("sha256", found, shards.get("sha256"))

    def _check_model_config(self) -> str:
        found = "sha256:" + _sha256(self._model_dir() / "config.json")
        return differ("model.config_sha256", found, self.receipt.model.get("config_sha256"))

    def _model_dir(self) -> Path:
        path = self.receipt.model.get("path")
        directory = self.run / str(self.receipt.produced.get("base_dir", ".")) / str(path)
        if not path or not directory.is_dir():
            raise Unavailable("the model directory is not here")
        return directory


class _Rows(NamedTuple):
    """What of an admitted corpus the receipt tells of."""

    hashes: list[str]
    tokens: list[int]  # of each row
    supervised: list[int]  # of each row: no token comes before the first one, so that one is never predicted


def _read_rows(run: Path, ref: FileRef, digest: Digest) -> _Rows:
    """Raises Unavailable, and KilnError KLN207 for another file, KLN206 for one that is no admitted corpus."""
    import polars as pl

    path = require(run / ref.path)
    if text := check_file(ref, path, digest):  # first: polars aborts on some damage, in a noisy way
        raise KilnError("KLN207", f"{path.name}: {text}")
    # As :func:`kiln_stages.training.loop.supervised_positions` counts them.
    labelled = pl.col("labels").list.slice(1).list.eval(pl.element() != CONTEXT_LABEL).list.sum()
    with open_input(path) as stream:
        try:
            frame = pl.read_parquet(stream, columns=["row_sha256", "input_ids", "label_spans", "labels"])
            counts = frame.select(tokens=pl.col("input_ids").list.len(), supervised=labelled)
            differing = row_whose_labels_differ(frame)
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
            raise KilnError("KLN206", f"{path.name} is no admitted corpus: {printable(error)}") from None
    if differing is not None:
        name = printable(frame["row_sha256"][differing])
        raise KilnError("KLN206", f"{path.name}: labels of row {differing + 1} ({name}) are not those of label_spans")
    return _Rows(frame["row_sha256"].to_list(), counts["tokens"].to_list(), counts["supervised"].to_list())


def _paths(refs: list[FileRef]) -> list[str]:
    return [ref.path for ref in refs]


def _sha256(path: Path) -> str:
    return hash_file(require(path))[0]
