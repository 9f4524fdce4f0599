"""What a run shows and writes: it times stages, reads metrics off batches and tells the loggers. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.evaluation.evaluation import EvaluationResult
from rlhf_megatron.observe.health import HealthWatch
from rlhf_megatron.observe.line_file import RunClock
from rlhf_megatron.observe.loggers import BatchView, Loggers
from rlhf_megatron.observe.metrics.batch import batch_metrics, distributions, samples_of, variance_metrics
from rlhf_megatron.observe.metrics.mismatch import mismatch_record
from rlhf_megatron.observe.metrics.rates import balance, throughput, time_per_token, utilisation
from rlhf_megatron.observe.run_facts import RunFacts
from rlhf_megatron.observe.trace import STAGES, STEPS, Trace

NOTHING_KNOWN = RunFacts()


class Tracker:
    """Owned by the controller. Use as a context manager: files are closed on every way out.

    With the logger "jsonl" there is a trace.json too. Its event "track" is the time that the tracker itself took.
    """

    def __init__(
        self,
        run_dir: Path,
        loggers: tuple[str, ...],
        total_steps: int,
        facts: RunFacts = NOTHING_KNOWN,
        clock: RunClock | None = None,
        watched: str | None = None,
    ) -> None:
        """`watched`: metric whose values `watched_values` has by step."""
        self.run_dir = run_dir
        self.watched_values: dict[int, float] = {}
        self.facts = facts
        self.clock = clock or RunClock(time.time())
        self.curve: list[tuple[int, float]] = []  # step, facts.curve: mean reward, or loss
        self.evaluations: list[tuple[int, EvaluationResult]] = []
        peak_lr = facts.settings.get("actor.optim.lr")
        self.health = HealthWatch(float(peak_lr) if peak_lr is not None else None)
        self.first_mismatch: float | None = None  # largest |log-prob difference|, engine against trainer, at step 1
        self.trace = Trace(run_dir / "trace.json" if "jsonl" in loggers else None, facts.name)
        self._start = time.monotonic()
        self._times: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._batch: TrainBatch | None = None
        self._tokens: TokenBatch | None = None
        self._version: int | None = None
        self._watched = watched
        self.loggers = Loggers(loggers, run_dir, total_steps, facts)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.loggers.tell(lambda logger: logger.close(is_failed=kind is not None))
        self.trace.close()

    @property
    def seconds(self) -> float:
        """Wall time since the tracker was made, beside what the rows of former processes stand for."""
        return time.monotonic() - self._start

    def restore(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """`rows`: of metrics.jsonl that former processes of this run wrote, as far as they count."""
        self._start -= max((float(row["seconds"]) for row in rows), default=0.0)
        for row in rows:
            self._watch(row["kind"], row["step"], row)
            if row["kind"] == "step":
                self.curve.append((row["step"], row[self.facts.curve]))
                self.health.seen(row["step"], row)
                if self.first_mismatch is None:
                    self.first_mismatch = row.get("training/rollout_log_probs_diff_max")
            elif row["kind"] == "evaluation" and "val/accuracy" in row:
                self.evaluations.append((row["step"], result_of_row(row)))

    @contextmanager
    def productive(self) -> Iterator[None]:
        """Time whose results count, when the block ends without an exception; see `attempts.RunClock`."""
        start = time.monotonic()
        yield
        self.clock.productive_s += time.monotonic() - start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage; the same stage entered twice in a step adds up."""
        self.waiting(name)
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self._times[name] = self._times.get(name, 0.0) + end - start
            self.trace.add(name, STAGES, "stage", start, end)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One turn of the loop; its metrics are written when it ends without an exception."""
        self._times, self._metrics, self._batch, self._tokens = {}, {}, None, None
        self.trace.step = step
        self.trace.take_call_seconds()  # of what came before the step
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.clock.productive_s += end - start
        self.trace.add(f"step {step}", STEPS, "step", start, end)
        with self.trace.span("track", STAGES, "stage"):
            self._write_step(step, end - start)
        self._times, self._batch, self._tokens = {}, None, None

    def _write_step(self, step: int, seconds: float) -> None:
        metrics = {f"timing_s/{name}": value for name, value in self._times.items()} | {"timing_s/step": seconds}
        metrics["training/global_step"] = float(step)
        self.loggers.start_again(step)
        calls, work = self.trace.take_call_seconds(), self.facts.workload
        if self._batch is not None:
            self._show_batch(step, self._batch)
            metrics = batch_metrics(self._batch, work.max_prompt_length if work else None) | self._metrics | metrics
            metrics |= self._derived(self._batch, metrics, calls) | variance_metrics(self._batch, metrics)
        elif self._tokens is not None:
            metrics = self._metrics | metrics | {"perf/total_num_tokens": float(self._tokens.num_tokens)}
            metrics |= self._derived(self._tokens, metrics, calls)
        metrics |= throughput(metrics, work.num_devices if work else None) | {"perf/ettr": self.clock.ettr()}
        verdicts, lines = self.health.seen(step, metrics)
        metrics |= verdicts
        for line in lines:
            self.note(line)
        if self.first_mismatch is None:
            self.first_mismatch = metrics.get("training/rollout_log_probs_diff_max")
        self.curve.append((step, metrics[self.facts.curve]))
        self.write(step, "step", metrics)

    def _derived(self, batch: TokenBatch, metrics: Mapping[str, float], calls: Mapping[str, float]) -> dict[str, float]:
        found = time_per_token(metrics, calls)
        if self.facts.workload is not None:
            found |= balance(batch, self.facts.workload) | utilisation(metrics, calls, batch, self.facts.workload)
        return found

    def _show_batch(self, step: int, batch: TrainBatch) -> None:
        spell = self.facts.spell
        view = BatchView(
            samples=tuple(samples_of(step, batch, self.facts.samples_kept, self.facts.seed)),
            mismatch=mismatch_record(step, batch, spell) if spell else None,
            distributions=partial(distributions, batch, self._version),
        )
        self.loggers.tell(lambda logger: logger.batch(step, view))

    def batch(self, batch: TrainBatch, metrics: dict[str, float], version: int | None = None) -> None:
        """This step's batch and what the stages say about it. `version`: of the policy that was trained on it."""
        self._batch, self._version = batch, version
        self._metrics |= metrics

    def tokens(self, batch: TokenBatch, metrics: dict[str, float]) -> None:
        """This step's documents, of a job that generates none, and what is said about it."""
        self._tokens = batch
        self._metrics |= metrics

    def held_out(self, step: int, values: Mapping[str, float]) -> None:
        """Metrics of an evaluation."""
        self.clock.productive_s += self._times.get("evaluate", 0.0)
        self.write(step, "evaluation", {**values, "timing_s/evaluate": self._times.get("evaluate", 0.0)})

    def evaluation(self, step: int, result: EvaluationResult | None) -> None:
        """Record an evaluation; None: the run has no held-out items."""
        self.clock.productive_s += self._times.get("evaluate", 0.0)
        if result is None:
            return
        self.evaluations.append((step, result))
        values = evaluation_metrics(result)
        values |= {f"timing_s/{k}": v for k, v in self._times.items() if k == "evaluate"}
        self.write(step, "evaluation", values)

    def waiting(self, text: str) -> None:
        """Show what the run does or waits for now. The next text replaces it."""
        self.loggers.tell(lambda logger: logger.stage(text))

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        self.loggers.tell(lambda logger: logger.note(text))

    def warmup(self, step: int, metrics: dict[str, float]) -> None:
        self.write(step, "warmup", metrics)

    def write(self, step: int, kind: str, metrics: Mapping[str, float]) -> None:
        """A row of metrics to all loggers; metric names and units: `metric_names`."""
        self._watch(kind, step, metrics)
        seconds = self.seconds
        self.loggers.tell(lambda logger: logger.row(kind, step, seconds, metrics))

    def _watch(self, kind: str, step: int, row: Mapping[str, Any]) -> None:
        if kind != "warmup" and self._watched is not None and row.get(self._watched) is not None:
            self.watched_values[step] = float(row[self._watched])


