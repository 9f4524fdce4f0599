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
    """Shows its parts as one `process.Process`."""

    def __init__(self, parts: Sequence[ServerProcessHandle]) -> None:
        self.name = parts[0].name
        self._parts = parts

    @property
    def pid(self) -> int:
        return self._parts[0].pid

    @property
    def log(self) -> Path:
        return self._reporting_part.log

    @property
    def exit_code(self) -> int | None:
        """Return that of a part that has ended; None while all run."""
        return next((code for part in self._parts if (code := part.exit_code) is not None), None)

    def read_log_tail(self, num_lines: int = TAIL_LINES) -> str:
        return self._reporting_part.read_log_tail(num_lines)

    def send_signal(self, signal_number: int) -> None:
        for part in self._parts:
            part.send_signal(signal_number)

    def request_stop(self) -> None:
        for part in self._parts:
            part.request_stop()

    def stop(self) -> None:
        stop_processes(self._parts)

    def kill(self) -> None:
        for part in self._parts:
            part.kill()

    def archive_log(self) -> None:
        for part in self._parts:
            part.archive_log()

    @property
    def _reporting_part(self) -> ServerProcessHandle:
        """Return a part that has ended, else the first."""
        return next((part for part in self._parts if part.exit_code is not None), self._parts[0])


@dataclass
class SpanningServerLaunch:
    """Starts and awaits its parts as one `process.Launch`."""

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
        started = [part.process for part in self.parts if part.process is not None]
        return SpanningServerProcess(started) if started else None

    def take_seat(self, seat: ServerSeat) -> None:
        raise AssertionError("each part has its own")

    def start(self) -> None:
        """Start the first part, which says where they meet and waits there, then the others.
        Raises EngineError.
        """
        first, *others = self.parts
        first.start()
        self.started_parts = [first]
        meeting = first.get_rendezvous_address()
        for part in (
            others if meeting else ()
        ):  # else the first could not be started, and `wait_until_healthy` tells why
            part.rendezvous_address = meeting
            part.start()
            self.started_parts.append(part)

    def get_rendezvous_address(self) -> str:
        return ""

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait until all parts are up. Raises the EngineError of the part that fails first: the
        others wait for it.
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
