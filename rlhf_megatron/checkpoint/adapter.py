"""Adapters of LoRA on disk: peft's directories, and the checkpoints of this package that hold them beside the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rlhf_megatron.checkpoint.dist_source import DistSource
from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.models.lora import DOWN, UP, is_adapter, last_part, merged, stem_of
from rlhf_megatron.models.table import HFTensor, Rule, plain_rule

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_STAYS = (True, False, "gaussian", "eva")  # kinds of first matrices; others change the base's weights
_PREFIX = "base_model.model."  # of names in peft's files


def read_adapter(directory: Path, lora: LoRAConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The matrices of an adapter that peft wrote, by our names. Raises ValueError for one that is not of this model
    and these settings."""
    if not (directory / CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        raise ValueError(f"actor.lora.path ({directory}) must be a directory with {CONFIG} and {WEIGHTS}.")
    stored = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    ours = {"r": lora.rank, "lora_alpha": lora.alpha}
    plain = {"use_rslora": False, "use_dora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
    for key, wanted in (ours | plain).items():
        if stored.get(key, wanted) != wanted:
            raise ValueError(
                f"{directory / CONFIG} has {key} {stored[key]!r}, but {wanted!r} is needed; set actor.lora as it says,"
                " or merge that adapter and start from the merged model."
            )
    if (begun := stored.get("init_lora_weights", True)) not in (*BASE_STAYS, None):
        raise ValueError(
            f"{directory / CONFIG} has init_lora_weights {begun!r}: its matrices stand beside weights that peft changed"
            " when it made them, not the model's own; merge that adapter and start from the merged model."
        )
    held = {name.removeprefix(_PREFIX): tensor for name, tensor in load_file(directory / WEIGHTS).items()}
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    wanted_shapes = {name: tuple(shape) for name, shape in shapes.items()}
    if found != wanted_shapes:
        differing = sorted(name for name in found.keys() | wanted_shapes.keys() if found.get(name) != shapes.get(name))
        raise ValueError(
            f"{directory} and actor.lora.target_modules differ in {', '.join(differing[:4])} and"
            f" {max(len(differing) - 4, 0)} more; name the modules that {CONFIG} names."
        )
    return held


@dataclass(frozen=True)
class MergedSource:
    """A `WeightSource` of a checkpoint with adapters: its weights with the matrices added in."""

    source: DistSource
    scale: float

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        found = self.source.hf_tensors(rule)
        stem = stem_of(rule.megatron_name)
        if stem + DOWN not in self.source.names:
            return found
        down, up = (self.source.hf_tensors(_plain(self.source, stem + part))[0] for part in (DOWN, UP))
        return (merged(found[0], down, up, self.scale),)

    def dtype_of(self, rule: Rule) -> str:
        return self.source.dtype_of(rule)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """The matrices by name, as they train."""
        for name in filter(is_adapter, self.source.names):
            if not name.startswith("optimizer."):
                yield name, self.source.hf_tensors(_plain(self.source, name))[0]


def _plain(source: DistSource, name: str) -> Rule:
    return plain_rule(name, HFTensor(name, source.shape_of(name)), "replicated", None)


def write_adapter(directory: Path, lora: LoRAConfig, matrices: Iterator[tuple[str, Tensor]], base: str) -> int:
    """Write the new directory of an adapter, as peft's `save_pretrained` does, and return the number of tensors.

    `base`: what peft takes for the name of the model.
    """
    tensors = {_PREFIX + name: tensor.float().contiguous() for name, tensor in matrices}
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    modules = sorted({last_part(name.rpartition(".lora_")[0]) for name in tensors})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(tensors)
