"""Recorded rollouts: one file a step, written after `score`, and where the run stood
before the first.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rlhf_megatron.controller.recovery.run_journal import write_or_warn
from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.data.codec import read_message_file, write_message_file


@codec.register("RecordedStart")
@dataclass(frozen=True)
class RecordedStart:
    """The state of the run before its first step."""

    num_warmup_steps: int
    policy_version: int  # that its rollouts were sampled with


class RolloutRecorder:
    """Files `start.batch`, `step_000001.batch` ... under a directory."""

    def __init__(self, directory: Path) -> None:
        """Make a recorder of files in `directory`, which the first write creates."""
        self.directory = directory

    def _get_step_path(self, step: int) -> Path:
        """Return the file of a step."""
        return self.directory / f"step_{step:06d}.batch"

    def write_step(self, step: int, batch: ScoredBatch) -> None:
        """Write the scored samples of a step, without the columns of later stages. Where the disk
        is full, log a warning and go on: the step is not recorded.
        """
        scored = ScoredBatch(
            **{field.name: getattr(batch, field.name) for field in fields(ScoredBatch)}
        )

        def write_scored_batch() -> None:
            """Create the directory and write the file."""
            self.directory.mkdir(parents=True, exist_ok=True)
            write_message_file(self._get_step_path(step), scored)

        write_or_warn(
            self._get_step_path(step),
            write_scored_batch,
            f"step {step} is not recorded, and cannot be replayed",
        )

    def write_start(self, start: RecordedStart) -> None:
        """Write the state of the run before its first step. Raise OSError."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_message_file(self.directory / "start.batch", start)

    def read_start(self) -> RecordedStart:
        """Read the state before the first step. Raise ValueError where nothing was recorded."""
        path = self.directory / "start.batch"
        start = read_message_file(path) if path.exists() else None
        if not isinstance(start, RecordedStart):
            raise ValueError(
                f"{path} is missing or of another kind; record the run again with --record."
            )
        return start

    def read_step(self, step: int) -> ScoredBatch:
        """Read the scored samples of a step. Raise ValueError when the step was not recorded."""
        path = self._get_step_path(step)
        if not path.exists():
            known = sorted(p.name for p in self.directory.glob("step_*.batch"))
            raise ValueError(
                (
                    f"step {step} is not recorded: {path} does not exist (recorded: {known[0]}"
                    f" .. {known[-1]})."
                )
                if known
                else f"no recorded step under {self.directory}; run with --record first."
            )
        batch = read_message_file(path)
        if not isinstance(batch, ScoredBatch):
            raise ValueError(
                f"{path} holds a {type(batch).__name__}, not a ScoredBatch; record the run again."
            )
        return batch
