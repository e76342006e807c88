"""What a train receipt says, against itself: digests, sums, and every value that follows from another one in it.

No file is read here. :func:`binding` is the receipt in the form that checkpoints are compared in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from kiln_cli.config import TRAIN_SECTIONS, RunConfig, TrainConfig
from kiln_cli.identity import Domain, domain_json_sha256, is_hash
from kiln_cli.plugins import DISTRIBUTION
from kiln_cli.receipts import FAILURE_REASONS, TrainReceipt
from kiln_cli.stage_manifests import MANIFEST_NAMES
from kiln_cli.text import printable
from kiln_stages.evidence.claims import Claim, Unavailable, claim, compare, differ
from kiln_stages.evidence.distillation_claims import distillation_faults
from kiln_stages.evidence.training_data import training_data_faults
from kiln_stages.training.base_adapter import receipt_path
from kiln_stages.training.checkpoint import checkpoint_name
from kiln_stages.training.checkpoint_manifest import (
    ABSENT,
    Binding,
    DataPart,
    PrecisionPolicy,
    RngStream,
    flatten,
    scheduler_state,
)
from kiln_stages.training.corpora import corpus_of
from kiln_stages.training.kinds import OPD, SFT, Kind, kind_named
from kiln_stages.training.provenance import execution_provenance
from kiln_stages.training.tensors import Shard, base_model_sha256

ADAPTER_CONFIG = "train/adapter/adapter_config.json"
ADAPTER_MODEL = "train/adapter/adapter_model.safetensors"
LOSS_LOG = "train/metrics.jsonl"
CARD = "train/adapter/README.md"
LOSS_CURVE = "train/loss.svg"
CHAT_TEMPLATE = "train/adapter/chat_template.jinja"
TOKENIZER = "train/adapter/tokenizer.json"
OUTPUTS = {
    ADAPTER_CONFIG: "adapter_config",
    ADAPTER_MODEL: "adapter_parameters",
    LOSS_LOG: "metrics",
    CARD: "model_card",
    LOSS_CURVE: "loss_curve",
    CHAT_TEMPLATE: "chat_template",
    TOKENIZER: "tokenizer",
    "train/adapter/tokenizer_config.json": "tokenizer",
}
MUON_RMS = 0.2  # torch's Muon is handed the profile's rate divided by it, and the weight decay times it
RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d+)?(Z|[+-]\d{2}:\d{2})\Z")
SLACK = 1e-12  # a mean of equal numbers may round to either side of them
BESIDE_EXECUTION = (
    "fast_paths",
    "gradient_checkpoint_plan",
    "head_columns",
    "head_probe",
    "loss_route",
    "precision",
)  # in the receipt's execution; apart in a checkpoint


def receipt_claims(receipt: TrainReceipt) -> Iterator[Claim]:
    for name, check in CHECKS:
        yield claim(name, partial(check, receipt))


def run_config(receipt: TrainReceipt) -> RunConfig:
    """The receipt's settings as a config. Raises msgspec.ValidationError."""
    return msgspec.convert(receipt.config, RunConfig)


def kind_of(receipt: TrainReceipt) -> Kind:
    """The kind of the training. Raises ValueError where the receipt names none that there is."""
    return kind_named(receipt.hyperparameters["mode"])


