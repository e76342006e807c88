"""The four kinds of things a plugin can add. Hooks return these; registries hold them by name.

Every kind has a ``name`` (unique over all plugins) and a ``doc`` (one line, shown by ``kiln plugins``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from kiln_cli.records import Candidate, Record, ToolCallRow

if TYPE_CHECKING:
    import torch

    from kiln_cli.chat import ChatRow
    from kiln_cli.config import DataConfig
    from kiln_cli.lines import Line


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A shape that raw rows come in.

    ``yields`` says what ``convert`` makes of one parsed JSON value: a ToolCallRow for prepare or a ChatRow for admit.
    ``convert`` raises :class:`kiln_cli.RowFault` for a row that has not the shape; it must be a pure function.
    ``reasons`` names the codes, beside the built-in ones, that a chat source's ``convert`` may reject a row for.
    ``recognise`` looks at the first row and says in a few words why it fits, or None.
    ``read`` turns lines into records; the default, one JSON text a line, serves all but sources that are no JSONL.
    """

    name: str
    doc: str
    yields: Literal["tool_calls", "chat"]
    convert: Callable[[dict[str, Any]], ToolCallRow | ChatRow]
    recognise: Callable[[dict[str, Any]], str | None]
    reasons: tuple[str, ...] = ()
    read: Callable[[Iterable[Line]], Iterator[Record]] | None = None


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A chat template by name: ``source`` is Jinja text, rendered in a sandbox as Hugging Face tokenizers do."""

    name: str
    doc: str
    source: str


Scope = Literal["line", "row", "pool", "pair"]


class DropReason(msgspec.Struct, frozen=True, kw_only=True):
    """A declared reason why prepare drops a row. The set is closed at start and every reason shows in the counts.

    ``order`` places it: the first reason that fits is the row's only one (built-in reasons: ``kiln plugins``).
    ``pointer`` is the JSON pointer of the field that it is about. ``scope`` says what it looks at:

    - ``line``: bytes before they are a row; raised by the reader, ``check`` is None.
    - ``row``: ``check(candidate, limits)`` returns None, or a detail that says what was found and expected. Reasons of
      order above 90 may use the parsed tools and calls: by then their shape is proven.
    - ``pool``: ``key(candidate)`` returns text or bytes; the first row with it stays, later ones are dropped. ``match``
      replaces equality of keys: given the keys of the rows that are left, in order, it yields pairs (index of a row to
      drop, index of the row it repeats).
    - ``pair``: compares a row with its root row; built in.

    ``opt_in`` reasons are in force only where ``[data] checks`` names them.
    """

    name: str
    doc: str
    scope: Scope
    order: int
    pointer: str = ""
    opt_in: bool = False
    check: Callable[[Candidate, DataConfig], str | None] | None = None
    key: Callable[[Candidate], str | bytes] | None = None
    match: Callable[[Sequence[str], DataConfig], Iterable[tuple[int, int]]] | None = None


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that an environment wrote within a trajectory: M positions, gathered as the supervised ones are."""

    hidden: torch.Tensor  # [M, H]: the states that predict them
    targets: torch.Tensor  # [M] int64
    total: int  # observation tokens of the rows before any was left out: what a mean over them divides by


class LossBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss is given beside the hidden states. N supervised positions, gathered before the output projection."""

    targets: torch.Tensor  # [N] int64: the token that each position must predict
    weights: torch.Tensor  # [N] float32: 1 unless a row weighs its positions
    row_ids: torch.Tensor  # [N] int64: which row of the batch a position belongs to
    columns: dict[str, torch.Tensor] = {}  # [N, ...] by name: what else the corpus says of these positions
    observed: Observed | None = None  # None where the rows have no observation tokens, or they are not trained on


class LossOut(msgspec.Struct, frozen=True, kw_only=True):
    """``loss``: a scalar tensor (float32, nats) with a graph behind it. Metrics and counts go to the log by name."""

    loss: torch.Tensor
    metrics: dict[str, float] = {}
    counts: dict[str, int] = {}


class Head(Protocol):
    """The model's own output head, scaling and soft caps included; N, H and V as above.

    A loss that needs the call alone may name it ``Callable[[Tensor], Tensor]``, and works with any such function.
    """

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [n, H] in the model's dtype -> logits [n, V]."""
        ...

    def at(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """rows [n, H], ids [n, K] int64 -> logits [n, K]: those of a few tokens at each position. The other logits are
        not computed where the model's head lets them be left out."""
        ...


class LossFunction(Protocol):
    def __call__(self, hidden: torch.Tensor, project: Head, batch: LossBatch) -> LossOut:
        """hidden [N, H] in the model's dtype; ``project(rows [n, H]) -> logits [n, V]`` is the model's own head."""
        ...


class Loss(msgspec.Struct, frozen=True, kw_only=True):
    """A training loss. ``target`` is ``module:function``, imported only when a training uses it (it needs torch).

    ``columns`` names what the function reads of ``LossBatch.columns``: rows that lack one cannot be trained with it.
    """

    name: str
    doc: str
    target: str
    columns: tuple[str, ...] = ()

    def load(self, **settings: Any) -> LossFunction:
        """The function. ``settings``: its keyword arguments, the same for every step of a training."""
        module, _, attribute = self.target.partition(":")
        function: LossFunction = getattr(importlib.import_module(module), attribute)
        return partial(function, **settings) if settings else function
