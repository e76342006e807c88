"""The admission that train carries out again, and the one that is recognised as done: neither believes what it finds.

The forger of these tests recomputes every digest that kiln publishes: file references, the receipt's aggregate, the
manifest's own digest. Only the rows themselves give him away.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages import admit
from kiln_stages.admitting import pipeline
from kiln_stages.admitting.corpus import admitted_sha256, read_corpus, write_corpus
from kiln_stages.admitting.fingerprint import NAME
from tiny_model import CHATML, Kiln

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.errors import KilnError
from kiln_cli.files import hash_file
from kiln_cli.identity import corpus_sha256
from kiln_cli.manifests import content_sha256, document, read_manifest
from kiln_cli.plugins import load_plugins
from kiln_cli.stage_manifests import AdmitManifest

GOOD = [
    {"messages": [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(6)
]
LINES = [json.dumps(GOOD[0]), '{"messages": []}', json.dumps(GOOD[1]), "{broken", *map(json.dumps, GOOD[2:])]


@pytest.fixture
def chat(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Path:
    """A folder with rows.jsonl and a run that has admitted it under ``skip``: 6 of 8 rows kept. No weights."""
    model = tmp_path / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    (tmp_path / "rows.jsonl").write_text("\n".join(LINES) + "\n")
    (tmp_path / "kiln.toml").write_text(
        'schema = "kiln.config.v1"\n[model]\npath = "model"\n'
        '[admit]\nfile = "rows.jsonl"\ninvalid_row_policy = "skip"\n'
    )
    done = kiln("admit", tmp_path / "kiln.toml", "--out", tmp_path / "run")
    assert done.code == 0, done.err
    return tmp_path


def train(kiln: Kiln, chat: Path) -> tuple[int, str]:
    done = kiln("train", chat / "kiln.toml", "--out", chat / "run")
    return done.code, done.err


def test_untouched_rows_pass_and_only_then_the_model_is_looked_for(chat: Path, kiln: Kiln) -> None:
    code, told = train(kiln, chat)
    assert code == 3 and "KLN302" in told and ".safetensors" in told


@pytest.mark.parametrize("options", [(), ("--set", "admit.max_tokens=300"), ("--template", "chatml")])
def test_the_command_that_is_told_to_come_next_takes_what_was_admitted(
    chat: Path, kiln: Kiln, options: tuple[str, ...]
) -> None:
    done = kiln("admit", chat / "kiln.toml", "--out", chat / "next", *options)
    assert done.code == 0, done.err
    (told,) = [line.removeprefix("next: kiln ") for line in done.err.splitlines() if line.startswith("next: ")]
    done = kiln(*told.split(" "))
    assert done.code == 3 and "KLN302" in done.err  # nothing is amiss but the weights


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("answer 3", "answer 9"),  # a kept row
        ('{"messages": []}', '{"messages": [] }'),  # a rejected row, which parses to the same
        ("{broken", "{brokem"),  # a rejected row, by its raw bytes
        (json.dumps(GOOD[5]) + "\n", ""),
    ],
)
def test_a_changed_source_is_refused_before_a_model_is_loaded(chat: Path, kiln: Kiln, old: str, new: str) -> None:
    rows = chat / "rows.jsonl"
    assert old in rows.read_text()
    rows.write_text(rows.read_text().replace(old, new))
    code, told = train(kiln, chat)
    assert code == 2 and "KLN207" in told and "rows.jsonl" in told and hash_file(rows)[0] in told


def reseal(run: Path, change: Callable[[dict[str, Any]], None] = lambda manifest: None) -> None:
    """Recomputes every digest in the admit manifest, as whoever writes it could."""
    path = run / "admit_manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    for ref in value["outputs"]:
        ref["sha256"], ref["bytes"] = hash_file(run / ref["path"])
    path.write_bytes(document(value))
    manifest = msgspec.json.decode(path.read_bytes(), type=AdmitManifest)
    manifest.content_sha256 = content_sha256(manifest)
    path.write_bytes(document(manifest))
    read_manifest(run, AdmitManifest)  # it is consistent in itself


def forge_receipt(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = run / "admit" / "sft_ingestion.json"
    receipt = json.loads(path.read_bytes())
    change(receipt)
    receipt["kept_corpus_sha256"] = corpus_sha256(receipt["kept_row_hashes"])
    path.write_bytes(document(receipt))
    reseal(run)


def _drop_a_kept_row(receipt: dict[str, Any]) -> None:
    receipt["kept_row_hashes"].pop(2)
    receipt["rows_kept"] -= 1
    receipt["rows_read"] -= 1


def _swap_a_kept_row(receipt: dict[str, Any]) -> None:
    receipt["kept_row_hashes"][4] = "sha256:" + "a" * 64


def _forget_the_rejected(receipt: dict[str, Any]) -> None:
    receipt["rejected_rows"] = []
    receipt["rows_rejected"] = 0
    receipt["rows_read"] = receipt["rows_kept"]


def _another_reason(receipt: dict[str, Any]) -> None:
    receipt["rejected_rows"][0]["reason"] = "tokenization_error"


def _another_policy(receipt: dict[str, Any]) -> None:
    receipt["invalid_row_policy"] = "fail"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_drop_a_kept_row, "kept row 3 is"),
        (_swap_a_kept_row, "kept row 5 is sha256:aaaa"),
        (_forget_the_rejected, "rejected row 1 is missing, found row 2"),
        (_another_reason, "rejected row 1 is row 2"),
        (_another_policy, "invalid_row_policy is 'fail', found 'skip'"),
    ],
)
def test_a_receipt_edited_and_aggregated_again_is_refused(
    chat: Path, kiln: Kiln, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    forge_receipt(chat / "run", change)
    code, told = train(kiln, chat)
    assert code == 2 and "KLN207" in told and "sft_ingestion.json does not say what its rows give" in told
    assert said in told


def test_a_forged_label_with_all_digests_recomputed_is_refused(chat: Path, kiln: Kiln) -> None:
    run = chat / "run"
    path = run / "admit" / "corpus.parquet"
    rows = read_corpus(path)
    (start, end) = rows[1].label_spans[0]
    rows[1] = msgspec.structs.replace(rows[1], label_spans=[(start - 1, end)])
    write_corpus(path, rows)
    reseal(run, lambda value: value["details"]["admitted_sha256"].update(corpus=admitted_sha256(rows)))
    code, told = train(kiln, chat)
    assert code == 2 and "KLN207" in told and "now have other tokens or labels" in told


def test_rows_that_were_handed_over_are_read_again_from_their_copy(chat: Path, kiln: Kiln) -> None:
    run = chat / "inline"
    rows = [argument for row in GOOD[:2] for argument in ("--row", json.dumps(row))]
    done = kiln("admit", *rows, "--model", chat / "model", "--out", run)
    assert done.code == 0, done.err
    config = run / "config.resolved.toml"
    assert kiln("train", config, "--out", run).code == 3  # all is well but for the weights
    copy = run / "admit" / "rows.jsonl"
    copy.write_text(copy.read_text().replace("answer 1", "answer 7"))
    reseal(run, lambda value: value["inputs"][0].update(sha256=hash_file(copy)[0], bytes=copy.stat().st_size))
    done = kiln("train", config, "--out", run)
    assert done.code == 2 and "kept row 2 is" in done.err


# --- the fingerprint


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("a row was judged")

    monkeypatch.setattr(pipeline, "judge_range", refuse)


def loaded(chat: Path) -> LoadedConfig:
    return load_config(chat / "kiln.toml")


def test_the_same_again_judges_no_row_and_changes_no_byte(chat: Path, no_work: None) -> None:
    before = {path: path.read_bytes() for path in (chat / "run" / "admit").iterdir()}
    result = admit.run(loaded(chat), chat / "run", load_plugins())
    assert result.unchanged and result.manifest == read_manifest(chat / "run", AdmitManifest)
    assert {path: path.read_bytes() for path in (chat / "run" / "admit").iterdir()} == before


def _rows(chat: Path) -> None:
    (chat / "rows.jsonl").write_text("\n".join(LINES[:-1]) + "\n")


def _template(chat: Path) -> None:
    (chat / "model" / "chat_template.jinja").write_text(CHATML + " ")


def _tokenizer(chat: Path) -> None:
    path = chat / "model" / "tokenizer_config.json"
    path.write_text(path.read_text().replace("<|im_end|>", "<|endoftext|>"))


def _settings(chat: Path) -> None:
    path = chat / "kiln.toml"
    path.write_text(path.read_text() + "max_tokens = 100\n")


def _corpus(chat: Path) -> None:
    path = chat / "run" / "admit" / "corpus.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"X")


def _rejected(chat: Path) -> None:
    (chat / "run" / "admit" / "rejected.jsonl").unlink()


def _manifest(chat: Path) -> None:
    path = chat / "run" / "admit_manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"rows_kept": 6', b'"rows_kept": 7'))


def _damaged_fingerprint(chat: Path) -> None:
    (chat / "run" / NAME).write_bytes(b"{")


@pytest.mark.parametrize(
    "change", [_rows, _template, _tokenizer, _settings, _corpus, _rejected, _manifest, _damaged_fingerprint]
)
def test_whatever_differs_is_admitted_again(chat: Path, no_work: None, change: Callable[[Path], None]) -> None:
    change(chat)
    with pytest.raises(AssertionError, match="a row was judged"):
        admit.run(loaded(chat), chat / "run", load_plugins())


def test_a_failed_admission_leaves_the_one_before_it_whole(chat: Path) -> None:
    before = {path: path.read_bytes() for path in (chat / "run").rglob("*") if path.is_file()}
    (chat / "rows.jsonl").write_text("{broken\n")
    with pytest.raises(KilnError) as caught:
        admit.run(loaded(chat), chat / "run", load_plugins())
    assert caught.value.code == "KLN102"
    after = {path: path.read_bytes() for path in (chat / "run").rglob("*") if path.is_file()}
    lock = chat / "run" / ".kiln.lock"
    assert {path: data for path, data in after.items() if path != lock} == {
        path: data for path, data in before.items() if path != lock
    }
