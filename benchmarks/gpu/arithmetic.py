"""Operations, rates and shares: what turns seconds into figures. Pure numbers;
standard library only.

A product [T, H] @ [H, V] takes 2 T H V operations: G of a shape. The head's forward pass is 1 G;
its backward pass 2 G with kept logits and 3 G where they are computed again, and is counted
as what it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Dense bfloat16 with float32 sums, operations a second, as the vendors' data sheets have them.
PEAKS = {
    "H200": 989.4e12,
    "GH200": 989.4e12,
    "H100 PCIe": 756.0e12,
    "H100 NVL": 835.0e12,
    "H100": 989.4e12,
    "H800": 989.4e12,
    "H20": 148.0e12,
    "B200": 2250.0e12,
    "A100": 312.0e12,
    "A800": 312.0e12,
}


@dataclass(frozen=True)
class HeadShape:
    """Rows, hidden size and vocabulary rows of one call of the head."""

    num_tokens: int
    hidden: int
    vocab: int

    @property
    def gemm_flop(self) -> float:
        """G: operations of one product of this shape."""
        return 2.0 * self.num_tokens * self.hidden * self.vocab

    def __str__(self) -> str:
        return f"T={self.num_tokens} H={self.hidden} V={self.vocab}"


@dataclass(frozen=True)
class GemmSeconds:
    """Of the three products that a head cannot do without, each alone, on one shape."""

    forward: float  # logits, 16-bit
    grad_hidden: float
    grad_weight: float

    @property
    def all_three(self) -> float:
        return self.forward + self.grad_hidden + self.grad_weight


def tflops(num_flop: float, seconds: float) -> float:
    """10^12 operations a second."""
    return num_flop / seconds / 1e12


def percent(part: float, whole: float) -> float:
    return 100.0 * part / whole


def peak_flops(device_name: str) -> float | None:
    """Of the longest name in the table that the device's name has; None for a device
    that is not in it.
    """
    known = [
        name for name in PEAKS if set(name.split()) <= set(device_name.replace("-", " ").split())
    ]
    return PEAKS[max(known, key=len)] if known else None


@dataclass(frozen=True)
class StepFlop:
    """Operations that a training step cannot do without: forward once, backward twice that. Nothing
    is counted that is done a second time, nor the head on tokens that train nothing.
    """

    layers: float  # all matrix products with weights but the head's
    attention: float  # scores and their products with the values, of the causal half
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head

    @property
    def head_share(self) -> float:
        return self.head / self.total


def step_flop(
    hf_config: Mapping[str, Any], lengths: Sequence[int], num_rows: int, num_passes: int = 3
) -> StepFlop:
    """Of a step over documents of `lengths` tokens of which the head sees `num_rows`.

    `num_passes`: 3 for training (the backward pass counts twice), 1 for a forward pass.
    """
    hidden = hf_config["hidden_size"]
    num_layers = hf_config["num_hidden_layers"]
    num_heads = hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hidden // num_heads
    num_kv_heads = hf_config.get("num_key_value_heads") or num_heads
    attention_weights = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    layer_weights = attention_weights + 3 * hidden * hf_config["intermediate_size"]
    num_pairs = sum(length * length / 2 for length in lengths)
    return StepFlop(
        layers=num_passes * 2.0 * num_layers * layer_weights * sum(lengths),
        attention=num_passes * 4.0 * num_layers * num_heads * head_dim * num_pairs,
        head=num_passes * 2.0 * hidden * hf_config["vocab_size"] * num_rows,
    )
