"""`generate` and `evaluate` of a model that talks with an environment: whole episodes in place of
single answers, by the same workers, seeds and limits as in a run's own evaluations.

A row has, beside the last answer of each episode as its response, the column `episodes`:

    {"end": "done", "status": "ok", "reward": 1.0, "turn_rewards": [], "num_turns": 3,
     "messages": [{"role": "user", "content": "?"}, ...]}

`reward` is the environment's own, null where it leaves the episode to scorers; an episode that does
not count has a status "masked:<why>" with an "error".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from rlhf_megatron.agents.episode_batch import decode_last_answer
from rlhf_megatron.agents.episode_book import GroupSize
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.row_environments import list_row_environments
from rlhf_megatron.agents.run_episodes import (
    make_episode_runner,
    make_episode_settings,
    make_episode_workers,
)
from rlhf_megatron.config.rules.batch_rules import compute_episode_tokens
from rlhf_megatron.config.schema import DataConfig
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.data.prompt_items import make_prompt_batch
from rlhf_megatron.jobs.generation.answer_file import AnswerFile, digest_texts
from rlhf_megatron.jobs.generation.answer_generation_job import STEP, AnswerGenerationJob
from rlhf_megatron.jobs.generation.answer_progress import ProgressReporter
from rlhf_megatron.jobs.generation.context_limit import find_context_limit
from rlhf_megatron.jobs.generation.model_source import ServedWeights
from rlhf_megatron.rewards.scorers.reward_types import MASKED, OK, TIMEOUT
from rlhf_megatron.rollout.engine_interface import GeneratedSample
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.rollout_requests import make_sampling_params

WINDOW_PROMPTS = 256  # whose episodes are run in one call, and are in memory


@dataclass(frozen=True)
class EpisodeJob(AnswerGenerationJob):
    """A checked job that runs episodes for prompts; `run` does the work."""

    keeps_messages: ClassVar[bool] = True
    data: DataConfig = field(default_factory=DataConfig)

    @classmethod
    def from_settings(
        cls,
        setup: EngineSetup,
        data: DataConfig,
        served_weights: ServedWeights,
        split: str,
        output_path: Path,
        writes_tokens: bool = False,
        overwrite: bool = False,
    ) -> EpisodeJob:
        """Return a job with the prompts of a configuration; see `AnswerGenerationJob.from_config`.
        Raise ValueError where the model's context has no room for an episode, and for an
        environment that a row names wrongly.
        """
        job = cls.from_config(
            setup, data, None, False, served_weights, split, output_path, writes_tokens, overwrite
        )
        assert isinstance(job, EpisodeJob), "the class makes its own"
        limit = find_context_limit(served_weights.model.hf_config, setup.rollout)
        longest = max(len(item.prompt_ids) for item in job.items)
        max_tokens = compute_episode_tokens(setup.rollout.environment, data)
        if limit is not None and longest + max_tokens > limit.num_tokens:
            raise ValueError(
                f"rollout.environment.max_tokens is {max_tokens}, but {limit} leaves"
                f" {limit.num_tokens - longest} tokens behind the longest prompt, which has"
                f" {longest}; lower it to that."
            )
        list_row_environments(job.items, setup.trainer.deterministic)
        return replace(job, data=data)

    def make_fingerprint(self) -> dict[str, Any]:
        """Return everything that the episodes depend on, besides the bytes of the weights."""
        environment = self.setup.rollout.environment
        counted = {
            name: value
            for name, value in asdict(environment).items()
            if name not in ("num_workers", "max_concurrent", "reward_weight", "scorer_weight")
        }
        # beside the prompts: an environment reads the whole row
        rows = [json.dumps([item.chat, item.label, item.source, item.extra]) for item in self.items]
        return super().make_fingerprint() | {"environment": counted, "rows": digest_texts(rows)}

    def _generate_missing_answers(
        self, sync: WeightSync, answers: AnswerFile, report: Callable[[str], None]
    ) -> dict[str, float]:
        """Run the episodes that the file lacks, window by window, and append each row as its group
        is whole. Return the figures of this call.
        """
        rollout = self.setup.rollout
        environments = list_row_environments(self.items, self.setup.trainer.deterministic)
        pace = ProgressReporter(self.num_rows - len(answers.answered_indices), report)
        stops = self.tokenizer.make_stop_token_ids(rollout.stop)
        params = make_sampling_params(rollout.val_kwargs, self.max_response_length, stops)
        data = replace(self.data, max_response_length=self.max_response_length)
        settings = make_episode_settings(rollout.environment, data, self.setup.trainer.seed)
        size = GroupSize(rollout.val_kwargs.n, rollout.val_kwargs.n)
        with make_episode_workers(
            rollout, self.setup.model, data, answers.job_folder, environments
        ) as workers:
            workers.start()
            runner = make_episode_runner(
                sync.fleet, workers, settings, self.setup.trainer.deterministic
            )
            for start in range(0, self.num_rows, WINDOW_PROMPTS):
                prompts = make_prompt_batch(self.items[start : start + WINDOW_PROMPTS], start)
                answered_rows = [
                    row for row in range(len(prompts)) if start + row in answers.answered_indices
                ]
                known: dict[int, list[Episode]] = {row: [] for row in answered_rows}

                def append_groups(
                    groups: Sequence[tuple[int, list[Episode]]], first_row: int = start
                ) -> None:
                    """Append the rows of prompts whose episodes have all ended."""
                    for row, episodes in groups:
                        answers.append(self.make_episode_row(first_row + row, episodes))
                        pace.count_prompt([one.num_sampled_tokens for one in episodes])

                if len(known) < len(prompts):
                    runner.run_episodes(
                        prompts, size, params, STEP, known, append_groups, lambda text: None
                    )
        return pace.collect_figures()

    def make_answer_row(
        self, prompt_number: int, group: Sequence[GeneratedSample]
    ) -> dict[str, Any]:
        """Raise AssertionError: rows of this job are made by `make_episode_row`."""
        raise AssertionError("an episode is no single answer")

    def make_episode_row(self, prompt_number: int, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return the row of the file for a prompt and its episodes."""
        item = self.items[prompt_number]
        row: dict[str, Any] = {
            "index": prompt_number,
            "source": item.source,
            "prompt": item.prompt,
            "answer": item.label,
            "responses": [decode_last_answer(episode, self.tokenizer) for episode in episodes],
            "finish_reasons": [
                episode.turns[-1].finish_reason if episode.turns else "abort"
                for episode in episodes
            ],
            "num_tokens": [episode.num_sampled_tokens for episode in episodes],
            "episodes": [describe_episode(episode) for episode in episodes],
        }
        if item.extra:
            row["extra"] = item.extra
        if self.writes_tokens:
            row["token_ids"] = [episode.token_ids.tolist() for episode in episodes]
            row["log_probs"] = [episode.log_probs.tolist() for episode in episodes]
            row["turn_spans"] = [
                [[turn.begin, turn.end] for turn in episode.turns] for episode in episodes
            ]
        return row


