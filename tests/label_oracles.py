"""What each template of the shared data prints for an assistant turn, written down family by family.

An oracle reads the row's messages and nothing of the product: it builds the text that opens the turn and the text
that is to be trained, from the rules of the template's family, in plain Python. ``place`` then finds both in a
rendered text, in order and behind the text of every message before.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

Message = dict[str, Any]


class Turn(NamedTuple):
    """What stands right before the trained text, and the trained text."""

    header: str
    trained: str


class Scene(NamedTuple):
    """A conversation, the place of the turn in it, and the text of the tokenizer's end token."""

    messages: list[Message]
    at: int
    eos: str

    @property
    def message(self) -> Message:
        return self.messages[self.at]

    @property
    def content(self) -> str:
        return str(self.message["content"])

    @property
    def is_last(self) -> bool:
        return self.at == len(self.messages) - 1

    @property
    def calls(self) -> list[Message]:
        return [call["function"] for call in self.message.get("tool_calls") or []]

    def before(self) -> str:
        """The role of the message before, "" for none."""
        return str(self.messages[self.at - 1]["role"]) if self.at else ""


def chatml(scene: Scene) -> Turn:
    return Turn("<|im_start|>assistant\n", scene.content + "<|im_end|>\n")


def smollm3(scene: Scene) -> Turn:
    first = scene.messages[0]
    silent = first["role"] == "system" and "/no_think" in first["content"]
    header = "<|im_start|>assistant\n" + ("<think>\n\n</think>\n" if silent else "")
    return Turn(header, scene.content.lstrip("\n") + "<|im_end|>\n")


def qwen25(scene: Scene) -> Turn:
    parts = [scene.content] if scene.content or not scene.calls else []
    return Turn("<|im_start|>assistant\n", "\n".join([*parts, *map(_call_tag, scene.calls)]) + "<|im_end|>\n")


def qwen25_training(scene: Scene) -> Turn:
    """Its block opens before the newline behind the role."""
    return Turn("<|im_start|>assistant", "\n" + qwen25(scene).trained)


def qwen3(scene: Scene) -> Turn:
    thought, answer = _thought(scene)
    if scene.at > _last_question(scene) and (scene.is_last or thought):
        return _qwen3(scene, f"<think>\n{thought.strip(chr(10))}\n</think>\n\n", answer.lstrip("\n"), answer)
    return _qwen3(scene, "", answer, answer)


def qwen3_training(scene: Scene) -> Turn:
    thought, answer = _thought(scene)
    return _qwen3(scene, f"<think>\n{thought.strip(chr(10))}\n</think>\n\n", answer.lstrip("\n"), answer)


def _qwen3(scene: Scene, thinking: str, shown: str, answer: str) -> Turn:
    calls = "\n".join(map(_call_tag, scene.calls))
    glue = "\n" if calls and answer else ""
    return Turn("<|im_start|>assistant\n", f"{thinking}{shown}{glue}{calls}<|im_end|>\n")


def qwen35(scene: Scene) -> Turn:
    """The generation prompt holds the opening tag, so it is header; earlier turns have no thinking."""
    thought, answer = _thought(
        scene._replace(messages=[{**m, "content": m["content"].strip()} for m in scene.messages])
    )
    calls = "\n".join(
        f"<tool_call>\n<function={call['name']}>\n"
        + "".join(f"<parameter={key}>\n{_plain(value)}\n</parameter>\n" for key, value in call["arguments"].items())
        + "</function>\n</tool_call>"
        for call in scene.calls
    )
    told = answer + ("\n\n" if calls and answer.strip() else "") + calls + "<|im_end|>\n"
    if scene.at > _last_question(scene):
        return Turn("<|im_start|>assistant\n<think>\n", f"{thought.strip()}\n</think>\n\n{told}")
    return Turn("<|im_start|>assistant\n", told)


def phi3(scene: Scene) -> Turn:
    return Turn("<|assistant|>\n", scene.content + "<|end|>\n")


def phi3_training(scene: Scene) -> Turn:
    """Its last block runs through the end-of-text token behind the conversation."""
    return Turn("<|assistant|>\n", scene.content + "<|end|>\n" + (scene.eos if scene.is_last else ""))


def phi4(scene: Scene) -> Turn:
    return Turn("<|im_start|>assistant<|im_sep|>", scene.content + "<|im_end|>")


def mistral_v1(scene: Scene) -> Turn:
    return Turn(" [/INST]", f" {scene.content}{scene.eos}")


def mistral_v3(scene: Scene) -> Turn:
    return _mistral(scene, "[TOOL_CALLS] ", " " + scene.content.strip())


def nemo(scene: Scene) -> Turn:
    return _mistral(scene, "[TOOL_CALLS]", scene.content)


def _mistral(scene: Scene, opening: str, content: str) -> Turn:
    calls = [
        json.dumps({"name": c["function"]["name"], "arguments": c["function"]["arguments"], "id": c["id"]},
                   ensure_ascii=False)
        for c in scene.message.get("tool_calls") or []
    ]  # fmt: skip
    header = "[/TOOL_RESULTS]" if scene.before() == "tool" else "[/INST]"
    return Turn(header, (f"{opening}[{', '.join(calls)}]" if calls else content) + scene.eos)


