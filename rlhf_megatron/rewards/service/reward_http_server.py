"""Rewards behind HTTP, for runs on other machines: POST /score takes one sample, and answers
with its result.

Requests that come while samples are scored are scored together, next: the worker processes
serve all of them.
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

from rlhf_megatron.rewards.scorers.reward_types import RewardResult, RewardSample
from rlhf_megatron.rewards.service.response_reading import ReadingReporter
from rlhf_megatron.rewards.service.reward_scorer import RewardScorer

MAX_BODY_BYTES = 1 << 26
LOOK_S = 0.5  # for a request to end
SOCKET_S = 60.0  # for a client that sends or reads nothing
PATH = "/score"
LOCAL = ("127.0.0.1", "localhost")


class RewardHttpServer(ThreadingHTTPServer):
    """An HTTP server that answers from threads of its own; `score_until_over` scores the samples,
    on the thread that has entered the scorer.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, api_key: str | None) -> None:
        """Bind the server to the address. Raise ValueError for an address that other machines reach
        without a key, OSError for one that is in use.
        """
        if api_key is None and host not in LOCAL:
            raise ValueError(
                f"--host {host} is reached by others: give the key that clients must"
                " send (--api-key-file)."
            )
        super().__init__((host, port), _RewardRequestHandler)
        self.api_key = api_key
        self._waiting_samples: list[tuple[RewardSample, Future[RewardResult]]] = []
        self._state_changed = threading.Condition()
        self._has_ended = False

    @property
    def url(self) -> str:
        """Return the URL to which clients post samples."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}{PATH}"

    def score_sample(self, sample: RewardSample) -> RewardResult:
        """Queue the sample, wait until `score_until_over` has scored it, and return the result.
        Raise ValueError where the server ends, or as the scorer does.
        """
        result: Future[RewardResult] = Future()
        with self._state_changed:
            if self._has_ended:
                raise ValueError("the server ends")
            self._waiting_samples.append((sample, result))
            self._state_changed.notify()
        return result.result()

    def score_until_over(
        self,
        scorer: RewardScorer,
        is_over: Callable[[], bool],
        report_line: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Serve requests and score the queued samples, in batches on this thread, until `is_over`
        returns True; then close the server and fail the samples that wait. `report_line` is called
        with what is to be said of the responses that the rewards read, when they first come.
        """
        reporter = ReadingReporter(scorer.components, report_line)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        try:
            while not is_over():
                with self._state_changed:
                    self._state_changed.wait_for(lambda: self._waiting_samples, LOOK_S)
                    batch = self._waiting_samples
                    self._waiting_samples = []
                if batch:
                    reporter.report_samples([sample for sample, _ in batch])
                    _score_waiting_batch(scorer, batch)
        finally:
            with self._state_changed:
                self._has_ended = True
                for _, answer in self._waiting_samples:
                    answer.set_exception(ValueError("the server ends"))
            self.shutdown()
            self.server_close()


def _score_waiting_batch(
    scorer: RewardScorer, batch: list[tuple[RewardSample, Future[RewardResult]]]
) -> None:
    """Score the samples together and set their futures. Set and raise the ValueError of a scorer
    whose processes are gone.
    """
    try:
        results = scorer.score_without_limit([sample for sample, _ in batch])
    except ValueError as error:  # the processes of the rewards are gone for good
        for _, answer in batch:
            answer.set_exception(error)
        raise
    for (_, answer), result in zip(batch, results, strict=True):
        answer.set_result(result)


class _RewardRequestHandler(BaseHTTPRequestHandler):
    server: RewardHttpServer
    timeout = SOCKET_S

    def do_POST(self) -> None:
        """Answer a POST: check the origin, the key, the path and the length, then score the sample
        in the body.
        """
        given = self.headers.get("Authorization", "")
        wanted = f"Bearer {self.server.api_key}"
        length = self.headers.get("Content-Length", "")
        if "Origin" in self.headers:
            self._send_json(403, {"error": "web pages are not served"})
        elif self.server.api_key is not None and not hmac.compare_digest(
            given.encode(), wanted.encode()
        ):
            self._send_json(
                401,
                {
                    "error": (
                        "a bearer token is needed: key_file of the server in the"
                        " run's configuration"
                    )
                },
            )
        elif self.path != PATH:
            self._send_json(404, {"error": f"the path is {PATH}"})
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self._send_json(
                413, {"error": f"a body needs a length, at most {MAX_BODY_BYTES} bytes"}
            )
        else:
            self._answer_sample(self.rfile.read(int(length)))

    def _answer_sample(self, body: bytes) -> None:
        """Score the sample in the body and send its result; 400 for a body that is no sample, 503
        where the server cannot score.
        """
        try:
            sample = msgspec.json.decode(body, type=RewardSample)
        except (msgspec.DecodeError, RecursionError) as error:
            self._send_json(400, {"error": f"the body is no sample: {error}"})
            return
        try:
            result = self.server.score_sample(sample)
        except ValueError as error:
            self._send_json(503, {"error": str(error)})
        else:
            self._send_json(200, asdict(result))

    def _send_json(self, status: int, answer: dict[str, object]) -> None:
        """Send a response of this status with the answer as JSON."""
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Log nothing: a run asks thousands of times a step."""
