"""The episodes of a step as the controller keeps them: which are to come, which go on, and what
each has ended with. Shared by the two ways of running them, freely and in lock-step.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.agents.episode_messages import (
    CancelEpisode,
    EpisodeEnd,
    EpisodeLimits,
    ReportEpisode,
    RequestTurn,
    StartEpisode,
)
from rlhf_megatron.agents.episode_record import Episode, EpisodeTokens
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool, EpisodeWorkerProcess, WorkerLoss
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.seeds import derive_seed

logger = logging.getLogger(__name__)

CANCEL_S = 5.0  # for code of an episode that is over to come back, else its worker is retired
SILENT_S = 10.0  # of a worker with episodes; it is then taken for lost
BLOCKED_LIMIT_S = 5.0  # async code that keeps a worker's loop so long goes into a worker of its own
ALONE_AFTER_RESTARTS = 2  # restarts from which on an episode has a worker of its own


@dataclass(frozen=True)
class EpisodeSettings:
    """What holds for all episodes of a run."""

    environment: str  # of rows that name none
    params: dict[str, Any]
    limits: EpisodeLimits
    timeout_s: float
    max_concurrent: int
    run_seed: int


@dataclass(frozen=True)
class GroupSize:
    """How many episodes a prompt gets, and with how many its group closes: the rest is aborted."""

    num_episodes: int
    min_group: int


@dataclass(frozen=True)
class EpisodePlace:
    """Which episode of a step: the row of its prompt, and its number in the group."""

    row: int
    number: int


@dataclass(eq=False)
class LiveEpisode:
    """An episode that is to come or goes on."""

    key: int
    place: EpisodePlace
    attempt: int = 0
    worker: EpisodeWorkerProcess | None = None
    tokens: EpisodeTokens = field(default_factory=EpisodeTokens)
    started_at: float = 0.0  # of this attempt
    environment_since: float = 0.0  # since when its environment is at work
    needs_own_worker: bool = False

    @property
    def num_restarts(self) -> int:
        """Return how often the episode was started again."""
        return max(0, self.attempt - 1)


class EpisodeBook:
    """Keeps the episodes of one call: starts them, hears their workers, and notes their ends.

    `on_turn_request(episode, request)` is called for each turn that a worker asks for, and
    `on_end(episode)` before an episode that has a turn under way is ended.
    """

    def __init__(
        self,
        pool: EpisodeWorkerPool,
        settings: EpisodeSettings,
        prompts: PromptBatch,
        group_size: GroupSize,
        step: int,
        on_turn_request: Callable[[LiveEpisode, RequestTurn], None],
        on_end: Callable[[LiveEpisode], None],
        measure_running_turn: Callable[[LiveEpisode], float] = lambda episode: 0.0,
    ) -> None:
        """Plan the episodes of each prompt; none is started yet. `measure_running_turn`
        returns the seconds that the turn under way has spent at an engine.
        """
        self.finished: dict[EpisodePlace, Episode] = {}
        self.live: dict[int, LiveEpisode] = {}
        self.waiting: deque[LiveEpisode] = deque()
        self._pool = pool
        self._settings = settings
        self._prompts = prompts
        self._num_episodes = group_size.num_episodes
        self._min_group = group_size.min_group
        self._step = step
        self._on_turn_request = on_turn_request
        self._on_end = on_end
        self._measure_running_turn = measure_running_turn
        self._num_finished_in_row = [0] * len(prompts)
        # key -> since when the code of an episode that is over has not come back
        self._cancelled_at: dict[int, tuple[EpisodeWorkerProcess, float]] = {}
        self._heard_at: dict[EpisodeWorkerProcess, float] = {}

    def plan_rows(self, rows: Sequence[int]) -> None:
        """Let all episodes of these prompts wait for their start, in order."""
        for row in rows:
            for number in range(self._num_episodes):
                key = row * self._num_episodes + number
                self.waiting.append(LiveEpisode(key, EpisodePlace(row, number)))

    @property
    def is_finished(self) -> bool:
        """Return whether every planned episode has ended."""
        return not self.live and not self.waiting

    def start_waiting_episodes(self) -> None:
        """Start episodes that wait, as long as `max_concurrent` allows."""
        while self.waiting and len(self.live) < self._settings.max_concurrent:
            self._start_episode(self.waiting.popleft())

    def handle_worker_events(self) -> None:
        """Carry out what workers have asked for and reported since the last call."""
        for event in self._pool.take_events():
            if isinstance(event, WorkerLoss):
                self._handle_worker_loss(event.worker, event.cause)
                continue
            worker, report = event
            self._heard_at[worker] = time.monotonic()
            episode = self.live.get(report.key)
            is_current = episode is not None and episode.attempt == report.attempt
            if isinstance(report, ReportEpisode):
                self._cancelled_at.pop(report.key, None)
                if is_current:
                    assert episode is not None
                    self._finish_episode(episode, report)
                self._pool.release_episode(worker, report.key)
            elif not is_current or episode is None:
                continue
            elif isinstance(report, RequestTurn):
                self._on_turn_request(episode, report)
            elif report.seconds > BLOCKED_LIMIT_S and not worker.is_solitary:
                # its async code holds up its neighbours; alone it only holds up itself
                episode.needs_own_worker = True
                self._pool.kill_worker(worker)
                self._handle_worker_loss(worker, f"was held up for {report.seconds:.0f} s")

    def check_time_limits(self) -> None:
        """End episodes that are over their deadline, and workers that do not come back."""
        now = time.monotonic()
        for episode in list(self.live.values()):
            if now - episode.started_at > self._settings.timeout_s:
                self.end_episode(episode, "timeout")
        for key, (worker, cancelled_at) in list(self._cancelled_at.items()):
            if now - cancelled_at > CANCEL_S:
                del self._cancelled_at[key]
                worker.is_retired = True  # one of its threads is lost
                worker.keys.discard(key)
        live_workers = {episode.worker for episode in self.live.values()}
        for live_worker in live_workers:
            if live_worker is None or live_worker.is_solitary:
                continue
            if now - self._heard_at.setdefault(live_worker, now) > SILENT_S:
                self._pool.kill_worker(live_worker)
                self._handle_worker_loss(live_worker, f"reported nothing for {SILENT_S:.0f} s")

    def end_episode(self, episode: LiveEpisode, end: EpisodeEnd, error: str = "") -> None:
        """End an episode from outside: note its end, and tell its worker, which may take a while to
        get its code back.
        """
        worker = episode.worker
        self._finish_episode(
            episode, ReportEpisode(episode.key, episode.attempt, end, None, error=error)
        )
        if worker is not None:
            self._cancelled_at[episode.key] = (worker, time.monotonic())
            worker.send_order(CancelEpisode(episode.key, episode.attempt))

    def abort_all(self) -> None:
        """Forget all episodes that go on or wait, for a call that was interrupted."""
        for episode in list(self.live.values()):
            self.end_episode(episode, "aborted")
        self.waiting.clear()

    def is_row_finished(self, row: int) -> bool:
        """Return whether all episodes of a prompt have ended."""
        return all(
            EpisodePlace(row, number) in self.finished for number in range(self._num_episodes)
        )

    def collect_groups(self, rows: Sequence[int]) -> list[list[Episode]]:
        """Return the finished episodes of these prompts, a list for each."""
        return [
            [self.finished[EpisodePlace(row, number)] for number in range(self._num_episodes)]
            for row in rows
        ]

    def derive_turn_seed(self, episode: LiveEpisode) -> int:
        """Return the seed of the episode's next turn."""
        return derive_seed(
            self._settings.run_seed,
            self._step,
            self._prompts.group_ids[episode.place.row],
            episode.place.number,
            len(episode.tokens.turns),
        )

    def _start_episode(self, episode: LiveEpisode) -> None:
        """Send the episode to a worker."""
        row = episode.place.row
        prompts = self._prompts
        name, params = self._choose_environment(row)
        episode.attempt += 1
        episode.tokens = EpisodeTokens()
        episode.started_at = episode.environment_since = time.monotonic()
        order = StartEpisode(
            episode.key,
            episode.attempt,
            name,
            params,
            self._settings.limits,
            self._settings.timeout_s,
            _read_messages(prompts, row),
            prompts.prompts[row],
            prompts.labels[row],
            prompts.sources[row],
            prompts.extras[row],
            derive_seed(
                self._settings.run_seed, self._step, prompts.group_ids[row], episode.place.number
            ),
            list(prompts.prompt_ids[row]),
        )
        self.live[episode.key] = episode
        is_alone = episode.needs_own_worker or episode.num_restarts >= ALONE_AFTER_RESTARTS
        episode.worker = self._pool.start_episode(order, is_alone)
        self._heard_at.setdefault(episode.worker, time.monotonic())

    def _choose_environment(self, row: int) -> tuple[str, dict[str, Any]]:
        """Return the name and the parameters of the environment of a prompt: those of its column
        `environment`, else those of the settings.
        """
        extra = self._prompts.extras[row]
        named = json.loads(extra).get("environment") if extra else None
        if not isinstance(named, dict):
            return self._settings.environment, self._settings.params
        return str(named["name"]), dict(named.get("params") or {})

    def _handle_worker_loss(self, worker: EpisodeWorkerProcess, cause: str) -> None:
        """Start the episodes of a lost worker again, from their seeds and with a new deadline. An
        episode that was alone in it has ended it: it is not tried again.
        """
        self._heard_at.pop(worker, None)
        for key, (other, _) in list(self._cancelled_at.items()):
            if other is worker:
                del self._cancelled_at[key]
        for episode in [one for one in self.live.values() if one.worker is worker]:
            self._on_end(episode)
            if worker.is_solitary:
                error = f"The worker of this episode alone {cause}; its code has ended the worker."
                self._finish_episode(
                    episode,
                    ReportEpisode(
                        episode.key, episode.attempt, "environment_failed", None, error=error
                    ),
                )
                continue
            del self.live[episode.key]
            episode.worker = None
            self.waiting.appendleft(episode)
        if not worker.is_solitary:
            logger.warning("a worker of %d episodes %s; they start again", len(worker.keys), cause)
        worker.keys.clear()

    def _finish_episode(self, episode: LiveEpisode, report: ReportEpisode) -> None:
        """Note the end of an episode, and abort the rest of its group where the group may close."""
        unfinished_s = self._measure_running_turn(episode) if report.end == "timeout" else 0.0
        self._on_end(episode)
        del self.live[episode.key]
        row = episode.place.row
        token_ids, log_probs, num_prompt = episode.tokens.join_columns(
            self._prompts.prompt_ids[row]
        )
        turn_rewards = tuple(report.turn_rewards)
        self.finished[episode.place] = Episode(
            token_ids,
            log_probs,
            num_prompt,
            tuple(episode.tokens.turns),
            report.end,
            report.reward,
            turn_rewards if len(turn_rewards) == len(episode.tokens.turns) else (),
            dict(report.metrics),
            json.dumps(report.messages, ensure_ascii=False),
            report.error,
            episode.num_restarts,
            time.monotonic() - episode.started_at,
            self._choose_environment(row)[0],
            unfinished_s,
        )
        if report.end == "aborted":
            return
        self._num_finished_in_row[row] += 1
        if self._num_finished_in_row[row] >= self._min_group:
            self._abort_rest_of_group(row)

    def _abort_rest_of_group(self, row: int) -> None:
        """End the episodes of a group that has enough others."""
        for episode in [one for one in self.live.values() if one.place.row == row]:
            self.end_episode(episode, "aborted")
        for episode in [one for one in self.waiting if one.place.row == row]:
            self.waiting.remove(episode)
            episode.started_at = time.monotonic()
            self.live[episode.key] = episode
            self.end_episode(episode, "aborted")


def _read_messages(prompts: PromptBatch, row: int) -> list[dict[str, Any]]:
    """Return the prompt of a row as messages: those of its chat, or its text as one message of the
    user.
    """
    if prompts.chats is not None and prompts.chats[row]:
        messages: list[dict[str, Any]] = json.loads(prompts.chats[row])
        return messages
    return [{"role": "user", "content": prompts.prompts[row]}]
