"""What environments do wrong, and what becomes of their episodes and of the episodes beside them.
Worker processes are real; engines answer at once.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from episode_tools import (
    LIMITS,
    PLUGIN,
    Engines,
    make_pool,
    make_prompts,
    run_rows,
    summarize,
)

from rlhf_megatron.agents import episode_book, episode_workers
from rlhf_megatron.agents.episode_book import EpisodeSettings, GroupSize
from rlhf_megatron.agents.episode_record import Episode
from rlhf_megatron.agents.episode_runner import LockStepEpisodeRunner
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.rollout.engine_interface import SamplingParams

GOOD_ROWS: list[dict[str, Any]] = [{} for _ in range(12)]
TOLERANCE_S = 1.0  # of a busy machine, beside what is asserted


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EpisodeWorkerPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rlhf_megatron.rewards.service.worker_processes.list_loaded_plugins", lambda: [PLUGIN]
        )
        with make_pool(tmp_path_factory.mktemp("faults") / "log") as started:
            yield started


@pytest.fixture(autouse=True)
def nothing_is_in_quarantine(pool: EpisodeWorkerPool) -> None:
    pool.quarantined_rows.clear()


@pytest.fixture(scope="module")
def undisturbed(pool: EpisodeWorkerPool) -> list[Any]:
    """The good rows by themselves."""
    return [summarize(episode) for [episode] in run_rows(pool, GOOD_ROWS)]


def run_faults(
    pool: EpisodeWorkerPool, faults: list[dict[str, Any]], **options: Any
) -> tuple[list[Episode], list[Episode]]:
    """The episodes of the good rows, and of these faults beside them."""
    groups = run_rows(pool, [*GOOD_ROWS, *faults], **options)
    episodes = [episode for [episode] in groups]
    return episodes[: len(GOOD_ROWS)], episodes[len(GOOD_ROWS) :]


CODE_FAULTS = {
    "raise": "KeyError: 'no such thing'",
    "stop_iteration": "raised StopIteration",
    "interrupt": "KeyboardInterrupt",
    "strange": "StrangeError: strange",
    "cancelled": "CancelledError",
    "sys_exit": "SystemExit: bye",
    "nothing": "reset and step must return an Observation, not NoneType.",
    "text": "reset and step must return an Observation, not str.",
    "reward_text": "Observation.reward ('1') must be a number, not str.",
    "messages_set": "Observation.messages must be a text or a list of messages, not set.",
    "message_text": "Observation.messages has '1'; each must be a dict with role and content.",
    "message_number": "has the content '1'; it must be a text or a list of text parts.",
    "message_object": "has a value that JSON does not have: Object of type object",
    "surrogate": "has half a character (a lone surrogate) in its text; replace it",
    "flood": "has 100,000,000 bytes, and the talk ",
    "many_messages": "messages, more than 10000; send fewer, longer messages.",
}
STEP_FAULTS = {  # that show at the end of the episode
    "reward_nan": "the reward of turn 1 (nan) must be a finite number.",
    "metric_text": "could not convert string to float: 'y'",
    "many_metrics": "Outcome.metrics has 1001 numbers, more than 256.",
}
RUN_FAULTS = {
    "raise_at_end": "ValueError: at the end",
    "early_over": "EpisodeOver was raised: max_turns",
    "two_calls": "chat was called while a former call of the episode waits for its answer",
    "wrong_count": "Outcome.turn_rewards has 5 numbers for 1 turns",
}


def test_code_that_raises_or_returns_garbage_is_named(
    pool: EpisodeWorkerPool, undisturbed: list[Any]
) -> None:
    cases = [
        *[
            ({"fault": fault, "turn": turn, "environment": environment}, message)
            for fault, message in CODE_FAULTS.items()
            for environment, turn in (("faulty", -1), ("faulty", 1), ("faulty_async", 1))
        ],
        *[({"fault": fault, "turn": 1, "num_turns": 2}, why) for fault, why in STEP_FAULTS.items()],
        *[({"fault": f, "environment": "faulty_run"}, why) for f, why in RUN_FAULTS.items()],
        ({"environment": "unknown"}, "unknown"),
    ]
    rows = [{"num_turns": 3, **row} for row, _ in cases]
    good, bad = run_faults(pool, rows, timeout_s=120.0)
    assert [summarize(episode) for episode in good] == undisturbed
    for (row, message), episode in zip(cases, bad, strict=True):
        assert (episode.end, episode.is_scored) == ("environment_failed", False), row
        assert message in episode.error, row
        assert len(episode.error) < 10_000 and episode.num_restarts == 0


def test_ends_of_talks(pool: EpisodeWorkerPool) -> None:
    """Each limit ends an episode by its name, whatever the code makes of it."""
    rows: list[dict[str, Any]] = [
        {"num_turns": 2},
        {"num_turns": 9},
        {"fault": "return_at_end"},
        {"fault": "swallow"},
        {"fault": "swallow_all"},
        {"fault": "let_through"},
        {"fault": "no_reward"},
        {"fault": "change_past"},
    ]
    rows = [{**row, "environment": "faulty_run" if "fault" in row else "faulty"} for row in rows]
    episodes = [episode for [episode] in run_rows(pool, rows)]
    ends = ["done", *["max_turns"] * 5, "done", "refused"]
    assert [episode.end for episode in episodes] == ends
    assert [episode.is_scored for episode in episodes] == [True] * 7 + [False]
    assert [len(episode.turns) for episode in episodes] == [2, 6, 6, 6, 6, 6, 1, 1]
    done, over, returned, *_ = episodes
    assert done.reward == 0.0 and len(done.turn_rewards) == 2 and "right" in done.metrics
    assert len(over.turn_rewards) == 6, "a limit takes no reward away"
    assert (returned.reward, returned.turn_rewards) == (0.5, (1.0,) * 6)
    assert all(episode.reward is None for episode in episodes[3:])
    talk = json.loads(done.messages)
    assert [message["role"] for message in talk] == [
        "user",
        "user",
        "assistant",
        "user",
        "assistant",
    ]

    [[short], [cut]] = run_rows(pool, [{"num_turns": 6}] * 2, max_tokens=12)
    assert {short.end, cut.end} == {"max_tokens"} and short.is_scored
    assert len(short.token_ids) - short.num_prompt_tokens <= 12
    [[failed], [other]] = run_rows(pool, [{}, {}], engines=Engines(failing={0}))
    assert (failed.end, failed.error, failed.is_scored) == ("engine_failed", "no engine can", False)
    assert other.end == "done"


def test_deadlines_cover_start_steps_and_judgement(pool: EpisodeWorkerPool, tmp_path: Path) -> None:
    """Code that comes back late, or never; that ignores being cancelled, or answers it."""
    closed = tmp_path / "closed"
    rows: list[dict[str, Any]] = [
        {"fault": "hang", "turn": -1},
        {"fault": "hang", "turn": 1, "seconds": 3.0, "closed": str(closed)},
        {"fault": "hang", "turn": 1, "environment": "faulty_async", "closed": str(closed)},
        {"fault": "ignore_cancel", "turn": 0, "environment": "faulty_async"},
        {"fault": "hang_in_thread", "turn": 0, "environment": "faulty_async"},
        {"fault": "return_at_deadline", "environment": "faulty_run"},
        {"step_s": 0.9, "num_turns": 5},
    ]
    began = time.monotonic()
    good, bad = run_faults(pool, [{"num_turns": 3, **row} for row in rows], timeout_s=2.0)
    assert time.monotonic() - began < 2.0 + TOLERANCE_S
    assert {episode.end for episode in good} == {"done"}
    assert {episode.num_restarts for episode in [*good, *bad]} == {0}
    assert [episode.end for episode in bad] == ["timeout"] * 7
    assert not any(episode.is_scored for episode in bad), "the environments have used the time"
    assert [len(episode.turns) for episode in bad] == [0, 2, 2, 1, 1, 1, 2]
    assert len(json.loads(bad[1].messages)) == 5, "the talk is told"
    # the same keys once more, while code of the former ones comes back or stays
    again = run_rows(pool, [{}] * len([*good, *bad]), step=1)
    assert {episode.end for [episode] in again} == {"done"}
    wait_until(lambda: closed.exists() and len(closed.read_text().split()) == 2, 20.0)
    # what never comes back costs its worker, once the others have ended
    wait_until(lambda: look_for_releases(pool), 30.0)
    assert all(not worker.attempts for worker in pool._workers.values())


def look_for_releases(pool: EpisodeWorkerPool) -> bool:
    """Whether all code has come back, or was given up with its worker."""
    run_rows(pool, [{}], step=2)
    workers = list(pool._workers.values())
    return not any(worker.attempts or worker.is_retired for worker in workers)


def wait_until(is_true: Any, within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < give_up_at, "it takes too long"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("turn_s", "step_s", "is_scored"),
    [(0.9, 0.0, True), (9.0, 0.0, True), (0.3, 0.9, False), (0.6, 0.4, True)],
)
def test_who_used_the_time_decides_about_a_timeout(
    pool: EpisodeWorkerPool, turn_s: float, step_s: float, is_scored: bool
) -> None:
    engines = Engines(turn_s=lambda key, request: turn_s)
    rows = [{"num_turns": 6, "step_s": step_s}]
    [[episode]] = run_rows(pool, rows, timeout_s=1.6, engines=engines)
    assert (episode.end, episode.is_scored) == ("timeout", is_scored)
    assert episode.seconds < 1.6 + TOLERANCE_S


def test_a_turn_of_the_engine_may_take_longer_than_a_worker_may_be_silent(
    pool: EpisodeWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing comes from an episode that waits; its worker is alive."""
    monkeypatch.setattr(episode_book, "SILENT_S", 1.5)
    engines = Engines(turn_s=lambda key, request: 2.5)
    [[episode]] = run_rows(pool, [{"num_turns": 1}], engines=engines)
    assert (episode.end, episode.num_restarts) == ("done", 0)


