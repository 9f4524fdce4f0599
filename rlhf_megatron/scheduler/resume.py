"""Whether a run directory holds a run that goes on, and from where."""

from __future__ import annotations

import json
from pathlib import Path

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.scheduler.attempts import read_attempts

CHECKPOINTS = "checkpoints"


def goes_on(run_dir: Path, config: RunConfig) -> bool:
    """Whether what the directory holds is to be resumed: cheap, nothing is verified yet.

    With resume_path it is where the run in it began at that checkpoint and has got further since.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable" or not has_checkpoints(run_dir):
        return False
    if trainer.resume_mode == "auto":
        return True
    starts = [line for line in read_attempts(run_dir) if line.get("kind") == "start"]
    return bool(starts) and starts[0].get("resumed_from") == str(trainer.resume_from_path)


def has_checkpoints(run_dir: Path) -> bool:
    """Whether any was ever committed; it may be broken by now."""
    return any((run_dir / CHECKPOINTS).glob("step_*"))


def completion(run_dir: Path, config: RunConfig) -> str | None:
    """What to say of a run that has all of its steps already; None: there is work to do."""
    if not goes_on(run_dir, config):
        return None
    try:
        steps = int(json.loads((run_dir / "summary.json").read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    total = config.trainer.total_training_steps
    if steps < total:
        return None
    return (
        f"{run_dir} is complete: {steps} steps were made and trainer.total_training_steps is {total}. Set more steps to"
        " train on, or start anew with --fresh."
    )
