"""The one list of rules on a configuration. A rule registers itself; problems are told in the order of registration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.source import Loaded

Findings: TypeAlias = Iterator[Problem | None]
Rule: TypeAlias = Callable[[Loaded], Findings]
Idle: TypeAlias = tuple[bool, tuple[str, ...], str, str]
"""(whether the settings are idle, the settings, the switch that decides, how to make them act)"""
IdleRule: TypeAlias = Callable[[RunConfig], Iterable[Idle]]

RULES: list[Rule] = []
IDLE_RULES: list[IdleRule] = []
R = TypeVar("R", bound=Rule)
I = TypeVar("I", bound=IdleRule)  # noqa: E741


@dataclass(frozen=True)
class Check:
    """A look at what a configuration points to, beyond the rules: files, this machine, running servers."""

    reads: tuple[str, ...]  # settings or sections; it is left out where one of them is known to be wrong
    run: Callable[[RunConfig], object]  # raises ConfigError, ValueError or OSError
    instead: Check | None = None  # where it is left out


NAME_RULE = "must be a name of printable characters, 200 bytes at most, as files and pages bear it; shorten it"


def is_name(text: str) -> bool:
    """Whether `NAME_RULE` holds."""
    return bool(text.strip()) and text.isprintable() and len(text.encode()) <= 200


def wrong(is_so: object, text: str, keys: tuple[str, ...] = ()) -> Problem | None:
    """The problem that there is where `is_so`."""
    return Problem(text, keys) if is_so else None


def told(findings: Findings) -> Iterator[Problem]:
    """Drop the findings that are no problem."""
    return (problem for problem in findings if problem is not None)


def rule(function: R) -> R:
    """Register a generator of contradictions. It touches no file; `rules.files` has those that do."""
    RULES.append(function)
    return function


def rule_of_rl(function: R) -> R:
    """Register a rule of the job train: other jobs leave its sections at their defaults."""
    RULES.append(lambda loaded: function(loaded) if loaded.config.job == "train" else iter(()))
    return function


def idle(function: I) -> I:
    """Register a table of settings that would be ignored."""
    IDLE_RULES.append(function)
    return function
