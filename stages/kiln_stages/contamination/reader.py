"""How rows that are named are read."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kiln_cli.config import AdmitConfig
from kiln_cli.plugins import Plugins


class Reader(NamedTuple):
    """``base_dir``: where relative paths count from. ``scratch``: a directory for what is unpacked. ``registry``: of
    named data sets. ``near``: whether near duplicates are asked for. ``settings``: those of the admission that asks,
    for rows in a shape that only they describe.
    """

    plugins: Plugins
    base_dir: Path
    scratch: Path
    registry: Path
    near: bool = False
    settings: AdmitConfig = AdmitConfig()
