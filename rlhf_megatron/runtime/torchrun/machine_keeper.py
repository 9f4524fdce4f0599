"""The keeper of a machine, under torchrun: parent of the servers there, as `engines` tells it.

It registers on the control channel like a host, and so ends with the run, and the run with it. It
makes its launches from its own copy of the settings, which all machines must have alike: what the
controller tells it is a name.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.parent_process import end_with_parent, outlive_parent
from rlhf_megatron.rewards.service.reward_model_servers import SERVER, make_server_launches
from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.engine_kinds import get_engine_kind
from rlhf_megatron.rollout.fleet.server_process import (
    ServerLaunch,
    ServerSeat,
    StartProgress,
    stop_processes,
)
from rlhf_megatron.rollout.sglang.sglang_launch import SGLangServerLaunch
from rlhf_megatron.rollout.transports.transfer_dir import (
    TransferDirectory,
    make_transfer_directory_at,
)
from rlhf_megatron.runtime import host_registration, message_channel
from rlhf_megatron.runtime.control_messages import BUILD, RoleCall, RoleCallReply
from rlhf_megatron.runtime.driver_gate import DriverGate
from rlhf_megatron.runtime.host_control import RunDeadlines
from rlhf_megatron.runtime.host_errors import make_host_failure
from rlhf_megatron.runtime.host_service import HostService
from rlhf_megatron.runtime.process_control import (
    AGENTS_PARENT_ENV,
    KEEPER_ENV,
    handle_signals_in_thread,
    redirect_output,
)
from rlhf_megatron.runtime.rank_pools import ENGINES
from rlhf_megatron.runtime.role_host import MainThreadActivity
from rlhf_megatron.runtime.route_store import enable_route_stores, get_run_secret, start_route_store
from rlhf_megatron.runtime.server_keepers import RemoteLaunch, ServerKeeper, ServerReport
from rlhf_megatron.runtime.stop_signals import SIGNALS, HostStopHandler
from rlhf_megatron.runtime.torchrun.machine_servers import (
    ServerMachines,
    assign_engine_part_seat,
    assign_reward_server_seat,
)

logger = logging.getLogger(__name__)

# HOST:PORT of the controller, where a host has started this keeper
_ADDRESS_ENV = "RLHF_MEGATRON_KEEPER_OF"
_PARENT_ENV = "RLHF_MEGATRON_KEEPER_PARENT"  # and that host's process
_REGISTER_S = 15.0  # for the controller to take a keeper that has just been told its address
_LOOK_AGAIN_S = 1.0
_VERBS = ("report", "send_signal", "request_stop", "stop", "kill")


def start_keeper_process(
    machine: int,
    controller_address: str,
    secret: bytes,
    arguments: Sequence[str],
    environment: Mapping[str, str],
) -> None:
    """Start the keeper of this machine as the process `python arguments`, with the controller's
    address and the secret in its environment. The keeper ends with the control channel.
    """
    own = {
        KEEPER_ENV: str(machine),
        _ADDRESS_ENV: controller_address,
        _PARENT_ENV: str(os.getpid()),
    }
    own[message_channel.SECRET_ENV] = secret.decode()
    keeper_environment = make_import_environment({**environment, **own})
    subprocess.Popen([sys.executable, *arguments], env=keeper_environment)


def run_keeper(
    machine: int, servers: ServerMachines, run_dir: Path, deadlines: RunDeadlines
) -> int:
    """Run as the keeper of `machine` until the run ends. Return its exit code: on a machine without
    ranks the controller's, else 0. Must be called on the main thread.

    Raise ValueError where no server of the run is on this machine, ConnectionError where there is
    no controller.
    """
    pool = servers.keeper_pool
    if pool is None or machine not in pool.machines:
        raise ValueError(
            f"no server of this run is on machine {machine}; name it in rollout.engine_machines,"
            " or start fewer machines."
        )
    rank = pool.machines.index(machine)
    found, exit_code = _register_keeper(rank, machine, deadlines.startup_s)
    console = redirect_output(run_dir / "logs" / f"engines{machine}.log")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    os.close(console)
    stopping = HostStopHandler(deadlines.stop_s)
    handle_signals_in_thread(SIGNALS, stopping.handle_signal)
    activity = MainThreadActivity(pool.format_rank_label(rank))
    service = HostService(found, activity, lambda: 1)
    stopping.send_notice = service.send_signal_notice
    stopping.is_startup = False
    service.send_reply(RoleCallReply(BUILD))
    with contextlib.closing(
        MachineKeeper(servers, machine, run_dir, found.local_address)
    ) as keeper:
        while (call := service.wait_for_call()) is not None:
            with activity.enter_stage(call.method, "running"):
                service.send_reply(_handle_keeper_call(keeper, call, activity.rank_label))
    service.leave_run()
    return exit_code()


def _register_keeper(
    rank: int, machine: int, timeout_s: float
) -> tuple[message_channel.MessageChannel, Callable[[], int]]:
    """Register with the controller. Return the channel, and a function that waits for this
    process's exit code. Raise ConnectionError.
    """
    secret = message_channel.read_secret(os.environ)
    os.environ.pop(message_channel.SECRET_ENV, None)
    parents = [os.environ.pop(name, None) for name in (_PARENT_ENV, AGENTS_PARENT_ENV)]
    end_with_parent(signal.SIGTERM, next((int(parent) for parent in parents if parent), None))
    if (controller := os.environ.pop(_ADDRESS_ENV, None)) is None:
        found = _register_without_rank(rank, machine, secret, timeout_s)
    else:
        assert secret is not None, "who started this process gave it the secret"
        host, _, port = controller.rpartition(":")
        enable_route_stores(secret)
        found = (
            host_registration.register_host(host, int(port), secret, rank, ENGINES, timeout_s),
            lambda: 0,
        )
    outlive_parent()  # from here on it ends with the control channel, in order
    return found


def _register_without_rank(
    rank: int, machine: int, secret: bytes | None, timeout_s: float
) -> tuple[message_channel.MessageChannel, Callable[[], int]]:
    """Register as the keeper of a machine without a rank, for which the controller's address comes
    from the store at MASTER_ADDR; try again until `timeout_s`, since the machine may be early or
    find an attempt that has ended. Return the channel, and a function that waits for the exit code.
    """
    from rlhf_megatron.runtime.torchrun.control_store import find_controller, read_exit_code

    deadline = time.monotonic() + timeout_s
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            if (place := find_controller(left, secret)) is not None:
                controller, drawn, store = place
                host, _, port = controller.rpartition(":")
                tried_s = min(left, _REGISTER_S)
                enable_route_stores(drawn)
                found = host_registration.register_host(
                    host, int(port), drawn, rank, ENGINES, tried_s
                )
                return found, partial(read_exit_code, store, machine)
        except (
            RuntimeError,
            ConnectionError,
        ) as error:  # the first: torch's, of a store that is not there
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"machine {machine} has found no controller within {timeout_s:g} s"
                    f" (MASTER_ADDR {os.environ.get('MASTER_ADDR')}): {error}"
                ) from error
        time.sleep(_LOOK_AGAIN_S)


def _handle_keeper_call(keeper: MachineKeeper, call: RoleCall, keeper_label: str) -> RoleCallReply:
    """Carry out an order, or collect the reports, and return the reply. A failure is in the reply;
    no Exception is raised.
    """
    try:
        is_order = call.method == f"{ENGINES}.order"
        return RoleCallReply(
            call.id,
            value=keeper.handle_order(**call.arguments) if is_order else keeper.collect_reports(),
        )
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("%s failed", call.method)
        return RoleCallReply(call.id, failure=make_host_failure(error, keeper_label))


class MachineKeeper:
    """The keepers of the servers of one machine."""

    def __init__(self, servers: ServerMachines, machine: int, run_dir: Path, address: str) -> None:
        """Keep the servers' settings; start the store of routes and the gate of drivers where the
        machine needs them. `address` is the address at which the controller reaches this machine.
        """
        self._server_machines = servers
        self._setup = servers.setup
        self._machine = machine
        self._run_dir = run_dir
        self._address = address
        # of all engines of the run, not started
        self._engine_launches: dict[str, ServerLaunch] = {}
        self._reward_server_launches: list[ServerLaunch] = []  # of the reward model, the same
        self._server_keepers: dict[str, ServerKeeper] = {}
        self._transfer_dir: TransferDirectory | None = None  # made here
        if servers.keeps_routes:
            self._route_store = start_route_store(run_dir, address)
        has_drivers = (
            machine in servers.engine_part_machines and self._setup.rollout.num_drivers != 0
        )
        self._driver_gate = DriverGate(address, get_run_secret()) if has_drivers else None

    def handle_order(self, machine: int, name: str, verb: str, arguments: Sequence[Any]) -> Any:
        """Start the server `name` for the verb "begin", else call the method `verb` of its keeper,
        and return the result. Return None where `machine` is another machine.
        """
        if machine != self._machine:
            return None
        if verb == "begin":
            return self._start_server(name, *arguments)
        assert verb in _VERBS, f"a keeper does not {verb}"
        return getattr(self._server_keepers[name], verb)(*arguments)

    def collect_reports(self) -> dict[str, ServerReport]:
        """Return the reports of the servers of this machine, by name."""
        return {name: keeper.report() for name, keeper in self._server_keepers.items()}

    def close(self) -> None:
        """Stop all servers, and remove the transfer directory that this keeper made."""
        stop_processes(
            [
                keeper.server_process
                for keeper in self._server_keepers.values()
                if keeper.server_process is not None
            ]
        )
        if self._transfer_dir is not None:
            self._transfer_dir.remove_directory()

    def _start_server(
        self,
        name: str,
        server_index: int,
        transfer_dir: Path,
        is_restart: bool,
        rendezvous_address: str,
    ) -> str:
        """Make the launch of the engine part or reward-model server `name` from this machine's own
        settings, and start it. Return the rendezvous address.
        """
        rollout = self._setup.rollout
        if name.startswith(SERVER):
            seat = partial(
                assign_reward_server_seat, self._server_machines, server_index, self._address
            )
            if not self._reward_server_launches:
                reward_model = self._server_machines.reward_model
                self._reward_server_launches = [
                    *make_server_launches(self._setup, reward_model, self._run_dir, may_exist=True)
                ]
            return self._start_launch(self._reward_server_launches[server_index], seat, is_restart)
        if (
            not get_engine_kind(rollout.engine).can_run_elsewhere
            and rollout.weight_transport == "tensor"
        ):
            # Weights come through memory of this machine alone, and so does what the
            # engine says of them.
            self._transfer_dir = self._transfer_dir or make_transfer_directory_at(transfer_dir)
        if not self._engine_launches:
            self._setup.start_servers(self._run_dir, transfer_dir, None, self._record_launch)
        place = self._server_machines.engine_part_machines[:server_index].count(self._machine)
        seat = partial(
            assign_engine_part_seat,
            rollout,
            self._setup.trainer,
            self._machine,
            place,
            self._address,
        )
        return self._start_launch(self._engine_launches[name], seat, is_restart, rendezvous_address)

    def _start_launch(
        self,
        launch: ServerLaunch,
        find_seat: Callable[[], ServerSeat],
        is_restart: bool,
        rendezvous_address: str = "",
    ) -> str:
        """Start the launch under a new keeper and return its rendezvous address. A reward-model
        server that was started before keeps its port.
        """
        former = self._server_keepers.get(launch.name)
        address = None if former is None else former.report().address
        if address is not None and isinstance(launch, SGLangServerLaunch) and not launch.is_engine:
            launch.fixed_port = urlsplit(address.url).port  # rewards know it
        keeper = self._server_keepers[launch.name] = ServerKeeper()
        keeper.driver_gate = self._driver_gate
        launch = copy.copy(launch)
        launch.rendezvous_address = rendezvous_address
        return keeper.start_server(
            launch, find_seat, is_restart, self._setup.rollout.startup_timeout_s
        )

    def _record_launch(self, launch: ServerLaunch) -> ServerLaunch:
        """Record a launch by its name, and return a substitute that starts nothing."""
        self._engine_launches[launch.name] = launch
        return _RecordedLaunch(launch)


@dataclass
class _RecordedLaunch(RemoteLaunch):
    """A launch that starts nothing, given back in place of a launch that was recorded."""

    process: None = None

    def take_seat(self, seat: ServerSeat) -> None:
        """Raise AssertionError: a recorded launch has no seat."""
        raise AssertionError("it has none")

    def start(self) -> None:
        """Do nothing."""

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Return an empty address at once."""
        return EngineAddress(self.name, "", "", "")
