"""What a resumed run does with the files of the processes before it, and what it counts."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from data_samples import scored
from scheduler_samples import to_train

from rlhf_megatron.config.schema import TrainerConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult
from rlhf_megatron.controller.observe.line_file import (
    RunAttempts,
    RunClock,
    move_superseded_rows,
    read_attempt_lines,
    read_step_rows,
    sum_evaluation_seconds,
)
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.checkpoint_export import find_best_step
from rlhf_megatron.controller.recovery.resume_point import RunState
from rlhf_megatron.controller.recovery.save_policy import SavePolicy
from rlhf_megatron.stop import RunStopped, StopRequest

RESULT = EvaluationResult(0.25, 0.2, 0.3, 40, 3.5, ())


def write(path: Path, rows: list[dict[str, Any]], tail: str = "") -> bytes:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path.read_bytes()


def test_rows_after_the_checkpoint_move_and_the_others_keep_every_byte(tmp_path: Path) -> None:
    rows = [
        {"kind": "warmup", "step": 30, "seconds": 1.0},
        {"kind": "evaluation", "step": 0, "seconds": 2.0, "timing_s/evaluate": 0.75},
        {"kind": "step", "step": 1, "seconds": 3.0, "actor/grad_norm": float("nan")},
        {"kind": "step", "step": 2, "seconds": 4.0},
        {"kind": "evaluation", "step": 2, "seconds": 5.0, "timing_s/evaluate": 0.5},
        {"kind": "step", "step": 3, "seconds": 6.0},
    ]
    whole = write(tmp_path / "metrics.jsonl", rows, tail='{"kind": "step", "st')
    samples = write(tmp_path / "samples.jsonl", [{"step": 1}, {"step": 2}])
    assert move_superseded_rows(tmp_path, 2, attempt_number=1) == 2  # step 3, and what was cut off
    lines = whole.splitlines(keepends=True)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines[:5])
    assert (tmp_path / "superseded/attempt_001/metrics.jsonl").read_bytes() == b"".join(lines[5:])
    assert (tmp_path / "samples.jsonl").read_bytes() == samples
    assert not (tmp_path / "superseded/attempt_001/samples.jsonl").exists()
    kept = read_step_rows(tmp_path)
    assert [row["step"] for row in kept] == [30, 0, 1, 2, 2]
    assert (
        sum_evaluation_seconds(kept, 2),
        sum_evaluation_seconds(kept, 0),
        sum_evaluation_seconds(kept, 1),
    ) == (0.5, 0.75, 0)
    assert (
        move_superseded_rows(tmp_path, 2, attempt_number=2) == 0
        and not (tmp_path / "superseded/attempt_002").exists()
    )
    assert move_superseded_rows(tmp_path, 0, attempt_number=2) == 3
    assert [row["step"] for row in read_step_rows(tmp_path)] == [30, 0]


def step(tracker: RunTracker, number: int, seconds: float = 0.0) -> None:
    with tracker.track_step(number):
        time.sleep(seconds)
        said = {"policy/version": 1.0, "rollout/num_samples": 3.0, "actor/num_epochs": 1.0}
        tracker.set_step_batch(
            to_train(scored()), {**said, "training/rollout_log_probs_diff_max": number * 1e-6}
        )


def test_a_tracker_goes_on_where_the_rows_end(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("jsonl",), total_steps=3) as tracker:
        tracker.log_evaluation(0, RESULT)
        step(tracker, 1)
        step(tracker, 2)
    rows = read_step_rows(tmp_path)
    for row in rows:
        row["seconds"] += 100.0
    with RunTracker(
        tmp_path, ("jsonl",), total_steps=3, facts=RunFacts(resumed_from_step=2)
    ) as again:
        again.restore_from_rows(rows)
        step(again, 3)
    assert again.curve_points == [
        *tracker.curve_points,
        (3, 0.75),
    ] and again.evaluation_results == [(0, RESULT)]
    assert again.first_mismatch == 1e-6
    last = read_step_rows(tmp_path)[-1]
    assert last["step"] == 3 and last["seconds"] > 100.0


def test_ettr_counts_what_stands_over_the_time_since_the_first_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched 10 s ago; 4 s of the attempts before count, and 2 x 0.1 s of this one. A step that
    fails does not.
    """
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    clock = RunClock(time.time() - 10.0, productive_s=4.0)
    with RunTracker(tmp_path, ("jsonl",), total_steps=3, clock=clock) as tracker:
        step(tracker, 1, seconds=0.1)
        with pytest.raises(KeyError), tracker.track_step(2):
            time.sleep(0.1)
            raise KeyError("2")
        with tracker.count_as_productive():
            time.sleep(0.1)
    assert clock.productive_s == pytest.approx(4.2)
    (row,) = read_step_rows(tmp_path)
    assert row["perf/ettr"] == pytest.approx(4.1 / 10.1, rel=1e-3)
    clock.add_productive_time(1.0)
    assert clock.compute_ettr() == pytest.approx(5.2 / 10.3, rel=1e-3)


