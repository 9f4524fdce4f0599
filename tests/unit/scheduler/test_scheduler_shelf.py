"""What the scheduler hands to the registered estimators: all columns that they name, and no
pass for nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from scheduler_samples import train_batch

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    AdvantageOutputs,
)
from rlhf_megatron.config.schema import AlgorithmConfig, RunConfig
from rlhf_megatron.controller.scheduler.advantage_stage import AdvantageStage
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup, load_algorithm_setup
from rlhf_megatron.controller.scheduler.model_updates import UpdateSettings, request_annotations
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    ScoredBatch,
    TokenBatch,
    TokenLogProbs,
    add_columns,
)
from rlhf_megatron.runtime.role_proxies import RoleProxies


def config_of(name: str, **params: Any) -> RunConfig:
    config = RunConfig(algorithm=AlgorithmConfig(adv_estimator=name, params=params))
    return replace(config, data=replace(config.data, task="addition"))


def scored_batch() -> ScoredBatch:
    train = train_batch(4)
    kept = {f.name: getattr(train, f.name) for f in fields(ScoredBatch)}
    parts = {"exact_match": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    return ScoredBatch(**{**kept, "reward_parts": parts})


class Calls:
    """A worker group of one call: log-probs that tell what was asked for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def scatter_call(
        self, method: str, batch: TokenBatch, **arguments: Any
    ) -> Future[TokenLogProbs]:
        self.asked.append({"method": method, **arguments})
        ones = torch.ones(batch.num_tokens)
        future: Future[TokenLogProbs] = Future()
        with_squares = arguments.get("with_sum_squares", False)
        squares = 0.25 * ones if with_squares else None
        future.set_result(TokenLogProbs(-ones, 2 * ones, squares))
        return future


@pytest.mark.parametrize(
    ("name", "is_asked"),
    [("grpo", False), ("optimal_token_baseline", True), ("tir_optimal_token_baseline", True)],
)
def test_squared_probabilities_are_summed_only_for_an_estimator_that_reads_them(
    name: str, is_asked: bool
) -> None:
    config = config_of(name)
    calls = Calls()
    found = request_annotations(
        RoleProxies(calls),
        UpdateSettings.from_run_config(config),
        load_algorithm_setup(config),
        scored_batch(),
    )  # type: ignore[arg-type]
    (asked,) = calls.asked
    assert asked["method"] == "actor.log_probs" and asked["with_entropy"] is True
    assert asked.get("with_sum_squares", False) is is_asked
    assert (found.sum_squares is not None) is is_asked
    if found.sum_squares is not None:
        assert found.sum_squares.tolist() == [0.25] * found.num_tokens


def test_an_estimator_gets_every_column_of_the_batch() -> None:
    seen: list[AdvantageInputs] = []

    def estimator(inputs: AdvantageInputs, params: object) -> AdvantageOutputs:
        seen.append(inputs)
        return AdvantageOutputs(torch.zeros(inputs.response_mask_T.numel()))

    scored = scored_batch()
    tokens = torch.arange(scored.num_tokens, dtype=torch.float32)
    batch = add_columns(
        AnnotatedBatch, scored, old_log_probs=-tokens, values=tokens, sum_squares=tokens / 100
    )
    AdvantageStage(AlgorithmConfig(), AlgorithmSetup(estimator, None, False))(batch)
    (inputs,) = seen
    assert inputs.log_probs_T is not None and torch.equal(inputs.log_probs_T, -tokens)
    assert inputs.rollout_log_probs_T is not None and torch.equal(
        inputs.rollout_log_probs_T, scored.rollout_log_probs
    )
    assert inputs.sum_squares_T is not None and torch.equal(inputs.sum_squares_T, tokens / 100)
    assert {name: part.tolist() for name, part in inputs.reward_parts.items()} == {
        "exact_match": [1, 2, 3, 4]
    }


def test_gdpo_reads_the_parts_and_not_the_reward() -> None:
    """Groups (0, 1) and (2, 3), lengths 1 2 3 4. Each group's parts (1, 2) and (3, 4) are -+
    sqrt(1/2) normalised, the part that is not named is not looked at. Whitened over the 10 tokens:
    mean (-1 + 2 - 3 + 4) / 10 = 0.2 of them, variance (10 - 10 * 0.2^2) / 9 of +-1, so that the
    advantages are (-1 - 0.2) and (1 - 0.2) over sqrt(9.6 / 9).
    """
    config = config_of("gdpo", gdpo_reward_keys=["exact_match"], epsilon=0.0)
    scored = scored_batch()
    parts = {**scored.reward_parts, "other": torch.tensor([9.0, -9.0, 5.0, 7.0])}
    batch = add_columns(
        AnnotatedBatch, replace(scored, rewards=-scored.rewards, reward_parts=parts)
    )
    train, _ = AdvantageStage(config.algorithm, load_algorithm_setup(config))(batch)
    first = [train.advantages[int(offset) + 1].item() for offset in train.offsets[:-1]]
    low = -1.2 / (9.6 / 9) ** 0.5
    high = 0.8 / (9.6 / 9) ** 0.5
    assert first == pytest.approx([low, high, low, high], rel=1e-5)


def test_nothing_that_is_registered_lacks_what_it_needs() -> None:
    known = {"gdpo": {"gdpo_reward_keys": ["exact_match"]}}
    missing = {}
    for name in ADV_ESTIMATORS:
        try:
            load_algorithm_setup(config_of(name, **known.get(name, {})))
        except ValueError as error:
            missing[name] = str(error)
    assert missing == {}
