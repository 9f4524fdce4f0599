"""What a run shows and writes: it times stages, reads metrics off batches and tells the loggers.
Decides nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.evaluation.held_out_evaluation import (
    EvaluationResult,
    HeldOutExample,
)
from rlhf_megatron.controller.observe.health import HealthWatch
from rlhf_megatron.controller.observe.line_file import RunClock
from rlhf_megatron.controller.observe.loggers import BatchView, LoggerSet
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    compute_batch_metrics,
    compute_variance_metrics,
    iter_distributions,
    make_logged_samples,
)
from rlhf_megatron.controller.observe.metrics.former_metric_names import find_current_name
from rlhf_megatron.controller.observe.metrics.metric_catalogue import make_source_key_part
from rlhf_megatron.controller.observe.metrics.mismatch_check import make_mismatch_step
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    compute_flops_utilisation,
    compute_replica_balance,
    compute_throughput,
    compute_time_per_token,
)
from rlhf_megatron.controller.observe.report.run_files import HeldOutSample
from rlhf_megatron.controller.observe.run_facts import RunFacts
from rlhf_megatron.controller.observe.trace import STAGES_TRACK, STEPS_TRACK, TraceWriter
from rlhf_megatron.data.batch import TokenBatch, TrainBatch

UNKNOWN_RUN_FACTS = RunFacts()
# by which an evaluation is known again after a restart
EVALUATION_METRICS = (
    "val/accuracy",
    "val/accuracy_low",
    "val/accuracy_high",
    "val/num_items",
    "val/response_length",
)


class RunTracker:
    """Owned by the controller. Use as a context manager: files are closed on every way out.

    With the logger "jsonl" there is a trace.json too. Its event "track" is the time that the
    tracker itself took.
    """

    def __init__(
        self,
        run_dir: Path,
        logger_names: tuple[str, ...],
        total_steps: int,
        facts: RunFacts = UNKNOWN_RUN_FACTS,
        clock: RunClock | None = None,
        watched_metric: str | None = None,
    ) -> None:
        """Open the loggers and the trace of a run. `watched_metric`: the metric whose values
        `watched_values` keeps by step.
        """
        self.run_dir = run_dir
        self.watched_values: dict[int, float] = {}
        self.facts = facts
        self.clock = clock or RunClock(time.time())
        self.curve_points: list[tuple[int, float]] = []  # step, facts.curve: mean reward, or loss
        self.evaluation_results: list[tuple[int, EvaluationResult]] = []
        peak_lr = facts.settings.get("actor.optim.lr")
        self.health_watch = HealthWatch(float(peak_lr) if peak_lr is not None else None)
        # largest |log-prob difference|, engine against trainer, at step 1
        self.first_mismatch: float | None = None
        self.trace = TraceWriter(
            run_dir / "trace.json" if "jsonl" in logger_names else None, facts.run_name
        )
        self._start_monotonic_s = time.monotonic()
        self._stage_seconds: dict[str, float] = {}
        self._step_metrics: dict[str, float] = {}
        self._train_batch: TrainBatch | None = None
        self._token_batch: TokenBatch | None = None
        self._batch_version: int | None = None
        self._watched_metric = None if watched_metric is None else find_current_name(watched_metric)
        self.logger_set = LoggerSet(logger_names, run_dir, total_steps, facts)

    def __enter__(self) -> RunTracker:
        """Return the tracker itself."""
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        """Close loggers and trace."""
        self.logger_set.call_each(lambda logger: logger.close(is_failed=error_type is not None))
        self.trace.close()

    @property
    def run_seconds(self) -> float:
        """Return the wall time of the run: since the tracker was made, plus the time that the rows
        of former processes cover.
        """
        return time.monotonic() - self._start_monotonic_s

    def restore_from_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Restore curves, evaluations, health and run time from the rows of metrics.jsonl that
        former processes of this run wrote and that still count.
        """
        self._start_monotonic_s -= max((row.get("seconds") or 0.0 for row in rows), default=0.0)
        for row in rows:
            self._record_watched_metric(row["kind"], row["step"], row)
            if row["kind"] == "step":
                value = row.get(self.facts.curve_metric)
                self.curve_points.append((row["step"], math.nan if value is None else value))
                self.health_watch.judge_step(row["step"], row)
                if self.first_mismatch is None:
                    self.first_mismatch = row.get("training/rollout_log_probs_diff_max")
            elif row["kind"] == "evaluation" and all(
                row.get(name) is not None for name in EVALUATION_METRICS
            ):
                self.evaluation_results.append((row["step"], parse_evaluation_result(row)))

    @contextmanager
    def count_as_productive(self) -> Iterator[None]:
        """Add the time of the block to the productive time, unless it ends by an exception; see
        `line_file.RunClock`.
        """
        start = time.monotonic()
        yield
        self.clock.productive_s += time.monotonic() - start

    @contextmanager
    def time_stage(self, stage_name: str) -> Iterator[None]:
        """Show the stage and record the time of the block; times of a stage that is entered twice
        in a step add up.
        """
        self.show_stage(stage_name)
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self._stage_seconds[stage_name] = self._stage_seconds.get(stage_name, 0.0) + end - start
            self.trace.add_event(stage_name, STAGES_TRACK, "stage", start, end)

    @contextmanager
    def track_step(self, step: int) -> Iterator[None]:
        """Run the block as one turn of the loop; write the metrics of the step when the block ends
        without an exception.
        """
        self._stage_seconds = {}
        self._step_metrics = {}
        self._train_batch = None
        self._token_batch = None
        self.trace.step = step
        self.trace.take_call_seconds()  # of what came before the step
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.clock.productive_s += end - start
        self.trace.add_event(f"step {step}", STEPS_TRACK, "step", start, end)
        with self.trace.record_span("track", STAGES_TRACK, "stage"):
            self._log_step(step, end - start)
        self._stage_seconds = {}
        self._train_batch = None
        self._token_batch = None

    def _log_step(self, step: int, step_seconds: float) -> None:
        """Compute and log all metrics of a step, and its health verdicts."""
        metrics = {f"timing_s/{name}": value for name, value in self._stage_seconds.items()} | {
            "timing_s/step": step_seconds
        }
        metrics["training/global_step"] = float(step)
        self.logger_set.restart_stopped_by_full_disk(step)
        calls = self.trace.take_call_seconds()
        work = self.facts.performance_basis
        if self._train_batch is not None:
            self._log_batch_view(step, self._train_batch)
            metrics = (
                compute_batch_metrics(self._train_batch, work.max_prompt_length if work else None)
                | self._step_metrics
                | metrics
            )
            metrics |= self._compute_rate_metrics(
                self._train_batch, metrics, calls
            ) | compute_variance_metrics(self._train_batch, metrics)
        elif self._token_batch is not None:
            metrics = (
                self._step_metrics
                | metrics
                | {"perf/total_num_tokens": float(self._token_batch.num_tokens)}
            )
            metrics |= self._compute_rate_metrics(self._token_batch, metrics, calls)
        metrics |= compute_throughput(metrics, work.num_devices if work else None) | {
            "perf/ettr": self.clock.compute_ettr()
        }
        verdicts, lines = self.health_watch.judge_step(step, metrics)
        metrics |= verdicts
        for line in lines:
            self.show_note(line)
        if self.first_mismatch is None:
            self.first_mismatch = metrics.get("training/rollout_log_probs_diff_max")
        self.curve_points.append((step, metrics[self.facts.curve_metric]))
        self.log_metrics(step, "step", metrics)

    def _compute_rate_metrics(
        self, batch: TokenBatch, metrics: Mapping[str, float], call_seconds: Mapping[str, float]
    ) -> dict[str, float]:
        """Return times per token, balance over replicas and FLOPs utilisation of a step."""
        found = compute_time_per_token(metrics, call_seconds)
        if self.facts.performance_basis is not None:
            found |= compute_replica_balance(
                batch, self.facts.performance_basis
            ) | compute_flops_utilisation(
                metrics, call_seconds, batch, self.facts.performance_basis
            )
        return found

    def _log_batch_view(self, step: int, batch: TrainBatch) -> None:
        """Give the loggers the samples, the mismatch and the distributions of the step's batch."""
        spell = self.facts.decode_tokens
        view = BatchView(
            samples=tuple(
                make_logged_samples(
                    step, batch, self.facts.num_samples_logged, self.facts.seed, spell
                )
            ),
            mismatch_step=make_mismatch_step(step, batch, spell) if spell else None,
            iter_distributions=partial(iter_distributions, batch, self._batch_version),
        )
        self.logger_set.call_each(lambda logger: logger.log_batch(step, view))

    def set_step_batch(
        self, batch: TrainBatch, metrics: dict[str, float], policy_version: int | None = None
    ) -> None:
        """Set the batch that this step trained on, and add the metrics of the stages.
        `policy_version` is the version of the policy that trained on the batch.
        """
        self._train_batch = batch
        self._batch_version = policy_version
        self._step_metrics |= metrics

    def set_step_tokens(self, batch: TokenBatch, metrics: dict[str, float]) -> None:
        """Set the documents of this step, in a job that generates none, and add metrics to the
        step.
        """
        self._token_batch = batch
        self._step_metrics |= metrics

    def log_held_out_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of an evaluation, with the time that the stage "evaluate" took."""
        self.clock.productive_s += self._stage_seconds.get("evaluate", 0.0)
        self.log_metrics(
            step,
            "evaluation",
            {**metrics, "timing_s/evaluate": self._stage_seconds.get("evaluate", 0.0)},
        )

    def log_evaluation(self, step: int, result: EvaluationResult | None) -> None:
        """Record and log the result of an evaluation; with None, which means that the run has no
        held-out items, log nothing.
        """
        self.clock.productive_s += self._stage_seconds.get("evaluate", 0.0)
        if result is None:
            return
        self.evaluation_results.append((step, result))
        samples = [_make_held_out_sample(step, example) for example in result.examples]
        if samples and self.facts.num_samples_logged:
            self.logger_set.call_each(lambda logger: logger.log_held_out_samples(step, samples))
        values = compute_evaluation_metrics(result)
        values |= {f"timing_s/{k}": v for k, v in self._stage_seconds.items() if k == "evaluate"}
        self.log_metrics(step, "evaluation", values)

    def show_stage(self, text: str) -> None:
        """Show what the run does or waits for now. The next text replaces it."""
        self.logger_set.call_each(lambda logger: logger.show_stage(text))

    def show_note(self, text: str) -> None:
        """Show a line to the person who watches."""
        self.logger_set.call_each(lambda logger: logger.show_note(text))

    def log_warmup_step(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step of the warm-up."""
        self.log_metrics(step, "warmup", metrics)

    def log_metrics(self, step: int, row_kind: str, metrics: Mapping[str, float]) -> None:
        """Give a row of metrics to all loggers. `row_kind`: warmup, step or evaluation. For names
        and units see `metrics.metric_catalogue`.
        """
        self._record_watched_metric(row_kind, step, metrics)
        seconds = self.run_seconds
        self.logger_set.call_each(
            lambda logger: logger.log_metrics(row_kind, step, seconds, metrics)
        )

    def _record_watched_metric(self, row_kind: str, step: int, row: Mapping[str, Any]) -> None:
        """Keep the value of the watched metric, unless the row is of a warm-up."""
        if (
            row_kind != "warmup"
            and self._watched_metric is not None
            and row.get(self._watched_metric) is not None
        ):
            self.watched_values[step] = float(row[self._watched_metric])


