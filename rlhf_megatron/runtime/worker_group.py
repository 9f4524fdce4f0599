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
        """The layout of the actor's pool."""

    @property
    def layouts(self) -> Mapping[str, ParallelLayout]:
        """The layouts by pool: "actor" and, where the critic has ranks of its own, "critic"."""

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Split `batch` by data-parallel replica (balanced), call everywhere, and put the results
        together in order.

        `token_budget`: tokens of a micro-batch. The method gets its shard as `batch` and its
        ReplicaPlan as `plan`. A result that is a TokenBatch comes back as one batch in the order of
        `batch`; an UpdateResult as their sum.
        """

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """Make the same call on every rank of the role's pool ("host": the actor's). One result a
        rank, in order.
        """

    def describe_hosts(self) -> list[str]:
        """Say what each host is doing, for a person, by rank; [] where there is none beside this
        process. Takes seconds.
        """

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """Set what makes the error of a call that is late, from now on."""

    def abort_with_error(self, error: HostError) -> None:
        """Hosts are ended; all pending and later calls fail with `error`. Returns at once."""

    def close(self) -> None:
        """End all hosts. Safe to call twice."""
