"""``kiln teacher``: who may score rows for a distillation, and the scores.

An alias is pinned to one identity in ``teachers.json`` of the registry directory. A corpus names the identity in its
first line; admission takes it only where the two are equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kiln_cli.config import LoadedConfig, load_config
from kiln_cli.counting import counted
from kiln_cli.errors import KilnError
from kiln_cli.plugins import load_plugins
from kiln_cli.terminal import SILENT, Progress, table, terminal
from kiln_cli.text import printable
from kiln_stages.admitting.contract import Contract, build_contract, load_terms
from kiln_stages.admitting.special_tokens import require_markers
from kiln_stages.distilling import local_identity
from kiln_stages.distilling.identity import LOCAL_PROTOCOL, TeacherIdentity
from kiln_stages.distilling.pinning import (
    Difference,
    differences,
    directories,
    register_endpoint,
    register_local,
    server_of,
)
from kiln_stages.distilling.registry import DEFAULT_DIRECTORY, FILE_NAME, Registry, Teacher, read_registry
from kiln_stages.distilling.scoring import Scorer, ScoringResult, Work, score_rows
from kiln_stages.distilling.targets import TargetFinder
from kiln_stages.distilling.tokenizers import tokenizer_identity

AliasArgument = Annotated[str, typer.Argument(metavar="ALIAS", help="What the teacher goes by.")]
RegistryOption = Annotated[Path, typer.Option("--registry", help="The directory that teachers.json lies in.")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
SHOWN_DIGITS = 12  # of a revision, in the list


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
    identity: Annotated[
        Path | None, typer.Option("--identity", help="The server's manifest or identity; asked for if left out.")
    ] = None,
    key_env: Annotated[str | None, typer.Option("--key-env", help="The variable that has the server's key.")] = None,
    key_file: Annotated[Path | None, typer.Option("--key-file", help="The file that has the server's key.")] = None,
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
    if endpoint is not None:
        _require_absent(
            adapter=adapter, served_model_id=served_model_id, max_top_k=max_top_k, max_model_len=max_model_len
        )
        if key_env is not None and key_file is not None:
            raise KilnError("KLN201", "--key-env and --key-file exclude each other", hint="name one place of the key")
        result = register_endpoint(
            alias, endpoint, registry, identity=identity, key_env=key_env, key_file=key_file, replace=replace
        )
    else:
        assert model is not None
        _require_absent(identity=identity, key_env=key_env, key_file=key_file)
        found = local_identity.identify(
            model,
            adapter,
            served_model_id=served_model_id,
            max_top_k=max_top_k,
            max_model_len=max_model_len,
            dtype=dtype,
            device_type=device,
        )
        result = register_local(alias, found, registry, replace=replace)
    if json:
        terminal.json_data(result)
    state = "unchanged" if result.unchanged else "registered"
    terminal.say(f"{state}: {printable(alias)}\n{_facts(result.teacher)}")
    if endpoint is not None and (key_env or key_file) and endpoint.startswith("http:"):
        terminal.warn(f"{printable(endpoint)} is no https address: the key goes to it unencrypted")
    terminal.say(f"next: kiln teacher score REQUEST --teacher {printable(alias)} --out teacher.jsonl")


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
    lines = [f"differs: {printable(alias)} is not what its alias is pinned to", *_told(result.differences)]
    terminal.say("\n".join(lines))
    raise typer.Exit(1)


def score(
    request: Annotated[Path, typer.Argument(metavar="REQUEST", help="Rows to score, as JSON lines.")],
    teacher: Annotated[str, typer.Option("--teacher", metavar="ALIAS", help="Who scores them.")],
    out: Annotated[Path, typer.Option("--out", help="The scored corpus to write.")],
    config: Annotated[Path | None, typer.Option("--config", help="The config that the rows are admitted by.")] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="The student's directory: its tokenizer; a local teacher's own.")
    ] = None,
    template: Annotated[str | None, typer.Option("--template", help="A template by name, or a file.")] = None,
    top_k: Annotated[int, typer.Option("--top-k", min=16, help="Candidates a position; a loss takes 16 or 32.")] = 32,
    send: Annotated[
        Literal["ids", "text"], typer.Option("--send", help="What a server gets; it must make the same ids of a text.")
    ] = "ids",
    requests: Annotated[int, typer.Option("--requests", min=1, max=64, help="To a server at a time.")] = 4,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds that a server may be silent.")] = 600,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of a local teacher.")] = None,
    registry: Annotated[
        Path | None, typer.Option("--registry", help="Where teachers.json lies; the config's, or .kiln.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Score rows with a teacher: its best candidates at every supervised position. A cut run goes on where it was."""
    settings = Settings(top_k=top_k, send=send, requests=requests, timeout=timeout, threads=threads)
    loaded = load_config(config, [], {"admit": {"template": template}} if template else {})
    known = read_registry(registry or loaded.resolve(loaded.run.admit.registry))
    loaded = _with_model(loaded, model, known, known.get(teacher))
    result = run_score(request, known, teacher, out, loaded, settings, progress=terminal)
    if json:
        terminal.json_data(result)
    terminal.say(account(result))
    for name, count in result.ignored_fields.items():
        rows = counted(count, "row", "rows")
        terminal.warn(f"field {printable(name)} of {rows} is not in the corpus: no scored row has it")
    if result.other_tokenizer_config:
        terminal.warn(
            "the rows' tokenizer settings or chat template are not the teacher's: "
            "kiln admit takes them with [distill] other_tokenizer_config = true alone"
        )
    rows = f"--file {printable(out)} --kind opd --teacher {printable(teacher)}"
    place = "" if known.directory == DEFAULT_DIRECTORY else f" --registry {printable(known.directory)}"
    terminal.say(f"next: kiln admit {rows}{place} --model {printable(loaded.model_dir())} --out RUN")


