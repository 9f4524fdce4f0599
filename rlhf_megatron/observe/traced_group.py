"""A WorkerGroup whose calls appear in the trace, one track a pool: two pools that work at the same time are seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.observe.trace import CALL, Trace
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.hang import DescribeHang
from rlhf_megatron.runtime.pool import pool_of_role
from rlhf_megatron.runtime.worker_group import WorkerGroup


class TracedGroup:
    """See `WorkerGroup`; every call goes on to `group`."""

    def __init__(self, group: WorkerGroup, trace: Trace) -> None:
        self._group = group
        self._trace = trace
        self._ends: dict[str, float] = {}  # by pool: when its last call ended

    @property
    def layout(self) -> Layout:
        return self._group.layout

    @property
    def layouts(self) -> Mapping[str, Layout]:
        return self._group.layouts

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        def call() -> Future[Any]:
            return self._group.scatter(method, batch, token_budget=token_budget, **arguments)

        return self._traced(method, call, num_samples=len(batch), num_tokens=batch.num_tokens)

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        return self._traced(method, lambda: self._group.broadcast(method, **arguments))

    def describe_hosts(self) -> list[str]:
        return self._group.describe_hosts()

    def describe_hangs_by(self, describe: DescribeHang) -> None:
        self._group.describe_hangs_by(describe)

    def end_with(self, error: HostError) -> None:
        self._group.end_with(error)

    def close(self) -> None:
        self._group.close()

    def _traced(self, method: str, call: Callable[[], Future[Any]], **arguments: Any) -> Future[Any]:
        pool = pool_of_role(list(self._group.layouts), method.partition(".")[0])
        start = time.monotonic()

        def add(_: Future[Any]) -> None:
            # A pool runs its calls one after the other, and their futures are done in that order.
            end = time.monotonic()
            self._trace.add(method, f"{pool} pool", CALL, max(start, self._ends.get(pool, start)), end, **arguments)
            self._ends[pool] = end

        future = call()
        future.add_done_callback(add)
        return future
