"""Which processes are below which, from /proc; nothing where there is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence


def list_children(pid: int) -> list[int]:
    """Return the pids of the processes whose parent is `pid` at this moment; [] where `pid` has
    ended.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
        except FileNotFoundError:
            # a kernel without CONFIG_PROC_CHILDREN
            if os.path.exists(f"/proc/{pid}/task/{thread}/stat"):
                return _scan_children(pid)
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def _scan_children(parent_pid: int) -> list[int]:
    """Return the children's pids by a scan of all of /proc."""
    return [
        int(pid)
        for pid in os.listdir("/proc")
        if pid.isdigit() and read_stat_fields(pid)[1:2] == [str(parent_pid).encode()]
    ]


def read_stat_fields(stat_path: int | str) -> Sequence[bytes]:
    """Return the fields of /proc/`stat_path`/stat from the state on, which is field 3 of proc(5);
    [] where the process has ended.
    """
    with contextlib.suppress(OSError), open(f"/proc/{stat_path}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return []


def iterate_descendants(pid: int, excluded_pids: Collection[int] = ()) -> Iterator[int]:
    """Yield the pids of all descendants of `pid` at this moment, without `excluded_pids` and their
    descendants.
    """
    for child in list_children(pid):
        if child not in excluded_pids:
            yield child
            yield from iterate_descendants(child, excluded_pids)
