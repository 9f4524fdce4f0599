"""Servers on several machines under torchrun, of engines and reward models: a keeper on each machine that has some, but
for the controller's.

    agent 0 --- host 0 --- controller --- server of machine 0
    agent 1 --- host 8 --- keeper ------- server of machine 1        as long as machine 1 has ranks
                           keeper ------- server of machine 2        started by launch/torchrun.sh there, without ranks

A keeper registers on the control channel like a host, and so ends with the run, and the run with it. It makes its
launches from its own copy of the settings, which all machines must have alike: what the controller tells it is a name.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlhf_megatron.config.rules.machines import machines_of_parts, machines_of_servers
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.parallel.device import visible_devices
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.resharding.transfer_dir import TransferDir, make_transfer_dir_at
from rlhf_megatron.rewards.service.model_servers import SERVER, server_launches
from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.process import LOOPBACK, Launch, Progress, Seat, stop_together
from rlhf_megatron.rollout.fleet.start import EngineSetup
from rlhf_megatron.rollout.kinds import engine_kind
from rlhf_megatron.rollout.sglang.environment import BASE, VISIBLE
from rlhf_megatron.rollout.sglang.process import SGLangLaunch
from rlhf_megatron.runtime import channel, registration
from rlhf_megatron.runtime.controller import Deadlines
from rlhf_megatron.runtime.failures import HostError, describe
from rlhf_megatron.runtime.host import Activity
from rlhf_megatron.runtime.keepers import (
    Answer,
    KeptLaunch,
    LateAnswerError,
    LaunchElsewhere,
    ProcessLostError,
    Report,
    ServerKeeper,
)
from rlhf_megatron.runtime.messages import BUILD, Call, Reply
from rlhf_megatron.runtime.pool import ENGINES, PoolSpec, pools_of
from rlhf_megatron.runtime.processes import AGENTS_PARENT_ENV, die_with_parent, on_signals, redirect_output
from rlhf_megatron.runtime.ray.places import gpus_of_part, gpus_per_server
from rlhf_megatron.runtime.route_store import reach_stores, serve_routes
from rlhf_megatron.runtime.routed import RoutedGroups
from rlhf_megatron.runtime.service import Service
from rlhf_megatron.runtime.stopping import SIGNALS, HostStop

logger = logging.getLogger(__name__)


KEEPER_ENV = "RLHF_MEGATRON_KEEPER"  # in the environment of a keeper: the number of its machine
_ADDRESS_ENV = "RLHF_MEGATRON_KEEPER_OF"  # and HOST:PORT of the controller, where a host has started it
_PARENT_ENV = "RLHF_MEGATRON_KEEPER_PARENT"  # and that host's process
_REGISTER_S = 15.0  # for the controller to take a keeper that has just been told its address
_LOOK_AGAIN_S = 1.0
_VERBS = ("report", "send_signal", "request_stop", "stop", "kill")
_FRESH_S = 0.1  # reports of all engines are asked for together, not more often


@dataclass(frozen=True)
class KeeperPool(PoolSpec):
    """The keepers of a job, after its ranks."""

    machines: tuple[int, ...] = ()  # by place in the pool

    def where(self, rank: int) -> str:
        return f"[{self.name} of machine {self.machines[rank]}]"


def keeper_pool(config: RunConfig) -> KeeperPool | None:
    """Return the pool of keepers; None where all servers are on the controller's machine."""
    used = {*machines_of_parts(config), *machines_of_servers(config)}
    machines = tuple(sorted(used - {0})) if config.job == "train" else ()
    if not machines:
        return None
    return KeeperPool(ENGINES, Layout(len(machines)), pools_of(config)[-1].end, machines)


def seat_of_server(config: RunConfig, index: int, address: str) -> Seat:
    """Return the seat of a server of the reward model, behind the engines of its machine."""
    machines, served = machines_of_servers(config), config.reward_model.served
    names, place = {name.replace("_", "-") for name in served.args}, machines[:index].count(machines[index])
    if config.trainer.device == "cpu" or not visible_devices() or BASE in names or VISIBLE in served.env:
        return Seat(address)
    size = gpus_per_server(served)
    num_taken = 0
    if not config.rollout.colocated:
        has_ranks = machines[index] < config.trainer.nnodes
        num_engines = machines_of_parts(config).count(machines[index])
        num_taken = has_ranks * config.trainer.n_gpus_per_node + num_engines * gpus_of_part(config.rollout)
    first = num_taken + place * size
    own = visible_devices()[first : first + size]
    if len(own) < size:
        raise EngineError(
            f"{SERVER}{index} needs devices {first} to {first + size - 1} of machine {machines[index]}, but"
            f" {len(visible_devices())} are visible there; lower reward_model.served.num_servers, or set"
            " reward_model.served.machines."
        )
    return Seat(address, {VISIBLE: ",".join(own)} if own else {})


