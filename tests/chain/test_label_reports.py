"""Reports from users of other tools about labels and templates, each run through `kiln admit` as they would.

The ids are those of the shared log of reports; ``docs/labels.md`` has them in a table.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from kiln_stages.admitting.corpus import AdmittedRow, read_corpus
from tiny_model import CHATML, Kiln, Outcome
from tokenizers import AddedToken, Tokenizer

Messages = list[dict[str, str]]


def u(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def a(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def s(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n'"
    " + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)


class Bench:
    """A directory to admit rows in, with the tiny model or a changed copy of it."""

    def __init__(self, root: Path, model: Path, kiln: Kiln) -> None:
        self.root, self.model, self._kiln = root, model, kiln

    def change_model(self, template: str | None = None, tokens: tuple[str, ...] = (), **settings: str) -> None:
        """A copy of the model with another template, more special tokens, other settings of the tokenizer."""
        copy = Path(shutil.copytree(self.model, self.root / "model"))
        if template is not None:
            (copy / "chat_template.jinja").write_text(template, encoding="utf-8")
        if tokens:
            tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
            tokenizer.save(str(copy / "tokenizer.json"))
        if settings:
            path = copy / "tokenizer_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        self.model = copy

    def admit(self, rows: list[Any], *options: str | Path) -> Outcome:
        """``kiln admit --file``; a row is messages, or a whole row."""
        lines = [json.dumps(row if isinstance(row, dict) else {"messages": row}) for row in rows]
        (self.root / "rows.jsonl").write_text("\n".join(lines) + "\n")
        file = self.root / "rows.jsonl"
        return self._kiln("admit", "--file", file, "--model", self.model, "--out", self.root / "run", *options)

    def rows(self) -> list[AdmittedRow]:
        return read_corpus(self.root / "run" / "admit" / "corpus.parquet")

    def trained(self, row: AdmittedRow) -> list[str]:
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        ids = row.input_ids
        return [tokenizer.decode(ids[first:last], skip_special_tokens=False) for first, last in row.label_spans]

    def text(self, row: AdmittedRow) -> str:
        tokenizer = Tokenizer.from_file(str(self.model / "tokenizer.json"))
        return str(tokenizer.decode(row.input_ids, skip_special_tokens=False))

    def manifest(self) -> Any:
        return json.loads((self.root / "run" / "admit_manifest.json").read_text())


@pytest.fixture
def bench(tmp_path: Path, tiny_model: Path, kiln: Kiln) -> Bench:
    return Bench(tmp_path, tiny_model, kiln)


def test_m1_a_template_without_generation_blocks_still_trains(bench: Bench) -> None:
    assert "generation %}" not in (bench.model / "chat_template.jinja").read_text()
    assert bench.admit([[u("alpha prompt"), a("beta answer")]]).code == 0
    [row] = bench.rows()
    assert bench.trained(row) == ["beta answer<|im_end|>\n"]
    assert bench.manifest()["counts"]["corpus"]["supervised_tokens"] == row.supervised > 0


def test_m1_a_template_whose_blocks_wrap_the_user_admits_none(bench: Bench) -> None:
    """Markers around the user turn: refused row by row, and no corpus comes of it."""
    bench.change_model(
        "{% for m in messages %}{% if m.role == 'user' %}{% generation %}{{ '<|im_start|>' + m.role + '\n' + m.content"
        " + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + "
        "'<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    done = bench.admit([[u("q"), a("a")], [u("q"), a("a"), u("z"), a("b")]], "--invalid-row-policy", "skip")
    assert done.code == 1
    assert "KLN102" in done.err
    assert re.search(r"mask_disagreement\s+2\n", done.err)
    assert not (bench.root / "run" / "admit" / "corpus.parquet").exists()


def test_m2_the_end_token_is_trained_though_it_is_the_pad_token(bench: Bench) -> None:
    """Nothing is padded, so no id can be ignored for being the pad token's."""
    bench.change_model(pad_token="<|im_end|>")
    assert bench.admit([[u("2+2?"), a("4")], [u("a longer question"), a("and a longer answer to it")]]).code == 0
    end = Tokenizer.from_file(str(bench.model / "tokenizer.json")).token_to_id("<|im_end|>")
    for row in bench.rows():
        [(first, last)] = row.label_spans
        assert row.input_ids[first:last].count(end) == 1
        assert row.input_ids[last - 2] == end  # and the newline behind it
        assert last == len(row.input_ids)


