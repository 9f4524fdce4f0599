"""Files of JSON lines in the run directory: metrics.jsonl, samples.jsonl, held_out_samples.jsonl,
mismatch.jsonl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_megatron.controller.observe.line_file import LineFile, replace_non_finite
from rlhf_megatron.controller.observe.loggers import LOGGERS, BatchView, RunLogger

if TYPE_CHECKING:
    from rlhf_megatron.controller.observe.report.run_files import HeldOutSample
    from rlhf_megatron.controller.observe.run_facts import RunFacts


@LOGGERS.register("jsonl")
class JsonlLogger(RunLogger):
    """A line is in its file when the call returns, or waits for room there (see `LineFile`)."""

    def __init__(self, run_dir: Path, total_steps: int, facts: RunFacts) -> None:
        """Open metrics.jsonl; the other files are opened with their first row."""
        self._run_dir = run_dir
        self._line_files = {"metrics": LineFile(run_dir / "metrics.jsonl")}

    def log_metrics(
        self, row_kind: str, step: int, run_seconds: float, metrics: Mapping[str, float]
    ) -> None:
        """Append a row to metrics.jsonl."""
        self._line_files["metrics"].write_row(
            {"kind": row_kind, "step": step, "seconds": round(run_seconds, 3), **metrics}
        )

    def log_batch(self, step: int, batch_view: BatchView) -> None:
        """Append the logged samples to samples.jsonl, and the mismatch of the step to
        mismatch.jsonl.
        """
        for sample in batch_view.samples:
            self._open_line_file("samples").write_row(replace_non_finite(asdict(sample)))
        if batch_view.mismatch_step is not None:
            self._open_line_file("mismatch").write_row(
                replace_non_finite(asdict(batch_view.mismatch_step))
            )

    def log_held_out_samples(self, step: int, samples: Sequence[HeldOutSample]) -> None:
        """Append the samples to held_out_samples.jsonl."""
        for sample in samples:
            self._open_line_file("held_out_samples").write_row(replace_non_finite(asdict(sample)))

    def flush(self) -> None:
        """Write the lines that wait in all files. Raise OSError."""
        for file in self._line_files.values():
            file.flush()

    def close(self, is_failed: bool) -> None:
        """Close all files."""
        for file in self._line_files.values():
            file.close()

    def _open_line_file(self, file_stem: str) -> LineFile:
        """Return the file <file_stem>.jsonl, opened at its first use."""
        if file_stem not in self._line_files:
            self._line_files[file_stem] = LineFile(self._run_dir / f"{file_stem}.jsonl")
        return self._line_files[file_stem]
