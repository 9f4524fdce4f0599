"""Recorded steps trained in a world that is up already: controller and host on every
rank, in lockstep.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from replay_tools import replay_stages
from torch import Tensor

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.scheduler.algorithm_setup import load_algorithm_setup
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import take_replica_shard
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.runtime import rank_roles
from rlhf_megatron.runtime.call_dispatch import join_replica_results, plan_scattered_call
from rlhf_megatron.runtime.rank_pools import ACTOR
from rlhf_megatron.runtime.role_proxies import RoleProxies


@dataclass(frozen=True)
class Trained:
    """What a rank saw of one run."""

    metrics: list[dict[str, float]]  # one a step
    moved: dict[str, float]  # role -> largest change of a parameter of this rank


class LockstepGroup:
    """A WorkerGroup of one replica for a controller that runs on each of its ranks: all make
    the same calls.
    """

    def __init__(self, world: World, built: dict[str, Any]) -> None:
        assert world.layout.dp == 1
        self.layout = world.layout
        self.built = built
        self.world = world
        self.layouts = {ACTOR: self.layout}

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        plans = plan_scattered_call(batch, self.layout, token_budget)
        role, _, name = method.partition(".")
        found = getattr(self.built[role], name)(
            batch=take_replica_shard(batch, plans[0]), plan=plans[0], **arguments
        )
        held = [found if self.world.is_leader else None]
        dist.broadcast_object_list(held, src=self.layout.get_leader_rank(0))
        future: Future[Any] = Future()
        future.set_result(join_replica_results(method, held, plans, batch.offsets))
        return future

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        raise AssertionError(f"{method}: nothing was to be skipped")


def train_recorded(world: World, config: RunConfig, record: Path, num_steps: int) -> Trained:
    """Steps 1 .. `num_steps` of a record, from the stages of a replay."""
    with patch.object(rank_roles, "create_world", lambda *_, **__: world):
        built: Any = rank_roles.RoleBuilder(config)(
            SimpleNamespace(name=ACTOR, layout=world.layout)
        )  # type: ignore[arg-type]
    group: Any = LockstepGroup(world, built)
    trained = {role: built[role] for role in ("actor", "critic") if role in built}
    before = {role: copies(model) for role, model in trained.items()}
    stages = replay_stages(
        config,
        RoleProxies(group),
        load_algorithm_setup(config),
        RolloutRecorder(record),
        PolicySync(policy_version=1),
    )
    metrics = []
    for step in range(1, num_steps + 1):
        scored = stages.score_rollout(
            step, stages.generate_rollout(step, stages.draw_prompts(step))
        )
        train = stages.compute_advantages(step, stages.annotate_step(step, scored))
        metrics.append(dict(stages.update_models(step, train)[1]))
    moved = {
        role: max(
            (new - old).abs().max().item()
            for new, old in zip(copies(model), before[role], strict=True)
        )
        for role, model in trained.items()
    }
    return Trained(metrics, moved)


def copies(model: Any) -> list[Tensor]:
    return [
        parameter.detach().clone()
        for chunk in model.backend.chunks
        for parameter in chunk.parameters()
    ]


def train_all(
    world: World, configs: dict[str, RunConfig], record: str, num_steps: int
) -> dict[str, Trained]:
    """What became of each, by name."""
    return {
        name: train_recorded(world, config, Path(record), num_steps)
        for name, config in configs.items()
    }
