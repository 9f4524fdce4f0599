"""The controller's life between its hosts' registration and their end, the same under every
launcher with processes.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_megatron.runtime import host_registration
from rlhf_megatron.runtime.driver_gate import enable_remote_drivers
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.rank_pools import PoolSpec
from rlhf_megatron.runtime.remote_worker_group import RemoteWorkerGroup
from rlhf_megatron.runtime.route_store import enable_route_stores
from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
from rlhf_megatron.runtime.stop_signals import ControllerStopHandler


@dataclass(frozen=True)
class RunDeadlines:
    startup_s: float  # for all hosts to register, and then for the roles to stand
    call_s: float  # of one call
    stop_s: float = 60.0  # of the run to end by itself, once it was asked to


def run_with_hosts(
    run_job: Callable[[RoutedWorkerGroup], int],
    listener: socket.socket,
    secret: bytes,
    pools: Sequence[PoolSpec],
    deadlines: RunDeadlines,
    stop_handler: ControllerStopHandler,
    is_stoppable: bool = True,
    find_lost_host: Callable[[], HostError | None] = lambda: None,
) -> int:
    """Wait until the hosts have registered and built their roles, call `run_job` with their group,
    and end the hosts. Return the exit code that `run_job` returns. Must be called on the main
    thread, within `stop_handler.install_handlers`.

    `is_stoppable`: `run_job` looks at the StopRequest; otherwise a signal ends the run at once.
    `find_lost_host` returns why a host will not come, as far as the launcher knows. Raise the
    exceptions that `run_job` raises, and HostError for failures on hosts, which is a ValueError too
    where a user can fix it.
    """
    group: RoutedWorkerGroup | None = None
    enable_route_stores(secret)
    enable_remote_drivers(secret)
    try:
        links = host_registration.gather_hosts(
            listener, secret, pools, deadlines.startup_s, find_lost_host
        )
        group = RoutedWorkerGroup(
            {
                pool.name: RemoteWorkerGroup(
                    pool.layout,
                    links[pool.name],
                    deadlines.startup_s,
                    deadlines.call_s,
                    stop_handler.stop_for_host_signal,
                )
                for pool in pools
            }
        )
        stop_handler.set_failure_source(group)
        group.wait_until_built()
        stop_handler.has_begun = True
        stop_handler.is_startup = not is_stoppable
        return run_job(group)
    finally:
        if group is not None:
            group.close()
