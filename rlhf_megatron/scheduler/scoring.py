"""Samples to rewards, and back to columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch

from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, gain
from rlhf_megatron.rewards import RewardResult, RewardSample
from rlhf_megatron.scheduler.batch_metrics import response_lengths
from rlhf_megatron.scheduler.greedy import greedy_rewards


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
