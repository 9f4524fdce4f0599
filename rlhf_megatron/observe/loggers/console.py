"""The terminal: a progress bar with the current stage, and a table row a step. Logs get a line a minute for the bar."""

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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column as ProgressColumn

from rlhf_megatron.observe.loggers import LOGGERS, Logger

if TYPE_CHECKING:
    from rlhf_megatron.observe.run_facts import RunFacts


@dataclass(frozen=True)
class Column:
    """A column of the console's table."""

    title: str
    width: int
    key: str | None  # metric; None: the step
    form: str
    rank: int  # on a narrow terminal the columns of the highest rank are left out
    is_optional: bool = False  # shown where the run has this metric


COLUMNS = (
    Column("step", 5, None, "d", 0),
    Column("loss", 9, "sft/loss", ".4f", 0, is_optional=True),
    Column("right", 6, "rewards/accuracies", ".2f", 1, is_optional=True),
    Column("margin", 8, "rewards/margins", ".3f", 2, is_optional=True),
    Column("reward", 7, "critic/rewards/mean", ".3f", 0),
    Column("mixed", 6, "reward/mixed_groups", ".2f", 3),
    Column("kl", 8, "actor/reward_kl_penalty", ".1e", 4, is_optional=True),
    Column("entropy", 8, "actor/entropy", ".3f", 2),
    Column("pg_loss", 9, "actor/pg_loss", ".2e", 3),
    Column("clip", 6, "actor/pg_clipfrac", ".3f", 5),
    Column("ppo_kl", 9, "actor/ppo_kl", ".1e", 4),
    Column("grad", 8, "actor/grad_norm", ".2e", 5),
    Column("vf_loss", 9, "critic/vf_loss", ".2e", 2, is_optional=True),
    Column("vf_ev", 6, "critic/vf_explained_var", ".2f", 2, is_optional=True),
    Column("length", 7, "response_length/mean", ".1f", 2),
    Column("|Δlogp|", 9, "training/rollout_log_probs_diff_max", ".1e", 3),
    Column("gen s", 6, "timing_s/generate", ".2f", 6),
    Column("upd s", 6, "timing_s/update", ".2f", 6),
    Column("sync s", 6, "timing_s/sync", ".2f", 6),
    Column("step s", 6, "timing_s/step", ".2f", 1),
    Column("tok/s", 7, "perf/tokens_per_s", ".0f", 5),
    Column("ettr", 5, "perf/ettr", ".2f", 6),
)
SOURCE = "reward/source/"  # <source>/mean
SET_MEAN = re.compile(r"val/([^/]+)/mean@\d+")
SOURCE_WIDTHS, SOURCE_RANK = (6, 12), 4
SUPERVISED = "sft/loss"  # only a run without rewards has it
AFTER_SOURCES = 2  # columns in front of those of the sources
ROWS_PER_HEADER = 25
QUIET_S = 60.0  # after which a log is told where the run is


