"""The tokens that train, without the others: what estimators of single tokens work on.

Response tokens of valid samples, one after the other. A token inside a response that the policy did not sample (a
tool's output) is none of them: it is no time step, and a reward on it does not count.
"""

# B samples, T packed tokens, N response tokens of valid samples

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs, places, repeated
from rlhf_megatron.algorithms.advantages.scan import discounted_sums_
from rlhf_megatron.lazy import Tensor, torch


@dataclass(frozen=True)
class ResponseTokens:
    places_N: Tensor  # int64, in [0, T), rising
    lengths_B: Tensor  # int64, of each sample; 0 for one of masked status
    num_tokens: int  # T

    @staticmethod
    def of(inputs: AdvantageInputs) -> ResponseTokens:
        trains_T = inputs.response_mask_T
        if not bool(inputs.is_valid_B.all()):
            trains_T = trains_T & repeated(inputs.is_valid_B, inputs.offsets.diff())
        places_N = places(trains_T)
        return ResponseTokens(places_N, torch.searchsorted(places_N, inputs.offsets).diff(), trains_T.numel())

    def take(self, column_T: Tensor) -> Tensor:
        """[N] float64."""
        return column_T.index_select(0, self.places_N).double()

    def put(self, column_N: Tensor) -> Tensor:
        """[T] float32, 0 elsewhere."""
        column_T = torch.zeros(self.num_tokens, device=column_N.device)
        return column_T.scatter_(0, self.places_N, column_N.float())

    def spread(self, column_B: Tensor) -> Tensor:
        """[B] -> [N]: each sample's entry on its tokens."""
        return repeated(column_B, self.lengths_B)

    def sums_to_go(self, column_T: Tensor, gamma: float = 1.0) -> Tensor:
        """[N] float64: y_n = x_n + gamma y_{n + 1} within each sample."""
        return self._summed(self.take(column_T), self.lengths_B, gamma)

    def sums_so_far(self, column_N: Tensor) -> Tensor:
        """[N] float64: y_n = x_n + y_{n - 1} within each sample. As exact at the front as the sums there are small."""
        return self._summed(column_N.flip(0), self.lengths_B.flip(0), 1.0).flip(0)

    def _summed(self, column_N: Tensor, lengths: Tensor, gamma: float) -> Tensor:
        sums = torch.empty(column_N.numel() + 1, dtype=torch.float64, device=column_N.device)
        sums[:-1] = column_N
        discounted_sums_(sums, lengths, gamma)
        return sums[:-1]
