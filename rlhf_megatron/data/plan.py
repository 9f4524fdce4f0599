"""How the samples of a call are spread over replicas and packed into micro-batches. Pure integers, made on the controller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReplicaPlan:
    """One replica's share of a call."""

    samples: tuple[int, ...]  # indices into the whole batch, in the order in which the shard holds them
    micro_batches: tuple[tuple[int, ...], ...]  # indices into the shard; as many for every replica; none is empty
    packed_length: int  # tokens that every micro-batch of this call is packed to (a masked tail document fills it)


def plan_replicas(
    lengths: list[int], num_replicas: int, token_budget: int, alignment: int = 1
) -> tuple[ReplicaPlan, ...]:
    """Spread samples of the given lengths over replicas.

    Replicas get loads balanced by cost (tokens and attention), the same number of micro-batches of at most
    `token_budget` tokens each, and one packed length. `alignment`: each document is padded to a multiple of it.
    A replica that gets no sample has the index -1 as its only sample: the caller gives it a no-op sample of zero weight.

    Raises ValueError when a sample alone is over the budget.
    """
    raise NotImplementedError
