"""The weights of a checkpoint as a Hugging Face directory: one process, any machine, whatever
layout wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import LoRAConfig, TrainerConfig
from rlhf_megatron.controller.observe.line_file import read_step_rows
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore, VerifiedCheckpoint
from rlhf_megatron.controller.recovery.resume_point import (
    CHECKPOINTS,
    CONFIG,
    check_same_architecture,
    read_run_state,
)
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.registry import load_registry
from rlhf_megatron.weights.checkpoint_manifest import MANIFEST
from rlhf_megatron.weights.conversion.conversion_writer import ReportBytes, write_hf_directory
from rlhf_megatron.weights.conversion.stored_model import StoredModel
from rlhf_megatron.weights.hf_reader import read_hf_config, read_json_object
from rlhf_megatron.weights.lora import compute_lora_scale
from rlhf_megatron.weights.lora_adapter import MergedLoraSource, write_peft_adapter
from rlhf_megatron.weights.torch_dist_source import TorchDistSource
from rlhf_megatron.weights.value_model import make_reward_model_config, make_value_model_config

# of a run that writes weights itself
HF = "hf"
HF_CRITIC = "hf_critic"


@dataclass(frozen=True)
class ExportableWeights:
    """The weights of a checkpoint, ready to be written."""

    model: StoredModel
    hf_config: Mapping[str, Any]  # config.json to write
    checkpoint_path: Path
    step: int
    lora_config: LoRAConfig | None = None  # of a policy that has adapters

    def write_hf_directory(
        self,
        output_directory: Path,
        dtype: str | None = None,
        report_bytes: ReportBytes | None = None,
    ) -> int:
        """Write the weights to the new directory `output_directory` in Hugging Face layout, and
        return the number of tensors. `dtype` is that of
        `weights.conversion.conversion_writer.write_hf_directory`.

        Raise ValueError before anything is written when `output_directory` is not empty or space is
        short.
        """
        return len(
            write_hf_directory(
                self.model,
                output_directory,
                dtype,
                report_bytes=report_bytes,
                hf_config=self.hf_config,
            )
        )

    def write_adapter_directory(self, output_directory: Path) -> int:
        """Write the new directory `output_directory` with the adapter alone, as peft reads it, and
        return the number of tensors.

        Raise ValueError where no adapter was trained, or `output_directory` exists.
        """
        if self.lora_config is None or not isinstance(self.model.source, MergedLoraSource):
            raise ValueError(
                f"{self.checkpoint_path} has no adapter: actor.lora.rank was 0; export it"
                " without --adapter."
            )
        if output_directory.exists():
            raise ValueError(f"{output_directory} exists; give the name of a new directory.")
        return write_peft_adapter(
            output_directory,
            self.lora_config,
            self.model.source.read_adapter_matrices(),
            str(self.model.companions_directory or ""),
        )


def find_exportable_weights(
    run_or_checkpoint: Path,
    step: int | None = None,
    use_best: bool = False,
    model_directory: Path | None = None,
    role: Literal["actor", "critic"] = "actor",
) -> ExportableWeights:
    """Return the weights of a checkpoint of the run `run_or_checkpoint`, or of that checkpoint
    itself.

    Take the newest good checkpoint; or the checkpoint of `step`; or with `use_best` the checkpoint
    with the best trainer.keep_best. `model_directory` gives the config.json and tokenizer for the
    weights, where those of the run are not on this machine. A critic becomes a token classifier of
    one label, a trained reward model a sequence classifier.

    Raise ValueError where there is no such checkpoint, the checkpoint is not good, or the model
    directory is of another model.
    """
    found = _find_checkpoint(run_or_checkpoint, step, use_best)
    state = read_run_state(found)
    if not (found.path / role).is_dir():
        raise ValueError(f"{found.path} has no {role}: the run trained none.")
    config = read_run_config(found.path / CONFIG).config
    is_critic = role == "critic"
    is_reward_model = config.job == "reward-model"
    own = config.critic.path if is_critic and config.critic.path is not None else config.model.path
    directory = model_directory or Path(own)
    hf_config: dict[str, Any]
    if directory.is_dir():
        hf_config = _read_hf_config_with_plugins(directory, config.plugins)
        if own == config.model.path:
            check_same_architecture(str(directory), state)
    elif model_directory is not None or own != config.model.path:
        raise ValueError(
            f"{directory} is not a directory; give one with the config.json of this {role}"
            " by --model."
        )
    else:
        hf_config = {name: json.loads(value) for name, value in state.architecture.items()}
    companions = model_directory or Path(config.model.path)
    source = TorchDistSource(found.path / role)
    lora = config.actor.lora if role == "actor" and config.actor.lora.rank else None
    weights = StoredModel(
        hf_config,
        source if lora is None else MergedLoraSource(source, compute_lora_scale(lora)),
        found.path / role,
        companions if companions.is_dir() else None,
        recorded_digests={},
        head="value" if is_critic or is_reward_model else "vocabulary",
        is_written_by_fsdp=config.actor.backend == "fsdp",
    )
    if is_reward_model:
        exported_config = make_reward_model_config(hf_config)
    elif is_critic:
        exported_config = make_value_model_config(hf_config)
    else:
        exported_config = dict(hf_config)
    return ExportableWeights(weights, exported_config, found.path, state.step, lora)


def _read_hf_config_with_plugins(directory: Path, plugins: Sequence[str]) -> dict[str, Any]:
    """Read config.json, after running the plugins where no built-in family has the model's type.
    Plugins are not run otherwise: they may not be on this machine.
    """
    if plugins and str(
        read_json_object(directory / "config.json").get("model_type")
    ) not in load_registry("model family"):
        load_plugins(plugins)
    return read_hf_config(directory)


def _find_checkpoint(
    run_or_checkpoint: Path, step: int | None, use_best: bool
) -> VerifiedCheckpoint:
    """Find and verify a checkpoint of a run, or the checkpoint at this path. Raise ValueError with
    the steps that there are.
    """
    if (run_or_checkpoint / MANIFEST).is_file():
        return CheckpointStore(run_or_checkpoint.parent).verify_checkpoint(run_or_checkpoint)
    store = CheckpointStore(run_or_checkpoint / CHECKPOINTS)
    steps = store.list_steps()
    if not steps:
        raise ValueError(
            f"{run_or_checkpoint} has no checkpoints: it kept none (trainer.save_freq, save_last),"
            " or ended before the first one."
        )
    if use_best:
        metric = read_run_config(run_or_checkpoint / CONFIG).config.trainer.keep_best
        if metric is None:
            raise ValueError(
                f"trainer.keep_best of {run_or_checkpoint} is null; give --step, one"
                f" of {_join_steps(steps)}."
            )
        values = {
            row["step"]: row[metric]
            for row in read_step_rows(run_or_checkpoint)
            if isinstance(row.get(metric), int | float)
        }
        step = find_best_step(values, steps, metric)
        if step is None:
            raise ValueError(
                f"no checkpoint of {run_or_checkpoint} has a value of {metric}; give --step, one"
                f" of {_join_steps(steps)}."
            )
    if step is not None:
        if step not in steps:
            raise ValueError(
                f"{run_or_checkpoint} has no checkpoint of step {step}; there"
                f" are {_join_steps(steps)}."
            )
        return store.verify_checkpoint(store.get_checkpoint_path(step))
    found = store.find_newest()
    assert found is not None, "there are steps"
    return found


def _join_steps(steps: Sequence[int]) -> str:
    """Return the steps as text, ascending, separated by commas."""
    return ", ".join(map(str, sorted(steps)))


def find_best_step(
    value_by_step: Mapping[int, float], steps: Sequence[int], metric: str | None
) -> int | None:
    """Return the step of `steps` with the best value of `metric`, the later step where two are
    equal; None where no step has a finite value.
    """
    found = find_metric(metric) if metric is not None else None
    sign = -1 if found is not None and found.better_direction == "lower" else 1
    known = [
        (sign * value_by_step[step], step)
        for step in steps
        if math.isfinite(value_by_step.get(step, math.nan))
    ]
    return max(known)[1] if known else None


def export_missing_weights(run_dir: Path, trainer: TrainerConfig, has_critic: bool) -> list[str]:
    """Export the weights that `trainer.save_hf` asks for and that a complete run has not written,
    from its last checkpoint. Return a line of text for each directory.

    Raise ValueError where the last step has no checkpoint.
    """
    wanted: list[tuple[str, Literal["actor", "critic"]]] = [(HF, "actor")]
    wanted += [(HF_CRITIC, "critic")] if has_critic else []
    lines = []
    for name, role in wanted:
        if not (run_dir / name).exists():
            find_exportable_weights(
                run_dir, trainer.total_training_steps, role=role
            ).write_hf_directory(run_dir / name)
            lines.append(f"weights of the {role}: {run_dir / name}")
    return lines


def describe_saved_weights(
    run_dir: Path, trainer: TrainerConfig, value_by_step: Mapping[int, float]
) -> list[str]:
    """Return lines for a person: which weights and checkpoints a run has left and what to do with
    them. `value_by_step`: the values of trainer.keep_best, by step.
    """
    store = CheckpointStore(run_dir / CHECKPOINTS)
    steps = store.list_steps()
    written = [
        f"weights: {run_dir / name}" for name in (HF, HF_CRITIC) if (run_dir / name).is_dir()
    ]
    lines = [
        *written,
        *(f"state after step {step}: {store.get_checkpoint_path(step)}" for step in steps[:1]),
    ]
    if (best := find_best_step(value_by_step, steps, trainer.keep_best)) is not None:
        lines.append(
            f"best {trainer.keep_best}, {value_by_step[best]:g}: {store.get_checkpoint_path(best)}"
        )
    if steps and not written:
        lines.append(f"weights in Hugging Face layout: rlhf-megatron export {run_dir} --out DIR")
    return lines or ["no weights were kept (trainer.save_last: none)"]
