"""Episodes under test: real worker processes, and engines that answer as a function of prompt and
seed.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from places import MODEL, SUPPORT

from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_messages import EpisodeLimits
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import FreeEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.rollout.engine_interface import (
    EngineError,
    GeneratedSample,
    GenerateRequest,
    SamplingParams,
)
from rlhf_megatron.rollout.fleet.generation_session import FinishedCall

PLUGIN = str(SUPPORT / "faulty_environments.py")
EOS = 1
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


def answer(request: GenerateRequest) -> GeneratedSample:
    """One to four tokens, digits and the end of the turn."""
    draw = random.Random(f"{request.prompt_ids} {request.seeds}")
    room = request.params.max_new_tokens
    ids = [draw.randint(2, 11) for _ in range(draw.randint(1, 3))] + [EOS]
    reason = "stop" if len(ids) <= room else "length"
    ids = ids[:room]
    log_probs = [-draw.random() for _ in ids]
    return GeneratedSample(tuple(ids), tuple(log_probs), reason, 0)  # type: ignore[arg-type]


@dataclass
class Engines:
    """Stands for a fleet, and for its one session. `turn_s`: until a turn has come. Turns of the
    keys in `failing` fail.
    """

    turn_s: Callable[[int, GenerateRequest], float] = lambda key, request: 0.0
    failing: set[int] = field(default_factory=set)
    num_turns: int = 0
    aborted: list[int] = field(default_factory=list)
    on_poll: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._running: dict[int, tuple[float, float, GenerateRequest]] = {}
        self._calls: dict[int, float] = {}
        self._event = threading.Event()

    def check_stop(self) -> None:
        pass

    def open_session(self, **options: bool) -> Engines:
        return self

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self._running.clear()

    def submit_requests(
        self, key: int, requests: Sequence[GenerateRequest], preference: object = None
    ) -> None:
        assert key not in self._running, f"key {key} is running"
        now = time.monotonic()
        [request] = requests
        self._running[key] = (now, now + self.turn_s(key, request), request)

    def poll_finished(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        self.on_poll()
        finished = self._harvest()
        if not finished:
            self._event.wait(self._wait_s())
            self._event.clear()
            finished = self._harvest()
        return finished

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
        return [[answer(request)] for request in requests]

    def take_finished_call(self, key: int) -> FinishedCall:
        return FinishedCall(None, self._calls.pop(key))

    def take_failures(self) -> list[tuple[int, EngineError]]:
        keys = [key for key in self._running if key in self.failing]
        for key in keys:
            del self._running[key]
        return [(key, EngineError("no engine can")) for key in keys]

    def measure_engine_seconds(self, key: int) -> float:
        started_at = self._running[key][0] if key in self._running else time.monotonic()
        return time.monotonic() - started_at

    def abort_keys(self, keys: Collection[int]) -> None:
        for key in keys:
            self.aborted += [key] if self._running.pop(key, None) else []

    def wake_poll(self) -> None:
        self._event.set()

    def mend_engines(self) -> None:
        pass

    def _wait_s(self) -> float:
        now = time.monotonic()
        times = [ready - now for key, (_, ready, _) in self._running.items()]
        return max(0.0, min([*times, 0.05]))

    def _harvest(self) -> list[tuple[int, list[list[GeneratedSample]]]]:
        now = time.monotonic()
        finished = []
        for key, (started, ready, request) in list(self._running.items()):
            if ready <= now and key not in self.failing:
                del self._running[key]
                self._calls[key] = now - started
                self.num_turns += 1
                finished.append((key, [[answer(request)]]))
        return finished


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
