"""Corrections that are given to the store: a new one goes to the top, one with a known request id changes its line.

What is given takes the place of what stood there, member by member; what is not given stays, the marker of a training
in any case. All of it is checked before anything is written.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from kiln_cli import strict_json
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.lines import LINE_CAP, LineReader
from kiln_cli.text import printable
from kiln_cli.white_space import trimmed
from kiln_stages.correcting.correction import MARKER, Correction
from kiln_stages.correcting.json_members import values
from kiln_stages.correcting.store import Line, Store, changing
from kiln_stages.reading.sources import json_lines
from kiln_stages.reading.transports import open_plain

FAULTS_SHOWN = 20
# Of a correction that is new: what must be given, and what is taken where a field is not.
REQUIRED = ("request_id", "user", "ideal")
DEFAULTS = {"agent": '"unknown"', "adapter": "null", "original": '""', "truncated": "false"}
_ORDER = [name for name in Correction.__struct_fields__ if name not in MARKER]


class GivenCorrection(NamedTuple):
    """Members by key, as JSON text; ``where`` they come from, for messages."""

    where: str
    members: dict[str, str]


class Added(msgspec.Struct, kw_only=True):
    """Request ids by what became of them. ``markers``: of those that brought a marker of training, which is left out:
    training alone writes it. ``stale``: of those whose texts are not the ones any more that their marker speaks of."""

    schema: str = "kiln.corrections-added.v1"
    store: str
    added: list[str] = []
    changed: list[str] = []
    unchanged: list[str] = []
    markers: list[str] = []
    stale: list[str] = []
    unfit: dict[str, str] = {}


def given_fields(fields: Mapping[str, object]) -> GivenCorrection:
    """A correction of fields as Python values; None stands for a field that is not given. Raises KilnError KLN204."""
    members = {}
    for key, value in fields.items():
        try:
            if value is not None:
                members[key] = msgspec.json.encode(value).decode()
        except UnicodeEncodeError:
            raise KilnError("KLN204", f"{key} is no UTF-8", hint="give the correction in a file, as JSON") from None
    return GivenCorrection("the correction", members)


@contextmanager
def given_file(path: Path | None, scratch: Path) -> Iterator[Iterable[GivenCorrection]]:
    """The corrections of a file, packed or not, or of standard input (None). Raises KilnError as ``open_plain`` does,
    and KLN204 with every line that is no object, KLN107 where there is none."""
    label = "standard input" if path is None else printable(path)
    with open_plain(path, scratch) as plain:
        faults, found = [], []
        for record in json_lines(LineReader(plain.stream, hashed=False)):
            where = f"{label} line {record.line}"
            try:
                found.append(GivenCorrection(where, _members(record.text)))
            except strict_json.JsonFault as fault:
                faults.append(f"{where}: {fault.kind}: {fault.detail}")
        _refuse(faults)
        if not found:
            raise KilnError("KLN107", f"{label} holds no corrections", hint="one JSON object a line")
        yield found


def add(path: Path, given: Iterable[GivenCorrection], *, retrain: bool = False) -> Added:
    """Puts corrections into the store at ``path``. ``retrain``: drop their markers, so that they are active again.

    Raises KilnError KLN204 with every correction that is none, and nothing is written; KLN401 and KLN402 as
    ``changing`` does.
    """
    done = Added(store=str(path))
    faults = []
    with changing(path, "kiln corrections add") as store:
        for one in given:
            try:
                _add_one(store, one, retrain, done)
            except RowFault as fault:
                faults.append(f"{one.where}: {fault.detail}")
        _refuse(faults)
    return done


def _add_one(store: Store, given: GivenCorrection, retrain: bool, done: Added) -> None:
    request_id = _request_id(given)
    members = {key: value for key, value in given.members.items() if key not in MARKER}
    if any(given.members.get(key, "null") != "null" for key in MARKER):
        done.markers.append(request_id)
    line = store.get(request_id)
    if line is None:
        line = store.add(_new_text(members))
        done.added.append(request_id)
    else:
        changed = store.set_members(line, _that_differ(line, members))
        changed |= retrain and store.clear_marker(line)
        (done.changed if changed else done.unchanged).append(request_id)
    correction = line.correction
    assert correction is not None
    if not trimmed(correction.user):
        raise RowFault("malformed", "user is blank", "/user")
    if correction.state() == "stale":
        done.stale.append(request_id)
    elif reason := correction.unfit():
        done.unfit[request_id] = reason


def _request_id(given: GivenCorrection) -> str:
    value = strict_json.parse(given.members.get("request_id", "null").encode("utf-8"))
    if not isinstance(value, str):
        found = strict_json.type_name(value) if "request_id" in given.members else "nothing"
        raise RowFault("malformed", f"request_id must be a string, found {found}", "/request_id")
    return value


def _new_text(members: Mapping[str, str]) -> str:
    """The line of a new correction: its fields in the order of the contract, then what it has beside them."""
    if missing := [name for name in REQUIRED if name not in members]:
        raise RowFault("malformed", f"a new correction needs {' and '.join(missing)}", f"/{missing[0]}")
    now = msgspec.json.encode(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())).decode()
    whole = DEFAULTS | {"created_at": now} | dict(members)
    ordered = [*_ORDER, *(key for key in members if key not in _ORDER)]
    return "{" + ",".join(f"{msgspec.json.encode(key).decode()}:{whole[key]}" for key in ordered) + "}"


def _that_differ(line: Line, members: Mapping[str, str]) -> dict[str, str]:
    """The members that say something else than the line does: an escape written otherwise is no change."""
    there = values(line.text.decode("utf-8"))
    return {key: value for key, value in members.items() if not _same(there.get(key), value)}


def _same(left: str | None, right: str) -> bool:
    if left is None or left == right:
        return left == right
    texts = [strict_json.parse(text.encode("utf-8")) for text in (left, right)]
    return isinstance(texts[0], str) and texts[0] == texts[1]


def _members(text: bytes | None) -> dict[str, str]:
    if text is None:
        raise strict_json.JsonFault("syntax", f"the line is longer than {LINE_CAP} bytes")
    strict_json.parse_object(text)
    return values(text.decode("utf-8"))


def _refuse(faults: list[str]) -> None:
    if faults:
        shown = [printable(fault) for fault in faults[:FAULTS_SHOWN]]
        more = [f"and {len(faults) - FAULTS_SHOWN} more"] if len(faults) > FAULTS_SHOWN else []
        plural = "correction is" if len(faults) == 1 else "corrections are"
        raise KilnError(
            "KLN204",
            f"{len(faults)} {plural} refused, and nothing is added:\n  " + "\n  ".join([*shown, *more]),
            hint="mend what is listed; docs/artifacts.md, *corrections*, has the fields",
            details={"faults": faults},
        )
