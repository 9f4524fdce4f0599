"""What rounding loses of the actor's updates in weight syncs, measured on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rlhf_megatron.ranks.workers.backend_protocols import TrainedBackend
from rlhf_megatron.weights.update_rounding import (
    MAX_SAMPLED_VALUES,
    LostUpdateSums,
    MergeRounding,
    choose_sampled_tensors,
    make_lost_update_sums,
    sum_lost_squares,
)
from rlhf_megatron.weights.weight_table import WeightRule


@dataclass(frozen=True)
class EngineExport:
    """The weights of a sync, and what is to be called when they have been sent."""

    shards: Iterator[tuple[WeightRule, Tensor | None]]
    # returns what rounding has lost of the weights that this rank alone sent; None where nothing
    # is known
    finish_send: Callable[[], LostUpdateSums | None]


@dataclass(frozen=True)
class _SampledValues:
    """The sampled values of a part of a weight, in host memory. A copy."""

    weight: Tensor  # in the type of the model
    master: Tensor  # float32; the same tensor as `weight` where the model is float32

    def is_exact_in(self, engine_dtype: torch.dtype) -> bool:
        """Return whether engines of this type hold the float32 values as they are."""
        return self.weight.dtype == engine_dtype == torch.float32


_WeightSample = dict[tuple[str, int], _SampledValues]
"""By the name of a weight, and the place of the first value in this rank's shard."""


class CastRounding:
    """What the cast to the engines' type loses of the changes of a fixed sample of tensors, from
    one sync to the next. Each rank reads the values that it alone updates.

    `has_optimizer` returns whether the optimizer's float32 weights are on the device.
    """

    def __init__(self, backend: TrainedBackend, has_optimizer: Callable[[], bool]) -> None:
        self._backend = backend
        self._has_optimizer = has_optimizer
        self._sent_sample: _WeightSample | None = None  # as the last sync sent it
        self._sent_version: int | None = None  # of that sync
        self._offloaded_sample: _WeightSample | None = None

    def read_before_offload(self) -> None:
        """Read the sample while the optimizer's float32 weights are still on the device. The sync
        that follows takes these values: without an optimizer no weight changes.
        """
        self._offloaded_sample = self._read_sample()

    def forget_offloaded_values(self) -> None:
        """Free the memory of `read_before_offload`: no sync can follow, because the parameters
        leave the device as well.
        """
        self._offloaded_sample = None

    def finish_send(self, policy_version: int, engine_dtype: torch.dtype) -> LostUpdateSums | None:
        """Return the sums over the sample of this rank, of the change since the last sync. Call it
        when the weights have been sent and before they change.

        Return None for the first sync of a process, and for a version that is sent once more.
        """
        if policy_version == self._sent_version:
            return None
        sample = self._read_sample() if self._has_optimizer() else self._offloaded_sample
        if sample is None:
            return None
        former_sample = self._sent_sample
        self._sent_sample = sample
        self._sent_version = policy_version
        if former_sample is None:
            return None
        sums = torch.zeros(2, dtype=torch.float64)
        is_rounded = False
        for key, values in sample.items():
            former = former_sample.get(key)
            if former is None or values.is_exact_in(engine_dtype):
                continue
            is_rounded = True
            sums += sum_lost_squares(
                values.weight.to(engine_dtype),
                former.weight.to(engine_dtype),
                values.master - former.master,
            )
        return make_lost_update_sums(sums) if is_rounded else None

    @cached_property
    def _sampled_names(self) -> frozenset[str]:
        """Return the Megatron names of the tensors of the sample, the same on all ranks."""
        return frozenset(choose_sampled_tensors(self._backend.table))

    def _read_sample(self) -> _WeightSample:
        """Return a copy of the values that the sample has of this rank's weights."""
        sample: _WeightSample = {}
        for shard in self._backend.iterate_master_shards(self._sampled_names, MAX_SAMPLED_VALUES):
            weight = shard.weight.detach().to("cpu", copy=True)
            is_float32 = weight.dtype == torch.float32
            master = weight if is_float32 else shard.master.detach().to("cpu", copy=True)
            sample[shard.name, shard.start] = _SampledValues(weight, master)
        return sample


def measure_merge(backend: TrainedBackend, engine_dtype: torch.dtype) -> EngineExport:
    """Return the export of a model with adapters, which measures what rounding loses of them while
    the weights are sent.
    """
    rounding = MergeRounding(engine_dtype, backend.world.device)
    return EngineExport(backend.export_shards(rounding), rounding.finish_send)
