"""`rollout.colocated`: trainer and engines take turns with the same devices. docs/colocated.md has a
table of a step.

What an engine has released comes back without contents. So the engines' turn always begins with a stream of weights,
of a new version or of the same one again. An engine that is started again in the engines' turn needs weights, too: then
the caches alone go and come back, and the trainer's parameters come and go; what others were generating goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Literal

from rlhf_megatron import faults
from rlhf_megatron.rewards.service.model_servers import ModelServers
from rlhf_megatron.rollout.engine import Engine, EngineError
from rlhf_megatron.rollout.fleet.fleet import EngineFleet
from rlhf_megatron.runtime.proxies import ReferenceProxy, TrainedProxy
from rlhf_megatron.workers.findings import MemoryReport
from rlhf_megatron.workers.offload import TRAINER_PARTS

Phase = Literal["training", "sync", "generation"]
Turn = Literal["trainer", "engines", "scorers", None]  # None: on the way


class Turns:
    """Hands the devices over; stages, weight syncs and checkpoints call it first, on the controller's thread. This one
    is for a trainer and engines that have devices of their own."""

    resend: Callable[[], object]  # the current weights to all engines again, verified; set by WeightSync

    def to_trainer(self) -> None:
        """All of the trainer is on its devices when this returns."""

    def to_engines(self) -> None:
        """The engines serve the current weights when this returns."""

    def to_scorers(self) -> None:
        """The servers of a reward model have their devices when this returns."""

    def before_stream(self) -> None:
        """The trainer's parameters, and memory for the engines' weights, are there when this returns."""

    def after_stream(self) -> None:
        """Engines have their caches, and can serve, when this returns."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the turns since the last call."""
        return {}


class Colocation(Turns):
    """Made when it is the engines' turn: see `leave_devices`.

    Every step can be made again from wherever an error has left it, so that a run that ends can still save its state.
    """

    def __init__(
        self,
        roles: Sequence[TrainedProxy],
        reference: ReferenceProxy | None,
        fleet: EngineFleet,
        scorers: ModelServers | None = None,
    ) -> None:
        """`roles`: those that learn, the actor first. `scorers`: asleep."""
        self._roles = tuple(roles)
        self._actor, self._others = roles[0], roles[1:]
        self._reference = reference
        self._fleet = fleet
        self._scorers = scorers
        self._turn: Turn = "engines"
        self._metrics: dict[str, float] = {}
        self._seconds = 0.0

    def to_trainer(self) -> None:
        if self._turn == "trainer":
            return
        with self._changing("trainer"):
            if self._scorers is not None:
                self._scorers.sleep()
            self._fleet.release_memory()
            faults.reach("turns.before_restore")
            _wait(role.onload(parts=TRAINER_PARTS) for role in self._roles)

    def to_scorers(self) -> None:
        """Give the devices to the reward servers. Only after `to_engines`: trainer and engines hold nothing then."""
        if self._scorers is None or self._turn == "scorers":
            return
        assert self._turn == "engines", "samples are scored when the engines have made them"
        with self._changing("scorers"):
            self._fleet.release_memory()
            self._scorers.wake()

    def to_engines(self) -> None:
        if self._turn != "engines":
            self.resend()
        assert self._turn == "engines", "weights were sent, but the engines have not got the devices"

    def before_stream(self) -> None:
        if self._turn == "scorers":
            self.to_trainer()  # from which the weights come
        if self._turn == "engines":  # one of them was started again
            with self._changing(None):
                self._fleet.release_memory(("kv_cache",))
                self._actor.onload(parts=("parameters",), is_read_only=True).result()
            return
        self._measure("training")
        with self._changing(None):
            self._actor.offload(parts=("gradients", "optimizer")).result()
            _wait(role.offload(parts=TRAINER_PARTS) for role in self._others)
            faults.reach("turns.before_stream")
            self._fleet.resume_memory(("weights",))
        self._measure("sync")

    def after_stream(self) -> None:
        with self._changing("engines"):
            self._actor.offload(parts=TRAINER_PARTS).result()
            faults.reach("turns.after_stream")
            self._fleet.resume_memory()
        self._measure("generation")

    def take_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics | {"timing_s/turns": self._seconds}, {}
        self._seconds = 0.0
        return metrics

    @contextmanager
    def _changing(self, turn: Turn) -> Iterator[None]:
        start, self._turn = time.monotonic(), None
        yield
        self._turn = turn
        self._seconds += time.monotonic() - start

    def _measure(self, phase: Phase) -> None:
        models: list[TrainedProxy | ReferenceProxy] = [*self._roles]
        models += [self._reference] if self._reference is not None else []
        calls = [(model.pool, model.memory_report()) for model in models]
        pools: dict[str, list[list[MemoryReport]]] = {}
        for pool, call in calls:
            pools.setdefault(pool, []).append(call.result())
        ranks = [reports_of_rank for reports in pools.values() for reports_of_rank in zip(*reports, strict=True)]
        self._metrics |= {f"memory/{phase}_{name}": float(value) for name, value in most(ranks).items()}
        engines = list(engine_bytes(self._fleet.live))
        if engines:
            self._metrics[f"memory/{phase}_engine_bytes"] = float(max(engines))


def most(ranks: Sequence[Sequence[MemoryReport]]) -> dict[str, int]:
    """Return the largest of each number over ranks, which have a report a model. "used_bytes" only where known."""
    found = {
        "device_bytes": max(of[0].process_bytes or sum(report.held_bytes for report in of) for of in ranks),
        "host_bytes": max(of[0].resident_bytes for of in ranks),
        "offloaded_bytes": max(sum(report.copied_bytes for report in of) for of in ranks),
    }
    used = max(of[0].used_bytes for of in ranks)
    return {**found, "used_bytes": used} if used else found


def engine_bytes(engines: Sequence[Engine]) -> Iterator[int]:
    """Yields bytes of weights and key-value cache, for engines that can tell."""
    for engine in engines:
        with suppress(EngineError):  # one that is down
            if (held := engine.held_bytes()) is not None:
                yield held


def leave_devices(roles: Sequence[TrainedProxy]) -> None:
    """Take a colocated trainer off its devices before the engines start: they shall find the memory free that they are
    to use."""
    for role in roles:
        role.offload().result()


def _wait(calls: Iterable[Future[list[None]]]) -> None:
    """Start all calls, then wait: roles with ranks of their own work at the same time."""
    for call in list(calls):
        call.result()


def refuse_probe(engine: Engine) -> None:
    """Stands in place of a probe, for which the trainer would have to score while the engine holds the device."""
    raise EngineError(
        f"{engine.address.name} cannot tell digests of the weights that stand in it, and rollout.colocated leaves no"
        " room for a probe; use engines that the run starts, or rollout.colocated: false."
    )
