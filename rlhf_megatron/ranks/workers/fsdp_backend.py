"""The trainer backend on FSDP2: any causal language model of transformers, its parameters cut
over all ranks.

Documents are packed, or have rows of their own where they would see each other. That they do not,
and that the head's kernel gives what the model's own head gives, is measured when a model is made.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from rlhf_megatron.config.schema import FSDPConfig, KernelsConfig, LoRAConfig, OptimConfig
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import (
    StagedState,
    load_dtensors,
    stage_dtensors,
)
from rlhf_megatron.ranks.kernels.chosen_token_logits import apply_softcap
from rlhf_megatron.ranks.kernels.log_prob import HeadOutputs
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.backend_protocols import MasterShard, RowsFunction
from rlhf_megatron.ranks.workers.backend_protocols import PolicyHead as RowHead
from rlhf_megatron.ranks.workers.expert_routes import ExpertRoutes
from rlhf_megatron.ranks.workers.fsdp_adapter import FSDPAdapter
from rlhf_megatron.ranks.workers.fsdp_optimizer import FSDPStepOptimizer
from rlhf_megatron.ranks.workers.log_prob_head import LogProbHead
from rlhf_megatron.ranks.workers.nonfinite import find_bad_tensors
from rlhf_megatron.ranks.workers.offload import TrainerPart
from rlhf_megatron.ranks.workers.rank_reports import HeadReport, ReplicaReport
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch
from rlhf_megatron.weights.families.model_family import HFConfig, read_positive_int
from rlhf_megatron.weights.lora import (
    DOWN,
    UP,
    add_lora_layers,
    compute_lora_change,
    compute_lora_scale,
    get_layer_stem,
)
from rlhf_megatron.weights.parallel_layout import GridCoordinates, ParallelLayout
from rlhf_megatron.weights.transformers_causal_lm import build_causal_lm, make_causal_lm_table
from rlhf_megatron.weights.update_rounding import MergeRounding
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import HeadKind, WeightRule, slice_piece

# tokens of the documents that are packed, to see whether they see each other
PACKING_CHECK_LENGTHS = 7, 5
# relative errors; of a leak they are of order 1
PACKING_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 6e-2}
# the same products; a weak cap is off by 1e-4
HEAD_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
logger = logging.getLogger(__name__)


class FSDPBackend:
    """A `TrainedBackend`; with `is_frozen` a `ModelBackend`. A rank is a replica, and holds a piece
    of each parameter.

    Parameters that learn are float32; activations and gathered parameters have `dtype`, gradients
    are summed in float32. With a `lora` of a rank above 0 only the LoRA matrices learn, which begin
    from `seed`, and the weights keep `dtype`. A frozen model with a `lora` has such matrices too,
    which do not learn: the reference of a policy with LoRA.

    Raise ValueError for a model that transformers cannot build, or whose packed documents leak.
    """

    def __init__(
        self,
        hf_config: HFConfig,
        weight_source: WeightSource,
        world: World,
        dtype: torch.dtype,
        fsdp_config: FSDPConfig,
        head: HeadKind = "vocabulary",
        is_frozen: bool = False,
        lora: LoRAConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.lora = lora if lora is not None and lora.rank else None
        self.hf_config = hf_config
        self.world = world
        self.dtype = dtype
        self.fsdp_config = fsdp_config
        self.is_frozen = is_frozen
        kind = hf_config.get("model_type")
        own = dtype if is_frozen or self.lora else torch.float32
        if (
            fsdp_config.attn_implementation == "sdpa"
            and hf_config.get("attn_logit_softcapping") is not None
        ):
            raise ValueError(
                f"{kind}: sdpa drops attn_logit_softcapping; set"
                " actor.fsdp.attn_implementation to eager."
            )
        self.model = build_causal_lm(hf_config, fsdp_config.attn_implementation, head, own)
        self.table: Sequence[WeightRule] = make_causal_lm_table(self.model, hf_config, head)
        self.adapter: FSDPAdapter | None = None
        if self.lora is not None:
            add_lora_layers(self.model.decoder, self.lora)
            self.adapter = FSDPAdapter(self.lora, self.model.collect_tensors, world, seed)
        if is_frozen:
            self.model.requires_grad_(False)
        if fsdp_config.activation_checkpointing and not is_frozen:
            _enable_layer_recompute(self.model.decoder_layers, str(kind))
        self._shard_model()
        device = torch.device("cpu") if fsdp_config.cpu_offload else world.device
        self.model._apply(
            lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(world.device)
        )
        self.load_weights(weight_source)
        self.optimizer: FSDPStepOptimizer  # since `begin_phase`
        with torch.no_grad():
            self._ensure_documents_isolated(str(kind))
            self.model.returns_logits = head == "vocabulary" and self._needs_full_logits()

    @property
    def export_world(self) -> World:
        """Return the world that a weight sync or an export gathers from: all ranks as one copy of
        the model in pieces, as if tp were the number of ranks.
        """
        world = self.world
        num_ranks = self.world.layout.world_size
        layout = ParallelLayout(num_ranks, tp=num_ranks)
        here = GridCoordinates(dp=0, pp=0, tp=self.world.rank)
        return replace(
            world,
            layout=layout,
            coordinates=here,
            copy_group=world.dp_group,
            leader_rank=0,
            is_in_pieces=True,
        )

    @property
    def run_passes(self) -> Callable[[PackedBatch, RowsFunction, bool], list[Tensor]]:
        """Return the function that runs the model over packed micro-batches, with or without a
        backward pass.
        """
        return self._run_micro_batches

    has_router_terms = False
    routes: ExpertRoutes | None = None

    @property
    def run_training_passes(self) -> Callable[[PackedBatch, RowsFunction], list[Tensor]]:
        """Return the function that runs the model forward and backward over micro-batches."""
        return partial(self._run_micro_batches, forward_only=False)

    def begin_training_pass(self, packed_batch: PackedBatch) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def end_training_pass(self) -> dict[str, float]:
        """Return {}: this backend has no loss terms of routers."""
        return {}

    def update_router_biases(self) -> None:
        """Do nothing: only the optimizer changes the weights of this backend."""

    def _run_micro_batches(
        self, packed_batch: PackedBatch, process_rows: RowsFunction, forward_only: bool
    ) -> list[Tensor]:
        """Run the model on each micro-batch, and backward unless `forward_only`. Return the third
        value that `process_rows` returned for each micro-batch, in order.
        """
        collected = []
        # as many on every rank: `data.replica_plan` fills up with no-op samples
        for micro in packed_batch.micro_batches:
            lengths: dict[str, Any] = {}
            # else each layer waits for the device
            if self.fsdp_config.attn_implementation.startswith("flash"):
                lengths = {f"cu_seq_lens_{side}": micro.cu_seqlens for side in "qk"}
                lengths |= {f"max_length_{side}": micro.max_seqlen for side in "qk"}

            def compute_rows(hidden_states: Tensor, micro_batch: MicroBatch = micro) -> Any:
                """Return the loss and the collected values of this micro-batch's hidden states."""
                return process_rows(micro_batch, hidden_states)

            value, _, kept = self.model(
                micro.token_ids, micro.position_ids, compute_rows, micro.rows, **lengths
            )
            if not forward_only:
                value.backward()
            collected.append(kept)
        if forward_only:
            self._reshard_modules()
        return collected

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> RowHead:
        """Return the policy's head: the log-prob kernel on the head's weight, or a `FullLogitsHead`
        where the logits are more than a product with the weight.
        """
        if self.model.returns_logits:
            return FullLogitsHead(role, self.world)
        vocab_size = read_positive_int(self.hf_config, "vocab_size")
        return LogProbHead(
            role,
            lambda: self.model.output_layer.weight,
            0,
            vocab_size,
            self.world,
            self.dtype,
            chunk_size,
            kernels,
            self.model.softcap,
        )

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """Return [R] values of the rows, by the model's value head."""
        return self.model.compute_values(hidden_SH, rows_R)

    @property
    def watched_modules(self) -> Sequence[nn.Module]:
        """Return the modules in which a pass is watched for numbers that are not finite: the whole
        model.
        """
        return [self.model]

    def list_part_tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        """Return this rank's local tensors of a part: optimizer state, parameters, or gradients
        that exist now.
        """
        if part == "optimizer":
            return self.optimizer.list_state_tensors()
        return (self.named_weights() if part == "parameters" else self.named_gradients()).values()

    def begin_phase(
        self, optim: OptimConfig, num_steps: int, keeps_main_params: bool = False
    ) -> None:
        """Make a fresh optimizer with its schedules for the parameters that learn.
        `keeps_main_params` has no effect here.
        """
        named: dict[str, Any] = self.model.collect_tensors()
        parameters = {name: tensor for name, tensor in named.items() if tensor.requires_grad}
        self.optimizer = FSDPStepOptimizer(parameters, optim, num_steps, self.world)

    def gather_parameters(self) -> None:
        """Do nothing: the shards are always as the last optimizer step left them."""

    def export_shards(
        self, merge_rounding: MergeRounding | None = None
    ) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Return an iterator over each rule of the table with this rank's piece of the tensor on
        the world's device, LoRA matrices merged into the weight. All ranks must call it: the LoRA
        down matrices are gathered at once; iterating communicates nothing. `merge_rounding` gets
        each merged piece.
        """
        local_tensors = self.named_weights()
        named = dict[str, Any](self.model.collect_tensors())
        # of each pair of matrices the first is wanted whole, of the second the weight's rows
        with torch.no_grad():
            downs = {
                name: named[name].full_tensor() for name in local_tensors if name.endswith(DOWN)
            }

        def materialize_tensor(rule: WeightRule) -> Tensor:
            """Return this rank's piece of the rule's tensor on the device, LoRA merged."""
            # copied only where the piece is kept in host memory
            weight = local_tensors[rule.megatron_name].detach()
            stem = get_layer_stem(rule.megatron_name)
            if self.lora is None or stem + DOWN not in downs:
                return weight.to(self.world.device)
            change = compute_lora_change(
                downs[stem + DOWN].to(weight.device),
                local_tensors[stem + UP].detach(),
                compute_lora_scale(self.lora),
            )
            merged_weight = weight.float() + change
            if merge_rounding is not None:
                merge_rounding.add_merged_weight(weight, change, merged_weight)
            return merged_weight.to(self.world.device)

        return ((rule, materialize_tensor(rule)) for rule in self.table)

    @torch.no_grad()
    def load_weights(self, weight_source: WeightSource) -> None:
        """Fill this rank's pieces from `weight_source`, and the LoRA matrices from the adapter at
        `lora.path` or, without a path, from their seeded initial values.
        """
        local_tensors = self.named_weights()
        rank = self.world.rank
        num_ranks = self.world.layout.world_size
        for rule in self.table:
            full = rule.to_megatron(*weight_source.read_hf_tensors(rule))
            target = local_tensors[rule.megatron_name]
            target.copy_(
                full[slice_piece(len(full), rank, num_ranks)] if rule.split == "pieces" else full
            )
        if self.adapter is not None:
            self.adapter.fill_first_values()

    @torch.no_grad()
    def copy_weights_from(self, source_backend: FSDPBackend) -> None:
        """Copy the weights of another FSDP backend of the same model and LoRA into this one, each
        matrix for itself.

        LoRA is not merged here: a merged weight in bfloat16 would be another model than the weight
        with its two matrices. And a float32 weight is rounded as FSDP2 rounds it when it is
        gathered. So both backends compute the same bits.
        """
        source = source_backend.named_weights()
        target = self.named_weights()
        assert source.keys() == target.keys(), "both models have LoRA, or none has"
        for name, tensor in target.items():
            tensor.copy_(source[name])

    def named_parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's local pieces of the parameters that learn, by name."""
        return {
            name: to_local_tensor(tensor)
            for name, tensor in self.model.collect_tensors().items()
            if tensor.requires_grad
        }

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's local pieces of the gradients that exist, by parameter name."""
        return self.optimizer.get_local_gradients()

    def named_weights(self) -> Mapping[str, Tensor]:
        """Return this rank's local pieces of all parameters, and of buffers that are weights, by
        name.
        """
        return {
            name: to_local_tensor(tensor) for name, tensor in self.model.collect_tensors().items()
        }

    def iterate_master_shards(
        self, names: Collection[str], max_values: int
    ) -> Iterator[MasterShard]:
        """Yield the first values of this rank's pieces of the weights of these names. The weights
        that learn are float32, so that each is its own master.
        """
        for name, tensor in self.named_weights().items():
            if name in names:
                weight = tensor.detach().reshape(-1)[: max_values // self.world.layout.world_size]
                yield MasterShard(name, 0, weight, weight)

    def check_replicas(self) -> ReplicaReport:
        """Return a report of the numbers that are not finite in this rank's weights. No tensor is
        on two ranks, so there is nothing to compare.
        """
        return ReplicaReport(str(self.world), 0, 0, 0.0, (), find_bad_tensors(self.named_weights()))

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank writes in a save: its weights and two moments of
        each parameter that learns.
        """
        learning = self.named_parameters().values()
        return sum(
            tensor.nbytes for tensor in (*self.named_weights().values(), *learning, *learning)
        )

    def stage_state_for_save(self, common_values: dict[str, Any] | None) -> StagedState:
        """Copy the model to host memory to be written; with `common_values` also the optimizer's
        moments, its schedule and those values.
        """
        if common_values is None:
            return stage_dtensors(self.model.collect_tensors(), {})
        scheduler = self.optimizer.scheduler.state_dict()
        return stage_dtensors(
            {**self.model.collect_tensors(), **self.optimizer.get_moment_tensors()},
            {**common_values, "scheduler": scheduler},
        )

    @torch.no_grad()
    def restore_state(self, directory: Path, common_values: dict[str, Any] | None) -> None:
        """Load the model saved in `directory`; with `common_values`, as stored, also the
        optimizer's moments and the position of its schedule.
        """
        moments = {} if common_values is None else self.optimizer.get_moment_tensors()
        load_dtensors(
            directory,
            {**{k: t.detach() for k, t in self.model.collect_tensors().items()}, **moments},
        )
        if common_values is not None:
            self.optimizer.load_scheduler_state(common_values["scheduler"])

    def _shard_model(self) -> None:
        """Apply FSDP2 to each decoder layer and to the whole model: sum gradients without dividing
        them, reduced in float32.
        """
        is_on_cpu = self.world.device.type == "cpu"
        dtype = self.dtype
        policy: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(self.world.dp_group, self.world.device.type),
            "reshard_after_forward": self.fsdp_config.reshard_after_forward,
            "offload_policy": CPUOffloadPolicy(pin_memory=not is_on_cpu)
            if self.fsdp_config.cpu_offload
            else OffloadPolicy(),
        }
        if dtype != torch.float32:
            policy["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=torch.float32
            )
        for layer in self.model.decoder_layers:
            fully_shard(layer, **policy)
        fully_shard(self.model, **policy)
        for module in self.model.modules():
            # losses arrive divided by a global count: gradients are only summed
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no multiplied sum

    def _reshard_modules(self) -> None:
        """Free the gathered parameters that stay whole without a backward pass: embedding, head,
        and layers that are not resharded after their forward pass.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _compute_hidden_states(self, *documents: Tensor) -> list[Tensor]:
        """Return the model's output of each document, float32, from one forward pass over all the
        documents packed together.
        """
        tokens = torch.cat(documents)[None].to(self.world.device)
        positions = torch.cat([torch.arange(len(document)) for document in documents])[None].to(
            self.world.device
        )
        rows = torch.arange(tokens.shape[1], device=self.world.device)
        found: Tensor = self.model(
            tokens, positions, lambda hidden: hidden[0].float().clone(), rows
        )
        self._reshard_modules()
        return list(found.split([len(document) for document in documents]))

    def _ensure_documents_isolated(self, model_type: str) -> None:
        """Check that a packed document does not depend on the document before it; where it does,
        give each document a row of its own, with a warning. Raise ValueError where documents see
        each other even then. All ranks must call it, and use the same tokens.
        """
        error = self._measure_document_leak()
        if error <= PACKING_TOLERANCE.get(self.dtype, 1e-3):
            return
        self.model.find_max_over_ranks = self._all_reduce_max
        if self.world.rank == 0:
            logger.warning(
                (
                    "%s with attn_implementation %r lets packed documents see each other (one"
                    " changes by %.1e with the one before it): each has a row of its own in padded"
                    " batches, which takes more memory and time"
                ),
                *(model_type, self.fsdp_config.attn_implementation, error),
            )
        if not (error := self._measure_document_leak()) <= PACKING_TOLERANCE.get(self.dtype, 1e-3):
            raise ValueError(
                f"{model_type} with attn_implementation {self.fsdp_config.attn_implementation!r}"
                f" lets documents of a batch see each other: one changes by {error:.1e} with the"
                " others. Use another actor.fsdp.attn_implementation, or actor.backend megatron"
                " where it has the family."
            )

    def _all_reduce_max(self, local_number: int) -> int:
        """Return the largest `local_number` of all ranks."""
        largest = torch.tensor([local_number], device=self.world.device)
        all_reduce(largest, ReduceOp.MAX, group=self.world.dp_group)
        return int(largest.item())

    def _measure_document_leak(self) -> float:
        """Return the relative change of a packed document's hidden states with the document before
        it; infinity where a number is not finite.
        """
        vocab_size = read_positive_int(self.hf_config, "vocab_size")
        generator = torch.Generator().manual_seed(0)
        first, other, second = (
            torch.randint(0, vocab_size, (n,), generator=generator)
            for n in (PACKING_CHECK_LENGTHS[0], PACKING_CHECK_LENGTHS[0], PACKING_CHECK_LENGTHS[1])
        )
        behind = self._compute_hidden_states(first, second)[1]
        behind_other = self._compute_hidden_states(other, second)[1]
        (alone,) = self._compute_hidden_states(second)
        errors = (
            _compute_relative_distance(behind, alone),
            _compute_relative_distance(behind, behind_other),
        )
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def _needs_full_logits(self) -> bool:
        """Return whether log-probs need the model's own head: the head has more than a weight (such
        as a bias, which must learn), or hidden states times the weight, capped, differ from the
        model's logits at nine tokens. Warn on rank 0 where they do.
        """
        tokens = torch.arange(9) % read_positive_int(self.hf_config, "vocab_size")
        positions = torch.arange(9)[None].to(self.world.device)
        rows = torch.arange(9, device=self.world.device)
        tokens = tokens[None].to(self.world.device)

        def multiply_head_weight(hidden: Tensor) -> Tensor:
            """Return the logits that hidden states times the head's weight give, capped."""
            weight: Tensor = self.model.output_layer.weight
            return apply_softcap((hidden[0] @ weight.T).float(), self.model.softcap)

        mine: Tensor = self.model(tokens, positions, multiply_head_weight, rows)
        self.model.returns_logits = True
        real: Tensor = self.model(tokens, positions, lambda logits: logits[0].float().clone(), rows)
        self.model.returns_logits = False
        self._reshard_modules()
        error = _compute_relative_distance(mine, real)
        has_more = len(list(self.model.output_layer.parameters())) > 1
        is_unlike = has_more or not error <= HEAD_TOLERANCE.get(self.dtype, 1e-5)
        if is_unlike and self.world.rank == 0:
            logger.warning(
                (
                    "the head of %s is more than a product with its weight (%s): all logits of the"
                    " rows are made"
                ),
                self.hf_config.get("model_type"),
                "it has a bias" if has_more else f"off by {error:.1e}",
            )
        return is_unlike


class FullLogitsHead:
    """A `PolicyHead` for models whose logits are more than a product with the head's weight: the
    model's own head makes the logits.
    """

    def __init__(self, role: str, world: World) -> None:
        self._head_report = HeadReport(
            f"{role} {world}", "plain (the model's own head, all logits)", "reference", 0, ()
        )

    def compute_outputs(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_squares: bool,
    ) -> HeadOutputs:
        """Return the log-probs of the targets, and entropies and sums of squared probabilities
        where requested. `hidden_SH` holds the logits [R, V] of the rows.
        """
        log_p_RV = (hidden_SH.float() / temperature).log_softmax(-1)
        return HeadOutputs(
            log_p_RV.gather(1, micro_batch.targets[:, None])[:, 0],
            -(log_p_RV.exp() * log_p_RV).sum(-1) if with_entropy else None,
            log_p_RV.detach().exp().square().sum(-1) if with_sum_squares else None,
        )

    def compute_log_probs_of(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        log_probs_R: Tensor,
        token_ids_RK: Tensor,
    ) -> Tensor:
        """Return the log-probs [R, K] of the tokens `token_ids_RK`, with grad. `hidden_SH` holds
        the logits [R, V] of the rows.
        """
        return (hidden_SH.float() / temperature).log_softmax(-1).gather(1, token_ids_RK.long())

    @torch.no_grad()
    def find_likeliest_tokens(
        self, hidden_SH: Tensor, micro_batch: MicroBatch, temperature: float, num_top: int
    ) -> tuple[Tensor, Tensor]:
        """Return ([R, K] ids, [R, K] log-probs) of the `num_top` likeliest tokens, the likeliest
        first, without grad. `hidden_SH` holds the logits [R, V] of the rows.
        """
        return _top_log_probs(hidden_SH, temperature, num_top)

    def make_report(self) -> HeadReport:
        """Return the report that names the role and says that all logits are made by the model's
        own head.
        """
        return self._head_report


def _top_log_probs(logits_RV: Tensor, temperature: float, num_top: int) -> tuple[Tensor, Tensor]:
    """Return (ids [R, K], log-probs [R, K]) of the likeliest tokens, the likeliest first."""
    log_probs_RK, ids_RK = (logits_RV.float() / temperature).log_softmax(-1).topk(num_top, -1)
    return ids_RK, log_probs_RK


def to_local_tensor(tensor: Any) -> Tensor:
    """Return this rank's piece of a DTensor, or any other tensor as it is; the memory is shared,
    not copied.
    """
    held: Tensor = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return held


def _compute_relative_distance(measured: Tensor, expected: Tensor) -> float:
    """Return |measured - expected| / |expected|, in Euclidean norms."""
    return float((measured - expected).norm() / expected.norm())


def _enable_layer_recompute(layers: Sequence[nn.Module], model_type: str) -> None:
    """Make each layer keep only its inputs and recompute the rest in the backward pass. Only the
    layer itself is put in training mode, so the modules inside keep dropout off. Raise ValueError
    where the layers of transformers cannot recompute.
    """
    if not layers or not all(hasattr(layer, "gradient_checkpointing") for layer in layers):
        raise ValueError(
            f"{model_type}: its layers are not recomputed; set"
            " actor.fsdp.activation_checkpointing to false."
        )
    for layer in layers:
        marked: Any = layer
        marked.gradient_checkpointing = marked.training = True
        marked._gradient_checkpointing_func = _checkpoint_layer


def _checkpoint_layer(function: Any, *args: Any) -> Any:
    """Run `function` with torch's non-reentrant activation checkpointing, without saving random
    states.
    """
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False
    )
