"""Actors whose routing is replayed, on the ranks of a layout; what parity's own job
does, with routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from benchmarks.parity.cases import Cut, Recipe, Role
from benchmarks.parity.sharded import RankResult, _run_cut, train_batch
from benchmarks.parity.subjects import ActorSubject, StateSource
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.data.batch import TokenBatch, TokenLogProbs, TrainBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan, take_replica_shard
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call

RECORD_BUDGET = 200  # tokens of a micro-batch when routes are recorded: others than in any cut


def write_routes(directory: Path, routes_TLK: Tensor, offsets: Tensor) -> tuple[str, ...]:
    """A file a sample, as engines write them; samples whose tokens have no route get none."""
    names = []
    for sample, (start, stop) in enumerate(
        zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
    ):
        ids = routes_TLK[start : stop - 1]
        ids = ids[(ids >= 0).flatten(1).all(1)]  # the first so many
        path = directory / f"sample{sample}.npy"
        if len(ids) and dist.get_rank() == 0:
            np.save(path, ids.flatten(1).numpy().astype(np.uint8))
        names.append(str(path) if len(ids) else "")
    dist.barrier()
    return tuple(names)


def told_by_engine(
    world: World,
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
    cuts: Sequence[Cut],
    recipe: Recipe,
    megatron: MegatronConfig,
    role: Role,
    directory: Path,
    planted: int = 0,
) -> list[RankResult]:
    """R3: every pass meets batch["routes"]. `planted`: each token gets the route of the token so
    many before it.
    """
    columns = dict(batch)
    routes = columns.pop("routes")
    names = write_routes(directory, routes.roll(planted, 0), batch["offsets"])
    found = []
    for cut in cuts:
        subject = ActorSubject(cut, recipe, megatron, "r3")
        make = partial(subject.make, hf_config, state, world)
        found.append(
            _run_cut(world, subject, make, replace(train_batch(columns), routes=names), None)
        )
    return found


@dataclass(frozen=True)
class Recorded(ActorSubject):
    """R2: the routes of `before` are recorded, then the actor becomes another model; log-probs are
    not asked for the samples by name, so that they record nothing.
    """

    before: dict[str, Tensor] = field(default_factory=dict)
    batch: TrainBatch | None = None

    def make(self, hf_config: dict[str, Any], state: dict[str, Tensor], world: World) -> Any:
        assert self.batch is not None
        worker = super().make(hf_config, self.before, world)
        plan = plan_scattered_call(self.batch, world.layout, RECORD_BUDGET)[world.coordinates.dp]
        worker.log_probs(take_replica_shard(self.batch, plan), plan, self.recipe.temperature)
        worker.replace_weights(StateSource(state))
        return worker

    def columns(self, worker: Any, batch: TokenBatch, plan: ReplicaPlan) -> TokenLogProbs | None:
        tokens = TokenBatch(batch.offsets, batch.token_ids, batch.response_mask)
        found: TokenLogProbs | None = worker.log_probs(
            tokens, plan, self.recipe.temperature, with_entropy=True
        )
        return found


def recorded_before(
    world: World,
    hf_config: dict[str, Any],
    state: dict[str, Tensor],
    batch: dict[str, Tensor],
    cuts: Sequence[Cut],
    recipe: Recipe,
    megatron: MegatronConfig,
    role: Role,
    before: dict[str, Tensor],
) -> list[RankResult]:
    """R2: updates of `state` meet what the routers of `before` picked."""
    columns = {name: column for name, column in batch.items() if name != "routes"}
    whole = train_batch(columns)
    found = []
    for cut in cuts:
        subject = Recorded(cut, recipe, megatron, "r2", before, whole)
        found.append(
            _run_cut(world, subject, partial(subject.make, hf_config, state, world), whole, None)
        )
    return found
