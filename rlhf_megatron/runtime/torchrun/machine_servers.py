"""Servers on several machines under torchrun, of engines and reward models: a keeper on each
machine that has some, but for the controller's.

    agent 0 --- host 0 --- controller --- server of machine 0
    agent 1 --- host 8 --- keeper ------- server of machine 1        as long as machine 1 has ranks
                           keeper ------- server of machine 2        started by launch/torchrun.sh
                               there, without ranks
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.config.rules.engine_machines import (
    assign_part_machines,
    assign_reward_server_machines,
)
from rlhf_megatron.config.schema import RewardModelConfig, RolloutConfig, RunConfig, TrainerConfig
from rlhf_megatron.device import list_visible_devices
from rlhf_megatron.rewards.service.reward_model_servers import SERVER
from rlhf_megatron.rollout.engine_interface import EngineError
from rlhf_megatron.rollout.fleet.engine_setup import EngineSetup
from rlhf_megatron.rollout.fleet.server_process import LOOPBACK, ServerLaunch, ServerSeat
from rlhf_megatron.rollout.sglang.sglang_environment import BASE_GPU_ID, VISIBLE_DEVICES
from rlhf_megatron.runtime.host_errors import HostError
from rlhf_megatron.runtime.rank_pools import ENGINES, PoolSpec
from rlhf_megatron.runtime.ray.ray_placement import count_gpus_per_part, count_gpus_per_server
from rlhf_megatron.runtime.route_store import start_route_store
from rlhf_megatron.runtime.routed_worker_group import RoutedWorkerGroup
from rlhf_megatron.runtime.server_keepers import (
    CallHandle,
    KeeperLaunch,
    LateAnswerError,
    RemoteProcessLostError,
    ServerReport,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout

_FRESH_S = 0.1  # reports of all engines are asked for together, not more often


@dataclass(frozen=True)
class KeeperPoolSpec(PoolSpec):
    """The keepers of a job, after its ranks."""

    machines: tuple[int, ...] = ()  # by place in the pool

    def format_rank_label(self, rank: int) -> str:
        """Return the keeper's name as messages have it: "[engines of machine 2]". `rank` counts in
        the pool.
        """
        return f"[{self.name} of machine {self.machines[rank]}]"


@dataclass(frozen=True)
class ServerMachines:
    """The servers of a job over its machines: its engines, and those of a reward model."""

    setup: EngineSetup
    reward_model: RewardModelConfig
    engine_part_machines: Sequence[int]  # machine of each part of an engine
    reward_server_machines: Sequence[int]  # machine of each server of the reward model
    keeps_routes: bool  # of samples, on the machines of their engines

    @classmethod
    def from_config(cls, config: RunConfig) -> ServerMachines:
        """Return the machines of the engine parts (for the job train) and the reward-model servers
        that the configuration gives.
        """
        of_parts = assign_part_machines(config) if config.job == "train" else ()
        keeps_routes = config.actor.router_replay == "r3"
        return cls(
            EngineSetup.from_config(config),
            config.reward_model,
            of_parts,
            assign_reward_server_machines(config),
            keeps_routes,
        )

    @property
    def keeper_pool(self) -> KeeperPoolSpec | None:
        """Return the pool of keepers, one for each machine with servers but machine 0; None where
        all servers are on machine 0, the controller's.
        """
        machines = tuple(sorted({*self.engine_part_machines, *self.reward_server_machines} - {0}))
        trainer = self.setup.trainer
        num_ranks = trainer.nnodes * trainer.n_gpus_per_node
        return (
            KeeperPoolSpec(ENGINES, ParallelLayout(len(machines)), num_ranks, machines)
            if machines
            else None
        )


def assign_reward_server_seat(
    servers: ServerMachines, server_index: int, address: str
) -> ServerSeat:
    """Return the seat (`address` and devices) of a reward-model server: devices behind those of the
    ranks and the engines of its machine. Raise EngineError where the machine has too few devices.
    """
    machines = servers.reward_server_machines
    served = servers.reward_model.served
    rollout = servers.setup.rollout
    trainer = servers.setup.trainer
    names = {name.replace("_", "-") for name in served.args}
    place = machines[:server_index].count(machines[server_index])
    if (
        trainer.device == "cpu"
        or not list_visible_devices()
        or BASE_GPU_ID in names
        or VISIBLE_DEVICES in served.env
    ):
        return ServerSeat(address)
    size = count_gpus_per_server(served)
    num_taken = 0
    if not rollout.colocated:
        has_ranks = machines[server_index] < trainer.nnodes
        num_engines = servers.engine_part_machines.count(machines[server_index])
        num_taken = has_ranks * trainer.n_gpus_per_node + num_engines * count_gpus_per_part(rollout)
    first = num_taken + place * size
    own = list_visible_devices()[first : first + size]
    if len(own) < size:
        raise EngineError(
            f"{SERVER}{server_index} needs devices {first} to {first + size - 1} of machine"
            f" {machines[server_index]}, but {len(list_visible_devices())} are visible there;"
            " lower reward_model.served.num_servers, or set reward_model.served.machines."
        )
    return ServerSeat(address, {VISIBLE_DEVICES: ",".join(own)} if own else {})


def assign_engine_part_seat(
    rollout: RolloutConfig,
    trainer: TrainerConfig,
    machine: int,
    index_on_machine: int,
    address: str,
) -> ServerSeat:
    """Return the seat (`address` and devices) of the engine part that is number `index_on_machine`
    among those of `machine`: the first free devices, then those of the machine's ranks, whose
    memory the engine opens. Raise EngineError where there are too few devices.
    """
    user = rollout.sglang
    names = {name.replace("_", "-") for name in user.args}
    if (
        trainer.device == "cpu"
        or not list_visible_devices()
        or BASE_GPU_ID in names
        or VISIBLE_DEVICES in user.env
    ):
        return ServerSeat(address)
    visible = list_visible_devices()
    of_ranks = visible[: trainer.n_gpus_per_node] if machine < trainer.nnodes else []
    size = count_gpus_per_part(rollout)
    first = index_on_machine * size + (0 if rollout.colocated else len(of_ranks))
    own = visible[first : first + size]
    if len(own) < size:
        raise EngineError(
            f"engine {index_on_machine} of machine {machine} needs devices {first} to"
            f" {first + size - 1}, but {len(visible)} are visible there; lower"
            " rollout.num_engines, tp-size or trainer.n_gpus_per_node, or"
            " set rollout.engine_machines."
        )
    return ServerSeat(
        address, {VISIBLE_DEVICES: ",".join(dict.fromkeys([*own, *of_ranks]))} if own else {}
    )


class MachineServerPlacer:
    """A `rollout.fleet.server_process.LaunchPlacement`: servers of machine 0 start here, other
    servers from their machine's keeper.
    """

    def __init__(self, servers: ServerMachines, group: RoutedWorkerGroup, run_dir: Path) -> None:
        """Keep the job's group of hosts, keepers included, and start the store of routes where
        routes are kept.
        """
        if servers.keeps_routes:
            self._route_store = start_route_store(run_dir, group.controller_address)
        self._servers = servers
        self._rollout = servers.setup.rollout
        self._trainer = servers.setup.trainer
        self._group = group
        self._address = (
            LOOPBACK if self._rollout.weight_transport == "tensor" else group.controller_address
        )
        self._keeper_pool = servers.keeper_pool
        self._num_placed = 0
        self._lock = threading.Lock()
        self._reports: dict[str, ServerReport] = {}
        self._reports_fetched_at = 0.0

    def __call__(self, launch: ServerLaunch) -> ServerLaunch:
        """Place the next part of an engine: return the launch with its seat on machine 0, else a
        launch that the keeper of its machine starts.
        """
        index = self._num_placed
        self._num_placed += 1
        machines = self._servers.engine_part_machines
        machine = machines[index]
        if machine == 0:
            launch.take_seat(
                assign_engine_part_seat(
                    self._rollout, self._trainer, 0, machines[:index].count(0), self._address
                )
            )
            return launch
        return self._make_keeper_launch(launch, machine, index)

    def place_reward_server(self, launch: ServerLaunch) -> ServerLaunch:
        """Place a server of the reward model, by the number in its name. On machine 0, where
        rewards are computed, the server listens on the loopback address.
        """
        index = int(launch.name.removeprefix(SERVER))
        machine = self._servers.reward_server_machines[index]
        if machine == 0:
            launch.take_seat(assign_reward_server_seat(self._servers, index, LOOPBACK))
            return launch
        return self._make_keeper_launch(launch, machine, index)

    def _make_keeper_launch(
        self, launch: ServerLaunch, machine: int, server_index: int
    ) -> ServerLaunch:
        """Return a launch that the keeper of `machine` starts."""
        remote = _MachineKeeperHandle(self, machine, launch.name)

        def start_by_keeper(is_restart: bool) -> tuple[_MachineKeeperHandle, CallHandle]:
            """Order the keeper to start the server; return the keeper's handle and the call."""
            return remote, remote.submit_call(
                "begin", server_index, launch.transfer_dir, is_restart, launch.rendezvous_address
            )

        return KeeperLaunch(launch, start_by_keeper, self._rollout.startup_timeout_s, machine)

    def submit_to_keepers(
        self, machine: int, server_name: str, method: str, arguments: Sequence[Any]
    ) -> Future[list[Any]]:
        """Send the order to all keepers, of which only the keeper of `machine` carries it out. The
        future gets one result for each keeper.
        """
        order = {
            "machine": machine,
            "name": server_name,
            "verb": method,
            "arguments": list(arguments),
        }
        return self._group.broadcast_call(f"{ENGINES}.order", **order)

    def wait_for_answer(self, future: Future[list[Any]], machine: int, timeout_s: float) -> Any:
        """Return the answer of the keeper of `machine`. Raise RemoteProcessLostError where a host
        has failed, LateAnswerError after `timeout_s`.
        """
        assert self._keeper_pool is not None
        try:
            return future.result(timeout_s)[self._keeper_pool.machines.index(machine)]
        except HostError as error:
            raise RemoteProcessLostError(str(error)) from error
        except TimeoutError as error:
            raise LateAnswerError(
                f"the keeper of machine {machine} did not answer within {timeout_s:g} s."
            ) from error

    def fetch_report(self, server_name: str, timeout_s: float) -> ServerReport:
        """Return the report of a server on another machine, an empty one where its keeper has none
        yet. Reports of all servers are fetched together, and kept for _FRESH_S. Raise the errors
        that `wait_for_answer` raises.
        """
        with self._lock:
            if time.monotonic() - self._reports_fetched_at >= _FRESH_S:
                try:
                    found = self._group.broadcast_call(f"{ENGINES}.reports").result(timeout_s)
                except HostError as error:
                    raise RemoteProcessLostError(str(error)) from error
                except TimeoutError as error:
                    raise LateAnswerError(
                        f"not all keepers answered within {timeout_s:g} s."
                    ) from error
                self._reports = {
                    name: report for reports in found for name, report in reports.items()
                }
                self._reports_fetched_at = time.monotonic()
            return self._reports.get(server_name, ServerReport())