VERBS = {"register": register, "list": list_teachers, "manifest": manifest, "verify": verify, "score": score}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are scored. ``send``, ``requests`` and ``timeout`` are for servers, ``threads`` for local models."""

    top_k: int = 32
    send: Literal["ids", "text"] = "ids"
    requests: int = 4
    timeout: float = 600.0
    threads: int | None = None


def run_verify(alias: str, registry: Path = DEFAULT_DIRECTORY) -> Verified:
    """Raises KilnError KLN212 for an unknown alias, and as :func:`kiln_stages.distilling.pinning.differences` does."""
    known = read_registry(registry)
    teacher = known.get(alias)
    return Verified(
        alias=alias,
        content_revision=teacher.content_revision,
        differences=differences(known, teacher),
    )


def run_score(
    request: Path,
    known: Registry,
    alias: str,
    out: Path,
    config: LoadedConfig,
    settings: Settings,
    *,
    progress: Progress = SILENT,
) -> ScoringResult:
    """Writes the scored corpus ``out``. ``config`` says whose tokenizer and template make the rows' ids.

    Raises KilnError: KLN212 for an unknown alias, KLN221 where teacher and rows do not fit, KLN103 where a local
    teacher's files are not those of its identity, and as :func:`kiln_stages.distilling.scoring.score_rows` does.
    """
    teacher = known.get(alias)
    contract = _contract(config)
    _require_fit(teacher.identity, contract, settings.top_k)
    if teacher.local is not None and (changed := differences(known, teacher)):
        raise _changed(teacher, changed)
    work = Work(
        request=request,
        out=out,
        alias=alias,
        identity=teacher.identity,
        finder=TargetFinder(contract),
        top_k=settings.top_k,
        # A server writes one token behind the row: completions of none are refused by some.
        max_tokens=teacher.identity.max_model_len - (teacher.endpoint is not None),
        max_candidates=None if teacher.endpoint is None else teacher.identity.max_prompt_logprob_candidates,
        other_tokenizer_config=_other_tokenizer_config(teacher.identity, contract),
    )
    return score_rows(work, lambda: _scorer(known, teacher, settings), progress)


def _scorer(known: Registry, teacher: Teacher, settings: Settings) -> Scorer:
    if teacher.endpoint is not None:
        from kiln_stages.distilling.scoring_endpoint import EndpointScorer

        server = server_of(known, teacher.endpoint, settings.timeout)
        return EndpointScorer(
            teacher.identity, server, top_k=settings.top_k, send=settings.send, requests=settings.requests
        )
    assert teacher.local is not None, "an entry has one of the two"
    from kiln_stages.distilling.scoring_local import LocalScorer

    model, adapter = directories(known, teacher.local)
    return LocalScorer(teacher.identity, teacher.local, model, adapter, top_k=settings.top_k, threads=settings.threads)


def _with_model(config: LoadedConfig, model: Path | None, known: Registry, teacher: Teacher) -> LoadedConfig:
    """Whose tokenizer and template make the rows' ids: the ``--model``'s, the config's, or a local teacher's own."""
    if model is None and config.run.model.path is None:
        if teacher.local is None:
            raise KilnError(
                "KLN201",
                "--model is missing: a served teacher has no tokenizer here that could make the rows' ids",
                hint="name the student's model directory, or the run's config with --config",
            )
        model = known.resolve(teacher.local.model)
    return config if model is None else config.replace("model", path=config.counted_from_base(model))


def _contract(config: LoadedConfig) -> Contract:
    contract = build_contract(config, load_terms(config, load_plugins()))
    require_markers(contract)
    return contract


def _require_fit(identity: TeacherIdentity, contract: Contract, top_k: int) -> None:
    """Report D2: ids of one vocabulary mean nothing to a teacher of another."""
    if top_k > identity.max_top_k:
        raise KilnError(
            "KLN221",
            f"--top-k is {top_k}, the teacher gives at most "
            f"{counted(identity.max_top_k, 'candidate', 'candidates')} a position",
            hint="ask for fewer, or register the teacher with a larger --max-top-k",
        )
    rows = tokenizer_identity(contract.files).vocab_sha256
    if rows != identity.tokenizer_vocab_sha256:
        raise KilnError(
            "KLN221",
            f"the rows' tokenizer ({printable(contract.files.directory)}) has another vocabulary than the teacher's: "
            f"{rows}, the teacher has {identity.tokenizer_vocab_sha256}",
            hint="a teacher can score rows of its own tokenizer alone",
        )


def _other_tokenizer_config(identity: TeacherIdentity, contract: Contract) -> bool:
    """A served teacher's digest follows a rule of its server and is not compared."""
    rows = tokenizer_identity(contract.files).config_sha256
    return identity.protocol == LOCAL_PROTOCOL and rows != identity.tokenizer_config_sha256


