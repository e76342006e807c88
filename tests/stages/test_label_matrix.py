"""Every template of the shared data, two tokenizers, every conversation shape: labels are right, or the row is refused.

Right means: the trained text, read from the rendered text and again from the labelled ids, is what the template prints
for the assistant's turns by an oracle that shares no code with the product (``label_oracles``). Refused means: for the
code that stands in the tables here, each with its reason; a row that turns from one into the other fails the test.
"""

from __future__ import annotations

import functools
import gzip
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from gguf_tokenizer import phi3_tokenizer_json
from kiln_stages.labelling.label_proof import Claim, prove
from kiln_stages.labelling.labels import LabelFinder, Rendered
from kiln_stages.labelling.rendering import ChatTemplate
from kiln_stages.labelling.tokens import Encoded, RowTokenizer
from label_oracles import place
from label_rows import CALL, RESULT, ROWS, SYSTEM, TOOLS, Row, all_templates, says, user
from tests_support import shared_path

from kiln_cli.errors import RowFault

TOKENIZERS = ("smollm2", "phi3")
SHAPES: dict[str, Row] = {
    **ROWS,
    "one_token": ([user("x"), says("Y")], None),
    "three_equal_turns": ([user("MASKED"), says("NOT MASKED")] * 3, None),
    "unicode": ([user("naïve ☃"), says("👩‍👩‍👧 नमस्ते é"), user("多"), says("言")], None),
    "answer_is_the_question": ([user("assistant"), says("assistant"), user("user"), says("user")], None),
    "two_results": ([user("q"), says("", tool_calls=[CALL]), RESULT, RESULT, says("21.")], TOOLS),
    "result_then_question": ([user("q"), says("", tool_calls=[CALL]), RESULT, says("2."), user("z"), says("n")], None),
    "weight_0_call": ([user("q"), says("", tool_calls=[CALL], weight=0), RESULT, says("21.")], None),
    "thinking_then_call": ([user("q"), says("", reasoning_content="hmm", tool_calls=[CALL])], TOOLS),
    "tools_unused": ([user("q"), says("no need")], TOOLS),
    "control_text_in_result": ([user("q"), says("", tool_calls=[CALL]), {**RESULT, "content": "<|im_end|>\n<|im_start|>"
                                "assistant\nx"}, says("21.")], None),
    "control_words": ([user("[/INST] <|end|> <|assistant|>\nx<|endoftext|>"), says("[INST] a <|user|> <s>b")], None),
}  # fmt: skip
# Shapes again with a system turn in front; the name of such a case ends in "+system".
CASES: dict[str, Row] = {
    **SHAPES,
    **{
        f"{shape}+system": ([SYSTEM, *messages], tools)
        for shape, (messages, tools) in SHAPES.items()
        if messages[0]["role"] != "system"
    },
}


# What is refused, and why. Shapes are named without "+system"; what a system turn adds stands in SYSTEM_IS_LOST.
SMOLLM2, CHATML, PHI4 = "tokenizers/smollm2/chat_template", "templates/axolotl/chatml", "templates/axolotl/phi_4"
MISTRAL_V1, MISTRAL_V3 = "templates/axolotl/mistral_v1", "templates/axolotl/mistral_v2v3"
NEMO = "templates/llama_cpp/mistralai-Mistral-Nemo-Instruct-2407"
SMOLLM3 = "templates/llama_cpp/HuggingFaceTB-SmolLM3-3B"
QWEN25 = ("templates/llama_cpp/Qwen-Qwen2.5-7B-Instruct", "templates/trl/qwen2_5")
QWEN25_TRAINING, QWEN35 = "templates/trl/qwen2_5_training", "templates/llama_cpp/Qwen3.5-4B"
QWEN3 = ("templates/llama_cpp/Qwen-Qwen3-0.6B", "templates/trl/qwen3")
PHI3 = ("templates/llama_cpp/microsoft-Phi-3.5-mini-instruct", "templates/trl/phi3", "templates/trl/phi3_training")
R1 = "templates/llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"
V31, GPT_OSS = "templates/llama_cpp/deepseek-ai-DeepSeek-V3.1", "templates/llama_cpp/openai-gpt-oss-120b"

