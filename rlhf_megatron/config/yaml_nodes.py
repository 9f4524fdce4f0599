"""YAML text as a tree of nodes that remember where they were written.

Scalars follow YAML 1.2's core schema: `1e-4` is a number, `yes` and `010` are text. Anchors work;
merge keys do not (`extends` does their work).

Also: Where each value of a configuration came from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import yaml

from rlhf_megatron.config.errors import ConfigError, ConfigProblem
from rlhf_megatron.config.key_paths import get_config_value, list_leaf_keys
from rlhf_megatron.config.schema import RunConfig

MAX_CHARACTERS = 1 << 20  # of a file; the longest that are shipped have thousands
MAX_NODES = 20_000  # of a file, aliases written out: nested ones multiply

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

_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

_NO_TEXT = re.compile("[\x00\ud800-\udfff]")  # which quoted YAML can write as an escape


@dataclass(frozen=True)
class ValueOrigin:
    """A place where a value was written. A higher `layer` wins over a lower one."""

    source: str  # "default", "command line", or a file
    line: int | None = None  # counted from 1
    # -1: default; then the files, a base before what extends it; the command line is last
    layer: int = -1

    def __str__(self) -> str:
        """Return the place as "source:line", or only the source."""
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT = ValueOrigin("default")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and the origins of all values that somebody wrote (full key
    path -> origin).
    """

    config: RunConfig
    provenance: Mapping[str, ValueOrigin] = field(default_factory=dict)
    lock_contents: Mapping[str, Any] | None = None  # of a run's lock file, as it is written there

    @staticmethod
    def from_config(config: RunConfig) -> LoadedConfig:
        """Return a configuration made in code as a LoadedConfig: settings that differ from their
        defaults count as set, with the origin "code".
        """
        default = RunConfig()
        keys = [
            key
            for key in list_leaf_keys(RunConfig)
            if get_config_value(config, key) != get_config_value(default, key)
        ]
        return LoadedConfig(config, {key: ValueOrigin("code", layer=0) for key in keys})

    @staticmethod
    def from_defaults() -> LoadedConfig:
        """Return the configuration in which every setting has its default."""
        return LoadedConfig(RunConfig(), {})

    def find_origin(self, key: str) -> ValueOrigin:
        """Return the origin of a key, or of the innermost mapping around the key; DEFAULT if nobody
        wrote either.
        """
        while key:
            if key in self.provenance:
                return self.provenance[key]
            key = key.rpartition(".")[0]
        return DEFAULT

    def list_set_keys(self, prefix: str) -> list[str]:
        """Return the keys at or below `prefix` that somebody wrote, each once: a written mapping
        appears as its entries.
        """
        below = [key for key in self.provenance if key == prefix or key.startswith(prefix + ".")]
        return [key for key in below if not any(other.startswith(key + ".") for other in below)]

    def is_set(self, key: str) -> bool:
        """Return whether somebody wrote this key or a key below it."""
        return bool(self.list_set_keys(key))

    def find_layer(self, key: str) -> int:
        """Return the highest layer in which `key` or a key below it was written; -1 if the key has
        its default.
        """
        return max((self.provenance[k].layer for k in self.list_set_keys(key)), default=-1)


@dataclass(frozen=True)
class ScalarNode:
    value: Any  # None, bool, int, float or str
    text: str  # as written
    is_plain: bool  # written without quotes
    origin: ValueOrigin


@dataclass(frozen=True)
class SequenceNode:
    items: tuple[Node, ...]
    origin: ValueOrigin


@dataclass(frozen=True)
class MappingNode:
    items: Mapping[str, Node]
    origin: ValueOrigin


Node: TypeAlias = ScalarNode | SequenceNode | MappingNode


class _CoreSchemaLoader(yaml.SafeLoader):
    """Resolves plain scalars as YAML 1.2 does."""


_CoreSchemaLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in CORE_SCHEMA:
    _CoreSchemaLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first
    )

_PLAIN_VALUES: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", "")),
    "float": lambda text: float(
        text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan")
    ),
    "str": str,
}


