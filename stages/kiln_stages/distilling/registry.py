"""Registered teachers: ``teachers.json`` in the registry directory, one JSON document, written whole and under a lock.

An entry pins an identity to an alias and says where the teacher is: a model directory, or a server. It never holds a
key, only the name of the environment variable or file that has it. Paths in it are absolute, or count from the
registry directory, so that a project can be moved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import run_lock, write_file
from kiln_cli.manifests import damaged, document, read_document
from kiln_cli.text import printable
from kiln_stages.distilling.identity import TeacherIdentity

FILE_NAME = "teachers.json"
SCHEMA = "kiln.teachers.v1"
DEFAULT_DIRECTORY = Path(".kiln")
ALIAS = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@:/+-]{0,255}\Z")


class LocalModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A teacher that runs here, through transformers. ``model`` and ``adapter`` are directories.

    The last five settings are those that ``inference_config_sha256`` of the identity is made of.
    """

    model: str
    adapter: str | None
    attention: str
    device_type: str
    dtype: str
    torch: str
    transformers: str


class Endpoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A teacher behind an OpenAI-compatible server. ``url`` is what ``/v1/completions`` is put behind.

    The key, if there is one, is the value of the environment variable ``key_env`` or the text of ``key_file``.
    ``identity_from``: the server itself, or a file that the user gave.
    """

    url: str
    key_env: str | None
    key_file: str | None
    identity_from: str


class Teacher(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An alias and what it is pinned to; of ``local`` and ``endpoint`` exactly one is there."""

    alias: str
    content_revision: str
    identity: TeacherIdentity
    local: LocalModel | None
    endpoint: Endpoint | None


class TeachersFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The document. Teachers stand in the order of their aliases."""

    schema: str = SCHEMA
    teachers: list[Teacher]


class Registry(msgspec.Struct, frozen=True):
    """The teachers of one registry directory, by alias."""

    directory: Path
    teachers: dict[str, Teacher]

    def get(self, alias: str) -> Teacher:
        """Raises KilnError KLN212 for an alias that is not registered, with those that are."""
        if alias in self.teachers:
            return self.teachers[alias]
        known = ", ".join(map(printable, self.teachers)) or "none"
        raise KilnError(
            "KLN212",
            f"no teacher {printable(alias)!r} in {printable(self.directory / FILE_NAME)}; registered are: {known}",
            hint="`kiln teacher register ALIAS` registers one; --registry names another directory",
        )

    def resolve(self, path: str) -> Path:
        """A path of an entry, as seen from the working directory."""
        return Path(os.path.normpath(self.directory / path))

    def written(self, path: Path) -> str:
        """A path of the command line, as an entry keeps it."""
        return str(path) if path.is_absolute() else os.path.relpath(path, self.directory)


def read_registry(directory: Path) -> Registry:
    """An absent file is an empty registry. Raises KilnError KLN206 where the file contradicts itself."""
    path = directory / FILE_NAME
    if not path.exists():
        return Registry(directory, {})
    found = read_document(path, TeachersFile, SCHEMA).teachers
    for teacher in found:
        for fault in _faults(teacher):
            raise damaged(path, f"teacher {teacher.alias}: {fault}")
    aliases = [teacher.alias for teacher in found]
    if aliases != sorted(set(aliases)):
        raise damaged(path, "aliases are not in order, or one stands twice")
    return Registry(directory, {teacher.alias: teacher for teacher in found})


def register(directory: Path, teacher: Teacher, *, replace: bool = False) -> bool:
    """Adds the teacher, or replaces what its alias was pinned to; False where nothing changed.

    The alias may be given another place of the same identity freely (a moved model directory), another identity only
    with ``replace``. Raises KilnError KLN201 for a text that is no alias or a name that no terminal can show, KLN219
    for another identity, KLN401 where another process writes, KLN402 where the disk refuses.
    """
    require_alias(teacher.alias)
    _require_shown(teacher.identity)
    with run_lock(directory, "kiln teacher register", "name another --registry", nested=False):
        registry = read_registry(directory)
        before = registry.teachers.get(teacher.alias)
        if before is not None and before.identity != teacher.identity and not replace:
            raise _taken(before, teacher)
        everyone = registry.teachers | {teacher.alias: teacher}
        ordered = [everyone[alias] for alias in sorted(everyone)]
        written = write_file(directory / FILE_NAME, document(TeachersFile(teachers=ordered)))
    return not written.unchanged


def require_alias(alias: str) -> str:
    """Raises KilnError KLN201 where the text is no alias."""
    if ALIAS.match(alias) is None:
        raise KilnError(
            "KLN201",
            f"{printable(alias)!r} is no alias for a teacher",
            hint="use letters, digits and . _ @ : / + -, at most 256, beginning with a letter, a digit or _",
        )
    return alias


def _require_shown(identity: TeacherIdentity) -> None:
    """Names go to terminals byte for byte, in the manifest line: nothing in them may act on one."""
    line = identity.manifest_line().decode("utf-8")
    if printable(line, len(line)) != line:
        raise KilnError(
            "KLN201",
            f"a name of the identity holds a control or invisible character: {printable(line, 300)}",
            hint="names stand in the manifest line as they are; choose one of visible characters",
        )


def difference_lines(pinned: TeacherIdentity, other: TeacherIdentity) -> list[str]:
    """Each field that differs with both values, a line each."""
    return [
        f"  {field}: pinned {printable(here, 300)}, found {printable(there, 300)}"
        for field, here, there in pinned.differences(other)
    ]


def _faults(teacher: Teacher) -> Iterator[str]:
    yield from teacher.identity.faults()
    if (found := teacher.identity.content_revision()) != teacher.content_revision:
        yield f"content_revision is {teacher.content_revision}, its identity has {found}"
    if ALIAS.match(teacher.alias) is None:
        yield "its alias is no alias"
    if (teacher.local is None) == (teacher.endpoint is None):
        yield "expected one of local and endpoint"


def _taken(before: Teacher, teacher: Teacher) -> KilnError:
    lines = "\n".join(difference_lines(before.identity, teacher.identity))
    return KilnError(
        "KLN219",
        f"the alias {printable(teacher.alias)} is pinned to another identity:\n{lines}",
        hint="take another alias, or --replace; corpora that the old one scored will then be refused",
        details={
            "differences": [
                {"field": field, "pinned": here, "found": there}
                for field, here, there in before.identity.differences(teacher.identity)
            ]
        },
    )
