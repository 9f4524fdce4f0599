"""The launcher without processes: one rank, called directly. A debugger works in it; unit tests use it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.dispatch import join, scatter_calls
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.hang import DescribeHang
from rlhf_megatron.runtime.host import Activity, BuildRoles, Host
from rlhf_megatron.runtime.messages import Call
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
        self._host: Host | None = Host(joined, Activity(joined.where))
        try:
            self._host.build(build_roles)
        except BaseException:
            self.close()
            raise

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        def run(host: Host) -> Any:
            scattered = scatter_calls(1, method, batch, self.layout, token_budget, arguments)
            return join(method, [host.call(scattered.calls[0])], scattered.plans)

        return self._done(run)

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        return self._done(lambda host: [host.call(Call(1, method, arguments))])

    def describe_hosts(self) -> list[str]:
        return []

    def describe_hangs_by(self, describe: DescribeHang) -> None:
        """A call runs on the caller's thread: it is never waited for."""

    def end_with(self, error: HostError) -> None:
        """The same."""

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None
            dist.destroy_process_group()

    def _done(self, run: Callable[[Host], Any]) -> Future[Any]:
        assert self._host is not None, "the group is closed"
        future: Future[Any] = Future()
        try:
            future.set_result(run(self._host))
        except Exception as error:  # the future carries it, with its traceback
            future.set_exception(error)
        return future
