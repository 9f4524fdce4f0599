"""FLOPs that a model cannot do without, and the peaks of devices: what model FLOPs utilisation (MFU) is made of. Pure.

A product with a weight matrix is 2 operations a weight and token; attention is 4 x heads x head size for each pair of
a token and one before it (causal: half of the square of the length); the head runs on the tokens that train. Backward
counts twice. What is computed again (recomputation, padding, several vocabulary passes) is not counted: MFU, not HFU.
"""

# B samples

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Dense bfloat16 with float32 sums, TFLOP/s, as the vendors' data sheets have them (without sparsity).
PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "L40S": 362.05,
    "L40": 181.05,
    "L4": 121.0,
    "A10": 125.0,
}
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
FORWARD, TRAINING = 1, 3  # passes, in units of a forward pass


def peak_tflops(device_name: str) -> float | None:
    """Of the longest name in the table whose words the device's name has; None for one that is not in it."""
    words = set(device_name.replace("-", " ").split())
    known = [name for name in PEAK_TFLOPS if set(name.split()) <= words]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def model_flops(
    hf_config: Mapping[str, Any], lengths_B: Tensor, num_head_tokens: int, passes: int, head_size: int | None = None
) -> float | None:
    """Of a pass over whole samples. `head_size`: outputs of the head (1 of a critic); None: the vocabulary.

    None for a model with experts, whose active weights this does not count, or of which nothing is known.
    """
    if "hidden_size" not in hf_config or any(hf_config.get(key) for key in EXPERT_KEYS):
        return None
    hidden, num_heads = hf_config["hidden_size"], hf_config["num_attention_heads"]
    head_dim = hf_config.get("head_dim") or hidden // num_heads
    num_kv_heads = hf_config.get("num_key_value_heads") or num_heads
    attention = hidden * head_dim * (2 * num_heads + 2 * num_kv_heads)
    weights = hf_config["num_hidden_layers"] * (attention + 3 * hidden * hf_config["intermediate_size"])
    lengths = lengths_B.double()
    pairs = float(lengths.square().sum()) / 2
    head = 2.0 * hidden * (head_size or hf_config["vocab_size"]) * num_head_tokens
    scores = 4.0 * hf_config["num_hidden_layers"] * num_heads * head_dim * pairs
    return passes * (2.0 * weights * float(lengths.sum()) + scores + head)
