"""``[distill]``: the settings of off-policy distillation from scored teacher rows.

They are those of the public server's OpdConfig, and a few beside it. LoRA, optimizer, checkpoints and dtype are
``[train]``'s. A value that the server knows and this version does not have is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from kiln_cli.sections import CrossFault, Section

TOP_K_SIZES = (32, 16)  # what the loss takes, largest first

Count = Annotated[int, Meta(ge=1, le=2**53 - 1)]
NotNegative = Annotated[float, Meta(ge=0)]
NonEmpty = Annotated[str, Meta(min_length=1)]


class EchoConfig(Section, frozen=True, kw_only=True):
    """Cross-entropy on what the environment said, beside the distillation. ``lambda`` 0 switches it off.

    ``env_mask_mode`` "env_only" takes the text inside of tool responses, "full_obs" whole observation segments.
    ``warning_filter`` leaves out the first ``warning_prefix_len`` bytes of a segment.
    """

    lambda_: NotNegative = msgspec.field(name="lambda", default=0.05)
    env_mask_mode: Literal["env_only", "full_obs"] = "env_only"
    warning_filter: bool = True


class StableConfig(Section, frozen=True, kw_only=True):
    """A stabiliser of on-policy distillation; off is the only mode."""

    mode: Literal["off"] = "off"

    SHORT_FOR: ClassVar[str | None] = "mode"


class DistillConfig(Section, frozen=True, kw_only=True):
    """``teacher``: an alias of the registry. ``top_k``: candidates asked for, resolved by :func:`resolve_top_k`.
    ``require_token_ids``: every scored token must name its id. ``other_tokenizer_config``: a teacher whose tokenizer
    has the student's vocabulary and other settings is taken, if every scored token names its id.
    ``echo``: off where it is left out. ``heldout_file``: a second scored corpus, which is never trained on.
    """

    teacher: NonEmpty | None = None
    training_mode: Literal["off_policy", "on_policy"] = "off_policy"
    objective: Literal["reverse_kl", "cross_entropy"] = "reverse_kl"
    loss: Literal["teacher_top_k", "sampled_token", "full_vocab"] = "teacher_top_k"
    top_k: Count = 32
    require_token_ids: bool = False
    other_tokenizer_config: bool = False
    echo: EchoConfig | None = None
    heldout_file: NonEmpty | None = None
    tail_bucket: bool = False
    coverage: bool = False
    samples_per_prompt: Count = 1
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 0.9
    max_tokens: Count = 7168
    sampler_segments: Count | None = None
    rollout_prompt_rendering: Literal["legacy_action_boundary", "chat_template"] = "legacy_action_boundary"
    stable_opd: StableConfig = StableConfig()
    discount: NotNegative = 0.0
    clip_epsilon: NotNegative = 0.0
    max_cost_usd: float | None = None

    # Values that the public server parses and this version does not have.
    NOT_BUILT: ClassVar[dict[tuple[str, object], str]] = {
        ("training_mode", "on_policy"): "a corpus of scored rows is trained on off-policy",
        ("objective", "cross_entropy"): "the objective is reverse_kl",
        ("loss", "sampled_token"): "the loss is teacher_top_k",
        ("loss", "full_vocab"): "the loss is teacher_top_k",
    }
    # Settings that have one value off-policy.
    ONLY: ClassVar[dict[str, tuple[object, str]]] = {
        "samples_per_prompt": (1, "a scored row has one answer, and is one step"),
        "discount": (0.0, "every scored token counts alike"),
        "clip_epsilon": (0.0, "nothing is clipped"),
        "max_cost_usd": (None, "nothing here costs money"),
    }
    # Settings of how a student is sampled, which off-policy distillation never does.
    OF_SAMPLING: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "max_tokens",
        "sampler_segments",
        "rollout_prompt_rendering",
    )

    def faults(self) -> Iterable[CrossFault]:
        for (name, value), instead in self.NOT_BUILT.items():
            if getattr(self, name) == value:
                yield CrossFault((name,), f"{name} = {value!r} is not built in this version: {instead}")
        for name, (only, reason) in self.ONLY.items():
            if (found := getattr(self, name)) != only:
                wanted = "left out" if only is None else repr(only)
                yield CrossFault((name,), f"{name} = {found!r} is refused: {reason}; it can only be {wanted}")
        if self.top_k < TOP_K_SIZES[-1]:
            yield CrossFault(("top_k",), f"top_k = {self.top_k}: {_SIZES}")

    def warnings(self) -> Iterable[str]:
        """What is allowed and changes nothing."""
        defaults = DistillConfig()
        for name in self.OF_SAMPLING:
            if (found := getattr(self, name)) != getattr(defaults, name):
                yield f"distill.{name} = {found} changes nothing: scored rows are trained on, no answers are sampled"


def resolve_top_k(requested: int, source_max: int, vocabulary: int) -> int | None:
    """How many candidates the loss takes: the largest of 32 and 16 that is not above what was asked for, what the
    teacher gives at most, and the vocabulary. None where both are."""
    most = min(requested, source_max, vocabulary)
    return next((size for size in TOP_K_SIZES if size <= most), None)


_SIZES = "the loss takes 16 or 32 candidates, the larger one that top_k allows"
