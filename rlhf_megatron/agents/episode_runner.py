"""Runs the episodes of a step: each turn is a request of its own to the engines. Only here do
episodes meet versions, seeds, retries and aborts, which the session knows.

Freely: every episode goes on as soon as its turn has come. In lock-step, for deterministic runs: a
piece of whole groups at a time, whose live episodes take each turn together, so that what an engine
decodes together depends on seeds and answers alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlhf_megatron.agents.episode_book import EpisodeBook, EpisodeSettings, GroupSize, LiveEpisode
from rlhf_megatron.agents.episode_messages import DeliverTurn, RequestTurn
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.generation_session import GenerationSession
from rlhf_megatron.rollout.fleet.request_balancer import EnginePreference
from rlhf_megatron.rollout.group_columns import make_plain_version_spans

MEND_S = 1.0  # between looks at engines that were started again
WAIT_S = 0.05  # for workers, where no turn is under way
PIECE_GROUPS = 16  # of a piece in lock-step

RecordGroups = Callable[[Sequence[tuple[int, list[Episode]]]], None]
"""Called with (row of the prompt, episodes) of groups that are whole."""


class EpisodeRunner(Protocol):
    """Runs episodes for prompts."""

    def run_episodes(
        self,
        prompts: PromptBatch,
        group_size: GroupSize,
        params: SamplingParams,
        step: int,
        known_groups: Mapping[int, list[Episode]],
        record_groups: RecordGroups,
        report_progress: Callable[[str], object],
    ) -> list[list[Episode]]:
        """Return the episodes of each prompt, in order. `params`: how turns are
        sampled; each has a limit of its own. `step` is a part of the seeds. `known_groups`, by row,
        were finished before. Raise EngineError where engines fail for good, ValueError where
        workers do.
        """


class FreeEpisodeRunner:
    """Runs each episode by itself, over one session of the fleet."""

    def __init__(
        self, fleet: EngineFleet, pool: EpisodeWorkerPool, settings: EpisodeSettings
    ) -> None:
        """Take the engines and the workers."""
        self._fleet = fleet
        self._pool = pool
        self._settings = settings

    def run_episodes(
        self,
        prompts: PromptBatch,
        group_size: GroupSize,
        params: SamplingParams,
        step: int,
        known_groups: Mapping[int, list[Episode]],
        record_groups: RecordGroups,
        report_progress: Callable[[str], object],
    ) -> list[list[Episode]]:
        """Run the episodes; see `EpisodeRunner`."""
        rows = [row for row in range(len(prompts)) if row not in known_groups]
        session = self._fleet.open_session(keeps_failures=True, keeps_finished_calls=True)
        self._pool.notify = session.wake_poll
        with session:
            turns = _SessionTurns(session, params)
            book = EpisodeBook(
                self._pool,
                self._settings,
                prompts,
                group_size,
                step,
                turns.submit_turn,
                turns.abort_turn,
                turns.measure_running_turn,
            )
            turns.book = book
            book.plan_rows(rows)
            recorder = _GroupRecorder(book, rows, record_groups, report_progress)
            mended_at = time.monotonic()
            try:
                while not book.is_finished:
                    self._fleet.check_stop()
                    book.start_waiting_episodes()
                    turns.deliver_finished_turns()
                    book.handle_worker_events()
                    book.check_time_limits()
                    recorder.record_whole_groups()
                    if time.monotonic() - mended_at > MEND_S:
                        session.mend_engines()
                        mended_at = time.monotonic()
            except BaseException:
                book.abort_all()
                raise
            recorder.record_whole_groups()
        found = dict(zip(rows, book.collect_groups(rows), strict=True))
        groups = {**known_groups, **found}
        return [groups[row] for row in range(len(prompts))]


class _SessionTurns:
    """The turns that a session has under way, by the keys of their episodes."""

    def __init__(self, session: GenerationSession, params: SamplingParams) -> None:
        """Send turns to this session, sampled with `params`."""
        self.book: EpisodeBook
        self._session = session
        self._params = params
        self._environment_seconds: dict[int, float] = {}
        # where the former turn of an episode was generated
        self._preference_by_key: dict[int, EnginePreference | None] = {}

    def submit_turn(self, episode: LiveEpisode, request: RequestTurn) -> None:
        """Send the turn that a worker asks for to the engines."""
        key = episode.key
        self._environment_seconds[key] = time.monotonic() - episode.environment_since
        ids = episode.tokens.append_prompt(request.new_ids)
        seed = self.book.derive_turn_seed(episode)
        params = replace(self._params, max_new_tokens=request.max_new_tokens)
        self._session.submit_requests(
            key, [GenerateRequest(ids, (seed,), params)], self._preference_by_key.get(key)
        )

    def abort_turn(self, episode: LiveEpisode) -> None:
        """Abort the turn of an episode that is ended, where it has one under way."""
        if self._environment_seconds.pop(episode.key, None) is not None:
            self._session.abort_keys([episode.key])
        self._preference_by_key.pop(episode.key, None)

    def measure_running_turn(self, episode: LiveEpisode) -> float:
        """Return the seconds that an episode's turn has spent at an engine so far."""
        return self._session.measure_engine_seconds(episode.key)

    def deliver_finished_turns(self) -> None:
        """Hand the turns that have come to their episodes' workers, and end the episodes whose
        turns no engine could generate. Wait a moment for turns or for workers.
        """
        for key, groups in self._session.poll_finished():
            call = self._session.take_finished_call(key)
            environment_s = self._environment_seconds.pop(key)
            episode = self.book.live[key]
            [[sample]] = groups
            self._preference_by_key[key] = call.engine
            deliver_turn(episode, sample, call.engine_seconds, environment_s)
        for key, error in self._session.take_failures():
            self._environment_seconds.pop(key, None)
            failed = self.book.live.get(key)
            if failed is not None:  # else its group has closed with the failure before
                self.book.end_episode(failed, "engine_failed", str(error))


