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
    """A WorkerGroup over several pools. Calls to one pool keep their order; calls to different
    pools overlap.

    "critic.update" goes to the critic's pool where there is one; every role without a pool of its
    name is in the first pool. When one pool fails the others end too, and all pending and later
    calls fail with the error of that pool.
    """

    def __init__(self, groups: Mapping[str, RemoteWorkerGroup]) -> None:
        """Tie the groups of the pools together. `groups` has the actor's pool first."""
        self._groups = dict(groups)
        tie_worker_groups(list(self._groups.values()))

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout of the first pool, the actor's."""
        return next(iter(self._groups.values())).layout

    @property
    def layouts(self) -> Mapping[str, ParallelLayout]:
        """Return the layouts by the name of the pool, without the pool of keepers."""
        return {name: group.layout for name, group in self._groups.items() if name != ENGINES}

    @property
    def controller_address(self) -> str:
        """Return the address of the controller's machine that the hosts reach."""
        return next(iter(self._groups.values())).controller_address

    @property
    def failure(self) -> HostError | None:
        """Return the error that ended the job, or None while all pools run."""
        return next(
            (group.failure for group in self._groups.values() if group.failure is not None), None
        )

    def wait_until_built(self) -> None:
        """Wait until all ranks of all pools have built their roles. Raise the errors that
        `RemoteWorkerGroup.wait_until_built` raises.
        """
        for group in self._groups.values():
            group.wait_until_built()

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Scatter the call in the role's pool; see `WorkerGroup.scatter_call`."""
        return self._find_group(method).scatter_call(
            method, batch, token_budget=token_budget, **arguments
        )

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """Make the call on every rank of the role's pool; see `WorkerGroup.broadcast_call`."""
        return self._find_group(method).broadcast_call(method, **arguments)

    def query_statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, HostStatus | None]:
        """Ask each host of all pools for its current work, and return the statuses by rank label. A
        host that did not answer within `timeout_s` has None.
        """
        return {
            view.rank_label: view.status
            for view in query_snapshots(list(self._groups.values()), timeout_s)
        }

    def describe_hosts(self) -> list[str]:
        """Describe the hosts of all pools; see `WorkerGroup.describe_hosts`."""
        return describe_hosts(query_snapshots(list(self._groups.values()), STATUS_TIMEOUT_S))

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """Set the function that makes the error of a late call, in all pools."""
        for group in self._groups.values():
            group.set_hang_describer(describe_hang)

    def abort_with_error(self, error: HostError) -> None:
        """End all pools with `error`; see `WorkerGroup.abort_with_error`."""
        for group in self._groups.values():
            group.abort_with_error(error)

    def close(self) -> None:
        """End the hosts of all pools at the same time. Safe to call twice."""
        with ThreadPoolExecutor(len(self._groups)) as threads:
            for done in [threads.submit(group.close) for group in self._groups.values()]:
                done.result()

    def _find_group(self, method: str) -> RemoteWorkerGroup:
        """Return the group of the pool that has the role of "role.method"."""
        return self._groups[find_pool_of_role(list(self._groups), method.partition(".")[0])]
