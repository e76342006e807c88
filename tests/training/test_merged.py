"""``kiln export --merged`` and ``kiln generate``: the trained model as other tools load it, beside base and adapter."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import pytest
import torch
from huggingface_hub import ModelCard
from kiln_stages import export, generate, train
from kiln_stages.training import merging
from peft import PeftModel
from tiny_model import CHATML, write_tiny_model
from training.admitted_run import admitted_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from kiln_cli import KilnError, app
from kiln_cli.plugins import Plugins

TEXT = list(range(3, 200))


def adapted_logits(run: Path, dtype: torch.dtype) -> torch.Tensor:
    """By the few lines that the card shows."""
    base = AutoModelForCausalLM.from_pretrained(str(run.parent / "model"), dtype=dtype)
    model = PeftModel.from_pretrained(base, str(run / "train" / "adapter"), autocast_adapter_dtype=False)
    return logits(model)


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=torch.tensor([TEXT])).logits[0].float()
    return found


def test_the_merged_model_gives_the_adapters_logits(finished: Path, tmp_path: Path) -> None:
    result = export.run_merged(finished, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.dtype == torch.float32
    wanted = adapted_logits(finished, torch.float32)
    assert float((logits(merged) - wanted).abs().max() / wanted.abs().max()) <= 1e-5
    base = logits(AutoModelForCausalLM.from_pretrained(str(finished.parent / "model")))
    assert float((base - wanted).abs().max() / wanted.abs().max()) > 1e-2, "the adapter does something"
    assert result.bound == 1e-5 and result.largest_difference <= 1e-5 and result.proof_tokens > 100


def test_a_bfloat16_training_is_merged_in_bfloat16(tmp_path: Path, plugins: Plugins) -> None:
    config, out = admitted_run(tmp_path)
    train.run(config.replace("train", dtype="bfloat16"), out, plugins)
    result = export.run_merged(out, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(str(tmp_path / "merged"))
    assert merged.dtype == torch.bfloat16 and result.dtype == "bfloat16"
    wanted = adapted_logits(out, torch.bfloat16)
    assert float((logits(merged) - wanted).abs().max() / wanted.abs().max()) <= result.bound


def test_the_directory_is_whole_and_its_card_names_the_base(finished: Path, tmp_path: Path) -> None:
    result = export.run_merged(finished, tmp_path / "merged")
    names = sorted(path.name for path in (tmp_path / "merged").iterdir())
    assert (
        [file.path for file in result.files]
        == names
        == [
            "README.md",
            "chat_template.jinja",
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        ]
    )
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o644 for path in (tmp_path / "merged").iterdir())
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "merged"))
    assert tokenizer.chat_template == CHATML
    card = ModelCard.load(tmp_path / "merged" / "README.md")
    assert (card.data.base_model, card.data.library_name) == ("tiny", "transformers")
    assert f"within {result.largest_difference:.1e}" in card.text
    for path in (tmp_path / "merged").glob("*.[jm]*"):
        assert str(finished.parent).encode() not in path.read_bytes(), path.name


def test_an_existing_directory_is_refused_even_if_it_is_empty(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    with pytest.raises(KilnError, match="exists") as caught:
        export.run_merged(finished, tmp_path / "merged")
    assert caught.value.code == "KLN216" and list((tmp_path / "merged").iterdir()) == []


def test_a_merged_model_of_other_logits_does_not_appear(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(merging.BOUNDS, "float32", 1e-12)
    with pytest.raises(KilnError, match="the merged model's logits differ") as caught:
        export.run_merged(finished, tmp_path / "merged")
    assert caught.value.code == "KLN103" and list(tmp_path.iterdir()) == []


def test_files_that_the_receipt_does_not_vouch_for_are_refused(run: Path, tmp_path: Path) -> None:
    adapter = run / "train" / "adapter" / "adapter_model.safetensors"
    data = adapter.read_bytes()
    adapter.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(KilnError, match=r"adapter_model\.safetensors changed") as caught:
        export.run_merged(run, tmp_path / "merged")
    assert caught.value.code == "KLN207"
    adapter.write_bytes(data)
    write_tiny_model(run.parent / "model", seed=8)
    for call in (
        lambda: export.run_merged(run, tmp_path / "merged"),
        lambda: generate.run(run, row=None, prompt="What?"),
    ):
        with pytest.raises(KilnError, match="other weights than the adapter was trained on") as caught:
            call()
        assert caught.value.code == "KLN207"


def test_a_prompt_is_answered_by_base_and_adapter_the_same_way_each_time(finished: Path) -> None:
    first = generate.run(finished, row=None, prompt="What is the weather?", max_new_tokens=8)
    assert first == generate.run(finished, row=None, prompt="What is the weather?", max_new_tokens=8)
    assert first.prompt == "What is the weather?" and first.expected is None
    assert first.base != first.adapter
    longer = generate.run(finished, row=None, prompt="What is the weather?", max_new_tokens=12)
    assert longer.adapter.startswith(first.adapter) and longer.adapter != first.adapter


def test_generation_is_of_the_most_likely_tokens_after_the_template(finished: Path) -> None:
    """Token by token from the logits, without ``generate``."""
    answer = generate.run(finished, row=None, prompt="What?", max_new_tokens=6)
    tokenizer = AutoTokenizer.from_pretrained(str(finished.parent / "model"))
    turns = [{"role": "user", "content": "What?"}]
    ids: list[int] = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    begin = len(ids)
    base = AutoModelForCausalLM.from_pretrained(str(finished.parent / "model"))
    model = PeftModel.from_pretrained(base, str(finished / "train" / "adapter")).eval()
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert answer.adapter == tokenizer.decode(ids[begin:], skip_special_tokens=True)


def test_the_command_shows_both(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["generate", str(finished), "--prompt", "Hi", "--max-new-tokens", "3", "--json"]) == 0
    value = msgspec.json.decode(capsys.readouterr().out)
    assert value["schema"] == "kiln.generation.v1" and {"prompt", "base", "adapter"} <= value.keys()
    assert app.run(["generate", str(finished), "--row", "1", "--max-new-tokens", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["prompt", "expected", "base", "adapter"]
