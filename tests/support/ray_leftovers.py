"""Processes that a Ray cluster of a test has left. Ray's workers write their title over their
environment, so a mark there does not find them; but each holds a log file of its cluster open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from end_to_end_tools import processes_with

# tell the GCS for a minute, which is gone too, and end
AGENTS = "ray::DashboardAgent", "ray::RuntimeEnvAgent"
AGENTS_S = 120.0


@contextmanager
def short_directory() -> Iterator[Path]:
    """Paths of Ray's sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def processes_of(marker: str, directory: Path) -> list[int]:
    """Living ones with that mark in their environment, or with a file below `directory` open."""
    found = set(processes_with(marker))
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if any(_link(fd).startswith(f"{directory}/") for fd in (entry / "fd").iterdir()):
                found.add(int(entry.name))
    return sorted(found - {os.getpid()})


def left_over(marker: str, directory: Path, within_s: float) -> list[str]:
    """Command lines of those that still live then.
    Agents of a raylet that was killed have longer.
    """
    began = time.monotonic()
    while True:
        lines = [line for pid in processes_of(marker, directory) if (line := _command_line(pid))]
        seconds = time.monotonic() - began
        others = [line for line in lines if not line.startswith(AGENTS)]
        if not lines or seconds > AGENTS_S or (others and seconds > within_s):
            return lines
        time.sleep(0.1)


def end(marker: str, directory: Path) -> None:
    for pid in processes_of(marker, directory):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return ""


def _link(path: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""
