"""Signals to the processes of a toy run (tests/support/runtime_toy.py): who is named, how it
ends, and how soon.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import warm
from runtime_tools import Start, toy_runs

from benchmarks.chaos.program import Launch
from benchmarks.chaos.task import LAYOUTS, overrides, place, write_task
from rlhf_megatron.runtime.stop_signals import CLEANUP_S
from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = pytest.mark.dist


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_runs(tmp_path) as begin:
        yield begin


@pytest.mark.parametrize(
    ("victim", "number", "reason"),
    [
        ("host1", signal.SIGTERM, "SIGTERM to [actor dp0 pp0 tp1]"),
        pytest.param(
            "controller", signal.SIGUSR1, "SIGUSR1 to the controller", marks=pytest.mark.chaos
        ),
        pytest.param(
            "agent", signal.SIGUSR1, "SIGUSR1 to [actor dp0 pp0 tp", marks=pytest.mark.chaos
        ),
        pytest.param(
            "agent", signal.SIGINT, "SIGINT to [actor dp0 pp0 tp", marks=pytest.mark.chaos
        ),
    ],
)
def test_a_signal_to_any_process_stops_the_run_where_it_can_save(
    start: Start, victim: str, number: signal.Signals, reason: str
) -> None:
    """The hosts sit in a call at that moment; calls after it still reach all of them."""
    run = start("stop", "2,2,1")
    run.wait_for("ready")
    time.sleep(0.3)
    os.kill(run.agent.pid if victim == "agent" else run.pids()[victim], number)
    assert run.wait() == STOPPED_EXIT_CODE, run.console()
    assert (run.directory / "reason").read_text().startswith(reason)
    assert "Traceback" not in run.console()
    assert all((run.directory / f"closed{rank}").exists() for rank in range(2)), (
        "hosts ended in an orderly way"
    )
    run.assert_no_orphans(3)


@pytest.mark.chaos
def test_a_run_that_does_not_stop_in_time_is_ended(start: Start) -> None:
    """stop_grace_s is 1.5 s; the controller waits for a call that would not end."""
    run = start("busy", "2,1,1")
    run.wait_for("ready")
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(run.pids()["host1"], signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.console()
    assert 1.5 <= time.monotonic() - began < 1.5 + CLEANUP_S
    assert "SIGTERM to [actor dp1 pp0 tp0]: stopping, within 1.5 s" in run.console()
    run.assert_no_orphans(3)


@pytest.mark.parametrize(
    ("victim", "wait_s"), [pytest.param("controller", 1.0, marks=pytest.mark.chaos), ("host1", 4.0)]
)
def test_a_second_signal_ends_it_at_once(start: Start, victim: str, wait_s: float) -> None:
    """Time to stop would be left: a minute."""
    run = start("endless", "2,1,1")
    run.wait_for("ready")
    time.sleep(0.5)
    os.kill(run.pids()[victim], signal.SIGTERM)
    time.sleep(wait_s)
    os.kill(run.pids()[victim], signal.SIGTERM)
    assert run.wait() == 128 + signal.SIGTERM, run.console()
    run.assert_no_orphans(3)


@pytest.mark.parametrize(
    "newest",
    [
        "launcher",
        pytest.param("agent", marks=pytest.mark.chaos),
        "rank1",
        pytest.param("controller", marks=pytest.mark.chaos),
    ],
)
def test_a_signal_in_the_first_seconds_says_that_the_run_can_be_started_again(
    tmp_path: Path, newest: str
) -> None:
    """A real run, told to stop as soon as that process lives: nothing has begun."""
    values = {**LAYOUTS["tp2"], **place(tmp_path)}
    # whose signals are blocked at first
    with warm.cold() if newest in ("agent", "controller") else nullcontext():
        launch = Launch(
            [str(write_task(tmp_path)), *overrides(values)], tmp_path, tmp_path / "console", {}
        )
    try:
        while not (takes_sigterm(launch.pid) if newest == "launcher" else has(launch, newest)):
            assert launch.exit_code is None and launch.seconds < 60, launch.console.read_text()
            time.sleep(0.01)
        os.kill(launch.pid, signal.SIGTERM)
        assert launch.wait(60.0) == STOPPED_EXIT_CODE, launch.console.read_text()
        assert "Traceback" not in launch.console.read_text() and not launch.left_over(10.0)
    finally:
        launch.kill()


def has(launch: Launch, role: str) -> bool:
    """Whether a process of that role lives; not `find`, which takes a command that has no others
    yet for all roles.
    """
    return any(process.role == role for process in launch.processes())


def takes_sigterm(pid: int) -> bool:
    """Whether a process has a handler of its own."""
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def test_one_signal_to_all_processes_is_one_signal(start: Start) -> None:
    """What a scheduler does; the agent passes it on to the ranks besides."""
    run = start("stop", "2,2,1")
    run.wait_for("ready")
    time.sleep(0.3)
    for pid in (run.agent.pid, *run.pids().values()):
        os.kill(pid, signal.SIGTERM)
    assert run.wait() == STOPPED_EXIT_CODE, run.console()
    assert (run.directory / "reason").exists()
    run.assert_no_orphans(3)
