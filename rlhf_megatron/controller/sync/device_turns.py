"""`rollout.colocated`: trainer and engines take turns with the same devices. docs/colocated.md has
a table of a step.

What an engine has released comes back without contents. So the engines' turn always begins with a
stream of weights, of a new version or of the same one again. An engine that is started again in the
engines' turn needs weights, too: then the caches alone go and come back, and the trainer's
parameters come and go; what others were generating goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Literal

from rlhf_megatron import faults
from rlhf_megatron.ranks.workers.offload import TRAINER_PARTS
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport
from rlhf_megatron.rewards.service.reward_model_servers import RewardModelServers
from rlhf_megatron.rollout.engine_interface import EngineError, InferenceEngine
from rlhf_megatron.rollout.fleet.engine_fleet import EngineFleet
from rlhf_megatron.runtime.role_proxies import ReferenceProxy, TrainedProxy

Phase = Literal["training", "sync", "generation"]
Turn = Literal["trainer", "engines", "scorers", None]  # None: on the way


class DeviceTurns:
    """Hands the devices over; stages, weight syncs and checkpoints call it first, on the
    controller's thread. This one is for a trainer and engines that have devices of their own.
    """

    # the current weights to all engines again, verified; set by WeightSync
    resend_weights: Callable[[], object]

    def give_devices_to_trainer(self) -> None:
        """Make sure that the whole trainer is on its devices when this returns. Nothing to do with
        separate devices.
        """

    def give_devices_to_engines(self) -> None:
        """Make sure that the engines serve the current weights when this returns. Nothing to do
        with separate devices.
        """

    def give_devices_to_scorers(self) -> None:
        """Make sure that the servers of a reward model have their devices when this returns.
        Nothing to do with separate devices.
        """

    def prepare_weight_stream(self) -> None:
        """Make sure that the trainer's parameters, and memory for the engines' weights, are on the
        devices when this returns. Nothing to do with separate devices.
        """

    def finish_weight_stream(self) -> None:
        """Make sure that the engines have their caches, and can serve, when this returns. Nothing
        to do with separate devices.
        """

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the turns since the last call, and forget them; {} with separate
        devices.
        """
        return {}


