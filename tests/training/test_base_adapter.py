"""``[train] base_adapter``: a training that begins with an adapter's values; what does not fit is named, each thing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import resume, train, verify_receipt
from kiln_stages.training.base_adapter import MODEL, read_base_adapter
from kiln_stages.training.checkpoint import list_checkpoints
from kiln_stages.training.tensors import StoredTensor, adapter_content_sha256, encode_tensors, read_tensors
from kiln_stages.training.trainer import Trainer
from training.admitted_run import admitted_run
from training.tiny_models import make_plan

from kiln_cli import KilnError
from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.manifests import document, read_receipt
from kiln_cli.plugins import Plugins

Edit = Callable[[Path], None]
LINK = "the base adapter is that of the training of run/train_receipt.json"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, plugins: Plugins) -> Path:
    """A project with a finished run ``run``; ``second`` has the same rows, admitted and not trained."""
    directory = tmp_path_factory.mktemp("first")
    config, out = admitted_run(directory)
    shutil.copytree(out, directory / "second")
    train.run(config, out, plugins)
    return directory


@pytest.fixture
def project(first: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(first, tmp_path / "project"))


def load(project: Path, *assignments: str) -> LoadedConfig:
    return load_config(project / "kiln.toml", ["train.base_adapter=run/train/adapter", *assignments])


def tensors_of(adapter: Path) -> list[StoredTensor]:
    return read_tensors((adapter / MODEL).read_bytes())


def test_a_training_begins_with_the_base_adapters_values(model_dir: Path, tmp_path: Path) -> None:
    whole = Trainer(make_plan(model_dir, epochs=2))
    list(whole.steps())
    whole.write_adapter(tmp_path)
    base = read_base_adapter(tmp_path, "base")
    assert base.content_sha256 == adapter_content_sha256(whole.adapter_tensors())
    begun = Trainer(make_plan(model_dir, epochs=2, base_adapter=base))
    assert begun.adapter_tensors() == whole.adapter_tensors()
    losses = [record.loss for record in begun.steps()]
    assert sum(losses[:4]) < sum(whole.state.loss_history[:4])


def test_the_base_adapter_is_in_receipt_checkpoint_and_training_file(project: Path, plugins: Plugins) -> None:
    out = project / "second"
    train.run(load(project), out, plugins)
    base = read_base_adapter(project / "run" / "train" / "adapter", "run/train/adapter")
    receipt = read_receipt(out / "train_receipt.json")
    made_by = read_receipt(project / "run" / "train_receipt.json")
    link = {"path": "run/train_receipt.json", "content_sha256": made_by.content_sha256}
    assert receipt.adapters["base"] == {**base.in_receipt(), "receipt": link}
    assert receipt.hyperparameters["init"] == "base_adapter"
    assert json.loads((out / "train" / "training.json").read_bytes())["base_adapter_sha256"] == base.content_sha256
    for _, path in list_checkpoints(out / "train"):
        manifest = json.loads((path / "checkpoint_manifest.json").read_bytes())
        assert manifest["auxiliary_state"]["base_adapter_sha256"] == base.content_sha256
    verdict = verify_receipt.run(out)
    assert verdict.named("fails") == []
    assert "the base adapter is the one begun with" in [claim.name for claim in verdict.claims]
    assert LINK in verdict.named("holds")
    assert train.run(load(project), out, plugins).unchanged


def test_an_adapter_without_a_receipt_is_no_link(project: Path, plugins: Plugins) -> None:
    shutil.copytree(project / "run" / "train" / "adapter", project / "alone")
    out = project / "second"
    train.run(load(project, "train.base_adapter=alone"), out, plugins)
    assert read_receipt(out / "train_receipt.json").adapters["base"]["receipt"] is None
    verdict = verify_receipt.run(out)
    assert verdict.named("fails") == []
    assert not [one for one in verdict.claims if one.name.startswith("the base adapter is that of")]


def test_an_adapter_that_is_not_its_receipts_is_refused(project: Path, plugins: Plugins) -> None:
    _edit_tensors(lambda one: one._replace(data=bytes(len(one.data))), keep_receipt=True)(
        project / "run" / "train" / "adapter"
    )
    with pytest.raises(KilnError, match=r"is not the one of its train_receipt\.json: ") as caught:
        train.run(load(project), project / "second", plugins)
    assert caught.value.code == "KLN207"


def test_the_link_is_walked_back(project: Path, plugins: Plugins) -> None:
    """A third training on top of the second; then the first one's receipt is changed, and then it is gone."""
    shutil.copytree(project / "second", project / "third")
    train.run(load(project), project / "second", plugins)
    train.run(load(project, "train.base_adapter=second/train/adapter"), project / "third", plugins)
    links = [LINK.replace("run/", "second/"), LINK]
    held = verify_receipt.run(project / "third").named("holds")
    assert [name for name in held if name.startswith("the base adapter is that of")] == links
    path = project / "run" / "train_receipt.json"
    receipt = read_receipt(path)
    receipt.adapter_name = "other"
    receipt.seal()
    path.write_bytes(document(receipt))
    assert verify_receipt.run(project / "third").named("fails") == [LINK]
    path.unlink()
    verdict = verify_receipt.run(project / "third")
    assert verdict.named("fails") == [] and verdict.named("not checkable here") == [LINK]


def test_a_receipt_that_was_made_again_is_another_base(project: Path, plugins: Plugins) -> None:
    """The same tensors from a training that says something else: the finished run names the old one, and is refused."""
    train.run(load(project), project / "second", plugins)
    path = project / "run" / "train_receipt.json"
    receipt = read_receipt(path)
    receipt.token_counts["context_tokens"] += 1
    receipt.seal()
    path.write_bytes(document(receipt))
    with pytest.raises(KilnError, match="holds this training, unfinished"):
        train.run(load(project), project / "second", plugins)
    path.unlink()
    assert train.run(load(project), project / "second", plugins).unchanged


