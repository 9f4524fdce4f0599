"""What a sandbox is to those who run programs in it: a session of one program, and what a run
of it came to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Ending = Literal["exit", "timeout", "memory", "processes", "files", "died"]


class SandboxUnavailableError(RuntimeError):
    """The sandbox failed, not the program; the sample is masked."""


@dataclass(frozen=True)
class SandboxProgram:
    """Python source. `function` names the function to call, of the module or of its class Solution;
    with None the program reads stdin and prints.
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
        """Return whether the program ended by itself with exit code 0."""
        return self.ending == "exit" and self.exit_code == 0


class SandboxSession(Protocol):
    """One program; each run starts from nothing."""

    def run_program(self, stdin: str = "", arguments: tuple[Any, ...] = ()) -> ProgramResult:
        """Run the program once, with `stdin`, or with `arguments` for its function, and return how
        the run ended. Raise SandboxUnavailableError where the sandbox itself fails.
        """


class ProgramSandbox(Protocol):
    """A place where untrusted programs run. Only one thread at a time may use it."""

    def open_session(self, program: SandboxProgram) -> AbstractContextManager[SandboxSession]:
        """Return a context manager that holds a session of this program. Raise
        SandboxUnavailableError where the sandbox itself fails.
        """

    def close(self) -> None:
        """End the sandbox and all its processes. Safe to call twice."""
