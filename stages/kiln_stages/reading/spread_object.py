"""Pretty-printed JSON: an object that is spread over lines is one row, not as many broken ones.

A file that holds one such object is read as that row. Several of them are no JSON lines and no array; the file is
refused as a whole, since every line of it would be.
"""

from __future__ import annotations

import json
from typing import BinaryIO

from kiln_cli.errors import KilnError
from kiln_cli.lines import BOM, LINE_CAP, TRIMMED
from kiln_stages.reading.array_lines import first_line, is_open

_BLANKS = TRIMMED.decode("ascii")
_LINE_ENDS_TO_BLANKS = bytes.maketrans(b"\r\n", b"  ")
# Places alone are wanted: what is wrong with the numbers of a row is that row's own fault.
_PLACES = json.JSONDecoder(parse_int=len, parse_float=len)


def spread_object(stream: BinaryIO, name: str) -> bytes | None:
    """The one object of a file as a line, each byte in its place; None where the file has lines to be judged each.

    The object is at most as long as a line may be; what is longer is left to the rules of lines. Raises KilnError
    KLN206 where another object begins behind it and is spread over lines too.
    """
    try:
        if not _begins_object(first_line(stream)):
            return None
        stream.seek(0)
        head = stream.read(LINE_CAP + len(BOM) + 1)
    finally:
        stream.seek(0)
    text = head.removeprefix(BOM)
    source = text.decode("utf-8", "surrogateescape")
    start = len(source) - len(source.lstrip(_BLANKS))
    try:
        _, end = _PLACES.raw_decode(source, start)
    except (ValueError, RecursionError):
        return None
    behind = source[end:].lstrip(_BLANKS)
    if not behind and len(text) <= LINE_CAP:
        return b" " * (len(head) - len(text)) + text.translate(_LINE_ENDS_TO_BLANKS)
    first, last = (source.count("\n", 0, place) + 1 for place in (start, end))
    if first == last or not _begins_object(behind.partition("\n")[0].encode("utf-8", "surrogateescape")):
        return None
    raise KilnError(
        "KLN206",
        f"{name} looks pretty-printed: its first object is spread over lines {first} to {last}, the next one too",
        hint="write one object a line (`jq -c . FILE`), or put them into one JSON array",
    )


def _begins_object(line: bytes) -> bool:
    return line.startswith(b"{") and is_open(line)
