"""A server that spans machines: a part on each, one process group. The first part answers for all,
and where one part has ended all are: who watches such a server sees one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog
from rlhf_megatron.rollout.fleet.server_process import (
    TAIL_LINES,
    ServerLaunch,
    ServerProcessHandle,
    ServerSeat,
    StartProgress,
    stop_processes,
)


class SpanningServerProcess:
    """The parts of a server that spans machines, used as one `ServerProcessHandle`."""

    def __init__(self, parts: Sequence[ServerProcessHandle]) -> None:
        self.name = parts[0].name
        self._parts = parts

    @property
    def pid(self) -> int:
        """Return the process id of the first part."""
        return self._parts[0].pid

    @property
    def log(self) -> Path:
        """Return the log of a part that has ended, else of the first part."""
        return self._reporting_part.log

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the first part that has ended; None while all run."""
        return next((code for part in self._parts if (code := part.exit_code) is not None), None)

    def read_log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """Return the end of the log of a part that has ended, else of the first part."""
        return self._reporting_part.read_log_tail(num_lines)

    def send_signal(self, signal_number: int) -> None:
        """Send the signal to the process groups of all parts."""
        for part in self._parts:
            part.send_signal(signal_number)

    def request_stop(self) -> None:
        """Ask all parts to stop, and return at once."""
        for part in self._parts:
            part.request_stop()

    def stop(self) -> None:
        """Stop all parts and wait for their end."""
        stop_processes(self._parts)

    def kill(self) -> None:
        """Kill all parts, one after the other."""
        for part in self._parts:
            part.kill()

    def archive_log(self) -> None:
        """Rename the log of each part to a numbered name."""
        for part in self._parts:
            part.archive_log()

    @property
    def _reporting_part(self) -> ServerProcessHandle:
        """Return a part that has ended, else the first."""
        return next((part for part in self._parts if part.exit_code is not None), self._parts[0])


@dataclass
class SpanningServerLaunch:
    """The launches of the parts of a server that spans machines, used as one `ServerLaunch`."""

    parts: Sequence[ServerLaunch]
    started_parts: list[ServerLaunch] = field(default_factory=list)  # of this start
    rendezvous_address: str = ""

    @property
    def name(self) -> str:
        return self.parts[0].name

    @property
    def log(self) -> Path:
        return self.parts[0].log

    @property
    def transfer_dir(self) -> Path:
        return self.parts[0].transfer_dir

    @property
    def process(self) -> SpanningServerProcess | None:
        """Return the started parts as one process; None before any was started."""
        started = [part.process for part in self.parts if part.process is not None]
        return SpanningServerProcess(started) if started else None

    def take_seat(self, seat: ServerSeat) -> None:
        """Refuse with AssertionError: each part takes a seat of its own."""
        raise AssertionError("each part has its own")

    def start(self) -> None:
        """Start the first part, wait for the address at which the parts meet, and start the others
        with it. Where the first part has no address, the others are not started, and
        `wait_until_healthy` reports the failure. Raise EngineError.
        """
        first, *others = self.parts
        first.start()
        self.started_parts = [first]
        meeting = first.get_rendezvous_address()
        # else the first could not be started, and `wait_until_healthy` tells why
        for part in others if meeting else ():
            part.rendezvous_address = meeting
            part.start()
            self.started_parts.append(part)

    def get_rendezvous_address(self) -> str:
        """Return "": the parts meet among themselves."""
        return ""

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait until all started parts are up, and return the address of the server. Raise the
        EngineError of the part that fails first, without waiting for the others.
        """
        calls = EngineCallLog()
        waits = []
        for part in self.started_parts:
            told = progress if part is self.parts[0] else None
            waits.append(
                calls.start_in_thread(
                    part.name, "wait", partial(part.wait_until_healthy, deadline, told)
                )
            )
        finished, _ = wait(waits, return_when=FIRST_EXCEPTION)
        for part, found in zip(self.started_parts, waits, strict=True):
            error = found.exception() if found in finished else None
            if isinstance(error, EngineError):
                words = (
                    f"{self.name} is on {len(self.parts)} machines, and {part.name} did not"
                    f" start: {error}"
                )
                raise type(error)(words) from error
        return next(found for found in waits if found in finished).result()
