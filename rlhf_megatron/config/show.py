"""A resolved configuration: each value and where it came from for people, or the whole as YAML."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from rlhf_megatron.config.key_paths import get_config_value, list_leaf_keys
from rlhf_megatron.config.rules.supervised_rules import OF_RL
from rlhf_megatron.config.rules.validate import find_ignored_settings
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.secrets import redact_secrets
from rlhf_megatron.config.yaml_nodes import CORE_SCHEMA, DEFAULT, LoadedConfig, ValueOrigin

MAX_VALUE_WIDTH = 40
Scalar = bool | int | float | str
_DIM = "\x1b[2m"
_BOLD = "\x1b[1m"
_RESET = "\x1b[0m"


def format_settings_table(loaded: LoadedConfig, use_colours: bool = False) -> str:
    """Return one aligned line for each setting: key, value, origin. With colours, values that
    somebody wrote are bold and defaults dim. Secrets are redacted.
    """
    rows = list(_list_setting_rows(loaded))
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(MAX_VALUE_WIDTH, max(len(value) for _, value, _ in rows))
    lines = []
    for key, value, origin in rows:
        line = f"{key:<{key_width}}  {value:<{value_width}}  {origin}"
        if use_colours:
            line = f"{_DIM if origin == str(DEFAULT) else _BOLD}{line}{_RESET}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def _list_setting_rows(loaded: LoadedConfig) -> Iterator[tuple[str, str, str]]:
    """Yield (key, value, origin) as texts for each setting, with one row for each entry of a free
    mapping. Secrets are redacted.
    """
    config = redact_secrets(loaded.config)
    for key in list_leaf_keys(RunConfig):
        value = get_config_value(config, key)
        if isinstance(value, dict) and value:
            for name, entry in value.items():
                yield (
                    f"{key}.{name}",
                    format_yaml_value(entry),
                    str(loaded.find_origin(f"{key}.{name}")),
                )
        else:
            yield key, format_yaml_value(value), str(loaded.find_origin(key))


def format_yaml_value(value: Any) -> str:
    """Return a value as a user would write it in YAML or on the command line, in one line."""
    if isinstance(value, float):
        return repr(value)
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.dump(
        _make_dumpable(value),
        Dumper=_YamlDumper,
        default_flow_style=True,
        default_style=style,
        width=10**9,
        allow_unicode=True,
    )
    return text.removesuffix("\n").removesuffix("\n...")


def select_notable_settings(
    config: RunConfig, main_keys: Collection[str], hidden_keys: Collection[str]
) -> dict[str, Scalar]:
    """Return the settings `main_keys` and all settings that differ from their defaults, without
    `hidden_keys`; entries of free mappings one by one. Values that are no scalars become text, and
    secrets are redacted.
    """
    config = redact_secrets(config)
    defaults = RunConfig()
    found: dict[str, Scalar] = {}
    for key in list_leaf_keys(RunConfig):
        value = get_config_value(config, key)
        if config.job != "train" and key.startswith(OF_RL):
            continue
        if key in hidden_keys or (
            key not in main_keys and value == get_config_value(defaults, key)
        ):
            continue
        entries = (
            {f"{key}.{name}": entry for name, entry in value.items()}
            if isinstance(value, dict)
            else {key: value}
        )
        found |= {
            name: entry if isinstance(entry, bool | int | float | str) else format_yaml_value(entry)
            for name, entry in entries.items()
        }
    return found


def render_config_yaml(config: RunConfig, with_secrets: bool = False) -> str:
    """Return the resolved configuration as YAML that `load_run_config` accepts, without the
    settings that the configuration ignores. Secrets are redacted unless `with_secrets`.
    """
    config = config if with_secrets else redact_secrets(config)
    every = LoadedConfig(
        config, {key: ValueOrigin("resolved", layer=0) for key in list_leaf_keys(RunConfig)}
    )
    idle = {problem.keys[0] for problem in find_ignored_settings(every)}
    sections_of_idle = {key.rpartition(".")[0] for key in idle}
    sections_in_use = {
        key.rpartition(".")[0]
        for key in list_leaf_keys(RunConfig)
        if key not in idle and get_config_value(config, key) is not None
    }
    empty = sections_of_idle - sections_in_use  # what is left of them is null
    tree: dict[str, Any] = {}
    for key in list_leaf_keys(RunConfig):
        if key not in idle and key.rpartition(".")[0] not in empty:
            *sections, name = key.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = _make_dumpable(get_config_value(config, key))
    return yaml.dump(tree, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True)


def _make_dumpable(value: Any) -> Any:
    """Return a value of the configuration as dicts, lists and scalars; the None fields of a
    dataclass are left out.
    """
    if is_dataclass(value):  # an entry of a list: null is what a missing key means
        value = {
            f.name: item for f in fields(value) if (item := getattr(value, f.name)) is not None
        }
    if isinstance(value, dict):
        return {key: _make_dumpable(item) for key, item in value.items()}
    return [_make_dumpable(item) for item in value] if isinstance(value, list | tuple) else value


class _YamlDumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would take for something else; writes no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True, so that repeated values are written out instead of as anchors."""
        return True


for _tag, _pattern, _first in CORE_SCHEMA:
    _YamlDumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
