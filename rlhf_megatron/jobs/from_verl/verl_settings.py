"""Holds the settings of verl under one name each, whatever layout they were written in; knows which
are dealt with.

OmegaConf's `${...}` in values is resolved here: another key, `${.neighbour}`,
`${oc.select:key,default}`, `${oc.env:NAME}`. OmegaConf itself refuses a whole file for one
malformed value, reads the real environment only, and lets values that name each other grow without
bound. What a file does not say is verl's default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from math import isfinite
from typing import Any

from rlhf_megatron.config.verl_names import RENAMED_SECTIONS, rename_to_current_key
from rlhf_megatron.config.yaml_nodes import MappingNode, parse_yaml
from rlhf_megatron.jobs.from_verl.settings_reader import (
    ValueProblem,
    VerlSetting,
    WrittenSettings,
    flatten_yaml_settings,
    parse_hydra_value,
)

_TABLE = parse_yaml(
    files("rlhf_megatron.jobs.from_verl").joinpath("defaults.yaml").read_text(encoding="utf-8"),
    "defaults.yaml",
    0,
)
assert isinstance(_TABLE, MappingNode)
DEFAULTS: dict[str, Any] = {
    leaf.name: leaf.value
    for section, node in _TABLE.items.items()
    for leaf in flatten_yaml_settings(section, node)
}
"""Of verl, where they decide what is learnt and differ from ours."""


MISSING: Any = object()
MAX_DEPTH = 16  # of values that point to values
MAX_TEXT = 100_000
_WHOLE = re.compile(r"\$\{([^${}]*(?:\{\})?)\}\s*\Z", re.DOTALL)
_PART = re.compile(r"\$\{([^${}]*)\}")

BUFFER = "reward.reward_kwargs.overlong_buffer_cfg"
ALIASES = (
    ("actor_rollout_ref.hybrid_engine", "hybrid_engine"),
    ("actor_rollout_ref.nccl_timeout", "nccl_timeout"),
    ("custom_reward_function.overlong_buffer", BUFFER),
    ("reward_model.overlong_buffer", BUFFER),
    ("custom_reward_function", "reward.custom_reward_function"),
    ("reward_manager", "reward.reward_manager"),
    ("reward_model.reward_manager", "reward.reward_manager.name"),
    ("reward_model.reward_kwargs", "reward.reward_kwargs"),
    ("reward_model.sandbox_fusion", "reward.sandbox_fusion"),
    ("sandbox_fusion", "reward.sandbox_fusion"),
    ("reward_model.reward_loop_source", "reward.reward_manager.source"),
    ("reward_model.reward_loop_module_path", "reward.reward_manager.module.path"),
    ("reward_model.reward_loop_class_name", "reward.reward_manager.module.name"),
    ("reward_model.num_workers", "reward.num_workers"),
    ("reward_model", "reward.reward_model"),
    (
        "rollout.update_weights_bucket_megabytes",
        "rollout.checkpoint_engine.update_weights_bucket_megabytes",
    ),
)
"""Names of former layouts. The first that fits counts."""
_MANDATORY = "???"  # Hydra's mark of a value that must still be given


def resolve_setting_value(
    settings: Mapping[str, VerlSetting], name: str, environment: Mapping[str, str]
) -> Any:
    """Return the value of the setting `name` with its `${...}` references resolved; MISSING where a
    reference leads to no setting or in a circle.
    """
    return _resolve_interpolations(settings, name, settings[name].value, environment, 0)


def _resolve_interpolations(
    settings: Mapping[str, VerlSetting],
    name: str,
    value: Any,
    environment: Mapping[str, str],
    depth: int,
) -> Any:
    """Return a value with its references resolved, also within text and lists; MISSING where that
    fails or is too deep. `name` is the setting that relative references count from.
    """
    if depth > MAX_DEPTH:
        return MISSING
    if isinstance(value, list):
        items = [
            _resolve_interpolations(settings, name, item, environment, depth + 1) for item in value
        ]
        return MISSING if any(item is MISSING for item in items) else items
    if not isinstance(value, str) or "${" not in value:
        return value
    if whole := _WHOLE.match(value):
        return _resolve_reference(settings, name, whole[1], environment, depth)
    text = value
    while part := _PART.search(text):
        found = _resolve_reference(settings, name, part[1], environment, depth)
        if found is MISSING or isinstance(found, dict | list) or len(text) > MAX_TEXT:
            return MISSING
        text = text[: part.start()] + str(found) + text[part.end() :]
    return text


def _resolve_reference(
    settings: Mapping[str, VerlSetting],
    name: str,
    expression: str,
    environment: Mapping[str, str],
    depth: int,
) -> Any:
    """Return the value of the expression in `${...}`: a setting, a section as a dict, oc.select or
    oc.env with a default; MISSING for others and where nothing is found.
    """
    kind, colon, arguments = expression.partition(":")
    default: Any = MISSING
    if colon and kind.strip() in ("oc.select", "oc.env"):
        expression, comma, text = arguments.partition(",")
        default = parse_hydra_value(text, "") if comma else None
        if kind.strip() == "oc.env":
            return environment.get(expression.strip(), default)
    elif colon:
        return MISSING
    key = _make_absolute_key(name, expression.strip())
    if key in settings:
        return _resolve_interpolations(settings, key, settings[key].value, environment, depth + 1)
    below = {other[len(key) + 1 :]: other for other in settings if other.startswith(key + ".")}
    if below:
        found = {
            short: _resolve_interpolations(
                settings, full, settings[full].value, environment, depth + 1
            )
            for short, full in below.items()
        }
        return {short: value for short, value in found.items() if value is not MISSING}
    return default


def _make_absolute_key(name: str, path: str) -> str:
    """Return the full key that a reference in the setting `name` means: ".x" is beside the setting,
    "..x" one section above.
    """
    num_points = len(path) - len(path.lstrip("."))
    if not num_points:
        return path
    parts = name.split(".")[:-num_points]
    return ".".join([*parts, path[num_points:]])


def normalize_key(written_key: str) -> str:
    """Return a setting's name in verl's present layout with our section names:
    actor_rollout_ref.actor.x becomes actor.x, custom_reward_function.x becomes
    reward.custom_reward_function.x.
    """
    path = rename_to_current_key(written_key)
    for old, new in ALIASES:
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


class VerlSettings:
    """The settings of a file under one name each. Methods named `use_...` mark a setting as dealt
    with. Values that cannot be read are noted in `problems`.
    """

    def __init__(self, written_settings: WrittenSettings, environment: Mapping[str, str]) -> None:
        """Resolve the references of all settings, and keep each under its present name. A reference
        that leads nowhere is noted, and verl's default counts then.
        """
        self.problems = list(written_settings.problems)
        self.notes = list(written_settings.notes)
        self._settings: dict[str, VerlSetting] = {}
        self._used_keys: set[str] = set()
        for name, setting in written_settings.settings.items():
            value = resolve_setting_value(written_settings.settings, name, environment)
            if value is MISSING:
                self.notes.append(
                    f"{name} ({setting.value}) points to what is not there: verl's"
                    " default is taken."
                )
            elif value != _MANDATORY:
                self._add_setting(normalize_key(name), VerlSetting(name, value, setting.location))

    def _add_setting(self, key: str, setting: VerlSetting) -> None:
        """Keep a setting under `key`. A null yields to the value of another layout, as in verl's
        migration; where two values differ, keep the first and note a problem.
        """
        other = self._settings.get(key)
        if other is not None and other.value is None:
            del self._settings[key]
        elif other is not None and setting.value is not None and other.value != setting.value:
            message = (
                f"{other.name} ({other.value}) [{other.location}] and {setting.name}"
                f" ({setting.value}) [{setting.location}] are the same setting in two"
                " layouts; keep one."
            )
            self.problems.append(ValueProblem(other.name, message))
        self._settings.setdefault(key, setting)

    def assume_value(self, key: str, value: Any, source: str) -> None:
        """Set `key` to a value that follows from the setting `source`, in place of any value in the
        file. From then on the setting counts as written.
        """
        where = self._settings[source].location if source in self._settings else "verl's default"
        self._settings[key] = VerlSetting(self.get_written_name(source), value, where)

    def is_written(self, key: str) -> bool:
        """Return whether the file or an override sets this setting."""
        return key in self._settings

    def is_written_below(self, section: str) -> bool:
        """Return whether the file or an override sets any setting below this section."""
        return any(key.startswith(section + ".") for key in self._settings)

    def peek_value(self, key: str) -> Any:
        """Return the value of a setting, else verl's default, else None; do not mark the setting as
        dealt with.
        """
        return self._settings[key].value if key in self._settings else DEFAULTS.get(key)

    def is_true(self, key: str) -> bool:
        """Return whether the setting, or verl's default of it, is true; do not mark the setting as
        dealt with.
        """
        return str(self.peek_value(key)).lower() in ("true", "yes", "on")

    def use_value(self, key: str) -> Any:
        """Return the value of a setting, else verl's default, else None, and mark the setting as
        dealt with.
        """
        self._used_keys.add(key)
        return self.peek_value(key)

    def get_written_name(self, key: str) -> str:
        """Return a setting's name as the user wrote it, or as verl names its default."""
        if key in self._settings:
            return self._settings[key].name
        old = {new: old for old, new in reversed(RENAMED_SECTIONS)}
        section, _, rest = key.partition(".")
        return f"{old[section]}.{rest}" if section in old else key

    def get_location(self, key: str) -> str:
        """Return the file and line where a setting was written. Raise KeyError if
        nobody wrote it.
        """
        return self._settings[key].location

    def mark_used(self, *keys: str) -> None:
        """Mark settings as dealt with; a key that ends in ".*" means all settings below."""
        for key in keys:
            if key.endswith(".*"):
                self._used_keys.update(
                    other for other in self._settings if other.startswith(key[:-1])
                )
            self._used_keys.add(key)

    def list_written_keys(self) -> list[str]:
        """Return all settings of the file and its overrides, in this order."""
        return list(self._settings)

    def list_unused_keys(self) -> list[str]:
        """Return the settings that no translation has used, in the order of the file."""
        return [key for key in self._settings if key not in self._used_keys]

    def use_values_below(self, section: str) -> dict[str, Any]:
        """Return name below the section -> value for all settings that were written there, and mark
        them as dealt with.
        """
        keys = [key for key in self._settings if key.startswith(section + ".")]
        return {key[len(section) + 1 :]: self.use_value(key) for key in keys}

    def use_whole_number(self, key: str, minimum: int = 1) -> int | None:
        """Return a setting as a whole number of at least `minimum`, and mark it as dealt with.
        Return None where there is no value, and, with a noted problem, for any other value.
        """
        value = self.use_value(key)
        if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
            return value
        self._report_wrong_value(key, value, f"a whole number from {minimum}")
        return None

    def use_number(self, key: str) -> float | None:
        """Return a setting as a finite number, and mark it as dealt with. Return None where there
        is no value, and, with a noted problem, for any other value.
        """
        value = self.use_value(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            return value
        self._report_wrong_value(key, value, "a number")
        return None

    def use_flag(self, key: str) -> bool:
        """Return a setting as true or false, and mark it as dealt with. Return False where there is
        no value, and, with a noted problem, for any other value.
        """
        value = self.use_value(key)
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, bool):
            return value
        self._report_wrong_value(key, value, "true or false")
        return False

    def use_text(self, key: str) -> str | None:
        """Return a setting as text, and mark it as dealt with. Return None where there is no value,
        and, with a noted problem, for a value that is no text or number.
        """
        value = self.use_value(key)
        if isinstance(value, str | int | float):
            return str(value)
        self._report_wrong_value(key, value, "text")
        return None

    def _report_wrong_value(self, key: str, value: Any, rule: str) -> None:
        """Note once in `problems` that the value must follow `rule`; do nothing for None."""
        if value is not None:
            name = self.get_written_name(key)
            problem = ValueProblem(
                name, f"{name} ({value!r}) must be {rule}; correct it. [{self.get_location(key)}]"
            )
            if problem not in self.problems:
                self.problems.append(problem)
