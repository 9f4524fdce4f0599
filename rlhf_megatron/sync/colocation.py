"""`rollout.colocated`: trainer and engines take turns with the same devices. Who holds what, and how it changes hands.

    trainer's turn   parameters, gradients, optimizer state; the engines hold nothing
    before_stream    gradients and optimizer state (of the critic: all) go, the engines' weights come
    after_stream     the parameters go, the engines' key-value caches come
    engines' turn    the trainer holds nothing: all that it keeps is in host memory
    to_trainer       the engines' weights and caches go, all of the trainer comes

What an engine has released comes back without contents. So the engines' turn always begins with a stream of weights:
of a new version, or of the same one again where the policy stayed (after a checkpoint, or a step that trained the
critic only). A reference takes no part: it is on the device only while it is asked (`reference.param_offload`).

An engine that is started again in the engines' turn needs weights, too: then the caches alone go and come back, and
the trainer's parameters come and go; what the other engines were generating goes on afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal, Protocol

from rlhf_megatron import faults
from rlhf_megatron.config.rules.run import has_critic, needs_reference
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.rollout.engine import Engine, EngineError
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.rollout.local.client import LocalEngine
from rlhf_megatron.runtime.worker_group import WorkerGroup
from rlhf_megatron.workers.memory import MemoryReport
from rlhf_megatron.workers.offload import TRAINER_PARTS, TrainerPart

Phase = Literal["training", "sync", "generation"]


class Turns(Protocol):
    """What stages, weight syncs and checkpoints say before they need the devices. Called by the controller's thread."""

    resend: Callable[[], object]  # the current weights to all engines again, verified; set by WeightSync

    def to_trainer(self) -> None:
        """All of the trainer is on its devices when this returns."""

    def to_engines(self) -> None:
        """The engines serve the current weights when this returns."""

    def before_stream(self) -> None:
        """The trainer's parameters, and memory for the engines' weights, are there when this returns."""

    def after_stream(self) -> None:
        """Engines have their caches, and can serve, when this returns."""

    def take_metrics(self) -> dict[str, float]:
        """Of the turns since the last time."""


class NoTurns:
    """Trainer and engines have devices of their own."""

    resend: Callable[[], object]

    def to_trainer(self) -> None:
        pass

    def to_engines(self) -> None:
        pass

    def before_stream(self) -> None:
        pass

    def after_stream(self) -> None:
        pass

    def take_metrics(self) -> dict[str, float]:
        return {}


