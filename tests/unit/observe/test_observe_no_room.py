"""A logger that fails and a disk that is full: the run goes on, files have whole rows, lines
wait for room.
"""

import errno
import json
import logging
import resource
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
from full_disk import files_end_at
from scheduler_samples import train_batch

from rlhf_megatron.controller.observe import line_file, loggers
from rlhf_megatron.controller.observe.line_file import (
    LineFile,
    RunAttempts,
    retry_while_disk_is_full,
    write_file_atomically,
)
from rlhf_megatron.controller.observe.loggers import LOGGERS, RunLogger
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.recovery.run_journal import StepJournal

SAID = {"actor/num_epochs": 1.0, "rollout/num_samples": 10.0}


def track(tracker: RunTracker, *steps: int) -> None:
    for step in steps:
        with tracker.track_step(step), tracker.time_stage("update"):
            tracker.set_step_batch(train_batch(), SAID)


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


class Planted(RunLogger):
    """Raises in the method that `broken` names."""

    broken = ""
    error: Exception = UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")
    calls: ClassVar[list[str]] = []

    def __init__(self, *arguments: Any) -> None:
        self._tell("init")

    def _tell(self, name: str) -> None:
        self.calls.append(name)
        if name == self.broken:
            raise self.error

    def log_metrics(self, *arguments: Any) -> None:
        self._tell("row")

    def log_batch(self, *arguments: Any) -> None:
        self._tell("batch")

    def show_stage(self, text: str) -> None:
        self._tell("stage")

    def show_note(self, text: str) -> None:
        self._tell("note")

    def close(self, is_failed: bool) -> None:
        self._tell("close")


@pytest.mark.parametrize("broken", ["init", "row", "batch", "stage", "note", "close"])
def test_a_logger_that_fails_is_switched_off_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    monkeypatch.setattr(LOGGERS, "_entries", dict(LOGGERS._entries))
    monkeypatch.setattr(Planted, "broken", broken)
    monkeypatch.setattr(Planted, "calls", [])
    LOGGERS.register("planted")(Planted)
    with caplog.at_level(logging.WARNING), RunTracker(tmp_path, ("planted", "jsonl"), 3) as tracker:
        tracker.show_note("hello")
        track(tracker, 1, 2)
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        "logger planted is switched off: UnicodeEncodeError: 'utf-8' codec can't encode"
    )
    assert said.endswith(" The run goes on with jsonl.") and Planted.calls.count(broken) == 1 + (
        broken == "close"
    )


def test_rows_wait_for_room_and_no_file_has_a_cut_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), RunTracker(tmp_path, ("jsonl",), 9) as tracker:
        track(tracker, 1)
        sizes = [(tmp_path / f"{name}.jsonl").stat().st_size for name in ("metrics", "samples")]
        later = range(2, 4 + 3 * sizes[0] // sizes[1])  # more samples than fit
        with files_end_at(sizes[0] * 5 // 2):  # half of the third row would fit
            track(tracker, *later)
            assert steps_of(tmp_path / "metrics.jsonl") == [1, 2]
            assert {1} <= set(steps_of(tmp_path / "samples.jsonl")) < {1, *later}
            with pytest.raises(
                OSError, match=r"metrics.jsonl cannot be written: File too large\. .* Make room"
            ):
                tracker.logger_set.flush()
        track(tracker, later.stop)
    for name in ("metrics", "samples"):
        assert sorted(set(steps_of(tmp_path / f"{name}.jsonl"))) == [1, *later, later.stop]
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())}
    assert {f"step {step}" for step in range(1, later.stop + 1)} <= names
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and all(
        text.endswith("Its lines wait in memory; the run goes on.") for text in said
    )
    assert all(f"`du -sh {tmp_path}/*` shows what is large" in text for text in said)


def test_lines_beyond_the_bound_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(line_file, "MAX_WAITING_BYTES", 30)
    with files_end_at(9):
        file = LineFile(tmp_path / "x.jsonl")
        for number in range(5):
            file.write_row({"a": number})  # 9 bytes each: one is written, three wait
    file.close()
    assert [json.loads(line)["a"] for line in (tmp_path / "x.jsonl").read_text().splitlines()] == [
        0,
        1,
        2,
        3,
    ]
    assert caplog.records[-1].message.endswith(
        "x.jsonl lacks 1 lines for which the disk had no room."
    )


