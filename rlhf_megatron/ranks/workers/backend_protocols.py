"""The interface of a trainer backend for actor, critic and reference: one model on one rank, and
its optimizer.

`ranks.workers.megatron_backend` has one on Megatron-Core, `ranks.workers.fsdp_backend` one on
FSDP2. All methods are called on every rank of the pool at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_megatron.config.schema import KernelsConfig, OptimConfig
from rlhf_megatron.ranks.checkpoint.sharded_checkpoint import StagedState
from rlhf_megatron.ranks.kernels.log_prob import HeadOutputs
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.expert_routes import ExpertRoutes
from rlhf_megatron.ranks.workers.offload import TrainerPart
from rlhf_megatron.ranks.workers.rank_reports import HeadReport, ReplicaReport
from rlhf_megatron.ranks.workers.sequence_packing import MicroBatch, PackedBatch
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.update_rounding import MergeRounding
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import WeightRule

RowsResult = tuple[Tensor, int, Tensor]
"""(scalar loss; 0, a token count that has no effect; the tensor to collect)."""
RowsFunction = Callable[[MicroBatch, Tensor], RowsResult]
"""(micro-batch, hidden [1, S, H]) -> its result. On the last chunk of the last stage, all tp and cp
ranks: S are the tokens of this cp rank, of which each tp rank has its part where sequence
parallelism splits them.
"""


@dataclass(frozen=True)
class OptimizerStepResult:
    """The result of one optimizer step; the same on all ranks of a replica, and of all replicas."""

    grad_norm: float  # global, before clipping; nan or inf in a step that is skipped
    lr: float
    is_skipped: bool


@dataclass(frozen=True)
class MasterShard:
    """A stretch of a weight's shard, with the float32 values that the optimizer steps on."""

    name: str  # of the weight, Megatron's
    start: int  # place of the first value in this rank's shard, flattened
    weight: Tensor  # [values], in the type in which the model holds the weight
    # [values], float32; the weight itself where the model holds the weight in float32
    master: Tensor


class StepOptimizer(Protocol):
    """AdamW and its schedules over the parameters of one backend."""

    @property
    def lr(self) -> float:
        """Return the current learning rate."""
        ...

    def step(self, losses: Tensor | None = None) -> OptimizerStepResult:
        """Take one step with the current gradients, and return its norm and learning rate and
        whether it was skipped. `losses` holds the losses of this rank's micro-batches, where the
        rank has any.

        A gradient, norm or loss that is not finite, on any rank, leaves every rank unchanged.
        """

    def check_finiteness(self, losses: Tensor | None) -> tuple[int, float]:
        """Return (verdict, global gradient norm), the same on all ranks; the verdict is
        `nonfinite.FINITE`, INFINITE or NAN.
        """


class PolicyHead(Protocol):
    """The head of a policy: log-probs and entropies of rows, by the kernel in use. Call it on the
    last stage, on all tp ranks.
    """

    def compute_outputs(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_squares: bool,
    ) -> HeadOutputs:
        """Return the log-probs of the micro-batch's target tokens, with grad, and entropies and
        sums of squared probabilities where requested.
        """
        ...

    def compute_log_probs_of(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        log_probs_R: Tensor,
        token_ids_RK: Tensor,
    ) -> Tensor:
        """Return the log-probs [R, K], float32, with grad, of the tokens `token_ids_RK`.
        `log_probs_R` holds the log-probs of the targets, from `compute_outputs`.
        """

    def find_likeliest_tokens(
        self, hidden_SH: Tensor, micro_batch: MicroBatch, temperature: float, num_top: int
    ) -> tuple[Tensor, Tensor]:
        """Return ([R, K] ids, [R, K] float32 log-probs) of the `num_top` likeliest tokens, the
        likeliest first, without grad.
        """

    def make_report(self) -> HeadReport | None:
        """Return the report on the head; None off the last stage."""


class ModelAdapter(Protocol):
    """The LoRA matrices of a model. All methods are called on every rank of the pool at once."""

    def gather_matrices(self) -> dict[str, Tensor]:
        """Return all matrices, whole, by name."""

    def save(self, directory: Path, matrices: Mapping[str, Tensor], base_model_name: str) -> None:
        """Write these matrices into a new directory in peft's format. Call it on one rank.
        `base_model_name`: the model name or path that peft's config gives as the base.
        """

    def load(self, directory: Path) -> None:
        """Load the matrices that `save` wrote. Raise ValueError where they do not fit."""

    def clear(self) -> None:
        """Make the matrices have no effect, until others are loaded."""


