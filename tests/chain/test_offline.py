"""No stage opens a socket, and none asks for a name: the chain runs in a process where both would raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny_model import RUN

CHAIN = """
import socket, sys

class Opened(BaseException):
    '''No handler of a stage may swallow it.'''

def refuse(*arguments, **options):
    sys.stderr.write(f"SOCKET {arguments!r}\\n")
    raise Opened(repr(arguments))

for name in ("connect", "connect_ex", "sendto", "bind"):
    setattr(socket.socket, name, refuse)
for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "create_connection"):
    setattr(socket, name, refuse)
try:
    socket.create_connection(("localhost", 80))
except Opened:
    print("guarded", flush=True)

from kiln_cli.app import run
config, out = sys.argv[1:]
for arguments in (
    ["prepare", config, "--out", out],
    ["admit", config, "--out", out],
    ["train", config, "--out", out],
    ["verify-receipt", out, "--require-all"],
):
    print(arguments[0], run(arguments), flush=True)
"""


def test_no_stage_opens_a_socket(project: Path) -> None:
    config = project / "kiln.toml"
    text = config.read_text(encoding="utf-8")
    for old, new in (("n_train = 16", "n_train = 2"), ("epochs = 2", "epochs = 1")):
        assert old in text
        text = text.replace(old, new)
    config.write_text(text, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", CHAIN, str(config), str(project / RUN)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = [line for line in done.stdout.splitlines() if line.split()[0] in STAGES]
    assert results == [f"{stage} 0" for stage in STAGES], done.stdout + done.stderr
    assert done.stderr.count("SOCKET") == done.stdout.count("guarded") == 1


STAGES = ("prepare", "admit", "train", "verify-receipt")
