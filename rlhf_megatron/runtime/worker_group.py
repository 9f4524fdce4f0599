"""The controller's only view of a pool of ranks: two verbs, both returning futures."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.parallel.layout import Layout


class WorkerGroup(Protocol):
    """`method` is "role.method", e.g. "actor.update" or "reference.log_probs", or "host.method".

    Calls run one after the other, in the order in which they were made. After a call that failed the hosts are ended
    and every later call fails with the same error (see `runtime.failures`).
    """

    layout: Layout

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        """Split `batch` by data-parallel replica (balanced), call everywhere, and put the results together in order.

        `token_budget`: tokens of a micro-batch. The method gets its shard as `batch` and its ReplicaPlan as `plan`.
        A result that is a TokenBatch comes back as one batch in the order of `batch`; an UpdateResult as their sum.
        """

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """The same call on every rank. One result a rank, in rank order."""

    def close(self) -> None:
        """End all hosts. Safe to call twice."""
