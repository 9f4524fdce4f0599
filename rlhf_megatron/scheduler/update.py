"""The update of a step: epochs x mini-batches of the actor and of the critic, one optimizer step each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.scheduler.mini_batches import mini_batches, value_mini_batches
from rlhf_megatron.workers.contract import UpdateResult

CALLS_IN_FLIGHT = 2  # of a role: one that runs and one that waits, so that a pool is never idle


@dataclass(frozen=True)
class RoleUpdate:
    """What one role trains on in a step."""

    role: str  # "actor" | "critic"
    num_epochs: int
    token_budget: int
    arguments: dict[str, Any]  # of its `update`, beside batch and plan
    mini_batches: Iterator[TokenBatch]  # of all epochs


def update(group: WorkerGroup, config: RunConfig, step: int, batch: TrainBatch) -> dict[str, float]:
    """Trains on a step's batch; returns metrics averaged over the optimizer steps of each role.

    There is a critic where the batch has values. In the first `trainer.critic_warmup` steps it learns alone.
    """
    roles = [critic_update(config, step, batch)] if batch.values is not None else []
    if trains_actor(config, step):
        roles.append(actor_update(config, step, batch))
    metrics = {"actor/num_epochs": 0.0, "actor/num_optimizer_steps": 0.0, "actor/num_skipped_steps": 0.0}
    for role, results in zip(roles, run_updates(group, roles), strict=True):
        metrics |= update_metrics(role, results)
    return metrics


def trains_actor(config: RunConfig, step: int) -> bool:
    """False in the steps of the critic's warm-up. Steps count from 1."""
    return step > config.trainer.critic_warmup


def actor_update(config: RunConfig, step: int, batch: TrainBatch) -> RoleUpdate:
    actor = config.actor
    return RoleUpdate(
        "actor",
        actor.ppo_epochs,
        actor.ppo_max_token_len_per_gpu,
        {"temperature": config.rollout.temperature, "loss": "policy"},
        (
            mini_batch
            for epoch in range(actor.ppo_epochs)
            for mini_batch in mini_batches(
                batch, actor.mini_batch_size, actor.loss_agg_mode, actor.shuffle, config.trainer.seed, step, epoch
            )
        ),
    )


def critic_update(config: RunConfig, step: int, batch: TrainBatch) -> RoleUpdate:
    """What `critic` leaves null is as in `actor`, the order of samples always."""
    actor, critic = config.actor, config.critic
    num_epochs = critic.ppo_epochs or actor.ppo_epochs
    size, mode = critic.mini_batch_size or actor.mini_batch_size, critic.loss_agg_mode or actor.loss_agg_mode
    return RoleUpdate(
        "critic",
        num_epochs,
        critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        {},
        (
            mini_batch
            for epoch in range(num_epochs)
            for mini_batch in value_mini_batches(batch, size, mode, actor.shuffle, config.trainer.seed, step, epoch)
        ),
    )


def run_updates(group: WorkerGroup, roles: Sequence[RoleUpdate]) -> list[list[UpdateResult]]:
    """The results of each role's mini-batches, in order.

    Roles take turns, one mini-batch each, as long as they have any: that is the order in which one pool runs them.
    Pools of their own work at the same time. A role's next mini-batch goes out when its last but one is done.
    """
    results: list[list[UpdateResult]] = [[] for _ in roles]
    waiting: list[deque[Future[UpdateResult]]] = [deque() for _ in roles]
    for turn in zip_longest(*(role.mini_batches for role in roles)):
        for i, mini_batch in enumerate(turn):
            if mini_batch is None:
                continue
            if len(waiting[i]) == CALLS_IN_FLIGHT:
                results[i].append(waiting[i].popleft().result())
            role = roles[i]
            waiting[i].append(
                group.scatter(f"{role.role}.update", mini_batch, token_budget=role.token_budget, **role.arguments)
            )
    for i, futures in enumerate(waiting):
        results[i] += [future.result() for future in futures]
    return results


def update_metrics(role: RoleUpdate, results: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over the optimizer steps; counts and the last learning rate under the role's name."""
    count = len(results)
    return {
        **{name: sum(result.sums[name] for result in results) / count for name in results[0].sums},
        f"{role.role}/grad_norm": sum(result.grad_norm for result in results) / count,
        f"{role.role}/lr": results[-1].lr,
        f"{role.role}/num_optimizer_steps": float(count),
        f"{role.role}/num_skipped_steps": float(sum(result.is_skipped for result in results)),
        f"{role.role}/num_epochs": float(role.num_epochs),
    }
