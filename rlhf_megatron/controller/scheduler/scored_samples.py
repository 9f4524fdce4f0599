"""Samples to rewards, and back to columns of a batch.

Also: One greedy sample a prompt, for estimators that need `align_greedy_rewards`. What a step
trains on where rewards decide how often a sample does: PF-PPO, see algorithms/resampling.py.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_megatron.algorithms.prompt_groups import PromptGroups, mark_informative_samples
from rlhf_megatron.algorithms.resampling import ResamplingParams, draw_resampled_indices
from rlhf_megatron.config.rules.part_rules import MAIN_REWARD
from rlhf_megatron.config.schema import FilterGroupsConfig, PFPPOConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    count_sampled_tokens,
    make_valid_sample_mask,
    select_reward_column,
    summarise_mean_max_min,
)
from rlhf_megatron.data.batch import (
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
    add_columns,
    concat_batches,
    select_samples,
)
from rlhf_megatron.data.response_texts import ResponseReader
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample, is_masked

logger = logging.getLogger(__name__)
ScoredBatchType = TypeVar("ScoredBatchType", bound=ScoredBatch)

RESAMPLING_SEED_PURPOSE = 13  # of the seed


def align_greedy_rewards(
    rollout: RolloutBatch, greedy_rollout: RolloutBatch, greedy_results: Sequence[RewardResult]
) -> Tensor:
    """Return [B] float32: for each sample of `rollout` the reward of the greedy sample of its
    prompt, nan where that has masked status.

    `greedy_results` holds one result for each sample of `greedy_rollout`.
    """
    found = {
        group: nan if is_masked(result.status) else result.score
        for group, result in zip(greedy_rollout.group_ids.tolist(), greedy_results, strict=True)
    }
    return torch.tensor([found[group] for group in rollout.group_ids.tolist()], dtype=torch.float32)


def select_groups(rollout_batches: Sequence[RolloutBatch], group_ids: Tensor) -> RolloutBatch:
    """Return the samples of these groups out of all `rollout_batches`, joined into one batch. (Used
    for the greedy samples of a step.)
    """
    greedy = concat_batches(rollout_batches)
    return select_samples(
        greedy, torch.isin(greedy.group_ids, group_ids).nonzero().view(-1).tolist()
    )


def compute_greedy_length_metrics(greedy_rollout: RolloutBatch) -> dict[str, float]:
    """Return mean, max and min of the response lengths of greedy samples, in tokens."""
    return summarise_mean_max_min("greedy/response_length", count_sampled_tokens(greedy_rollout))


def compute_greedy_reward_metrics(batch: ScoredBatch) -> dict[str, float]:
    """Return mean, max and min of the greedy rewards of a batch, and the share of prompts without
    one; each prompt counts once.
    """
    assert batch.greedy_rewards is not None
    groups = PromptGroups.from_ids(batch.group_ids, torch.ones(len(batch), dtype=torch.bool))
    rewards = torch.empty(groups.num_groups).index_copy_(0, groups.index_B, batch.greedy_rewards)
    known = rewards[~rewards.isnan()]
    return {
        **summarise_mean_max_min("greedy/rewards", known),
        "greedy/masked": 1.0 - known.numel() / max(1, rewards.numel()),
    }


def release_free_memory() -> None:
    """Give freed memory of answers and messages back to the system: the pieces are too small for
    the C library to do so by itself.
    """
    with suppress(OSError, AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def make_reward_samples(rollout: RolloutBatch, reader: ResponseReader) -> list[RewardSample]:
    """Return the input of the reward function for each sample. `reader` finds what the texts of the
    responses do not show.
    """
    prefixes = {prompt: reader.find_prefix(prompt) for prompt in set(rollout.prompts)}
    columns = zip(
        rollout.prompts,
        rollout.responses,
        rollout.labels,
        rollout.sources,
        rollout.finish_reasons,
        rollout.extras,
        _iterate_response_ids(rollout),
        strict=True,
    )
    return [
        RewardSample(
            prompt,
            response,
            label,
            source,
            finish_reason,
            len(token_ids),
            extra,
            prefixes[prompt],
            reader.locate_special_tokens(token_ids, response),
        )
        for prompt, response, label, source, finish_reason, extra, token_ids in columns
    ]


def _iterate_response_ids(rollout: RolloutBatch) -> Iterator[list[int]]:
    """Yield the token ids of each response: of an episode those of its last turn, whose text the
    column `responses` has.
    """
    turn_spans = rollout.turn_spans or ((),) * len(rollout)
    for (begin, end), spans in zip(pairwise(rollout.offsets.tolist()), turn_spans, strict=True):
        if spans:
            first, last = spans[-1]
            yield rollout.token_ids[begin + first : begin + last].tolist()
            continue
        token_ids = rollout.token_ids[begin:end]
        yield token_ids[rollout.response_mask[begin:end]].tolist()


def make_scored_batch(
    rollout: RolloutBatch,
    results: Sequence[RewardResult],
    greedy_rollout: RolloutBatch | None = None,
    greedy_results: Sequence[RewardResult] = (),
) -> ScoredBatch:
    """Return `rollout` with the rewards, statuses and reward parts of `results` (one for each
    sample), and with a column of greedy rewards where there is a greedy rollout. A part that a
    result does not have is nan.
    """
    names = sorted({name for result in results for name in result.parts})
    return add_columns(
        ScoredBatch,
        rollout,
        rewards=torch.tensor([result.score for result in results], dtype=torch.float32),
        reward_statuses=tuple(result.status for result in results),
        reward_parts={
            name: torch.tensor([r.parts.get(name, nan) for r in results]) for name in names
        },
        greedy_rewards=align_greedy_rewards(rollout, greedy_rollout, greedy_results)
        if greedy_rollout
        else None,
    )


def resample_batch(
    batch: TrainBatch, pf_ppo: PFPPOConfig, seed: int, step: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return (as many samples as `batch` has, drawn from it with all their columns, by reward;
    metrics). Return (`batch`, {}) where PF-PPO is switched off.

    The draw depends on (seed, step), so that a resumed or replayed step draws the same samples. Use
    the result for the update only: the metrics of rewards and lengths describe what the policy
    sampled.
    """
    if not pf_ppo.enable:
        return batch, {}
    params = ResamplingParams(pf_ppo.reweight_method, pf_ppo.weight_pow)
    drawn = draw_resampled_indices(
        batch.rewards,
        make_valid_sample_mask(batch),
        params,
        derive_seed(seed, step, RESAMPLING_SEED_PURPOSE),
    ).tolist()
    return select_samples(batch, drawn), {"pf_ppo/distinct_samples": len(set(drawn)) / len(batch)}


