"""Drivers as the controller sees them: the questions of its engines' clients go to processes that
ask in its place.

A driver that dies or hangs is started again. What it was asked ends in `DriverLostError`, as if the
engine had failed, so it is asked for again with the same seeds; the engine is not blamed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from rlhf_megatron.data import codec
from rlhf_megatron.data.expert_route_files import remove_route_files
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.plugins import list_loaded_plugins
from rlhf_megatron.rollout import generation_queries, http_client
from rlhf_megatron.rollout.drivers.driver_reply import HEARTBEAT, DriverReply
from rlhf_megatron.rollout.drivers.network_channel import NetworkMessageChannel
from rlhf_megatron.rollout.drivers.unix_channel import UnixMessageChannel, make_socket_pair
from rlhf_megatron.rollout.engine_interface import DriverLostError, SampleGroups
from rlhf_megatron.rollout.generation_queries import GenerationQuery

logger = logging.getLogger(__name__)

DRIVER_MODULE = "rlhf_megatron.rollout.drivers.driver_process"
_OPEN_TIMEOUT_S = 60.0
_CHECK_INTERVAL_S = 5.0
_MAX_SILENT_CHECKS = 12  # looks in a row at a driver that says nothing; then it hangs
_MAX_FAILED_STARTS = 3  # in a row that it ended by itself before it was there; then it is given up
_RECONNECT_DELAY_S = 1.0  # between connections to a machine that gives none
_ENGINES_PER_DRIVER = 32
_CORES_PER_DRIVER = 4

# (HOST:PORT of another machine's gate, number) -> a connection to a new driver there, see
# `runtime.driver_gate`. Raises OSError and EOFError. Set once in the controller of a run that has
# such machines.
connect_through_gate: Callable[[str, int], socket.socket] | None = None


def choose_driver_counts(
    gate_by_engine: Sequence[str], num_requested: int | None
) -> tuple[int, int]:
    """Return how many drivers this machine starts for the engines without a gate, and how many each
    other machine with a gate starts. `gate_by_engine`: for each engine the HOST:PORT at which its
    machine starts drivers, or "". `num_requested`: `rollout.num_drivers`, which both numbers
    follow; None chooses them by the number of engines and cores.
    """
    hosts = Counter(gate.rpartition(":")[0] for gate in gate_by_engine)
    near = hosts.pop("", 0)
    if num_requested is not None:
        return (num_requested if near else 0), num_requested
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    elsewhere = (
        -(-max(hosts.values(), default=0) // _ENGINES_PER_DRIVER)
        if len(gate_by_engine) >= _ENGINES_PER_DRIVER
        else 0
    )
    return min(near // _ENGINES_PER_DRIVER, cores // _CORES_PER_DRIVER), elsewhere


class DriverPool:
    """The drivers of this process. Until `close`, the generation queries of this process go through
    `num_local` drivers on this machine, and `num_per_machine` on each other machine that has
    engines and a driver gate.
    """

    def __init__(self, num_local: int, num_per_machine: int = 0) -> None:
        self._num_restarts = 0
        self._num_per_machine = num_per_machine
        self._driver_numbers = itertools.count()
        self._local_drivers: list[_LocalDriverHandle] = []
        self._remote_drivers: dict[str, list[_RemoteDriverHandle]] = {}  # by host
        http_client.run_in_event_loop(self._open_drivers(num_local), _OPEN_TIMEOUT_S)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the drivers on this machine."""
        return [driver.pid for driver in self._local_drivers]

    @property
    def are_all_ready(self) -> bool:
        """Return whether every driver has sent its first sign of life since it was started."""
        return all(driver.is_ready for driver in self._iterate_drivers())

    def send_query(self, query: GenerationQuery) -> Coroutine[Any, Any, SampleGroups]:
        """Have the least busy driver send the query and return the samples of each request: a
        driver on the engine's machine where there is one, else a local driver. Without local
        drivers this process sends the query itself. Raise DriverLostError where the driver ends
        before it answers, or where no driver is left.
        """
        able = [
            driver
            for driver in self._get_machine_drivers(query.server.drivers)
            if not driver.is_given_up
        ]
        able = able or [driver for driver in self._local_drivers if not driver.is_given_up]
        if not able and not self._local_drivers:
            return query.fetch_groups()
        if not able:
            raise DriverLostError(
                f"no driver is left: {self._local_drivers[0].exit_message}; set"
                " rollout.num_drivers to 0."
            )
        return min(
            able, key=lambda driver: (not driver.is_ready, driver.num_open_queries)
        ).send_query(query)

    def _get_machine_drivers(self, gate: str) -> Sequence[_DriverHandle]:
        """Return the drivers of the machine with this gate; start them at the first call. Return
        none where the gate is "" or other machines start no drivers.
        """
        host = gate.rpartition(":")[0]
        if not host or connect_through_gate is None or not self._num_per_machine:
            return ()
        if host not in self._remote_drivers:
            http_client.get_connection_slots().add_processes(self._num_per_machine)
            numbers = itertools.islice(self._driver_numbers, self._num_per_machine)
            self._remote_drivers[host] = [
                _RemoteDriverHandle(number, self._count_restart, gate) for number in numbers
            ]
        for driver in self._remote_drivers[host]:
            driver.gate = gate  # of the machine's gates one that has an engine
        return self._remote_drivers[host]

    def _iterate_drivers(self) -> Iterator[_DriverHandle]:
        """Iterate over all drivers, the local ones first."""
        return itertools.chain(self._local_drivers, *self._remote_drivers.values())

    def take_restart_count(self) -> int:
        """Return how often drivers were started again since the last call."""
        taken = self._num_restarts
        self._num_restarts = 0
        return taken

    def close(self) -> None:
        """End all drivers; this process sends its queries itself from then on. Safe to call
        twice.
        """
        http_client.run_in_event_loop(self._close_drivers(), _OPEN_TIMEOUT_S)

    async def _open_drivers(self, num_local: int) -> None:
        """Start the local drivers and the heartbeat checks, and route the loop's queries through
        this pool.
        """
        http_client.set_connection_limit(max(1, num_local))
        self._local_drivers = [
            _LocalDriverHandle(number, self._count_restart)
            for number in itertools.islice(self._driver_numbers, num_local)
        ]
        self._watch_task = asyncio.get_running_loop().create_task(self._check_drivers_forever())
        generation_queries.set_query_sender(self)

    async def _close_drivers(self) -> None:
        """Stop the heartbeat checks, restore the direct queries, and end all drivers."""
        self._watch_task.cancel()
        generation_queries.set_query_sender(None)
        http_client.set_connection_limit(1)
        for driver in self._iterate_drivers():
            driver.close()

    async def _check_drivers_forever(self) -> None:
        """Check the heartbeat of every driver every few seconds, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            for driver in self._iterate_drivers():
                driver.check_heartbeat()

    def _count_restart(self) -> None:
        """Count one restart of a driver."""
        self._num_restarts += 1


class _DriverHandle:
    """Send queries to one driver process, and start it again where it ends. Use it only in the loop
    of `rollout.http_client`.
    """

    _channel: UnixMessageChannel | NetworkMessageChannel

    def __init__(self, driver_number: int, count_restart: Callable[[], None]) -> None:
        self._driver_number = driver_number
        self._count_restart = count_restart
        self._future_by_query: dict[int, asyncio.Future[SampleGroups]] = {}
        self._query_numbers = itertools.count(HEARTBEAT + 1)
        self._num_starts = 1  # of these, and the one that is under way; 0: it is there
        self._num_silent_checks = 0
        self.exit_message = ""
        self._start_driver()

    @property
    def num_open_queries(self) -> int:
        """Return the number of queries that the driver has not answered."""
        return len(self._future_by_query)

    @property
    def is_ready(self) -> bool:
        """Return whether the driver has sent a message since it was last started."""
        return self._num_starts == 0

    @property
    def is_given_up(self) -> bool:
        """Return whether the driver failed to start too often and is not started again."""
        return self._num_starts > _MAX_FAILED_STARTS

    async def send_query(self, query: GenerationQuery) -> SampleGroups:
        """Send the query to the driver and return the samples of each request. Raise what the query
        raised in the driver, or DriverLostError. Where the waiting task is cancelled, tell the
        driver to cancel the query.
        """
        number = next(self._query_numbers)
        future = self._future_by_query[number] = asyncio.get_running_loop().create_future()
        self._channel.send_message(number, codec.encode_message_pieces(query))
        try:
            return await future
        finally:
            if self._future_by_query.pop(number, None) is not None:  # nobody waits for it any more
                self._channel.send_message(number)

    def check_heartbeat(self) -> None:
        """Count one more check without a message from the driver; after a minute of them, end the
        driver and start it again.
        """
        self._num_silent_checks += 1
        if self._num_silent_checks >= _MAX_SILENT_CHECKS and not self.is_given_up:
            logger.warning("%s hangs", self)
            self._channel.close()
            self._restart_or_give_up()

    def close(self) -> None:
        """End the driver, and fail its open queries with DriverLostError."""
        self._channel.close()
        self._end_process()
        self._fail_open_queries("the drivers were closed")

    def _start_driver(self) -> None:
        """Begin to start the driver, and set `_channel` to a new channel to it."""
        raise NotImplementedError

    def _end_process(self) -> tuple[str, bool]:
        """End what is left of the driver. Return how it ended, as the end of a sentence, and
        whether it ended by itself.
        """
        return "is gone", True

    def _handle_message(self, query_number: int, data: bytearray) -> None:
        """Take a message of the driver: a heartbeat, or the answer to a query, which goes to the
        query's future. Remove the route files of an answer that nobody awaits.
        """
        self._num_starts = self._num_silent_checks = 0
        if query_number == HEARTBEAT:
            return
        answered: DriverReply = codec.decode_message(data)
        future = self._future_by_query.pop(query_number, None)
        if future is None or future.done():
            remove_route_files(name for group in answered.groups for name in group.routes)
            return
        try:
            future.set_result(answered.read_groups())
        except RuntimeError as error:
            future.set_exception(error)

    def _restart_or_give_up(self) -> None:
        """Fail the open queries and start the driver again, or give it up after too many failed
        starts. The driver's end of the connection is closed already.
        """
        how, is_own = self._end_process()
        self._fail_open_queries(f"{self} {how}")
        self._num_starts = max(1, self._num_starts + is_own)
        if self.is_given_up:
            logger.error(
                "%s, %d times before it was there: it is given up",
                self.exit_message,
                _MAX_FAILED_STARTS,
            )
            return
        logger.warning("%s and is started again", self.exit_message)
        self._count_restart()
        self._num_silent_checks = 0
        self._start_driver()

    def _fail_open_queries(self, exit_message: str) -> None:
        """Fail all open queries with DriverLostError and remember the message."""
        self.exit_message = exit_message
        asked = self._future_by_query
        self._future_by_query = {}
        for future in asked.values():
            if not future.done():
                future.set_exception(DriverLostError(exit_message))


class _LocalDriverHandle(_DriverHandle):
    """A driver that is a child of this process."""

    def __str__(self) -> str:
        return f"driver{self._driver_number} (process {self.pid})"

    @property
    def pid(self) -> int:
        """Return the driver's process id."""
        return self._process.pid

    def _start_driver(self) -> None:
        """Start the driver process with one end of a socket pair, and open the channel on the other
        end.
        """
        ours, theirs = make_socket_pair()
        with theirs:
            self._process = start_driver_process(theirs, self._driver_number)
        self._channel = UnixMessageChannel(ours, self._handle_message, self._restart_or_give_up)

    def _end_process(self) -> tuple[str, bool]:
        """Kill the driver and wait for its end. A negative exit code, of a signal, does not count
        as its own failure.
        """
        self._process.kill()
        code = self._process.wait()
        return f"has ended with code {code}", code >= 0  # whoever kills one may do so at any time


