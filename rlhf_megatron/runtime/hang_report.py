"""What hosts are doing when something is not finished in time, for a person: one block of lines a
host, by rank.

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

from rlhf_megatron.runtime.control_messages import HostStatus
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.process_control import read_process_state

# hosts write the stacks of all threads to their log, even when Python does not run there
DUMP_SIGNAL = signal.SIGUSR2
# what is late, and the lines of `describe_hosts` -> the error
DescribeHang = Callable[[str, Sequence[str]], HostError]
_SILENT = {
    "T": "is stopped (SIGSTOP, or a debugger)",
    "t": "is stopped by a debugger",
    "D": "waits in the kernel (state D): a disk, a network file system or a driver",
    "Z": "has ended",
    "": "has ended",
}

NUM_FRAMES = 8
QUIET = ("control channel", "signals")  # threads that wait for messages all the time


@dataclass(frozen=True)
class HostSnapshot:
    """A host as the controller sees it."""

    rank_label: str
    pid: int
    is_local: bool  # on the controller's machine
    status: HostStatus | None  # None: it did not say


def describe_hosts(snapshots: Sequence[HostSnapshot]) -> list[str]:
    """Return lines about each host's work, and a line on which hosts to look at first. A silent
    host of this machine gets DUMP_SIGNAL, and writes its stacks to its log.
    """
    lines = [line for view in snapshots for line in _describe_host(view)]
    suspects = [view.rank_label for view in snapshots if view.status is None]
    if not suspects and any(view.status and view.status.collective for view in snapshots):
        suspects = [
            view.rank_label
            for view in snapshots
            if view.status and view.status.method and not view.status.collective
        ]
    if suspects and len(suspects) < len(snapshots):
        what = (
            "is not where the others are" if len(suspects) == 1 else "are not where the others are"
        )
        lines.append(f"Look first at {', '.join(suspects)}: {what}.")
    return lines


def _describe_host(snapshot: HostSnapshot) -> list[str]:
    """Return the lines about one host: its call, stage, time and stacks, or why it is silent."""
    status = snapshot.status
    if status is None:
        return [f"  {snapshot.rank_label} {_explain_silence(snapshot)}"]
    inside = f", in {status.collective}" if status.collective else ""
    lines = [
        f"  {snapshot.rank_label} {status.method or 'no call'}: {status.stage} for"
        f" {status.seconds:.1f} s{inside}"
    ]
    lines += [f"      {frame}" for frame in status.stack]
    if not status.collective:
        lines += format_thread_stacks(status.threads)
    return lines


def format_thread_stacks(threads: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return indented lines of the threads' names and frames. `threads` holds (name, frames)."""
    return [
        line
        for name, stack in threads
        for line in (f"    thread {name}", *(f"      {frame}" for frame in stack))
    ]


def _explain_silence(snapshot: HostSnapshot) -> str:
    """Return why a host does not answer, as far as its process state tells. Send DUMP_SIGNAL to a
    living process of this machine.
    """
    if not snapshot.is_local:
        return "does not answer: its process is stopped, or its machine is unreachable"
    state = read_process_state(snapshot.pid)
    if state in _SILENT:
        return f"does not answer: process {snapshot.pid} {_SILENT[state]}"
    with contextlib.suppress(ProcessLookupError):
        os.kill(snapshot.pid, DUMP_SIGNAL)
    return (
        f"does not answer: process {snapshot.pid} is alive (state {state}), but no other thread of"
        " it gets to run Python; the stacks are in its log"
    )


def list_thread_frames(thread_id: int) -> list[FrameType]:
    """Return the Python frames of a thread, innermost first; [] when the thread runs no Python."""
    return list(_iterate_outward(sys._current_frames().get(thread_id)))


def format_frames(frames: list[FrameType], max_frames: int = NUM_FRAMES) -> tuple[str, ...]:
    """Return the innermost `max_frames` frames as "dir/file.py:12 function", innermost last.
    `frames` is innermost first.
    """
    return tuple(_format_frame(frame) for frame in frames[:max_frames][::-1])


def list_other_thread_stacks(*excluded_thread_ids: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return (name, frames) of each thread that runs Python, without the calling thread,
    `excluded_thread_ids` and the threads whose names begin with one in QUIET.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found = []
    for thread_id, frame in sys._current_frames().items():
        name = names.get(thread_id, f"thread {thread_id}")  # one that C++ has started
        if thread_id in (threading.get_ident(), *excluded_thread_ids) or name.startswith(QUIET):
            continue
        found.append((name, format_frames(list(_iterate_outward(frame)))))
    return tuple(found)


def _iterate_outward(innermost_frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and the frames that called it, innermost first."""
    while innermost_frame is not None:
        yield innermost_frame
        innermost_frame = innermost_frame.f_back


def _format_frame(frame: FrameType) -> str:
    """Return a frame as "dir/file.py:12 function"."""
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
