"""What actor, critic and reference ask of a trainer backend: one model on one rank, and what trains it.

`workers.megatron` has one on Megatron-Core, `workers.fsdp` one on FSDP2. All methods are called on every rank of the
pool at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rlhf_megatron.checkpoint.dist_checkpoint import StagedState
from rlhf_megatron.checkpoint.source import WeightSource
from rlhf_megatron.config.schema import KernelsConfig, OptimConfig
from rlhf_megatron.kernels.log_prob import HeadOutputs
from rlhf_megatron.models.families.base import HFConfig
from rlhf_megatron.models.table import Rule
from rlhf_megatron.parallel.world import World
from rlhf_megatron.workers.findings import HeadReport, ReplicaReport
from rlhf_megatron.workers.offload import TrainerPart
from rlhf_megatron.workers.pack import MicroBatch, Packed
from rlhf_megatron.workers.routes import Routes

RowsResult = tuple[Tensor, int, Tensor]
"""(scalar loss; 0, the token count, by which nothing divides; what to collect)."""
RowsFunction = Callable[[MicroBatch, Tensor], RowsResult]
"""(micro-batch, hidden [1, S, H]) -> its result. On the last chunk of the last stage, all tp and cp ranks: S are the
tokens of this cp rank, of which each tp rank has its part where sequence parallelism splits them."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step; the same on all ranks of a replica, and of all replicas."""

    grad_norm: float  # global, before clipping; nan or inf in a step that is skipped
    lr: float
    is_skipped: bool


class StepOptimizer(Protocol):
    """AdamW and its schedules over the parameters of one backend."""

    @property
    def lr(self) -> float: ...

    def step(self, losses: Tensor | None = None) -> StepResult:
        """One step with the gradients that stand there. `losses`: of this rank's micro-batches, where it has any.

        A gradient, norm or loss that is not finite, on whatever rank, changes nothing on any.
        """

    def judge(self, losses: Tensor | None) -> tuple[int, float]:
        """(`nonfinite.FINITE`, INFINITE or NAN; the global gradient norm), alike on all ranks."""


class Head(Protocol):
    """The head of a policy: log-probs and entropies of rows, by the kernel in use. Last stage, all tp ranks."""

    def outputs(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, with_entropy: bool, with_sum_squares: bool
    ) -> HeadOutputs: ...

    def log_probs_at(
        self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, log_probs_R: Tensor, ids_RK: Tensor
    ) -> Tensor:
        """[R, K] float32, with grad: those of the tokens `ids_RK`. `log_probs_R`: of the targets, from `outputs`."""

    def top(self, hidden_SH: Tensor, micro: MicroBatch, temperature: float, count: int) -> tuple[Tensor, Tensor]:
        """([R, K] ids, [R, K] float32 log-probs) of the `count` likeliest tokens, the likeliest first. No grad."""

    def report(self) -> HeadReport | None:
        """Report on the head; None off the last stage."""


class Backend(Protocol):
    """A model with its weights. What trains it stands there after `begin_phase`, if the model was made to train."""

    hf_config: HFConfig
    table: Sequence[Rule]
    world: World
    dtype: torch.dtype  # of the activations, and of the files that are written

    routes: Routes | None  # of a model with experts whose routing is replayed

    @property
    def exporting(self) -> World:
        """The place of this rank among those that a weight sync or an export gathers from."""

    @property
    def run(self) -> Callable[[Packed, RowsFunction, bool], list[Tensor]]:
        """(micro-batches, what to do with rows, is it forward only) -> what `on_rows` collected, in order, on the last
        stage; [] elsewhere.

        Forward, and backward of the loss that `on_rows` returns. Gradients add up, and are summed over replicas.
        """

    def make_head(self, role: str, chunk_size: int, kernels: KernelsConfig) -> Head:
        """Raises ValueError for a kernel that cannot run."""

    def values(self, hidden_SH: Tensor, rows_R: Tensor) -> Tensor:
        """[R] float32, of a model with a value head; inside `on_rows`."""

    def tensors(self, part: TrainerPart) -> Iterable[Tensor]:
        """Return the tensors that hold the memory of a part."""

    def sync(self) -> None:
        """Gather what the last optimizer step left to be gathered."""

    def export(self) -> Iterator[tuple[Rule, Tensor | None]]:
        """Export synced parameters, as `contract.Worker.export` does."""

    def load(self, source: WeightSource) -> None:
        """Become the model of `source`. Raises ValueError."""

    def copy_from(self, other: Any) -> None:
        """Become the model of another backend of the same kind, layout and architecture."""


class TrainedBackend(Backend, Protocol):
    """A backend whose model learns."""

    @property
    def optimizer(self) -> StepOptimizer: ...

    @property
    def watched(self) -> Sequence[nn.Module]:
        """The modules in which a pass is watched for numbers that are not finite."""

    def begin_phase(self, optim: OptimConfig, num_steps: int, is_model_kept: bool = False) -> None:
        """A fresh optimizer and schedules. `is_model_kept`: float32 parameters behind the model's stay as they are."""

    @property
    def has_router_terms(self) -> bool:
        """Whether a training pass needs to know of which document each token is."""

    @property
    def train(self) -> Callable[[Packed, RowsFunction], list[Tensor]]:
        """`run` with a backward pass, between `begin_pass` and `end_pass`."""

    def begin_pass(self, packed: Packed) -> None:
        """Gradients are zero."""

    def end_pass(self) -> dict[str, float]:
        """The replica's share of terms that the loss does not know of: those of routers."""

    def after_step(self) -> None:
        """Move what moves beside the optimizer, after a step that was not skipped."""

    def named_parameters(self) -> Mapping[str, Tensor]:
        """This rank's parts."""

    def named_gradients(self) -> Mapping[str, Tensor]:
        """This rank's parts."""

    def named_weights(self) -> Mapping[str, Tensor]:
        """`named_parameters`, and buffers that are weights too."""

    def check_replicas(self) -> ReplicaReport: ...

    def num_save_bytes(self) -> int: ...

    def stage(self, plain: dict[str, Any] | None) -> StagedState:
        """The model, copied to host memory to be written. With `plain`, values that are alike on all ranks, also the
        optimizer and its schedules, and those values."""

    def restore(self, directory: Path, plain: dict[str, Any] | None) -> None:
        """Become the model that was saved; with `plain`, as it was stored, also the optimizer. Raises ValueError.

        Of the schedules only the number of steps is taken over: what they are is the configuration's to say.
        """