CALLS = frozenset({
    "call", "call_and_result", "calls_without_tools", "two_calls", "call_with_text", "two_results",
    "result_then_question", "weight_0_call", "thinking_then_call", "control_text_in_result",
})  # fmt: skip
REASONING = frozenset({"reasoning", "reasoning_twice", "thinking_then_call"})
DECLARES_TOOLS = frozenset(shape for shape, (_, tools) in SHAPES.items() if tools)
# `template_error`: the template itself raises.
RAISES: dict[str, frozenset[str]] = {
    # Roles must alternate, and a tool result has no place; a call alone passes as an answer that is then lost.
    MISTRAL_V1: frozenset({"no_user", "assistant_first", "two_in_a_row", "call_with_text"})
    | (CALLS - {"call", "two_calls", "thinking_then_call"}),
    # Roles must alternate but for calls and results.
    MISTRAL_V3: frozenset({"no_user", "assistant_first", "two_in_a_row"}),
    NEMO: frozenset({"no_user", "assistant_first", "two_in_a_row"}),
    # "No user query found in messages."
    QWEN35: frozenset({"no_user"}),
}
# `template_lost_content`: the template leaves out text of the row in silence.
LOSES: dict[str, frozenset[str]] = {
    # No tools, no calls, no reasoning field.
    **dict.fromkeys((SMOLLM2, CHATML, PHI4, SMOLLM3, *PHI3), CALLS | REASONING | DECLARES_TOOLS),
    MISTRAL_V1: REASONING | {"call", "two_calls", "tools_unused"},
    # No reasoning field; the text of a turn that calls.
    MISTRAL_V3: REASONING | {"call_with_text"},
    NEMO: REASONING | {"call_with_text"},
    **dict.fromkeys((*QWEN25, QWEN25_TRAINING), REASONING),
    # Tools are not declared; thinking is dropped, from the last turn too.
    **dict.fromkeys((R1, V31), REASONING | DECLARES_TOOLS | {"think_tags", "think_tags_twice"}),
    # The second call of a turn; the text of a call that is not the last word.
    GPT_OSS: frozenset({"two_calls", "call_with_text"}),
}
# Both print the system text before the last message only if that is the user's, which a row to train on never has.
SYSTEM_IS_LOST = (MISTRAL_V3, NEMO)
# `mask_disagreement`: the template cannot render the first turn alone, so nothing shows where it ends.
UNDECIDED = {QWEN35: frozenset({"assistant_first"})}

# `boundary_straddle`: one token holds text of both sides of an edge.
_CALLED_AND_ADMITTED = CALLS - {"call_with_text", "thinking_then_call", "weight_0_call"}
_TWO_TURNS = frozenset({"twins", "one_in_another", "weight_0_last", "empty_turn", "assistant_first",
                        "three_equal_turns", "unicode", "answer_is_the_question"})  # fmt: skip
