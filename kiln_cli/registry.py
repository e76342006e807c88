"""Named things from plugins: no duplicates, no surprises in their order, nothing added after the start."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

import msgspec

from kiln_cli.errors import KilnError
from kiln_cli.text import printable


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)


class Owner(msgspec.Struct, frozen=True, order=True):
    """The installed distribution that a plugin came from."""

    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


class Registry(Generic[T]):
    """Values of one kind by name, in a declared order, each with its owner. Frozen once built."""

    def __init__(
        self,
        kind: str,
        entries: Iterable[tuple[Owner, T]],
        order: Callable[[T], int] = lambda value: 0,
    ) -> None:
        self.kind = kind
        owners: dict[str, Owner] = {}
        values: dict[str, T] = {}
        for owner, value in entries:
            if value.name in owners:
                raise KilnError(
                    "KLN210",
                    f"{kind} {printable(value.name)!r} is provided by both {owners[value.name]} and {owner}",
                    hint="uninstall one, or limit what is loaded: KILN_PLUGINS=distribution,...",
                )
            owners[value.name] = owner
            values[value.name] = value
        names = sorted(values, key=lambda name: (order(values[name]), name))
        self._values = {name: values[name] for name in names}
        self._owners = owners

    def __iter__(self) -> Iterator[T]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> list[str]:
        return list(self._values)

    def owner(self, name: str) -> Owner:
        return self._owners[name]

    def get(self, name: str) -> T:
        """The value of this name. Raises KilnError KLN212 with the nearest name there is."""
        try:
            return self._values[name]
        except KeyError:
            near = difflib.get_close_matches(name, self._values, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise KilnError(
                "KLN212",
                f"no {self.kind} is named {printable(name)!r}; there are: {', '.join(self._values) or 'none'}",
                hint=f"{hint}`kiln plugins` lists what is loaded",
            ) from None
