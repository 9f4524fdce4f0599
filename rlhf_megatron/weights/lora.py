"""LoRA (arXiv 2106.09685): matrices of a small rank beside frozen linear layers, under the names
that peft has.

A layer computes W x + scale B A x with scale = alpha / rank; the engine and exports get
W + scale B A.
"""
# R rank, I inputs, O outputs

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import LoRAConfig

ALL_LINEAR = "all-linear"
ROUTERS = ("gate", "router", "shared_expert_gate")
DOWN = "lora_A.weight"
UP = "lora_B.weight"


class LoRALinear(nn.Module):
    """A linear layer with its two matrices, which are float32 and have no memory yet ("meta")."""

    def __init__(self, base_layer: nn.Linear, rank: int, scale: float) -> None:
        """Wrap a linear layer. `scale`: the factor of B A."""
        super().__init__()
        self.base_layer = base_layer
        self.scale = scale
        inputs = base_layer.in_features
        outputs = base_layer.out_features
        self.lora_A = nn.Linear(inputs, rank, bias=False, device="meta", dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outputs, bias=False, device="meta", dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return W x + scale B A x."""
        found: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scale
        return found


def compute_lora_scale(lora: LoRAConfig) -> float:
    """Return the factor of B A: alpha / rank."""
    return lora.alpha / lora.rank


def add_lora_layers(decoder: nn.Module, lora: LoRAConfig) -> None:
    """Freeze the model, and replace its linear layers that `lora` names by layers with trainable
    LoRA matrices.

    "all-linear" names every linear layer of the decoder layers, except routers and experts. Raise
    ValueError for a name that no such layer has, and for a model without such layers.
    """
    linear = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear)
        and _is_in_decoder_layer(name)
        and not _is_router_or_expert(name)
    }
    known = sorted({get_last_name_part(name) for name in linear})
    if not known:
        raise ValueError(
            "the model's decoder layers have no linear layers (nn.Linear); set"
            " actor.lora.rank to 0."
        )
    if unknown := [name for name in lora.target_modules if name not in (*known, ALL_LINEAR)]:
        raise ValueError(
            f"actor.lora.target_modules ({', '.join(unknown)}) must be {ALL_LINEAR}, or linear"
            " layers that stand in the decoder's layers and are neither routers nor"
            f" experts: {', '.join(known)}."
        )
    decoder.requires_grad_(False)
    for name, module in linear.items():
        if ALL_LINEAR in lora.target_modules or get_last_name_part(name) in lora.target_modules:
            parent, _, own = name.rpartition(".")
            setattr(
                decoder.get_submodule(parent),
                own,
                LoRALinear(module, lora.rank, compute_lora_scale(lora)),
            )


def _is_in_decoder_layer(name: str) -> bool:
    """Return whether a module name has a layer number in it."""
    return any(part.isdigit() for part in name.split("."))


def _is_router_or_expert(name: str) -> bool:
    """Return whether a module is a router or belongs to an expert, by its name."""
    return get_last_name_part(name) in ROUTERS or "experts" in name.split(".")


def get_last_name_part(name: str) -> str:
    """Return the part of a dotted name behind the last dot."""
    return name.rpartition(".")[2]


def is_lora_matrix(name: str) -> bool:
    """Return whether a tensor name is that of a LoRA matrix, A or B."""
    return name.endswith((DOWN, UP))


def get_layer_stem(name: str) -> str:
    """Return a weight's name without "weight", dot included: the stem plus DOWN or UP is the name
    of a LoRA matrix.
    """
    return name.removesuffix("weight")


def make_initial_lora_matrix(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the initial value of a LoRA matrix, as in peft: A uniform within 1 / sqrt(I), B zero.
    It depends on name, shape and seed only.
    """
    if name.endswith(UP):
        return torch.zeros(tuple(shape))
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return (torch.rand(tuple(shape), generator=generator) * 2 - 1) / math.sqrt(shape[1])


def compute_lora_change(down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Return scale B A in float32, for the rows that `up_OR` holds."""
    return (up_OR.float() @ down_RI.float()) * scale


def merge_lora_weight(weight_OI: Tensor, down_RI: Tensor, up_OR: Tensor, scale: float) -> Tensor:
    """Return W + scale B A in float32. `weight_OI` may hold a part of the rows, with the same rows
    of `up_OR`.
    """
    return weight_OI.float() + compute_lora_change(down_RI, up_OR, scale)
