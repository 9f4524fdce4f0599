"""Defaults that an earlier version had, which a run keeps that began with them.

A run that is resumed must not change because this package did: its checkpoint holds the resolved
configuration, and where nobody set a setting of this table, the former value stays. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

from rlhf_megatron.config.key_paths import get_config_value, join_key_path
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.yaml_nodes import (
    LoadedConfig,
    MappingNode,
    Node,
    convert_to_nodes,
    convert_to_plain,
    merge_nodes,
)


@dataclass(frozen=True)
class FormerDefault:
    """The value of one setting that a configuration of an earlier version means."""

    key: str
    value: bool | int | float | str | None
    # True: the setting did not exist, so a resolved configuration that used it, and has it not in
    # writing, means `value`. False: the setting existed with `value` as its default, and every
    # configuration that used the setting has it in writing.
    is_new_setting: bool
    reason: str  # what the former value does, as the end of "because"
    # Another setting and the values of it with which this one is in use; None: wherever its section
    # is in use. The rules may leave this setting out of `config.yaml` as ignored nowhere else, or
    # its absence would say nothing about the version that wrote the file.
    used_where: tuple[str, tuple[str, ...]] | None = None

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
        FormerDefault(
            f"{section}.optim.lr_decay_ends",
            "at_last_step",
            True,
            _DECAY_ENDS,
            (f"{section}.optim.lr_decay_style", ("linear", "cosine")),
        )
        for section in ("actor", "critic", "warmup")
    ),
    FormerDefault(
        "data.add_special_tokens",
        False,
        True,
        "the run began when plain text got no token in front, such as <s>",
    ),
    FormerDefault(
        "sft.use_head_bias",
        True,
        True,
        "the run began when the heads of all reward models had a bias, which its state holds",
        ("job", ("reward-model",)),
    ),
    FormerDefault(
        "algorithm.filter_groups.metric",
        "reward",
        False,
        "the run began when the filter compared whole rewards, with their terms",
    ),
)


def list_implied_defaults(settings: Mapping[str, str]) -> list[FormerDefault]:
    """Return the former defaults that a resolved configuration (setting -> value as text) means by
    not having their settings.
    """
    return [
        former
        for former in FORMER_DEFAULTS
        if former.is_new_setting
        and former.key not in settings
        and is_setting_in_use(former, settings)
    ]


def is_setting_in_use(former: FormerDefault, settings: Mapping[str, str]) -> bool:
    """Return whether a resolved configuration used the setting of a former default, or would have
    used the setting if it had existed.
    """
    if former.used_where is not None:
        other_key, values = former.used_where
        return settings.get(other_key) in values
    section = former.key.rpartition(".")[0] + "."
    return any(key.startswith(section) for key in settings)


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
    for former in list_implied_defaults(dict(_list_node_settings(root, ""))):
        value: Any = former.value
        for name in reversed(former.key.split(".")):
            value = {name: value}
        tree = merge_nodes(tree, convert_to_nodes(value, root.origin))
    assert isinstance(tree, MappingNode), "a mapping is merged over a mapping"
    return tree


def _list_node_settings(node: Node, key: str) -> Iterator[tuple[str, str]]:
    """Yield (full key, value as text) of all values in a tree; `key` is that of the tree itself."""
    if isinstance(node, MappingNode):
        for name, item in node.items.items():
            yield from _list_node_settings(item, join_key_path(key, name))
    else:
        yield key, format_yaml_value(convert_to_plain(node))


def keep_former_defaults(
    loaded: LoadedConfig, resumed_settings: Mapping[str, str]
) -> tuple[LoadedConfig, list[FormerDefault]]:
    """Return (a configuration with the former defaults that a resumed run keeps, these defaults).

    `resumed_settings` are the settings (as text) of the checkpoint that the run goes on from. A
    setting that somebody wrote in `loaded` stays as it was written.
    """
    before = add_implied_defaults(resumed_settings)
    former_defaults = [
        former
        for former in FORMER_DEFAULTS
        if before.get(former.key) == format_yaml_value(former.value)
        and not loaded.is_set(former.key)
    ]
    config = loaded.config
    for former in former_defaults:
        config = _replace_setting(config, former.key, former.value)
    return replace(loaded, config=config), former_defaults


def _replace_setting(section: Any, key: str, value: object) -> Any:
    """Return a section (a dataclass) with another value for the setting at `key`, a key path that
    begins in the section.
    """
    name, _, rest = key.partition(".")
    assert is_dataclass(section), f"{key} must lie in a section"
    inner = _replace_setting(get_config_value(section, name), rest, value) if rest else value
    return replace(section, **{name: inner})  # type: ignore[type-var]
