"""The controller's typed view of the hosts: one proxy a role, whose methods return futures.

    result = workers.actor.update(mini_batch, token_budget, temperature=1.0).result()  # an UpdateResult
    reports = workers.critic.memory_report().result()  # one a rank of the critic's pool

A proxy's methods are made from the signatures of what stands on the ranks (`workers.contract` and the protocols here),
so that mypy checks every call. All arguments but the batch and the token budget are given by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlhf_megatron.checkpoint.manifest import SaveResult
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.sender import SendReport
from rlhf_megatron.rollout.engine import EngineAddress, WeightTransport
from rlhf_megatron.runtime.pool import pool_of_role
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.workers.contract import (
    ForwardWorker,
    ScoreWorker,
    TeachingWorker,
    TrainedWorker,
    TrainWorker,
    ValueWorker,
    Worker,
)

Arguments = ParamSpec("Arguments")
Batch = TypeVar("Batch", bound=TokenBatch)
Result = TypeVar("Result")


class RngWorker(Protocol):
    """A worker that keeps the random states of its ranks."""

    def save_rng(self, *, directory: Path) -> SaveResult:
        """This rank's random states, as a part of a checkpoint. What goes wrong is in the result."""

    def load_rng(self, *, directory: Path) -> None:
        """Undo `save_rng`. Raises ValueError."""


class HostWorker(RngWorker, Protocol):
    """Methods that are about the rank and not about one model."""

    def send_weights(
        self,
        *,
        version: int,
        engines: list[EngineAddress],
        transfer_dir: Path,
        bucket_bytes: int,
        dtype: str,
        transport: WeightTransport = "tensor",
        ranks_per_machine: int | None = None,
    ) -> SendReport:
        """Send the actor's weights to all engines, as `deliver_weights` says. Every rank takes part.

        An engine that fails stands in the report and ends nothing here.
        """

    def save_hf(self, *, directory: Path) -> None:
        """Write the actor in Hugging Face layout, with configuration and tokenizer of the model that it was."""

    def refresh_reference(self) -> None:
        """Make the reference the actor as it is now (after a warm-up)."""

    def save_reference(self, *, directory: Path) -> SaveResult:
        """Write the reference in Hugging Face layout, as a part of a checkpoint. What goes wrong is in the result."""

    def load_reference(self, *, directory: Path) -> None:
        """Undo `save_reference`."""


class CriticWorker(ValueWorker, RngWorker, Protocol):
    """The critic, and how it is written."""

    def save_hf(self, *, directory: Path) -> None:
        """Write its weights in Hugging Face layout, as a token classifier of one label. critic.path can name it."""


class Scattered(Generic[Batch, Arguments, Result]):
    """A proxy's method that splits its batch over the replicas: (batch, token budget, **arguments) -> result."""

    def __init__(self, method: Callable[Concatenate[Any, Batch, ReplicaPlan, Arguments], Result | None]) -> None:
        self._name = method.__name__

    def __get__(self, proxy: Proxy, _: type) -> Callable[Concatenate[Batch, int, Arguments], Future[Result]]:
        return partial(proxy._scatter, self._name)


class OnAllRanks(Generic[Arguments, Result]):
    """A proxy's method that is called on every rank of the role's pool: one result a rank, in rank order."""

    def __init__(self, method: Callable[Concatenate[Any, Arguments], Result]) -> None:
        self._name = method.__name__

    def __get__(self, proxy: Proxy, _: type) -> Callable[Arguments, Future[list[Result]]]:
        return partial(proxy._broadcast, self._name)


Watch = Callable[..., None]
"""(pool, method, start, future, **facts): told of every call when it is made. `start`: as time.monotonic counts."""


class Proxy:
    """A role on all ranks of its pool. A call of a role that the run does not have fails with LookupError."""

    def __init__(self, group: WorkerGroup, role: str, watch: Watch | None = None) -> None:
        self.role = role
        self._group = group
        self._watch = watch

    @property
    def pool(self) -> str:
        """The name of the pool whose ranks have the role."""
        return pool_of_role(list(self._group.layouts), self.role)

    @property
    def layout(self) -> Layout:
        """The layout of that pool."""
        return self._group.layouts[self.pool]

    def _scatter(self, name: str, batch: TokenBatch, token_budget: int, **arguments: Any) -> Future[Any]:
        method, start = f"{self.role}.{name}", time.monotonic()
        future = self._group.scatter(method, batch, token_budget=token_budget, **arguments)
        if self._watch is not None:
            self._watch(self.pool, method, start, future, num_samples=len(batch), num_tokens=batch.num_tokens)
        return future

    def _broadcast(self, name: str, **arguments: Any) -> Future[list[Any]]:
        method, start = f"{self.role}.{name}", time.monotonic()
        future = self._group.broadcast(method, **arguments)
        if self._watch is not None:
            self._watch(self.pool, method, start, future)
        return future


