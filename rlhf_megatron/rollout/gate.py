"""Where generate calls to one engine wait in the event loop of `rollout.http`: for the end of a pause, and for one of
the connections that the process may have."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rlhf_megatron.rollout.http import Places, connections, run

_VERB_S = 60.0  # the loop is never busy for so long


class Gate:
    """Stock SGLang holds what comes during a pause where its own abort does not reach it; here an abort does.

    `passing` is of the loop; all other methods are for other threads.
    """

    def __init__(self, places: Places | None = None) -> None:
        """`places`: where the calls need such beside connections of the process."""
        self._places = places
        self.is_open = True  # only the loop changes it
        self._num_aborts = 0
        self._num_inside = 0
        self._waiting: set[str] = set()
        self._next_change = asyncio.Event()

    def open(self) -> None:
        self._now(is_open=True)

    def close(self) -> None:
        """Make calls wait that come from now on."""
        self._now(is_open=False)

    def abort(self, names: Collection[str] = ()) -> None:
        """End the calls of these names that wait; without names all of them."""
        self._now(names=names, is_for_all=not names)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Return whether nothing runs, as soon as that is so, or after `timeout_s`."""

        async def empty() -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    while self._num_inside:
                        await self._next_change.wait()
            except TimeoutError:
                pass
            return not self._num_inside

        return run(empty(), timeout_s)

    def passing(self, timeout_s: float, name: str = "") -> Passing:
        """Return a context manager that gives True where the call may run inside of the block, False where it was
        aborted as it waited. Entering it raises TimeoutError after `timeout_s`."""
        return Passing(self, timeout_s, name)

    async def enter(self, timeout_s: float, name: str) -> tuple[bool, Places]:
        """Wait for a place, for `Passing`. Returns whether the call may run, and where the place is from."""
        before, free = self._num_aborts, self._free()

        def is_over() -> bool:
            return self._num_aborts != before or bool(name and name not in self._waiting)

        if name:
            self._waiting.add(name)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while not (self.is_open or is_over()):
                        await self._next_change.wait()
                    await free.acquire()
                    if self.is_open or is_over():
                        break
                    free.release()  # a pause has begun as it waited: others may have engines that go on
            is_running = not is_over()
        finally:
            self._waiting.discard(name)
        self._num_inside += is_running
        return is_running, free

    def leave(self, has_run: bool, places: Places) -> None:
        """Give the place back, for `Passing`."""
        places.release()
        self._num_inside -= has_run
        if not self._num_inside:
            self._tell()

    def _free(self) -> Places:
        """Return those of which there are fewer."""
        found = connections()
        return self._places if self._places is not None and self._places.count < found.count else found

    def _tell(self) -> None:
        self._next_change.set()
        self._next_change = asyncio.Event()

    def _now(self, is_open: bool | None = None, names: Collection[str] = (), is_for_all: bool = False) -> None:
        async def change() -> None:
            self.is_open = self.is_open if is_open is None else is_open
            self._num_aborts += is_for_all
            self._waiting.difference_update(names)
            self._tell()

        run(change(), _VERB_S)


class Passing:
    """See `Gate.passing`; thousands may be open, so it is small."""

    __slots__ = ("_gate", "_has_run", "_name", "_places", "_timeout_s")
    _places: Places

    def __init__(self, gate: Gate, timeout_s: float, name: str) -> None:
        self._gate, self._timeout_s, self._name = gate, timeout_s, name
        self._has_run = False

    async def __aenter__(self) -> bool:
        self._has_run, self._places = await self._gate.enter(self._timeout_s, self._name)
        return self._has_run

    async def __aexit__(self, *error: object) -> None:
        self._gate.leave(self._has_run, self._places)
