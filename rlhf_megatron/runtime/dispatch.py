"""A scattered call as one call a rank, and its results as one result. The same for every launcher, and pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan, plan_replicas, restore, take
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.messages import Call
from rlhf_megatron.workers.contract import UpdateResult
from rlhf_megatron.workers.pack import forwarded_lengths

codec.register(UpdateResult)


@dataclass(frozen=True)
class Scattered:
    """One call for each rank, in rank order; the leaders' calls carry the shards."""

    calls: tuple[Call, ...]
    plans: tuple[ReplicaPlan, ...]  # one a replica
    leaders: tuple[int, ...]  # rank of each replica's leader


def plan_call(batch: TokenBatch, layout: Layout, token_budget: int) -> tuple[ReplicaPlan, ...]:
    """How a scattered call splits `batch`, one plan a replica. The same arguments give the same plans.

    `token_budget`: tokens that a rank forwards of a micro-batch; the cp ranks of a replica have theirs together. The
    last token of each document is not forwarded. Raises ValueError when a sample is over the budget.
    """
    return plan_replicas(
        forwarded_lengths(batch.lengths).tolist(),
        layout.dp,
        token_budget * layout.cp,
        document_multiple=layout.document_multiple,
        packed_multiple=layout.packed_multiple,
        micro_batch_multiple=layout.micro_batch_multiple,
    )


def scatter_calls(
    call_id: int, method: str, batch: TokenBatch, layout: Layout, token_budget: int, arguments: dict[str, Any]
) -> Scattered:
    """Split `batch` over the replicas of `layout`. Each rank's call has its replica's plan as the argument `plan`.

    Raises as `plan_call`.
    """
    assert "plan" not in arguments, f"{method}: the plan is made here"
    plans = plan_call(batch, layout, token_budget)
    leaders = tuple(layout.leader(dp) for dp in range(layout.dp))
    calls = []
    for rank in range(layout.world_size):
        dp = layout.coordinates(rank).dp
        shard = codec.encode(take(batch, plans[dp])) if rank == leaders[dp] else None
        calls.append(Call(call_id, method, {**arguments, "plan": plans[dp]}, is_scattered=True, shard=shard))
    return Scattered(tuple(calls), plans, leaders)


def join(method: str, results: Sequence[Any], plans: Sequence[ReplicaPlan]) -> Any:
    """The replicas' results as one: a TokenBatch in the order of the whole batch, an UpdateResult as the sum, or None.

    Raises TypeError when the method returned something else.
    """
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        raise TypeError(f"{method} returned different types: {[type(result).__name__ for result in results]}")
    if first is None:
        return None
    if isinstance(first, TokenBatch):
        return restore(results, plans)
    if isinstance(first, UpdateResult):
        return sum_updates(method, results)
    raise TypeError(
        f"{method} returned a {type(first).__name__}; a scattered call returns a TokenBatch or UpdateResult"
    )


def sum_updates(method: str, results: Sequence[UpdateResult]) -> UpdateResult:
    """`sums` added over replicas. What is global must be the same on each of them, bit for bit."""
    first = results[0]
    for name in ("grad_norm", "lr", "is_skipped"):
        values = [getattr(result, name) for result in results]
        assert len({repr(value) for value in values}) == 1, f"{method}: {name} differs over replicas: {values}"
    assert all(set(result.sums) == set(first.sums) for result in results), (
        f"{method}: replicas summed different metrics"
    )
    return replace(first, sums={name: sum(result.sums[name] for result in results) for name in first.sums})
