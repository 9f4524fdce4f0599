"""Models of 0.5 to 1.5 billion parameters with random weights made on the spot, and batches of
packed samples for them.

The configurations are those of Qwen2.5-0.5B and Qwen2.5-1.5B; no file is read.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.batch import MiniBatch, compute_offsets
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.weight_table import HFTensor, WeightRule

STD = 0.02


def qwen2_config(
    hidden: int, num_layers: int, num_heads: int, intermediate: int, vocab: int = 151936
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": STD,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


CONFIGS = {"0.5B": qwen2_config(896, 24, 14, 4864), "1.5B": qwen2_config(1536, 28, 12, 8960)}
QUICK_CONFIG = qwen2_config(64, 2, 4, 96, vocab=300)


@dataclass(frozen=True)
class DeviceWeights:
    """A source of weights for `load_model.load_hf` that makes each tensor once, and keeps it, on
    `device`: a CPU would take a minute. A tensor depends on its name and shape alone (and on the
    kind of device).
    """

    device: torch.device
    made: dict[str, Tensor] = field(default_factory=dict)

    def read_hf_tensors(self, rule: WeightRule) -> tuple[Tensor, ...]:
        """The HF tensors of a rule, float32."""
        return tuple(self.tensor(hf) for hf in rule.hf_tensors)

    def get_dtype_name(self, rule: WeightRule) -> str:
        return "float32"

    def tensor(self, hf: HFTensor) -> Tensor:
        if hf.name not in self.made:
            self.made[hf.name] = self._make(hf)
        return self.made[hf.name]

    def named(self, hf_config: dict[str, Any]) -> dict[str, Tensor]:
        """All of a model, by HF name."""
        return {
            hf.name: self.tensor(hf)
            for rule in make_weight_table(hf_config)
            for hf in rule.hf_tensors
        }

    def _make(self, hf: HFTensor) -> Tensor:
        if len(hf.shape) == 1:
            return torch.full(hf.shape, float("norm" in hf.name), device=self.device)
        seed = int.from_bytes(hashlib.sha256(hf.name.encode()).digest()[:7], "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(hf.shape, generator=generator, device=self.device) * STD


def make_lengths(num_tokens: int, longest: int, seed: int = 0) -> list[int]:
    """Lognormal lengths (median a quarter of the longest one) that add up to `num_tokens`,
    16 or more each.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    left = num_tokens
    while left >= 16:
        drawn = float(torch.randn((), generator=generator) * 0.6)
        length = min(int(longest / 4 * 2.718281828**drawn), longest, left)
        lengths.append(max(16, length))
        left -= lengths[-1]
    lengths[-1] += left  # what was too little for a sample of its own, or too much by one
    return lengths


def make_batch(lengths: list[int], vocab: int, prompt_share: float, seed: int = 1) -> MiniBatch:
    """Random tokens and advantages; the first `prompt_share` of each sample is prompt, one
    token at least.
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.cat(
        [torch.arange(length) >= max(1, round(length * prompt_share)) for length in lengths]
    )
    weights = mask / mask.sum()
    uniform = -torch.log(torch.tensor(float(vocab)))
    return MiniBatch(
        offsets=compute_offsets(torch.tensor(lengths)),
        token_ids=torch.randint(0, vocab, (mask.numel(),), generator=generator),
        response_mask=mask,
        loss_weights=weights,
        metric_weights=weights,
        advantages=torch.randn(mask.numel(), generator=generator) * mask,
        old_log_probs=(uniform + 0.1 * torch.randn(mask.numel(), generator=generator)) * mask,
    )
