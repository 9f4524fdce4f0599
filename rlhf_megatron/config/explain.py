"""Everything that is known of one setting: `rlhf-megatron config explain KEY [RUN.yaml]`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache

from rlhf_megatron.config.key_paths import (
    get_config_value,
    list_leaf_keys,
    list_section_keys,
    list_setting_leaves,
)
from rlhf_megatron.config.reference import describe_type
from rlhf_megatron.config.rules import IDLE_RULES, RULES, validate
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.schema.setting_fields import NOT_NEGATIVE
from rlhf_megatron.config.show import format_yaml_value
from rlhf_megatron.config.verl_names import (
    RENAMED_SECTIONS,
    VERL_NAMES,
    rename_to_current_key,
    suggest_setting,
)
from rlhf_megatron.config.yaml_nodes import LoadedConfig

_WORD = re.compile(r"[a-z]\w*(?:\.\w+)+")


def explain_setting(key: str, loaded: LoadedConfig | None = None) -> str:
    """Return lines that explain a setting: its meaning, type, range, default, verl's names for it,
    and settings that rules mention beside it; with a configuration also its value and the place
    that set the value. For a section return a line for each of its settings.

    Raise ValueError, with the nearest names, for a key that does not exist.
    """
    here = rename_to_current_key(key)
    if here in list_section_keys(RunConfig):
        lines = [
            f"{leaf.key}: {leaf.doc}"
            for leaf in list_setting_leaves(RunConfig)
            if leaf.key.startswith(here + ".")
        ]
        return "\n".join([f"{here} is a section:", *lines]) + "\n"
    leaf = next((leaf for leaf in list_setting_leaves(RunConfig) if leaf.key == here), None)
    if leaf is None:
        raise ValueError(f"{key} is no setting. {suggest_setting(key).text}".strip())
    limits = "" if leaf.bounds == NOT_NEGATIVE else f", {leaf.bounds}"
    rows = [
        (here, leaf.doc),
        ("type", describe_type(leaf.type) + limits),
        ("default", format_yaml_value(get_config_value(RunConfig(), here))),
    ]
    if loaded is not None:
        rows.append(
            (
                "value",
                (
                    f"{format_yaml_value(get_config_value(loaded.config, here))}"
                    f" ({loaded.find_origin(here)})"
                ),
            )
        )
    rows += [("verl", name) for name in _list_verl_names(here)]
    rows += [("goes with", ", ".join(related))] if (related := _find_related_settings(here)) else []
    return "".join(f"{name}: {text}\n" for name, text in rows)


def _list_verl_names(key: str) -> Iterator[str]:
    """Yield verl's names for a setting, with a note where there is one; nothing where verl's name
    is the same.
    """
    for entry in VERL_NAMES:
        if entry.target == key:
            yield f"{entry.name}{f' ({entry.note})' if entry.note else ''}"
    for old, new in RENAMED_SECTIONS[:4]:
        if key.startswith(new + ".") and not any(entry.target == key for entry in VERL_NAMES):
            yield old + key.removeprefix(new)


@cache
def _collect_keys_of_rules() -> tuple[frozenset[str], ...]:
    """Return for each rule the settings that its source code names, without rules that name only
    one.
    """
    assert validate, "the rules are registered when their modules are imported"
    known = set(list_leaf_keys(RunConfig))
    rules: list[Callable[..., object]] = [*RULES, *IDLE_RULES]
    found = (frozenset(_WORD.findall(inspect.getsource(rule))) & known for rule in rules)
    return tuple(keys for keys in found if len(keys) > 1)


def _find_related_settings(key: str) -> list[str]:
    """Return at most 12 settings that the two smallest rules with this setting name beside it."""
    rules = sorted((keys for keys in _collect_keys_of_rules() if key in keys), key=len)
    return list(dict.fromkeys(other for keys in rules[:2] for other in sorted(keys - {key})))[:12]