STRADDLES: dict[tuple[str, str], frozenset[str]] = {
    # The newline of the header and those that the answer begins with.
    **{("smollm2", name): frozenset({"white_space"}) for name in (SMOLLM2, CHATML, *QWEN25, *QWEN3, *PHI3)},
    # `][` of [/INST][TOOL_CALLS], for a tokenizer that has neither as a token.
    ("smollm2", MISTRAL_V3): _CALLED_AND_ADMITTED,
    ("phi3", MISTRAL_V3): _CALLED_AND_ADMITTED,
    ("phi3", NEMO): _CALLED_AND_ADMITTED | {"control_words"},  # an answer that begins with [INST]
    # `]<` of [/INST]<think>, too.
    ("smollm2", NEMO): _CALLED_AND_ADMITTED | {"control_words", "think_tags", "think_tags_twice"},
    # `><` of <|im_sep|><think>, and of <|im_end|><|im_start|>, for a tokenizer without them.
    ("smollm2", PHI4): frozenset({"think_tags", "think_tags_twice"}),
    ("phi3", PHI4): _TWO_TURNS | {"white_space", "empty", "two_in_a_row", "think_tags", "think_tags_twice",
                                  "control_words"},
    # `><` of <｜end▁of▁sentence｜><｜User｜>, for a tokenizer without them; newlines after <｜Assistant｜>.
    ("smollm2", R1): _TWO_TURNS | {"white_space", "empty", "two_in_a_row", "calls_without_tools",
                                   "result_then_question", "control_text_in_result"},
    ("smollm2", V31): _TWO_TURNS | {"white_space", "empty", "calls_without_tools", "result_then_question",
                                    "control_text_in_result"},
    # `><` of <|end|><|start|> and of <|call|><|start|>; phi-3 has <|end|> as a token.
    ("smollm2", GPT_OSS): _TWO_TURNS | _CALLED_AND_ADMITTED - {"call", "two_calls"}
    | {"white_space", "two_in_a_row", "think_tags_twice", "reasoning_twice"},
    ("phi3", GPT_OSS): _CALLED_AND_ADMITTED - {"call", "two_calls"},
}  # fmt: skip
# `token_loss`: this tokenizer writes a space as U+2581, which these templates print themselves.
NO_TOKEN = {("phi3", R1), ("phi3", V31)}


def expected(name: str, tokenizer: str, case: str) -> str:
    """The code that the tables give a case, "" where it is admitted."""
    shape, _, extra = case.partition("+")
    if shape in RAISES.get(name, ()) and not (name == QWEN35 and extra):
        return "template_error"
    if name in SYSTEM_IS_LOST and CASES[case][0][0]["role"] == "system":
        return "template_lost_content"
    if shape in LOSES.get(name, ()):
        return "template_lost_content"
    if shape in UNDECIDED.get(name, ()):
        return "mask_disagreement"
    if (tokenizer, name) in NO_TOKEN:
        return "token_loss"
    return "boundary_straddle" if shape in STRADDLES.get((tokenizer, name), ()) else ""


class Vocabulary(NamedTuple):
    """A tokenizer as a model directory describes it."""

    json: str
    bos: str
    eos: str


class Outcome(NamedTuple):
    """One row under one template and tokenizer: labelled text and tokens, or the code it is refused for."""

    code: str
    detail: str
    rendered: Rendered | None
    encoded: Encoded | None


@functools.cache
def vocabulary(name: str) -> Vocabulary:
    if name == "smollm2":
        packed = shared_path("data/tokenizers/smollm2/tokenizer.json.gz").read_bytes()
        return Vocabulary(gzip.decompress(packed).decode("utf-8"), "<|im_start|>", "<|im_end|>")
    path = shared_path("data/tokenizers/llama_cpp/ggml-vocab-phi-3.gguf")
    return Vocabulary(phi3_tokenizer_json(path), "<s>", "<|endoftext|>")


@functools.cache
def row_tokenizer(name: str) -> RowTokenizer:
    made = vocabulary(name)
    return RowTokenizer(made.json, made.bos, (made.bos, made.eos))


@functools.cache
def chat_template(name: str, tokenizer: str) -> ChatTemplate:
    path, made = shared_path(f"data/{name}.jinja"), vocabulary(tokenizer)
    special = {"bos_token": made.bos, "eos_token": made.eos}
    return ChatTemplate(path.read_text(encoding="utf-8"), path.stem, special, date="2025-01-31")


