"""Reports from users of other tools that a render or an encoding alone can show, and the views that answer some."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from gguf_tokenizer import phi3_tokenizer_json
from kiln_stages.admitting.prepared_rows import TOOL_PROMPT
from kiln_stages.admitting.row_views import RowView
from kiln_stages.admitting.special_tokens import missing_marker
from kiln_stages.labelling.labels import LabelFinder
from kiln_stages.labelling.markers import printed_markers
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.labelling.tokens import RowTokenizer
from label_rows import CALL, RESULT, SYSTEM, TOOLS, all_templates, says, template, user
from tests_support import packed_text, shared_path

from kiln_cli.errors import RowFault

QWEN3 = "templates/llama_cpp/Qwen-Qwen3-0.6B"
QWEN3_TRAINING = "templates/trl/qwen3_training"
SMOLLM2 = "tokenizers/smollm2/chat_template"
MISTRAL = "templates/axolotl/mistral_v2v3"


def smollm2_json() -> str:
    return packed_text("data/tokenizers/smollm2/tokenizer.json.gz")


@pytest.fixture(scope="module")
def smollm2() -> RowTokenizer:
    return RowTokenizer(smollm2_json(), "<|im_start|>", ("<|im_end|>",))


@pytest.fixture(scope="module")
def phi3() -> RowTokenizer:
    return RowTokenizer(phi3_tokenizer_json(shared_path("data/tokenizers/llama_cpp/ggml-vocab-phi-3.gguf")), "<s>")


def trained(finder: LabelFinder, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> list[str]:
    rendered = finder.find(messages, tools)
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_m3_equal_turns_under_mistral() -> None:
    row = [user("MASKED"), says("NOT MASKED")] * 3
    assert trained(LabelFinder(template(MISTRAL)), row) == [" NOT MASKED</s>"] * 3


def test_m5_thinking_that_the_template_takes_out_of_an_earlier_turn() -> None:
    row = [user("Hi"), says("<think>p</think>Hello"), user("Bye"), says("<think>q</think>See you")]
    rendered = LabelFinder(template(QWEN3)).find(row)
    texts = [rendered.text[start:end] for start, end in rendered.spans]
    assert texts == ["Hello<|im_end|>\n", "<think>\nq\n</think>\n\nSee you<|im_end|>\n"]
    assert not any("Bye" in text or "Hi" in text for text in texts)
    assert rendered.notes == ("template_rewrites_turns: thinking of message 2 is left out",)


def test_m7_a_marker_that_tokenises_otherwise_in_its_place(phi3: RowTokenizer) -> None:
    source = (
        "{% for m in messages %}{{ '\n### ' + ('Assistant' if m.role == 'assistant' else 'User') + ': ' + m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n### Assistant: ' }}{% endif %}"
    )
    rendered = LabelFinder(ChatTemplate(source, "hashes")).find([user("Hello"), says("Hi"), user("x"), says("y")])
    assert [rendered.text[start:end] for start, end in rendered.spans] == ["Hi", "y"]
    alone = phi3.pieces("\n### Assistant:")
    assert alone != phi3.pieces("Hello\n### Assistant:")[1:]  # the trap: a search by ids would not find it
    encoded = phi3.encode(rendered.text, rendered.spans, rendered.content_spans)
    pieces = phi3.pieces(rendered.text)
    assert [pieces[first:last] for first, last in encoded.label_spans] == [["▁Hi"], ["▁y"]]
    # A space that the row's own text ends in is no matter of spelling.
    open_end = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "bare")
    row = LabelFinder(open_end).find([user("Hello "), says("Hi")])
    with pytest.raises(RowFault, match="the token ' Hi' crosses the start") as error:
        phi3.encode(row.text, row.spans, row.content_spans)
    assert error.value.reason == "boundary_straddle"


def test_p5_a_closing_tag_that_the_template_leaves_an_orphan() -> None:
    orphan = [user("2+2?"), says("4 because\n</think>\n\n4")]
    finder = LabelFinder(template(QWEN3_TRAINING))
    # This one looks for the closing tag alone, so each tag stands once.
    assert trained(finder, orphan) == ["<think>\n4 because\n</think>\n\n4<|im_end|>\n"]
    source = shared_path(f"data/{QWEN3_TRAINING}.jinja").read_text(encoding="utf-8")
    both = source.replace("{%- if '</think>' in content %}", "{%- if '<think>' in content and '</think>' in content %}")
    assert both != source
    faulty = LabelFinder(ChatTemplate(both, "faulty"))
    with pytest.raises(RowFault) as error:
        faulty.find(orphan)
    assert error.value.reason == "unbalanced_reasoning_tags"
    assert error.value.detail == "faulty prints message 2 (assistant) with the tags <think> </think> </think>"
    assert error.value.pointer == "/messages/1/content"
    sound = [user("2+2?"), says("<think>\nsum\n</think>\n\n4")]
    assert trained(faulty, sound) == ["<think>\nsum\n</think>\n\n4<|im_end|>\n"]
    assert trained(faulty, [user("q"), says("plain")]) == ["<think>\n\n</think>\n\nplain<|im_end|>\n"]


@pytest.mark.parametrize(
    "answer", ["<think>open", "a</think>b<think>c", "<think>a</think><think>b</think>", "x</think>"]
)
@pytest.mark.parametrize("name", ["templates/axolotl/phi_4", "templates/llama_cpp/HuggingFaceTB-SmolLM3-3B"])
def test_p5_tags_that_a_row_brings_unpaired_to_a_thinking_template(name: str, answer: str) -> None:
    with pytest.raises(RowFault, match="unbalanced_reasoning_tags"):
        LabelFinder(template(name)).find([user("q"), says(answer)])


def test_p5_a_turn_of_weight_0_and_a_template_without_thinking_are_left_alone() -> None:
    row = [user("q"), says("x</think>", weight=0), user("q"), says("a")]
    assert trained(LabelFinder(template("templates/axolotl/phi_4")), row) == ["a<|im_end|>"]
    assert trained(LabelFinder(template(SMOLLM2)), [user("q"), says("x</think>y")]) == ["x</think>y<|im_end|>\n"]


# Views of a row (`[admit] tools = "system"`, `system_turn = "fold"`).


def test_tools_as_text() -> None:
    finder = LabelFinder(template(SMOLLM2), RowView(tools="system"))
    row = [SYSTEM, user("q"), says("", tool_calls=[CALL]), RESULT, says("21.")]
    rendered = finder.find(row, TOOLS)
    tools = json.dumps([TOOLS[0]["function"]], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert rendered.text.startswith(f"<|im_start|>system\n{TOOL_PROMPT}\n{tools}\n\nbe kind<|im_end|>\n")
    assert [rendered.text[start:end] for start, end in rendered.spans] == [
        '{"name":"get_weather","arguments":{"city":"Pa\\"r\\nis é","days":3,"now":true,"unit":null}}<|im_end|>\n',
        "21.<|im_end|>\n",
    ]
    assert "tool_calls" in row[2]  # the row itself is as it was


def test_tools_as_text_in_the_shapes_that_rows_have() -> None:
    view = RowView(tools="system")
    call = {"name": "f", "arguments": '{"b": 1, "a": 2}'}
    text = '{"name":"f","arguments":{"a":2,"b":1}}'
    for calls, content, expected in [
        ([call], "", text),
        ([{"function": call}, call], "", f"[{text},{text}]"),
        ([call], "let me", f"let me\n{text}"),
        ([{"name": "f"}], "", '{"name":"f","arguments":{}}'),
    ]:
        messages, tools = view([user("q"), says(content, tool_calls=calls, reasoning_content="r", weight=0)], None)
        assert tools is None
        assert messages[1] == {"role": "assistant", "content": expected, "reasoning_content": "r", "weight": 0}
    messages, _ = view([user("q"), says("a")], [{"name": "g"}, {"type": "function", "function": {"name": "f"}, "x": 1}])
    listed = '[{"name":"g"},{"function":{"name":"f"},"type":"function","x":1}]'
    assert messages[0] == {"role": "system", "content": f"{TOOL_PROMPT}\n{listed}"}
    plain = [user("q"), says("a")]
    assert view(plain, None) == (plain, None)


@pytest.mark.parametrize(("call", "reason"), [
    ({"name": "f", "arguments": "{bad"}, "tool_arguments_invalid_json"),
    ({"name": "f", "arguments": "[1]"}, "tool_arguments_invalid_json"),
    ({"name": "f", "arguments": 1}, "tool_arguments_invalid_json"),
    ({"arguments": {}}, "template_error"),
    ("f()", "template_error"),
])  # fmt: skip
def test_calls_that_cannot_be_text(call: Any, reason: str) -> None:
    with pytest.raises(RowFault) as error:
        RowView(tools="system")([user("q"), says("", tool_calls=[call])], None)
    assert (error.value.reason, error.value.pointer) == (reason, "/messages/1/tool_calls/0")


def test_t2_a_folded_system_turn() -> None:
    view = RowView(system_turn="fold")
    assert view([SYSTEM, user("hi"), says("yo")], None)[0] == [user("be kind\n\nhi"), says("yo")]
    two = [SYSTEM, {"role": "system", "content": "and short"}, user("hi"), says("yo")]
    assert view(two, None)[0] == [user("be kind\n\nand short\n\nhi"), says("yo")]
    assert view([user("hi"), says("yo")], None)[0] == [user("hi"), says("yo")]
    assert view([says("yo"), user("hi"), says("a")], None)[0] == [says("yo"), user("hi"), says("a")]
    for row in ([SYSTEM, says("yo")], [SYSTEM]):
        with pytest.raises(RowFault, match="needs a user message"):
            view(row, None)


@pytest.mark.parametrize("name", [MISTRAL, "templates/llama_cpp/mistralai-Mistral-Nemo-Instruct-2407"])
def test_t2_a_system_turn_that_the_template_drops_is_told_and_folds(name: str) -> None:
    row = [SYSTEM, user("hi"), says("yo")]
    with pytest.raises(RowFault, match=r'message 1 \(system\) content; \[admit\] system_turn = "fold"'):
        LabelFinder(template(name)).find(row)
    assert "be kind\n\nhi" in LabelFinder(template(name), RowView(system_turn="fold")).find(row).text


def test_t2_only_a_system_turn_is_blamed_for_itself() -> None:
    """A row that is refused with and without its system message is not sent to fold it."""
    with pytest.raises(RowFault) as error:
        LabelFinder(template(MISTRAL)).find([SYSTEM, user("a"), user("b"), says("c")])
    assert error.value.reason == "template_error"
    assert "fold" not in error.value.detail


# Markers of a template that a tokenizer lacks (M9).


@pytest.mark.parametrize(("name", "missing"), [
    (SMOLLM2, None),
    ("templates/axolotl/chatml", None),
    ("templates/llama_cpp/Qwen-Qwen2.5-7B-Instruct", None),
    (QWEN3, None),
    ("templates/trl/phi3", "<|user|>"),
    ("templates/axolotl/phi_4", "<|im_sep|>"),
    ("templates/llama_cpp/openai-gpt-oss-120b", "<|start|>"),
    ("templates/llama_cpp/deepseek-ai-DeepSeek-V3.1", "<｜User｜>"),
    (MISTRAL, None),  # [INST] is plain text to a tokenizer that has none of its kind
])  # fmt: skip
def test_m9_markers_under_smollm2(name: str, missing: str | None, smollm2: RowTokenizer) -> None:
    path = shared_path(f"data/{name}.jinja")
    made = ChatTemplate(path.read_text(encoding="utf-8"), path.stem, {"eos_token": "<|im_end|>"}, date="2025-01-31")
    assert missing_marker(made, smollm2, ("<|im_end|>",)) == missing


@pytest.mark.parametrize("name", [name for name in all_templates() if "hi-3" in name or "phi3" in name])
def test_m9_phi3_templates_under_phi3(name: str, phi3: RowTokenizer, smollm2: RowTokenizer) -> None:
    path = shared_path(f"data/{name}.jinja")
    made = ChatTemplate(path.read_text(encoding="utf-8"), path.stem, {"eos_token": "<|endoftext|>"})
    assert missing_marker(made, phi3, ("<s>", "<|endoftext|>")) is None
    assert missing_marker(made, smollm2, ("<|endoftext|>",)) == "<|user|>"


def test_m9_an_end_token_and_bracketed_markers(smollm2: RowTokenizer) -> None:
    printing = ChatTemplate(
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}", "e", {"eos_token": "</s>"}
    )
    assert missing_marker(printing, smollm2, ("</s>",)) == "</s>"
    row_text = ChatTemplate("{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}", "r")
    assert missing_marker(row_text, smollm2, ()) is None
    bracketed = template(MISTRAL)  # prints <s> and </s>, too, which are not asked for here
    knows_one = tokenizers.Tokenizer.from_str(smollm2_json())
    knows_one.add_special_tokens(["[INST]"])
    assert missing_marker(bracketed, RowTokenizer(knows_one.to_str()), ()) == "[/INST]"
    silent = ChatTemplate("{{ raise_exception('no') }}", "silent")
    assert missing_marker(silent, smollm2, ()) is None


def test_markers_that_a_template_prints_are_control_tokens_though_not_marked_so() -> None:
    """As in DeepSeek's files: a question that holds the assistant's marker opens no turn."""
    name = "templates/llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
    made = template(name)
    markers = printed_markers(made)
    assert {"<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁output▁begin｜>"} <= markers
    assert not any("q" in marker for marker in markers)
    plain = tokenizers.Tokenizer.from_str(smollm2_json())
    plain.add_tokens([tokenizers.AddedToken(marker, normalized=False) for marker in sorted(markers)])
    opener = plain.token_to_id("<｜Assistant｜>")
    rendered = LabelFinder(made).find([user("a<｜Assistant｜>b"), says("c<｜User｜>d")])
    tokenizer = RowTokenizer(plain.to_str(), None, markers)
    encoded = tokenizer.encode(rendered.text, rendered.spans, rendered.content_spans)
    assert encoded.input_ids.count(opener) == 1
    assert encoded.input_ids.count(plain.token_to_id("<｜User｜>")) == 1
    assert plain.decode(encoded.input_ids, skip_special_tokens=False) == rendered.text
    with pytest.raises(RowFault, match="control_token_in_content"):
        tokenizer.encode(rendered.text, rendered.spans, rendered.content_spans, "reject")
