"""`a.b.c=value` arguments of the command line, as nodes. The value is YAML: `[1, 2]`, `{a: 1}`, `null`, `1e-4`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rlhf_megatron.config.errors import ConfigError, Problem
from rlhf_megatron.config.provenance import Origin
from rlhf_megatron.config.redact import secrets_in
from rlhf_megatron.config.source import MappingNode, parse, plain

SOURCE = "command line"
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*\Z")


def parse_overrides(overrides: Sequence[str], layer: int) -> list[MappingNode]:
    """One tree an override, to be merged in this order. Raises ConfigError with all that are malformed."""
    origin = Origin(SOURCE, layer=layer)
    trees: list[MappingNode] = []
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals or not _KEY.match(key):
            hint = " Keys need no '+' or '--' in front." if re.match(r"\+|--|~", key) else ""
            problems.append(Problem(f"override {override!r} must have the form section.key=value.{hint}", where=SOURCE))
            continue
        try:
            node = parse(text, SOURCE, layer, with_lines=False)
        except ConfigError as error:
            problems += [Problem(f"override {override!r}: {problem}") for problem in error.problems]
            continue
        if secrets := secrets_in(plain(node), key):
            what = f"override {secrets[0]}: every user of the machine can read a command line; set it in the file."
            problems.append(Problem(what, where=SOURCE))
            continue
        *sections, name = key.split(".")
        tree = MappingNode({name: node}, origin)
        for section in reversed(sections):
            tree = MappingNode({section: tree}, origin)
        trees.append(tree)
    if problems:
        raise ConfigError(problems)
    return trees
