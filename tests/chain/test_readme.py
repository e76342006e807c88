"""The README's example of a stage called from Python, run as it stands but for its placeholders."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def test_rows_are_admitted_from_python(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "kiln_stages" in block]
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for placeholder, value in (('"path/to/model"', repr(str(tiny_model))), ('{"messages": [...]}', repr(row))):
        assert example.count(placeholder) == 1
        example = example.replace(placeholder, value)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    receipt = json.loads((tmp_path / "runs/chat/admit/sft_ingestion.json").read_bytes())
    assert (receipt["source"], receipt["rows_kept"]) == ("inline", 1)
    assert receipt["kept_row_hashes"] == ["sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"]
