"""Every real chat file through ``kiln admit``, row by row kept or refused for the reason that its oddities give.

The expected counts are derived by hand from ``shared/data/NOTES.md`` (sections 1 and 5), not from what kiln says. Each
file goes through two templates with one tokenizer (SmolLM2-135M's, at most 8,192 tokens):

- SmolLM2's own prints role and content of each message and nothing else, so a row with tools, calls or reasoning loses
  text and is refused;
- Qwen3's (as TRL has it) prints tools, calls, results and reasoning, so the same rows are admitted.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
from tests_support import shared_path
from tiny_model import Kiln

from kiln_cli.counting import counted

LOST = "template_lost_content"


class File(NamedTuple):
    """``refused``: row numbers by code under SmolLM2's and under Qwen3's template; ``ignored``: fields of every row."""

    source: str
    rows: int
    smollm2: dict[str, set[int]]
    qwen3: dict[str, set[int]]
    ignored: tuple[str, ...] = ()


def every(rows: int) -> set[int]:
    return set(range(1, rows + 1))


def glaive_rows_with_tools() -> set[int]:
    """NOTES: ``tools`` is the text "[]" in 109 of the 300 rows. The others name tools that SmolLM2's template drops;
    those that call one (153 rows) are among them, since nothing is called that is not declared."""
    rows = json.loads(shared_path("data/chat/glaive_toolcall_en_sharegpt.json").read_text(encoding="utf-8"))
    found = {number for number, row in enumerate(rows, start=1) if json.loads(row["tools"])}
    assert len(found) == 300 - 109
    return found


# Row 244 of the glaive file is a program whose last string is some 11,500 noughts, once in the question and again in
# the answer; SmolLM2's tokenizer gives each digit a token of its own, so it is far over 8,192 tokens by itself.
NOUGHTS = {244}

# Their text parts hold a closing tag alone: Qwen3's template would print it behind the block that it closes itself.
STRAY_TAGS = {6, 7}

FILES = {
    # One pretty-printed object: one row of six human and six gpt turns.
    "axolotl_conversation.json": File("sharegpt", 1, {}, {}),
    # human and gpt turns alone; each row has an id that changes nothing.
    "fastchat_dummy_sharegpt.json": File("sharegpt", 500, {}, {}, ("id",)),
    "glaive_toolcall_en_sharegpt.json": File(
        "sharegpt", 300, {LOST: glaive_rows_with_tools(), "over_length": NOUGHTS}, {"over_length": NOUGHTS}
    ),
    # user and assistant turns. No-break spaces and a zero-width string are text like any other.
    "gsm8k_messages.jsonl": File("messages", 400, {}, {}),
    "gsm8k_question_answer.jsonl": File("question_answer", 500, {}, {}),
    # {{name}} and {{author}} are text of the row, never Jinja.
    "identity_alpaca.json": File("alpaca", 91, {}, {}),
    # loss_weight is 0 on user and 1 on assistant turns, which is what kiln does without being asked: nothing to tell.
    "identity_content_parts.jsonl": File("content_parts", 50, {}, {}),
    # 775 rows without input; no blank output.
    "llms_from_scratch_alpaca.json": File("alpaca", 1100, {}, {}),
    # Scripts that are not NFC and hold zero-width characters: a byte-level tokenizer takes them all.
    "mgsm_multilingual.jsonl": File("messages", 440, {}, {}, ("id", "lang")),
    # prompter is the user. The 39 threads that end with a prompter have an assistant turn before it.
    "oasst_en_threads.jsonl": File("oasst", 100, {}, {}, ("id", "lang")),
    # Every row has tools and one call without content: SmolLM2's template would show neither.
    # parallel_tool_calls is known, so it is not told as ignored.
    "openai_drone_tools.jsonl": File("messages", 103, {LOST: every(103)}, {}),
    # Row 4 has no user turn, which neither template minds. Row 5 has 8,033 tokens; Qwen3's empty think block in front
    # of the answer is a dozen more, still under 8,192.
    "openai_toy_chat.jsonl": File("messages", 5, {}, {}),
    # Every assistant turn has reasoning, which SmolLM2's template drops, as it drops the tools of all rows but two.
    # Qwen3's prints the reasoning of the last exchange and, lawfully, leaves out that of earlier ones. In rows 6 and 7
    # the answer itself closes a block that it has not opened.
    "reason_tool_content_parts.jsonl": File(
        "content_parts", 50, {LOST: every(50)}, {"unbalanced_reasoning_tags": STRAY_TAGS}
    ),
    # Each seed task has one instance.
    "self_instruct_seed_tasks.jsonl": File("self_instruct", 175, {}, {}, ("id", "is_classification", "name")),
}


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the real tokenizer and template and no weights."""
    given = shared_path("data/tokenizers/smollm2")
    model = tmp_path_factory.mktemp("smollm2")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(given / name, model / name)
    (model / "tokenizer.json").write_bytes(gzip.decompress((given / "tokenizer.json.gz").read_bytes()))
    (model / "config.json").write_text('{"max_position_embeddings": 8192}')
    return model


