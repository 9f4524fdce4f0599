"""A named table of interchangeable parts (estimators, losses, rewards, model families, tasks).

A part declares, beside its function, the dataclass of its parameters and the batch fields it needs, so that a
configuration can be checked against it before any process is started.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered part: `build` is the function or class, `params` its frozen parameter dataclass (or None)."""

    name: str
    build: T
    params: type | None
    needs: tuple[str, ...]  # names of the batch columns that the part reads


class Registry(Generic[T]):
    """Maps a name to an `Entry`. `kind` is the word used in error messages, e.g. "policy loss"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, params: type | None = None, needs: tuple[str, ...] = ()) -> Callable[[T], T]:
        """Decorator. Raises ValueError when `name` is taken by another part."""

        def add(build: T) -> T:
            if name in self._entries and self._entries[name].build is not build:
                raise ValueError(f"{self.kind} {name!r} is registered already; choose another name.")
            self._entries[name] = Entry(name, build, params, needs)
            return build

        return add

    def get(self, name: str) -> Entry[T]:
        """Raises ValueError naming the known parts when `name` is unknown."""
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            known = ", ".join(sorted(self._entries)) or "none"
            raise ValueError(f"unknown {self.kind} {name!r}.{hint} Known: {known}.")
        return self._entries[name]

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))
