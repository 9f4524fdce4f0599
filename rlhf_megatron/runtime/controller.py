"""The controller's life between its hosts' registration and their end, the same under every launcher with processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlhf_megatron.runtime import registration
from rlhf_megatron.runtime.driver_gate import reach_gates
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.pool import PoolSpec
from rlhf_megatron.runtime.remote import RemoteGroup
from rlhf_megatron.runtime.route_store import reach_stores
from rlhf_megatron.runtime.routed import RoutedGroups
from rlhf_megatron.runtime.stopping import ControllerStop


@dataclass(frozen=True)
class Deadlines:
    startup_s: float  # for all hosts to register, and then for the roles to stand
    call_s: float  # of one call
    stop_s: float = 60.0  # of the run to end by itself, once it was asked to


def control(
    run: Callable[[RoutedGroups], int],
    listener: socket.socket,
    secret: bytes,
    pools: Sequence[PoolSpec],
    deadlines: Deadlines,
    stopping: ControllerStop,
    is_stoppable: bool = True,
    find_lost: Callable[[], HostError | None] = lambda: None,
) -> int:
    """Wait for the hosts, `run`, end the hosts; returns what `run` does. On the main thread, in `stopping.installed`.

    `is_stoppable`: `run` looks at the StopRequest. `find_lost`: why a host will not come, as far as the launcher knows.
    Raises what `run` raises; HostError, also a ValueError where a user can fix it, for what goes wrong on hosts.
    """
    group: RoutedGroups | None = None
    reach_stores(secret)
    reach_gates(secret)
    try:
        links = registration.gather_hosts(listener, secret, pools, deadlines.startup_s, find_lost)
        group = RoutedGroups(
            {
                pool.name: RemoteGroup(
                    pool.layout, links[pool.name], deadlines.startup_s, deadlines.call_s, stopping.tell
                )
                for pool in pools
            }
        )
        stopping.watch(group)
        group.wait_until_built()
        stopping.has_begun, stopping.is_startup = True, not is_stoppable
        return run(group)
    finally:
        if group is not None:
            group.close()
