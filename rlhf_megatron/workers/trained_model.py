"""A model that learns, on one rank: what actor and critic share, whatever their rows cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.async_save import BackgroundSave
from rlhf_megatron.checkpoint.dist_checkpoint import SAVE_TIMEOUT_S, load_plain, load_sharded
from rlhf_megatron.checkpoint.load_model import load_hf, local_shards
from rlhf_megatron.checkpoint.manifest import SaveResult
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.checkpoint.staged import stage_sharded
from rlhf_megatron.config.schema import MegatronConfig, OptimConfig
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.table import Head, Rule
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.data_parallel import move_buffers_to_device, move_buffers_to_host, sync_parameters, wrap
from rlhf_megatron.workers.forward import sum_over_cp
from rlhf_megatron.workers.memory import move_to_device, move_to_host
from rlhf_megatron.workers.optimizer import Optimizer, reset
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.pipeline import run_micro_batches

EXTRA_STATE = "_extra_state"
RowLossFunction = Callable[[Tensor, MicroBatch], tuple[Tensor, dict[str, Tensor]]]
"""(hidden_RH, micro-batch) -> (this rank's share of the loss, with grad; its share of each metric)."""


@dataclass(frozen=True)
class Phase:
    """A stretch of training with an optimizer of its own."""

    optim: OptimConfig
    num_steps: int  # optimizer steps in all; the length of schedules that name none


class TrainedModel:
    """Weights, gradient buffers and optimizer. Made on all ranks of the pool at once, and so are all calls.

    `phases`: name -> optimizer and length; the first one is entered at once.

    Raises ValueError for an architecture, layout or schedule that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        megatron: MegatronConfig,
        phases: Mapping[str, Phase],
        head: Head = "vocabulary",
    ) -> None:
        self.world = world
        self.dtype = dtype
        self.megatron = megatron
        self.phases = dict(phases)
        self.phase = next(iter(self.phases))
        self.model = build_model(hf_config, world, dtype, megatron, head)
        self.table = table_for(hf_config, world.layout.tp, self.model.impl, head)
        load_hf(self.model.chunks, self.table, weights, world.coordinates.tp, world.layout.tp)
        self.chunks = wrap(self.model.chunks, self.model.transformer_config, megatron, world)
        self.model.chunks = list(self.chunks)
        self.optimizer = self._fresh_optimizer()
        self._save: BackgroundSave | None = None  # that was begun and not finished

    def update(self, packed: Packed, row_loss: RowLossFunction) -> UpdateResult | None:
        """Forward and backward over the micro-batches and one optimizer step. The result on leaders; None elsewhere."""
        world = self.world
        names: list[str] = []

        def on_rows(hidden_RH: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
            value, sums = row_loss(hidden_RH, micro)
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
        """See `contract.TrainedWorker`."""
        if phase not in self.phases:
            raise ValueError(f"unknown phase {phase!r}; known: {', '.join(self.phases)}.")
        self.phase = phase
        new = self.phases[phase]
        self.optimizer = reset(self.optimizer, self.chunks, new.optim, new.num_steps, self.dtype, self.world)

    def start_again(self, weights: WeightSource) -> None:
        """Become the model of `weights`, with a fresh optimizer of the current phase."""
        sync_parameters(self.chunks)
        load_hf(self.chunks, self.table, weights, self.world.coordinates.tp, self.world.layout.tp)
        self.optimizer = self._fresh_optimizer()

    def synced_chunks(self) -> list[nn.Module]:
        """The model's chunks with all parameters as the last optimizer step left them."""
        sync_parameters(self.chunks)
        return self.model.chunks

    def export(self) -> Iterator[tuple[Rule, Tensor]]:
        """See `contract.Worker`."""
        return local_shards(self.synced_chunks(), self.table)

    def offload(self) -> None:
        """See `contract.Worker`. Weights, moments and main parameters; gradient buffers are dropped."""
        sync_parameters(self.chunks)
        move_buffers_to_host(self.chunks, self.world)
        move_to_host(self._tensors(), self.world.device)

    def onload(self) -> None:
        """See `contract.Worker`."""
        move_to_device(self._tensors(), self.world.device)
        move_buffers_to_device(self.chunks, self.world)

    def num_save_bytes(self) -> int:
        """See `contract.TrainedWorker`. Replicas hold the same; the first one counts."""
        place = self.world.coordinates
        if place.dp > 0 or place.cp > 0:
            return 0
        num_moments = 2 if self.dtype == torch.float32 else 3  # and the float32 parameters
        a_parameter = self.dtype.itemsize + 4 * num_moments
        return sum(parameter.numel() for chunk in self.chunks for parameter in chunk.parameters()) * a_parameter

    def begin_save(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        assert self._save is None, "one save at a time"
        sync_parameters(self.chunks)
        plain = {"scheduler": self.optimizer.scheduler.state_dict(), "phase": self.phase}
        staged = stage_sharded({**self._state(is_loading=False), **plain})
        self._save = BackgroundSave(staged, directory, str(self.world))

    def is_save_done(self) -> bool:
        """See `contract.TrainedWorker`."""
        return self._save is None or self._save.is_done

    def finish_save(self, timeout_s: float) -> SaveResult:
        """See `contract.TrainedWorker`."""
        assert self._save is not None, "no save was begun"
        save, self._save = self._save, None
        return save.finish(timeout_s)

    def save(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        self.begin_save(directory)
        result = self.finish_save(SAVE_TIMEOUT_S)
        if result.error is not None:
            raise OSError(result.error)

    def load(self, directory: Path) -> None:
        """See `contract.TrainedWorker`."""
        plain = load_plain(directory)
        if plain["phase"] != self.phase:
            self.reset_optimizer(plain["phase"])
        loaded = load_sharded(directory, self._state(is_loading=True))
        for index, chunk in enumerate(self.chunks):
            mismatch = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
            missing = [name for name in mismatch.missing_keys if not name.endswith(EXTRA_STATE)]
            assert not missing and not mismatch.unexpected_keys, f"missing {missing}, {mismatch.unexpected_keys}"
        self.optimizer.load_state_dict(loaded["optimizer"], plain["scheduler"])

    def _fresh_optimizer(self) -> Optimizer:
        phase = self.phases[self.phase]
        return Optimizer(self.chunks, phase.optim, phase.num_steps, self.dtype, self.world)

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
        is_buffered = self.megatron.use_distributed_optimizer
        return [*([] if is_buffered else parameters), *self.optimizer.state_tensors()]


def _without_extra_state(state: dict[str, Any]) -> dict[str, Any]:
    """Linear layers add an object each, which would be stored as a pickle: None, or Transformer Engine's fp8 scales."""
    return {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}
