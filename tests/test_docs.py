"""The documentation says what the program does: hooks, commands, errors, config keys, domains, paths, examples."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec
import pluggy
import pytest
from kiln_stages.evidence import words
from kiln_stages.evidence.claims import Status

import kiln_cli
from kiln_cli import hookspecs
from kiln_cli.app import COMMANDS, NOT_BUILT
from kiln_cli.config import DataConfig, DatasetConfig, RunConfig
from kiln_cli.errors import CATALOGUE, KilnError, RowFault
from kiln_cli.identity import Domain
from kiln_cli.plugins import BUILT_IN
from kiln_cli.refused_keys import REFUSED_KEYS
from kiln_cli.request_form import DISTILL_KEYS, KEYS, REFUSED
from kiln_cli.sections import Section

ROOT = Path(__file__).resolve().parents[1]
HOOKS = [name for name in vars(hookspecs) if name.startswith("kiln_")]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "stages", "plugins", "fixtures")
    for path in (ROOT / folder).glob("*.md")
)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """What stands below a second-level heading, up to the next one."""
    _, found, rest = text.partition(f"\n## {heading}\n")
    assert found, f"no heading: ## {heading}"
    return rest.partition("\n## ")[0]


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def table_rows(text: str) -> Iterator[list[str]]:
    """The cells of each table row, without the head and the rule."""
    for line in text.split("\n"):
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def all_blocks(language: str) -> list[Any]:
    """Every block of a language on every page, as parameters named by page and place."""
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name in PAGES
        for number, block in enumerate(code_blocks(page(name), language), start=1)
    ]


# ---- hooks


def signature(hook: str) -> str:
    return f"{hook}{inspect.signature(getattr(hookspecs, hook))}".replace("'", "")


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_heading_with_its_signature(hook: str) -> None:
    text = section(page("docs/hooks.md"), f"`{signature(hook)}`")
    for word in ("**When called:**", "**Return:**", "**A duplicate**"):
        assert word in text, f"{hook}: {word} is missing"
    assert code_blocks(text, "python"), f"{hook} has no example"


def test_hooks_page_has_no_other_hook() -> None:
    assert re.findall(r"^## `(\w+)\(", page("docs/hooks.md"), re.MULTILINE) == HOOKS


EXAMPLES = {
    "kiln_sources": {"kiln_sources": ["qa", "qa_tabs"]},
    "kiln_templates": {"kiln_templates": ["sections"]},
    "kiln_losses": {"kiln_losses": ["cross_entropy_z"]},
    "kiln_drop_reasons": {
        "kiln_sources": ["consented"],
        "kiln_drop_reasons": ["no_consent", "uncalled_tools", "same_answers"],
    },
}


def example(hook: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The hook's example, run as the module that its first line names."""
    (source,) = code_blocks(section(page("docs/hooks.md"), f"`{signature(hook)}`"), "python")
    return run_module(source, monkeypatch)


def run_module(source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    named = re.match(r"# (\w+)\.py\n", source)
    assert named, "the first line must name the module"
    module = types.ModuleType(named.group(1))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, f"{module.__name__}.py", "exec"), module.__dict__)
    return module


