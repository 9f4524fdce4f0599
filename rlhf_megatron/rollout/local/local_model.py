"""A transformers causal LM behind the two forward passes that the generator needs, with attention
over the generator's own key-value cache.

A forward pass carries a `PrefillAttention` or a `DecodeAttention` object through the model's
keyword arguments to each layer, which takes its keys and values in and attends. So no cache class
of transformers is involved and transformers builds no mask.

Shapes: N rows, P prompt columns, S cache columns, Hq / Hk query / key heads, D head size, Dv that
of values: D, or less in latent attention, whose values take the first part of their
places in the cache.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf_megatron.device import empty_device_cache
from rlhf_megatron.weights.unread_tensors import (
    find_different_row,
    find_droppable_kind,
    format_other_head,
    format_unread_tensors,
)
from rlhf_megatron.weights.weight_sets import INDEX, check_weight_sets

ATTENTION_NAME = "rlhf_megatron_local"
# transformers' attention that ours is compared with, where it is not sdpa
_STOCK_ATTENTION = {"gpt_oss": "eager"}
# model_type -> the one that transformers has for such a model
_MODEL_TYPE_ALIASES = {"kimi_k2": "deepseek_v3"}


@dataclass(frozen=True)
class AttentionLimits:
    """What limits a layer's attention beside its keys and queries: a window and sinks."""

    window: int | None = None  # tokens that a token sees, itself with them; None: all before it
    sinks: Tensor | None = None  # [Hq] a logit of each head in the softmax, for no key

    def add_sink_key(
        self, key: Tensor, value: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return key, value and mask with one more key of zeros, whose mask entry is the sink's
        logit; unchanged without sinks. key, value [N, H, K, *]; mask [*, Hq, P, K], or [*, Hk, Hq /
        Hk, K] where query heads take the place of rows.
        """
        if self.sinks is None:
            return key, value, mask
        sinks = self.sinks.to(mask.dtype).view(mask.shape[1], -1, 1).expand(*mask.shape[:-1], 1)
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), torch.cat([mask, sinks], -1)


@dataclass
class PrefillAttention:
    """Attention over whole prompts, right-padded: causal attention needs no mask, and the columns
    behind a prompt are never read.
    """

    keys_values: Tensor  # [2, layers, N, P, Hk, D], filled layer by layer

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        limits: AttentionLimits,
    ) -> Tensor:
        """Store the layer's keys and values, and return its causal attention: query [N, Hq, P, D],
        key [N, Hk, P, D], value [N, Hk, P, Dv] -> [N, P, Hq, Dv].
        """
        self.keys_values[0, layer] = key.transpose(1, 2)
        self.keys_values[1, layer, ..., : value.shape[-1]] = value.transpose(1, 2)
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key = key.repeat_interleave(repeats, 1)
            value = value.repeat_interleave(repeats, 1)
        if limits.window or limits.sinks is not None:
            places = torch.arange(query.shape[2], device=query.device)
            before = places[:, None] - places
            is_hidden = (before < 0) | (before >= limits.window) if limits.window else before < 0
            mask = torch.zeros(before.shape, dtype=query.dtype, device=query.device).masked_fill(
                is_hidden, -torch.inf
            )
            key, value, mask = limits.add_sink_key(
                key, value, mask.expand(1, query.shape[1], -1, -1)
            )
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scaling
            ).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=query.shape[2] > 1, scale=scaling
        )
        return out.transpose(1, 2)


@dataclass
class DecodeAttention:
    """Attention of one new token for each row. Row i holds `positions[i]` tokens before it."""

    keys_values: Tensor  # [2, layers, N, S, Hk, D], views into the cache
    rows: Tensor  # [N] int64: 0, 1, ...
    positions: Tensor  # [N] int64: column that the new token takes
    mask: Tensor  # [N, 1, 1, S] of the model's dtype: 0 where a row may look, -inf elsewhere

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        limits: AttentionLimits,
    ) -> Tensor:
        """Write the new token's key and value into the cache, and return its attention over the
        row: query [N, Hq, 1, D], key [N, Hk, 1, D], value [N, Hk, 1, Dv] -> [N, 1, Hq, Dv].
        """
        keys = self.keys_values[0, layer]
        values = self.keys_values[1, layer, ..., : value.shape[-1]]
        keys[self.rows, self.positions] = key.squeeze(2)
        values[self.rows, self.positions] = value.squeeze(2)
        num_rows, num_heads, _, head_size = query.shape
        num_key_heads = key.shape[1]
        # The query heads that share a key head take the place of the query length: no
        # key is repeated.
        grouped = query.reshape(num_rows, num_key_heads, num_heads // num_key_heads, head_size)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        mask = self.mask
        if limits.window:
            columns = torch.arange(keys.shape[2], device=keys.device)
            is_hidden = columns <= self.positions[:, None] - limits.window
            mask = mask.masked_fill(is_hidden[:, None, None], -torch.inf)
        if limits.sinks is not None:
            keys, values, mask = limits.add_sink_key(
                keys, values, mask.expand(-1, *grouped.shape[1:3], -1)
            )
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
        return out.reshape(num_rows, 1, num_heads, -1)


def compute_rollout_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    rollout: PrefillAttention | DecodeAttention,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a layer, by the `rollout` object, in the interface of transformers'
    attention functions. Raise ValueError for a model with soft-capped attention.
    """
    if kwargs.get("softcap") is not None:
        raise ValueError(
            f"the local engine cannot decode a model with softcap={kwargs['softcap']}; use SGLang."
        )
    limits = AttentionLimits(kwargs.get("sliding_window"), kwargs.get("s_aux"))
    return rollout.attend(module.layer_idx, query, key, value, scaling, limits), None


def install_rollout_attention(model: Any) -> None:
    """Make `model` (a transformers causal LM) use `compute_rollout_attention`."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, compute_rollout_attention)
    model.config._attn_implementation = ATTENTION_NAME
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = ATTENTION_NAME


class LocalModel:
    """Weights and forward passes. `module` is the transformers model; its parameters are read
    at every call.
    """

    def __init__(self, module: Any) -> None:
        """Wrap the transformers model `module`, and install the rollout attention in it. Raise
        ValueError where the logits differ from transformers' own.
        """
        config = module.config.get_text_config()
        self.module = module.eval().requires_grad_(False)
        self.vocab_size: int = config.vocab_size
        self.max_positions: int = config.max_position_embeddings
        self.num_layers: int = config.num_hidden_layers
        self.num_key_heads: int = config.num_key_value_heads or config.num_attention_heads
        # the first: latent
        head_size = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
        self.head_size: int = head_size or config.hidden_size // config.num_attention_heads
        self._transformer = module.base_model
        # of a forward pass: the experts of its tokens in each layer that has any
        self._picked_experts: list[Tensor] = []
        self.num_expert_layers = self._hook_expert_layers()
        self.top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
        self._lm_head = module.get_output_embeddings()
        first = next(module.parameters())
        self.device = first.device
        self.dtype = first.dtype
        expected = self._compute_stock_logits()
        install_rollout_attention(module)
        self._check_logits(expected)

    def make_cache(self, num_rows: int, num_columns: int) -> Tensor:
        """Return an empty key-value cache [2, layers, rows, columns, key heads, head size], of
        zeros (never NaN, so that a masked column adds 0).
        """
        shape = (2, self.num_layers, num_rows, num_columns, self.num_key_heads, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def make_routes(self, num_rows: int, num_columns: int) -> Tensor:
        """Return an empty table [rows, columns, layers with experts, experts of a token] for the
        experts that the tokens in the cache met.
        """
        shape = (
            num_rows,
            num_columns,
            self.num_expert_layers,
            self.top_k if self.num_expert_layers else 0,
        )
        return torch.zeros(shape, dtype=torch.int16, device=self.device)

    def prefill_prompts(self, token_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read right-padded prompts `token_ids` [N, P] of `lengths` [N] tokens. Return the logits
        of each last position [N, V], keys and values [2, layers, N, P, Hk, D], and routes [N, P,
        layers, experts].
        """
        num_rows, num_columns = token_ids.shape
        state = PrefillAttention(self.make_cache(num_rows, num_columns))
        positions = torch.arange(num_columns, device=self.device).expand(num_rows, -1)
        hidden = self._run_forward(token_ids, positions, state)
        rows = torch.arange(num_rows, device=self.device)
        return (
            self._lm_head(hidden[rows, lengths - 1]),
            state.keys_values,
            self._collect_routes(num_rows, num_columns),
        )

    def score_tokens(self, token_ids: Tensor, num_given: int, num_tokens_at_once: int) -> Tensor:
        """Return the log-probs [num_given] float32 of the last `num_given` tokens of `token_ids`
        [T]. The logits of `num_tokens_at_once` tokens are in memory at a time.
        """
        num_tokens = len(token_ids)
        state = PrefillAttention(self.make_cache(1, num_tokens))
        positions = torch.arange(num_tokens, device=self.device)[None]
        hidden = self._run_forward(token_ids[None], positions, state)[
            0, num_tokens - num_given - 1 : -1
        ]
        found = []
        for part, wanted in zip(
            hidden.split(num_tokens_at_once),
            token_ids[-num_given:].split(num_tokens_at_once),
            strict=True,
        ):
            found.append(
                self._lm_head(part).float().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
            )
        return torch.cat(found)

    def decode_tokens(self, token_ids: Tensor, state: DecodeAttention) -> tuple[Tensor, Tensor]:
        """Read one more token for each row, `token_ids` [N] at `state.positions`. Return the logits
        [N, V] and the routes [N, layers, experts].
        """
        hidden = self._run_forward(token_ids.unsqueeze(1), state.positions.unsqueeze(1), state)
        return self._lm_head(hidden.squeeze(1)), self._collect_routes(len(token_ids), 1)[:, 0]

    def _hook_expert_layers(self) -> int:
        """Register hooks that record which experts each layer's router picks, and return the number
        of layers with experts.
        """
        layers = [
            module
            for name, module in self._transformer.named_modules()
            if name.endswith(".experts")
        ]
        for experts in layers:  # called with (hidden states, experts of each token, their weights)
            experts.register_forward_pre_hook(
                lambda module, inputs: self._picked_experts.append(inputs[1])
            )
        return len(layers)

    def _collect_routes(self, num_rows: int, num_columns: int) -> Tensor:
        """Return the experts that the last forward pass picked, [rows, columns, layers, experts]
        int16.
        """
        if not self.num_expert_layers:
            return self.make_routes(num_rows, num_columns)
        return (
            torch.stack(self._picked_experts, 1)
            .to(torch.int16)
            .unflatten(0, (num_rows, num_columns))
        )

    def _run_forward(
        self, token_ids: Tensor, positions: Tensor, state: PrefillAttention | DecodeAttention
    ) -> Tensor:
        """Run the transformer with the attention of `state`, and return the last hidden states [N,
        P, H].
        """
        self._picked_experts.clear()
        return self._transformer(
            token_ids, position_ids=positions, use_cache=False, rollout=state
        ).last_hidden_state

    @torch.inference_mode()
    def _compute_stock_logits(self) -> Tensor:
        """Return transformers' own logits of the last probe token, before the attention is
        replaced.
        """
        return self.module(self._make_probe_ids(), use_cache=False).logits[:, -1].float()

    @torch.inference_mode()
    def _check_logits(self, expected_logits: Tensor) -> None:
        """Compare the logits of the probe tokens with transformers' own, and raise ValueError where
        they differ: it refuses a family whose head is more than a matrix (soft-capped or scaled
        logits) before a token is sampled.
        """
        ids = self._make_probe_ids()
        logits, *_ = self.prefill_prompts(ids, torch.tensor([ids.shape[1]], device=self.device))
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        scale = expected_logits.abs().max().clamp(min=1.0)
        difference = ((logits.float() - expected_logits).abs().max() / scale).item()
        if difference > tolerance:  # NaN passes: weights that are not there yet
            raise ValueError(
                f"the local engine's logits differ from transformers' by {difference:.3g}"
                f" (relative; at most {tolerance}) for {type(self.module).__name__}: its attention"
                " or head is not supported; use SGLang."
            )

    def _make_probe_ids(self) -> Tensor:
        """Return a few fixed token ids [1, 7] for the comparison of logits."""
        return (torch.arange(7, device=self.device) * 5 % self.vocab_size).unsqueeze(0)


def load_local_model(path: Path, dtype: str, device: str, load_weights: bool) -> LocalModel:
    """Load the model of a Hugging Face directory. `load_weights` False: random weights, which the
    first weight sync replaces.

    Raise ValueError when the directory lacks files, a tensor is missing or has another shape, or
    nothing reads a tensor.
    """
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} has no config.json; model.path must be a directory in Hugging Face layout."
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = _read_model_config(path)
    kind = {
        "dtype": getattr(torch, dtype),
        "attn_implementation": _STOCK_ATTENTION.get(config.model_type, "sdpa"),
    }
    if not load_weights:
        with no_init_weights(), torch.device(device):
            module = AutoModelForCausalLM.from_config(config, **kind)
        module.tie_weights()
        with torch.no_grad():
            # not zeros: the check of the forward pass needs logits that differ
            for parameter in module.parameters():
                parameter.normal_(std=0.05) if parameter.dim() > 1 else parameter.fill_(1.0)
        return LocalModel(_set_latent_norm_epsilon(module))
    if not list(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors; other weight formats are not read.")
    index = path / INDEX
    check_weight_sets(
        path, json.loads(index.read_text())["weight_map"] if index.is_file() else None
    )
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, use_safetensors=True, output_loading_info=True, **kind
    )
    module, report = loaded
    wrong = {
        kind: sorted(map(str, names))
        for kind, names in report.items()
        if names and kind != "unexpected_keys"
    }
    if wrong:
        raise ValueError(f"the weights in {path} do not fit its config.json: {wrong}.")
    problem = _find_unread_problem(module, sorted(map(str, report["unexpected_keys"])))
    if problem is not None:
        raise ValueError(f"{path} does not fit its config.json: {problem}.")
    return LocalModel(_set_latent_norm_epsilon(module).to(device))


