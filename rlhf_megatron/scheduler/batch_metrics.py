"""Metrics that are read off a finished batch. Pure."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.groups import Groups
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TokenBatch, TrainBatch
from rlhf_megatron.rollout.engine import FinishReason


def valid_samples(batch: ScoredBatch) -> Tensor:
    """[B] bool: samples whose reward counts."""
    return torch.tensor([not status.startswith("masked:") for status in batch.reward_statuses], dtype=torch.bool)


def valid_tokens(batch: ScoredBatch) -> Tensor:
    """[T] bool: response tokens of samples whose reward counts."""
    is_valid = valid_samples(batch)
    if bool(is_valid.all()):
        return batch.response_mask
    return batch.response_mask & is_valid.repeat_interleave(batch.lengths)


def response_lengths(batch: TokenBatch) -> Tensor:
    """[B] int64, tokens that the policy sampled."""
    if bool((batch.lengths > 0).all()):
        return sample_counts(batch.response_mask, batch.offsets)
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), batch.response_mask.to(torch.int64).cumsum(0)])
    return sums[batch.offsets[1:]] - sums[batch.offsets[:-1]]


def sample_counts(is_counted_T: Tensor, offsets: Tensor) -> Tensor:
    """[B] int64: True entries of each sample, none of which is empty."""
    starts = offsets[:-1].numpy()
    return torch.from_numpy(np.add.reduceat(is_counted_T.numpy().view(np.uint8), starts, dtype=np.int64))


def picked(column: Tensor, mask: Tensor) -> Tensor:
    """`column[mask]`. numpy's way of it takes a fifth of torch's time on a CPU, where all columns of a step are."""
    return torch.from_numpy(column.numpy()[mask.numpy()])


def token_versions(batch: RolloutBatch) -> Tensor:
    """[T] int64, policy version that each response token was sampled from; prompt tokens have that of the first."""
    versions_T = batch.policy_versions.repeat_interleave(batch.lengths)
    if batch.version_spans is not None and any(batch.version_spans):
        firsts = (batch.offsets[1:] - response_lengths(batch)).tolist()
        for first, spans in zip(firsts, batch.version_spans, strict=True):
            for version, start, end in spans:
                versions_T[first + start : first + end] = version
    return versions_T


def group_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Shares of groups that teach something, and of those of several samples that count that do not."""
    groups = Groups.of(batch.group_ids, valid_samples(batch))
    is_mixed, counts = groups.have_spread(batch.rewards), groups.counts()
    is_uniform = (counts > 1) & ~is_mixed
    rewards = groups.sums(batch.rewards) / counts.clamp(min=1)  # of a uniform group: of each of its samples
    shares = {
        "mixed_groups": is_mixed,
        "uniform_groups": is_uniform,
        "solve_all": is_uniform & (rewards >= 1.0),
        "solve_none": is_uniform & (rewards <= 0.0),
    }
    return {f"reward/{name}": int(of_groups.sum()) / max(1, groups.num_groups) for name, of_groups in shares.items()}


def statistics(name: str, values: Tensor) -> dict[str, float]:
    """`name`/{mean,max,min}; zeros where there are no values."""
    values = values.float() if values.numel() else torch.zeros(1)
    return {
        f"{name}/mean": values.mean().item(),
        f"{name}/max": values.max().item(),
        f"{name}/min": values.min().item(),
    }


def batch_metrics(batch: TrainBatch, max_prompt_length: int | None = None) -> dict[str, float]:
    """See metric_names for units and meanings. `max_prompt_length`: that prompts are cut to, None where not known."""
    metrics = {
        "perf/total_num_tokens": float(batch.num_tokens),
        **statistics("critic/advantages", picked(batch.advantages, batch.response_mask)),
        **length_metrics(batch, max_prompt_length),
        **group_metrics(batch),
        **reward_metrics(batch),
        **engine_metrics(batch),
        **value_metrics(batch),
    }
    if batch.entropies is not None:
        metrics["actor/entropy"] = _mean(picked(batch.entropies, batch.response_mask))
    return metrics


def length_metrics(batch: RolloutBatch, max_prompt_length: int | None = None) -> dict[str, float]:
    """Of responses, of those that were not aborted, of prompts; turns where a sample has several."""
    responses = response_lengths(batch)
    prompts = batch.lengths - responses
    is_whole = torch.tensor([reason != "abort" for reason in batch.finish_reasons], dtype=torch.bool)
    num_cut = sum(reason == "length" for reason in batch.finish_reasons)
    num_whole = int(is_whole.sum())
    metrics = {
        **statistics("response_length", responses),
        "response_length/clip_ratio": num_cut / len(batch),
        **statistics("response_length_non_aborted", responses[is_whole]),
        "response_length_non_aborted/clip_ratio": num_cut / max(1, num_whole),
        "response/aborted_ratio": 1.0 - num_whole / len(batch),
        **statistics("prompt_length", prompts),
    }
    if max_prompt_length is not None:
        metrics["prompt_length/clip_ratio"] = int((prompts >= max_prompt_length).sum()) / len(batch)
    mask = batch.response_mask.numpy()
    begins = mask[1:] & ~mask[:-1]  # no sample begins with a response token
    if np.count_nonzero(begins) > int((responses > 0).sum()):
        turns = sample_counts(torch.from_numpy(np.concatenate([[False], begins])), batch.offsets)
        metrics |= statistics("num_turns", turns)
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
    numbers = {source: number for number, source in enumerate(sorted(set(batch.sources)))}
    sources = torch.tensor([numbers[source] for source in batch.sources])
    for source, number in numbers.items():
        is_of = (sources == number) & is_valid
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
    """What the critic said before the update, and the returns of the estimator; what there is of both."""
    columns = {"critic/values": batch.values, "critic/returns": batch.returns}
    found = {name: column for name, column in columns.items() if column is not None}
    is_valid = valid_tokens(batch) if found else batch.response_mask
    return {
        key: value
        for name, column in found.items()
        for key, value in statistics(name, picked(column, is_valid)).items()
    }


def _mean(values: Tensor) -> float:
    return values.mean().item() if values.numel() else 0.0
