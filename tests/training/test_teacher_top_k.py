"""The distillation loss: worked values, a float64 reference written out, finite differences, ECHO, and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from kiln_plugins.teacher_top_k import SMALLEST_TAIL, reverse_kl, teacher_top_k
from kiln_stages.training.loop import ObservedTargets, TrainRow, row_loss
from kiln_stages.training.model import LanguageModel
from torch import Tensor
from training.tiny_models import TARGETS, VOCABULARY, tiny_causal

from kiln_cli import LossBatch, Observed

H, V, K = 12, 61, 5
# Student logits, teacher logprobs, the divergence and its gradient with respect to the logits.
WORKED = [
    ([1.0, 0.0], [-0.5108256237659907, -1.2039728043259361], 0.009677987178342833, [0.0603309260507, -0.0603309260507]),
    (
        [0.5, -1.0, 2.0, 0.0],
        [-0.25, -2.0, -3.0, -4.0],
        1.7288228044319807,
        [-0.5290616579, -0.1092111641, 0.6468348224, -0.0085620003],
    ),
]


@pytest.mark.parametrize(("student", "teacher", "value", "gradient"), WORKED, ids=["K = 2", "K = 4"])
def test_worked_values_of_the_contract(
    student: list[float], teacher: list[float], value: float, gradient: list[float]
) -> None:
    for dtype, bound in ((torch.float64, 1e-15), (torch.float32, 2e-7)):
        logits = torch.tensor([student], dtype=dtype, requires_grad=True)
        found = reverse_kl(logits, torch.tensor([teacher], dtype=dtype))
        found.sum().backward()  # type: ignore[no-untyped-call]
        assert logits.grad is not None
        assert abs(found.item() - value) <= bound * max(1.0, value)
        assert logits.grad[0].tolist() == pytest.approx(gradient, abs=max(bound, 1e-9))


def test_gradcheck_and_the_gradient_that_the_contract_writes_out() -> None:
    generator = torch.Generator().manual_seed(2)
    student = torch.randn(6, K, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(6, K, generator=generator, dtype=torch.float64).log_softmax(-1) - 0.3
    assert torch.autograd.gradcheck(lambda logits: reverse_kl(logits, teacher), (student,))
    kl = reverse_kl(student, teacher)
    (gradient,) = torch.autograd.grad(kl.sum(), student)
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    torch.testing.assert_close(gradient, log_p.exp() * ((log_p - log_q) - kl.unsqueeze(-1)))


def test_only_the_top_k_counts_renormalised_on_both_sides() -> None:
    student, teacher = torch.randn(3, K), torch.randn(3, K).log_softmax(-1)
    shuffled = torch.randperm(K)
    torch.testing.assert_close(reverse_kl(student + 7, teacher - 2), reverse_kl(student, teacher), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(reverse_kl(student[:, shuffled], teacher[:, shuffled]), reverse_kl(student, teacher))
    assert (reverse_kl(teacher, teacher) == 0).all()


class Setting(NamedTuple):
    """A head of its own, and a batch for it."""

    hidden: Tensor
    head: FixedHead
    batch: LossBatch


class FixedHead:
    """A head of one weight, which remembers how many rows were projected at a time, and in how many calls of ``at``."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.projected: list[int] = []
        self.asked: list[tuple[int, ...]] = []

    def __call__(self, rows: Tensor) -> Tensor:
        self.projected.append(len(rows))
        return rows @ self.weight.t()

    def at(self, rows: Tensor, ids: Tensor) -> Tensor:
        self.asked.append(tuple(ids.shape))
        return (self.weight[ids] @ rows.unsqueeze(-1)).squeeze(-1)


def setting(count: int = 9, observed: int | None = None, dtype: torch.dtype = torch.float64) -> Setting:
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(V, H, generator=generator, dtype=dtype)
    teacher = torch.randn(count, V, generator=generator, dtype=dtype).log_softmax(-1)
    best = teacher.topk(K)
    seen = None
    if observed is not None:
        seen = Observed(
            hidden=torch.randn(observed, H, generator=generator, dtype=dtype).requires_grad_(),
            targets=torch.randint(V, (observed,), generator=generator),
            total=observed + 3,
        )
    batch = LossBatch(
        targets=torch.randint(V, (count,), generator=generator),
        weights=torch.ones(count),
        row_ids=torch.zeros(count, dtype=torch.int64),
        columns={"teacher_token_ids": best.indices, "teacher_logprobs": best.values},
        observed=seen,
    )
    hidden = torch.randn(count, H, generator=generator, dtype=dtype).requires_grad_()
    return Setting(hidden, FixedHead(weight), batch)


