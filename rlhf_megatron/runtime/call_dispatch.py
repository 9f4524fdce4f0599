"""A scattered call as one call a rank, and its results as one result. The same for every
launcher, and pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import TokenBatch, TokenColumns, iterate_columns
from rlhf_megatron.data.replica_plan import (
    NO_OP_LENGTH,
    ReplicaPlan,
    encode_replica_shard,
    plan_replicas,
    restore_sample_order,
)
from rlhf_megatron.data.shared_prompts import find_sample_prompts
from rlhf_megatron.ranks.workers.forwarded_documents import count_forwarded_tokens
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.control_messages import RoleCall
from rlhf_megatron.weights.parallel_layout import ParallelLayout

codec.register("UpdateResult", {"old_log_probs": "own"})(UpdateResult)


@dataclass(frozen=True)
class ScatteredCall:
    """One call for each rank; the leaders' calls carry the shards."""

    call_id: int
    method: str
    batch: TokenBatch
    arguments: dict[str, Any]
    layout: ParallelLayout
    replica_plans: tuple[ReplicaPlan, ...]  # one a replica

    @cached_property
    def _calls_without_shard(self) -> tuple[RoleCall, ...]:
        """Return one call for each replica, with the replica's plan and without its shard."""
        arguments = ({**self.arguments, "plan": plan} for plan in self.replica_plans)
        return tuple(
            RoleCall(self.call_id, self.method, these, is_scattered=True) for these in arguments
        )

    @property
    def leader_ranks(self) -> tuple[int, ...]:
        """Return the rank of each replica's leader, by replica."""
        return tuple(self.layout.get_leader_rank(dp) for dp in range(self.layout.dp))

    @property
    def max_shard_bytes(self) -> int:
        """Return the number of bytes of the token columns in the largest shard."""
        width = sum(
            column.element_size()
            for _, axis, column in iterate_columns(self.batch)
            if axis == "token"
        )
        lengths = [*self.batch.lengths.tolist(), NO_OP_LENGTH]  # behind them: NO_OP is -1
        return width * max(
            sum(lengths[sample] for sample in plan.samples) for plan in self.replica_plans
        )

    def make_rank_call(self, rank: int) -> RoleCall:
        """Return the call of a rank; the call of a leader carries the replica's shard. The shard is
        encoded here, so that calls that are made and sent one after the other hold one shard at a
        time. The other ranks of a replica share one object.
        """
        dp = self.layout.locate_rank(rank).dp
        call = self._calls_without_shard[dp]
        if rank != self.layout.get_leader_rank(dp):
            return call
        return replace(call, shard=encode_replica_shard(self.batch, self.replica_plans[dp]))


def plan_scattered_call(
    batch: TokenBatch, layout: ParallelLayout, token_budget: int
) -> tuple[ReplicaPlan, ...]:
    """Return the plans by which a scattered call splits `batch`, one plan for each replica. The
    same arguments give the same plans.

    `token_budget` is the number of tokens of a micro-batch that a rank forwards; the cp ranks of a
    replica add up theirs. The last token of each document is not forwarded, and a prompt is
    forwarded once for its samples in a micro-batch where the layout shares prompts. Raise
    ValueError when a sample is over the budget.
    """
    return plan_replicas(
        count_forwarded_tokens(batch.lengths).tolist(),
        layout.dp,
        token_budget * layout.cp,
        document_multiple=layout.document_multiple,
        packed_multiple=layout.packed_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
        sample_prompts=find_sample_prompts(batch) if layout.shares_prompts else None,
    )


def make_scattered_call(
    call_id: int,
    method: str,
    batch: TokenBatch,
    layout: ParallelLayout,
    token_budget: int,
    arguments: dict[str, Any],
) -> ScatteredCall:
    """Split `batch` over the replicas of `layout`. Each rank's call has its replica's plan as the
    argument `plan`. Raise ValueError when a sample is over `token_budget`.
    """
    assert "plan" not in arguments, f"{method}: the plan is made here"
    return ScatteredCall(
        call_id, method, batch, arguments, layout, plan_scattered_call(batch, layout, token_budget)
    )


def join_replica_results(
    method: str,
    replica_results: Sequence[Any],
    replica_plans: Sequence[ReplicaPlan],
    batch_offsets: Tensor,
) -> Any:
    """Join the replicas' results. TokenColumns come in the order of the whole batch, whose offsets
    are `batch_offsets`; an UpdateResult is the sum; None stays None. Raise TypeError for other
    results.
    """
    first = replica_results[0]
    if any(type(result) is not type(first) for result in replica_results):
        raise TypeError(
            f"{method} returned different types:"
            f" {[type(result).__name__ for result in replica_results]}"
        )
    if first is None:
        return None
    if isinstance(first, TokenColumns):
        return restore_sample_order(replica_results, replica_plans, batch_offsets)
    if isinstance(first, UpdateResult):
        total = sum_update_results(method, replica_results)
        return (
            total
            if first.old_log_probs is None
            else replace(
                total,
                old_log_probs=restore_sample_order(
                    [r.old_log_probs for r in replica_results], replica_plans, batch_offsets
                ),
            )
        )
    raise TypeError(
        f"{method} returned a {type(first).__name__}; a scattered call returns TokenColumns or"
        " an UpdateResult"
    )


def sum_update_results(method: str, replica_results: Sequence[UpdateResult]) -> UpdateResult:
    """Return the first replica's result with the `sums` added over all replicas. The gradient norm,
    the learning rate and the skip flag must be equal on all replicas, bit for bit (AssertionError).
    """
    first = replica_results[0]
    for name in ("grad_norm", "lr", "is_skipped"):
        values = [getattr(result, name) for result in replica_results]
        assert len({repr(value) for value in values}) == 1, (
            f"{method}: {name} differs over replicas: {values}"
        )
    assert all(set(result.sums) == set(first.sums) for result in replica_results), (
        f"{method}: replicas summed different metrics"
    )
    return replace(
        first,
        sums={name: sum(result.sums[name] for result in replica_results) for name in first.sums},
    )
