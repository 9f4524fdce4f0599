"""A server elsewhere that is started again: its keeper may still report the one before."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.rollout.engine_interface import EngineAddress
from rlhf_megatron.rollout.fleet.server_process import ServerSeat
from rlhf_megatron.runtime.server_keepers import KeeperLaunch, ServerReport

ADDRESS = EngineAddress("reward0", "sglang", "http://10.0.0.2:30000", "key")


@dataclass
class Named:
    """What a launch is called."""

    name: str = "reward0"
    log: Path = Path("reward0.log")
    meeting: str = ""

    def take(self, seat: ServerSeat) -> None:
        raise AssertionError


class Machine:
    """A keeper that begins after its third report; `begun` is the answer of the call
    that tells it to.
    """

    def __init__(self) -> None:
        self.pid = 100
        self.left = 0
        self.is_done = True

    def begin(self, is_again: bool) -> tuple[Machine, Machine]:
        self.left = 3 * is_again
        return self, self

    def call_method(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        if method != "report":
            return None
        self.left -= 1
        if self.left == 0:
            self.pid += 1
        return ServerReport(self.pid, address=ADDRESS)

    def wait_for_result(self, timeout_s: float) -> str:
        return ""

    def kill(self) -> None:
        pass


def test_the_report_of_the_server_before_is_none_of_the_new_one() -> None:
    machine = Machine()
    launch = KeeperLaunch(Named(), machine.begin, 1.0)  # type: ignore[arg-type]
    for pid in (100, 101, 102):
        launch.start()
        assert (
            launch.wait_until_healthy(time.monotonic() + 60.0, None) == ADDRESS
            and launch.process is not None
        )
        assert launch.process.last_pid == pid