def registered(module: types.ModuleType) -> dict[str, list[Any]]:
    """What a plugin manager with kiln's own plugins and this one holds of this one, by hook."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in BUILT_IN:
        manager.register(importlib.import_module(name), name)
    before = {hook: {value.name for values in getattr(manager.hook, hook)() for value in values} for hook in HOOKS}
    manager.register(module, module.__name__)
    manager.check_pending()
    values: dict[str, list[Any]] = {}
    for hook in HOOKS:
        ours = [value for values in getattr(manager.hook, hook)() for value in values if value.name not in before[hook]]
        if ours:
            values[hook] = ours
    return values


@pytest.mark.parametrize("hook", HOOKS)
def test_example_registers_what_it_says(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = registered(example(hook, monkeypatch))
    assert {name: [value.name for value in found] for name, found in values.items()} == EXAMPLES[hook]
    for found in values.values():
        for value in found:
            assert value.doc and "\n" not in value.doc


@pytest.mark.parametrize("source", all_blocks("python"))
def test_examples_import_kiln_cli_and_nothing_deeper(source: str) -> None:
    deeper = re.findall(r"^\s*(?:from|import)\s+(kiln_\w+(?:\.\w+)*)", source, re.MULTILINE)
    if "kiln_stages" in deeper:
        return  # calls a stage from Python and is no plugin; tests/chain/test_readme.py runs it
    assert set(deeper) <= {"kiln_cli"}
    for name in re.findall(r"from kiln_cli import ([\w, ]+)", source):
        assert set(name.split(", ")) <= set(kiln_cli.__all__)


def test_source_example_reads_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kiln_stages.admitting.incoming import IncomingRow, chat_rows
    from kiln_stages.reading.sources import json_lines, open_rows

    from kiln_cli.lines import LineReader
    from kiln_cli.registry import Owner, Registry

    qa, tabs = registered(example("kiln_sources", monkeypatch))["kiln_sources"]
    sources = Registry("source", [(Owner("example", "1"), qa), (Owner("example", "1"), tabs)])

    def rows(name: str, data: bytes) -> list[IncomingRow]:
        path = tmp_path / "rows"
        path.write_bytes(data)
        with open_rows(path, name, sources, "chat", tmp_path) as (plain, choice):
            return list(chat_rows(json_lines(LineReader(plain.stream), elements=plain.elements), choice.source))

    good, bad = rows(qa.name, b'{"ask":"a","reply":"b"}\n\n{"ask":1,"reply":"b"}\n')
    # The row of vector V1: two shapes of one conversation share an identity.
    assert good.sha256() == "sha256:c8629e6809a8733fc0af19c1a28c81b15fcc8e0a964d77eb5625e8273280ad42"
    assert isinstance(bad.fault, RowFault) and bad.fault.reason == "invalid_json"
    assert qa.recognise({"ask": "a", "reply": "b"}) and qa.recognise({"ask": "a"}) is None
    first, second, third = rows(tabs.name, b"a\tb\n\n\xff\tb\nc")
    assert first.sha256() == good.sha256()
    assert second.fault is not None and second.fault.reason == "invalid_json"
    assert third.row is not None and third.row.messages[1]["content"] == ""


def test_every_finer_word_is_named() -> None:
    from kiln_cli.chat import MISFITS
    from kiln_cli.strict_json import JsonFault

    text = section(page("docs/artifacts.md"), "Rejected rows")
    for word in (*JsonFault.KINDS, *MISFITS):
        assert f"`{word}`" in text, word


def test_shapes_page_has_every_source() -> None:
    from kiln_cli.plugins import load_plugins

    sources = load_plugins().sources
    for heading, yields in (("Conversations", "chat"), ("Function calls", "tool_calls")):
        named = [cells[0].strip("`") for cells in table_rows(section(page("docs/shapes.md"), heading))]
        assert sorted(named) == sorted(source.name for source in sources if source.yields == yields)


def test_template_example_gives_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    from kiln_stages.labelling.labels import LabelFinder
    from kiln_stages.labelling.rendering import ChatTemplate

    (template,) = registered(example("kiln_templates", monkeypatch))["kiln_templates"]
    finder = LabelFinder(ChatTemplate(template.source, template.name, {"eos_token": "</s>"}))
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    found = finder.find([{"role": role, "content": content} for role, content in turns])
    assert [found.text[start:end] for start, end in found.spans] == ["two</s>\n", "four</s>\n"]


def test_loss_example_computes_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    (loss,) = registered(example("kiln_losses", monkeypatch))["kiln_losses"]
    hidden = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
    head = torch.linspace(-1, 1, 20).reshape(4, 5)
    batch = kiln_cli.LossBatch(
        targets=torch.tensor([0, 3, 4]), weights=torch.ones(3), row_ids=torch.zeros(3, dtype=torch.int64)
    )
    out = loss.load()(hidden, lambda rows: rows @ head, batch)
    logits = (hidden @ head).detach()
    expected = torch.nn.functional.cross_entropy(logits, batch.targets) + 1e-4 * logits.logsumexp(-1).square().mean()
    assert torch.allclose(out.loss.detach(), expected)
    out.loss.backward()
    assert torch.isfinite(hidden.grad).all() and set(out.metrics) == {"nll"}


def test_drop_reason_example_drops_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from kiln_stages.preparing.screening import Screen

    from kiln_cli.records import Record

    values = registered(example("kiln_drop_reasons", monkeypatch))
    (source,), reasons = values["kiln_sources"], values["kiln_drop_reasons"]
    screen = Screen(DatasetConfig(path="rows.jsonl"), source, reasons, DataConfig())

    def outcome(**changes: Any) -> Any:
        row = {
            "consent": True,
            "query": "What is the weather?",
            "tools": '[{"name":"f","description":"","parameters":{}}]',
            "answers": '[{"name":"f","arguments":{"b":1,"a":2}}]',
        } | changes
        text = msgspec.json.encode(row)
        return screen.screen(Record(row_index=1, line=1, offset=0, length=len(text), text=text))

    assert outcome().drop is None
    assert outcome(consent=False).drop.reason == "no_consent"
    assert outcome(answers='[{"name":"g","arguments":{}}]').drop.reason == "uncalled_tools"
    assert outcome().keys == outcome(answers='[{"arguments":{"a":2,"b":1},"name":"f"}]').keys


def test_plugins_page_shows_a_whole_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    text = page("plugins/README.md")
    (source,) = code_blocks(text, "python")
    assert len(source.strip().split("\n")) <= 20
    module = run_module(source, monkeypatch)
    assert registered(module)
    (project,) = (tomllib.loads(block) for block in code_blocks(text, "toml"))
    assert module.__name__ in project["project"]["entry-points"][hookspecs.ENTRY_POINT_GROUP].values()


# ---- commands and errors


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_section(command: str) -> None:
    assert f"kiln {command} " in section(page("docs/commands.md"), f"kiln {command}")


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_error_has_a_section(code: str) -> None:
    entry = CATALOGUE[code]
    text = section(page("docs/errors.md"), f"{code}: {entry.title}")
    assert f"Exit code {int(entry.exit_code)}." in text


def test_generated_pages_are_as_the_program_makes_them() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, f"{done.stderr}run `make docs`"


# ---- config


def sections(kind: type[Section], at: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Each table of the config with its heading on the page."""
    yield (f"`{at}`" if at else "Top level"), kind
    for field in msgspec.structs.fields(kind):
        listed = get_origin(field.type) is list
        inner = get_args(field.type)[0] if get_args(field.type) else field.type
        if isinstance(inner, type) and issubclass(inner, Section):
            name = f"{at.strip('[]')}.{field.encode_name}".strip(".")
            yield from sections(inner, f"[[{name}]]" if listed else f"[{name}]")


