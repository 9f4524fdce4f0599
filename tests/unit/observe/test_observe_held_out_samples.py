"""Samples of held-out items: the same items in each evaluation, in a file and in TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    ScoredEvaluationSet,
    summarize_evaluation,
)
from rlhf_megatron.controller.observe.line_file import move_superseded_rows
from rlhf_megatron.controller.observe.report.run_files import read_run_files
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.tracker import RunTracker
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, make_masked_result

NUM_ITEMS = 9


def evaluate(num_right: int, num_examples: int = 6) -> EvaluationResult:
    """Two sets of nine items with two samples each; the first items are right, one is masked."""
    scored_sets = []
    for name in ("sums", "words"):
        numbers = range(NUM_ITEMS)
        prompts = PromptBatch(
            tuple((i,) for i in numbers),
            tuple(f"{name} {i}" for i in numbers),
            tuple(str(i) for i in numbers),
            (name,) * NUM_ITEMS,
            tuple(numbers),
            ("",) * NUM_ITEMS,
        )
        results = tuple(
            (RewardResult(float(i < num_right), parts={"length": 2.0}), RewardResult(0.0))
            if i != 2
            else (make_masked_result("down"), RewardResult(1.0))
            for i in numbers
        )
        texts = tuple((f"first {i}", f"second {i}") for i in numbers)
        lengths = tuple((3, 4) for _ in numbers)
        scored_sets.append(ScoredEvaluationSet(name, prompts, texts, lengths, results))
    return summarize_evaluation(scored_sets, num_examples)


def write_evaluations(run_dir: Path, num_samples: int) -> None:
    facts = RunFacts("run", num_samples_logged=num_samples)
    with RunTracker(run_dir, ("jsonl", "tensorboard"), 4, facts) as tracker:
        for step in (0, 2, 4):
            tracker.log_evaluation(step, evaluate(num_right=step, num_examples=num_samples))


def test_each_evaluation_has_the_same_items(tmp_path: Path) -> None:
    write_evaluations(tmp_path, 6)
    found = read_run_files(tmp_path).held_out_samples
    assert [(s.step, s.source, s.item) for s in found] == [
        (step, source, item)
        for step in (0, 2, 4)
        for source in ("sums", "words")
        for item in range(3)
    ]
    assert [s.score for s in found if (s.source, s.item) == ("sums", 1)] == [0.0, 1.0, 1.0]
    masked = next(s for s in found if s.item == 2)
    assert (masked.score, masked.reward, masked.status) == (None, None, "masked:down")
    assert vars(found[0]) == {
        "step": 0,
        "source": "sums",
        "item": 0,
        "prompt": "sums 0",
        "response": "first 0",
        "label": "0",
        "score": 0.0,
        "reward": 0.0,
        "status": "ok",
        "parts": {"length": 2.0},
        "num_tokens": 3,
    }


def test_a_text_of_each_evaluation_is_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_evaluations(tmp_path, 2)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "run"))
    events.Reload()
    texts = {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in events.Tensors("held_out_samples/text_summary")
    }
    assert list(texts) == [0, 2, 4]
    assert "**item 0**: score 0 (ok), 3 tokens" in texts[0] and "    first 0" in texts[0]
    assert "**item 0**: score 1 (ok), 3 tokens" in texts[2]


def test_a_run_that_keeps_no_samples_has_none(tmp_path: Path) -> None:
    write_evaluations(tmp_path, 0)
    assert not (tmp_path / "held_out_samples.jsonl").exists()
    assert evaluate(1, num_examples=0).examples == ()


def test_a_resumed_run_moves_the_samples_of_evaluations_that_it_makes_again(
    tmp_path: Path,
) -> None:
    write_evaluations(tmp_path, 2)
    move_superseded_rows(tmp_path, 2, 1)
    path = tmp_path / "held_out_samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("score", "is_binary"), [(0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (-1.0, 0.0), (2.0, 0.0)]
)
def test_the_run_says_whether_scores_are_0_or_1(
    tmp_path: Path, score: float, is_binary: float
) -> None:
    prompts = PromptBatch(((0,),), ("p",), ("l",), ("s",), (0,), ("",))
    scored_set = ScoredEvaluationSet(
        "s", prompts, (("a", "b"),), ((1, 1),), ((RewardResult(score), RewardResult(1.0)),)
    )
    with RunTracker(tmp_path, ("jsonl",), 1) as tracker:
        tracker.log_evaluation(1, summarize_evaluation([scored_set]))
    (row,) = read_run_files(tmp_path).evaluations
    assert row.metrics["val/binary_scores"] == is_binary
