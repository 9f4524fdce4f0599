"""The one list of rules on a configuration. A rule registers itself; problems are told in the order of registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias, TypeVar

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded

Rule: TypeAlias = Callable[[Loaded], Iterator[Problem]]
Idle: TypeAlias = tuple[bool, tuple[str, ...], str, str]
"""(whether the settings are idle, the settings, the switch that decides, how to make them act)"""
IdleRule: TypeAlias = Callable[[RunConfig], Iterator[Idle]]

RULES: list[Rule] = []
IDLE_RULES: list[IdleRule] = []
R = TypeVar("R", bound=Rule)
I = TypeVar("I", bound=IdleRule)  # noqa: E741


def rule(function: R) -> R:
    """Register a generator of contradictions. It touches no file; `rules.files` has those that do."""
    RULES.append(function)
    return function


def idle(function: I) -> I:
    """Register a generator of settings that would be ignored."""
    IDLE_RULES.append(function)
    return function
