"""``kiln teacher``: who may score rows for a distillation, and the scores.

An alias is pinned to one identity in ``teachers.json`` of the registry directory. A corpus names the identity in its
first line; admission takes it only where the two are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kiln_cli.errors import KilnError, not_built
from kiln_cli.terminal import table, terminal
from kiln_cli.text import block, printable
from kiln_stages.distilling import local_identity
from kiln_stages.distilling.registry import (
    DEFAULT_DIRECTORY,
    FILE_NAME,
    Registry,
    Teacher,
    read_registry,
    require_alias,
)
from kiln_stages.distilling.registry import register as add_to_registry

AliasArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="What the teacher goes by.")]
RegistryOption = Annotated[Path, typer.Option("--registry", help="The directory that teachers.json lies in.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
SHOWN_DIGITS = 12  # of a revision, in the list


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """``unchanged``: the alias was pinned to exactly this before."""

    schema: str = "kiln.teacher-registration.v1"
    teacher: Teacher
    unchanged: bool


class Difference(msgspec.Struct, frozen=True):
    """A field of the identity, or of what ``inference_config_sha256`` is made of."""

    field: str
    pinned: object
    found: object


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """What the alias is pinned to against what its files give now; ``differences`` is empty where it holds."""

    schema: str = "kiln.teacher-verification.v1"
    alias: str
    content_revision: str
    differences: list[Difference]


def command() -> None:
    """Register teachers, show and check who they are, and have one score rows for a distillation."""


def register(
    alias: AliasArgument,
    model: Annotated[Path | None, typer.Option("--model", help="A local model directory.")] = None,
    adapter: Annotated[Path | None, typer.Option("--adapter", help="A LoRA that it wears, in PEFT's layout.")] = None,
    endpoint: Annotated[str | None, typer.Option("--endpoint", metavar="URL", help="A server instead.")] = None,
    served_model_id: Annotated[
        str | None, typer.Option("--served-model-id", help="Its name in manifests; the directory's if left out.")
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype", help="What it computes in.")] = "float32",
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="What it runs on.")] = "cpu",
    max_top_k: Annotated[int | None, typer.Option("--max-top-k", min=1, help="Candidates a position; 32.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", min=1, help="Tokens a row; the model's positions.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Pin the alias to another identity.")] = False,
    registry: RegistryOption = DEFAULT_DIRECTORY,
    json: JsonOption = False,
) -> None:
    """Pin an alias to a model's files, or to what a server says of itself."""
    if (model is None) == (endpoint is None):
        raise KilnError("KLN201", "give one of --model and --endpoint", hint="kiln teacher register ALIAS --model DIR")
    if model is None:
        raise not_built("a teacher behind a server", "register a model directory")
    found = local_identity.identify(
        model,
        adapter,
        served_model_id=served_model_id,
        max_top_k=max_top_k,
        max_model_len=max_model_len,
        dtype=dtype,
        device_type=device,
    )
    result = run_register(alias, found, registry, replace=replace)
    if json:
        terminal.json_data(result)
    state = "unchanged" if result.unchanged else "registered"
    terminal.say(f"{state}: {printable(alias)}\n{_facts(result.teacher)}")


def list_teachers(registry: RegistryOption = DEFAULT_DIRECTORY, json: JsonOption = False) -> None:
    """List the registered teachers."""
    known = read_registry(registry)
    if json:
        terminal.json_data({"schema": "kiln.teacher-list.v1", "teachers": list(known.teachers.values())})
        return
    if not known.teachers:
        terminal.say(f"no teacher in {printable(registry / FILE_NAME)}")
        return
    head: list[object] = ["alias", "model", "adapter", "vocabulary", "top K", "revision", "where"]
    terminal.data(table([head, *map(_row, known.teachers.values())], indent=""))


def manifest(alias: AliasArgument, registry: RegistryOption = DEFAULT_DIRECTORY) -> None:
    """Print the manifest line of a teacher: the first line of every corpus that it scores."""
    terminal.data(read_registry(registry).get(alias).identity.manifest_line().decode("utf-8"))


def verify(alias: AliasArgument, registry: RegistryOption = DEFAULT_DIRECTORY, json: JsonOption = False) -> None:
    """Derive a teacher's identity again from its files, and compare it with what its alias is pinned to."""
    result = run_verify(alias, registry)
    if json:
        terminal.json_data(result)
    if not result.differences:
        terminal.say(f"holds: {printable(alias)} is {result.content_revision}")
        return
    lines = [f"  {each.field}: pinned {_shown(each.pinned)}, found {_shown(each.found)}" for each in result.differences]
    terminal.say("\n".join([f"differs: {printable(alias)} is not what its alias is pinned to", *lines]))
    raise typer.Exit(1)


VERBS = {"register": register, "list": list_teachers, "manifest": manifest, "verify": verify}


def run_register(
    alias: str, found: local_identity.LocalTeacher, registry: Path = DEFAULT_DIRECTORY, *, replace: bool = False
) -> Registered:
    """Pins the alias to a teacher that was identified.

    Raises KilnError KLN201 for a text that is no alias, KLN219 where it is pinned to another identity, KLN206/401/402
    as :func:`kiln_stages.distilling.registry.register` does.
    """
    where = Registry(registry, {})
    place = msgspec.structs.replace(
        found.model,
        model=where.written(Path(found.model.model)),
        adapter=None if found.model.adapter is None else where.written(Path(found.model.adapter)),
    )
    teacher = Teacher(
        alias=require_alias(alias),
        content_revision=found.identity.content_revision(),
        identity=found.identity,
        local=place,
        endpoint=None,
    )
    return Registered(teacher=teacher, unchanged=not add_to_registry(registry, teacher, replace=replace))


def run_verify(alias: str, registry: Path = DEFAULT_DIRECTORY) -> Verified:
    """Raises KilnError KLN212 for an unknown alias, KLN302 and others where its files cannot be read."""
    known = read_registry(registry)
    teacher = known.get(alias)
    assert teacher.local is not None, "a served teacher cannot be registered"
    found = local_identity.identify_again(teacher.identity, teacher.local, *_directories(known, teacher))
    differences = [
        *teacher.identity.differences(found.identity),
        *local_identity.inference_differences(teacher.local, found.model),
    ]
    return Verified(
        alias=alias,
        content_revision=teacher.content_revision,
        differences=[Difference(*each) for each in differences],
    )


def _directories(known: Registry, teacher: Teacher) -> tuple[Path, Path | None]:
    assert teacher.local is not None
    adapter = teacher.local.adapter
    return known.resolve(teacher.local.model), None if adapter is None else known.resolve(adapter)


def _row(teacher: Teacher) -> list[object]:
    identity = teacher.identity
    adapter = "" if identity.adapter is None else identity.adapter.name
    where = teacher.local.model if teacher.local is not None else teacher.endpoint.url if teacher.endpoint else ""
    revision = teacher.content_revision[:SHOWN_DIGITS]
    return [
        teacher.alias, identity.served_model_id, adapter, identity.vocab_size, identity.max_top_k, revision, where,
    ]  # fmt: skip


def _facts(teacher: Teacher) -> str:
    identity = msgspec.to_builtins(teacher.identity)
    rows: list[list[object]] = [[field, _shown(value)] for field, value in identity.items() if value is not None]
    return table([["revision", teacher.content_revision], *rows])


def _shown(value: object) -> str:
    return block(printable(value, 300))
