"""A reward model's scores as rewards: what is scored, what a sample is paid, and where."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from data_samples import scored

from rlhf_megatron.config.schema import RewardModelConfig
from rlhf_megatron.controller.scheduler.model_rewards import ModelRewardScorer, find_step_ends
from rlhf_megatron.data.batch import CriticValues, RolloutBatch, ScoredBatch, TokenBatch
from rlhf_megatron.rewards.scorers import RewardResult

PIECES = {11: "a\n", 12: "\nb", 15: "c"}


class Model:
    """Says of each state the id of the token before it, where it is asked."""

    asked: TokenBatch | None = None

    def values(self, batch: TokenBatch, token_budget: int) -> Future[CriticValues]:
        self.asked = batch
        column = torch.zeros(batch.num_tokens)
        column[1:] = batch.token_ids[:-1].float()
        future: Future[CriticValues] = Future()
        future.set_result(CriticValues(column * batch.response_mask))
        return future


def rewarded(batch: ScoredBatch, **settings: Any) -> ScoredBatch:
    config = RewardModelConfig(path="model", **settings)
    asked = ModelRewardScorer(config, 100, lambda ids: PIECES[ids[0]]).request_scores(
        Model(), batch
    )  # type: ignore[arg-type]
    assert asked is not None
    return asked.await_scored_batch()


def test_one_score_for_the_last_token_of_a_response() -> None:
    """Sample 1 has no response: its last token is scored. Its status keeps it out of everything."""
    found = rewarded(scored(), weight=0.5)
    assert found.reward_parts["reward_model"].tolist() == [12, 13, 15]
    assert found.rewards.tolist() == [1 + 6, 0 + 6.5, 0.5 + 7.5]
    assert found.reward_parts["exact"].tolist() == [1, 0, 0] and found.process_rewards is None


def test_mean_std_and_sigmoid() -> None:
    found = rewarded(scored(), mean=13.0, std=2.0, activation="sigmoid")
    expected = [1 / (1 + math.exp(-(score - 13) / 2)) for score in (12, 13, 15)]
    assert found.reward_parts["reward_model"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "paid", "part"),
    [
        ({"granularity": "token", "step_reduction": "sum"}, [0, 11, 12, 13, 0, 15], [23, 13, 15]),
        ({"granularity": "token"}, [0, 5.5, 6, 13, 0, 15], [11.5, 13, 15]),
        ({"granularity": "step", "step_reduction": "sum"}, [0, 0, 12, 13, 0, 15], [12, 13, 15]),
        ({"granularity": "step", "step_separator": "a"}, [0, 5.5, 6, 13, 0, 15], [11.5, 13, 15]),
    ],
)
def test_scores_of_tokens_and_steps(
    settings: dict[str, Any], paid: list[float], part: list[float]
) -> None:
    found = rewarded(scored(), weight=2.0, **settings)
    assert found.process_rewards is not None
    assert found.process_rewards.tolist() == [2 * share for share in paid]
    assert found.reward_parts["reward_model"].tolist() == part
    assert found.rewards.tolist() == [
        rule + 2 * own for rule, own in zip((1, 0, 0.5), part, strict=True)
    ]


def test_a_batch_that_has_its_scores_is_left_alone() -> None:
    """A step recorded after it was scored is not paid twice in a replay."""
    once = rewarded(scored())
    assert (
        ModelRewardScorer(RewardModelConfig(path="model"), 100, str).request_scores(Model(), once)
        is None
    )  # type: ignore[arg-type]


def test_the_model_reads_whole_samples_and_computes_what_is_asked() -> None:
    model = Model()
    ModelRewardScorer(RewardModelConfig(path="model"), 100, str).request_scores(model, scored())  # type: ignore[arg-type]
    assert model.asked is not None
    assert model.asked.token_ids.tolist() == [10, 11, 12, 12, 13, 13, 14, 15, 15]
    assert model.asked.response_mask.nonzero().view(-1).tolist() == [3, 5, 8]


@pytest.mark.parametrize(
    ("pieces", "separator", "ends"),
    [
        (["a\n\nb", "c\n", "\n", "d"], "\n\n", [0, 2]),
        (["\n", "\n", "\n", "\n"], "\n\n", [1, 3]),
        (["x. y. ", "z."], ". ", [0]),
        (["a", "", "b"], "ab", [2]),
        ([], "x", []),
    ],
)
def test_step_ends(pieces: list[str], separator: str, ends: list[int]) -> None:
    assert find_step_ends(pieces, separator) == ends


def test_parts_of_masked_samples_stay_numbers() -> None:
    batch = replace(scored(), rewards=torch.tensor([1.0, math.nan, 0.5]))
    assert rewarded(batch).rewards.isnan().tolist() == [False, True, False]


def test_samples_of_an_evaluation_get_their_own_scores() -> None:
    """A masked one stays as it is; parts of the rule and its status, too."""
    results = [
        RewardResult(1.0, parts={"exact": 1.0}),
        RewardResult(0.0, "masked:aborted"),
        RewardResult(0.0, "malformed", {"exact": 0.0}),
    ]
    rewards = ModelRewardScorer(RewardModelConfig(path="model", weight=0.5), 100, str)
    columns = {field.name: getattr(scored(), field.name) for field in fields(RolloutBatch)}
    found = rewards.add_model_scores(Model(), RolloutBatch(**columns), results)  # type: ignore[arg-type]
    assert [(one.status, one.score) for one in found] == [
        ("ok", 7.0),
        ("masked:aborted", 0.0),
        ("malformed", 7.5),
    ]
