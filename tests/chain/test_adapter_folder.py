"""Report A4: what lies beside the adapter renders and encodes as the training did; a second stage hears of a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_stages.admitting.contract import load_terms
from kiln_stages.training.tokenizer_copy import write_tokenizer
from tiny_model import CHATML, RUN, Kiln

from kiln_cli import KilnError
from kiln_cli.config import load_config
from kiln_cli.plugins import Plugins
from kiln_cli.stage_manifests import TemplateUsed

ROWS = (
    '{"messages":[{"role":"user","content":"What is the weather?"},{"role":"assistant","content":"city 17"}]}\n'
    '{"messages":[{"role":"user","content":"And today?"},{"role":"assistant","content":"city number 17"}]}\n'
)
OTHER = CHATML.replace("{% for message", "{{ bos_token }}\n{% for message")
ADAPTER = f"{RUN}/train/adapter"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, admitted: Path, kiln: Kiln) -> Path:
    """A project trained under a template of its own, T1, which is not the model's."""
    project = tmp_path_factory.mktemp("a4")
    (project / "model").symlink_to((admitted / "model").resolve())
    (project / "rows.jsonl").write_text(ROWS)
    (project / "t1.jinja").write_text(OTHER)
    (project / "kiln.toml").write_text(
        'schema = "kiln.config.v1"\n[model]\npath = "model"\nid = "tiny"\n'
        '[admit]\nfile = "rows.jsonl"\ntemplate = "t1.jinja"\n'
        "[train]\nepochs = 1\nlora_rank = 2\nlora_alpha = 4.0\nthreads = 1\n"
    )
    for stage in ("admit", "train"):
        done = kiln(stage, project / "kiln.toml", "--out", project / RUN)
        assert done.code == 0, done.err
    return project


def template_sha256(project: Path, run: str) -> str:
    manifest = json.loads((project / run / "admit_manifest.json").read_bytes())
    found: str = manifest["details"]["template"]["sha256"]
    return found


def test_a4_the_adapters_folder_holds_the_very_template_used(trained: Path, kiln: Kiln) -> None:
    data = (trained / ADAPTER / "chat_template.jinja").read_bytes()
    assert data.decode() == OTHER
    receipt = json.loads((trained / RUN / "train_receipt.json").read_bytes())
    assert receipt["tokenizer"]["template"]["sha256"] == "sha256:" + hashlib.sha256(data).hexdigest()
    assert kiln("verify-receipt", trained / RUN).code == 0


def test_a4_transformers_renders_and_encodes_as_the_training_did(trained: Path) -> None:
    from transformers import AutoTokenizer

    loaded: Any = AutoTokenizer.from_pretrained(str(trained / ADAPTER), local_files_only=True)
    model: Any = AutoTokenizer.from_pretrained(str(trained / "model"), local_files_only=True)
    messages = json.loads(ROWS.splitlines()[0])["messages"]
    assert loaded.apply_chat_template(messages, tokenize=False).startswith("<|endoftext|>")
    assert loaded.apply_chat_template(messages, tokenize=False) != model.apply_chat_template(messages, tokenize=False)
    text = "What is the weather like in city number 17? <|im_end|>"
    assert loaded(text)["input_ids"] == model(text)["input_ids"]
    assert loaded.special_tokens_map == model.special_tokens_map


def test_a4_a_second_admission_from_the_folder_has_the_equal_hash(trained: Path, kiln: Kiln) -> None:
    done = kiln(
        "admit", "--file", trained / "rows.jsonl", "--model", trained / ADAPTER, "--out", trained / "from-adapter"
    )
    assert done.code == 0, done.err
    assert template_sha256(trained, "from-adapter") == template_sha256(trained, RUN)
    ids = [
        json.loads((trained / run / "admit_manifest.json").read_bytes())["details"]["admitted_sha256"]
        for run in ("from-adapter", RUN)
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize("template, same", [("t1.jinja", True), ("model", False)])
def test_a4_a_second_stage_on_the_adapter_is_told_of_its_template(
    template: str, same: bool, trained: Path, kiln: Kiln, tmp_path: Path
) -> None:
    settings = ["--set", f"train.base_adapter={ADAPTER}", "--set", f"admit.template={template}"]
    done = kiln("admit", trained / "kiln.toml", *settings, "--out", tmp_path / "second")
    assert done.code == 0, done.err
    sha256 = template_sha256(trained, RUN)
    if same:
        assert f"the chat template is the one of base adapter {ADAPTER}: {sha256}" in done.err
        return
    assert f"base adapter {ADAPTER} was trained under {sha256}; what differs:" in done.err
    assert "-{{ bos_token }}" in done.err


def test_a_template_that_is_not_the_admitted_one_is_not_written(
    trained: Path, plugins: Plugins, tmp_path: Path
) -> None:
    terms = load_terms(load_config(trained / "kiln.toml"), plugins)
    with pytest.raises(
        KilnError, match=r"t1\.jinja changed after `kiln admit`: sha256:\w{64}, expected sha256:0"
    ) as caught:
        write_tokenizer(terms, TemplateUsed(name="x", sha256="sha256:" + "0" * 64), tmp_path, tmp_path)
    assert caught.value.code == "KLN207"
    assert not list(tmp_path.iterdir())


def test_an_adapter_without_a_template_is_said_to_have_none(trained: Path, kiln: Kiln, tmp_path: Path) -> None:
    settings = ["--set", "train.base_adapter=elsewhere"]
    done = kiln("admit", trained / "kiln.toml", *settings, "--out", tmp_path / "second")
    assert done.code == 0, done.err
    assert "base adapter elsewhere holds no chat_template.jinja" in done.err


def test_a_template_inside_the_tokenizers_settings_is_not_copied(
    trained: Path, kiln: Kiln, copy_of: Callable[..., Path]
) -> None:
    """The folder must hold one template and no other, whichever place a reader looks first."""
    project = copy_of(trained, own_model=True)
    path = project / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": "{{ 'stale' }}"}))
    for stage in ("admit", "train"):
        extra = ["--fresh"] if stage == "train" else []
        done = kiln(stage, project / "kiln.toml", "--out", project / RUN, *extra)
        assert done.code == 0, done.err
    assert "chat_template" not in json.loads((project / ADAPTER / "tokenizer_config.json").read_text())
