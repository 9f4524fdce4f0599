"""The one list of rules on a configuration. A rule registers itself; problems are reported in
the order of registration.
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
"""(whether the settings are idle, the settings, the switch that decides, how to make them act); in
the last, "{switch}" stands for the switch's name, so that no message says "it" of two settings."""
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
    """A check of the things that a configuration points to, beyond the rules: files, this machine,
    running servers.
    """

    # settings or sections; it is left out where one of them is known to be wrong
    required_keys: tuple[str, ...]
    run: Callable[[RunConfig], object]  # raises ConfigError, ValueError or OSError
    fallback: PreflightCheck | None = None  # where it is left out


def is_valid_name(text: str) -> bool:
    """Return whether a name satisfies `NAME_RULE`: not blank, printable, and at most 200 bytes."""
    return bool(text.strip()) and text.isprintable() and len(text.encode()) <= 200


def make_problem_if(
    condition: object, text: str, keys: tuple[str, ...] = ()
) -> ConfigProblem | None:
    """Return a ConfigProblem with this text and these keys if `condition` is true, else None."""
    return ConfigProblem(text, keys) if condition else None


def drop_none(problems: OptionalProblems) -> Iterator[ConfigProblem]:
    """Yield the problems of a rule without the None that stand for "no problem"."""
    return (problem for problem in problems if problem is not None)


def register_rule(rule_function: R) -> R:
    """Add a rule to `RULES` for every job, and return the rule unchanged. A rule yields the
    contradictions of a configuration and touches no file; checks that read files are in
    `file_rules.py`.
    """
    RULES.append(rule_function)
    return rule_function


def register_rl_rule(rule_function: R) -> R:
    """Add a rule to `RULES` for the job "train" alone, and return the rule unchanged; other jobs
    leave the rule's sections at their defaults.
    """
    RULES.append(lambda loaded: rule_function(loaded) if loaded.config.job == "train" else iter(()))
    return rule_function


def register_idle_rule(rule_function: I) -> I:
    """Add a function to `IDLE_RULES` and return the function unchanged. The function lists
    `IdleSettings`: settings, and whether a configuration would ignore them.
    """
    IDLE_RULES.append(rule_function)
    return rule_function
