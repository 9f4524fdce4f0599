"""The methods that every trainer backend offers on one rank. The controller's proxies
(`runtime.role_proxies`) are made from these signatures, and mypy compares the classes with them.

All methods are called on every rank of the pool at once (plain SPMD). Batches arrive already
broadcast to all ranks of a replica; results are returned on the leader (last pipeline stage, cp 0,
tp 0) and are None elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlhf_megatron.data.batch import (
    CriticValues,
    MiniBatch,
    TokenBatch,
    TokenLogProbs,
    TopLogProbs,
    ValueMiniBatch,
)
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.offload import TRAINER_PARTS, TrainerPart
from rlhf_megatron.ranks.workers.rank_reports import (
    HeadReport,
    MemoryReport,
    NonFiniteReport,
    ReplicaReport,
)
from rlhf_megatron.weights.checkpoint_manifest import SaveResult
from rlhf_megatron.weights.weight_table import WeightRule


@dataclass(frozen=True)
class UpdateResult:
    """The result of one optimizer step. `sums` add up over replicas, because they were divided by
    global counts before.
    """

    sums: dict[str, float]  # loss and token-averaged metrics, this replica's share
    grad_norm: float  # global, before clipping
    lr: float
    # a gradient, the norm or a loss is not finite on some rank: nothing was changed, on no rank
    is_skipped: bool
    # of the policy before the step, where the mini-batch came without old_log_probs
    old_log_probs: TokenLogProbs | None = None


class ModelWorker(Protocol):
    """A model of any role."""

    def export_shards(self) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """Return an iterator over this rank's shards with their table rules, in table order: views,
        not copies.

        Parameters that an update left to be gathered are gathered before this returns; iterating
        communicates nothing.
        """

    def memory_report(self) -> MemoryReport:
        """Report the memory that this rank holds now, on its device and in host memory."""


class TrainedWorker(ModelWorker, Protocol):
    """A model that learns."""

    def offload(self, *, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device memory of these parts; parts that are in host memory already stay there.

        Gradients are discarded. A method that needs a part that is not on the device raises
        RuntimeError until `onload`.
        """

    def onload(
        self, *, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False
    ) -> None:
        """Bring these parts back to the device, bit for bit; gradients become zero. `is_read_only`
        promises that nothing changes them before the next `offload`, which then copies nothing.
        """

    def reset_optimizer(self, *, phase: str) -> None:
        """Start a fresh optimizer and schedules, for the phase "warmup" or "rl"."""

    def take_skip_reports(self) -> list[NonFiniteReport]:
        """Return this rank's reports on the optimizer steps that were skipped since the last call,
        in order, and clear them.
        """

    def check_replicas(self) -> ReplicaReport:
        """Compare the tensors that this rank holds alike with other ranks, check the parameters for
        numbers that are not finite, and return the report.
        """

    def save_weights(self, *, directory: Path) -> str:
        """Write the model, without its optimizer, and the random states into `directory`, for a
        capsule. Return "" or the reason why they could not be written.
        """

    def load_weights(self, *, directory: Path) -> None:
        """Load the model from a directory of `save_weights`, which may come from another layout.
        Raise ValueError where it does not fit.
        """

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank will write in a save; the sum over ranks is the
        whole save.
        """

    def begin_save(self, *, directory: Path) -> None:
        """Save sharded model, optimizer and schedules under `directory`, for loading under any
        layout.

        Return when they are copied to host memory: they may change from then on, while a thread
        writes. One save may run at a time.
        """

    def is_save_done(self) -> bool:
        """Return whether this rank has nothing left to write, so that `finish_save` will not wait
        for it.
        """

    def finish_save(self, *, timeout_s: float) -> SaveResult:
        """Wait for the save that `begin_save` began, and return its files or its error; a rank that
        has not written its files `timeout_s` seconds from now has failed.

        A failure to write is an error in the result, on all ranks, not an exception.
        """

    def save(self, *, directory: Path) -> None:
        """Save and wait for the files. Raise OSError on all ranks when one cannot write."""

    def load(self, *, directory: Path) -> None:
        """Load a saved model with its optimizer. Raise ValueError, with the name of the tensor that
        is missing or has another shape.
        """


class ForwardWorker(ModelWorker, Protocol):
    """A frozen policy: the reference."""

    def log_probs(
        self,
        batch: TokenBatch,
        plan: ReplicaPlan,
        *,
        temperature: float,
        with_entropy: bool = False,
    ) -> TokenLogProbs | None:
        """Return log p(token | tokens before) at the tokens in `response_mask`, of the distribution
        softmax(logits / temperature), and entropies if requested.
        """

    def head_report(self) -> HeadReport | None:
        """Return the report on the backend that computes the log-probs and on its self-checks; None
        off the last stage.
        """


class TeacherWorker(ForwardWorker, Protocol):
    """A frozen policy that others may learn from."""

    def top_log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, *, temperature: float, count: int
    ) -> TopLogProbs | None:
        """Return the `count` likeliest tokens and their log-probs at `response_mask`."""


class PolicyWorker(ForwardWorker, TrainedWorker, Protocol):
    """A policy that learns: the actor."""

    def log_probs(
        self,
        batch: TokenBatch,
        plan: ReplicaPlan,
        *,
        temperature: float,
        with_entropy: bool = False,
        with_sum_squares: bool = False,
    ) -> TokenLogProbs | None:
        """Return log-probs as the reference does; on request also the sum of the squared
        probabilities over the vocabulary.
        """

    def update(
        self,
        batch: MiniBatch,
        plan: ReplicaPlan,
        *,
        temperature: float,
        loss: str = "policy",
        capsule: Path | None = None,
    ) -> UpdateResult | None:
        """Run forward and backward over the micro-batches, and take one optimizer step.

        `loss` is "policy"; or "sft", the sum of -log p(token) x its loss weight, of either sign:
        every supervised job uses it, with weights that hold global denominators, weights of
        samples, and slopes of preference losses. Its sums are actor/loss, that sum, and
        actor/sft_loss, with metric weights. Columns of other losses are None. Or "distillation",
        towards the columns `teacher_`; its sum is actor/loss.

        `capsule` is a directory for `save_weights` when the step is skipped; only the first skipped
        step with this directory writes it.
        """

    def rerun_forward_backward(
        self, batch: MiniBatch, plan: ReplicaPlan, *, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """Run `update` without the optimizer step; `take_skip_reports` then returns a report,
        whether or not all numbers were finite, with the first tensor that was not.
        """


class ScoreWorker(ModelWorker, Protocol):
    """A frozen model with a value head: the reward model."""

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> CriticValues | None:
        """Return the value of the state before each token in `response_mask`, from the same rows as
        log-probs.
        """


class ValueWorker(ScoreWorker, TrainedWorker, Protocol):
    """A value model that learns: the critic."""

    def update(
        self,
        batch: ValueMiniBatch,
        plan: ReplicaPlan,
        *,
        loss: str = "value",
        capsule: Path | None = None,
    ) -> UpdateResult | None:
        """Update as `PolicyWorker.update` does, with the value loss. Its sums are critic/vf_loss,
        critic/vf_clipfrac and critic/vpred_mean.

        `loss` is "value"; or "linear", the sum of value x loss weight, which trains a reward model:
        its weights are the slopes of the loss of pairs. Its sum is actor/loss, because the model
        takes the place that a policy has in other jobs.
        """

    def rerun_forward_backward(
        self, batch: ValueMiniBatch, plan: ReplicaPlan, *, loss: str = "value"
    ) -> UpdateResult | None:
        """Run `update` without its optimizer step; see `PolicyWorker.rerun_forward_backward`."""

    def load_hf(self, *, directory: Path) -> None:
        """Load the model of a Hugging Face directory of the same architecture, with a fresh
        optimizer.

        Its value head is loaded; where it has none, the head gets its first weights again. Raise
        ValueError where the directory does not fit.
        """
