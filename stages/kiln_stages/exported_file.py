"""How an export names a file that it wrote."""

from __future__ import annotations

import msgspec


class ExportedFile(msgspec.Struct, frozen=True, kw_only=True):
    """``path`` is relative to the directory that was written; ``sha256`` is bare hex."""

    path: str
    sha256: str
    bytes: int
