"""Sums over whole sequences, seen from the rows of one micro-batch: what sequence-level
losses are made of.

A micro-batch holds whole sequences, but under context parallelism a rank has only some rows of
each: `reduce` adds up over the ranks that share them. It is the caller's collective (the same calls
in the same order on all of them), so that no loss has one of its own.
"""

# T rows of a micro-batch on this rank, S sequences of the micro-batch (the same on all ranks
# that share them)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlhf_megatron.lazy import Tensor, torch


def _return_unchanged(sums: Tensor) -> Tensor:
    """Return the sums as they are: this rank has all rows of its sequences."""
    return sums


@dataclass(frozen=True)
class RowSequences:
    """The sequence of each row, and how to sum over sequences. No tensor in it has a gradient."""

    ids_T: Tensor  # int64, the sequence of each row, in [0, num_sequences)
    num_sequences: int
    reduce_across_ranks: Callable[[Tensor], Tensor] = (
        # [K, S] float64 of this rank -> the sum over all that share the sequences
        _return_unchanged
    )

    def sum_by_sequence(self, *columns_T: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of each column over whole sequences, [S] float64 each. All ranks that
        share the sequences must call it; a call takes one exchange.
        """
        stacked = torch.stack([column_T.detach().to(torch.float64) for column_T in columns_T])
        sums = stacked.new_zeros(len(columns_T), self.num_sequences).index_add_(
            1, self.ids_T, stacked
        )
        return tuple(self.reduce_across_ranks(sums))

    def mean_by_sequence(self, column_T: Tensor) -> Tensor:
        """Return the mean over the rows of each whole sequence, [S] float64; 0 for a sequence
        without rows. All ranks that share the sequences must call it.
        """
        total_S, count_S = self.sum_by_sequence(column_T, torch.ones_like(column_T))
        return total_S / count_S.clamp(min=1)

    def repeat_per_row(self, column_S: Tensor) -> Tensor:
        """Return each row's entry of its sequence, [T]."""
        return column_S.index_select(0, self.ids_T)
