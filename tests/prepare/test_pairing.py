"""Paired sources (contract: item 5, 3, 3.1, 3.2): root splits stay, pairs inherit them, every other row is counted."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages import prepare
from kiln_stages.prepare import PrepareResult
from prepare.conftest import (
    ABSENT,
    ROOT_REASONS,
    SPLITS,
    A,
    T,
    data_files,
    examples,
    ids,
    jsonl,
    paired,
    project,
    raw,
    reasons,
    rejected,
)
from tests_support import shared_path

from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins

EN: dict[str, object] = {"path": "rows.jsonl", "language": "en"}
FR: dict[str, object] = {"path": "rows.fr.jsonl", "language": "fr", "source_id_column": "source_example_id"}
ES: dict[str, object] = {"path": "rows.es.jsonl", "language": "es", "source_id_column": "source_example_id"}


# --- vector A (contract, 3.1)

FIXTURE = "data/function_calling/sommelier_fixture"
ROOT_A = {
    "train": "20 15 11 27 23 7 6 13 12 16 10 26 30 22 17 28 2 14 19 3",
    "validation": "18 29 5 25 8",
    "test": "9 24 1 4 21",
}


def test_vector_a_with_french(tmp_path: Path, plugins: Plugins) -> None:
    root, french = (shared_path(f"{FIXTURE}/preparation_rows{ending}.jsonl") for ending in ("", ".fr"))
    digest = hashlib.sha256(french.read_bytes()).hexdigest()
    assert digest.startswith("94d092d4") and digest.endswith("5158")
    datasets = [{**EN, "path": str(root)}, {**FR, "path": str(french)}]
    result = prepare.run(project(tmp_path, datasets, (20, 5, 5)), tmp_path / "run", plugins)
    languages = result.summary.languages
    assert not any(languages["en"].counts.values())
    assert {name: count for name, count in languages["fr"].counts.items() if count} == {
        "duplicate_source_example": 1,
        "missing_source_example": 1,
        "pair_answers_mismatch": 1,
        "pair_tools_mismatch": 1,
    }
    assert languages["en"].split_sizes == {"train": 20, "validation": 5, "test": 5}
    assert languages["fr"].split_sizes == {"train": 17, "validation": 4, "test": 5}
    pairs = {row["source_id"]: row["source_example_id"] for row in map(json.loads, french.read_bytes().splitlines())}
    for split, numbers in ROOT_A.items():
        found = examples(tmp_path / "run", split)
        order = [f"prep-{number}" for number in numbers.split()]
        english, rest = found[: len(order)], found[len(order) :]
        assert [row["example_id"] for row in english] == order
        assert {row["language"] for row in rest} == {"fr"}
        # Each French row follows its root row's order, and names it.
        places = [order.index(row["source_example_id"]) for row in rest]
        assert places == sorted(places)
        assert all(pairs[row["example_id"]] == row["source_example_id"] for row in rest)
        assert len(found) == {"train": 37, "validation": 9, "test": 10}[split]
    theirs = {
        "train": "eabd3cc57b7ca89cc9bfdb6c23fdae75048a52a17a1797045d3569150ce0bab3",
        "validation": "8dc730a11a9a5f28e0dbf2c28c4f27107b0366af6c1e30c5a80885453e550843",
        "test": "2af57095d2407077e04312690df65560f73f6c53902edb933f659d173db2c5c5",
    }
    for split, expected in theirs.items():
        # The original writes json.dumps' default separators and ASCII escapes; the records are equal.
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in examples(tmp_path / "run", split))
        assert hashlib.sha256(text.encode()).hexdigest() == expected, split


# --- vector B (contract, 3.2)


def vector_b() -> dict[str, bytes]:
    answers = '[{"name":"f","arguments":{"x":1}}]'
    root_changes: dict[int, dict[str, object]] = {
        13: {"query": ""},
        14: {"tools": "  "},
        15: {"answers": ""},
        16: {"query": "too short"},
        17: {"query": "x" * 2001},
        18: {"tools": "["},
        19: {"tools": "{}"},
        20: {"answers": "nope"},
        21: {"answers": "[]"},
        22: {"answers": '[{"name":"f","arguments":{}},{"name":"f","arguments":{}}]'},
        23: {"query": "  ROOT   query\tnumber 01\u00a0PLEASE "},
    }
    roots = []
    for number in range(1, 24):
        query = _q(number) if number <= 12 else f"Valid query for row {number}"
        changes = {"source_id": f"r{number:02}", "query": query, "answers": answers, **root_changes.get(number, {})}
        roots.append(raw(number, **changes))
    pair_changes: dict[int, dict[str, object]] = {
        3: {"tools": T.replace('"d"', '"D"')},
        4: {"answers": answers.replace('"x":', '"x": ')},
        5: {"query": _q(8)},
        6: {"query": _q(9).upper()},
        7: {"query": _q(7)},
        13: {"source_example_id": "r99"},
        14: {"source_example_id": "r13"},
        15: {"source_example_id": "r02"},
        16: {"source_example_id": "r01", "query": "court"},
        17: {"source_example_id": "r03", "query": _f(3).upper()},
        18: {"source_example_id": "r04"},
    }
    pairs = []
    for number in range(1, 19):
        changes = {"source_id": f"f{number:02}", "query": _f(number), "answers": answers}
        pairs.append(raw(number, **{**changes, "source_example_id": f"r{number:02}", **pair_changes.get(number, {})}))
    return {"rows.jsonl": jsonl(*roots), "rows.fr.jsonl": jsonl(*pairs)}


def _q(number: int) -> str:
    return f"Root query number {number:02} please"


def _f(number: int) -> str:
    return f"Requête racine numéro {number:02} svp"


def run_b(root: Path, plugins: Plugins, datasets: Any = (EN, FR), **limits: object) -> PrepareResult:
    config = project(root, datasets, (6, 3, 2), files=vector_b(), limits=limits)
    return prepare.run(config, root / "run", plugins)


def sha(run: Path, split: str) -> str:
    return hashlib.sha256((run / "data" / f"{split}.jsonl").read_bytes()).hexdigest()


def test_the_files_of_vector_b() -> None:
    assert {name: hashlib.sha256(data).hexdigest() for name, data in vector_b().items()} == {
        "rows.jsonl": "f2f1630243e84018c00ef627d292739446cdb76dc570d457738e22b6095c9208",
        "rows.fr.jsonl": "960672efffa38e31a4610710f231c0b94bea0838799e1475c68fbbddf2a296a0",
    }


def test_vector_b(tmp_path: Path, plugins: Plugins) -> None:
    result = run_b(tmp_path, plugins)
    run = tmp_path / "run"
    assert ids(run, "train") == ["r08", "r06", "r03", "r09", "r10", "r07", "f08", "f06", "f09", "f10", "f07"]
    assert ids(run, "validation") == ["r12", "r04", "r05", "f12", "f18"]
    assert ids(run, "test") == ["r01", "r02", "f01", "f02"]
    assert {split: sha(run, split) for split in SPLITS} == {
        "train": "dabbfee8b0da038eab32c68ec47d4aea92ea2f0e5a62cfbfcf7bddb2eadb135e",
        "validation": "eb6a9f733f22824b52e58a05823ec1c9f93a84010fda4352f6c2cfcdfdc63cee",
        "test": "22d0668e02e2ae05845553f50cf3bd301752101f5b3b91f77e1ce6e2fb3b783a",
    }
    english, french = result.summary.languages["en"], result.summary.languages["fr"]
    assert {name: count for name, count in english.counts.items() if count} == dict.fromkeys(ROOT_REASONS, 1)
    assert (english.valid_rows, english.deduplicated_rows) == (13, 12)
    assert english.split_sizes == {"train": 6, "validation": 3, "test": 2}
    assert {name: count for name, count in french.counts.items() if count} == {
        "query_too_short": 1,
        "duplicate_query": 1,
        "missing_source_example": 3,
        "duplicate_source_example": 1,
        "pair_tools_mismatch": 1,
        "pair_answers_mismatch": 1,
        "cross_split_duplicate": 1,
    }
    assert (french.valid_rows, french.deduplicated_rows) == (17, 16)
    assert french.split_sizes == {"train": 5, "validation": 2, "test": 2}
    assert reasons(run, "fr") == {
        "f03": "pair_tools_mismatch",
        "f04": "pair_answers_mismatch",
        "f05": "cross_split_duplicate",
        "f11": "missing_source_example",
        "f13": "missing_source_example",
        "f14": "missing_source_example",
        "f15": "duplicate_source_example",
        "f16": "query_too_short",
        "f17": "duplicate_query",
    }
    drops = result.summary.kiln
    assert [(d.rows_read, d.kept, d.dropped, d.unused) for d in drops.values()] == [(23, 11, 11, 1), (18, 9, 9, 0)]
    assert not any(count for d in drops.values() for count in d.counts.values())
    assert result.summary.requested == {"train": 6, "validation": 3, "test": 2}


def test_vector_b_as_the_original_writes_it(tmp_path: Path, plugins: Plugins) -> None:
    """The records are those of the original: in its layout they have its digests."""
    run_b(tmp_path, plugins)
    theirs = {
        "train": ("d84fc78ae03d9219b59dc752f841f17789847e6f1e9ca0e4bf0a598cfa85f132", 4680),
        "validation": ("132e09730a203475928e6f3108d705b1063688c39977af7c89f932a0b087a29e", 2159),
        "test": ("f57afd2e07847e3a580e48123b53ad940df9ed6027883867f174fbbf7ad22377", 1708),
    }
    for split, (digest, size) in theirs.items():
        text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in examples(tmp_path / "run", split))
        assert (hashlib.sha256(text.encode()).hexdigest(), len(text)) == (digest, size), split


def test_vector_b_as_the_original_summarises_it(tmp_path: Path, plugins: Plugins) -> None:
    """The drop summary without what kiln adds is the original's, to the byte."""
    run_b(tmp_path, plugins)
    summary = json.loads((tmp_path / "run" / "data" / "drop_summary.json").read_bytes())
    del summary["kiln"]
    digest = hashlib.sha256(json.dumps(summary, sort_keys=True, indent=2).encode()).hexdigest()
    assert digest == "b72d332ace0b540f8b7e06d8345ae51f53491a05ab1dfecbcd6e5d9ab522fbc3"


