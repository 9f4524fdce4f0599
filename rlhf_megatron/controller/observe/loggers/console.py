"""The terminal: a progress bar with the current stage, and a table row a step. Logs get a line a
minute for the bar.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column as ProgressColumn

from rlhf_megatron.controller.observe.loggers import LOGGERS, RunLogger

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.run_facts import RunFacts

SOURCE_KEY_PREFIX = "reward/source/"  # <source>/mean
SET_MEAN_PATTERN = re.compile(r"val/([^/]+)/mean@\d+")
SOURCE_COLUMN_WIDTHS = (6, 12)
SOURCE_DROP_PRIORITY = 4
SUPERVISED_LOSS_KEY = "sft/loss"  # only a run without rewards has it
NUM_COLUMNS_BEFORE_SOURCES = 2  # columns in front of those of the sources
ROWS_PER_HEADER = 25
MAX_QUIET_S = 60.0  # after which a log is told where the run is


@dataclass(frozen=True)
class ConsoleColumn:
    """A column of the console's table."""

    title: str
    width: int
    metric_key: str | None  # metric; None: the step
    format_spec: str
    drop_priority: int  # on a narrow terminal the columns of the highest rank are left out
    is_optional: bool = False  # shown where the run has this metric


CONSOLE_COLUMNS = (
    ConsoleColumn("step", 5, None, "d", 0),
    ConsoleColumn("loss", 9, "sft/loss", ".4f", 0, is_optional=True),
    ConsoleColumn("right", 6, "rewards/accuracies", ".2f", 1, is_optional=True),
    ConsoleColumn("margin", 8, "rewards/margins", ".3f", 2, is_optional=True),
    ConsoleColumn("reward", 7, "critic/rewards/mean", ".3f", 0),
    ConsoleColumn("mixed", 6, "reward/mixed_groups", ".2f", 3),
    ConsoleColumn("kl", 8, "actor/reward_kl_penalty", ".1e", 4, is_optional=True),
    ConsoleColumn("entropy", 8, "actor/entropy", ".3f", 2),
    ConsoleColumn("pg_loss", 9, "actor/pg_loss", ".2e", 3),
    ConsoleColumn("clip", 6, "actor/pg_clipfrac", ".3f", 5),
    ConsoleColumn("ppo_kl", 9, "actor/ppo_kl", ".1e", 4),
    ConsoleColumn("grad", 8, "actor/grad_norm", ".2e", 5),
    ConsoleColumn("vf_loss", 9, "critic/vf_loss", ".2e", 2, is_optional=True),
    ConsoleColumn("vf_ev", 6, "critic/vf_explained_var", ".2f", 2, is_optional=True),
    ConsoleColumn("length", 7, "response_length/mean", ".1f", 2),
    ConsoleColumn("|Δlogp|", 9, "training/rollout_log_probs_diff_max", ".1e", 3),
    ConsoleColumn("gen s", 6, "timing_s/generate", ".2f", 6),
    ConsoleColumn("upd s", 6, "timing_s/update", ".2f", 6),
    ConsoleColumn("sync s", 6, "timing_s/sync", ".2f", 6),
    ConsoleColumn("step s", 6, "timing_s/step", ".2f", 1),
    ConsoleColumn("tok/s", 7, "perf/tokens_per_s", ".0f", 5),
    ConsoleColumn("ettr", 5, "perf/ettr", ".2f", 6),
)


