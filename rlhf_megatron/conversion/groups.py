"""Work in groups, done in this process or in several that are forked off it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

Work = Callable[[int], Any]
"""From the number of a group to what came of it, which can be pickled."""


def run_groups(numbers: Sequence[int], work: Work, num_processes: int) -> Iterator[tuple[int, Any]]:
    """(number, result) of each group, as they are done. Raises what `work` raises, ValueError and OSError.

    Each process begins at a place of its own in `numbers`: the kernel lets one process at a time write into a file. The
    processes end with this one, whatever ends it.
    """
    if num_processes <= 1 or len(numbers) <= 1:
        for number in numbers:
            yield number, work(number)
        return
    context = multiprocessing.get_context("fork")
    children: dict[Connection, Any] = {}
    try:
        for _ in range(min(num_processes, len(numbers))):
            ours, theirs = context.Pipe()
            child = context.Process(target=_serve, args=(theirs, [*children, ours], work, os.getpid()), daemon=True)
            child.start()
            theirs.close()
            children[ours] = child
        yield from _deal(list(numbers), children)
    finally:
        for ours, child in children.items():
            ours.close()
            child.terminate()
            child.join()


def _deal(numbers: list[int], children: dict[Connection, Any]) -> Iterator[tuple[int, Any]]:
    """Hand each child one group at a time and yield the answers as they come."""
    bounds = [len(numbers) * child // len(children) for child in range(len(children) + 1)]
    own = {ours: numbers[low:high][::-1] for ours, (low, high) in zip(children, pairwise(bounds), strict=True)}
    working = set()
    for ours in children:
        ours.send(own[ours].pop())
        working.add(ours)
    while working:
        for ready in wait(working):
            assert isinstance(ready, Connection)
            try:
                number, result, error = ready.recv()
            except EOFError:
                children[ready].join()
                code = children[ready].exitcode
                raise OSError(f"a process of the conversion ended with exit code {code}; run it again.") from None
            if error is not None:
                raise error
            if left := own[ready] or max(own.values(), key=len):
                ready.send(left.pop())
            else:
                working.discard(ready)
            yield number, result


def _serve(theirs: Connection, others: Sequence[Connection], work: Work, parent: int) -> None:
    """A child: it works on one group after the other until the parent closes the pipe, or is gone."""
    for other in others:  # else the pipe would not end with the parent
        other.close()
    torch.set_num_threads(1)
    while True:
        try:
            number = theirs.recv()
        except EOFError:
            return
        if os.getppid() != parent:
            return
        answer: tuple[int, Any, Exception | None]
        try:
            answer = (number, work(number), None)
        except (ValueError, OSError) as error:
            answer = (number, None, type(error)(str(error)))
        try:
            theirs.send(answer)
        except BrokenPipeError:
            return
