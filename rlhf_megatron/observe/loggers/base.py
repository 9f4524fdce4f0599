"""What a logger is: it is told what a run does, and writes or shows what it likes of it.

A new one is a new file here with a class that is registered in LOGGERS, and its name among those of `trainer.logger`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.lazy import Tensor
from rlhf_megatron.registry import Registry

if TYPE_CHECKING:
    from rlhf_megatron.observe.metrics.mismatch import MismatchRecord
    from rlhf_megatron.observe.run_facts import RunFacts
    from rlhf_megatron.observe.samples import Sample


@dataclass(frozen=True)
class BatchView:
    """What loggers are shown of a step's batch, made once for all of them."""

    samples: tuple[Sample, ...]
    mismatch: MismatchRecord | None
    distributions: Mapping[str, Tensor]  # name -> the values, see `distributions`


class Logger:
    """Does nothing. All calls come from one thread. Optional packages are imported inside of methods."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Makes its files in `run_dir`, or goes on with those that are there."""

    @classmethod
    def check(cls) -> None:
        """Before anything is started. Raises ValueError where the logger cannot work here, with the fix."""

    def row(self, kind: str, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        """Metrics of a step. `kind`: warmup, step or evaluation; `seconds`: since the run began."""

    def batch(self, step: int, view: BatchView) -> None:
        """What a step was made of; before its row."""

    def stage(self, text: str) -> None:
        """What the run does or waits for now; overwritten by the next."""

    def note(self, text: str) -> None:
        """A line for the person who watches."""

    def close(self, is_failed: bool) -> None:
        """`is_failed`: the run ends by an exception."""


LOGGERS: Registry[type[Logger]] = Registry("logger")

MAX_VIEWS = 200  # histograms and tables of a run; viewers show no more of them


def is_view_step(step: int, total_steps: int) -> bool:
    """Steps at which large things are logged: the first, the last, and every ceil(total_steps / MAX_VIEWS)."""
    return step in (1, total_steps) or step % max(1, -(-total_steps // MAX_VIEWS)) == 0