WORKER_FAULTS = {
    "exit": "ended with code 3",
    "kill": "was ended by signal 9",
    "segfault": "was ended by signal 11",
    "close_descriptors": "was ended by signal 9",
    "socket_garbage": "was ended because something else than its reports came from it",
    "socket_flood": "was ended because something else than its reports came from it",
}


def test_neighbours_of_code_that_ends_workers_start_again(
    pool: EpisodeWorkerPool, undisturbed: list[Any]
) -> None:
    """Their tokens are those of a run without it. The guilty ones are known by being alone."""
    rows = [{"fault": fault, "turn": 1, "num_turns": 3} for fault in WORKER_FAULTS]
    rows.append({"fault": "stop_loop", "turn": 1, "num_turns": 3, "environment": "faulty_async"})
    good, bad = run_faults(pool, rows, timeout_s=60.0)
    assert [summarize(episode) for episode in good] == undisturbed
    assert any(episode.num_restarts for episode in good)
    for row, episode in zip(rows, bad, strict=True):
        assert (episode.end, episode.num_restarts) == ("environment_failed", 2), row
        fault = str(row["fault"])
        assert WORKER_FAULTS.get(fault, "ended with code 1") in episode.error, row
        assert "The row is not tried again in this run." in episode.error
    # later episodes of these rows end at once, and of no others
    run_rows(pool, GOOD_ROWS)
    before = sorted(pool._workers)
    good, later = run_faults(pool, rows, step=3)
    assert [episode.error for episode in later] == [episode.error for episode in bad]
    assert all((e.end, len(e.turns), e.num_restarts) == ("environment_failed", 0, 0) for e in later)
    assert {(episode.end, episode.num_restarts) for episode in good} == {("done", 0)}
    assert sorted(pool._workers) == before, "they have not been tried"


