"""Engines as actors of a real Ray cluster of this machine: how their servers begin, end
and are replaced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import MARKER
from places import ROOT, SUPPORT
from ray_leftovers import end, left_over, short_directory
from rollout_tools import tiny_qwen3

pytest.importorskip("ray")
PROGRAM = SUPPORT / "ray_engines_program.py"
ANSWER_S = 240.0
GONE_S = 15.0


class Driver:
    """The program, and what it has said."""

    def __init__(self, model: Path, folder: Path, num_engines: int, temporary: Path) -> None:
        self.temporary = temporary
        self.marker = uuid.uuid4().hex
        folder.mkdir(exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(model), str(folder), str(num_engines)],
            env={
                **os.environ,
                MARKER: self.marker,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "TMPDIR": str(temporary),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # else Ray has something to say
                return json.loads(line)
        raise AssertionError("the driver has ended")

    def ask(self, words: str) -> dict[str, Any]:
        self.tell(words)
        return self.hear()

    def tell(self, words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(words + "\n")
        self.process.stdin.flush()

    def ending(self, name: str) -> str:
        """Ray may take a moment to tell that an actor has ended."""
        deadline = time.monotonic() + ANSWER_S
        while (found := self.ask(f"ending {name}")["ending"]) is None:
            assert time.monotonic() < deadline
        return found

    def left_over(self, within_s: float) -> list[str]:
        return left_over(f"{MARKER}={self.marker}", self.temporary, within_s)

    def end(self) -> None:
        end(f"{MARKER}={self.marker}", self.temporary)
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ray") / "model"
    tiny_qwen3(1).save_pretrained(path)
    return path


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Driver] = []

    def begin(num_engines: int = 1, path: Path = model) -> Driver:
        started.append(Driver(path, tmp_path / "run", num_engines, temporary))
        return started[-1]

    with short_directory() as temporary:
        yield begin
        for driver in started:
            driver.end()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(pid: int, within_s: float = GONE_S) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


@pytest.mark.dist
def test_no_server_outlives_a_driver_that_is_killed(start) -> None:
    driver = start()
    server = driver.hear()["pids"]["engine0"]
    actor = parent_of(server)
    assert "rollout.local.local_server" in name_of(server)
    assert name_of(actor).startswith("ray::"), (
        "the server is a child of an actor, not of the driver"
    )
    os.kill(driver.process.pid, signal.SIGKILL)
    assert is_gone(server) and is_gone(actor)


@pytest.mark.long
@pytest.mark.dist
def test_an_engine_is_killed_ended_and_replaced_with_its_actor(start, tmp_path: Path) -> None:
    driver = start(2)
    first = driver.hear()
    servers = first["pids"]
    actors = {name: parent_of(pid) for name, pid in servers.items()}
    assert len(set(actors.values())) == 2, "an actor each"
    log = tmp_path / "run" / "engines" / "engine0.log"

    # The actor is killed: the server ends with it, and says so.
    assert driver.ask("ending engine0") == {"ending": None}
    os.kill(actors["engine0"], signal.SIGKILL)
    assert is_gone(servers["engine0"])
    ending = driver.ending("engine0")
    assert (
        ending.startswith("it exited with code -9; the end of ")
        and "its keeper has ended: engine0: " in ending
    )

    # A new actor, another port, the former log under a number; the other engine is what it was.
    second = driver.ask("restart engine0")
    assert (
        second["pids"]["engine1"] == servers["engine1"]
        and second["urls"]["engine1"] == first["urls"]["engine1"]
    )
    assert second["urls"]["engine0"] != first["urls"]["engine0"]
    assert parent_of(second["pids"]["engine0"]) not in actors.values()
    assert (
        f"listening on {first['urls']['engine0'].removeprefix('http://')}"
        in log.with_suffix(".1.log").read_text()
    )
    assert f"listening on {second['urls']['engine0'].removeprefix('http://')}" in log.read_text()

    # The server is killed under a living actor.
    os.kill(second["pids"]["engine0"], signal.SIGKILL)
    assert is_gone(second["pids"]["engine0"])
    ending = driver.ending("engine0")
    assert (
        ending.startswith("it exited with code -9")
        and "listening on" in ending
        and "actor" not in ending
    )

    # It is killed by name; its actor goes too.
    killed = driver.ask("kill engine1")["ending"]
    assert killed.startswith("it exited with code -9")
    assert is_gone(servers["engine1"]) and is_gone(actors["engine1"])

    driver.tell("end")
    assert driver.hear() == {"is_over": True}
    assert driver.process.wait(ANSWER_S) == 0
    assert driver.left_over(30) == []


@pytest.mark.long
@pytest.mark.dist
def test_an_actor_that_is_stopped_does_not_hold_up_its_replacement(start) -> None:
    driver = start()
    server = driver.hear()["pids"]["engine0"]
    actor = parent_of(server)
    os.kill(actor, signal.SIGSTOP)
    assert driver.ask("ending engine0") == {"ending": None}, "the server may be well"
    again = driver.ask("restart engine0")
    assert again["pids"]["engine0"] != server
    assert is_gone(actor, 30) and is_gone(server, 30)


@pytest.mark.long
@pytest.mark.dist
def test_a_server_that_cannot_start_says_why_and_leaves_nothing(start, tmp_path: Path) -> None:
    driver = start(1, tmp_path / "nothing")
    error = driver.hear()["error"]
    assert error.startswith("engine0 exited with code 2 before it was ready; the end of ")
    assert error.endswith(
        "/nothing has no config.json; model.path must be a directory in Hugging Face layout."
    )
    assert driver.process.wait(ANSWER_S) == 0
    assert driver.left_over(30) == []
