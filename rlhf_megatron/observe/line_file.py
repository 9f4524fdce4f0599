"""The files of JSON lines of a run: written so that all lines but the last are always whole, and over restarts.

Rows that a resumed run will write again are moved to superseded/, so that each step has one row. attempts.jsonl
says when the processes of a run began and ended, and from which step each went on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import Any

from rlhf_megatron.data import direct
from rlhf_megatron.stop import RunStopped

logger = logging.getLogger(__name__)
NO_ROOM = (ENOSPC, EDQUOT, EFBIG)
MAX_WAITING_BYTES = 64 << 20  # of lines that wait in memory for room in one file
PAUSE_S, POLL_S = 600.0, 2.0


def explained(path: Path, error: OSError) -> OSError:
    """The same error with the name of the file and, of a full disk, with what helps."""
    text = f"{path} cannot be written: {error.strerror or error}."
    if error.errno in NO_ROOM:
        free = shutil.disk_usage(next(place for place in path.parents if place.exists())).free / 1e6
        text += (
            f" {free:.0f} MB are free there. Make room: `du -sh {path.parent}/*` shows what is large (record/,"
            " superseded/, checkpoints, of which trainer.max_ckpt_to_keep keeps fewer), or raise the quota."
        )
    return OSError(error.errno, text)


def write_whole(path: Path, data: bytes) -> None:
    """The file appears by rename when it is complete and on disk. Raises OSError (see `explained`)."""
    try:
        direct.write_whole(path, [data])
    except OSError as error:
        raise explained(path, error) from error


def write_patiently(write: Callable[[], None], check_stop: Callable[[], None]) -> None:
    """Call `write`. While it finds the disk full the run pauses, for PAUSE_S at most; then its OSError is raised."""
    end = None
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in NO_ROOM or (end is not None and time.monotonic() > end):
                raise
            if end is None:
                end = time.monotonic() + PAUSE_S
                logger.warning("%s The run waits for room, %.0f minutes at most.", error.strerror, PAUSE_S / 60)
        check_stop()
        time.sleep(POLL_S)


class LineFile:
    """Appends whole lines. A line that a former process left unfinished is cut off first.

    Writing raises nothing: lines for which the disk has no room wait in memory, and go first when there is room.
    """

    def __init__(self, path: Path) -> None:
        if path.exists():
            cut_after(path, path.read_bytes().rfind(b"\n") + 1)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._waiting: deque[bytes] = deque()
        self._num_bytes, self._num_lost = 0, 0
        self._is_told = False

    def write(self, row: Mapping[str, Any]) -> None:
        """The line is with the operating system when this returns, or waits."""
        self.append(json.dumps(row).encode() + b"\n")

    def append(self, line: bytes) -> None:
        if self._num_bytes + len(line) > MAX_WAITING_BYTES:
            self._num_lost += 1
            return
        self._waiting.append(line)
        self._num_bytes += len(line)
        try:
            self.flush()
        except OSError as error:
            if not self._is_told:
                logger.warning("%s Its lines wait in memory; the run goes on.", error.strerror)
            self._is_told = True

    def flush(self) -> None:
        """Write the lines that wait. Raises OSError (see `explained`); the file then ends with a whole line."""
        while self._waiting:
            line, end = self._waiting[0], os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(line):  # a disk that becomes full takes a part
                    written += self._file.write(line[written:])
            except OSError as error:
                self._file.truncate(end)
                raise explained(self._path, error) from error
            self._waiting.popleft()
            self._num_bytes -= len(line)
        self._is_told = False

    def close(self) -> None:
        try:
            self.flush()
        except OSError as error:
            self._num_lost += len(self._waiting)
            logger.warning("%s", error.strerror)
        if self._num_lost:
            logger.warning("%s lacks %d lines for which the disk had no room.", self._path, self._num_lost)
        self._file.close()


def cut_after(path: Path, num_bytes: int) -> None:
    """Keeps the first `num_bytes` of a file."""
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def strict(value: Any) -> Any:
    """`value` with None for each number that JSON has no word for (NaN, infinities)."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    return [strict(item) for item in value] if isinstance(value, list | tuple) else value


DIRECTORY = "superseded"
FILES = ("metrics.jsonl", "samples.jsonl", "mismatch.jsonl")
ENDINGS = ("summary.json", "hf", "hf_critic")  # of a run that had all of its steps, or nearly


