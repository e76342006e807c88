"""The plugin author's API. A plugin imports from here and nothing deeper; ``docs/hooks.md`` has a page a hook."""

from kiln_cli.chat import ChatRow
from kiln_cli.errors import KilnError, RowFault
from kiln_cli.extensions import DropReason, Head, Loss, LossBatch, LossOut, Observed, Source, Template
from kiln_cli.hookspecs import hookimpl
from kiln_cli.records import Candidate, Record, ToolCallRow

__all__ = [
    "Candidate",
    "ChatRow",
    "DropReason",
    "Head",
    "KilnError",
    "Loss",
    "LossBatch",
    "LossOut",
    "Observed",
    "Record",
    "RowFault",
    "Source",
    "Template",
    "ToolCallRow",
    "hookimpl",
]
