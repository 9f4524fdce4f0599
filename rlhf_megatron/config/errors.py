"""What is wrong with a configuration: problems are gathered and raised all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ConfigProblem:
    """One thing to mend. `text` carries the value, the rule and the fix."""

    text: str
    keys: tuple[str, ...] = ()  # full key paths that it is about, the one to mend first
    location: str = ""  # file:line or "command line"

    def __str__(self) -> str:
        return f"{self.text} [{self.location}]" if self.location else self.text


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line a problem. `subject`: what has them,
    where it is not the run's configuration.
    """

    def __init__(self, problems: Sequence[ConfigProblem | str], subject: str = "") -> None:
        self.subject = subject
        self.problems = [str(problem) for problem in problems]
        super().__init__("\n".join(self.problems))
