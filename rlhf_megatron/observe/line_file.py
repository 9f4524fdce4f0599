"""The files of JSON lines of a run: written so that all lines but the last are always whole, and over restarts.

Rows that a resumed run will write again are moved to superseded/, so that each step has one row. attempts.jsonl
says when the processes of a run began and ended, and from which step each went on.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.stop import RunStopped


class LineFile:
    """Appends. A line that a former process left unfinished is cut off first."""

    def __init__(self, path: Path) -> None:
        if path.exists():
            cut_after(path, path.read_bytes().rfind(b"\n") + 1)
        self._file = path.open("ab")

    def write(self, row: Mapping[str, Any]) -> None:
        """The line is with the operating system when this returns."""
        self._file.write(json.dumps(row).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
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
    """Of the evaluation after `step` that stands: the state of that step was saved before it."""
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
        _write(to, b"".join(moved))
        _write(aside := path.with_name(f"{path.name}.tmp"), b"".join(kept))
        os.replace(aside, path)
    return len(moved)


def _row(line: bytes) -> dict[str, Any]:
    """{} for one that is none."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else {}


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


ATTEMPTS = "attempts.jsonl"
COMPLETE, STOPPED, FAILED = "complete", "stopped", "failed"


@dataclass
class RunClock:
    """How much of the time since a run was launched first went into what stands, over restarts.

    `productive_s`: time in steps, evaluations and warm-up whose results count. What a kill undid does not, nor do
    starting, loading and waiting for a checkpoint.
    """

    first_start: float  # unix seconds
    productive_s: float = 0.0

    def ettr(self) -> float:
        """Effective training time ratio: productive time / wall time since the first launch."""
        return self.productive_s / max(1e-9, time.time() - self.first_start)

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
        """Of the current attempt; None: it started anew."""
        return self._starts[-1]["resumed_from_step"] if self._starts else None

    @contextmanager
    def attempt(self, since: float, resumed_from_step: int | None, **facts: Any) -> Iterator[None]:
        """A line at the start and one at the end, with what it ended by. `facts`: of the start; None is left out."""
        start = {"kind": "start", "time": since, "resumed_from_step": resumed_from_step}
        start |= {name: value for name, value in facts.items() if value is not None}
        self._write(start)
        self._starts.append(start)
        try:
            yield
        except BaseException as error:
            kind = STOPPED if isinstance(error, RunStopped | KeyboardInterrupt) else FAILED
            self._end(f"{kind}: {error or type(error).__name__}")
            raise
        self._end(COMPLETE)

    def _end(self, reason: str) -> None:
        self._write({"kind": "end", "time": time.time(), "reason": reason[:1000]})

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
