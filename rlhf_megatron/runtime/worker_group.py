"""The controller's only view of the ranks: two verbs, both returning futures."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.runtime.hang_report import DescribeHang
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.weights.parallel_layout import ParallelLayout


class WorkerGroup(Protocol):
    """`method` is "role.method", e.g. "actor.update" or "reference.log_probs", or "host.method".

    Calls to roles of one pool run one after the other, in the order in which they were made; those
    to roles of different pools run at the same time. After a call that failed all hosts are ended
    and every later call fails with the same error (see `runtime.host_errors`).
    """

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout of the actor's pool."""

    @property
    def layouts(self) -> Mapping[str, ParallelLayout]:
        """Return the layouts by the name of the pool: "actor" and, where these roles have ranks of
        their own, "critic", "reward_model" and "reference".
        """

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Split `batch` evenly over the data-parallel replicas, call the method on all ranks, and
        join the results.

        `token_budget` is the number of tokens in a micro-batch. The method gets its shard as
        `batch` and its ReplicaPlan as `plan`. TokenColumns come back in the order of `batch`; an
        UpdateResult comes back as the sum over the replicas.
        """

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """Make the same call on every rank of the role's pool ("host": the actor's pool). The
        future gets one result a rank, in rank order.
        """

    def describe_hosts(self) -> list[str]:
        """Return lines that describe for a person the current work of each host, by rank; [] where
        this process is the only host. Takes seconds.
        """

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """Set the function that makes the error of a late call, from now on."""

    def abort_with_error(self, error: HostError) -> None:
        """End the hosts; all pending and later calls fail with `error`. Return at once."""

    def close(self) -> None:
        """End all hosts. Safe to call twice."""
