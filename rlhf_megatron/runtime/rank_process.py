"""The life of a host once it knows its place, the same under every launcher with processes."""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rlhf_megatron.runtime import host_registration
from rlhf_megatron.runtime.hang_report import DUMP_SIGNAL
from rlhf_megatron.runtime.host_control import RunDeadlines
from rlhf_megatron.runtime.host_service import HostService, serve_role_calls
from rlhf_megatron.runtime.process_control import redirect_output
from rlhf_megatron.runtime.rank_pools import PoolMember, PoolSpec, format_rank_label, join_rank_pool
from rlhf_megatron.runtime.role_host import BuildRoles, MainThreadActivity
from rlhf_megatron.runtime.route_store import enable_route_stores
from rlhf_megatron.runtime.stop_signals import HostStopHandler

logger = logging.getLogger(__name__)

# a call's deadline comes before the deadline of the collective that it is stuck in
COLLECTIVE_SLACK_S = 120.0


@dataclass(frozen=True)
class JobRank:
    """One rank of a job."""

    rank: int  # of the job
    pool: PoolSpec

    @property
    def pool_rank(self) -> int:
        """Return the rank within the pool."""
        return self.rank - self.pool.first_rank

    @property
    def rank_label(self) -> str:
        """Return the rank's coordinates as messages name them: "[actor dp1 pp0 tp3]"."""
        return format_rank_label(self.pool.name, self.pool.layout, self.pool_rank)


def run_rank_process(
    job_rank: JobRank,
    controller_address: tuple[str, int],
    secret: bytes,
    build_roles: BuildRoles,
    open_pool_store: Callable[[], dist.Store],
    log_dir: Path,
    deadlines: RunDeadlines,
    backend: str,
    stop_handler: HostStopHandler,
    wait_for_exit_code: Callable[[], int],
) -> bool:
    """Register with the controller, which listens at `controller_address`, and serve until the
    controller tells this rank to leave. Return False where the controller cannot be reached. Must
    be called on the main thread.

    From now on this process writes to log_dir/rank<N>.log. `open_pool_store` returns the store that
    only the ranks of the pool share. `wait_for_exit_code` returns the exit code for a process whose
    main thread does not come back.
    """
    console = redirect_output(log_dir / f"rank{job_rank.rank}.log")
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {job_rank.rank_label} %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    try:
        host, port = controller_address
        channel = host_registration.register_host(
            host,
            port,
            secret,
            job_rank.pool_rank,
            job_rank.pool.name,
            deadlines.startup_s,
        )
    except ConnectionError as error:
        logger.exception("cannot reach the controller")
        os.write(console, f"{job_rank.rank_label} cannot reach the controller: {error}\n".encode())
        return False
    enable_route_stores(secret)
    activity = MainThreadActivity(job_rank.rank_label)
    service = HostService(channel, activity, wait_for_exit_code)
    stop_handler.send_notice = service.send_signal_notice
    store = open_pool_store()
    timeout_s = deadlines.call_s + COLLECTIVE_SLACK_S

    def join_pool_of_rank() -> PoolMember:
        """Join the torch world of this rank's pool."""
        return join_rank_pool(
            job_rank.pool.name, job_rank.pool.layout, job_rank.pool_rank, store, backend, timeout_s
        )

    def build_rank_roles(pool: PoolMember) -> Mapping[str, object]:
        """Build the roles, and record that the start is over for signals."""
        roles = build_roles(pool)
        stop_handler.is_startup = False
        return roles

    serve_role_calls(service, activity, join_pool_of_rank, build_rank_roles)
    return True
