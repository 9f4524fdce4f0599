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
        """One a replica."""
        arguments = ({**self.arguments, "plan": plan} for plan in self.replica_plans)
        return tuple(
            RoleCall(self.call_id, self.method, these, is_scattered=True) for these in arguments
        )

    @property
    def leader_ranks(self) -> tuple[int, ...]:
        """Rank of each replica's leader."""
        return tuple(self.layout.get_leader_rank(dp) for dp in range(self.layout.dp))

    @property
    def max_shard_bytes(self) -> int:
        """The bytes of the token columns of the largest shard."""
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
        """Make the call of a rank with its shard, so that one shard stands at a time where calls
        are sent one after the other. The ranks of a replica that are not its leader
        share one object.
        """
        dp = self.layout.locate_rank(rank).dp
        call = self._calls_without_shard[dp]
        if rank != self.layout.get_leader_rank(dp):
            return call
        return replace(call, shard=encode_replica_shard(self.batch, self.replica_plans[dp]))


def plan_scattered_call(
    batch: TokenBatch, layout: ParallelLayout, token_budget: int
) -> tuple[ReplicaPlan, ...]:
    """Return how a scattered call splits `batch`, one plan a replica. The same arguments give
    the same plans.

    `token_budget`: tokens that a rank forwards of a micro-batch; the cp ranks of a replica have
    theirs together. The last token of each document is not forwarded, and a prompt once for the
    samples of a micro-batch, where the layout shares prompts. Raises ValueError when a sample is
    over the budget.
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
    argument `plan`.

    Raises as `plan_scattered_call`.
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
    """Join the replicas' results: TokenColumns in the order of the whole batch, whose
    `batch_offsets` these are, an UpdateResult as the sum, or None.

    Raises TypeError when the method returned something else.
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
    """Return `sums` added over replicas. What is global must be the same on each of
    them, bit for bit.
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
