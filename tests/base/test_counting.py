"""One thing is told of in the singular, any other number in the plural, with a comma every three digits."""

from __future__ import annotations

import pytest

from kiln_cli.counting import counted


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (1001, "1,001 rows")])
def test_counted(count: int, text: str) -> None:
    assert counted(count, "row", "rows") == text
