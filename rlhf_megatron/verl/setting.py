"""A setting of verl as somebody wrote it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    name: str  # as written, such as actor_rollout_ref.rollout.n
    value: Any  # plain: None, bool, int, float, str, list, dict
    where: str  # file:line, or "command line"


@dataclass
class Written:
    """What a file and the overrides after it say. A later setting of a name has replaced an earlier one."""

    settings: dict[str, Setting] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # for the user: what was assumed or not read
    problems: list[str] = field(default_factory=list)  # settings whose value cannot be known

    def add(self, setting: Setting) -> None:
        before = self.settings.get(setting.name)
        if before is not None and before.value != setting.value:
            self.notes.append(
                f"{setting.name} is given twice: {setting.value!r} ({setting.where}) replaces {before.value!r}"
                f" ({before.where})."
            )
        self.settings[setting.name] = setting

    def remove(self, name: str) -> None:
        """The setting and all below it."""
        for key in [key for key in self.settings if key == name or key.startswith(name + ".")]:
            del self.settings[key]
