"""A server that spans machines: a part on each, one process group. The first part answers for all, and where one part
has ended all are: who watches such a server sees one process."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.calls import EngineCalls
from rlhf_megatron.rollout.fleet.process import TAIL_LINES, Launch, Process, Progress, Seat, stop_together


class SpanningProcess:
    """Shows its parts as one `process.Process`."""

    def __init__(self, parts: Sequence[Process]) -> None:
        self.name = parts[0].name
        self._parts = parts

    @property
    def pid(self) -> int:
        return self._parts[0].pid

    @property
    def log(self) -> Path:
        return self._teller.log

    @property
    def exit_code(self) -> int | None:
        """Return that of a part that has ended; None while all run."""
        return next((code for part in self._parts if (code := part.exit_code) is not None), None)

    def tail(self, num_lines: int = TAIL_LINES) -> str:
        return self._teller.tail(num_lines)

    def send_signal(self, number: int) -> None:
        for part in self._parts:
            part.send_signal(number)

    def request_stop(self) -> None:
        for part in self._parts:
            part.request_stop()

    def stop(self) -> None:
        stop_together(self._parts)

    def kill(self) -> None:
        for part in self._parts:
            part.kill()

    def keep_log(self) -> None:
        for part in self._parts:
            part.keep_log()

    @property
    def _teller(self) -> Process:
        """Return a part that has ended, else the first."""
        return next((part for part in self._parts if part.exit_code is not None), self._parts[0])


@dataclass
class SpanningLaunch:
    """Starts and awaits its parts as one `process.Launch`."""

    parts: Sequence[Launch]
    begun: list[Launch] = field(default_factory=list)  # of this start
    meeting: str = ""

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
    def process(self) -> SpanningProcess | None:
        started = [part.process for part in self.parts if part.process is not None]
        return SpanningProcess(started) if started else None

    def take(self, seat: Seat) -> None:
        raise AssertionError("each part has its own")

    def start(self) -> None:
        """Start the first part, which says where they meet and waits there, then the others. Raises EngineError."""
        first, *others = self.parts
        first.start()
        self.begun = [first]
        meeting = first.meets_at()
        for part in others if meeting else ():  # else the first could not be started, and `wait` tells why
            part.meeting = meeting
            part.start()
            self.begun.append(part)

    def meets_at(self) -> str:
        return ""

    def wait(self, deadline: float, progress: Progress | None) -> EngineAddress:
        """Wait until all parts are up. Raises the EngineError of the part that fails first: the others wait for it."""
        calls, waits = EngineCalls(), []
        for part in self.begun:
            told = progress if part is self.parts[0] else None
            waits.append(calls.start(part.name, "wait", partial(part.wait, deadline, told)))
        finished, _ = wait(waits, return_when=FIRST_EXCEPTION)
        for part, found in zip(self.begun, waits, strict=True):
            error = found.exception() if found in finished else None
            if isinstance(error, EngineError):
                words = f"{self.name} is on {len(self.parts)} machines, and {part.name} did not start: {error}"
                raise type(error)(words) from error
        return next(found for found in waits if found in finished).result()
