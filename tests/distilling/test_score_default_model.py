"""The default model scores rows as somebody else scored them with it, rounded to six decimals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kiln_stages.distilling import local_identity
from kiln_stages.distilling.pinning import register_local
from kiln_stages.distilling.registry import read_registry
from kiln_stages.teacher import Settings, run_score
from kiln_stages.training import determinism
from tests_support import shared_path

from kiln_cli.config import load_config

determinism.go_offline()

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"


@pytest.mark.model
def test_scores_are_those_that_were_made_elsewhere(tmp_path: Path) -> None:
    lines = shared_path("data/opd/smollm2_teacher_rows.jsonl").read_text(encoding="utf-8").splitlines()
    theirs = [json.loads(lines[number]) for number in (0, 1, 11)]  # plain, with earlier answers, of many scripts
    request = tmp_path / "rows.jsonl"
    bare = [{name: value for name, value in row.items() if name != "teacher_tokens"} for row in theirs]
    request.write_text("".join(json.dumps(row) + "\n" for row in bare), encoding="utf-8")
    register_local("smollm2", local_identity.identify(MODEL), tmp_path)
    config = load_config(None).replace("model", path=str(MODEL))
    out = tmp_path / "teacher.jsonl"
    result = run_score(request, read_registry(tmp_path), "smollm2", out, config, Settings())
    assert (result.rows, result.targets) == (3, 26 + 45 + 26)
    ours = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()[1:]]
    for left, right in zip(ours, theirs, strict=True):
        assert {**left, "teacher_tokens": 0} == {**right, "teacher_tokens": 0}
        for one, other in zip(left["teacher_tokens"], right["teacher_tokens"], strict=True):
            assert one["token_id"] == other["token_id"] and abs(one["logprob"] - other["logprob"]) < 1e-4
            scores = {each["token_id"]: each["logprob"] for each in other["top_logprobs"]}
            for each in one["top_logprobs"]:
                # Which of two near ones is the 32nd may differ by the last digit.
                assert abs(each["logprob"] - scores.get(each["token_id"], other["top_logprobs"][-1]["logprob"])) < 1e-4
