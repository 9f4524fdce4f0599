"""A reward model behind HTTP servers: real servers on this machine, of which one is killed,
refuses or lies.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rlhf_megatron.data.tokenizer import write_character_tokenizer
from rlhf_megatron.rewards import endpoint_replicas
from rlhf_megatron.rewards.reward_endpoint import RewardEndpoint
from rlhf_megatron.rewards.scorers import RewardSample, reward_server
from rlhf_megatron.rewards.scorers.reward_server import RewardServerParams

score = reward_server.score_by_reward_server
Answer = Callable[[dict[str, Any]], tuple[int, Any]]


def embedding(*numbers: float) -> Answer:
    return lambda body: (200, [{"embedding": list(numbers)}])


def of_length(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, {"embedding": [len(body["text"]) / 10]}


class Server(ThreadingHTTPServer):
    """Answers as `answer` says, and counts what it was asked."""

    daemon_threads = True

    def __init__(self, answer: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked = list[dict[str, Any]]()
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def url(self, path: str = "/classify") -> str:
        return f"http://127.0.0.1:{self.server_address[1]}{path}"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        status, answer = self.server.answer(body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def start() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def started(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    endpoint_replicas._resting.clear()
    yield started
    for server in servers:
        server.stop()


def params_of(*urls: str, **settings: Any) -> RewardServerParams:
    return RewardServerParams(
        tuple(RewardEndpoint(url, timeout_s=20.0) for url in urls), **settings
    )


def sample(response: str) -> RewardSample:
    return RewardSample("Q: ", response, "", "s", "stop", 3)


def test_every_sample_is_scored_once_when_a_replica_ends(
    start: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_replicas, "FAILOVER_S", 0.01)
    first = start(of_length)
    second = start(of_length)
    params = params_of(first.url(), second.url(), ending="!", rest_s=3600.0)
    assert params.prepare() == "reward model: 2 of 2 servers answer"
    first.asked.clear()
    second.asked.clear()
    results = []
    for number in range(60):
        if number == 30:
            before = len(first.asked)
            first.stop()
        results.append(score(sample("a" * number), params))
    assert [(result.status, result.score) for result in results] == [
        ("ok", (number + 4) / 10) for number in range(60)
    ]
    asked = [body["text"] for server in (first, second) for body in server.asked]
    assert sorted(map(len, asked)) == list(range(4, 64)) and 0 < before == len(first.asked)
    assert sum(result.parts["failovers"] for result in results) == 1, "a server that failed rests"


def test_a_server_that_comes_back_is_asked_again(start: Callable[[Answer], Server]) -> None:
    answers = iter([(503, {}), (503, {}), *[(200, {"embedding": [2.0]})] * 40])
    flaky = start(lambda body: next(answers))
    params = RewardServerParams(
        (RewardEndpoint(flaky.url(), patience_s=0.01),), rest_s=3600.0, patience_s=60.0
    )
    assert score(sample("a"), params).parts["failovers"] == 2
    assert endpoint_replicas._resting == {} and score(sample("b"), params).score == 2.0


def test_no_server_at_all_masks_the_sample(start: Callable[[Answer], Server]) -> None:
    gone = start(of_length)
    url = gone.url()
    gone.stop()
    params = RewardServerParams((RewardEndpoint(url, patience_s=0.01),), patience_s=0.0)
    assert score(sample("a"), params).status == "masked:endpoint"
    with pytest.raises(ValueError, match="no server of the reward model gives a score"):
        params.prepare()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (embedding(0.1, 0.2, 0.3), "answered 3 numbers, the first 0.1, in place of one score"),
        (embedding(float("nan")), "answered 1 numbers, the first nan"),
        (lambda body: (200, {"data": "?"}), "which has no embedding"),
        (lambda body: (400, {"error": "too long"}), "answered 400"),
    ],
)
def test_what_is_no_score_is_refused_at_once(
    start: Callable[[Answer], Server], answer: Answer, text: str
) -> None:
    server = start(answer)
    with pytest.raises(ValueError, match=text):
        params_of(server.url()).prepare()
    result = score(sample("a"), params_of(server.url()))
    assert result.status == "masked:refused" and text in result.error and len(server.asked) == 2


def unspellable(body: dict[str, Any]) -> tuple[int, Any]:
    """As SGLang answers for text that its tokenizer cannot spell."""
    return (500, {}) if "\u2603" in body["text"] else of_length(body)


@pytest.mark.parametrize("count", [1, 2])
def test_a_sample_that_servers_fail_at_is_masked_at_once(
    start: Callable[[Answer], Server], count: int
) -> None:
    """They answer others, so it is the sample: it waits for no patience, and no server rests."""
    servers = [start(unspellable) for _ in range(count)]
    params = params_of(*(server.url() for server in servers), rest_s=3600.0)
    result = score(sample("\u2603"), params)
    assert result.status == "masked:refused" and "answered 500" in result.error
    assert sum(len(server.asked) for server in servers) == 3 * count, "it twice, and a probe"
    assert score(sample("a"), params).parts["failovers"] == 0 and endpoint_replicas._resting == {}


def test_a_server_that_fails_at_all_is_not_the_samples_fault(
    start: Callable[[Answer], Server],
) -> None:
    broken = start(lambda body: (500, {}))
    params = RewardServerParams((RewardEndpoint(broken.url(), patience_s=0.5),), patience_s=0.0)
    assert score(sample("a"), params).status == "masked:endpoint"
    refuser = start(lambda body: (404, {}))
    good = start(of_length)
    found = [
        score(sample("a"), params_of(refuser.url(), good.url(), rest_s=3600.0)) for _ in range(40)
    ]
    assert {result.status for result in found} == {"ok"} and len(refuser.asked) == 1, "it rests"


def test_replicas_with_biases_of_their_own_are_refused(start: Callable[[Answer], Server]) -> None:
    params = params_of(start(embedding(0.5)).url(), start(embedding(0.54)).url())
    with pytest.raises(
        ValueError, match=r"servers score one text differently .* write score.bias \(0\)"
    ):
        params.prepare()


def test_a_router_is_asked_for_embeddings(start: Callable[[Answer], Server]) -> None:
    router = start(lambda body: (200, {"data": [{"embedding": [len(body["input"])]}]}))
    assert score(sample("ab"), params_of(router.url("/v1/embeddings"), model="rm")).score == 5
    assert router.asked == [{"model": "rm", "input": "Q: ab"}]


def test_paths_that_say_1_for_all() -> None:
    with pytest.raises(ValueError, match=r"gives 1\.0 for every text"):
        params_of("http://127.0.0.1:1/v1/classify")
    with pytest.raises(ValueError, match="servers must name one server"):
        params_of()


def test_the_ids_of_the_models_own_tokenizer_are_sent(
    start: Callable[[Answer], Server], tmp_path: Path
) -> None:
    """A server would add its own tokens to text: a second <bos> in front of that of a template."""
    write_character_tokenizer(tmp_path)
    server = start(lambda body: (200, {"embedding": [len(body["input_ids"])]}))
    params = params_of(server.url(), tokenizer=str(tmp_path), mean=3.0, std=2.0)
    assert score(replace(sample("12<eos>"), prompt="<pad>1"), params).score == (5 - 3) / 2
    assert server.asked == [{"input_ids": [0, 3, 3, 4, 1]}]
    assert (
        score(replace(sample(""), prompt=""), params).status == "masked:refused"
        and len(server.asked) == 1
    )


def test_a_score_far_from_0_has_a_sigmoid(start: Callable[[Answer], Server]) -> None:
    server = start(embedding(-5e4))
    assert score(sample("a"), params_of(server.url(), activation="sigmoid")).score == 0.0
