"""YAML text as a tree of nodes that remember where they were written.

Scalars follow YAML 1.2's core schema: `1e-4` is a number, `yes` and `010` are text. Anchors work; merge keys do not
(`extends` does their work).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.provenance import Origin


@dataclass(frozen=True)
class Scalar:
    value: Any  # None, bool, int, float or str
    text: str  # as written
    is_plain: bool  # written without quotes
    origin: Origin


@dataclass(frozen=True)
class SequenceNode:
    items: tuple[Node, ...]
    origin: Origin


@dataclass(frozen=True)
class MappingNode:
    items: Mapping[str, Node]
    origin: Origin


Node: TypeAlias = Scalar | SequenceNode | MappingNode


CORE_SCHEMA = (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)\Z", list("tTfF")),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)\Z", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9_]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z",
        list("-+.0123456789"),
    ),
)
"""(type, pattern of the plain scalars that have it, characters with which these begin)"""


class _CoreSchemaLoader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2 does."""


_CoreSchemaLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in CORE_SCHEMA:
    _CoreSchemaLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)

_PLAIN_VALUES: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", "")),
    "float": lambda text: float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")),
    "str": str,
}


def parse(text: str, source: str, layer: int, with_lines: bool = True) -> Node:
    """The tree of a YAML document; an empty one is a null scalar.

    Raises ConfigError on bad syntax, a key that is written twice or is not text, and tags or merge keys.
    """

    def origin(mark: yaml.Mark) -> Origin:
        return Origin(source, mark.line + 1 if with_lines else None, layer)

    try:
        root = yaml.compose(text, Loader=_CoreSchemaLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            [Problem(f"not valid YAML: {reason}; correct the line.", where=str(origin(mark)) if mark else source)]
        ) from None
    if root is None:
        return Scalar(None, "", True, Origin(source, 1 if with_lines else None, layer))
    problems: list[Problem] = []
    tree = _convert(root, origin, problems, ())
    if problems:
        raise ConfigError(problems)
    return tree


def _convert(
    node: yaml.Node, origin: Callable[[yaml.Mark], Origin], problems: list[Problem], parents: tuple[yaml.Node, ...]
) -> Node:
    here = origin(node.start_mark)
    if any(node is parent for parent in parents):
        problems.append(Problem("an anchor contains itself; remove the alias.", where=str(here)))
        return Scalar(None, "", True, here)
    if isinstance(node, yaml.SequenceNode):
        return SequenceNode(tuple(_convert(item, origin, problems, (*parents, node)) for item in node.value), here)
    if isinstance(node, yaml.MappingNode):
        items: dict[str, Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            key_origin = origin(key.start_mark)
            if name == "<<" or name is None:
                what = "merge key '<<'" if name else "key that is not text"
                problems.append(
                    Problem(f"a {what} is not supported; use extends or write the keys out.", where=str(key_origin))
                )
            elif name in items:
                problems.append(
                    Problem(f"key {name!r} is written twice in one section; keep one.", where=str(key_origin))
                )
            else:
                child = _convert(value, origin, problems, (*parents, node))
                items[name] = _at(child, key_origin)
        return MappingNode(items, here)
    assert isinstance(node, yaml.ScalarNode)
    kind = node.tag.rpartition(":")[2]
    if kind not in _PLAIN_VALUES:
        problems.append(Problem(f"tag {node.tag!r} is not supported; write a plain value.", where=str(here)))
        return Scalar(None, "", True, here)
    return Scalar(_PLAIN_VALUES[kind](node.value), node.value, node.style is None, here)


def _at(node: Node, origin: Origin) -> Node:
    """The node, said to stand where its key stands."""
    if isinstance(node, Scalar):
        return Scalar(node.value, node.text, node.is_plain, origin)
    if isinstance(node, SequenceNode):
        return SequenceNode(node.items, origin)
    return MappingNode(node.items, origin)


def lift(value: Any, origin: Origin) -> Node:
    """A tree of plain Python values as nodes."""
    if isinstance(value, Mapping):
        return MappingNode({str(key): lift(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return SequenceNode(tuple(lift(item, origin) for item in value), origin)
    return Scalar(value, str(value), False, origin)


def plain(node: Node) -> Any:
    """The tree as plain Python values: dict, list and scalars."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, SequenceNode):
        return [plain(item) for item in node.items]
    return {key: plain(item) for key, item in node.items.items()}


def merge(lower: Node, upper: Node) -> Node:
    """`upper` over `lower`: mappings merge key by key, all else is replaced; an empty mapping clears what it covers."""
    if not (isinstance(lower, MappingNode) and isinstance(upper, MappingNode) and upper.items):
        return upper
    items = dict(lower.items)
    for key, node in upper.items.items():
        items[key] = merge(items[key], node) if key in items else node
    return MappingNode(items, lower.origin)
