"""When what ran: trace.json in the trace event format of Chrome's and Perfetto's viewers.

An array, one event a line, each with a comma behind it; both viewers take a file whose closing
bracket is missing. Times are wall-clock microseconds. A track is a "thread" of the one process: 0
whole steps, 1 stages, then others. Format: "Trace Event
Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.line_file import LineFile, truncate_file

# Perfetto takes track 0 for the one with the process's number: that must be no other track's
PROCESS_NUMBER = 1000
STEPS_TRACK = "steps"
STAGES_TRACK = "stages"
CALL_CATEGORY = "call"  # category of calls to the hosts
OPENING_LINE = b"[\n"
ENDING_LINE = b"]\n"
_CLOSING_EVENT = {
    "name": "process_labels",
    "ph": "M",
    "pid": PROCESS_NUMBER,
    "tid": 0,
    "args": {"labels": "closed"},
}


class TraceWriter:
    """Threads may share it. Without a path nothing is written."""

    def __init__(self, path: Path | None, process_name: str) -> None:
        """Open the trace, going on in a former file, or only sum up the times of calls where `path`
        is None.
        """
        self.step = 0  # set by the tracker: the step that new events belong to
        self._call_seconds: dict[str, float] = {}
        self._pool_call_ends: dict[str, float] = {}  # by pool: when its last call ended
        self._lock = threading.Lock()
        self._track_numbers: dict[str, int] = {}
        self._wall_clock_offset_s = time.time() - time.monotonic()
        self._file = None
        if path is None:
            return
        last_end = _strip_trace_ending(path) if path.exists() else 0.0
        self._wall_clock_offset_s += max(0.0, last_end - time.time())  # a clock that was set back
        self._file = LineFile(path)
        if not path.stat().st_size:
            self._file.append_line(OPENING_LINE)
        self._write_event(
            {
                "name": "process_name",
                "ph": "M",
                "pid": PROCESS_NUMBER,
                "args": {"name": process_name},
            }
        )
        for track in (STEPS_TRACK, STAGES_TRACK):
            self._get_or_add_track(track)

    @contextmanager
    def record_span(self, name: str, track: str, category: str, **arguments: Any) -> Iterator[None]:
        """Record the time of the block as an event, also when the block ends by an exception."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add_event(name, track, category, start, time.monotonic(), **arguments)

    def add_event(
        self, name: str, track: str, category: str, start_s: float, end_s: float, **arguments: Any
    ) -> None:
        """Write an event from `start_s` to `end_s`, as `time.monotonic` counts, and add the time of
        a call to the call seconds. Write nothing after `close`.
        """
        first, last = (
            round((self._wall_clock_offset_s + moment) * 1e6) for moment in (start_s, end_s)
        )
        with self._lock:
            if category == CALL_CATEGORY:
                self._call_seconds[name] = self._call_seconds.get(name, 0.0) + end_s - start_s
            if self._file is None:
                return
            event = {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": first,
                "dur": last - first,
                "pid": PROCESS_NUMBER,
            }
            self._write_event(
                {
                    **event,
                    "tid": self._get_or_add_track(track),
                    "args": {"step": self.step, **arguments},
                }
            )

    def record_call(
        self, pool_name: str, method: str, start_s: float, future: Future[Any], **arguments: Any
    ) -> None:
        """Record a call to the hosts, which becomes an event on its pool's track when `future` is
        done.
        """

        def add_call_event(_: Future[Any]) -> None:
            """Add the event, from the start of the call or the end of the pool's last call."""
            # A pool runs its calls one after the other, and their futures are done in that order.
            end = time.monotonic()
            self.add_event(
                method,
                f"{pool_name} pool",
                CALL_CATEGORY,
                max(start_s, self._pool_call_ends.get(pool_name, start_s)),
                end,
                **arguments,
            )
            self._pool_call_ends[pool_name] = end

        future.add_done_callback(add_call_event)

    def take_call_seconds(self) -> dict[str, float]:
        """Return the seconds that calls to the hosts took since the last time, by call
        ("actor.update"), also where no file is written.
        """
        with self._lock:
            taken = self._call_seconds
            self._call_seconds = {}
        return taken

    def close(self) -> None:
        """Write the end of the file and close it; later events are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.append_line(json.dumps(_CLOSING_EVENT).encode() + b"\n" + ENDING_LINE)
                self._file.close()
                self._file = None

    def _get_or_add_track(self, track_name: str) -> int:
        """Return a track's number. A new track gets a name, and its place below the others."""
        if track_name not in self._track_numbers:
            number = self._track_numbers[track_name] = len(self._track_numbers)
            for what, arguments in (
                ("thread_name", {"name": track_name}),
                ("thread_sort_index", {"sort_index": number}),
            ):
                self._write_event(
                    {
                        "name": what,
                        "ph": "M",
                        "pid": PROCESS_NUMBER,
                        "tid": number,
                        "args": arguments,
                    }
                )
        return self._track_numbers[track_name]

    def _write_event(self, event: dict[str, Any]) -> None:
        """Append an event to the file as a line."""
        assert self._file is not None
        self._file.append_line(json.dumps(event).encode() + b",\n")


def _strip_trace_ending(path: Path) -> float:
    """Cut the closing bracket with the event before it, or an unfinished line, off the file. Return
    the unix seconds at which the last event left ended.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    while lines and not (lines[-1].endswith(b",\n") or lines == [OPENING_LINE]):
        lines.pop()
    truncate_file(path, sum(map(len, lines)))
    with suppress(ValueError, IndexError):
        last = json.loads(lines[-1][:-2])
        return float(last.get("ts", 0) + last.get("dur", 0)) / 1e6
    return 0.0
