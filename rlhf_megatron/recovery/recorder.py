"""Recorded rollouts: one file a step, written after `score`, and where the run stood before the first."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import ScoredBatch
from rlhf_megatron.data.codec import read_file, write_file
from rlhf_megatron.recovery.journal import guarded


@codec.register
@dataclass(frozen=True)
class RecordedStart:
    """The state of the run before its first step."""

    num_warmup_steps: int
    policy_version: int  # that its rollouts were sampled with


class Recorder:
    """Files `start.batch`, `step_000001.batch` ... under a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:06d}.batch"

    def write(self, step: int, batch: ScoredBatch) -> None:
        """Write a step, without what later stages have added. A disk that is full costs the record of the step."""
        scored = ScoredBatch(**{field.name: getattr(batch, field.name) for field in fields(ScoredBatch)})

        def write() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_file(self._path(step), scored)

        guarded(self._path(step), write, f"step {step} is not recorded, and cannot be replayed")

    def write_start(self, start: RecordedStart) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        write_file(self.directory / "start.batch", start)

    def read_start(self) -> RecordedStart:
        """Raises ValueError where nothing was recorded."""
        path = self.directory / "start.batch"
        start = read_file(path) if path.exists() else None
        if not isinstance(start, RecordedStart):
            raise ValueError(f"{path} is missing or of another kind; record the run again with --record.")
        return start

    def read(self, step: int) -> ScoredBatch:
        """Raises ValueError when the step was not recorded."""
        path = self._path(step)
        if not path.exists():
            known = sorted(p.name for p in self.directory.glob("step_*.batch"))
            raise ValueError(
                f"step {step} is not recorded: {path} does not exist (recorded: {known[0]} .. {known[-1]})."
                if known
                else f"no recorded step under {self.directory}; run with --record first."
            )
        batch = read_file(path)
        if not isinstance(batch, ScoredBatch):
            raise ValueError(f"{path} holds a {type(batch).__name__}, not a ScoredBatch; record the run again.")
        return batch
