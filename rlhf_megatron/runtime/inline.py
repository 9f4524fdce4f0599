"""The launcher without processes: one rank, called directly. A debugger works in it; unit tests use it."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.plan import take
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.dispatch import join, plan_call
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.hang import DescribeHang
from rlhf_megatron.runtime.host import Activity, BuildRoles, Host
from rlhf_megatron.runtime.pool import join_pool


class InlineGroup:
    """A WorkerGroup of one rank in this process. A call runs before it returns; its future is done.

    Raises what `build_roles` raises. There can be one at a time in a process, since it owns the default process group.
    """

    def __init__(
        self, build_roles: BuildRoles, pool: str = "actor", backend: str = "gloo", collective_timeout_s: float = 1800.0
    ) -> None:
        self.layout = Layout(world_size=1)
        self.layouts = {pool: self.layout}
        joined = join_pool(pool, self.layout, 0, dist.HashStore(), backend, collective_timeout_s)
        self._is_closed = False
        self._host = Host(joined, Activity(joined.where))
        try:
            self._host.build(build_roles)
        except BaseException:
            self.close()
            raise

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        """The batch goes to the role as it is, without the messages between processes."""
        future: Future[Any] = Future()
        try:
            (plan,) = plans = plan_call(batch, self.layout, token_budget)
            result = self._host.find(method)(batch=take(batch, plan), plan=plan, **arguments)
            future.set_result(join(method, [result], plans, batch.offsets))
        except Exception as error:  # the future carries it, with its traceback
            future.set_exception(error)
        return future

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        future: Future[list[Any]] = Future()
        try:
            future.set_result([self._host.find(method)(**arguments)])
        except Exception as error:
            future.set_exception(error)
        return future

    def describe_hosts(self) -> list[str]:
        return []

    def describe_hangs_by(self, describe: DescribeHang) -> None:
        """A call runs on the caller's thread: it is never waited for."""

    def end_with(self, error: HostError) -> None:
        """The same."""

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._host.close()
            dist.destroy_process_group()
