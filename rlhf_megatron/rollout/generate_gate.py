"""Where generate calls to one engine wait in the event loop of `rollout.http_client`: for the end
of a pause, and for one of the connections that the process may have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rlhf_megatron.rollout.http_client import (
    ConnectionSlots,
    get_connection_slots,
    run_in_event_loop,
)

_CHANGE_TIMEOUT_S = 60.0  # the loop is never busy for so long


class GenerateGate:
    """Stock SGLang holds what comes during a pause where its own abort does not reach it; here
    an abort does.

    `admit_call` is of the loop; all other methods are for other threads.
    """

    def __init__(self, extra_slots: ConnectionSlots | None = None) -> None:
        """`extra_slots`: where the calls need such beside connections of the process."""
        self._extra_slots = extra_slots
        self.is_open = True  # only the loop changes it
        self._num_aborts = 0
        self._num_running_calls = 0
        self._waiting_names: set[str] = set()
        self._change_event = asyncio.Event()

    def open_gate(self) -> None:
        self._change_state(is_open=True)

    def close_gate(self) -> None:
        """Make calls wait that come from now on."""
        self._change_state(is_open=False)

    def abort_waiting_calls(self, call_names: Collection[str] = ()) -> None:
        """End the calls of these names that wait; without names all of them."""
        self._change_state(aborted_names=call_names, aborts_all=not call_names)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Return whether nothing runs, as soon as that is so, or after `timeout_s`."""

        async def wait_for_running_calls() -> bool:
            try:
                async with asyncio.timeout(timeout_s):
                    while self._num_running_calls:
                        await self._change_event.wait()
            except TimeoutError:
                pass
            return not self._num_running_calls

        return run_in_event_loop(wait_for_running_calls(), timeout_s)

    def admit_call(self, timeout_s: float, call_name: str = "") -> CallAdmission:
        """Return a context manager that gives True where the call may run inside of the block,
        False where it was aborted as it waited. Entering it raises TimeoutError after `timeout_s`.
        """
        return CallAdmission(self, timeout_s, call_name)

    async def wait_for_slot(self, timeout_s: float, call_name: str) -> tuple[bool, ConnectionSlots]:
        """Wait for a place, for `CallAdmission`. Returns whether the call may run, and where the
        place is from.
        """
        before = self._num_aborts
        free = self._choose_scarcer_slots()

        def is_aborted() -> bool:
            return self._num_aborts != before or bool(
                call_name and call_name not in self._waiting_names
            )

        if call_name:
            self._waiting_names.add(call_name)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    while not (self.is_open or is_aborted()):
                        await self._change_event.wait()
                    await free.acquire()
                    if self.is_open or is_aborted():
                        break
                    # a pause has begun as it waited: others may have engines that go on
                    free.release()
            is_running = not is_aborted()
        finally:
            self._waiting_names.discard(call_name)
        self._num_running_calls += is_running
        return is_running, free

    def release_slot(self, has_run: bool, slots: ConnectionSlots) -> None:
        """Give the place back, for `CallAdmission`."""
        slots.release()
        self._num_running_calls -= has_run
        if not self._num_running_calls:
            self._notify_change()

    def _choose_scarcer_slots(self) -> ConnectionSlots:
        """Return those of which there are fewer."""
        found = get_connection_slots()
        return (
            self._extra_slots
            if self._extra_slots is not None and self._extra_slots.num_slots < found.num_slots
            else found
        )

    def _notify_change(self) -> None:
        self._change_event.set()
        self._change_event = asyncio.Event()

    def _change_state(
        self,
        is_open: bool | None = None,
        aborted_names: Collection[str] = (),
        aborts_all: bool = False,
    ) -> None:
        async def apply_change() -> None:
            self.is_open = self.is_open if is_open is None else is_open
            self._num_aborts += aborts_all
            self._waiting_names.difference_update(aborted_names)
            self._notify_change()

        run_in_event_loop(apply_change(), _CHANGE_TIMEOUT_S)


class CallAdmission:
    """See `GenerateGate.passing`; thousands may be open, so it is small."""

    __slots__ = ("_call_name", "_gate", "_has_run", "_slots", "_timeout_s")
    _slots: ConnectionSlots

    def __init__(self, gate: GenerateGate, timeout_s: float, call_name: str) -> None:
        self._gate = gate
        self._timeout_s = timeout_s
        self._call_name = call_name
        self._has_run = False

    async def __aenter__(self) -> bool:
        self._has_run, self._slots = await self._gate.wait_for_slot(
            self._timeout_s, self._call_name
        )
        return self._has_run

    async def __aexit__(self, *error: object) -> None:
        self._gate.release_slot(self._has_run, self._slots)