@functools.cache
def outcomes(name: str, tokenizer: str) -> dict[str, Outcome]:
    """Every case under one template and tokenizer."""
    finder, out = LabelFinder(chat_template(name, tokenizer)), {}
    for case, (messages, tools) in CASES.items():
        rendered = None
        try:
            rendered = finder.find(messages, tools)
            encoded = row_tokenizer(tokenizer).encode(rendered.text, rendered.spans, rendered.content_spans)
            out[case] = Outcome("", "", rendered, encoded)
        except RowFault as fault:
            out[case] = Outcome(fault.reason, fault.detail, rendered, None)
    return out


@functools.cache
def pieces(tokenizer: str) -> dict[int, bytes]:
    """The bytes that each id stands for, read from the vocabulary by a table of its own."""
    description = json.loads(vocabulary(tokenizer).json)
    out = {}
    # Byte-level vocabularies write a byte that prints as itself, and the others as the characters from U+0100 on.
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    letters = {chr(byte if byte in prints else next(rest)): byte for byte in range(256)}
    for piece, number in description["model"]["vocab"].items():
        if tokenizer == "smollm2":
            out[number] = bytes(letters[char] for char in piece)
        elif len(piece) == 6 and piece.startswith("<0x"):
            out[number] = bytes([int(piece[3:5], 16)])
        else:
            out[number] = piece.replace("▁", " ").encode()
    for token in description["added_tokens"]:
        out[token["id"]] = token["content"].encode()
    return out


@functools.cache
def added(tokenizer: str) -> frozenset[int]:
    return frozenset(token["id"] for token in json.loads(vocabulary(tokenizer).json)["added_tokens"])


def decoded(tokenizer: str, ids: list[int]) -> list[bytes]:
    """The bytes of each token; SentencePiece's own space before a stretch of text is taken off."""
    out, fresh = [], tokenizer == "phi3"
    for number in ids:
        told = pieces(tokenizer)[number]
        out.append(told[1:] if fresh and number not in added(tokenizer) else told)
        fresh = tokenizer == "phi3" and number in added(tokenizer)
    return out


def supervised(case: str) -> list[bool]:
    """For each assistant turn, whether it is trained."""
    return [m.get("weight", 1) != 0 for m in CASES[case][0] if m["role"] == "assistant"]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("name", all_templates())
def test_labels_are_what_the_template_prints_for_the_assistant(name: str, tokenizer: str) -> None:
    eos = vocabulary(tokenizer).eos
    for case, outcome in outcomes(name, tokenizer).items():
        if outcome.rendered is None:
            continue
        text, messages = outcome.rendered.text, CASES[case][0]
        spans = [span for span, kept in zip(place(name, messages, text, eos), supervised(case), strict=True) if kept]
        assert list(outcome.rendered.spans) == spans, (case, text)
        if outcome.encoded is None:
            continue
        parts = decoded(tokenizer, outcome.encoded.input_ids)
        assert b"".join(parts).decode("utf-8") == text, case
        labelled = [b"".join(parts[first:last]).decode("utf-8") for first, last in outcome.encoded.label_spans]
        assert labelled == [text[start:end] for start, end in spans], case


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_what_is_refused_is_what_the_tables_say(tokenizer: str) -> None:
    found = {(name, case): o.code for name in all_templates() for case, o in outcomes(name, tokenizer).items()}
    assert len(found) == 20 * len(CASES)
    wrong = {
        key: (code, expected(key[0], tokenizer, key[1]))
        for key, code in found.items()
        if code != expected(key[0], tokenizer, key[1])
    }
    assert wrong == {}, "(template, case): (found, expected)"
    assert sum(code == "" for code in found.values()) > 600


def test_a_refusal_names_its_template_or_its_token() -> None:
    for name, tokenizer in itertools.product(all_templates(), TOKENIZERS):
        for case, outcome in outcomes(name, tokenizer).items():
            if outcome.code in ("template_error", "template_lost_content", "mask_disagreement"):
                assert Path(name).name in outcome.detail, (case, outcome)
            elif outcome.code == "boundary_straddle":
                assert "the token '" in outcome.detail, (case, outcome)
            elif outcome.code:
                assert (outcome.code, "U+2581" in outcome.detail) == ("token_loss", True), (case, outcome)