def written_out(hidden: Tensor, weight: Tensor, batch: LossBatch) -> Tensor:
    """The loss of the contract, position by position, over the whole vocabulary."""
    total = hidden.new_zeros(())
    for row, ids, teacher in zip(
        hidden, batch.columns["teacher_token_ids"], batch.columns["teacher_logprobs"], strict=True
    ):
        s = (weight @ row)[ids]
        log_p, log_q = s - s.logsumexp(0), teacher - teacher.logsumexp(0)
        total = total + (log_p.exp() * (log_p - log_q)).sum()
    return total / len(hidden)


def test_it_is_the_mean_over_action_tokens_of_the_float64_reference() -> None:
    hidden, head, batch = setting()
    out = teacher_top_k(hidden, head, batch)
    expected = written_out(hidden, head.weight, batch)
    torch.testing.assert_close(out.loss, expected)
    gradients = [torch.autograd.grad(loss, hidden)[0] for loss in (out.loss, expected)]
    torch.testing.assert_close(*gradients)
    assert out.metrics == {"reverse_kl": pytest.approx(expected.item())}
    assert out.counts == {"action_tokens": 9}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_sums_within_the_bounds_of_the_contract(dtype: torch.dtype) -> None:
    hidden, head, batch = setting(dtype=dtype)
    out = teacher_top_k(hidden, head, batch)
    batch.columns["teacher_logprobs"] = batch.columns["teacher_logprobs"].double()
    expected = written_out(hidden.double(), head.weight.double(), batch).item()
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=1e-5 if dtype == torch.float32 else 1e-2)


def test_the_whole_vocabulary_is_never_projected() -> None:
    hidden, head, batch = setting(300)
    teacher_top_k(hidden, head, batch).loss.backward()  # type: ignore[no-untyped-call]
    assert head.projected == []
    assert head.asked == [(300, K)]


