"""The trainer backend on Megatron-Core: every layout of tensor, pipeline, context, expert and
data parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhf_megatron.config.schema import KernelsConfig, MegatronConfig, OptimConfig
from rlhf_megatron.ranks.checkpoint.model_weights import (
    collect_named_parameters,
    collect_named_weights,
    iterate_local_shards,
    load_weights_on_rank,
)
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import (
    EXTRA_STATE,
    StagedState,
    drop_extra_state,
    load_sharded_state,
    stage_sharded_state,
)
from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
from rlhf_megatron.ranks.models.output_heads import get_head_weight, get_value_head
from rlhf_megatron.ranks.models.router_losses import make_router_loss_terms
from rlhf_megatron.ranks.models.router_replay import RouterReplay, make_router_replay
from rlhf_megatron.ranks.parallel.mcore_fixes import is_expert_parameter
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import (
    MasterShard,
    ModelAdapter,
    RowsFunction,
    RowsResult,
)
from rlhf_megatron.ranks.workers.data_parallel import (
    gather_updated_parameters,
    list_gradient_tensors,
    list_parameter_tensors,
    wrap_for_data_parallelism,
)
from rlhf_megatron.ranks.workers.expert_routes import ExpertRoutes, ReplayMode
from rlhf_megatron.ranks.workers.log_prob_head import LogProbHead
from rlhf_megatron.ranks.workers.megatron_optimizer import MegatronStepOptimizer, reset_optimizer
from rlhf_megatron.ranks.workers.offload import TrainerPart
from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states
from rlhf_megatron.ranks.workers.optimizer_state_format import OptimizerStateFormat
from rlhf_megatron.ranks.workers.pipeline_passes import run_micro_batches
from rlhf_megatron.ranks.workers.rank_reports import ReplicaReport
from rlhf_megatron.ranks.workers.replica_check import compare_replicas
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.update_rounding import MergeRounding
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule


class MegatronBackend:
    """A `TrainedBackend`; with `is_frozen` a `ModelBackend`, without gradient buffers.

    Raise ValueError for an architecture or layout that is not supported.
    """

    adapter: ModelAdapter | None = None  # models on this backend have no adapters

    def __init__(
        self,
        hf_config: HFConfig,
        weight_source: WeightSource,
        world: World,
        dtype: torch.dtype,
        megatron: MegatronConfig,
        head: HeadKind = "vocabulary",
        is_frozen: bool = False,
        router_replay: ReplayMode = "none",
    ) -> None:
        self.hf_config = hf_config
        self.world = world
        self.dtype = dtype
        self.optimizer_state_format = OptimizerStateFormat.from_megatron_config(megatron)
        self.model = build_megatron_model(hf_config, world, dtype, megatron, head)
        self.table: Sequence[WeightRule] = make_weight_table(
            hf_config, world.layout.tp, self.model.impl, head
        )
        load_weights_on_rank(self.model.chunks, self.table, weight_source, world)
        self.chunks: Sequence[Any] = self.model.chunks
        self.optimizer: MegatronStepOptimizer  # since `begin_phase`
        # Parameters keep requires_grad, though no pass of a frozen model records a gradient: frozen
        # ones go through another linear layer of megatron's, which rounds differently: KL against
        # an equal actor would not be 0.
        self.router_terms = None
        self.routes: ExpertRoutes | None = None
        if router_replay != "none":
            replay = make_router_replay(self.model.chunks, self.model.transformer_config, world)
            self.routes = ExpertRoutes(replay, router_replay, world)
        if not is_frozen:
            transformer_config = self.model.transformer_config
            self.router_terms = make_router_loss_terms(
                self.model.chunks, megatron, transformer_config, world
            )
            self.chunks = wrap_for_data_parallelism(
                self.model.chunks, self.model.transformer_config, megatron, world
            )
            self.model.chunks = list(self.chunks)

    @property
    def run_passes(self) -> Callable[[PackedBatch, RowsFunction, bool], list[Tensor]]:
        """Return the function that runs the chunks over packed micro-batches, with or without a
        backward pass.
        """
        return partial(run_micro_batches, self.chunks, self.world, replay=self._router_replay)

    @property
    def _router_replay(self) -> RouterReplay | None:
        """Return the replay of recorded expert routes, or None where routing is not replayed."""
        return None if self.routes is None else self.routes.router_replay

    @property
    def has_router_terms(self) -> bool:
        """Return whether the routers have loss terms or moving biases, so that a training pass must
        know the document of each token.
        """
        return self.router_terms is not None

    @property
    def run_training_passes(self) -> Callable[[PackedBatch, RowsFunction], list[Tensor]]:
        """Return the function that runs the chunks forward and backward over packed micro-batches,
        with the loss terms of the routers.
        """
        run = partial(run_micro_batches, self.chunks, self.world, forward_only=False)
        return partial(run, routers=self.router_terms, replay=self._router_replay)

    def begin_training_pass(self, packed_batch: PackedBatch) -> None:
        """Clear the gradients and start the loss terms of the routers. A global load-balancing loss
        costs a forward pass here, which counts the loads.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        terms = self.router_terms
        if terms is None:
            return
        if terms.needs_counting_pass:

            def return_zero_loss(micro_batch: MicroBatch, hidden_states: Tensor) -> RowsResult:
                """Return a zero loss: the counting pass needs only the routers' loads."""
                return hidden_states.new_zeros(()), 0, hidden_states.new_zeros(1)

            terms.begin_pass(*packed_batch.forwarded_counts, is_counting=True)
            with torch.no_grad():
                run_micro_batches(
                    self.chunks,
                    self.world,
                    packed_batch,
                    return_zero_loss,
                    forward_only=True,
                    routers=terms,
                    replay=self._router_replay,
                )
            terms.finish_pass()
        terms.begin_pass(*packed_batch.forwarded_counts)

    def end_training_pass(self) -> dict[str, float]:
        """Return this replica's share of the routers' loss terms, and the metrics of the route
        replay, by name.
        """
        terms = {} if self.router_terms is None else self.router_terms.finish_pass()
        return terms if self._router_replay is None else terms | self._router_replay.finish_pass()

    def update_router_biases(self) -> None:
        """Move the biases of the experts by the loads of the last pass, where the model has such
        biases.
        """
        if self.router_terms is not None:
            self.router_terms.update_expert_biases()

    @property
    def export_world(self) -> World:
        """Return the world that a weight sync or an export gathers from: the backend's own."""
        return self.world

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> LogProbHead:
        """Return the policy's head with the kernel that `kernels` selects, for this rank's shard of
        the vocabulary.
        """
        return LogProbHead(
            role,
            self._head_weight,
            self.model.vocab_start,
            self.model.vocab_size,
            self.world,
            self.dtype,
            chunk_size,
            kernels,
        )

    def _head_weight(self) -> nn.Parameter:
        """Return the weight of the last chunk's output head."""
        return get_head_weight(self.model.chunks[-1])

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """Return [R] values of the rows, by the last chunk's value head."""
        return get_value_head(self.model.chunks[-1]).compute_values(hidden_SH, rows_R)

    @property
    def watched_modules(self) -> Sequence[nn.Module]:
        """Return the modules in which a pass is watched for numbers that are not finite: this
        rank's chunks.
        """
        return self.chunks

    def list_part_tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        """Return the tensors that hold the memory of a part. A frozen model returns its parameters
        for each part but "optimizer".
        """
        if part == "optimizer":
            return self.optimizer.list_state_tensors()
        if self.chunks is self.model.chunks:  # frozen
            return [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        return (list_parameter_tensors if part == "parameters" else list_gradient_tensors)(
            self.chunks
        )

    def begin_phase(
        self, optim: OptimConfig, num_steps: int, keeps_main_params: bool = False
    ) -> None:
        """Make a fresh optimizer with its schedules, or, with `keeps_main_params`, reset the
        present one and keep its float32 parameters.
        """
        chunks: Any = self.chunks
        if keeps_main_params:
            self.optimizer = reset_optimizer(
                self.optimizer, chunks, optim, num_steps, self.dtype, self.world
            )
        else:
            self.optimizer = MegatronStepOptimizer(
                chunks, optim, num_steps, self.dtype, self.world, self.optimizer_state_format
            )

    def gather_parameters(self) -> None:
        """Gather the parameters that the last optimizer step updated on other ranks; do nothing for
        a frozen model.
        """
        if self.chunks is not self.model.chunks:
            gather_updated_parameters(self.chunks)

    def export_shards(
        self, merge_rounding: MergeRounding | None = None
    ) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Yield each rule of this rank's stage with the rank's shard, or with None for an expert of
        other ranks. `merge_rounding` gets nothing: this backend has no adapters.
        """
        return iterate_local_shards(self.chunks, self.table)

    def iterate_master_shards(
        self, names: Collection[str], max_values: int
    ) -> Iterator[MasterShard]:
        """Yield this rank's part of the weights of these names, as
        `TrainedBackend.iterate_master_shards` describes. The optimizer must be on the device.
        """
        parameters = collect_named_parameters(self.chunks)
        rule_by_parameter = {
            id(parameters[rule.megatron_name]): rule
            for rule in self.table
            if rule.megatron_name in names and rule.megatron_name in parameters
        }
        for state in iterate_parameter_states(self.optimizer.megatron_optimizer):
            rule = rule_by_parameter.get(id(state.model_param))
            if rule is None or state.main_param is None:
                continue
            if self._counts_for_all_holders(rule, is_shared_out=state.element_range is not None):
                start = 0 if state.element_range is None else state.element_range.start
                num_values = max_values // self._count_shards(rule) - start
                if num_values > 0:
                    weight, master = state.decode_first_values(num_values)
                    yield MasterShard(rule.megatron_name, start, weight, master)

    def _count_shards(self, rule: WeightRule) -> int:
        """Return the number of shards into which the layout cuts the weight of a rule."""
        layout = self.world.layout
        if rule.split == "replicated":
            return 1
        return layout.tp if rule.expert is None else layout.etp

    def _counts_for_all_holders(self, rule: WeightRule, is_shared_out: bool) -> bool:
        """Return whether a sum over ranks must count this rank's part of a weight. Of ranks with
        the same part only the first counts. `is_shared_out`: the ranks with the same shard have
        different parts of it, by a distributed optimizer.
        """
        layout = self.world.layout
        place = self.world.coordinates
        if rule.expert is None:
            shard_number = place.tp
            is_first_copy = place.dp == 0 and place.cp == 0
        else:
            shard_number = layout.compute_etp_rank(self.world.rank)
            is_first_copy = dist.get_rank(self.world.expert_dp_group) == 0
        is_first_holder = rule.split != "replicated" or shard_number == 0
        return is_first_holder and (is_shared_out or is_first_copy)

    def load_weights(self, weight_source: WeightSource) -> None:
        """Fill the parameters of this rank from `weight_source`."""
        load_weights_on_rank(self.chunks, self.table, weight_source, self.world)

    @torch.no_grad()
    def copy_weights_from(self, source_backend: MegatronBackend) -> None:
        """Copy all weights of another Megatron backend with the same layout and architecture into
        this one.
        """
        source = collect_named_weights(source_backend.chunks)
        for name, parameter in collect_named_weights(self.chunks).items():
            parameter.copy_(source[name])

    def named_parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's parameters by global name."""
        return collect_named_parameters(self.chunks)

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's float32 gradient buffers by global parameter name."""
        return {
            name: _get_main_grad(parameter)
            for name, parameter in collect_named_parameters(self.chunks).items()
        }

    def named_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's parameters, and buffers that are weights, by global name."""
        return collect_named_weights(self.chunks)

    def check_replicas(self) -> ReplicaReport:
        """Compare the parameters and the optimizer state that this rank holds alike with other
        ranks, and return the report. All ranks must call it.
        """
        return compare_replicas(self.model.chunks, self.optimizer, self.world)

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank writes in a save: parameters, moments and float32
        parameters. Only the first of several ranks with the same tensors counts them.
        """
        place = self.world.coordinates
        counts = {
            False: place.dp == 0 and place.cp == 0,
            True: dist.get_rank(self.world.expert_dp_group) == 0,
        }
        num_moments = 2 if self.dtype == torch.float32 else 3  # and the float32 parameters
        a_parameter = self.dtype.itemsize + 4 * num_moments
        held = [
            p.numel()
            for name, p in collect_named_parameters(self.chunks).items()
            if counts[is_expert_parameter(name)]
        ]
        return sum(held) * a_parameter

    def stage_state_for_save(self, common_values: dict[str, Any] | None) -> StagedState:
        """Copy the model to host memory to be written; with `common_values` also the optimizer, its
        schedule and those values. All ranks must call it.
        """
        if common_values is None:
            return stage_sharded_state(self._make_sharded_model_state())
        scheduler = self.optimizer.scheduler.state_dict()
        return stage_sharded_state(
            {
                **self._make_sharded_training_state(is_loading=False),
                **common_values,
                "scheduler": scheduler,
            }
        )

    def restore_state(self, directory: Path, common_values: dict[str, Any] | None) -> None:
        """Load the model saved in `directory`; with `common_values`, as stored, also the optimizer
        and the position of its schedule. All ranks must call it.
        """
        if common_values is None:
            self._load_model_state(load_sharded_state(directory, self._make_sharded_model_state()))
            return
        loaded = load_sharded_state(directory, self._make_sharded_training_state(is_loading=True))
        self._load_model_state(loaded)
        self.optimizer.load_state_dict(loaded["optimizer"], common_values["scheduler"])

    def _load_model_state(self, loaded_state: dict[str, Any]) -> None:
        """Load each chunk's tensors from `loaded_state`; raise AssertionError where a name is
        missing or unexpected.
        """
        for index, chunk in enumerate(self.chunks):
            mismatch = chunk.module.load_state_dict(loaded_state[f"model{index}"], strict=False)
            missing = [name for name in mismatch.missing_keys if not name.endswith(EXTRA_STATE)]
            assert not missing and not mismatch.unexpected_keys, (
                f"missing {missing}, {mismatch.unexpected_keys}"
            )

    def _make_sharded_training_state(self, is_loading: bool) -> dict[str, Any]:
        """Return the sharded tensors of model and optimizer. Their stored names do not depend on
        the layout; the grouping of this dict is not stored.
        """
        model = self._make_sharded_model_state()
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading)}

    def _make_sharded_model_state(self) -> dict[str, Any]:
        """Return each chunk's sharded tensors, without extra state, under model0, model1, ..."""
        metadata = {"dp_cp_group": self.world.dp_cp_group}
        return {
            f"model{index}": drop_extra_state(chunk.module.sharded_state_dict(metadata=metadata))
            for index, chunk in enumerate(self.chunks)
        }


def _get_main_grad(parameter: Any) -> Tensor:
    """Return the float32 gradient buffer that megatron attached to the parameter."""
    gradient: Tensor = parameter.main_grad  # set by megatron
    return gradient
