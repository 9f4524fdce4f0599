"""The weights of a checkpoint as a Hugging Face directory: one process, any machine, whatever layout wrote them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_megatron.checkpoint.adapter import MergedSource, write_adapter
from rlhf_megatron.checkpoint.dist_source import DistSource
from rlhf_megatron.checkpoint.hf_reader import read_hf_config, read_json
from rlhf_megatron.checkpoint.manifest import MANIFEST
from rlhf_megatron.checkpoint.run_checkpoint import CheckpointStore, Found
from rlhf_megatron.checkpoint.value_model import reward_model_config, value_model_config
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.schema import LoRAConfig, TrainerConfig
from rlhf_megatron.conversion.model import Model
from rlhf_megatron.conversion.run import OnBytes, write_hf
from rlhf_megatron.models.lora import scale_of
from rlhf_megatron.observe.line_file import read_rows
from rlhf_megatron.observe.metrics.names import find
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.recovery.resume import CHECKPOINTS, CONFIG, check_architecture, read_state
from rlhf_megatron.registry import parts_of

HF, HF_CRITIC = "hf", "hf_critic"  # of a run that writes weights itself


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, ready to be written."""

    model: Model
    config: Mapping[str, Any]  # config.json to write
    checkpoint: Path
    step: int
    lora: LoRAConfig | None = None  # of a policy that has adapters

    def write(self, out: Path, dtype: str | None = None, on_bytes: OnBytes | None = None) -> int:
        """Write the new directory `out` and return the number of tensors; `dtype` as of `conversion.run.write_hf`.

        Raises ValueError before anything is written when `out` is not empty or space is short.
        """
        return len(write_hf(self.model, out, dtype, on_bytes=on_bytes, hf_config=self.config))

    def write_adapter(self, out: Path) -> int:
        """Write the new directory `out` with the adapter alone, as peft reads it, and return the number of tensors.

        Raises ValueError where no adapter was trained, or `out` exists.
        """
        if self.lora is None or not isinstance(self.model.source, MergedSource):
            raise ValueError(f"{self.checkpoint} has no adapter: actor.lora.rank was 0; export it without --adapter.")
        if out.exists():
            raise ValueError(f"{out} exists; give the name of a new directory.")
        return write_adapter(out, self.lora, self.model.source.adapters(), str(self.model.companions_from or ""))


def find_weights(
    path: Path,
    step: int | None = None,
    is_best: bool = False,
    model: Path | None = None,
    role: Literal["actor", "critic"] = "actor",
) -> Weights:
    """Return the weights of a checkpoint of the run `path`, or of that checkpoint itself.

    The newest good one; or that of `step`; or with `is_best` that with the best trainer.keep_best. `model`: whose
    config.json and tokenizer go with the weights, where those of the run are not on this machine. A critic becomes a
    token classifier of one label, a trained reward model a sequence classifier.

    Raises ValueError: no such checkpoint, one that is not good, another model.
    """
    found = _find(path, step, is_best)
    state = read_state(found)
    if not (found.path / role).is_dir():
        raise ValueError(f"{found.path} has no {role}: the run trained none.")
    config = read_run_config(found.path / CONFIG).config
    is_critic, is_reward_model = role == "critic", config.job == "reward-model"
    own = config.critic.path if is_critic and config.critic.path is not None else config.model.path
    directory = model or Path(own)
    hf_config: dict[str, Any]
    if directory.is_dir():
        hf_config = _hf_config(directory, config.plugins)
        if own == config.model.path:
            check_architecture(str(directory), state)
    elif model is not None or own != config.model.path:
        raise ValueError(f"{directory} is not a directory; give one with the config.json of this {role} by --model.")
    else:
        hf_config = {name: json.loads(value) for name, value in state.architecture.items()}
    companions = model or Path(config.model.path)
    source = DistSource(found.path / role)
    lora = config.actor.lora if role == "actor" and config.actor.lora.rank else None
    weights = Model(
        hf_config,
        source if lora is None else MergedSource(source, scale_of(lora)),
        found.path / role,
        companions if companions.is_dir() else None,
        digests={},
        head="value" if is_critic or is_reward_model else "vocabulary",
        is_of_fsdp=config.actor.backend == "fsdp",
    )
    exported = reward_model_config if is_reward_model else value_model_config if is_critic else dict
    return Weights(weights, exported(hf_config), found.path, state.step, lora)