def seat_on(config: RunConfig, machine: int, place: int, address: str) -> Seat:
    """The seat of the part of an engine with that place among those of `machine`: the first free devices there, and
    those of its ranks, whose memory it opens. Raises EngineError where there are too few."""
    rollout, user = config.rollout, config.rollout.sglang
    names = {name.replace("_", "-") for name in user.args}
    if config.trainer.device == "cpu" or not visible_devices() or BASE in names or VISIBLE in user.env:
        return Seat(address)
    visible = visible_devices()
    of_ranks = visible[: config.trainer.n_gpus_per_node] if machine < config.trainer.nnodes else []
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


# ---- in the controller ----


class MachineEngines:
    """A `rollout.fleet.process.Place`: engines of machine 0 start here, others with their machine's keeper."""

    def __init__(self, config: RunConfig, group: RoutedGroups, run_dir: Path) -> None:
        """`group`: of the job, keepers included."""
        if config.actor.router_replay == "r3":
            self._store = serve_routes(run_dir, group.own_address)
        self._config = config
        self._group = group
        self._address = LOOPBACK if config.rollout.weight_transport == "tensor" else group.own_address
        self._machines = machines_of_parts(config)
        self._keepers = keeper_pool(config)
        self._num_placed = 0
        self._lock = threading.Lock()
        self._reports: dict[str, Report] = {}
        self._asked_at = 0.0

    def __call__(self, launch: Launch) -> Launch:
        index = self._num_placed
        self._num_placed += 1
        machine = self._machines[index]
        if machine == 0:
            launch.take(seat_on(self._config, 0, self._machines[:index].count(0), self._address))
            return launch
        return self._kept(launch, machine, index)

    def reward_server(self, launch: Launch) -> Launch:
        """Place a server of the reward model. Rewards are computed on the controller's machine."""
        index = int(launch.name.removeprefix(SERVER))
        machine = machines_of_servers(self._config)[index]
        if machine == 0:
            launch.take(seat_of_server(self._config, index, LOOPBACK))
            return launch
        return self._kept(launch, machine, index)

    def _kept(self, launch: Launch, machine: int, index: int) -> Launch:
        remote = _Kept(self, machine, launch.name)

        def begin(is_again: bool) -> tuple[_Kept, Answer]:
            return remote, remote.submit("begin", index, launch.transfer_dir, is_again, launch.meeting)

        return KeptLaunch(launch, begin, self._config.rollout.startup_timeout_s, machine)

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


# ---- in a keeper ----


def start_keeper(
    machine: int, controller: str, secret: bytes, arguments: Sequence[str], environment: Mapping[str, str]
) -> None:
    """Start the keeper of this machine, which ends with the control channel: `python arguments`."""
    own = {KEEPER_ENV: str(machine), _ADDRESS_ENV: controller, _PARENT_ENV: str(os.getpid())}
    own[channel.SECRET_ENV] = secret.decode()
    subprocess.Popen([sys.executable, *arguments], env={**environment, **own})


def keep(machine: int, config: RunConfig, run_dir: Path, deadlines: Deadlines) -> int:
    """The life of a keeper. Returns its exit code, on a machine without ranks the controller's. Raises ValueError where
    no engine of the run is on this machine, ConnectionError where there is no controller. On the main thread."""
    pool = keeper_pool(config)
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
    with contextlib.closing(MachineKeeper(config, machine, run_dir, found.own_address)) as keeper:
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

    def __init__(self, config: RunConfig, machine: int, run_dir: Path, address: str) -> None:
        """`address`: of this machine, as the controller reaches it."""
        self._config = config
        self._machine = machine
        self._run_dir = run_dir
        self._address = address
        self._launches: dict[str, Launch] = {}  # of all engines of the run, not started
        self._servers: list[Launch] = []  # of the reward model, the same
        self._keepers: dict[str, ServerKeeper] = {}
        self._transfer: TransferDir | None = None  # made here
        if config.actor.router_replay == "r3":
            self._store = serve_routes(run_dir, address)

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
        rollout = self._config.rollout
        if name.startswith(SERVER):
            seat = partial(seat_of_server, self._config, index, self._address)
            launches: Sequence[Launch] = self._servers or server_launches(self._config, self._run_dir, is_made=True)
            self._servers = [*launches]
            return self._start(launches[index], seat, is_again)
        if not engine_kind(rollout.engine).is_elsewhere and rollout.weight_transport == "tensor":
            # Weights come through memory of this machine alone, and so does what the engine says of them.
            self._transfer = self._transfer or make_transfer_dir_at(transfer_dir)
        if not self._launches:
            EngineSetup.of(self._config).start(self._run_dir, transfer_dir, None, self._recorded)
        place = machines_of_parts(self._config)[:index].count(self._machine)
        seat = partial(seat_on, self._config, self._machine, place, self._address)
        return self._start(self._launches[name], seat, is_again, meeting)

    def _start(self, launch: Launch, seat: Callable[[], Seat], is_again: bool, meeting: str = "") -> str:
        former = self._keepers.get(launch.name)
        address = None if former is None else former.report().address
        if address is not None and isinstance(launch, SGLangLaunch) and not launch.is_engine:
            launch.port = urlsplit(address.url).port  # rewards know it
        keeper = self._keepers[launch.name] = ServerKeeper()
        launch = copy.copy(launch)
        launch.meeting = meeting
        return keeper.begin(launch, seat, is_again, self._config.rollout.startup_timeout_s)

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
