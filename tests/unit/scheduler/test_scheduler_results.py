"""What a run writes: evaluation, tracker, curve, records, run directory, summary."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from data_samples import scored
from places import MODEL
from scheduler_samples import to_train

from rlhf_megatron.config.schema import RolloutConfig, RunConfig, SamplingConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import EvaluationResult, EvaluationSet
from rlhf_megatron.controller.observe.line_file import RunAttempts
from rlhf_megatron.controller.observe.metrics.performance_metrics import compute_throughput
from rlhf_megatron.controller.observe.run_dir import create_fresh_run_dir, write_json_atomically
from rlhf_megatron.controller.observe.run_summary import (
    describe_sampling,
    draw_reward_curve,
    summarise_training,
)
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.controller.recovery.rollout_recorder import RecordedStart, RolloutRecorder
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup, RunData
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.data.batch import PromptBatch, TokenBatch
from rlhf_megatron.data.codec import write_message_file
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.engine_fleet import GroupsCallback


class CannedFleet:
    """Answers a prompt's samples with the tokens that the test put here; keeps the requests."""

    def __init__(self, answers: list[list[str]]) -> None:
        self.tokenizer = load_tokenizer(MODEL)
        self.answers = answers
        self.requests: list[GenerateRequest] = []

    def generate(
        self, requests: list[GenerateRequest], on_groups: GroupsCallback | None = None, *_: object
    ) -> list[list[GeneratedSample]]:
        """Groups come one after the other."""
        self.requests = requests
        groups = [
            [
                GeneratedSample(ids := self.tokenizer.encode(text), (0.0,) * len(ids), "stop", 1)
                for text in texts
            ]
            for texts in self.answers[: len(requests)]
        ]
        for index, group in enumerate(groups if on_groups is not None else ()):
            on_groups(index, [group])
        return groups


def test_an_item_counts_once_however_many_samples_it_has() -> None:
    """Items with 2, 1 and 0 right answers of 2 samples: scores 1, 0.5, 0."""
    held_out = PromptBatch(
        ((0,), (1,), (2,)), ("0", "1", "2"), ("12", "3", "4"), ("s",) * 3, (0, 1, 2), ("",) * 3
    )
    fleet = CannedFleet([["12", "12"], ["3", "999"], ["5", "6"]])
    data = RunData(None, (EvaluationSet("s", held_out),), fleet.tokenizer, (14,))

    def reward(samples: Sequence[RewardSample]) -> list[RewardResult]:
        return [RewardResult(float(sample.response == sample.label)) for sample in samples]

    parts = AlgorithmSetup(None, None, needs_reference=False)
    stages = StepStages(RunConfig(), None, fleet, data, parts, dict, reward)
    result = stages.measure_accuracy(None, SamplingConfig(temperature=0.5, n=2))
    assert (result.accuracy, result.num_items) == (0.5, 3)
    assert result.mean_response_length == pytest.approx((2 + 2 + 1 + 3 + 1 + 1) / 6)
    assert [(e.item, e.prompt, e.response, e.score) for e in result.examples] == [
        (0, "0", "12", 1.0),
        (1, "1", "3", 1.0),
        (2, "2", "5", 0.0),
    ]
    assert [len(request.seeds) for request in fleet.requests] == [2, 2, 2]
    assert len({seed for request in fleet.requests for seed in request.seeds}) == 6
    assert fleet.requests[0].params.temperature == 0.5 and fleet.requests[
        0
    ].params.stop_token_ids == (14,)
    assert stages.measure_accuracy(2, SamplingConfig(temperature=1.0, n=2)).accuracy == 0.75
    assert len(fleet.requests) == 2


def test_the_run_tells_how_many_groups_are_done() -> None:
    asked = PromptBatch(
        ((0,), (1,), (2,)), ("0", "1", "2"), ("12", "3", "4"), ("s",) * 3, (0, 1, 2), ("",) * 3
    )
    fleet = CannedFleet([["12", "12"], ["3", "999"], ["5", "6"]])
    data = RunData(None, (), fleet.tokenizer, (14,))
    said = []
    config = RunConfig(rollout=RolloutConfig(n=2))
    parts = AlgorithmSetup(None, None, needs_reference=False)
    StepStages(
        config, None, fleet, data, parts, dict, lambda samples: [], report_progress=said.append
    ).generate_rollout(1, asked)
    assert said == [f"generate, {count} of 3 groups" for count in (1, 2, 3)]


def test_evaluation_has_a_sampling_of_its_own() -> None:
    """What training samples from stays softmax(logits / rollout.temperature), whatever
    evaluation leaves out.
    """
    asked = PromptBatch(((0,),), ("0",), ("12",), ("s",), (0,), ("",))
    fleet = CannedFleet([["12", "12", "3"]])
    data = RunData(None, (EvaluationSet("s", asked),), fleet.tokenizer, (14,))
    val = SamplingConfig(temperature=0.6, n=3, top_p=0.9, top_k=20, min_p=0.05)
    config = RunConfig(rollout=RolloutConfig(n=3, temperature=0.8, val_kwargs=val))
    parts = AlgorithmSetup(None, None, needs_reference=False)
    stages = StepStages(
        config, None, fleet, data, parts, dict, lambda samples: [RewardResult(0.0) for _ in samples]
    )
    length = config.data.max_response_length
    assert stages.evaluate_held_out() is not None
    assert fleet.requests[0].params == SamplingParams(
        length, 0.6, (14,), top_p=0.9, top_k=20, min_p=0.05
    )
    stages.generate_rollout(1, asked)
    assert fleet.requests[0].params == SamplingParams(length, 0.8, (14,))