def result_of_row(row: Mapping[str, Any]) -> EvaluationResult:
    """Read back a row that `Tracker.evaluation` wrote: its totals, without the sets and examples."""
    return EvaluationResult(
        accuracy=row["val/accuracy"],
        low=row["val/accuracy_low"],
        high=row["val/accuracy_high"],
        num_items=int(row["val/num_items"]),
        mean_response_length=row["val/response_length"],
        examples=(),
    )


def evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of all held-out items together, and of each set of them."""
    values = {
        "val/accuracy": result.accuracy,
        "val/accuracy_low": result.low,
        "val/accuracy_high": result.high,
        "val/num_items": float(result.num_items),
        "val/response_length": result.mean_response_length,
    }
    for one in result.sets:
        count = one.num_samples
        found = {f"mean@{count}": one.mean, f"std@{count}": one.std, "num_items": float(one.num_items)}
        found |= {f"best@{k}": best for k, best in one.best if k > 1}
        for figure in one.figures:
            key = f"{figure.name}@{figure.k}"
            found |= {key: figure.value} if figure.name != "best" else {}
            if figure.low is not None and figure.high is not None:
                found |= {f"{key}/low": figure.low, f"{key}/high": figure.high}
        if one.low is not None and one.high is not None:
            found |= {"low": one.low, "high": one.high}
        found |= {"num_masked": float(one.num_masked), "response_length": one.mean_response_length}
        values |= {f"val/{one.name}/{name}": value for name, value in found.items()}
    return values