def parse_yaml(text: str, source: str, layer: int, with_lines: bool = True) -> Node:
    """Return the tree of a YAML document; an empty document is a null scalar.

    Raise ConfigError on bad syntax, a key that is written twice or is not text, tags or merge keys,
    and documents that are no configuration by their size or depth.
    """
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            [
                ConfigProblem(
                    f"it has more than {MAX_CHARACTERS} characters; name another file.",
                    location=source,
                )
            ]
        )

    def make_origin(mark: yaml.Mark) -> ValueOrigin:
        """Return the origin for a position in the document, without a line if
        `with_lines` is off.
        """
        return ValueOrigin(source, mark.line + 1 if with_lines else None, layer)

    try:
        root = yaml.compose(text, Loader=_CoreSchemaLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        raise ConfigError(
            [
                ConfigProblem(
                    f"not valid YAML: {reason}; correct the line.",
                    location=str(make_origin(mark)) if mark else source,
                )
            ]
        ) from None
    except RecursionError:
        raise ConfigError(
            [
                ConfigProblem(
                    "sections lie too deep in each other; name another file.", location=source
                )
            ]
        ) from None
    if root is None:
        return ScalarNode(None, "", True, ValueOrigin(source, 1 if with_lines else None, layer))
    tree = _NodeConverter(make_origin)
    try:
        converted = tree.convert(root, ())
    except RecursionError:
        raise ConfigError(
            [
                ConfigProblem(
                    "sections lie too deep in each other; name another file.", location=source
                )
            ]
        ) from None
    if tree.problems:
        raise ConfigError(tree.problems)
    return converted


class _NodeConverter:
    """Converts the nodes of PyYAML into our nodes, and collects the problems of the document."""

    def __init__(self, make_origin: Callable[[yaml.Mark], ValueOrigin]) -> None:
        """Begin without nodes or problems. `make_origin` returns the origin for a position in the
        document.
        """
        self.make_origin = make_origin
        self.problems: list[ConfigProblem] = []
        self.num_nodes = 0

    def convert(self, node: yaml.Node, parents: tuple[yaml.Node, ...]) -> Node:
        """Return our node for a node of PyYAML. Record a problem, and return a null scalar, for a
        value that is not supported. `parents` are the nodes around this one, to notice an anchor
        that contains itself. Raise ConfigError where the document has too many values.
        """
        here = self.make_origin(node.start_mark)
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            problem = (
                f"it has more than {MAX_NODES} values with its aliases written out; write fewer."
            )
            raise ConfigError([ConfigProblem(problem, location=str(here))])
        if any(node is parent for parent in parents):
            return self._record_problem("an anchor contains itself; remove the alias.", here)
        if not isinstance(node, yaml.ScalarNode):
            if node.tag not in _COLLECTIONS:
                return self._record_problem(
                    f"tag {node.tag!r} is not supported; write plain values.", here
                )
            parents = (*parents, node)
        if isinstance(node, yaml.SequenceNode):
            return SequenceNode(tuple(self.convert(item, parents) for item in node.value), here)
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, parents, here)
        assert isinstance(node, yaml.ScalarNode)
        kind = node.tag.rpartition(":")[2]
        if _NO_TEXT.search(node.value):
            return self._record_problem(
                f"{node.value[:40]!r} has what no file can hold (NUL, half of a pair); remove it.",
                here,
            )
        if kind not in _PLAIN_VALUES:
            return self._record_problem(
                f"tag {node.tag!r} is not supported; write a plain value.", here
            )
        try:
            return ScalarNode(_PLAIN_VALUES[kind](node.value), node.value, node.style is None, here)
        except ValueError:
            return self._record_problem(
                f"{node.value[:40]!r} is no {kind} that can be read; correct it.", here
            )

    def _convert_mapping(
        self, node: yaml.MappingNode, parents: tuple[yaml.Node, ...], origin: ValueOrigin
    ) -> Node:
        """Return a MappingNode, in which each value has the origin of its key. Record problems of
        keys that are repeated, not text, or merge keys, and leave them out.
        """
        items: dict[str, Node] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else None
            key_origin = self.make_origin(key.start_mark)
            if name == "<<" or name is None or _NO_TEXT.search(name):
                what = "merge key '<<'" if name == "<<" else "key that is not text"
                self._record_problem(
                    f"a {what} is not supported; use extends or write the keys out.", key_origin
                )
            elif name in items:
                self._record_problem(
                    f"key {name!r} is written twice in one section; keep one.", key_origin
                )
            else:
                items[name] = _move_to_origin(self.convert(value, parents), key_origin)
        return MappingNode(items, origin)

    def _record_problem(self, text: str, origin: ValueOrigin) -> ScalarNode:
        """Record a problem at this place, and return a null scalar in place of the value."""
        self.problems.append(ConfigProblem(text, location=str(origin)))
        return ScalarNode(None, "", True, origin)


def _move_to_origin(node: Node, origin: ValueOrigin) -> Node:
    """Return a copy of the node whose origin is that of its key."""
    if isinstance(node, ScalarNode):
        return ScalarNode(node.value, node.text, node.is_plain, origin)
    if isinstance(node, SequenceNode):
        return SequenceNode(node.items, origin)
    return MappingNode(node.items, origin)


def convert_to_nodes(value: Any, origin: ValueOrigin) -> Node:
    """Return a tree of plain Python values as nodes, all with this origin."""
    if isinstance(value, Mapping):
        return MappingNode(
            {str(key): convert_to_nodes(item, origin) for key, item in value.items()}, origin
        )
    if isinstance(value, list | tuple):
        return SequenceNode(tuple(convert_to_nodes(item, origin) for item in value), origin)
    return ScalarNode(value, str(value), False, origin)


def convert_to_plain(node: Node) -> Any:
    """Return a tree of nodes as plain Python values: dicts, lists and scalars."""
    if isinstance(node, ScalarNode):
        return node.value
    if isinstance(node, SequenceNode):
        return [convert_to_plain(item) for item in node.items]
    return {key: convert_to_plain(item) for key, item in node.items.items()}


def merge_nodes(lower: Node, upper: Node) -> Node:
    """Return `upper` merged over `lower`: mappings merge key by key, and all other nodes are
    replaced. An empty mapping in `upper` replaces the mapping below it.
    """
    if not (isinstance(lower, MappingNode) and isinstance(upper, MappingNode) and upper.items):
        return upper
    items = dict(lower.items)
    for key, node in upper.items.items():
        items[key] = merge_nodes(items[key], node) if key in items else node
    return MappingNode(items, lower.origin)
