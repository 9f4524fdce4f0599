"""A file of JSON objects, one a line, that is whole up to its last line whenever the process ends.

Also: What a resumed run writes again leaves its place: rows of metrics.jsonl and its like, so that each step has one
row
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


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


def read_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl; [] where that is not written."""
    path = run_dir / FILES[0]
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
