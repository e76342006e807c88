"""Rows of products in whole tiles of 16, in bfloat16 on a CPU alone, and what is put behind them thrown away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kiln_stages.training.model import LanguageModel
from kiln_stages.training.tiles import in_tiles
from torch import nn
from training.tiny_models import tiny_causal


@pytest.mark.parametrize(("rows", "tiled"), [(1, 16), (15, 16), (16, 16), (17, 32), (128, 128)])
def test_rows_of_zeros_make_tiles_whole(rows: int, tiled: int) -> None:
    given = torch.randn(rows, 3).bfloat16()
    found = in_tiles(given)
    assert found.shape == (tiled, 3)
    assert torch.equal(found[:rows], given) and not found[rows:].any()
    assert in_tiles(given.float()) is not given and in_tiles(given.float()).shape == (rows, 3)


@pytest.mark.parametrize(("dtype", "seen"), [(torch.float32, 5), (torch.bfloat16, 16)])
def test_head_and_last_feed_forward_block_work_on_whole_tiles(dtype: torch.dtype, seen: int) -> None:
    model = LanguageModel(tiny_causal("llama").to(dtype))
    model.add_lora(4, 8.0, 42)
    counts: dict[str, int] = {}

    def count(name: str) -> Any:
        return lambda module, args: counts.update({name: args[0].shape[-2]})

    head: nn.Module = model.causal.get_submodule("lm_head")
    head.register_forward_pre_hook(count("head"))
    block: Any = model.causal.get_submodule("model.layers.1.mlp")
    plain = block.forward.args[0]  # of the partial function: the block as it is at any rows
    block.forward = type(block.forward)(
        block.forward.func, lambda x: counts.update(block=x.shape[-2]) or plain(x), *block.forward.args[1:]
    )
    states = model.states_at(torch.arange(40), torch.tensor([3, 9, 21, 22, 39]))
    logits = model.project(states)
    assert counts == {"head": seen, "block": seen}
    assert len(states) == len(logits) == 5
