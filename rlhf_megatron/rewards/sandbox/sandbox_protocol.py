"""What a sandbox is to those who run programs in it: a session of one program, and what a run
of it came to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Ending = Literal["exit", "timeout", "memory", "processes", "files", "died"]


class SandboxUnavailableError(RuntimeError):
    """The sandbox failed, not the program: its sample is left out."""


@dataclass(frozen=True)
class SandboxProgram:
    """Python source. `function`: what is called, of the module or of its class Solution; None: it
    reads and prints.
    """

    code: str
    function: str | None = None


@dataclass(frozen=True)
class ProgramResult:
    """How one run of a program ended."""

    ending: Ending
    exit_code: int = 0  # exit code; negative: a signal
    stdout: str = ""
    stderr: str = ""  # its end
    value: str | None = None  # JSON of what the function returned

    @property
    def is_success(self) -> bool:
        return self.ending == "exit" and self.exit_code == 0


class SandboxSession(Protocol):
    """One program; each run starts from nothing."""

    def run_program(self, stdin: str = "", arguments: tuple[Any, ...] = ()) -> ProgramResult:
        """`arguments`: of the function. Raises SandboxUnavailable."""


class ProgramSandbox(Protocol):
    """Used by one thread at a time."""

    def open_session(self, program: SandboxProgram) -> AbstractContextManager[SandboxSession]:
        """Raises SandboxUnavailable."""

    def close(self) -> None:
        """End all of it. Safe to call twice."""