def test_every_shared_file_is_named() -> None:
    assert {path.name for path in shared_path("data/chat").iterdir()} == set(FILES)


# Rows of plain text are no different under Qwen3's template; the toy rows are short, long, and without a user.
OF_TOOLS = [name for name, file in FILES.items() if file.smollm2 != file.qwen3]
CASES = [*((name, "smollm2") for name in FILES), *((name, "qwen3") for name in [*OF_TOOLS, "openai_toy_chat.jsonl"])]


@pytest.mark.parametrize(("name", "template"), CASES)
def test_each_row_is_kept_or_refused_for_its_reason(
    name: str, template: str, smollm2: Path, kiln: Kiln, tmp_path: Path
) -> None:
    file = FILES[name]
    refused: dict[str, set[int]] = getattr(file, template)
    kept = file.rows - sum(map(len, refused.values()))
    arguments: list[str | Path] = ["--model", smollm2, "--out", tmp_path / "run", "--invalid-row-policy", "skip"]
    if template == "qwen3":
        arguments += ["--template", shared_path("data/templates/trl/qwen3.jinja")]
    done = kiln("admit", "--file", shared_path(f"data/chat/{name}"), *arguments)
    if not kept:
        assert done.code == 1, done.err
        assert "KLN102" in done.err
        (code,) = refused
        assert counts_of(done.err) == {"rows read": file.rows, "kept": 0, code: file.rows}
        return
    assert done.code == 0, done.err
    manifest = json.loads((tmp_path / "run" / "admit_manifest.json").read_bytes())
    counts = manifest["counts"]["corpus"]
    codes = {code: count for code, count in counts["reasons"].items() if count}
    assert (counts["rows_read"], counts["rows_kept"]) == (file.rows, kept)
    assert codes == {code: len(rows) for code, rows in refused.items()}
    assert counts["ignored_fields"] == dict.fromkeys(file.ignored, file.rows)
    found: dict[str, set[int]] = {}
    for line in (tmp_path / "run" / "admit" / "rejected.jsonl").read_bytes().splitlines():
        row = json.loads(line)
        found.setdefault(row["code"], set()).add(row["row_index"])
        assert row["detail"]
    assert found == refused


def test_validate_knows_them_all(kiln: Kiln) -> None:
    done = kiln("validate", *(shared_path(f"data/chat/{name}") for name in FILES))
    assert done.code == 0, done.err
    for line, (name, file) in zip(done.out.splitlines(), FILES.items(), strict=True):
        assert f"/{name}: sft ({file.source}: " in line
        assert line.endswith(f": {counted(file.rows, 'row', 'rows')}, 0 faults, 0 notes")
        # A conversation with tools is what prepare reads, too; then the other kind is named.
        assert ("--kind raw" in line) == (name in OF_TOOLS)


def counts_of(text: str) -> dict[str, int]:
    """The table below an error: names and numbers."""
    return {name: int(number) for name, number in re.findall(r"^ *(\w[\w ]*?) {2,}(\d+)$", text, re.MULTILINE)}


def test_the_notes_are_what_the_derivation_says() -> None:
    """The facts of the files that the expected counts rest on, counted with none of kiln's code."""

    def lines(name: str) -> list[dict[str, list[dict[str, object]]]]:
        return [json.loads(line) for line in shared_path(f"data/chat/{name}").read_text(encoding="utf-8").splitlines()]

    glaive = json.loads(shared_path("data/chat/glaive_toolcall_en_sharegpt.json").read_text(encoding="utf-8"))
    calling = {
        number
        for number, row in enumerate(glaive, start=1)
        if any(turn["from"] == "function_call" for turn in row["conversations"])
    }
    assert calling <= glaive_rows_with_tools()
    assert len(calling) == 153
    (row,) = (glaive[number - 1] for number in NOUGHTS)
    assert [turn["value"].count("0") > 5_500 for turn in row["conversations"]] == [True, True]
    # All others have under 10,000 characters, which even at two to a token are few enough.
    assert all(
        sum(len(turn["value"]) for turn in other["conversations"]) < 10_000 for other in glaive if other is not row
    )
    threads = lines("oasst_en_threads.jsonl")
    assert Counter(thread["messages"][-1]["role"] for thread in threads) == {"assistant": 61, "prompter": 39}
    assert all(any(message["role"] == "assistant" for message in thread["messages"]) for thread in threads)
    drone = lines("openai_drone_tools.jsonl")
    assert all(row["tools"] and "content" not in row["messages"][2] for row in drone)
    parts = lines("reason_tool_content_parts.jsonl")
    spoken = [message for row in parts for message in row["messages"] if message["role"] == "assistant"]
    assert all(message["content"][0]["type"] == "reasoning" for message in spoken)  # type: ignore[index]
    tagged = {number for number, row in enumerate(parts, start=1) if "think>" in json.dumps(row["messages"])}
    assert tagged == STRAY_TAGS
