"""Figures of one case as they come: each is printed, and written at once where a file is wanted.

A case that dies later (of memory, of a compiler, of its time budget) has lost only what it had
not measured yet.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import significant
from benchmarks.gpu.arithmetic import percent, tflops
from benchmarks.gpu.timing import LIMIT_S, Spread
from benchmarks.kernels.case import CaseResult, Figure
from rlhf_megatron.device import empty_device_cache, select_rank_device

MESSAGE_LENGTH = 2000
QUICK_LIMIT_S = 0.01  # of one measurement: the least number of runs


class MissingError(Exception):
    """A measurement cannot be made here; the message says what it needs."""


@dataclass
class Target:
    """Where the next case writes and when it must be done.
    Set by the process that runs one case.
    """

    path: Path | None = None
    deadline: float = float("inf")  # of time.monotonic()


target = Target()


class Recorder:
    """One case's figures. `is_quick`: tiny sizes, on whatever device there is."""

    def __init__(self, is_quick: bool) -> None:
        self.is_quick = is_quick
        self.device = select_rank_device("auto")
        if self.device.type != "cuda" and not is_quick:
            raise ValueError(
                "these sizes need a GPU, and torch finds none; on a CPU only quick runs make sense."
            )
        self.limit_s = QUICK_LIMIT_S if is_quick else LIMIT_S
        self.dtype = torch.bfloat16
        self.figures: list[Figure] = []
        self.details: dict[str, Any] = {
            "device": self.device.type,
            "seconds": {},
            "failed": {},
            "skipped": {},
        }

    def add(
        self,
        what: str,
        value: float,
        unit: str,
        baseline: str = "",
        bar: float | None = None,
        is_more_better: bool = False,
    ) -> None:
        """`bar` counts on a GPU only: tiny sizes on a CPU meet none."""
        kept = bar if self.device.type == "cuda" and not self.is_quick else None
        figure = Figure(what, significant(value), unit, baseline, kept, is_more_better)
        self.figures.append(figure)
        verdict = (
            "" if kept is None else f"   bar {kept:g}: {'met' if figure.is_met else 'NOT MET'}"
        )
        print(f"    {what:64} {figure.value:>12g} {unit:9}{verdict}", flush=True)
        self._write()

    def add_times(self, what: str, times: Spread, bar_ms: float | None = None) -> None:
        """Milliseconds; the spread goes to the details."""
        self.add(f"{what}, time", times.median * 1e3, "ms", bar=bar_ms)
        self.details["seconds"][what] = {
            key: significant(value) for key, value in asdict(times).items()
        }

    def add_rate(
        self,
        what: str,
        times: Spread,
        num_flop: float,
        bare_s: float,
        bar_tflops: float | None = None,
        bar_ms: float | None = None,
    ) -> None:
        """Time, rate and, as per cent, the speed of the bare products alone: `bare_s`, on
        the same shape.
        """
        self.add_times(what, times, bar_ms)
        self.add(
            f"{what}, rate",
            tflops(num_flop, times.median),
            "TFLOP/s",
            bar=bar_tflops,
            is_more_better=True,
        )
        self.add(
            f"{what}, of bare GEMM",
            percent(bare_s, times.median),
            "%",
            "the bare products' time over ours",
        )

    def note(self, name: str, value: Any) -> None:
        self.details[name] = value
        self._write()

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """What `run` returns; None, with the reason in the details, where it fails or
        the time is up.

        Its memory is free afterwards, unless the result holds on to it.
        """
        if time.monotonic() > target.deadline:
            self.details["skipped"][name] = "the case's time was up"
            return None
        try:
            return run()
        except MissingError as reason:
            self.details["skipped"][name] = str(reason)
            print(f"    {name}: skipped, {reason}", flush=True)
        except Exception:  # whatever a baseline or a size may raise is its own loss
            self.details["failed"][name] = traceback.format_exc()[-MESSAGE_LENGTH:]
            print(
                f"    {name}: FAILED, {self.details['failed'][name].strip().splitlines()[-1]}",
                flush=True,
            )
        finally:
            self.free()
            self._write()
        return None

    def free(self) -> None:
        """Memory that nothing holds goes back to the device. Tiny sizes have none that is
        worth the search.
        """
        if not self.is_quick:
            gc.collect()
        empty_device_cache(self.device)

    def result(self) -> CaseResult:
        """Raises RuntimeError where nothing was measured at all."""
        if not self.figures:
            raise RuntimeError(
                f"nothing was measured: {self.details['failed'] or self.details['skipped']}"
            )
        return CaseResult(tuple(self.figures), self.details)

    def _write(self) -> None:
        if target.path is not None:
            write_json(target.path, {"figures": as_rows(self.figures), "details": self.details})


def as_rows(figures: list[Figure] | tuple[Figure, ...]) -> list[dict[str, Any]]:
    """As they stand in a result file."""
    return [{**asdict(figure), "is_met": figure.is_met} for figure in figures]


def write_json(path: Path, value: Any) -> None:
    """Appears by rename when complete."""
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(value, indent=1) + "\n")
    aside.rename(path)