def shown(field: msgspec.structs.FieldInfo) -> str:
    """A field's default as the page writes it."""
    if field.required:
        return "required"
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(default, Section):
        return "defaults"
    return "none" if default is None else f"`{msgspec.json.encode(default).decode()}`"


@pytest.mark.parametrize("heading, kind", list(sections(RunConfig)))
def test_every_config_key_is_listed_with_its_default(heading: str, kind: type[Section]) -> None:
    listed = {row[0].strip("`"): row[2] for row in table_rows(section(page("docs/config.md"), heading))}
    assert listed == {field.encode_name: shown(field) for field in msgspec.structs.fields(kind)}


def test_every_refused_key_is_listed_with_its_reason() -> None:
    text = section(page("docs/config.md"), "Keys that are refused by name")
    listed = {key: row[1].replace("`", "") for row in table_rows(text) for key in re.findall(r"`(\w+)`", row[0])}
    assert listed == {key: reason.replace("`", "") for key, reason in REFUSED_KEYS.items()}


def test_every_key_of_a_request_is_listed_with_what_it_stands_for() -> None:
    cells = list(table_rows(section(page("docs/config.md"), "The request form")))
    listed = {row[0].strip("`"): row[1].split(";")[0].strip("`") for row in cells if row[0].strip("`") in KEYS}
    assert listed == KEYS
    rest = [row for row in cells if row[0].strip("`") not in KEYS]
    reasons = {key: row[1].replace("`", "") for row in rest for key in re.findall(r"`(\w+)`", row[0])}
    assert reasons == {key: reason.replace("`", "") for key, reason in REFUSED.items()}


def test_every_key_of_a_request_for_distillation_is_listed() -> None:
    cells = table_rows(section(page("docs/config.md"), "A request for distillation"))
    assert {row[0].strip("`"): row[1].split(";")[0].strip("`") for row in cells} == DISTILL_KEYS


@pytest.mark.parametrize("source", [block for block in all_blocks("toml") if "kiln.config.v1" in block.values[0]])
def test_every_config_on_a_page_is_one(source: str, tmp_path: Path) -> None:
    from kiln_cli.config import load_config

    path = tmp_path / "mine.toml"
    path.write_text(source, encoding="utf-8")
    load_config(path)


# ---- artifacts


@pytest.mark.parametrize("domain", Domain)
def test_every_domain_is_listed(domain: Domain) -> None:
    listed = [row[0].strip("`") for row in table_rows(section(page("docs/artifacts.md"), "Domains"))]
    assert listed.count(domain.value) == 1
    assert len(listed) == len(Domain)


def test_every_field_of_evidence_is_listed() -> None:
    from kiln_stages.admitting.admission import RejectedDetail
    from kiln_stages.admitting.corpus import COLUMNS
    from kiln_stages.distilling import identity, registry
    from kiln_stages.distilling.ingestion import ScoredIngestion
    from kiln_stages.distilling.rows import COLUMNS as SCORED_COLUMNS

    from kiln_cli import receipts, stage_manifests
    from kiln_cli.records import PreparedExample

    text = page("docs/artifacts.md")
    structs = (
        receipts.FileRef,
        receipts.ManifestRef,
        stage_manifests.StageManifest,
        stage_manifests.Produced,
        stage_manifests.PrepareDetails,
        stage_manifests.RawDataset,
        stage_manifests.AdmitDetails,
        stage_manifests.RowsRead,
        stage_manifests.ToolsShown,
        stage_manifests.Contamination,
        stage_manifests.HeldOutRows,
        stage_manifests.HeldOutSet,
        receipts.IngestionReceipt,
        receipts.RejectedRow,
        ScoredIngestion,
        receipts.DropSummary,
        receipts.LanguageDrops,
        receipts.KilnDrops,
        receipts.TrainReceipt,
        receipts.ReceiptData,
        receipts.Held,
        receipts.CheckpointRef,
        PreparedExample,
        RejectedDetail,
        identity.TeacherIdentity,
        identity.AdapterIdentity,
        registry.TeachersFile,
        registry.Teacher,
        registry.LocalModel,
        registry.Endpoint,
    )
    names = {field for struct in structs for field in struct.__struct_encode_fields__} | {*COLUMNS, *SCORED_COLUMNS}
    assert not sorted(name for name in names if f"`{name}`" not in text)