def describe_episode(episode: Episode) -> dict[str, Any]:
    """Return what a row says of an episode; see the module."""
    status = OK
    if not episode.is_scored:
        status = MASKED + episode.end
    elif episode.is_policy_timeout:
        status = TIMEOUT
    described: dict[str, Any] = {
        "end": episode.end,
        "status": status,
        "reward": episode.reward,
        "turn_rewards": list(episode.turn_rewards),
        "num_turns": len(episode.turns),
        "messages": json.loads(episode.messages or "[]"),
    }
    if episode.error:
        described["error"] = episode.error
    return described


def summarize_episodes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines on the episodes of a file: turns, and how they ended; none for a file without
    episodes.
    """
    episodes = [one for row in rows for one in row.get("episodes") or ()]
    if not episodes:
        return []
    ends: dict[str, int] = {}
    for one in episodes:
        ends[one["end"]] = ends.get(one["end"], 0) + 1
    num_turns = sum(one["num_turns"] for one in episodes)
    shares = ", ".join(
        f"{end} {count / len(episodes):.1%}"
        for end, count in sorted(ends.items(), key=lambda item: -item[1])
    )
    return [
        f"{len(episodes)} episodes of {num_turns / len(episodes):.2f} turns on average; ends:"
        f" {shares}"
    ]
