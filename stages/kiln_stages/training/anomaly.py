"""``detect_anomaly``: names the operation that first made a NaN or an Inf: forward, backward or update.

torch's own mode looks at gradients for NaN and lets every Inf pass. Here each ATen operation of a step is looked at as
it runs, by a dispatch mode: one that turns finite inputs into a NaN or an Inf, or an Inf into a NaN, ends the run. The
values of a run are not changed by being watched; only its time is (every result is read once more).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kiln_cli.errors import KilnError
from kiln_cli.text import printable

# Results that no operation made: memory that nothing was written to yet (strict mode fills it with NaN), and constants
# that the caller asked for, such as a mask of -Inf.
FRESH = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh"}
CONSTANT = {"full", "full_like", "new_full", "fill", "fill_", "scalar_tensor", "masked_fill", "masked_fill_", "where"}
PLACE = "kiln.module"  # key under which a node of the backward graph knows the module that made it
OUTSIDE = "the head or the loss"

T = TypeVar("T")


class Values(NamedTuple):
    """Which values that are not finite some tensors hold."""

    nan: bool
    inf: bool


def watched(steps: Iterator[T], model: nn.Module, row: Callable[[], str]) -> Iterator[T]:
    """The same steps, each under watch. ``row`` says which row comes next, for the message.

    Raises KilnError KLN104 with the operation, its module and the row; before the first step, for a weight that is not
    finite itself.
    """
    require_finite_weights(model.named_parameters())
    watch = AnomalyWatch()
    while True:
        with watch.over(model, row()):
            record = next(steps, None)
        if record is None:
            return
        yield record


def require_finite_weights(parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raises KilnError KLN104: what is not finite in the model's files was made by no operation."""
    for name, parameter in parameters:
        found = values_of([parameter])
        if any(found):
            raise KilnError(
                "KLN104",
                f"the weight {printable(name)} holds {_called(found)} before the first step",
                hint="fetch the model again: its files are damaged, or were written by a run that failed",
            )


class AnomalyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at every operation between entering and leaving, in this thread and in autograd's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row = ""
        self._modules: list[str] = []  # names of the modules that are running, the innermost last

    @contextmanager
    def over(self, model: nn.Module, row: str) -> Iterator[None]:
        """Watches what is done within, keeping account of the module that does it."""
        self._row, self._modules = row, []
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._entering(name)).remove)
                stack.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
            stack.enter_context(self)
            yield

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        written, read = _arguments(func, args, options)
        before = values_of(written)  # they will be overwritten
        out = func(*args, **options)
        if func.overloadpacket.__name__ not in FRESH | CONSTANT:
            self._judge(func, before, read, [*_results(func, out), *written])
        return out

    def _judge(self, func: Any, before: Values, read: list[Tensor], results: list[Tensor]) -> None:
        after = values_of(results)
        if not any(after):
            return
        given = values_of(read)
        nan, inf = before.nan or given.nan, before.inf or given.inf
        made = Values(nan=after.nan and not nan, inf=after.inf and not inf and not nan)
        if any(made):
            raise KilnError(
                "KLN104",
                f"{func} made {_called(made)} in {self._place()}, {self._row}; "
                f"result {_shape(results[0])}, largest finite input {_largest(read):.6g}",
                hint="lower `[train] learning_rate`, or look at that row of the corpus",
                details={"operation": str(func), "place": self._place(), "made": _called(made)},
            )

    def _place(self) -> str:
        inside = printable(self._modules[-1]) if self._modules else ""
        node = cast(Any, torch._C)._current_autograd_node()
        if node is None:
            return f"the forward of {inside or OUTSIDE}"
        if inside:
            return f"the forward of {inside}, computed again in the backward"
        return f"the backward of {printable(node.metadata.get(PLACE, OUTSIDE))} ({node.name()})"

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(name or type(module).__name__)

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._modules.pop()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    _label(tensor.grad_fn, name or type(module).__name__)

        return leave


def values_of(tensors: Iterable[Tensor]) -> Values:
    """Whether any of the floating-point tensors holds a NaN, and whether any holds an Inf."""
    nan = inf = False
    for tensor in tensors:
        if not torch.isfinite(tensor).all():
            nan = nan or bool(torch.isnan(tensor).any())
            inf = inf or bool(torch.isinf(tensor).any())
    return Values(nan, inf)


def _label(node: Any, name: str) -> None:
    """Tells the nodes behind ``node`` who made them; modules end innermost first, so that theirs is the name kept."""
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if PLACE not in node.metadata:
            node.metadata[PLACE] = name
            waiting.extend(following for following, _ in node.next_functions if following is not None)


def _arguments(func: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The floating-point tensors that an operation overwrites, and those that it reads only."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = options.get(argument.name) if argument.kwarg_only or place >= len(args) else args[place]
        overwrites = argument.alias_info is not None and argument.alias_info.is_write
        (written if overwrites else read).extend(_floats(value))
    return written, read


def _results(func: Any, out: Any) -> list[Tensor]:
    """What of an operation's results carries values on. Beside its result, fused attention returns sums that it pads
    with Inf."""
    if func.overloadpacket.__name__.startswith("_scaled_dot_product") and "backward" not in str(func):
        return _floats(out[0])
    return _floats(out)


def _floats(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _called(found: Values) -> str:
    return "a NaN" if found.nan else "an Inf"


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _largest(tensors: list[Tensor]) -> float:
    finite = [tensor[torch.isfinite(tensor)].abs().max().item() for tensor in tensors if torch.isfinite(tensor).any()]
    return float(max(finite, default=0.0))