def rows(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def track_a_step(tracker: RunTracker, step: int) -> None:
    with tracker.track_step(step):
        for name in ("generate", "update", "sync", "sync"):
            with tracker.time_stage(name):
                time.sleep(0.02 if name == "sync" else 0)
        said = {
            "policy/version": step + 1.0,
            "policy/lag": 0.5,
            "rollout/num_samples": 3.0,
            "actor/num_epochs": 2.0,
        }
        tracker.set_step_batch(
            to_train(scored()), {**said, "training/rollout_log_probs_diff_max": step * 1e-6}
        )


RESULT = EvaluationResult(0.25, 0.2, 0.3, 40, 3.5, ())


def test_rows_of_metrics_jsonl(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("jsonl",), total_steps=2) as tracker:
        tracker.log_warmup_step(1, {"warmup/loss": 2.0})
        with tracker.time_stage("evaluate"):
            pass
        tracker.log_evaluation(0, RESULT)
        track_a_step(tracker, 1)
        track_a_step(tracker, 2)
        tracker.log_evaluation(2, None)
    found = rows(tmp_path)
    assert [(row["kind"], row["step"]) for row in found] == [
        ("warmup", 1),
        ("evaluation", 0),
        ("step", 1),
        ("step", 2),
    ]
    assert (
        found[1]["val/accuracy"] == 0.25
        and found[1]["val/num_items"] == 40
        and "timing_s/evaluate" in found[1]
    )
    assert found[2]["critic/rewards/mean"] == 0.75 and found[2]["policy/version"] == 2
    assert found[2]["policy/lag"] == 0.5 and [row["training/global_step"] for row in found[2:]] == [
        1.0,
        2.0,
    ]
    assert {key for key in found[2] if key.startswith("timing_s/")} == {
        *("timing_s/generate", "timing_s/update", "timing_s/sync", "timing_s/step")
    }
    assert 0.04 <= found[2]["timing_s/sync"] <= found[2]["timing_s/step"], (
        "a stage entered twice adds up"
    )
    seconds = [row["seconds"] for row in found]
    assert seconds == sorted(seconds)
    assert tracker.curve_points == [(1, 0.75), (2, 0.75)] and tracker.evaluation_results == [
        (0, RESULT)
    ]
    assert tracker.first_mismatch == 1e-6  # of the first step
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "metrics.jsonl",
        "samples.jsonl",
        "trace.json",
    ]


def test_a_step_that_failed_is_not_written(tmp_path: Path) -> None:
    with (  # noqa: SIM117
        RunTracker(tmp_path, ("jsonl",), total_steps=1) as tracker,
        pytest.raises(KeyError, match="x"),
    ):
        with tracker.track_step(1):
            raise KeyError("x")
    assert rows(tmp_path) == [] and tracker.curve_points == []


def test_throughput_by_hand() -> None:
    metrics = {"perf/total_num_tokens": 600.0, "timing_s/step": 4.0}
    assert compute_throughput(metrics) == {"perf/tokens_per_s": 150.0}
    metrics |= {"timing_s/generate": 2.0, "response_length/mean": 5.0, "rollout/num_samples": 60.0}
    metrics |= {"timing_s/update": 0.5, "actor/num_epochs": 3.0}
    found = compute_throughput(metrics)
    assert (
        found["perf/tokens_per_s_generate"] == 5 * 60 / 2
        and found["perf/tokens_per_s_update"] == 600 * 3 / 0.5
    )


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    with RunTracker(tmp_path, ("jsonl", "tensorboard"), total_steps=1) as tracker:
        track_a_step(tracker, 1)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    events.Reload()
    (row,) = rows(tmp_path)
    keys = set(row) - {"kind", "step", "seconds"}
    assert set(events.Tags()["scalars"]) == keys
    for key in keys:
        assert events.Scalars(key)[0].value == pytest.approx(row[key], rel=1e-6)
    assert events.Tags()["tensors"] == ["samples/text_summary"]


def test_the_console_shows_a_row_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunTracker(tmp_path, ("console",), total_steps=1) as tracker:
        tracker.log_evaluation(0, RESULT)
        track_a_step(tracker, 1)
    evaluation, header, row = capsys.readouterr().out.splitlines()
    assert evaluation == "step 0: held-out score 0.250 [0.200, 0.300] on 40 items"
    values = dict(zip(header.split(), row.split(), strict=False))
    assert values["step"] == "1" and values["reward"] == "0.750" and values["entropy"] == "-"


