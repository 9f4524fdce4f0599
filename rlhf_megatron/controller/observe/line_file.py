"""The files of JSON lines of a run: written so that all lines but the last are always whole, and
over restarts.

Rows that a resumed run will write again are moved to superseded/, so that each step has one row.
attempts.jsonl says when the processes of a run began and ended, and from which step each went on.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.metrics.former_metric_names import rename_former_metrics
from rlhf_megatron.data import direct_file_io
from rlhf_megatron.stop import RunStopped
from rlhf_megatron.write_errors import FULL_DISK_ERRNOS, explain_write_error

logger = logging.getLogger(__name__)
MAX_WAITING_BYTES = 64 << 20  # of lines that wait in memory for room in one file
MAX_DISK_WAIT_S = 600.0
DISK_POLL_S = 2.0

SUPERSEDED_DIR = "superseded"
STEP_ROW_FILES = ("metrics.jsonl", "samples.jsonl", "held_out_samples.jsonl", "mismatch.jsonl")
FINAL_OUTPUTS = ("summary.json", "hf", "hf_critic")  # of a run that had all of its steps, or nearly

# No figure of a run is larger, also no square of one that a report sums up; what is, is damage.
MAX_NUMBER = 1e150
MAX_INTEGER_DIGITS = 1000  # of an integer that is read as one
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

ATTEMPTS_FILE = "attempts.jsonl"
COMPLETE = "complete"
STOPPED = "stopped"
FAILED = "failed"


def write_file_atomically(path: Path, data: bytes) -> None:
    """Write the file, which appears by rename when it is complete and on disk. Raise OSError (see
    `explain_write_error`).
    """
    direct_file_io.write_large_file_atomically(path, [data])


def retry_while_disk_is_full(write: Callable[[], None], check_stop: Callable[[], None]) -> None:
    """Call `write` until it finds the disk not full. The run waits meanwhile, for MAX_DISK_WAIT_S
    at most; then raise the OSError. Raise any other OSError at once. `check_stop` is called between
    attempts and may raise.
    """
    end = None
    while True:
        try:
            return write()
        except OSError as error:
            if error.errno not in FULL_DISK_ERRNOS or (end is not None and time.monotonic() > end):
                raise
            if end is None:
                end = time.monotonic() + MAX_DISK_WAIT_S
                logger.warning(
                    "%s The run waits for room, %.0f minutes at most.",
                    error.strerror,
                    MAX_DISK_WAIT_S / 60,
                )
        check_stop()
        time.sleep(DISK_POLL_S)


class LineFile:
    """Appends whole lines. A line that a former process left unfinished is cut off first.

    Writing raises nothing: lines for which the disk has no room wait in memory, and go first when
    there is room.
    """

    def __init__(self, path: Path) -> None:
        """Open the file to append to it, after cutting off an unfinished last line."""
        if path.exists():
            truncate_file(path, path.read_bytes().rfind(b"\n") + 1)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._pending_lines: deque[bytes] = deque()
        self._num_pending_bytes = 0
        self._num_lost_lines = 0
        self._has_warned = False

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Append the row as a line of JSON. The line is with the operating system when this
        returns, or waits in memory for room.
        """
        self.append_line(json.dumps(row).encode() + b"\n")

    def append_line(self, line: bytes) -> None:
        """Append a whole line, which ends with a newline. Where the disk fails, warn and keep it in
        memory; lose it where too many bytes wait.
        """
        if self._num_pending_bytes + len(line) > MAX_WAITING_BYTES:
            self._num_lost_lines += 1
            return
        self._pending_lines.append(line)
        self._num_pending_bytes += len(line)
        try:
            self.flush()
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s Its lines wait in memory; the run goes on.", error.strerror)
            self._has_warned = True

    def flush(self) -> None:
        """Write the lines that wait. Raise OSError (see `explain_write_error`); the file then ends
        with a whole line.
        """
        while self._pending_lines:
            line = self._pending_lines[0]
            end = os.fstat(self._file.fileno()).st_size
            try:
                written = 0
                while written < len(line):  # a disk that becomes full takes a part
                    written += self._file.write(line[written:])
            except OSError as error:
                self._file.truncate(end)
                raise explain_write_error(self._path, error) from error
            self._pending_lines.popleft()
            self._num_pending_bytes -= len(line)
        self._has_warned = False

    def close(self) -> None:
        """Write the lines that wait, warn of lines that are lost, and close the file. Raises
        nothing.
        """
        try:
            self.flush()
        except OSError as error:
            self._num_lost_lines += len(self._pending_lines)
            logger.warning("%s", error.strerror)
        if self._num_lost_lines:
            logger.warning(
                "%s lacks %d lines for which the disk had no room.",
                self._path,
                self._num_lost_lines,
            )
        self._file.close()


