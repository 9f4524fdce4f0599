"""Servers that are killed while they start: started again within the limit, and counted."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rollout_tools import tiny_qwen3

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineKilledError
from rlhf_megatron.rollout.fleet.engine_calls import EngineCallLog
from rlhf_megatron.rollout.fleet.engine_supervisor import EngineSupervisor, SupervisionSettings
from rlhf_megatron.rollout.fleet.server_process import (
    EngineServers,
    ServerLaunch,
    ServerProcess,
    ServerSeat,
    StartProgress,
    await_server_ready,
    translate_error_of_killed_server,
)
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.local.local_launch import start_local_engines
from rlhf_megatron.rollout.sglang.sglang_launch import make_start_error

# Each start does what the next word of the plan says.
SERVER = """
import os, pathlib, sys, time
folder, name, *plan = sys.argv[1:]
count = pathlib.Path(folder, f"{name}.starts")
number = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (number + 1))
word = plan[min(number, len(plan) - 1)]
print("start", number, word, flush=True)
if word == "killed":
    os.kill(os.getpid(), 9)
if word == "fails":
    sys.exit(3)
pathlib.Path(folder, f"{name}.ready").touch()
time.sleep(600)
"""


@dataclass
class PlannedLaunch:
    """A `ServerLaunch` of a process whose starts go as planned."""

    name: str
    folder: Path
    plan: tuple[str, ...]
    rendezvous_address: str = ""
    process: ServerProcess | None = None
    seats: list[ServerSeat] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def transfer_dir(self) -> Path:
        return self.folder

    def take_seat(self, seat: ServerSeat) -> None:
        self.seats.append(seat)

    def get_rendezvous_address(self) -> str:
        return ""

    def start(self) -> None:
        (self.folder / f"{self.name}.ready").unlink(missing_ok=True)
        command = [sys.executable, "-S", "-c", SERVER, str(self.folder), self.name, *self.plan]
        self.process = ServerProcess(self.name, command, self.log, {})

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        assert self.process is not None
        is_ready = (self.folder / f"{self.name}.ready").is_file
        await_server_ready(self.process, is_ready, deadline, progress)
        return EngineAddress(self.name, "local", f"http://127.0.0.1:1/{self.name}", "token")


def test_a_server_that_is_killed_while_it_starts_is_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    launches = [
        PlannedLaunch("engine0", tmp_path, ("serves",)),
        PlannedLaunch("engine1", tmp_path, ("killed", "killed", "serves")),
    ]
    caplog.set_level(logging.WARNING)
    with EngineServers(launches, 60.0, max_restarts=3) as servers:
        assert [address.name for address in servers.addresses] == ["engine0", "engine1"]
        assert [process.exit_code for process in servers.processes] == [None, None]
        assert servers.num_start_restarts == 2
    assert "engine1 was killed while it started, and is started again (2 of 3)" in caplog.text
    logs = ["engine0.log", "engine1.1.log", "engine1.2.log", "engine1.log"]
    assert sorted(path.name for path in tmp_path.glob("*.log")) == logs
    assert (tmp_path / "engine0.starts").read_text() == "x"


def test_the_limit_of_restarts_holds_over_all_servers_that_start(tmp_path: Path) -> None:
    launches = [
        PlannedLaunch("engine0", tmp_path, ("killed", "serves")),
        PlannedLaunch("engine1", tmp_path, ("killed",)),
    ]
    with pytest.raises(EngineError) as caught:
        EngineServers(launches, 60.0, max_restarts=2)
    assert not isinstance(caught.value, EngineKilledError)
    text = str(caught.value)
    assert "engine1 exited with code -9 (a signal) before it was ready" in text
    assert "rollout.max_engine_restarts (2) is used up" in text
    assert (tmp_path / "engine1.starts").read_text() == "xx"
    for launch in launches:
        assert launch.process is not None and launch.process.exit_code is not None


def test_a_server_that_fails_by_itself_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="engine0 exited with code 3 before it was ready"):
        EngineServers([PlannedLaunch("engine0", tmp_path, ("fails", "serves"))], 60.0, None, 5)
    assert (tmp_path / "engine0.starts").read_text() == "x"


def test_a_server_that_is_killed_again_while_it_is_started_again(tmp_path: Path) -> None:
    """The supervisor starts it once more, as long as restarts are left of those that the first
    start has taken from.
    """
    plan = ("killed", "serves", "killed", "serves")
    with EngineServers([PlannedLaunch("engine0", tmp_path, plan)], 60.0, max_restarts=4) as servers:
        settings = SupervisionSettings(
            servers=servers,
            make_client=lambda address: SilentEngine(address),  # type: ignore[arg-type,return-value]
            max_restarts=4,
            num_restarts_before=servers.num_start_restarts,
        )
        client = SilentEngine(servers.addresses[0])
        supervisor = EngineSupervisor([client], settings, EngineCallLog())  # type: ignore[list-item]
        assert supervisor.restart_budget.num_restarts == 1
        supervisor.mark_down(supervisor.members[0], "it is ill")
        deadline = time.monotonic() + 60
        while supervisor.members[0].reason or (tmp_path / "engine0.starts").read_text() != "xxxx":
            supervisor.advance_states(None)
            time.sleep(0.02)
            assert time.monotonic() < deadline, supervisor.members
        assert supervisor.restart_budget.num_restarts == 3
        assert supervisor.counters["rollout/engine_restarts"] == 3


@dataclass
class SilentEngine:
    """A client of nothing."""

    address: EngineAddress

    def close(self) -> None:
        """Nothing is open."""


def test_a_question_that_fails_because_the_server_is_killed(tmp_path: Path) -> None:
    launch = PlannedLaunch("engine0", tmp_path, ("serves",))
    launch.start()
    assert launch.process is not None
    launch.wait_until_healthy(time.monotonic() + 60, None)
    refuses = pytest.raises(EngineError, match="it refuses")
    with refuses as refused, translate_error_of_killed_server(launch.process):
        raise EngineError("it refuses")
    assert not isinstance(refused.value, EngineKilledError)
    is_killed = pytest.raises(EngineKilledError, match="code -9")
    with is_killed, translate_error_of_killed_server(launch.process):
        os.killpg(launch.process.pid, signal.SIGKILL)
        raise EngineError("the connection broke")
    launch.process.kill()


def test_what_sglang_says_when_it_kills_itself() -> None:
    """A server whose scheduler fails kills itself: its own error counts, not the signal."""
    killed = EngineKilledError("engine0 exited with code -9 (a signal) before it was ready")
    exited = EngineError("engine0 exited with code 1 before it was ready")
    own_error = "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static"
    lost = "Rank 0 scheduler died during initialization (exit code: -9)."
    assert isinstance(make_start_error(killed, "loading weights"), EngineKilledError)
    assert not isinstance(make_start_error(killed, own_error), EngineKilledError)
    assert not isinstance(make_start_error(exited, own_error), EngineKilledError)
    assert isinstance(make_start_error(exited, f"RuntimeError: {lost}"), EngineKilledError)


@pytest.mark.dist
def test_a_bundled_server_that_is_killed_while_it_starts(tmp_path: Path) -> None:
    tiny_qwen3(0).save_pretrained(tmp_path / "model")
    launches: list[ServerLaunch] = []

    def note_launch(launch: ServerLaunch) -> ServerLaunch:
        launches.append(launch)
        return launch

    def kill_first_process() -> None:
        while not launches or launches[0].process is None:
            time.sleep(0.001)
        os.killpg(launches[0].process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_first_process)
    thread.start()
    with start_local_engines(
        tmp_path / "model", 1, tmp_path, transfer_dir=None, max_restarts=1, placement=note_launch
    ) as servers:
        thread.join()
        assert servers.num_start_restarts == 1
        LocalEngine(servers.addresses[0]).check_health(30.0)
