"""Samples to rewards, and back to columns of a batch.

Also: One greedy sample a prompt, for estimators that need `greedy_rewards`. What a step trains on where rewards
decide how often a sample does: PF-PPO, see algorithms/resampling.py.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import nan
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_megatron.algorithms.groups import Groups, teaches
from rlhf_megatron.algorithms.resampling import ResamplingParams, resample
from rlhf_megatron.config.schema import FilterGroupsConfig, PFPPOConfig
from rlhf_megatron.data.batch import RolloutBatch, ScoredBatch, TrainBatch, concat, gain, select
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.observe.metrics.batch import response_lengths, statistics, valid_samples
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample, is_masked

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch", bound=ScoredBatch)


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
    """Return metrics of the greedy rewards of a batch, each prompt counted once."""
    assert batch.greedy_rewards is not None
    groups = Groups.of(batch.group_ids, torch.ones(len(batch), dtype=torch.bool))
    rewards = torch.empty(groups.num_groups).index_copy_(0, groups.index_B, batch.greedy_rewards)
    known = rewards[~rewards.isnan()]
    return {**statistics("greedy/rewards", known), "greedy/masked": 1.0 - known.numel() / max(1, rewards.numel())}


def give_back_memory() -> None:
    """Give memory of answers and messages back to the system: their pieces are too small for the C library to do so
    by itself.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def reward_samples(rollout: RolloutBatch) -> list[RewardSample]:
    """Return what the reward reads of each sample."""
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


# Groups without signal are left out of a step; other prompts are generated in their place (`algorithms.groups`).


def filtered(
    first: ScoredBatch, settings: FilterGroupsConfig, wanted: int, another: Callable[[int], ScoredBatch]
) -> tuple[ScoredBatch, dict[str, float]]:
    """(the first `wanted` groups that teach, metrics).

    `another(number)` generates and scores a further batch, counted from 1; at most `max_num_gen_batches` there are in
    all. Where these have too few groups, the step has what they have. Where none teaches it has `first` as it is, which
    `teaches_nothing` tells later stages.
    """
    kept: list[ScoredBatch] = []
    batch, num_batches, num_generated, num_kept = first, 1, 0, 0
    while True:
        is_kept = _teaches(batch, settings)
        num_generated += batch.group_ids.unique().numel()
        if bool(is_kept.any()):
            kept.append(select(batch, is_kept.nonzero().view(-1).tolist()))
            num_kept += kept[-1].group_ids.unique().numel()
        if num_kept >= wanted or num_batches == settings.max_num_gen_batches:
            break
        batch, num_batches = another(num_batches), num_batches + 1
    metrics = FewGroups(settings, wanted)(min(num_kept, wanted), num_generated, num_kept)
    return (_first_groups(concat(alike(kept)), wanted) if kept else first), metrics


class FewGroups:
    """Says what is left of a step's groups. `wanted`: that a step has."""

    def __init__(self, settings: FilterGroupsConfig, wanted: int) -> None:
        self._settings = settings
        self._wanted = wanted

    @property
    def most_groups(self) -> int:
        """The largest number of groups that a step may generate."""
        return self._settings.max_num_gen_batches * self._wanted

    def __call__(self, num_taken: int, num_generated: int, num_with_signal: int) -> dict[str, float]:
        """Metrics; a warning where the step has too few."""
        num_batches = num_generated / self._wanted
        if num_taken < self._wanted:
            logger.warning(
                "algorithm.filter_groups: %d of %d groups differ in %s after %g batches (max_num_gen_batches); %s."
                " Easier or harder prompts, more samples a prompt or more batches give more.",
                num_taken,
                self._wanted,
                self._settings.metric,
                num_batches,
                "the step trains on those" if num_taken else "no update in this step",
            )
        return {
            "filter_groups/num_gen_batches": num_batches,
            "filter_groups/kept": num_with_signal / max(1, num_generated),
            "filter_groups/num_groups": float(num_taken),
        }


def teaches_nothing(batch: ScoredBatch, settings: FilterGroupsConfig) -> bool:
    """Whether no group of a step that went through `filtered` has signal."""
    return not bool(_teaches(batch, settings).any())


def _teaches(batch: ScoredBatch, settings: FilterGroupsConfig) -> Tensor:
    """[B] bool."""
    metric = batch.rewards
    if settings.metric != "reward" and settings.metric in batch.reward_parts:
        part = batch.reward_parts[settings.metric]
        metric = torch.where(part.isnan(), batch.rewards, part)
    return teaches(metric, batch.group_ids, valid_samples(batch))


def _first_groups(batch: ScoredBatch, count: int) -> ScoredBatch:
    """Return the first groups of a batch in which groups stand one after the other."""
    _, number = batch.group_ids.unique_consecutive(return_inverse=True)
    return select(batch, (number < count).nonzero().view(-1).tolist())


def alike(batches: Sequence[Batch]) -> list[Batch]:
    """Give all batches the same parts of the reward: a batch without samples of some data source lacks those of its
    reward.
    """
    names = sorted({name for batch in batches for name in batch.reward_parts})
    return [
        replace(
            batch,
            reward_parts={name: batch.reward_parts.get(name, torch.full((len(batch),), torch.nan)) for name in names},
        )
        for batch in batches
    ]
