"""Models that do not learn, on one rank: forward only, no gradients, no optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from rlhf_megatron.data.batch import CriticValues, TokenBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.backend_protocols import ModelBackend
from rlhf_megatron.ranks.workers.forward_passes import compute_values
from rlhf_megatron.ranks.workers.offload import OffloadableMemory
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport
from rlhf_megatron.weights.weight_table import WeightRule


class FrozenModel:
    """A model that does not learn. Make it on all ranks of the pool at once, each with the same
    arguments but `backend`, whose model is frozen.

    `is_offloaded` keeps the weights in host memory between calls; their storages on the device are
    empty then, on a CPU too.
    """

    def __init__(self, backend: ModelBackend, role: str, is_offloaded: bool = False) -> None:
        self.backend = backend
        self.is_offloaded = is_offloaded
        self.offloadable_memory = OffloadableMemory(
            role,
            backend.world.device,
            {"parameters": partial(backend.list_part_tensors, "parameters")},
        )
        if is_offloaded:
            self.offload()

    def export_shards(self) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Return an iterator over this rank's shards with their table rules. Raise RuntimeError
        where the weights are offloaded: see `onload`.
        """
        self.offloadable_memory.require_parts(["parameters"])
        return self.backend.export_shards()

    def offload(self) -> None:
        """Free the device memory of the weights, which are copied to host memory only where they
        have changed since the last copy.
        """
        self.offloadable_memory.drop_parts()

    def onload(self) -> None:
        """Bring the weights back to the device."""
        self.offloadable_memory.restore_parts(is_read_only=True)

    def memory_report(self) -> MemoryReport:
        """Report the memory that this rank holds now."""
        return self.offloadable_memory.make_report()

    @contextmanager
    def _weights_on_device(self, will_change_weights: bool = False) -> Iterator[None]:
        """Keep the weights on the device within the block, and offload them afterwards if the model
        is offloaded. `will_change_weights` must be True where the block changes them.
        """
        self.onload()
        self.offloadable_memory.require_parts(["parameters"], will_change=will_change_weights)
        try:
            yield
        finally:
            if self.is_offloaded:
                self.offload()


class FrozenRewardModel(FrozenModel):
    """A frozen model with a value head, which scores samples. A `ScoreWorker`."""

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> CriticValues | None:
        """Return the scores of the samples' tokens on the leader; None elsewhere. See
        `ScoreWorker.values`.
        """
        with self._weights_on_device():
            return compute_values(self.backend, batch, plan)
