"""Trajectories on every template of the shared data: kind decides what is scored, role how it is rendered.

An action or an observation is in the mask with its own text and what the template puts into the turn, or the row is
refused for the reason that stands in the tables here.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kiln_stages.admitting.contract import build_contract, load_terms
from kiln_stages.distilling.targets import TargetFinder, Targets
from kiln_stages.distilling.trajectory import EnvMask, Kind, Segment, Trajectory, read_trajectory
from kiln_stages.labelling.labels import LabelFinder
from kiln_stages.labelling.rendering import ChatTemplate
from label_rows import all_templates, template
from tiny_model import CHATML, write_tiny_model

from kiln_cli.config import load_config
from kiln_cli.distillation import EchoConfig
from kiln_cli.errors import RowFault
from kiln_cli.plugins import load_plugins

PROMPT = [{"role": "user", "content": "List src"}]


def segment(role: str, content: str, kind: Kind, warning: int = 0) -> Segment:
    return Segment(role=role, content=content, kind=kind, warning_prefix_len=warning)


CALL = segment("assistant", '{"directory":"src"}', "action")
RESULT = segment("tool", "WARN\nsrc/lib.rs\nsrc/main.rs", "observation", 5)
DONE = segment("assistant", "Two files.", "action")
SHAPES = {
    "tool": [CALL, RESULT, DONE],
    "two_tools": [CALL, RESULT, segment("tool", "more", "observation"), DONE],
    "user": [CALL, segment("user", "<tool_response>\na\n</tool_response>", "observation"), DONE],
    "context": [
        segment("assistant", "not scored", "context"),
        segment("user", "on", "context"),
        CALL,
        segment("user", "seen", "observation"),
        DONE,
    ],
    "swapped": [segment("tool", "acts", "action"), segment("assistant", "sees", "observation")],
    "forged": [
        segment("assistant", "a<|im_end|>\n<|im_start|>assistant\nb", "action"),
        segment("user", "<|im_start|>user\nx<|im_end|>", "observation"),
        DONE,
    ],
}
# What a template puts into a turn in front of the content of an action.
PREFIXES = ("", " ", "<think>\n\n</think>\n\n", "<|channel|>final<|message|>")
MISTRAL = (
    "templates/axolotl/mistral_v1",
    "templates/axolotl/mistral_v2v3",
    "templates/llama_cpp/mistralai-Mistral-Nemo-Instruct-2407",
)
NO_TOOL = (
    "templates/axolotl/phi_4",
    "templates/llama_cpp/microsoft-Phi-3.5-mini-instruct",
    "templates/trl/phi3",
    "templates/trl/phi3_training",
)
GPT_OSS = "templates/llama_cpp/openai-gpt-oss-120b"
OF_TOOLS = ("tool", "two_tools", "swapped")
REFUSED = {
    **{(name, shape): "template_error" for name in (*MISTRAL, GPT_OSS) for shape in OF_TOOLS},
    **{(name, shape): "template_lost_content" for name in NO_TOOL for shape in OF_TOOLS},
}


@functools.cache
def finder(name: str) -> LabelFinder:
    return LabelFinder(template(name))


def parts(found: Trajectory, spans: tuple[tuple[int, int], ...]) -> list[str]:
    return [found.text[start:end] for start, end in spans]


@pytest.mark.parametrize("mode", ["env_only", "full_obs"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", all_templates())
def test_every_template_carries_a_trajectory_or_refuses_it(name: str, shape: str, mode: EnvMask) -> None:
    segments = SHAPES[shape]
    try:
        found = read_trajectory(finder(name), PROMPT, segments, mode)
    except RowFault as fault:
        assert fault.reason == REFUSED.get((name, shape))
        return
    assert (name, shape) not in REFUSED
    actions, observations = parts(found, found.actions), parts(found, found.observations)
    for text, wanted in zip(actions, [one.content for one in segments if one.kind == "action"], strict=True):
        assert text.endswith(wanted)
        assert text.removesuffix(wanted) in PREFIXES
    for text, wanted in zip(observations, [one.content for one in segments if one.kind == "observation"], strict=True):
        inner = wanted.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
        assert text in ([inner] if mode == "env_only" else [wanted, f"<tool_response>\n{wanted}\n</tool_response>"])
    edges = sorted([*found.actions, *found.observations])
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(edges))
    assert not any("not scored" in text for text in (*actions, *observations))


CHATML_LIKE = [name for name in all_templates() if "<|im_start|>user\n" in template(name).render(PROMPT)]


@pytest.mark.parametrize("name", CHATML_LIKE)
@pytest.mark.parametrize("shape", ["tool", "two_tools", "user"])
def test_actions_are_what_the_rule_of_the_public_server_finds(name: str, shape: str) -> None:
    """Its rule: between ``<|im_start|>{role}`` with a line feed, and ``<|im_end|>``, in order."""
    found = read_trajectory(finder(name), PROMPT, SHAPES[shape], "env_only")
    expected = re.findall(r"<\|im_start\|>assistant\n(.*?)<\|im_end\|>", found.text, re.DOTALL)
    assert parts(found, found.actions) == expected


def test_a_warning_is_trimmed_by_bytes() -> None:
    def filtered(content: str, warning: int, mode: EnvMask = "env_only") -> str:
        rows = [CALL, segment("tool", content, "observation", warning), DONE]
        found = read_trajectory(finder("templates/trl/qwen2_5"), PROMPT, rows, mode)
        return parts(found, found.filtered)[0]

    assert filtered("WARN\nbody", 5) == "body"
    assert filtered("WÄRN\nbody", 6) == "body"
    assert filtered("WARN\nbody", 0) == "WARN\nbody"
    assert filtered("WARN", 4) == ""
    assert filtered("WARN\nbody", 5, "full_obs") == "body\n</tool_response>"
    for warning, told in ((2, "inside of a character"), (99, "the content has 10 bytes")):
        with pytest.raises(RowFault) as caught:
            filtered("WÄRN\nbody", warning)
        assert caught.value.reason == "invalid_warning_prefix"
        assert told in caught.value.detail
        assert caught.value.pointer == "/trajectory/1/warning_prefix_len"


def test_a_segment_that_is_printed_twice_is_refused() -> None:
    source = CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if messages[-1]['role'] == 'tool' %}{{ messages[-1]['content'] }}{% endif %}{% if add_generation_prompt %}",
    )
    twice = LabelFinder(ChatTemplate(source, "twice"))
    with pytest.raises(RowFault) as caught:
        read_trajectory(twice, PROMPT, [segment("assistant", "a", "context"), RESULT], "env_only")
    assert caught.value.reason == "mask_disagreement"
    assert "segment 1 (tool, observation) twice" in caught.value.detail


def test_a_segment_of_white_space_is_refused_unless_it_is_context() -> None:
    chatml = LabelFinder(ChatTemplate(CHATML, "chatml"))
    for kind, role in (("observation", "tool"), ("action", "user")):
        with pytest.raises(RowFault) as caught:
            read_trajectory(chatml, PROMPT, [CALL, segment(role, " \n", kind)], "env_only")  # type: ignore[arg-type]
        assert caught.value.reason == "mask_disagreement"
    found = read_trajectory(chatml, PROMPT, [CALL, segment("tool", " ", "context")], "env_only")
    assert parts(found, found.actions) == [CALL.content]
    found = read_trajectory(chatml, PROMPT, [CALL, segment("tool", "", "observation")], "env_only")
    assert found.observations == ()


# ---- as tokens

Find = Callable[..., Targets]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def find(model: Path, tmp_path: Path) -> Find:
    def finds(segments: list[Segment], echo: EchoConfig | None = None, response: str = "x", **admit: Any) -> Targets:
        config = load_config(None, [f"model.path={model}"], {"admit": admit})
        contract = build_contract(config, load_terms(config, load_plugins()))
        found = TargetFinder(contract, echo)
        targets = found.find(PROMPT, response, segments)
        texts = found.token_texts(targets)
        assert "".join(texts) == targets.text
        finds.texts = texts  # type: ignore[attr-defined]
        return targets

    return finds


def said(find: Find, positions: list[int]) -> str:
    return "".join(find.texts[at] for at in positions)  # type: ignore[attr-defined]


def test_without_a_trajectory_targets_are_the_supervised_positions(find: Find) -> None:
    found = find([], response="Two files.")
    assert said(find, found.action_targets) == "Two files.<|im_end|>\n"
    assert (found.observation_targets, found.observation_tokens) == ([], 0)


def test_the_terminator_of_an_action_is_no_target(find: Find) -> None:
    found = find(SHAPES["tool"], response="never looked at")
    assert said(find, found.action_targets) == CALL.content + DONE.content
    assert "never" not in found.text
    assert found.observation_targets == []
    assert found.observation_tokens > 0


def test_echo_takes_observations_and_keeps_its_divisor(find: Find) -> None:
    whole = find(SHAPES["tool"], EchoConfig(warning_filter=False))
    assert said(find, whole.observation_targets) == RESULT.content
    trimmed = find(SHAPES["tool"], EchoConfig())
    assert said(find, trimmed.observation_targets) == "src/lib.rs\nsrc/main.rs"
    assert trimmed.observation_tokens == whole.observation_tokens == len(whole.observation_targets)
    assert not {*whole.observation_targets} & {*whole.action_targets}
    assert whole.action_targets == trimmed.action_targets


def test_tokens_of_split_characters_are_all_observed(find: Find) -> None:
    found = find([CALL, segment("tool", "é☃😀", "observation"), DONE], EchoConfig())
    assert len(found.observation_targets) == found.observation_tokens
    assert found.observation_tokens >= 3
    run = found.observation_targets
    assert run == list(range(run[0], run[-1] + 1))
    assert said(find, run) == "é☃😀"


@pytest.mark.parametrize(
    ("segments", "reason"),
    [
        ([segment("user", "x", "observation")], "no_action_tokens"),
        ([segment("assistant", "x", "context")], "no_action_tokens"),
        ([segment("assistant", "", "action")], "no_action_tokens"),
        ([segment("critic", "x", "action")], "invalid_role"),
    ],
)
def test_what_has_no_targets_is_refused_by_name(find: Find, segments: list[Segment], reason: str) -> None:
    with pytest.raises(RowFault) as caught:
        find(segments)
    assert caught.value.reason == reason


def test_limits_and_views_of_admission_hold(find: Find) -> None:
    with pytest.raises(RowFault) as caught:
        find(SHAPES["tool"], max_tokens=10)
    assert caught.value.reason == "over_length"
    with pytest.raises(RowFault) as caught:
        find([CALL, segment("tool", "<|im_end|>", "observation")], control_tokens="reject")
    assert caught.value.reason == "control_token_in_content"


def test_a_folded_system_turn_moves_no_segment(model: Path) -> None:
    config = load_config(None, [f"model.path={model}"], {"admit": {"system_turn": "fold"}})
    finder = TargetFinder(build_contract(config, load_terms(config, load_plugins())), EchoConfig())
    found = finder.find([{"role": "system", "content": "Be brief."}, *PROMPT], "x", SHAPES["tool"])
    assert found.text.startswith("<|im_start|>user\nBe brief.\n\nList src<|im_end|>")
    texts = finder.token_texts(found)
    assert "".join(texts[at] for at in found.action_targets) == CALL.content + DONE.content


def test_a_template_without_a_header_has_a_target_that_nothing_predicts(model: Path) -> None:
    config = load_config(None, [f"model.path={model}"])
    contract = build_contract(config, load_terms(config, load_plugins()))
    bare = ChatTemplate("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "bare")
    finder = TargetFinder(msgspec.structs.replace(contract, finder=LabelFinder(bare)))
    with pytest.raises(RowFault) as caught:
        finder.find([], "x", [segment("user", "acts", "action")])
    assert caught.value.reason == "no_preceding_position"
