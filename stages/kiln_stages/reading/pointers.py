"""What a JSON pointer (RFC 6901) leads to in a parsed value."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_INDEX = re.compile("0|[1-9][0-9]{0,9}")


def at_pointer(value: Any, pointer: str) -> Any:
    """The value that ``pointer`` (``/metadata/doc``) leads to; ``msgspec.UNSET`` where it leads nowhere."""
    found = value
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(key) and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return msgspec.UNSET
    return found
