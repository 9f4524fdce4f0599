"""Follow a training run: its newest checkpoint goes to the engines, verified, while they answer.

A checkpoint is linked into a folder of the server first, so that the run may remove it while the server needs it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_megatron.checkpoint.run_checkpoint import CheckpointStore
from rlhf_megatron.generation.file_weights import bring
from rlhf_megatron.recovery.export import Weights, find_weights
from rlhf_megatron.recovery.resume import CHECKPOINTS
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.sync.weight_sync import WeightSync

EVERY_S = 1.0


class Pinned:
    """The newest checkpoint of a run, kept in `folder` by links."""

    def __init__(self, run_dir: Path, folder: Path) -> None:
        self.store = CheckpointStore(run_dir / CHECKPOINTS)
        self.folder = folder

    def newest(self) -> int | None:
        """The step of the newest checkpoint, intact or not."""
        return next(iter(self.store.steps()), None)

    def take(self, step: int) -> Weights:
        """Link and verify it. Raises ValueError and OSError; nothing of it stays then."""
        target = self.folder / self.store.path_of(step).name
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(self.store.path_of(step), target, copy_function=_link)
            return find_weights(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def keep_only(self, checkpoint: Path) -> None:
        for other in self.folder.iterdir():
            if other != checkpoint:
                shutil.rmtree(other, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class Follower:
    """Callable, now and then, by the thread that may sync."""

    def __init__(self, pinned: Pinned, sync: WeightSync, report: Callable[[str], None]) -> None:
        self._pinned = pinned
        self._sync = sync
        self._report = report
        self._refused = -1  # a step that was tried, and is no good
        self._next_s = 0.0

    def __call__(self) -> None:
        """Sync a newer checkpoint where there is one; one that is broken is told of and left out. The version of the
        weights is the checkpoint's step."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + EVERY_S
        step = self._pinned.newest()
        if step is None or step <= max(self._sync.version, self._refused):
            return
        try:
            weights = self._pinned.take(step)
            seconds = bring(self._sync, weights.model, weights.step)
        except FileNotFoundError:  # the run has removed it meanwhile: the next one is there
            return
        except (EngineError, ValueError, OSError) as error:
            self._refused = step
            self._report(f"step {step} is not served, step {self._sync.version} still is: {error}")
            return
        self._pinned.keep_only(weights.checkpoint)
        self._report(f"step {step} is served, verified, after {seconds:.1f} s")
