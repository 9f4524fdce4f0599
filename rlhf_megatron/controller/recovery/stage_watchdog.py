"""The hang doctor: a stage of a step that is not finished in time ends the run, with one report of
who was doing what.

The report has all hosts by rank, the threads of the controller, and the last calls to engines. It
is the error's message and stands in HANG_REPORT of the run directory. Calls outside of stages have
a deadline too (`runtime.remote_worker_group`); theirs is the same report.
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

from rlhf_megatron.runtime.hang_report import (
    format_frames,
    format_thread_stacks,
    list_other_thread_stacks,
    list_thread_frames,
)
from rlhf_megatron.runtime.host_errors import HostTimeoutError
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.write_errors import write_text_file

logger = logging.getLogger(__name__)

HANG_REPORT = "hang_report.txt"
CONTROLLER_FRAMES = 16
ENGINE_CALLS = 30
FIRST_S = 1.0  # for the main thread to learn it from a call to the hosts
END_S = 45.0  # for the run to end after the report; then the process is ended
_INTERRUPT = signal.SIGUSR2


class StageWatchdog:
    """Callable: `with watchdog("generate"): ...` on the main thread raises HostTimeoutError when
    that takes too long.

    A context manager around the whole run. `stage_timeouts_s`: stages with a deadline of their own.
    A main thread that does not come back to Python is not waited for: END_S after the report the
    process ends with code 1.
    """

    def __init__(
        self, stage_timeout_s: float, stage_timeouts_s: Mapping[str, float], run_dir: Path
    ) -> None:
        """Make the watchdog of the calling thread, which must be the main thread.
        `stage_timeouts_s` are the stages with a deadline of their own; all others have
        `stage_timeout_s`, in seconds.
        """
        self._default_timeout_s = stage_timeout_s
        self._timeout_s_by_stage = dict(stage_timeouts_s)
        self._report_path = run_dir / HANG_REPORT
        self._worker_group: WorkerGroup | None = None
        self._list_recent_calls: Callable[[], Sequence[object]] = list
        self._lock = threading.Lock()
        self._report_error: HostTimeoutError | None = None  # of the report, once there is one
        self._is_stage_over = threading.Event()  # of the stage that runs
        self._main_thread_id = threading.get_ident()
        self._kill_timer: threading.Timer | None = None

    def set_report_sources(
        self, group: WorkerGroup, list_recent_calls: Callable[[], Sequence[object]]
    ) -> None:
        """Set what a report describes: the hosts of `group`, and the calls to engines that
        `list_recent_calls` returns, as printed. Also make late calls to the hosts use this report.
        """
        self._worker_group = group
        self._list_recent_calls = list_recent_calls
        group.set_hang_describer(self._report_late_call)

    def __enter__(self) -> StageWatchdog:
        """Install the signal handler that interrupts the main thread."""
        self._previous_handler = signal.signal(_INTERRUPT, self._raise_report_error)
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the signal handler, and cancel the timer that would end the process."""
        with self._lock:  # a report that is being made is finished
            signal.signal(_INTERRUPT, self._previous_handler)
            if self._kill_timer is not None:
                self._kill_timer.cancel()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Run the block with the deadline of this stage. When the block takes too long, write a
        report and raise HostTimeoutError in it.
        """
        is_over = self._is_stage_over = threading.Event()
        timer = threading.Timer(
            self._get_timeout_s(stage), self._handle_late_stage, (stage, is_over)
        )
        timer.daemon = True
        timer.name = "watchdog"
        timer.start()
        try:
            yield
        finally:
            is_over.set()
            timer.cancel()

    def _get_timeout_s(self, stage: str) -> float:
        """Return the seconds that a stage may take."""
        return self._timeout_s_by_stage.get(stage, self._default_timeout_s)

    def _handle_late_stage(self, stage: str, is_stage_over: threading.Event) -> None:
        """Make the report of a late stage, abort the calls to the hosts, and interrupt the main
        thread if the stage does not end then. Runs on the timer's thread.
        """
        key = (
            f"trainer.stage_timeouts_s.{stage}"
            if stage in self._timeout_s_by_stage
            else "trainer.stage_timeout_s"
        )
        header = (
            f"The stage {stage} was not finished within {self._get_timeout_s(stage):g} s ({key})."
        )
        error = self._report_late_stage(header, is_stage_over)
        if error is None:
            return
        if self._worker_group is not None:
            self._worker_group.abort_with_error(error)
        if not is_stage_over.wait(FIRST_S):
            with self._lock:
                if not is_stage_over.is_set():
                    signal.pthread_kill(self._main_thread_id, _INTERRUPT)

    def _raise_report_error(self, signal_number: int, frame: FrameType | None) -> None:
        """Raise the error of the report on the main thread, where the stage still runs. Called by
        the signal.
        """
        if self._report_error is not None and not self._is_stage_over.is_set():
            raise self._report_error

    def _report_late_call(self, header: str, host_lines: Sequence[str]) -> HostTimeoutError:
        """Return the error of a late call to the hosts: that of a report already made, or of a new
        report.
        """
        with self._lock:
            return self._report_error or self._write_report(header, host_lines)

    def _report_late_stage(
        self, header: str, is_stage_over: threading.Event
    ) -> HostTimeoutError | None:
        """Return the error of a late stage; None where the stage ended meanwhile."""
        with self._lock:
            if self._report_error is not None or is_stage_over.is_set():
                return self._report_error
            return self._write_report(
                header,
                self._worker_group.describe_hosts() if self._worker_group is not None else [],
            )

    def _write_report(self, header: str, host_lines: Sequence[str]) -> HostTimeoutError:
        """Write the report, start the timer that ends the process after END_S, and return the error
        with the report as its message. The caller holds the lock.
        """
        lines = [header]
        lines += ["The hosts:", *host_lines] if host_lines else []
        lines += [
            "The controller:",
            *self._format_controller_stacks(),
            *self._format_recent_calls(),
        ]
        text = "\n".join(lines)
        self._report_error = HostTimeoutError(text)
        self._kill_timer = threading.Timer(END_S, _kill_process_with_report, (text,))
        self._kill_timer.daemon = True
        self._kill_timer.start()
        try:
            write_text_file(self._report_path, f"{time.strftime('%F %T')}\n{text}\n")
        except OSError as error:  # the message has it too
            logger.error("%s cannot be written: %s", self._report_path, error)
        return self._report_error

    def _format_controller_stacks(self) -> list[str]:
        """Return the stacks of all threads of the controller, the main thread first."""
        main = ("main", format_frames(list_thread_frames(self._main_thread_id), CONTROLLER_FRAMES))
        return format_thread_stacks(
            [
                main,
                *(
                    (name, s)
                    for name, s in list_other_thread_stacks(self._main_thread_id)
                    if name != "watchdog"
                ),
            ]
        )

    def _format_recent_calls(self) -> list[str]:
        """Return the last calls to engines with a heading; [] where there are none."""
        calls = self._list_recent_calls()[-ENGINE_CALLS:]
        return ["The last calls to engines:", *(f"  {call}" for call in calls)] if calls else []


def _kill_process_with_report(report_text: str) -> None:
    """Print the report to stderr and end the process at once, with exit code 1."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(
            f"{report_text}\nThe controller did not end within {END_S:g} s of this report; it"
            " is ended.\n"
        )
        sys.stderr.flush()
    os._exit(1)