def test_vector_b_with_digests_given_back(tmp_path: Path, plugins: Plugins) -> None:
    result = run_b(tmp_path, plugins, release_failed_pair_digest=True)
    run = tmp_path / "run"
    assert ids(run, "train") == ["r08", "r06", "r03", "r09", "r10", "r07", "f08", "f06", "f17", "f09", "f10", "f07"]
    assert ids(run, "validation") == ["r12", "r04", "r05", "f12", "f18"]
    assert ids(run, "test") == ["r01", "r02", "f01", "f02"]
    assert sha(run, "train") == "dc0f72b97ff766e8bf24615cb81dedef7277916320a8615fa87196f35918d6f9"
    french = result.summary.languages["fr"]
    assert (french.valid_rows, french.deduplicated_rows, french.counts["duplicate_query"]) == (17, 17, 0)
    assert french.split_sizes == {"train": 6, "validation": 2, "test": 2}
    drops = result.summary.kiln["fr"]
    assert (drops.rows_read, drops.kept, drops.dropped, drops.unused) == (18, 10, 8, 0)
    assert result.summary.languages["en"].deduplicated_rows == 12


def test_the_order_of_the_config_does_not_matter(tmp_path: Path, plugins: Plugins) -> None:
    found = []
    for name, datasets in (("one", (EN, FR)), ("two", (FR, EN))):
        run_b(tmp_path / name, plugins, datasets)
        found.append(data_files(tmp_path / name / "run"))
    assert found[0] == found[1]


