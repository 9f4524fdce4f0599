"""Rewards behind HTTP, for runs on other machines: POST /score takes one sample, and answers with its result.

Requests that come while samples are scored are scored together, next: the worker processes serve all of them.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from rlhf_megatron.rewards.scorers.base import RewardResult, RewardSample
from rlhf_megatron.rewards.service.scorer import Scorer

MAX_BODY_BYTES = 1 << 26
LOOK_S = 0.5  # for a request to end
SOCKET_S = 60.0  # for a client that sends or reads nothing
PATH = "/score"
LOCAL = ("127.0.0.1", "localhost")


class RewardServer(ThreadingHTTPServer):
    """Answers from threads of its own; `run` scores, on the thread that has entered the scorer."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, key: str | None) -> None:
        """Raises ValueError for an address that others reach without a key, OSError for one that is taken."""
        if key is None and host not in LOCAL:
            raise ValueError(
                f"--host {host} is reached by others: give the key that clients must send (--api-key-file)."
            )
        super().__init__((host, port), _Handler)
        self.key = key
        self._waiting: list[tuple[RewardSample, Future[RewardResult]]] = []
        self._changed = threading.Condition()
        self._has_ended = False

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}{PATH}"

    def score(self, sample: RewardSample) -> RewardResult:
        """Wait for `run`. Raises ValueError where that has ended, or as the scorer does."""
        result: Future[RewardResult] = Future()
        with self._changed:
            if self._has_ended:
                raise ValueError("the server ends")
            self._waiting.append((sample, result))
            self._changed.notify()
        return result.result()

    def run(self, scorer: Scorer, is_over: Callable[[], bool]) -> None:
        """Score what comes until `is_over`."""
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            while not is_over():
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting, LOOK_S)
                    batch, self._waiting = self._waiting, []
                if batch:
                    _answer(scorer, batch)
        finally:
            with self._changed:
                self._has_ended = True
                for _, answer in self._waiting:
                    answer.set_exception(ValueError("the server ends"))
            self.shutdown()
            self.server_close()


def _answer(scorer: Scorer, batch: list[tuple[RewardSample, Future[RewardResult]]]) -> None:
    try:
        results = scorer.unbounded([sample for sample, _ in batch])
    except ValueError as error:  # the processes of the rewards are gone for good
        for _, answer in batch:
            answer.set_exception(error)
        raise
    for (_, answer), result in zip(batch, results, strict=True):
        answer.set_result(result)


class _Handler(BaseHTTPRequestHandler):
    server: RewardServer
    timeout = SOCKET_S

    def do_POST(self) -> None:
        given, wanted = self.headers.get("Authorization", ""), f"Bearer {self.server.key}"
        length = self.headers.get("Content-Length", "")
        if "Origin" in self.headers:
            self._say(403, {"error": "web pages are not served"})
        elif self.server.key is not None and not hmac.compare_digest(given.encode(), wanted.encode()):
            self._say(401, {"error": "a bearer token is needed: key_file of the server in the run's configuration"})
        elif self.path != PATH:
            self._say(404, {"error": f"the path is {PATH}"})
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self._say(413, {"error": f"a body needs a length, at most {MAX_BODY_BYTES} bytes"})
        else:
            self._score(self.rfile.read(int(length)))

    def _score(self, body: bytes) -> None:
        try:
            sample = msgspec.json.decode(body, type=RewardSample)
        except (msgspec.DecodeError, RecursionError) as error:
            self._say(400, {"error": f"the body is no sample: {error}"})
            return
        try:
            result = self.server.score(sample)
        except ValueError as error:
            self._say(503, {"error": str(error)})
        else:
            self._say(200, asdict(result))

    def _say(self, status: int, answer: dict[str, object]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Log nothing: a run asks thousands of times a step."""
