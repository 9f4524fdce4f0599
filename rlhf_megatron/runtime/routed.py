"""A WorkerGroup over the pools of a job: each call goes to the pool that has the role, and they end together."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.hang import DescribeHang, describe_hosts
from rlhf_megatron.runtime.messages import Status
from rlhf_megatron.runtime.pool import ENGINES, pool_of_role
from rlhf_megatron.runtime.remote import STATUS_TIMEOUT_S, RemoteGroup, tie, views_of


class RoutedGroups:
    """`groups`: by pool, the actor's first. Calls to one pool keep their order; those to different pools overlap.

    "critic.update" goes to the critic's pool where there is one; every role that is no pool's name is in the first.
    When one pool fails the others end too, and all pending and later calls fail with what went wrong there.
    """

    def __init__(self, groups: Mapping[str, RemoteGroup]) -> None:
        self._groups = dict(groups)
        tie(list(self._groups.values()))

    @property
    def layout(self) -> Layout:
        """The layout of the first pool, the actor's."""
        return next(iter(self._groups.values())).layout

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """The layouts, by pool of ranks."""
        return {name: group.layout for name, group in self._groups.items() if name != ENGINES}

    @property
    def own_address(self) -> str:
        """See `RemoteGroup`."""
        return next(iter(self._groups.values())).own_address

    @property
    def failure(self) -> HostError | None:
        """The error that ended the job; None while all is well."""
        return next((group.failure for group in self._groups.values() if group.failure is not None), None)

    def wait_until_built(self) -> None:
        """Returns when the roles of all pools stand. Raises as `RemoteGroup.wait_until_built`."""
        for group in self._groups.values():
            group.wait_until_built()

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        """See `WorkerGroup`."""
        return self._group(method).scatter(method, batch, token_budget=token_budget, **arguments)

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """See `WorkerGroup`: every rank of the role's pool."""
        return self._group(method).broadcast(method, **arguments)

    def statuses(self, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, Status | None]:
        """Ask each host of all pools what it is doing, by coordinates; None where it did not answer within
        `timeout_s`.
        """
        return {view.where: view.status for view in views_of(list(self._groups.values()), timeout_s)}

    def describe_hosts(self) -> list[str]:
        """See `WorkerGroup`: all pools."""
        return describe_hosts(views_of(list(self._groups.values()), STATUS_TIMEOUT_S))

    def describe_hangs_by(self, describe: DescribeHang) -> None:
        """See `WorkerGroup`."""
        for group in self._groups.values():
            group.describe_hangs_by(describe)

    def end_with(self, error: HostError) -> None:
        """See `WorkerGroup`."""
        for group in self._groups.values():
            group.fail_with(error)

    def close(self) -> None:
        """End all hosts, those of the pools at the same time. Safe to call twice."""
        with ThreadPoolExecutor(len(self._groups)) as threads:
            for done in [threads.submit(group.close) for group in self._groups.values()]:
                done.result()

    def _group(self, method: str) -> RemoteGroup:
        return self._groups[pool_of_role(list(self._groups), method.partition(".")[0])]
