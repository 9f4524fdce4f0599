"""Schedules by name (`schedule.name`). Every module of this package registers itself; none imports torch."""

from __future__ import annotations

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.config.typed import look_up
from rlhf_megatron.registry import import_modules
from rlhf_megatron.scheduler.schedules.base import SCHEDULES, Schedule

import_modules(__name__, __path__)

__all__ = ["SCHEDULES", "Schedule", "load_schedule"]


def load_schedule(section: ScheduleConfig) -> Schedule:
    """The one that a configuration names. Raises ConfigError for an unknown name, and with all wrong parameters."""
    problems: list[str] = []
    entry, schedule = look_up(SCHEDULES, section.name, section.params, "schedule", problems)
    if problems or entry is None:
        raise ConfigError(problems)
    if entry.params is None:
        return entry.build()
    assert schedule is not None, "whose class is its own dataclass of parameters"
    return schedule