def binding(receipt: TrainReceipt) -> Binding:
    """What a checkpoint of this training is bound to, derived a second time, from the receipt alone.

    Raises Unavailable for a training that failed before there was a model.
    """
    config, corpus = run_config(receipt).train, corpus_of(receipt.data)
    parameters, execution, kind = receipt.hyperparameters, receipt.execution, kind_of(receipt)
    if execution is None:
        raise Unavailable("the training failed before its model was loaded")
    optimizer = {"kind": config.optimizer.kind, **config.optimizer.resolved()}
    seed = str(parameters["seed"])
    return Binding(
        training_kind=kind.name,
        adapter_name=receipt.adapter_name,
        effective_config={
            **receipt.config["train"],
            "learning_rate": config.rate,
            "optimizer": optimizer,
            "seed": seed,
            **{section: receipt.config[section] for section in kind.settings},
        },
        precision_policy=msgspec.convert(execution["precision"], PrecisionPolicy),
        data=DataPart(
            source_kind=kind.source_kind,
            content_sha256=_bare(corpus.sha256),
            item_count=corpus.kept,
        ),
        total_steps=corpus.kept * config.epochs,
        optimizer_kind=parameters["optimizer"]["kind"],
        optimizer_hyperparameters=parameters["optimizer"]["effective"],
        scheduler_state=scheduler_state(config.profile, config.rate),
        rng_streams={
            name: RngStream(algorithm=algorithm, seed=seed, position=0) for name, algorithm in kind.streams().items()
        },
        auxiliary_state={
            "admit_content_sha256": receipt.previous.content_sha256,
            "base_adapter_sha256": receipt.adapters["base"] and receipt.adapters["base"]["content_sha256"],
            "base_model_id": receipt.model["id"],
            "base_model_weights_sha256": receipt.model["base_weight_shards"]["sha256"],
            "execution": {key: value for key, value in execution.items() if key not in BESIDE_EXECUTION},
            "fast_paths": {"parts": execution["fast_paths"]["parts"]},
            "gradient_checkpoint_plan": execution["gradient_checkpoint_plan"],
            "head_probe": {key: execution["head_probe"][key] for key in ("bound", "exact")},
            **({"head_columns": execution["head_columns"]["used"]} if kind is OPD else {}),
            **corpus.identities(),
            "kiln_train_version": receipt.kiln["package_version"],
            "loop_state_type": kind.loop_state_type,
            "lora": {key: parameters[key] for key in ("alpha", "rank", "target_modules")},
            "model_config_sha256": receipt.model["config_sha256"],
            "plugins": {plugin.distribution: plugin.version for plugin in receipt.plugins},
            "template": receipt.tokenizer["template"],
            "tokenizer": receipt.tokenizer["files"],
        },
    )


def _check_whole_digest(receipt: TrainReceipt) -> str:
    return differ("receipt_sha256", receipt.receipt_sha256, receipt.whole_digest())


def _check_content_digest(receipt: TrainReceipt) -> str:
    return differ("content_sha256", receipt.content_sha256, receipt.content_digest())


def _check_envelope(receipt: TrainReceipt) -> str:
    """A name, a time, and failure fields exactly where the training failed. Type and version are read's to check."""
    reason, message = receipt.failure_reason, receipt.failure_message
    if receipt.status == "failed":
        sound = reason in FAILURE_REASONS and bool(message and message.strip())
    else:
        sound = reason is None and message is None
    told = f"status is {receipt.status}, failure_reason {reason!r}, failure_message {message!r}"
    at = receipt.produced.get("at")
    faults = [
        "" if receipt.adapter_name.strip() else "adapter_name is blank",
        "" if isinstance(at, str) and RFC3339.match(at) else f"produced.at is {printable(repr(at))}, no RFC 3339 time",
        "" if sound else printable(told),
    ]
    return "; ".join(filter(None, faults))


def _check_template(receipt: TrainReceipt) -> str:
    """The digest of the template that was trained under, wherever it stands; and those that follow from the files."""
    found = receipt.tokenizer
    template, files = found["template"], found["files"]
    config = files.get("tokenizer_config.json")
    expected = {
        "training_chat_template_sha256": template["sha256"],
        "tokenizer_config_sha256": None if config is None else f"sha256:{config}",
    }
    if template["name"] == "model":
        expected["chat_template_sha256"] = template["sha256"]
    faults = [
        "" if is_hash(template["sha256"]) else f"template.sha256 is {printable(template['sha256'])}, no hash",
        compare("tokenizer", {name: found[name] for name in expected}, expected),
    ]
    return "; ".join(filter(None, faults))


def _check_provenance(receipt: TrainReceipt) -> str:
    return compare("execution_provenance", receipt.execution_provenance, execution_provenance(receipt))


def _check_precision(receipt: TrainReceipt) -> str:
    if receipt.execution is None:
        return ""
    blank = [
        name for name, text in receipt.execution["precision"].items() if isinstance(text, str) and not text.strip()
    ]
    return f"precision.{printable(blank[0])} is blank" if blank else ""


def _check_norms(receipt: TrainReceipt) -> str:
    """The order of the numbers, and that every module has one entry; a finished training names all of its modules."""
    targets = receipt.hyperparameters["target_modules"] or []
    grads, deltas = receipt.lora_grad_norms, receipt.lora_delta_norms
    faults = [
        f"lora_grad_norms of {printable(each.module)} are not min <= mean <= max"
        for each in grads
        if not 0 <= each.min <= each.mean * (1 + SLACK) or not each.mean <= each.max * (1 + SLACK)
    ]
    if receipt.status == "success":
        faults.append(differ("modules of lora_grad_norms", [each.module for each in grads], targets))
        faults.append(differ("modules of lora_delta_norms", [each.module for each in deltas], targets))
        pairs = {each.module: each.pair_count for each in deltas}
        faults += [
            differ(f"sample_count of {each.module}", each.sample_count, 2 * pairs.get(each.module, 0) * receipt.steps)
            for each in grads
        ]
    else:
        faults.append(differ("lora_delta_norms", deltas, []))
    return "; ".join(filter(None, faults))