def test_given_back_digests_test_accepted_rows_only(tmp_path: Path, plugins: Plugins) -> None:
    """duplicate_query comes before the pairing reasons, and only an accepted row has used its text up."""
    same = "La même requête partout"
    rows = [
        paired(1, "nobody", query=same),
        paired(2, "s1", query=same),
        paired(3, "nobody", query=same),
        paired(4, "s2", query=same.upper()),
    ]
    files = {"rows.jsonl": jsonl(*(raw(n) for n in range(1, 7))), "rows.fr.jsonl": jsonl(*rows)}
    for release, expected in (
        (True, {"f1": "missing_source_example", "f3": "duplicate_query", "f4": "duplicate_query"}),
        (
            False,
            {"f1": "missing_source_example", "f2": "duplicate_query", "f3": "duplicate_query", "f4": "duplicate_query"},
        ),
    ):
        config = project(tmp_path, (EN, FR), (2, 2, 2), files=files, limits={"release_failed_pair_digest": release})
        result = prepare.run(config, tmp_path / "run", plugins)
        assert reasons(tmp_path / "run", "fr") == expected
        french = result.summary.languages["fr"]
        assert french.deduplicated_rows == french.valid_rows - french.counts["duplicate_query"]


# --- several paired languages


def splits_of_roots(root: Path, plugins: Plugins, rows: bytes, sizes: tuple[int, int, int]) -> dict[str, str]:
    prepare.run(project(root, (EN,), sizes, files={"rows.jsonl": rows}), root / "plain", plugins)
    return {name: split for split in SPLITS for name in ids(root / "plain", split)}


