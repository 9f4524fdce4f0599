"""Finds the checkpoint that a run starts from, and checks that this configuration may go
on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.config.former_defaults import add_implied_defaults
from rlhf_megatron.config.resume_changes import (
    OF_DATA_ORDER,
    ConfigChanges,
    compare_run_settings,
    flatten_config_yaml,
)
from rlhf_megatron.config.rules.schedule_rules import does_schedule_take_turns
from rlhf_megatron.config.schema import RunConfig, ScheduleConfig, TrainerConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.line_file import read_attempt_lines
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore, VerifiedCheckpoint
from rlhf_megatron.data import codec
from rlhf_megatron.data.item_stream import ItemStream, StreamCursor
from rlhf_megatron.plugins import compute_plugin_digests
from rlhf_megatron.weights.checkpoint_manifest import verify_file_sizes
from rlhf_megatron.weights.hf_reader import read_hf_config

CHECKPOINTS = "checkpoints"
RUN_STATE = "run_state.batch"
CONFIG = "config.yaml"

_NO_ARCHITECTURE = (
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "auto_map",
)


@codec.register("RunState")
@dataclass(frozen=True)
class RunState:
    """The state after `step`. Seeds of samples and shuffles follow from (trainer.seed, step)."""

    step: int  # 0: after the warm-up, or before anything
    # weight syncs so far; these weights are that version also when they are sent again
    policy_version: int
    cursor: StreamCursor | None  # of the prompt stream
    # of the controller of the KL term in the reward; {}: none
    kl: dict[str, float] = field(default_factory=dict)
    num_warmup_steps: int = 0
    warmup_accuracy: float | None = None
    num_consecutive_skips: int = 0  # optimizer steps in a row with non-finite gradients
    productive_s: float = 0.0  # time in steps, evaluations and warm-up that this state came from
    # of the policy: entries of its config.json, as JSON
    architecture: dict[str, str] = field(default_factory=dict)
    plugins: dict[str, str] = field(default_factory=dict)  # as configured -> digest of the source
    # positions of the stream before the cursor whose groups were in flight
    untrained: tuple[int, ...] = ()


def read_run_state(checkpoint: VerifiedCheckpoint) -> RunState:
    """Read the controller's state from a checkpoint. Raise ValueError where the file is no state of
    the checkpoint's step.
    """
    state = codec.read_message_file(checkpoint.path / RUN_STATE)
    if not isinstance(state, RunState) or state.step != checkpoint.manifest.step:
        raise ValueError(
            f"{checkpoint.path / RUN_STATE} is not the state of step {checkpoint.manifest.step}."
        )
    return state


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint, and what is known of it before any host is up."""

    checkpoint: VerifiedCheckpoint
    state: RunState
    config_changes: ConfigChanges  # of the configuration since it was written
    is_same_run: bool  # False: a new run directory starts from another run's checkpoint

    def __str__(self) -> str:
        """Return a text with the step, the checkpoint, and the settings that changed since."""
        changed = f"; changed: {self.config_changes}" if self.config_changes.all_changes else ""
        layout = (
            " (another layout: sums are made in another order, bits may differ)"
            if self.config_changes.layout_changes
            else ""
        )
        return f"resumed after step {self.state.step} from {self.checkpoint.path}{changed}{layout}"


def is_run_resumed(run_dir: Path, trainer: TrainerConfig) -> bool:
    """Return whether a run in this directory would be resumed. This is cheap: nothing is verified
    yet.

    With resume_path the run is resumed when it began at that checkpoint and has a checkpoint of its
    own since.
    """
    if trainer.resume_mode == "disable" or not CheckpointStore(run_dir / CHECKPOINTS).list_steps():
        return False
    if trainer.resume_mode == "auto":
        return True
    starts = [line for line in read_attempt_lines(run_dir) if line.get("kind") == "start"]
    return bool(starts) and starts[0].get("resumed_from") == str(trainer.resume_from_path)


def read_resumed_settings(run_dir: Path, trainer: TrainerConfig) -> dict[str, str]:
    """Return the settings, each as text, of the checkpoint that a run in this directory would go on
    from; {} for a new run.

    Every process of a run reads the settings, before the data are read, so only the sizes of the
    checkpoint's files are compared with the manifest here. `find_resume_point` verifies the
    checkpoint, and says what is wrong where no checkpoint is good.
    """
    if is_run_resumed(run_dir, trainer):
        store = CheckpointStore(run_dir / CHECKPOINTS)
        paths = [store.get_checkpoint_path(step) for step in store.list_steps()]
    elif trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        paths = [Path(trainer.resume_from_path)]
    else:
        return {}
    for path in paths:
        with suppress(OSError, ValueError, yaml.YAMLError):
            verify_file_sizes(path)
            return flatten_config_yaml((path / CONFIG).read_text(encoding="utf-8"))
    return {}


