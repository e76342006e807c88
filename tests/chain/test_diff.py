"""``kiln diff``: rows added, removed, moved, labels changed, settings and versions, and whether resume is legal."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from forging import forge_labels
from kiln_stages.evidence.run_differences import _longest_rise
from tiny_model import RUN, Kiln

Copy = Callable[..., Path]


def diff(kiln: Kiln, a: Path, b: Path) -> dict[str, Any]:
    done = kiln("diff", a / RUN, b / RUN, "--json")
    assert done.code == 0, done.err
    value: dict[str, Any] = json.loads(done.out)
    return value


def again(kiln: Kiln, project: Path, old: str, new: str, *stages: str) -> Path:
    """The stages run once more under a config with one change."""
    path = project / "kiln.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    for stage in stages:
        done = kiln(stage, path, "--out", project / RUN, *(["--fresh"] if stage == "train" else []))
        assert done.code == 0, done.err
    return project


def test_a_run_and_its_copy_are_the_same_and_resume_is_legal(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    found = diff(kiln, finished, copy_of(finished))
    assert [found["rows"][kind] for kind in ("added", "removed", "moved", "changed")] == [[], [], [], []]
    assert found["rows"]["same"] > 0 and found["settings"] == found["versions"] == []
    assert found["resume"]["legal"] is True and found["resume"]["differences"] == []
    assert "rows, labels, settings and versions are the same" in kiln("diff", finished / RUN, finished / RUN).out


def test_another_seed_moves_rows_between_splits(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    other = again(kiln, copy_of(admitted), "seed = 42", "seed = 43", "prepare", "admit")
    rows = diff(kiln, admitted, other)["rows"]
    for row in rows["moved"]:
        assert row["a"] and row["b"]
    assert any(row["a"].split()[0] != row["b"].split()[0] for row in rows["moved"])
    between = {frozenset((row["a"].split()[0], row["b"].split()[0])) for row in rows["moved"]}
    assert frozenset(("test", "corpus")) in between
    swapped = diff(kiln, other, admitted)["rows"]
    assert {row["row_sha256"] for row in rows["added"]} == {row["row_sha256"] for row in swapped["removed"]}
    assert rows["added"] and all(row["a"] == "" for row in rows["added"])


def test_rows_of_the_test_split_are_counted_as_they_were_written(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    other = copy_of(admitted)
    splits = [other / RUN / "data" / f"{name}.jsonl" for name in ("train", "validation", "test")]
    counts = [len(path.read_text().splitlines()) for path in splits]
    rejected = len((other / RUN / "admit" / "rejected.jsonl").read_text().splitlines())
    assert counts[2] > 0
    assert diff(kiln, admitted, other)["rows"]["same"] == sum(counts) - rejected
    splits[2].write_text("")
    done = kiln("diff", admitted / RUN, other / RUN)
    assert done.code == 2 and "KLN207" in done.err and "test.jsonl" in done.err


def test_a_cap_removes_rows_and_moves_no_other(admitted: Path, copy_of: Copy, kiln: Kiln) -> None:
    tighter = again(kiln, copy_of(admitted), "max_tokens = 192", "max_tokens = 4096", "admit")
    found = diff(kiln, admitted, tighter)
    assert found["rows"]["added"] and not found["rows"]["removed"] and not found["rows"]["moved"]
    assert [change["what"] for change in found["settings"]] == ["config.admit.max_tokens"]
    assert (found["settings"][0]["a"], found["settings"][0]["b"]) == ("192", "4096")


def test_a_changed_label_is_named(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    mine = copy_of(finished, own_model=True)
    row = forge_labels(mine / RUN, 3)
    found = diff(kiln, finished, mine)
    (changed,) = found["rows"]["changed"]
    assert (changed["row_sha256"], changed["a"], changed["b"]) == (row.row_sha256, "corpus 4", "corpus 4")
    assert changed["what"].startswith("labels: trained on")
    assert found["resume"]["legal"] is False, "the corpus is another one"


def test_resume_is_asked_by_the_comparison_of_resume_itself(finished: Path, copy_of: Copy, kiln: Kiln) -> None:
    other = again(kiln, copy_of(finished), "learning_rate = 0.01", "learning_rate = 0.02", "train")
    found = diff(kiln, finished, other)
    answer = found["resume"]
    assert answer["legal"] is False and answer["checkpoint"].endswith("00000025.kiln-checkpoint")
    # What `kiln resume` says of the same checkpoint under the same settings.
    config = finished / RUN / "config.resolved.toml"
    mine = copy_of(finished, "mine")
    (mine / RUN / "config.resolved.toml").write_text(
        config.read_text("utf-8").replace("learning_rate = 0.01", "learning_rate = 0.02"), "utf-8"
    )
    (mine / RUN / "train_receipt.json").unlink()
    refused = json.loads(kiln("resume", mine / RUN, "--json").out)["error"]["details"]["differences"]
    assert [[each["what"], each["checkpoint_value"], each["current_value"]] for each in refused] == [
        [each["what"], each["a"], each["b"]] for each in answer["differences"]
    ]


def test_what_cannot_be_told_is_said(admitted: Path, finished: Path, kiln: Kiln) -> None:
    assert diff(kiln, finished, admitted)["resume"]["legal"] is None
    assert diff(kiln, admitted, finished)["resume"] == {
        "checkpoint": None,
        "differences": [],
        "legal": False,
        "why": "A has no checkpoint to resume from",
    }


def test_a_directory_that_is_no_run_is_refused(tmp_path: Path, admitted: Path, kiln: Kiln) -> None:
    done = kiln("diff", admitted / RUN, tmp_path)
    assert (done.code, "KLN206" in done.err) == (2, True)


@pytest.mark.parametrize("seed", range(5))
def test_the_fewest_rows_are_called_moved(seed: int) -> None:
    numbers = random.Random(seed).sample(range(9), 9)
    rising = (set(c) for n in range(9, 0, -1) for c in combinations(range(9), n) if _rises([numbers[at] for at in c]))
    best = next(rising)
    found = _longest_rise(numbers)
    assert len(found) == len(best) and _rises([numbers[at] for at in sorted(found)])
    assert _longest_rise([]) == set()


def _rises(numbers: list[int]) -> bool:
    return numbers == sorted(set(numbers))
