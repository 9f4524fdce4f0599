"""Schedules by name (`schedule.name`). Every module of this package registers itself; none imports torch."""

from __future__ import annotations

import importlib
import pkgutil

from rlhf_megatron.scheduler.schedules.base import SCHEDULES, Schedule

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["SCHEDULES", "Schedule"]
