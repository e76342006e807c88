"""Scored corpora made on the spot: a teacher for a tiny model, its manifest line, and examples with made-up scores.

The scores are no model's. They keep every rule, so that a test can break one at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from kiln_stages.admit import AdmitResult
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.admitting.model_files import load_model_files
from kiln_stages.distilling.identity import (
    IDENTITY_SCHEMA,
    LOCAL_PROTOCOL,
    LOGPROBS_MODE,
    SERVED_PROTOCOL,
    TeacherIdentity,
)
from kiln_stages.distilling.registry import Endpoint, Teacher, register
from kiln_stages.distilling.targets import TargetFinder, Targets
from kiln_stages.distilling.tokenizers import tokenizer_identity, vocabulary_size
from kiln_stages.distilling.trajectory import Segment

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins

# The fixtures ``admit`` and ``refuse`` of tests/distilling.
Admit = Callable[..., AdmitResult]
Refuse = Callable[..., KilnError]

ALIAS = "large@vllm"
TOP_K = 16


def teacher_identity(model: Path, **changes: Any) -> TeacherIdentity:
    """A served teacher with the tokenizer of ``model``."""
    tokenizer = tokenizer_identity(load_model_files(model))
    identity = TeacherIdentity(
        schema=IDENTITY_SCHEMA,
        protocol=SERVED_PROTOCOL,
        served_model_id="large",
        base_model_sha256="a" * 64,
        tokenizer_vocab_sha256=tokenizer.vocab_sha256,
        tokenizer_config_sha256=tokenizer.config_sha256,
        adapter=None,
        vocab_size=vocabulary_size(model),
        max_top_k=TOP_K,
        max_model_len=1024,
        max_prompt_logprob_candidates=1000,
        logprobs_mode=LOGPROBS_MODE,
        implementation="made up",
        inference_config_sha256="d" * 64,
    )
    return msgspec.structs.replace(identity, **changes).require_sound()


def local_identity(model: Path, **changes: Any) -> TeacherIdentity:
    return teacher_identity(model, protocol=LOCAL_PROTOCOL, **changes)


def register_teacher(registry: Path, identity: TeacherIdentity, alias: str = ALIAS) -> None:
    teacher = Teacher(
        alias=alias,
        content_revision=identity.content_revision(),
        identity=identity,
        local=None,
        endpoint=Endpoint(url="http://localhost:1", key_env=None, key_file=None, identity_from="file"),
    )
    register(registry, teacher, replace=True)


class Scorer:
    """Gives examples scores under the template and tokenizer of ``model``."""

    def __init__(self, model: Path, **admit: Any) -> None:
        config = load_config(None, [f"model.path={model}"], {"admit": admit})
        self.finder = TargetFinder(build_contract(config, load_terms(config, load_plugins())))
        self.vocabulary = vocabulary_size(model)

    def targets(self, messages: Sequence[dict[str, Any]], response: str, segments: Sequence[Any] = ()) -> Targets:
        typed = [Segment(role=s["role"], content=s["content"], kind=s.get("kind", "context")) for s in segments]
        return self.finder.find(messages, response, typed)

    def example(
        self,
        question: str = "What is the weather like?",
        response: str = "It rains.",
        *,
        trajectory: Sequence[dict[str, Any]] = (),
        top_k: int = TOP_K,
        **more: Any,
    ) -> dict[str, Any]:
        """A row of the seed page's form, every token with its id and ``top_k`` candidates."""
        messages = [{"role": "user", "content": question}]
        found = self.targets(messages, response, trajectory)
        texts = self.finder.token_texts(found)
        entries = [
            {"token": texts[at], "token_id": found.input_ids[at], "top_logprobs": self.candidates(number, top_k)}
            for number, at in enumerate(found.action_targets)
        ]
        row: dict[str, Any] = {"messages": messages, "teacher_response": response, "teacher_tokens": entries, **more}
        return {**row, "trajectory": list(trajectory)} if trajectory else row

    def candidates(self, number: int, top_k: int = TOP_K) -> list[dict[str, Any]]:
        """Halved probabilities from one half on: 1/2, 1/4, ... They add up to less than one."""
        return [
            {"token_id": (number * 5 + rank) % self.vocabulary, "logprob": round(-(rank + 1) * math.log(2), 6)}
            for rank in range(top_k)
        ]


def line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def corpus(identity: TeacherIdentity, rows: Sequence[dict[str, Any] | bytes]) -> bytes:
    """The manifest line and a line a row, given as an object or as its bytes."""
    lines = [identity.manifest_line(), *(row if isinstance(row, bytes) else line(row) for row in rows)]
    return b"\n".join(lines) + b"\n"
