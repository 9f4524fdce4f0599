"""Hosts and controller as real processes under torchrun, with the toy role
of tests/support/runtime_toy.py.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import SUPPORT
from runtime_tools import Start, toy_runs

from rlhf_megatron.runtime.process_control import AGENT_ENV

pytestmark = pytest.mark.dist


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_runs(tmp_path) as begin:
        yield begin


@pytest.mark.parametrize(
    ("num_ranks", "tp", "pp"), [(1, 1, 1), pytest.param(2, 2, 1, marks=pytest.mark.long), (4, 1, 2)]
)
def test_values_and_order(start: Start, num_ranks: int, tp: int, pp: int) -> None:
    run = start("values", f"{num_ranks},{tp},{pp}")
    assert run.wait() == 0, run.console()
    result = json.loads((run.directory / "result.json").read_text())
    tokens = [i for i in range(7) for _ in range(i + 1)]
    assert result["log_probs"] == [[0.5 * t for t in tokens], [2.0 * t for t in tokens]]
    # one sample of one token of value 0: other replicas had a no-op sample
    assert result["single"] == [0.0]
    assert result["update"] == [0 + 2 + 6 + 12 + 20 + 30 + 42, sum(range(num_ranks + 1))]
    if num_ranks == 4:  # dp varies faster than pp; each rank had run three calls before
        names = ["dp0 pp0 tp0", "dp1 pp0 tp0", "dp0 pp1 tp0", "dp1 pp1 tp0"]
        assert result["places"] == [
            f"[actor {name}] x 4 of rank {rank}" for rank, name in enumerate(names)
        ]
        assert result["statuses"] == [f"[actor {name}]" for name in names]
    assert all((run.directory / f"closed{rank}").exists() for rank in range(num_ranks))
    run.assert_no_orphans(num_ranks + 1)


def test_an_exception_on_one_rank_ends_the_run_with_its_coordinates(start: Start) -> None:
    run = start("raise", "2,2,1")
    assert run.wait() == 3
    console = run.console()
    assert (
        "HostCallError: [actor dp0 pp0 tp1] toy.fail_on: RuntimeError: tensor w1 is missing."
        in console
    )
    assert "in fail_on" in console  # the traceback there
    assert "RuntimeError: tensor w1 is missing." in run.log(1)
    run.assert_no_orphans(3)


def test_what_a_user_can_fix_arrives_as_a_value_error_without_traceback(start: Start) -> None:
    run = start("build", "2,1,2")
    assert run.wait() == 3
    assert (
        "HostCallValueError: [actor dp0 pp1 tp0] building roles: no weights in model.path."
        in run.console()
    )
    assert "Traceback" not in run.console()
    run.assert_no_orphans(3)


def test_a_killed_rank_is_named(start: Start) -> None:
    run = start("kill", "2,2,1")
    assert run.wait() != 0
    assert "HostLostError: [actor dp0 pp0 tp1] (process " in run.console()
    assert "died during toy.kill_on" in run.console()
    run.assert_no_orphans(3)


def test_hung_and_stopped_ranks_are_reported_and_ended(start: Start) -> None:
    """Rank 0 waits in a collective, rank 1 sleeps, rank 2's process is stopped."""
    run = start("hang", "3,3,1")
    assert run.wait() != 0
    lines = run.console().splitlines()
    header = (
        "HostTimeoutError: toy.hang was not finished within 2 s"
        " (trainer.stage_timeout_s). The hosts:"
    )
    lines = lines[lines.index(header) :]
    at = [
        next(i for i, line in enumerate(lines) if f"[actor dp0 pp0 tp{rank}]" in line)
        for rank in range(3)
    ]
    assert "toy.hang: running for 2." in lines[at[0]] and lines[at[0]].endswith("s, in barrier")
    assert "toy.hang: running for 2." in lines[at[1]]
    assert "support/runtime_toy.py" in lines[at[2] - 1] and lines[at[2] - 1].endswith(" hang")
    assert lines[at[2]].endswith(
        f"does not answer: process {run.pids()['host2']} is stopped (SIGSTOP, or a debugger)"
    )
    assert "Look first at [actor dp0 pp0 tp2]: is not where the others are." in lines
    run.assert_no_orphans(4)


def test_the_controllers_exit_code_is_the_runs(start: Start) -> None:
    run = start("exit7", "2,1,1")
    assert run.wait() == 7, run.console()
    run.assert_no_orphans(3)


@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [
        ("agent", signal.SIGKILL, -9),
        ("agent", signal.SIGTERM, 143),
        ("controller", signal.SIGKILL, 137),
        ("host0", signal.SIGKILL, 137),
        ("host1", signal.SIGKILL, 3),
    ],
)
def test_no_orphans_whoever_ends(
    start: Start, victim: str, number: signal.Signals, code: int
) -> None:
    run = start("busy", "2,1,1")
    run.wait_for("ready")
    time.sleep(0.5)  # until the hosts are inside of the call
    os.kill(run.agent.pid if victim == "agent" else run.pids()[victim], number)
    assert run.wait() == code, run.console()
    run.assert_no_orphans(3)


@pytest.mark.parametrize(("rank", "code"), [(0, -signal.SIGTERM), (1, -signal.SIGKILL)])
def test_a_rank_ends_whose_agent_was_killed_before_it_looked(
    tmp_path: Path, rank: int, code: int
) -> None:
    """Else it would wait for the agent's store, for as long as a start may take."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    environment = {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    command = [sys.executable, "-m", "runtime_toy", "host", "values", "2,2,1", str(tmp_path)]
    orphan = subprocess.Popen(
        command, cwd=SUPPORT, env={**os.environ, **environment, AGENT_ENV: str(ended.pid)}
    )
    try:
        assert orphan.wait(20) == code
    finally:
        orphan.kill()


def test_the_secret_stays_secret_and_nothing_listens(start: Start) -> None:
    run = start("busy", "2,1,1")
    run.wait_for("ready")
    secret = next(
        entry.partition(b"=")[2]
        for entry in Path(f"/proc/{run.pids()['controller']}/environ").read_bytes().split(b"\0")
        if entry.startswith(b"RLHF_MEGATRON_SECRET=")
    )
    assert len(secret) == 64
    for pid in (run.agent.pid, *run.pids().values()):
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert secret.decode() not in run.console() + run.log(0) + run.log(1)
    assert json.loads((run.directory / "ready").read_text()) == [], (
        "children of the controller inherit none of it"
    )
    assert not listening_sockets(run.pids()["controller"]), (
        "it stops to listen when all hosts are there"
    )
    os.kill(run.agent.pid, signal.SIGINT)
    assert run.wait() == 130
    run.assert_no_orphans(3)


def listening_sockets(pid: int) -> set[str]:
    """Inodes of the TCP sockets on which process `pid` listens."""
    own = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(file))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[9] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}