def test_a_text_that_two_paired_languages_share_across_splits(tmp_path: Path, plugins: Plugins) -> None:
    rows = jsonl(*(raw(n) for n in range(1, 7)))
    where = splits_of_roots(tmp_path, plugins, rows, (2, 2, 2))
    train, test = (next(name for name, split in where.items() if split == wanted) for wanted in ("train", "test"))
    other = next(name for name, split in where.items() if split == "train" and name != train)
    shared = "Un texte commun aux deux"
    french = jsonl(paired(1, train, query=shared))
    spanish = jsonl(
        paired(1, test, query=shared.upper(), source_id="e1"), paired(2, other, query=f" {shared}", source_id="e2")
    )
    files = {"rows.jsonl": rows, "rows.fr.jsonl": french, "rows.es.jsonl": spanish}
    for datasets, lost in (((EN, FR, ES), {"es": {"e1", "e2"}}), ((ES, EN, FR), {"fr": {"f1"}})):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        prepare.run(project(tmp_path, datasets, (2, 2, 2), files=files), run, plugins)
        found = {(row["language"], row["example_id"], row["reason"]) for row in rejected(run)}
        if "es" in lost:
            # e1 stands in another split than f1; e2 is a repeat of e1 within its own source.
            assert found == {("es", "e1", "cross_split_duplicate"), ("es", "e2", "duplicate_query")}
        else:
            # Spanish is listed first here: its row stays, the later source's is dropped.
            assert found == {("es", "e2", "duplicate_query"), ("fr", "f1", "cross_split_duplicate")}
        order = [row["language"] for row in examples(run, "train")]
        assert order == sorted(order, key=[str(d["language"]) for d in (EN, *datasets)].index)


def test_a_text_shared_within_one_split_is_kept(tmp_path: Path, plugins: Plugins) -> None:
    rows = jsonl(*(raw(n) for n in range(1, 7)))
    where = splits_of_roots(tmp_path, plugins, rows, (4, 1, 1))
    one, two, *_ = (name for name, split in where.items() if split == "train")
    files = {
        "rows.jsonl": rows,
        "rows.fr.jsonl": jsonl(paired(1, one, query="Un texte commun aux deux")),
        "rows.es.jsonl": jsonl(
            paired(1, two, query="UN texte commun aux deux", source_id="e1"),
            paired(2, one, query=f"Valid query for row {one[1:]}", source_id="e2"),
        ),
    }
    prepare.run(project(tmp_path, (EN, FR, ES), (4, 1, 1), files=files), tmp_path / "run", plugins)
    assert rejected(tmp_path / "run") == []
    assert ids(tmp_path / "run", "train")[4:] == ["f1", *sorted(("e1", "e2"), key=["e2", "e1"].index)]


def test_a_paired_source_may_be_empty_in_a_split(tmp_path: Path, plugins: Plugins) -> None:
    rows = jsonl(*(raw(n) for n in range(1, 7)))
    where = splits_of_roots(tmp_path, plugins, rows, (2, 2, 2))
    name = next(name for name, split in where.items() if split == "validation")
    files = {"rows.jsonl": rows, "rows.fr.jsonl": jsonl(paired(1, name))}
    result = prepare.run(project(tmp_path, (EN, FR), (2, 2, 2), files=files), tmp_path / "run", plugins)
    assert result.summary.languages["fr"].split_sizes == {"train": 0, "validation": 1, "test": 0}
    shown = prepare.account(result, tmp_path / "run")
    french = shown[shown.index("fr (paired)") :]
    assert [line.split() for line in french.splitlines() if line.split()[:1] == ["train"]] == [["train", "0"]]


