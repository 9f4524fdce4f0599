"""Evaluation sets: figures by hand, intervals, masked samples, limits."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from places import MODEL

from rlhf_megatron.config.schema import DataConfig, DataSourceConfig, RunConfig
from rlhf_megatron.controller.evaluation.confidence_intervals import (
    compute_item_interval,
    compute_t95_quantile,
    compute_wilson_interval,
)
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    EvaluationSet,
    HeldOutExample,
    ScoredEvaluationSet,
    compute_accuracy,
    compute_majority_accuracy,
    estimate_best_of_k,
    evaluate_sets,
    limit_prompts,
    summarize_evaluation,
)
from rlhf_megatron.controller.scheduler.algorithm_setup import make_run_data
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.prompts import load_prompt_sets
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.scorers.reward_types import make_masked_result
from rlhf_megatron.rollout.engine_interface import GeneratedSample


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_that_of_newcombe_1998_table_1(
    right: int, count: int, low: float, high: float
) -> None:
    assert compute_wilson_interval(right / count, count) == pytest.approx((low, high), abs=5e-5)
    mirrored = compute_wilson_interval(1 - right / count, count)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)
    assert compute_item_interval(
        [[1.0]] * right + [[0.0]] * (count - right)
    ) == compute_wilson_interval(right / count, count)


def test_the_interval_of_nothing_is_everything() -> None:
    assert compute_wilson_interval(0.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (4, 2.7764), (5, 2.5706), (9, 2.2622), (30, 2.0423), (1000, 1.9623)],
)
def test_students_t(degrees: int, quantile: float) -> None:
    assert compute_t95_quantile(degrees) == pytest.approx(quantile, abs=4e-4)


def test_the_interval_of_graded_scores_is_students() -> None:
    """Means 0.2, 0.4, 0.9: mean 0.5, variance 0.13, standard error sqrt(0.13 / 3) = 0.20817, t of 2
    degrees 4.30265.
    """
    interval = compute_item_interval([[0.1, 0.3], [0.4], [0.9, 0.9]])
    assert interval == pytest.approx((0.5 - 4.30265 * 0.20817, 0.5 + 4.30265 * 0.20817), abs=1e-4)
    assert compute_item_interval([[0.5], [0.5]]) == (0.5, 0.5)
    assert compute_item_interval([[0.3, 0.4]]) is None, "one item says nothing of others"


def test_the_interval_of_several_right_or_wrong_samples() -> None:
    """Item means 1, 0.5, 0, 0.5: mean 0.5, variance of the mean (0.5 / 3) / 4 = 1/24, so 0.25 *
    24 = 6 answers.
    """
    items = [[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert compute_item_interval(items) == pytest.approx(
        compute_wilson_interval(0.5, 6, compute_t95_quantile(3))
    )
    # no difference between items: every sample is an answer of its own, never more
    alike = [[1.0, 0.0]] * 4
    assert compute_item_interval(alike) == pytest.approx(
        compute_wilson_interval(0.5, 8, compute_t95_quantile(3))
    )
    assert compute_item_interval([[0.0] * 8] * 20) == compute_wilson_interval(0, 20), (
        "all wrong: samples may be one answer"
    )
    split = [[1.0, 1.0], [0.0, 0.0]] * 2  # samples of an item agree: never fewer answers than items
    assert compute_item_interval(split) == pytest.approx(
        compute_wilson_interval(0.5, 4, compute_t95_quantile(3))
    )


@pytest.mark.parametrize(
    ("right", "wrong", "num_items", "num_samples"),
    [(0.2, 1.0, 20, 8), (1.0, 1.0, 20, 4), (0.1, 2.0, 100, 8), (1.0, 1.0, 20, 1)],
)
def test_the_interval_covers_the_truth(
    right: float, wrong: float, num_items: int, num_samples: int
) -> None:
    """Items of Beta(right, wrong) difficulty: the mean of all such items lies inside about
    95 times of 100.
    """
    chance = random.Random(0)
    truth = right / (right + wrong)
    inside = 0
    for _ in range(400):
        rates = [chance.betavariate(right, wrong) for _ in range(num_items)]
        items = [[float(chance.random() < rate) for _ in range(num_samples)] for rate in rates]
        low, high = compute_item_interval(items) or (0.0, 0.0)
        inside += low <= truth <= high
    assert 0.90 <= inside / 400 <= 0.98


def test_best_of() -> None:
    """Pairs of 0, 1, 5: (1 + 5 + 5) / 3. For 3 right of 10, pass@2 is 1 - C(7, 2) /
    C(10, 2) = 24 / 45.
    """
    assert estimate_best_of_k([5.0, 0.0, 1.0], 2) == pytest.approx(11 / 3)
    assert (
        estimate_best_of_k([5.0, 0.0, 1.0], 1) == 2 and estimate_best_of_k([5.0, 0.0, 1.0], 3) == 5
    )
    assert estimate_best_of_k([1.0] * 3 + [0.0] * 7, 2) == pytest.approx(24 / 45)
    assert estimate_best_of_k([-2.0, -1.0], 2) == -1


def prompts(*labels: str, first: int = 0, source: str = "s") -> PromptBatch:
    count = len(labels)
    names = tuple(f"{source}{i}" for i in range(count))
    ids = tuple((first + i,) for i in range(count))
    return PromptBatch(
        ids, names, labels, (source,) * count, tuple(range(first, first + count)), ("",) * count
    )


def answered(
    name: str, labels: Sequence[str], scores: Sequence[Sequence[float | None]]
) -> ScoredEvaluationSet:
    """None: masked. The j-th response is j + 1 tokens long."""
    results = tuple(
        tuple(make_masked_result("down") if s is None else RewardResult(s) for s in item)
        for item in scores
    )
    texts = tuple(tuple("r" * (j + 1) for j in range(len(item))) for item in scores)
    return ScoredEvaluationSet(
        name, prompts(*labels), texts, tuple(tuple(map(len, t)) for t in texts), results
    )


def test_the_figures_of_a_set() -> None:
    (found,) = summarize_evaluation(
        [answered("s", "aba", [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)])]
    ).sets
    assert (found.name, found.num_items, found.num_samples, found.num_masked) == ("s", 3, 2, 0)
    assert found.mean == 0.5 and found.std == pytest.approx(0.5 / 3)  # deviations 0.5, 0, 0
    assert found.best == ((1, 0.5), (2, pytest.approx(2 / 3)))
    assert found.mean_response_length == 1.5 and found.majority_accuracy == pytest.approx(2 / 3)


def test_masked_samples_are_left_out_and_counted() -> None:
    """Item scores 0.5 (of two that count), nothing, 1: the mean is 0.75 over two items."""
    result = summarize_evaluation(
        [answered("s", "abc", [(1.0, 0.0, None, None), (None,) * 4, (1.0,) * 4])]
    )
    (found,) = result.sets
    assert (found.num_items, found.num_masked, found.num_samples) == (2, 6, 4)
    assert found.mean == result.accuracy == 0.75 and result.num_items == 2
    assert found.best == ((1, 0.75), (2, 1.0), (4, 1.0))  # of the last, only the third item has 4
    assert (found.low, found.high) == compute_item_interval([(1.0, 0.0), (1.0,) * 4])


def test_a_set_that_could_not_be_scored_at_all() -> None:
    with pytest.raises(
        ValueError, match=r"evaluation set 'b' could be scored \(masked:down 2\); fix"
    ):
        summarize_evaluation(
            [answered("a", "x", [(1.0,)]), answered("b", "xy", [(None,), (None,)])]
        )


def test_all_sets_together() -> None:
    """4 items with scores 1, 0, 0, 0 in two sets; lengths as they come."""
    result = summarize_evaluation(
        [answered("a", "x", [(1.0,)]), answered("b", "xyz", [(0.0,)] * 3)]
    )
    assert (result.accuracy, result.num_items) == (0.25, 4)
    assert (result.low, result.high) == compute_wilson_interval(0.25, 4)
    assert [(s.name, s.mean, s.num_items) for s in result.sets] == [("a", 1.0, 1), ("b", 0.0, 3)]
    assert [(e.set_name, e.item, e.prompt) for e in result.examples] == [
        ("a", 0, "s0"),
        *(("b", item, f"s{item}") for item in range(3)),
    ]


def test_the_accuracy_of_all_is_what_it_was() -> None:
    result = compute_accuracy([1.0, 0.0, 0.5, 0.5], [2, 4, 6], has_binary_scores=True)
    assert (result.accuracy, result.num_items, result.mean_response_length) == (0.5, 4, 4.0)
    assert (result.low, result.high) == pytest.approx((0.15004, 0.84996), abs=1e-5)  # 2 of 4
    assert result == replace(result, low=compute_wilson_interval(0.5, 4)[0])


def test_graded_scores_have_one_interval_in_a_run_and_in_evaluate() -> None:
    """`evaluate` prints the interval of a set, a run that of all sets: here they are one."""
    scores = [0.0, 0.1, 0.2, 0.3]
    result = compute_accuracy(scores, [1], has_binary_scores=False)
    assert (result.low, result.high) == compute_item_interval([(score,) for score in scores])
    alone = compute_accuracy([0.5], [1], has_binary_scores=False)
    assert (alone.low, alone.high) == compute_wilson_interval(0.5, 1)  # bounds of any share


def test_scores_that_leave_the_unit_interval_have_an_interval_around_their_mean() -> None:
    result = compute_accuracy([2.0, 1.0, 2.0, 1.0], [1], has_binary_scores=False)
    half = 3.182446305 * (1 / 3 / 4) ** 0.5  # t(3) x standard error; variance of the four is 1/3
    assert (result.accuracy, result.low, result.high) == pytest.approx(
        (1.5, 1.5 - half, 1.5 + half)
    )
    alone = compute_accuracy([1.5], [1], has_binary_scores=False)
    assert (alone.low, alone.high) == (-math.inf, math.inf)  # one says nothing of others


def test_majority_answer() -> None:
    assert compute_majority_accuracy(["1", "2", "1", "3"]) == 0.5


def asked(
    sets: Sequence[EvaluationSet], answers: dict[int, list[str]]
) -> tuple[EvaluationResult, list[PromptBatch], list[list[RewardSample]]]:
    """Evaluates with `answers` by group id, exact match as reward;
    what was generated and scored.
    """
    tokenizer = load_tokenizer(MODEL)
    batches: list[PromptBatch] = []
    scored: list[list[RewardSample]] = []

    def generate(batch: PromptBatch) -> list[list[GeneratedSample]]:
        batches.append(batch)
        return [
            [
                GeneratedSample(ids := tokenizer.encode(text), (0.0,) * len(ids), "stop", 1)
                for text in answers[group]
            ]
            for group in batch.group_ids
        ]

    def score(samples: list[RewardSample]) -> list[RewardResult]:
        scored.append(samples)
        return [RewardResult(float(sample.response == sample.label)) for sample in samples]

    return evaluate_sets(sets, generate, ResponseReader(tokenizer), score), batches, scored


def test_every_sample_reaches_its_set() -> None:
    sets = [
        EvaluationSet("a", prompts("1", "2", source="a")),
        EvaluationSet("b", prompts("33", first=2, source="b")),
    ]
    result, batches, scored = asked(sets, {0: ["1", "1"], 1: ["2", "0"], 2: ["0", "33"]})
    assert [(s.name, s.mean, s.mean_response_length) for s in result.sets] == [
        ("a", 0.75, 1.0),
        ("b", 0.5, 1.5),
    ]
    # one call for all sets
    (batch,) = batches
    (samples,) = scored
    assert batch.group_ids == (0, 1, 2) and batch.sources == ("a", "a", "b")
    assert [(s.prompt, s.response, s.label, s.source, s.num_tokens) for s in samples[3:5]] == [
        ("a1", "0", "2", "a", 1),
        ("b0", "0", "33", "b", 1),
    ]
    assert result.examples[-1] == HeldOutExample("b", 0, "b0", "0", "33", 0.0, 0.0, "ok", {}, 1)
    assert result.has_binary_scores


def test_the_limit_holds_for_each_set() -> None:
    sets = (EvaluationSet("a", prompts(*"1234")), EvaluationSet("b", prompts("5", first=4)))
    assert [len(s.prompts) for s in limit_prompts(sets, 2)] == [2, 1]
    assert limit_prompts(sets, None) == sets
    assert limit_prompts(sets, 2)[0].prompts == prompts(*"12")


def test_the_sets_of_a_run() -> None:
    """Group ids count over all sets: no two prompts share the seeds of their samples."""
    tokenizer = load_tokenizer(MODEL)
    sources = tuple(
        DataSourceConfig(
            f"digits{n}", task="addition", task_params={"num_digits": n, "num_val": 3 * n}
        )
        for n in (1, 2)
    )
    config = RunConfig(data=DataConfig(sources=sources, train_batch_size=10))
    sets = load_prompt_sets(config.data, tokenizer)
    data = make_run_data(config.data, config.trainer.seed, config.rollout.stop, sets, tokenizer)
    assert [(s.name, s.prompts.group_ids) for s in data.held_out_sets] == [
        ("digits1", (0, 1, 2)),
        ("digits2", tuple(range(3, 9))),
    ]
    assert data.held_out_sets[1].prompts.prompts == tuple(
        item.prompt for item in sets.held_out_sets[1].items
    )
    assert (
        data.stream is not None and data.stream.draw_step_prompts(1).sources.count("digits1") == 5
    )
    nothing = load_prompt_sets(DataConfig(task="addition"), tokenizer)
    assert [
        s.name for s in make_run_data(RunConfig().data, 0, (), nothing, tokenizer).held_out_sets
    ] == ["addition"]
