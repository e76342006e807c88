"""What torch's optimizers are handed, and their state through named tensors and back."""

from __future__ import annotations

import math

import pytest
import torch
from kiln_stages.training.optimizers import STATE_KEYS, build_optimizer, effective, export_state, restore_state
from torch import Tensor

from kiln_cli.config import OptimizerConfig

KINDS = ("muon", "adam_w", "sgd")


def leaves(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(11)
    return {f"leaf{i}": torch.randn(shape).to(dtype).requires_grad_() for i, shape in enumerate([(4, 12), (9, 4)])}


def steps(kind: str, parameters: dict[str, Tensor], optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        for index, parameter in enumerate(parameters.values()):
            generator = torch.Generator().manual_seed(100 * step + index)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def build(kind: str, parameters: dict[str, Tensor], rate: float = 1e-2, **changes: object) -> torch.optim.Optimizer:
    return build_optimizer(kind, parameters, rate, {**OptimizerConfig(kind=kind).resolved(), **changes})  # type: ignore[arg-type]


def test_muon_moves_by_rate_times_the_root_of_the_longer_side() -> None:
    parameters = leaves()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    steps("muon", parameters, build("muon", parameters, 1e-2), 0, 1)
    for name, parameter in parameters.items():
        rows, columns = parameter.shape
        moved = (parameter.detach() - before[name]).norm().item()
        orthogonal = 1e-2 * math.sqrt(max(rows, columns)) * math.sqrt(min(rows, columns))
        assert 0.65 < moved / orthogonal < 1.25  # Newton-Schulz leaves singular values near, not at, one


@pytest.mark.parametrize("nesterov", [True, False])
def test_stacked_muon_is_torchs_muon(nesterov: bool) -> None:
    shapes = [(4, 12), (9, 4), (4, 12), (9, 4), (4, 12), (5, 5)]
    torch.manual_seed(3)
    ours = {str(i): torch.randn(shape).requires_grad_() for i, shape in enumerate(shapes)}
    theirs = {name: parameter.detach().clone().requires_grad_() for name, parameter in ours.items()}
    stacked = build("muon", ours, 1e-2, weight_decay=0.1, nesterov=nesterov)
    group = {key: value for key, value in stacked.param_groups[0].items() if key != "params"}
    plain = torch.optim.Muon(list(theirs.values()), **group)
    before = {name: parameter.detach().clone() for name, parameter in ours.items()}
    for first in range(4):
        steps("muon", ours, stacked, first, first + 1)
        steps("muon", theirs, plain, first, first + 1)
    for name, parameter in ours.items():
        moved = (parameter - before[name]).norm().item()
        assert (parameter - theirs[name]).norm().item() < 0.02 * moved  # bfloat16 products, in another order
        buffers = (state.state[p]["momentum_buffer"] for state, p in ((stacked, parameter), (plain, theirs[name])))
        assert torch.equal(*buffers)


def test_muon_shrinks_by_rate_times_decay() -> None:
    parameters = leaves()
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = build("muon", parameters, 1e-2, weight_decay=0.5)
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, before[name] * (1 - 1e-2 * 0.5), rtol=1e-6)


def test_effective_hyperparameters_are_what_torch_has() -> None:
    muon = effective(build("muon", leaves(), 1e-3))
    assert muon["implementation"] == "kiln_stages.training.optimizers.StackedMuon"
    assert (muon["lr"], muon["weight_decay"], muon["momentum"]) == (5e-3, 0.0, 0.95)
    assert (muon["ns_steps"], muon["nesterov"], muon["adjust_lr_fn"]) == (5, True, "match_rms_adamw")
    adam = effective(build("adam_w", leaves(), 1e-4))
    assert (adam["lr"], adam["betas"], adam["eps"], adam["weight_decay"]) == (1e-4, [0.9, 0.999], 1e-8, 0.0)
    sgd = effective(build("sgd", leaves(), 1e-4))
    assert (sgd["lr"], sgd["momentum"]) == (1e-4, 0)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="'lion' is unknown"):
        build_optimizer("lion", leaves(), 1e-3, {})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restored_in_the_middle_gives_equal_bits(kind: str, dtype: torch.dtype) -> None:
    whole = leaves(dtype)
    steps(kind, whole, build(kind, whole), 0, 6)

    first = leaves(dtype)
    optimizer = build(kind, first)
    steps(kind, first, optimizer, 0, 3)
    state = export_state(kind, optimizer, first)
    assert set(state) == {f"{name}.{key}" for name in first for key in STATE_KEYS[kind]}
    assert all(tensor.dtype == torch.float32 for tensor in state.values())

    second = {name: parameter.detach().clone().requires_grad_() for name, parameter in first.items()}
    resumed = build(kind, second)
    restore_state(kind, resumed, second, state, 3)
    steps(kind, second, resumed, 3, 6)
    assert all(torch.equal(whole[name], second[name]) for name in whole)


@pytest.mark.parametrize("kind", ["muon", "adam_w"])
def test_zeroed_moments_are_noticed(kind: str) -> None:
    whole, second = leaves(), leaves()
    steps(kind, whole, build(kind, whole), 0, 4)
    optimizer = build(kind, second)
    steps(kind, second, optimizer, 0, 3)
    state = {name: torch.zeros_like(tensor) for name, tensor in export_state(kind, optimizer, second).items()}
    restore_state(kind, optimizer, second, state, 3)
    steps(kind, second, optimizer, 3, 4)
    assert not any(torch.equal(whole[name], second[name]) for name in whole)


def test_restored_state_is_a_copy() -> None:
    parameters = leaves()
    optimizer = build("muon", parameters)
    steps("muon", parameters, optimizer, 0, 1)
    state = {name: tensor.clone() for name, tensor in export_state("muon", optimizer, parameters).items()}
    before = {name: tensor.clone() for name, tensor in state.items()}
    restore_state("muon", optimizer, parameters, state, 1)
    steps("muon", parameters, optimizer, 1, 2)
    assert all(torch.equal(state[name], before[name]) for name in state)


@pytest.mark.parametrize("kind", ["muon", "adam_w"])
def test_state_that_does_not_fit_is_refused(kind: str) -> None:
    parameters = leaves()
    optimizer = build(kind, parameters)
    with pytest.raises(ValueError, match="took no step yet"):
        export_state(kind, optimizer, parameters)
    steps(kind, parameters, optimizer, 0, 1)
    state = export_state(kind, optimizer, parameters)
    name = next(iter(state))
    with pytest.raises(ValueError, match=f"1 missing or unexpected tensors, the first is '{name}'"):
        restore_state(kind, optimizer, parameters, {k: v for k, v in state.items() if k != name}, 1)
    with pytest.raises(ValueError, match="shape"):
        restore_state(kind, optimizer, parameters, {**state, name: state[name].T.contiguous()}, 1)
