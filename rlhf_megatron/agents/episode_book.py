"""The episodes of a step as the controller keeps them: which are to come, which go on, and what
each has ended with. Shared by the two ways of running them, freely and in lock-step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.agents.episode_messages import (
    EpisodeEnd,
    EpisodeLimits,
    ReportAlive,
    ReportEpisode,
    ReportRelease,
    RequestTurn,
    StartEpisode,
)
from rlhf_megatron.agents.episode_record import Episode, EpisodeTokens
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool, EpisodeWorkerProcess, WorkerLoss
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.seeds import derive_seed

logger = logging.getLogger(__name__)

SILENT_S = 10.0  # of a worker with episodes; it is then taken for lost
LOOK_S = 0.05  # between two looks at deadlines
AWAY_S = 2.0  # between two looks: whoever looks was kept waiting, and so were others
BLOCKED_WARNING_S = 1.0  # async code that keeps a worker's loop so long is named in the log
BLOCKED_LIMIT_S = 5.0  # async code that keeps a worker's loop so long goes into a worker of its own
ALONE_AFTER_RESTARTS = 2  # restarts from which on an episode has a worker of its own
MAX_ALONE = 32  # workers of one episode at a time, beside those of many


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
    attempt: int = 0  # 0: it has not begun
    num_restarts: int = 0  # because its worker was lost
    worker: EpisodeWorkerProcess | None = None
    tokens: EpisodeTokens = field(default_factory=EpisodeTokens)
    started_at: float = 0.0  # of this attempt
    environment_since: float = 0.0  # since when its environment is at work
    awaits_turn: bool = False  # its worker has asked for a turn of the policy
    needs_own_worker: bool = False  # its code has held up a worker of many


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
        max_alone: int | None = MAX_ALONE,
    ) -> None:
        """Plan the episodes of each prompt; none is started yet. `measure_running_turn`
        returns the seconds that the turn under way has spent at an engine. `max_alone`: workers of
        one episode at a time; None: as many as are needed, for episodes that wait for each other.
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
        self._max_alone = max_alone
        self._num_scored_in_row = [0] * len(prompts)
        self._looked_at = time.monotonic()
        self._warned_environments: set[str] = set()

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
        """Start episodes that wait, as long as `max_concurrent` allows, and end those of rows in
        quarantine. Episodes that need a worker of their own wait for one while others start.
        """
        if not self.waiting or len(self.live) >= self._settings.max_concurrent:
            return
        postponed: list[LiveEpisode] = []
        num_alone = self._pool.count_solitary_workers()
        while self.waiting and len(self.live) < self._settings.max_concurrent:
            episode = self.waiting.popleft()
            error = self._pool.quarantined_rows.get(self._identify_row(episode.place.row))
            if error is not None:
                self.live[episode.key] = episode
                episode.started_at = time.monotonic()
                self.end_episode(episode, "environment_failed", error)
            elif not _is_alone(episode):
                self._start_episode(episode)
            elif self._max_alone is None or num_alone < self._max_alone:
                num_alone += 1
                self._start_episode(episode)
            else:
                postponed.append(episode)
        self.waiting.extendleft(reversed(postponed))

    def handle_worker_events(self) -> None:
        """Carry out what workers have asked for and reported since the last call."""
        for event in self._pool.take_events():
            if isinstance(event, WorkerLoss):
                self._handle_worker_loss(event)
                continue
            worker, report = event
            if isinstance(report, ReportRelease):
                self._pool.release_attempt(worker, report.attempt, report.is_clean)
            elif isinstance(report, ReportAlive):
                self._handle_blocked_loop(worker, report)
            else:
                self._handle_report(worker, report)

    def check_time_limits(self) -> None:
        """End episodes that are over their deadline, and workers that do not come back. Most calls
        return at once.
        """
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        for episode in list(self.live.values()):
            if self.live.get(episode.key) is not episode:
                continue  # ended with its group
            if now - episode.started_at > self._settings.timeout_s:
                self._end_late_episode(episode)
        self._pool.retire_stuck_workers()
        was_away = now - self._looked_at > AWAY_S
        self._looked_at = now
        for worker in {episode.worker for episode in self.live.values()} - {None}:
            assert worker is not None
            if was_away:
                worker.heard_at = max(worker.heard_at, now - AWAY_S)
            if not worker.is_solitary and now - worker.heard_at > SILENT_S:
                self._lose_worker(worker, f"reported nothing for {SILENT_S:.0f} s")

    def _end_late_episode(self, episode: LiveEpisode) -> None:
        """End an episode that is over its deadline. Where the code of another one holds up its
        worker, all of the worker's episodes start again.
        """
        worker = episode.worker
        if worker is None or worker.is_solitary or not worker.is_held_up:
            self.end_episode(episode, "timeout")
        elif worker.is_silent:
            self._lose_worker(worker, "reported nothing at the deadline of an episode")
        elif worker.alive_report.attempt == episode.attempt:
            self.end_episode(episode, "timeout")
        else:
            self._lose_held_up_worker(worker, worker.alive_report)

    def end_episode(self, episode: LiveEpisode, end: EpisodeEnd, error: str = "") -> None:
        """End an episode from outside: note its end, and tell its worker, which may take a while to
        get its code back.
        """
        if episode.worker is not None:
            self._pool.cancel_attempt(episode.worker, episode.key, episode.attempt)
        self._finish_episode(
            episode, ReportEpisode(episode.key, episode.attempt, end, None, error=error)
        )

    def abort_all(self) -> None:
        """Forget all episodes that go on or wait, for a call that was interrupted."""
        for episode in self.live.values():
            if episode.worker is not None:
                self._pool.cancel_attempt(episode.worker, episode.key, episode.attempt)
        self.live.clear()
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
        episode.attempt = self._pool.make_attempt_number()
        episode.started_at = episode.environment_since = time.monotonic()
        order = StartEpisode(
            episode.key,
            episode.attempt,
            name,
            params,
            self._settings.limits,
            episode.started_at + self._settings.timeout_s,
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
        episode.worker = self._pool.start_episode(order, _is_alone(episode))

    def _handle_report(
        self, worker: EpisodeWorkerProcess, report: RequestTurn | ReportEpisode
    ) -> None:
        """Carry out a request for a turn, or note an end. A request that no episode makes, such as
        a second one at a time, has another author than the worker: user code shares its process.
        """
        episode = self.live.get(report.key)
        if isinstance(report, ReportEpisode):
            self._pool.mark_over(worker, report.attempt)
        if episode is None or episode.attempt != report.attempt or episode.worker is not worker:
            return  # it is over
        if isinstance(report, ReportEpisode):
            self._finish_episode(episode, report)
        elif episode.awaits_turn or not _is_valid_request(report, self._settings.limits):
            self._lose_worker(worker, "was ended because it asked for a turn that cannot be")
        else:
            episode.awaits_turn = True
            self._on_turn_request(episode, report)

    def _handle_blocked_loop(self, worker: EpisodeWorkerProcess, report: ReportAlive) -> None:
        """End a worker whose episodes are held up by async code. An episode alone only holds up
        itself.
        """
        if worker.is_solitary or (report.attempt is None and report.blocked_s < SILENT_S):
            return
        if report.blocked_s > BLOCKED_WARNING_S:
            for episode in self._find_blocking_episodes(worker, report):
                self._warn_of_blocking_code(episode, report.blocked_s)
        if report.blocked_s > BLOCKED_LIMIT_S:
            self._lose_held_up_worker(worker, report)

    def _lose_held_up_worker(self, worker: EpisodeWorkerProcess, report: ReportAlive) -> None:
        """End a worker that is held up; the episode to blame goes into a worker of its own."""
        for episode in self._find_blocking_episodes(worker, report):
            episode.needs_own_worker = True
        self._lose_worker(worker, f"was held up for {report.blocked_s:.0f} s by async code")

    def _find_blocking_episodes(
        self, worker: EpisodeWorkerProcess, report: ReportAlive
    ) -> list[LiveEpisode]:
        """Return the episode whose code holds up a worker; none where the code is of an episode
        that is over.
        """
        return [
            episode
            for episode in self.live.values()
            if episode.worker is worker and episode.attempt == report.attempt
        ]

    def _warn_of_blocking_code(self, episode: LiveEpisode, seconds: float) -> None:
        """Log, once for each environment, that its async code holds up other episodes."""
        name, _ = self._choose_environment(episode.place.row)
        if name not in self._warned_environments:
            self._warned_environments.add(name)
            logger.warning(
                "async code of the environment %s has kept %.1f s from the other episodes of its"
                " worker; make it a plain function, which runs in a thread, or await what it waits"
                " for.",
                name,
                seconds,
            )

    def _identify_row(self, row: int) -> str:
        """Return what makes two rows the same, in all steps of a run."""
        prompts = self._prompts
        parts = [prompts.prompts[row], prompts.labels[row], prompts.extras[row]]
        parts += [prompts.chats[row]] if prompts.chats else []
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def _choose_environment(self, row: int) -> tuple[str, dict[str, Any]]:
        """Return the name and the parameters of the environment of a prompt: those of its column
        `environment`, else those of the settings.
        """
        extra = self._prompts.extras[row]
        named = json.loads(extra).get("environment") if extra else None
        if not isinstance(named, dict):
            return self._settings.environment, self._settings.params
        return str(named["name"]), dict(named.get("params") or {})

    def _lose_worker(self, worker: EpisodeWorkerProcess, cause: str) -> None:
        """End a worker, and handle its loss."""
        self._pool.kill_worker(worker)
        self._handle_worker_loss(WorkerLoss(worker, cause))

    def _handle_worker_loss(self, loss: WorkerLoss) -> None:
        """Start the episodes of a lost worker again, from their seeds and with a new deadline. An
        episode that was alone in it has ended it: neither it nor its row is tried again.
        """
        worker = loss.worker
        episodes = [one for one in self.live.values() if one.worker is worker]
        for episode in episodes:
            if self.live.get(episode.key) is not episode:
                continue  # ended with its group
            if worker.is_solitary and loss.is_own_doing:
                self._quarantine_row(episode, loss.cause)
            else:
                self._plan_restart(episode, loss.is_own_doing)
        if episodes and not worker.is_solitary:
            logger.warning(
                "a worker of %d episodes %s; they start again", len(episodes), loss.cause
            )
        worker.attempts.clear()

    def _plan_restart(self, episode: LiveEpisode, is_counted: bool) -> None:
        """Let an episode wait for another start. `is_counted`: its code may have ended its
        worker.
        """
        self._on_end(episode)
        del self.live[episode.key]
        episode.worker = None
        episode.tokens = EpisodeTokens()
        episode.awaits_turn = False
        episode.num_restarts += is_counted
        self.waiting.appendleft(episode)

    def _quarantine_row(self, episode: LiveEpisode, cause: str) -> None:
        """End an episode whose code has ended a worker of its own, and try its row no more."""
        name, _ = self._choose_environment(episode.place.row)
        error = (
            f"The worker of this episode alone {cause}; the code of the environment {name} has"
            " ended the worker. The row is not tried again in this run."
        )
        self._pool.quarantined_rows[self._identify_row(episode.place.row)] = error
        logger.warning("the row %.60r: %s", self._prompts.prompts[episode.place.row], error)
        episode.worker = None
        self.end_episode(episode, "environment_failed", error)

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
        if self.finished[episode.place].is_scored:
            self._num_scored_in_row[row] += 1
            if self._num_scored_in_row[row] == self._min_group:
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


def _is_alone(episode: LiveEpisode) -> bool:
    """Return whether an episode has, or is to have, a worker of its own."""
    return episode.needs_own_worker or episode.num_restarts >= ALONE_AFTER_RESTARTS


def _is_valid_request(request: RequestTurn, limits: EpisodeLimits) -> bool:
    """Return whether a worker may ask for this turn."""
    return (
        1 <= request.max_new_tokens <= limits.max_turn_tokens
        and len(request.new_ids) <= limits.max_prompt_tokens + limits.max_tokens
        and min(request.new_ids, default=0) >= 0
    )


def _read_messages(prompts: PromptBatch, row: int) -> list[dict[str, Any]]:
    """Return the prompt of a row as messages: those of its chat, or its text as one message of the
    user.
    """
    if prompts.chats and prompts.chats[row]:
        messages: list[dict[str, Any]] = json.loads(prompts.chats[row])
        return messages
    return [{"role": "user", "content": prompts.prompts[row]}]
