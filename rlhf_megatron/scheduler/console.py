"""The terminal: a progress bar with the current stage, and a table row a step."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

COLUMNS = (
    ("step", 5, None, "d"),
    ("reward", 7, "critic/rewards/mean", ".3f"),
    ("mixed", 6, "reward/mixed_groups", ".2f"),
    ("entropy", 8, "actor/entropy", ".3f"),
    ("pg_loss", 9, "actor/pg_loss", ".2e"),
    ("clip", 6, "actor/pg_clipfrac", ".3f"),
    ("ppo_kl", 9, "actor/ppo_kl", ".1e"),
    ("grad", 8, "actor/grad_norm", ".2e"),
    ("length", 7, "response_length/mean", ".1f"),
    ("|Δlogp|", 9, "training/rollout_log_probs_diff_max", ".1e"),
    ("gen s", 6, "timing_s/generate", ".2f"),
    ("upd s", 6, "timing_s/update", ".2f"),
    ("sync s", 6, "timing_s/sync", ".2f"),
    ("step s", 6, "timing_s/step", ".2f"),
    ("tok/s", 7, "perf/tokens_per_s", ".0f"),
)
ROWS_PER_HEADER = 25


class ConsoleView:
    """Plain lines where stdout is no terminal, a live bar below the table where it is."""

    def __init__(self, total_steps: int) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._rows = 0
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._progress.start()
        self._task = self._progress.add_task("start", total=total_steps)

    def close(self) -> None:
        self._progress.stop()

    def stage(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def note(self, text: str) -> None:
        self._console.print(text, markup=False)

    def row(self, step: int, metrics: dict[str, float]) -> None:
        if self._rows % ROWS_PER_HEADER == 0:
            self._console.print(" ".join(f"{name:>{width}}" for name, width, _, _ in COLUMNS), style="bold")
        cells = []
        for _, width, key, form in COLUMNS:
            value = step if key is None else metrics.get(key)
            cells.append(f"{value:>{width}{form}}" if value is not None else f"{'-':>{width}}")
        self._console.print(" ".join(cells))
        self._rows += 1
        self._progress.update(self._task, completed=step)

    def warmup(self, step: int, metrics: dict[str, float]) -> None:
        accuracy = f"  sampled accuracy {metrics['warmup/accuracy']:.3f}" if "warmup/accuracy" in metrics else ""
        self._console.print(
            f"warm-up {step:>4}  loss {metrics['warmup/loss']:.4f}  grad {metrics['warmup/grad_norm']:.2e}{accuracy}"
        )
