"""What every trainer backend offers on one rank. The Megatron actor is the first; another backend is another file.

All methods are called on every rank of the pool at once (plain SPMD). Batches arrive already broadcast to all ranks of
a replica; results are returned on the leader (last pipeline stage, cp 0, tp 0) and are None elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlhf_megatron.data.batch import LogProbs, MiniBatch, TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.models.table import Rule


@dataclass(frozen=True)
class UpdateResult:
    """Of one optimizer step. `sums` add up over replicas: they were divided by global counts before."""

    sums: dict[str, float]  # loss and token-averaged metrics, this replica's share
    grad_norm: float  # global, before clipping
    lr: float
    is_skipped: bool  # a non-finite gradient norm: no parameter was changed, on no rank


class ForwardWorker(Protocol):
    """A frozen model: the reference."""

    def log_probs(
        self, batch: TokenBatch, plan: ReplicaPlan, temperature: float, with_entropy: bool = False
    ) -> LogProbs | None:
        """log p(token | before) at `response_mask`, of the distribution softmax(logits / temperature)."""

    def export(self) -> Iterator[tuple[Rule, Tensor]]:
        """This rank's shards with their table rules, in table order: views, not copies.

        What an update left to be gathered is gathered before this returns; iterating communicates nothing.
        """

    def offload(self) -> None:
        """Move weights (and optimizer state) to host memory; a no-op where they are there already."""

    def onload(self) -> None:
        """Undo `offload`."""


class TrainWorker(ForwardWorker, Protocol):
    """A model that learns: the actor."""

    def update(
        self, batch: MiniBatch, plan: ReplicaPlan, temperature: float, loss: str = "policy"
    ) -> UpdateResult | None:
        """Forward and backward over the micro-batches and one optimizer step. `loss`: "policy" or "sft"."""

    def reset_optimizer(self, phase: str) -> None:
        """Fresh optimizer and schedules: phase "warmup" or "rl"."""

    def save(self, directory: Path) -> None:
        """Sharded model, optimizer and schedules under `directory`; loads under another layout."""

    def load(self, directory: Path) -> None:
        """Undo `save`. Raises ValueError naming the tensor that is missing or has another shape."""
