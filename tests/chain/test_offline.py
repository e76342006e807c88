"""Report A2: no stage opens a socket to a network or asks for a name; the chain runs where both would raise."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import RUN, Kiln

from kiln_cli.config import load_config

# Loaded by every Python process before anything else, children of a stage included. What it raises is no Exception,
# so that no handler of a stage may swallow it, and is written down besides.
GUARD = """
import os, socket

class Opened(BaseException):
    pass

def refuse(*arguments, **options):
    with open(os.environ["SOCKET_LOG"], "a") as log:
        log.write(repr(arguments) + "\\n")
    raise Opened(repr(arguments))

class Guarded(socket.socket):
    def __init__(self, family=-1, *arguments, **options):
        if family not in (socket.AF_UNIX,):
            refuse(family)
        super().__init__(family, *arguments, **options)

    connect = connect_ex = bind = sendto = refuse

socket.socket = Guarded
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
    setattr(socket, name, refuse)
"""


# One process for the whole chain; its workers are processes of their own.
CHAIN = """
import json, sys
from kiln_cli.app import run
if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        print("\\nended:", arguments[0], int(run(arguments)), flush=True)
"""


class Opened(BaseException):
    """As above: no handler of a stage may swallow it."""


def stages(project: Path) -> list[list[str]]:
    """Every stage, over two rows and two steps, with all that comes behind a training."""
    config, out, teachers = str(project / "kiln.toml"), str(project / RUN), str(project / "teachers")
    request = {"messages": [{"role": "user", "content": "Hi"}], "teacher_response": "yes"}
    (project / "request.jsonl").write_text(json.dumps(request) + "\n", encoding="utf-8")
    extra = ["--set", "train.adapter_smoke_test=true", "--set", "train.checkpoint_interval=1"]
    return [
        ["prepare", config, "--out", out],
        ["admit", config, "--out", out],
        ["train", config, "--out", out, *extra],
        ["resume", out],
        ["verify-receipt", out, "--require-all", "--deep"],
        ["status", out],
        ["report", out],
        ["generate", out, "--prompt", "What is the weather?", "--max-new-tokens", "2"],
        ["export", out, "--layout", "hf", "--out", str(project / "rows")],
        ["export", out, "--merged", str(project / "merged")],
        ["teacher", "register", "here", "--model", str(project / "model"), "--registry", teachers],
        ["teacher", "verify", "here", "--registry", teachers],
        ["teacher", "score", str(project / "request.jsonl"), "--teacher", "here", "--registry", teachers,
         "--out", str(project / "scored.jsonl")],
    ]  # fmt: skip


@pytest.fixture
def small(project: Path) -> Path:
    """Two rows, one epoch: two steps."""
    config = project / "kiln.toml"
    text = config.read_text(encoding="utf-8")
    for old, new in (("n_train = 16", "n_train = 2"), ("epochs = 2", "epochs = 1")):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text, encoding="utf-8")
    assert load_config(config).run.data.n_train == 2
    return project


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What asked for a name or a network in this process."""
    seen: list[str] = []

    def refuse(*arguments: object, **options: object) -> None:
        seen.append(repr(arguments))
        raise Opened(repr(arguments))

    for name in ("connect", "connect_ex", "sendto", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    return seen


def test_a2_no_stage_uses_a_socket_in_this_process(small: Path, kiln: Kiln, blocked: list[str]) -> None:
    with pytest.raises(Opened):
        socket.create_connection(("localhost", 80))
    blocked.clear()
    for arguments in stages(small):
        done = kiln(*arguments)
        assert done.code == 0, (arguments[0], done.err)
    assert blocked == []
    assert (small / RUN / "train" / "adapter" / "adapter_model.safetensors").exists()


def test_a2_a_teacher_behind_a_server_is_the_one_exception(small: Path, kiln: Kiln, blocked: list[str]) -> None:
    """Named on the command line, it is asked; this is also what shows that the guard sees what it must."""
    with pytest.raises(Opened):
        kiln("teacher", "register", "there", "--endpoint", "http://localhost:80", "--registry", small / "teachers")
    assert blocked


def test_a2_no_stage_uses_a_socket_as_a_process_nor_do_its_children(small: Path, tmp_path: Path) -> None:
    guard, log = tmp_path / "guard", tmp_path / "sockets.log"
    guard.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    path = os.pathsep.join([str(guard), *filter(None, sys.path)])
    environment = {**kept, "PYTHONPATH": path, "SOCKET_LOG": str(log)}

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    for attempt in ("socket.create_connection(('localhost', 80))", "socket.socket(socket.AF_INET)"):
        assert "Opened" in python("-c", f"import socket; {attempt}").stderr
    assert len(log.read_text().splitlines()) == 2
    log.unlink()
    chain = stages(small)
    done = python("-c", CHAIN, json.dumps(chain))
    assert not log.exists(), log.read_text()
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended: ")]
    assert ended == [f"ended: {arguments[0]} 0" for arguments in chain], done.stderr


def test_a2_the_adapter_holds_what_was_trained_and_no_embeddings(finished: Path) -> None:
    """Peft asks the hub whether a vocabulary changed, to decide on embeddings; here only LoRA is ever saved."""
    from kiln_stages.training.tensors import read_tensors

    tensors = read_tensors((finished / RUN / "train" / "adapter" / "adapter_model.safetensors").read_bytes())
    assert tensors
    assert all(".lora_A." in tensor.name or ".lora_B." in tensor.name for tensor in tensors)
