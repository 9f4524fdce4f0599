"""Holds our configuration as it grows, and what of verl's could not be taken over; writes both as commented YAML."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import REDACTED, secrets_in
from rlhf_megatron.config.show import as_text
from rlhf_megatron.config.verl_names import VERL_NAMES, VerlName, entry_of
from rlhf_megatron.verl.given import DEFAULTS, Given


@dataclass(frozen=True)
class Told:
    """Facts that only the user knows. None: not told."""

    train_rows: int | None = None  # of the training files: epochs into steps
    response_length: int | None = None  # usual tokens of a response: nats a token into nats a response
    home: str = ""  # directory that ~ stands for
    reward: str = ""  # our reward's name, where it is given


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
    def __init__(self, given: Given, told: Told) -> None:
        self.given, self.told = given, told
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

    def take(
        self, source: str, key: str = "", as_ours: Callable[[Any], Any] = lambda value: value, note: str = ""
    ) -> None:
        """Put the setting `source`, where verl has a value for it, as ours of the name `key` (or of the same name)."""
        value = self.given.get(source)
        if value is not None:
            self.put(key or source, as_ours(value), (source,), note)

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
    """The setting of ours that `key` is, or in which it stands as an entry; or ""."""
    while key:
        if key in leaf_keys(RunConfig):
            return key
        key = key.rpartition(".")[0]
    return ""


LEARNING = ("actor", "algorithm", "critic", "data", "distillation", "model", "reference", "reward", "rollout")
"""Sections in which an unknown setting may change what is learnt."""

FOLLOWERS = {
    "critic.model.tokenizer_path": "model.path",
    **{f"{role}.rollout_n": "rollout.n" for role in ("actor", "critic", "reference")},
}


def rest(draft: Draft) -> None:
    for key in draft.given.rest():
        if key.rpartition(".")[2] == "_target_":
            draft.given.ignore(key)
        elif (key in leaf_keys(RunConfig) and draft.given.look(key) is None is default_of(key)) or _follows(draft, key):
            draft.given.ignore(key)
            draft.num_off += 1
        elif (ours := free_mapping(key)) and (ours == key or isinstance(default_of(ours), Mapping)):
            draft.copy(key)
        else:
            _leave(draft, key)


def _follows(draft: Draft, key: str) -> bool:
    """verl's copies of other settings, as long as they are that."""
    other = FOLLOWERS.get(key)
    return other is not None and draft.given.look(key) == draft.given.look(other)


def _leave(draft: Draft, key: str) -> None:
    entry, value = entry_of(key), draft.given.get(key)
    if entry is None:
        reason = f"unknown; {near(key)}" if near(key) else "unknown"
        draft.leave(key, reason, learns=not is_off(value) and key.partition(".")[0] in LEARNING)
    elif is_off(value) or value in entry.off or not _is_switched_on(draft, entry):
        draft.num_off += 1
    else:
        draft.leave(key, reason_of(entry), entry.learns)


def reason_of(entry: VerlName) -> str:
    """Say why a setting has no counterpart here, or which setting to use instead."""
    note = entry.note.removesuffix("; remove it")
    if entry.target is None:
        return note
    return f"see {entry.target}: {note}" if note else f"see {entry.target}"


def _is_switched_on(draft: Draft, entry: VerlName) -> bool:
    return not entry.switch or not is_off(draft.given.look(entry.switch))


def is_off(value: Any) -> bool:
    """A value that asks for nothing."""
    return value is None or value is False or value in ("", "null", "none", "None", "disabled", 0, [], {}, -1)


def near(key: str) -> str:
    """Guess what a misspelt setting of verl meant, as a sentence or ""."""
    known = (
        {entry.name for entry in VERL_NAMES if not entry.name.endswith("*")} | set(DEFAULTS) | set(leaf_keys(RunConfig))
    )
    section, _, name = key.rpartition(".")
    siblings = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
    found = difflib.get_close_matches(name, siblings, n=1, cutoff=0.7)
    best = [siblings[found[0]]] if found else difflib.get_close_matches(key, known, n=1, cutoff=0.85)
    return f"did you mean {best[0]}?" if best else ""


WIDTH = 116
COLUMN = 58  # where comments beside a value begin, as far as values let them


def as_yaml(
    values: dict[str, Value],
    left: Sequence[Left],
    dropped: Sequence[tuple[str, str]],
    notes: Sequence[str],
    source: str,
) -> str:
    """`dropped`: (our setting, why) that would have no effect. The text loads as a configuration of ours."""
    lines = [
        *_comment(
            f"From {source} by `rlhf-megatron config from-verl`. Beside a value: the setting of verl that it is made"
            " of; (default): the file is silent, and verl does this."
        )
    ]
    for section, tree in tree_of(values).items():
        lines += ["", *_section(section, tree, 0)]
    for title, items in (
        ("Without counterpart, and it changes what is learnt:", [line_of(one) for one in left if one.learns]),
        ("Without counterpart:", [line_of(one) for one in left if not one.learns]),
        ("Left out, as it would have no effect here:", [f"{key}: {why}" for key, why in dropped]),
        ("Notes:", notes),
    ):
        if items:
            lines += ["", *_comment(title)]
            for item in items:
                lines += _comment(item, "- ")
    return "\n".join(lines) + "\n"


def line_of(left: Left) -> str:
    return f"{left.name}={shown(left.value)}: {left.reason}" if left.name else left.reason


def shown(value: Any) -> str:
    """Format a value on one line of at most 80 characters."""
    text = as_text(value).replace("\n", " ")
    return text if len(text) <= 80 else text[:77] + "..."


def _section(name: str, node: Any, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if isinstance(node, Value):
        yield from _comment(node.note, "", indent) if node.note else ()
        line = f"{indent}{as_text(name)}: {as_text(node.value)}"
        origin = ", ".join(node.sources) + (" (default)" if node.is_default else "")
        yield f"{line:<{COLUMN}}  # {_plain(origin)}" if node.sources else line
        return
    yield f"{indent}{as_text(name)}:"
    for child, below in node.items():
        yield from _section(child, below, depth + 1)


def _comment(text: str, bullet: str = "", indent: str = "") -> list[str]:
    start = f"{indent}# {bullet}"
    return textwrap.wrap(
        _plain(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=f"{indent}# {' ' * len(bullet)}",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    """Remove characters that would end a comment, or that YAML forbids in one."""
    return "".join(char if char.isprintable() else " " if char.isspace() else "?" for char in text)
