"""The exchanges between the tp ranks of the head: one forward, one backward, and the parts of a
split sequence.

The statistics of all rows go as one packed tensor, combined in rank order, so that all ranks get
the same bits.
"""

# S tokens of this rank's part of a sequence, R rows, H hidden, G ranks of the tp
# group, K statistics

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.ranks.kernels.logit_tile_ops import MIN_LOGIT, RowStatistics


@dataclass(frozen=True)
class PackedStatistics:
    """`RowStatistics` as rows of one tensor [K, R]: max, sum, target, then weighted and squares
    where requested.
    """

    values_KR: Tensor
    has_weighted_sum: bool
    has_square_sum: bool

    @staticmethod
    def make_empty(
        num_rows: int,
        has_weighted_sum: bool,
        has_square_sum: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedStatistics:
        """Return the statistics before the first tile."""
        values_KR = torch.zeros(
            3 + has_weighted_sum + has_square_sum, num_rows, dtype=dtype, device=device
        )
        values_KR[0] = MIN_LOGIT
        values_KR[2] = -torch.inf
        return PackedStatistics(values_KR, has_weighted_sum, has_square_sum)

    def select_rows(self, row_slice: slice = slice(None)) -> RowStatistics:
        """Return the statistics of these rows as views."""
        return self._unpack_statistics(self.values_KR[:, row_slice])

    def combine_over_group(self, tp_group: ProcessGroup) -> RowStatistics:
        """Return the statistics over the whole vocabulary. Call it on all ranks of the group; it
        makes one all-gather.
        """
        num_ranks = tp_group.size()
        gathered = self.values_KR.new_empty(
            num_ranks * self.values_KR.shape[0], self.values_KR.shape[1]
        )
        dist.all_gather_into_tensor(gathered, self.values_KR, group=tp_group)
        shards = self._unpack_statistics(
            gathered.view(num_ranks, *self.values_KR.shape).transpose(0, 1)
        )  # of each [G, R]
        max_R = shards.max_R.amax(0)
        shards = shards.rescale_to_max(max_R)
        return RowStatistics(
            max_R,
            shards.sum_R.sum(0),
            shards.target_R.amax(0),
            None if shards.weighted_R is None else shards.weighted_R.sum(0),
            None if shards.squares_R is None else shards.squares_R.sum(0),
        )

    def _unpack_statistics(self, packed_values: Tensor) -> RowStatistics:
        """Return views of packed values [K, ...] as `RowStatistics`."""
        return RowStatistics(
            packed_values[0],
            packed_values[1],
            packed_values[2],
            packed_values[3] if self.has_weighted_sum else None,
            packed_values[-1] if self.has_square_sum else None,
        )


def gather_sequence(part_SH: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Return the whole sequence [G S, H] from the part [S, H] of each rank. All ranks of the group
    must call it.
    """
    whole = part_SH.new_empty(tp_group.size() * part_SH.shape[0], part_SH.shape[1])
    dist.all_gather_into_tensor(whole, part_SH.contiguous(), group=tp_group)
    return whole


@dataclass(frozen=True)
class PendingGradientSum:
    """The sum of a gradient over the tp group, under way."""

    summed_gradient: Tensor
    pending_collective: dist.Work | None
    source_gradient: Tensor | None = None  # is read until the work is done

    @staticmethod
    def start_reduction(
        gradient: Tensor, tp_group: ProcessGroup | None, is_sequence_split: bool
    ) -> PendingGradientSum:
        """Start the sum of `gradient`, which covers all tokens, over the group; where the sequence
        is split, the result covers this rank's part. All ranks of the group must call it.

        `gradient` may be summed in place. A `tp_group` of None sums nothing.
        """
        if tp_group is None:
            return PendingGradientSum(gradient, None)
        if not is_sequence_split:
            return PendingGradientSum(
                gradient, dist.all_reduce(gradient, group=tp_group, async_op=True)
            )
        part = gradient.new_empty(gradient.shape[0] // tp_group.size(), gradient.shape[1])
        work = dist.reduce_scatter_tensor(part, gradient, group=tp_group, async_op=True)
        return PendingGradientSum(part, work, gradient)

    def wait_for_sum(self) -> Tensor:
        """Wait for the sum and return it."""
        if self.pending_collective is not None:
            self.pending_collective.wait()
        return self.summed_gradient
