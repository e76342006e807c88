"""Labels: the trained text of real templates, written down by hand or found by an oracle that knows the family."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kiln_stages.labelling.label_proof import Claim, prove
from kiln_stages.labelling.labels import LabelFinder, Rendered
from kiln_stages.labelling.rendering import ChatTemplate
from label_rows import ROWS, THOUGHT, Row, all_templates, says, template, user
from tests_support import shared_path

from kiln_cli.errors import RowFault


@functools.cache
def found(name: str, row: str) -> Rendered | str:
    """The labels of a row, or the reason why it is refused."""
    try:
        return LabelFinder(template(name)).find(*ROWS[row])
    except RowFault as fault:
        return fault.reason


def trained(rendered: Rendered | str) -> list[str]:
    assert isinstance(rendered, Rendered), rendered
    return [rendered.text[start:end] for start, end in rendered.spans]


def turns(row: str) -> list[int]:
    messages = ROWS[row][0]
    return [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1) != 0]


SMOLLM2 = "tokenizers/smollm2/chat_template"
CHATML = [SMOLLM2, "templates/axolotl/chatml", "templates/llama_cpp/Qwen-Qwen2.5-7B-Instruct", "templates/trl/qwen2_5"]
MISTRAL = "templates/axolotl/mistral_v1"
NEMO = "templates/llama_cpp/mistralai-Mistral-Nemo-Instruct-2407"
PHI3 = "templates/trl/phi3"
QWEN3 = "templates/llama_cpp/Qwen-Qwen3-0.6B"
QWEN35 = "templates/llama_cpp/Qwen3.5-4B"
GPT_OSS = "templates/llama_cpp/openai-gpt-oss-120b"
R1 = "templates/llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
CALL_TEXT = (
    '<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Pa\\"r\\nis é", "days": 3, "now": true, "unit": null}}\n</tool_call>'
)


@pytest.mark.parametrize(("name", "row", "expected"), [
    (SMOLLM2, "plain", ["yes<|im_end|>\n"]),
    (SMOLLM2, "twins", ["yes<|im_end|>\n", "yes<|im_end|>\n"]),
    (SMOLLM2, "weight_0", ["no<|im_end|>\n"]),
    (SMOLLM2, "white_space", ["\n\n yes \n\n<|im_end|>\n", " y <|im_end|>\n"]),
    (SMOLLM2, "control_text", ["b<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"]),
    (SMOLLM2, "empty_turn", ["<|im_end|>\n", "c<|im_end|>\n"]),
    (MISTRAL, "twins", [" yes</s>", " yes</s>"]),
    (NEMO, "plain", ["yes</s>"]),
    (NEMO, "call_and_result", ['[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Pa\\"r\\nis é", "days": 3, '
                               '"now": true, "unit": null}, "id": "abcdef123"}]</s>', "21.</s>"]),
    (PHI3, "twins", ["yes<|end|>\n", "yes<|end|>\n"]),
    ("templates/trl/phi3_training", "twins", ["yes<|end|>\n", "yes<|end|>\n</s>"]),
    ("templates/trl/phi3_training", "weight_0_last", ["yes<|end|>\n"]),
    ("templates/trl/qwen2_5_training", "plain", ["\nyes<|im_end|>\n"]),
    ("templates/axolotl/phi_4", "system", ["yes<|im_end|>"]),
    (QWEN3, "twins", ["yes<|im_end|>\n", "<think>\n\n</think>\n\nyes<|im_end|>\n"]),
    (QWEN3, "think_tags_twice", ["ans<|im_end|>\n", "<think>\nw\n</think>\n\nb<|im_end|>\n"]),
    (QWEN3, "call_with_text", [f"let me\n{CALL_TEXT}<|im_end|>\n", "<think>\n\n</think>\n\n21.<|im_end|>\n"]),
    (QWEN35, "reasoning", ["hmm\n</think>\n\nans<|im_end|>\n"]),  # the prompt holds the think opener
    (QWEN35, "reasoning_twice", ["ans<|im_end|>\n", "k\n</think>\n\nb<|im_end|>\n"]),
    (GPT_OSS, "twins", ["<|channel|>final<|message|>yes<|end|>", "<|channel|>final<|message|>yes<|return|>"]),
    (GPT_OSS, "call", [' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Pa\\"r\\nis é", '
                       '"days": 3, "now": true, "unit": null}<|call|>']),
    (R1, "system", ["yes<｜end▁of▁sentence｜>"]),
    ("templates/llama_cpp/HuggingFaceTB-SmolLM3-3B", "no_think", ["ans<|im_end|>\n"]),
])  # fmt: skip
def test_trained_text(name: str, row: str, expected: list[str]) -> None:
    assert trained(found(name, row)) == expected


@pytest.mark.parametrize("name", CHATML)
def test_chatml_family_against_its_own_tags(name: str) -> None:
    refused = {"control_text", "reasoning", "reasoning_twice"}  # the tags in the text would fool the oracle
    checked = 0
    for row in ROWS.keys() - refused:
        result = found(name, row)
        if isinstance(result, str):
            assert result == "template_lost_content"
            assert any("tool_calls" in message for message in ROWS[row][0])
            continue
        oracle = [m.span(1) for m in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n?)", result.text, re.S)]
        spoken = [i for i, message in enumerate(ROWS[row][0]) if message["role"] == "assistant"]
        assert len(oracle) == len(spoken)
        wanted = [span for i, span in zip(spoken, oracle, strict=True) if i in turns(row)]
        assert list(result.spans) == wanted, (name, row)
        checked += 1
    assert checked >= 14


def test_every_template_labels_or_refuses_every_row() -> None:
    """The render is never changed, spans are in order, the answer is in its span, questions never are."""
    labelled = 0
    for name, row in itertools.product(all_templates(), ROWS):
        result = found(name, row)
        if isinstance(result, str):
            assert result in ("template_error", "template_lost_content", "mask_disagreement"), (name, row)
            assert row not in ("plain", "twins", "weight_0", "one_in_another"), (name, row, result)
            continue
        assert result.text == template(name).render(*ROWS[row])
        assert len(result.spans) == len(turns(row))
        edges = [edge for span in result.spans for edge in span]
        assert edges == sorted(edges)
        for turn, text in zip(turns(row), trained(result), strict=True):
            answer = ROWS[row][0][turn]["content"].rpartition("</think>")[2].strip()
            assert answer in text
        labelled += 1
    assert labelled >= 300


def test_few_templates_leave_rows_undecided() -> None:
    undecided = {
        (name, row) for name, row in itertools.product(all_templates(), ROWS) if found(name, row) == "mask_disagreement"
    }
    assert undecided == {(QWEN35, "assistant_first")}  # it cannot render the first turn alone


def test_spans_that_are_off_by_a_little_fail_the_proof() -> None:
    tried = 0
    for name, row in itertools.product(all_templates(), ROWS):
        result = found(name, row)
        if isinstance(result, str):
            continue
        form, text = template(name).settle(*ROWS[row])
        for at, edge, by in itertools.product(range(len(result.spans)), (0, 1), (-5, -1, 1, 5)):
            spans = [list(span) for span in result.spans]
            spans[at][edge] += by
            edges = [0, *itertools.chain(*spans), len(text)]
            if edges != sorted(edges) or spans[at][0] == spans[at][1]:
                continue
            moved = tuple((start, end) for start, end in spans)
            with pytest.raises(RowFault, match="mask_disagreement"):
                prove(Claim(template(name), form, ROWS[row][1], text, moved, turns(row)))
            tried += 1
    assert tried > 3000


def test_a_turn_that_ends_otherwise_than_an_earlier_one_is_looked_at_by_itself() -> None:
    """The proof looks once a row at what may follow a closing; this template opens a turn behind message 4."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% elif messages | length == 4 %}[user]{% endif %}"
    )
    turning = ChatTemplate(source, "turning")
    messages = [user("A"), says("B"), user("C"), says("D"), user("E"), says("F"), user("G")]
    result = LabelFinder(turning).find(messages)
    assert trained(result) == ["B[end]\n", "D[end]\n", "F[end]\n"]
    for turn in (0, 1, 2):
        spans = list(result.spans)
        spans[turn] = (spans[turn][0], spans[turn][1] + len("[user]"))
        with pytest.raises(RowFault, match="does not end with its turn"):
            prove(Claim(turning, messages, None, result.text, tuple(spans), [1, 3, 5]))


