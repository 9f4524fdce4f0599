"""Episodes freely and in lock-step: the same episodes, whole pieces, and what ends a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from episode_tools import LIMITS, PLUGIN, Engines, make_pool, make_prompts, run_rows, summarize

from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import PIECE_GROUPS, LockStepEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.rollout.engine_interface import GeneratedSample, GenerateRequest, SamplingParams
from rlhf_megatron.rollout.fleet.generation_session import FinishedCall
from rlhf_megatron.rollout.fleet.request_balancer import EnginePreference
from rlhf_megatron.stop import RunStopped


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodeWorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rlhf_megatron.rewards.service.worker_processes.list_loaded_plugins", lambda: [PLUGIN]
        )
        started = make_pool(tmp_path_factory.mktemp("log") / "environments.log")
    with started:
        yield started


@dataclass
class CountingEngines(Engines):
    """Engines that note their calls, and which may stop the run at one of them."""

    calls: list[list[GenerateRequest]] = field(default_factory=list)
    preferences: list[tuple[int, object]] = field(default_factory=list)
    stop_at_look: int = 10**9
    num_looks: int = 0

    def check_stop(self) -> None:
        self.num_looks += 1
        if self.num_looks > self.stop_at_look:
            raise RunStopped("asked to")

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[GeneratedSample]]:
        self.calls.append(list(requests))
        return super().generate(requests)

    def submit_requests(
        self, key: int, requests: Sequence[GenerateRequest], preference: object = None
    ) -> None:
        self.preferences.append((key, preference))
        super().submit_requests(key, requests, preference)

    def take_finished_call(self, key: int) -> FinishedCall:
        seconds = super().take_finished_call(key).engine_seconds
        return FinishedCall(EnginePreference(f"engine{key % 2}", 7), seconds)


def run_in_lock_step(
    pool: EpisodeWorkerPool,
    num_rows: int,
    engines: CountingEngines,
    known: dict[int, list[Episode]] | None = None,
    num_episodes: int = 1,
    record: Callable[[int], Any] = lambda row: None,
    labels: Sequence[dict[str, Any]] = (),
) -> list[list[Episode]]:
    settings = EpisodeSettings("faulty", {}, LIMITS, 20.0, 4, 1)
    runner = LockStepEpisodeRunner(engines, pool, settings)  # type: ignore[arg-type]
    return runner.run_episodes(
        make_prompts(labels or [{}] * num_rows),
        GroupSize(num_episodes, num_episodes),
        SamplingParams(4),
        0,
        known or {},
        lambda groups: [record(row) for row, _ in groups],
        lambda text: None,
    )


def test_both_ways_have_the_same_episodes(pool: EpisodeWorkerPool) -> None:
    """Engines that answer as a function of prompt and seed are not told apart by the order."""
    freely = run_rows(pool, [{}] * 5, num_episodes=3, engines=CountingEngines())
    engines = CountingEngines()
    in_step = run_in_lock_step(pool, 5, engines, num_episodes=3)
    assert [[summarize(one) for one in group] for group in in_step] == [
        [summarize(one) for one in group] for group in freely
    ]
    assert len({str(summarize(one)) for group in freely for one in group}) == 15
    assert {one.end for group in freely for one in group} <= {"done", "max_turns", "max_tokens"}
    turns = [len(one.turns) for group in in_step for one in group]
    assert [len(call) for call in engines.calls] == [
        sum(count > number for count in turns) for number in range(max(turns))
    ], "all that go on take each turn together, whatever max_concurrent says"
    seeds = [request.seeds for call in engines.calls for request in call]
    assert len(set(seeds)) == len(seeds)


def test_whole_pieces_are_known_or_run_again(pool: EpisodeWorkerPool) -> None:
    """The first piece is known; of the second one a group is not."""
    num_rows = PIECE_GROUPS * 2 + 3
    engines = CountingEngines()
    recorded: list[int] = []
    groups = run_in_lock_step(pool, num_rows, engines, record=recorded.append)
    assert recorded == list(range(num_rows))
    assert max(len(call) for call in engines.calls) == PIECE_GROUPS
    known = {row: group for row, group in enumerate(groups) if row != PIECE_GROUPS + 2}
    again = CountingEngines()
    recorded.clear()
    resumed = run_in_lock_step(pool, num_rows, again, known, record=recorded.append)
    assert recorded == list(range(PIECE_GROUPS, 2 * PIECE_GROUPS))
    assert resumed[0] is groups[0] and resumed[-1] is groups[-1]
    assert len(again.calls[0]) == PIECE_GROUPS
    assert [[summarize(one) for one in group] for group in resumed] == [
        [summarize(one) for one in group] for group in groups
    ]


def test_a_turn_is_asked_of_the_engine_of_the_turn_before(pool: EpisodeWorkerPool) -> None:
    engines = CountingEngines()
    [[episode]] = run_rows(pool, [{}], engines=engines)
    assert len(episode.turns) > 1
    assert engines.preferences[0] == (0, None)
    later = engines.preferences[1:]
    assert later == [(0, EnginePreference("engine0", 7))] * (len(episode.turns) - 1)


def test_failures_of_one_group_may_come_together(pool: EpisodeWorkerPool) -> None:
    """Four turns of a row fail at once, and the group still ends whole."""
    engines = CountingEngines(failing={0, 1, 2, 3})
    [group] = run_rows(pool, [{}], num_episodes=6, min_group=2, engines=engines)
    ends = [episode.end for episode in group]
    assert len(ends) == 6 and ends.count("engine_failed") <= 4
    assert sum(episode.is_scored for episode in group) >= 2
    failed = [episode for episode in group if episode.end == "engine_failed"]
    assert all(episode.error == "no engine can" for episode in failed)


@pytest.mark.parametrize("is_in_step", [False, True])
def test_a_request_to_stop_is_heard_between_turns(
    pool: EpisodeWorkerPool, is_in_step: bool
) -> None:
    """No turn is ever answered in time; afterwards the workers run other episodes."""
    engines = CountingEngines(lambda key, request: 3600.0, stop_at_look=2)
    with pytest.raises(RunStopped):
        if is_in_step:
            run_in_lock_step(pool, 3, engines)
        else:
            run_rows(pool, [{}] * 3, engines=engines)
    groups = run_rows(pool, [{}] * 3)
    assert [len(group) for group in groups] == [1, 1, 1]
    assert all(group[0].is_scored for group in groups)


def test_a_worker_that_is_lost_changes_no_set_of_turns(
    pool: EpisodeWorkerPool, tmp_path: Path
) -> None:
    """Its episodes get the turns that they had; what is decoded together stays the same."""
    pool.quarantined_rows.clear()
    once = tmp_path / "once"
    labels = [{"num_turns": 4}, {"num_turns": 5, "fault": "exit", "turn": 2, "once": str(once)}] * 2
    calls = []
    episodes = []
    for is_lost in (False, True):
        once.touch()
        if is_lost:
            once.unlink()
        engines = CountingEngines()
        groups = run_in_lock_step(pool, len(labels), engines, labels=labels, num_episodes=2)
        calls.append([[(one.prompt_ids, one.seeds) for one in call] for call in engines.calls])
        episodes.append([one for group in groups for one in group])
    assert calls[0] == calls[1]
    assert list(map(summarize, episodes[0])) == list(map(summarize, episodes[1]))
    restarts = [sum(one.num_restarts for one in of_run) for of_run in episodes]
    assert restarts[0] == 0 and restarts[1] >= 1
