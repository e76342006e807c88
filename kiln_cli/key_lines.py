"""On which line a key of a TOML or JSON file stands, so that a fault of its value can be shown there.

Keys go by their path from the top, ``steps[1].config.epochs``. Both texts have been parsed before: what is read here is
only where things are. A key inside a TOML array or inline table has no line of its own; the key that holds it has.
"""

from __future__ import annotations

import re
from pathlib import Path

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]")
_KEY = re.compile(r"""\s*((?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*'))*)\s*=""")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:\n]')


def line_of(path: Path, text: str, dotted: str) -> int:
    """The line, from 1, of a key or of the nearest one that holds it; 0 where none of them stands in the text."""
    lines = json_lines(text) if path.suffix == ".json" else toml_lines(text)
    while dotted:
        if dotted in lines:
            return lines[dotted]
        dotted = re.sub(r"(?:\.[^.\[\]]+|\[\d+\]|^[^.\[\]]+)\Z", "", dotted)
    return 0


def toml_lines(text: str) -> dict[str, int]:
    """The line of each table and key, the first where a path occurs twice."""
    found: dict[str, int] = {}
    count: dict[str, int] = {}  # tables of each array of tables so far
    table, inside = "", ""  # the path of the open table; the quotes of the text of several lines that is open
    for number, line in enumerate(text.split("\n"), start=1):
        if not inside:
            if header := _HEADER.match(line):
                table = _table_path(_bare(header[2]), count, array=header[1] == "[[")
                found.setdefault(table, number)
            elif key := _KEY.match(line):
                path = table
                for part in _bare(key[1]):
                    path = f"{path}.{part}" if path else part
                    found.setdefault(path, number)
        for quotes in re.findall(r'"""|\'\'\'', line):
            inside = "" if inside == quotes else inside or quotes
    return found


def _bare(key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in key.split(".")]


def _table_path(parts: list[str], count: dict[str, int], *, array: bool) -> str:
    """The path of a header. A part that is an array of tables means the last table of it, or a new one."""
    path = ""
    for at, part in enumerate(parts):
        path = f"{path}.{part}" if path else part
        if array and at == len(parts) - 1:
            count[path] = count.get(path, 0) + 1
        if path in count:
            path += f"[{count[path] - 1}]"
    return path


def json_lines(text: str) -> dict[str, int]:
    """The line of each key and of each element of an array."""
    found: dict[str, int] = {}
    line, path = 1, ""
    stack: list[tuple[str, int]] = []  # of each open object or array: its path, and the element's number (-1: object)
    waiting = ""  # the text that is a key if a colon follows
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark == "\n":
            line += 1
        elif mark in "{[":
            if path.endswith("]"):
                found[path] = line  # an element begins here, not at the comma before it
            stack.append((path, 0 if mark == "[" else -1))
            path = f"{path}[0]" if mark == "[" else path
            found.setdefault(path, line)
        elif mark in "}]":
            path = stack.pop()[0]
        elif mark == "," and stack[-1][1] >= 0:
            stack[-1] = (stack[-1][0], stack[-1][1] + 1)
            path = f"{stack[-1][0]}[{stack[-1][1]}]"
            found[path] = line
        elif mark == ":":
            path = f"{stack[-1][0]}.{waiting}" if stack[-1][0] else waiting
            found.setdefault(path, line)
        else:
            waiting = mark[1:-1]
    return found