def test_blocks_around_the_user_turn_are_refused() -> None:
    source = shared_path("data/templates/axolotl/phi_4.jinja").read_text(encoding="utf-8")
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    opening, closing = "{{'<|im_start|>user<|im_sep|>'", "'<|im_end|>'}}{% elif"
    assert opening in source
    assert closing in source
    wrong = source.replace(opening, "{% generation %}" + opening)
    wrong = wrong.replace(closing, closing.replace("{% elif", "{% endgeneration %}{% elif"))
    finder = LabelFinder(ChatTemplate(wrong, "wrong"))
    for row in ("plain", "system", "twins", "control_text", "weight_0"):
        with pytest.raises(RowFault, match="mask_disagreement"):
            finder.find(*ROWS[row])


@pytest.mark.parametrize("body", [
    "{% generation %}{{ m.role + m.content }}{% endgeneration %}",  # every message
    "{{ m.role }}{% if m.role == 'assistant' %}{{ m.content }}{% generation %}!{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",  # constant text only
    "{{ m.role + m.content }}{% if loop.last %}{% generation %}{% endgeneration %}{% endif %}",  # empty
])  # fmt: skip
def test_blocks_in_wrong_places_are_refused(body: str) -> None:
    finder = LabelFinder(ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", "wrong"))
    with pytest.raises(RowFault, match="mask_disagreement"):
        finder.find(*ROWS["twins"])


def test_lost_text_is_named() -> None:
    for name, row, what in [
        (SMOLLM2, "reasoning", "message 2 (assistant) reasoning"),
        (SMOLLM2, "calls_without_tools", "message 2 (assistant) tool_calls[0] name"),
        (SMOLLM2, "call", 'the template chat_template ignores `tools`; [admit] tools = "system" puts them'),
        (NEMO, "system", "message 1 (system) content"),
        (GPT_OSS, "two_calls", "message 2 (assistant) tool_calls[1] name"),
        (R1, "think_tags", "message 2 (assistant) content"),
    ]:
        with pytest.raises(RowFault) as error:
            LabelFinder(template(name)).find(*ROWS[row])
        assert error.value.reason == "template_lost_content"
        assert what in error.value.detail


def test_thinking_left_out_of_an_earlier_turn_is_noted() -> None:
    for name in (QWEN3, QWEN35):
        result = found(name, "think_tags_twice")
        assert isinstance(result, Rendered)
        assert result.notes == ("template_rewrites_turns: thinking of message 2 is left out",)
    plain = found(QWEN3, "twins")
    assert isinstance(plain, Rendered)
    assert plain.notes == ()


def test_rows_without_anything_to_train_on() -> None:
    finder = LabelFinder(template(SMOLLM2))
    for messages, reason, detail in [
        ([user("hi")], "no_assistant_message", "at least one message of role assistant"),
        ([user("hi"), says("yes", weight=0)], "no_supervised_tokens", "weight 0"),
    ]:
        with pytest.raises(RowFault, match=detail) as error:
            finder.find(messages)
        assert error.value.reason == reason


def test_content_spans_hold_all_row_text_and_nothing_else() -> None:
    result = found(SMOLLM2, "control_text")
    assert isinstance(result, Rendered)
    texts = [result.text[start:end] for start, end in result.content_spans]
    assert texts == [message["content"] for message in ROWS["control_text"][0]]
    result = found(SMOLLM2, "white_space")
    assert isinstance(result, Rendered)
    texts = [result.text[start:end] for start, end in result.content_spans]
    assert texts == [message["content"] for message in ROWS["white_space"][0]]


def test_control_text_is_located_wherever_a_row_can_hold_it() -> None:
    """In tool schemas, ids, argument names and values: every occurrence lies in a content span."""
    bad = "<|im_end|>"
    call = {"type": "function", "id": bad, "function": {"name": bad, "arguments": {bad: [bad, {"k": bad}]}}}
    tools = [
        {
            "type": "function",
            "function": {
                "name": "f",
                "description": bad,
                "parameters": {
                    "type": "object",
                    "properties": {bad: {"type": "string", "enum": [bad], "default": bad}},
                },
            },
        }
    ]
    messages = [
        {"role": "system", "content": bad},
        user(bad),
        says(bad, tool_calls=[call]),
        {"role": "tool", "content": bad, "tool_call_id": bad},
        says(THOUGHT + bad),
    ]
    for name in (QWEN3, "templates/trl/qwen2_5", "templates/trl/qwen3_training"):
        result = LabelFinder(template(name)).find(messages, tools)
        inside = sum(result.text[start:end].count(bad) for start, end in result.content_spans)
        clean = [{**message, "content": "x"} for message in messages]
        harmless = {"name": "f", "arguments": {"x": ["x", {"k": "x"}]}}
        clean[2]["tool_calls"] = [{"type": "function", "function": harmless}]
        tools_clean = [{"type": "function", "function": {"name": "f", "description": "d"}}]
        assert result.text.count(bad) - inside == template(name).render(clean, tools_clean).count(bad)


def test_results_do_not_depend_on_earlier_rows() -> None:
    for name in all_templates():
        finder = LabelFinder(template(name))
        remembered = dict(finder._memo)
        for row in ROWS:
            try:
                result: Rendered | str = finder.find(*ROWS[row])
            except RowFault as fault:
                result = fault.reason
            assert result == found(name, row), (name, row)
        assert finder._memo == remembered


def renders_of(monkeypatch: pytest.MonkeyPatch, name: str, row: Row) -> int:
    finder = LabelFinder(template(name))
    forms = []
    render_form = ChatTemplate.render_form

    def counted(*args: Any, **more: Any) -> str:
        forms.append(args[1])
        return render_form(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(ChatTemplate, "render_form", counted)
        finder.find(*row)
    return len(forms)


@pytest.mark.parametrize(("name", "row", "renders"), [
    (SMOLLM2, "plain", 6),
    (QWEN3, "plain", 6),
    (QWEN3, "think_tags", 6),
    ("templates/trl/qwen3_training", "plain", 4),
    ("templates/trl/qwen2_5", "call", 7),  # a gap of its own: the arguments end in null
])  # fmt: skip
def test_a_usual_row_is_rendered_a_few_times(
    monkeypatch: pytest.MonkeyPatch, name: str, row: str, renders: int
) -> None:
    assert renders_of(monkeypatch, name, ROWS[row]) == renders


@pytest.mark.parametrize("name", [SMOLLM2, QWEN3, "templates/trl/qwen2_5"])
def test_a_long_conversation_is_rendered_twice_a_turn(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    messages = [message for i in range(20) for message in (user(f"What is {i}?"), says(f"It is {i}."))]
    assert renders_of(monkeypatch, name, (messages, None)) == 4 + 2 * 20


def test_marks_do_not_collide_with_the_row() -> None:
    text = "qk0z000000b qk1z000001e"
    result = LabelFinder(template(SMOLLM2)).find([user(text), says(text)])
    assert trained(result) == [text + "<|im_end|>\n"]


@pytest.mark.parametrize("body", [
    "{{ m.role ~ ': ' ~ m.content | upper ~ '\n' }}",  # changes the marks
    "{{ m.role ~ ': ' ~ m.content | length ~ '\n' }}",  # prints something else
    "{{ m.role ~ ': ' ~ m.content | truncate(30) ~ '\n' }}",
    "{{ m.role ~ ': ' ~ m.content ~ (messages[-1].content | length) ~ '\n' }}",
])  # fmt: skip
def test_templates_that_rewrite_text_are_refused(body: str) -> None:
    finder = LabelFinder(ChatTemplate("{% for m in messages %}" + body + "{% endfor %}", "rewrites"))
    long = "a long text with many words in it, longer than the limit"
    with pytest.raises(RowFault, match=r"template_lost_content|mask_disagreement"):
        finder.find([user("hi " + long), says(long)])


def test_a_template_without_prompt_or_end_of_turn_trains_the_bare_text() -> None:
    source = "{% for m in messages %}{{ '[' ~ m.content ~ ']' if m.role == 'user' else m.content }}{% endfor %}"
    result = LabelFinder(ChatTemplate(source, "bare")).find([user("q"), says("a"), user("q"), says("b")])
    assert trained(result) == ["a", "b"]


def test_only_one_newline_behind_the_end_of_turn_is_trained() -> None:
    source = (
        "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content ~ '<end>\n\n\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    result = LabelFinder(ChatTemplate(source, "wide")).find([user("q"), says("a"), user("q"), says("b")])
    assert trained(result) == ["a<end>\n", "b<end>\n"]


@pytest.mark.parametrize("source", [
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}[assistant]",  # prompt or not
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}{{ eos_token }}",
])  # fmt: skip
def test_a_template_that_always_opens_or_closes_trains_no_header(source: str) -> None:
    finder = LabelFinder(ChatTemplate(source, "always", {"eos_token": "</s>"}))
    for row in ("plain", "twins", "system"):
        with pytest.raises(RowFault, match="mask_disagreement"):
            finder.find(*ROWS[row])


FRAGMENTS = [
    "<think>",
    "</think>",
    " ",
    "\n",
    "x",
    "hi",
    "<|im_end|>\n",
    "<|im_start|>assistant\n",
    "é",
    "\x1d",
    "\u2028",
    "qk0z000001b",
    "X0wX",
    '"',
    "\\",
    "{{ x }}",
    "</s>",
    "[/INST]",
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join) | st.text(
    st.characters(exclude_categories=["Cs", "Cn"]), max_size=20
)


@settings(max_examples=200, deadline=None)
@given(texts, texts, texts)
@example("", "", "")
@example("x", "x", "x")
def test_any_text_is_trained_whole_and_alone(question: str, first: str, second: str) -> None:
    messages = [user(question), says(first), user(first), says(second)]
    wanted = [first + "<|im_end|>\n", second + "<|im_end|>\n"]
    for name in (SMOLLM2, "templates/trl/qwen2_5"):
        result = LabelFinder(template(name)).find(messages)
        assert trained(result) == wanted
        head = result.text.index("<|im_start|>user\n" + question)
        places = [head + len("<|im_start|>user\n" + question + "<|im_end|>\n<|im_start|>assistant\n")]
        between = "<|im_start|>user\n" + first + "<|im_end|>\n<|im_start|>assistant\n"
        places.append(places[0] + len(wanted[0]) + len(between))
        assert [start for start, _ in result.spans] == places


def test_a_wrong_memory_costs_time_and_no_row() -> None:
    finder = LabelFinder(template(SMOLLM2))
    right = finder.find(*ROWS["twins"])
    finder._memo = {key: value + 1 for key, value in finder._memo.items()}
    assert finder.find(*ROWS["twins"]) == right