def _hf_config(directory: Path, plugins: Sequence[str]) -> dict[str, Any]:
    """Plugins are run only where one must bring the model's family: others may not be on this machine."""
    if plugins and str(read_json(directory / "config.json").get("model_type")) not in parts_of("model family"):
        load_plugins(plugins)
    return read_hf_config(directory)


def _find(path: Path, step: int | None, is_best: bool) -> Found:
    """Raises ValueError with the steps that there are."""
    if (path / MANIFEST).is_file():
        return CheckpointStore(path.parent).verify(path)
    store = CheckpointStore(path / CHECKPOINTS)
    steps = store.steps()
    if not steps:
        raise ValueError(
            f"{path} has no checkpoints: it kept none (trainer.save_freq, save_last), or ended before the first one."
        )
    if is_best:
        metric = read_run_config(path / CONFIG).config.trainer.keep_best
        if metric is None:
            raise ValueError(f"trainer.keep_best of {path} is null; give --step, one of {_listed(steps)}.")
        values = {row["step"]: row[metric] for row in read_rows(path) if isinstance(row.get(metric), int | float)}
        step = best_step(values, steps, metric)
        if step is None:
            raise ValueError(f"no checkpoint of {path} has a value of {metric}; give --step, one of {_listed(steps)}.")
    if step is not None:
        if step not in steps:
            raise ValueError(f"{path} has no checkpoint of step {step}; there are {_listed(steps)}.")
        return store.verify(store.path_of(step))
    found = store.newest()
    assert found is not None, "there are steps"
    return found


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(steps)))


def best_step(values: Mapping[int, float], steps: Sequence[int], metric: str | None) -> int | None:
    """The one of `steps` with the best value of `metric`, the later one of two; None where none has a finite one."""
    found = find(metric) if metric is not None else None
    sign = -1 if found is not None and found.better == "lower" else 1
    known = [(sign * values[step], step) for step in steps if math.isfinite(values.get(step, math.nan))]
    return max(known)[1] if known else None


def export_complete(run_dir: Path, trainer: TrainerConfig, has_critic: bool) -> list[str]:
    """Write what `trainer.save_hf` asks for and a complete run has not written. Returns a line for each directory.

    Raises ValueError where the last step has no checkpoint.
    """
    wanted: list[tuple[str, Literal["actor", "critic"]]] = [(HF, "actor")]
    wanted += [(HF_CRITIC, "critic")] if has_critic else []
    lines = []
    for name, role in wanted:
        if not (run_dir / name).exists():
            find_weights(run_dir, trainer.total_training_steps, role=role).write(run_dir / name)
            lines.append(f"weights of the {role}: {run_dir / name}")
    return lines


def closing_lines(run_dir: Path, trainer: TrainerConfig, values: Mapping[int, float]) -> list[str]:
    """Say what a run has left and what to do with it. `values`: of trainer.keep_best, by step."""
    store = CheckpointStore(run_dir / CHECKPOINTS)
    steps = store.steps()
    written = [f"weights: {run_dir / name}" for name in (HF, HF_CRITIC) if (run_dir / name).is_dir()]
    lines = [*written, *(f"state after step {step}: {store.path_of(step)}" for step in steps[:1])]
    if (best := best_step(values, steps, trainer.keep_best)) is not None:
        lines.append(f"best {trainer.keep_best}, {values[best]:g}: {store.path_of(best)}")
    if steps and not written:
        lines.append(f"weights in Hugging Face layout: rlhf-megatron export {run_dir} --out DIR")
    return lines or ["no weights were kept (trainer.save_last: none)"]
