"""Drivers as the controller sees them: the questions of its engines' clients go to processes that ask in its place.

A driver that dies or hangs is started again. What it was asked ends in `DriverLostError`, as if the engine had failed,
so it is asked for again with the same seeds; the engine is not blamed.
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
from rlhf_megatron.data.routes import remove_routes
from rlhf_megatron.plugins import loaded
from rlhf_megatron.rollout import http, questions
from rlhf_megatron.rollout.drivers.messages import BEAT, Answered
from rlhf_megatron.rollout.drivers.port import Port, pair
from rlhf_megatron.rollout.drivers.stream import Stream
from rlhf_megatron.rollout.engine import DriverLostError, Groups
from rlhf_megatron.rollout.questions import Question

logger = logging.getLogger(__name__)

MODULE = "rlhf_megatron.rollout.drivers.process"
_OPEN_S = 60.0
_LOOK_S = 5.0
_SILENT = 12  # looks in a row at a driver that says nothing; then it hangs
_STARTS = 3  # in a row that it ended by itself before it was there; then it is given up
_AGAIN_S = 1.0  # between connections to a machine that gives none
_ENGINES_EACH, _CORES_EACH = 32, 4

# (HOST:PORT of another machine's gate, number) -> a connection to a new driver there, see `runtime.driver_gate`. Raises
# OSError and EOFError. Set once in the controller of a run that has such machines.
reach: Callable[[str, int], socket.socket] | None = None


def counts(gates: Sequence[str], wanted: int | None) -> tuple[int, int]:
    """Drivers on this machine for the engines whose machines start none, and on each other machine. `gates`: where the
    machine of each engine starts some, or "". `wanted`: `rollout.num_drivers`."""
    hosts = Counter(gate.rpartition(":")[0] for gate in gates)
    near = hosts.pop("", 0)
    if wanted is not None:
        return (wanted if near else 0), wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    elsewhere = -(-max(hosts.values(), default=0) // _ENGINES_EACH) if len(gates) >= _ENGINES_EACH else 0
    return min(near // _ENGINES_EACH, cores // _CORES_EACH), elsewhere


class Drivers:
    """The drivers of this process: its questions go through `count` of them, and through `count_elsewhere` on each
    machine with engines that starts some, until `close`."""

    def __init__(self, count: int, count_elsewhere: int = 0) -> None:
        self._num_restarts = 0
        self._count_elsewhere = count_elsewhere
        self._numbers = itertools.count()
        self._drivers: list[_NearDriver] = []
        self._elsewhere: dict[str, list[_FarDriver]] = {}  # by host
        http.run(self._open(count), _OPEN_S)

    @property
    def pids(self) -> list[int]:
        return [driver.pid for driver in self._drivers]

    @property
    def are_ready(self) -> bool:
        """All have said that they are there."""
        return all(driver.is_ready for driver in self._all())

    def ask(self, question: Question) -> Coroutine[Any, Any, Groups]:
        """Ask a driver, as `questions.ask` asks an engine: one on the engine's machine where there is one. Raises
        DriverLostError where the driver ends before it answers.
        """
        able = [driver for driver in self._of(question.server.drivers) if not driver.is_given_up]
        able = able or [driver for driver in self._drivers if not driver.is_given_up]
        if not able and not self._drivers:
            return question.answer()
        if not able:
            raise DriverLostError(f"no driver is left: {self._drivers[0].ending}; set rollout.num_drivers to 0.")
        return min(able, key=lambda driver: (not driver.is_ready, driver.num_asked)).ask(question)

    def _of(self, gate: str) -> Sequence[_Driver]:
        """The drivers of a machine, which start when they are asked for the first time."""
        host = gate.rpartition(":")[0]
        if not host or reach is None or not self._count_elsewhere:
            return ()
        if host not in self._elsewhere:
            http.connections().grow(self._count_elsewhere)
            numbers = itertools.islice(self._numbers, self._count_elsewhere)
            self._elsewhere[host] = [_FarDriver(number, self._count, gate) for number in numbers]
        for driver in self._elsewhere[host]:
            driver.gate = gate  # of the machine's gates one that has an engine
        return self._elsewhere[host]

    def _all(self) -> Iterator[_Driver]:
        return itertools.chain(self._drivers, *self._elsewhere.values())

    def take_restarts(self) -> int:
        """Since the last time."""
        taken, self._num_restarts = self._num_restarts, 0
        return taken

    def close(self) -> None:
        """Safe to call twice."""
        http.run(self._close(), _OPEN_S)

    async def _open(self, count: int) -> None:
        http.limit_connections(max(1, count))
        self._drivers = [_NearDriver(number, self._count) for number in itertools.islice(self._numbers, count)]
        self._watch = asyncio.get_running_loop().create_task(self._look())
        questions.use(self)

    async def _close(self) -> None:
        self._watch.cancel()
        questions.use(None)
        http.limit_connections(1)
        for driver in self._all():
            driver.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for driver in self._all():
                driver.look()

    def _count(self) -> None:
        self._num_restarts += 1


class _Driver:
    """Asks one driver, and starts it again where it ends. Used in the loop of `rollout.http` alone."""

    _port: Port | Stream

    def __init__(self, number: int, count_restart: Callable[[], None]) -> None:
        self._number = number
        self._count_restart = count_restart
        self._asked: dict[int, asyncio.Future[Groups]] = {}
        self._numbers = itertools.count(BEAT + 1)
        self._num_starts = 1  # of these, and the one that is under way; 0: it is there
        self._num_silent = 0
        self.ending = ""
        self._start()

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    @property
    def is_ready(self) -> bool:
        return self._num_starts == 0

    @property
    def is_given_up(self) -> bool:
        return self._num_starts > _STARTS

    async def ask(self, question: Question) -> Groups:
        number = next(self._numbers)
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        self._port.send(number, codec.encode_parts(question))
        try:
            return await future
        finally:
            if self._asked.pop(number, None) is not None:  # nobody waits for it any more
                self._port.send(number)

    def look(self) -> None:
        """End the driver if it has said nothing for a minute."""
        self._num_silent += 1
        if self._num_silent >= _SILENT and not self.is_given_up:
            logger.warning("%s hangs", self)
            self._port.close()
            self._ended()

    def close(self) -> None:
        self._port.close()
        self._reap()
        self._lose("the drivers were closed")

    def _start(self) -> None:
        """Begin to start it, with a new port."""
        raise NotImplementedError

    def _reap(self) -> tuple[str, bool]:
        """End what is left of it. Returns how it has ended, and whether it did so by itself."""
        return "is gone", True

    def _take(self, number: int, data: bytearray) -> None:
        self._num_starts = self._num_silent = 0
        if number == BEAT:
            return
        answered: Answered = codec.decode(data)
        future = self._asked.pop(number, None)
        if future is None or future.done():
            remove_routes(name for group in answered.groups for name in group.routes)
            return
        try:
            future.set_result(answered.read())
        except RuntimeError as error:
            future.set_exception(error)

    def _ended(self) -> None:
        """Start the driver again, or give it up: its end of the connection is closed."""
        how, is_own = self._reap()
        self._lose(f"{self} {how}")
        self._num_starts = max(1, self._num_starts + is_own)
        if self.is_given_up:
            logger.error("%s, %d times before it was there: it is given up", self.ending, _STARTS)
            return
        logger.warning("%s and is started again", self.ending)
        self._count_restart()
        self._num_silent = 0
        self._start()

    def _lose(self, words: str) -> None:
        self.ending = words
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(DriverLostError(words))


class _NearDriver(_Driver):
    """A child of this process."""

    def __str__(self) -> str:
        return f"driver{self._number} (process {self.pid})"

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = pair()
        with theirs:
            self._process = start_process(theirs, self._number)
        self._port = Port(ours, self._take, self._ended)

    def _reap(self) -> tuple[str, bool]:
        self._process.kill()
        code = self._process.wait()
        return f"has ended with code {code}", code >= 0  # whoever kills one may do so at any time


class _FarDriver(_Driver):
    """A child of another machine's gate, which ends it with the connection."""

    def __init__(self, number: int, count_restart: Callable[[], None], gate: str) -> None:
        self.gate = gate
        super().__init__(number, count_restart)

    def __str__(self) -> str:
        return f"driver{self._number} at {self.gate}"

    def _start(self) -> None:
        self._port = Stream(self._take, self._ended)
        self._opening = asyncio.get_running_loop().create_task(self._connect(self._port))

    async def _connect(self, port: Stream) -> None:
        await asyncio.sleep((self._num_starts - 1) * _AGAIN_S)
        assert reach is not None
        try:
            await port.use(await asyncio.to_thread(reach, self.gate, self._number))
        except (OSError, EOFError) as error:
            if not port.is_closed:
                logger.warning("%s is not to be had: %s", self, error)
                self._ended()


def start_process(theirs: socket.socket, number: int) -> subprocess.Popen[bytes]:
    """Start a driver of this machine, which ends with the other end of `theirs`."""
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(theirs.fileno()), str(number), *loaded()],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # Ctrl-C is not for it
        env={"OMP_NUM_THREADS": "1", **os.environ},
    )
