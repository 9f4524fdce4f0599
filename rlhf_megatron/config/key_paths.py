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
    return f"{path}.{key}" if path else key


@cache
def resolve_field_types(cls: type) -> dict[str, Any]:
    """Field name -> resolved annotation, of a dataclass."""
    hints = get_type_hints(cls)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def list_setting_leaves(cls: type, path: str = "") -> tuple[SettingLeaf, ...]:
    """All settings below a dataclass, in the order of the schema. Sections are
    walked, not returned.
    """
    return tuple(_walk_setting_leaves(cls, path))


def _walk_setting_leaves(cls: type, path: str) -> Iterator[SettingLeaf]:
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
    return tuple(leaf.key for leaf in list_setting_leaves(cls))


@cache
def list_section_keys(cls: type) -> tuple[str, ...]:
    """Full key paths of all sections below a dataclass."""
    found = []
    for key in list_leaf_keys(cls):
        parts = key.split(".")
        found += [".".join(parts[:depth]) for depth in range(1, len(parts))]
    return tuple(dict.fromkeys(found))


def get_config_value(config: Any, key: str) -> Any:
    """The value at a full key path; entries of free mappings are reached by their name, None
    where it lacks.
    """
    value = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else getattr(value, name)
    return value


def has_field_default(cls: type, field_name: str) -> bool:
    found = next(f for f in fields(cls) if f.name == field_name)
    return found.default is not MISSING or found.default_factory is not MISSING


def suggest_nearest_key(path: str, known_keys: Sequence[str]) -> KeySuggestion:
    """The known keys that an unknown `path` may have meant: the same name elsewhere, else a
    similar spelling.
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
    return KeySuggestion(f"Did you mean {keys[0]}?", tuple(keys)) if keys else KeySuggestion("")