def test_ids_are_unique_over_all_sources(tmp_path: Path, plugins: Plugins) -> None:
    """A paired row with a root row's id comes later, so the root row has it."""
    files = {
        "rows.jsonl": jsonl(*(raw(n) for n in range(1, 7))),
        "rows.fr.jsonl": jsonl(paired(1, "s1", source_id="s2"), paired(2, "s2"), paired(3, "s3", source_id="f2")),
    }
    result = prepare.run(project(tmp_path, (FR, EN), (2, 2, 2), files=files), tmp_path / "run", plugins)
    assert [(row["row_index"], row["reason"]) for row in rejected(tmp_path / "run")] == [
        (1, "duplicate_example_id"),
        (3, "duplicate_example_id"),
    ]
    assert result.summary.kiln["en"].counts["duplicate_example_id"] == 0


# --- what a paired row names


def test_a_root_row_s_own_source_example_id_is_not_copied(tmp_path: Path, plugins: Plugins) -> None:
    rows = [raw(n, source_example_id="elsewhere") for n in range(3)]
    prepare.run(project(tmp_path, (EN,), files={"rows.jsonl": jsonl(*rows)}), tmp_path / "run", plugins)
    assert [e["source_example_id"] for split in SPLITS for e in examples(tmp_path / "run", split)] == [None] * 3


def test_paired_rows_that_name_no_root(tmp_path: Path, plugins: Plugins) -> None:
    odd: list[object] = [ABSENT, None, "", " \u3000", True, 1.5, ["s1"], {"id": "s1"}]
    pairs = [paired(n, value) for n, value in enumerate(odd)]
    files = {"rows.jsonl": jsonl(*(raw(n) for n in range(3))), "rows.fr.jsonl": jsonl(*pairs)}
    result = prepare.run(project(tmp_path, (EN, FR), files=files), tmp_path / "run", plugins)
    found = rejected(tmp_path / "run")
    assert [(row["reason"], row["pointer"]) for row in found] == [("missing_field", "/source_example_id")] * len(odd)
    # An object with an id: the id is known, and it is taken (item 4).
    assert [row["example_id"] for row in found] == [f"f{n}" for n in range(len(odd))]
    assert result.summary.kiln["fr"].counts["missing_field"] == len(odd)


def test_line_reasons_of_a_paired_row_come_in_their_order(tmp_path: Path, plugins: Plugins) -> None:
    """Item 3: unknown_schema, missing_field, invalid_example_id, duplicate_example_id, then the sixteen."""
    pairs = [
        paired(1, ABSENT, schema_version="x", source_id=None),
        paired(2, ABSENT, source_id=None, query=""),
        paired(3, "s1", source_id=None, query=""),
        paired(4, ABSENT, query=""),
        paired(5, "s1", source_id="f4", query=""),
        paired(6, "nobody", query=""),
    ]
    files = {"rows.jsonl": jsonl(*(raw(n) for n in range(3))), "rows.fr.jsonl": jsonl(*pairs)}
    config = project(tmp_path, (EN, {**FR, "source": "sommelier"}), files=files)
    prepare.run(config, tmp_path / "run", plugins)
    assert [row["reason"] for row in rejected(tmp_path / "run")] == [
        "unknown_schema",
        "missing_field",
        "invalid_example_id",
        "missing_field",
        "duplicate_example_id",
        "missing_query",
    ]


def test_xlam_rows_name_the_root_s_own_id(tmp_path: Path, plugins: Plugins) -> None:
    """``source_id_column`` may hold the id that the root row has in its file, as a string or a number."""

    def xlam(query: str, **more: object) -> dict[str, Any]:
        return {"query": query, "tools": T, "answers": A, **more}

    roots = [xlam(f"Root query number {n}", id=n) for n in range(1, 5)] + [xlam("Root query number x", id="x 5")]
    pairs = [
        xlam("Requête numéro 1", id=1, source_id=1),
        xlam("Requête numéro 2", id=2, source_id="2"),
        xlam("Requête numéro 3", id=3, source_id="rows:3"),
        xlam("Requête numéro x", id=4, source_id="x 5"),
        xlam("Requête numéro y", id=5, source_id=9),
        xlam("Requête numéro 4", id=6, source_id=4.0),
        xlam("Requête numéro 0", id=7),
    ]
    files = {"rows.jsonl": jsonl(*roots), "rows.fr.jsonl": jsonl(*pairs)}
    config = project(tmp_path, (EN, {**FR, "source_id_column": "source_id"}), (3, 1, 1), files=files)
    prepare.run(config, tmp_path / "run", plugins)
    run = tmp_path / "run"
    found = {e["example_id"]: e["source_example_id"] for split in SPLITS for e in examples(run, split)}
    assert {name: root for name, root in found.items() if root is not None} == {
        "rows.fr:1": "rows:1",
        "rows.fr:2": "rows:2",
        "rows.fr:3": "rows:3",
        "rows.fr:4": "rows:x 5",
    }
    assert reasons(run, "fr") == {
        "rows.fr:5": "missing_source_example",
        "rows.fr:6": "missing_field",
        "rows.fr:7": "missing_field",
    }


