"""Mistral dense (model_type "mistral"; 7B from v0.2 on and Nemo are such): Llama without biases, no sliding window."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.models.families import dense
from rlhf_megatron.models.families.base import FAMILIES, HFConfig


def _read(hf_config: HFConfig) -> dense.DenseModel:
    return dense.read_dense_model(hf_config, head_dim=None, max_positions=131072)


def _unsupported(hf_config: HFConfig) -> Iterator[str]:
    window = hf_config.get("sliding_window", "left out, which means 4096")
    if window is not None:
        yield f"sliding_window ({window}) is not supported; it must be null: choose another model."


FAMILIES.register("mistral")(dense.family("mistral", _read, _unsupported, attention_bias=False, mlp_bias=False))
