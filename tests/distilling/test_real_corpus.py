"""Real scores of the default model, as they were rounded to six decimals: admitted whole, and refused when shifted."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kiln_stages import admit as stage
from kiln_stages.distilling.admitted import scored_corpus
from kiln_stages.distilling.rows import ScoredRows
from scored_corpus import ALIAS, line, local_identity, register_teacher
from tests_support import shared_path

from kiln_cli.config import load_config
from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins

MODEL = Path(__file__).resolve().parents[2] / "models" / "smollm2-135m-instruct"
pytestmark = pytest.mark.model
ABOVE_ONE = [(4, 5), (4, 6), (12, 7)]  # line of the rows and token of those whose rounded mass exceeds one

Rows = list[dict[str, Any]]
Admit = Callable[..., stage.AdmitResult]


@pytest.fixture
def rows() -> Rows:
    text = shared_path("data/opd/smollm2_teacher_rows.jsonl").read_text(encoding="utf-8")
    return [json.loads(row) for row in text.split("\n") if row]


@pytest.fixture
def admit(tmp_path: Path) -> Admit:
    """``admit(rows)``, or with the bytes behind the manifest line."""

    def admits(rows: Rows | bytes, **distill: Any) -> stage.AdmitResult:
        identity = local_identity(MODEL, max_top_k=32)
        register_teacher(tmp_path, identity)
        data = rows if isinstance(rows, bytes) else b"".join(line(row) + b"\n" for row in rows)
        path = tmp_path / "corpus.jsonl"
        path.write_bytes(identity.manifest_line() + b"\n" + data)
        settings = {"file": str(path), "registry": str(tmp_path)}
        config = load_config(
            None, [f"model.path={MODEL}"], {"admit": settings, "distill": {"teacher": ALIAS, **distill}}
        )
        return stage.run(config, tmp_path / "run", load_plugins())

    return admits


def mass(token: dict[str, Any]) -> float:
    """As the contract has it: float32 scores, exponentials added up in float64."""
    scores = struct.unpack("<32f", struct.pack("<32f", *(one["logprob"] for one in token["top_logprobs"])))
    return sum(map(math.exp, scores))


def test_the_file_is_admitted_as_it_stands(admit: Admit, rows: Rows, tmp_path: Path) -> None:
    data = shared_path("data/opd/smollm2_teacher_rows.jsonl").read_bytes()
    result = admit(data, require_token_ids=True)
    counts = result.manifest.counts["corpus"]
    assert (counts["rows_kept"], counts["action_tokens"]) == (12, 331)
    found = scored_corpus(result.manifest)
    assert found is not None
    assert (found.top_k, found.alignment.proven, found.alignment.of) == (32, 331, 331)
    above = [
        (number, at)
        for number, row in enumerate(rows, start=1)
        for at, token in enumerate(row["teacher_tokens"])
        if mass(token) > 1
    ]
    assert above == ABOVE_ONE
    kept = list(ScoredRows(tmp_path / "run" / "admit" / "corpus.parquet"))
    assert [len(row.action_targets) for row in kept] == [len(row["teacher_tokens"]) for row in rows]


def test_mass_beyond_the_tolerance_is_refused(admit: Admit, rows: Rows) -> None:
    token = rows[3]["teacher_tokens"][5]
    excess = math.log((1 + 1e-5) / mass(token))
    for one in token["top_logprobs"]:
        one["logprob"] = min(one["logprob"] + excess, 0.0)
    assert mass(token) == pytest.approx(1 + 1e-5, abs=1e-6)
    with pytest.raises(KilnError) as caught:
        admit(rows)
    assert ":5: example 4: mass_above_one at /teacher_tokens/5/top_logprobs" in caught.value.message


def test_rows_shifted_by_one_position_are_refused_where_ids_are_given(admit: Admit, rows: Rows) -> None:
    shifted = rows[6]["teacher_tokens"]
    rows[6]["teacher_tokens"] = [shifted[-1], *shifted[:-1]]
    with pytest.raises(KilnError) as caught:
        admit(rows)
    assert ":8: example 7: token_id_mismatch at /teacher_tokens/0/token_id" in caught.value.message
    for token in rows[6]["teacher_tokens"]:
        del token["token_id"]
    found = scored_corpus(admit(rows).manifest)
    assert found is not None
    assert found.alignment.proven == 331 - len(shifted)


def test_without_its_manifest_the_file_is_refused(tmp_path: Path, admit: Admit) -> None:
    admit(shared_path("data/opd/smollm2_teacher_rows.jsonl").read_bytes())
    settings = {"file": str(shared_path("data/opd/smollm2_teacher_rows.jsonl")), "kind": "opd"}
    config = load_config(
        None,
        [f"model.path={MODEL}"],
        {"admit": {**settings, "registry": str(tmp_path)}, "distill": {"teacher": ALIAS}},
    )
    with pytest.raises(KilnError) as caught:
        stage.run(config, tmp_path / "other", load_plugins())
    assert ":1: example 1: logprobs_without_manifest at /teacher_tokens/0/logprob" in caught.value.message
