"""A llama-architecture GGUF file as a weight source, with its config and tokenizer in Hugging Face form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.models.table import Rule

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NORMAL_TOKEN = 1  # GGUF's token type; every other one is special


class GGUFSource:
    """Implements `WeightSource`: tensors are dequantised to float32 when asked for, the file is mapped."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError when the file is not a tied llama model, or the gguf package is missing."""
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ValueError("reading GGUF files needs the package gguf; install rlhf-megatron[demo].") from error
        self.path = Path(path)
        self._reader = GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self._field("general.architecture") != "llama" or "output.weight" in self._tensors:
            raise ValueError(f"{path} is no llama model with tied embeddings; only those are converted.")
        self.num_heads = int(self._field("llama.attention.head_count"))
        self.num_groups = int(self._field("llama.attention.head_count_kv"))

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return tuple(self._tensor(hf.name).view(hf.shape) for hf in rule.hf)

    def dtype_of(self, rule: Rule) -> str:
        return "float32"

    def hf_config(self) -> dict[str, Any]:
        """config.json."""
        hidden_size = int(self._field("llama.embedding_length"))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": int(self._field("llama.vocab_size")),
            "hidden_size": hidden_size,
            "intermediate_size": int(self._field("llama.feed_forward_length")),
            "num_hidden_layers": int(self._field("llama.block_count")),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_groups,
            "head_dim": hidden_size // self.num_heads,
            "hidden_act": "silu",
            "max_position_embeddings": int(self._field("llama.context_length")),
            "rms_norm_eps": _as_written(self._field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _as_written(self._field("llama.rope.freq_base")),
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": int(self._field("tokenizer.ggml.bos_token_id")),
            "eos_token_id": int(self._field("tokenizer.ggml.eos_token_id")),
            "pad_token_id": int(self._field("tokenizer.ggml.padding_token_id")),
            "torch_dtype": "float32",
        }

    def write_tokenizer(self, directory: Path) -> None:
        """tokenizer.json and tokenizer_config.json. Raises ValueError for a pre-tokenizer other than SmolLM's."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        kind = self._field("tokenizer.ggml.pre")
        if kind != "smollm":
            raise ValueError(f"{self.path} has the pre-tokenizer {kind!r}; only 'smollm' is converted.")
        tokens = self._field("tokenizer.ggml.tokens")
        types = self._field("tokenizer.ggml.token_type")
        merges = [tuple(merge.split(" ")) for merge in self._field("tokenizer.ggml.merges")]
        unknown = tokens[int(self._field("tokenizer.ggml.unknown_token_id"))]
        ids = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        special = [token for token, kind in zip(tokens, types, strict=True) if kind != _NORMAL_TOKEN]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        tokenizer.save(str(directory / "tokenizer.json"))
        config = self.hf_config()
        description = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": unknown,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": self._field("tokenizer.chat_template"),
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(description, indent=1) + "\n")

    def _field(self, key: str) -> Any:
        if key not in self._reader.fields:
            raise ValueError(f"{self.path} has no field {key}.")
        return self._reader.fields[key].contents()

    def _tensor(self, hf_name: str) -> Tensor:
        from gguf.quants import dequantize

        name = _gguf_name(hf_name)
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor {name} for {hf_name}.")
        stored = self._tensors[name]
        values = dequantize(stored.data, stored.tensor_type).astype(np.float32)
        if name.endswith("attn_q.weight"):
            values = _halves_first(values, self.num_heads)
        elif name.endswith("attn_k.weight"):
            values = _halves_first(values, self.num_groups)
        return torch.from_numpy(np.ascontiguousarray(values))


def _gguf_name(hf_name: str) -> str:
    if hf_name in _TOP:
        return _TOP[hf_name]
    layer, part = hf_name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_IN_LAYER[part]}.weight"


def _halves_first(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """GGUF interleaves the two halves of a head that rotary embeddings pair; Hugging Face keeps them apart."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _as_written(value: float) -> float:
    """The decimal number behind a float32: 9.99999975e-06 -> 1e-05."""
    return float(f"{float(value):.7g}")