@dataclass(frozen=True)
class _MachineKeeperHandle:
    """The handle of the keeper of one server; see `runtime.server_keepers.RemoteHandle`."""

    placer: MachineServerPlacer
    machine: int
    server_name: str

    def call_method(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call the method of the server's keeper and return its result; see
        `RemoteHandle.call_method`.
        """
        if method == "report":
            return self.placer.fetch_report(self.server_name, timeout_s)
        return self.submit_call(method, *arguments).wait_for_result(timeout_s)

    def submit_call(self, method: str, *arguments: Any) -> _KeeperCallHandle:
        """Order the method from the server's keeper without waiting, and return a handle of the
        answer.
        """
        return _KeeperCallHandle(
            self, self.placer.submit_to_keepers(self.machine, self.server_name, method, arguments)
        )

    def kill(self) -> None:
        """Do nothing: the keeper stays, for the machine's other servers."""


@dataclass(frozen=True)
class _KeeperCallHandle:
    keeper: _MachineKeeperHandle
    future: Future[list[Any]]

    @property
    def is_done(self) -> bool:
        """Return whether all keepers have answered, or the call has failed."""
        return self.future.done()

    def wait_for_result(self, timeout_s: float) -> Any:
        """Return the answer of the server's keeper; see `MachineServerPlacer.wait_for_answer`."""
        return self.keeper.placer.wait_for_answer(self.future, self.keeper.machine, timeout_s)
