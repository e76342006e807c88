"""Where a key stands: tables of tables, dotted and quoted keys, texts of several lines, JSON."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiln_cli.key_lines import json_lines, line_of, toml_lines

TOML = """name = "a"
[model]
path = "m"
[[steps]]
name = "first"
[steps.config]
epochs = 1
[[steps]]
name = "second"
config.epochs = 2
"quoted" = 3
note = \'\'\'
name = "in a text"
[[steps]]
\'\'\'
[[steps.inner]]
x = 1
[[steps]]
examples_from = { dataset = "d" }
"""

JSON = """{
  "name": "a, {b}: \\"c\\"",
  "steps": [
    {"name": "first",
     "config": {"epochs": 1}},
    {
      "name": "second", "rows": [1,
        2]
    }
  ],
  "last": null
}
"""


def test_toml() -> None:
    assert toml_lines(TOML) == {
        "name": 1,
        "model": 2,
        "model.path": 3,
        "steps[0]": 4,
        "steps[0].name": 5,
        "steps[0].config": 6,
        "steps[0].config.epochs": 7,
        "steps[1]": 8,
        "steps[1].name": 9,
        "steps[1].config": 10,
        "steps[1].config.epochs": 10,
        "steps[1].quoted": 11,
        "steps[1].note": 12,
        "steps[1].inner[0]": 16,
        "steps[1].inner[0].x": 17,
        "steps[2]": 18,
        "steps[2].examples_from": 19,
    }


def test_json() -> None:
    found = json_lines(JSON)
    assert {key: found[key] for key in ("name", "steps", "steps[0]", "steps[0].config.epochs", "steps[1].rows[1]")} == {
        "name": 2,
        "steps": 3,
        "steps[0]": 4,
        "steps[0].config.epochs": 5,
        "steps[1].rows[1]": 7,
    }
    assert (found["steps[1]"], found["steps[1].name"], found["last"]) == (6, 7, 11)


@pytest.mark.parametrize(
    "dotted, line",
    [
        ("steps[1].config.epochs", 10),
        ("steps[1].config.nothing", 10),
        ("steps[2].examples_from.dataset", 19),
        ("steps[2].name", 18),
        ("steps[7].name", 0),
        ("model.nothing.more", 2),
        ("nothing", 0),
        ("", 0),
    ],
)
def test_the_nearest_key_that_stands_there(dotted: str, line: int) -> None:
    assert line_of(Path("a.toml"), TOML, dotted) == line


def test_empty_texts() -> None:
    assert json_lines("{}") == {"": 1}
    assert toml_lines("") == {}