def describe_complete_run(run_dir: Path, trainer: TrainerConfig) -> str | None:
    """Return a message for a run that has made all of its steps; None when there is work to do."""
    if not is_run_resumed(run_dir, trainer):
        return None
    try:
        steps = int(json.loads((run_dir / "summary.json").read_text())["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    total = trainer.total_training_steps
    if steps < total:
        return None
    return (
        f"{run_dir} is already complete: {steps} steps were made, and trainer.total_training_steps"
        f" is {total}. Set more steps to train on, or start anew with --fresh."
    )


def find_resume_point(
    config: RunConfig, run_dir: Path, stream: ItemStream[Any] | None
) -> ResumePoint | None:
    """Return the checkpoint to start from, after checking that this configuration can go on from
    it, and move `stream` to its position. Return None for a new run.

    Raise ValueError when there are checkpoints and none is intact, or when this configuration
    cannot go on from the checkpoint.
    """
    trainer = config.trainer
    is_same_run = is_run_resumed(run_dir, trainer)
    if is_same_run:
        found = CheckpointStore(run_dir / CHECKPOINTS).find_newest()
        assert found is not None, "goes_on has seen a checkpoint"
    elif trainer.resume_mode == "resume_path":
        assert trainer.resume_from_path is not None, "a rule demands it"
        path = Path(trainer.resume_from_path)
        found = CheckpointStore(path.parent).verify_checkpoint(path)
    else:
        return None
    state = read_run_state(found)
    before = add_implied_defaults(flatten_config_yaml((found.path / CONFIG).read_text()))
    now = compute_plugin_digests(config.plugins)
    changes = compare_run_settings(
        before | _label_plugin_digests(state.plugins),
        flatten_config_yaml(render_config_yaml(config)) | _label_plugin_digests(now),
    )
    check_same_architecture(config.model.path, state)
    _require_steps_left(trainer.total_training_steps, state, found.path, is_same_run)
    check_schedule_can_resume(config.schedule, config.algorithm.filter_groups.enable, state)
    _restore_prompt_stream(stream, state, changes)
    return ResumePoint(found, replace(state, plugins=now), changes, is_same_run)


def _label_plugin_digests(plugins: Mapping[str, str]) -> dict[str, str]:
    """Return the digests of plugins as entries "source of <plugin>", to compare them like
    settings.
    """
    return {f"source of {plugin}": digest for plugin, digest in plugins.items()}


def make_attempt_facts(
    resume_point: ResumePoint | None, resume_path: str | None, plugins: Sequence[str]
) -> dict[str, Any]:
    """Return what attempts.jsonl keeps of the start of a process: the step and checkpoint it
    resumed from, changed settings, and digests of the plugins.
    """
    own = {"plugins": compute_plugin_digests(plugins)} if plugins else {}
    if resume_point is None:
        return {"resumed_from_step": None, **own}
    path = resume_point.checkpoint.path.name if resume_point.is_same_run else str(resume_path)
    changes = {key: list(pair) for key, pair in resume_point.config_changes.all_changes.items()}
    return {
        "resumed_from_step": resume_point.state.step,
        "resumed_from": path,
        "changes": changes or None,
        **own,
    }


def read_architecture(model_path: str) -> dict[str, str]:
    """Return the entries of a model's config.json that `RunState.architecture` keeps; a resumed run
    must have the same.
    """
    entries = read_hf_config(Path(model_path))
    return {
        name: json.dumps(value, sort_keys=True)
        for name, value in entries.items()
        if name not in _NO_ARCHITECTURE
    }


def check_same_architecture(model_path: str, state: RunState) -> None:
    """Raise ValueError where a model directory is of another architecture than the policy of a
    checkpoint.
    """
    now = read_architecture(model_path)
    before = state.architecture
    different = [
        f"{name} is {now.get(name, 'missing')} and was {before.get(name, 'missing')}"
        for name in sorted(now.keys() | before.keys())
        if now.get(name) != before.get(name)
    ]
    if different:
        raise ValueError(
            f"model.path ({model_path}) has another architecture than the resumed run:"
            f" {'; '.join(different)}. Set it back, or start anew with --fresh."
        )


def _require_steps_left(
    num_total_steps: int, state: RunState, checkpoint: Path, is_same_run: bool
) -> None:
    """Raise ValueError for a run without steps to do. A run in its own directory may go on after
    its last step: it may still lack the last evaluation and the summary.
    """
    if state.step > num_total_steps or (state.step == num_total_steps and not is_same_run):
        raise ValueError(
            f"nothing is left to do: {checkpoint} is after step {state.step}, and"
            f" trainer.total_training_steps is {num_total_steps}; set more steps"
            f" than {state.step}."
        )


def check_schedule_can_resume(schedule: ScheduleConfig, has_filter: bool, state: RunState) -> None:
    """Raise ValueError where a synchronous run would go on with groups in flight, or inside of a
    step's prompts.
    """
    if not does_schedule_take_turns(schedule) or state.cursor is None:
        return
    expected = state.step * state.cursor.batch_size
    if state.untrained or not (has_filter or state.cursor.num_drawn == expected):
        raise ValueError(
            f"schedule.name ({schedule.name}) cannot go on from this checkpoint:"
            f" {state.cursor.num_drawn} prompts were started and {len(state.untrained)} of them"
            f" not trained, but whole steps need {expected} prompts; restore the schedule that the"
            " run began with."
        )


def _restore_prompt_stream(
    prompt_stream: ItemStream[Any] | None, state: RunState, changes: ConfigChanges
) -> None:
    """Move the prompt stream to the position of the checkpoint. Raise ValueError, with both values
    of each setting that changed, when the prompts would come in another order.
    """
    if state.cursor is None or prompt_stream is None:
        return
    try:
        prompt_stream.restore_cursor(state.cursor)
    except ValueError as error:
        suspects = {
            key: pair for key, pair in changes.all_changes.items() if key.startswith(OF_DATA_ORDER)
        }
        said = ", ".join(
            f"{key} is {now} and was {before}" for key, (before, now) in suspects.items()
        )
        raise ValueError(f"{error}" + (f" Changed: {said}." if said else "")) from error