def test_a_clock_that_is_set_back_changes_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = time.time()
    with (
        RunAttempts(tmp_path).record_attempt(now - 5.0, None),
        RunTracker(tmp_path, ("jsonl",), 3, clock=RunClock(now)) as tracker,
    ):
        monkeypatch.setattr(time, "time", lambda: now - 1e6)
        step(tracker, 1, seconds=0.1)
    (row,) = read_step_rows(tmp_path)
    _, end = read_attempt_lines(tmp_path)
    assert 0.0 < row["perf/ettr"] <= 1.0 and 5.0 <= end["seconds"] < 60.0
    assert not caplog.records
    # A later process begins before the first launch: said, and nothing is divided by
    # what cannot be.
    clock = RunClock(now, productive_s=3.0)
    assert clock.compute_ettr() == 1.0 and "1000000 s before the first launch" in caplog.text
    with RunTracker(tmp_path, ("jsonl",), 3) as tracker:
        step(tracker, 2)
    events = json.loads((tmp_path / "trace.json").read_text())
    starts = [event["ts"] for event in events if event["name"] in ("step 1", "step 2")]
    assert len(starts) == 2 and starts == sorted(starts)


def test_tensorboard_drops_what_is_written_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed, steps in ((None, (1, 2, 3)), (1, (2,))):
        facts = RunFacts(resumed_from_step=resumed)
        with RunTracker(tmp_path, ("tensorboard",), total_steps=3, facts=facts) as tracker:
            for number in steps:
                step(tracker, number)
        time.sleep(1.1)  # event files are told apart by the second in which they began
    events = EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    events.Reload()
    assert [event.step for event in events.Scalars("critic/rewards/mean")] == [1, 2]


def test_wandb_is_given_the_same_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    run = SimpleNamespace(
        finish=lambda exit_code: None, define_metric=lambda *a, **k: None, log=lambda values: None
    )
    service = SimpleNamespace(
        Settings=lambda **arguments: SimpleNamespace(**arguments),
        init=lambda **arguments: calls.append(arguments) or run,
    )
    monkeypatch.setitem(sys.modules, "wandb", service)  # type: ignore[arg-type]
    for resumed in (None, 2):
        with RunTracker(
            tmp_path, ("wandb",), total_steps=3, facts=RunFacts(resumed_from_step=resumed)
        ):
            pass
    assert (
        len(calls) == 2
        and calls[0]["id"] == calls[1]["id"] == (tmp_path / "wandb_run_id").read_text().strip()
    )
    assert calls[0]["resume"] == "allow" and len(calls[0]["id"]) == 8


class Checkpoints:
    """Commits at `wait_for_save` what was begun, unless it is `broken`."""

    def __init__(self, broken: bool = False) -> None:
        self.commit_callback: Any = None
        self.last_save_seconds: float | None = None
        self.begun: list[RunState] = []
        self.weights: list[int] = []  # one for each time that they were written
        self.broken = broken

    def begin_save(self, state: RunState) -> None:
        self.begun.append(state)

    def commit_if_written(self) -> dict[str, float]:
        return {"checkpoint/num_failed": 0.0}

    def wait_for_save(self) -> None:
        if self.begun and not self.broken:
            self.commit_callback(self.begun[-1].step)


def keeper_of(
    checkpoints: Checkpoints, save_freq: int, num_warmup_steps: int = 0, **settings: Any
) -> SavePolicy:
    def capture(step: int) -> RunState:
        return RunState(step, step + 1, None, num_warmup_steps=num_warmup_steps)

    config = TrainerConfig(save_freq=save_freq, total_training_steps=5, **settings)
    return SavePolicy(capture, checkpoints, None, config, lambda: checkpoints.weights.append(1))


def test_states_are_saved_every_so_often_and_after_the_last_step() -> None:
    checkpoints = Checkpoints()
    keeper = keeper_of(checkpoints, save_freq=2, num_warmup_steps=3)
    keeper.record_initial_state(0, is_saved=False)
    for number in range(1, 6):
        keeper.save_if_due(number)
    assert [state.step for state in checkpoints.begun] == [0, 2, 4, 5]
    assert keeper.take_metrics() == {"checkpoint/num_failed": 0.0}


def test_nothing_is_saved_that_a_checkpoint_has_or_that_is_worth_nothing() -> None:
    for num_warmup_steps, is_saved in ((0, False), (3, True)):
        checkpoints = Checkpoints()
        keeper_of(checkpoints, 2, num_warmup_steps).record_initial_state(0, is_saved)
        assert checkpoints.begun == []


