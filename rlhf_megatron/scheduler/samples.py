"""Samples to rewards, and back to columns of a batch.

Also: One greedy sample a prompt, for estimators that need `greedy_rewards`. What a step trains on where rewards
decide how often a sample does: PF-PPO, see algorithms/resampling.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from rlhf_megatron.algorithms.groups import Groups
from rlhf_megatron.algorithms.resampling import ResamplingParams, resample
from rlhf_megatron.config.schema import PFPPOConfig
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TrainBatch, concat, gain, select
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.observe.metrics.batch import response_lengths, statistics, valid_samples
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample, is_masked


def greedy_rewards(rollout: RolloutBatch, greedy: RolloutBatch, results: Sequence[RewardResult]) -> Tensor:
    """[B] float32: for each sample of `rollout` the reward of the greedy sample of its prompt; nan: masked status.

    `results`: one for each sample of `greedy`.
    """
    found = {
        group: nan if is_masked(result.status) else result.score
        for group, result in zip(greedy.group_ids.tolist(), results, strict=True)
    }
    return torch.tensor([found[group] for group in rollout.group_ids.tolist()], dtype=torch.float32)


def of_groups(batches: Sequence[RolloutBatch], group_ids: Tensor) -> RolloutBatch:
    """The greedy samples of these groups, out of those of all batches that a step has generated."""
    greedy = concat(batches)
    return select(greedy, torch.isin(greedy.group_ids, group_ids).nonzero().view(-1).tolist())


def greedy_length_metrics(greedy: RolloutBatch) -> dict[str, float]:
    return statistics("greedy/response_length", response_lengths(greedy))


def greedy_reward_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Of a batch with greedy rewards, each prompt once."""
    assert batch.greedy_rewards is not None
    groups = Groups.of(batch.group_ids, torch.ones(len(batch), dtype=torch.bool))
    rewards = torch.empty(groups.num_groups).index_copy_(0, groups.index_B, batch.greedy_rewards)
    known = rewards[~rewards.isnan()]
    return {**statistics("greedy/rewards", known), "greedy/masked": 1.0 - known.numel() / max(1, rewards.numel())}


def reward_samples(rollout: RolloutBatch) -> list[RewardSample]:
    """What the reward reads of each sample."""
    columns = (rollout.prompts, rollout.responses, rollout.labels, rollout.sources, rollout.finish_reasons)
    lengths = response_lengths(rollout).tolist()
    return [RewardSample(*values) for values in zip(*columns, lengths, rollout.extras, strict=True)]


def to_scored(
    rollout: RolloutBatch,
    results: Sequence[RewardResult],
    greedy: RolloutBatch | None = None,
    of_greedy: Sequence[RewardResult] = (),
) -> ScoredBatch:
    """`rollout` with a result a sample, and where there are greedy samples their rewards as a column."""
    names = sorted({name for result in results for name in result.parts})
    return gain(
        ScoredBatch,
        rollout,
        rewards=torch.tensor([result.score for result in results], dtype=torch.float32),
        reward_statuses=tuple(result.status for result in results),
        reward_parts={name: torch.tensor([r.parts.get(name, nan) for r in results]) for name in names},
        greedy_rewards=greedy_rewards(rollout, greedy, of_greedy) if greedy else None,
    )


PURPOSE = 13  # of the seed


def resampled(batch: TrainBatch, config: PFPPOConfig, seed: int, step: int) -> tuple[TrainBatch, dict[str, float]]:
    """(as many samples of `batch`, drawn with all their columns; metrics). `batch` itself where that is switched off.

    Drawn by (seed, step), so that a resumed or replayed step draws the same. Made for the update only: the metrics of
    rewards and lengths tell what the policy sampled.
    """
    if not config.enable:
        return batch, {}
    params = ResamplingParams(config.reweight_method, config.weight_pow)
    drawn = resample(batch.rewards, valid_samples(batch), params, derive_seed(seed, step, PURPOSE)).tolist()
    return select(batch, drawn), {"pf_ppo/distinct_samples": len(set(drawn)) / len(batch)}
