"""The one list of rules on a configuration. A rule registers itself; problems are told in the order
of registration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

OptionalProblems: TypeAlias = Iterator[ConfigProblem | None]
Rule: TypeAlias = Callable[[LoadedConfig], OptionalProblems]
IdleSettings: TypeAlias = tuple[bool, tuple[str, ...], str, str]
"""(whether the settings are idle, the settings, the switch that decides, how to make them act)"""
IdleRule: TypeAlias = Callable[[RunConfig], Iterable[IdleSettings]]

RULES: list[Rule] = []
IDLE_RULES: list[IdleRule] = []
R = TypeVar("R", bound=Rule)
I = TypeVar("I", bound=IdleRule)  # noqa: E741

NAME_RULE = (
    "must be a name of printable characters, 200 bytes at most, as files and pages bear"
    " it; shorten it"
)


@dataclass(frozen=True)
class PreflightCheck:
    """A look at what a configuration points to, beyond the rules: files, this machine,
    running servers.
    """

    required_keys: tuple[
        str, ...
    ]  # settings or sections; it is left out where one of them is known to be wrong
    run: Callable[[RunConfig], object]  # raises ConfigError, ValueError or OSError
    fallback: PreflightCheck | None = None  # where it is left out


def is_valid_name(text: str) -> bool:
    """Whether `NAME_RULE` holds."""
    return bool(text.strip()) and text.isprintable() and len(text.encode()) <= 200


def make_problem_if(
    condition: object, text: str, keys: tuple[str, ...] = ()
) -> ConfigProblem | None:
    """The problem that there is where `condition`."""
    return ConfigProblem(text, keys) if condition else None


def drop_none(problems: OptionalProblems) -> Iterator[ConfigProblem]:
    """Drop the findings that are no problem."""
    return (problem for problem in problems if problem is not None)


def register_rule(rule_function: R) -> R:
    """Register a generator of contradictions. It touches no file;
    `rules.files` has those that do.
    """
    RULES.append(rule_function)
    return rule_function


def register_rl_rule(rule_function: R) -> R:
    """Register a rule of the job train: other jobs leave its sections at their defaults."""
    RULES.append(lambda loaded: rule_function(loaded) if loaded.config.job == "train" else iter(()))
    return rule_function


def register_idle_rule(rule_function: I) -> I:
    """Register a table of settings that would be ignored."""
    IDLE_RULES.append(rule_function)
    return rule_function
