"""What a row of the batch costs: the supervised loss, or the policy loss that the configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from rlhf_megatron.config.schema import ActorConfig


@dataclass(frozen=True)
class RowTerms:
    """Per row, before any weight."""

    loss_R: Tensor  # [R] float32, with grad
    metrics: dict[str, Tensor]  # name -> [R]


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows: log-probs, entropies where needed, and the batch's columns at the same tokens."""

    function: Callable[[Tensor, Tensor | None, Mapping[str, Tensor]], RowTerms]
    needs_entropy: bool

    def __call__(self, log_probs_R: Tensor, entropies_R: Tensor | None, columns: Mapping[str, Tensor]) -> RowTerms:
        return self.function(log_probs_R, entropies_R, columns)


def make_row_loss(loss: str, config: ActorConfig) -> RowLoss:
    """`loss`: "policy" or "sft". Raises ValueError for another name."""
    if loss == "sft":
        return RowLoss(_supervised, needs_entropy=False)
    raise ValueError(f'unknown loss {loss!r}; known: "policy", "sft".')


def _supervised(log_probs_R: Tensor, entropies_R: Tensor | None, columns: Mapping[str, Tensor]) -> RowTerms:
    return RowTerms(-log_probs_R, {"actor/sft_loss": -log_probs_R})
