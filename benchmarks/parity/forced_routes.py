"""transformers' models with the experts of every token given: gates come from the live logits, as
in router replay.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def force(model: nn.Module, ids_TLK: Tensor, offsets: Tensor) -> None:
    """From now on token t of the samples of `offsets` meets ids_TLK[t] (layers with experts in
    order), whichever samples a forward pass has; -1: the experts that the router picks.

    A forward pass must be told its samples by `select` before.
    """
    gates = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    for layer, gate in enumerate(gates):
        gate.forced = _Layer(ids_TLK[:, layer], offsets)
        if type(gate).__name__.endswith("TopKRouter"):
            gate.forward = MethodType(_softmax_router, gate)
    blocks = [m for m in model.modules() if hasattr(m, "route_tokens_to_experts")]
    for block in blocks:
        block.route_tokens_to_experts = MethodType(_sigmoid_routes, block)


class _Layer:
    def __init__(self, ids_TK: Tensor, offsets: Tensor) -> None:
        self.ids_TK = ids_TK
        self.offsets = offsets
        self.samples = range(offsets.numel() - 1)

    def of_batch(self, num_rows: int) -> Tensor:
        """[samples x length, K] of a right-padded batch; -1 in the padding."""
        length = num_rows // len(self.samples)
        rows = torch.full((len(self.samples), length, self.ids_TK.shape[-1]), -1)
        for row, sample in enumerate(self.samples):
            ids = self.ids_TK[int(self.offsets[sample]) : int(self.offsets[sample + 1])]
            rows[row, : len(ids)] = ids[:length]
        return rows.flatten(0, 1)


def select(model: nn.Module, samples: range) -> None:
    """The next forward passes have these samples."""
    for module in model.modules():
        if isinstance(getattr(module, "forced", None), _Layer):
            module.forced.samples = samples


def _softmax_router(gate: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = nn.functional.linear(
        x.reshape(-1, gate.hidden_dim), gate.weight, getattr(gate, "bias", None)
    )
    scores = logits.softmax(-1)
    picked = _picked(gate, scores.topk(gate.top_k, -1).indices)
    weights = scores.gather(1, picked)
    if getattr(gate, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, picked


def _sigmoid_routes(block: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
    live, _ = type(block).route_tokens_to_experts(block, logits)
    picked = _picked(block.gate, live)
    weights = logits.sigmoid().gather(1, picked)
    if block.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return picked, weights * block.routed_scaling_factor


def _picked(gate: Any, live: Tensor) -> Tensor:
    given = gate.forced.of_batch(live.shape[0])
    return torch.where(given < 0, live, given)


def shifted(
    routes_TLK: Tensor, num_experts: int, hf_config: Mapping[str, Any] | None = None
) -> Tensor:
    """Every expert's successor, which no router would pick; -1 stays."""
    return torch.where(routes_TLK < 0, routes_TLK, (routes_TLK + 1) % num_experts)