def test_another_base_adapter_is_another_training(project: Path, plugins: Plugins) -> None:
    out = project / "second"
    train.run(load(project), out, plugins)
    # Its receipt goes, too: beside it, other tensors are refused before they are compared.
    _edit_tensors(lambda one: one._replace(data=bytes(len(one.data) - 1) + b"\1"))(
        project / "run" / "train" / "adapter"
    )
    (failing,) = [line for line in verify_receipt.run(out).claims if line.status == "fails"]
    assert failing.name == "the base adapter is the one begun with"
    with pytest.raises(KilnError, match="holds a training of another base adapter: sha256:") as caught:
        train.run(load(project), out, plugins)
    assert caught.value.code == "KLN208"
    (out / "train_receipt.json").unlink()
    shutil.rmtree(out / "train" / "adapter")
    with pytest.raises(KilnError, match=r"bound\.base_adapter_sha256") as caught:
        resume.run(load(project), out, plugins)
    assert caught.value.code == "KLN209"


def test_a_cut_training_goes_on_from_its_checkpoint_not_from_the_base(project: Path, plugins: Plugins) -> None:
    out = project / "second"
    train.run(load(project), out, plugins)
    before = (out / "train" / "adapter" / MODEL).read_bytes()
    (out / "train_receipt.json").unlink()
    shutil.rmtree(out / "train" / "adapter")
    assert resume.run(load(project), out, plugins).resumed_from == 8
    assert (out / "train" / "adapter" / MODEL).read_bytes() == before


def _edit_config(**changes: Any) -> Edit:
    def edit(adapter: Path) -> None:
        path = adapter / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def _edit_tensors(change: Callable[[StoredTensor], StoredTensor | None], *, keep_receipt: bool = False) -> Edit:
    """Changes the first tensor; None takes it away. The receipt that vouches for the adapter goes unless it is kept."""

    def edit(adapter: Path) -> None:
        one, *rest = tensors_of(adapter)
        changed = change(one)
        (adapter / MODEL).write_bytes(encode_tensors([*([changed] if changed else []), *rest]))
        if not keep_receipt:
            (adapter.parents[1] / "train_receipt.json").unlink()

    return edit


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (_edit_config(r=4), ["r", "4", "2"]),
        (_edit_config(lora_alpha=8), ["lora_alpha", "8", "4.0"]),
        (_edit_config(use_dora=True), ["use_dora", "True", "False"]),
        (_edit_config(use_rslora=True), ["use_rslora", "True", "False"]),
        (_edit_config(bias="all"), ["bias", "all", "none"]),
        (_edit_config(peft_type="IA3"), ["peft_type", "IA3", "LORA"]),
        (_edit_config(modules_to_save=["lm_head"]), ["modules_to_save", "['lm_head']", "None"]),
        (_edit_tensors(lambda one: None), [FIRST, "(absent)", "F32 [2, 48]"]),
        (_edit_tensors(lambda one: one._replace(shape=(48, 2))), [FIRST, "F32 [48, 2]", "F32 [2, 48]"]),
        (
            _edit_tensors(lambda one: one._replace(dtype="BF16", data=one.data[::2])),
            [FIRST, "BF16 [2, 48]", "F32 [2, 48]"],
        ),
    ],
)
def test_each_difference_is_named(edit: Edit, line: list[str], project: Path, plugins: Plugins) -> None:
    edit(project / "run" / "train" / "adapter")
    with pytest.raises(KilnError) as caught:
        train.run(load(project), project / "second", plugins)
    assert caught.value.code == "KLN217"
    head, _, found = caught.value.message.splitlines()
    assert "does not fit: 1 thing differs" in head
    assert [part.strip() for part in found.split("  ") if part.strip()] == line
    assert not (project / "second" / "train").exists()


@pytest.mark.parametrize(
    ("assignments", "named"),
    [
        (["train.lora_rank=4"], {"r", FIRST}),
        (["train.target_modules=['q_proj']"], {FIRST}),
        (["train.dtype=bfloat16"], {FIRST}),
        (["train.lora_alpha=2.0"], {"lora_alpha"}),
    ],
)
def test_another_training_than_the_adapters_is_refused(
    assignments: list[str], named: set[str], project: Path, plugins: Plugins
) -> None:
    with pytest.raises(KilnError) as caught:
        train.run(load(project, *assignments), project / "second", plugins)
    assert caught.value.code == "KLN217"
    assert isinstance(caught.value.details, dict)
    assert named <= {each["what"] for each in caught.value.details["differences"]}


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name: str, project: Path, plugins: Plugins) -> None:
    (project / "run" / "train" / "adapter" / name).unlink()
    with pytest.raises(KilnError, match=f"the base adapter is missing: .* has no {name}") as caught:
        train.run(load(project), project / "second", plugins)
    assert caught.value.code == "KLN204"


@pytest.mark.parametrize(
    "name, text",
    [
        ("adapter_config.json", "[]"),
        ("adapter_config.json", "{"),
        pytest.param("adapter_config.json", "[" * 200_000, id="deep"),
        pytest.param("adapter_config.json", '{"r": 2, "r": 4}', id="twice"),
        (MODEL, "x"),
    ],
)
def test_a_damaged_file_is_named(name: str, text: str, project: Path, plugins: Plugins) -> None:
    (project / "run" / "train" / "adapter" / name).write_text(text)
    with pytest.raises(KilnError) as caught:
        train.run(load(project), project / "second", plugins)
    assert caught.value.code == "KLN206"
