"""Servers on several machines under torchrun, of engines and reward models: a keeper on each machine that has some, but
for the controller's.

    agent 0 --- host 0 --- controller --- server of machine 0
    agent 1 --- host 8 --- keeper ------- server of machine 1        as long as machine 1 has ranks
                           keeper ------- server of machine 2        started by launch/torchrun.sh there, without ranks
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.config.rules.machines import machines_of_parts, machines_of_servers
from rlhf_megatron.config.schema import RewardModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.parallel.device import visible_devices
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.rewards.service.model_servers import SERVER
from rlhf_megatron.rollout.engine import EngineError
from rlhf_megatron.rollout.fleet.process import LOOPBACK, Launch, Seat
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.rollout.sglang.environment import BASE, VISIBLE
from rlhf_megatron.runtime.failures import HostError
from rlhf_megatron.runtime.keepers import (
    Answer,
    KeptLaunch,
    LateAnswerError,
    ProcessLostError,
    Report,
)
from rlhf_megatron.runtime.pool import ENGINES, PoolSpec
from rlhf_megatron.runtime.ray.places import gpus_of_part, gpus_per_server
from rlhf_megatron.runtime.route_store import serve_routes
from rlhf_megatron.runtime.routed import RoutedGroups

_FRESH_S = 0.1  # reports of all engines are asked for together, not more often


@dataclass(frozen=True)
class KeeperPool(PoolSpec):
    """The keepers of a job, after its ranks."""

    machines: tuple[int, ...] = ()  # by place in the pool

    def where(self, rank: int) -> str:
        return f"[{self.name} of machine {self.machines[rank]}]"


@dataclass(frozen=True)
class Servers:
    """The servers of a job over its machines: its engines, and those of a reward model."""

    setup: EngineSetup
    reward_model: RewardModelConfig
    of_parts: Sequence[int]  # machine of each part of an engine
    of_servers: Sequence[int]  # machine of each server of the reward model
    keeps_routes: bool  # of samples, on the machines of their engines

    @classmethod
    def of(cls, config: RunConfig) -> Servers:
        of_parts = machines_of_parts(config) if config.job == "train" else ()
        keeps_routes = config.actor.router_replay == "r3"
        return cls(EngineSetup.of(config), config.reward_model, of_parts, machines_of_servers(config), keeps_routes)

    @property
    def keepers(self) -> KeeperPool | None:
        """The pool of keepers; None where all servers are on the controller's machine."""
        machines, trainer = tuple(sorted({*self.of_parts, *self.of_servers} - {0})), self.setup.trainer
        num_ranks = trainer.nnodes * trainer.n_gpus_per_node
        return KeeperPool(ENGINES, Layout(len(machines)), num_ranks, machines) if machines else None


def seat_of_server(servers: Servers, index: int, address: str) -> Seat:
    """Return the seat of a server of the reward model, behind the engines of its machine."""
    machines, served = servers.of_servers, servers.reward_model.served
    rollout, trainer = servers.setup.rollout, servers.setup.trainer
    names, place = {name.replace("_", "-") for name in served.args}, machines[:index].count(machines[index])
    if trainer.device == "cpu" or not visible_devices() or BASE in names or VISIBLE in served.env:
        return Seat(address)
    size = gpus_per_server(served)
    num_taken = 0
    if not rollout.colocated:
        has_ranks = machines[index] < trainer.nnodes
        num_engines = servers.of_parts.count(machines[index])
        num_taken = has_ranks * trainer.n_gpus_per_node + num_engines * gpus_of_part(rollout)
    first = num_taken + place * size
    own = visible_devices()[first : first + size]
    if len(own) < size:
        raise EngineError(
            f"{SERVER}{index} needs devices {first} to {first + size - 1} of machine {machines[index]}, but"
            f" {len(visible_devices())} are visible there; lower reward_model.served.num_servers, or set"
            " reward_model.served.machines."
        )
    return Seat(address, {VISIBLE: ",".join(own)} if own else {})


def seat_on(rollout: RolloutConfig, trainer: TrainerConfig, machine: int, place: int, address: str) -> Seat:
    """Return the seat of the part of an engine with that place among those of `machine`: the first free devices there,
    and those of its ranks, whose memory it opens. Raises EngineError where there are too few."""
    user = rollout.sglang
    names = {name.replace("_", "-") for name in user.args}
    if trainer.device == "cpu" or not visible_devices() or BASE in names or VISIBLE in user.env:
        return Seat(address)
    visible = visible_devices()
    of_ranks = visible[: trainer.n_gpus_per_node] if machine < trainer.nnodes else []
    size = gpus_of_part(rollout)
    first = place * size + (0 if rollout.colocated else len(of_ranks))
    own = visible[first : first + size]
    if len(own) < size:
        raise EngineError(
            f"engine {place} of machine {machine} needs devices {first} to {first + size - 1}, but {len(visible)} are"
            " visible there; lower rollout.num_engines, tp-size or trainer.n_gpus_per_node, or set"
            " rollout.engine_machines."
        )
    return Seat(address, {VISIBLE: ",".join(dict.fromkeys([*own, *of_ranks]))} if own else {})


