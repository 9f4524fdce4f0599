"""A transformers causal LM behind the two forward passes that the generator needs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.rollout.local import attention
from rlhf_megatron.rollout.local.attention import Decode, Prefill

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        attention.install(module)
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
    """From a Hugging Face directory. `load_weights` False: random weights, to be replaced by the first weight sync.

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
            module = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa")
        module.tie_weights()
        with torch.no_grad():
            for parameter in module.parameters():  # not zeros: the check of the forward pass needs logits that differ
                parameter.normal_(std=0.05) if parameter.dim() > 1 else parameter.fill_(1.0)
        return LocalModel(module)
    if not list(path.glob("*.safetensors")):
        raise ValueError(f"{path} has no *.safetensors; other weight formats are not read.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", use_safetensors=True, output_loading_info=True
    )
    module, report = loaded
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind != "unexpected_keys"}
    if wrong:
        raise ValueError(f"the weights in {path} do not fit its config.json: {wrong}.")
    return LocalModel(module.to(device))