def _check_ingestion(receipt: TrainReceipt) -> str:
    return printable("; ".join(corpus_of(receipt.data).ingestion.faults()))


def _check_binding(receipt: TrainReceipt) -> str:
    corpus = corpus_of(receipt.data)
    sft = receipt.data.conversations() if corpus.kind is SFT else None
    policy = "fail" if sft is None else sft.invalid_row_policy  # a scored corpus has no other
    faults = [
        differ("hyperparameters.mode", receipt.hyperparameters["mode"], corpus.kind.name),
        differ("config.admit.invalid_row_policy", run_config(receipt).admit.invalid_row_policy, policy),
        differ("data.examples_filtered", receipt.data.examples_filtered, corpus.filtered),
        differ("data.examples_read", receipt.data.examples_read, corpus.read),
    ]
    if sft is not None:
        faults.append(training_data_faults(receipt.training_data, sft, receipt.config["admit"]))
        faults += [
            f"{name} stands in the receipt of no distillation" for name in ("opd", "echo") if _has(receipt, name)
        ]
    else:
        faults.append(compare("training_data", receipt.training_data, corpus.training_data()))
        faults.append(distillation_faults(receipt, run_config(receipt)))
    return "; ".join(filter(None, faults))


def _has(receipt: TrainReceipt, name: str) -> bool:
    return getattr(receipt, name) is not msgspec.UNSET


def _check_counts(receipt: TrainReceipt) -> str:
    expected = receipt.data.examples_kept * run_config(receipt).train.epochs
    if receipt.status == "failed":
        within = 0 <= receipt.steps <= expected
        return differ("data.examples_trained", receipt.data.examples_trained, receipt.steps) or (
            "" if within else f"steps is {receipt.steps}, outside 0..{expected}"
        )
    faults = [
        differ("data.examples_trained", receipt.data.examples_trained, expected),
        differ("steps", receipt.steps, expected),
    ]
    return "; ".join(filter(None, faults))


def _check_config(receipt: TrainReceipt) -> str:
    config = run_config(receipt)
    sections = (config, config.project, config.data, config.train, config.train.optimizer)
    faults = [printable(fault.text) for section in sections for fault in section.faults()]
    sound = dict(flatten("config", msgspec.to_builtins(config)))
    faults += [
        differ(printable(name), text, sound.get(name, ABSENT)) for name, text in flatten("config", receipt.config)
    ]
    return "; ".join(filter(None, faults))


def _check_config_digest(receipt: TrainReceipt) -> str:
    found = domain_json_sha256(Domain.CONFIG, {name: receipt.config[name] for name in TRAIN_SECTIONS})
    return differ("config_sha256", receipt.config_sha256, found)


def _check_hyperparameters(receipt: TrainReceipt) -> str:
    """All but the target layers and torch's own defaults follow from the config."""
    config, found = run_config(receipt), receipt.hyperparameters
    train = config.train
    effective = found["optimizer"]["effective"]
    targets = found["target_modules"]
    if receipt.execution is None:  # the model never came up
        handed, chosen = None, None
    else:
        handed = effective | _handed_to_torch(train)
        chosen = targets if train.target_modules is None else sorted(set(train.target_modules))
    expected = {
        "alpha": train.lora_alpha,
        "alpha_over_rank": train.lora_alpha / train.lora_rank,
        "epochs": train.epochs,
        "init": Domain.LORA_INIT.value if train.base_adapter is None else "base_adapter",
        "learning_rate": train.rate,
        "loss": train.loss,
        "mode": kind_of(receipt).name,
        "optimizer": {"effective": handed, "kind": train.optimizer.kind},
        "profile": train.profile,
        "rank": train.lora_rank,
        "seed": str(config.project.seed),
        "shuffle": kind_of(receipt).shuffle,
        "target_modules": chosen,
    }
    return compare("hyperparameters", found, expected)


