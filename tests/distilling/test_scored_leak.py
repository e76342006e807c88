"""A scored corpus and held-out rows: its prompts are compared, as a file and as the run that admitted it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kiln_stages import leak
from scored_corpus import Admit, Scorer

from kiln_cli.errors import KilnError
from kiln_cli.plugins import Plugins


def test_a_prompt_that_is_held_out_is_found(tmp_path: Path, admit: Admit, scorer: Scorer, plugins: Plugins) -> None:
    rows = [scorer.example(asked) for asked in ("one", "Two ", "three")]
    admit(rows)
    held_out = tmp_path / "eval.jsonl"
    messages = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "an answer"}]
    held_out.write_bytes(json.dumps({"messages": messages}).encode() + b"\n")
    for named in ("run", "corpus.jsonl"):
        found = leak.run([str(held_out), str(tmp_path / named)], plugins)
        assert [(each.rule, each.a.line, each.b.line) for each in found.leaks] == [("same_prompt", 1, 3)]
    (tmp_path / "corpus.jsonl").write_bytes(b"")
    with pytest.raises(KilnError) as caught:
        leak.run([str(held_out), str(tmp_path / "run")], plugins)
    assert caught.value.code == "KLN207"


@pytest.mark.parametrize("kind", ["opd", "auto"])
def test_held_out_rows_are_not_left_unread(admit: Admit, scorer: Scorer, kind: str) -> None:
    with pytest.raises(KilnError) as caught:
        admit([scorer.example("one")], 'admit.held_out=["eval.jsonl"]', kind=kind)
    assert "held_out = ['eval.jsonl'] is not for" in caught.value.message