def truncate_file(path: Path, num_bytes: int) -> None:
    """Cut the file after its first `num_bytes`."""
    with path.open("r+b") as file:
        file.truncate(num_bytes)


def replace_non_finite(value: Any) -> Any:
    """Return `value` with None for each number that JSON does not have (NaN, infinities), also
    within lists and mappings.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    return (
        [replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value
    )


def parse_json_text(text: str | bytes) -> Any:
    """Return the value of a text of JSON, with the replacement character in place of each half of a
    surrogate pair, which no file and no terminal can hold. Raise ValueError where the text is not
    JSON, or is nested too deep.
    """
    try:
        try:
            value = json.loads(text)
        except ValueError:
            # Python refuses integers of thousands of digits; as floats they are infinite.
            value = json.loads(text, parse_int=_parse_any_integer)
        is_escaped = _ESCAPED_SURROGATE.search(
            text if isinstance(text, str) else text.decode(errors="replace")
        )
        return _replace_surrogates(value) if is_escaped else value
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _parse_any_integer(digits: str) -> int | float:
    """Return the number of a JSON integer; a float where it has more than a thousand digits."""
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else float(digits)


def _replace_surrogates(value: Any) -> Any:
    """Return the value with the replacement character for each half of a surrogate pair in its
    texts and keys.
    """
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return [_replace_surrogates(item) for item in value] if isinstance(value, list) else value


def is_usable_number(value: Any) -> bool:
    """Return whether a value is a number that a figure of a run can be: finite, and not larger than
    MAX_NUMBER. JSON has numbers of any size, and Python reads NaN and Infinity.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -MAX_NUMBER <= value <= MAX_NUMBER


def drop_unusable_numbers(value: Any, path: str, unusable_places: list[str]) -> Any:
    """Return a value with None in place of each number that no figure can be, and append the keys
    of those numbers to `unusable_places`.
    """
    if isinstance(value, dict):
        return {
            key: drop_unusable_numbers(item, f"{path}.{key}" if path else key, unusable_places)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [drop_unusable_numbers(item, path, unusable_places) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and not is_usable_number(value):
        unusable_places.append(path)
        return None
    return value


def move_superseded_rows(run_dir: Path, last_step: int, attempt_number: int) -> int:
    """Move rows of steps after `last_step` to superseded/attempt_<n>/, and return how many of them
    metrics.jsonl had.

    A last line that was cut off and the FINAL_OUTPUTS of the run are moved too. Rows of a warm-up
    stay: their steps are not steps of the run.
    """
    to = run_dir / SUPERSEDED_DIR / f"attempt_{attempt_number:03d}"
    for name in FINAL_OUTPUTS:
        if (run_dir / name).exists():
            to.mkdir(parents=True, exist_ok=True)
            os.rename(run_dir / name, to / name)
    counts = [
        _move_rows_after_step(run_dir / name, to / name, last_step) for name in STEP_ROW_FILES
    ]
    return counts[0]


def read_step_rows(run_dir: Path, file_name: str = STEP_ROW_FILES[0]) -> list[dict[str, Any]]:
    """Return the whole rows of a file of JSON lines, with None for numbers that no figure can be;
    [] where the file does not exist. Rows of metrics.jsonl have a kind, and their metrics the names
    of today.
    """
    path = run_dir / file_name
    if not path.exists():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _parse_step_row(line))]
    rows = [drop_unusable_numbers(row, "", []) for row in rows]
    if file_name != STEP_ROW_FILES[0]:
        return rows
    return [rename_former_metrics(row) for row in rows if isinstance(row.get("kind"), str)]


def sum_evaluation_seconds(rows: Sequence[Mapping[str, Any]], step: int) -> float:
    """Return the seconds of the evaluation after `step`, whose row is kept: the state of that step
    was saved before the evaluation.
    """
    return sum(
        row.get("timing_s/evaluate") or 0.0
        for row in rows
        if (row["kind"], row["step"]) == ("evaluation", step)
    )


