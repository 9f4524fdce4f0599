"""Groups without signal are left out of a step; other prompts are generated in their place (`algorithms.groups`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rlhf_megatron.algorithms.groups import teaches
from rlhf_megatron.config.schema import FilterGroupsConfig
from rlhf_megatron.data.batch import ScoredBatch, concat, select
from rlhf_megatron.observe.metrics.batch import valid_samples

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch", bound=ScoredBatch)


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
        """That a step may have generated."""
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
    """Of groups that stand one after the other."""
    _, number = batch.group_ids.unique_consecutive(return_inverse=True)
    return select(batch, (number < count).nonzero().view(-1).tolist())


def alike(batches: Sequence[Batch]) -> list[Batch]:
    """With the same parts of the reward: a batch without samples of some data source lacks those of its reward."""
    names = sorted({name for batch in batches for name in batch.reward_parts})
    return [
        replace(
            batch,
            reward_parts={name: batch.reward_parts.get(name, torch.full((len(batch),), torch.nan)) for name in names},
        )
        for batch in batches
    ]
