"""A torch process group of one sender, rank 0, and the ranks of one engine: buckets are broadcast in it.

It is made as stock SGLang's `init_custom_process_group` makes the other side: the same prefixes before the keys of the
rendezvous store. It is no part of torch's default world, so it can be made, broken and left at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlhf_megatron.parallel.bound_store import listen

_POLL_S = 0.002
_WATCHDOG_S = 24 * 3600.0  # NCCL's own deadline, which would end the process: the one of `broadcast` comes first
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_CLEAN_UP_ONLY = "2"
_environment = threading.Lock()


class UpdateGroup:
    """Make it, have the engine's ranks join at `address` and `port` while this side is in `join`, then broadcast.

    After any error it is of no more use. Thread-safe in that `abort` may be called while another thread is inside.
    """

    def __init__(self, name: str, address: str, num_engine_ranks: int, backend: str, join_timeout_s: float) -> None:
        """`address`: of this host, as the engine reaches it; the store listens there and nowhere else. `name` must be
        new to the engine. Raises OSError where it cannot listen."""
        self.name = name
        self.address = address
        self.backend_name = backend
        self.world_size = num_engine_ranks + 1
        self._timeout = timedelta(seconds=join_timeout_s)
        listener = listen(address, 0)
        self.port: int = listener.getsockname()[1]
        self._store: TCPStore | None = TCPStore(
            address,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )
        self._backend: Any = None

    def join(self) -> None:
        """Returns when all ranks have joined. Raises RuntimeError when they have not by the deadline."""
        device = "cuda" if self.backend_name == "nccl" else "cpu"
        assert self._store is not None, "the group is closed"
        store = PrefixStore(f"{device}/", PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store)))
        make = self._nccl if self.backend_name == "nccl" else self._gloo
        self._backend = make(store)

    def broadcast(self, bucket: Tensor, timeout_s: float) -> None:
        """Returns when the engine's ranks have been sent all of `bucket`. Raises RuntimeError when they died or do not
        take it in time."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=timeout_s)
        backend = self._backend
        assert backend is not None, "join comes before broadcast"
        if self.backend_name == "gloo":
            backend.broadcast([bucket], options).wait(options.timeout)
            return
        deadline = time.monotonic() + timeout_s
        with torch.cuda.stream(torch.cuda.Stream(bucket.device)):  # the trainer's own work does not wait for it
            work = backend.broadcast([bucket], options)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name}: the engine has not taken a bucket within {timeout_s:g} s.")
                time.sleep(_POLL_S)
            work.wait()  # raises what went wrong

    def abort(self) -> None:
        """Give up what is under way. With gloo that ends when the engine leaves the group, or at its deadline."""
        backend, self._backend, self._store = self._backend, None, None
        if backend is not None and self.backend_name == "nccl":
            backend.abort()

    close = abort

    def _gloo(self, store: PrefixStore) -> Any:
        gloo: Any = ProcessGroupGloo  # the options are not in torch's type stubs
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout = self._timeout
        options._threads = 1
        return ProcessGroupGloo(store, 0, self.world_size, options)

    def _nccl(self, store: PrefixStore) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_WATCHDOG_S)
        with _errors_end_no_process():
            return dist.ProcessGroupNCCL(store, 0, self.world_size, options)


@contextmanager
def _errors_end_no_process() -> Iterator[None]:
    """NCCL's watchdog ends a process whose peer died. A trainer outlives its engines, so it only cleans up here. A
    group reads that from the environment when it is made, and there is no other way to say it."""
    with _environment:
        before = os.environ.get(_NCCL_ERRORS)
        os.environ[_NCCL_ERRORS] = _CLEAN_UP_ONLY
        try:
            yield
        finally:
            if before is None:
                del os.environ[_NCCL_ERRORS]
            else:
                os.environ[_NCCL_ERRORS] = before
