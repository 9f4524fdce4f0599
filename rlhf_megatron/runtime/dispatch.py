"""A scattered call as one call a rank, and its results as one result. The same for every launcher, and pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import TokenBatch, TokenColumns, columns_of
from rlhf_megatron.data.plan import NO_OP_LENGTH, ReplicaPlan, encoded, plan_replicas, restore
from rlhf_megatron.data.shared_prompts import find_prompts
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.messages import Call
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.documents import forwarded_lengths

codec.register(UpdateResult)


@dataclass(frozen=True)
class Scattered:
    """One call for each rank; the leaders' calls carry the shards."""

    id: int
    method: str
    batch: TokenBatch
    arguments: dict[str, Any]
    layout: Layout
    plans: tuple[ReplicaPlan, ...]  # one a replica

    @cached_property
    def _without_shard(self) -> tuple[Call, ...]:
        """One a replica."""
        arguments = ({**self.arguments, "plan": plan} for plan in self.plans)
        return tuple(Call(self.id, self.method, these, is_scattered=True) for these in arguments)

    @property
    def leaders(self) -> tuple[int, ...]:
        """Rank of each replica's leader."""
        return tuple(self.layout.leader(dp) for dp in range(self.layout.dp))

    @property
    def largest_bytes(self) -> int:
        """The bytes of the token columns of the largest shard."""
        width = sum(column.element_size() for _, axis, column in columns_of(self.batch) if axis == "token")
        lengths = [*self.batch.lengths.tolist(), NO_OP_LENGTH]  # behind them: NO_OP is -1
        return width * max(sum(lengths[sample] for sample in plan.samples) for plan in self.plans)

    def call(self, rank: int) -> Call:
        """Make the call of a rank with its shard, so that one shard stands at a time where calls are sent one after
        the other. The ranks of a replica that are not its leader share one object.
        """
        dp = self.layout.coordinates(rank).dp
        call = self._without_shard[dp]
        if rank != self.layout.leader(dp):
            return call
        return replace(call, shard=encoded(self.batch, self.plans[dp]))


def plan_call(batch: TokenBatch, layout: Layout, token_budget: int) -> tuple[ReplicaPlan, ...]:
    """Return how a scattered call splits `batch`, one plan a replica. The same arguments give the same plans.

    `token_budget`: tokens that a rank forwards of a micro-batch; the cp ranks of a replica have theirs together. The
    last token of each document is not forwarded, and a prompt once for the samples of a micro-batch, where the layout
    shares prompts. Raises ValueError when a sample is over the budget.
    """
    return plan_replicas(
        forwarded_lengths(batch.lengths).tolist(),
        layout.dp,
        token_budget * layout.cp,
        document_multiple=layout.document_multiple,
        packed_multiple=layout.packed_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
        prompts=find_prompts(batch) if layout.shares_prompts else None,
    )


def scatter_calls(
    call_id: int, method: str, batch: TokenBatch, layout: Layout, token_budget: int, arguments: dict[str, Any]
) -> Scattered:
    """Split `batch` over the replicas of `layout`. Each rank's call has its replica's plan as the argument `plan`.

    Raises as `plan_call`.
    """
    assert "plan" not in arguments, f"{method}: the plan is made here"
    return Scattered(call_id, method, batch, arguments, layout, plan_call(batch, layout, token_budget))


def join(method: str, results: Sequence[Any], plans: Sequence[ReplicaPlan], offsets: Tensor) -> Any:
    """Join the replicas' results: TokenColumns in the order of the whole batch, whose `offsets` these are, an
    UpdateResult as the sum, or None.

    Raises TypeError when the method returned something else.
    """
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        raise TypeError(f"{method} returned different types: {[type(result).__name__ for result in results]}")
    if first is None:
        return None
    if isinstance(first, TokenColumns):
        return restore(results, plans, offsets)
    if isinstance(first, UpdateResult):
        total = sum_updates(method, results)
        return total if first.own is None else replace(total, own=restore([r.own for r in results], plans, offsets))
    raise TypeError(
        f"{method} returned a {type(first).__name__}; a scattered call returns TokenColumns or an UpdateResult"
    )


def sum_updates(method: str, results: Sequence[UpdateResult]) -> UpdateResult:
    """Return `sums` added over replicas. What is global must be the same on each of them, bit for bit."""
    first = results[0]
    for name in ("grad_norm", "lr", "is_skipped"):
        values = [getattr(result, name) for result in results]
        assert len({repr(value) for value in values}) == 1, f"{method}: {name} differs over replicas: {values}"
    assert all(set(result.sums) == set(first.sums) for result in results), (
        f"{method}: replicas summed different metrics"
    )
    return replace(first, sums={name: sum(result.sums[name] for result in results) for name in first.sums})
