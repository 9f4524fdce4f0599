"""The frozen reference on one rank: forward only, no gradients, no optimizer. A `ForwardWorker`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.checkpoint.load_model import load_on_rank, local_shards, named_weights
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import KernelsConfig, MegatronConfig
from rlhf_megatron.data.batch import LogProbs, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.findings import HeadReport, MemoryReport
from rlhf_megatron.workers.log_prob_head import LogProbHead
from rlhf_megatron.workers.offload import Offload
from rlhf_megatron.workers.pipeline import forward_log_probs


class MegatronReference:
    """Made on all ranks of the pool at once, each with the same arguments but `world`.

    `chunk_size`: vocabulary columns that the head handles at a time, and `kernels`: how. `megatron`: settings of the
    pool, of which those that concern gradients are without effect here. `is_offloaded`: keep the weights in host memory
    between calls; their storages on the device are empty then, on a CPU too.

    Raises ValueError for an architecture or layout that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        chunk_size: int,
        kernels: KernelsConfig,
        megatron: MegatronConfig,
        is_offloaded: bool = False,
    ) -> None:
        self.world = world
        self.is_offloaded = is_offloaded
        self.model = build_model(hf_config, world, dtype, megatron)
        self.table = table_for(hf_config, world.layout.tp, self.model.impl)
        self.head = LogProbHead("reference", self.model, world, dtype, chunk_size, kernels)
        load_on_rank(self.model.chunks, self.table, weights, world)
        # Parameters keep requires_grad, though no pass records a gradient: frozen ones go through another linear layer
        # of megatron's, which rounds differently, and the KL against an equal actor would not be 0.
        self.memory = Offload("reference", world.device, {"parameters": self._parameters})
        if is_offloaded:
            self.offload()

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """Log-probs of the frozen policy, as `ForwardWorker.log_probs`."""
        with self._on_device():
            rows = self.head.rows(temperature, with_entropy)
            return forward_log_probs(self.model.chunks, rows, self.world, batch, plan)

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off the last stage."""
        return self.head.report()

    def copy_weights(self, chunks: list[nn.Module]) -> None:
        """Become the model of `chunks` (the actor's, after a warm-up), which has the same layout and configuration."""
        source = named_weights(chunks)
        with self._on_device(is_changed=True), torch.no_grad():
            for name, parameter in named_weights(self.model.chunks).items():
                parameter.copy_(source[name])

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture. Raises ValueError."""
        reader = HFReader(directory)
        reader.check(table_for(self.model.hf_config, self.world.layout.tp))
        with self._on_device(is_changed=True):
            load_on_rank(self.model.chunks, self.table, reader, self.world)

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        """This rank's shards with their table rules. The weights must be on the device: see `onload`."""
        self.memory.require("parameters")
        return local_shards(self.model.chunks, self.table)

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

    def _parameters(self) -> list[Tensor]:
        return [parameter for chunk in self.model.chunks for parameter in chunk.parameters()]
