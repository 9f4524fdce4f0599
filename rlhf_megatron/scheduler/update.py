"""The update of a step: epochs x mini-batches of the actor and of the critic, one optimizer step each."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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

    num_epochs: int
    token_budget: int
    arguments: dict[str, Any]  # of its `update`, beside batch and plan
    mini_batches: Iterator[TokenBatch]  # of all epochs


def actor_update(config: RunConfig, step: int, batch: TrainBatch) -> RoleUpdate:
    actor = config.actor
    return RoleUpdate(
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
        num_epochs,
        critic.ppo_max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu,
        {},
        (
            mini_batch
            for epoch in range(num_epochs)
            for mini_batch in value_mini_batches(batch, size, mode, actor.shuffle, config.trainer.seed, step, epoch)
        ),
    )


def run_updates(group: WorkerGroup, updates: Mapping[str, RoleUpdate]) -> dict[str, float]:
    """Trains each role, `updates` by method ("actor.update"). Returns metrics averaged over its optimizer steps.

    Roles take turns, one mini-batch each, as long as they have any: that is the order in which one pool runs them.
    Pools of their own work at the same time. A role's next mini-batch goes out when its last but one is done.
    """
    results: dict[str, list[UpdateResult]] = {method: [] for method in updates}
    waiting: dict[str, deque[Future[UpdateResult]]] = {method: deque() for method in updates}
    for turn in zip_longest(*(update.mini_batches for update in updates.values())):
        for (method, update), mini_batch in zip(updates.items(), turn, strict=True):
            if mini_batch is None:
                continue
            if len(waiting[method]) == CALLS_IN_FLIGHT:
                results[method].append(waiting[method].popleft().result())
            call = group.scatter(method, mini_batch, token_budget=update.token_budget, **update.arguments)
            waiting[method].append(call)
    metrics = {"actor/num_epochs": 0.0, "actor/num_optimizer_steps": 0.0, "actor/num_skipped_steps": 0.0}
    for method, update in updates.items():
        results[method] += [future.result() for future in waiting[method]]
        metrics |= update_metrics(method.partition(".")[0], update.num_epochs, results[method])
    return metrics


def update_metrics(role: str, num_epochs: int, results: Sequence[UpdateResult]) -> dict[str, float]:
    """Means over the optimizer steps; counts and the last learning rate under the role's name."""
    count = len(results)
    return {
        **{name: sum(result.sums[name] for result in results) / count for name in results[0].sums},
        f"{role}/grad_norm": sum(result.grad_norm for result in results) / count,
        f"{role}/lr": results[-1].lr,
        f"{role}/num_optimizer_steps": float(count),
        f"{role}/num_skipped_steps": float(sum(result.is_skipped for result in results)),
        f"{role}/num_epochs": float(num_epochs),
    }