class MachineEngines:
    """A `rollout.fleet.process.Place`: engines of machine 0 start here, others with their machine's keeper."""

    def __init__(self, servers: Servers, group: RoutedGroups, run_dir: Path) -> None:
        """`group`: of the job, keepers included."""
        if servers.keeps_routes:
            self._store = serve_routes(run_dir, group.own_address)
        self._servers, self._rollout, self._trainer = servers, servers.setup.rollout, servers.setup.trainer
        self._group = group
        self._address = LOOPBACK if self._rollout.weight_transport == "tensor" else group.own_address
        self._keepers = servers.keepers
        self._num_placed = 0
        self._lock = threading.Lock()
        self._reports: dict[str, Report] = {}
        self._asked_at = 0.0

    def __call__(self, launch: Launch) -> Launch:
        index = self._num_placed
        self._num_placed += 1
        machines = self._servers.of_parts
        machine = machines[index]
        if machine == 0:
            launch.take(seat_on(self._rollout, self._trainer, 0, machines[:index].count(0), self._address))
            return launch
        return self._kept(launch, machine, index)

    def reward_server(self, launch: Launch) -> Launch:
        """Place a server of the reward model. Rewards are computed on the controller's machine."""
        index = int(launch.name.removeprefix(SERVER))
        machine = self._servers.of_servers[index]
        if machine == 0:
            launch.take(seat_of_server(self._servers, index, LOOPBACK))
            return launch
        return self._kept(launch, machine, index)

    def _kept(self, launch: Launch, machine: int, index: int) -> Launch:
        remote = _Kept(self, machine, launch.name)

        def begin(is_again: bool) -> tuple[_Kept, Answer]:
            return remote, remote.submit("begin", index, launch.transfer_dir, is_again, launch.meeting)

        return KeptLaunch(launch, begin, self._rollout.startup_timeout_s, machine)

    def submit(self, machine: int, name: str, method: str, arguments: Sequence[Any]) -> Future[list[Any]]:
        """All keepers get the call; the one of the machine obeys."""
        order = {"machine": machine, "name": name, "verb": method, "arguments": list(arguments)}
        return self._group.broadcast(f"{ENGINES}.order", **order)

    def answer(self, future: Future[list[Any]], machine: int, timeout_s: float) -> Any:
        """Raises ProcessLostError and LateAnswerError."""
        assert self._keepers is not None
        try:
            return future.result(timeout_s)[self._keepers.machines.index(machine)]
        except HostError as error:
            raise ProcessLostError(str(error)) from error
        except TimeoutError as error:
            raise LateAnswerError(f"the keeper of machine {machine} did not answer within {timeout_s:g} s.") from error

    def report(self, name: str, timeout_s: float) -> Report:
        """Return the report of an engine elsewhere. Raises as `answer` does."""
        with self._lock:
            if time.monotonic() - self._asked_at >= _FRESH_S:
                try:
                    found = self._group.broadcast(f"{ENGINES}.reports").result(timeout_s)
                except HostError as error:
                    raise ProcessLostError(str(error)) from error
                except TimeoutError as error:
                    raise LateAnswerError(f"not all keepers answered within {timeout_s:g} s.") from error
                self._reports = {name: report for reports in found for name, report in reports.items()}
                self._asked_at = time.monotonic()
            return self._reports.get(name, Report())


@dataclass(frozen=True)
class _Kept:
    """The keeper of one engine; see `runtime.keepers.Remote`."""

    engines: MachineEngines
    machine: int
    name: str

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method == "report":
            return self.engines.report(self.name, timeout_s)
        return self.submit(method, *arguments).result(timeout_s)

    def submit(self, method: str, *arguments: Any) -> _Answer:
        return _Answer(self, self.engines.submit(self.machine, self.name, method, arguments))

    def kill(self) -> None:
        """The keeper stays, for the machine's other engines."""


@dataclass(frozen=True)
class _Answer:
    kept: _Kept
    future: Future[list[Any]]

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def result(self, timeout_s: float) -> Any:
        return self.kept.engines.answer(self.future, self.kept.machine, timeout_s)
