"""Key paths of a tree of configuration dataclasses, and the nearest one to a misspelt path."""

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
    """Return a guess at the known key that an unknown `path` meant: the same name in another
    section, or a similar spelling. The guess is empty where nothing is near.
    """
    section, _, name = path.rpartition(".")
    elsewhere = [key for key in known_keys if key.rpartition(".")[2] == name]
    siblings = [key for key in known_keys if key.rpartition(".")[0] == section]
    near_names = difflib.get_close_matches(
        name, [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.75
    )
    if near_names:
        return _make_suggestion([join_key_path(section, near_names[0])])
    if elsewhere:
        best = difflib.get_close_matches(path, elsewhere, n=3, cutoff=0.0)
        return KeySuggestion(f"A key of that name exists as {' and '.join(best)}.", tuple(best))
    near_names = difflib.get_close_matches(
        name, [key.rpartition(".")[2] for key in siblings], n=1, cutoff=0.6
    )
    if near_names:
        return _make_suggestion([join_key_path(section, near_names[0])])
    near = difflib.get_close_matches(path, known_keys, n=1, cutoff=0.8)
    if not near:
        by_name = {key.rpartition(".")[2]: key for key in known_keys}
        near = [by_name[n] for n in difflib.get_close_matches(name, by_name, n=1, cutoff=0.7)]
    return _make_suggestion(near)


def _make_suggestion(keys: Sequence[str]) -> KeySuggestion:
    """Return the suggestion "Did you mean ...?" for the first key, or an empty suggestion without
    keys.
    """
    return KeySuggestion(f"Did you mean {keys[0]}?", tuple(keys)) if keys else KeySuggestion("")