class _RemoteDriverHandle(_DriverHandle):
    """A driver that another machine's gate starts as its child, and ends when the connection
    ends.
    """

    def __init__(self, driver_number: int, count_restart: Callable[[], None], gate: str) -> None:
        self.gate = gate
        super().__init__(driver_number, count_restart)

    def __str__(self) -> str:
        return f"driver{self._driver_number} at {self.gate}"

    def _start_driver(self) -> None:
        """Open a channel without a connection, and begin to connect it through the gate."""
        self._channel = NetworkMessageChannel(self._handle_message, self._restart_or_give_up)
        self._connect_task = asyncio.get_running_loop().create_task(
            self._connect_channel(self._channel)
        )

    async def _connect_channel(self, channel: NetworkMessageChannel) -> None:
        """Connect the channel to a new driver through the gate, after a delay that grows with the
        failed starts. Where it fails, restart or give up the driver.
        """
        await asyncio.sleep((self._num_starts - 1) * _RECONNECT_DELAY_S)
        assert connect_through_gate is not None
        try:
            await channel.attach_socket(
                await asyncio.to_thread(connect_through_gate, self.gate, self._driver_number)
            )
        except (OSError, EOFError) as error:
            if not channel.is_closed:
                logger.warning("%s is not to be had: %s", self, error)
                self._restart_or_give_up()


def start_driver_process(
    driver_socket: socket.socket, driver_number: int
) -> subprocess.Popen[bytes]:
    """Start a driver process on this machine and return it. It serves `driver_socket` and ends when
    the other end of that socket closes.
    """
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            DRIVER_MODULE,
            str(driver_socket.fileno()),
            str(driver_number),
            *list_loaded_plugins(),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=(driver_socket.fileno(),),
        start_new_session=True,  # Ctrl-C is not for it
        env={"OMP_NUM_THREADS": "1", **make_import_environment(os.environ)},
    )