@pytest.mark.parametrize(
    ("save_freq", "save_last", "expected"),
    [
        (0, "state", [5]),
        (0, "weights", []),
        (0, "none", []),
        (2, "none", [2, 4]),
        (2, "weights", [2, 4]),
    ],
)
def test_what_is_saved_at_the_end(save_freq: int, save_last: str, expected: list[int]) -> None:
    checkpoints = Checkpoints()
    keeper = keeper_of(checkpoints, save_freq, save_last=save_last)
    keeper.record_initial_state(0, is_saved=False)
    for number in range(1, 6):
        keeper.save_if_due(number)
    assert [state.step for state in checkpoints.begun] == expected


def test_a_stop_without_time_for_a_save_says_which_step_the_run_goes_on_from() -> None:
    checkpoints = Checkpoints()
    stop = StopRequest()
    keeper = keeper_of(checkpoints, 2, stop_grace_s=60.0)
    keeper.record_initial_state(0, is_saved=False)
    for number in range(1, 4):
        keeper.save_if_due(number)
    checkpoints.wait_for_save()
    checkpoints.last_save_seconds = 61.0
    stop.request("SIGTERM")
    said = (
        r"^SIGTERM; the state after step 3 is not saved: .* took 61 s, .* (59|60) s are left.* goes"
        r" on after step 2$"
    )
    with pytest.raises(RunStopped, match=said), keeper.save_when_stopped(stop):
        stop.raise_if_requested()
    checkpoints.last_save_seconds = 50.0
    with (
        pytest.raises(RunStopped, match="the state after step 3 is saved"),
        keeper.save_when_stopped(stop),
    ):
        stop.raise_if_requested()
    assert [state.step for state in checkpoints.begun] == [2, 3]


def test_a_stop_writes_the_weights_where_these_are_kept() -> None:
    checkpoints = Checkpoints()
    keeper = keeper_of(checkpoints, 0, save_last="weights")
    keeper.record_initial_state(0, is_saved=False)
    with (
        pytest.raises(RunStopped, match=r"^x; the weights after step 0 are written$"),
        keeper.save_when_stopped(StopRequest()),
    ):
        raise RunStopped("x")
    assert checkpoints.weights == [1] and not checkpoints.begun


def test_values_of_the_watched_metric_are_known_by_step_over_a_restart(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("jsonl",), 4, watched_metric="val/accuracy") as tracker:
        tracker.log_evaluation(2, RESULT)
        tracker.log_metrics(1, "warmup", {"val/accuracy": 1.0})
    with RunTracker(tmp_path, ("jsonl",), 4, watched_metric="val/accuracy") as again:
        again.restore_from_rows(read_step_rows(tmp_path))
        assert tracker.watched_values == again.watched_values == {2: 0.25}


def test_the_best_step_is_the_later_one_of_two() -> None:
    values = {1: 0.5, 2: 0.75, 3: float("nan"), 4: 0.75, 5: 0.9}
    of = "val/accuracy"
    assert find_best_step(values, [4, 3, 2, 1], of) == 4 and find_best_step(values, [3], of) is None
    assert (
        find_best_step({}, [1], of) is None
        and find_best_step({1: 0.5, 2: 0.7}, [1, 2], "val/loss") == 1
    )


def test_a_stop_saves_the_last_whole_step_once() -> None:
    checkpoints = Checkpoints()
    keeper = keeper_of(checkpoints, save_freq=3)
    keeper.record_initial_state(0, is_saved=False)
    keeper.save_if_due(1)
    with (
        pytest.raises(RunStopped, match=r"SIGTERM to .*; the state after step 1 is saved"),
        keeper.save_when_stopped(StopRequest()),
    ):
        raise RunStopped("SIGTERM to [actor dp0 pp0 tp1]")
    assert [state.step for state in checkpoints.begun] == [1]
    with pytest.raises(RunStopped), keeper.save_when_stopped(StopRequest()):
        raise RunStopped("again")
    assert len(checkpoints.begun) == 1


def test_a_stop_that_cannot_save_is_an_error_and_one_without_checkpoints_is_none() -> None:
    keeper = keeper_of(Checkpoints(broken=True), save_freq=3)
    keeper.record_initial_state(0, is_saved=False)
    with (
        pytest.raises(OSError, match=r"the state after step 0 could not be saved \(x\)"),
        keeper.save_when_stopped(StopRequest()),
    ):
        raise RunStopped("x")
    keeper = keeper_of(Checkpoints(), save_freq=0, save_last="none")
    keeper.record_initial_state(0, is_saved=False)
    with pytest.raises(RunStopped, match=r"^x$"), keeper.save_when_stopped(StopRequest()):
        raise RunStopped("x")
