"""What the threads of this process are doing, as lines of text."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

NUM_FRAMES = 8
QUIET = ("control channel", "signals")  # threads that wait for messages all the time


def frames_of(thread_id: int) -> list[FrameType]:
    """Innermost first; [] when the thread runs no Python."""
    return list(_frames(sys._current_frames().get(thread_id)))


def describe(frames: list[FrameType], limit: int = NUM_FRAMES) -> tuple[str, ...]:
    """The innermost `limit` frames, innermost last: "dir/file.py:12 function"."""
    return tuple(_describe_frame(frame) for frame in frames[:limit][::-1])


def other_threads(*left_out: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and stack of the threads that run Python, without the one that asks, those `left_out` and QUIET ones."""
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