def _handed_to_torch(config: TrainConfig) -> dict[str, Any]:
    """The config's own hyper-parameters under the names of torch's optimizer, as far as they decide what it does."""
    given, rate = config.optimizer.resolved(), config.rate
    if config.optimizer.kind == "muon":
        return {
            "lr": rate / MUON_RMS,
            "momentum": given["momentum"],
            "nesterov": given["nesterov"],
            "ns_steps": given["ns_iters"],
            "weight_decay": given["weight_decay"] * MUON_RMS,
        }
    if config.optimizer.kind == "adam_w":
        betas = [given["beta1"], given["beta2"]]
        return {"betas": betas, "eps": given["eps"], "lr": rate, "weight_decay": given["weight_decay"]}
    return {"lr": rate}


def _check_names(receipt: TrainReceipt) -> str:
    config = run_config(receipt)
    base = receipt.model["base_weight_shards"]["sha256"]
    faults = [
        differ("adapter_name", receipt.adapter_name, config.train.adapter),
        differ("model.id", receipt.model["id"], config.model.id or base),
        differ("model.path", receipt.model["path"], config.model.path),
        differ("previous.path", receipt.previous.path, MANIFEST_NAMES["admit"]),
    ]
    return "; ".join(filter(None, faults))


def _check_execution(receipt: TrainReceipt) -> str:
    train, found = run_config(receipt).train, receipt.execution
    if found is None:
        return "" if receipt.status == "failed" and receipt.steps == 0 else "execution is null"
    kinds = ("activation_dtype", "gradient_dtype", "optimizer_state_dtype", "parameter_dtype")
    expected: dict[str, Any] = {
        "device": train.device,
        "dtype": train.dtype,
        "loss_route": "supervised_positions",
        "precision": {**dict.fromkeys(kinds, train.dtype), "stochastic_rounding": {"enabled": False}},
    }
    if train.threads is not None:
        expected["threads_intra_op"] = train.threads
    plan = found["gradient_checkpoint_plan"]
    faults = [
        compare("execution", {key: found.get(key) for key in expected}, expected),
        differ("segments of gradient_checkpoint_plan", plan and len(plan), train.grad_checkpoint_segments),
    ]
    return "; ".join(filter(None, faults))


def _check_kiln(receipt: TrainReceipt) -> str:
    names = [plugin.distribution for plugin in receipt.plugins]
    versions = {plugin.distribution: plugin.version for plugin in receipt.plugins}
    losses = [name for plugin in receipt.plugins for name in plugin.losses]
    loss = receipt.hyperparameters["loss"]
    faults = [
        compare("kiln", receipt.kiln, {"distribution": DISTRIBUTION, "package_version": versions.get(DISTRIBUTION)}),
        differ("order of plugins", names, sorted(set(names))),
        "" if loss in losses else f"loss is {printable(loss)}, the plugins have {printable(losses)}",
    ]
    return "; ".join(filter(None, faults))


def _check_base_weights(receipt: TrainReceipt) -> str:
    found = receipt.model["base_weight_shards"]
    shards = {item["filename"]: Shard(**item) for item in found["shards"]}
    ordered = [shards[name] for name in sorted(shards)]
    expected = {
        "schema": "kiln.base-weight-shards.v1",
        "sha256": base_model_sha256(ordered),
        "shards": [shard._asdict() for shard in ordered],
        "total_bytes": sum(shard.size_bytes for shard in ordered),
    }
    return compare("model.base_weight_shards", found, expected)


def _check_outputs(receipt: TrainReceipt) -> str:
    """The adapter's files, the loss log and its curve, no more and no less, and the same adapter under ``adapters``. A
    failed training has no adapter, and a loss log where it came to a step."""
    if receipt.status == "failed":
        return _check_failed_outputs(receipt)
    if text := differ("outputs", [ref.path for ref in receipt.outputs], list(OUTPUTS)):
        return text
    files = {ref.path: ref for ref in receipt.outputs}
    steps = {LOSS_LOG: receipt.steps}
    shape = {path: [ref.base, ref.kind, ref.schema, ref.rows] for path, ref in files.items()}
    output = {
        "adapter_model_bytes": files[ADAPTER_MODEL].bytes,
        "adapter_model_sha256": files[ADAPTER_MODEL].sha256,
        "content_sha256": (receipt.adapters["output"] or {}).get("content_sha256"),
        "path": ADAPTER_MODEL.rpartition("/")[0],
    }
    faults = [
        compare("outputs", shape, {path: ["run", kind, None, steps.get(path)] for path, kind in OUTPUTS.items()}),
        differ("chat template", files[CHAT_TEMPLATE].sha256, _bare(receipt.tokenizer["template"]["sha256"])),
        compare("adapters", receipt.adapters, {"base": _base_adapter(receipt), "output": output}),
    ]
    return "; ".join(filter(None, faults))


