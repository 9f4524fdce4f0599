"""Loggers by name (`trainer.logger`). Every module of this package is imported, so that a new file registers itself."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.observe.loggers.base import LOGGERS, BatchView, Logger
from rlhf_megatron.registry import import_modules

import_modules(__name__, __path__)


def check_loggers(names: Sequence[str]) -> None:
    """Starts nothing. Raises ConfigError with what the loggers of a run lack."""
    problems = []
    for name in names:
        try:
            LOGGERS.get(name).build.check()
        except ValueError as error:
            problems.append(f"trainer.logger: {error}")
    if problems:
        raise ConfigError(problems)


__all__ = ["LOGGERS", "BatchView", "Logger", "check_loggers"]