# ---- README


def test_paths_of_the_tree_exist() -> None:
    (tree,) = code_blocks(section(page("README.md"), "The tree"), "text")
    paths = []
    parents: list[tuple[int, str]] = []
    for line in tree.split("\n"):
        if not line.strip():
            continue
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        parents = [parent for parent in parents if parent[0] < depth]
        path = "".join(parent for _, parent in parents) + name
        if name.endswith("/"):
            parents.append((depth, name))
        paths.append(path)
    assert len(paths) > 10
    assert not [path for path in paths if not (ROOT / path).exists()]


def test_files_and_functions_of_the_journey_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)`:\s+`([\w.]+)`", section(page("README.md"), "One row's journey"))
    assert len(named) >= 8
    for path, function in named:
        text = page(path)
        *owners, last = function.split(".")
        for owner in owners:
            assert re.search(rf"^class {owner}\b", text, re.MULTILINE), f"{path} has no class {owner}"
        assert re.search(rf"^\s*def {last}\b", text, re.MULTILINE), f"{path} has no function {function}"


@pytest.mark.parametrize("name", PAGES)
def test_pages_name_commands_that_exist(name: str) -> None:
    fence = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    blocks = fence.findall(page(name))
    code = [*re.findall(r"`([^`]+)`", fence.sub("", page(name))), *"".join(blocks).split("\n")]
    used = {match for line in code for match in re.findall(r"(?:^|\s|/)kiln ([a-z][a-z-]+)", line)}
    allowed = {*COMMANDS, *(NOT_BUILT if name in ("CHANGELOG.md", "docs/errors.md", "docs/commands.md") else ())}
    assert used <= allowed, f"{name}: {sorted(used - allowed)}"


def test_readme_lists_what_is_not_built() -> None:
    text = section(page("README.md"), "What this version does not do")
    listed = text.split("\n\n")[0]
    assert set(re.findall(r"`([a-z-]+)`", listed)) == set(NOT_BUILT)


def test_the_tree_of_the_readme_has_every_package_of_the_stages() -> None:
    tree = section(page("README.md"), "The tree")
    packages = [path.parent.name for path in (ROOT / "stages" / "kiln_stages").glob("*/__init__.py")]
    assert packages
    assert [name for name in packages if not re.search(rf"^ +{name}/ ", tree, re.MULTILINE)] == []


def test_readme_lists_the_exit_codes() -> None:
    listed = [row.split(" | ")[0].strip("| ") for row in section(page("README.md"), "Exit codes").split("\n")]
    assert {"0", "1", "2", "3", "4", "5"} <= set(listed)


@pytest.mark.parametrize("name", PAGES)
def test_links_between_pages_lead_somewhere(name: str) -> None:
    folder = (ROOT / name).parent
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page(name))
    assert not [target for target in targets if "://" not in target and not (folder / target).exists()]


def test_unknown_names_are_refused_with_an_error_of_the_catalogue() -> None:
    """The pages say KLN210 and KLN212: these are the codes that the registries raise."""
    from kiln_cli.registry import Owner, Registry

    template = kiln_cli.Template(name="x", doc="d", source="")
    with pytest.raises(KilnError) as duplicate:
        Registry("template", [(Owner("a", "1"), template), (Owner("b", "2"), template)])
    assert duplicate.value.code == "KLN210" and "a 1" in str(duplicate.value) and "b 2" in str(duplicate.value)
    with pytest.raises(KilnError) as unknown:
        Registry("template", [(Owner("a", "1"), template)]).get("y")
    assert unknown.value.code == "KLN212"


def test_the_words_of_a_verdict_are_explained_and_what_is_not_promised_is_on_the_page() -> None:
    assert set(words.STATUSES) == set(get_args(Status))
    text = " ".join(page("docs/artifacts.md").split())
    for promise in words.NOT_PROMISED:
        assert f"- {promise}" in text
        assert promise in words.explanation()
    for word in words.VERDICTS:
        assert f"  {word}: " in words.explanation()
