"""Samples to rewards: each is scored by the main reward of its source and by all terms, in one weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.reward_service.components import Components, combine, load_components
from rlhf_megatron.reward_service.error_rate import check_error_rate
from rlhf_megatron.reward_service.outcome import outcome
from rlhf_megatron.rewards import RewardResult, RewardSample
from rlhf_megatron.rewards.base import masked

REWARD_LOG = "rewards.log"  # in the run directory: what rewards in worker processes print


class Scorer:
    """Used in a `with` block: it may have worker processes. Called on the controller."""

    def __init__(self, components: Components, config: RewardConfig, log: Path) -> None:
        self.components = components
        self.config = config
        self.log = log

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def __call__(self, samples: Sequence[RewardSample]) -> list[RewardResult]:
        """One result a sample, in order. Raises RewardError when more than `reward.max_error_rate` of them failed."""
        results = [self._score(sample) for sample in samples]
        check_error_rate(samples, results, self.config.max_error_rate, str(self.log))
        return results

    def _score(self, sample: RewardSample) -> RewardResult:
        if sample.finish_reason == "abort":
            return masked("aborted")
        components = self.components.of(sample.source)
        return combine(components, [outcome(c.entry.build, sample, c.params) for c in components])


def make_scorer(config: RewardConfig, log: Path) -> Scorer:
    """`log`: takes what worker processes print. Raises ConfigError with all unknown names and wrong parameters."""
    return Scorer(load_components(config), config, log)


def check_reward(config: RewardConfig) -> None:
    """Raises ConfigError with all that is wrong with the rewards. Looked at before a run is started."""
    load_components(config)
