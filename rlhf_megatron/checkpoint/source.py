"""Sources of weights: a Hugging Face directory, a converted directory, a random seed, another file format.

A random tensor depends on its name, its shape and the seed only: not on the order in which tensors are asked for, and
so not on the layout of the model that loads them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import HFTensor, Rule


class WeightSource(Protocol):
    """Gives the Hugging Face tensors of one rule at a time, so that a whole model is never in memory."""

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """The tensors of `rule.hf`, in that order, on the CPU; read-only views are allowed. Raises ValueError."""

    def dtype_of(self, rule: Rule) -> str:
        """ "float32", "bfloat16" or "float16", without reading the tensors. Raises ValueError when they differ."""


def one_dtype(rule: Rule, dtypes: set[str]) -> str:
    """The only one of `dtypes`. Raises ValueError: one Megatron tensor cannot be made of tensors of several types."""
    if len(dtypes) != 1:
        names = ", ".join(hf.name for hf in rule.hf)
        raise ValueError(
            f"{names} have types {', '.join(sorted(dtypes))} but become the one tensor {rule.megatron_name}; give one"
            " type for all weights (--dtype)."
        )
    return next(iter(dtypes))


@dataclass(frozen=True)
class RandomSource:
    """A source of weights for `load_model.load_weights`. Matrices have the deviation `std`; norms are 1, biases 0."""

    seed: int
    std: float

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """The HF tensors of a rule, float32 on the CPU."""
        return tuple(self.tensor(hf) for hf in rule.hf)

    def dtype_of(self, rule: Rule) -> str:
        return "float32"

    def tensor(self, hf: HFTensor) -> Tensor:
        """One HF tensor, float32 on the CPU."""
        if len(hf.shape) == 1:
            return torch.ones(hf.shape) if hf.name.endswith(".weight") else torch.zeros(hf.shape)
        seed = hashlib.sha256(f"{self.seed}:{hf.name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "little") >> 1)
        return torch.randn(hf.shape, generator=generator) * self.std


def random_source(hf_config: HFConfig, seed: int) -> RandomSource:
    """Weights of `initializer_range` (0.02 where config.json has none)."""
    std = hf_config.get("initializer_range")
    return RandomSource(seed=seed, std=0.02 if std is None else float(std))


def random_hf_tensors(hf_config: HFConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor that files of the model have, float32 on the CPU, one at a time."""
    source = random_source(hf_config, seed)
    entries: dict[str, list[Tensor]] = {}
    for rule in table_for(hf_config):
        for hf in rule.hf:
            if hf.entry is None:
                yield hf.name, source.tensor(hf)
                continue
            found = entries.setdefault(hf.entry.name, [])
            found.append(source.tensor(hf))
            if len(found) == hf.entry.count:
                yield hf.entry.name, torch.stack(entries.pop(hf.entry.name))
