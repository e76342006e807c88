"""What admission needs of a model directory: tokenizer, chat template, special tokens, positions. No weights, no torch.

Everything is read from ``tokenizer.json`` and the small JSON files beside it, since importing transformers costs two
seconds; transformers is the fallback for a tokenizer without that file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.extensions import Template
from kiln_cli.files import hash_file, read_bounded
from kiln_cli.identity import sha256_hex
from kiln_cli.registry import Registry
from kiln_cli.stage_manifests import AdmitDetails, TemplateUsed
from kiln_cli.text import printable

FILE_LIMIT = 256 * 1024 * 1024
# The files that decide what a text tokenizes to and how a conversation renders.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ModelFiles(msgspec.Struct, frozen=True):
    """``tokenizer_json``: the text of a ``tokenizer.json``. ``special_tokens`` maps names as templates use them
    (``bos_token``) to texts. ``positions`` is None where the config states none."""

    directory: Path
    tokenizer_json: str
    special_tokens: dict[str, str]
    chat_template: str | None
    positions: int | None

    def file_digests(self) -> dict[str, str]:
        """SHA-256 (hex) of each tokenizer file that the directory has."""
        present = (name for name in TOKENIZER_FILES if (self.directory / name).is_file())
        return {name: hash_file(self.directory / name)[0] for name in present}


class TemplateChoice(msgspec.Struct, frozen=True):
    name: str
    source: str

    @property
    def sha256(self) -> str:
        return "sha256:" + sha256_hex(self.source.encode("utf-8"))

    def used(self) -> TemplateUsed:
        """What evidence says of it."""
        return TemplateUsed(name=self.name, sha256=self.sha256)


def load_model_files(directory: Path) -> ModelFiles:
    """Raises KilnError KLN302 where the directory or what admission needs of it is missing."""
    if not directory.is_dir():
        raise missing(directory, "the model directory does not exist")
    # An adapter's folder has the tokenizer of its training, and no config of a model.
    config = _json_file(directory / "config.json", required=not (directory / "adapter_config.json").is_file())
    if (directory / "tokenizer.json").is_file():
        tokenizer_json = _text_file(directory / "tokenizer.json")
        settings = _json_file(directory / "tokenizer_config.json", required=False)
        special_tokens = _special_tokens(settings | _json_file(directory / "special_tokens_map.json", required=False))
        template = _chat_template(directory, settings)
    else:
        tokenizer_json, special_tokens, template = _through_transformers(directory)
    positions = _positions(config) if config else _longest(tokenizer_settings(directory))
    return ModelFiles(directory, tokenizer_json, special_tokens, template, positions)


def tokenizer_settings(directory: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` with the special tokens of the file beside it, and without a chat template."""
    settings = _json_file(directory / "tokenizer_config.json", required=False)
    settings |= _json_file(directory / "special_tokens_map.json", required=False)
    return {name: value for name, value in settings.items() if name != "chat_template"}


def choose_template(wanted: str, files: ModelFiles, templates: Registry[Template], base_dir: Path) -> TemplateChoice:
    """The template of ``[admit] template``: "model", a registered name, or a file.

    Raises KilnError KLN212 for a name that is none of these. A model without a template gets plain ChatML, by name.
    """
    if wanted == "model":
        if files.chat_template is not None:
            return TemplateChoice("model", files.chat_template)
        return TemplateChoice("chatml", templates.get("chatml").source)
    if wanted in templates:
        return TemplateChoice(wanted, templates.get(wanted).source)
    path = base_dir / wanted
    if path.is_file():
        return TemplateChoice(path.name, _text_file(path))
    templates.get(wanted)  # raises with the names there are
    raise AssertionError


def tokenizer_identity(directory: Path, details: AdmitDetails) -> dict[str, Any]:
    """What a train receipt says of the tokenizer: the files and the template that admission recorded in ``details``,
    and by name the digests of the tokenizer's config, of the model's own chat template (as text, wherever it lies) and
    of the one that was trained under. Null for a file or template that the model does not have."""
    config = details.tokenizer.get("tokenizer_config.json")
    own = _chat_template(directory, _json_file(directory / "tokenizer_config.json", required=False))
    return {
        "files": details.tokenizer,
        "template": msgspec.to_builtins(details.template),
        "tokenizer_config_sha256": f"sha256:{config}" if config is not None else None,
        "chat_template_sha256": "sha256:" + sha256_hex(own.encode("utf-8")) if own is not None else None,
        "training_chat_template_sha256": details.template.sha256,
    }


def missing(directory: Path, what: str) -> KilnError:
    return KilnError(
        "KLN302",
        f"{printable(directory)}: {what}",
        hint="for the default model run `python fixtures/fetch_model.py`; else mend [model] path",
    )


def _text_file(path: Path) -> str:
    try:
        return read_bounded(path, FILE_LIMIT).decode("utf-8")
    except UnicodeDecodeError as error:
        raise missing(path.parent, f"{path.name} is no UTF-8: {error.reason} at byte {error.start}") from None


def _json_file(path: Path, *, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise missing(path.parent, f"{path.name} is missing")
        return {}
    # Plain JSON, not the contract for rows: Hugging Face writes model_max_length as an integer of 31 digits.
    try:
        value = json.loads(_text_file(path))
    except ValueError as error:
        raise missing(path.parent, f"{path.name} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise missing(path.parent, f"{path.name} is damaged: it holds no object")
    return value


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    tokens = {}
    for name in SPECIAL_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_template(directory: Path, settings: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _text_file(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the default one is for conversations
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _positions(config: dict[str, Any]) -> int | None:
    inner = config.get("text_config")
    for settings in (config, inner if isinstance(inner, dict) else {}):
        for name in ("max_position_embeddings", "n_positions"):
            if isinstance(settings.get(name), int):
                return int(settings[name])
    return None


def _longest(settings: dict[str, Any]) -> int | None:
    """The length that a tokenizer's settings state; a number of 31 digits there means none."""
    length = settings.get("model_max_length")
    return length if isinstance(length, int) and 0 < length < 10**9 else None


def _through_transformers(directory: Path) -> tuple[str, dict[str, str], str | None]:
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer
    except ImportError:
        raise missing(directory, "tokenizer.json is missing, and reading others needs `kiln-toolkit[train]`") from None
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise missing(directory, f"no tokenizer can be loaded: {error}") from None
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise missing(directory, "its tokenizer has no fast form, so labels cannot be mapped by offsets")
    tokens = {name: text for name, text in loaded.special_tokens_map.items() if name in SPECIAL_TOKENS}
    template = loaded.chat_template
    return backend.to_str(), tokens, template if isinstance(template, str) else None