class TrainedProxy(Proxy):
    """A model that learns: the actor or the critic."""

    memory_report = OnAllRanks(Worker.memory_report)
    offload = OnAllRanks(TrainedWorker.offload)
    onload = OnAllRanks(TrainedWorker.onload)
    take_skips = OnAllRanks(TrainedWorker.take_skips)
    check_replicas = OnAllRanks(TrainedWorker.check_replicas)
    reset_optimizer = OnAllRanks(TrainedWorker.reset_optimizer)
    save_weights = OnAllRanks(TrainedWorker.save_weights)
    load_weights = OnAllRanks(TrainedWorker.load_weights)
    num_save_bytes = OnAllRanks(TrainedWorker.num_save_bytes)
    begin_save = OnAllRanks(TrainedWorker.begin_save)
    is_save_done = OnAllRanks(TrainedWorker.is_save_done)
    finish_save = OnAllRanks(TrainedWorker.finish_save)
    load = OnAllRanks(TrainedWorker.load)


class ActorProxy(TrainedProxy):
    log_probs = Scattered(TrainWorker.log_probs)
    update = Scattered(TrainWorker.update)
    look_again = Scattered(TrainWorker.look_again)
    head_report = OnAllRanks(TrainWorker.head_report)


class CriticProxy(TrainedProxy):
    values = Scattered(ValueWorker.values)
    update = Scattered(ValueWorker.update)
    look_again = Scattered(ValueWorker.look_again)
    load_hf = OnAllRanks(ValueWorker.load_hf)
    save_hf = OnAllRanks(CriticWorker.save_hf)
    save_rng = OnAllRanks(CriticWorker.save_rng)
    load_rng = OnAllRanks(CriticWorker.load_rng)


class ReferenceProxy(Proxy):
    log_probs = Scattered(ForwardWorker.log_probs)
    top_log_probs = Scattered(TeachingWorker.top_log_probs)
    head_report = OnAllRanks(ForwardWorker.head_report)
    memory_report = OnAllRanks(Worker.memory_report)


class RewardModelProxy(Proxy):
    values = Scattered(ScoreWorker.values)
    memory_report = OnAllRanks(Worker.memory_report)


class HostProxy(Proxy):
    """Rank by rank, the ranks of the actor's pool."""

    send_weights = OnAllRanks(HostWorker.send_weights)
    save_hf = OnAllRanks(HostWorker.save_hf)
    refresh_reference = OnAllRanks(HostWorker.refresh_reference)
    save_reference = OnAllRanks(HostWorker.save_reference)
    load_reference = OnAllRanks(HostWorker.load_reference)
    save_rng = OnAllRanks(HostWorker.save_rng)
    load_rng = OnAllRanks(HostWorker.load_rng)


class Workers:
    """The proxies of all roles. `group` carries the calls and owns the hosts; `watch` is told of each call."""

    def __init__(self, group: WorkerGroup, watch: Watch | None = None) -> None:
        self.group = group
        self.actor = ActorProxy(group, "actor", watch)
        self.critic = CriticProxy(group, "critic", watch)
        self.learning_reward_model = CriticProxy(group, "actor", watch)  # of the job reward-model, in the actor's place
        self.reward_model = RewardModelProxy(group, "reward_model", watch)
        self.reference = ReferenceProxy(group, "reference", watch)
        self.host = HostProxy(group, "host", watch)

    def learning(self, has_critic: bool) -> list[TrainedProxy]:
        """Return the roles that are trained."""
        return [self.actor, self.critic] if has_critic else [self.actor]

    def of_pools(self) -> dict[str, TrainedProxy | RewardModelProxy | ReferenceProxy]:
        """Return, by pool, the role that it is named after."""
        by_name = {role.role: role for role in (self.actor, self.critic, self.reward_model, self.reference)}
        return {pool: by_name[pool] for pool in self.group.layouts}
