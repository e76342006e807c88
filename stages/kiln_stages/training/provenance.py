"""``kiln.execution-provenance.v1``: what computed a training, on what, in which arithmetic, under one digest.

Everything in it stands elsewhere in the receipt too; here it is put together so that two runs can be compared by one
value. Needs no torch: verification derives it from the receipt a second time.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kiln_cli.identity import canonical_json, sha256_hex
from kiln_cli.receipts import TrainReceipt

SCHEMA = "kiln.execution-provenance.v1"
_BUILD = ("cuda", "cudnn", "machine", "peft", "python", "system", "torch", "transformers")
_BACKEND = ("cpu", "cpu_capability", "cpu_features", "device", "device_capability", "device_name")
_KERNELS = ("attention", "loss_route")
_BESIDE = ("precision", "dtype")


def execution_provenance(receipt: TrainReceipt) -> dict[str, Any] | None:
    """The provenance of a receipt's training, None where it failed before there was a machine to tell of.

    ``provenance_sha256``: SHA-256 of the canonical JSON of all other fields, without a domain.
    """
    execution = receipt.execution
    if execution is None:
        return None
    parts = (*_BUILD, *_BACKEND, *_KERNELS, *_BESIDE)
    value: dict[str, Any] = {
        "schema": SCHEMA,
        "backend": _chosen(execution, _BACKEND),
        "build": {
            **_chosen(execution, _BUILD),
            "kiln": receipt.kiln["package_version"],
            "plugins": {plugin.distribution: plugin.version for plugin in receipt.plugins},
        },
        "model": {
            "base_model_weights_sha256": receipt.model["base_weight_shards"]["sha256"],
            "config_sha256": receipt.model["config_sha256"],
            "training_chat_template_sha256": receipt.tokenizer["training_chat_template_sha256"],
        },
        "precision": execution["precision"],
        "kernels": {**_chosen(execution, _KERNELS), "optimizer": receipt.hyperparameters["optimizer"]["kind"]},
        "configuration": {key: item for key, item in execution.items() if key not in parts},
    }
    plain = msgspec.to_builtins(value)
    return {**plain, "provenance_sha256": "sha256:" + sha256_hex(canonical_json(plain))}


def _chosen(execution: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: execution[name] for name in names if name in execution}
