"""The policy on one rank: log-probs, updates, export, checkpoints. A `contract.TrainWorker` on Megatron-Core."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.dist_checkpoint import load_sharded, save_sharded
from rlhf_megatron.checkpoint.load_model import load_hf, local_shards
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import ActorConfig, OptimConfig
from rlhf_megatron.data.batch import LogProbs, MiniBatch, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.data_parallel import move_buffers_to_device, move_buffers_to_host, sync_parameters, wrap
from rlhf_megatron.workers.forward import RowLogProbs, forward_log_probs, sum_over_cp
from rlhf_megatron.workers.losses import make_row_losses
from rlhf_megatron.workers.memory import move_to_device, move_to_host
from rlhf_megatron.workers.optimizer import Optimizer, reset
from rlhf_megatron.workers.pack import MicroBatch, pack, token_columns
from rlhf_megatron.workers.pipeline import run_micro_batches

COLUMNS = token_columns(MiniBatch)
EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class Phase:
    """A stretch of training with an optimizer of its own."""

    optim: OptimConfig
    num_steps: int  # optimizer steps in all; the length of schedules that name none


class MegatronActor:
    """Made on all ranks of the pool at once, each with the same arguments but `world`.

    `phases`: name -> optimizer and length ("warmup", "rl"); the first one is entered at once.

    Raises ValueError for an architecture, layout, loss or schedule that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        config: ActorConfig,
        phases: Mapping[str, Phase],
    ) -> None:
        self.world = world
        self.dtype = dtype
        self.config = config
        self.phases = dict(phases)
        self.losses = make_row_losses(config)
        self.model = build_model(hf_config, world, dtype, config.megatron)
        self.table = table_for(hf_config, world.layout.tp, self.model.impl)
        load_hf(self.model.chunks, self.table, weights, world.coordinates.tp, world.layout.tp)
        self.chunks = wrap(self.model.chunks, self.model.transformer_config, config.megatron, world)
        self.model.chunks = list(self.chunks)
        phase = next(iter(self.phases.values()))
        self.optimizer = Optimizer(self.chunks, phase.optim, phase.num_steps, dtype, world)

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """See `contract.ForwardWorker`."""
        rows = RowLogProbs(self.model, self.world, temperature, with_entropy, self.config.log_prob_chunk_size)
        return forward_log_probs(self.chunks, rows, self.world, batch, plan)

    def update(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """See `contract.TrainWorker`. Raises ValueError for an unknown loss or a column that it needs and lacks."""
        if loss not in self.losses:
            raise ValueError(f"unknown loss {loss!r}; known: {', '.join(self.losses)}.")
        row_loss = self.losses[loss]
        world = self.world
        packed = pack(batch, plan, world.layout, world.coordinates.cp, COLUMNS, world.device)
        rows = RowLogProbs(self.model, world, temperature, row_loss.needs_entropy, self.config.log_prob_chunk_size)
        names: list[str] = []

        def on_rows(hidden_RH: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            value, sums = row_loss(*rows(hidden_RH, micro), micro.columns)
            names[:] = sums
            return value, torch.stack(list(sums.values()))

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = run_micro_batches(self.chunks, world, packed, on_rows, forward_only=False)
        step = self.optimizer.step()
        if not world.is_last_stage:
            return None
        totals = sum_over_cp(torch.stack(sums).sum(0), world)
        if not world.is_leader:
            return None
        return UpdateResult(dict(zip(names, totals.tolist(), strict=True)), step.grad_norm, step.lr, step.is_skipped)

    def reset_optimizer(self, phase: str) -> None:
        """See `contract.TrainWorker`."""
        if phase not in self.phases:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(self.phases)}.")
        new = self.phases[phase]
        self.optimizer = reset(self.optimizer, self.chunks, new.optim, new.num_steps, self.dtype, self.world)

    def synced_chunks(self) -> list[nn.Module]:
        """The model's chunks with all parameters as the last optimizer step left them. All ranks of the pool."""
        sync_parameters(self.chunks)
        return self.model.chunks

    def export(self) -> Iterator[tuple[Rule, Tensor]]:
        """See `contract.ForwardWorker`."""
        return local_shards(self.synced_chunks(), self.table)

    def offload(self) -> None:
        """See `contract.ForwardWorker`. Weights, moments and main parameters; gradient buffers are dropped."""
        sync_parameters(self.chunks)
        move_buffers_to_host(self.chunks, self.world)
        move_to_host(self._tensors(), self.world.device)

    def onload(self) -> None:
        """See `contract.ForwardWorker`."""
        move_to_device(self._tensors(), self.world.device)
        move_buffers_to_device(self.chunks, self.world)

    def save(self, directory: Path) -> None:
        """See `contract.TrainWorker`."""
        sync_parameters(self.chunks)
        save_sharded(directory, {**self._state(is_loading=False), "scheduler": self.optimizer.scheduler.state_dict()})

    def load(self, directory: Path) -> None:
        """See `contract.TrainWorker`."""
        loaded = load_sharded(directory, self._state(is_loading=True))
        for index, chunk in enumerate(self.chunks):
            mismatch = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
            missing = [name for name in mismatch.missing_keys if not name.endswith(EXTRA_STATE)]
            assert not missing and not mismatch.unexpected_keys, f"missing {missing}, {mismatch.unexpected_keys}"
        self.optimizer.load_state_dict(loaded["optimizer"], loaded["scheduler"])

    def _state(self, is_loading: bool) -> dict[str, Any]:
        """Sharded tensors under names that do not depend on the layout; how they are grouped here is not stored."""
        metadata = {"dp_cp_group": self.world.dp_cp_group}
        model = {
            f"model{index}": _without_extra_state(chunk.module.sharded_state_dict(metadata=metadata))
            for index, chunk in enumerate(self.chunks)
        }
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading)}

    def _tensors(self) -> list[Tensor]:
        """What moves one by one: not the parameters that are views of a buffer."""
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        is_buffered = self.config.megatron.use_distributed_optimizer
        return [*([] if is_buffered else parameters), *self.optimizer.state_tensors()]


def _without_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """Linear layers add an object each, which would be stored as a pickle: None, or Transformer Engine's fp8 scales."""
    return {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}
