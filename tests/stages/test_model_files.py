"""What admission reads of a model directory, and what it says where something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kiln_stages.admitting.model_files import choose_template, load_model_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model directory with a byte-level tokenizer as ``tokenizer.json``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["some text to learn merges from", "some more text"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 1024}))
    return tmp_path


def test_positions_and_special_tokens(directory: Path) -> None:
    files = load_model_files(directory)
    assert files.positions == 1024
    assert files.special_tokens == {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    assert set(files.file_digests()) == {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"}


def test_without_tokenizer_json_transformers_gives_the_same_ids(directory: Path) -> None:
    text = "some text, and text that is new: é 漢字"
    own = Tokenizer.from_str(load_model_files(directory).tokenizer_json).encode(text, add_special_tokens=False).ids
    (directory / "tokenizer.json").unlink()
    fallback = load_model_files(directory)
    assert Tokenizer.from_str(fallback.tokenizer_json).encode(text, add_special_tokens=False).ids == own
    assert fallback.special_tokens["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(directory: Path, name: str) -> None:
    (directory / name).write_text("{")
    with pytest.raises(KilnError, match=name) as caught:
        load_model_files(directory)
    assert caught.value.code == "KLN302"


def test_a_missing_directory_and_a_missing_config(directory: Path, tmp_path: Path) -> None:
    for path, what in ((tmp_path / "nowhere", "does not exist"), (directory, "config.json is missing")):
        (directory / "config.json").unlink(missing_ok=True)
        with pytest.raises(KilnError, match=what) as caught:
            load_model_files(path)
        assert caught.value.exit_code == 3


def test_where_the_template_comes_from(directory: Path, plugins: Plugins, tmp_path: Path) -> None:
    """The model's own, from either place; plain ChatML by name where it has none; a registered one; a file."""
    files = load_model_files(directory)
    assert choose_template("model", files, plugins.templates, tmp_path).name == "chatml"
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from the list"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": named}))
    assert choose_template("model", load_model_files(directory), plugins.templates, tmp_path).source == "from the list"
    (directory / "chat_template.jinja").write_text("from the file")
    assert choose_template("model", load_model_files(directory), plugins.templates, tmp_path).source == "from the file"
    (tmp_path / "mine.jinja").write_text("mine")
    assert choose_template("mine.jinja", files, plugins.templates, tmp_path).source == "mine"
    with pytest.raises(KilnError, match="chatml"):
        choose_template("chatmll", files, plugins.templates, tmp_path)
