"""Drivers as the controller sees them: the questions of its engines' clients go to processes that ask in its place.

A driver that dies or hangs is started again. What it was asked ends in `DriverLostError`, as if the engine had failed,
so it is asked for again with the same seeds; the engine is not blamed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import subprocess
import sys
from collections.abc import Callable

from rlhf_megatron.data import codec
from rlhf_megatron.data.routes import remove_routes
from rlhf_megatron.plugins import loaded
from rlhf_megatron.rollout import http, questions
from rlhf_megatron.rollout.drivers.messages import BEAT, Answered
from rlhf_megatron.rollout.drivers.port import Port, pair
from rlhf_megatron.rollout.engine import DriverLostError, Groups
from rlhf_megatron.rollout.questions import Question

logger = logging.getLogger(__name__)

MODULE = "rlhf_megatron.rollout.drivers.process"
_OPEN_S = 60.0
_LOOK_S = 5.0
_SILENT = 12  # looks in a row at a driver that says nothing; then it hangs
_STARTS = 3  # in a row that it ended by itself before it was there; then it is given up
_ENGINES_EACH, _CORES_EACH = 32, 4


def default_count(num_engines: int) -> int:
    """Drivers for so many engines on this machine; 0 where the controller's own loop keeps up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return min(num_engines // _ENGINES_EACH, cores // _CORES_EACH)


class Drivers:
    """The drivers of this process: its questions go through `count` of them, until `close`."""

    def __init__(self, count: int) -> None:
        self._num_restarts = 0
        self._drivers: list[_Driver] = []
        http.run(self._open(count), _OPEN_S)

    @property
    def pids(self) -> list[int]:
        return [driver.pid for driver in self._drivers]

    @property
    def are_ready(self) -> bool:
        """All have said that they are there."""
        return all(driver.is_ready for driver in self._drivers)

    async def ask(self, question: Question) -> Groups:
        """Ask a driver, as `questions.ask` asks an engine. Raises DriverLostError where the driver ends before it
        answers.
        """
        able = [driver for driver in self._drivers if not driver.is_given_up]
        if not able:
            raise DriverLostError(f"no driver is left: {self._drivers[0].ending}; set rollout.num_drivers to 0.")
        return await min(able, key=lambda driver: (not driver.is_ready, driver.num_asked)).ask(question)

    def take_restarts(self) -> int:
        """Since the last time."""
        taken, self._num_restarts = self._num_restarts, 0
        return taken

    def close(self) -> None:
        """Safe to call twice."""
        http.run(self._close(), _OPEN_S)

    async def _open(self, count: int) -> None:
        http.limit_connections(count)
        self._drivers = [_Driver(number, self._count) for number in range(count)]
        self._watch = asyncio.get_running_loop().create_task(self._look())
        questions.use(self)

    async def _close(self) -> None:
        self._watch.cancel()
        questions.use(None)
        http.limit_connections(1)
        for driver in self._drivers:
            driver.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            for driver in self._drivers:
                driver.look()

    def _count(self) -> None:
        self._num_restarts += 1


class _Driver:
    """Used in the loop of `rollout.http` alone."""

    def __init__(self, number: int, count_restart: Callable[[], None]) -> None:
        self._number = number
        self._count_restart = count_restart
        self._asked: dict[int, asyncio.Future[Groups]] = {}
        self._numbers = itertools.count(BEAT + 1)
        self._num_starts = 1  # of these, and the one that is under way; 0: it is there
        self.ending = ""
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

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
        """Kill the driver if it has said nothing for a minute."""
        self._num_silent += 1
        if self._num_silent >= _SILENT and not self.is_given_up:
            logger.warning("driver%d (process %d) hangs and is killed", self._number, self.pid)
            self._process.kill()

    def close(self) -> None:
        self._port.close()
        self._reap()
        self._lose("the drivers were closed")

    def _start(self) -> None:
        self._num_silent = 0
        ours, theirs = pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno()), str(self._number), *loaded()],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is not for it
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._port = Port(ours, self._take, self._ended)

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
        code = self._reap()
        self._lose(f"driver{self._number} (process {self.pid}) has ended with code {code}")
        self._num_starts = max(1, self._num_starts + (code >= 0))  # whoever kills one may do so at any time
        if self.is_given_up:
            logger.error("%s, %d times before it was there: it is given up", self.ending, _STARTS)
            return
        logger.warning("%s and is started again", self.ending)
        self._count_restart()
        self._start()

    def _reap(self) -> int:
        """Kill what is left of the process and return its exit code."""
        self._process.kill()
        return self._process.wait()

    def _lose(self, words: str) -> None:
        self.ending = words
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_exception(DriverLostError(words))
