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
    """Hold generate calls back while the gate is closed, and let another thread abort the calls
    that wait. (Stock SGLang keeps the calls that come during a pause where its own abort does not
    reach them.)

    Call `admit_call` in the event loop of `rollout.http_client`, and all other methods from other
    threads.
    """

    def __init__(self, extra_slots: ConnectionSlots | None = None) -> None:
        """Make an open gate. `extra_slots` are connection slots that the calls share beside the
        process's own; a call takes a slot from the smaller of the two.
        """
        self._extra_slots = extra_slots
        self.is_open = True  # only the loop changes it
        self._num_aborts = 0
        self._num_running_calls = 0
        self._waiting_names: set[str] = set()
        self._change_event = asyncio.Event()

    def open_gate(self) -> None:
        """Open the gate: let the waiting calls and new calls run."""
        self._change_state(is_open=True)

    def close_gate(self) -> None:
        """Close the gate: make new calls and the calls that still wait for a slot wait until it
        opens. Calls that already run are not touched.
        """
        self._change_state(is_open=False)

    def abort_waiting_calls(self, call_names: Collection[str] = ()) -> None:
        """Abort the waiting calls with these names, or all waiting calls where `call_names` is
        empty: `admit_call` then yields False for them. Running calls are not touched.
        """
        self._change_state(aborted_names=call_names, aborts_all=not call_names)

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until no call runs, for at most `timeout_s`. Return whether no call runs."""

        async def wait_for_running_calls() -> bool:
            """Wait in the loop until no call runs or the time is up, and return whether no call
            runs.
            """
            try:
                async with asyncio.timeout(timeout_s):
                    while self._num_running_calls:
                        await self._change_event.wait()
            except TimeoutError:
                pass
            return not self._num_running_calls

        return run_in_event_loop(wait_for_running_calls(), timeout_s)

    def admit_call(self, timeout_s: float, call_name: str = "") -> CallAdmission:
        """Return an async context manager that waits for the gate and a connection slot, and yields
        True where the call may run inside the block, False where it was aborted while it waited.
        Entering it raises TimeoutError after `timeout_s`.
        """
        return CallAdmission(self, timeout_s, call_name)

    async def wait_for_slot(self, timeout_s: float, call_name: str) -> tuple[bool, ConnectionSlots]:
        """Wait until the gate is open and a slot is free, or until the call is aborted. Return
        whether the call may run, and the slots from which one was taken (also for an aborted call).
        Only `CallAdmission` calls it. Raise TimeoutError after `timeout_s`.
        """
        before = self._num_aborts
        free = self._choose_scarcer_slots()

        def is_aborted() -> bool:
            """Return whether this call was aborted since it began to wait."""
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
        """Give the slot back to `slots`, and count the call out where it has run. Only
        `CallAdmission` calls it.
        """
        slots.release()
        self._num_running_calls -= has_run
        if not self._num_running_calls:
            self._notify_change()

    def _choose_scarcer_slots(self) -> ConnectionSlots:
        """Return the extra slots where they are fewer than the process's slots, else the
        process's.
        """
        found = get_connection_slots()
        return (
            self._extra_slots
            if self._extra_slots is not None and self._extra_slots.num_slots < found.num_slots
            else found
        )

    def _notify_change(self) -> None:
        """Wake all coroutines that wait for a change of the gate or of the number of running
        calls.
        """
        self._change_event.set()
        self._change_event = asyncio.Event()

    def _change_state(
        self,
        is_open: bool | None = None,
        aborted_names: Collection[str] = (),
        aborts_all: bool = False,
    ) -> None:
        """Open or close the gate (None: leave it), abort the waiting calls of these names, or all
        of them, and wake the waiting calls. Run it from a thread outside the loop; it waits until
        the loop has done it.
        """

        async def apply_change() -> None:
            """Apply the change in the loop, where nothing else changes the gate meanwhile."""
            self.is_open = self.is_open if is_open is None else is_open
            self._num_aborts += aborts_all
            self._waiting_names.difference_update(aborted_names)
            self._notify_change()

        run_in_event_loop(apply_change(), _CHANGE_TIMEOUT_S)


class CallAdmission:
    """Be the context manager of `GenerateGate.admit_call`. Thousands may be open, so it is
    small.
    """

    __slots__ = ("_call_name", "_gate", "_has_run", "_slots", "_timeout_s")
    _slots: ConnectionSlots

    def __init__(self, gate: GenerateGate, timeout_s: float, call_name: str) -> None:
        self._gate = gate
        self._timeout_s = timeout_s
        self._call_name = call_name
        self._has_run = False

    async def __aenter__(self) -> bool:
        """Wait for admission. Return True where the call may run, False where it was aborted."""
        self._has_run, self._slots = await self._gate.wait_for_slot(
            self._timeout_s, self._call_name
        )
        return self._has_run

    async def __aexit__(self, *error: object) -> None:
        """Give the slot back."""
        self._gate.release_slot(self._has_run, self._slots)
