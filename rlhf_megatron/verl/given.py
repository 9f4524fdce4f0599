"""verl's settings under one name each, whichever layout they were written in; which have been dealt with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from rlhf_megatron.config.verl_names import RENAMED_SECTIONS, current_path
from rlhf_megatron.verl.defaults import DEFAULTS
from rlhf_megatron.verl.interpolate import MISSING, resolve
from rlhf_megatron.verl.setting import Setting, Written

ALIASES = (
    ("actor_rollout_ref.hybrid_engine", "hybrid_engine"),
    ("actor_rollout_ref.nccl_timeout", "nccl_timeout"),
    ("custom_reward_function", "reward.custom_reward_function"),
    ("reward_manager", "reward.reward_manager"),
    ("reward_model.reward_manager", "reward.reward_manager.name"),
    ("reward_model.reward_kwargs", "reward.reward_kwargs"),
    ("reward_model.sandbox_fusion", "reward.sandbox_fusion"),
    ("reward_model.num_workers", "reward.num_workers"),
    ("reward_model", "reward.reward_model"),
    ("rollout.update_weights_bucket_megabytes", "rollout.checkpoint_engine.update_weights_bucket_megabytes"),
)
"""Names of former layouts. The first that fits counts."""
_MANDATORY = "???"  # Hydra's mark of a value that must still be given


def one_name(written: str) -> str:
    """The name in today's layout: actor_rollout_ref.actor.x is actor.x, custom_reward_function.x reward....x."""
    path = current_path(written)
    for old, new in ALIASES:
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


class Given:
    """`get` and its likes mark a setting as dealt with. What cannot be read is noted in `problems`."""

    def __init__(self, written: Written, environment: Mapping[str, str]) -> None:
        self.problems = list(written.problems)
        self.notes = list(written.notes)
        self._settings: dict[str, Setting] = {}
        self._used: set[str] = set()
        for name, setting in written.settings.items():
            value = resolve(written.settings, name, environment)
            if value is MISSING:
                self.notes.append(f"{name} ({setting.value}) points to what is not there: verl's default is taken.")
            elif value != _MANDATORY:
                self._add(one_name(name), Setting(name, value, setting.where))

    def _add(self, key: str, setting: Setting) -> None:
        other = self._settings.get(key)
        if other is not None and other.value != setting.value:
            self.problems.append(
                f"{other.name} ({other.value}) [{other.where}] and {setting.name} ({setting.value}) [{setting.where}]"
                " are the same setting in two layouts; keep one."
            )
        self._settings.setdefault(key, setting)

    def assume(self, key: str, value: Any, source: str) -> None:
        """`key` follows from the setting `source`, whatever stands there. From now on it is as if it was written."""
        where = self._settings[source].where if source in self._settings else "verl's default"
        self._settings[key] = Setting(self.name(source), value, where)

    def has(self, key: str) -> bool:
        """Whether somebody wrote it."""
        return key in self._settings

    def has_below(self, section: str) -> bool:
        return any(key.startswith(section + ".") for key in self._settings)

    def look(self, key: str) -> Any:
        """The value, or verl's default, or None; not marked as dealt with."""
        return self._settings[key].value if key in self._settings else DEFAULTS.get(key)

    def get(self, key: str) -> Any:
        self._used.add(key)
        return self.look(key)

    def name(self, key: str) -> str:
        """As it was written, or as verl's default is called."""
        if key in self._settings:
            return self._settings[key].name
        old = {new: old for old, new in reversed(RENAMED_SECTIONS)}
        section, _, rest = key.partition(".")
        return f"{old[section]}.{rest}" if section in old else key

    def where(self, key: str) -> str:
        return self._settings[key].where

    def ignore(self, *keys: str) -> None:
        """They have been dealt with; one that ends in ".*" stands for all below."""
        for key in keys:
            if key.endswith(".*"):
                self._used.update(other for other in self._settings if other.startswith(key[:-1]))
            self._used.add(key)

    def rest(self) -> list[str]:
        """What nobody has dealt with, in the order of the file."""
        return [key for key in self._settings if key not in self._used]

    def below(self, section: str) -> dict[str, Any]:
        """Name below the section -> value, all marked."""
        keys = [key for key in self._settings if key.startswith(section + ".")]
        return {key[len(section) + 1 :]: self.get(key) for key in keys}

    def whole(self, key: str, low: int = 1) -> int | None:
        """A whole number from `low`, or None where there is none or it is something else."""
        value = self.get(key)
        if isinstance(value, str) and value.strip().lstrip("-").isdecimal():
            value = int(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            return value
        self._wrong(key, value, f"a whole number from {low}")
        return None

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
            return value
        self._wrong(key, value, "a number")
        return None

    def flag(self, key: str) -> bool:
        """False also where there is none or it is something else."""
        value = self.get(key)
        words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
        if isinstance(value, str) and value.lower() in words:
            return words[value.lower()]
        if isinstance(value, bool):
            return value
        self._wrong(key, value, "true or false")
        return False

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if isinstance(value, str | int | float):
            return str(value)
        self._wrong(key, value, "text")
        return None

    def _wrong(self, key: str, value: Any, rule: str) -> None:
        if value is not None:
            problem = f"{self.name(key)} ({value!r}) must be {rule}; correct it. [{self.where(key)}]"
            if problem not in self.problems:
                self.problems.append(problem)
