"""What a training loop carries from step to step besides the model and the optimizer: ``kiln.sft-loop-state.v1``, and
``kiln.opd-loop-state.v1`` of the same fields."""

from __future__ import annotations

import math

import msgspec

from kiln_stages.training.kinds import SFT, Kind


class GradNorms(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """L2 norms of LoRA gradients under one module name: a sample for each leaf and step."""

    module: str
    sample_count: int
    min: float
    max: float
    sum: float


class LoopState(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The state after ``global_step`` committed steps. ``loss_history`` has the loss of each, in nats a token.

    ``epoch_index`` and ``cursor_in_epoch`` are the place of the next row, from 0; sums and items count the running
    epoch. ``first_epoch_loss`` and ``best_epoch_loss`` are means of finished epochs, None before the first is done.
    """

    schema_version: int = 1
    state_type: str = SFT.loop_state_type
    global_step: int = 0
    epoch_index: int = 0
    cursor_in_epoch: int = 0
    loss_history: list[float] = []
    last_loss: float | None = None
    current_epoch_loss_sum: float = 0.0
    current_epoch_items: int = 0
    first_epoch_loss: float | None = None
    best_epoch_loss: float | None = None
    lora_grad_norms: list[GradNorms] = []

    def commit(self, loss: float, norms: dict[str, float], count: int) -> None:
        """Takes in one step over a corpus of ``count`` rows: its loss, and the gradient norm of each leaf by name."""
        self.global_step += 1
        self.loss_history.append(loss)
        self.last_loss = loss
        self.current_epoch_loss_sum += loss
        self.current_epoch_items += 1
        self._take_norms(norms)
        self.epoch_index, self.cursor_in_epoch = divmod(self.global_step, count)
        if self.cursor_in_epoch == 0:
            mean = self.current_epoch_loss_sum / self.current_epoch_items
            self.first_epoch_loss = mean if self.first_epoch_loss is None else self.first_epoch_loss
            self.best_epoch_loss = mean if self.best_epoch_loss is None else min(mean, self.best_epoch_loss)
            self.current_epoch_loss_sum, self.current_epoch_items = 0.0, 0

    def faults(self, kind: Kind, item_count: int) -> list[str]:
        """What contradicts what, for a corpus of ``item_count`` rows; empty for a sound state."""
        state_type = kind.loop_state_type
        numbers = [*self.loss_history, self.current_epoch_loss_sum]
        numbers += [x for x in (self.last_loss, self.first_epoch_loss, self.best_epoch_loss) if x is not None]
        numbers += [x for entry in self.lora_grad_norms for x in (entry.min, entry.max, entry.sum)]
        done = self.epoch_index > 0
        last = self.loss_history[-1] if self.loss_history else None
        checks = [
            (f"schema_version is {self.schema_version}, expected 1", self.schema_version == 1),
            (f"state_type is {self.state_type!r}, expected {state_type!r}", self.state_type == state_type),
            (
                f"loss_history has {len(self.loss_history)} losses for step {self.global_step}",
                len(self.loss_history) == self.global_step,
            ),
            ("a loss or a gradient norm is not finite", all(map(math.isfinite, numbers))),
            (f"last_loss is {self.last_loss}, the history ends with {last}", self.last_loss == last),
            (
                f"current_epoch_items {self.current_epoch_items} != cursor_in_epoch {self.cursor_in_epoch}",
                self.current_epoch_items == self.cursor_in_epoch,
            ),
            (
                f"first and best epoch loss belong exactly where an epoch is done (epoch_index {self.epoch_index})",
                (self.first_epoch_loss is not None, self.best_epoch_loss is not None) == (done, done),
            ),
            (
                f"global_step {self.global_step} != epoch {self.epoch_index} x {item_count} + {self.cursor_in_epoch}",
                self.global_step == self.epoch_index * item_count + self.cursor_in_epoch
                and 0 <= self.cursor_in_epoch < item_count,
            ),
        ]
        return [text for text, holds in checks if not holds]

    def history_faults(self, item_count: int) -> list[str]:
        """Which sums and means of epochs are not those that the loss history gives, to the last bit.

        They decide when a diverging run stops, so a state that was edited must not carry others.
        """
        again = LoopState()
        for loss in self.loss_history:
            again.commit(loss, {}, item_count)
        names = ("current_epoch_loss_sum", "current_epoch_items", "first_epoch_loss", "best_epoch_loss")
        pairs = ((name, getattr(self, name), getattr(again, name)) for name in names)
        return [f"{name} is {found}, the loss history gives {given}" for name, found, given in pairs if found != given]

    def _take_norms(self, norms: dict[str, float]) -> None:
        samples: dict[str, list[float]] = {}
        for name, norm in norms.items():
            samples.setdefault(_module_of(name), []).append(norm)
        known = {entry.module: entry for entry in self.lora_grad_norms}
        for module, values in sorted(samples.items()):
            entry = known.get(module)
            if entry is None:
                entry = GradNorms(module=module, sample_count=0, min=math.inf, max=0.0, sum=0.0)
                self.lora_grad_norms.append(entry)
            entry.sample_count += len(values)
            entry.min = min(entry.min, *values)
            entry.max = max(entry.max, *values)
            entry.sum += math.fsum(values)


def _module_of(name: str) -> str:
    """``q_proj`` of ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``."""
    return name.rsplit(".", 3)[-3]
