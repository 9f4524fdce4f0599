"""The launcher without processes: one rank, called directly. A debugger works in it;
unit tests use it.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.runtime.call_dispatch import join_replica_results, plan_scattered_call
from rlhf_megatron.runtime.hang_report import DescribeHang
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.rank_pools import join_rank_pool
from rlhf_megatron.runtime.role_host import BuildRoles, MainThreadActivity, RoleHost
from rlhf_megatron.weights.parallel_layout import ParallelLayout


class InlineWorkerGroup:
    """A WorkerGroup of one rank in this process. A call runs before it returns, and its future is
    done.

    The errors of `build_roles` are raised here. A process can have one such group at a time, since
    the group owns the default process group.
    """

    def __init__(
        self,
        build_roles: BuildRoles,
        pool_name: str = "actor",
        backend: str = "gloo",
        collective_timeout_s: float = 1800.0,
    ) -> None:
        """Initialise a torch world of one rank, and build the roles in this process."""
        self.layout = ParallelLayout(world_size=1)
        self.layouts = {pool_name: self.layout}
        joined = join_rank_pool(
            pool_name, self.layout, 0, dist.HashStore(), backend, collective_timeout_s
        )
        self._is_closed = False
        self._host = RoleHost(joined, MainThreadActivity(joined.rank_label))
        try:
            self._host.build_roles(build_roles)
        except BaseException:
            self.close()
            raise

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Run the method on the whole batch, without encoding the batch into messages, and return a
        finished future with the result or the exception.
        """
        future: Future[Any] = Future()
        try:
            (plan,) = plans = plan_scattered_call(batch, self.layout, token_budget)
            result = self._host.find_method(method)(
                batch=take_replica_shard(batch, plan), plan=plan, **arguments
            )
            future.set_result(join_replica_results(method, [result], plans, batch.offsets))
        except Exception as error:  # the future carries it, with its traceback
            future.set_exception(error)
        return future

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        """Run the method and return a finished future with [result], or with the exception."""
        future: Future[list[Any]] = Future()
        try:
            future.set_result([self._host.find_method(method)(**arguments)])
        except Exception as error:
            future.set_exception(error)
        return future

    def describe_hosts(self) -> list[str]:
        """Return []: there is no host beside this process."""
        return []

    def set_hang_describer(self, describe_hang: DescribeHang) -> None:
        """Do nothing: a call runs on the caller's thread, and is never late."""

    def abort_with_error(self, error: HostError) -> None:
        """Do nothing: there is no host to end."""

    def close(self) -> None:
        """Close the roles and destroy the default process group. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self._host.close_roles()
            dist.destroy_process_group()
