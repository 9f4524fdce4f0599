"""Which ranks of a job make which Megatron world: the actor's pool and, where the critic has ranks of its own, its."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_megatron.config.rules import megatron_sections
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.parallel.layout import Layout, layout_of

ACTOR, CRITIC = "actor", "critic"


@dataclass(frozen=True)
class PoolSpec:
    """A pool before any process runs: the ranks `first_rank` .. `first_rank` + layout.world_size - 1 of the job."""

    name: str  # in messages: "[critic dp0 pp0 tp1]"
    layout: Layout
    first_rank: int

    @property
    def end(self) -> int:
        """The rank after its last one."""
        return self.first_rank + self.layout.world_size

    def __str__(self) -> str:
        """ "critic tp2 pp1 dp1 on 2 ranks"."""
        count = self.layout.world_size
        return f"{self.name} {self.layout} on {count} rank{'s' if count > 1 else ''}"


def pools_of(config: RunConfig) -> tuple[PoolSpec, ...]:
    """The actor's pool on the first ranks; then the critic's, where it has one. Raises ValueError for a bad layout."""
    pools: list[PoolSpec] = []
    for section, megatron, num_ranks in megatron_sections(config):
        name = section.partition(".")[0]
        pools.append(PoolSpec(name, layout_of(megatron, num_ranks), pools[-1].end if pools else 0))
    return tuple(pools)


def pool_of_rank(pools: Sequence[PoolSpec], rank: int) -> PoolSpec:
    """`rank`: of the job."""
    return next(pool for pool in pools if pool.first_rank <= rank < pool.end)


def pool_of_role(names: Sequence[str], role: str) -> str:
    """Of a job's pools the one that has the role: that of its name, or the first."""
    return role if role in names else names[0]