@dataclass(frozen=True)
class _TakenTurn:
    """A turn of an episode in lock-step."""

    prompt_ids: tuple[int, ...]
    sample: GeneratedSample
    engine_seconds: float


class LockStepEpisodeRunner:
    """Runs a piece of whole groups at a time, and lets its live episodes take each turn together.
    The pieces follow from the number of prompts alone, so that a resumed run cuts the same ones.
    """

    def __init__(
        self, fleet: EngineFleet, pool: EpisodeWorkerPool, settings: EpisodeSettings
    ) -> None:
        """Take the engines and the workers."""
        self._fleet = fleet
        self._pool = pool
        self._settings = settings

    def run_episodes(
        self,
        prompts: PromptBatch,
        group_size: GroupSize,
        params: SamplingParams,
        step: int,
        known_groups: Mapping[int, list[Episode]],
        record_groups: RecordGroups,
        report_progress: Callable[[str], object],
    ) -> list[list[Episode]]:
        """Run the episodes; see `EpisodeRunner`. A piece of which a group is not known runs as a
        whole, since the answers of its episodes depend on each other.
        """
        groups: dict[int, list[Episode]] = {}
        for first in range(0, len(prompts), PIECE_GROUPS):
            rows = range(first, min(first + PIECE_GROUPS, len(prompts)))
            if all(row in known_groups for row in rows):
                groups |= {row: known_groups[row] for row in rows}
                continue
            piece = self._run_piece(prompts, rows, group_size, params, step)
            record_groups(list(zip(rows, piece, strict=True)))
            groups |= zip(rows, piece, strict=True)
            report_progress(f"generate, {len(groups)} of {len(prompts)} groups of episodes")
        return [groups[row] for row in range(len(prompts))]

    def _run_piece(
        self,
        prompts: PromptBatch,
        rows: Sequence[int],
        group_size: GroupSize,
        params: SamplingParams,
        step: int,
    ) -> list[list[Episode]]:
        """Run the episodes of these prompts, turn by turn."""
        requests: dict[int, RequestTurn] = {}
        taken_turns: dict[int, list[_TakenTurn]] = {}  # by the keys of their episodes

        def note_request(episode: LiveEpisode, request: RequestTurn) -> None:
            """Keep a request until all live episodes have one. An episode that has started again
            gets the turns that it has had, so that the others are not decoded with another set.
            """
            turns = taken_turns.get(episode.key, [])
            number = len(episode.tokens.turns)
            if number < len(turns):
                taken = turns[number]
                if episode.tokens.append_prompt(request.new_ids) == taken.prompt_ids:
                    deliver_turn(episode, taken.sample, taken.engine_seconds, 0.0)
                    return
                del turns[number:]  # the environment says something else than before
            requests[episode.key] = request

        def drop_request(episode: LiveEpisode) -> None:
            """Forget the request of an episode that is ended."""
            requests.pop(episode.key, None)

        book = EpisodeBook(
            self._pool,
            # all of a piece are live together, whatever the limit says
            replace(self._settings, max_concurrent=len(rows) * group_size.num_episodes),
            prompts,
            group_size,
            step,
            note_request,
            drop_request,
            max_alone=None,
        )
        self._pool.notify = lambda: None
        book.plan_rows(rows)
        try:
            while not book.is_finished:
                self._fleet.check_stop()
                book.start_waiting_episodes()
                book.handle_worker_events()
                book.check_time_limits()
                if book.live and len(requests) == len(book.live) and not book.waiting:
                    self._take_turn(book, requests, taken_turns, params)
                else:
                    time.sleep(WAIT_S / 10)
        except BaseException:
            book.abort_all()
            raise
        return book.collect_groups(rows)

    def _take_turn(
        self,
        book: EpisodeBook,
        turn_requests: dict[int, RequestTurn],
        taken_turns: dict[int, list[_TakenTurn]],
        params: SamplingParams,
    ) -> None:
        """Generate the next turn of all live episodes in one call, in the order of their keys, and
        add the turns to `taken_turns`.
        """
        episodes = [book.live[key] for key in sorted(turn_requests)]
        ordered = [turn_requests[episode.key] for episode in episodes]
        turn_requests.clear()
        began = time.monotonic()
        requests = [
            GenerateRequest(
                episode.tokens.append_prompt(request.new_ids),
                (book.derive_turn_seed(episode),),
                replace(params, max_new_tokens=request.max_new_tokens),
            )
            for episode, request in zip(episodes, ordered, strict=True)
        ]
        generated = self._fleet.generate(requests)
        engine_s = time.monotonic() - began
        for episode, request, [sample] in zip(episodes, requests, generated, strict=True):
            turn = _TakenTurn(request.prompt_ids, sample, engine_s)
            taken_turns.setdefault(episode.key, []).append(turn)
            deliver_turn(episode, sample, engine_s, began - episode.environment_since)