def _make_held_out_sample(step: int, example: HeldOutExample) -> HeldOutSample:
    """Return an example of the evaluation after `step` as loggers write it."""
    return HeldOutSample(
        step=step,
        source=example.set_name,
        item=example.item,
        prompt=example.prompt,
        response=example.response,
        label=example.label,
        score=example.score,
        reward=example.reward,
        status=example.status,
        parts=example.parts,
        num_tokens=example.num_tokens,
    )


def parse_evaluation_result(row: Mapping[str, Any]) -> EvaluationResult:
    """Return the evaluation of a row that `RunTracker.log_evaluation` wrote: its totals, without
    the sets and examples.
    """
    return EvaluationResult(
        accuracy=row["val/accuracy"],
        low=row["val/accuracy_low"],
        high=row["val/accuracy_high"],
        num_items=int(row["val/num_items"]),
        mean_response_length=row["val/response_length"],
        examples=(),
        reward=row.get("val/reward"),
        has_binary_scores=row.get("val/binary_scores") == 1.0,
    )


def compute_evaluation_metrics(result: EvaluationResult) -> dict[str, float]:
    """Return the metrics of all held-out items together, and of each held-out set."""
    values = {
        "val/accuracy": result.accuracy,
        "val/accuracy_low": result.low,
        "val/accuracy_high": result.high,
        "val/num_items": float(result.num_items),
        "val/response_length": result.mean_response_length,
        "val/binary_scores": float(result.has_binary_scores),
    }
    if result.reward is not None:
        values["val/reward"] = result.reward
    for one in result.sets:
        count = one.num_samples
        found = {
            f"mean@{count}": one.mean,
            f"std@{count}": one.std,
            "num_items": float(one.num_items),
        }
        found |= {f"best@{k}": best for k, best in one.best if k > 1}
        for figure in one.figures:
            key = f"{figure.name}@{figure.k}"
            found |= {key: figure.value} if figure.name != "best" else {}
            if figure.low is not None and figure.high is not None:
                found |= {f"{key}_low": figure.low, f"{key}_high": figure.high}
        if one.low is not None and one.high is not None:
            found |= {"low": one.low, "high": one.high}
        if one.reward is not None:
            found["reward"] = one.reward
        found |= {"num_masked": float(one.num_masked), "response_length": one.mean_response_length}
        prefix = f"val/{make_source_key_part(one.name)}"
        values |= {f"{prefix}/{name}": value for name, value in found.items()}
    return values
