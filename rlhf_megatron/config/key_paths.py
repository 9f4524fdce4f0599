"""Key paths of a tree of configuration dataclasses, and the ones that an unknown path meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from rlhf_megatron.config.schema.setting_fields import NOT_NEGATIVE, Interval


@dataclass(frozen=True)
class SettingLeaf:
    """A setting: its full key path, annotated type, one-line description and the interval that its
    numbers lie in.
    """

    key: str
    type: Any
    doc: str = ""
    bounds: Interval = NOT_NEGATIVE


@dataclass(frozen=True)
class KeySuggestion:
    """A guess at what a misspelt key meant. `text` is a whole sentence or empty."""

    text: str
    keys: tuple[str, ...] = ()


def join_key_path(path: str, key: str) -> str:
    """Return the full key path of `key` in the section at `path`; `path` "" is the root."""
    return f"{path}.{key}" if path else key


@cache
def resolve_field_types(cls: type) -> dict[str, Any]:
    """Return field name -> resolved type annotation for the fields of a dataclass."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def list_setting_leaves(cls: type, path: str = "") -> tuple[SettingLeaf, ...]:
    """Return all settings below a dataclass, in the order of the schema, with full key paths that
    begin with `path`. Sections are descended into and are not returned themselves.
    """
    return tuple(_walk_setting_leaves(cls, path))


def _walk_setting_leaves(cls: type, path: str) -> Iterator[SettingLeaf]:
    """Yield the settings below a dataclass, with full key paths that begin with `path`."""
    types = resolve_field_types(cls)
    for f in fields(cls):
        key = join_key_path(path, f.name)
        if isinstance(types[f.name], type) and is_dataclass(types[f.name]):
            yield from list_setting_leaves(types[f.name], key)
        else:
            yield SettingLeaf(
                key,
                types[f.name],
                f.metadata.get("doc", ""),
                f.metadata.get("bounds", NOT_NEGATIVE),
            )


@cache
def list_leaf_keys(cls: type) -> tuple[str, ...]:
    """Return the full key paths of all settings below a dataclass, in the order of the schema."""
    return tuple(leaf.key for leaf in list_setting_leaves(cls))


@cache
def list_section_keys(cls: type) -> tuple[str, ...]:
    """Return the full key paths of all sections below a dataclass, in the order of the schema."""
    found = []
    for key in list_leaf_keys(cls):
        parts = key.split(".")
        found += [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return tuple(dict.fromkeys(found))


def get_config_value(config: Any, key: str) -> Any:
    """Return the value at a full key path. An entry of a free mapping is reached by its name, and
    is None where the mapping lacks the name. Raise AttributeError for an unknown setting.
    """
    value = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def has_field_default(cls: type, field_name: str) -> bool:
    """Return whether the field of this dataclass has a default value or a default factory."""
    found = next(f for f in fields(cls) if f.name == field_name)
    return found.default is not MISSING or found.default_factory is not MISSING


def suggest_nearest_key(path: str, known_keys: Sequence[str]) -> KeySuggestion:
    """Return a guess at the known key that an unknown `path` meant: a misspelt path, a setting of
    the same section whose name has the same words, the same name in another section, or a misspelt
    name there. The guess is empty where nothing is really near.
    """
    section, _, name = path.rpartition(".")
    if misspelt := [key for key in known_keys if _is_misspelt_path(path, key)]:
        best = min(misspelt, key=lambda key: _count_edits(path, key))
        return _make_suggestion([best])
    siblings = [key for key in known_keys if key.rpartition(".")[0] == section]
    if same_words := _find_keys_with_words(name, siblings):
        return _make_suggestion(same_words)
    elsewhere = [key for key in known_keys if key.rpartition(".")[2] == name]
    if name in _NAMES_OF_MANY_THINGS:
        top = path.partition(".")[0]
        elsewhere = [key for key in elsewhere if _is_same_or_misspelt(top, key.partition(".")[0])]
    if elsewhere:
        best_keys = difflib.get_close_matches(path, elsewhere, n=3, cutoff=0.0)
        text = f"A key of that name exists as {' and '.join(best_keys)}."
        return KeySuggestion(text, tuple(best_keys))
    if len(name) < _LENGTH_OF_TELLING_NAMES:
        return KeySuggestion("")
    near = [key for key in known_keys if _is_misspelt_name(name, key.rpartition(".")[2])]
    near = near or [key for key in known_keys if _contains_words(name, key.rpartition(".")[2])]
    return _make_suggestion(sorted(near, key=lambda key: _count_edits(path, key))[:1])


_NAMES_OF_MANY_THINGS = ("enable", "model", "name", "params", "path", "type")
"""Names that say little without their section."""

_LENGTH_OF_TELLING_NAMES = 6  # characters: shorter names are near to too many others


def _find_keys_with_words(name: str, keys: Sequence[str]) -> list[str]:
    """Return those of the keys, at most two, whose names have all words of `name` and one more, or
    at least two words and all of them in `name`; in the order of `keys`.
    """
    words = {*name.split("_")}
    if max(map(len, words)) >= 4:
        names = {key: {*key.rpartition(".")[2].split("_")} for key in keys}
        if with_one_more := [
            key for key in keys if words < names[key] and len(names[key] - words) == 1
        ]:
            return with_one_more[:2]
    return [key for key in keys if _contains_words(name, key.rpartition(".")[2])][:1]


def _contains_words(name: str, known_name: str) -> bool:
    """Return whether `name` has all words of `known_name`, which has two or more."""
    known_words = {*known_name.split("_")}
    return len(known_words) > 1 and known_words < {*name.split("_")}


def _is_misspelt_path(path: str, known_key: str) -> bool:
    """Return whether a path is as deep as a known key, and each of its parts is the key's or a
    misspelling of it.
    """
    parts = path.split(".")
    known_parts = known_key.split(".")
    return len(parts) == len(known_parts) and all(
        _is_same_or_misspelt(part, known_part)
        for part, known_part in zip(parts, known_parts, strict=True)
    )


def _is_same_or_misspelt(name: str, known_name: str) -> bool:
    """Return whether two names are the same, or the first is a misspelling of the second."""
    return name == known_name or _is_misspelt_name(name, known_name)


def _is_misspelt_name(name: str, known_name: str) -> bool:
    """Return whether a name differs from a known one in few letters: in 1 of up to 5, 2 of up to
    12, or 3. Names of up to 3 letters are misspellings of nothing.
    """
    length = max(len(name), len(known_name))
    if length < 4 or abs(len(name) - len(known_name)) > 3:
        return False
    max_edits = 3
    if length <= 12:
        max_edits = 2
    if length <= 5:
        max_edits = 1
    return _count_edits(name, known_name) <= max_edits


def _count_edits(text: str, other: str) -> int:
    """Return the least number of letters to insert, remove, replace or swap with a neighbour that
    turns one text into the other (optimal string alignment).
    """
    before_last: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(text, 1):
        row = [i]
        for j, other_letter in enumerate(other, 1):
            replaced = last[j - 1] + (letter != other_letter)
            row.append(min(last[j] + 1, row[j - 1] + 1, replaced))
            if i > 1 and j > 1 and (letter, text[i - 2]) == (other[j - 2], other_letter):
                row[j] = min(row[j], before_last[j - 2] + 1)
        before_last, last = last, row
    return last[-1]


def _make_suggestion(keys: Sequence[str]) -> KeySuggestion:
    """Return the suggestion "Did you mean ...?" for the keys, or an empty suggestion without
    keys.
    """
    return KeySuggestion(f"Did you mean {' or '.join(keys)}?" if keys else "", tuple(keys))
