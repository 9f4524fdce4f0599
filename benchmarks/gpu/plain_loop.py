"""A training loop of transformers and torch alone, on a GPU: what a careful person writes
without a framework.

Padded batches of samples sorted by length, SDPA, logits at the response's positions only, float32
log_softmax, PPO's clipped loss with the same global denominator, clip_grad_norm_, torch's fused
AdamW. Weights, gradients and moments are bfloat16 ("bfloat16": the fastest, and the least exact),
or float32 under autocast ("autocast", as exact as ours).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.bench_actor_update import PaddedChunk, padded
from rlhf_megatron.data.batch import MiniBatch

Precision = Literal["bfloat16", "autocast"]
LR = 1e-6
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
EPS = 1e-8
CLIP_GRAD = 1.0
CLIP = 0.2
DUAL_CLIP = 3.0


class PlainLoop:
    """`rows`: samples of a padded batch."""

    def __init__(
        self,
        hf_config: dict[str, Any],
        weights: dict[str, Tensor],
        batch: MiniBatch,
        rows: int,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.device = device
        self.is_autocast = precision == "autocast"
        dtype = torch.float32 if self.is_autocast else torch.bfloat16
        self.model = _model(hf_config, weights, dtype, device)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        exempt = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [
            {"params": decayed, "weight_decay": WEIGHT_DECAY},
            {"params": exempt, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)
        self.batch = batch
        self.use_rows(rows)

    def use_rows(self, rows: int) -> None:
        order = sorted(range(len(self.batch)), key=lambda i: -int(self.batch.lengths[i]))
        chunks = [padded(self.batch, order[i : i + rows]) for i in range(0, len(order), rows)]
        self.chunks = [_to(chunk, self.device) for chunk in chunks]

    def __call__(self) -> tuple[float, float]:
        """(loss, gradient norm)"""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for chunk in self.chunks:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_autocast):
                loss = self._loss(chunk)
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_GRAD)
        self.optimizer.step()
        return total.item(), norm.item()

    def _loss(self, chunk: PaddedChunk) -> Tensor:
        kept = torch.arange(chunk.first_row, chunk.token_ids.shape[1] - 1, device=self.device)
        out = self.model(
            chunk.token_ids,
            attention_mask=chunk.attention_mask,
            logits_to_keep=kept,
            use_cache=False,
        )
        targets = chunk.token_ids[:, chunk.first_row + 1 :]
        log_probs = out.logits.float().log_softmax(-1).gather(2, targets[..., None])[..., 0]
        ratio = (log_probs - chunk.old_log_probs).exp()
        clipped = torch.maximum(
            -chunk.advantages * ratio, -chunk.advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
        )
        bounded = torch.where(
            chunk.advantages < 0, torch.minimum(clipped, -chunk.advantages * DUAL_CLIP), clipped
        )
        return (bounded * chunk.loss_weights).sum()


def _to(chunk: PaddedChunk, device: torch.device) -> PaddedChunk:
    return PaddedChunk(
        chunk.token_ids.to(device),
        None if chunk.attention_mask is None else chunk.attention_mask.to(device),
        chunk.first_row,
        chunk.advantages.to(device),
        chunk.old_log_probs.to(device),
        chunk.loss_weights.to(device),
    )


def _model(
    hf_config: dict[str, Any], weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**hf_config)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.train()