def test_restarts_leave_a_group_alone(pool: EpisodeWorkerPool, tmp_path: Path) -> None:
    """One crash, which does not come again: everybody ends well, none alone."""
    row = {"fault": "exit", "turn": 0, "num_turns": 2, "once": str(tmp_path / "once")}
    good, [episode] = run_faults(pool, [row])
    assert (episode.end, episode.num_restarts) == ("done", 1)
    assert {e.end for e in good} == {"done"} and {e.num_restarts for e in good} <= {0, 1}
    assert pool.quarantined_rows == {}


def test_the_template_is_killed(
    pool: EpisodeWorkerPool, undisturbed: list[Any], tmp_path: Path
) -> None:
    """It is started again, and nobody is to blame, alone or not."""
    template = pool._template
    row = {"fault": "kill_template", "turn": 0, "num_turns": 2, "once": str(tmp_path / "once")}
    good, [episode] = run_faults(pool, [row], timeout_s=60.0)
    assert [summarize(episode) for episode in good] == undisturbed
    assert (episode.end, episode.num_restarts) == ("done", 0)
    assert pool._template is not template and pool.quarantined_rows == {}


def test_async_code_that_holds_the_loop_goes_into_a_worker_of_its_own(
    pool: EpisodeWorkerPool, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(episode_book, "BLOCKED_LIMIT_S", 1.5)
    row = {"fault": "block", "turn": 1, "num_turns": 3, "seconds": 4.0}
    row["environment"] = "faulty_async"
    good, [episode] = run_faults(pool, [row], max_concurrent=len(GOOD_ROWS) + 1)
    assert [summarize(episode) for episode in good] == undisturbed
    assert (episode.end, episode.num_restarts) == ("done", 1), "alone it holds up itself only"
    assert "async code of the environment faulty_async has kept" in caplog.text


@pytest.mark.parametrize("limit_s", [2.0, 30.0])
def test_code_in_c_that_keeps_pythons_lock(
    pool: EpisodeWorkerPool, monkeypatch: pytest.MonkeyPatch, limit_s: float
) -> None:
    """Nobody can tell whose it is until it is alone; its neighbours get a new deadline."""
    monkeypatch.setattr(episode_workers, "MAX_ALIVE_GAP_S", 1.5)
    monkeypatch.setattr(episode_book, "SILENT_S", 2.0)
    row = {"fault": "hold_lock", "turn": 1, "num_turns": 3, "seconds": 3 if limit_s > 2 else 1000}
    good, [episode] = run_faults(pool, [row], timeout_s=limit_s)
    assert {e.end for e in good} == {"done"}
    assert episode.end == ("timeout" if limit_s == 2.0 else "done")
    assert episode.num_restarts == 2 and not episode.is_policy_timeout


def test_a_group_closes_with_the_episodes_that_count(pool: EpisodeWorkerPool) -> None:
    """Failed ones do not. The turns of the others are aborted, at the engines too."""
    engines = Engines(turn_s=lambda key, request: 0.0 if key in (0, 1, 4) else 1.5)
    [group] = run_rows(
        pool, [{"num_turns": 2}], num_episodes=6, min_group=3, engines=engines, max_concurrent=5
    )
    ends = [episode.end for episode in group]
    assert ends == ["done", "done", "aborted", "aborted", "done", "aborted"]
    assert {2, 3} <= set(engines.aborted)
    failing = Engines(failing={0, 1, 2})
    [group] = run_rows(pool, [{"num_turns": 2}], num_episodes=6, min_group=3, engines=failing)
    assert [episode.end for episode in group] == ["engine_failed"] * 3 + ["done"] * 3


def test_environments_are_closed_once_whatever_ended_them(
    pool: EpisodeWorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "closed"
    common = {"closed": str(path), "num_turns": 2}
    rows: list[dict[str, Any]] = [
        {**common},
        {**common, "fault": "raise", "turn": 1},
        {**common, "fault": "raise", "turn": 99},
        {**common, "fault": "interrupt", "turn": 99, "environment": "faulty_async"},
        {**common, "environment": "faulty_async"},
        {**common, "num_turns": 9},
    ]
    began = time.monotonic()
    rows.append({**common, "fault": "hang", "turn": 99, "seconds": 8.0})
    episodes = [episode for [episode] in run_rows(pool, rows)]
    ends = ["done", "environment_failed", "done", "done", "done", "max_turns", "done"]
    assert [episode.end for episode in episodes] == ends
    assert time.monotonic() - began < 6.0, "nobody waits for a close that hangs"
    wait_until(lambda: len(path.read_text().split()) == len(rows), 5.0)


def test_forked_children_and_output_do_no_harm(
    pool: EpisodeWorkerPool, undisturbed: list[Any]
) -> None:
    rows = [
        {"fault": fault, "turn": 0, "num_turns": 2, "environment": environment}
        for fault in ("fork", "print", "leave_task")
        for environment in ("faulty", "faulty_async")
    ]
    good, bad = run_faults(pool, rows)
    assert [summarize(episode) for episode in good] == undisturbed
    assert {(episode.end, episode.num_restarts) for episode in bad} == {("done", 0)}
    assert pool._log_path is not None
    log = pool._log_path.read_text()
    assert "x" * 100 in log and "y" * 100 in log


def test_forged_requests_end_the_worker_and_not_the_run(
    pool: EpisodeWorkerPool, undisturbed: list[Any]
) -> None:
    """User code can write what a worker writes. A turn that nobody can ask for is no request."""
    engines = Engines(turn_s=lambda key, request: 0.1)
    rows = [
        {"fault": "forged_request", "turn": 0, "num_turns": 2, "max_new_tokens": number}
        for number in (1, 10**6)
    ]
    good, bad = run_faults(pool, rows, timeout_s=60.0, engines=engines)
    assert [summarize(episode) for episode in good] == undisturbed
    for episode in bad:
        assert (episode.end, episode.num_restarts) == ("environment_failed", 2)
        assert "was ended because it asked for a turn that cannot be" in episode.error


def test_episodes_that_wait_for_each_other_may_all_be_alone(
    pool: EpisodeWorkerPool, undisturbed: list[Any]
) -> None:
    """In lock-step a turn is taken once all have asked for it."""
    rows = [{"fault": "exit", "turn": 1, "num_turns": 3}]
    settings = EpisodeSettings("faulty", {}, LIMITS, 60.0, 64, 1)
    runner = LockStepEpisodeRunner(Engines(), pool, settings)  # type: ignore[arg-type]
    groups = runner.run_episodes(
        make_prompts([*GOOD_ROWS * 2, *rows]),
        GroupSize(1, 1),
        SamplingParams(4),
        0,
        {},
        lambda groups: None,
        lambda text: None,
    )
    *good, bad = [episode for [episode] in groups]
    assert [summarize(episode) for episode in good[: len(GOOD_ROWS)]] == undisturbed
    assert {episode.end for episode in good} == {"done"}
    assert (bad.end, bad.num_restarts) == ("environment_failed", 2)


def test_the_number_of_workers_of_one_episode_is_bounded(
    pool: EpisodeWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_book, "ALONE_AFTER_RESTARTS", 0)
    counts = []
    engines = Engines(
        turn_s=lambda key, request: 0.01, on_poll=lambda: counts.append(len(pool._workers))
    )
    groups = run_rows(pool, [{}] * 30, engines=engines)
    assert {episode.end for [episode] in groups} == {"done"}
    assert max(counts) <= episode_book.MAX_ALONE + 2, "and two of many"


FIVE_KINDS: dict[str, dict[str, Any]] = {
    "hang": {"fault": "hang", "turn": 1},
    "raise": {"fault": "raise", "turn": 1},
    "exit": {"fault": "exit", "turn": 1},
    "garbage": {"fault": "nothing", "turn": 1},
    "flood": {"fault": "flood", "turn": 1},
}
ENDS_OF_KINDS = {
    "hang": ("timeout", ""),
    "raise": ("environment_failed", "KeyError: 'no such thing'"),
    "exit": ("environment_failed", "The worker of this episode alone ended with code 3"),
    "garbage": ("environment_failed", "must return an Observation, not NoneType"),
    "flood": ("environment_failed", "has 100,000,000 bytes, and the talk "),
}


@pytest.mark.long
def test_five_thousand_episodes_with_faults_in_five_of_a_hundred(
    pool: EpisodeWorkerPool,
) -> None:
    """Each fault is named, no episode is late, and none is lost to another one's fault: all others
    end as they do in a run without faults.
    """
    timeout_s, num_episodes = 20.0, 5000
    engines = Engines(turn_s=lambda key, request: random.Random(f"{key} {request}").random() / 5)
    options: dict[str, Any] = {"timeout_s": timeout_s, "max_concurrent": 256, "engines": engines}
    clean_rows: list[dict[str, Any]] = [{}] * num_episodes
    began = time.monotonic()
    clean = [episode for [episode] in run_rows(pool, clean_rows, **options)]
    clean_s = time.monotonic() - began
    places = random.Random(1).sample(range(num_episodes), num_episodes // 20)
    kinds = dict(zip(places, [*FIVE_KINDS] * (num_episodes // 100), strict=True))
    rows = [
        # each has a row of its own, as data does
        {**row, "row": place, **(FIVE_KINDS[kinds[place]] if place in kinds else {})}
        for place, row in enumerate(clean_rows)
    ]
    began = time.monotonic()
    episodes = [episode for [episode] in run_rows(pool, rows, **options)]
    taken_s = time.monotonic() - began
    ends: Counter[tuple[str, str]] = Counter()
    for place, episode in enumerate(episodes):
        kind = kinds.get(place, "good")
        ends[kind, episode.end] += 1
        if kind == "good":
            assert summarize(episode) == summarize(clean[place])
        else:
            end, error = ENDS_OF_KINDS[kind]
            assert episode.end == end and error in episode.error
    latest_s = max(episode.seconds for episode in episodes)
    restarts = Counter(episode.num_restarts for episode in episodes)
    print(f"\n{dict(ends)}; {clean_s:.1f} s without faults, {taken_s:.1f} s with them")
    print(f"longest attempt {latest_s:.3f} s of {timeout_s:.0f} s, restarts {dict(restarts)}")
    assert latest_s < timeout_s + TOLERANCE_S
