"""A causal language model in two halves: the decoder, and the model's own head at chosen positions only.

Logits are needed only where a token is supervised. ``hidden`` runs the decoder; ``project`` runs everything that the
model does after it (projection, scaling, soft caps) on gathered rows. Both are the model's own code, whatever its
architecture, and a probe proves at load that the two halves give what the whole gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded
from kiln_cli.text import printable
from kiln_stages.training import determinism, fast_paths, tiles
from kiln_stages.training.head import OutputHead
from kiln_stages.training.lora import LoraShape, add_lora, are_transposed, choose_targets
from kiln_stages.training.segments import split_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROBE_TOKENS = 24
# How far gathered logits may lie from full ones, relative to the largest logit: a matrix product over fewer rows may
# sum in another order. A wrong head (a missing soft cap or scale) is off by far more.
PROBE_BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
FETCH_HINT = "run `python fixtures/fetch_model.py`, or name a model directory with `[model] path`"


class HeadProbe(NamedTuple):
    """How gathered logits compared with full logits at load. ``relative`` is the largest difference / largest logit."""

    exact: bool
    relative: float
    bound: float


class LanguageModel:
    """A causal language model that can be asked for hidden states and for logits apart.

    ``causal`` is the transformers model; it stays in eval mode, since this profile has no dropout of any kind. After
    :meth:`add_lora`, ``parameters`` holds the trainable leaves by their names in the adapter file, ``frozen`` the rest.
    """

    def __init__(self, causal: nn.Module) -> None:
        self.causal = causal.eval().requires_grad_(False)
        self.parameters: dict[str, nn.Parameter] = {}
        self.frozen: dict[str, nn.Parameter] = {}
        self.shape: LoraShape | None = None
        self.fast_paths = fast_paths.NONE
        self._fast_forwards: fast_paths.Forwards = {}
        self._read = fast_paths.ReadRows()
        self._decoder: Any = cast(Any, causal).base_model
        self.head = OutputHead(causal)
        self.probe = self._prove_head()
        self._prove_causal()

    @property
    def device(self) -> torch.device:
        return next(self.causal.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.causal.parameters()).dtype

    def hidden(self, input_ids: Tensor) -> Tensor:
        """input_ids [1, T] int64 -> last hidden states [1, T, H], after the final norm, in the model's dtype."""
        out: Tensor = self._decoder(input_ids=input_ids, use_cache=False).last_hidden_state  # [1, T, H]
        return out

    def states_at(self, ids: Tensor, rows: Tensor) -> Tensor:
        """ids [T] int64, rows [n] int64 in 0..T-1, no two the same -> last hidden states at these rows alone [n, H].

        What nothing read depends on is not computed: the tokens behind the last row, and the last feed-forward block
        elsewhere, where that is a faster path.
        """
        with self._read.only(rows):
            hidden = self.hidden(self._whole_tiles(ids[: int(rows.max()) + 1]).unsqueeze(0))
        return hidden.squeeze(0).index_select(0, rows)

    def _whole_tiles(self, ids: Tensor) -> Tensor:
        """ids [T] int64 -> as many as make whole tiles; what is put behind them changes nothing before it."""
        spare = tiles.spare_rows(len(ids), self.dtype, self.device)
        limit = getattr(cast(Any, self.causal).config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and len(ids) + spare > limit:  # a learned position, or a scale of rotations, may end there
            return ids
        return nn.functional.pad(ids, (0, spare))

    def project(self, rows: Tensor) -> Tensor:
        """rows [n, H] -> logits [n, V] through the model's own head."""
        return self.head(rows)

    def add_lora(self, rank: int, alpha: float, seed: int, target_modules: list[str] | None = None) -> None:
        """Puts trainable LoRA leaves on the target layers, and runs parts of the model by faster paths.

        Raises KilnError KLN214 where the model has none of the target layers.
        """
        targets = choose_targets(self.causal, target_modules)
        self.shape = LoraShape(rank, alpha, targets, are_transposed(self.causal, targets))
        self.parameters = add_lora(self.causal, self.shape, seed)
        self.frozen = {name: leaf for name, leaf in self.causal.named_parameters() if not leaf.requires_grad}
        self.fast_paths, self._fast_forwards = fast_paths.install(
            self._decoder, self.parameters, self._probe_states, self._read
        )

    @contextmanager
    def modules_own(self) -> Iterator[None]:
        """Within, nothing runs by a faster path: what comes out is what peft gives that loads the adapter elsewhere."""
        fast_paths.take_out(self._fast_forwards)
        try:
            yield
        finally:
            fast_paths.put_in(self._fast_forwards)

    def split_layers(self, segments: int) -> list[int]:
        """Has the backward compute the decoder's layers again, in so many segments; returns the layers of each.

        Raises KilnError KLN214 where that cannot be done, or would change a bit of the hidden states.
        """
        sizes = split_layers(self._decoder, segments, self._read)
        ids = self._probe_ids()
        with torch.no_grad():
            wanted = self.hidden(ids)
        try:
            same = torch.equal(self.hidden(ids), wanted)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise _refused(f"its layers cannot be run in segments: {printable(error)}") from error
        if not same:
            raise _refused("its layers give other hidden states in segments")
        return sizes

    def _probe_states(self, rows: Tensor | None) -> Tensor:
        """Hidden states of the probe's ids: [1, T, H], or those at ``rows`` [n, H]."""
        ids = self._probe_ids()
        return self.hidden(ids) if rows is None else self.states_at(ids[0], rows.to(self.device))

    def _probe_ids(self) -> Tensor:
        """[1, T] int64: some token ids of the model's."""
        vocabulary = int(cast(Any, self.causal).config.get_text_config().vocab_size)
        return (torch.arange(PROBE_TOKENS, device=self.device) * 7919 + 1).remainder(vocabulary).unsqueeze(0)

    @torch.no_grad()
    def _prove_head(self) -> HeadProbe:
        ids = self._probe_ids()
        try:
            full: Tensor = cast(Any, self.causal)(input_ids=ids, use_cache=False).logits[0].float()  # [T, V]
            rows = self.hidden(ids)[0, 1::3]  # [T / 3, H]
            gathered = self.project(rows).float()  # [T / 3, V]
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise _refused(f"its head cannot be run apart from its decoder: {printable(error)}") from error
        wanted = full[1::3]
        bound = PROBE_BOUNDS[self.dtype]
        if gathered.shape != wanted.shape:
            raise _refused(f"gathered logits have shape {tuple(gathered.shape)}, expected {tuple(wanted.shape)}")
        relative = float((gathered - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))
        if not relative <= bound:  # written so that NaN is refused too
            raise _refused(f"gathered logits differ from full logits by {relative:.3g} of the largest, bound {bound:g}")
        self.head.prove_columns(rows, bound)
        return HeadProbe(exact=bool(torch.equal(gathered, wanted)), relative=relative, bound=bound)

    @torch.no_grad()
    def _prove_causal(self) -> None:
        """Raises KilnError KLN214 where another token changes hidden states before it: such a model sees the labels,
        and :meth:`states_at` leaves out what it would have seen."""
        ids = self._probe_ids()
        half = PROBE_TOKENS // 2
        other = torch.cat([ids[:, :half], ids[:, half:].flip(1)], dim=1)
        before, after = (self.hidden(each)[:, :half].float() for each in (ids, other))
        relative = fast_paths.relative_difference(after, before)
        bound = PROBE_BOUNDS[self.dtype]
        if not relative <= bound:
            raise _refused(f"later tokens change hidden states before them by {relative:.3g}, bound {bound:g}")


def attention_of(path: Path) -> str:
    """The attention that a model directory is run with: torch's fused one, or ``eager`` where the model caps its
    attention scores (Gemma-2), which the fused one cannot. Raises KilnError KLN302 for a config that is not understood.
    """
    require_model_files(path)
    determinism.go_offline()
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = cast(Any, AutoConfig).from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        kind = cast(Any, AutoModelForCausalLM)._model_mapping[type(config)]
    except (OSError, ValueError, KeyError) as error:
        raise _not_loadable(path, f"transformers knows no such decoder: {printable(error)}") from error
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return "eager" if capped or not kind._supports_sdpa else "sdpa"


def load_language_model(
    path: Path, *, dtype: str = "float32", attention: str = "sdpa", device: str = "cpu"
) -> LanguageModel:
    """Loads a base model from a local directory: safetensors only, no code from the directory, no network.

    Raises KilnError KLN302 where files are missing or do not make the whole model, KLN214 where its head cannot be
    used for gathered positions, KLN301 where the device is not there.
    """
    require_model_files(path)
    determinism.go_offline()
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    cast(Any, disable_progress_bar)()
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KilnError("KLN301", f"device {device!r} is not available to torch", hint='set `[train] device = "cpu"`')
    try:
        causal, info = cast(Any, AutoModelForCausalLM).from_pretrained(
            str(path),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=DTYPES[dtype],
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _not_loadable(path, f"transformers cannot load it: {printable(error)}") from error
    # Weights that no file brings would be drawn at random in silence.
    absent = sorted({*info["missing_keys"], *(str(item) for item in info["mismatched_keys"])})
    if absent:
        raise _not_loadable(
            path,
            f"{counted(len(absent), 'weight is', 'weights are')} missing or misshapen, first {printable(absent[0])}",
        )
    return LanguageModel(causal.to(device))


def require_model_files(path: Path) -> None:
    """Raises KilnError KLN302 unless ``path`` has a config and every safetensors shard that its index names."""
    if not path.is_dir():
        raise _not_loadable(path, "there is no such directory")
    if not (path / "config.json").is_file():
        raise _not_loadable(path, "config.json is missing")
    index = path / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        try:
            names = sorted(set(json.loads(read_bounded(index, 64 * 1024 * 1024))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _not_loadable(path, f"{index.name} cannot be read: {printable(error)}") from None
    for name in names:
        if not (path / name).is_file():
            raise _not_loadable(path, f"{printable(name)} is missing")


def _not_loadable(path: Path, detail: str) -> KilnError:
    return KilnError("KLN302", f"no model can be loaded from {printable(path)}: {detail}", hint=FETCH_HINT)


def _refused(detail: str) -> KilnError:
    return KilnError(
        "KLN214", f"the model cannot be trained by this profile: {detail}", hint="choose a decoder-only model"
    )
