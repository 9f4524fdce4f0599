"""Work in groups, done in this process or in several that are forked off it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

RunGroup = Callable[[int], Any]
"""From the number of a group to what came of it, which can be pickled."""


def run_groups_in_processes(
    group_numbers: Sequence[int], run_group: RunGroup, num_processes: int
) -> Iterator[tuple[int, Any]]:
    """(number, result) of each group, as they are done. Raises what `run_group` raises,
    ValueError and OSError.

    Each process begins at a place of its own in `group_numbers`: the kernel lets one process at a
    time write into a file. The processes end with this one, whatever ends it.
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
    """Hand each child one group at a time and yield the answers as they come."""
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
    """A child: it works on one group after the other until the parent closes the
    pipe, or is gone.
    """
    for other in inherited_connections:  # else the pipe would not end with the parent
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            number = connection.recv()
        except EOFError:
            return
        if os.getppid() != parent_pid:
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
