"""What a run shows and writes: stage times, metrics.jsonl, TensorBoard, console, summary.json. Decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf_megatron.data.batch import TrainBatch
from rlhf_megatron.scheduler.batch_metrics import batch_metrics
from rlhf_megatron.scheduler.console import ConsoleView
from rlhf_megatron.scheduler.evaluation import EvaluationResult


class Tracker:
    """Owned by the controller. Use as a context manager: files are closed on every way out."""

    def __init__(self, run_dir: Path, loggers: tuple[str, ...], total_steps: int) -> None:
        self.run_dir = run_dir
        self.rewards: list[tuple[int, float]] = []  # step, mean reward
        self.evaluations: list[tuple[int, EvaluationResult]] = []
        self.first_mismatch: float | None = None  # largest |log-prob difference|, engine against trainer, at step 1
        self._start = time.monotonic()
        self._times: dict[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._file = (run_dir / "metrics.jsonl").open("a") if "jsonl" in loggers else None
        self._console = ConsoleView(total_steps) if "console" in loggers else None
        self._board = None
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"))

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        if self._console:
            self._console.close()
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()

    @property
    def seconds(self) -> float:
        """Wall time since the tracker was made."""
        return time.monotonic() - self._start

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a stage; the same stage entered twice in a step adds up."""
        if self._console:
            self._console.stage(name)
        start = time.monotonic()
        try:
            yield
        finally:
            self._times[name] = self._times.get(name, 0.0) + time.monotonic() - start

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """One turn of the loop; its metrics are written when it ends without an exception."""
        self._times, self._metrics = {}, {}
        start = time.monotonic()
        yield
        seconds = time.monotonic() - start
        metrics = {**self._metrics, **{f"timing_s/{k}": v for k, v in self._times.items()}, "timing_s/step": seconds}
        metrics |= throughput(metrics)
        if self.first_mismatch is None:
            self.first_mismatch = metrics.get("training/rollout_log_probs_diff_max")
        self.rewards.append((step, metrics["critic/rewards/mean"]))
        self.write(step, "step", metrics)
        if self._console:
            self._console.row(step, metrics)
        self._times = {}

    def batch(self, batch: TrainBatch, metrics: dict[str, float]) -> None:
        """Metrics of this step's batch and of what the stages say about it."""
        self._metrics |= batch_metrics(batch) | metrics
        if self._board:
            text = "\n\n".join(
                f"`{batch.prompts[i]}` → `{batch.responses[i]}` (label `{batch.labels[i]}`, reward"
                f" {batch.rewards[i].item():g}, {batch.finish_reasons[i]})"
                for i in range(min(4, len(batch)))
            )
            self._board.add_text("samples", text, int(metrics["policy/version"]) - 1)

    def evaluation(self, step: int, result: EvaluationResult | None) -> None:
        """None: the run has no held-out items."""
        if result is None:
            return
        self.evaluations.append((step, result))
        values = {
            "val/accuracy": result.accuracy,
            "val/accuracy_low": result.low,
            "val/accuracy_high": result.high,
            "val/num_items": float(result.num_items),
            "val/response_length": result.mean_response_length,
        }
        values |= {f"timing_s/{k}": v for k, v in self._times.items() if k == "evaluate"}
        self.write(step, "evaluation", values)
        if self._console:
            self._console.note(
                f"step {step}: held-out accuracy {result.accuracy:.3f}"
                f" [{result.low:.3f}, {result.high:.3f}] on {result.num_items} items"
            )

    def waiting(self, text: str) -> None:
        """What the run waits for now; overwritten by the next."""
        if self._console:
            self._console.stage(text)

    def note(self, text: str) -> None:
        """A line for the person who watches."""
        if self._console:
            self._console.note(text)

    def warmup(self, step: int, metrics: dict[str, float]) -> None:
        self.write(step, "warmup", metrics)
        if self._console:
            self._console.warmup(step, metrics)

    def write(self, step: int, kind: str, metrics: dict[str, float]) -> None:
        """One line of metrics.jsonl: {"kind", "step", "seconds", metric: value ...}; the same to TensorBoard."""
        row: dict[str, Any] = {"kind": kind, "step": step, "seconds": round(self.seconds, 3), **metrics}
        if self._file:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._board:
            for key, value in metrics.items():
                self._board.add_scalar(key, value, step)


def throughput(metrics: dict[str, float]) -> dict[str, float]:
    """Tokens per second of the whole step and of its two large stages."""
    tokens = metrics["perf/total_num_tokens"]
    rates = {"perf/tokens_per_s": tokens / max(1e-9, metrics["timing_s/step"])}
    if "timing_s/generate" in metrics:
        responses = metrics["response_length/mean"] * metrics["rollout/num_samples"]
        rates["perf/tokens_per_s/generate"] = responses / max(1e-9, metrics["timing_s/generate"])
    if "timing_s/update" in metrics:
        trained = tokens * metrics["actor/num_epochs"]
        rates["perf/tokens_per_s/update"] = trained / max(1e-9, metrics["timing_s/update"])
    return rates