# Groups without signal are left out of a step; other prompts are generated in their
# place (`algorithms.prompt_groups`).


def filter_groups_with_signal(
    first_batch: ScoredBatch,
    filter_config: FilterGroupsConfig,
    num_wanted_groups: int,
    make_further_batch: Callable[[int], ScoredBatch],
) -> tuple[ScoredBatch, dict[str, float]]:
    """Return (the first `num_wanted_groups` groups with signal, metrics).

    `make_further_batch(number)` generates and scores a further batch, counted from 1; there are at
    most `max_num_gen_batches` batches with the first. Where all batches have too few groups with
    signal, the step has fewer groups. Where no group has signal, return `first_batch` as it is;
    later stages find this out with `has_no_signal`.
    """
    kept: list[ScoredBatch] = []
    batch = first_batch
    num_batches = 1
    num_generated = 0
    num_kept = 0
    while True:
        is_kept = _mask_samples_with_signal(batch, filter_config)
        num_generated += batch.group_ids.unique().numel()
        if bool(is_kept.any()):
            kept.append(select_samples(batch, is_kept.nonzero().view(-1).tolist()))
            num_kept += kept[-1].group_ids.unique().numel()
        if num_kept >= num_wanted_groups or num_batches == filter_config.max_num_gen_batches:
            break
        batch = make_further_batch(num_batches)
        num_batches = num_batches + 1
    metrics = GroupFilterReport(filter_config, num_wanted_groups)(
        min(num_kept, num_wanted_groups), num_generated, num_kept
    )
    return (
        _select_first_groups(concat_batches(align_reward_parts(kept)), num_wanted_groups)
        if kept
        else first_batch
    ), metrics


class GroupFilterReport:
    """Says what is left of a step's groups. `wanted`: that a step has."""

    def __init__(self, filter_config: FilterGroupsConfig, num_wanted_groups: int) -> None:
        """Make the report for steps that want `num_wanted_groups` groups."""
        self._filter_config = filter_config
        self._num_wanted_groups = num_wanted_groups

    @property
    def max_groups_per_step(self) -> int:
        """The largest number of groups that a step may generate."""
        return self._filter_config.max_num_gen_batches * self._num_wanted_groups

    def __call__(
        self, num_taken_groups: int, num_generated_groups: int, num_with_signal: int
    ) -> dict[str, float]:
        """Return the metrics of a step's group filter, and log a warning where the step has fewer
        groups than wanted.
        """
        num_batches = num_generated_groups / self._num_wanted_groups
        if num_taken_groups < self._num_wanted_groups:
            logger.warning(
                (
                    "algorithm.filter_groups: %d of %d groups differ in %s after %g batches"
                    " (max_num_gen_batches); %s. Easier or harder prompts, more samples a prompt or"
                    " more batches give more."
                ),
                num_taken_groups,
                self._num_wanted_groups,
                "the main reward"
                if self._filter_config.metric == MAIN_REWARD
                else self._filter_config.metric,
                num_batches,
                "the step trains on those" if num_taken_groups else "no update in this step",
            )
        return {
            "filter_groups/num_gen_batches": num_batches,
            "filter_groups/kept": num_with_signal / max(1, num_generated_groups),
            "filter_groups/num_groups": float(num_taken_groups),
        }


def has_no_signal(batch: ScoredBatch, filter_config: FilterGroupsConfig) -> bool:
    """Return whether no group of a step that went through `filter_groups_with_signal` has
    signal.
    """
    return not bool(_mask_samples_with_signal(batch, filter_config).any())


def _mask_samples_with_signal(batch: ScoredBatch, filter_config: FilterGroupsConfig) -> Tensor:
    """Return [B] bool: the samples of groups in which the filter's metric differs between valid
    samples. All samples of a group have the same value; a group with fewer than two valid samples
    has no signal.
    """
    metric = select_reward_column(batch, filter_config.metric)
    return mark_informative_samples(metric, batch.group_ids, make_valid_sample_mask(batch))


def _select_first_groups(batch: ScoredBatch, num_groups: int) -> ScoredBatch:
    """Return the first `num_groups` groups of a batch in which the samples of a group are
    consecutive.
    """
    _, number = batch.group_ids.unique_consecutive(return_inverse=True)
    return select_samples(batch, (number < num_groups).nonzero().view(-1).tolist())


def align_reward_parts(batches: Sequence[ScoredBatchType]) -> list[ScoredBatchType]:
    """Return the batches with the same reward parts in each, nan where a batch lacked the part: a
    batch without samples of some data source lacks the parts of that source's reward.
    """
    names = sorted({name for batch in batches for name in batch.reward_parts})
    return [
        replace(
            batch,
            reward_parts={
                name: batch.reward_parts.get(name, torch.full((len(batch),), torch.nan))
                for name in names
            },
        )
        for batch in batches
    ]
