"""The share of a policy update that rounding loses on the way to the engines: of adapters that are
merged into weights, and of float32 weights that are cast. Pure tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.data import codec
from rlhf_megatron.weights.weight_table import WeightRule

NUM_SAMPLED_TENSORS = 16
# of a tensor, over all of its shards; of 16 tensors a sample keeps at most 50 MB
MAX_SAMPLED_VALUES = 1 << 19
_BLOCK_VALUES = 1 << 20  # values that are compared at a time, so that little memory is in use
_NUMBER = re.compile(r"\d+")


@codec.register("LostUpdateSums")
@dataclass(frozen=True)
class LostUpdateSums:
    """Sums over weights that one rank alone sends. Those of all ranks add up.

    With a change of float32 weights of [1.0, 0.5], of which the engine sees [1.0, 0.0], the sums
    are 0.25 and 1.25.
    """

    lost_squares: float  # of what the engine sees of the change, less the change
    change_squares: float


def sum_lost_squares(sent_now: Tensor, sent_before: Tensor, change: Tensor) -> Tensor:
    """Return [sum of (sent now - sent before - change)^2, sum of change^2], float64 [2].

    `sent_now` and `sent_before` are in the engines' type, `change` is in float32; all have the same
    number of values.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=change.device)
    blocks = zip(
        sent_now.reshape(-1).split(_BLOCK_VALUES),
        sent_before.reshape(-1).split(_BLOCK_VALUES),
        change.reshape(-1).split(_BLOCK_VALUES),
        strict=True,
    )
    for now, before, change_block in blocks:
        lost = now.float() - before.float() - change_block
        sums += torch.stack(
            [
                torch.linalg.vector_norm(lost, dtype=torch.float64).square(),
                torch.linalg.vector_norm(change_block, dtype=torch.float64).square(),
            ]
        )
    return sums


def make_lost_update_sums(sums: Tensor) -> LostUpdateSums:
    """Return the result of `sum_lost_squares`, or a sum of such results, as plain numbers."""
    lost_squares, change_squares = sums.tolist()
    return LostUpdateSums(lost_squares, change_squares)


def compute_lost_update_share(sums_of_ranks: Iterable[LostUpdateSums | None]) -> float | None:
    """Return |sent now - sent before - change| / |change| over all ranks, in Euclidean norms. None
    where no rank has measured, or no weight has changed.
    """
    measured = [sums for sums in sums_of_ranks if sums is not None]
    change_squares = math.fsum(sums.change_squares for sums in measured)
    if change_squares == 0.0:
        return None
    return math.sqrt(math.fsum(sums.lost_squares for sums in measured) / change_squares)


class MergeRounding:
    """What rounding loses of adapters, summed up while their weights are merged and sent. The
    weights without adapters, as engines hold them, count as sent before.
    """

    def __init__(self, engine_dtype: torch.dtype, device: torch.device) -> None:
        """Begin with sums of zero, which are kept on `device`."""
        self._engine_dtype = engine_dtype
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)

    def add_merged_weight(self, weight: Tensor, change: Tensor, merged_weight: Tensor) -> None:
        """Add a piece of a weight that this rank alone sends. `change` is scale B A in float32,
        `merged_weight` the sum of `weight` and `change` in float32.
        """
        lost = sum_lost_squares(
            merged_weight.to(self._engine_dtype), weight.to(self._engine_dtype), change
        )
        self._sums += lost.to(self._sums.device)

    def finish_send(self) -> LostUpdateSums:
        """Return the sums over all pieces that were added."""
        return make_lost_update_sums(self._sums)


def choose_sampled_tensors(
    table: Sequence[WeightRule], num_tensors: int = NUM_SAMPLED_TENSORS
) -> tuple[str, ...]:
    """Return the Megatron names of `num_tensors` matrices of a model, or of all where it has fewer:
    the sample by which a sync measures what a cast loses. It depends on the table only.

    A kind of matrix is a name without the numbers of layer and expert. Kinds take turns, so that
    all are in the sample, and the matrices of a kind are spread over layers and experts, in other
    layers for each kind. Vectors (norms, biases) are left out: they have next to nothing of an
    update's norm.
    """
    names_by_kind: dict[str, list[str]] = {}
    for rule in table:
        if rule.dtype is None and len(rule.megatron_shape) >= 2:
            kind = _NUMBER.sub("N", rule.megatron_name)
            names_by_kind.setdefault(kind, []).append(rule.megatron_name)
    kinds = list(names_by_kind.values())
    counts = [0] * len(kinds)
    num_left = min(num_tensors, sum(map(len, kinds)))
    while num_left:
        for position, names in enumerate(kinds):
            if num_left and counts[position] < len(names):
                counts[position] += 1
                num_left -= 1
    chosen: list[str] = []
    for position, names in enumerate(kinds):
        shift = (position + 0.5) / len(kinds)
        for number in range(counts[position]):
            place = int((number + shift) * len(names) / counts[position])
            chosen.append(names[place])
    return tuple(chosen)
