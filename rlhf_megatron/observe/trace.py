"""When what ran: trace.json in the trace event format of Chrome's and Perfetto's viewers.

An array, one event a line, each with a comma behind it; both viewers take a file whose closing bracket is missing.
Times are wall-clock microseconds. A track is a "thread" of the one process: 0 whole steps, 1 stages, then others.
Format: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
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

from rlhf_megatron.observe.line_file import LineFile, cut_after

PROCESS = 1000  # Perfetto takes track 0 for the one with the process's number: that must be no other track's
STEPS, STAGES = "steps", "stages"
CALL = "call"  # category of calls to the hosts
OPENING, ENDING = b"[\n", b"]\n"
_CLOSING_EVENT = {"name": "process_labels", "ph": "M", "pid": PROCESS, "tid": 0, "args": {"labels": "closed"}}


class Trace:
    """Threads may share it. Without a path nothing is written."""

    def __init__(self, path: Path | None, process_name: str) -> None:
        self.step = 0  # set by the tracker: the step that new events belong to
        self._call_seconds: dict[str, float] = {}
        self._ends: dict[str, float] = {}  # by pool: when its last call ended
        self._lock = threading.Lock()
        self._tracks: dict[str, int] = {}
        self._wall_clock = time.time() - time.monotonic()
        self._file = None
        if path is None:
            return
        last_end = _reopen(path) if path.exists() else 0.0
        self._wall_clock += max(0.0, last_end - time.time())  # a clock that was set back
        self._file = LineFile(path)
        if not path.stat().st_size:
            self._file.append(OPENING)
        self._write({"name": "process_name", "ph": "M", "pid": PROCESS, "args": {"name": process_name}})
        for track in (STEPS, STAGES):
            self._track(track)

    @contextmanager
    def span(self, name: str, track: str, category: str, **arguments: Any) -> Iterator[None]:
        """Record the time of the block as an event, also when it ends by an exception."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(name, track, category, start, time.monotonic(), **arguments)

    def add(self, name: str, track: str, category: str, start: float, end: float, **arguments: Any) -> None:
        """An event from `start` to `end`, as `time.monotonic` counts. Not written once closed."""
        first, last = (round((self._wall_clock + moment) * 1e6) for moment in (start, end))
        with self._lock:
            if category == CALL:
                self._call_seconds[name] = self._call_seconds.get(name, 0.0) + end - start
            if self._file is None:
                return
            event = {"name": name, "cat": category, "ph": "X", "ts": first, "dur": last - first, "pid": PROCESS}
            self._write({**event, "tid": self._track(track), "args": {"step": self.step, **arguments}})

    def watch(self, pool: str, method: str, start: float, future: Future[Any], **arguments: Any) -> None:
        """A call to the hosts, which becomes an event on its pool's track when `future` is done."""

        def add(_: Future[Any]) -> None:
            # A pool runs its calls one after the other, and their futures are done in that order.
            end = time.monotonic()
            self.add(method, f"{pool} pool", CALL, max(start, self._ends.get(pool, start)), end, **arguments)
            self._ends[pool] = end

        future.add_done_callback(add)

    def take_call_seconds(self) -> dict[str, float]:
        """Return the seconds that calls to the hosts took since the last time, by call ("actor.update"), also where no
        file is written.
        """
        with self._lock:
            taken, self._call_seconds = self._call_seconds, {}
        return taken

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.append(json.dumps(_CLOSING_EVENT).encode() + b"\n" + ENDING)
                self._file.close()
                self._file = None

    def _track(self, name: str) -> int:
        """Return a track's number. A new track gets a name, and its place below the others."""
        if name not in self._tracks:
            number = self._tracks[name] = len(self._tracks)
            for what, arguments in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": number})):
                self._write({"name": what, "ph": "M", "pid": PROCESS, "tid": number, "args": arguments})
        return self._tracks[name]

    def _write(self, event: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.append(json.dumps(event).encode() + b",\n")


def _reopen(path: Path) -> float:
    """Takes off a closing bracket with the event before it, or a line that was cut off. Returns when the rest ended."""
    lines = path.read_bytes().splitlines(keepends=True)
    while lines and not (lines[-1].endswith(b",\n") or lines == [OPENING]):
        lines.pop()
    cut_after(path, sum(map(len, lines)))
    with suppress(ValueError, IndexError):
        last = json.loads(lines[-1][:-2])
        return float(last.get("ts", 0) + last.get("dur", 0)) / 1e6
    return 0.0