@pytest.mark.parametrize("observed", [1, 7, 300])
def test_echo_adds_lambda_over_all_observed_tokens_times_the_sum(observed: int) -> None:
    hidden, head, batch = setting(observed=observed)
    seen = batch.observed
    assert seen is not None
    kl = written_out(hidden, head.weight, batch)
    nll = -(seen.hidden @ head.weight.t()).log_softmax(-1).gather(-1, seen.targets.unsqueeze(-1)).sum()
    expected = kl + 0.05 * nll / (observed + 3)
    out = teacher_top_k(hidden, head, batch, echo_lambda=0.05)
    torch.testing.assert_close(out.loss, expected)
    leaves = (hidden, seen.hidden)
    for left, right in zip(torch.autograd.grad(out.loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(left, right)
    assert out.metrics["env_ce"] == pytest.approx(nll.item() / (observed + 3))
    assert out.metrics["reverse_kl"] == pytest.approx(kl.item())
    assert out.counts == {"action_tokens": 9, "env_tokens": observed, "env_tokens_before_filter": observed + 3}
    assert max(head.projected) <= 128


@pytest.mark.parametrize(("observed", "echo_lambda"), [(None, 0.05), (0, 0.05), (6, 0.0)])
def test_echo_without_anything_to_add_leaves_the_loss_alone(observed: int | None, echo_lambda: float) -> None:
    hidden, head, batch = setting(observed=observed)
    out = teacher_top_k(hidden, head, batch, echo_lambda=echo_lambda)
    torch.testing.assert_close(out.loss, written_out(hidden, head.weight, batch))
    assert "env_ce" not in out.metrics and head.projected == []


def test_the_tail_bucket_is_one_more_outcome_and_passes_gradcheck() -> None:
    hidden, head, batch = setting(7)
    ids, teacher = batch.columns["teacher_token_ids"], batch.columns["teacher_logprobs"]
    log_p = (hidden @ head.weight.t()).log_softmax(-1).gather(-1, ids)
    p_tail, q_tail = (1 - each.exp().sum(-1) for each in (log_p, teacher))
    expected = ((log_p.exp() * (log_p - teacher)).sum(-1) + p_tail * (p_tail / q_tail).log()).mean()
    torch.testing.assert_close(teacher_top_k(hidden, head, batch, tail_bucket=True).loss, expected)
    torch.testing.assert_close(teacher_top_k(hidden, head, batch, tail_bucket=True, chunk=2).loss, expected)

    def loss(rows: Tensor) -> Tensor:
        return teacher_top_k(rows, head, batch, tail_bucket=True).loss

    assert torch.autograd.gradcheck(loss, (hidden,))


def test_a_teacher_whose_mass_rounds_above_one_has_the_smallest_tail() -> None:
    hidden, head, batch = setting(3)
    batch.columns["teacher_logprobs"] = torch.full((3, K), -torch.tensor(float(K)).log() + 1e-6)
    loss = teacher_top_k(hidden, head, batch, tail_bucket=True).loss
    assert torch.isfinite(loss) and loss > 0
    assert SMALLEST_TAIL == 2**-24


@pytest.mark.parametrize("chunk", [2, 128])
def test_coverage_measures_both_sides_and_trains_on_neither(chunk: int) -> None:
    hidden, head, batch = setting(7)
    ids, teacher = batch.columns["teacher_token_ids"], batch.columns["teacher_logprobs"]
    inside = (hidden @ head.weight.t()).softmax(-1).gather(-1, ids).sum(-1).mean()
    out = teacher_top_k(hidden, head, batch, coverage=True, chunk=chunk)
    assert out.metrics["student_mass_outside"] == pytest.approx(1 - inside.item())
    assert out.metrics["teacher_mass_top_k"] == pytest.approx(teacher.exp().sum(-1).mean().item())
    torch.testing.assert_close(out.loss, written_out(hidden, head.weight, batch))
    assert max(head.projected) <= chunk


@pytest.mark.parametrize(
    "columns",
    [
        {"teacher_token_ids": torch.zeros(3, K, dtype=torch.int64), "teacher_logprobs": torch.zeros(9, K)},
        {"teacher_token_ids": torch.zeros(9, K, dtype=torch.int64), "teacher_logprobs": torch.zeros(9, K - 1)},
        {"teacher_token_ids": torch.zeros(9, 0, dtype=torch.int64), "teacher_logprobs": torch.zeros(9, 0)},
    ],
)
def test_scores_of_another_shape_are_refused(columns: dict[str, Tensor]) -> None:
    hidden, head, batch = setting()
    batch.columns.update(columns)
    with pytest.raises(ValueError, match=r"expected \[N, H\], \[N, K\] and \[N, K\]"):
        teacher_top_k(hidden, head, batch)


# The model's own head at a few tokens.

IDS = torch.tensor([[5, 17, 3, 88, 41, 60, 2, 9, 33, 71]])
FAMILY_NAMES = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")


@pytest.mark.parametrize("kind", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_columns_are_the_heads_own_logits_soft_caps_included(kind: str, dtype: torch.dtype, lora: bool) -> None:
    model = LanguageModel(tiny_causal(kind).to(dtype))
    assert model.head.columns.used, model.head.columns.why
    if lora:
        model.add_lora(2, 4.0, 42, TARGETS.get(kind))
    rows = model.hidden(IDS)[0].detach()  # [T, H]
    ids = torch.randint(VOCABULARY, (len(rows), K), generator=torch.Generator().manual_seed(1))
    whole = model.project(rows)
    found = model.head.at(rows, ids)
    torch.testing.assert_close(found, whole.gather(-1, ids), rtol=0, atol=model.probe.bound * whole.abs().max().item())


def test_a_soft_cap_is_in_the_divergence_and_in_its_gradient() -> None:
    model = LanguageModel(tiny_causal("gemma2", initializer_range=0.3))
    rows = model.hidden(IDS)[0].detach().requires_grad_()
    ids = torch.arange(len(rows) * K).remainder(VOCABULARY).view(len(rows), K)
    teacher = torch.linspace(-1, -4, K).expand(len(rows), K)
    found = reverse_kl(model.head.at(rows, ids), teacher).mean()
    expected = reverse_kl(model.project(rows).gather(-1, ids), teacher).mean()
    bare = reverse_kl((rows @ model.causal.get_parameter("lm_head.weight").t()).gather(-1, ids), teacher).mean()
    torch.testing.assert_close(found, expected)
    assert abs(bare.item() - found.item()) > 0.01
    gradients = [torch.autograd.grad(kl, rows)[0] for kl in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_many_rows_are_computed_in_chunks_with_the_same_gradient() -> None:
    model = LanguageModel(tiny_causal("llama"))
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(300, 32, generator=generator).requires_grad_()
    ids = torch.randint(VOCABULARY, (300, K), generator=generator)
    both = model.head.at(rows, ids), model.project(rows).gather(-1, ids)
    gradients = [torch.autograd.grad(logits.square().sum(), rows)[0] for logits in both]
    torch.testing.assert_close(*gradients)


def _normalised_over_the_vocabulary(causal: Any) -> str:
    class Centred(type(causal)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits - out.logits.mean(dim=-1, keepdim=True)
            return out

    causal.__class__ = Centred
    return "they differ from the head"


def _another_projection(causal: Any) -> str:
    class Doubled(torch.nn.Linear):
        def forward(self, rows: Tensor) -> Tensor:
            return 2 * super().forward(rows)

    head = Doubled(32, VOCABULARY, bias=False)
    head.weight = causal.lm_head.weight
    causal.lm_head = head
    return "the output projection is Doubled, no plain linear layer"


@pytest.mark.parametrize("change", [_normalised_over_the_vocabulary, _another_projection])
def test_a_head_that_columns_cannot_stand_for_is_gathered(change: Callable[[Any], str]) -> None:
    causal = tiny_causal("llama")
    why = change(causal)
    model = LanguageModel(causal)
    assert not model.head.columns.used and why in model.head.columns.why
    rows = model.hidden(IDS)[0].detach()
    ids = torch.arange(len(rows) * K).remainder(VOCABULARY).view(len(rows), K)
    torch.testing.assert_close(model.head.at(rows, ids), model.project(rows).gather(-1, ids))


# A row through the model: the first step against the base itself, shifted scores, and the adapter's whole gradient.


def scored_by(model: LanguageModel, ids: list[int], targets: list[int], shift: int = 0) -> TrainRow:
    """A row whose scores are the model's own; ``shift``: taken from so many positions too late."""
    with torch.no_grad():
        logprobs = model.project(model.hidden(torch.tensor([ids]))[0]).double().log_softmax(-1)  # [T, V]
        best = logprobs[[target - 1 + shift for target in targets]].float().topk(16)
    columns = {"teacher_token_ids": best.indices, "teacher_logprobs": best.values}
    spans = [(target, target + 1) for target in targets]
    return TrainRow(1, "sha256:" + "0" * 64, ids, spans, columns)


ROW_IDS = [(place * place * 7 + 3) % VOCABULARY for place in range(30)]
ROW_TARGETS = [4, 5, 6, 7, 15, 16, 17, 18, 19, 27]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_where_the_teacher_is_the_base_itself_the_first_step_has_no_divergence(kind: str) -> None:
    """LoRA B is 0 at the first step: at every position the reverse KL is at most 1e-6."""
    model = LanguageModel(tiny_causal(kind))
    row = scored_by(model, ROW_IDS, ROW_TARGETS)
    model.add_lora(2, 4.0, 42)
    hidden = model.hidden(torch.tensor([ROW_IDS]))[0][[target - 1 for target in ROW_TARGETS]]
    kl = reverse_kl(model.head.at(hidden, row.columns["teacher_token_ids"]), row.columns["teacher_logprobs"])
    assert kl.abs().max().item() <= 1e-6
    assert row_loss(model, teacher_top_k, row)[0].loss.item() <= 1e-6


def test_scores_shifted_by_one_position_raise_the_divergence_visibly() -> None:
    model = LanguageModel(tiny_causal("llama", initializer_range=0.3))
    right, shifted = (scored_by(model, ROW_IDS, ROW_TARGETS, shift) for shift in (0, 1))
    model.add_lora(2, 4.0, 42)
    losses = [row_loss(model, teacher_top_k, row)[0].loss.item() for row in (right, shifted)]
    assert losses[0] <= 1e-6 and losses[1] > 0.1


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("tail_bucket", [False, True])
def test_the_adapters_whole_gradient_is_that_of_a_dense_reference(kind: str, tail_bucket: bool) -> None:
    """Float64, a trajectory and ECHO on: the reference makes all logits of all positions, as a plain loss would."""
    model = LanguageModel(tiny_causal(kind).float())
    row = scored_by(model, ROW_IDS, ROW_TARGETS)._replace(observed=ObservedTargets([9, 10, 11, 21], 6))
    model.add_lora(2, 4.0, 42)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for leaf in model.parameters.values():
            leaf.add_(torch.randn(leaf.shape, generator=generator) * 0.05)
    model.causal.double()
    leaves = list(model.parameters.values())
    with model.modules_own():
        out, _ = row_loss(model, lambda *args: teacher_top_k(*args, echo_lambda=0.05, tail_bucket=tail_bucket), row)
        found = torch.autograd.grad(out.loss, leaves)
        logits = model.causal(input_ids=torch.tensor([ROW_IDS])).logits[0]  # [T, V]
    ids, teacher = row.columns["teacher_token_ids"], row.columns["teacher_logprobs"].double()
    rows = logits[[target - 1 for target in ROW_TARGETS]]
    if tail_bucket:
        log_p, log_q = rows.log_softmax(-1).gather(-1, ids), teacher
        tails = [1 - each.exp().sum(-1) for each in (log_p, log_q)]
        rest = tails[0] * (tails[0] / tails[1]).log()
    else:
        log_p, log_q, rest = rows.gather(-1, ids).log_softmax(-1), teacher.log_softmax(-1), torch.zeros(len(rows))
    kl = ((log_p.exp() * (log_p - log_q)).sum(-1) + rest).mean()
    places = [9, 10, 11, 21]
    observed = logits[[place - 1 for place in places]].log_softmax(-1)
    nll = -sum(observed[at, ROW_IDS[place]] for at, place in enumerate(places))
    expected = torch.autograd.grad(kl + 0.05 * nll / 6, leaves)
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-12)
