"""Which processes are below which, from /proc; nothing where there is none."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, at this moment; none of one that has ended."""
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
            if os.path.exists(f"/proc/{pid}/task/{thread}/stat"):  # a kernel without CONFIG_PROC_CHILDREN
                return _by_parent(pid)
        except OSError:
            continue  # the thread has ended meanwhile
    return found


def _by_parent(parent: int) -> list[int]:
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and fields_of(pid)[1:2] == [str(parent).encode()]]


def fields_of(path: int | str) -> Sequence[bytes]:
    """Return the fields of /proc/`path`/stat from the state on, which is field 3 of proc(5); none of what has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{path}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()
    return []


def descendants(pid: int, but: Collection[int] = ()) -> Iterator[int]:
    """Processes below `pid`, at this moment, without those in `but` and below them."""
    for child in children(pid):
        if child not in but:
            yield child
            yield from descendants(child, but)
