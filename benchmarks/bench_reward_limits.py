"""Limits of a reward server over eight worker processes, and a server that is away for 20 seconds.

    python -m benchmarks.bench_reward_limits [--rate 40] [--seconds 20] [--away-s 20] [--workers 8]

A real server on this machine counts requests by when they come, and how many it has at once.
`rate`: requests a second that arrived over those that `requests_per_s` allows, from the first to
the last. `away`: the server refuses connections for 20 s in the midst of the samples, then is there
again at its address; each sample must have its own score, once, and none may be masked. A third
batch has less patience than the server is away: those samples are masked, and told. A difference
ends the benchmark. Writes benchmarks/results/reward_limits.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common import significant, write_result
from rlhf_megatron.config.schema import RewardConfig
from rlhf_megatron.rewards.scorers import RewardResult, RewardSample
from rlhf_megatron.rewards.service.reward_scorer import make_reward_scorer


class Server(ThreadingHTTPServer):
    """Scores a text by its length, after a moment."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.lock = threading.Lock()
        self.arrivals = list[float]()
        self.at_once = 0
        self.most = 0
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        server = self.server
        with server.lock:
            server.arrivals.append(time.monotonic())
            server.at_once += 1
            server.most = max(server.most, server.at_once)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(0.02)
        data = json.dumps({"embedding": [float(len(body["text"]))]}).encode()
        with server.lock:
            server.at_once -= 1
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


def samples(count: int) -> list[RewardSample]:
    return [RewardSample("", "x" * (1 + number), "", "s", "stop", 1) for number in range(count)]


def score(
    port: int, count: int, workers: int, patience_s: float, **limits: float
) -> tuple[list[RewardResult], float]:
    """(results, wall seconds)."""
    server = {"url": f"http://127.0.0.1:{port}/classify", "patience_s": patience_s, **limits}
    params = {"servers": [server], "patience_s": patience_s}
    config = RewardConfig(
        name="reward_server", params=params, num_workers=workers, max_error_rate=1.0
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        make_reward_scorer(config, Path(folder) / "log") as scorer,
    ):
        scorer(samples(2 * workers))  # all workers are there
        start = time.monotonic()
        return scorer(samples(count)), time.monotonic() - start


def check(results: list[RewardResult]) -> dict[str, int]:
    """Statuses. Raises ValueError where a sample has the score of another, or 0 by mistake."""
    wrong = [i for i, one in enumerate(results) if one.status == "ok" and one.score != i + 1]
    wrong += [i for i, one in enumerate(results) if one.status not in ("ok", "masked:endpoint")]
    if wrong:
        raise ValueError(
            f"samples {wrong[:5]} have a wrong status or score, the first {results[wrong[0]]}"
        )
    return dict(Counter(one.status for one in results))


def limited(args: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    count = int(args.rate * args.seconds)
    results, _ = score(
        server.server_address[1],
        count,
        args.workers,
        120.0,
        requests_per_s=args.rate,
        concurrency=4,
    )
    server.stop()
    arrivals = sorted(server.arrivals)[-count:]
    rate = (count - 1) / (arrivals[-1] - arrivals[0])
    found = {
        "statuses": check(results),
        "allowed": args.rate,
        "arrived": significant(rate),
        "at_once": server.most,
    }
    if not 0.95 <= rate / args.rate <= 1.05 or server.most > 4:
        raise ValueError(f"the limits were not held within 5 %: {found}")
    return found


def away(args: argparse.Namespace, patience_s: float) -> dict[str, Any]:
    """A rate by which samples go on for longer than the server is away."""
    server = Server()
    port = server.server_address[1]
    count = int(2 * args.away_s)

    def leave() -> None:
        first = len(server.arrivals)
        while len(server.arrivals) < first + 2 * args.workers + 10:
            time.sleep(0.01)
        server.stop()
        time.sleep(args.away_s)
        again.append(Server(port))

    again: list[Server] = []
    leaving = threading.Thread(target=leave)
    leaving.start()
    results, wall_s = score(port, count, args.workers, patience_s, requests_per_s=20.0)
    leaving.join()
    again[0].stop()
    return {"statuses": check(results), "patience_s": patience_s, "wall_s": significant(wall_s)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=40.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of the limited batch")
    parser.add_argument("--away-s", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    result = {"workers": args.workers, "away_s": args.away_s, "limits": limited(args)}
    result["away"] = away(args, 6 * args.away_s)
    result["away_with_little_patience"] = away(args, args.away_s / 10)
    if set(result["away"]["statuses"]) != {"ok"}:
        raise ValueError(f"samples were lost while the server was away: {result['away']}")
    print(result)
    print(
        f"wrote {write_result('reward_limits', 'python -m benchmarks.bench_reward_limits', result)}"
    )


if __name__ == "__main__":
    main()
