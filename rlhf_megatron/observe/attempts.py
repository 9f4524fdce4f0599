"""attempts.jsonl: when the processes of a run began and ended, over restarts, and from which step each went on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.observe.line_file import LineFile
from rlhf_megatron.stop import RunStopped

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
