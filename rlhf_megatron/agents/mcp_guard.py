"""The process between a worker and an MCP server that it has started: it ends the server, and
everything that the server has started, when the worker or the server ends, however that happens.

    python -I -S -c CODE PARENT_PID PROGRAM [ARGUMENT ...]

The server has the guard's standard input, output and environment. Only the standard library is
there (`-S`), since the environment is the server's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.rewards.process_tree import list_children

_PR_SET_CHILD_SUBREAPER = 36
SIGNAL_EXIT_CODE = 128  # added to the number of the signal that has ended a process
START_FAILED = 127

_IMPORT_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = (
    "import sys; sys.path.insert(0, {root!r});"
    " from rlhf_megatron.agents.mcp_guard import main; sys.exit(main())"
)


def make_guarded_command(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` below a guard, as a child of this process."""
    code = _CODE.format(root=_IMPORT_ROOT)
    return [sys.executable, "-I", "-S", "-c", code, str(os.getpid()), *command]


def main() -> int:
    """Run the server until it ends, this process's parent ends, or SIGTERM comes; then kill all
    that is left. Return the server's exit code.
    """
    parent_pid = int(sys.argv[1])
    _adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_on_signal)
    end_with_parent(signal.SIGTERM, parent_pid)
    try:
        server = subprocess.Popen(
            sys.argv[2:],
            # this process has one thread, so code may run between fork and exec
            preexec_fn=partial(end_with_parent, signal.SIGKILL, os.getpid()),
        )
        # the worker must see the end of the server's output, and the server that of its input
        for descriptor in (sys.stdin.fileno(), sys.stdout.fileno()):
            os.close(descriptor)
        code = server.wait()
    except OSError as error:
        sys.stderr.write(f"{sys.argv[2]} cannot be started: {error}\n")
        return START_FAILED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()
    return code if code >= 0 else SIGNAL_EXIT_CODE - code


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Leave `main`, through its last clean-up."""
    raise SystemExit(SIGNAL_EXIT_CODE + number)


def _adopt_orphans() -> None:
    """Make what the server leaves behind a child of this process, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _kill_children() -> None:
    """Kill all children, and those that become children because their parents were killed."""
    with contextlib.suppress(OSError):  # none is left; or there is no /proc
        while children := list_children(os.getpid()):
            for child in children:
                os.kill(child, signal.SIGKILL)
            os.waitpid(-1, 0)