def test_curve_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    assert draw_reward_curve(
        path, "title", [(1, 0.1), (2, 0.4)], [(0, RESULT), (2, replace(RESULT, accuracy=0.5))], 0.05
    )
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape == (540, 960, 4)
    orange = (abs(pixels[..., :3] - torch.tensor([1.0, 0.498, 0.055]).numpy()) < 0.02).all(-1)
    assert orange.sum() > 100  # the line of held-out accuracy
    assert draw_reward_curve(tmp_path / "empty.png", "nothing yet", [], [])


def test_the_curve_says_what_it_shows_whatever_the_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import pyplot

    axes: list[Any] = []
    monkeypatch.setattr(pyplot, "close", lambda figure: axes.append(figure.axes[0]))
    how = (
        describe_sampling(SamplingConfig(temperature=0.7, n=4)),
        describe_sampling(SamplingConfig(temperature=0.0)),
    )
    for rewards in ([(1, -3.5), (2, 12.0)], [(1, 0.25), (2, 0.5)]):
        draw_reward_curve(
            tmp_path / "curve.png", "title", rewards, [(0, RESULT)], sampling_texts=how
        )
    labels = [text.get_text() for text in axes[0].get_legend().get_texts()]
    assert (
        labels[0] == "critic/rewards/mean, a step (sampled at temperature 0.7, 4 samples a prompt)"
    )
    assert labels[1] == "val/accuracy, held-out (greedy)" and axes[0].get_ylabel() == "score"
    assert (
        axes[0].get_ylim()[0] < -3.5
        and axes[0].get_ylim()[1] > 12.0
        and axes[1].get_ylim() == (0, 1.02)
    )


def test_recorded_batches_come_back(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path / "record")
    with pytest.raises(
        ValueError, match=r"no recorded step under .*record; run with --record first\."
    ):
        recorder.read_step(1)
    with pytest.raises(ValueError, match=r"start.batch is missing .* record the run again"):
        recorder.read_start()
    recorder.write_start(RecordedStart(num_warmup_steps=7, policy_version=3))
    recorder.write_step(1, scored())
    recorder.write_step(12, replace(scored(), rewards=torch.zeros(3)))
    assert recorder.read_start() == RecordedStart(7, 3)
    again = recorder.read_step(1)
    assert torch.equal(again.rewards, scored().rewards) and torch.equal(
        again.token_ids, scored().token_ids
    )
    assert torch.equal(again.rollout_log_probs, scored().rollout_log_probs)
    assert (
        again.reward_statuses == scored().reward_statuses and again.responses == scored().responses
    )
    assert torch.equal(again.reward_parts["exact"], scored().reward_parts["exact"])
    assert not recorder.read_step(12).rewards.any()
    with pytest.raises(
        ValueError, match=r"step 2 is not recorded: .*step_000002.batch does not exist \(recorded: "
    ):
        recorder.read_step(2)
    tokens = TokenBatch(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([False]))
    write_message_file(tmp_path / "record" / "step_000003.batch", tokens)
    with pytest.raises(ValueError, match="holds a TokenBatch, not a ScoredBatch"):
        recorder.read_step(3)


def test_a_former_run_is_moved_aside_whole(tmp_path: Path) -> None:
    path, moved = create_fresh_run_dir(str(tmp_path / "runs"), "x")
    assert moved is None and path == tmp_path / "runs" / "x" and (path / "logs").is_dir()
    for number in range(1, 4):
        (path / "logs" / "rank0.log").write_text(f"run {number}")
        path, moved = create_fresh_run_dir(str(tmp_path / "runs"), "x")
        assert moved == path.with_name(f"x.{number}") and list((path / "logs").iterdir()) == []
    kept = {f"x.{number}": f"run {number}" for number in (1, 2, 3)}
    assert {
        p.name: (p / "logs" / "rank0.log").read_text() for p in path.parent.iterdir() if p != path
    } == kept


def test_a_file_in_the_place_of_the_run_is_moved_too(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("precious")
    path, moved = create_fresh_run_dir(str(tmp_path), "x")
    assert moved is not None and moved.read_text() == "precious" and path.is_dir()


def test_write_json_leaves_no_half_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomically(path, {"steps": 1})
    with pytest.raises(TypeError):
        write_json_atomically(path, {"steps": object()})
    assert json.loads(path.read_text()) == {"steps": 1}


@pytest.mark.parametrize(
    ("steps", "before", "after"),
    [((0, 2, 4), 0.0, 0.4), ((4,), None, 0.4), ((0,), 0.0, None), ((), None, None)],
)
def test_summary_takes_before_from_step_0_and_after_from_the_last(
    tmp_path: Path, steps: tuple[int, ...], before: float | None, after: float | None
) -> None:
    with RunTracker(tmp_path, (), total_steps=4) as tracker:
        for step in steps:
            tracker.log_evaluation(step, replace(RESULT, accuracy=step / 10))
        found = summarise_training(
            tracker, {"actor": "tp1 pp1 dp1"}, None, None, RunAttempts(tmp_path)
        )
    assert found.get("accuracy_before") == before and found.get("accuracy_after") == after
    assert found["reward_first"] is None and found["steps"] == 0
    if steps:
        assert found.get("accuracy_after_interval", found.get("accuracy_before_interval")) == [
            0.2,
            0.3,
        ]
