"""Work in groups, done in this process or in several that are forked off it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from rlhf_megatron.parent_process import end_with_parent

RunGroup = Callable[[int], Any]
"""From the number of a group to what came of it, which can be pickled."""


def run_groups_in_processes(
    group_numbers: Sequence[int], run_group: RunGroup, num_processes: int
) -> Iterator[tuple[int, Any]]:
    """Yield (number, result of `run_group`) of each group, in the order in which groups finish.
    Raise ValueError or OSError that `run_group` raises, and OSError where a process dies.

    With one process the groups run here. Else they run in forked processes, each of which begins at
    its own place in `group_numbers`: the kernel lets only one process at a time write into a file.
    The processes end with this one, however it ends.
    """
    if num_processes <= 1 or len(group_numbers) <= 1:
        for number in group_numbers:
            yield number, run_group(number)
        return
    context = multiprocessing.get_context("fork")
    children: dict[Connection, Any] = {}
    try:
        for _ in range(min(num_processes, len(group_numbers))):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=_run_child_process,
                args=(theirs, [*children, ours], run_group, os.getpid()),
                daemon=True,
            )
            child.start()
            theirs.close()
            children[ours] = child
        yield from _deal_groups_to_children(list(group_numbers), children)
    finally:
        for ours, child in children.items():
            ours.close()
            child.terminate()
            child.join()


def _deal_groups_to_children(
    group_numbers: list[int], child_by_connection: dict[Connection, Any]
) -> Iterator[tuple[int, Any]]:
    """Send each child one group at a time and yield (number, result) as answers arrive; a child
    without groups of its own takes from the child with the most left. Raise a child's error, and
    OSError where a child died.
    """
    bounds = [
        len(group_numbers) * child // len(child_by_connection)
        for child in range(len(child_by_connection) + 1)
    ]
    own = {
        ours: group_numbers[low:high][::-1]
        for ours, (low, high) in zip(child_by_connection, pairwise(bounds), strict=True)
    }
    working = set()
    for ours in child_by_connection:
        ours.send(own[ours].pop())
        working.add(ours)
    while working:
        for ready in wait(working):
            assert isinstance(ready, Connection)
            try:
                number, result, error = ready.recv()
            except EOFError:
                child_by_connection[ready].join()
                code = child_by_connection[ready].exitcode
                raise OSError(
                    f"a process of the conversion ended with exit code {code}; run it again."
                ) from None
            if error is not None:
                raise error
            if left := own[ready] or max(own.values(), key=len):
                ready.send(left.pop())
            else:
                working.discard(ready)
            yield number, result


def _run_child_process(
    connection: Connection,
    inherited_connections: Sequence[Connection],
    run_group: RunGroup,
    parent_pid: int,
) -> None:
    """Run groups in a child process, one after the other, until the parent closes the pipe. The
    process is killed when the parent ends. Send (number, result, error) of each group; only
    ValueError and OSError are sent as errors.
    """
    for other in inherited_connections:  # else the pipe would not end with the parent
        other.close()
    end_with_parent(signal.SIGKILL, parent_pid)
    torch.set_num_threads(1)
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        answer: tuple[int, Any, Exception | None]
        try:
            answer = (number, run_group(number), None)
        except (ValueError, OSError) as error:
            answer = (number, None, type(error)(str(error)))
        try:
            connection.send(answer)
        except BrokenPipeError:
            return