def test_m9_a_template_of_another_model_is_refused_before_any_row(bench: Bench) -> None:
    bench.change_model("{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>{% endfor %}")
    description = (bench.model / "tokenizer.json").read_text()
    (bench.model / "tokenizer.json").write_text(description.replace("<|im_start|>", "<|begin|>"))
    done = bench.admit([[u("q"), a("a")]] * 43, "--template", "chatml", "--invalid-row-policy", "skip")
    assert done.code == 2
    assert "KLN213" in done.err
    assert "the chat template chatml prints <|im_start|>, which the tokenizer has not as one token" in done.err
    assert "<|im_start|>user" in done.err
    assert "0 of " in done.err
    assert not (bench.root / "run" / "admit").exists()
    meant = bench.admit([[u("q"), a("a")]], "--template", "chatml", "--set", "admit.unknown_markers=text")
    assert meant.code == 0
    assert bench.trained(bench.rows()[0]) == ["a<|im_end|>\n"]
    assert bench.admit([[u("q"), a("a")]]).code == 0  # its own template is taken at its word


@pytest.mark.parametrize("key", ["packing", "truncation", "max_length", "padding"])
def test_m10_p1_packing_padding_and_truncation_are_refused_by_name(bench: Bench, key: str) -> None:
    done = bench.admit([[u("q"), a("a")]], "--set", f"train.{key}=true")
    assert done.code == 2
    assert f"train.{key} is refused: rows are never packed, cut, or padded" in done.err


def test_m10_the_counts_of_the_manifest_are_the_labels_of_the_corpus(bench: Bench) -> None:
    """Both numbers of the report in one: what is counted when a row is judged is what stands in the corpus."""
    assert bench.admit([[u("q"), a("one")], [u("q"), a("two"), u("z"), a("three")]]).code == 0
    counts = bench.manifest()["counts"]["corpus"]
    assert counts["supervised_tokens"] == sum(row.supervised for row in bench.rows())
    assert counts["tokens"] == sum(len(row.input_ids) for row in bench.rows())


def test_m12_a_doubled_beginning_is_refused_and_one_is_kept(bench: Bench) -> None:
    """The tokenizer may add a beginning of its own; admit never asks it to. A template that prints two is told."""
    ids = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    bos = ids.token_to_id("<|endoftext|>")
    template = (bench.model / "chat_template.jinja").read_text()
    bench.change_model("{{ bos_token }}" + template)
    assert bench.admit([[u("test"), a("ok")]]).code == 0
    [row] = bench.rows()
    assert row.input_ids.count(bos) == 1
    assert row.input_ids[0] == bos
    assert bench.trained(row) == ["ok<|im_end|>\n"]
    (bench.model / "chat_template.jinja").write_text("{{ bos_token }}{{ bos_token }}" + template)
    done = bench.admit([[u("test"), a("ok")]])
    assert done.code == 1
    assert "duplicate_bos" in done.err


def test_m14_a_one_token_answer_is_trained(bench: Bench) -> None:
    assert bench.admit([[u("x"), a("Y")]]).code == 0
    [row] = bench.rows()
    [(first, last)] = row.label_spans
    tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    assert [tokenizer.id_to_token(i) for i in row.input_ids[first:last]] == ["Y", "<|im_end|>", "Ċ"]
    # A label is predicted from the token before it, so "Y" counts only if it is not the first.
    assert first > 0


def test_p1_rows_over_the_cap_are_counted_and_none_is_cut(bench: Bench) -> None:
    long = [u("word " * 200), a("ok")]
    done = bench.admit([long] * 8, "--set", "admit.max_tokens=64", "--invalid-row-policy", "skip")
    assert done.code == 1
    assert "over_length" in done.err
    short = [[u(f"q{number}"), a("ok")] for number in range(7)]
    done = bench.admit([*short, long], "--set", "admit.max_tokens=64", "--invalid-row-policy", "skip")
    assert done.code == 0
    reasons = bench.manifest()["counts"]["corpus"]["reasons"]
    assert {name: count for name, count in reasons.items() if count} == {"over_length": 1}
    assert [bench.trained(row) for row in bench.rows()] == [["ok<|im_end|>\n"]] * 7


