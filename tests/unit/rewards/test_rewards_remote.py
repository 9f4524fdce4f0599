"""Rewards behind HTTP: the command, two servers of it, and a run's scorer that asks them."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_samples import VALID

from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardSample
from rlhf_megatron.rewards.service.reward_http_server import RewardHttpServer, ScoringEndedError
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer

FUNCTION = """
import os

def score(response, label):
    if response == "raise":
        raise KeyError(label)
    if response == "die":
        os.kill(os.getpid(), 9)
    return {"score": float(response == label), "length": len(response)}
"""


class Served:
    """Two `RewardHttpServer`s of a user's function, in this process. The main thread enters
    scorers, as it must.
    """

    def __init__(self, folder: Path) -> None:
        (folder / "mine.py").write_text(FUNCTION)
        config = RewardConfig(
            name="function", params={"path": f"{folder / 'mine.py'}:score"}, num_workers=2
        )
        self.ends = [threading.Event(), threading.Event()]
        self.scorers = [make_reward_scorer(config, folder / f"log{number}") for number in range(2)]
        self.servers = [RewardHttpServer("127.0.0.1", 0, "secret") for _ in self.scorers]
        self.threads = []
        for server, scorer, end in zip(self.servers, self.scorers, self.ends, strict=True):
            scorer.__enter__()
            scorer.wait_until_ready()
            self.threads.append(
                threading.Thread(target=server.score_until_over, args=(scorer, end.is_set))
            )
            self.threads[-1].start()

    def stop(self, number: int) -> None:
        self.ends[number].set()
        self.threads[number].join()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    found = Served(tmp_path)
    yield found
    for number, scorer in enumerate(found.scorers):
        found.stop(number)
        scorer.__exit__(None, None, None)


def config_of(folder: Path, *servers: RewardHttpServer) -> RewardConfig:
    (folder / "key").write_text("secret\n")
    addresses = [
        {"url": server.url, "key_file": str(folder / "key"), "patience_s": 20.0}
        for server in servers
    ]
    params = {"servers": addresses, "patience_s": 60.0, "rest_s": 3600.0}
    return RewardConfig(name="remote", params=params, num_workers=3, max_error_rate=1.0)


def sample(response: str, label: str = "4") -> RewardSample:
    return RewardSample("2+2=", response, label, "s", "stop", 1)


def test_every_sample_has_its_own_result_though_a_server_ends(
    tmp_path: Path, served: Served
) -> None:
    asked = [sample(str(number), str(number - number % 3)) for number in range(40)] + [
        sample("raise"),
        sample("die"),
    ]
    with make_reward_scorer(config_of(tmp_path, *served.servers), tmp_path / "log") as scorer:
        for _ in range(2):
            results = scorer.score_without_limit(asked)
            assert [one.score for one in results[:40]] == [
                float(number % 3 == 0) for number in range(40)
            ]
            assert [one.parts["remote/function/length"] for one in results[:40]] == [
                float(len(str(n))) for n in range(40)
            ]
            assert [one.status for one in results[40:]] == ["masked:KeyError", "masked:worker_died"]
            served.stop(0)


def test_a_server_that_ends_tells_those_that_wait(served: Served) -> None:
    """So that they ask another one at once. It has accepted the sample,
    and ends before it scores.
    """
    server = RewardHttpServer("127.0.0.1", 0, "secret")
    waiting = threading.Thread(target=lambda: errors.append(_error_of(server)))
    errors: list[str] = []
    waiting.start()
    while not server._waiting_samples:
        waiting.join(0.01)
    server.score_until_over(served.scorers[0], lambda: True)
    waiting.join()
    assert [*errors, _error_of(server)] == ["the server ends"] * 2


def _error_of(server: RewardHttpServer) -> str:
    with pytest.raises(ScoringEndedError) as error:
        server.queue_sample(sample("4")).result()
    return str(error.value)


def test_what_is_no_sample_is_refused(served: Served) -> None:
    def post(body: bytes, path: str = "/score", **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection(*served.servers[0].server_address[:2], timeout=60.0)
        connection.request("POST", path, body, {"Authorization": "Bearer secret", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    assert post(b"{}")[0] == post(b"[" * 100000)[0] == post(b'{"prompt": 1}')[0] == 400
    assert post(b"{}", path="/")[0] == 404
    assert post(b"{}", Authorization="Bearer secret2")[0] == 401
    assert post(b"{}", Origin="http://site")[0] == 403
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 is reached by others: give the key"):
        RewardHttpServer("0.0.0.0", 0, None)


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                **yaml.safe_load(VALID),
                "reward": {"name": "exact_match", "params": {"pattern": "#### (.*)"}},
            }
        )
    )
    command = [sys.executable, "-m", "rlhf_megatron", "serve-rewards", str(path), "--port", "0"]
    env = {**os.environ, "RLHF_MEGATRON_API_KEY": ""}
    process = subprocess.Popen(
        [*command, f"--out={tmp_path / 'out'}"], stderr=subprocess.PIPE, text=True, env=env
    )
    assert process.stderr is not None
    try:
        said = next(line for line in process.stderr if line.startswith("rewards at "))
        url = said.removeprefix("rewards at ").strip()
        params = {"servers": [{"url": url}]}
        with make_reward_scorer(
            RewardConfig(name="remote", params=params, num_workers=1), tmp_path / "log"
        ) as scorer:
            results = scorer.score_without_limit([sample("#### 4"), sample("#### 5"), sample("?")])
        assert [(one.status, one.score) for one in results] == [
            ("ok", 1.0),
            ("ok", 0.0),
            ("malformed", 0.0),
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0
    finally:
        process.kill()
        process.wait()
