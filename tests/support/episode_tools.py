"""Episodes under test: real worker processes, and engines that answer as a function of prompt and
seed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from places import MODEL, SUPPORT

from benchmarks.episode_engines import Engines
from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_messages import EpisodeLimits
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import FreeEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.rollout.engine_interface import SamplingParams

PLUGIN = str(SUPPORT / "faulty_environments.py")
LIMITS = EpisodeLimits(max_turns=6, max_tokens=100, max_turn_tokens=4, max_prompt_tokens=20)
DIALOGUE = {
    "tokenizer_path": str(MODEL),
    "model_path": str(MODEL),
    "stop": [],
    "data": {
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "system_prompt": None,
        "add_special_tokens": False,
    },
}


def make_prompts(labels: Sequence[Mapping[str, Any]], first_group: int = 0) -> PromptBatch:
    """A row for each label. The label may name the row's environment."""
    extras = [
        json.dumps({"environment": {"name": label["environment"], "params": {}}})
        if "environment" in label
        else ""
        for label in labels
    ]
    count = len(labels)
    return PromptBatch(
        ((16,),) * count,
        ("?",) * count,
        tuple(json.dumps(dict(label)) for label in labels),
        ("games",) * count,
        tuple(range(first_group, first_group + count)),
        tuple(extras),
    )


def make_pool(
    log_path: Path | None, num_workers: int = 2, environment: str = "faulty"
) -> EpisodeWorkerPool:
    """A pool that is started. The caller closes it."""
    entry = {"name": environment, "params": {}, "key": "rollout.environment"}
    pool = EpisodeWorkerPool([entry], DIALOGUE, num_workers, log_path)
    try:
        pool.start()
    except BaseException:
        pool.close()
        raise
    return pool


def run_rows(
    pool: EpisodeWorkerPool,
    labels: Sequence[Mapping[str, Any]],
    *,
    environment: str = "faulty",
    timeout_s: float = 20.0,
    num_episodes: int = 1,
    min_group: int | None = None,
    max_concurrent: int = 64,
    engines: Engines | None = None,
    limits: EpisodeLimits = LIMITS,
    step: int = 0,
    **limit_changes: int,
) -> list[list[Episode]]:
    """The episodes of each row, by the free runner."""
    settings = EpisodeSettings(
        environment, {}, replace(limits, **limit_changes), timeout_s, max_concurrent, 1
    )
    runner = FreeEpisodeRunner(engines or Engines(), pool, settings)  # type: ignore[arg-type]
    return runner.run_episodes(
        make_prompts(labels),
        GroupSize(num_episodes, min_group or num_episodes),
        SamplingParams(4),
        step,
        {},
        lambda groups: None,
        lambda text: None,
    )


def summarize(episode: Episode) -> tuple[Any, ...]:
    """What a restart must not change."""
    return (
        episode.token_ids.tolist(),
        episode.log_probs.tolist(),
        [(turn.begin, turn.end, turn.finish_reason) for turn in episode.turns],
        episode.end,
        episode.reward,
        episode.turn_rewards,
        episode.metrics,
        episode.messages,
        episode.error,
    )
