"""What is right or wrong is read from the main reward, whatever terms are added for length and
form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from data_samples import scored

from rlhf_megatron.config.schema import FilterGroupsConfig, RewardConfig, RewardTermConfig
from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    ScoredEvaluationSet,
    summarize_evaluation,
)
from rlhf_megatron.controller.observe.metrics.batch_metrics import compute_group_metrics
from rlhf_megatron.controller.observe.tracker import compute_evaluation_metrics
from rlhf_megatron.controller.scheduler.scored_samples import (
    filter_groups_with_signal,
    make_scored_batch,
)
from rlhf_megatron.data.batch import (
    PromptBatch,
    RolloutBatch,
    ScoredBatch,
    concat_batches,
    select_samples,
)
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_components import get_main_score
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

# The README's case: responses of 2 tokens are not punished, those of 4 by 1.
OVERLONG = RewardTermConfig("overlong", 1.0, {"max_len": 4, "buffer": 2})
EXACT: dict[str, str] = {}
WITH_LENGTH = RewardConfig(params=EXACT, terms=(OVERLONG,))
# (group, response, tokens), the label is 7
SAMPLES = [
    (0, "8", 2),  # wrong throughout, of two lengths
    (0, "9", 4),
    (1, "7", 2),  # right and wrong
    (1, "8", 2),
    (2, "7", 2),  # right throughout, of two lengths
    (2, "7", 4),
    (3, "8", 2),  # right and wrong, with one sum
    (3, "7", 4),
]


def score(config: RewardConfig, source: str = "s", **options: bool) -> list[RewardResult]:
    samples = [
        RewardSample("", response, "7", source, "stop", num_tokens)
        for _, response, num_tokens in SAMPLES
    ]
    with make_reward_scorer(config, Path(os.devnull), **options) as scorer:
        return scorer(samples)


def make_batch(results: Sequence[RewardResult]) -> ScoredBatch:
    """The samples as a batch."""
    one_sample = select_samples(scored(), [0])
    rollout = concat_batches([one_sample] * len(results))
    groups = torch.tensor([group for group, _, _ in SAMPLES])
    return make_scored_batch(
        RolloutBatch(
            **{
                field.name: getattr(rollout, field.name)
                for field in fields(RolloutBatch)
                if field.name != "group_ids"
            },
            group_ids=groups,
        ),
        results,
    )


def list_kept_groups(config: RewardConfig, filter_config: FilterGroupsConfig) -> list[int]:
    """The groups of one batch that the filter keeps."""

    def make_no_batch(number: int) -> ScoredBatch:
        raise AssertionError("one batch is the limit")

    filter_config = replace(filter_config, enable=True, max_num_gen_batches=1)
    batch = make_batch(score(config))
    kept, _ = filter_groups_with_signal(batch, filter_config, 4, make_no_batch)
    return sorted(set(kept.group_ids.tolist()))


def test_groups_are_kept_that_are_right_and_wrong() -> None:
    assert list_kept_groups(WITH_LENGTH, FilterGroupsConfig()) == [1, 3]


def test_an_explicit_reward_means_the_whole_of_it() -> None:
    assert list_kept_groups(WITH_LENGTH, FilterGroupsConfig(metric="reward")) == [0, 1, 2]


@pytest.mark.parametrize("weight", [1.0, -0.5])
def test_without_terms_both_are_one(weight: float) -> None:
    config = RewardConfig(
        name="overlong",
        params={"max_len": 4, "buffer": 2},
        by_source={"s": RewardTermConfig("exact_match", weight, EXACT)},
    )
    for metric in ("main_reward", "reward"):
        assert list_kept_groups(config, FilterGroupsConfig(metric=metric)) == [1, 3]


def test_where_the_main_reward_is_zero_the_terms_say_all() -> None:
    config = RewardConfig(name="zero", terms=(RewardTermConfig("exact_match", 1.0, EXACT),))
    assert list_kept_groups(config, FilterGroupsConfig()) == [1, 3]
    assert "main_reward" not in score(config)[0].parts


def test_solved_groups_are_right_or_wrong_whatever_their_length() -> None:
    """Of four groups one is right throughout and one wrong; without signal by the whole reward is
    the group with one sum.
    """
    assert compute_group_metrics(make_batch(score(WITH_LENGTH))) == {
        "reward/mixed_groups": 0.75,
        "reward/uniform_groups": 0.25,
        "reward/solve_all": 0.25,
        "reward/solve_none": 0.25,
    }


def test_a_weight_or_a_bonus_moves_no_bar() -> None:
    """A weight of 0.5 makes no right group unsolved, a bonus for form no wrong group solved."""
    halved = RewardConfig(by_source={"s": RewardTermConfig("exact_match", 0.5, EXACT)})
    bonus = RewardTermConfig("format", 1.0, {"pattern": ".*"})
    for config in (halved, RewardConfig(params=EXACT, terms=(bonus,))):
        metrics = compute_group_metrics(make_batch(score(config)))
        assert metrics["reward/solve_all"] == metrics["reward/solve_none"] == 0.25


def evaluate(config: RewardConfig) -> dict[str, float]:
    """The metrics of an evaluation with two samples an item."""
    results = score(config)
    pairs = tuple(zip(results[::2], results[1::2], strict=True))
    texts = tuple((SAMPLES[i][1], SAMPLES[i + 1][1]) for i in range(0, len(SAMPLES), 2))
    prompts = PromptBatch(
        ((),) * 4, ("",) * 4, ("7",) * 4, ("s",) * 4, tuple(range(4)), extras=("",) * 4
    )
    scored_set = ScoredEvaluationSet("s", prompts, texts, ((2, 4),) * 4, pairs)
    return compute_evaluation_metrics(summarize_evaluation([scored_set]))


def test_accuracy_is_the_share_of_right_answers() -> None:
    """4 of 8 answers are right, and one of two in 3 of 4 items; three of the lengths cost 1."""
    metrics = evaluate(WITH_LENGTH)
    assert metrics["val/accuracy"] == metrics["val/s/mean@2"] == 0.5
    assert metrics["val/s/best@2"] == 0.75 and metrics["val/s/worst@2"] == 0.25
    assert metrics["val/s/maj@2"] == 0.5
    assert metrics["val/reward"] == metrics["val/s/reward"] == 0.125
    assert metrics["val/accuracy_low"] >= 0.0 and metrics["val/accuracy_high"] <= 1.0


def test_without_terms_the_reward_is_the_accuracy() -> None:
    metrics = evaluate(RewardConfig(params=EXACT))
    assert metrics["val/accuracy"] == 0.5 and "val/reward" not in metrics


def test_a_model_that_scores_later_leaves_the_main_reward() -> None:
    """Rewards of a model on the ranks are added to the results behind the reward stage."""
    results = score(RewardConfig(params=EXACT), has_later_scores=True)
    later = [replace(result, score=result.score + 10.0) for result in results]
    assert [get_main_score(result) for result in later] == [0, 0, 1, 0, 1, 1, 0, 1]
    assert compute_group_metrics(make_batch(later))["reward/solve_all"] == 0.25