def _bare(sha256: str) -> str:
    return sha256.removeprefix("sha256:")


def _check_failed_outputs(receipt: TrainReceipt) -> str:
    found = [[ref.path, ref.base, ref.kind, ref.schema, ref.rows] for ref in receipt.outputs]
    logged = [[LOSS_LOG, "run", OUTPUTS[LOSS_LOG], None, receipt.steps]]
    faults = [
        differ("outputs", found, logged if receipt.loss_log_sha256 is not None else []),
        differ("adapters.output", receipt.adapters["output"], None),
        differ("held_out", receipt.held_out, None),
    ]
    return "; ".join(filter(None, faults))


def _base_adapter(receipt: TrainReceipt) -> dict[str, Any] | None:
    """What ``adapters.base`` must be, as far as the receipt can tell: there exactly where the config names one."""
    path = run_config(receipt).train.base_adapter
    if path is None:
        return None
    found: dict[str, Any] = receipt.adapters["base"] or {}
    digests = ("adapter_model_bytes", "adapter_model_sha256", "content_sha256")
    link = found.get("receipt")
    if link is not None:
        link = {"content_sha256": link["content_sha256"], "path": receipt_path(path)}
    return {"path": path, "receipt": link, **{name: found.get(name) for name in digests}}


def _check_smoke_test(receipt: TrainReceipt) -> str:
    """There exactly where the config asks for it, over its prompts."""
    found, train = receipt.adapter_smoke_test, run_config(receipt).train
    if receipt.status == "failed" or found is None:
        asked = receipt.status == "success" and train.adapter_smoke_test
        return differ("adapter_smoke_test", found, "a result") if asked else differ("adapter_smoke_test", found, None)
    prompts = [entry["prompt"] for entry in found["prompts"]]
    counts = {len(entry["new_token_ids"]) for entry in found["prompts"]}
    faults = [
        differ("prompts of adapter_smoke_test", prompts, train.smoke_prompts),
        differ("new tokens of adapter_smoke_test", counts, {found["new_tokens"]}),
    ]
    return "; ".join(filter(None, faults))


def _check_checkpoints(receipt: TrainReceipt) -> str:
    steps = [checkpoint.step for checkpoint in receipt.checkpoints]
    faults = [
        differ(f"name of step {each.step}", each.name, checkpoint_name(receipt.adapter_name, each.step))
        for each in receipt.checkpoints
    ]
    # None is made at the end, but a training that was stopped leaves one of its last step.
    past = receipt.steps + (receipt.status == "failed")
    faults.append(differ("steps", steps, [step for step in sorted(set(steps)) if 0 < step < past]))
    return "; ".join(filter(None, faults))


CHECKS: tuple[tuple[str, Callable[[TrainReceipt], str]], ...] = (
    ("receipt_sha256 covers the receipt", _check_whole_digest),
    ("content_sha256 covers what is compared", _check_content_digest),
    ("name, time and failure fields agree with the status", _check_envelope),
    ("digests of tokenizer and template follow from their files", _check_template),
    ("the ingestion receipt is sound", _check_ingestion),
    ("the receipt is bound to its ingestion", _check_binding),
    ("the base weights' digest and size follow from their shards", _check_base_weights),
    ("the execution provenance and its digest follow from the receipt", _check_provenance),
    ("no field of the precision is blank", _check_precision),
    ("examples and steps add up", _check_counts),
    ("the receipt's config is sound and has no unknown key", _check_config),
    ("config_sha256 covers the receipt's config", _check_config_digest),
    ("hyperparameters are those of the config", _check_hyperparameters),
    ("adapter and model are named as in the config", _check_names),
    ("device, precision and threads are those of the config", _check_execution),
    ("kiln and the loss come from the receipt's plugins", _check_kiln),
    ("outputs are the adapter's files, the loss log and its curve", _check_outputs),
    ("norms of gradients and adapter are of the trained modules", _check_norms),
    ("the smoke test is the one that the config asks for", _check_smoke_test),
    ("checkpoints are named by adapter and step", _check_checkpoints),
)
