"""A distillation loss is a pure function from log-probs of student and teacher to one loss a token.

The teacher tells its K most likely tokens. What is beyond them is one more outcome (`has_tail`), or
both distributions are those of the K tokens alone.
"""

# T tokens, K most likely tokens of the teacher

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.registry import Registry

MAX_TOTAL_LOG_PROB = -1e-7  # log of the K tokens' whole probability: the tail keeps a logarithm


@dataclass(frozen=True)
class DistillationParams:
    top_k: int = 16  # tokens that the teacher tells of each place
    # all other tokens count as one; false: the K tokens' probabilities are made to sum to 1
    has_tail: bool = True

    def __post_init__(self) -> None:
        """Raise ValueError for too few tokens."""
        if self.top_k < 1 + (not self.has_tail):
            raise ValueError(
                f"top_k ({self.top_k}) must be at least 1, and 2 without has_tail; use 16."
            )


DistillationLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(student [T, N], with grad; teacher [T, N]; log-probs of the same N outcomes, each summing
to 1) -> [T] nats.
"""
DISTILLATION_LOSSES: Registry[DistillationLoss] = Registry(
    "distillation loss", call_arguments=("student", "teacher")
)


def normalize_top_k_log_probs(log_probs_TK: Tensor, has_tail: bool) -> Tensor:
    """Return log-probs whose probabilities sum to 1: [T, K + 1] with the tail, all other tokens, as
    the last outcome, or [T, K] without it.
    """
    total_T1 = log_probs_TK.logsumexp(-1, keepdim=True)
    if not has_tail:
        return log_probs_TK - total_T1
    return torch.cat(
        [log_probs_TK, (-torch.expm1(total_T1.clamp(max=MAX_TOTAL_LOG_PROB))).log()], -1
    )
