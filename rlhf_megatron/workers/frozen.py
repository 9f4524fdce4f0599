"""Models that do not learn, on one rank: forward only, no gradients, no optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch, Values
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.table import Rule
from rlhf_megatron.workers.backend import Backend
from rlhf_megatron.workers.findings import MemoryReport
from rlhf_megatron.workers.forward import forward_values
from rlhf_megatron.workers.offload import Offload


class Frozen:
    """Made on all ranks of the pool at once, each with the same arguments but `backend`, whose model is frozen.

    `is_offloaded`: keep the weights in host memory between calls; their storages on the device are empty then, on a CPU
    too.
    """

    def __init__(self, backend: Backend, role: str, is_offloaded: bool = False) -> None:
        self.backend = backend
        self.is_offloaded = is_offloaded
        self.memory = Offload(role, backend.world.device, {"parameters": partial(backend.tensors, "parameters")})
        if is_offloaded:
            self.offload()

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        """This rank's shards with their table rules. The weights must be on the device: see `onload`."""
        self.memory.require("parameters")
        return self.backend.export()

    def offload(self) -> None:
        """Free the device's memory of the weights. They are copied where they have changed since the last time."""
        self.memory.drop()

    def onload(self) -> None:
        """Undo `offload`."""
        self.memory.restore(is_read_only=True)

    def memory_report(self) -> MemoryReport:
        """Report what this rank holds now."""
        return self.memory.report()

    @contextmanager
    def _on_device(self, is_changed: bool = False) -> Iterator[None]:
        """The weights are there meanwhile, and then where they are kept."""
        self.onload()
        self.memory.require("parameters", is_changed=is_changed)
        try:
            yield
        finally:
            if self.is_offloaded:
                self.offload()


class RewardModel(Frozen):
    """A frozen model with a value head, which scores samples. A `ScoreWorker`."""

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> Values | None:
        """Scores, as `ScoreWorker.values`."""
        with self._on_device():
            return forward_values(self.backend, batch, plan)
