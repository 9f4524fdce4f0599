"""The controller's typed view of the hosts: one proxy a role, whose methods return futures.

    result = ranks.workers.actor.update(mini_batch, token_budget, temperature=1.0).result()
        # an UpdateResult
    reports = ranks.workers.critic.memory_report().result()  # one a rank of the critic's pool

A proxy's methods are made from the signatures of what stands on the ranks
(`ranks.workers.worker_protocols` and the protocols here), so that mypy checks every call. All
arguments but the batch and the token budget are given by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.resharding.weight_sender import SendReport
from rlhf_megatron.ranks.workers.worker_protocols import (
    ForwardWorker,
    ModelWorker,
    PolicyWorker,
    ScoreWorker,
    TeacherWorker,
    TrainedWorker,
    ValueWorker,
)
from rlhf_megatron.rollout.engine_interface import EngineAddress, WeightTransport
from rlhf_megatron.runtime.rank_pools import find_pool_of_role
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.weights.checkpoint_manifest import SaveResult
from rlhf_megatron.weights.parallel_layout import ParallelLayout

Arguments = ParamSpec("Arguments")
Batch = TypeVar("Batch", bound=TokenBatch)
Result = TypeVar("Result")


class RngWorker(Protocol):
    """A worker that keeps the random states of its ranks."""

    def save_rng(self, *, directory: Path) -> SaveResult:
        """Write this rank's random states, as a part of a checkpoint. The returned result holds the
        error of a failed write, which is not raised.
        """

    def load_rng(self, *, directory: Path) -> None:
        """Restore this rank's random states from a directory that `save_rng` wrote. Raise
        ValueError.
        """


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
        """Send the actor's weights to all engines, as `deliver_weights` describes. Every rank takes
        part.

        A failure of an engine is recorded in the report, and is not raised here.
        """

    def save_hf(self, *, directory: Path) -> None:
        """Write the actor in Hugging Face layout, with the configuration and the tokenizer files of
        the model directory.
        """

    def refresh_reference(self) -> None:
        """Copy the actor's present weights into the reference (after a warm-up), if there is a
        reference.
        """

    def save_reference(self, *, directory: Path) -> SaveResult:
        """Write the reference in Hugging Face layout, as a part of a checkpoint. The returned
        result holds the error of a failed write, which is not raised.
        """

    def load_reference(self, *, directory: Path) -> None:
        """Load the reference's weights from a directory that `save_reference` wrote."""


class CriticWorker(ValueWorker, RngWorker, Protocol):
    """The critic, and the ways to write it."""

    def save_hf(self, *, directory: Path) -> None:
        """Write the critic's weights in Hugging Face layout, as a token classifier of one label.
        critic.path can name the directory.
        """


class ScatteredMethod(Generic[Batch, Arguments, Result]):
    """A proxy's method that splits its batch over the replicas: (batch, token budget,
    **arguments) -> result.
    """

    def __init__(
        self, method: Callable[Concatenate[Any, Batch, ReplicaPlan, Arguments], Result | None]
    ) -> None:
        """Take the worker's method, of which only the name and the types are used."""
        self._method_name = method.__name__

    def __get__(
        self, proxy: RoleProxy, _: type
    ) -> Callable[Concatenate[Batch, int, Arguments], Future[Result]]:
        """Return the call (batch, token budget, **arguments) -> future, bound to the proxy."""
        return partial(proxy._scatter_call, self._method_name)


class BroadcastMethod(Generic[Arguments, Result]):
    """A proxy's method that is called on every rank of the role's pool: one result a rank,
    in rank order.
    """

    def __init__(self, method: Callable[Concatenate[Any, Arguments], Result]) -> None:
        """Take the worker's method, of which only the name and the types are used."""
        self._method_name = method.__name__

    def __get__(self, proxy: RoleProxy, _: type) -> Callable[Arguments, Future[list[Result]]]:
        """Return the call (**arguments) -> future of one result a rank, bound to the proxy."""
        return partial(proxy._broadcast_call, self._method_name)


Watch = Callable[..., None]
"""(pool, method, start, future, **facts): told of every call when it is made. `start`: as
time.monotonic counts.
"""