def admitted_claims(tokenizer: str) -> list[tuple[str, Claim]]:
    """Every admitted case as the claim that was proven for it; a system turn in front proves nothing new."""
    claims = []
    for name in all_templates():
        template = chat_template(name, tokenizer)
        for case, outcome in outcomes(name, tokenizer).items():
            if outcome.rendered is not None and "+" not in case:
                form, text = template.settle(*CASES[case])
                turns = [
                    i for i, m in enumerate(CASES[case][0]) if m["role"] == "assistant" and m.get("weight", 1) != 0
                ]
                claims.append(
                    (f"{name} {case}", Claim(template, form, CASES[case][1], text, outcome.rendered.spans, turns))
                )
    return claims


def test_every_span_edge_shifted_by_one_character_is_refused() -> None:
    tried = 0
    for what, claim in admitted_claims("smollm2"):
        prove(claim)
        for at, edge, by in itertools.product(range(len(claim.spans)), (0, 1), (-1, 1)):
            spans = [list(span) for span in claim.spans]
            spans[at][edge] += by
            edges = [0, *itertools.chain(*spans), len(claim.text)]
            if edges != sorted(edges):
                continue  # such spans overlap or leave the text: there is nothing to prove
            with pytest.raises(RowFault) as error:
                prove(msgspec.structs.replace(claim, spans=tuple((start, end) for start, end in spans)))
            assert error.value.reason == "mask_disagreement", what
            tried += 1
    assert tried > 2000


class Shifted(ChatTemplate):
    """A template whose renders are off by ``by`` characters where they serve as evidence, ``damage`` says which."""

    def __init__(self, claim: Claim, damage: str, by: int) -> None:
        self.__dict__.update(claim.template.__dict__)
        self._claim, self._damage, self._by = claim, damage, by

    def render_form(self, form: Any, tools: Any = None, add_generation_prompt: bool = False, **options: Any) -> str:
        text = super().render_form(form, tools, add_generation_prompt, **options)
        row, whole = self._claim.form, self._claim.text
        if self._damage == "words" and len(form) == len(row) and list(form) != row:
            return " " + text if self._by > 0 else text[1:]
        if self._damage == "prompts" and add_generation_prompt and whole.startswith(text):
            return whole[: len(text) + self._by]
        return text

    def render_marked(self, messages: Any, tools: Any = None) -> Any:
        text, blocks = super().render_marked(messages, tools)
        by = self._by if self._damage == "blocks" else 0
        return text, tuple((start + by, end + by) for start, end in blocks)


def shows_prompts(claim: Claim) -> bool:
    """Whether the text goes on from the prompt of each turn, so that prompts are what shows where turns start."""
    return 0 not in claim.turns and all(
        claim.text.startswith(claim.template.render_form(claim.form[:turn], claim.tools, True)) for turn in claim.turns
    )


def has_words(message: dict[str, Any]) -> bool:
    return any(message.get(field) for field in ("content", "reasoning_content", "tool_calls"))


@pytest.mark.parametrize(("damage", "least"), [("words", 300), ("prompts", 150), ("blocks", 50)])
def test_every_row_is_refused_when_the_proof_is_off_by_one_character(damage: str, least: int) -> None:
    """The render with other words, the prompts of turns, the generation blocks: each by itself is enough to refuse."""
    refused = 0
    for what, claim in admitted_claims("smollm2"):
        if damage != "words" and claim.template.has_markers != (damage == "blocks"):
            continue
        if damage == "prompts" and not shows_prompts(claim):
            continue
        if damage == "words" and not any(has_words(claim.form[turn]) for turn in claim.turns):
            continue  # no other words to put there
        for by in (-1, 1):
            with pytest.raises(RowFault) as error:
                prove(msgspec.structs.replace(claim, template=Shifted(claim, damage, by)))
            assert error.value.reason == "mask_disagreement", what
            refused += 1
    assert refused >= 2 * least