@LOGGERS.register("console")
class ConsoleLogger(RunLogger):
    """Plain lines where stdout is no terminal, with all columns; where it is one, those that fit
    and a bar below.
    """

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Start the progress bar; where stdout is no terminal, start a thread that prints progress
        lines.
        """
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._seen_metric_keys: set[str] = set()  # all metrics of steps so far
        self._table_columns: tuple[ConsoleColumn, ...] = ()
        self._num_rows = 0
        self._progress_bar = Progress(
            TextColumn(
                "[bold]{task.description}",
                markup=True,
                table_column=ProgressColumn(no_wrap=True, overflow="ellipsis", ratio=1),
            ),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._progress_bar.start()
        self._progress_task = self._progress_bar.add_task("start", total=total_steps)
        self._total_steps = total_steps
        self._last_finished_step = 0
        self._stage_text = "start"
        self._step_seconds: list[float] = []  # seconds of each step
        self._last_output_s = time.monotonic()
        self._is_closed = threading.Event()
        if not self._console.is_terminal:
            threading.Thread(
                target=self._log_progress_while_quiet, name="progress", daemon=True
            ).start()

    def _log_progress_while_quiet(self) -> None:
        """Print a progress line whenever nothing was printed for MAX_QUIET_S, until the logger is
        closed.
        """
        while not self._is_closed.wait(
            max(0.01, self._last_output_s + MAX_QUIET_S - time.monotonic())
        ):
            if time.monotonic() - self._last_output_s >= MAX_QUIET_S:
                with contextlib.suppress(OSError, ValueError):  # no room, or closed
                    self.show_note(self.describe_progress())

    def describe_progress(self) -> str:
        """Return how far the run is, and how long the rest takes at the pace of the last steps."""
        from rlhf_megatron.controller.observe.report.run_overview import (
            estimate_seconds_left,
            format_duration,
        )

        left = estimate_seconds_left(
            self._step_seconds, self._total_steps - self._last_finished_step
        )
        end = f", about {format_duration(left)} left" if left is not None else ""
        return (
            f"{self._stage_text}: {self._last_finished_step} of {self._total_steps} steps done{end}"
        )

    def close(self, is_failed: bool) -> None:
        """Stop the progress bar and the thread of progress lines."""
        self._is_closed.set()
        self._progress_bar.stop()

    def show_stage(self, text: str) -> None:
        """Show the text at the progress bar."""
        self._stage_text = text
        self._progress_bar.update(self._progress_task, description=text.replace("[", r"\["))

    def show_note(self, text: str) -> None:
        """Print a line."""
        self._last_output_s = time.monotonic()
        self._console.print(text, markup=False)

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Print a table row for a step, and a line for an evaluation or an evaluated warm-up
        step.
        """
        if row_kind == "step":
            self._show_step_row(step, metrics)
        elif row_kind == "evaluation":
            self._show_evaluation(step, metrics)
        elif "warmup/accuracy" in metrics:  # between evaluations a warm-up is quiet
            self.show_note(
                f"warm-up {step:>4}  loss {metrics['warmup/loss']:.4f}  grad"
                f" {metrics['warmup/grad_norm']:.2e}  sampled score"
                f" {metrics['warmup/accuracy']:.3f}"
            )

    def _show_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the held-out loss or score, and the scores of the sets where there are
        several.
        """
        if "val/loss" in metrics:
            self.show_note(f"step {step}: held-out " + ", ".join(_iter_held_out_losses(metrics)))
            return
        low = metrics["val/accuracy_low"]
        high = metrics["val/accuracy_high"]
        name = "accuracy" if metrics.get("val/binary_scores") == 1.0 else "score"
        self.show_note(
            f"step {step}: held-out {name} {metrics['val/accuracy']:.3f} [{low:.3f}, {high:.3f}]"
            f" on {metrics['val/num_items']:.0f} items"
        )
        found = [
            (match[1], value)
            for key, value in metrics.items()
            if (match := SET_MEAN_PATTERN.fullmatch(key))
        ]
        if len(found) > 1:
            self.show_note("    " + "  ".join(f"{name} {value:.3f}" for name, value in found))

    def _show_step_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's row, with a new header where the columns changed or after
        ROWS_PER_HEADER rows.
        """
        self._last_output_s = time.monotonic()
        self._last_finished_step = step
        if "timing_s/step" in metrics:
            self._step_seconds.append(metrics["timing_s/step"])
        if not metrics.keys() <= self._seen_metric_keys:
            self._seen_metric_keys |= metrics.keys()
            columns = self._select_columns_for_terminal()
            # the table changes: a header
            self._num_rows = self._num_rows if columns == self._table_columns else 0
            self._table_columns = columns
        if self._num_rows % ROWS_PER_HEADER == 0:
            self._console.print(
                " ".join(f"{c.title:>{c.width}}" for c in self._table_columns),
                style="bold",
                markup=False,
            )
        self._console.print(
            " ".join(format_console_cell(c, step, metrics) for c in self._table_columns),
            markup=False,
        )
        self._num_rows += 1
        self._progress_bar.update(self._progress_task, completed=step)

    def _select_columns_for_terminal(self) -> tuple[ConsoleColumn, ...]:
        """Return the columns for the metrics seen so far; on a terminal only those that fit."""
        columns = select_console_columns(self._seen_metric_keys)
        return (
            keep_columns_that_fit(columns, self._console.width)
            if self._console.is_terminal
            else columns
        )