@pytest.mark.parametrize("datasets", [(EN, {**EN, "language": "fr"}), (FR,), (FR, ES), (EN, {**FR, "language": "en"})])
def test_one_root_and_each_language_once(tmp_path: Path, datasets: Any) -> None:
    with pytest.raises(KilnError) as caught:
        project(tmp_path, datasets)
    assert caught.value.code == "KLN203"
    assert "datasets" in caught.value.message


# --- whatever the paired files hold, the root's splits stay

LINKS = st.sampled_from([*(f"s{n}" for n in range(14)), "nobody", "", None])
PAIR = st.fixed_dictionaries(
    {
        "link": LINKS,
        "query": st.sampled_from(
            [*(f"Requête numéro {n} svp" for n in range(8)), *(f"Valid query for row {n}" for n in range(14)), "x"]
        ),
        "tools": st.sampled_from([T, T, T, T + " "]),
        "answers": st.sampled_from([A, A, A, A.replace("{}", '{"x":1}')]),
        "id": st.sampled_from([None, None, None, "s1", "twin"]),
    }
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PAIR, max_size=20), st.lists(PAIR, max_size=20), st.booleans(), st.integers(0, 3))
def test_root_splits_are_the_same_with_or_without_pairs(
    plugins: Plugins, french: list[dict[str, Any]], spanish: list[dict[str, Any]], release: bool, seed: int
) -> None:
    roots = [raw(n) for n in range(12)] + [raw(12, query="short"), raw(13, query=raw(3)["query"])]
    files = {"rows.jsonl": jsonl(*roots)}
    for name, drawn in (("fr", french), ("es", spanish)):
        files[f"rows.{name}.jsonl"] = jsonl(
            *(
                paired(
                    n,
                    row["link"],
                    query=row["query"],
                    tools=row["tools"],
                    answers=row["answers"],
                    source_id=row["id"] or f"{name}{n}",
                )
                for n, row in enumerate(drawn)
            )
        )
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        limits = {"release_failed_pair_digest": release}
        alone, run = root / "alone", root / "run"
        prepare.run(project(root, (EN,), (5, 3, 2), files=files, limits=limits, seed=seed), alone, plugins)
        # An empty file has no shape of its own, so the source is named.
        datasets = ({**FR, "source": "sommelier"}, EN, {**ES, "source": "sommelier"})
        result = prepare.run(project(root, datasets, (5, 3, 2), limits=limits, seed=seed), run, plugins)
        roots_of: dict[str, str] = {}
        digests: dict[str, str] = {}
        everything = []
        for split, size in zip(SPLITS, (5, 3, 2), strict=True):
            mine, lines = ((where / "data" / f"{split}.jsonl").read_bytes().split(b"\n") for where in (alone, run))
            assert lines[:size] == mine[:size]
            found = examples(run, split)
            everything += found
            roots_of |= {row["example_id"]: split for row in found[:size]}
            languages = [row["language"] for row in found]
            assert languages == sorted(languages, key=["en", "fr", "es"].index)
            for row in found:
                assert digests.setdefault(row["query_sha256"], split) == split
            for language in ("fr", "es"):
                named = [row["source_example_id"] for row in found if row["language"] == language]
                order = [row["example_id"] for row in found[:size]]
                assert [order.index(name) for name in named] == sorted({order.index(name) for name in named})
        assert len({row["example_id"] for row in everything}) == len(everything)
        for language, drawn in (("fr", french), ("es", spanish)):
            drops = result.summary.kiln[language]
            assert drops.rows_read == len(drawn) == drops.kept + drops.dropped
            assert drops.unused == 0
            counted = sum(result.summary.languages[language].counts.values()) + sum(drops.counts.values())
            assert drops.dropped == counted == sum(row["language"] == language for row in rejected(run))
