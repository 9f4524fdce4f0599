"""What a run may leave behind or pile up: ports, entries of shared memory, file descriptors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.program import Process

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "rlhf-megatron"  # of what the package makes there
CACHES = ("torchinductor_",)  # torch's own in the temporary directory, one a user
LISTEN = "0A"
ENDS = 10  # counts at either end of a process's life whose minimum is compared
ALLOWED_GROWTH = 8  # descriptors
MIN_SECONDS = 20.0  # that a process must have been watched


def shared_memory() -> set[str]:
    """Names of the package's entries."""
    return (
        {path.name for path in SHARED_MEMORY.glob(f"{PREFIX}*")}
        if SHARED_MEMORY.is_dir()
        else set()
    )


def temporary_entries(directory: Path) -> list[str]:
    """What is left in a temporary directory that was empty, torch's caches left out."""
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(CACHES))


def new_entries(before: set[str], after: set[str]) -> list[str]:
    return sorted(after - before)


def listening_ports(pids: Iterable[int] | None) -> set[int]:
    """TCP ports on which these processes listen; None: anybody."""
    sockets: dict[str, int] = {}  # inode -> port
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == LISTEN:
                    sockets[words[9]] = int(words[1].rpartition(":")[2], 16)
    if pids is None:
        return set(sockets.values())
    held = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    return {port for inode, port in sockets.items() if inode in held}


@dataclass
class FileCounts:
    """Open file descriptors of each process over its life."""

    # (role, pid) -> time, count
    _counts: dict[tuple[str, int], list[tuple[float, int]]] = field(default_factory=dict)

    def add(self, processes: Sequence[Process], seconds: float) -> None:
        for process in processes:
            self._counts.setdefault((process.role, process.pid), []).append(
                (seconds, process.num_files)
            )

    def table(self) -> list[dict[str, object]]:
        """A row for each process that was watched long enough: the fewest open at
        first, and at last.
        """
        rows = []
        for (role, _), counts in self._counts.items():
            seconds = counts[-1][0] - counts[0][0]
            if seconds >= MIN_SECONDS and len(counts) >= 2 * ENDS:
                first, last = (
                    min(count for _, count in part) for part in (counts[:ENDS], counts[-ENDS:])
                )
                rows.append(
                    {"role": role, "seconds": round(seconds, 1), "first": first, "last": last}
                )
        return rows

    def problems(self) -> list[str]:
        return [
            f"{row['role']} had {row['first']} open files at first and {row['last']} at last"
            for row in self.table()
            if int(str(row["last"])) - int(str(row["first"])) > ALLOWED_GROWTH
        ]
