"""What actor, critic and reference ask of a trainer backend: one model on one rank, and
what trains it.

`ranks.workers.megatron_backend` has one on Megatron-Core, `ranks.workers.fsdp_backend` one on
FSDP2. All methods are called on every rank of the pool at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from rlhf_megatron.weights.weight_source import WeightSource
from rlhf_megatron.weights.weight_table import WeightRule

RowsResult = tuple[Tensor, int, Tensor]
"""(scalar loss; 0, the token count, by which nothing divides; what to collect)."""
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


class StepOptimizer(Protocol):
    """AdamW and its schedules over the parameters of one backend."""

    @property
    def lr(self) -> float: ...

    def step(self, losses: Tensor | None = None) -> OptimizerStepResult:
        """One step with the gradients that stand there. `losses`: of this rank's micro-batches,
        where it has any.

        A gradient, norm or loss that is not finite, on whatever rank, changes nothing on any.
        """

    def check_finiteness(self, losses: Tensor | None) -> tuple[int, float]:
        """(`nonfinite.FINITE`, INFINITE or NAN; the global gradient norm), alike on all ranks."""


class PolicyHead(Protocol):
    """The head of a policy: log-probs and entropies of rows, by the kernel in use. Last
    stage, all tp ranks.
    """

    def compute_outputs(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        with_entropy: bool,
        with_sum_squares: bool,
    ) -> HeadOutputs: ...

    def compute_log_probs_of(
        self,
        hidden_SH: Tensor,
        micro_batch: MicroBatch,
        temperature: float,
        log_probs_R: Tensor,
        token_ids_RK: Tensor,
    ) -> Tensor:
        """[R, K] float32, with grad: those of the tokens `token_ids_RK`. `log_probs_R`: of the
        targets, from `compute_outputs`.
        """

    def find_likeliest_tokens(
        self, hidden_SH: Tensor, micro_batch: MicroBatch, temperature: float, num_top: int
    ) -> tuple[Tensor, Tensor]:
        """([R, K] ids, [R, K] float32 log-probs) of the `num_top` likeliest tokens, the likeliest
        first. No grad.
        """

    def make_report(self) -> HeadReport | None:
        """Report on the head; None off the last stage."""


class ModelBackend(Protocol):
    """A model with its weights. What trains it stands there after `begin_phase`, if the model was
    made to train.
    """

    hf_config: HFConfig
    table: Sequence[WeightRule]
    world: World
    dtype: torch.dtype  # of the activations, and of the files that are written

    routes: ExpertRoutes | None  # of a model with experts whose routing is replayed

    @property
    def export_world(self) -> World:
        """The place of this rank among those that a weight sync or an export gathers from."""

    @property
    def run_passes(self) -> Callable[[PackedBatch, RowsFunction, bool], list[Tensor]]:
        """(micro-batches, what to do with rows, is it forward only) -> what `on_rows` collected, in
        order, on the last stage; [] elsewhere.

        Forward, and backward of the loss that `on_rows` returns. Gradients add up, and are summed
        over replicas.
        """

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> PolicyHead:
        """Raises ValueError for a kernel that cannot run."""

    def compute_values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """[R] float32, of a model with a value head; inside `on_rows`."""

    def list_part_tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        """Return the tensors that hold the memory of a part."""

    def gather_parameters(self) -> None:
        """Gather what the last optimizer step left to be gathered."""

    def export_shards(self) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Export synced parameters, as `contract.Worker.export` does."""

    def load_weights(self, weight_source: WeightSource) -> None:
        """Become the model of `weight_source`. Raises ValueError."""

    def copy_weights_from(self, source_backend: Any) -> None:
        """Become the model of another backend of the same kind, layout and architecture."""


class TrainedBackend(ModelBackend, Protocol):
    """A backend whose model learns."""

    @property
    def optimizer(self) -> StepOptimizer: ...

    @property
    def watched_modules(self) -> Sequence[nn.Module]:
        """The modules in which a pass is watched for numbers that are not finite."""

    def begin_phase(
        self, optim: OptimConfig, num_steps: int, keeps_main_params: bool = False
    ) -> None:
        """A fresh optimizer and schedules. `keeps_main_params`: float32 parameters behind the
        model's stay as they are.
        """

    @property
    def has_router_terms(self) -> bool:
        """Whether a training pass needs to know of which document each token is."""

    @property
    def run_training_passes(self) -> Callable[[PackedBatch, RowsFunction], list[Tensor]]:
        """`run` with a backward pass, between `begin_training_pass` and `end_training_pass`."""

    def begin_training_pass(self, packed_batch: PackedBatch) -> None:
        """Gradients are zero."""

    def end_training_pass(self) -> dict[str, float]:
        """The replica's share of terms that the loss does not know of: those of routers."""

    def update_router_biases(self) -> None:
        """Move what moves beside the optimizer, after a step that was not skipped."""

    def named_parameters(self) -> Mapping[str, Tensor]:
        """This rank's parts."""

    def named_gradients(self) -> Mapping[str, Tensor]:
        """This rank's parts."""

    def named_weights(self) -> Mapping[str, Tensor]:
        """`named_parameters`, and buffers that are weights too."""

    def check_replicas(self) -> ReplicaReport: ...

    def estimate_save_bytes(self) -> int: ...

    def stage_state_for_save(self, common_values: dict[str, Any] | None) -> StagedState:
        """The model, copied to host memory to be written. With `common_values`, values that are
        alike on all ranks, also the optimizer and its schedules, and those values.
        """

    def restore_state(self, directory: Path, common_values: dict[str, Any] | None) -> None:
        """Become the model that was saved; with `common_values`, as it was stored, also the
        optimizer. Raises ValueError.

        Of the schedules only the number of steps is taken over: what they are is the
        configuration's to say.
        """
