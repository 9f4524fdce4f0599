"""The weights of a checkpoint as a Hugging Face directory: one process, any machine, whatever
layout wrote them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import LoRAConfig, TrainerConfig
from rlhf_megatron.controller.observe.line_file import read_step_rows
from rlhf_megatron.controller.observe.metrics.former_metric_names import find_current_name
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore, VerifiedCheckpoint
from rlhf_megatron.controller.recovery.resume_point import (
    CHECKPOINTS,
    CONFIG,
    check_same_architecture,
    read_run_state,
)
from rlhf_megatron.data.tokenizer import load_tokenizer
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.registry import load_registry
from rlhf_megatron.weights.checkpoint_manifest import MANIFEST
from rlhf_megatron.weights.conversion.conversion_writer import ReportBytes, write_hf_directory
from rlhf_megatron.weights.conversion.stored_model import StoredModel
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.hf_reader import read_hf_config, read_json_object
from rlhf_megatron.weights.lora import compute_lora_scale
from rlhf_megatron.weights.lora_adapter import MergedLoraSource, write_peft_adapter
from rlhf_megatron.weights.torch_dist_source import TorchDistSource
from rlhf_megatron.weights.value_model import BIAS as HEAD_BIAS
from rlhf_megatron.weights.value_model import WEIGHT as HEAD_WEIGHT
from rlhf_megatron.weights.value_model import (
    ZeroBiasSource,
    choose_pad_token_id,
    describe_classifier_export,
    make_reward_model_config,
    make_value_model_config,
    needs_zero_bias,
)
from rlhf_megatron.weights.weight_table import VALUE_HEADS, HeadKind

# keys of a value head's bias in the checkpoints of both backends, megatron and fsdp
STORED_BIAS_KEYS = frozenset({"value_head.bias", HEAD_BIAS})
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
    notes: tuple[str, ...] = ()  # what a reader of the directory must know, a sentence each

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
    one label; so does a reward model whose checkpoint has a bias of the head, and one without a
    bias becomes a sequence classifier.

    Raise ValueError where there is no such checkpoint, the checkpoint is not good, or the model
    directory is of another model.
    """
    checkpoint = _find_checkpoint(run_or_checkpoint, step, use_best)
    state = read_run_state(checkpoint)
    if not (checkpoint.path / role).is_dir():
        raise ValueError(f"{checkpoint.path} has no {role}: the run trained none.")
    config = read_run_config(checkpoint.path / CONFIG).config
    is_critic = role == "critic"
    is_reward_model = config.job == "reward-model"
    model_path = (
        config.critic.path if is_critic and config.critic.path is not None else config.model.path
    )
    directory = model_directory or Path(model_path)
    hf_config: dict[str, Any]
    if directory.is_dir():
        hf_config = _read_hf_config_with_plugins(directory, config.plugins)
        if model_path == config.model.path:
            check_same_architecture(str(directory), state)
    elif model_directory is not None or model_path != config.model.path:
        raise ValueError(
            f"{directory} is not a directory; give one with the config.json of this {role}"
            " by --model."
        )
    else:
        hf_config = {name: json.loads(value) for name, value in state.architecture.items()}
    companions = model_directory or Path(config.model.path)
    notes: list[str] = []
    tokenizer_directory = None
    if config.model.tokenizer_path is not None and model_directory is None:
        tokenizer_directory = Path(config.model.tokenizer_path)
        if not tokenizer_directory.is_dir():
            notes.append(
                f"the run's tokenizer ({tokenizer_directory}) is not here; the tokenizer, if any,"
                f" is that of {companions}. --model DIR names a directory with the right one."
            )
            tokenizer_directory = None
    stored = TorchDistSource(checkpoint.path / role)
    lora = config.actor.lora if role == "actor" and config.actor.lora.rank else None
    head: HeadKind = "vocabulary"
    exported_config = dict(hf_config)
    if is_reward_model:
        # What the checkpoint has decides: checkpoints of before the setting have a bias.
        head = "value" if not STORED_BIAS_KEYS.isdisjoint(stored.names) else "unbiased_value"
        exported_config = make_reward_model_config(
            hf_config,
            head == "value",
            _find_pad_token_id(tokenizer_directory or companions, companions, hf_config),
        )
    elif is_critic:
        head = "value"
        exported_config = make_value_model_config(hf_config)
    weights = StoredModel(
        hf_config,
        stored if lora is None else MergedLoraSource(stored, compute_lora_scale(lora)),
        checkpoint.path / role,
        companions if companions.is_dir() else None,
        recorded_digests={},
        head=head,
        is_written_by_fsdp=config.actor.backend == "fsdp",
        tokenizer_directory=tokenizer_directory,
    )
    if head == "unbiased_value" and needs_zero_bias(exported_config):
        weights = _add_zero_bias(weights)
    if head in VALUE_HEADS:
        notes += describe_classifier_export(exported_config)
    return ExportableWeights(
        weights, exported_config, checkpoint.path, state.step, lora, tuple(notes)
    )


def _find_pad_token_id(
    tokenizer_directory: Path, companions_directory: Path, hf_config: HFConfig
) -> int | None:
    """Return the `pad_token_id` of an exported reward model, None where there is no tokenizer."""
    if not (tokenizer_directory / "tokenizer.json").is_file():
        return None
    tokenizer = load_tokenizer(tokenizer_directory, companions_directory)
    return choose_pad_token_id(tokenizer, int(hf_config["vocab_size"]))


def _add_zero_bias(model: StoredModel) -> StoredModel:
    """Return a reward model without a bias of the head as one with a bias of 0."""
    [weight_rule] = [rule for rule in model.weight_table if rule.hf_tensors[0].name == HEAD_WEIGHT]
    return replace(model, source=ZeroBiasSource(model.source, weight_rule), head="value")


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
        key = find_current_name(metric)
        values = {
            row["step"]: row[key]
            for row in read_step_rows(run_or_checkpoint)
            if isinstance(row.get(key), int | float)
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
    found = find_metric(find_current_name(metric)) if metric is not None else None
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
            weights = find_exportable_weights(run_dir, trainer.total_training_steps, role=role)
            weights.write_hf_directory(run_dir / name)
            lines.append(f"weights of the {role}: {run_dir / name}")
            lines += [f"note: {note}" for note in weights.notes]
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
