"""Turns nodes into typed dataclasses: every leaf is checked against its annotation, and all
problems are gathered.

The parameters of a registered part, which stand in a free mapping, are checked in the same way.
Types are strict:
a plain YAML scalar becomes text where text is wanted (`experiment_name: 2024`); whole numbers
become floats; nothing else is cast.
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

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.key_paths import (
    KeySuggestion,
    has_field_default,
    join_key_path,
    list_leaf_keys,
    resolve_field_types,
    suggest_nearest_key,
)
from rlhf_megatron.config.yaml_nodes import (
    DEFAULT,
    LoadedConfig,
    MappingNode,
    Node,
    ScalarNode,
    SequenceNode,
    ValueOrigin,
    convert_to_nodes,
    convert_to_plain,
)
from rlhf_megatron.registry import Registry, RegistryEntry

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

P = TypeVar("P")
T = TypeVar("T")


class ConfigConverter:
    """Converts one tree of nodes into a dataclass. Afterwards `problems`, `provenance` and
    `broken_keys` (keys without a reliable value) are filled.

    `suggest_key` returns a guess at the meaning of an unknown key; `should_expand` returns whether
    the keys below an unknown section deserve a message each.
    """

    def __init__(
        self,
        suggest_key: Callable[[str], KeySuggestion],
        should_expand: Callable[[str], bool] = lambda key: False,
    ) -> None:
        """Begin without problems; see the class for the two functions."""
        self._suggest_key = suggest_key
        self._should_expand = should_expand
        self.problems: list[ConfigProblem] = []
        self.provenance: dict[str, ValueOrigin] = {}
        self.broken_keys: set[str] = set()

    def convert_section(self, cls: type, node: Node, path: str, default: Any = None) -> Any:
        """Return an instance of the dataclass `cls`, with values that the node lacks taken from
        `default` or from the class. Record problems of single values; return BROKEN, with a
        recorded problem, where no instance can be made.
        """
        if not isinstance(node, MappingNode):
            what = (
                "is empty"
                if isinstance(node, ScalarNode) and node.value is None
                else f"({_format_node(node)}) is not a section"
            )
            return self._report_problem(
                path, node, f"{what}; give it keys with values or remove it."
            )
        kinds = resolve_field_types(cls)
        values: dict[str, Any] = {}
        for name, child in node.items.items():
            key = join_key_path(path, name)
            if name not in kinds:
                self._report_unknown_key(key, child)
                continue
            value = self.convert_value(kinds[name], child, key, getattr(default, name, None))
            if value is not BROKEN:
                values[name] = value
        if default is not None:
            return replace(default, **values)
        missing = [
            name for name in kinds if name not in node.items and not has_field_default(cls, name)
        ]
        for name in missing:
            self._report_problem(
                join_key_path(path, name),
                node,
                f"is missing; it has no default: give {_describe_scalar_type(kinds[name])}.",
            )
        if any(name not in values and not has_field_default(cls, name) for name in kinds):
            return BROKEN
        try:
            return cls(**values)
        except (ValueError, TypeError, ArithmeticError) as error:  # a rule of the class itself
            return self._report_problem(path, node, f": {error}")

    def convert_value(self, annotation: Any, node: Node, key: str, default: Any = None) -> Any:
        """Return the node as a value of the type `annotation`, or BROKEN with a recorded problem.
        Record the origin of the value under `key`.
        """
        if isinstance(annotation, type) and is_dataclass(annotation):
            return self.convert_section(annotation, node, key, default)
        self.provenance[key] = node.origin
        origin = get_origin(annotation)
        if annotation is Any:
            self._record_entry_origins(node, key)
            return convert_to_plain(node)
        if origin in (Union, types.UnionType):
            return self._convert_union(annotation, node, key)
        if origin is Literal:
            return self._convert_choice(get_args(annotation), node, key)
        if origin is tuple or origin is list:
            return self._convert_sequence(annotation, node, key)
        if origin is dict:
            return self._convert_mapping(annotation, node, key)
        assert annotation in NAMES, f"{key}: a configuration field cannot have type {annotation}"
        return self._convert_scalar(annotation, node, key)

    def _convert_scalar(self, scalar_type: type, node: Node, key: str) -> Any:
        """Return the node as a scalar of this type, or BROKEN with a recorded problem. Plain text
        and whole numbers may become text and floats; nothing else is cast.
        """
        if not isinstance(node, ScalarNode):
            return self._report_problem(
                key,
                node,
                f"({_format_node(node)}) must be {NAMES[scalar_type]}; write a single value.",
            )
        value = node.value
        if scalar_type is str and node.is_plain and value is not None:
            return node.text
        if (
            scalar_type is float
            and isinstance(value, int | float)
            and not isinstance(value, bool)
            and value == value
        ):
            return float(min(max(value, -LARGEST), LARGEST)) if isinstance(value, int) else value
        if type(value) is scalar_type and value == value:
            return value
        if value is None:
            fix = "give a value, or remove the key for the default."
        elif isinstance(value, str) and not node.is_plain and UNQUOTED[scalar_type].match(value):
            fix = "remove the quotes and write it plainly."
        elif scalar_type is str:
            fix = f"put it in quotes: '{node.text}'."
        elif scalar_type is int and isinstance(value, float):
            fix = (
                "write it without point and exponent, such"
                f" as {round(value) if math.isfinite(value) else 1}."
            )
        else:
            fix = (
                "write "
                + {
                    int: "digits only, such as 8.",
                    float: "one such as 1e-6.",
                    bool: "true or false.",
                }[scalar_type]
            )
        return self._report_problem(
            key, node, f"({_format_node(node)}) must be {NAMES[scalar_type]}; {fix}"
        )

    def _convert_union(self, annotation: Any, node: Node, key: str) -> Any:
        """Return the node as a value of the first type of the union that accepts it; problems are
        recorded for the last type.
        """
        options = get_args(annotation)
        if isinstance(node, ScalarNode) and node.value is None and type(None) in options:
            return None
        options = tuple(option for option in options if option is not type(None))
        for option in options[:-1]:
            attempt = ConfigConverter(self._suggest_key)
            value = attempt.convert_value(option, node, key)
            if not attempt.problems:
                return value
        return self.convert_value(options[-1], node, key)

    def _convert_choice(self, choices: tuple[Any, ...], node: Node, key: str) -> Any:
        """Return the choice that equals the node's value in value and type, or BROKEN with a
        recorded problem that names the nearest choice.
        """
        if isinstance(node, ScalarNode):
            for choice in choices:
                if node.value == choice and type(node.value) is type(choice):
                    return choice
        known = ", ".join(str(choice) for choice in choices)
        near = difflib.get_close_matches(
            str(_get_written_value(node)), [str(choice) for choice in choices], n=1
        )
        fix = f"did you mean {near[0]}?" if near else f"choose {choices[0]}."
        rule = f"must be one of {known}" if len(choices) > 1 else f"must be {known}"
        return self._report_problem(key, node, f"({_format_node(node)}) {rule}; {fix}")

    def _convert_sequence(self, annotation: Any, node: Node, key: str) -> Any:
        """Return the node as a tuple or list whose items have the annotated types, or BROKEN with
        recorded problems.
        """
        if not isinstance(node, SequenceNode):
            return self._report_problem(
                key,
                node,
                (
                    f"({_format_node(node)}) must be a list; write [{_format_node(node)}]"
                    " with brackets."
                ),
            )
        arguments = get_args(annotation)
        if get_origin(annotation) is list or arguments[-1] is Ellipsis:
            kinds = arguments[:1] * len(node.items)
        else:
            kinds = arguments
            if len(node.items) != len(kinds):
                fix = f"write {len(kinds)}, between brackets."
                return self._report_problem(
                    key, node, f"({_format_node(node)}) must have {len(kinds)} entries; {fix}"
                )
        values = [
            self.convert_value(item_kind, item, f"{key}[{index}]")
            for index, (item_kind, item) in enumerate(zip(kinds, node.items, strict=True))
        ]
        for index in range(len(values)):
            self.provenance.pop(f"{key}[{index}]", None)
        if any(value is BROKEN for value in values):
            self.broken_keys.add(key)
            return BROKEN
        return get_origin(annotation)(values)

    def _convert_mapping(self, annotation: Any, node: Node, key: str) -> Any:
        """Return the node as a dict whose values have the annotated type, or BROKEN with recorded
        problems.
        """
        if not isinstance(node, MappingNode):
            return self._report_problem(
                key, node, f"({_format_node(node)}) must be a mapping; write {{name: value}}."
            )
        values = {
            name: self.convert_value(get_args(annotation)[1], item, join_key_path(key, name))
            for name, item in node.items.items()
        }
        return BROKEN if any(value is BROKEN for value in values.values()) else values

    def _record_entry_origins(self, node: Node, key: str) -> None:
        """Record the origin of a node and of all mapping entries below it."""
        self.provenance[key] = node.origin
        if isinstance(node, MappingNode):
            for name, child in node.items.items():
                self._record_entry_origins(child, join_key_path(key, name))

    def _report_unknown_key(self, key: str, node: Node) -> None:
        """Record a problem for an unknown key, with a suggestion; for a section that should be
        expanded, one for each key below it.
        """
        if isinstance(node, MappingNode) and node.items and self._should_expand(key):
            for name, child in node.items.items():
                self._report_unknown_key(join_key_path(key, name), child)
            return
        suggestion = self._suggest_key(key)
        what = "section" if isinstance(node, MappingNode) else "key"
        hint = suggestion.text or "Remove it; `rlhf-megatron config reference` lists all keys."
        self.broken_keys.update(suggestion.keys)
        self.problems.append(
            ConfigProblem(
                f"unknown {what} {key} ({_format_node(node)}). {hint}", (key,), str(node.origin)
            )
        )

    def _report_problem(self, key: str, node: Node, text: str) -> Any:
        """Record a problem of the value at `key`, and return BROKEN."""
        self.broken_keys.add(key)
        space = "" if text.startswith(":") else " "
        self.problems.append(ConfigProblem(f"{key}{space}{text}", (key,), str(node.origin)))
        return BROKEN


def _get_written_value(node: Node) -> Any:
    """Return a scalar's text as it was written, or another node as plain Python values."""
    return node.text if isinstance(node, ScalarNode) else convert_to_plain(node)


