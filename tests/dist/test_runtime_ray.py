"""Ranks in a running Ray cluster, with the toy role of tests/support/runtime_toy.py: calls,
failures, what is left.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray_tools import NUM_CPUS, free_cpus, running_cluster
from runtime_tools import Run, Start, toy_runs
from runtime_toy import MACHINES

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    with running_cluster() as environment:
        yield environment


@pytest.fixture
def start(tmp_path: Path, cluster: dict[str, str]) -> Iterator[Start]:
    with toy_runs(tmp_path, "ray", cluster) as begin:
        yield begin


def hosts_left(run: Run, within_s: float = 15.0) -> list[int]:
    """Processes of ranks that still live; they belong to the cluster,
    whose environment they have.
    """
    deadline = time.monotonic() + within_s
    while left := [
        pid
        for name, pid in run.pids().items()
        if name != "controller" and Path(f"/proc/{pid}").exists()
    ]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


def test_calls_reach_every_rank(start: Start) -> None:
    """The same numbers as under torchrun: two replicas share seven samples of 1 to 7 tokens."""
    run = start("values", "2,1,1")
    assert run.wait() == 0, run.console()
    result = json.loads((run.directory / "result.json").read_text())
    tokens = [sample for sample in range(7) for _ in range(sample + 1)]
    assert result["log_probs"] == [[0.5 * t for t in tokens], [2.0 * t for t in tokens]]
    assert result["update"] == [sum(tokens), 3.0]
    names = ["[actor dp0 pp0 tp0]", "[actor dp1 pp0 tp0]"]
    assert result["places"] == [f"{name} x 4 of rank {rank}" for rank, name in enumerate(names)]
    assert result["statuses"] == names
    assert {path.name for path in run.directory.glob("closed*")} == {"closed0", "closed1"}
    assert "leaving: the run is over" in run.log(1)
    assert hosts_left(run) == []


@pytest.mark.long
def test_an_exception_on_one_rank_names_it(start: Start) -> None:
    run = start("raise", "2,2,1")
    assert run.wait() == 3
    assert "[actor dp0 pp0 tp1] toy.fail_on: RuntimeError: tensor w1 is missing." in run.console()
    assert hosts_left(run) == []


def test_a_killed_rank_is_named_and_ends_the_run(start: Start, cluster: dict[str, str]) -> None:
    run = start("kill", "2,2,1")
    assert run.wait() == 3
    pid = run.pids()["host1"]
    assert f"[actor dp0 pp0 tp1] (process {pid}) died during toy.kill_on" in run.console()
    assert hosts_left(run) == []
    assert free_cpus(cluster) == NUM_CPUS, "this run and the one before gave back their room"


@pytest.mark.long  # its words are tested in test_runtime_ray_places.py
def test_no_room_is_said_with_what_there_is(start: Start) -> None:
    run = start("no_room", "2,2,1")
    assert run.wait() == 3
    console = run.console()
    assert "ValueError: the Ray cluster has no place for this run after" in console
    assert "ranks 0-1: 2e+06 CPU" in console and f"machine 0: {NUM_CPUS} CPU" in console
    assert run.pids().keys() == {"controller"}


@pytest.mark.long
def test_a_rank_that_cannot_be_built_is_named(start: Start) -> None:
    run = start("build", "2,2,1")
    assert run.wait() == 3
    assert "[actor dp0 pp0 tp1] building roles: no weights in model.path." in run.console()
    assert hosts_left(run) == []


@pytest.mark.long
def test_hosts_end_when_the_driver_is_killed(start: Start, cluster: dict[str, str]) -> None:
    """One waits in a collective, the other sleeps."""
    run = start("endless", "2,2,1")
    run.wait_for("ready")
    os.kill(run.agent.pid, signal.SIGKILL)
    assert hosts_left(run) == []
    deadline = time.monotonic() + 30
    while free_cpus(cluster) != NUM_CPUS:
        assert time.monotonic() < deadline, "the room is not given back"


@pytest.mark.long
@pytest.mark.parametrize("victim", ["controller", "host1"])
def test_a_signal_stops_the_run_where_its_state_is_whole(start: Start, victim: str) -> None:
    run = start("stop", "2,1,2")
    run.wait_for("ready")
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pids()[victim], signal.SIGTERM)
    assert run.wait() == 75, run.console()
    told = {"controller": "SIGTERM to the controller", "host1": "SIGTERM to [actor dp0 pp1 tp0]"}
    assert (run.directory / "reason").read_text() == told[victim]
    assert hosts_left(run) == []


@pytest.mark.long
def test_a_rank_that_cannot_start_is_told_at_once(tmp_path: Path, cluster: dict[str, str]) -> None:
    """Its plan of faults is none; nobody waits for it until the deadline, which is a minute."""
    plan = {
        "RLHF_MEGATRON_FAULTS": "nonsense",
        "RLHF_MEGATRON_FAULTS_DIR": str(tmp_path / "faults"),
    }
    with toy_runs(tmp_path, "ray", cluster | plan) as begin:
        run = begin("values", "2,2,1")
        assert run.wait() == 3
    told = "[actor dp0 pp0 tp0] did not start: ValueError: fault 'nonsense' is not of the form"
    assert told in run.console() and "HostLostError" in run.console()


def raylet_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.long
def test_two_machines_have_their_shares_of_the_ranks(tmp_path: Path) -> None:
    with (
        running_cluster(num_machines=2) as environment,
        toy_runs(tmp_path, "ray", environment | {MACHINES: "2"}) as begin,
    ):
        run = begin("stop", "4,2,1")
        run.wait_for("ready")
        pids = run.pids()
        machines = [raylet_of(pids[f"host{rank}"]) for rank in range(4)]
        assert machines[0] == machines[1] != machines[2] == machines[3]
        run.agent.send_signal(signal.SIGTERM)
        assert run.wait() == 75, run.console()
        assert hosts_left(run) == []


@pytest.mark.long
def test_a_cluster_that_is_not_there_is_told_at_once(tmp_path: Path) -> None:
    with toy_runs(tmp_path, "ray", {"RAY_ADDRESS": "127.0.0.1:1"}) as begin:
        run = begin("values", "2,2,1")
        assert run.wait() == 3
    assert "ray.address (127.0.0.1:1): no Ray cluster answers there" in run.console()
