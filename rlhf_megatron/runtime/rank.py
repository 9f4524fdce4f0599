"""The life of a host once it knows its place, the same under every launcher with processes."""

from __future__ import annotations

import faulthandler
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from rlhf_megatron.runtime import registration
from rlhf_megatron.runtime.controller import Deadlines
from rlhf_megatron.runtime.hang import DUMP_SIGNAL
from rlhf_megatron.runtime.host import Activity, BuildRoles
from rlhf_megatron.runtime.pool import Pool, PoolSpec, join_pool, where
from rlhf_megatron.runtime.processes import redirect_output
from rlhf_megatron.runtime.route_store import reach_stores
from rlhf_megatron.runtime.service import Service, serve
from rlhf_megatron.runtime.stopping import HostStop

logger = logging.getLogger(__name__)

COLLECTIVE_SLACK_S = 120.0  # a call's deadline comes before the deadline of the collective that it is stuck in


@dataclass(frozen=True)
class RankPlace:
    """One rank of a job."""

    rank: int  # of the job
    pool: PoolSpec

    @property
    def pool_rank(self) -> int:
        return self.rank - self.pool.first_rank

    @property
    def where(self) -> str:
        """ "[actor dp1 pp0 tp3]"."""
        return where(self.pool.name, self.pool.layout, self.pool_rank)


def run_rank(
    place: RankPlace,
    controller: tuple[str, int],
    secret: bytes,
    build_roles: BuildRoles,
    pool_store: Callable[[], dist.Store],
    log_dir: Path,
    deadlines: Deadlines,
    backend: str,
    stopping: HostStop,
    exit_code: Callable[[], int],
) -> bool:
    """Register with the controller, which listens at that host and port, and serve until told to leave.

    From now on this process writes to log_dir/rank<N>.log. `pool_store`: shared by the ranks of the pool and by nothing
    else. `exit_code`: of this process, where its main thread does not come back. Returns False when the controller
    cannot be reached. On the main thread.
    """
    console = redirect_output(log_dir / f"rank{place.rank}.log")
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {place.where} %(levelname)s %(name)s: %(message)s", force=True
    )
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL)
    try:
        channel = registration.register_host(*controller, secret, place.pool_rank, place.pool.name, deadlines.startup_s)
    except ConnectionError as error:
        logger.exception("cannot reach the controller")
        os.write(console, f"{place.where} cannot reach the controller: {error}\n".encode())
        return False
    reach_stores(secret)
    activity = Activity(place.where)
    service = Service(channel, activity, exit_code)
    stopping.send = service.tell
    store = pool_store()
    timeout_s = deadlines.call_s + COLLECTIVE_SLACK_S

    def join() -> Pool:
        return join_pool(place.pool.name, place.pool.layout, place.pool_rank, store, backend, timeout_s)

    def build(joined: Pool) -> Mapping[str, object]:
        roles = build_roles(joined)
        stopping.is_startup = False
        return roles

    serve(service, activity, join, build)
    return True
