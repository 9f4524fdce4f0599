"""Attention over the generator's own key-value cache, called by a transformers model as its attention implementation.

A forward pass carries a `Prefill` or a `Decode` object through the model's keyword arguments to each layer; it takes
the layer's keys and values in and attends. So no cache class of transformers is involved and no mask is built by it.

Shapes: N rows, P prompt columns, S cache columns, Hq / Hk query / key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

IMPLEMENTATION = "rlhf_megatron_local"


@dataclass
class Prefill:
    """Whole prompts, right-padded: causal attention needs no mask, and what stands behind a prompt is never read."""

    keys_values: Tensor  # [2, layers, N, P, Hk, D], filled layer by layer

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [N, Hq, P, D], key and value [N, Hk, P, D] -> [N, P, Hq, D]."""
        self.keys_values[0, layer] = key.transpose(1, 2)
        self.keys_values[1, layer] = value.transpose(1, 2)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=query.shape[2] > 1, scale=scaling)
        return out.transpose(1, 2)


@dataclass
class Decode:
    """One new token a row. Row i holds `positions[i]` tokens before it."""

    keys_values: Tensor  # [2, layers, N, S, Hk, D], views into the cache
    rows: Tensor  # [N] int64: 0, 1, ...
    positions: Tensor  # [N] int64: column that the new token takes
    mask: Tensor  # [N, 1, 1, S] of the model's dtype: 0 where a row may look, -inf elsewhere

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [N, Hq, 1, D], key and value [N, Hk, 1, D] -> [N, 1, Hq, D]."""
        keys, values = self.keys_values[0, layer], self.keys_values[1, layer]
        keys[self.rows, self.positions] = key.squeeze(2)
        values[self.rows, self.positions] = value.squeeze(2)
        num_rows, num_heads, _, head_size = query.shape
        num_key_heads = key.shape[1]
        # The query heads that share a key head take the place of the query length: no key is repeated.
        grouped = query.reshape(num_rows, num_key_heads, num_heads // num_key_heads, head_size)
        out = F.scaled_dot_product_attention(
            grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=self.mask, scale=scaling
        )
        return out.reshape(num_rows, 1, num_heads, head_size)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    rollout: Prefill | Decode,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The interface of transformers' attention functions."""
    for name in ("sliding_window", "softcap", "s_aux"):
        if kwargs.get(name) is not None:
            raise ValueError(f"the local engine cannot decode a model with {name}={kwargs[name]}; use SGLang.")
    return rollout.attend(module.layer_idx, query, key, value, scaling), None


def install(model: Any) -> None:
    """Make `model` (a transformers causal LM) use `attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
    model.config._attn_implementation = IMPLEMENTATION
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = IMPLEMENTATION
