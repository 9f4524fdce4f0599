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
    """The result of one optimizer step. `sums` add up over replicas: they were divided by global
    counts before.
    """

    sums: dict[str, float]  # loss and token-averaged metrics, this replica's share
    grad_norm: float  # global, before clipping
    lr: float
    # a gradient, the norm or a loss is not finite on some rank: nothing was changed, on no rank
    is_skipped: bool
    old_log_probs: TokenLogProbs | None = (
        None  # of the policy before the step, where the mini-batch came without old_log_probs
    )


class ModelWorker(Protocol):
    """A model, whatever is asked of it."""

    def export_shards(self) -> Iterator[tuple[WeightRule, Tensor | None]]:
        """This rank's shards with their table rules, in table order: views, not copies.

        What an update left to be gathered is gathered before this returns; iterating
        communicates nothing.
        """

    def memory_report(self) -> MemoryReport:
        """Report what this rank holds now, on its device and in host memory."""


class TrainedWorker(ModelWorker, Protocol):
    """A model that learns."""

    def offload(self, *, parts: Sequence[TrainerPart] = TRAINER_PARTS) -> None:
        """Free the device's memory of these parts; parts that are in host memory
        already stay there.

        Gradients are let go. What needs a part that is not on the device raises RuntimeError
        until `onload`.
        """

    def onload(
        self, *, parts: Sequence[TrainerPart] = TRAINER_PARTS, is_read_only: bool = False
    ) -> None:
        """Undo `offload`, bit for bit; gradients are zero. `is_read_only`: nothing will change
        before the next `offload`, which then copies nothing.
        """

    def reset_optimizer(self, *, phase: str) -> None:
        """Fresh optimizer and schedules: phase "warmup" or "rl"."""

    def take_skip_reports(self) -> list[NonFiniteReport]:
        """Take what this rank saw in each optimizer step that was skipped since the last call,
        in their order.
        """

    def check_replicas(self) -> ReplicaReport:
        """Compare what this rank holds alike with others; parameters are looked at for numbers that
        are not finite.
        """

    def save_weights(self, *, directory: Path) -> str:
        """The model, without its optimizer, and the random states, for a capsule; "" or why it
        could not be written.
        """

    def load_weights(self, *, directory: Path) -> None:
        """The model out of such a directory, under any layout. Raises ValueError where
        it does not fit.
        """

    def estimate_save_bytes(self) -> int:
        """Return about the bytes that this rank will write in a save; the sum over ranks is
        the whole save.
        """

    def begin_save(self, *, directory: Path) -> None:
        """Save sharded model, optimizer and schedules under `directory`, to be loaded
        under any layout.

        Returns when they are copied to host memory: they may change from now on, while a thread
        writes. One at a time.
        """

    def is_save_done(self) -> bool:
        """This rank writes nothing any more; `finish_save` will not wait for it."""

    def finish_save(self, *, timeout_s: float) -> SaveResult:
        """End what `begin_save` began; a rank that has not written its files `timeout_s` from
        now has failed.

        What keeps a rank from writing is an error in the result, on all ranks, and no exception.
        """

    def save(self, *, directory: Path) -> None:
        """`begin_save` and `finish_save`. Raises OSError on all ranks when one cannot write."""

    def load(self, *, directory: Path) -> None:
        """Become what was saved. Raises ValueError naming the tensor that is missing or has
        another shape.
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
        """log p(token | before) at `response_mask`, of the distribution
        softmax(logits / temperature).
        """

    def head_report(self) -> HeadReport | None:
        """How its log-probs are computed, and what was found out about that; None off
        the last stage.
        """


class TeacherWorker(ForwardWorker, Protocol):
    """A frozen policy that others may learn from."""

    def top_log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, *, temperature: float, count: int
    ) -> TopLogProbs | None:
        """Return the `count` likeliest tokens and their log-probs at each place in
        `response_mask`.
        """


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
        """Return log-probs as the reference does; on demand also the sum of the squared
        probabilities of the vocabulary.
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
        """Forward and backward over the micro-batches and one optimizer step.

        `loss`: "policy"; or "sft", the sum of -log p(token) x its loss weight, of either sign: the
        one verb of every supervised job, whose weights hold global denominators, weights of
        samples, and slopes of preference losses. Its sums: actor/loss, that sum, and
        actor/sft_loss, with metric weights. Columns of other losses are None. Or "distillation",
        towards the columns `teacher_`; its sum: actor/loss.

        `capsule`: a directory for `save_weights`, when the step is skipped; for the first such step
        that names it.
        """

    def rerun_forward_backward(
        self, batch: MiniBatch, plan: ReplicaPlan, *, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """`update` without the optimizer step; `take_skips` tells what was seen, finite or not, and
        what came first.
        """


class ScoreWorker(ModelWorker, Protocol):
    """A frozen model with a value head: the reward model."""

    def values(self, batch: TokenBatch, plan: ReplicaPlan) -> CriticValues | None:
        """The value of the state before each token at `response_mask`, from the same
        rows as log-probs.
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
        """Update as `PolicyWorker.update` does, with the value loss. Sums: critic/vf_loss,
        critic/vf_clipfrac, critic/vpred_mean.

        `loss`: "value"; or "linear", the sum of value x loss weight, which trains a reward model:
        its weights are the slopes of the loss of pairs. Its sum: actor/loss, as the model stands
        where a policy does in other jobs.
        """

    def rerun_forward_backward(
        self, batch: ValueMiniBatch, plan: ReplicaPlan, *, loss: str = "value"
    ) -> UpdateResult | None:
        """Look again as `PolicyWorker.look_again` does."""

    def load_hf(self, *, directory: Path) -> None:
        """Become the model of a Hugging Face directory of the same architecture, with a
        fresh optimizer.

        Its value head is taken over; where it has none, the head gets its first weights again.
        Raises ValueError.
        """