def _iter_held_out_losses(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield texts with the losses of all held-out sets together, then with the loss of each set
    where there are several.
    """
    names = ("loss", "perplexity", "rewards/accuracies")
    yield from (
        f"{name} {metrics[f'val/{name}']:.4f}" for name in names if f"val/{name}" in metrics
    )
    sets = [key.split("/")[1] for key in metrics if key.count("/") == 2 and key.endswith("/loss")]
    if len(sets) > 1:
        yield from (f"{name} {metrics[f'val/{name}/loss']:.4f}" for name in sets)


def select_console_columns(metric_keys: set[str]) -> tuple[ConsoleColumn, ...]:
    """Return all columns of a run with these metrics, with a column for each data source where
    there are several.
    """
    sources = sorted(
        key for key in metric_keys if key.startswith(SOURCE_KEY_PREFIX) and key.endswith("/mean")
    )
    extra = [_make_source_column(key) for key in sources] if len(sources) > 1 else []
    is_of_rl = SUPERVISED_LOSS_KEY not in metric_keys
    used = [
        c
        for c in CONSOLE_COLUMNS
        if c.metric_key in (None, *metric_keys) or (is_of_rl and not c.is_optional)
    ]
    return (*used[:NUM_COLUMNS_BEFORE_SOURCES], *extra, *used[NUM_COLUMNS_BEFORE_SOURCES:])


def _make_source_column(metric_key: str) -> ConsoleColumn:
    """Return the column of a data source's mean reward, titled with its name, shortened if
    need be.
    """
    name = metric_key.removeprefix(SOURCE_KEY_PREFIX).removesuffix("/mean")
    low, high = SOURCE_COLUMN_WIDTHS
    title = name if len(name) <= high else name[: high - 1] + "…"
    return ConsoleColumn(title, max(low, len(title)), metric_key, ".3f", SOURCE_DROP_PRIORITY)


def keep_columns_that_fit(
    columns: tuple[ConsoleColumn, ...], max_width: int
) -> tuple[ConsoleColumn, ...]:
    """Keep the columns of the lowest drop priority that fit into `max_width` characters, in their
    order.
    """
    kept: list[ConsoleColumn] = []
    for column in sorted(columns, key=lambda c: c.drop_priority):
        if sum(c.width + 1 for c in kept) + column.width <= max_width:
            kept.append(column)
    return tuple(c for c in columns if c in kept)


def format_console_cell(column: ConsoleColumn, step: int, metrics: Mapping[str, float]) -> str:
    """Return the value of a column, padded to its width; "-" where the step lacks the metric."""
    value = step if column.metric_key is None else metrics.get(column.metric_key)
    return (
        f"{value:>{column.width}{column.format_spec}}"
        if value is not None
        else f"{'-':>{column.width}}"
    )
