"""Recorded steps trained in a world that is up already: controller and host on every rank, in lockstep."""

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
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.plan import take
from rlhf_megatron.parallel.world import World
from rlhf_megatron.recovery.recorder import Recorder
from rlhf_megatron.runtime import roles
from rlhf_megatron.runtime.dispatch import join, plan_call
from rlhf_megatron.runtime.pool import ACTOR
from rlhf_megatron.runtime.proxies import Workers
from rlhf_megatron.scheduler.parts import load_parts
from rlhf_megatron.sync.weight_sync import Sync


@dataclass(frozen=True)
class Trained:
    """What a rank saw of one run."""

    metrics: list[dict[str, float]]  # one a step
    moved: dict[str, float]  # role -> largest change of a parameter of this rank


class LockstepGroup:
    """A WorkerGroup of one replica for a controller that runs on each of its ranks: all make the same calls."""

    def __init__(self, world: World, built: dict[str, Any]) -> None:
        assert world.layout.dp == 1
        self.layout, self.built, self.world = world.layout, built, world
        self.layouts = {ACTOR: self.layout}

    def scatter(self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any) -> Future[Any]:
        plans = plan_call(batch, self.layout, token_budget)
        role, _, name = method.partition(".")
        found = getattr(self.built[role], name)(batch=take(batch, plans[0]), plan=plans[0], **arguments)
        held = [found if self.world.is_leader else None]
        dist.broadcast_object_list(held, src=self.layout.leader(0))
        future: Future[Any] = Future()
        future.set_result(join(method, held, plans, batch.offsets))
        return future

    def broadcast(self, method: str, **arguments: Any) -> Future[list[Any]]:
        raise AssertionError(f"{method}: nothing was to be skipped")


def train_recorded(world: World, config: RunConfig, record: Path, num_steps: int) -> Trained:
    """Steps 1 .. `num_steps` of a record, from the stages of a replay."""
    with patch.object(roles, "create_world", lambda *_, **__: world):
        built: Any = roles.RoleBuilder(config)(SimpleNamespace(name=ACTOR, layout=world.layout))  # type: ignore[arg-type]
    group: Any = LockstepGroup(world, built)
    trained = {role: built[role] for role in ("actor", "critic") if role in built}
    before = {role: copies(model) for role, model in trained.items()}
    stages = replay_stages(config, Workers(group), load_parts(config), Recorder(record), Sync(version=1))
    metrics = []
    for step in range(1, num_steps + 1):
        scored = stages.score(step, stages.generate(step, stages.next_prompts(step)))
        train = stages.advantages(step, stages.annotate(step, scored))
        metrics.append(dict(stages.update(step, train)[1]))
    moved = {
        role: max((new - old).abs().max().item() for new, old in zip(copies(model), before[role], strict=True))
        for role, model in trained.items()
    }
    return Trained(metrics, moved)


def copies(model: Any) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in model.backend.chunks for parameter in chunk.parameters()]


def train_all(world: World, configs: dict[str, RunConfig], record: str, num_steps: int) -> dict[str, Trained]:
    """What became of each, by name."""
    return {name: train_recorded(world, config, Path(record), num_steps) for name, config in configs.items()}
