"""Follow a training run: its newest checkpoint goes to the engines, verified, while they answer.

A checkpoint is linked into a folder of the server first, so that the run may remove it while the
server needs it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from rlhf_megatron.controller.recovery.checkpoint_export import (
    ExportableWeights,
    find_exportable_weights,
)
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.controller.recovery.resume_point import CHECKPOINTS
from rlhf_megatron.controller.sync.weight_sync import WeightSync
from rlhf_megatron.jobs.generation.file_weights import sync_file_weights
from rlhf_megatron.rollout.engine_interface import EngineError

EVERY_S = 1.0


class PinnedCheckpoint:
    """The newest checkpoint of a run, kept in `pin_dir` by links."""

    def __init__(self, run_dir: Path, pin_dir: Path) -> None:
        self.checkpoint_store = CheckpointStore(run_dir / CHECKPOINTS)
        self.pin_dir = pin_dir

    def find_newest_step(self) -> int | None:
        """The step of the newest checkpoint, intact or not."""
        return next(iter(self.checkpoint_store.list_steps()), None)

    def pin_checkpoint(self, step: int) -> ExportableWeights:
        """Link and verify it. Raises ValueError and OSError; nothing of it stays then."""
        target = self.pin_dir / self.checkpoint_store.get_checkpoint_path(step).name
        shutil.rmtree(target, ignore_errors=True)
        try:
            shutil.copytree(
                self.checkpoint_store.get_checkpoint_path(step), target, copy_function=_link_or_copy
            )
            return find_exportable_weights(target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise

    def remove_others(self, checkpoint: Path) -> None:
        for other in self.pin_dir.iterdir():
            if other != checkpoint:
                shutil.rmtree(other, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class CheckpointFollower:
    """Callable, now and then, by the thread that may sync."""

    def __init__(
        self,
        pinned_checkpoint: PinnedCheckpoint,
        weight_sync: WeightSync,
        report: Callable[[str], None],
    ) -> None:
        self._pinned_checkpoint = pinned_checkpoint
        self._weight_sync = weight_sync
        self._report = report
        self._refused_step = -1  # a step that was tried, and is no good
        self._next_look_at = 0.0

    def __call__(self) -> None:
        """Sync a newer checkpoint where there is one; one that is broken is told of and left out.
        The version of the weights is the checkpoint's step.
        """
        if time.monotonic() < self._next_look_at:
            return
        self._next_look_at = time.monotonic() + EVERY_S
        step = self._pinned_checkpoint.find_newest_step()
        if step is None or step <= max(self._weight_sync.policy_version, self._refused_step):
            return
        try:
            weights = self._pinned_checkpoint.pin_checkpoint(step)
            seconds = sync_file_weights(self._weight_sync, weights.model, weights.step)
        except FileNotFoundError:  # the run has removed it meanwhile: the next one is there
            return
        except (EngineError, ValueError, OSError) as error:
            self._refused_step = step
            self._report(
                f"step {step} is not served, step {self._weight_sync.policy_version} still"
                f" is: {error}"
            )
            return
        self._pinned_checkpoint.remove_others(weights.checkpoint_path)
        self._report(f"step {step} is served, verified, after {seconds:.1f} s")
