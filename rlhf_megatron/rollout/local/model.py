"""A transformers causal LM behind the two forward passes that the generator needs, with attention over the generator's
own key-value cache.

A forward pass carries a `Prefill` or a `Decode` object through the model's keyword arguments to each layer, which
takes its keys and values in and attends. So no cache class of transformers is involved and transformers builds no
mask.

Shapes: N rows, P prompt columns, S cache columns, Hq / Hk query / key heads, D head size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_megatron.parallel.device import empty_cache

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


class LocalModel:
    """Weights and forward passes. `module` is the transformers model; its parameters are read at every call."""

    def __init__(self, module: Any) -> None:
        config = module.config.get_text_config()
        self.module = module.eval().requires_grad_(False)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.num_key_heads: int = config.num_key_value_heads or config.num_attention_heads
        self.head_size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._body = module.base_model
        self._head = module.get_output_embeddings()
        first = next(module.parameters())
        self.device, self.dtype = first.device, first.dtype
        expected = self._logits_of_stock_model()
        install(module)
        self._check_against(expected)

    def new_cache(self, num_rows: int, num_columns: int) -> Tensor:
        """[2, layers, rows, columns, key heads, head size] of zeros (never NaN, so that a masked column adds 0)."""
        shape = (2, self.num_layers, num_rows, num_columns, self.num_key_heads, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def prefill(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Right-padded prompts [N, P] of `lengths` [N] -> logits of each last position [N, V], keys and values."""
        num_rows, num_columns = token_ids.shape
        state = Prefill(self.new_cache(num_rows, num_columns))
        positions = torch.arange(num_columns, device=self.device).expand(num_rows, -1)
        hidden = self._forward(token_ids, positions, state)
        rows = torch.arange(num_rows, device=self.device)
        return self._head(hidden[rows, lengths - 1]), state.keys_values

    def decode(self, token_ids: Tensor, state: Decode) -> Tensor:
        """One more token a row: [N] ids at `state.positions` -> logits [N, V]."""
        hidden = self._forward(token_ids.unsqueeze(1), state.positions.unsqueeze(1), state)
        return self._head(hidden.squeeze(1))

    def _forward(self, token_ids: Tensor, positions: Tensor, state: Prefill | Decode) -> Tensor:
        return self._body(token_ids, position_ids=positions, use_cache=False, rollout=state).last_hidden_state

    @torch.inference_mode()
    def _logits_of_stock_model(self) -> Tensor:
        return self.module(self._probe_ids(), use_cache=False).logits[:, -1].float()

    @torch.inference_mode()
    def _check_against(self, expected: Tensor) -> None:
        """Refuse a family whose head is more than a matrix (soft-capped or scaled logits) before it samples a token."""
        ids = self._probe_ids()
        logits, _ = self.prefill(ids, torch.tensor([ids.shape[1]], device=self.device))
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        scale = expected.abs().max().clamp(min=1.0)
        difference = ((logits.float() - expected).abs().max() / scale).item()
        if difference > tolerance:  # NaN passes: weights that are not there yet
            raise ValueError(
                f"the local engine's logits differ from transformers' by {difference:.3g} (relative; at most"
                f" {tolerance}) for {type(self.module).__name__}: its attention or head is not supported; use SGLang."
            )

    def _probe_ids(self) -> Tensor:
        return (torch.arange(7, device=self.device) * 5 % self.vocab_size).unsqueeze(0)


def load_model(path: Path, dtype: str, device: str, load_weights: bool) -> LocalModel:
    """Loads a Hugging Face directory. `load_weights` False: random weights, to be replaced by the first weight sync.

    Raises ValueError when the directory lacks files, or a tensor is missing or has another shape.
    """
    if not (path / "config.json").is_file():
        raise ValueError(f"{path} has no config.json; model.path must be a directory in Hugging Face layout.")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if not load_weights:
        config = AutoConfig.from_pretrained(path)
        with no_init_weights(), torch.device(device):
            module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation="sdpa")
        module.tie_weights()
        with torch.no_grad():
            for parameter in module.parameters():  # not zeros: the check of the forward pass needs logits that differ
                parameter.normal_(std=0.05) if parameter.dim() > 1 else parameter.fill_(1.0)
        return LocalModel(module)
    if not list(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors; other weight formats are not read.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="sdpa", use_safetensors=True, output_loading_info=True
    )
    module, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind != "unexpected_keys"}
    if wrong:
        raise ValueError(f"the weights in {path} do not fit its config.json: {wrong}.")
    return LocalModel(module.to(device))


def give_back(device: torch.device) -> None:
    """Hand what is free to the device and to the kernel, so that other processes can have it.

    glibc keeps freed tensors of less than 32 MiB in its heap: without the trim a released model of small tensors stays
    in the process to the last byte.
    """
    empty_cache(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Memory behind tensors that share none."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
