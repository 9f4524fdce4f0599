"""What hosts are doing when something is not finished in time, for a person: one block of lines a host, by rank.

Also: What the threads of this process are doing, as lines of text.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.messages import Status
from rlhf_megatron.runtime.processes import state_of

DUMP_SIGNAL = signal.SIGUSR2  # hosts write the stacks of all threads to their log, even when Python does not run there
DescribeHang = Callable[[str, Sequence[str]], HostError]  # what is late, and the lines of `describe_hosts` -> the error
_SILENT = {
    "T": "is stopped (SIGSTOP, or a debugger)",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel (state D): a disk, a network file system or a driver",
    "Z": "has ended",
    "": "has ended",
}


@dataclass(frozen=True)
class HostView:
    """A host as the controller sees it."""

    where: str
    pid: int
    is_here: bool  # on the controller's machine
    status: Status | None  # None: it did not say


def describe_hosts(views: Sequence[HostView]) -> list[str]:
    """Return a block of text a host, and which to look at first. A silent host is asked for its stacks by signal."""
    lines = [line for view in views for line in _describe(view)]
    suspects = [view.where for view in views if view.status is None]
    if not suspects and any(view.status and view.status.collective for view in views):
        suspects = [view.where for view in views if view.status and view.status.method and not view.status.collective]
    if suspects and len(suspects) < len(views):
        what = "is not where the others are" if len(suspects) == 1 else "are not where the others are"
        lines.append(f"Look first at {', '.join(suspects)}: {what}.")
    return lines


def _describe(view: HostView) -> list[str]:
    status = view.status
    if status is None:
        return [f"  {view.where} {_why_silent(view)}"]
    inside = f", in {status.collective}" if status.collective else ""
    lines = [f"  {view.where} {status.method or 'no call'}: {status.stage} for {status.seconds:.1f} s{inside}"]
    lines += [f"      {frame}" for frame in status.stack]
    if not status.collective:
        lines += stack_lines(status.threads)
    return lines


def stack_lines(threads: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    return [line for name, stack in threads for line in (f"    thread {name}", *(f"      {frame}" for frame in stack))]


def _why_silent(view: HostView) -> str:
    if not view.is_here:
        return "does not answer: its process is stopped, or its machine is unreachable"
    state = state_of(view.pid)
    if state in _SILENT:
        return f"does not answer: process {view.pid} {_SILENT[state]}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(view.pid, DUMP_SIGNAL)
    return (
        f"does not answer: process {view.pid} is alive (state {state}), but no other thread of it gets to run Python;"
        " the stacks are in its log"
    )


NUM_FRAMES = 8
QUIET = ("control channel", "signals")  # threads that wait for messages all the time


def frames_of(thread_id: int) -> list[FrameType]:
    """Innermost first; [] when the thread runs no Python."""
    return list(_frames(sys._current_frames().get(thread_id)))


def describe(frames: list[FrameType], limit: int = NUM_FRAMES) -> tuple[str, ...]:
    """Return the innermost `limit` frames, innermost last: "dir/file.py:12 function"."""
    return tuple(_describe_frame(frame) for frame in frames[:limit][::-1])


def other_threads(*left_out: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return name and stack of the threads that run Python, but the one that asks, `left_out` and QUIET ones."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for thread_id, frame in sys._current_frames().items():
        name = names.get(thread_id, f"thread {thread_id}")  # one that C++ has started
        if thread_id in (threading.get_ident(), *left_out) or name.startswith(QUIET):
            continue
        found.append((name, describe(list(_frames(frame)))))
    return tuple(found)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _describe_frame(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