class ColocatedDeviceTurns(DeviceTurns):
    """Made when it is the engines' turn: see `offload_trainer`.

    Every step can be made again from wherever an error has left it, so that a run that ends can
    still save its state.
    """

    def __init__(
        self,
        roles: Sequence[TrainedProxy],
        reference: ReferenceProxy | None,
        fleet: EngineFleet,
        scorers: RewardModelServers | None = None,
    ) -> None:
        """Begin with the engines' turn. `roles`: the roles that learn, the actor first. `scorers`:
        reward servers, asleep.
        """
        self._trained_roles = tuple(roles)
        self._actor = roles[0]
        self._roles_beside_actor = roles[1:]
        self._reference = reference
        self._fleet = fleet
        self._scorers = scorers
        self._current_turn: Turn = "engines"
        self._metrics: dict[str, float] = {}
        self._turn_seconds = 0.0

    def give_devices_to_trainer(self) -> None:
        """Put reward servers to sleep, release the engines' memory, and load the trainer back,
        unless it is the trainer's turn already.
        """
        if self._current_turn == "trainer":
            return
        with self._change_turn("trainer"):
            if self._scorers is not None:
                self._scorers.sleep()
            self._fleet.release_memory()
            faults.reach_fault_point("turns.before_restore")
            _wait_for_calls(role.onload(parts=TRAINER_PARTS) for role in self._trained_roles)

    def give_devices_to_scorers(self) -> None:
        """Release the engines' memory and wake the reward servers. Call it in the engines' turn
        only, when neither trainer nor engines need their devices. Without reward servers, do
        nothing.
        """
        if self._scorers is None or self._current_turn == "scorers":
            return
        assert self._current_turn == "engines", "samples are scored when the engines have made them"
        with self._change_turn("scorers"):
            self._fleet.release_memory()
            self._scorers.wake()

    def give_devices_to_engines(self) -> None:
        """Send the current weights to all engines again, unless it is the engines' turn already."""
        if self._current_turn != "engines":
            self.resend_weights()
        assert self._current_turn == "engines", (
            "weights were sent, but the engines have not got the devices"
        )

    def prepare_weight_stream(self) -> None:
        """Move gradients, optimizer and the other roles off the devices, and give the engines
        memory for their weights. In the engines' turn (an engine was started again) only release
        the engines' caches and load the parameters.
        """
        if self._current_turn == "scorers":
            self.give_devices_to_trainer()  # from which the weights come
        if self._current_turn == "engines":  # one of them was started again
            with self._change_turn(None):
                self._fleet.release_memory(("kv_cache",))
                self._actor.onload(parts=("parameters",), is_read_only=True).result()
            return
        self._measure_memory("training")
        with self._change_turn(None):
            self._actor.offload(parts=("gradients", "optimizer")).result()
            _wait_for_calls(role.offload(parts=TRAINER_PARTS) for role in self._roles_beside_actor)
            faults.reach_fault_point("turns.before_stream")
            self._fleet.resume_memory(("weights",))
        self._measure_memory("sync")

    def finish_weight_stream(self) -> None:
        """Move the trainer off the devices, and give the engines the rest of their memory; it is
        the engines' turn then.
        """
        with self._change_turn("engines"):
            self._actor.offload(parts=TRAINER_PARTS).result()
            faults.reach_fault_point("turns.after_stream")
            self._fleet.resume_memory()
        self._measure_memory("generation")

    def take_metrics(self) -> dict[str, float]:
        """Return memory and seconds of the turns since the last call, and forget them."""
        metrics = self._metrics | {"timing_s/turns": self._turn_seconds}
        self._metrics = {}
        self._turn_seconds = 0.0
        return metrics

    @contextmanager
    def _change_turn(self, next_turn: Turn) -> Iterator[None]:
        """Set the turn to None within the block and to `next_turn` after it, and add the seconds to
        the metrics. After an error the turn stays None.
        """
        start = time.monotonic()
        self._current_turn = None
        yield
        self._current_turn = next_turn
        self._turn_seconds += time.monotonic() - start

    def _measure_memory(self, phase: Phase) -> None:
        """Record the largest memory of a rank and of an engine as the metrics of this phase."""
        models: list[TrainedProxy | ReferenceProxy] = [*self._trained_roles]
        models += [self._reference] if self._reference is not None else []
        calls = [(model.pool_name, model.memory_report()) for model in models]
        pools: dict[str, list[list[MemoryReport]]] = {}
        for pool, call in calls:
            pools.setdefault(pool, []).append(call.result())
        ranks = [
            reports_of_rank
            for reports in pools.values()
            for reports_of_rank in zip(*reports, strict=True)
        ]
        self._metrics |= {
            f"memory/{phase}_{name}": float(value)
            for name, value in find_largest_memory(ranks).items()
        }
        engines = list(list_engine_bytes(self._fleet.live_engines))
        if engines:
            self._metrics[f"memory/{phase}_engine_bytes"] = float(max(engines))


def find_largest_memory(reports_by_rank: Sequence[Sequence[MemoryReport]]) -> dict[str, int]:
    """Return the largest value over ranks of each memory figure, in bytes, by name. Each rank has
    one report for each model. "used_bytes" is there only where known.
    """
    found = {
        "device_bytes": max(
            of[0].process_bytes or sum(report.held_bytes for report in of) for of in reports_by_rank
        ),
        "host_bytes": max(of[0].resident_bytes for of in reports_by_rank),
        "offloaded_bytes": max(sum(report.copied_bytes for report in of) for of in reports_by_rank),
    }
    used = max(of[0].used_bytes for of in reports_by_rank)
    return {**found, "used_bytes": used} if used else found


def list_engine_bytes(engines: Sequence[InferenceEngine]) -> Iterator[int]:
    """Yield the bytes of weights and key-value cache of each engine that reports them; skip engines
    that are down.
    """
    for engine in engines:
        with suppress(EngineError):  # one that is down
            if (held := engine.get_held_bytes()) is not None:
                yield held


def offload_trainer(roles: Sequence[TrainedProxy]) -> None:
    """Move a colocated trainer off its devices, so that the engines, which start next, find the
    memory free.
    """
    for role in roles:
        role.offload().result()


def _wait_for_calls(calls: Iterable[Future[list[None]]]) -> None:
    """Start all calls, then wait for them: roles with ranks of their own work at the same time."""
    for call in list(calls):
        call.result()


def refuse_engine_probe(engine: InferenceEngine) -> None:
    """Raise EngineError. Used in place of a probe in a colocated run, where the trainer would have
    to score while the engine holds the device.
    """
    raise EngineError(
        f"{engine.address.name} cannot tell digests of the weights that stand in it, and"
        " rollout.colocated leaves no room for a probe; use engines that the run starts, or"
        " rollout.colocated: false."
    )
