"""The trainer backend on Megatron-Core: every layout of tensor, pipeline, context, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_megatron.checkpoint.dist_checkpoint import (
    EXTRA_STATE,
    StagedState,
    load_sharded,
    stage_sharded,
    without_extra_state,
)
from rlhf_megatron.checkpoint.load_model import load_on_rank, local_shards, named_parameters, named_weights
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import KernelsConfig, MegatronConfig, OptimConfig
from rlhf_megatron.models.build import build_model
from rlhf_megatron.models.families.base import HFConfig, table_for
from rlhf_megatron.models.head import head_weight, value_head
from rlhf_megatron.models.replay import RouterReplay, make_router_replay
from rlhf_megatron.models.router import make_router_terms
from rlhf_megatron.models.table import Head, Rule
from rlhf_megatron.parallel.mcore_fixes import is_of_expert
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.backend import RowsFunction, RowsResult
from rlhf_megatron.workers.data_parallel import gradient_tensors, parameter_tensors, sync_parameters, wrap
from rlhf_megatron.workers.findings import ReplicaReport
from rlhf_megatron.workers.kept_state import Kept
from rlhf_megatron.workers.log_prob_head import LogProbHead
from rlhf_megatron.workers.offload import TrainerPart
from rlhf_megatron.workers.optimizer import Optimizer, reset
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.pipeline import run_micro_batches
from rlhf_megatron.workers.replicas import check_replicas
from rlhf_megatron.workers.routes import ReplayMode, Routes


class MegatronBackend:
    """A `TrainedBackend`; with `is_frozen` a `Backend`, without gradient buffers.

    Raises ValueError for an architecture or layout that is not supported.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weights: WeightSource,
        world: World,
        dtype: torch.dtype,
        megatron: MegatronConfig,
        head: Head = "vocabulary",
        is_frozen: bool = False,
        router_replay: ReplayMode = "none",
    ) -> None:
        self.hf_config = hf_config
        self.world = world
        self.dtype = dtype
        self.kept_state = Kept.of(megatron)
        self.model = build_model(hf_config, world, dtype, megatron, head)
        self.table: Sequence[Rule] = table_for(hf_config, world.layout.tp, self.model.impl, head)
        load_on_rank(self.model.chunks, self.table, weights, world)
        self.chunks: Sequence[Any] = self.model.chunks
        self.optimizer: Optimizer  # since `begin_phase`
        # Parameters keep requires_grad, though no pass of a frozen model records a gradient: frozen ones go through
        # another linear layer of megatron's, which rounds differently: KL against an equal actor would not be 0.
        self.router_terms = None
        self.routes: Routes | None = None
        if router_replay != "none":
            replay = make_router_replay(self.model.chunks, self.model.transformer_config, world)
            self.routes = Routes(replay, router_replay, world)
        if not is_frozen:
            transformer_config = self.model.transformer_config
            self.router_terms = make_router_terms(self.model.chunks, megatron, transformer_config, world)
            self.chunks = wrap(self.model.chunks, self.model.transformer_config, megatron, world)
            self.model.chunks = list(self.chunks)

    @property
    def run(self) -> Callable[[Packed, RowsFunction, bool], list[Tensor]]:
        return partial(run_micro_batches, self.chunks, self.world, replay=self._replay)

    @property
    def _replay(self) -> RouterReplay | None:
        return None if self.routes is None else self.routes.replay

    @property
    def has_router_terms(self) -> bool:
        return self.router_terms is not None

    @property
    def train(self) -> Callable[[Packed, RowsFunction], list[Tensor]]:
        run = partial(run_micro_batches, self.chunks, self.world, forward_only=False)
        return partial(run, routers=self.router_terms, replay=self._replay)

    def begin_pass(self, packed: Packed) -> None:
        """Clear the gradients and start the terms of the routers. Loads that must be known before cost a forward
        pass.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        terms = self.router_terms
        if terms is None:
            return
        if terms.needs_counting:

            def nothing(micro: MicroBatch, hidden: Tensor) -> RowsResult:
                return hidden.new_zeros(()), 0, hidden.new_zeros(1)

            terms.begin(*packed.num_forwarded, is_counting=True)
            with torch.no_grad():
                run_micro_batches(
                    self.chunks, self.world, packed, nothing, forward_only=True, routers=terms, replay=self._replay
                )
            terms.end()
        terms.begin(*packed.num_forwarded)

    def end_pass(self) -> dict[str, float]:
        terms = {} if self.router_terms is None else self.router_terms.end()
        return terms if self._replay is None else terms | self._replay.end()

    def after_step(self) -> None:
        if self.router_terms is not None:
            self.router_terms.move_biases()

    @property
    def exporting(self) -> World:
        return self.world

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> LogProbHead:
        vocabulary = (self.model.vocab_start, self.model.vocab_size)
        return LogProbHead(role, self._head_weight, *vocabulary, self.world, self.dtype, chunk_size, kernels)

    def _head_weight(self) -> nn.Parameter:
        return head_weight(self.model.chunks[-1])

    def values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        return value_head(self.model.chunks[-1]).values(hidden_SH, rows_R)

    @property
    def watched(self) -> Sequence[nn.Module]:
        return self.chunks

    def tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        if part == "optimizer":
            return self.optimizer.state_tensors()
        if self.chunks is self.model.chunks:  # frozen
            return [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        return (parameter_tensors if part == "parameters" else gradient_tensors)(self.chunks)

    def begin_phase(self, optim: OptimConfig, num_steps: int, is_model_kept: bool = False) -> None:
        chunks: Any = self.chunks
        if is_model_kept:
            self.optimizer = reset(self.optimizer, chunks, optim, num_steps, self.dtype, self.world)
        else:
            self.optimizer = Optimizer(chunks, optim, num_steps, self.dtype, self.world, self.kept_state)

    def sync(self) -> None:
        if self.chunks is not self.model.chunks:
            sync_parameters(self.chunks)

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        return local_shards(self.chunks, self.table)

    def load(self, source: WeightSource) -> None:
        load_on_rank(self.chunks, self.table, source, self.world)

    @torch.no_grad()
    def copy_from(self, other: MegatronBackend) -> None:
        source = named_weights(other.chunks)
        for name, parameter in named_weights(self.chunks).items():
            parameter.copy_(source[name])

    def named_parameters(self) -> Mapping[str, Tensor]:
        return named_parameters(self.chunks)

    def named_gradients(self) -> Mapping[str, Tensor]:
        return {name: _main_grad(parameter) for name, parameter in named_parameters(self.chunks).items()}

    def named_weights(self) -> Mapping[str, Tensor]:
        return named_weights(self.chunks)

    def check_replicas(self) -> ReplicaReport:
        return check_replicas(self.model.chunks, self.optimizer, self.world)

    def num_save_bytes(self) -> int:
        """Copies hold the same; the first one counts."""
        place = self.world.coordinates
        counts = {False: place.dp == 0 and place.cp == 0, True: dist.get_rank(self.world.expert_dp_group) == 0}
        num_moments = 2 if self.dtype == torch.float32 else 3  # and the float32 parameters
        a_parameter = self.dtype.itemsize + 4 * num_moments
        held = [p.numel() for name, p in named_parameters(self.chunks).items() if counts[is_of_expert(name)]]
        return sum(held) * a_parameter

    def stage(self, plain: dict[str, Any] | None) -> StagedState:
        if plain is None:
            return stage_sharded(self._model_state())
        scheduler = self.optimizer.scheduler.state_dict()
        return stage_sharded({**self._state(is_loading=False), **plain, "scheduler": scheduler})

    def restore(self, directory: Path, plain: dict[str, Any] | None) -> None:
        if plain is None:
            self._load_model(load_sharded(directory, self._model_state()))
            return
        loaded = load_sharded(directory, self._state(is_loading=True))
        self._load_model(loaded)
        self.optimizer.load_state_dict(loaded["optimizer"], plain["scheduler"])

    def _load_model(self, loaded: dict[str, Any]) -> None:
        for index, chunk in enumerate(self.chunks):
            mismatch = chunk.module.load_state_dict(loaded[f"model{index}"], strict=False)
            missing = [name for name in mismatch.missing_keys if not name.endswith(EXTRA_STATE)]
            assert not missing and not mismatch.unexpected_keys, f"missing {missing}, {mismatch.unexpected_keys}"

    def _state(self, is_loading: bool) -> dict[str, Any]:
        """Sharded tensors under names that do not depend on the layout; how they are grouped here is not stored."""
        model = self._model_state()
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading)}

    def _model_state(self) -> dict[str, Any]:
        metadata = {"dp_cp_group": self.world.dp_cp_group}
        return {
            f"model{index}": without_extra_state(chunk.module.sharded_state_dict(metadata=metadata))
            for index, chunk in enumerate(self.chunks)
        }


def _main_grad(parameter: Any) -> Tensor:
    gradient: Tensor = parameter.main_grad  # set by megatron
    return gradient
