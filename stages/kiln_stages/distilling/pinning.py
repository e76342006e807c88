"""What an alias is pinned to: files that are read, or what a server says; and whether that is still so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.files import read_bounded
from kiln_cli.text import printable
from kiln_stages.distilling import local_identity
from kiln_stages.distilling.identity import IdentityFault, TeacherIdentity, parse_identity
from kiln_stages.distilling.registry import (
    DEFAULT_DIRECTORY,
    Endpoint,
    LocalModel,
    Registry,
    Teacher,
    register,
    require_alias,
)

if TYPE_CHECKING:  # the one module that opens sockets is imported where a server is asked
    from kiln_stages.distilling.scoring_endpoint import Server

IDENTITY_LIMIT = 64 * 1024


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


def register_local(
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
    return _pin(require_alias(alias), found.identity, registry, local=place, replace=replace)


def register_endpoint(
    alias: str,
    url: str,
    registry: Path = DEFAULT_DIRECTORY,
    *,
    identity: Path | None = None,
    key_env: str | None = None,
    key_file: Path | None = None,
    replace: bool = False,
) -> Registered:
    """Pins the alias to the identity that the server gives, or that the file ``identity`` holds.

    Raises KilnError KLN204/206 for a file without an identity, KLN220/404 as the server answers, and as
    :func:`register_local` does.
    """
    from kiln_stages.distilling import scoring_endpoint as served

    require_alias(alias)
    served.check_url(url)
    where = Registry(registry, {})
    endpoint = Endpoint(
        url=url,
        key_env=key_env,
        key_file=None if key_file is None else where.written(key_file),
        identity_from="server" if identity is None else "file",
    )
    if identity is None:
        found = served.identity_of(server_of(where, endpoint), alias)
    else:
        found = served.require_served(_identity_in(identity))
    return _pin(alias, found, registry, endpoint=endpoint, replace=replace)


def differences(known: Registry, teacher: Teacher) -> list[Difference]:
    """What the alias is pinned to against what its files are, or what its server says, now; empty where it holds.

    Raises KilnError KLN103 where nothing but a file of the user's says who it is, KLN302 and others where its files
    cannot be read, KLN220/404 as its server answers.
    """
    if teacher.endpoint is not None:
        pairs = teacher.identity.differences(_served_identity(known, teacher.alias, teacher.endpoint))
    else:
        assert teacher.local is not None, "an entry has one of the two"
        found = local_identity.identify_again(teacher.identity, teacher.local, *directories(known, teacher.local))
        pairs = [
            *teacher.identity.differences(found.identity),
            *local_identity.inference_differences(teacher.local, found.model),
        ]
    return [Difference(*pair) for pair in pairs]


def directories(known: Registry, place: LocalModel) -> tuple[Path, Path | None]:
    """Of the model and of its adapter, as seen from the working directory."""
    return known.resolve(place.model), None if place.adapter is None else known.resolve(place.adapter)


def server_of(known: Registry, endpoint: Endpoint, timeout: float = 60.0) -> Server:
    """The server of an entry, with its key. Raises KilnError KLN220 where the key is not where the entry says."""
    from kiln_stages.distilling.scoring_endpoint import Server, read_key

    key_file = None if endpoint.key_file is None else known.resolve(endpoint.key_file)
    return Server(endpoint.url, read_key(endpoint, key_file), timeout)


def _served_identity(known: Registry, alias: str, endpoint: Endpoint) -> TeacherIdentity:
    if endpoint.identity_from != "server":
        raise KilnError(
            "KLN103",
            f"{printable(alias)} cannot be verified: its identity came from a file, and its server gives none",
            hint="register it again with the manifest of the deployment that scores now",
        )
    from kiln_stages.distilling.scoring_endpoint import identity_of

    return identity_of(server_of(known, endpoint), alias)


def _identity_in(path: Path) -> TeacherIdentity:
    try:
        return parse_identity(read_bounded(path, IDENTITY_LIMIT))
    except IdentityFault as fault:
        raise KilnError(
            "KLN206",
            f"{printable(path)} holds no teacher identity: {fault}",
            hint="give a manifest line, an identity as JSON, or a fingerprint, as the server writes it",
        ) from None


def _pin(
    alias: str,
    identity: TeacherIdentity,
    registry: Path,
    *,
    local: LocalModel | None = None,
    endpoint: Endpoint | None = None,
    replace: bool,
) -> Registered:
    teacher = Teacher(
        alias=alias,
        content_revision=identity.content_revision(),
        identity=identity,
        local=local,
        endpoint=endpoint,
    )
    return Registered(teacher=teacher, unchanged=not register(registry, teacher, replace=replace))
