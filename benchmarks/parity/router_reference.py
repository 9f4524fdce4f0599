"""The routers' part of the reference, in plain torch: which experts tokens meet, the routers' loss
terms, their biases.

Nothing of the package is used. Only tokens that something is predicted from count: all but each
sample's last.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.parity.cases import Recipe


class Routers:
    """Keeps the logits of every router of a transformers model in its last forward pass."""

    def __init__(self, model: nn.Module, hf_config: Mapping[str, Any]) -> None:
        self.top_k = hf_config.get("num_experts_per_tok", 0)
        self.is_sigmoid = "n_routed_experts" in hf_config
        self.num_groups = hf_config.get("n_group") or 1
        self.topk_group = hf_config.get("topk_group") or 1
        gates = {
            name: m
            for name, m in model.named_modules()
            if type(m).__name__.lower().endswith("topkrouter")
        }
        self.gates = list(gates.values())
        self.layers = [int(name.split("layers.")[1].split(".")[0]) for name in gates]
        self.logits: dict[int, Tensor] = {}
        for number, gate in enumerate(self.gates):
            gate.register_forward_hook(
                lambda module, given, out, number=number: self._keep(number, out)
            )

    def _keep(self, number: int, out: Any) -> None:
        self.logits[number] = out[0] if isinstance(out, tuple) else out

    def routes(self, lengths: list[int]) -> Tensor:
        """[T, layers with experts, top_k]: the sorted experts of each token of samples of these
        lengths; -1 of their last tokens.
        """
        found = torch.full((sum(lengths), len(self.gates), self.top_k), -1, dtype=torch.int64)
        is_read = torch.cat([torch.arange(n) < n - 1 for n in lengths]).nonzero().flatten()
        for number in range(len(self.gates)):
            found[is_read, number] = (
                self._picked(number, torch.cat(self._samples(number, lengths))).sort(-1).values
            )
        return found

    def loss(self, lengths: list[int], recipe: Recipe) -> Tensor | float:
        """The terms of all layers, each with its weight (Switch Transformer, 2101.03961;
        ST-MoE, 2202.08906).
        """
        total: Tensor | float = 0.0
        for number in range(len(self.gates) if recipe.router_terms else 0):
            samples = self._samples(number, lengths)
            whole = torch.cat(samples)
            total = total + recipe.z_coef * whole.logsumexp(-1).square().mean()
            if recipe.balancing == "global_aux_loss":
                total = total + recipe.aux_coef * self._imbalance(whole)
            elif recipe.balancing == "seq_aux_loss":
                total = (
                    total
                    + recipe.aux_coef
                    * torch.stack([self._imbalance(one) for one in samples]).mean()
                )
        return total

    @torch.no_grad()
    def move_biases(self, lengths: list[int], rate: float) -> None:
        """Towards even loads (2408.15664); of routers that have a bias."""
        for number, gate in enumerate(self.gates):
            if hasattr(gate, "e_score_correction_bias") and rate:
                picked = self._picked(number, torch.cat(self._samples(number, lengths)))
                loads = torch.bincount(
                    picked.flatten(), minlength=gate.e_score_correction_bias.numel()
                ).double()
                gate.e_score_correction_bias += rate * torch.sign(loads.mean() - loads).to(
                    gate.e_score_correction_bias
                )

    def _samples(self, number: int, lengths: list[int]) -> list[Tensor]:
        """Logits [tokens, experts] of each sample."""
        logits = self.logits[number].view(len(lengths), -1, self.logits[number].shape[-1])
        return [logits[sample, : n - 1] for sample, n in enumerate(lengths)]

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)

    def _picked(self, number: int, logits: Tensor) -> Tensor:
        bias = getattr(self.gates[number], "e_score_correction_bias", 0.0)
        scores = self._scores(logits) + bias
        # DeepSeek-V3 (2412.19437): of the groups whose best two experts are best together
        if self.num_groups > 1:
            groups = scores.unflatten(-1, (self.num_groups, -1))
            kept = groups.topk(2, -1).values.sum(-1).topk(self.topk_group, -1).indices
            is_kept = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, kept, True)
            scores = groups.masked_fill(~is_kept[..., None], float("-inf")).flatten(-2)
        return scores.topk(self.top_k, -1).indices

    def _imbalance(self, logits: Tensor) -> Tensor:
        """E x sum over experts of (share of picks) x (mean probability);
        picks by the scores alone.
        """
        scores = self._scores(logits)
        probabilities = scores / scores.sum(-1, keepdim=True)
        num = logits.shape[-1]
        picks = (
            torch.bincount(scores.topk(self.top_k, -1).indices.flatten(), minlength=num)
            / scores.shape[0]
        )
        return num * (picks / self.top_k * probabilities.mean(0)).sum()
