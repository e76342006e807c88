"""A teacher that scores here: a transformers model, with its LoRA where it wears one.

The decoder runs over the whole row, the model's own head over the scored positions alone and a few at a time, so that
positions x vocabulary is never held. Logarithms are taken in float64 and rounded once, to float32: the mass of what is
written can exceed one by rounding alone. The same files on the same machine give the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kiln_cli.errors import KilnError, RowFault
from kiln_cli.text import printable
from kiln_stages.distilling.candidates import Scored, scored
from kiln_stages.distilling.identity import TeacherIdentity
from kiln_stages.distilling.registry import LocalModel
from kiln_stages.training import determinism
from kiln_stages.training.adapted import attach
from kiln_stages.training.base_adapter import MODEL
from kiln_stages.training.model import LanguageModel, load_language_model
from kiln_stages.training.tensors import read_tensors

LOGITS_AT_ONCE = 2**22  # positions x vocabulary of one projection: 32 MiB in float64


class LocalScorer:
    """Scores rows with the model in ``model`` and the adapter in ``adapter``, which must be those of the identity.

    ``threads``: as :func:`kiln_stages.training.determinism.fix` has it. Raises KilnError: KLN302/214 for a model that
    cannot be loaded or used, KLN221 for an adapter that is of another model, KLN301 where there is no such device.
    """

    parallel = 1  # rows at a time

    def __init__(
        self,
        identity: TeacherIdentity,
        place: LocalModel,
        model: Path,
        adapter: Path | None,
        *,
        top_k: int,
        threads: int | None = None,
    ) -> None:
        determinism.fix(threads)
        self._vocabulary, self._top_k = identity.vocab_size, top_k
        language_model = load_language_model(
            model, dtype=place.dtype, attention=place.attention, device=place.device_type
        )
        self._model = language_model if adapter is None else _wearing(language_model, adapter)

    def give_up(self) -> None:
        """Nothing is under way in other threads."""

    def score(self, text: str, input_ids: list[int], targets: list[int]) -> list[Scored]:
        """Each target's candidates, from the logits of the position before it. ``text`` is not looked at.

        Raises RowFault: ``token_id_out_of_vocab``, and those of :func:`kiln_stages.distilling.candidates.scored`.
        """
        if (largest := max(input_ids)) >= self._vocabulary:
            detail = f"the row has token {largest}, the teacher has {self._vocabulary} of them"
            raise RowFault("token_id_out_of_vocab", detail)
        try:
            return self._score(input_ids, targets)
        except torch.OutOfMemoryError as error:
            raise KilnError(
                "KLN403",
                f"out of memory over a row of {len(input_ids)} tokens: {printable(error)}",
                hint="register the teacher with a lower --max-model-len, or use a larger machine",
            ) from error

    @torch.inference_mode()
    def _score(self, input_ids: list[int], targets: list[int]) -> list[Scored]:
        ids = torch.tensor([input_ids], dtype=torch.int64, device=self._model.device)  # [1, T]
        before = torch.tensor(targets, device=self._model.device) - 1
        rows = self._model.hidden(ids)[0].index_select(0, before)  # [n, H]
        at_once = max(1, LOGITS_AT_ONCE // self._vocabulary)
        found: list[Scored] = []
        for first in range(0, len(targets), at_once):
            logits = self._model.project(rows[first : first + at_once])  # [m, V]
            if logits.shape[-1] != self._vocabulary:
                raise KilnError(
                    "KLN214",
                    f"the model has {logits.shape[-1]} logits a position, its config says {self._vocabulary}",
                    hint="restore the model directory, and register it again",
                )
            logprobs = logits.double().log_softmax(dim=-1).float()  # [m, V]
            for row, target in zip(logprobs, targets[first : first + at_once], strict=True):
                found.append(self._position(row, target, input_ids[target], len(found)))
        return found

    def _position(self, logprobs: Tensor, target: int, chosen: int, at: int) -> Scored:
        """logprobs [V] float32 of target ``at``. All that are no less than the K-th are compared, ties included."""
        if bool(logprobs.isnan().any()):
            raise RowFault("logprob_not_finite", f"the teacher's logits for position {target} are not finite")
        least = logprobs.topk(self._top_k).values[-1]
        among = (logprobs >= least).nonzero().flatten()
        pairs = dict(zip(among.tolist(), logprobs[among].tolist(), strict=True))
        pairs.setdefault(chosen, float(logprobs[chosen]))
        return scored(pairs.items(), chosen, at, self._top_k, self._vocabulary)


def _wearing(language_model: LanguageModel, adapter: Path) -> LanguageModel:
    """The model with the adapter on it, every tensor of which has found its place."""
    from peft import get_peft_model_state_dict

    try:
        adapted = attach(language_model.causal, adapter)
    except (ValueError, RuntimeError, KeyError, TypeError) as error:
        raise _unfit(adapter, printable(error)) from error
    stored = {tensor.name for tensor in read_tensors((adapter / MODEL).read_bytes(), str(adapter / MODEL))}
    worn = set(cast(Any, get_peft_model_state_dict)(adapted))
    if stored != worn:
        name = sorted(stored ^ worn)[0]
        where = "in the file alone" if name in stored else "not in the file"
        raise _unfit(
            adapter, f"{len(stored ^ worn)} of its tensors have no counterpart, first {printable(name)} ({where})"
        )
    return LanguageModel(adapted.get_base_model())


def _unfit(adapter: Path, detail: str) -> KilnError:
    return KilnError(
        "KLN221",
        f"the adapter {printable(adapter)} does not fit the teacher's model: {detail}",
        hint="register the model that the adapter was trained on",
    )
