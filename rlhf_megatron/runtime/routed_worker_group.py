"""A WorkerGroup over the pools of a job: each call goes to the pool that has the role, and
they end together.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.runtime.control_messages import HostStatus
from rlhf_megatron.runtime.hang_report import DescribeHang, describe_hosts
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.rank_pools import ENGINES, find_pool_of_role
from rlhf_megatron.runtime.remote_worker_group import (
    STATUS_TIMEOUT_S,
    RemoteWorkerGroup,
    query_snapshots,
    tie_worker_groups,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout


class RoutedWorkerGroup:
    """`groups`: by pool, the actor's first. Calls to one pool keep their order; those to different
    pools overlap.

    "critic.update" goes to the critic's pool where there is one; every role that is no pool's name
    is in the first. When one pool fails the others end too, and all pending and later calls fail
    with what went wrong there.
    """

    def __init__(self, groups: Mapping[str, RemoteWorkerGroup]) -> None:
        self._groups = dict(groups)
        tie_worker_groups(list(self._groups.values()))

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the first pool, the actor's."""
        return next(iter(self._groups.values())).layout

    @property
    def layouts(self) -> Mapping[str, ParallelLayout]:
        """The layouts, by pool of ranks."""
        return {name: group.layout for name, group in self._groups.items() if name != ENGINES}

    @property
    def controller_address(self) -> str:
        """See `RemoteWorkerGroup`."""
        return next(iter(self._groups.values())).controller_address

    @property
    def failure(self) -> HostError | None:
        """The error that ended the job; None while all is well."""
        return next(
            (group.failure for group in self._groups.values() if group.failure is not None), None
        )

    def wait_until_built(self) -> None:
        """Returns when the roles of all pools stand. Raises
        as `RemoteWorkerGroup.wait_until_built`.
        """
        for group in self._groups.values():
            group.wait_until_built()

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """See `WorkerGroup`."""
        return self._find_group(method).scatter_call(
            method, batch, token_budget=token_budget, **arguments
        )

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """See `WorkerGroup`: every rank of the role's pool."""
        return self._find_group(method).broadcast_call(method, **arguments)

    def query_statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, HostStatus | None]:
        """Ask each host of all pools what it is doing, by coordinates; None where it did not answer
        within `timeout_s`.
        """
        return {
            view.rank_label: view.status
            for view in query_snapshots(list(self._groups.values()), timeout_s)
        }

    def describe_hosts(self) -> list[str]:
        """See `WorkerGroup`: all pools."""
        return describe_hosts(query_snapshots(list(self._groups.values()), STATUS_TIMEOUT_S))

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """See `WorkerGroup`."""
        for group in self._groups.values():
            group.set_hang_describer(describe_hang)

    def abort_with_error(self, error: HostError) -> None:
        """See `WorkerGroup`."""
        for group in self._groups.values():
            group.abort_with_error(error)

    def close(self) -> None:
        """End all hosts, those of the pools at the same time. Safe to call twice."""
        with ThreadPoolExecutor(len(self._groups)) as threads:
            for done in [threads.submit(group.close) for group in self._groups.values()]:
                done.result()

    def _find_group(self, method: str) -> RemoteWorkerGroup:
        return self._groups[find_pool_of_role(list(self._groups), method.partition(".")[0])]
