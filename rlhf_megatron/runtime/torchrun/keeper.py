"""The keeper of a machine, under torchrun: parent of the servers there, as `engines` tells it.

It registers on the control channel like a host, and so ends with the run, and the run with it. It makes its launches
from its own copy of the settings, which all machines must have alike: what the controller tells it is a name.
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

from rlhf_megatron.resharding.transfer_dir import TransferDir, make_transfer_dir_at
from rlhf_megatron.rewards.service.model_servers import SERVER, server_launches
from rlhf_megatron.rollout.engine import EngineAddress
from rlhf_megatron.rollout.fleet.process import Launch, Progress, Seat, stop_together
from rlhf_megatron.rollout.kinds import engine_kind
from rlhf_megatron.rollout.sglang.process import SGLangLaunch
from rlhf_megatron.runtime import channel, registration
from rlhf_megatron.runtime.controller import Deadlines
from rlhf_megatron.runtime.driver_gate import DriverGate
from rlhf_megatron.runtime.failures import describe
from rlhf_megatron.runtime.host import Activity
from rlhf_megatron.runtime.keepers import (
    LaunchElsewhere,
    Report,
    ServerKeeper,
)
from rlhf_megatron.runtime.messages import BUILD, Call, Reply
from rlhf_megatron.runtime.pool import ENGINES
from rlhf_megatron.runtime.processes import (
    AGENTS_PARENT_ENV,
    KEEPER_ENV,
    die_with_parent,
    on_signals,
    redirect_output,
)
from rlhf_megatron.runtime.route_store import reach_stores, run_secret, serve_routes
from rlhf_megatron.runtime.service import Service
from rlhf_megatron.runtime.stopping import SIGNALS, HostStop
from rlhf_megatron.runtime.torchrun.engines import Servers, seat_of_server, seat_on

logger = logging.getLogger(__name__)

_ADDRESS_ENV = "RLHF_MEGATRON_KEEPER_OF"  # HOST:PORT of the controller, where a host has started this keeper
_PARENT_ENV = "RLHF_MEGATRON_KEEPER_PARENT"  # and that host's process
_REGISTER_S = 15.0  # for the controller to take a keeper that has just been told its address
_LOOK_AGAIN_S = 1.0
_VERBS = ("report", "send_signal", "request_stop", "stop", "kill")


def start_keeper(
    machine: int, controller: str, secret: bytes, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start the keeper of this machine, which ends with the control channel: `python arguments`."""
    own = {KEEPER_ENV: str(machine), _ADDRESS_ENV: controller, _PARENT_ENV: str(os.getpid())}
    own[channel.SECRET_ENV] = secret.decode()
    subprocess.Popen([sys.executable, *arguments], env={**environment, **own})


def keep(machine: int, servers: Servers, run_dir: Path, deadlines: Deadlines) -> int:
    """Live as a keeper. Returns its exit code, on a machine without ranks the controller's. Raises ValueError where no
    engine of the run is on this machine, ConnectionError where there is no controller. On the main thread."""
    pool = servers.keepers
    if pool is None or machine not in pool.machines:
        raise ValueError(
            f"no server of this run is on machine {machine}; name it in rollout.engine_machines, or start fewer"
            " machines."
        )
    rank = pool.machines.index(machine)
    found, exit_code = _registered(rank, machine, deadlines.startup_s)
    console = redirect_output(run_dir / "logs" / f"engines{machine}.log")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    os.close(console)
    stopping = HostStop(deadlines.stop_s)
    on_signals(SIGNALS, stopping.on_signal)
    activity = Activity(pool.where(rank))
    service = Service(found, activity, lambda: 1)
    stopping.send, stopping.is_startup = service.tell, False
    service.answer(Reply(BUILD))
    with contextlib.closing(MachineKeeper(servers, machine, run_dir, found.own_address)) as keeper:
        while (call := service.next_call()) is not None:
            with activity.doing(call.method, "running"):
                service.answer(_obeyed(keeper, call, activity.where))
    service.leave()
    return exit_code()


def _registered(rank: int, machine: int, timeout_s: float) -> tuple[channel.Channel, Callable[[], int]]:
    """The channel to the controller, and what waits for this process's exit code. Raises ConnectionError."""
    secret = channel.given_secret(os.environ)
    os.environ.pop(channel.SECRET_ENV, None)
    parents = [os.environ.pop(name, None) for name in (_PARENT_ENV, AGENTS_PARENT_ENV)]
    die_with_parent(signal.SIGTERM, next((int(parent) for parent in parents if parent), None))
    if (controller := os.environ.pop(_ADDRESS_ENV, None)) is None:
        found = _registered_from_afar(rank, machine, secret, timeout_s)
    else:
        assert secret is not None, "who started this process gave it the secret"
        host, _, port = controller.rpartition(":")
        reach_stores(secret)
        found = registration.register_host(host, int(port), secret, rank, ENGINES, timeout_s), lambda: 0
    die_with_parent(0)  # from here on it ends with the control channel, in order
    return found


