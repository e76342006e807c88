"""``kiln verify-receipt --deep`` finds what every digest vouches for: rows, tokens and labels are derived again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from forging import forge_labels, rebuild_chain
from kiln_stages.admitting.corpus import read_corpus, write_corpus
from tiny_model import RUN, Kiln

LABELS = "labels are the template's own"


class Found(NamedTuple):
    code: int
    verdict: str
    claims: list[dict[str, Any]]

    def named(self, status: str) -> list[str]:
        return [claim["name"] for claim in self.claims if claim["status"] == status]

    def detail(self, name: str) -> str:
        (found,) = [claim for claim in self.claims if name in claim["name"] and claim["status"] != "holds"]
        return str(found["detail"])


def verify(kiln: Kiln, run: Path, *options: str) -> Found:
    done = kiln("verify-receipt", run, "--json", *options)
    found = json.loads(done.out)
    return Found(done.code, found["verdict"], found["claims"])


@pytest.fixture
def mine(finished: Path, copy_of: Callable[..., Path]) -> Path:
    return copy_of(finished, own_model=True)


def test_plain_verification_says_that_labels_are_not_checked(mine: Path, kiln: Kiln) -> None:
    plain = verify(kiln, mine / RUN, "--require-all")
    assert (plain.code, plain.verdict) == (0, "consistent")
    assert [name for name in plain.named("not checked") if LABELS in name]
    assert not [name for name in plain.named("holds") if "labels are" in name]
    lines = kiln("verify-receipt", mine / RUN).out.splitlines()
    assert any(line.startswith("--") and LABELS in line and "--deep" in line for line in lines)
    assert lines[-1].endswith("1 not checked")


def test_deep_derives_an_untouched_run_again(mine: Path, kiln: Kiln) -> None:
    before = {path: path.read_bytes() for path in (mine / RUN).rglob("*") if path.is_file()}
    found = verify(kiln, mine / RUN, "--deep", "--require-all")
    assert (found.code, found.named("fails"), found.named("not checkable here"), found.named("not checked")) == (
        0,
        [],
        [],
        [],
    )
    assert len([name for name in found.named("holds") if LABELS in name]) == 2  # corpus, heldout
    assert "data/train.jsonl is what the raw rows give" in found.named("holds")
    assert {path: path.read_bytes() for path in (mine / RUN).rglob("*") if path.is_file()} == before


def test_one_label_forged_with_the_whole_chain_recomputed(mine: Path, kiln: Kiln) -> None:
    row = forge_labels(mine / RUN, 7)
    plain = verify(kiln, mine / RUN)
    assert (plain.code, plain.named("fails")) == (0, []), "the forgery is complete: no digest tells"
    assert [name for name in plain.named("not checked") if LABELS in name]
    deep = verify(kiln, mine / RUN, "--deep")
    assert (deep.code, deep.verdict) == (1, "does not verify")
    detail = deep.detail(f"corpus: {LABELS}")
    assert f"row {row.row_index} " in detail and row.row_sha256 in detail
    assert f"token {row.label_spans[0][0] - 1} is context in the corpus and trained on by the template" in detail
    assert "corpus: token ids are the tokenizer's own" in deep.named("holds")
    assert f"heldout: {LABELS}" in deep.named("holds")


def _another_id(run: Path) -> str:
    path = run / "admit" / "corpus.parquet"
    rows = read_corpus(path)
    ids = [*rows[3].input_ids]
    ids[2] = ids[2] + 1
    rows[3] = msgspec.structs.replace(rows[3], input_ids=ids)
    write_corpus(path, rows)
    return f"row {rows[3].row_index} "


def _two_rows_exchanged(run: Path) -> str:
    path = run / "admit" / "corpus.parquet"
    rows = read_corpus(path)
    rows[1], rows[2] = rows[2], rows[1]
    write_corpus(path, rows)
    return f"row {rows[1].row_index} "


def _another_test_row(run: Path) -> str:
    path = run / "data" / "test.jsonl"
    path.write_bytes(path.read_bytes().replace(b"weather", b"climate", 1))
    return "line 1 "


def _a_dropped_row_renamed(run: Path) -> str:
    path = run / "data" / "rejected.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"missing_tools"', b'"missing_query"', 1))
    return "line "


FORGERIES = {
    "a token": (_another_id, "corpus: token ids are the tokenizer's own"),
    "a prepared row": (_another_test_row, "data/test.jsonl is what the raw rows give"),
    "a reason of a drop": (_a_dropped_row_renamed, "data/rejected.jsonl is what the raw rows give"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_other_forgeries_with_the_chain_recomputed(mine: Path, kiln: Kiln, name: str) -> None:
    forge, claim = FORGERIES[name]
    where = forge(mine / RUN)
    rebuild_chain(mine / RUN)
    assert verify(kiln, mine / RUN).named("fails") == []
    deep = verify(kiln, mine / RUN, "--deep")
    assert deep.code == 1
    assert claim in deep.named("fails")
    assert where in deep.detail(claim)


def test_rows_in_another_order_are_found_and_named(mine: Path, kiln: Kiln) -> None:
    where = _two_rows_exchanged(mine / RUN)
    rebuild_chain(mine / RUN)
    deep = verify(kiln, mine / RUN, "--deep")
    assert "corpus: rows, hashes and their order are those of the data" in deep.named("fails")
    assert where in deep.detail("corpus: rows, hashes and their order")


@pytest.mark.parametrize(
    ("gone", "claim"),
    [("raw.jsonl", "the raw rows can be prepared again"), ("model", "the rows can be admitted again")],
)
def test_what_is_not_here_cannot_be_derived_again(mine: Path, kiln: Kiln, gone: str, claim: str) -> None:
    (mine / gone).rename(mine / "elsewhere")
    found = verify(kiln, mine / RUN, "--deep")
    assert (found.code, found.named("fails")) == (0, [])
    assert claim in found.named("not checkable here")
    assert verify(kiln, mine / RUN, "--deep", "--require-all").code == 1


def test_without_the_corpus_its_digest_is_still_derived(mine: Path, kiln: Kiln) -> None:
    (mine / RUN / "admit" / "corpus.parquet").unlink()
    found = verify(kiln, mine / RUN, "--deep")
    assert f"corpus: {LABELS}" in found.named("not checkable here")
    assert "corpus: the digest of ids and labels follows from the data" in found.named("holds")


def test_rows_of_the_command_line_are_derived_from_their_copy(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> None:
    run = tmp_path / "run"
    row = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A stone."}]}
    config = tmp_path / "kiln.toml"
    config.write_text(
        'schema = "kiln.config.v1"\n[train]\nepochs = 1\nlora_rank = 2\nlora_alpha = 4.0\nthreads = 1\n', "utf-8"
    )
    shutil.copytree(tiny_model, tmp_path / "model")
    admitted = kiln("admit", config, "--row", json.dumps(row), "--model", tmp_path / "model", "--out", run)
    assert admitted.code == 0, admitted.err
    assert kiln("train", run / "config.resolved.toml", "--out", run).code == 0
    found = verify(kiln, run, "--deep", "--require-all")
    assert (found.code, found.named("fails")) == (0, [])
    assert f"corpus: {LABELS}" in found.named("holds")
