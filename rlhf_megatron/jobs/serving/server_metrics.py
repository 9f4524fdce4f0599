"""Figures of a server in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator

from rlhf_megatron.jobs.serving.serving_backend import ServingBackend
from rlhf_megatron.rollout.fleet.engine_fleet import COUNTERS

PREFIX = "rlhf_megatron_"
BORDERS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class DurationHistogram:
    """A histogram of durations in seconds, with the upper borders BORDERS_S."""

    def __init__(self) -> None:
        """Begin without durations."""
        self._counts = [0] * (len(BORDERS_S) + 1)
        self._sum_s = 0.0

    def add_duration(self, seconds: float) -> None:
        """Count a duration, in seconds."""
        self._counts[bisect_left(BORDERS_S, seconds)] += 1
        self._sum_s += seconds

    def format_lines(self, metric_name: str, label: str) -> Iterator[str]:
        """Yield the lines of the histogram in Prometheus' format: cumulative buckets, sum and
        count. `label` is the text of a further label, such as endpoint="/health".
        """
        total = 0
        for border, count in zip((*map(str, BORDERS_S), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{metric_name}_bucket{{{label},le="{border}"}} {total}'
        yield f"{metric_name}_sum{{{label}}} {self._sum_s:.6f}"
        yield f"{metric_name}_count{{{label}}} {total}"


class ServerMetrics:
    """The counts and durations of a server. They are written and read in the event loop only."""

    def __init__(self, backend: ServingBackend) -> None:
        """Begin with all counts at 0; the figures of engines are read from `backend`."""
        self._backend = backend
        self.request_counts: Counter[tuple[str, int]] = Counter()  # endpoint, status
        self.token_counts: Counter[str] = Counter()  # prompt, generated
        # endpoint -> of whole answers
        self.answer_seconds: defaultdict[str, DurationHistogram] = defaultdict(DurationHistogram)
        self.first_text_seconds: defaultdict[str, DurationHistogram] = defaultdict(
            DurationHistogram
        )  # of streams, to their first text

    def format_metrics(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return "\n".join(self._iterate_lines()) + "\n"

    def _iterate_lines(self) -> Iterator[str]:
        """Yield the lines of all metrics: requests, tokens, durations, engines, and the fleet's
        counters.
        """
        backend = self._backend
        live, num_engines = backend.engine_counts
        yield from _format_metric_header("requests_total", "counter", "answered requests")
        for (endpoint, status), count in sorted(self.request_counts.items()):
            yield f'{PREFIX}requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
        yield from _format_metric_header(
            "tokens_total", "counter", "tokens of prompts and of answers"
        )
        for kind in ("prompt", "generated"):
            yield f'{PREFIX}tokens_total{{kind="{kind}"}} {self.token_counts[kind]}'
        for name, histograms, what in (
            ("request_seconds", self.answer_seconds, "of whole answers"),
            (
                "first_token_seconds",
                self.first_text_seconds,
                "from a request to the first text of its stream",
            ),
        ):
            yield from _format_metric_header(name, "histogram", f"seconds {what}")
            for endpoint, histogram in sorted(histograms.items()):
                yield from histogram.format_lines(PREFIX + name, f'endpoint="{endpoint}"')
        gauges = {
            "pieces_running": (backend.num_running, "pieces of answers that wait or are drawn"),
            "engines": (num_engines, "engines of this server"),
            "engines_serving": (live, "engines that serve now"),
            "policy_version": (
                backend.policy_version,
                "version of the weights: of a run, the step of the checkpoint",
            ),
        }
        for name, (value, what) in gauges.items():
            yield from _format_metric_header(name, "gauge", what)
            yield f"{PREFIX}{name} {value}"
        for counter in COUNTERS:
            name = counter.removeprefix("rollout/") + "_total"
            yield from _format_metric_header(name, "counter", "since the start")
            yield f"{PREFIX}{name} {backend.counters[counter]}"


def _format_metric_header(name: str, kind: str, help_text: str) -> Iterator[str]:
    """Yield the HELP and TYPE lines of a metric; `name` is without the common prefix."""
    yield f"# HELP {PREFIX}{name} {help_text}"
    yield f"# TYPE {PREFIX}{name} {kind}"
