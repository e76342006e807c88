"""A model's own output head, apart from its decoder: the projection and all that the model does after it.

The head is the model itself with its decoder replaced by one that hands rows through, so scaling and soft caps are the
model's. Where the logits of a few tokens are all that is needed, the output projection is replaced too, by one that
computes these columns alone; a probe at load decides whether that gives what the head gives.

Axes: n rows, H hidden size, V vocabulary, K tokens of interest at each row.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.training.tiles import in_tiles

CHUNK = 128  # rows at a time: bounds what is kept of the weights or logits of one chunk
PROBE_IDS = 5  # tokens a row that the probe of the columns compares


class ColumnsProbe(NamedTuple):
    """Whether columns of the output weight stand for the head. ``relative``: the largest difference from gathered
    logits / the largest logit; None where the columns cannot be computed. ``why`` they are not used; "" where they are.
    """

    used: bool
    relative: float | None
    why: str = ""


class OutputHead:
    """The head of a causal language model. Calling it gives all logits, :meth:`at` those of a few tokens."""

    def __init__(self, causal: nn.Module) -> None:
        self.module = _head_only(causal)
        self._projection = cast(Any, causal).get_output_embeddings()
        self.columns = ColumnsProbe(used=False, relative=None, why="they were not compared with the head")

    def __call__(self, rows: Tensor) -> Tensor:
        """rows [n, H] -> logits [n, V]."""
        logits: Tensor = self.module(inputs_embeds=in_tiles(rows).unsqueeze(0), use_cache=False).logits  # [1, n, V]
        return logits.squeeze(0)[: len(rows)]

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        """rows [n, H], ids [n, K] int64 in 0..V-1 -> logits [n, K].

        By columns of the output weight where they are proven, else by whole logits that are gathered and forgotten.
        Chunks are computed again in the backward pass, so that neither n x K x H nor n x V is ever held.
        """
        compute = self._by_columns if self.columns.used else self._gathered
        if len(rows) <= CHUNK:
            return compute(rows, ids)
        parts = [
            checkpoint(compute, rows[part], ids[part], use_reentrant=False, preserve_rng_state=False)
            for part in (slice(begin, begin + CHUNK) for begin in range(0, len(rows), CHUNK))
        ]
        return torch.cat(cast(list[Tensor], parts))

    @torch.no_grad()
    def prove_columns(self, rows: Tensor, bound: float) -> None:
        """Decides whether :meth:`at` may use columns: on ``rows`` they must give the head's own logits, to ``bound``
        relative to the largest."""
        whole = self(rows)  # [n, V]
        n, vocabulary = whole.shape
        ids = torch.arange(n * PROBE_IDS, device=rows.device).mul(7919).add(3).remainder(vocabulary).view(n, PROBE_IDS)
        try:
            found = self._by_columns(rows, ids).float()
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            self.columns = ColumnsProbe(used=False, relative=None, why=f"they cannot be computed: {printable(error)}")
            return
        wanted = whole.gather(-1, ids).float()
        if found.shape != wanted.shape:
            why = f"they have shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
            self.columns = ColumnsProbe(used=False, relative=None, why=why)
            return
        relative = float((found - wanted).abs().max() / whole.float().abs().max().clamp(min=1e-30))
        holds = relative <= bound  # false for NaN
        why = "" if holds else f"they differ from the head by {relative:.3g} of the largest logit, bound {bound:g}"
        self.columns = ColumnsProbe(used=holds, relative=relative, why=why)

    def _gathered(self, rows: Tensor, ids: Tensor) -> Tensor:
        return self(rows).gather(-1, ids)

    def _by_columns(self, rows: Tensor, ids: Tensor) -> Tensor:
        """The head's own code over an output projection of K columns a row. What the model does after the projection
        acts on each logit by itself, or the probe refuses it."""
        projection = self._projection
        name = next((name for name, layer in self.module._modules.items() if layer is projection), None)
        if name is None or type(projection) is not nn.Linear:
            raise TypeError(f"the output projection is {type(projection).__name__}, no plain linear layer of the model")
        head = _with_modules(self.module, {name: _Columns(projection, ids)})
        logits: Tensor = head(inputs_embeds=rows.unsqueeze(0), use_cache=False).logits  # [1, n, K]
        return logits.squeeze(0)


class _Columns(nn.Module):
    """An output projection at ``ids`` [n, K]: another K tokens in each row."""

    def __init__(self, projection: nn.Linear, ids: Tensor) -> None:
        super().__init__()
        self._projection = projection
        self._ids = ids

    def forward(self, rows: Tensor) -> Tensor:
        """rows [1, n, H] -> logits [1, n, K]."""
        weights = self._projection.weight[self._ids]  # [n, K, H]
        logits = torch.bmm(weights, rows.squeeze(0).unsqueeze(-1)).squeeze(-1)  # [n, K]
        if self._projection.bias is not None:
            logits = logits + self._projection.bias[self._ids]
        return logits.unsqueeze(0)


def _head_only(causal: nn.Module) -> nn.Module:
    """The same model, parameters shared, with the decoder replaced by one that hands its input through."""
    prefix = str(cast(Any, causal).base_model_prefix)
    if prefix not in causal._modules:
        raise KilnError(
            "KLN214",
            f"the model cannot be trained by this profile: it has no decoder under the name {prefix!r}",
            hint="choose a decoder-only model",
        )
    return _with_modules(causal, {prefix: _Passthrough()})


def _with_modules(model: nn.Module, modules: dict[str, nn.Module]) -> nn.Module:
    """The same model, parameters shared, with other direct children under these names."""
    other = copy.copy(model)
    # A shallow copy shares its tables of modules with the original: without this line the original would change too.
    other.__dict__["_modules"] = {**model._modules, **modules}
    return other


class _HeadInput:
    """A decoder's output to a head: hidden states, by name or as item 0. Whatever else it asks for is None."""

    def __init__(self, rows: Tensor) -> None:
        self.last_hidden_state = rows

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Passthrough(nn.Module):
    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _HeadInput:
        return _HeadInput(inputs_embeds)
