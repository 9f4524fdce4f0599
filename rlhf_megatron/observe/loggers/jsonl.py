"""Files of JSON lines in the run directory: metrics.jsonl, samples.jsonl, mismatch.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.observe.line_file import LineFile, strict
from rlhf_megatron.observe.loggers import LOGGERS, BatchView, Logger

if TYPE_CHECKING:
    from rlhf_megatron.observe.run_facts import RunFacts


@LOGGERS.register("jsonl")
class JsonlLogger(Logger):
    """A line is in its file when the call returns, or waits for room there (see `LineFile`)."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        self._directory = run_dir
        self._files = {"metrics": LineFile(run_dir / "metrics.jsonl")}

    def row(self, kind: str, step: int, seconds: float, metrics: Mapping[str, float]) -> None:
        self._files["metrics"].write({"kind": kind, "step": step, "seconds": round(seconds, 3), **metrics})

    def batch(self, step: int, view: BatchView) -> None:
        for sample in view.samples:
            self._file("samples").write(strict(vars(sample)))
        if view.mismatch is not None:
            self._file("mismatch").write(strict(asdict(view.mismatch)))

    def flush(self) -> None:
        for file in self._files.values():
            file.flush()

    def close(self, is_failed: bool) -> None:
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> LineFile:
        if name not in self._files:
            self._files[name] = LineFile(self._directory / f"{name}.jsonl")
        return self._files[name]
