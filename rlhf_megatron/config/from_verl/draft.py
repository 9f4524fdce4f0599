"""The configuration of ours as it grows, and what could not be taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.from_verl.defaults import DEFAULTS
from rlhf_megatron.config.from_verl.given import Given
from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.redact import REDACTED, secrets_in
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.registry import Registry


@dataclass(frozen=True)
class Parts:
    """What is registered: the names and parameters that a configuration may have."""

    estimators: Registry[Any]
    losses: Registry[Any]
    rewards: Registry[Any]


@dataclass(frozen=True)
class Told:
    """What only a user knows. None: not told."""

    train_rows: int | None = None  # of the training files: epochs into steps
    response_length: int | None = None  # usual tokens of a response: nats a token into nats a response
    home: str = ""  # directory that ~ stands for


@dataclass(frozen=True)
class Value:
    value: Any
    sources: tuple[str, ...]  # names of verl's settings that it is made of
    is_default: bool  # of verl: the file does not say it
    note: str = ""  # where the meaning differs


@dataclass(frozen=True)
class Left:
    """A setting of verl without counterpart here."""

    name: str  # as written; "" where the file should say something and does not
    value: Any
    reason: str
    learns: bool  # it changes what is learnt


class Draft:
    def __init__(self, given: Given, parts: Parts, told: Told) -> None:
        self.given, self.parts, self.told = given, parts, told
        self.values: dict[str, Value] = {}
        self.left: list[Left] = []
        self.num_off = 0  # settings that ask for nothing

    def put(self, key: str, value: Any, sources: tuple[str, ...], note: str = "") -> None:
        """`sources`: settings of verl, in today's names; they are dealt with."""
        self.given.ignore(*sources)
        written = tuple(filter(self.given.has, sources))
        names = tuple(self.given.name(source) for source in written or sources)
        if secrets_in(value, key):
            self.left.append(Left(names[0] if names else key, REDACTED, "a secret: write it yourself", False))
            return
        self.values[key] = Value(value, names, bool(sources) and not written, note)

    def copy(self, source: str, key: str = "", value: Any = ..., note: str = "") -> None:
        """The setting `source` as ours of the name `key` (the same, if none is given); verl's default of it where the
        file is silent and ours is another."""
        key = key or source
        if value is ...:
            value = self.given.get(source)
        self.given.ignore(source)
        if not self.given.has(source) and (source not in DEFAULTS or _same(value, default_of(key))):
            return
        if value is not None or self.given.has(source):
            self.put(key, value, (source,), note)

    def leave(self, source: str, reason: str, learns: bool = False) -> None:
        value = self.given.get(source)
        name = self.given.name(source)
        self.left.append(Left(name, REDACTED if secrets_in(value, source) else value, reason, learns))

    def ask(self, reason: str) -> None:
        """Something that the file does not say, or not in our units, and that changes what is learnt."""
        self.left.append(Left("", None, reason, True))


def default_of(key: str) -> Any:
    """Ours; None for an entry of a free mapping."""
    return value_of(RunConfig(), key) if key in leaf_keys(RunConfig) else None


def _same(value: Any, other: Any) -> bool:
    plain = list(other) if isinstance(other, tuple) else other
    return bool(value == plain) and isinstance(value, bool) == isinstance(plain, bool)


def tree_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Key paths as nested sections, in the order of the schema; entries of free mappings stand inside of these."""
    order = {key: place for place, key in enumerate(leaf_keys(RunConfig))}
    tree: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: order.get(key, order.get(free_mapping(key), len(order)))):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = values[key]
    return tree


def free_mapping(key: str) -> str:
    """The setting of ours in which the entry `key` stands, or ""."""
    while key:
        if key in leaf_keys(RunConfig):
            return key
        key = key.rpartition(".")[0]
    return ""
