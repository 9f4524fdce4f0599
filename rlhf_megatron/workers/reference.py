"""The frozen reference on one rank: forward only, no gradients, no optimizer. A `ForwardWorker`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.config.schema import KernelsConfig
from rlhf_megatron.data.batch import LogProbs, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.table import Rule
from rlhf_megatron.workers.backend import Backend
from rlhf_megatron.workers.findings import HeadReport, MemoryReport
from rlhf_megatron.workers.forward import RowLogProbs, forward_log_probs
from rlhf_megatron.workers.offload import Offload


class Reference:
    """Made on all ranks of the pool at once, each with the same arguments but `backend`, whose model is frozen.

    `chunk_size`: vocabulary columns that the head handles at a time, and `kernels`: how. `is_offloaded`: keep the
    weights in host memory between calls; their storages on the device are empty then, on a CPU too.
    """

    def __init__(self, backend: Backend, chunk_size: int, kernels: KernelsConfig, is_offloaded: bool = False) -> None:
        self.backend = backend
        self.is_offloaded = is_offloaded
        self.head = backend.make_head("reference", chunk_size, kernels)
        self.memory = Offload("reference", backend.world.device, {"parameters": partial(backend.tensors, "parameters")})
        if is_offloaded:
            self.offload()

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """Log-probs of the frozen policy, as `ForwardWorker.log_probs`."""
        with self._on_device():
            rows = RowLogProbs(self.head, temperature, with_entropy)
            return forward_log_probs(self.backend, rows, batch, plan)

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off the last stage."""
        return self.head.report()

    def copy_weights(self, backend: Backend) -> None:
        """Become the model of `backend` (the actor's, after a warm-up), which has the same layout and configuration."""
        with self._on_device(is_changed=True):
            self.backend.copy_from(backend)

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture. Raises ValueError."""
        reader = HFReader(directory)
        reader.check(self.backend.table)
        with self._on_device(is_changed=True):
            self.backend.load(reader)

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
        """What this rank holds now."""
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
