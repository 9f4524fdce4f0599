"""The episodes of a run: its workers, how they are run, and what they are worth. What the stages of
a step ask in place of plain generation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.agents.episode_batch import (
    EpisodeRewardWeights,
    collect_episode_batch,
    judge_episodes,
    needs_scorers,
)
from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_messages import EpisodeLimits
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import (
    EpisodeRunner,
    FreeEpisodeRunner,
    LockStepEpisodeRunner,
    RecordGroups,
)
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.agents.row_environments import NamedEnvironment
from rlhf_megatron.config.rules.batch_rules import compute_episode_tokens
from rlhf_megatron.config.schema import DataConfig, EnvironmentConfig, ModelConfig, RolloutConfig
from rlhf_megatron.data.batch import PromptBatch, RolloutBatch
from rlhf_megatron.data.tokenizer import Tokenizer
from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample
from rlhf_megatron.rollout.engine_interface import SamplingParams
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet

WORKER_LOG = "logs/environments.log"  # below the run directory

ScoreSamples = Callable[[Sequence[RewardSample]], list[RewardResult]]


class EpisodeErrorRateError(ValueError):
    """Too many episodes failed through no fault of the policy."""


@dataclass
class RunEpisodes:
    """Runs and judges the episodes of a run."""

    runner: EpisodeRunner
    tokenizer: Tokenizer
    weights: EpisodeRewardWeights
    max_error_rate: float
    log_path: Path

    def run_groups(
        self,
        prompts: PromptBatch,
        group_size: GroupSize,
        params: SamplingParams,
        step: int,
        known_groups: Mapping[int, list[Episode]] | None = None,
        record_groups: RecordGroups = lambda groups: None,
        report_progress: Callable[[str], object] = lambda text: None,
    ) -> list[list[Episode]]:
        """Return the episodes of each prompt; see `EpisodeRunner.run_episodes`. Raise
        EpisodeErrorRateError where more than `max_error_rate` of them failed.
        """
        groups = self.runner.run_episodes(
            prompts,
            group_size,
            params,
            step,
            known_groups or {},
            record_groups,
            report_progress,
        )
        self._check_error_rate([episode for group in groups for episode in group])
        return groups

    def collect_batch(
        self, prompts: PromptBatch, groups: Sequence[Sequence[Episode]], policy_version: int
    ) -> RolloutBatch:
        """Return the episodes as a batch, one row an episode. `policy_version` is that of the
        engines' weights.
        """
        return collect_episode_batch(prompts, groups, self.tokenizer, policy_version)

    def judge(
        self,
        episodes: Sequence[Episode],
        samples: Sequence[RewardSample],
        score: ScoreSamples,
    ) -> list[RewardResult]:
        """Return the reward of each episode. `samples` are what the scorers of the section `reward`
        read, and `score` asks them, for those episodes alone in which they have a say.
        """
        asked = [
            place for place, episode in enumerate(episodes) if needs_scorers(episode, self.weights)
        ]
        found: list[RewardResult | None] = [None] * len(episodes)
        if asked:
            results = score([samples[place] for place in asked])
            for place, result in zip(asked, results, strict=True):
                found[place] = result
        return judge_episodes(episodes, found, self.weights)

    def _check_error_rate(self, episodes: Sequence[Episode]) -> None:
        """Raise EpisodeErrorRateError where too many episodes failed through no fault of the
        policy; the message has the most frequent error.
        """
        failed = [
            episode
            for episode in episodes
            if not episode.is_scored and episode.end not in ("aborted",)
        ]
        if not failed or len(failed) / len(episodes) <= self.max_error_rate:
            return
        ends = ", ".join(
            f"{count} {end}" for end, count in Counter(one.end for one in failed).most_common()
        )
        errors = Counter(episode.error for episode in failed if episode.error)
        most = errors.most_common(1)[0][0] if errors else "none told an error"
        raise EpisodeErrorRateError(
            f"{len(failed)} of {len(episodes)} episodes failed ({ends}), which is more than"
            f" reward.max_error_rate ({self.max_error_rate:g}), and the policy is not to blame."
            f" The most frequent error (all: {self.log_path}):\n{most}\nCorrect the environment, or"
            " raise reward.max_error_rate."
        )


def make_episode_settings(
    environment: EnvironmentConfig, data: DataConfig, run_seed: int
) -> EpisodeSettings:
    """Return what holds for all episodes of a run."""
    assert environment.name is not None, "the run has episodes"
    return EpisodeSettings(
        environment.name,
        environment.params,
        EpisodeLimits(
            environment.max_turns,
            compute_episode_tokens(environment, data),
            data.max_response_length,
            data.max_prompt_length,
        ),
        environment.timeout_s,
        environment.max_concurrent,
        run_seed,
    )


def make_episode_workers(
    rollout: RolloutConfig,
    model: ModelConfig,
    data: DataConfig,
    run_dir: Path,
    row_environments: Sequence[NamedEnvironment] = (),
) -> EpisodeWorkerPool:
    """Return the pool of a run's workers, not started. `row_environments`: those that rows name
    beside the run's own.
    """
    environment = rollout.environment
    dialogue: dict[str, Any] = {
        "tokenizer_path": model.tokenizer_path or model.path,
        "model_path": model.path,
        "stop": list(rollout.stop),
        # the settings of `data` that say how messages become text
        "data": {
            "apply_chat_template": data.apply_chat_template,
            "apply_chat_template_kwargs": dict(data.apply_chat_template_kwargs),
            "system_prompt": data.system_prompt,
            "add_special_tokens": data.add_special_tokens,
        },
    }
    named: list[dict[str, Any]] = [
        {"name": environment.name, "params": environment.params, "key": "rollout.environment"}
    ]
    # one of a name is made as a trial: rows have been checked, and may be many
    of_rows = {row_environment.name: row_environment for row_environment in row_environments}
    named += [
        {"name": one.name, "params": dict(one.params), "key": one.key} for one in of_rows.values()
    ]
    return EpisodeWorkerPool(named, dialogue, environment.num_workers, run_dir / WORKER_LOG)


def make_episode_runner(
    fleet: EngineFleet,
    pool: EpisodeWorkerPool,
    settings: EpisodeSettings,
    is_deterministic: bool,
) -> EpisodeRunner:
    """Return what runs the episodes: in lock-step for a deterministic run, else freely."""
    if is_deterministic:
        return LockStepEpisodeRunner(fleet, pool, settings)
    return FreeEpisodeRunner(fleet, pool, settings)
