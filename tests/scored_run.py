"""A run directory whose corpus another tiny model scored: real scores, a trajectory in every other row, admitted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kiln_stages import admit
from kiln_stages.training.model import LanguageModel, load_language_model
from scored_corpus import ALIAS, TOP_K, Scorer, corpus, register_teacher, teacher_identity
from tiny_model import write_tiny_model

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.plugins import load_plugins

RUN = "run"
TEACHER_SEED = 11
CONFIG = """
schema = "kiln.config.v1"
[project]
seed = 42
[model]
path = "model"
id = "tiny"
[admit]
kind = "opd"
file = "teacher.jsonl"
[distill]
teacher = "{alias}"
{distill}
[train]
adapter = "tiny"
learning_rate = 0.01
lora_rank = 2
lora_alpha = 4.0
threads = 1
{train}
"""


def scored_project(
    directory: Path,
    rows: int = 4,
    *,
    distill: str = "[distill.echo]\nenv_mask_mode = 'full_obs'",
    train: str = "epochs = 3\ncheckpoint_interval = 4",
    shift: int = 0,
    held_out: range = range(0),
) -> tuple[LoadedConfig, Path]:
    """(config, run directory): a project that is ready to admit. ``shift``: scores from so many positions too late.

    ``held_out``: numbers of examples in a second corpus.
    """
    model = write_tiny_model(directory / "model")
    identity = teacher_identity(model)
    register_teacher(directory / ".kiln", identity)
    teacher = load_language_model(write_tiny_model(directory / "teacher", TEACHER_SEED))
    scorer = Scorer(model)
    for name, numbers in (("teacher.jsonl", range(rows)), ("held_out.jsonl", held_out)):
        examples = [scored_example(scorer, teacher, number, shift) for number in numbers]
        if examples:
            (directory / name).write_bytes(corpus(identity, examples))
    if held_out:
        distill = f'heldout_file = "held_out.jsonl"\n{distill}'
    path = directory / "kiln.toml"
    path.write_text(CONFIG.format(alias=ALIAS, distill=distill, train=train))
    return load_config(path), directory / RUN


def scored_run(directory: Path, rows: int = 4, **settings: Any) -> tuple[LoadedConfig, Path]:
    """The same, admitted."""
    config, out = scored_project(directory, rows, **settings)
    admit.run(config, out, load_plugins())
    return config, out


def forty_steps(directory: Path, optimizer: str, interval: int = 15) -> Path:
    """An admitted project: ten scored rows, five of them trajectories, ECHO on, four epochs."""
    scored_run(directory, 10, train=f"epochs = 4\ncheckpoint_interval = {interval}\noptimizer = '{optimizer}'")
    return directory


def scored_example(scorer: Scorer, teacher: LanguageModel, number: int, shift: int = 0) -> dict[str, Any]:
    """A row with the scores that the teacher gives; every other one is a trajectory with a tool's answer."""
    question = f"What is the weather like in city number {number} today?"
    answer = f"It rains in city number {number}." + " Take a coat." * (number % 3)
    segments: list[dict[str, Any]] = []
    if number % 2:
        call = f'{{"name":"get_weather","arguments":{{"city":"city {number}"}}}}'
        result = f"Warning: old data. Rain, {number} degrees."
        segments = [
            {"role": "assistant", "content": call, "kind": "action"},
            {"role": "tool", "content": result, "kind": "observation", "warning_prefix_len": 18},
            {"role": "assistant", "content": answer, "kind": "action"},
        ]
    row = scorer.example(question, answer, trajectory=segments, id=f"row-{number}", metadata={"note": "private"})
    targets = scorer.targets(row["messages"], answer, segments)
    scores = candidates(teacher, targets.input_ids, [target + shift for target in targets.action_targets])
    for entry, best in zip(row["teacher_tokens"], scores, strict=True):
        entry["top_logprobs"] = best
    return row


@torch.no_grad()
def candidates(teacher: LanguageModel, ids: Sequence[int], targets: Sequence[int]) -> list[list[dict[str, Any]]]:
    """The teacher's best tokens before each target, as float32 logprobs over its whole vocabulary."""
    logits = teacher.project(teacher.hidden(torch.tensor([list(ids)]))[0])  # [T, V]
    last = len(ids) - 1
    best = logits[[min(target - 1, last) for target in targets]].double().log_softmax(-1).topk(TOP_K)
    return [
        [{"token_id": token, "logprob": score} for token, score in zip(tokens, scores, strict=True)]
        for tokens, scores in zip(best.indices.tolist(), best.values.float().tolist(), strict=True)
    ]
