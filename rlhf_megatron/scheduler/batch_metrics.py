"""Metrics that are read off a finished batch. Pure."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import torch
from torch import Tensor

from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TokenBatch, TrainBatch
from rlhf_megatron.rollout.engine import FinishReason


def valid_samples(batch: ScoredBatch) -> Tensor:
    """[B] bool: samples whose reward counts."""
    return torch.tensor([not status.startswith("masked:") for status in batch.reward_statuses], dtype=torch.bool)


def valid_tokens(batch: ScoredBatch) -> Tensor:
    """[T] bool: response tokens of samples whose reward counts."""
    return batch.response_mask & valid_samples(batch).repeat_interleave(batch.lengths)


def response_lengths(batch: TokenBatch) -> Tensor:
    """[B] int64, tokens that the policy sampled."""
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), batch.response_mask.to(torch.int64).cumsum(0)])
    return sums[batch.offsets[1:]] - sums[batch.offsets[:-1]]


def token_versions(batch: RolloutBatch) -> Tensor:
    """[T] int64, policy version that each response token was sampled from; prompt tokens have that of the first."""
    versions_T = batch.policy_versions.repeat_interleave(batch.lengths)
    if batch.version_spans is not None and any(batch.version_spans):
        firsts = (batch.offsets[1:] - response_lengths(batch)).tolist()
        for first, spans in zip(firsts, batch.version_spans, strict=True):
            for version, start, end in spans:
                versions_T[first + start : first + end] = version
    return versions_T


def mixed_group_share(batch: ScoredBatch) -> float:
    """Share of groups whose valid samples do not all have one reward."""
    is_valid = valid_samples(batch)
    mixed = 0
    groups = batch.group_ids.unique()
    for group in groups:
        rewards = batch.rewards[(batch.group_ids == group) & is_valid]
        mixed += bool(rewards.numel() > 1 and rewards.min() != rewards.max())
    return mixed / max(1, groups.numel())


def statistics(name: str, values: Tensor) -> dict[str, float]:
    """`name`/{mean,max,min}; zeros where there are no values."""
    values = values.float() if values.numel() else torch.zeros(1)
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """See metric_names for units and meanings."""
    responses = response_lengths(batch)
    metrics = {
        "reward/mixed_groups": mixed_group_share(batch),
        "response_length/clip_ratio": sum(r == "length" for r in batch.finish_reasons) / len(batch),
        "perf/total_num_tokens": float(batch.num_tokens),
        **statistics("critic/advantages", batch.advantages[batch.response_mask]),
        **statistics("response_length", responses),
        **statistics("prompt_length", batch.lengths - responses),
        **reward_metrics(batch),
        **engine_metrics(batch),
        **value_metrics(batch),
    }
    if batch.entropies is not None:
        metrics["actor/entropy"] = _mean(batch.entropies[batch.response_mask])
    return metrics


def reward_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Rewards over all samples that count, by source and by part, and the share of each status."""
    is_valid = valid_samples(batch)
    rewards = batch.rewards[is_valid]
    metrics = {
        "reward/masked": 1.0 - is_valid.float().mean().item(),
        **statistics("critic/rewards", rewards),
        "critic/rewards/std": rewards.std().item() if rewards.numel() > 1 else 0.0,
    }
    for source in sorted(set(batch.sources)):
        is_of = torch.tensor([other == source for other in batch.sources]) & is_valid
        metrics[f"reward/source/{source}/mean"] = _mean(batch.rewards[is_of])
        metrics[f"reward/source/{source}/count"] = float(is_of.sum())
    for status, count in sorted(Counter(batch.reward_statuses).items()):
        metrics[f"reward/status/{status}"] = count / len(batch)
    for name, part in batch.reward_parts.items():
        metrics[f"reward/part/{name}"] = _mean(part[is_valid & ~part.isnan()])
    return metrics


def engine_metrics(batch: RolloutBatch) -> dict[str, float]:
    """What the engines told of their samples; what a recorded step of an earlier version does not tell is left out."""
    counts = Counter(batch.finish_reasons)
    metrics = {
        f"rollout/finish_reason/{reason}": counts[reason] / len(batch)
        for reason in sorted({*get_args(FinishReason), *counts})
    }
    if batch.version_spans is not None:
        several = sum(len({version for version, _, _ in spans}) > 1 for spans in batch.version_spans)
        metrics["rollout/samples_of_several_versions"] = several / len(batch)
    if batch.num_cached_tokens is not None:
        num_prompt_tokens = int((batch.lengths - response_lengths(batch)).sum())
        metrics["rollout/cached_token_share"] = int(batch.num_cached_tokens.sum()) / max(1, num_prompt_tokens)
    if batch.num_retractions is not None:
        metrics["rollout/num_retractions"] = float(batch.num_retractions.sum())
    return metrics


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """What the critic said before the update, against what it is to learn. Empty without a critic."""
    if batch.values is None or batch.returns is None:
        return {}
    is_valid = valid_tokens(batch)
    return {
        **statistics("critic/values", batch.values[is_valid]),
        **statistics("critic/returns", batch.returns[is_valid]),
    }


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else 0.0