class _GroupRecorder:
    """Hands whole groups on as they come."""

    def __init__(
        self,
        book: EpisodeBook,
        rows: Sequence[int],
        record_groups: RecordGroups,
        report_progress: Callable[[str], object],
    ) -> None:
        """Watch the groups of these rows."""
        self._book = book
        self._open_rows = list(rows)
        self._num_rows = len(rows)
        self._record_groups = record_groups
        self._report_progress = report_progress
        self._num_seen = 0

    def record_whole_groups(self) -> None:
        """Record the groups that have become whole since the last call."""
        if len(self._book.finished) == self._num_seen:
            return
        self._num_seen = len(self._book.finished)
        whole = [row for row in self._open_rows if self._book.is_row_finished(row)]
        if whole:
            self._open_rows = [row for row in self._open_rows if row not in set(whole)]
            self._record_groups(list(zip(whole, self._book.collect_groups(whole), strict=True)))
        num_done = self._num_rows - len(self._open_rows)
        self._report_progress(
            f"generate, {num_done} of {self._num_rows} groups, {self._num_seen} episodes"
        )


def deliver_turn(
    episode: LiveEpisode, sample: GeneratedSample, engine_s: float, environment_s: float
) -> None:
    """Add a turn to its episode, and send it to the episode's worker. A worker that is gone is
    noticed by its end.
    """
    episode.tokens.append_turn(sample, engine_s, environment_s)
    episode.environment_since = time.monotonic()
    episode.awaits_turn = False
    assert episode.worker is not None
    episode.worker.send_order(
        DeliverTurn(
            episode.key,
            episode.attempt,
            [int(token_id) for token_id in sample.token_ids],
            [float(log_prob) for log_prob in sample.log_probs],
            sample.finish_reason,
            sample.policy_version,
            list(make_plain_version_spans(sample)),
        )
    )
