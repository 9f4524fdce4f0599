"""Figures of a server in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator

from rlhf_megatron.rollout.fleet.fleet import COUNTERS
from rlhf_megatron.serving.backend import Backend

PREFIX = "rlhf_megatron_"
BORDERS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Durations, counted by upper borders."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BORDERS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BORDERS_S, seconds)] += 1
        self._sum_s += seconds

    def lines(self, name: str, label: str) -> Iterator[str]:
        total = 0
        for border, count in zip((*map(str, BORDERS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{label},le="{border}"}} {total}'
        yield f"{name}_sum{{{label}}} {self._sum_s:.6f}"
        yield f"{name}_count{{{label}}} {total}"


class ServerMetrics:
    """Written and read in the event loop."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.requests: Counter[tuple[str, int]] = Counter()  # endpoint, status
        self.tokens: Counter[str] = Counter()  # prompt, generated
        self.seconds: defaultdict[str, Histogram] = defaultdict(Histogram)  # endpoint -> of whole answers
        self.first_seconds: defaultdict[str, Histogram] = defaultdict(Histogram)  # of streams, to their first text

    def text(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        backend = self._backend
        live, num_engines = backend.num_engines
        yield from _metric("requests_total", "counter", "answered requests")
        for (endpoint, status), count in sorted(self.requests.items()):
            yield f'{PREFIX}requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
        yield from _metric("tokens_total", "counter", "tokens of prompts and of answers")
        for kind in ("prompt", "generated"):
            yield f'{PREFIX}tokens_total{{kind="{kind}"}} {self.tokens[kind]}'
        for name, histograms, what in (
            ("request_seconds", self.seconds, "of whole answers"),
            ("first_token_seconds", self.first_seconds, "from a request to the first text of its stream"),
        ):
            yield from _metric(name, "histogram", f"seconds {what}")
            for endpoint, histogram in sorted(histograms.items()):
                yield from histogram.lines(PREFIX + name, f'endpoint="{endpoint}"')
        gauges = {
            "pieces_running": (backend.num_running, "pieces of answers that wait or are drawn"),
            "engines": (num_engines, "engines of this server"),
            "engines_serving": (live, "engines that serve now"),
            "policy_version": (backend.version, "version of the weights: of a run, the step of the checkpoint"),
        }
        for name, (value, what) in gauges.items():
            yield from _metric(name, "gauge", what)
            yield f"{PREFIX}{name} {value}"
        for counter in COUNTERS:
            name = counter.removeprefix("rollout/") + "_total"
            yield from _metric(name, "counter", "since the start")
            yield f"{PREFIX}{name} {backend.counters[counter]}"


def _metric(name: str, kind: str, what: str) -> Iterator[str]:
    yield f"# HELP {PREFIX}{name} {what}"
    yield f"# TYPE {PREFIX}{name} {kind}"
