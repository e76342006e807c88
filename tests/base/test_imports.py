"""The import law: who may import whom, and what must not be loaded before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kiln_cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
BASE = sorted((ROOT / "kiln_cli").rglob("*.py"))
STAGES = sorted((ROOT / "stages" / "kiln_stages").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins" / "kiln_plugins").rglob("*.py"))
HEAVY = ("torch", "transformers", "peft", "polars", "tokenizers", "safetensors", "datasets", "numpy", "jinja2")
TRAINING = ("train", "resume", "generate")
ASKS_A_TEACHER = "stages/kiln_stages/distilling/scoring_endpoint.py"
NETWORK = {"socket", "http", "urllib", "requests", "httpx", "aiohttp", "huggingface_hub", "ftplib", "smtplib"}


def imports(path: Path, *, typing: bool = True) -> Iterator[tuple[str, ast.AST]]:
    """Every module that a file imports, at any depth; without ``typing`` those under TYPE_CHECKING are left out."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.If) and not typing and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, node) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.module or "", node


def tops(path: Path, *, typing: bool = True) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(path, typing=typing)}


def identify(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", BASE, ids=identify)
def test_the_base_imports_neither_stages_nor_plugins(path: Path) -> None:
    assert not tops(path) & {"kiln_stages", "kiln_plugins"}


@pytest.mark.parametrize("path", BASE, ids=identify)
def test_only_two_files_name_the_others_as_text(path: Path) -> None:
    """``app.py`` names the stages and ``plugins.py`` the built-in plugins; nothing else in the base knows of them."""
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
    }
    named = {
        node.value.split(".")[0]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings
    }
    expected = {"app.py": {"kiln_stages"}, "plugins.py": {"kiln_plugins"}}.get(path.name, set())
    assert named & {"kiln_stages", "kiln_plugins"} == expected


@pytest.mark.parametrize("path", PLUGINS, ids=identify)
def test_plugins_import_the_base_alone(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | {"kiln_cli", "msgspec"}
    if path.name in ("chunks.py", "cross_entropy.py", "teacher_top_k.py"):  # losses: imported when a training uses one
        allowed |= {"torch", "kiln_plugins"}
    assert tops(path, typing=False) <= allowed


@pytest.mark.parametrize("path", STAGES, ids=identify)
def test_stages_reach_plugins_through_the_registry(path: Path) -> None:
    assert "kiln_plugins" not in tops(path)
    text = path.read_text()
    assert "kiln_plugins" not in text or path.name in ("plugins.py",), "the text names the package"


@pytest.mark.parametrize("path", [*BASE, *STAGES, *PLUGINS], ids=identify)
def test_nothing_opens_a_socket_but_what_asks_a_teacher(path: Path) -> None:
    allowed = {"http", "socket", "urllib"} if identify(path) == ASKS_A_TEACHER else set()
    assert tops(path) & NETWORK == allowed


@pytest.mark.parametrize("path", [*BASE, *STAGES, *PLUGINS], ids=identify)
def test_what_asks_a_teacher_is_imported_inside_of_functions_alone(path: Path) -> None:
    """So no command has it by being imported: only where an endpoint is at hand is it loaded."""
    module = ASKS_A_TEACHER.removeprefix("stages/").removesuffix(".py").replace("/", ".")
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    assert module not in found


@pytest.mark.parametrize("path", [*BASE, *STAGES, *PLUGINS], ids=identify)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    assert docstring[0].isupper() or docstring[0] in "`k"


def loaded_after(code: str) -> set[str]:
    """Top-level names of the heavy modules that a fresh process has loaded after this code."""
    script = f"{code}\nimport sys\nprint('\\n'.join(m for m in {HEAVY!r} if m in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_loads_nothing_heavy() -> None:
    code = "from kiln_cli.app import run\ntry:\n    run(['--help'])\nexcept SystemExit:\n    pass"
    assert loaded_after(code) == set()


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in TRAINING])
def test_commands_without_training_never_load_torch(command: str) -> None:
    assert not loaded_after(f"import {COMMANDS[command]}") & {"torch", "transformers", "peft"}


def test_the_plugins_load_nothing_heavy() -> None:
    assert loaded_after("from kiln_cli.plugins import load_plugins\nload_plugins()") == set()


def test_the_base_imports_without_the_rest() -> None:
    """The base stands alone: no stage or plugin module is loaded with it."""
    modules = ", ".join(f"kiln_cli.{path.stem}" for path in BASE if path.stem != "__init__")
    script = f"import sys, {modules}\nprint([m for m in sys.modules if m.startswith(('kiln_stages', 'kiln_plugins'))])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
