"""Optional packages: named when they are missing, before anything is begun."""

from __future__ import annotations

import importlib.util

from kiln_cli.errors import KilnError

TRAIN_EXTRA = ("torch", "transformers", "peft")


def require_train_extra(what: str) -> None:
    """Raises KilnError KLN301 where a package of the extra ``train`` is not installed."""
    absent = [name for name in TRAIN_EXTRA if importlib.util.find_spec(name) is None]
    if absent:
        raise KilnError(
            "KLN301",
            f"{what} needs {', '.join(absent)}, which {'is' if len(absent) == 1 else 'are'} not installed",
            hint="pip install 'kiln-toolkit[train]'",
        )
