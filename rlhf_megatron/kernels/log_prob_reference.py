"""The specification of `linear_log_prob`: plain torch, whole vocabulary, autograd for the gradient.

Materialises [T, V]; for tests and for reading. Feed float64 to get a reference of reference quality.
"""

# T tokens, V vocabulary (with padding), H hidden

from __future__ import annotations

import torch
from torch import Tensor


def reference_linear_log_prob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """log p and entropy H = -sum p log p (nats) of p = softmax(hidden @ weight.T / temperature) without padded columns.

    Computed and returned in float32, or in float64 for float64 inputs. Raises ValueError when `vocab_start` is not 0:
    the weight must be whole.
    """
    if vocab_start != 0:
        raise ValueError(f"vocab_start ({vocab_start}) must be 0: the reference takes the whole weight.")
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    logits_TV = hidden_TH.to(dtype) @ weight_VH[:vocab_size].to(dtype).T / temperature
    log_p_TV = logits_TV.log_softmax(-1)
    log_probs_T = log_p_TV.gather(-1, targets_T[:, None])[:, 0]
    if not with_entropy:
        return log_probs_T, None
    return log_probs_T, -(log_p_TV.exp() * log_p_TV).sum(-1)