class ModelBackend(Protocol):
    """A model with its weights. Its optimizer exists after `begin_phase`, if the model was made to
    train.
    """

    hf_config: HFConfig
    table: Sequence[WeightRule]
    world: World
    dtype: torch.dtype  # of the activations, and of the files that are written

    routes: ExpertRoutes | None  # of a model with experts whose routing is replayed

    @property
    def adapter(self) -> ModelAdapter | None:
        """Return the LoRA matrices beside the layers; None for a model that has none."""

    @property
    def export_world(self) -> World:
        """Return the world that a weight sync or an export gathers from, with this rank's place in
        it.
        """

    @property
    def run_passes(self) -> Callable[[PackedBatch, RowsFunction, bool], list[Tensor]]:
        """Return a function (micro-batches, `process_rows`, is forward only) -> the third values
        that `process_rows` returned, in order, on the last stage; [] elsewhere.

        The function runs forward, and, unless forward only, backward of the loss that
        `process_rows` returns. Gradients add up, and are summed over replicas.
        """

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> PolicyHead:
        """Return the policy's head. Raise ValueError for a kernel that cannot run."""

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """Return [R] float32 values of the rows, of a model with a value head. Call it inside
        `process_rows`.
        """

    def list_part_tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        """Return the tensors that hold the memory of a part."""

    def gather_parameters(self) -> None:
        """Gather the parameters that the last optimizer step updated on other ranks."""

    def export_shards(
        self, merge_rounding: MergeRounding | None = None
    ) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Yield the rules of this rank's stage with this rank's shards, the parameters gathered
        before; None for an expert that other ranks hold.

        `merge_rounding` gets each weight into which an adapter is merged; a model without adapters
        has none.
        """

    def load_weights(self, weight_source: WeightSource) -> None:
        """Replace the model's weights by those of `weight_source`. Raise ValueError where they do
        not fit.
        """

    def copy_weights_from(self, source_backend: Any) -> None:
        """Copy the weights of another backend of the same kind, layout and architecture into this
        one, matrices of adapters included. A forward pass of this one then gives the bits that a
        forward pass of the other one gives.
        """


class TrainedBackend(ModelBackend, Protocol):
    """A backend whose model learns."""

    @property
    def optimizer(self) -> StepOptimizer:
        """Return the optimizer of the current phase."""
        ...

    @property
    def watched_modules(self) -> Sequence[nn.Module]:
        """Return the modules in which a pass is watched for numbers that are not finite."""

    def begin_phase(
        self, optim: OptimConfig, num_steps: int, keeps_main_params: bool = False
    ) -> None:
        """Make a fresh optimizer and schedules of `num_steps` optimizer steps. `keeps_main_params`
        keeps the float32 parameters behind the model's parameters as they are.
        """

    @property
    def has_router_terms(self) -> bool:
        """Return whether a training pass must know the document of each token, for the loss terms
        of routers.
        """

    @property
    def run_training_passes(self) -> Callable[[PackedBatch, RowsFunction], list[Tensor]]:
        """Return `run_passes` with a backward pass; call it between `begin_training_pass` and
        `end_training_pass`.
        """

    def begin_training_pass(self, packed_batch: PackedBatch) -> None:
        """Set the gradients to zero, and start the loss terms of routers, if any."""

    def end_training_pass(self) -> dict[str, float]:
        """Return the replica's share of the loss terms that the row loss does not include: the
        terms of routers, by name.
        """

    def update_router_biases(self) -> None:
        """Move the routers' biases, which the optimizer does not, after a step that was not
        skipped.
        """

    def named_parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the parameters by name."""

    def named_gradients(self) -> Mapping[str, Tensor]:
        """Return this rank's parts of the gradients by parameter name."""

    def named_weights(self) -> Mapping[str, Tensor]:
        """Return `named_parameters` and the buffers that are weights too."""

    def iterate_master_shards(
        self, names: Collection[str], max_values: int
    ) -> Iterator[MasterShard]:
        """Yield this rank's part of the weights of these Megatron names, as far as no other rank
        yields the same values. Of a weight, at most about `max_values` values are yielded by all
        ranks together: the first values of each shard. The parameters are gathered before.
        """

    def check_replicas(self) -> ReplicaReport:
        """Compare the tensors that this rank holds alike with other ranks; return the report."""
        ...

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank writes in a save."""
        ...

    def stage_state_for_save(self, common_values: dict[str, Any] | None) -> StagedState:
        """Copy the model to host memory to be written. With `common_values`, values that are alike
        on all ranks, also copy the optimizer, its schedules and those values.
        """

    def restore_state(self, directory: Path, common_values: dict[str, Any] | None) -> None:
        """Load the model that was saved in `directory`; with `common_values`, as stored, also the
        optimizer. Raise ValueError where the checkpoint does not fit.

        The schedules take only their number of steps from the checkpoint; their settings are those
        of the configuration.
        """