@LOGGERS.register("console")
class ConsoleLogger(Logger):
    """Plain lines where stdout is no terminal, with all columns; where it is one, those that fit and a bar below."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._keys: set[str] = set()  # all metrics of steps so far
        self._columns: tuple[Column, ...] = ()
        self._rows = 0
        self._progress = Progress(
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
        self._progress.start()
        self._task = self._progress.add_task("start", total=total_steps)
        self._total, self._done, self._stage = total_steps, 0, "start"
        self._took: list[float] = []  # seconds of each step
        self._said = time.monotonic()
        self._is_closed = threading.Event()
        if not self._console.is_terminal:
            threading.Thread(target=self._tell_each_minute, name="progress", daemon=True).start()

    def _tell_each_minute(self) -> None:
        while not self._is_closed.wait(max(0.01, self._said + QUIET_S - time.monotonic())):
            if time.monotonic() - self._said >= QUIET_S:
                with contextlib.suppress(OSError, ValueError):  # no room, or closed
                    self.note(self.progress())

    def progress(self) -> str:
        """Say how far the run is, and how long the rest takes at the pace of the last steps."""
        from rlhf_megatron.observe.report.facts import duration, seconds_left

        left = seconds_left(self._took, self._total - self._done)
        end = f", about {duration(left)} left" if left is not None else ""
        return f"{self._stage}: {self._done} of {self._total} steps done{end}"

    def close(self, is_failed: bool) -> None:
        self._is_closed.set()
        self._progress.stop()

    def stage(self, text: str) -> None:
        self._stage = text
        self._progress.update(self._task, description=text.replace("[", r"\["))

    def note(self, text: str) -> None:
        self._said = time.monotonic()
        self._console.print(text, markup=False)

    def row(self, kind: str, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        if kind == "step":
            self._step(step, metrics)
        elif kind == "evaluation":
            self._evaluation(step, metrics)
        elif "warmup/accuracy" in metrics:  # between evaluations a warm-up is quiet
            self.note(
                f"warm-up {step:>4}  loss {metrics['warmup/loss']:.4f}  grad {metrics['warmup/grad_norm']:.2e}"
                f"  sampled accuracy {metrics['warmup/accuracy']:.3f}"
            )

    def _evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        if "val/loss" in metrics:
            self.note(f"step {step}: held-out " + ", ".join(_losses(metrics)))
            return
        low, high = metrics["val/accuracy_low"], metrics["val/accuracy_high"]
        self.note(
            f"step {step}: held-out accuracy {metrics['val/accuracy']:.3f} [{low:.3f}, {high:.3f}]"
            f" on {metrics['val/num_items']:.0f} items"
        )
        found = [(match[1], value) for key, value in metrics.items() if (match := SET_MEAN.fullmatch(key))]
        if len(found) > 1:
            self.note("    " + "  ".join(f"{name} {value:.3f}" for name, value in found))

    def _step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._said, self._done = time.monotonic(), step
        if "timing_s/step" in metrics:
            self._took.append(metrics["timing_s/step"])
        if not metrics.keys() <= self._keys:
            self._keys |= metrics.keys()
            columns = self._fitting()
            self._rows = self._rows if columns == self._columns else 0  # the table changes: a header
            self._columns = columns
        if self._rows % ROWS_PER_HEADER == 0:
            self._console.print(" ".join(f"{c.title:>{c.width}}" for c in self._columns), style="bold", markup=False)
        self._console.print(" ".join(cell(c, step, metrics) for c in self._columns), markup=False)
        self._rows += 1
        self._progress.update(self._task, completed=step)

    def _fitting(self) -> tuple[Column, ...]:
        columns = columns_for(self._keys)
        return fit(columns, self._console.width) if self._console.is_terminal else columns


def _losses(metrics: Mapping[str, float]) -> Iterator[str]:
    """Yield the losses of all held-out sets together, then of each set where there are several."""
    names = ("loss", "perplexity", "rewards/accuracies")
    yield from (f"{name} {metrics[f'val/{name}']:.4f}" for name in names if f"val/{name}" in metrics)
    sets = [key.split("/")[1] for key in metrics if key.count("/") == 2 and key.endswith("/loss")]
    if len(sets) > 1:
        yield from (f"{name} {metrics[f'val/{name}/loss']:.4f}" for name in sets)


def columns_for(keys: set[str]) -> tuple[Column, ...]:
    """All columns of a run with these metrics; one a data source where there are several."""
    sources = sorted(key for key in keys if key.startswith(SOURCE) and key.endswith("/mean"))
    extra = [_source_column(key) for key in sources] if len(sources) > 1 else []
    is_of_rl = SUPERVISED not in keys
    used = [c for c in COLUMNS if c.key in (None, *keys) or (is_of_rl and not c.is_optional)]
    return (*used[:AFTER_SOURCES], *extra, *used[AFTER_SOURCES:])


def _source_column(key: str) -> Column:
    name = key.removeprefix(SOURCE).removesuffix("/mean")
    low, high = SOURCE_WIDTHS
    title = name if len(name) <= high else name[: high - 1] + "…"
    return Column(title, max(low, len(title)), key, ".3f", SOURCE_RANK)


def fit(columns: tuple[Column, ...], width: int) -> tuple[Column, ...]:
    """Keep the columns of the lowest ranks that fit into `width` characters, in their order."""
    kept: list[Column] = []
    for column in sorted(columns, key=lambda c: c.rank):
        if sum(c.width + 1 for c in kept) + column.width <= width:
            kept.append(column)
    return tuple(c for c in columns if c in kept)


def cell(column: Column, step: int, metrics: Mapping[str, float]) -> str:
    value = step if column.key is None else metrics.get(column.key)
    return f"{value:>{column.width}{column.form}}" if value is not None else f"{'-':>{column.width}}"
