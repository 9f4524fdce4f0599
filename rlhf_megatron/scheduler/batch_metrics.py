"""Metrics that are read off a finished batch. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.data.batch import ScoredBatch, TokenBatch, TrainBatch


def valid_samples(batch: ScoredBatch) -> Tensor:
    """[B] bool: samples whose reward counts."""
    return torch.tensor([not status.startswith("masked:") for status in batch.reward_statuses], dtype=torch.bool)


def response_lengths(batch: TokenBatch) -> Tensor:
    """[B] int64, tokens that the policy sampled."""
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), batch.response_mask.to(torch.int64).cumsum(0)])
    return sums[batch.offsets[1:]] - sums[batch.offsets[:-1]]


def mixed_group_share(batch: ScoredBatch) -> float:
    """Share of groups whose valid samples do not all have one reward."""
    is_valid = valid_samples(batch)
    mixed = 0
    groups = batch.group_ids.unique()
    for group in groups:
        rewards = batch.rewards[(batch.group_ids == group) & is_valid]
        mixed += bool(rewards.numel() > 1 and rewards.min() != rewards.max())
    return mixed / max(1, groups.numel())


def batch_metrics(batch: TrainBatch, version: int) -> dict[str, float]:
    """See metric_names for units and meanings."""
    is_valid = valid_samples(batch)
    rewards = batch.rewards[is_valid] if bool(is_valid.any()) else torch.zeros(1)
    has_responses = bool(batch.response_mask.any())
    advantages = batch.advantages[batch.response_mask] if has_responses else torch.zeros(1)
    responses = response_lengths(batch)
    prompts = batch.lengths - responses
    metrics = {
        "reward/mixed_groups": mixed_group_share(batch),
        "reward/masked": 1.0 - is_valid.float().mean().item(),
        "response_length/clip_ratio": sum(r == "length" for r in batch.finish_reasons) / len(batch),
        "policy/lag": (version - batch.policy_versions.float()).mean().item(),
        "perf/total_num_tokens": float(batch.num_tokens),
    }
    for name, values in (
        ("critic/rewards", rewards),
        ("critic/advantages", advantages),
        ("response_length", responses),
        ("prompt_length", prompts),
    ):
        metrics[f"{name}/mean"] = values.float().mean().item()
        metrics[f"{name}/max"] = values.max().item()
        metrics[f"{name}/min"] = values.min().item()
    for name, part in batch.reward_parts.items():
        metrics[f"reward/part/{name}"] = part[is_valid].mean().item() if bool(is_valid.any()) else 0.0
    if batch.entropies is not None:
        metrics["actor/entropy"] = batch.entropies[batch.response_mask].mean().item() if has_responses else 0.0
    return metrics
