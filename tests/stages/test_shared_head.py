"""What a batch begins with alike is encoded once, and the ids stay the tokenizer's own for each whole text."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from kiln_stages.labelling.shared_head import SharedHead
from kiln_stages.labelling.strings import any_of
from tests_support import packed_text

PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n"


@pytest.fixture(scope="module")
def source() -> str:
    return packed_text("data/tokenizers/smollm2/tokenizer.json.gz")


def finder(source: str) -> SharedHead:
    description = json.loads(source)
    control = any_of([token["content"] for token in description["added_tokens"] if token["special"]])
    added = [token["content"] for token in description["added_tokens"]]
    return SharedHead(tokenizers.Tokenizer.from_str(source), control, added)


def with_added(source: str, **token: object) -> str:
    tokenizer = tokenizers.Tokenizer.from_str(source)
    tokenizer.add_tokens([tokenizers.AddedToken(**token, normalized=False)])  # type: ignore[arg-type]
    return tokenizer.to_str()


def test_the_head_ends_before_the_last_control_token_that_all_texts_share(source: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(source)
    head, ids = finder(source).of([PROMPT + "one", PROMPT + "other", PROMPT])
    assert head == "<|im_start|>system\nBe brief.<|im_end|>\n"
    assert ids == tokenizer.encode(head, add_special_tokens=False).ids


@pytest.mark.parametrize("texts", [
    [],
    [PROMPT],  # by itself it is encoded once anyway
    ["one", "other"],
    ["<|im_start|>one", "<|im_start|>other"],  # nothing stands before the token
    ["a<|im_sta", "a<|im_end|>"],  # no whole token is shared
    ["", PROMPT],
])  # fmt: skip
def test_there_may_be_nothing_to_share(source: str, texts: list[str]) -> None:
    assert finder(source).of(texts) == ("", [])


@pytest.mark.parametrize("token", [
    {"content": "\n<|im_start|>user"},  # begins before the cut and reaches over it
    {"content": "\n<"},  # ends within the token that is cut before
    {"content": "x<|im_start|>"},  # not in these texts, but it could be in others of the batch
])  # fmt: skip
def test_no_cut_where_another_token_could_reach_over_it(source: str, token: dict[str, object]) -> None:
    assert finder(with_added(source, **token)).of([PROMPT + "one", PROMPT + "other"]) == ("", [])


def test_no_cut_where_a_token_reaches_over_it_in_another_text_alone(source: str) -> None:
    """The first text, which is encoded whole, does not hold it."""
    widened = with_added(source, content="\n<|im_start|>user\nq")
    tokenizer = tokenizers.Tokenizer.from_str(widened)
    texts = [PROMPT + "one", PROMPT + "q other"]
    assert tokenizer.token_to_id("\n<|im_start|>user\nq") in tokenizer.encode(texts[1], add_special_tokens=False).ids
    assert finder(widened).of(texts) == ("", [])


def test_no_cut_where_the_token_wants_to_stand_alone(source: str) -> None:
    """A token with single_word is one at the start of a rest, and none behind a letter."""
    tokenizer = tokenizers.Tokenizer.from_str(source)
    tokenizer.add_special_tokens([tokenizers.AddedToken("turn", single_word=True, normalized=False, special=True)])
    widened = tokenizer.to_str()
    assert finder(widened).of(["a return one", "a return two"]) == ("", [])
    assert finder(widened).of(["a turn one", "a turn two"])[0] == "a "


PARTS = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im", "user", "\n", " ", "é", "e\u0301", "1",
                         "'s", "<", ">", "|", "ab  c"])  # fmt: skip
ADDED = ["\n<|im_start|>", "s<|im_end|>", "b  ", None]
TEXTS = st.lists(PARTS, max_size=8).map("".join)


@pytest.fixture(scope="module")
def widened(source: str) -> dict[str | None, tuple[tokenizers.Tokenizer, SharedHead]]:
    sources = {added: source if added is None else with_added(source, content=added) for added in ADDED}
    return {added: (tokenizers.Tokenizer.from_str(each), finder(each)) for added, each in sources.items()}


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.lists(TEXTS, min_size=2, max_size=4), st.sampled_from(ADDED))
def test_ids_are_those_of_the_whole_text(
    widened: dict[str | None, tuple[tokenizers.Tokenizer, SharedHead]], head: str, rests: list[str], added: str | None
) -> None:
    tokenizer, heads = widened[added]
    texts = [head + rest for rest in rests]
    shared, ids = heads.of(texts)
    for text in texts:
        assert text.startswith(shared)
        rest = tokenizer.encode(text[len(shared) :], add_special_tokens=False).ids
        assert ids + rest == tokenizer.encode(text, add_special_tokens=False).ids