def test_t1_roles_that_do_not_alternate(bench: Bench) -> None:
    bench.change_model(STRICT)
    rows = [[u("a"), a("b")], [u("a"), a("b"), u("c"), u("d")], [u("e"), a("f")]]
    done = bench.admit(rows)
    assert done.code == 1
    assert "row 2 (line 2)" in done.err
    assert "template_error" in done.err
    assert "Conversation roles must alternate user/assistant/user/assistant/..." in done.err
    done = bench.admit(rows, "--invalid-row-policy", "skip")
    assert done.code == 0
    assert [row.row_index for row in bench.rows()] == [1, 3]
    assert bench.manifest()["counts"]["corpus"]["reasons"]["template_error"] == 1


def test_t2_a_system_turn_that_the_template_refuses(bench: Bench) -> None:
    bench.change_model(NO_SYSTEM)
    row: Messages = [s("Be brief"), u("hi"), a("yo")]
    done = bench.admit([row])
    assert done.code == 1
    assert "template_error" in done.err
    assert "System role not supported; it takes the row without message 1 (system)" in done.err
    assert 'system_turn = "fold"' in done.err
    assert bench.admit([row], "--set", "admit.system_turn=fold").code == 0
    [folded] = bench.rows()
    assert "<|im_start|>user\nBe brief\n\nhi<|im_end|>" in bench.text(folded)
    assert bench.trained(folded) == ["yo<|im_end|>\n"]
    manifest = bench.manifest()
    assert manifest["details"]["system_turn"] == "fold"
    # The identity is that of the row as given; the setting is part of what the receipt chain holds.
    (bench.model / "chat_template.jinja").write_text(CHATML)
    assert bench.admit([row]).code == 0
    assert bench.rows()[0].row_sha256 == folded.row_sha256
    assert bench.manifest()["config_sha256"] != manifest["config_sha256"]


def test_t9_tools_are_printed_once_and_not_trained(bench: Bench) -> None:
    bench.change_model(
        "{% for tool in tools or [] %}{{ '<|im_start|>tools\n' + tool | tojson + '<|im_end|>\n' }}{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert bench.admit([CALLING]).code == 0
    [row] = bench.rows()
    assert bench.text(row).count("Weather of a city") == 1
    assert bench.trained(row) == ['{"name": "get_weather", "arguments": {"city": "Oslo"}}<|im_end|>\n']


def test_t9_a_template_that_ignores_tools_is_named_with_the_count(bench: Bench) -> None:
    done = bench.admit([CALLING])
    assert done.code == 1
    assert 'the template model ignores `tools`; [admit] tools = "system" puts them into the system text' in done.err
    done = bench.admit([CALLING, CALLING, [u("q"), a("a")]], "--invalid-row-policy", "skip")
    assert done.code == 0
    assert bench.manifest()["counts"]["corpus"]["reasons"]["template_lost_content"] == 2
    assert re.search(r"template_lost_content\s+2\n", done.out + done.err)
    told = 'template: ignores `tools`; [admit] tools = "system" puts them into the system text: 2 rows'
    assert told in done.out + done.err
    # The way out that the message names.
    assert bench.admit([CALLING], "--set", "admit.tools=system").code == 0
    [row] = bench.rows()
    assert bench.text(row).count("Weather of a city") == 1
    assert bench.trained(row) == ['{"name":"get_weather","arguments":{"city":"Oslo"}}<|im_end|>\n']
    tools = bench.manifest()["details"]["tools"]
    assert (tools["mode"], tools["prompt"]) == ("system", "kiln-cli.tool-prompt.v1")


def test_t11_nothing_is_appended_to_what_the_template_prints(bench: Bench) -> None:
    """Gemma: the end of a turn and the end of the text are two tokens; only the one that is printed is trained."""
    tokens = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
    bench.change_model(GEMMA, tokens, bos_token="<bos>", eos_token="<eos>")
    assert bench.admit([[u("a"), a("b"), u("c"), a("d")]]).code == 0
    [row] = bench.rows()
    printed = "<bos><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n"
    printed += "<start_of_turn>user\nc<end_of_turn>\n<start_of_turn>model\nd<end_of_turn>\n"
    tokenizer = Tokenizer.from_file(str(bench.model / "tokenizer.json"))
    assert row.input_ids == tokenizer.encode(printed, add_special_tokens=False).ids
    assert tokenizer.token_to_id("<eos>") not in row.input_ids
    assert bench.trained(row) == ["b<end_of_turn>\n", "d<end_of_turn>\n"]


CALLING = {
    "messages": [
        u("Weather in Oslo?"),
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {"type": "object"}},
        }
    ],
}