def _format_node(node: Node) -> str:
    """Return the value as its author wrote it, in at most 80 characters."""
    if not isinstance(node, ScalarNode):
        text = str(convert_to_plain(node))
    elif node.is_plain and node.text:
        text = node.text
    elif node.value is not None:
        text = repr(node.value)
    else:
        text = "null"
    return text if len(text) <= 80 else text[:77] + "..."


def _describe_scalar_type(scalar_type: Any) -> str:
    """Return a scalar type in words, such as "a whole number"; "a value" for other types."""
    return NAMES.get(scalar_type, "a value")


def build_params(
    cls: type[P], mapping: Mapping[str, Any], key_path: str, loaded: LoadedConfig | None = None
) -> P:
    """Return an instance of the dataclass `cls` made from `mapping`, as strictly checked as the
    configuration itself.

    `key_path` is the key path of the mapping ("actor.policy_loss.params"). With `loaded`, messages
    name file and line. Raise ConfigError with all unknown names, wrong types, missing values, and
    the error of `cls.__post_init__`.
    """
    kind: type = cls
    known = [join_key_path(key_path, key) for key in list_leaf_keys(kind)]
    converter = ConfigConverter(lambda key: suggest_nearest_key(key, known))
    params = converter.convert_section(kind, convert_to_nodes(mapping, DEFAULT), key_path)
    if converter.problems:
        origins = loaded or LoadedConfig.from_defaults()
        problems = []
        for problem in converter.problems:
            origin = origins.find_origin(problem.keys[0])
            problems.append(replace(problem, location="" if origin is DEFAULT else str(origin)))
        raise ConfigError(problems)
    assert params is not BROKEN
    return params


def resolve_part(
    registry: Registry[T],
    name: str,
    params: Mapping[str, Any],
    key: str,
    problems: list[str],
    params_field: str = "params",
) -> tuple[RegistryEntry[T], Any] | tuple[None, None]:
    """Return (registry entry, its parameters) of the part that is named `name` in the section
    `key`; the parameters are None for a part that has none. Add texts to `problems` for an unknown
    name, wrong parameters, or parameters given to a part without any. Return (None, None) for an
    unknown name or wrong parameters.
    """
    try:
        entry = registry.get(name)
        if params and entry.params is None:
            problems.append(
                f"{key}.{params_field} ({params}) must be empty: {registry.kind} {name!r} has"
                " no parameters."
            )
        return entry, (
            build_params(entry.params, params, f"{key}.{params_field}") if entry.params else None
        )
    except ConfigError as error:
        problems += error.problems
    except ValueError as error:
        problems.append(f"{key}: {error}")
    return None, None
