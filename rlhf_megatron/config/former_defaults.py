"""Defaults that an earlier version had, which a run keeps that began with them.

A run that is resumed must not change because this package did: its checkpoint holds the resolved
configuration, and where nobody set a setting of this table, the former value stays. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from rlhf_megatron.config.key_paths import get_config_value
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.yaml_nodes import (
    LoadedConfig,
    MappingNode,
    Node,
    convert_to_nodes,
    merge_nodes,
)


@dataclass(frozen=True)
class FormerDefault:
    """What a configuration means that an earlier version wrote."""

    key: str
    value: bool | int | float | str | None
    # True: the setting did not exist, so a resolved configuration that has the setting's section
    # without the setting means `value`. No rule may leave such a setting out of `config.yaml` as
    # ignored while its section is in use. False: the setting existed with `value` as its default,
    # and every configuration that used the setting has it in writing.
    is_new_setting: bool
    reason: str  # what the former value does, as the end of "because"

    def describe(self, default: object) -> str:
        """Return the line for whoever watches a run that keeps the former value; `default` is the
        value that a new run has.
        """
        return (
            f"{self.key} stays {format_yaml_value(self.value)} because {self.reason}; set"
            f" {self.key}={format_yaml_value(default)} for what a new run does"
        )


_DECAY_ENDS = "the run began when the decay of the learning rate ended at the last optimizer step"

FORMER_DEFAULTS = (
    *(
        FormerDefault(f"{section}.optim.lr_decay_ends", "at_last_step", True, _DECAY_ENDS)
        for section in ("actor", "critic", "warmup")
    ),
    FormerDefault(
        "data.add_special_tokens",
        False,
        True,
        "the run began when plain text got no token in front, such as <s>",
    ),
)


def list_implied_defaults(keys: Collection[str]) -> list[FormerDefault]:
    """Return the former defaults that a resolved configuration means by not having their settings;
    `keys` are the full keys that the configuration has.
    """
    return [
        former
        for former in FORMER_DEFAULTS
        if former.is_new_setting
        and former.key not in keys
        and any(key.startswith(former.key.rpartition(".")[0] + ".") for key in keys)
    ]


def add_implied_defaults(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a resolved configuration (setting -> value as text), with the former
    defaults that the configuration means by not having them.
    """
    implied = list_implied_defaults(settings)
    return {**settings, **{former.key: format_yaml_value(former.value) for former in implied}}


def add_implied_nodes(root: MappingNode) -> MappingNode:
    """Return the tree of a resolved configuration, with the former defaults that the configuration
    means by not having them.
    """
    tree: Node = root
    for former in list_implied_defaults(_list_node_keys(root, "")):
        value: Any = former.value
        for name in reversed(former.key.split(".")):
            value = {name: value}
        tree = merge_nodes(tree, convert_to_nodes(value, root.origin))
    assert isinstance(tree, MappingNode), "a mapping is merged over a mapping"
    return tree


def _list_node_keys(node: Node, key: str) -> list[str]:
    """Return the full keys of all values in a tree; `key` is that of the tree itself."""
    if not isinstance(node, MappingNode):
        return [key]
    return [
        leaf
        for name, item in node.items.items()
        for leaf in _list_node_keys(item, f"{key}.{name}" if key else name)
    ]


def keep_former_defaults(
    loaded: LoadedConfig, resumed_settings: Mapping[str, str]
) -> tuple[LoadedConfig, list[FormerDefault]]:
    """Return a configuration with the former defaults that a resumed run keeps, and these.

    `resumed_settings` are the settings (as text) of the checkpoint that the run goes on from. A
    setting that somebody wrote in `loaded` stays as it was written.
    """
    before = add_implied_defaults(resumed_settings)
    kept = [
        former
        for former in FORMER_DEFAULTS
        if before.get(former.key) == format_yaml_value(former.value)
        and not loaded.is_set(former.key)
    ]
    config = loaded.config
    for former in kept:
        config = _replace_setting(config, former.key, former.value)
    return replace(loaded, config=config), kept


def _replace_setting(section: Any, key: str, value: object) -> Any:
    """Return a section (a dataclass) with another value for the setting at `key`, a key path that
    begins in the section.
    """
    name, _, rest = key.partition(".")
    assert is_dataclass(section), f"{key} must lie in a section"
    inner = _replace_setting(get_config_value(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})  # type: ignore[type-var]
