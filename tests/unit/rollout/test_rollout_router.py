"""Stock sglang-router between a fleet and engines: groups whole, seeds kept, workers exactly the
engines that serve.

Small HTTP servers speak SGLang's part here: what they answer is computed from the seed and the
prompt, and they say what came to them. Stock SGLang behind the
router: tests/engines/test_sglang_supervised.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rollout_tools import request
from sglang_tools import needs_sglang, sglang_python

from rlhf_megatron.rollout.engine_interface import (
    EngineAddress,
    EngineError,
    EngineRequestError,
    GenerateRequest,
    InferenceEngine,
)
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.rollout.fleet.engine_supervisor import SupervisionSettings
from rlhf_megatron.rollout.router.router_balancer import SGLangRouterBalancer
from rlhf_megatron.rollout.router.router_process import prepare_router
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_samples import make_version_name

VOCABULARY = 32
VERSION = 3
TEMPLATE = (7,) * 40  # all prompts begin alike, as they do with a chat template
REQUESTS = [
    request((*TEMPLATE, index, index + 1), tuple(range(8 * index, 8 * index + 8)), 5)
    for index in range(12)
]


@dataclass
class Worker:
    """A server that speaks SGLang's part. `key`: without it nothing but /health is answered."""

    name: str
    key: str
    version: int = VERSION
    delay_s: float = 0.0
    fail: int = 0  # requests that are answered 500
    is_cutting: bool = False  # half of an answer, and the connection ends
    is_gone: bool = False  # connections end without an answer
    seen: list[dict[str, Any]] = field(default_factory=list)  # bodies of /generate
    is_deterministic: bool = False
    paths: list[str] = field(default_factory=list)
    keys_seen: list[str] = field(default_factory=list)  # of the last
    port: int = 0

    def __enter__(self) -> Worker:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def answer(self) -> None:
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"null"
                )
                keys = (f"Bearer {worker.key}", f"Bearer admin {worker.name}")
                if self.path != "/health" and self.headers.get("Authorization") not in keys:
                    return self.send(401, {"error": {"message": "no key"}})
                worker.paths.append(self.path)
                if self.path != "/generate":
                    info = {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1}
                    return self.send(
                        200, {**info, "enable_deterministic_inference": worker.is_deterministic}
                    )
                return self.generate(body)

            def generate(self, body: dict[str, Any]) -> None:
                if "token_ids_logprob" in body:
                    return self.send(
                        400, {"error": {"message": f"valid range is [0, {VOCABULARY})"}}
                    )
                worker.seen.append(body)
                keys = self.headers.get_all("Authorization") or []
                worker.keys_seen = [key.removeprefix("Bearer ") for key in keys]
                if worker.fail:
                    worker.fail -= 1
                    return self.send(500, {"error": {"message": "out of luck"}})
                time.sleep(worker.delay_s)
                lists = isinstance(body["input_ids"][0], list)
                prompts = body["input_ids"] if lists else [body["input_ids"]]
                params = body["sampling_params"] if lists else [body["sampling_params"]]
                answers = [
                    answer_of(p, q, worker.version) for p, q in zip(prompts, params, strict=True)
                ]
                return self.send(200, answers if lists else answers[0])

            def send(self, status: int, answer: object) -> None:
                if worker.is_gone:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if worker.is_cutting and self.path == "/generate":
                    worker.is_cutting = False
                    self.wfile.write(data[: len(data) // 2])
                    self.close_connection = True
                    return
                self.wfile.write(data)

            do_GET = do_POST = answer

        class Server(ThreadingHTTPServer):
            request_queue_size = 128
            daemon_threads = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_gone = True
        self.server.shutdown()
        self.server.server_close()

    def client(self, folder: Path) -> InferenceEngine:
        address = EngineAddress(
            self.name, "sglang", f"http://127.0.0.1:{self.port}", f"admin {self.name}"
        )
        client = SGLangEngine(EngineAddress(**{**vars(address), "api_key": self.key}), folder)
        client._served_version = self.version  # as after a sync
        return client


def tokens_of(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    return [(sum(prompt) + 5 * seed + index) % VOCABULARY for index in range(count)]


def answer_of(prompt: list[int], params: dict[str, Any], version: int) -> dict[str, Any]:
    count = params["max_new_tokens"]
    tokens = tokens_of(prompt, params["sampling_seed"], count)
    meta = {
        "finish_reason": {"type": "length"},
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "completion_tokens": count,
        "cached_tokens": 0,
        "weight_version": make_version_name(version),
        "weight_versions": [{"version": make_version_name(version), "start": 0, "end": count}],
    }
    return {"output_ids": tokens, "meta_info": meta}


@dataclass
class Rig:
    """Two workers, and one router for all tests: it costs seconds to start."""

    folder: Path
    router: SGLangRouterBalancer
    workers: list[Worker]

    def fleet(
        self, retries: int = 2, timeout_s: float = 30.0, interval_s: float = 5.0
    ) -> EngineFleet:
        for worker in self.workers:
            worker.seen.clear()
        supervision = SupervisionSettings(health_interval_s=interval_s, health_timeout_s=2.0)
        engines = [worker.client(self.folder) for worker in self.workers]
        return EngineFleet(
            engines, timeout_s, retries, supervision=supervision, balancer=self.router
        )

    def num_seen(self) -> list[int]:
        return [len(worker.seen) for worker in self.workers]

    def groups_by_worker(self) -> list[set[tuple[int, ...]]]:
        return [{tuple(body["input_ids"]) for body in worker.seen} for worker in self.workers]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("router")
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(name, f"key {name}")) for name in ("engine0", "engine1")
        ]
        process = prepare_router(str(sglang_python()), {}, folder, 60.0)
        router = SGLangRouterBalancer(
            process, max_restarts=2, health_interval_s=0.3, health_timeout_s=1.0
        )
        stack.callback(router.close)
        yield Rig(folder, router, workers)


@pytest.fixture(autouse=True)
def as_new(request: pytest.FixtureRequest) -> None:
    if "rig" in request.fixturenames:
        for worker in request.getfixturevalue("rig").workers:
            worker.version = VERSION
            worker.delay_s = 0.0
            worker.fail = 0
            worker.is_cutting = False


def check(fleet: EngineFleet, requests: Sequence[GenerateRequest] = REQUESTS) -> None:
    """Every sample once, in order, the one of its seed."""
    came: Counter[int] = Counter()
    groups = fleet.generate(
        requests, lambda first, new: came.update(range(first, first + len(new)))
    )
    assert came == Counter(range(len(requests)))
    for asked, group in zip(requests, groups, strict=True):
        expected = [
            tuple(tokens_of(asked.prompt_ids, seed, asked.params.max_new_tokens))
            for seed in asked.seeds
        ]
        assert [sample.token_ids for sample in group] == expected
        assert {sample.policy_version for sample in group} == {VERSION}


@pytest.mark.sglang
@needs_sglang
def test_groups_stay_together_and_are_spread_evenly(rig: Rig) -> None:
    for worker in rig.workers:
        worker.delay_s = 0.3
    check(rig.fleet())
    first, second = rig.groups_by_worker()
    assert not first & second and len(first | second) == len(REQUESTS)
    assert rig.num_seen() == [48, 48]
    body = rig.workers[0].seen[0]
    sent = {
        key: body["sampling_params"][key]
        for key in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")
    }
    assert sent == {
        "max_new_tokens": 5,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
    }
    assert body["return_logprob"] is True and body["extra_key"] == f"version {VERSION}"


@pytest.mark.sglang
@needs_sglang
def test_what_fails_is_asked_for_again_and_nobody_is_blamed_for_long(rig: Rig) -> None:
    """One 500 and an answer cut off: both groups come again, with the same seeds; the engines
    answer and serve.
    """
    rig.workers[0].fail = 1
    rig.workers[1].is_cutting = True
    fleet = rig.fleet()
    check(fleet)
    assert len(fleet.live_engines) == 2
    counters = fleet.take_counters()
    assert counters == {
        "rollout/engine_failures": 0.0,
        "rollout/engine_restarts": 0.0,
        "rollout/driver_restarts": 0.0,
        "rollout/requests_reissued": 2.0,
    }
    examined = [call for call in fleet.list_recent_calls() if call.verb == "check"]
    assert {call.engine for call in examined} == {"engine0", "engine1"} and not any(
        call.error for call in examined
    )


@pytest.mark.sglang
@needs_sglang
def test_an_engine_of_another_version_is_found_and_gets_no_more(rig: Rig) -> None:
    """Which one it was the router does not say: a token of each tells."""
    rig.workers[1].version = VERSION - 1
    for worker in rig.workers:
        worker.delay_s = 0.1
    fleet = rig.fleet()
    fleet._served_versions.set_current(VERSION)
    resynced: list[str] = []

    def resync(engines: Sequence[InferenceEngine]) -> None:
        for engine in engines:
            assert isinstance(engine, SGLangEngine)
            engine._served_version = rig.workers[1].version = VERSION
            resynced.append(engine.address.name)

    assert fleet.resync_engines is None  # nobody can mend it
    check(fleet)
    assert [engine.address.name for engine in fleet.live_engines] == ["engine0"]
    assert set(rig.router._confirmed_workers) == {f"http://127.0.0.1:{rig.workers[0].port}"}
    rig.workers[1].seen.clear()
    check(fleet)
    assert rig.num_seen()[1] == 0
    fleet.resync_engines = resync
    check(fleet)
    assert resynced == ["engine1"] and len(fleet.live_engines) == 2
    assert fleet.take_counters()["rollout/engine_failures"] == 1.0


@pytest.mark.sglang
@needs_sglang
def test_an_engine_that_comes_back_elsewhere_is_a_worker_again(rig: Rig) -> None:
    """It is gone in the middle of a call; then it has another port and another key."""
    fleet = rig.fleet(interval_s=0.2)
    lost = rig.workers[1]
    lost.delay_s = 0.2
    groups: list[int] = []

    def leave(first: int, new: object) -> None:
        if not groups:
            lost.__exit__()
        groups.append(first)

    fleet.generate(REQUESTS, leave)
    assert sorted(groups) == list(range(len(REQUESTS)))
    back = rig.workers[1] = Worker("engine1", "another key").__enter__()
    assert f"http://127.0.0.1:{lost.port}" not in rig.router._confirmed_workers
    for worker in rig.workers:
        worker.delay_s = 0.1
    check(rig.fleet())
    assert min(rig.num_seen()) > 0 and {body["extra_key"] for body in back.seen} == {
        f"version {VERSION}"
    }
    assert set(rig.router._confirmed_workers.values()) == {"key engine0", "another key"}


@pytest.mark.long
@pytest.mark.sglang
@needs_sglang
def test_a_router_that_dies_or_hangs_is_replaced(rig: Rig) -> None:
    """With another port and key. The third time it is the end, and no engine is blamed."""
    for worker in rig.workers:
        worker.delay_s = 0.4
    for number in (signal.SIGKILL, signal.SIGSTOP):
        process = rig.router.router_process.process
        address = rig.router.router_process.address
        assert process is not None and address is not None
        fleet = rig.fleet()
        killer = threading.Timer(0.3, os.killpg, (process.pid, number))
        killer.start()
        check(fleet)
        killer.join()
        renewed = rig.router.router_process.address
        assert (
            renewed is not None and renewed.token != address.token and process.exit_code is not None
        )
        counters = fleet.take_counters()
        assert (
            counters["rollout/engine_failures"] == 0.0 and counters["rollout/requests_reissued"] > 0
        )
    rig.router.router_process.kill_router()
    with pytest.raises(
        EngineError, match=r"rollout\.max_engine_restarts \(2\) is used up: it exited with code -9"
    ):
        rig.fleet().generate(REQUESTS)
    rig.router.restart_budget.num_restarts = 0
    check(rig.fleet())


@pytest.mark.sglang
@needs_sglang
def test_the_key_is_needed_and_stands_nowhere_else(rig: Rig) -> None:
    check(rig.fleet())
    address = rig.router.router_process.address
    process = rig.router.router_process.process
    assert address is not None and process is not None
    for path, data in (
        ("/generate", b'{"input_ids":[1],"sampling_params":{}}'),
        ("/workers", None),
    ):
        # one key does not do for the other
        other = address.token if path == "/generate" else address.api_key
        for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {other}"}):
            asked = urllib.request.Request(
                address.url + path, data, {"Content-Type": "application/json", **key}
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(asked, timeout=10)
            assert refused.value.code == 401
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    for key in (address.token, address.api_key):
        assert key.encode() not in command and key not in process.log.read_text()
    asked_ones = [worker for worker in rig.workers if worker.seen]
    assert asked_ones and all(
        worker.keys_seen == [worker.key, address.api_key] for worker in asked_ones
    )
    for name in ("router.args", "router.token", "router.log"):
        mode = (rig.folder / "engines" / name).stat().st_mode
        assert stat.S_IMODE(mode) == 0o600
    assert listening(process.pid) <= {"127.0.0.1"}


def listening(pid: int) -> set[str]:
    """Addresses on which a process listens."""
    inodes = {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                raw = bytes.fromhex(columns[1].split(":")[0])
                found.add(".".join(map(str, raw[::-1])) if len(raw) == 4 else raw.hex())
    assert found, "the router listens nowhere"
    return found


@pytest.mark.sglang
@needs_sglang
def test_a_request_that_is_wrong_itself_is_refused_at_once(rig: Rig) -> None:
    fleet = rig.fleet()
    with pytest.raises(EngineRequestError, match=r"token 77 .*vocabulary .*\(0 \.\. 31\)"):
        fleet.generate([request((1,), (1,), 2), request((77,), (1,), 2)])
    assert sum(rig.num_seen()) <= 1
    assert fleet.take_counters()["rollout/requests_reissued"] == 0.0


@pytest.mark.parametrize(
    ("is_deterministic", "path"), [(True, "/server_info"), (False, "/health_generate")]
)
def test_a_server_where_seeds_count_gets_no_greedy_request(
    tmp_path: Path, is_deterministic: bool, path: str
) -> None:
    """SGLang's own health request is one, and in a batch with others it changes what their seeds
    draw. So the clients behind a router ask as well, which never generate themselves.
    """
    with Worker("engine0", "key engine0", is_deterministic=is_deterministic) as worker:
        client = worker.client(tmp_path)
        client.check_health(10.0)
        worker.paths.clear()
        client.check_health(10.0)
        assert worker.paths == ["/model_info", path]
        client.close()


def script(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "exit 1",
            r"which is not installed for .*python.*; install it there .*remove rollout\.router",
        ),
        ("echo 0.3.1", r"is 0\.3\.1, which must be 0\.3\.2 or newer and below 0\.4; install"),
        ("echo 0.4.0", r"is 0\.4\.0, which must be"),
    ],
)
def test_no_router_or_another_version(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare_router(script(tmp_path, text), {}, tmp_path, 5.0)


def test_a_router_that_does_not_start_says_why(tmp_path: Path) -> None:
    python = script(
        tmp_path, 'if [ "$1" = -c ]; then echo 0.3.2; else echo "no such policy"; exit 3; fi'
    )
    with pytest.raises(
        EngineError, match=r"(?s)router exited with code 3 before it was ready; .*no such policy"
    ):
        SGLangRouterBalancer(prepare_router(python, {}, tmp_path, 20.0), max_restarts=0)


def test_a_lost_port_is_tried_again_and_one_that_never_answers_ends(tmp_path: Path) -> None:
    lost = f'echo x >> {tmp_path}/tries; echo "Address already in use (os error 98)"; exit 1'
    python = script(tmp_path, f'if [ "$1" = -c ]; then echo 0.3.2; else {lost}; fi')
    with pytest.raises(EngineError, match="Address already in use"):
        SGLangRouterBalancer(prepare_router(python, {}, tmp_path, 20.0), max_restarts=0)
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    python = script(tmp_path, 'if [ "$1" = -c ]; then echo 0.3.2; else sleep 60; fi')
    start = time.monotonic()
    with pytest.raises(
        EngineError, match=r"router was not ready after 1 s \(rollout.startup_timeout_s\)"
    ):
        SGLangRouterBalancer(prepare_router(python, {}, tmp_path, 1.0), max_restarts=0)
    assert time.monotonic() - start < 20
