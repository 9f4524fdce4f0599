"""Sources of weights: a Hugging Face directory, a converted directory, a random seed,
another file format.

A random tensor depends on its name, its shape and the seed only: not on the order in which tensors
are asked for, and so not on the layout of the model that loads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule


class WeightSource(Protocol):
    """Gives the Hugging Face tensors of one rule at a time, so that a whole model is
    never in memory.
    """

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return the rule's Hugging Face tensors, in the order of `rule.hf_tensors`, on the CPU;
        read-only views are allowed. Raise ValueError where one cannot be read.
        """

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return the type of the rule's tensors, "float32", "bfloat16" or "float16", without
        reading them. Raise ValueError when the types differ.
        """


def require_single_dtype(rule: WeightRule, dtypes: set[str]) -> str:
    """Return the only element of `dtypes`. Raise ValueError where there are several: one Megatron
    tensor cannot be made of tensors of several types.
    """
    if len(dtypes) != 1:
        names = ", ".join(hf.name for hf in rule.hf_tensors)
        raise ValueError(
            f"{names} have types {', '.join(sorted(dtypes))} but become the one tensor"
            f" {rule.megatron_name}; give one type for all weights (--dtype)."
        )
    return next(iter(dtypes))


@dataclass(frozen=True)
class RandomWeightSource:
    """A source of random weights for `model_weights.load_hf_weights`. Matrices have the deviation
    `std`; norms are 1, biases 0.
    """

    seed: int
    std: float

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """Return random Hugging Face tensors of a rule, float32 on the CPU."""
        return tuple(self.make_random_tensor(hf) for hf in rule.hf_tensors)

    def get_dtype_name(self, rule: WeightRule) -> str:
        """Return "float32"."""
        return "float32"

    def make_random_tensor(self, hf_tensor: HFTensor) -> Tensor:
        """Return one Hugging Face tensor, float32 on the CPU: ones for a norm, zeros for a bias,
        else normal with deviation `std`. It depends on name, shape and seed only.
        """
        if len(hf_tensor.shape) == 1:
            return (
                torch.ones(hf_tensor.shape)
                if hf_tensor.name.endswith(".weight")
                else torch.zeros(hf_tensor.shape)
            )
        seed = hashlib.sha256(f"{self.seed}:{hf_tensor.name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        return torch.randn(hf_tensor.shape, generator=generator) * self.std


def make_random_source(hf_config: HFConfig, seed: int) -> RandomWeightSource:
    """Return a random source with the deviation `initializer_range` of config.json (0.02 where it
    has none).
    """
    std = hf_config.get("initializer_range")
    return RandomWeightSource(seed=seed, std=0.02 if std is None else float(std))


def generate_random_hf_tensors(hf_config: HFConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of every tensor that the model's files have, random, float32 on the CPU,
    one at a time.
    """
    source = make_random_source(hf_config, seed)
    entries: dict[str, list[Tensor]] = {}
    for rule in make_weight_table(hf_config):
        for hf in rule.hf_tensors:
            if hf.entry is None:
                yield hf.name, source.make_random_tensor(hf)
                continue
            found = entries.setdefault(hf.entry.name, [])
            found.append(source.make_random_tensor(hf))
            if len(found) == hf.entry.num_entries:
                yield hf.entry.name, torch.stack(entries.pop(hf.entry.name))
