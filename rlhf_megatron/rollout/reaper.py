"""What this process has started does not outlive it, however it ends: neither a stopped server nor its children."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence

# Reads until this process says that all is well, or has ended and with it the other end of the pipe.
_WATCH = """trap '' TERM INT HUP USR1; read -r word || kill -s KILL -- "-$1" """
# Begins only when it is watched, and is deaf to the signal with which a scheduler tells a whole job to stop.
_START = """trap '' USR1; read -r word && exec "$@" </dev/null"""


def watched(command: Sequence[str]) -> list[str]:
    """`command` as a process that waits for its `Reaper`."""
    return ["/bin/sh", "-c", _START, "sh", *command]


class Reaper:
    """A shell that kills the process group of a child when this process ends. It costs a pipe and 1 MB."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        """`child`: started with `watched`, as leader of its group and with a pipe as its standard input. It begins."""
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WATCH, "sh", str(child.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        _say(child)

    def dismiss(self) -> None:
        """The group has ended; its number may belong to somebody else soon. Safe to call twice."""
        _say(self._shell)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(1.0)


def _say(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # it has ended, or heard it before
        process.stdin.write(b"go\n")
        process.stdin.close()
