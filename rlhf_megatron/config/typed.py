"""Turns nodes into typed dataclasses: every leaf is checked against its annotation, and all problems are gathered.

The parameters of a registered part, which stand in a free mapping, are checked in the same way. Types are strict:
a plain YAML scalar becomes text where text is wanted (`experiment_name: 2024`); whole numbers become floats; nothing
else is cast.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.keys import Suggestion, field_types, has_default, join, leaf_keys, nearest
from rlhf_megatron.config.source import DEFAULT, Loaded, MappingNode, Node, Origin, Scalar, SequenceNode, lift, plain
from rlhf_megatron.registry import Entry, Registry

LARGEST = int(sys.float_info.max)  # whole numbers beyond have no float; none is in any range
BROKEN: Any = object()
"""Stands for a value that could not be converted; its problem has been noted."""

NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}

UNQUOTED = {
    int: re.compile(r"[-+]?(0|[1-9]\d*)\Z"),
    float: re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z"),
    bool: re.compile(r"(?i)(true|false)\Z"),
    str: re.compile(r"(?!)"),
}
"""What would have been right without quotes."""


class Converter:
    """Converts one tree. Afterwards `problems`, `provenance` and `broken` (keys without a reliable value) are filled.

    `suggest` tells for an unknown key what it may have meant; `expand` whether to look for known keys below it.
    """

    def __init__(self, suggest: Callable[[str], Suggestion], expand: Callable[[str], bool] = lambda key: False) -> None:
        self._suggest = suggest
        self._expand = expand
        self.problems: list[Problem] = []
        self.provenance: dict[str, Origin] = {}
        self.broken: set[str] = set()

    def section(self, cls: type, node: Node, path: str, default: Any = None) -> Any:
        """An instance of dataclass `cls`; what the node does not give is taken from `default`, or from the class."""
        if not isinstance(node, MappingNode):
            what = (
                "is empty" if isinstance(node, Scalar) and node.value is None else f"({_show(node)}) is not a section"
            )
            return self._refuse(path, node, f"{what}; give it keys with values or remove it.")
        kinds = field_types(cls)
        values: dict[str, Any] = {}
        for name, child in node.items.items():
            key = join(path, name)
            if name not in kinds:
                self._unknown(key, child)
                continue
            value = self.value(kinds[name], child, key, getattr(default, name, None))
            if value is not BROKEN:
                values[name] = value
        if default is not None:
            return replace(default, **values)
        missing = [name for name in kinds if name not in node.items and not has_default(cls, name)]
        for name in missing:
            self._refuse(join(path, name), node, f"is missing; it has no default: give {_name(kinds[name])}.")
        if any(name not in values and not has_default(cls, name) for name in kinds):
            return BROKEN
        try:
            return cls(**values)
        except (ValueError, TypeError, ArithmeticError) as error:  # a rule of the class itself
            return self._refuse(path, node, f": {error}")

    def value(self, kind: Any, node: Node, key: str, default: Any = None) -> Any:
        """The node as a value of the annotated type `kind`, or BROKEN."""
        if isinstance(kind, type) and is_dataclass(kind):
            return self.section(kind, node, key, default)
        self.provenance[key] = node.origin
        origin = get_origin(kind)
        if kind is Any:
            self._note_entries(node, key)
            return plain(node)
        if origin in (Union, types.UnionType):
            return self._union(kind, node, key)
        if origin is Literal:
            return self._choice(get_args(kind), node, key)
        if origin is tuple or origin is list:
            return self._sequence(kind, node, key)
        if origin is dict:
            return self._mapping(kind, node, key)
        assert kind in NAMES, f"{key}: a configuration field cannot have type {kind}"
        return self._scalar(kind, node, key)

    def _scalar(self, kind: type, node: Node, key: str) -> Any:
        if not isinstance(node, Scalar):
            return self._refuse(key, node, f"({_show(node)}) must be {NAMES[kind]}; write a single value.")
        value = node.value
        if kind is str and node.is_plain and value is not None:
            return node.text
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return float(min(max(value, -LARGEST), LARGEST)) if isinstance(value, int) else value
        if type(value) is kind and value == value:
            return value
        if value is None:
            fix = "give a value, or remove the key for the default."
        elif isinstance(value, str) and not node.is_plain and UNQUOTED[kind].match(value):
            fix = "remove the quotes and write it plainly."
        elif kind is str:
            fix = f"put it in quotes: '{node.text}'."
        elif kind is int and isinstance(value, float):
            fix = f"write it without point and exponent, such as {round(value) if math.isfinite(value) else 1}."
        else:
            fix = "write " + {int: "digits only, such as 8.", float: "one such as 1e-6.", bool: "true or false."}[kind]
        return self._refuse(key, node, f"({_show(node)}) must be {NAMES[kind]}; {fix}")

    def _union(self, kind: Any, node: Node, key: str) -> Any:
        options = get_args(kind)
        if isinstance(node, Scalar) and node.value is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        for option in options[:-1]:
            attempt = Converter(self._suggest)
            value = attempt.value(option, node, key)
            if not attempt.problems:
                return value
        return self.value(options[-1], node, key)

    def _choice(self, choices: tuple[Any, ...], node: Node, key: str) -> Any:
        if isinstance(node, Scalar):
            for choice in choices:
                if node.value == choice and type(node.value) is type(choice):
                    return choice
        known = ", ".join(str(choice) for choice in choices)
        near = difflib.get_close_matches(str(_plain_text(node)), [str(choice) for choice in choices], n=1)
        fix = f"did you mean {near[0]}?" if near else f"choose {choices[0]}."
        rule = f"must be one of {known}" if len(choices) > 1 else f"must be {known}"
        return self._refuse(key, node, f"({_show(node)}) {rule}; {fix}")

    def _sequence(self, kind: Any, node: Node, key: str) -> Any:
        if not isinstance(node, SequenceNode):
            return self._refuse(key, node, f"({_show(node)}) must be a list; write [{_show(node)}] with brackets.")
        arguments = get_args(kind)
        if get_origin(kind) is list or arguments[-1] is Ellipsis:
            kinds = arguments[:1] * len(node.items)
        else:
            kinds = arguments
            if len(node.items) != len(kinds):
                fix = f"write {len(kinds)}, between brackets."
                return self._refuse(key, node, f"({_show(node)}) must have {len(kinds)} entries; {fix}")
        values = [
            self.value(item_kind, item, f"{key}[{index}]")
            for index, (item_kind, item) in enumerate(zip(kinds, node.items, strict=True))
        ]
        for index in range(len(values)):
            self.provenance.pop(f"{key}[{index}]", None)
        if any(value is BROKEN for value in values):
            self.broken.add(key)
            return BROKEN
        return get_origin(kind)(values)

    def _mapping(self, kind: Any, node: Node, key: str) -> Any:
        if not isinstance(node, MappingNode):
            return self._refuse(key, node, f"({_show(node)}) must be a mapping; write {{name: value}}.")
        values = {name: self.value(get_args(kind)[1], item, join(key, name)) for name, item in node.items.items()}
        return BROKEN if any(value is BROKEN for value in values.values()) else values

    def _note_entries(self, node: Node, key: str) -> None:
        self.provenance[key] = node.origin
        if isinstance(node, MappingNode):
            for name, child in node.items.items():
                self._note_entries(child, join(key, name))

    def _unknown(self, key: str, node: Node) -> None:
        if isinstance(node, MappingNode) and node.items and self._expand(key):
            for name, child in node.items.items():
                self._unknown(join(key, name), child)
            return
        suggestion = self._suggest(key)
        what = "section" if isinstance(node, MappingNode) else "key"
        hint = suggestion.text or "Remove it; `rlhf-megatron config reference` lists all keys."
        self.broken.update(suggestion.keys)
        self.problems.append(Problem(f"unknown {what} {key} ({_show(node)}). {hint}", (key,), str(node.origin)))

    def _refuse(self, key: str, node: Node, text: str) -> Any:
        self.broken.add(key)
        space = "" if text.startswith(":") else " "
        self.problems.append(Problem(f"{key}{space}{text}", (key,), str(node.origin)))
        return BROKEN


def _plain_text(node: Node) -> Any:
    return node.text if isinstance(node, Scalar) else plain(node)


def _show(node: Node) -> str:
    """The value as its writer would recognise it, in at most 80 characters."""
    if isinstance(node, Scalar):
        text = node.text if node.is_plain and node.text else repr(node.value) if node.value is not None else "null"
    else:
        text = str(plain(node))
    return text if len(text) <= 80 else text[:77] + "..."


def _name(kind: Any) -> str:
    return NAMES.get(kind, "a value")


P = TypeVar("P")
T = TypeVar("T")


def params_from_mapping(cls: type[P], mapping: Mapping[str, Any], where: str, loaded: Loaded | None = None) -> P:
    """An instance of the dataclass `cls`, as strictly checked as the configuration itself.

    `where` is the key path of the mapping ("actor.policy_loss.params"). With `loaded`, messages name file and line.
    Raises ConfigError with all unknown names, wrong types, missing values and what `cls.__post_init__` refuses.
    """
    kind: type = cls
    known = [join(where, key) for key in leaf_keys(kind)]
    converter = Converter(lambda key: nearest(key, known))
    params = converter.section(kind, lift(mapping, DEFAULT), where)
    if converter.problems:
        origins = loaded or Loaded.of_nothing()
        problems = []
        for problem in converter.problems:
            origin = origins.origin(problem.keys[0])
            problems.append(replace(problem, where="" if origin is DEFAULT else str(origin)))
        raise ConfigError(problems)
    assert params is not BROKEN
    return params


def look_up(
    registry: Registry[T], name: str, params: Mapping[str, Any], key: str, problems: list[str], field: str = "params"
) -> tuple[Entry[T], Any] | tuple[None, None]:
    """(entry, its parameters) of the part that `key` names, or a pair of None and what is wrong added to `problems`."""
    try:
        entry = registry.get(name)
        if params and entry.params is None:
            problems.append(f"{key}.{field} ({params}) must be empty: {registry.kind} {name!r} has no parameters.")
        return entry, (params_from_mapping(entry.params, params, f"{key}.{field}") if entry.params else None)
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"{key}: {error}")
    return None, None
