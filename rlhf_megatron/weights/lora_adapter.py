"""Adapters of LoRA on disk: peft's directories, and the checkpoints of this package that hold them
beside the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rlhf_megatron.config.schema import LoRAConfig
from rlhf_megatron.weights.lora import (
    DOWN,
    UP,
    get_last_name_part,
    get_layer_stem,
    is_lora_matrix,
    merge_lora_weight,
)
from rlhf_megatron.weights.tensor_file import write_tensor_file
from rlhf_megatron.weights.torch_dist_source import TorchDistSource
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule, make_plain_rule
from rlhf_megatron.write_errors import write_text_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# kinds of first matrices; others change the base's weights
BASE_STAYS = True, False, "gaussian", "eva"
_PREFIX = "base_model.model."  # of names in peft's files


def read_peft_adapter(
    directory: Path, lora: LoRAConfig, expected_shapes: Mapping[str, Sequence[int]]
) -> dict[str, Tensor]:
    """Return the matrices of an adapter that peft wrote, by our names. Raise ValueError where files
    are missing, or the adapter's settings or shapes are not those of `lora` and `expected_shapes`.
    """
    if not (directory / CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        raise ValueError(
            f"actor.lora.path ({directory}) must be a directory with {CONFIG} and {WEIGHTS}."
        )
    stored = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    ours = {"r": lora.rank, "lora_alpha": lora.alpha}
    plain = {
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    for key, wanted in (ours | plain).items():
        if stored.get(key, wanted) != wanted:
            raise ValueError(
                f"{directory / CONFIG} has {key} {stored[key]!r}, but {wanted!r} is needed; set"
                " actor.lora as it says, or merge that adapter and start from the merged model."
            )
    if (begun := stored.get("init_lora_weights", True)) not in (*BASE_STAYS, None):
        raise ValueError(
            f"{directory / CONFIG} has init_lora_weights {begun!r}: its matrices stand beside"
            " weights that peft changed when it made them, not the model's own; merge that adapter"
            " and start from the merged model."
        )
    held = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in load_file(directory / WEIGHTS).items()
    }
    found = {name: tuple(tensor.shape) for name, tensor in held.items()}
    wanted_shapes = {name: tuple(shape) for name, shape in expected_shapes.items()}
    if found != wanted_shapes:
        differing = sorted(
            name
            for name in found.keys() | wanted_shapes.keys()
            if found.get(name) != expected_shapes.get(name)
        )
        raise ValueError(
            f"{directory} and actor.lora.target_modules differ in {', '.join(differing[:4])} and"
            f" {max(len(differing) - 4, 0)} more; name the modules that {CONFIG} names."
        )
    return held


@dataclass(frozen=True)
class MergedLoraSource:
    """A `WeightSource` of a checkpoint with adapters: its weights with the matrices added in."""

    source: TorchDistSource
    lora_scale: float

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the tensors of a rule, with the adapter's matrices added in float32 where the
        weight has an adapter.
        """
        found = self.source.read_hf_tensors(rule)
        stem = get_layer_stem(rule.megatron_name)
        if stem + DOWN not in self.source.names:
            return found
        down, up = (
            self.source.read_hf_tensors(_make_adapter_rule(self.source, stem + part))[0]
            for part in (DOWN, UP)
        )
        return (merge_lora_weight(found[0], down, up, self.lora_scale),)

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type of the stored weight, without regard to the adapter."""
        return self.source.get_dtype_name(rule)

    def read_adapter_matrices(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each adapter matrix of the checkpoint, not merged; optimizer
        state is left out.
        """
        for name in filter(is_lora_matrix, self.source.names):
            if not name.startswith("optimizer."):
                yield name, self.source.read_hf_tensors(_make_adapter_rule(self.source, name))[0]


def _make_adapter_rule(source: TorchDistSource, name: str) -> WeightRule:
    """Return a rule that reads the tensor `name` of the checkpoint as it is, not split."""
    return make_plain_rule(name, HFTensor(name, source.get_shape(name)), "replicated", None)


def write_peft_adapter(
    directory: Path, lora: LoRAConfig, matrices: Iterator[tuple[str, Tensor]], base_model_name: str
) -> int:
    """Write an adapter into a new directory as peft's `save_pretrained` does, in float32, and
    return the number of tensors.

    `base_model_name`: the model name or path that peft's config gives as the base.
    """
    tensors = {_PREFIX + name: tensor.float().contiguous() for name, tensor in matrices}
    directory.mkdir(parents=True)
    write_tensor_file(directory / WEIGHTS, tensors, {"format": "pt"})
    modules = sorted({get_last_name_part(name.rpartition(".lora_")[0]) for name in tensors})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model_name,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    write_text_file(directory / CONFIG, json.dumps(config, indent=2) + "\n")
    return len(tensors)
