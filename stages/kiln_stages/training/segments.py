"""``grad_checkpoint_segments``: decoder layers in segments, of which only the inputs are kept for the backward pass.

A segment's layers run once without keeping anything, and again, one segment at a time, in the backward. The same
operations run on the same values, so that losses and gradients have the same bits; memory falls, and time rises by up
to one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kiln_cli.errors import KilnError
from kiln_stages.training.fast_paths import ReadRows


class Call(NamedTuple):
    """What the decoder asked of one layer, beside the hidden states."""

    forward: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_layers(decoder: nn.Module, segments: int, read: ReadRows) -> list[int]:
    """Makes ``decoder`` run its layers in that many segments, in place; returns how many layers each has.

    ``read`` is what a pass is made for: a segment runs again for the same rows.

    Raises KilnError KLN214 where the decoder has fewer layers, or keeps them in no list that can be found.
    """
    layers = _layers_of(decoder)
    if segments > len(layers):
        raise KilnError(
            "KLN214",
            f"grad_checkpoint_segments = {segments} is more than the model's {len(layers)} decoder layers",
            hint=f"ask for 1 to {len(layers)} segments",
        )
    size, longer = divmod(len(layers), segments)
    sizes = [size + (place < longer) for place in range(segments)]
    begin = 0
    for size in sizes:
        _Segment(layers[begin : begin + size], read)
        begin += size
    return sizes


class _Segment:
    """Takes the place of its layers' ``forward``: the calls are collected, and the last one runs them all.

    Between layers a decoder only hands hidden states on, so that a layer whose call is only collected may hand on what
    it got. :meth:`LanguageModel.split_layers` proves it for the model at hand.
    """

    def __init__(self, layers: list[nn.Module], read: ReadRows) -> None:
        self._read = read
        self._calls: list[Call] = []
        self._input: Tensor | None = None
        for layer in layers:
            layer.forward = self._deferred(layer.forward, first=layer is layers[0], last=layer is layers[-1])

    def _deferred(self, forward: Callable[..., Tensor], *, first: bool, last: bool) -> Callable[..., Tensor]:
        def deferred(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not torch.is_grad_enabled():
                return forward(hidden, *args, **kwargs)
            if first:  # what an interrupted pass left is dropped
                self._calls, self._input = [], hidden
            self._calls.append(Call(forward, args, kwargs))
            if not last:
                return hidden
            calls, begin = self._calls, self._input
            self._calls, self._input = [], None
            rows = self._read.rows
            again = checkpoint(self._run, begin, calls, rows, use_reentrant=False, preserve_rng_state=False)
            return cast(Tensor, again)

        return deferred

    def _run(self, hidden: Tensor, calls: list[Call], rows: Tensor | None) -> Tensor:
        """hidden [1, T, H] -> the same behind all the layers."""
        with self._read.only(rows):
            for call in calls:
                hidden = call.forward(hidden, *call.args, **call.kwargs)
                if not isinstance(hidden, Tensor):
                    raise TypeError(f"a layer returns {type(hidden).__name__}, not its hidden states")
        return hidden


def _layers_of(decoder: nn.Module) -> list[nn.Module]:
    """The decoder's list of layers: the one of its own lists that is as long as its config says."""
    count = int(cast(Any, decoder).config.get_text_config().num_hidden_layers)
    found = [list(child) for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    if len(found) != 1:
        raise KilnError(
            "KLN214",
            f"the model's {count} decoder layers cannot be told: {len(found)} lists of that length",
            hint="leave out [train] grad_checkpoint_segments",
        )
    return found[0]
