"""Finished groups of the background to groups with rewards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from rlhf_megatron import faults
from rlhf_megatron.config.schema import FilterGroupsConfig
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.reward_service.error_rate import check_error_rate
from rlhf_megatron.rewards import RewardResult, RewardSample
from rlhf_megatron.scheduler.filter_groups import teaches_nothing
from rlhf_megatron.scheduler.generation import collect
from rlhf_megatron.scheduler.scoring import reward_samples, to_scored
from rlhf_megatron.scheduler.supply.base import Finished, Scored


class ScoreGroups:
    """Callable: groups -> the same with rewards. See `base.Score`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        scorer: Callable[[Sequence[RewardSample]], list[RewardResult]],
        filter_groups: FilterGroupsConfig,
    ) -> None:
        self._tokenizer = tokenizer
        self._scorer = scorer
        self._filter_groups = filter_groups

    def __call__(self, groups: Sequence[Finished]) -> list[Scored]:
        faults.reach("reward.before_score")
        rollouts = [collect(group.prompts, [group.samples[0]], self._tokenizer) for group in groups]
        greedy = [
            collect(group.prompts, [group.samples[1]], self._tokenizer) if len(group.samples) > 1 else None
            for group in groups
        ]
        asked = [reward_samples(rollout) for rollout in rollouts]
        asked_greedy = [reward_samples(one) if one is not None else [] for one in greedy]
        pairs = list(zip(asked, asked_greedy, strict=True))
        results = iter(self._scorer([sample for pair in pairs for samples in pair for sample in samples]))
        found = []
        for group, rollout, one, (samples, greedy_samples) in zip(groups, rollouts, greedy, pairs, strict=True):
            of_samples = [next(results) for _ in samples]
            batch = to_scored(rollout, of_samples, one, [next(results) for _ in greedy_samples])
            has_signal = not (self._filter_groups.enable and teaches_nothing(batch, self._filter_groups))
            found.append(Scored(group.number, batch, one, has_signal))
        return found


class LastSamples:
    """A scorer whose share of failures counts over the last `count` samples: a call may have a single group.

    `score`: as the scorer, without a bound on failures. Raises RewardError.
    """

    def __init__(
        self,
        score: Callable[[Sequence[RewardSample]], list[RewardResult]],
        count: int,
        max_error_rate: float,
        log: str,
    ) -> None:
        self._score = score
        self._last: deque[tuple[RewardSample, RewardResult]] = deque(maxlen=count)
        self._max_error_rate = max_error_rate
        self._log = log

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        results = self._score(samples)
        self._last.extend(zip(samples, results, strict=True))
        if len(self._last) == self._last.maxlen:
            last, of_last = zip(*self._last, strict=True)
            check_error_rate(last, of_last, self._max_error_rate, self._log)
        return results
