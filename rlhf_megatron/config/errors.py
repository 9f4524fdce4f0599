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
        """Return the problem's text, with its place in brackets where the place is known."""
        return f"{self.text} [{self.location}]" if self.location else self.text


class ConfigError(ValueError):
    """All problems of a configuration, one line each. `subject` names the thing that has them,
    where that is not the run's configuration.
    """

    def __init__(self, problems: Sequence[ConfigProblem | str], subject: str = "") -> None:
        """Keep the problems as texts, and join them with line breaks to the error's message."""
        self.subject = subject
        self.problems = [str(problem) for problem in problems]
        super().__init__("\n".join(self.problems))
