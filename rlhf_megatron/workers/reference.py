"""The frozen reference on one rank: forward only, no gradients, no optimizer. A `contract.ForwardWorker`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.hf_reader import HFReader
from rlhf_megatron.checkpoint.load_model import load_hf, local_shards, named_parameters
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.data.batch import LogProbs, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.forward import RowLogProbs, forward_log_probs
from rlhf_megatron.workers.memory import move_to_device, move_to_host


class MegatronReference:
    """Made on all ranks of the pool at once, each with the same arguments but `world`.

    `chunk_size`: vocabulary columns that the head handles at a time. `megatron`: settings of the pool, of which those
    that concern gradients are without effect here. `is_offloaded`: keep the weights in host memory
    between calls of `log_probs` (no effect on a CPU).

    Raises ValueError for an architecture or layout that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        chunk_size: int,
        megatron: MegatronConfig,
        is_offloaded: bool = False,
    ) -> None:
        self.world = world
        self.chunk_size = chunk_size
        self.is_offloaded = is_offloaded
        self.model = build_model(hf_config, world, dtype, megatron)
        self.table = table_for(hf_config, world.layout.tp, self.model.impl)
        load_hf(self.model.chunks, self.table, weights, world.coordinates.tp, world.layout.tp)
        # Parameters keep requires_grad, though no pass records a gradient: frozen ones go through another linear layer
        # of megatron's, which rounds differently, and the KL against an equal actor would not be 0.
        if is_offloaded:
            self.offload()

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """See `contract.ForwardWorker`."""
        if self.is_offloaded:
            self.onload()
        rows = RowLogProbs(self.model, self.world, temperature, with_entropy, self.chunk_size)
        result = forward_log_probs(self.model.chunks, rows, self.world, batch, plan)
        if self.is_offloaded:
            self.offload()
        return result

    def copy_weights(self, chunks: list[nn.Module]) -> None:
        """Become the model of `chunks` (the actor's, after a warm-up), which has the same layout and configuration."""
        source = named_parameters(chunks)
        with torch.no_grad():
            for name, parameter in named_parameters(self.model.chunks).items():
                parameter.copy_(source[name])

    def load_hf(self, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture. Raises ValueError."""
        reader = HFReader(directory)
        reader.check(table_for(self.model.hf_config, self.world.layout.tp))
        load_hf(self.model.chunks, self.table, reader, self.world.coordinates.tp, self.world.layout.tp)

    def export(self) -> Iterator[tuple[Rule, Tensor]]:
        """See `contract.Worker`."""
        return local_shards(self.model.chunks, self.table)

    def offload(self) -> None:
        """See `contract.Worker`."""
        move_to_host(self._tensors(), self.world.device)

    def onload(self) -> None:
        """See `contract.Worker`."""
        move_to_device(self._tensors(), self.world.device)

    def _tensors(self) -> list[Tensor]:
        return [parameter for chunk in self.model.chunks for parameter in chunk.parameters()]