def _find_unread_problem(module: Any, unread_names: Sequence[str]) -> str | None:
    """Return the problem of tensors that transformers did not read, and of a head that transformers
    kept although config.json ties the head to the embedding: weight syncs and other engines would
    take the embedding in its place. None where all is well.
    """
    lost = [name for name in unread_names if find_droppable_kind(name, shape=None) is None]
    if lost:
        return format_unread_tensors(lost, ())
    head = module.get_output_embeddings()
    embedding = module.get_input_embeddings()
    is_tied = getattr(module.config.get_text_config(), "tie_word_embeddings", False)
    if not is_tied or head.weight is embedding.weight:
        return None
    names = {child: name for name, child in module.named_modules()}
    row = find_different_row(head.weight.data, embedding.weight.data, tuple(head.weight.shape))
    return format_other_head(
        f"{names[head]}.weight", f"{names[embedding]}.weight", f"first in row {row}"
    )


def _read_model_config(path: Path) -> Any:
    """Return transformers' configuration of config.json, with a model type that transformers does
    not know replaced by the equivalent known one.
    """
    from transformers import AutoConfig

    raw = json.loads((path / "config.json").read_text())
    kind = _MODEL_TYPE_ALIASES.get(raw.get("model_type"))
    return (
        AutoConfig.for_model(**{**raw, "model_type": kind})
        if kind
        else AutoConfig.from_pretrained(path)
    )


def _set_latent_norm_epsilon(module: Any) -> Any:
    """Set the epsilon of the norms inside latent attention to the model's rms_norm_eps, as SGLang
    does, and return the module. transformers gives them 1e-6 whatever rms_norm_eps is.
    """
    for name, norm in module.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            norm.variance_epsilon = module.config.rms_norm_eps
    return module


def release_unused_memory(device: torch.device) -> None:
    """Return unused memory to the device and to the kernel, so that other processes can have it.

    glibc keeps freed tensors of less than 32 MiB in its heap: without the trim a released model of
    small tensors stays in the process to the last byte.
    """
    empty_device_cache(device)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def count_storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of these tensors, none of which may share a storage."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