def test_tensorboard_goes_on_when_there_is_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # file names of one second end in this count, and "10" would be read before "9"
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with (
        caplog.at_level(logging.WARNING),
        RunTracker(tmp_path, ("tensorboard", "jsonl"), 9) as tracker,
    ):
        track(tracker, 1)
        tracker.logger_set._active_loggers["tensorboard"]._writer.flush()  # type: ignore[attr-defined]
        (events,) = (tmp_path / "tensorboard" / "run").iterdir()
        with monkeypatch.context() as patch, files_end_at(events.stat().st_size):
            patch.setattr(loggers, "MIN_FREE_BYTES", 1 << 62)
            for thread in threading.enumerate():  # its next flush is now
                if type(thread).__name__ == "_AsyncWriterThread":
                    thread._next_flush_time = 0  # type: ignore[attr-defined]
            track(tracker, 2)
            # of a logger that is off by now, or that finds the disk full here
            with suppress(KeyError, OSError):
                tracker.logger_set._active_loggers["tensorboard"]._writer.flush()  # type: ignore[attr-defined]
            track(tracker, 3)
            assert "tensorboard" not in tracker.logger_set._active_loggers
            metrics = (tmp_path / "metrics.jsonl").stat().st_size
            assert metrics <= events.stat().st_size
        track(tracker, 4, 5)
    said = [record.message for record in caplog.records if "tensorboard" in record.message]
    assert (
        "logger tensorboard is switched off: " in said[0]
        and "It is tried again at each step" in said[0]
    )
    assert said[1] == "logger tensorboard: there is room again, and it goes on." and len(said) == 2
    assert "Traceback" not in capsys.readouterr().err
    board = EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    board.Reload()
    found = [event.step for event in board.Scalars("critic/rewards/mean")]
    assert found[0] == 1 and found[-2:] == [4, 5]
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]


def test_the_end_of_a_run_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_file, "DISK_POLL_S", 0.0)
    polls: list[int] = []
    path = tmp_path / "summary.json"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def make_room() -> None:
        polls.append(1)
        if len(polls) == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with files_end_at(100):
        retry_while_disk_is_full(lambda: write_file_atomically(path, b"x" * 200), make_room)
    assert len(polls) == 3 and path.stat().st_size == 200
    monkeypatch.setattr(line_file, "MAX_DISK_WAIT_S", -1.0)
    with (
        files_end_at(100),
        pytest.raises(OSError, match=r"other.json cannot be written.* Make room"),
    ):
        retry_while_disk_is_full(
            lambda: write_file_atomically(tmp_path / "other.json", b"x" * 200), lambda: None
        )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["summary.json"], (
        "nothing is left of the other"
    )


def test_journal_and_recorder_tell_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = StepJournal(tmp_path / "journal", "settings")
    recorder = RolloutRecorder(tmp_path / "record")
    with files_end_at(50):
        for step in (1, 2):
            journal.begin_batch_write(step, train_batch(), {}, 0.0)
            journal.wait_for_write()
            recorder.write_step(step, train_batch())
    said = [record.message for record in caplog.records]
    assert len(said) == 2 and all(
        "cannot be written: File too large." in text and "Make room" in text for text in said
    )
    assert "step 1 is not recorded, and cannot be replayed" in said[1]
    recorder.write_step(3, train_batch())
    assert [path.name for path in (tmp_path / "record").iterdir()] == ["step_000003.batch"]


def test_an_attempt_ends_although_its_line_cannot_be_written(tmp_path: Path) -> None:
    with files_end_at(0), RunAttempts(tmp_path).record_attempt(0.0, None):
        pass
    assert (tmp_path / "attempts.jsonl").read_bytes() == b""


OF_A_RANK = """
import logging, resource, sys
from pathlib import Path
from rlhf_megatron.runtime.process_control import redirect_output
redirect_output(Path(sys.argv[1]))
logging.basicConfig(level=logging.INFO)
print("printed")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
for _ in range(100):
    print("x" * 1000)
    logging.info("x" * 1000)
"""


def test_a_rank_whose_log_is_full_goes_on(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_A_RANK, str(tmp_path / "rank0.log")], capture_output=True
    )
    assert done.returncode == 0, done
    assert (tmp_path / "rank0.log").read_text() == "printed\nxx"


def test_free_room_is_told(tmp_path: Path) -> None:
    text = line_file.explain_write_error(
        tmp_path / "not" / "there", OSError(errno.ENOSPC, "No space left on device")
    ).strerror
    assert f"{shutil.disk_usage(tmp_path).free / 1e6:.0f}"[:3] in text