def _move_rows_after_step(path: Path, target_path: Path, step: int) -> int:
    """Move the rows of later steps, and lines that are no rows, to another file; return their
    number.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    moved: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        row = _parse_step_row(line) if line.endswith(b"\n") else {}
        is_kept = row and (row.get("kind") == "warmup" or row["step"] <= step)
        (kept if is_kept else moved).append(line)
    if moved:
        target_path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(target_path, b"".join(moved))
        write_file_atomically(path, b"".join(kept))
    return len(moved)


def _parse_step_row(line: bytes) -> dict[str, Any]:
    """Return the row of a line; {} for a line that is no row of a step."""
    try:
        row = parse_json_text(line)
    except ValueError:
        return {}
    has_step = isinstance(row, dict) and isinstance(row.get("step"), int)
    return row if has_step and is_usable_number(row["step"]) else {}


@dataclass
class RunClock:
    """How much of the time since a run was launched first went into what stands, over restarts.

    `productive_s`: time in steps, evaluations and warm-up whose results count. What a kill undid
    does not, nor do starting, loading and waiting for a checkpoint. The wall clock is read once;
    from then on the monotonic one counts.
    """

    first_start_time: float  # unix seconds
    productive_s: float = 0.0

    def __post_init__(self) -> None:
        """Start the clock; warn where the wall clock is before the first start."""
        before_s = time.time() - self.first_start_time
        if before_s < 0:
            logger.warning(
                "The clock is %.0f s before the first launch: ETTR counts from now.", -before_s
            )
        self._start_monotonic_s = time.monotonic() - max(0.0, before_s)

    def compute_ettr(self) -> float:
        """Return the effective training time ratio: productive time / wall time since the first
        launch; 1 at most.
        """
        return self.productive_s / max(
            1e-9, self.productive_s, time.monotonic() - self._start_monotonic_s
        )

    def add_productive_time(self, seconds: float) -> None:
        """Add seconds to the productive time."""
        self.productive_s += seconds


class RunAttempts:
    """The attempts of a run directory. One that was killed has a start and no end."""

    def __init__(self, run_dir: Path) -> None:
        """Read the starts of former attempts from attempts.jsonl of the run directory."""
        self._path = run_dir / ATTEMPTS_FILE
        self._start_lines = [
            line for line in read_attempt_lines(run_dir) if line.get("kind") == "start"
        ]

    @property
    def num_attempts(self) -> int:
        """Return the number of attempts that were started, the current one included once it is
        recorded.
        """
        return len(self._start_lines)

    @property
    def first_start_time(self) -> float:
        """Return the unix seconds at which the run was first launched; now where it never was."""
        return float(self._start_lines[0]["time"]) if self._start_lines else time.time()

    @property
    def resumed_from_step(self) -> int | None:
        """Return the step that the current attempt resumed from, or None where it started anew."""
        return self._start_lines[-1].get("resumed_from_step") if self._start_lines else None

    @contextmanager
    def record_attempt(
        self, start_time: float, resumed_from_step: int | None, **start_fields: Any
    ) -> Iterator[None]:
        """Write a line for the start of an attempt, run the block, and write a line for its end,
        with the reason. `start_fields` go into the line of the start; None is left out.
        """
        began = time.monotonic() - max(0.0, time.time() - start_time)
        start = {"kind": "start", "time": start_time, "resumed_from_step": resumed_from_step}
        start |= {name: value for name, value in start_fields.items() if value is not None}
        self._write_line(start)
        self._start_lines.append(start)
        try:
            yield
        except BaseException as error:
            kind = STOPPED if isinstance(error, RunStopped | KeyboardInterrupt) else FAILED
            self._write_end(began, f"{kind}: {error or type(error).__name__}")
            raise
        self._write_end(began, COMPLETE)

    def _write_end(self, start_monotonic_s: float, reason: str) -> None:
        """Write the line of the end, with the seconds that the attempt took; ignore a disk that
        fails.
        """
        seconds = round(time.monotonic() - start_monotonic_s, 1)
        with suppress(OSError):  # what the run ends by is what is told
            self._write_line(
                {"kind": "end", "time": time.time(), "seconds": seconds, "reason": reason[:1000]}
            )

    def _write_line(self, line: Mapping[str, Any]) -> None:
        """Append a line to attempts.jsonl."""
        file = LineFile(self._path)
        file.write_row(line)
        file.close()


def read_attempt_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return all lines of attempts.jsonl that can be read; a last line that was cut off is left
    out.
    """
    path = run_dir / ATTEMPTS_FILE
    lines: list[dict[str, Any]] = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            line = parse_json_text(text)
        except ValueError:
            continue
        has_seconds = isinstance(line, dict) and is_usable_number(line.get("seconds", 0.0))
        if has_seconds and is_usable_number(line.get("time")):
            lines.append(line)
    return lines
