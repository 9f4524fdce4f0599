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
    """The newest checkpoint of a run, kept in `pin_dir` by links, so that the run may remove its
    own copy.
    """

    def __init__(self, run_dir: Path, pin_dir: Path) -> None:
        """Remember the run and the folder for links; nothing is linked yet."""
        self.checkpoint_store = CheckpointStore(run_dir / CHECKPOINTS)
        self.pin_dir = pin_dir

    def find_newest_step(self) -> int | None:
        """Return the step of the run's newest checkpoint, intact or not; None if there is no
        checkpoint.
        """
        return next(iter(self.checkpoint_store.list_steps()), None)

    def pin_checkpoint(self, step: int) -> ExportableWeights:
        """Link the checkpoint of a step into `pin_dir`, verify it, and return its weights. Raise
        ValueError or OSError for a broken or removed one, of which no link is left.
        """
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
        """Remove all checkpoints in `pin_dir` but this one."""
        for other in self.pin_dir.iterdir():
            if other != checkpoint:
                shutil.rmtree(other, ignore_errors=True)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file, or copy it to another file system."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class CheckpointFollower:
    """Syncs newer checkpoints of a run to engines. The thread that may sync calls this object now
    and then.
    """

    def __init__(
        self,
        pinned_checkpoint: PinnedCheckpoint,
        weight_sync: WeightSync,
        report: Callable[[str], None],
    ) -> None:
        """Begin with the version that the engines serve; `report` gets a line for each sync and for
        each checkpoint that is refused.
        """
        self._pinned_checkpoint = pinned_checkpoint
        self._weight_sync = weight_sync
        self._report = report
        self._refused_step = -1  # a step that was tried, and is no good
        self._next_look_at = 0.0

    def __call__(self) -> None:
        """Sync a newer checkpoint to the engines if there is one; report and skip a broken one. Do
        nothing if the last look was less than a second ago. The version of the weights is the
        checkpoint's step.
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
