"""A busy engine is not a dead engine: how its scheduler gets on is told without waiting for the
step that is under way, and restarts are counted anew after a while without failures.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rollout_tools import tiny_qwen3

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    compute_stall_limit_s,
)
from rlhf_megatron.rollout.fleet import server_watch
from rlhf_megatron.rollout.fleet.server_watch import RestartBudget, ServerWatch
from rlhf_megatron.rollout.local.batch_generator import BatchGenerator
from rlhf_megatron.rollout.local.decode_service import DecodeService
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_model import LocalModel
from rlhf_megatron.rollout.local.weight_receiver import WeightReceiver
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_long_step_does_not_hold_up_the_answer(tmp_path: Path) -> None:
    model = LocalModel(tiny_qwen3(1))
    weights = WeightReceiver(model.module, tmp_path, True)
    service = DecodeService(BatchGenerator(model, 4, 4096), weights)
    try:
        wait_until(lambda: service.measure_progress().seconds_without_step == 0.0)
        may_go_on = threading.Event()
        long_call = service.run_in_decode_loop(may_go_on.wait)
        time.sleep(0.5)
        start = time.monotonic()
        busy = service.measure_progress()
        assert time.monotonic() - start < 0.2
        assert busy.is_running and 0.4 < busy.seconds_without_step < 10.0
        may_go_on.set()
        long_call.result(30)
        wait_until(lambda: service.measure_progress().seconds_without_step == 0.0)
        rested = service.measure_progress()
        assert 0.4 < rested.longest_step_s < 10.0
        # idle time is no time without a step
        time.sleep(0.3)
        assert service.measure_progress().seconds_without_step == 0.0
    finally:
        service.close()
    assert not service.measure_progress().is_running


def test_a_loop_whose_thread_has_ended_is_dead(tmp_path: Path) -> None:
    model = LocalModel(tiny_qwen3(1))
    weights = WeightReceiver(model.module, tmp_path, True)
    service = DecodeService(BatchGenerator(model, 4, 4096), weights)
    service.close()
    assert not service.measure_progress().is_running


@contextmanager
def serve_answers(answers: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """A server that answers each path with (status, body, delay in seconds); the paths that were
    asked are kept.
    """
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            answer = answers[self.path]
            status, body, delay_s = answer() if callable(answer) else answer  # type: ignore[misc]
            time.sleep(delay_s)
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", paths
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("seconds", "longest", "words"),
    [
        (0.0, 0.0, None),
        (1.9, 0.0, None),
        (2.1, 0.0, "no step has ended for 2 s"),
        (45.0, 5.0, None),
        (51.0, 5.0, "no step has ended for 51 s; the longest one took 5.0 s"),
    ],
)
def test_the_bundled_engine_is_ill_when_steps_stay_out(
    seconds: float, longest: float, words: str | None
) -> None:
    progress = {
        "is_running": True,
        "seconds_without_step": seconds,
        "longest_step_s": longest,
    }
    with serve_answers({"/health": (200, progress, 0.0)}) as (url, _):
        engine = LocalEngine(EngineAddress("engine0", "local", url, "token"))
        if words is None:
            engine.check_health(1.0)
        else:
            with pytest.raises(EngineError, match=words):
                engine.check_health(1.0)


def test_the_bundled_engine_is_ill_without_its_loop() -> None:
    progress = {"is_running": False, "seconds_without_step": 0.0, "longest_step_s": 0.0}
    with (
        serve_answers({"/health": (200, progress, 0.0)}) as (url, _),
        pytest.raises(EngineError, match="its decoding loop has ended"),
    ):
        LocalEngine(EngineAddress("engine0", "local", url, "token")).check_health(1.0)


def make_sglang_engine(url: str, directory: Path) -> SGLangEngine:
    engine = SGLangEngine(EngineAddress("engine0", "local", url, "token"), directory)
    engine._halt_mode = "in_place"  # so that its scheduler is asked for its state
    return engine


def test_sglang_s_scheduler_may_take_longer_than_its_http(tmp_path: Path) -> None:
    """SGLang gives up on its scheduler after 20 s and answers 503; it is asked again until the
    limit, which grows with the longest check that went well.
    """
    is_busy = iter([True, True, False])
    answers = {
        "/model_info": (200, {}, 0.0),
        "/server_info": lambda: (503, {}, 0.2) if next(is_busy) else (200, {}, 0.0),
    }
    with serve_answers(answers) as (url, paths):
        engine = make_sglang_engine(url, tmp_path)
        engine.check_health(1.0)
        assert paths == ["/model_info", "/server_info"] * 3
        assert engine._longest_health_check_s > 1.0


def test_sglang_s_scheduler_that_never_answers_is_dead(tmp_path: Path) -> None:
    answers = {"/model_info": (200, {}, 0.0), "/server_info": (503, {}, 0.0)}
    with serve_answers(answers) as (url, _):
        engine = make_sglang_engine(url, tmp_path)
        start = time.monotonic()
        with pytest.raises(EngineError, match="503"):
            engine.check_health(0.5)
        assert 0.9 < time.monotonic() - start < 10.0


def test_sglang_whose_http_does_not_answer_is_dead_at_once(tmp_path: Path) -> None:
    answers = {"/model_info": (200, {}, 5.0), "/server_info": (200, {}, 0.0)}
    with serve_answers(answers) as (url, paths):
        with pytest.raises(EngineError, match="no answer within"):
            make_sglang_engine(url, tmp_path).check_health(0.3)
        assert paths == ["/model_info"]


def test_the_limit_is_of_timeouts_or_of_steps() -> None:
    assert compute_stall_limit_s(30.0, 0.0) == 60.0
    assert compute_stall_limit_s(30.0, 6.0) == 60.0
    assert compute_stall_limit_s(30.0, 40.0) == 400.0


def test_a_watch_gives_each_check_the_whole_time() -> None:
    """A check that fails at once is repeated, and the time of the later ones does not shrink."""
    given: list[float] = []
    ill: list[str] = []

    def check_health(timeout_s: float) -> None:
        given.append(timeout_s)
        raise EngineError("no")

    ServerWatch("engine0", check_health, lambda: None, lambda _, words: ill.append(words), 0.1, 1.2)
    wait_until(lambda: ill)
    assert len(given) >= 2 and set(given) == {1.2}
    assert ill == ["no good answer to a health check (rollout.health_timeout_s is 1.2 s): no"]


def test_restarts_are_counted_anew_after_a_healthy_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(server_watch.time, "monotonic", lambda: now[0])
    budget = RestartBudget(2)
    assert [budget.take_restart() for _ in range(3)] == [True, True, False]
    now[0] += server_watch.HEALTHY_S - 1.0
    assert not budget.take_restart(), "that failure begins the while anew"
    now[0] += server_watch.HEALTHY_S
    assert [budget.take_restart() for _ in range(3)] == [True, True, False]
    assert not RestartBudget(0).take_restart()
