"""One greedy sample a prompt, for estimators that need `greedy_rewards`.

It is generated and scored with the samples of its step and never trained on: what stays of it is its reward, a column
of the samples of its prompt, which the journal and a record keep as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import torch
from torch import Tensor

from rlhf_megatron.algorithms.groups import Groups
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, concat, select
from rlhf_megatron.rewards import RewardResult, is_masked
from rlhf_megatron.scheduler.batch_metrics import response_lengths, statistics


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
