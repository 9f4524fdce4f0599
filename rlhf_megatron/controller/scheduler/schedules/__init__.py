"""Schedules by name (`schedule.name`). Every module of this package registers itself; none
imports torch.
"""

from __future__ import annotations

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.schema import ScheduleConfig
from rlhf_megatron.config.type_conversion import resolve_part
from rlhf_megatron.controller.scheduler.schedules.schedule_protocol import SCHEDULES, Schedule
from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)

__all__ = ["SCHEDULES", "Schedule", "load_schedule"]


def load_schedule(schedule_config: ScheduleConfig) -> Schedule:
    """Return the schedule that a configuration names, with its parameters. Raise ConfigError for an
    unknown name, and with all wrong parameters.
    """
    problems: list[str] = []
    entry, schedule = resolve_part(
        SCHEDULES, schedule_config.name, schedule_config.params, "schedule", problems
    )
    if problems or entry is None:
        raise ConfigError(problems)
    if entry.params is None:
        return entry.build()
    assert schedule is not None, "whose class is its own dataclass of parameters"
    return schedule