def supersede(run_dir: Path, step: int, attempt: int) -> int:
    """Move rows of steps after `step` to superseded/attempt_<n>/, and return how many of metrics.jsonl they were.

    A last line that was cut off goes with them, and so do ENDINGS. The steps of a warm-up are others than those of the
    run.
    """
    to = run_dir / DIRECTORY / f"attempt_{attempt:03d}"
    for name in ENDINGS:
        if (run_dir / name).exists():
            to.mkdir(parents=True, exist_ok=True)
            os.rename(run_dir / name, to / name)
    counts = [_move_rows(run_dir / name, to / name, step) for name in FILES]
    return counts[0]


def read_rows(run_dir: Path, name: str = FILES[0]) -> list[dict[str, Any]]:
    """Return the whole rows of a file of JSON lines; [] where it is not written."""
    path = run_dir / name
    return [row for line in path.read_bytes().splitlines() if (row := _row(line))] if path.exists() else []


def evaluation_seconds(rows: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the seconds of the evaluation after `step` that stands: the state of that step was saved before it."""
    return sum(row.get("timing_s/evaluate", 0.0) for row in rows if (row["kind"], row["step"]) == ("evaluation", step))


def _move_rows(path: Path, to: Path, step: int) -> int:
    if not path.exists():
        return 0
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        row = _row(line) if line.endswith(b"\n") else {}
        is_kept = row and (row.get("kind") == "warmup" or row["step"] <= step)
        (kept if is_kept else moved).append(line)
    if moved:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, b"".join(moved))
        write_whole(path, b"".join(kept))
    return len(moved)


def _row(line: bytes) -> dict[str, Any]:
    """{} for one that is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


ATTEMPTS = "attempts.jsonl"
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"


@dataclass
class RunClock:
    """How much of the time since a run was launched first went into what stands, over restarts.

    `productive_s`: time in steps, evaluations and warm-up whose results count. What a kill undid does not, nor do
    starting, loading and waiting for a checkpoint. The wall clock is read once; from then on the monotonic one counts.
    """

    first_start: float  # unix seconds
    productive_s: float = 0.0

    def __post_init__(self) -> None:
        before_s = time.time() - self.first_start
        if before_s < 0:
            logger.warning("The clock is %.0f s before the first launch: ETTR counts from now.", -before_s)
        self._start = time.monotonic() - max(0.0, before_s)

    def ettr(self) -> float:
        """Effective training time ratio: productive time / wall time since the first launch; 1 at most."""
        return self.productive_s / max(1e-9, self.productive_s, time.monotonic() - self._start)

    def add(self, seconds: float) -> None:
        self.productive_s += seconds


class Attempts:
    """The attempts of a run directory. One that was killed has a start and no end."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / ATTEMPTS
        self._starts = [line for line in read_attempts(run_dir) if line.get("kind") == "start"]

    @property
    def count(self) -> int:
        return len(self._starts)

    @property
    def first_start(self) -> float:
        """Unix seconds at which the run was launched first; now where it never was."""
        return float(self._starts[0]["time"]) if self._starts else time.time()

    @property
    def resumed_from_step(self) -> int | None:
        """The step that the current attempt resumed from; None: it started anew."""
        return self._starts[-1]["resumed_from_step"] if self._starts else None

    @contextmanager
    def attempt(self, since: float, resumed_from_step: int | None, **facts: Any) -> Iterator[None]:
        """A line at the start and one at the end, with what it ended by. `facts`: of the start; None is left out."""
        began = time.monotonic() - max(0.0, time.time() - since)
        start = {"kind": "start", "time": since, "resumed_from_step": resumed_from_step}
        start |= {name: value for name, value in facts.items() if value is not None}
        self._write(start)
        self._starts.append(start)
        try:
            yield
        except BaseException as error:
            kind = STOPPED if isinstance(error, RunStopped | KeyboardInterrupt) else FAILED
            self._end(began, f"{kind}: {error or type(error).__name__}")
            raise
        self._end(began, COMPLETE)

    def _end(self, began: float, reason: str) -> None:
        seconds = round(time.monotonic() - began, 1)
        with suppress(OSError):  # what the run ends by is what is told
            self._write({"kind": "end", "time": time.time(), "seconds": seconds, "reason": reason[:1000]})

    def _write(self, line: Mapping[str, Any]) -> None:
        file = LineFile(self._path)
        file.write(line)
        file.close()


def read_attempts(run_dir: Path) -> list[dict[str, Any]]:
    """All lines that can be read; a last one that was cut off is not there."""
    path = run_dir / ATTEMPTS
    found = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found += [line] if isinstance(line, dict) and isinstance(line.get("time"), int | float) else []
    return found
