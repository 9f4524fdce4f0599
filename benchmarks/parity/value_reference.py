"""The critic's part of the reference, in plain transformers and torch: a decoder and one linear layer behind it.

Nothing of the package is used. Parameters have the names of a Hugging Face ...ForTokenClassification with one label.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Columns = dict[str, Tensor]


class ValueModel(nn.Module):
    """The decoder of `causal`, a transformers ...ForCausalLM, and a linear layer `score` to one value."""

    def __init__(self, causal: nn.Module, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.model = causal.model
        self.score = nn.Linear(weight.shape[1], 1, dtype=weight.dtype)
        self.score.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, token_ids: Tensor) -> Tensor:
        """[T] of one sample -> [T]: after each token."""
        return self.score(self.model(token_ids[None]).last_hidden_state[0])[:, 0]


def token_values(model: nn.Module, batch: Columns, samples: range) -> Tensor:
    """[T] of `samples`: at each response token the value of what stands before it; 0 outside of the response mask."""
    values = []
    for i in samples:
        span = slice(int(batch["offsets"][i]), int(batch["offsets"][i + 1]))
        after = model(batch["token_ids"][span])
        values.append(torch.cat([after.new_zeros(1), after[:-1]]) * batch["response_mask"][span])
    return torch.cat(values)


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[T]: 0.5 max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2), as in OpenAI's baselines (ppo2).

    `clip` 0: none.
    """
    old, returns = old_values.to(values.dtype), returns.to(values.dtype)
    loss = (values - returns) ** 2
    if clip:
        loss = torch.maximum(loss, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    return 0.5 * loss
