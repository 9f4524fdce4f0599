"""A resolved configuration: each value and where it came from for people, or the whole as YAML."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from rlhf_megatron.config.keys import leaf_keys, value_of
from rlhf_megatron.config.rules.sft import OF_RL
from rlhf_megatron.config.rules.validate import ignored
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import redacted
from rlhf_megatron.config.source import CORE_SCHEMA, DEFAULT, Loaded, Origin

MAX_VALUE_WIDTH = 40
Scalar = bool | int | float | str
_DIM, _BOLD, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[0m"


def table(loaded: Loaded, use_colours: bool = False) -> str:
    """One line a setting: key, value, origin, aligned. Values that somebody wrote are bold, defaults dim."""
    rows = list(_rows(loaded))
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(MAX_VALUE_WIDTH, max(len(value) for _, value, _ in rows))
    lines = []
    for key, value, origin in rows:
        line = f"{key:<{key_width}}  {value:<{value_width}}  {origin}"
        if use_colours:
            line = f"{_DIM if origin == str(DEFAULT) else _BOLD}{line}{_RESET}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _rows(loaded: Loaded) -> Iterator[tuple[str, str, str]]:
    config = redacted(loaded.config)
    for key in leaf_keys(RunConfig):
        value = value_of(config, key)
        if isinstance(value, dict) and value:
            for name, entry in value.items():
                yield f"{key}.{name}", as_text(entry), str(loaded.origin(f"{key}.{name}"))
        else:
            yield key, as_text(value), str(loaded.origin(key))


def as_text(value: Any) -> str:
    """A value as one would write it in YAML or on the command line."""
    if isinstance(value, float):
        return repr(value)
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.dump(
        _plain(value), Dumper=_Dumper, default_flow_style=True, default_style=style, width=10**9, allow_unicode=True
    )
    return text.removesuffix("\n").removesuffix("\n...")


def chosen(config: RunConfig, main: Collection[str], hidden: Collection[str]) -> dict[str, Scalar]:
    """The settings `main` and all that differ from their defaults, but for `hidden`; entries of free mappings one by
    one."""
    config, defaults = redacted(config), RunConfig()
    found: dict[str, Scalar] = {}
    for key in leaf_keys(RunConfig):
        value = value_of(config, key)
        if config.job != "train" and key.startswith(OF_RL):
            continue
        if key in hidden or (key not in main and value == value_of(defaults, key)):
            continue
        entries = {f"{key}.{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {key: value}
        found |= {
            name: entry if isinstance(entry, bool | int | float | str) else as_text(entry)
            for name, entry in entries.items()
        }
    return found


def as_yaml(config: RunConfig, with_secrets: bool = False) -> str:
    """The resolved configuration as YAML that `load_run_config` accepts: all settings but those that are not in use."""
    config = config if with_secrets else redacted(config)
    every = Loaded(config, {key: Origin("resolved", layer=0) for key in leaf_keys(RunConfig)})
    idle = {problem.keys[0] for problem in ignored(every)}
    sections_of_idle = {key.rpartition(".")[0] for key in idle}
    sections_in_use = {
        key.rpartition(".")[0] for key in leaf_keys(RunConfig) if key not in idle and value_of(config, key) is not None
    }
    empty = sections_of_idle - sections_in_use  # what is left of them is null
    tree: dict[str, Any] = {}
    for key in leaf_keys(RunConfig):
        if key not in idle and key.rpartition(".")[0] not in empty:
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = _plain(value_of(config, key))
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value):  # an entry of a list: null is what a missing key means
        value = {f.name: item for f in fields(value) if (item := getattr(value, f.name)) is not None}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would take for something else; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
