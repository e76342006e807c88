"""What must hold before an example of a scored corpus is read: whose scores they are, and whose tokens.

The manifest line is canonical; its identity is the one that the alias pins, whole; its tokenizer is the student's; and
it gives as many candidates as the loss takes.
"""

from __future__ import annotations

from typing import NoReturn

import msgspec

from kiln_cli.config import LoadedConfig
from kiln_cli.distillation import DistillConfig, resolve_top_k
from kiln_cli.errors import KilnError
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Contract
from kiln_stages.distilling.corpus import FirstRecord
from kiln_stages.distilling.identity import LOCAL_PROTOCOL, IdentityFault, TeacherIdentity, parse_manifest
from kiln_stages.distilling.judging import Judge
from kiln_stages.distilling.registry import Teacher, difference_lines, read_registry
from kiln_stages.distilling.targets import TargetFinder
from kiln_stages.distilling.tokenizers import tokenizer_identity, vocabulary_size

REFUSED = "KLN112"


class Binding(msgspec.Struct, frozen=True, kw_only=True):
    """``top_k``: candidates that are read of each token. ``vocabulary``: ids are below it.
    ``tokenizer_config``: whether the teacher's tokenizer settings are the student's: "same", "other", or
    "not comparable" where a server digested them by a rule of its own."""

    alias: str
    identity: TeacherIdentity
    top_k: int
    vocabulary: int
    tokenizer_config: str
    judge: Judge


def pinned_teacher(config: LoadedConfig) -> Teacher:
    """The registered teacher of ``[distill] teacher``.

    Raises KilnError: KLN201 where none is named, KLN212 where the alias is not registered.
    """
    alias = config.run.distill.teacher
    if alias is None:
        raise KilnError(
            "KLN201",
            "a scored corpus needs the alias of its teacher",
            hint="--teacher ALIAS or [distill] teacher; `kiln teacher list` lists them",
        )
    return read_registry(config.resolve(config.run.admit.registry)).get(alias)


def bind(config: LoadedConfig, contract: Contract, record: FirstRecord, path: str) -> Binding:
    """Raises KilnError: KLN112 with what does not agree, both values shown; those of :func:`pinned_teacher`; KLN302 for
    a model directory that states no vocabulary."""
    settings, place = config.run.distill, f"{path}:{record.number}"
    try:
        identity = parse_manifest(record.line)
    except IdentityFault as fault:
        _refuse(place, "manifest_invalid", str(fault), "take the line from `kiln teacher manifest ALIAS`, as it is")
    pinned = pinned_teacher(config)
    if identity != pinned.identity:
        _refuse(
            place,
            "teacher_identity_mismatch",
            f"the corpus was not scored by the teacher that {printable(pinned.alias)} is pinned to:\n"
            + "\n".join(difference_lines(pinned.identity, identity)),
            "register the teacher that scored it under another alias, or score again",
        )
    tokenizer_config = _require_tokenizer(settings, contract, identity, place)
    vocabulary = min(identity.vocab_size, vocabulary_size(contract.files.directory))
    top_k = resolve_top_k(settings.top_k, identity.max_top_k, vocabulary)
    if top_k is None:
        _refuse(
            place,
            "top_k_unavailable",
            f"the loss takes 16 or 32 candidates; asked for are {settings.top_k}, the teacher gives at most "
            f"{identity.max_top_k}, the vocabulary has {vocabulary}",
            "score again with a teacher that gives 16 or more",
        )
    require_ids = settings.require_token_ids or tokenizer_config == "other"
    judge = Judge(TargetFinder(contract, settings.echo), top_k, vocabulary, require_ids=require_ids)
    return Binding(
        alias=pinned.alias,
        identity=identity,
        top_k=top_k,
        vocabulary=vocabulary,
        tokenizer_config=tokenizer_config,
        judge=judge,
    )


def _require_tokenizer(settings: DistillConfig, contract: Contract, identity: TeacherIdentity, place: str) -> str:
    """Ids mean the same on both sides if the vocabularies are one; sizes of output layers say nothing about that.

    Settings and chat template decide how a text is cut. The digest of a served teacher follows a rule of its server.
    """
    student = tokenizer_identity(contract.files)
    if identity.tokenizer_vocab_sha256 != student.vocab_sha256:
        _refuse(
            place,
            "tokenizer_mismatch",
            f"the teacher's vocabulary has tokenizer_vocab_sha256 {identity.tokenizer_vocab_sha256}, the student's "
            f"{student.vocab_sha256}: its ids name other tokens",
            "distil into a student with the teacher's tokenizer",
        )
    if identity.protocol != LOCAL_PROTOCOL:
        return "not comparable"
    if identity.tokenizer_config_sha256 == student.config_sha256:
        return "same"
    if not settings.other_tokenizer_config:
        _refuse(
            place,
            "tokenizer_mismatch",
            f"the teacher's tokenizer settings and chat template have tokenizer_config_sha256 "
            f"{identity.tokenizer_config_sha256}, the student's {student.config_sha256}",
            "[distill] other_tokenizer_config = true takes such a corpus if every scored token names its token_id",
        )
    return "other"


def _refuse(place: str, code: str, detail: str, hint: str) -> NoReturn:
    file, _, line = place.rpartition(":")
    fault = {"file": file, "line": int(line), "example": 0, "code": code, "pointer": "", "detail": detail}
    raise KilnError(REFUSED, f"{place}: {code}: {detail}", hint=hint, details={"faults": [fault]})