def _registered_from_afar(
    rank: int, machine: int, secret: bytes | None, timeout_s: float
) -> tuple[channel.Channel, Callable[[], int]]:
    """Register a machine without a rank, which may be early, or find what is left of an attempt that has ended."""
    from rlhf_megatron.runtime.torchrun.launcher import find_controller, told_exit_code

    deadline = time.monotonic() + timeout_s
    while True:
        left = max(1.0, deadline - time.monotonic())
        try:
            if (place := find_controller(left, secret)) is not None:
                controller, drawn, store = place
                host, _, port = controller.rpartition(":")
                tried_s = min(left, _REGISTER_S)
                reach_stores(drawn)
                found = registration.register_host(host, int(port), drawn, rank, ENGINES, tried_s)
                return found, partial(told_exit_code, store, machine)
        except (RuntimeError, ConnectionError) as error:  # the first: torch's, of a store that is not there
            if time.monotonic() > deadline:
                raise ConnectionError(
                    f"machine {machine} has found no controller within {timeout_s:g} s"
                    f" (MASTER_ADDR {os.environ.get('MASTER_ADDR')}): {error}"
                ) from error
        time.sleep(_LOOK_AGAIN_S)


def _obeyed(keeper: MachineKeeper, call: Call, where: str) -> Reply:
    try:
        is_order = call.method == f"{ENGINES}.order"
        return Reply(call.id, value=keeper.order(**call.arguments) if is_order else keeper.reports())
    except Exception as error:  # whatever it is, the controller must learn it
        logger.exception("%s failed", call.method)
        return Reply(call.id, failure=describe(error, where))


class MachineKeeper:
    """Parent of the servers of one machine."""

    def __init__(self, servers: Servers, machine: int, run_dir: Path, address: str) -> None:
        """`address`: of this machine, as the controller reaches it."""
        self._of_run, self._setup = servers, servers.setup
        self._machine = machine
        self._run_dir = run_dir
        self._address = address
        self._launches: dict[str, Launch] = {}  # of all engines of the run, not started
        self._servers: list[Launch] = []  # of the reward model, the same
        self._keepers: dict[str, ServerKeeper] = {}
        self._transfer: TransferDir | None = None  # made here
        if servers.keeps_routes:
            self._store = serve_routes(run_dir, address)
        has_drivers = machine in servers.of_parts and self._setup.rollout.num_drivers != 0
        self._gate = DriverGate(address, run_secret()) if has_drivers else None

    def order(self, machine: int, name: str, verb: str, arguments: Sequence[Any]) -> Any:
        """Obey, where that is this machine."""
        if machine != self._machine:
            return None
        if verb == "begin":
            return self._begin(name, *arguments)
        assert verb in _VERBS, f"a keeper does not {verb}"
        return getattr(self._keepers[name], verb)(*arguments)

    def reports(self) -> dict[str, Report]:
        """Return the reports, by engine."""
        return {name: keeper.report() for name, keeper in self._keepers.items()}

    def close(self) -> None:
        """All servers end."""
        stop_together([keeper.process for keeper in self._keepers.values() if keeper.process is not None])
        if self._transfer is not None:
            self._transfer.close()

    def _begin(self, name: str, index: int, transfer_dir: Path, is_again: bool, meeting: str) -> str:
        rollout = self._setup.rollout
        if name.startswith(SERVER):
            seat = partial(seat_of_server, self._of_run, index, self._address)
            if not self._servers:
                reward_model = self._of_run.reward_model
                self._servers = [*server_launches(self._setup, reward_model, self._run_dir, is_made=True)]
            return self._start(self._servers[index], seat, is_again)
        if not engine_kind(rollout.engine).is_elsewhere and rollout.weight_transport == "tensor":
            # Weights come through memory of this machine alone, and so does what the engine says of them.
            self._transfer = self._transfer or make_transfer_dir_at(transfer_dir)
        if not self._launches:
            self._setup.start(self._run_dir, transfer_dir, None, self._recorded)
        place = self._of_run.of_parts[:index].count(self._machine)
        seat = partial(seat_on, rollout, self._setup.trainer, self._machine, place, self._address)
        return self._start(self._launches[name], seat, is_again, meeting)

    def _start(self, launch: Launch, seat: Callable[[], Seat], is_again: bool, meeting: str = "") -> str:
        former = self._keepers.get(launch.name)
        address = None if former is None else former.report().address
        if address is not None and isinstance(launch, SGLangLaunch) and not launch.is_engine:
            launch.port = urlsplit(address.url).port  # rewards know it
        keeper = self._keepers[launch.name] = ServerKeeper()
        keeper.gate = self._gate
        launch = copy.copy(launch)
        launch.meeting = meeting
        return keeper.begin(launch, seat, is_again, self._setup.rollout.startup_timeout_s)

    def _recorded(self, launch: Launch) -> Launch:
        self._launches[launch.name] = launch
        return _Recorded(launch)


@dataclass
class _Recorded(LaunchElsewhere):
    """Starts nothing: its launch is looked at for the kind's way to start."""

    process: None = None

    def take(self, seat: Seat) -> None:
        raise AssertionError("it has none")

    def start(self) -> None:
        pass

    def wait(self, deadline: float, progress: Progress | None) -> EngineAddress:
        return EngineAddress(self.name, "", "", "")