class Colocation:
    """`roles`: those that learn. Made when it is the engines' turn: see `leave_devices`.

    Every step can be made again from wherever an error has left it, so that a run that ends can still save its state.
    """

    resend: Callable[[], object]

    def __init__(self, group: WorkerGroup, fleet: EngineFleet, roles: Sequence[str], has_reference: bool) -> None:
        self._group = group
        self._fleet = fleet
        self._roles = tuple(roles)
        self._has_reference = has_reference
        self._turn: Literal["trainer", "engines", None] = "engines"  # None: on the way
        self._metrics: dict[str, float] = {}
        self._seconds = 0.0

    def to_trainer(self) -> None:
        if self._turn == "trainer":
            return
        with self._changing("trainer"):
            self._fleet.release_memory()
            faults.reach("turns.before_restore")
            self._on_roles("onload", self._roles, TRAINER_PARTS)

    def to_engines(self) -> None:
        if self._turn != "engines":
            self.resend()
        assert self._turn == "engines", "weights were sent, but the engines have not got the devices"

    def before_stream(self) -> None:
        if self._turn == "engines":  # one of them was started again
            with self._changing(None):
                self._fleet.release_memory(("kv_cache",))
                self._on_roles("onload", ["actor"], ["parameters"], is_read_only=True)
            return
        self._measure("training")
        with self._changing(None):
            others = [role for role in self._roles if role != "actor"]
            self._on_roles("offload", ["actor"], ["gradients", "optimizer"])
            self._on_roles("offload", others, TRAINER_PARTS)
            faults.reach("turns.before_stream")
            self._fleet.resume_memory(("weights",))
        self._measure("sync")

    def after_stream(self) -> None:
        with self._changing("engines"):
            self._on_roles("offload", ["actor"], TRAINER_PARTS)
            faults.reach("turns.after_stream")
            self._fleet.resume_memory()
        self._measure("generation")

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics | {"timing_s/turns": self._seconds}, {}
        self._seconds = 0.0
        return metrics

    @contextmanager
    def _changing(self, turn: Literal["trainer", "engines", None]) -> Iterator[None]:
        start, self._turn = time.monotonic(), None
        yield
        self._turn = turn
        self._seconds += time.monotonic() - start

    def _on_roles(self, verb: str, roles: Sequence[str], parts: Sequence[TrainerPart], **arguments: bool) -> None:
        """At the same time where they have ranks of their own."""
        calls = [self._group.broadcast(f"{role}.{verb}", parts=tuple(parts), **arguments) for role in roles]
        for call in calls:
            call.result()

    def _measure(self, phase: Phase) -> None:
        """The most that any rank holds, and any engine."""
        roles = [*self._roles, *(["reference"] if self._has_reference else [])]
        calls = {role: self._group.broadcast(f"{role}.memory_report") for role in roles}
        reports: dict[str, list[MemoryReport]] = {role: call.result() for role, call in calls.items()}
        pools = [
            [of_role for role, of_role in reports.items() if self._pool(role) == pool] for pool in self._group.layouts
        ]
        ranks = [reports_of_rank for pool in pools for reports_of_rank in zip(*pool, strict=True)]
        self._metrics |= {f"memory/{phase}_{name}": float(value) for name, value in most(ranks).items()}
        engines = list(engine_bytes(self._fleet.live))
        if engines:
            self._metrics[f"memory/{phase}_engine_bytes"] = float(max(engines))

    def _pool(self, role: str) -> str:
        return role if role in self._group.layouts else "actor"


def most(ranks: Sequence[Sequence[MemoryReport]]) -> dict[str, int]:
    """The largest of each number over ranks, each of which has a report a model. "used_bytes" only where known."""
    found = {
        "device_bytes": max(of[0].process_bytes or sum(report.held_bytes for report in of) for of in ranks),
        "host_bytes": max(of[0].resident_bytes for of in ranks),
        "offloaded_bytes": max(sum(report.copied_bytes for report in of) for of in ranks),
    }
    used = max(of[0].used_bytes for of in ranks)
    return {**found, "used_bytes": used} if used else found


def engine_bytes(engines: Sequence[Engine]) -> Iterator[int]:
    """Of weights and key-value cache, for engines that can tell."""
    for engine in engines:
        if isinstance(engine, LocalEngine):
            with suppress(EngineError):  # one that is down
                held = engine.info()["memory"]
                yield held["weights_bytes"] + held["kv_cache_bytes"]


def learning_roles(config: RunConfig) -> tuple[str, ...]:
    return ("actor", "critic") if has_critic(config) else ("actor",)


def leave_devices(config: RunConfig, group: WorkerGroup) -> None:
    """Of a colocated trainer, before the engines start: they shall find the memory free that they are to use."""
    for role in learning_roles(config):
        group.broadcast(f"{role}.offload").result()


def make_turns(config: RunConfig, group: WorkerGroup, fleet: EngineFleet) -> Turns:
    """It is the trainer's turn when this returns. `leave_devices` was called before the engines started."""
    if not config.rollout.colocated:
        return NoTurns()
    turns = Colocation(group, fleet, learning_roles(config), needs_reference(config))
    turns.to_trainer()
    return turns


def refuse_probe(engine: Engine) -> None:
    """In place of a probe, for which the trainer would have to score while the engine holds the device."""
    raise EngineError(
        f"{engine.address.name} cannot tell digests of the weights that stand in it, and rollout.colocated leaves no"
        " room for a probe; use engines that the run starts, or rollout.colocated: false."
    )