class RoleProxy:
    """A role on all ranks of its pool. A call of a role that the run does not have fails
    with LookupError.
    """

    def __init__(self, group: WorkerGroup, role: str, on_call: Watch | None = None) -> None:
        """Make the proxy of `role`, whose calls go through `group`. `on_call` is called for every
        call when the call is made.
        """
        self.role = role
        self._group = group
        self._on_call = on_call

    @property
    def pool_name(self) -> str:
        """Return the name of the pool whose ranks have the role."""
        return find_pool_of_role(list(self._group.layouts), self.role)

    @property
    def layout(self) -> ParallelLayout:
        """Return the parallel layout of the role's pool."""
        return self._group.layouts[self.pool_name]

    def _scatter_call(
        self, method_name: str, batch: TokenBatch, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        """Scatter the call over the replicas of the role's pool, report the call to `on_call`, and
        return the future of the joined result.
        """
        method = f"{self.role}.{method_name}"
        start = time.monotonic()
        future = self._group.scatter_call(method, batch, token_budget=token_budget, **arguments)
        if self._on_call is not None:
            self._on_call(
                self.pool_name,
                method,
                start,
                future,
                num_samples=len(batch),
                num_tokens=batch.num_tokens,
            )
        return future

    def _broadcast_call(self, method_name: str, **arguments: Any) -> Future[list[Any]]:
        """Call the method on every rank of the role's pool, report the call to `on_call`, and
        return the future of the results in rank order.
        """
        method = f"{self.role}.{method_name}"
        start = time.monotonic()
        future = self._group.broadcast_call(method, **arguments)
        if self._on_call is not None:
            self._on_call(self.pool_name, method, start, future)
        return future


class TrainedProxy(RoleProxy):
    """A model that learns: the actor or the critic."""

    memory_report = BroadcastMethod(ModelWorker.memory_report)
    offload = BroadcastMethod(TrainedWorker.offload)
    onload = BroadcastMethod(TrainedWorker.onload)
    take_skip_reports = BroadcastMethod(TrainedWorker.take_skip_reports)
    check_replicas = BroadcastMethod(TrainedWorker.check_replicas)
    reset_optimizer = BroadcastMethod(TrainedWorker.reset_optimizer)
    save_weights = BroadcastMethod(TrainedWorker.save_weights)
    load_weights = BroadcastMethod(TrainedWorker.load_weights)
    estimate_save_bytes = BroadcastMethod(TrainedWorker.estimate_save_bytes)
    begin_save = BroadcastMethod(TrainedWorker.begin_save)
    is_save_done = BroadcastMethod(TrainedWorker.is_save_done)
    finish_save = BroadcastMethod(TrainedWorker.finish_save)
    load = BroadcastMethod(TrainedWorker.load)


class ActorProxy(TrainedProxy):
    log_probs = ScatteredMethod(PolicyWorker.log_probs)
    update = ScatteredMethod(PolicyWorker.update)
    rerun_forward_backward = ScatteredMethod(PolicyWorker.rerun_forward_backward)
    head_report = BroadcastMethod(PolicyWorker.head_report)


class CriticProxy(TrainedProxy):
    values = ScatteredMethod(ValueWorker.values)
    update = ScatteredMethod(ValueWorker.update)
    rerun_forward_backward = ScatteredMethod(ValueWorker.rerun_forward_backward)
    load_hf = BroadcastMethod(ValueWorker.load_hf)
    save_hf = BroadcastMethod(CriticWorker.save_hf)
    save_rng = BroadcastMethod(CriticWorker.save_rng)
    load_rng = BroadcastMethod(CriticWorker.load_rng)


class ReferenceProxy(RoleProxy):
    log_probs = ScatteredMethod(ForwardWorker.log_probs)
    top_log_probs = ScatteredMethod(TeacherWorker.top_log_probs)
    head_report = BroadcastMethod(ForwardWorker.head_report)
    memory_report = BroadcastMethod(ModelWorker.memory_report)


class RewardModelProxy(RoleProxy):
    values = ScatteredMethod(ScoreWorker.values)
    memory_report = BroadcastMethod(ModelWorker.memory_report)


class HostProxy(RoleProxy):
    """The role "host", on the ranks of the actor's pool."""

    send_weights = BroadcastMethod(HostWorker.send_weights)
    save_hf = BroadcastMethod(HostWorker.save_hf)
    refresh_reference = BroadcastMethod(HostWorker.refresh_reference)
    save_reference = BroadcastMethod(HostWorker.save_reference)
    load_reference = BroadcastMethod(HostWorker.load_reference)
    save_rng = BroadcastMethod(HostWorker.save_rng)
    load_rng = BroadcastMethod(HostWorker.load_rng)


class RoleProxies:
    """The proxies of all roles. `group` carries the calls and owns the hosts; `on_call` is called
    for every call.
    """

    def __init__(self, group: WorkerGroup, on_call: Watch | None = None) -> None:
        """Make a proxy of every role, also of roles that the run does not have."""
        self.group = group
        self.actor = ActorProxy(group, "actor", on_call)
        self.critic = CriticProxy(group, "critic", on_call)
        # of the job reward-model, in the actor's place
        self.learning_reward_model = CriticProxy(group, "actor", on_call)
        self.reward_model = RewardModelProxy(group, "reward_model", on_call)
        self.reference = ReferenceProxy(group, "reference", on_call)
        self.host = HostProxy(group, "host", on_call)

    def list_trained_proxies(self, has_critic: bool) -> list[TrainedProxy]:
        """Return the proxies of the models that are trained: the actor, and the critic where
        `has_critic`.
        """
        return [self.actor, self.critic] if has_critic else [self.actor]

    def map_proxies_by_pool(self) -> dict[str, TrainedProxy | RewardModelProxy | ReferenceProxy]:
        """Return, by the name of each pool, the proxy of the role after which the pool is named."""
        by_name = {
            role.role: role for role in (self.actor, self.critic, self.reward_model, self.reference)
        }
        return {pool: by_name[pool] for pool in self.group.layouts}
