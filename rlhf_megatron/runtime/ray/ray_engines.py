"""Engines under Ray: an actor each, on the machine of its bundle, where the server is its child.

driver --- actor of engine0 --- server         The server ends with its actor, the actor
                                               with the driver.
       `-- actor of engine1 --- server         The actor is the server's
                                               keeper (`runtime.server_keepers`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rlhf_megatron.config.rules.part_rules import count_machines_per_engine
from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.rollout.engine_kinds import get_engine_kind
from rlhf_megatron.rollout.fleet.server_process import ServerLaunch
from rlhf_megatron.rollout.transports.transfer_dir import (
    TransferDirectory,
    make_transfer_directory_at,
)
from rlhf_megatron.runtime.driver_gate import DriverGate
from rlhf_megatron.runtime.process_control import read_machine_id
from rlhf_megatron.runtime.ray.ray_cluster import ProcessLocation, RayCluster, locate_process
from rlhf_megatron.runtime.ray.ray_placement import (
    EngineSeating,
    assign_engine_seat,
    find_part_bundle,
    must_share_driver_machine,
)
from rlhf_megatron.runtime.server_keepers import (
    CallHandle,
    KeeperLaunch,
    RemoteHandle,
    ServerKeeper,
)


class SelfSeatingKeeper(ServerKeeper):
    """A keeper in an actor's process, which assigns its server a seat from the place where Ray has
    put it.
    """

    def __init__(self, working_dir: str) -> None:
        """Change to `working_dir` where this machine has the directory: relative paths of the
        settings count from the driver's working directory.
        """
        super().__init__()
        self._transfer_dir: TransferDirectory | None = None  # made here
        with contextlib.suppress(OSError):
            os.chdir(working_dir)

    def start_server_here(
        self,
        launch: ServerLaunch,
        seating: EngineSeating,
        is_restart: bool,
        timeout_s: float,
        makes_transfer_dir: bool,
        secret: bytes,
    ) -> str:
        """Start the server on this machine, with the seat that follows from the place where Ray has
        put this process; see `ServerKeeper.start_server` for the rest, also for the result.

        `makes_transfer_dir`: weights come through memory of this machine alone, and the keeper
        makes the directory. `secret`: the run's secret, where this machine may start drivers; b""
        elsewhere.
        """
        if secret and locate_process().machine != seating.driver_machine:
            self.driver_gate = DriverGate(locate_process().address, secret)
        if makes_transfer_dir:
            self._transfer_dir = make_transfer_directory_at(launch.transfer_dir)
        return self.start_server(
            launch, partial(assign_engine_seat, locate_process(), seating), is_restart, timeout_s
        )

    def stop(self) -> None:
        """Stop the server, and remove the transfer directory that this keeper made."""
        super().stop()
        if self._transfer_dir is not None:
            self._transfer_dir.remove_directory()


class RayServerPlacer:
    """A `rollout.fleet.server_process.LaunchPlacement` that starts each server from a Ray actor in
    the server's bundle.
    """

    def __init__(
        self,
        cluster: RayCluster,
        rollout: RolloutConfig,
        num_machines: int,
        num_cpus: float,
        num_gpus: int,
        locate_ranks: Callable[[], Sequence[ProcessLocation]],
        environment: Mapping[str, str],
        secret: bytes,
        first_bundle: int | None = None,
    ) -> None:
        """Make the placer; nothing is placed yet. `num_cpus` and `num_gpus` count for an engine on
        one machine; 0 GPUs on a CPU. `locate_ranks` waits until the trainer's ranks run and returns
        their places, by rank. The actors, and so the servers, get `environment`.

        `secret` is the run's secret, where machines other than the driver's start drivers.
        `first_bundle` is None for engines. For servers that score and take no weights,
        `first_bundle` is the index of their first bundle; other processes than the ranks and the
        driver call these servers.
        """
        self._cluster = cluster
        self._rollout = rollout
        self._num_machines = num_machines
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._locate_ranks = locate_ranks
        self._environment = environment
        self._first_bundle = first_bundle
        self._secret = secret if rollout.num_drivers != 0 else b""
        self._num_placed = 0

    def __call__(self, launch: ServerLaunch) -> ServerLaunch:
        """Return a launch that starts the server from an actor in the next bundle. Nothing starts
        yet; each call takes another bundle.
        """
        index = self._num_placed
        self._num_placed += 1
        rollout = self._rollout
        is_shared = self._rollout.colocated
        first = self._first_bundle
        is_known = first is None or self._cluster.is_own  # who asks it
        is_engine = first is None or is_shared
        number = (
            find_part_bundle(self._num_machines, is_shared, index)
            if is_engine
            else (first or 0) + index
        )

        def start_keeper(is_restart: bool) -> tuple[RemoteHandle, CallHandle]:
            """Start the actor, call it to start the server, and return the actor's handle and the
            call.
            """
            seating = EngineSeating(
                launch.name,
                read_machine_id() if is_known else "",
                tuple(self._locate_ranks()),
                first is None and must_share_driver_machine(rollout),
                self._num_gpus if is_shared else 0,
                index // self._num_machines * self._num_gpus,
                first is None and count_machines_per_engine(rollout) > 1,
            )
            keeper = self._cluster.start_object(
                launch.name,
                SelfSeatingKeeper,
                (os.getcwd(),),
                bundle_index=number,
                num_cpus=self._num_cpus,
                num_gpus=0 if is_shared else self._num_gpus,
                environment=self._environment,
            )
            makes_transfer_dir = (
                first is None
                and is_shared
                and rollout.weight_transport == "tensor"
                and not get_engine_kind(rollout.engine).can_run_elsewhere
            )
            call = keeper.submit_call(
                "start_server_here",
                launch,
                seating,
                is_restart,
                rollout.startup_timeout_s,
                makes_transfer_dir,
                self._secret,
            )
            return keeper, call

        machine = index % self._num_machines if is_shared else 0
        return KeeperLaunch(launch, start_keeper, rollout.startup_timeout_s, machine)
