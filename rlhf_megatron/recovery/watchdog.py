"""The hang doctor: a stage of a step that is not finished in time ends the run, with one report of who was doing what.

The report has all hosts by rank, the threads of the controller, and the last calls to engines. It is the error's
message and stands in HANG_REPORT of the run directory. Calls outside of stages have a deadline too
(`runtime.remote`); theirs is the same report.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rlhf_megatron.runtime.failures import HostTimeoutError
from rlhf_megatron.runtime.hang import describe, frames_of, other_threads, stack_lines
from rlhf_megatron.runtime.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

HANG_REPORT = "hang_report.txt"
CONTROLLER_FRAMES = 16
ENGINE_CALLS = 30
FIRST_S = 1.0  # for the main thread to learn it from a call to the hosts
END_S = 45.0  # for the run to end after the report; then the process is ended
_INTERRUPT = signal.SIGUSR2


class StageWatchdog:
    """Callable: `with watchdog("generate"): ...` on the main thread raises HostTimeoutError when that takes too long.

    A context manager around the whole run. `stage_timeouts_s`: stages with a deadline of their own. A main thread that
    does not come back to Python is not waited for: END_S after the report the process ends with code 1.
    """

    def __init__(self, stage_timeout_s: float, stage_timeouts_s: Mapping[str, float], run_dir: Path) -> None:
        self._timeout_s = stage_timeout_s
        self._timeouts_s = dict(stage_timeouts_s)
        self._path = run_dir / HANG_REPORT
        self._group: WorkerGroup | None = None
        self._calls: Callable[[], Sequence[object]] = list
        self._lock = threading.Lock()
        self._error: HostTimeoutError | None = None  # of the report, once there is one
        self._is_over = threading.Event()  # of the stage that runs
        self._main = threading.get_ident()
        self._last_resort: threading.Timer | None = None

    def look_at(self, group: WorkerGroup, calls: Callable[[], Sequence[object]]) -> None:
        """Set what a report covers. `calls` returns the last calls to engines, as printed."""
        self._group, self._calls = group, calls
        group.describe_hangs_by(self._late_call)

    def __enter__(self) -> StageWatchdog:
        self._before = signal.signal(_INTERRUPT, self._interrupted)
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:  # a report that is being made is finished
            signal.signal(_INTERRUPT, self._before)
            if self._last_resort is not None:
                self._last_resort.cancel()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        is_over = self._is_over = threading.Event()
        timer = threading.Timer(self._deadline(stage), self._expire, (stage, is_over))
        timer.daemon = True
        timer.name = "watchdog"
        timer.start()
        try:
            yield
        finally:
            is_over.set()
            timer.cancel()

    def _deadline(self, stage: str) -> float:
        return self._timeouts_s.get(stage, self._timeout_s)

    def _expire(self, stage: str, is_over: threading.Event) -> None:
        """Run on the timer's thread when a stage is late."""
        key = f"trainer.stage_timeouts_s.{stage}" if stage in self._timeouts_s else "trainer.stage_timeout_s"
        header = f"The stage {stage} was not finished within {self._deadline(stage):g} s ({key})."
        error = self._late_stage(header, is_over)
        if error is None:
            return
        if self._group is not None:
            self._group.end_with(error)
        if not is_over.wait(FIRST_S):
            with self._lock:
                if not is_over.is_set():
                    signal.pthread_kill(self._main, _INTERRUPT)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self._error is not None and not self._is_over.is_set():
            raise self._error

    def _late_call(self, header: str, host_lines: Sequence[str]) -> HostTimeoutError:
        with self._lock:
            return self._error or self._report(header, host_lines)

    def _late_stage(self, header: str, is_over: threading.Event) -> HostTimeoutError | None:
        """Make the error of a late stage; None where the stage ended meanwhile."""
        with self._lock:
            if self._error is not None or is_over.is_set():
                return self._error
            return self._report(header, self._group.describe_hosts() if self._group is not None else [])

    def _report(self, header: str, host_lines: Sequence[str]) -> HostTimeoutError:
        lines = [header]
        lines += ["The hosts:", *host_lines] if host_lines else []
        lines += ["The controller:", *self._controller_lines(), *self._engine_lines()]
        text = "\n".join(lines)
        self._error = HostTimeoutError(text)
        self._last_resort = threading.Timer(END_S, _end_process, (text,))
        self._last_resort.daemon = True
        self._last_resort.start()
        try:
            self._path.write_text(f"{time.strftime('%F %T')}\n{text}\n")
        except OSError as error:  # the message has it too
            logger.error("%s cannot be written: %s", self._path, error)
        return self._error

    def _controller_lines(self) -> list[str]:
        main = ("main", describe(frames_of(self._main), CONTROLLER_FRAMES))
        return stack_lines([main, *((name, s) for name, s in other_threads(self._main) if name != "watchdog")])

    def _engine_lines(self) -> list[str]:
        calls = self._calls()[-ENGINE_CALLS:]
        return ["The last calls to engines:", *(f"  {call}" for call in calls)] if calls else []


def _end_process(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\nThe controller did not end within {END_S:g} s of this report; it is ended.\n")
        sys.stderr.flush()
    os._exit(1)