def _require_absent(**options: object) -> None:
    """Options that say nothing of the kind of teacher that is registered are no oversight to pass over."""
    for name, value in options.items():
        if value is not None:
            flag = "--" + name.replace("_", "-")
            raise KilnError("KLN201", f"{flag} is of no use here", hint="a server says these itself; files have no key")


def _changed(teacher: Teacher, changed: list[Difference]) -> KilnError:
    return KilnError(
        "KLN103",
        "\n".join([f"{printable(teacher.alias)} is not what its alias is pinned to:", *_told(changed)]),
        hint="restore the files, or register the teacher as it is now",
        details={"differences": [msgspec.to_builtins(each) for each in changed]},
    )


def _told(changed: list[Difference]) -> list[str]:
    return [f"  {each.field}: pinned {_shown(each.pinned)}, found {_shown(each.found)}" for each in changed]


def account(result: ScoringResult) -> str:
    """What was scored, for people."""
    rows: list[list[object]] = [
        ["rows", result.rows],
        ["  scored before", result.rows_found],
        ["positions scored", result.targets],
        ["  own token not among the candidates", result.chosen_outside],
        ["  own token without a score", result.chosen_unscored],
        ["  as in an earlier row of the same tokens, scored otherwise this time", result.settled],
        [f"mean probability of the {result.top_k} candidates", result.mean_mass],
    ]
    state = "unchanged" if result.rows_found == result.rows else "written"
    return f"score: {printable(result.teacher)}\n{table(rows)}\n{state}: {printable(result.out)}"


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
    return printable(value, 300)
