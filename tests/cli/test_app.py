"""The command line as users and scripts meet it: exit codes, errors, foreign text, pipes, help."""

from __future__ import annotations

import ast
import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from kiln_cli import app
from kiln_cli.app import COMMANDS, NOT_BUILT
from kiln_cli.errors import CATALOGUE, Exit, KilnError, RowFault
from kiln_cli.plugins import version

ROOT = Path(__file__).resolve().parents[2]


def verbs(module: str) -> list[str]:
    """What ``VERBS`` of a module names, read without importing it."""
    tree = ast.parse(Path(str(importlib.util.find_spec(module).origin)).read_text())  # type: ignore[union-attr]
    found = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "VERBS"]
    return [ast.literal_eval(key) for value in found if isinstance(value, ast.Dict) for key in value.keys if key]


KILN = [sys.executable, "-m", "kiln_cli.app"]
BUILT = [name for name, module in COMMANDS.items() if importlib.util.find_spec(module)]
# Commands of several verbs, each with its own help.
VERBS = [f"{name} {verb}" for name, module in COMMANDS.items() for verb in verbs(module)]
HOSTILE = "a\x1b[31mred\x1b]8;;http://evil\x07link\u202egnp.exe\u200b\u2028\x9b\x00"


@pytest.fixture
def boom(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """``boom(error)``: from now on `kiln boom` raises it."""

    def put(error: BaseException) -> None:
        module = ModuleType("fake_boom")

        def command() -> None:
            raise error

        module.command = command  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fake_boom", module)
        monkeypatch.setitem(COMMANDS, "boom", "fake_boom")

    return put


def kiln(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KILN, *arguments], capture_output=True, text=True, timeout=120, **options)


# --- exit codes


@pytest.mark.parametrize("code", CATALOGUE)
def test_every_code_has_its_exit_code(
    boom: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str], code: str
) -> None:
    boom(KilnError(code, "something is wrong", hint="do something"))
    assert app.run(["boom"]) == CATALOGUE[code].exit_code == int(code[3])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"kiln: {code}: something is wrong\nhint: do something\n"


