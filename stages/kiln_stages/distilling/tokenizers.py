"""Which tokenizer a student has, in the terms of a teacher's identity, and how it must agree with the teacher's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.files import read_bounded
from kiln_cli.identity import canonical_json, sha256_hex
from kiln_stages.admitting.model_files import FILE_LIMIT, ModelFiles, missing, tokenizer_settings
from kiln_stages.distilling.identity import vocabulary_sha256


class TokenizerIdentity(msgspec.Struct, frozen=True):
    """Hex digests without a prefix, as in ``TeacherIdentity``."""

    vocab_sha256: str
    config_sha256: str


def tokenizer_identity(files: ModelFiles) -> TokenizerIdentity:
    """Of a model directory: the vocabulary, and the settings with the model's own chat template.

    Raises KilnError KLN302 for a ``tokenizer.json`` without a vocabulary.
    """
    return TokenizerIdentity(
        vocabulary_sha256(files.tokenizer_json).removeprefix("sha256:"),
        tokenizer_config_sha256(files.directory, files.chat_template),
    )


def tokenizer_config_sha256(model: Path, chat_template: str | None) -> str:
    """SHA-256 (hex) of the canonical JSON of a tokenizer's settings and of the chat template beside them."""
    value = {"tokenizer_config": tokenizer_settings(model), "chat_template": chat_template}
    return sha256_hex(canonical_json(value))


def vocabulary_size(model: Path) -> int:
    """Rows of the output projection, as the model's config has them; a tokenizer may use fewer.

    Raises KilnError KLN302 where the config does not say.
    """
    config: Any = json.loads(read_bounded(model / "config.json", FILE_LIMIT))
    for settings in (config, config.get("text_config") or {}):
        if isinstance(settings.get("vocab_size"), int):
            return int(settings["vocab_size"])
    raise missing(model, "config.json states no vocab_size")
