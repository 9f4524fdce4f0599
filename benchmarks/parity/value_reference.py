"""The critic's part of the reference, in plain transformers and torch: a decoder and one linear
layer behind it.

Nothing of the package is used. Parameters have the names of a Hugging Face
...ForTokenClassification with one label.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

Columns = dict[str, Tensor]


class ValueModel(nn.Module):
    """The decoder of `causal`, a transformers ...ForCausalLM, and a linear layer
    `score` to one value.
    """

    def __init__(self, causal: nn.Module, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.model = causal.model
        self.score = nn.Linear(weight.shape[1], 1, dtype=weight.dtype)
        self.score.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, token_ids: Tensor) -> Tensor:
        """[B, L] -> [B, L]: after each token."""
        return self.score(self.model(token_ids).last_hidden_state)[..., 0]


def tokens_of(batch: Columns, samples: range) -> slice:
    """Where the tokens of neighbouring samples stand in a column [T]."""
    return slice(int(batch["offsets"][samples.start]), int(batch["offsets"][samples.stop]))


def padded(batch: Columns, samples: range) -> tuple[Tensor, Tensor]:
    """Token ids [B, L] of `samples`, and where there is a token. Padding is behind a sample, which
    never sees it.
    """
    lengths = batch["offsets"].diff()[samples.start : samples.stop]
    is_token_BL = torch.arange(int(lengths.max())) < lengths[:, None]
    ids_BL = torch.zeros(is_token_BL.shape, dtype=torch.int64)
    ids_BL[is_token_BL] = batch["token_ids"][tokens_of(batch, samples)]
    return ids_BL, is_token_BL


def token_values(model: nn.Module, batch: Columns, samples: range) -> Tensor:
    """[T] of `samples`: at each response token the value of what stands before it; 0 outside of the
    response mask.
    """
    ids_BL, is_token_BL = padded(batch, samples)
    before = nn.functional.pad(model(ids_BL)[:, :-1], (1, 0))
    return before[is_token_BL] * batch["response_mask"][tokens_of(batch, samples)]


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[T]: 0.5 max((V - R)^2, (old + clamp(V - old, -clip, clip) - R)^2), as in OpenAI's
    baselines (ppo2).

    `clip` 0: none.
    """
    old = old_values.to(values.dtype)
    returns = returns.to(values.dtype)
    loss = (values - returns) ** 2
    if clip:
        loss = torch.maximum(loss, (old + (values - old).clamp(-clip, clip) - returns) ** 2)
    return 0.5 * loss