def deepseek_r1(scene: Scene) -> Turn:
    calls = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call['name']}\n```json\n{_json(call['arguments'])}\n```<｜tool▁call▁end｜>"
        for call in scene.calls
    ]
    header = "<｜tool▁outputs▁end｜>" if scene.before() == "tool" else "<｜Assistant｜>"
    return _deepseek(scene, header, "\n".join(calls))


def deepseek_v31(scene: Scene) -> Turn:
    calls = [
        f"<｜tool▁call▁begin｜>{call['name']}<｜tool▁sep｜>{_json(call['arguments'])}<｜tool▁call▁end｜>"
        for call in scene.calls
    ]
    # Only the first answer to a question has a header.
    header = "<｜Assistant｜><think></think>" if scene.before() == "user" else ""
    return _deepseek(scene, header, "".join(calls))


def _deepseek(scene: Scene, header: str, calls: str) -> Turn:
    told = f"{scene.content}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else scene.content
    return Turn(header, told + "<｜end▁of▁sentence｜>")


def gpt_oss(scene: Scene) -> Turn:
    """Thinking is printed in the last turn alone, as a message of its own that the model opens itself."""
    thought = scene.message.get("reasoning_content") or ""
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    if scene.calls:
        [call] = scene.calls
        later = [m for m in scene.messages[scene.at + 1 :] if m["role"] == "assistant" and not m.get("tool_calls")]
        told = f" to=functions.{call['name']}<|channel|>commentary json<|message|>{_json(call['arguments'])}<|call|>"
        return Turn("<|start|>assistant", ("" if later else analysis) + told)
    final = f"<|channel|>final<|message|>{scene.content}"
    return Turn("<|start|>assistant", analysis + final + "<|return|>" if scene.is_last else final + "<|end|>")


ORACLES: dict[str, Callable[[Scene], Turn]] = {
    "tokenizers/smollm2/chat_template": chatml,
    "templates/axolotl/chatml": chatml,
    "templates/axolotl/mistral_v1": mistral_v1,
    "templates/axolotl/mistral_v2v3": mistral_v3,
    "templates/axolotl/phi_4": phi4,
    "templates/llama_cpp/HuggingFaceTB-SmolLM3-3B": smollm3,
    "templates/llama_cpp/Qwen-Qwen2.5-7B-Instruct": qwen25,
    "templates/llama_cpp/Qwen-Qwen3-0.6B": qwen3,
    "templates/llama_cpp/Qwen3.5-4B": qwen35,
    "templates/llama_cpp/deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": deepseek_r1,
    "templates/llama_cpp/deepseek-ai-DeepSeek-V3.1": deepseek_v31,
    "templates/llama_cpp/microsoft-Phi-3.5-mini-instruct": phi3,
    "templates/llama_cpp/mistralai-Mistral-Nemo-Instruct-2407": nemo,
    "templates/llama_cpp/openai-gpt-oss-120b": gpt_oss,
    "templates/trl/phi3": phi3,
    "templates/trl/phi3_training": phi3_training,
    "templates/trl/qwen2_5": qwen25,
    "templates/trl/qwen2_5_training": qwen25_training,
    "templates/trl/qwen3": qwen3,
    "templates/trl/qwen3_training": qwen3_training,
}


def place(name: str, messages: list[Message], text: str, eos: str) -> list[tuple[int, int]]:
    """The character spans of all assistant turns in ``text``, weight 0 ones too. Fails where one is not there."""
    at, spans = 0, []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            if message["role"] == "user":
                at = _behind(text, message["content"].strip(), at)
            continue
        turn = ORACLES[name](Scene(messages, index, eos))
        end = _behind(text, turn.header + turn.trained, at)
        spans.append((end - len(turn.trained), end))
        at = end
    return spans


def _behind(text: str, part: str, at: int) -> int:
    found = text.find(part, at)
    assert found >= 0, f"{part!r} is not behind {at} in {text!r}"
    return found + len(part)


def _thought(scene: Scene) -> tuple[str, str]:
    """The thinking and the answer, from the field or from think tags in the content."""
    if scene.message.get("reasoning_content"):
        return str(scene.message["reasoning_content"]), scene.content
    if "</think>" not in scene.content:
        return "", scene.content
    parts = scene.content.split("</think>")
    return parts[0].rstrip("\n").split("<think>")[-1].lstrip("\n"), parts[-1].lstrip("\n")


def _last_question(scene: Scene) -> int:
    asked = [i for i, message in enumerate(scene.messages) if message["role"] == "user"]
    return asked[-1] if asked else len(scene.messages) - 1


def _call_tag(call: Message) -> str:
    return f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {_json(call["arguments"])}}}\n</tool_call>'


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return _json(value) if isinstance(value, (dict, list)) else str(value)
