"""The worker processes of episodes: how they start and end, and what their connections carry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import MARKER, processes_with
from episode_tools import LIMITS, PLUGIN, Engines, make_pool, make_prompts, run_rows
from places import ROOT, SUPPORT

from rlhf_megatron.agents import episode_workers
from rlhf_megatron.agents.episode_messages import (
    DeliverTurn,
    ReportAlive,
    ReportEpisode,
    ReportRelease,
    RequestTurn,
    StartEpisode,
    decode_order,
    decode_report,
    encode_worker_message,
)
from rlhf_megatron.agents.episode_workers import EpisodeWorkerPool
from rlhf_megatron.config.errors import ConfigError


@pytest.fixture(autouse=True, scope="module")
def plugin() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "rlhf_megatron.rewards.service.worker_processes.list_loaded_plugins", lambda: [PLUGIN]
        )
        yield


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, plugin: None) -> Iterator[EpisodeWorkerPool]:
    with make_pool(tmp_path_factory.mktemp("workers") / "log") as started:
        yield started


def wait_until(is_true: Callable[[], object], within_s: float = 15.0) -> None:
    give_up_at = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < give_up_at, "it takes too long"
        time.sleep(0.02)


def test_messages_come_back_as_they_were() -> None:
    prompt = [{"role": "user", "content": "\u00e4"}]
    params = {"a": [1, None, "x"]}
    messages: list[Any] = [
        StartEpisode(1, 2, "game", params, LIMITS, 12.5, prompt, "p", "l", "s", "", 7, [1, 2]),
        DeliverTurn(1, 2, [3], [-0.5], "stop", 4, [(4, 0, 1)]),
    ]
    reports: list[Any] = [
        RequestTurn(1, 2, [3, 4], 5),
        ReportEpisode(1, 2, "done", None, [1.0], {"m": 2.0}, [{"role": "user"}], "e"),
        ReportRelease(2, False),
        ReportAlive(0.5, None),
    ]
    assert [decode_order(encode_worker_message(one)[:-1]) for one in messages] == messages
    assert [decode_report(encode_worker_message(one)[:-1]) for one in reports] == reports
    assert all(encode_worker_message(one).count(b"\n") == 1 for one in [*messages, *reports])


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage",
        b"3",
        b"\xff\xfe",
        b"[" * 100_000,
        b'["RequestTurn"]',
        b'["RequestTurn", 3]',
        b'["StartEpisode", {}]',
        b'[["RequestTurn"], {}]',
        b'["RequestTurn", {"key": 1, "attempt": 1, "new_ids": ["x"], "max_new_tokens": 1}]',
        b'["RequestTurn", {"key": 1.5, "attempt": 1, "new_ids": [], "max_new_tokens": 1}]',
        b'["ReportEpisode", {"key": 1, "attempt": 1, "end": "won", "reward": 1.0}]',
        b'["ReportEpisode", {"key": 1, "attempt": 1, "end": "done", "reward": NaN}]',
        b'["ReportEpisode", {"key": 1, "attempt": 1, "end": "done", "reward": 1e999}]',
        b'["ReportEpisode", {"key": 1, "attempt": 1, "end": "done", "reward": 0, "error": "\\u"}]',
    ],
)
def test_what_is_no_report_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="is no report of an episode"):
        decode_report(line)


def test_problems_show_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin_path = tmp_path / "bad_plugin.py"
    plugin_path.write_text(
        "import os, sys\n"
        "from rlhf_megatron.agents.environment import ENVIRONMENTS, Environment\n"
        "if os.path.exists(__file__ + '.exit'):\n"
        "    os._exit(7)\n"
        "@ENVIRONMENTS.register('bad')\n"
        "class Bad(Environment):\n"
        "    def __init__(self):\n"
        "        raise RuntimeError('no server')\n"
        "    async def run(self, task, chat):\n"
        "        pass\n"
    )
    monkeypatch.setattr(
        "rlhf_megatron.rewards.service.worker_processes.list_loaded_plugins",
        lambda: [str(plugin_path)],
    )
    with pytest.raises(ConfigError, match=r"(?s)environment \(bad\) cannot be made.*no server"):
        make_pool(tmp_path / "log", environment="bad")
    Path(f"{plugin_path}.exit").touch()
    with pytest.raises(ValueError, match="loads the environments ended with code 7"):
        make_pool(tmp_path / "log", environment="bad")


def test_workers_end_first_where_memory_runs_out(pool: EpisodeWorkerPool) -> None:
    run_rows(pool, [{}])
    for pid in pool._workers:
        assert Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000"
    assert pool._template is not None
    assert Path(f"/proc/{pool._template.pid}/oom_score_adj").read_text().strip() != "1000"


def test_orders_never_wait_for_a_worker(pool: EpisodeWorkerPool) -> None:
    """A worker that reads nothing gets its orders later, all of them and in order."""
    row = {"fault": "block", "turn": 0, "num_turns": 2, "seconds": 2.0}
    [prompt] = make_prompts([{**row, "environment": "faulty_async"}]).labels
    orders = [
        StartEpisode(
            key, pool.make_attempt_number(), "faulty_async", {}, LIMITS, time.monotonic() + 60,
            [{"role": "user", "content": "?"}], "?", prompt if key == 0 else "{}", "s",
            "" if key == 0 else f'{{"x": "{"y" * 1_000_000}"}}', key, [16],
        )
        for key in range(6)
    ]  # fmt: skip
    worker = pool.start_episode(orders[0], False)
    requests: dict[int, RequestTurn] = {}

    def read_requests() -> None:
        for event in pool.take_events():
            assert isinstance(event, tuple)
            if isinstance(event[1], RequestTurn):
                requests[event[1].key] = event[1]

    def take_turn(attempt: int, key: int) -> None:
        worker.send_order(DeliverTurn(key, attempt, [2, 1], [-1.0, -1.0], "stop", 0, []))

    wait_until(lambda: read_requests() or requests)
    take_turn(orders[0].attempt, 0)  # its step keeps the event loop
    time.sleep(0.3)
    for order in orders[1:]:
        assert worker.send_order(order)
    assert len(worker.unsent) > 4_000_000, "it reads nothing, and nobody waits for it"
    wait_until(lambda: read_requests() or len(requests) == 6)
    assert not worker.unsent


def test_the_log_is_bounded(pool: EpisodeWorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_megatron.rewards.service.worker_processes.MAX_LOG_BYTES", 20_000)
    assert pool._log_path is not None
    for _ in range(10):
        run_rows(pool, [{"fault": "print", "turn": 0, "num_turns": 1}])
    assert pool._log_path.stat().st_size < 30_000
    assert pool._log_path.read_text().startswith("[what was before is left out]\n")


def test_workers_that_were_held_up_leave_no_surplus(pool: EpisodeWorkerPool) -> None:
    """Others are forked in their place; once all are well, idle ones beyond the number end."""
    run_rows(pool, [{}] * 4)
    for worker in pool._workers.values():
        worker.alive_report = ReportAlive(9.0, None)  # until the next one, at most a second
    run_rows(pool, [{"num_turns": 2}] * 4)
    assert len(pool._workers) <= 4

    def count_after_episodes() -> int:
        run_rows(pool, [{"num_turns": 2}] * 8)
        return len(pool._workers)

    wait_until(lambda: count_after_episodes() == pool.num_workers)


def test_templates_that_are_stopped_or_killed_are_replaced(
    pool: EpisodeWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_workers, "FORK_S", 0.5)
    monkeypatch.setattr("rlhf_megatron.rewards.service.worker_processes.STOP_S", 0.5)
    assert pool._template is not None
    stopped = pool._template.pid
    for worker in list(pool._workers.values()):
        pool.kill_worker(worker)  # so that another one is needed
    os.kill(stopped, signal.SIGSTOP)
    [[episode]] = run_rows(pool, [{}])
    assert episode.end == "done" and pool._template.pid != stopped
    wait_until(lambda: not Path(f"/proc/{stopped}").exists())
    # one that dies again and again ends the run
    monkeypatch.setattr(episode_workers, "MAX_TEMPLATE_RESTARTS", 1)
    pool._restart_times = deque(pool._restart_times, maxlen=1)
    with pytest.raises(ValueError, match="was lost 2 times within 10 minutes"):
        run_rows(pool, [{"fault": "kill_template", "turn": 0}])


def test_what_ended_workers_have_started_ends_with_them(tmp_path: Path) -> None:
    marker = f"episodes-{os.getpid()}-{time.monotonic_ns()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, marker)
        with make_pool(tmp_path / "log") as pool:
            run_rows(pool, [{"fault": "children", "turn": 0, "num_turns": 2}])
            assert len(processes_with(marker)) >= 4, "template, worker, and two children"
    wait_until(lambda: processes_with(marker) == [])


def test_a_closed_pool_closes_environments(tmp_path: Path) -> None:
    """Also those of episodes that go on, as at Ctrl-C."""
    closed = tmp_path / "closed"
    row = {"closed": str(closed), "num_turns": 5}

    def interrupt() -> None:
        if len(engines._running) == 4:
            raise KeyboardInterrupt

    engines = Engines(turn_s=lambda key, request: 100.0, on_poll=interrupt)
    with make_pool(tmp_path / "log") as pool, pytest.raises(KeyboardInterrupt):
        run_rows(pool, [row] * 4, engines=engines)
    assert closed.read_text().split() == ["closed"] * 4
    pool.close()


PROGRAM = f"""
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
sys.path[:0] = [{str(SUPPORT)!r}, {str(ROOT)!r}]
from pathlib import Path
from episode_tools import Engines, make_pool, run_rows, PLUGIN
from rlhf_megatron.rewards.service import worker_processes
worker_processes.list_loaded_plugins = lambda: [PLUGIN]
rows = [
    dict(fault="hang", turn=0), dict(fault="hang", turn=-1, environment="faulty_async"),
    dict(fault="children", turn=0), dict(fault="ignore_cancel", environment="faulty_async"),
]
path = Path(sys.argv[1])
is_told = []
def tell():
    if engines.num_turns == 2 and engines._running and not is_told:
        is_told.append(True)
        (path / "ready").touch()
engines = Engines(lambda key, request: 0.0 if len(request.prompt_ids) < 5 else 100.0, on_poll=tell)
with make_pool(path / "log") as pool:
    run_rows(pool, rows, timeout_s=600.0, engines=engines)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_controller_that_ends_leaves_no_process(tmp_path: Path, number: int) -> None:
    marker = f"episodes-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, MARKER: marker, "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "output", "wb") as output:
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path)],
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        wait_until((tmp_path / "ready").exists, 60.0)
        assert len(processes_with(marker)) >= 5
        program.send_signal(number)
        assert program.wait(20) != 0
        wait_until(lambda: processes_with(marker) == [], 20.0)
    finally:
        program.kill()