@pytest.mark.parametrize(
    "error, exit_code, start",
    [
        (ValueError("odd"), 5, "kiln: KLN501: unexpected ValueError: odd\nhint: "),
        (RowFault("reason", "detail"), 5, "kiln: KLN501: unexpected RowFault"),
        (RecursionError("deep"), 5, "kiln: KLN501: unexpected RecursionError"),
        (MemoryError(), 4, "kiln: KLN403: out of memory\nhint: "),
        (PermissionError(errno.EACCES, "Permission denied", "a\nb"), 2, "kiln: KLN204: cannot reach a\\nb: Permission"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a"), 2, "kiln: KLN204: cannot reach a: File name too"),
        (OSError(errno.EBADF, "Bad file descriptor"), 5, "kiln: KLN501: unexpected OSError"),
        (KeyboardInterrupt(), 130, "kiln: interrupted\n"),
    ],
)
def test_other_errors(
    boom: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    exit_code: int,
    start: str,
) -> None:
    boom(error)
    assert app.run(["boom"]) == exit_code
    err = capsys.readouterr().err
    assert err.startswith(start)
    assert "Traceback" not in err


def test_debug_shows_the_traceback(boom: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]) -> None:
    boom(ValueError("odd"))
    app.run(["--debug", "boom"])
    assert "Traceback" in capsys.readouterr().err
    app.run(["boom"])
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_without_a_hint_is_one_line(
    boom: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    boom(KilnError("KLN204", "message"))
    app.run(["boom"])
    assert capsys.readouterr().err == "kiln: KLN204: message\n"


@pytest.mark.parametrize(
    "arguments",
    [["prepare"], ["--nope"], ["prepare", "x", "--out"], ["prepare", "x", "--out", "y", "z"], ["explain", "--nope"]],
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert app.run(arguments) == Exit.USER_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"kiln: KLN201: .+\nhint: `kiln( \w+)? --help` shows the forms\n", err)


@pytest.mark.parametrize(
    "typed, meant", [("prepar", "prepare"), ("verify_receipt", "verify-receipt"), ("trian", "train")]
)
def test_an_unknown_command_suggests_the_nearest(capsys: pytest.CaptureFixture[str], typed: str, meant: str) -> None:
    assert app.run([typed, "x"]) == 2
    err = capsys.readouterr().err
    assert "KLN201" in err
    assert repr(typed) in err
    assert meant in err


@pytest.mark.parametrize("command", NOT_BUILT)
def test_commands_that_are_not_built_say_so(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert app.run([command, "--help"]) == app.run([command, "anything"]) == 2
    assert f"kiln: KLN211: `kiln {command}` is not built in this version\n" in capsys.readouterr().err
    assert command not in COMMANDS


def test_no_arguments_show_the_help() -> None:
    done = kiln()
    assert done.returncode in (0, 2)
    text = done.stdout + done.stderr
    assert "Usage: kiln" in text
    assert all(re.search(rf"^\W*{command}\b", text, re.MULTILINE) for command in COMMANDS)
    assert "\\n" not in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["--version"]) == 0
    assert capsys.readouterr().out == f"kiln {version()}\n"


# --- --json


def test_json_errors_are_one_object_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent.toml"
    assert app.run(["prepare", str(path), "--out", str(tmp_path / "run"), "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {
        "error": {
            "code": "KLN204",
            "message": f"cannot read {path}: No such file or directory",
            "hint": "check the path",
        }
    }
    assert err.startswith("kiln: KLN204: ")


def test_json_errors_carry_details(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    root = make_run({"kiln.toml": 'schema = "kiln.config.v1"\n[data]\nn_train = 0\nn_tst = 1\n'})
    assert app.run(["prepare", str(root / "kiln.toml"), "--out", str(root / "run"), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == "KLN203"
    assert len(error["details"]["faults"]) == 2


def test_without_json_stdout_stays_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["explain", "KLN999"]) == 2
    assert app.run(["prepare", "absent.toml", "--out", "x"]) == 2
    assert capsys.readouterr().out == ""


def test_prepare_from_the_command_line(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Data on stdout, the account on stderr, and --set in force."""
    tools, answers = '[{"name":"f","description":"d","parameters":{}}]', '[{"name":"f","arguments":{}}]'
    rows = [{"query": f"Valid query for row {n}", "tools": tools, "answers": answers} for n in range(5)]
    rows[4]["query"] = "short"
    root = make_run(
        {
            "kiln.toml": 'schema = "kiln.config.v1"\n[data]\nn_validation = 1\nn_test = 1\n'
            '[[datasets]]\npath = "r.jsonl"\n',
            "r.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        }
    )
    arguments = ["prepare", str(root / "kiln.toml"), "--out", str(root / "run"), "--set", "data.n_train=1"]
    assert app.run(arguments) == 0
    out, err = capsys.readouterr()
    assert out == ""
    account = {" ".join(line.split()[:-1]): line.split()[-1] for line in err.splitlines() if line.startswith("  ")}
    assert account == {
        "rows read": "5",
        "query_too_short": "1",
        "unused": "1",
        "kept": "3",
        "train": "1",
        "validation": "1",
        "test": "1",
    }
    assert "next: kiln admit" in err
    assert app.run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == json.loads((root / "run" / "data_manifest.json").read_bytes())
    assert "unchanged: " in err
    assert app.run(["--quiet", *arguments]) == 0
    assert capsys.readouterr() == ("", "")


# --- foreign text


def no_escapes(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    "arguments",
    [
        [HOSTILE.replace("\x00", "")],
        ["explain", HOSTILE],
        ["prepare", HOSTILE, "--out", "x"],
        ["prepare", "x.toml", f"--{HOSTILE}"],
        ["prepare", "x.toml", "--out", HOSTILE, HOSTILE],
        ["verify-receipt", HOSTILE],
        ["validate", HOSTILE],
        ["report", HOSTILE],
    ],
)
def test_hostile_arguments_never_reach_the_terminal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert app.run(arguments) in (2, 5)
    out, err = capsys.readouterr()
    assert no_escapes(err), err
    assert no_escapes(out), out
    assert err.startswith("kiln: KLN")


def test_hostile_files_never_reach_the_terminal(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A path, a config value, a --set, an unknown key and the keys of a row, each with control and bidi characters."""
    name = HOSTILE.replace("/", "").replace("\x00", "")
    quoted = json.dumps(HOSTILE)
    head = 'schema = "kiln.config.v1"\n'
    root = make_run(
        {
            f"{name}/{name}.toml": head + f"[data]\n{quoted} = 1\nn_train = {quoted}\n",
            f"{name}/rows.toml": head + f'[[datasets]]\npath = "{"rows"}.jsonl"\nid = {quoted}\n',
            f"{name}/rows.jsonl": json.dumps({HOSTILE: 1, "text": HOSTILE}) + "\n",
            f"{name}/schema.toml": f"schema = {quoted}\n",
        }
    )
    for config in (f"{name}.toml", "rows.toml", "schema.toml"):
        for extra in ([], ["--set", f"data.{HOSTILE}={HOSTILE}"], ["--json"]):
            code = app.run(["prepare", str(root / name / config), "--out", str(root / name / "run"), *extra])
            out, err = capsys.readouterr()
            assert code == 2
            assert no_escapes(out), out
            assert no_escapes(err), err


def test_rows_and_plugins_in_the_account_are_escaped(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tools, answers = '[{"name":"f","description":"d","parameters":{}}]', '[{"name":"f","arguments":{}}]'
    rows = [{"query": f"Valid query {n} {HOSTILE}", "tools": tools, "answers": answers, "id": HOSTILE} for n in (1, 2)]
    rows += [{**row, "id": f"{HOSTILE}{n}", "query": f"{n} {HOSTILE}"} for n, row in enumerate(rows)]
    root = make_run(
        {
            "kiln.toml": 'schema = "kiln.config.v1"\n[data]\nn_train = 1\nn_validation = 1\nn_test = 1\n'
            '[[datasets]]\npath = "r.jsonl"\n',
            "r.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        }
    )
    out_dir = root / HOSTILE.replace("/", "").replace("\x00", "")
    assert app.run(["prepare", str(root / "kiln.toml"), "--out", str(out_dir)]) == 0
    out, err = capsys.readouterr()
    assert no_escapes(out)
    assert no_escapes(err)


def test_an_exception_of_a_plugin_is_escaped(
    boom: Callable[[BaseException], None], capsys: pytest.CaptureFixture[str]
) -> None:
    boom(ValueError(HOSTILE))
    assert app.run(["boom"]) == 5
    err = capsys.readouterr().err
    assert no_escapes(err)
    assert "\\x1b[31mred" in err
    assert "\\u202e" in err


def test_arguments_that_are_no_utf8(tmp_path: Path) -> None:
    done = kiln("prepare", os.fsencode(tmp_path) + b"/\xff.toml", "--out", str(tmp_path / "run"), "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "KLN204"
    assert "\\udcff" in done.stderr


# --- pipes


@pytest.mark.parametrize("arguments", [["explain"], ["--help"], ["plugins", "--json"], ["explain", "KLN201"]])
def test_a_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    """The reader is gone before the first byte: no message, and the code of a process that SIGPIPE ended."""
    process = subprocess.Popen([*KILN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) in (141, -13)
    assert err == b""


def test_head_of_a_listing() -> None:
    script = f"set -o pipefail; {sys.executable} -m kiln_cli.app explain | head -0"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode in (0, 141)  # 0 where all of it fits into the pipe before head ends


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["explain"], ["plugins", "--json"]])
def test_a_full_device_is_a_resource(arguments: list[str], unbuffered: str) -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*KILN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=environment
        )
    assert done.returncode == Exit.RESOURCE
    assert done.stderr.count("KLN402") == 1
    assert "Traceback" not in done.stderr
    assert "ignored" not in done.stderr


# --- explain, plugins and the catalogue


def test_explain_lists_every_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[code, str(int(e.exit_code))] for code, e in CATALOGUE.items()]


@pytest.mark.parametrize("code", CATALOGUE)
def test_explain_has_a_page_a_code(capsys: pytest.CaptureFixture[str], code: str) -> None:
    assert app.run(["explain", code.lower()]) == 0
    out = capsys.readouterr().out
    entry = CATALOGUE[code]
    assert out == f"{code}: {entry.title} (exit code {code[3]})\n\n{entry.cause}\n{entry.remedy}\n"


def test_explain_of_an_unknown_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["explain", "KLN999"]) == 2
    assert "KLN212" in capsys.readouterr().err


def test_plugins_lists_what_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["plugins", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "kiln.plugins.v1"
    provided = {(entry["kind"], entry["name"]) for entry in value["provides"]}
    assert {("source", "xlam"), ("template", "chatml"), ("loss", "cross_entropy")} <= provided
    assert app.run(["plugins"]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"\b{name}\b", table) for _, name in provided)


def sources() -> list[Path]:
    tops = ("kiln_cli", "stages/kiln_stages", "plugins/kiln_plugins")
    return [path for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def test_codes_in_the_source_are_in_the_catalogue() -> None:
    mentioned = {code for path in sources() for code in re.findall(r"KLN\d+", path.read_text())}
    assert mentioned - set(CATALOGUE) == set()


def test_codes_in_the_catalogue_are_raised_somewhere() -> None:
    """A code counts as used where it stands as a whole string outside the catalogue itself."""
    used = set()
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict) and path.name == "errors.py":
                node.keys.clear()
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in CATALOGUE:
                used.add(node.value)
    assert set(CATALOGUE) - used == set()


@pytest.mark.parametrize("code", CATALOGUE)
def test_catalogue_entries_are_whole(code: str) -> None:
    entry = CATALOGUE[code]
    assert re.fullmatch(r"KLN[1-5]\d\d", code)
    assert entry.exit_code == int(code[3])
    assert entry.title == entry.title.strip(". ")
    for text in (entry.cause, entry.remedy):
        assert text.endswith(".")


@pytest.mark.parametrize("code", CATALOGUE)
def test_remedies_name_only_what_is_built(code: str) -> None:
    entry = CATALOGUE[code]
    named = re.findall(r"`kiln ([a-z-]+)", entry.title + entry.cause + entry.remedy)
    assert [command for command in named if command in NOT_BUILT] == []


# --- help

HELP_SCRIPT = """
import contextlib, io, json, sys
from kiln_cli.app import run
texts = {}
for command in sys.argv[1:]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run([*command.split(), "--help"])
    texts[command] = out.getvalue()
json.dump(texts, sys.stdout)
"""


@pytest.fixture(scope="module")
def help_texts() -> dict[str, str]:
    """Help of kiln and of each command, 100 columns wide, from one fresh process without colours."""
    environment = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "PYTHONPATH")}
    environment |= {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-c", HELP_SCRIPT, "", *BUILT, *VERBS],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    texts: dict[str, str] = json.loads(done.stdout)
    return {name: "\n".join(line.rstrip() for line in text.split("\n")) for name, text in texts.items()}


@pytest.mark.parametrize("command", ["", *BUILT, *VERBS])
def test_help(help_texts: dict[str, str], snapshot: SnapshotAssertion, command: str) -> None:
    """``pytest --snapshot-update`` writes new texts; read the difference before you commit it."""
    assert help_texts[command] == snapshot


@pytest.mark.parametrize("command", [*BUILT, *VERBS])
def test_help_says_what_each_option_does(help_texts: dict[str, str], command: str) -> None:
    text = help_texts[command]
    assert f"Usage: kiln {command}" in text
    assert "TODO" not in text
    assert max(map(len, text.split("\n"))) <= 100
    assert command.split()[0] in help_texts[""]


def test_the_list_of_commands_says_what_each_does(help_texts: dict[str, str]) -> None:
    """The first sentence of each command's own help stands whole in `kiln --help`."""
    listing = " ".join(help_texts[""].split())
    for command in BUILT:
        path = Path(str(importlib.util.find_spec(COMMANDS[command]).origin))  # type: ignore[union-attr]
        body = ast.parse(path.read_text()).body
        (function,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "command"]
        sentence = (ast.get_docstring(function) or "").split("\n\n")[0].split(". ")[0].rstrip(".")
        assert sentence
        assert f"{command} {' '.join(sentence.split())}" in listing
