"""Rows of one question and one answer as conversations: Alpaca, question/answer, seed tasks, prepared examples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from kiln_cli import ChatRow, RowFault, Source, hookimpl, strict_json
from kiln_cli.chat import misfit
from kiln_cli.chat_fields import chat_row, text
from kiln_cli.counting import counted
from kiln_cli.prepared_chat import native_row
from kiln_cli.records import PREPARED_SCHEMA, Call, PreparedExample, Tool
from kiln_cli.text import printable

# Rows with these hold a conversation of their own, whatever stands beside it.
_CONVERSATIONS = ("messages", "conversations")
# Without these a question may have no answer, and an answer that is a letter no sense.
_BESIDE_A_QUESTION = ("context", "choices", "options")


@hookimpl
def kiln_sources() -> Iterable[Source]:
    return (ALPACA, QUESTION_ANSWER, SELF_INSTRUCT, PREPARED)


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def _asked(instruction: str, given: str) -> str:
    """The instruction, and on the next line what it is to be applied to, if anything."""
    return f"{instruction}\n{given}" if given else instruction


def _field(record: dict[str, Any], *names: str) -> tuple[str, object]:
    """The field under the first of its names that the row has, null aside; two that differ are refused."""
    found = [(name, record[name]) for name in names if record.get(name) is not None]
    filled = [(name, value) for name, value in found if value != ""]
    if len(filled) == 2 and filled[0][1] != filled[1][1]:
        detail = f"conflicting_fields: the row has both {filled[0][0]} and {filled[1][0]}"
        raise RowFault("invalid_json", detail, f"/{filled[1][0]}")
    return next(iter([*filled, *found]), (names[0], record.get(names[0], msgspec.UNSET)))


def _convert_alpaca(record: dict[str, Any]) -> ChatRow:
    messages = []
    if record.get("system") not in (None, ""):
        messages.append({"role": "system", "content": text(record["system"], "/system")})
    messages += _history(record.get("history"))
    instruction = text(record.get("instruction", msgspec.UNSET), "/instruction")
    given, value = _field(record, "input", "context")
    given = "" if value in (None, msgspec.UNSET) else text(value, f"/{given}")
    messages.append(_user(_asked(instruction, given)))
    answer, value = _field(record, "output", "response")
    messages.append(_assistant(text(value, f"/{answer}")))
    known = {"system", "history", "instruction", "input", "context", "output", "response"}
    return chat_row(messages, None, record.keys() - known)


def _history(value: object) -> list[dict[str, Any]]:
    """Earlier turns: pairs of what was asked and what was answered. They are trained on like the last one."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise misfit("/history", "an array of pairs", value)
    messages = []
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            found = counted(len(pair), "entry", "entries") if isinstance(pair, list) else "no array"
            detail = f"wrong_type: expected a pair of question and answer, found {found}"
            raise RowFault("invalid_json", detail, f"/history/{index}")
        asked, answered = (text(item, f"/history/{index}/{place}") for place, item in enumerate(pair))
        messages += [_user(asked), _assistant(answered)]
    return messages


def _convert_question_answer(record: dict[str, Any]) -> ChatRow:
    question, answer = (text(record.get(name, msgspec.UNSET), f"/{name}") for name in ("question", "answer"))
    return chat_row([_user(question), _assistant(answer)], None, record.keys() - {"question", "answer"})


def _convert_self_instruct(record: dict[str, Any]) -> ChatRow:
    instances = record.get("instances", msgspec.UNSET)
    if not isinstance(instances, list):
        raise misfit("/instances", "an array with one instance", instances)
    if len(instances) != 1:
        detail = f"several_instances: a row becomes one conversation, and this one has {len(instances)} instances"
        raise RowFault("invalid_json", detail, "/instances")
    instance = instances[0]
    if not isinstance(instance, dict):
        raise misfit("/instances/0", "an object with input and output", instance)
    instruction = text(record.get("instruction", msgspec.UNSET), "/instruction")
    given = text("" if instance.get("input") is None else instance["input"], "/instances/0/input")
    answer = text(instance.get("output", msgspec.UNSET), "/instances/0/output")
    ignored = record.keys() - {"instruction", "instances"}
    ignored |= {f"instances[].{key}" for key in instance.keys() - {"input", "output"}}
    return chat_row([_user(_asked(instruction, given)), _assistant(answer)], None, ignored)


def _convert_prepared(record: dict[str, Any]) -> ChatRow:
    """The row that ``kiln admit`` makes of the example where the template prints tools. Ids and digests are no text of
    the conversation, and known."""
    found = record.get("schema_version", msgspec.UNSET)
    if found != PREPARED_SCHEMA:
        shown = "nothing" if found is msgspec.UNSET else printable(repr(found))
        detail = f"wrong_type: schema_version is {shown}, expected {PREPARED_SCHEMA!r}"
        raise RowFault("invalid_json", detail, "/schema_version")
    try:
        row = native_row(msgspec.convert(record, PreparedExample))
    except msgspec.ValidationError as error:
        found = str(error).replace(strict_json.WideDouble.__name__, float.__name__)  # a detail of the parser
        raise RowFault("invalid_json", f"wrong_type: no prepared example: {printable(found)}") from None
    ignored = {
        f"{field}[].{key}"
        for field, kind in (("tools", Tool), ("gold_calls", Call))
        for entry in record[field]
        for key in entry.keys() - set(kind.__struct_fields__)
    }
    return msgspec.structs.replace(row, ignored=tuple(sorted(ignored)))


def _has_conversation(record: dict[str, Any]) -> bool:
    return "schema_version" in record or any(field in record for field in _CONVERSATIONS)


def _recognise_alpaca(record: dict[str, Any]) -> str | None:
    fits = "instruction" in record and ("output" in record or "response" in record)
    return "has instruction and output" if fits and not _has_conversation(record) else None


def _recognise_question_answer(record: dict[str, Any]) -> str | None:
    if _has_conversation(record) or any(field in record for field in ("instruction", *_BESIDE_A_QUESTION)):
        return None
    return "has question and answer" if "question" in record and "answer" in record else None


def _recognise_self_instruct(record: dict[str, Any]) -> str | None:
    fits = "instruction" in record and isinstance(record.get("instances"), list)
    other = _has_conversation(record) or _recognise_alpaca(record) is not None
    return "has instruction and instances" if fits and not other else None


def _recognise_prepared(record: dict[str, Any]) -> str | None:
    return f"schema_version is {PREPARED_SCHEMA}" if record.get("schema_version") == PREPARED_SCHEMA else None


ALPACA = Source(
    name="alpaca",
    doc="instruction, input on the line below it, output (or context, response); system and history if given",
    yields="chat",
    convert=_convert_alpaca,
    recognise=_recognise_alpaca,
)
QUESTION_ANSWER = Source(
    name="question_answer",
    doc="question and answer",
    yields="chat",
    convert=_convert_question_answer,
    recognise=_recognise_question_answer,
)
SELF_INSTRUCT = Source(
    name="self_instruct",
    doc="instruction and one instance of input and output; a row with several instances is refused",
    yields="chat",
    convert=_convert_self_instruct,
    recognise=_recognise_self_instruct,
)
PREPARED = Source(
    name="prepared",
    doc=f"rows of {PREPARED_SCHEMA}, with tools and calls in the template's own format",
    yields="chat",
    convert=_convert_prepared,
    recognise=_recognise_prepared,
)
