"""A pool on one rank: its layout, its torch world, and the broadcast inside a replica.

Also: Which ranks of a job make which Megatron world: the actor's pool and, where the critic, a
reward model or the reference has ranks of its own, theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rlhf_megatron.config.rules.run_rules import list_pool_layouts
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.ranks.parallel.gloo_device import share_gloo_device
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout

ACTOR, CRITIC, REWARD_MODEL, REFERENCE = POOLS = "actor", "critic", "reward_model", "reference"
ENGINES = "engines"  # no torch world: the keepers of engines on other machines


@dataclass(frozen=True)
class PoolMember:
    """This rank's membership of a pool, which `build_roles` gets. The default process group exists;
    the roles make Megatron's groups.
    """

    pool_name: str
    layout: ParallelLayout
    rank: int
    replica_group: dist.ProcessGroup  # gloo, the ranks of this replica

    @property
    def rank_label(self) -> str:
        """Return the rank's coordinates as messages name them: "[actor dp1 pp0 tp3]"."""
        return format_rank_label(self.pool_name, self.layout, self.rank)

    @property
    def leader_rank(self) -> int:
        """Return the rank in the pool that receives and returns the data of this rank's replica."""
        return self.layout.get_leader_rank(self.layout.locate_rank(self.rank).dp)

    @property
    def is_replica_leader(self) -> bool:
        """Return whether this rank receives and returns its replica's data. Each replica has one
        leader.
        """
        return self.rank == self.leader_rank

    def broadcast_in_replica(self, data: bytes | None) -> bytes | bytearray:
        """Return the leader's `data` on all ranks of the replica. All of them must call it; the
        leader passes the bytes, the other ranks None.
        """
        assert (data is not None) == self.is_replica_leader, (
            f"{self.rank_label}: the leader, and only it, has the data"
        )
        if data is not None and self.replica_group.size() == 1:
            return data
        size = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(size, src=self.leader_rank, group=self.replica_group)
        buffer = bytearray(int(size)) if data is None else bytearray(data)
        dist.broadcast(
            torch.frombuffer(buffer, dtype=torch.uint8),
            src=self.leader_rank,
            group=self.replica_group,
        )
        return buffer


def format_rank_label(pool_name: str, layout: ParallelLayout, rank: int) -> str:
    """Return a rank's coordinates as messages name them: "[actor dp1 pp0 tp3]". `rank` counts in
    the pool.
    """
    return f"[{pool_name} {layout.locate_rank(rank)}]"


def join_rank_pool(
    pool_name: str,
    layout: ParallelLayout,
    rank: int,
    store: dist.Store,
    backend: str,
    timeout_s: float,
) -> PoolMember:
    """Initialise torch's default process group and a gloo group for each replica of a pool, and
    return this rank's membership. All ranks of the pool must call it; no other process may use
    `store`.

    `backend` is "gloo", or "cpu:gloo,cuda:nccl" on GPUs. `timeout_s` is the time limit of a
    collective. `rank` counts in the pool.
    """
    timeout = timedelta(seconds=timeout_s)
    share_gloo_device()
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=layout.world_size, timeout=timeout
    )
    groups = [
        dist.new_group(list(layout.list_replica_ranks(dp)), timeout=timeout, backend="gloo")
        for dp in range(layout.dp)
    ]
    return PoolMember(pool_name, layout, rank, groups[layout.locate_rank(rank).dp])


@dataclass(frozen=True)
class PoolSpec:
    """A pool before any process runs: the ranks `first_rank` .. `first_rank` +
    layout.world_size - 1 of the job.
    """

    name: str  # in messages: "[critic dp0 pp0 tp1]"
    layout: ParallelLayout
    first_rank: int

    @property
    def end_rank(self) -> int:
        """Return the job's rank after the last rank of the pool."""
        return self.first_rank + self.layout.world_size

    def format_rank_label(self, rank: int) -> str:
        """Return the coordinates of a rank of the pool as messages name them. `rank` counts in the
        pool.
        """
        return format_rank_label(self.name, self.layout, rank)

    def __str__(self) -> str:
        """Return the pool as messages name it: "critic tp2 pp1 dp1 on 2 ranks"."""
        count = self.layout.world_size
        return f"{self.name} {self.layout} on {count} rank{'s' if count > 1 else ''}"


def build_pool_specs(config: RunConfig) -> tuple[PoolSpec, ...]:
    """Return the pools of the job in the order of their ranks: the actor's, then the critic's, the
    reward model's and the reference's, where these have ranks of their own. Raise ValueError for a
    bad layout.
    """
    pools: list[PoolSpec] = []
    for section, megatron, num_ranks in list_pool_layouts(config):
        name = section.partition(".")[0]
        pools.append(
            PoolSpec(
                name, make_parallel_layout(megatron, num_ranks), pools[-1].end_rank if pools else 0
            )
        )
    return tuple(pools)


def find_pool_of_rank(pools: Sequence[PoolSpec], rank: int) -> PoolSpec:
    """Return the pool that a rank of the job belongs to."""
    return next(pool for pool in pools if pool.first_rank <= rank < pool.end_rank)


def find_pool_of_role(pool_names: Sequence[str], role: str) -> str:
    """Return the name of the pool that has the role: the pool of the role's name, or the first
    pool.
    """
    return role if role in pool_names else pool_names[0]
