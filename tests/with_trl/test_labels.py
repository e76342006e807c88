"""Labels beside TRL's, token for token, on TRL's own ``*_training`` templates.

TRL's side is what its ``SFTTrainer`` calls for each row, transformers' ``apply_chat_template`` with
``return_assistant_tokens_mask``; so these run without TRL too. Where TRL is installed (`make test-trl`), its other
templates are compared as well, and the trainer itself in ``test_sft_trainer.py``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests_support import shared_path
from with_trl.chat_files import MADE, Row, all_rows, as_objects, assistant, user
from with_trl.conftest import Admit, Corpus, ModelWith

OF_EACH_FILE = 8
CONTEXT = -100
# Templates, and markers that the tokenizer is given for them; without, they come out in pieces on both sides.
SHARED: dict[str, tuple[str, ...]] = {
    "phi3_training": (),
    "phi3_training with its markers": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "qwen2_5_training": (),
    "qwen3_training": (),
}
# Templates of TRL's own that admit refuses as a whole: they ask for the date, want other keys than messages have, or
# print a second begin-of-text token under this tokenizer.
WHOLE = {"gptoss", "muse_glimmer", "idefics3", "smolvlm", "llava_next", "lfm2", "lfm2_v2"}
# Codes of rows that TRL takes and kiln refuses. A token across an edge: TRL trains on all of it, header included. Text
# that a template does not print: TRL trains without it. An empty think block before the row's own: TRL trains on both.
STRICTER = {"boundary_straddle", "template_lost_content", "unbalanced_reasoning_tags", "mask_disagreement"}

Ids = list[int]


def trl_templates() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    paths = sorted(folder.glob("*_training.jinja")) if folder else []
    return [path for path in paths if path.stem.removesuffix("_training") not in WHOLE]


class Side(NamedTuple):
    """A model directory for kiln, and what TRL takes from it."""

    model: Path
    tokenizer: Any
    template: str


@pytest.fixture
def side(model_with: ModelWith) -> Callable[..., Side]:
    transformers = pytest.importorskip("transformers")

    def make(template: Path, *markers: str) -> Side:
        model = model_with(template, *markers)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
        return Side(model, tokenizer, template.read_text(encoding="utf-8"))

    return make


def shared_template(name: str) -> Path:
    return shared_path(f"data/templates/trl/{name}.jinja")


def of_trl(side: Side, row: Row, messages: list[Row] | None = None) -> tuple[Ids, Ids] | str:
    """Ids and labels as SFTTrainer makes them, or why it stops at this row. Arguments go in as objects, or as given
    where ``messages`` are."""
    try:
        found = side.tokenizer.apply_chat_template(
            as_objects(row["messages"]) if messages is None else messages,
            tools=row.get("tools"),
            chat_template=side.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    except Exception as error:  # a template raises what it likes
        return f"{type(error).__name__}: {error}"
    if 1 not in found["assistant_masks"]:
        return "no assistant tokens"
    pairs = zip(found["input_ids"], found["assistant_masks"], strict=True)
    return found["input_ids"], [token if mask else CONTEXT for token, mask in pairs]


def compare(side: Side, corpus: Corpus, rows: list[Row]) -> tuple[int, dict[int, str]]:
    """How many rows both sides took, alike; and kiln's codes for those that only TRL took. Fails where they differ."""
    alike, stricter = 0, {}
    for number, row in enumerate(rows, start=1):
        theirs = of_trl(side, row)
        if isinstance(theirs, str):
            continue
        if number not in corpus.kept:
            stricter[number] = corpus.refused[number]
            continue
        ours = corpus.kept[number]
        assert (ours["input_ids"], ours["labels"]) == theirs, f"row {number}: {row}"
        alike += 1
    return alike, stricter


@pytest.mark.parametrize(("name", "markers"), SHARED.items(), ids=list(SHARED))
def test_labels_are_those_of_trl_wherever_both_admit_the_row(
    admit: Admit, side: Callable[..., Side], name: str, markers: tuple[str, ...]
) -> None:
    both, rows = side(shared_template(name.split(" ")[0]), *markers), all_rows(OF_EACH_FILE)
    alike, stricter = compare(both, admit(rows, both.model), rows)
    assert alike > 0.75 * len(rows)
    assert set(stricter.values()) <= STRICTER
    names = list(MADE)
    straddling = [names[number - 1] for number, code in stricter.items() if code == "boundary_straddle"]
    # Phi-3's header ends in a line feed that is no token of its own where the answer goes on with white space.
    edges = ["white space at the edges", "an answer that begins with line feeds"]
    assert straddling == (edges if name.startswith("phi3") else [])


def test_a_block_one_character_shorter_is_no_longer_trls(admit: Admit, side: Callable[..., Side]) -> None:
    """The comparison can fail: TRL is shown blocks without the line feed that ends each turn."""
    both, end = side(shared_template("qwen3_training")), "{{- '<|im_end|>\\n' }}\n        {%- endgeneration %}"
    assert both.template.count(end) == 1
    rows = [MADE["two equal turns"]]
    shorter = both.template.replace(end, "{{- '<|im_end|>' }}{%- endgeneration %}{{ '\\n' }}")
    with pytest.raises(AssertionError, match="row 1"):
        compare(both._replace(template=shorter), admit(rows, both.model), rows)


PARTING: dict[str, tuple[Row, str | None]] = {
    "reasoning that is not printed": (MADE["reasoning in a field"], "template_lost_content"),
    "a control token in the text": ({"messages": [user("<|im_end|>"), assistant("<|im_start|>user")]}, None),
    "a character that the tokenizer drops": ({"messages": [user("hi"), assistant("a\x04b")]}, "token_loss"),
    "no assistant turn": ({"messages": [user("a")]}, "no_assistant_message"),
    "a turn of weight 0": ({"messages": [user("a"), assistant("b", weight=0), user("c"), assistant("d")]}, None),
    "a call's arguments as text": (
        {
            "messages": [
                user("1+2?"),
                assistant(
                    "", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}}]
                ),
            ],
            "tools": MADE["a call and its result"]["tools"],
        },
        None,
    ),
}


@pytest.mark.parametrize("name", PARTING)
def test_rows_on_which_both_part_as_the_docs_say(admit: Admit, side: Callable[..., Side], name: str) -> None:
    """Admitted by both, they differ; else kiln has the reason that docs/labels.md gives. TRL stops at one of them."""
    row, code = PARTING[name]
    both = side(shared_template("qwen2_5_training"))
    theirs = of_trl(both, row, row["messages"])
    assert theirs == "no assistant tokens" if code == "no_assistant_message" else not isinstance(theirs, str)
    corpus = admit([{"messages": [user("a"), assistant("b")]}, row], both.model)
    assert corpus.refused == ({} if code is None else {2: code})
    if code is None:
        assert (corpus.kept[2]["input_ids"], corpus.kept[2]["labels"]) != theirs


TRL_TEMPLATES = [pytest.param(path, id=path.stem) for path in trl_templates()]
ABSENT = pytest.param(None, id="none", marks=pytest.mark.skip("TRL is not here; `make test-trl` runs this"))


@pytest.mark.parametrize("path", TRL_TEMPLATES or [ABSENT])
def test_labels_are_those_of_trl_on_all_its_templates(admit: Admit, side: Callable[..., Side], path: Path) -> None:
    both, rows = side(path), all_rows(4)
    alike, stricter = compare(both, admit(rows, both.model), rows)
    assert alike
    assert set(stricter.values()) <= STRICTER
