"""What a worker process may not do: outlive its parent, or use more memory than it is given."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1
GIB = 2**30


def die_with(parent: int) -> None:
    """This process is killed when its parent ends, however that ends. `parent`: its pid, to notice that it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def limit_memory(gibibytes: float) -> None:
    """Allocations beyond this fail with MemoryError. Counts what the process may write, not libraries or files."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(gibibytes * GIB), hard))
