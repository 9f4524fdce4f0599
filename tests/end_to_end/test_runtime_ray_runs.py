"""Real runs in a Ray cluster of their own: where it listens, how they end, and that nothing
of them is left.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from places import SUPPORT

pytest.importorskip("ray")

from end_to_end_tools import DP2, Finished, processes_with, train, write_config
from launch_tools import Started
from listening import is_loopback, listening
from namespaces import Machines, has_namespaces
from ray_leftovers import left_over
from ray_tools import running_cluster
from test_launch_nodes import numbers

from benchmarks import launchers
from rlhf_megatron.faults import DIRECTORY_ENV, PLAN_ENV
from rlhf_megatron.runtime.process_control import ChildProcess, find_children, read_process_state
from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = [pytest.mark.dist, pytest.mark.long]
GONE_WITHIN_S = 20.0
RAY = {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 2, "tp": 2, "pp": 1}
SHORT = {"warmup.max_steps": 0, "trainer.val_before_train": False}
ENDLESS = {"trainer.total_training_steps": 100_000, "trainer.save_freq": 2}


class Run(Started):
    """`process` is the driver."""

    def rank(self, number: int) -> int:
        """The process that writes its log."""
        log = str(self.run_dir / "logs" / f"rank{number}.log")
        for pid in processes_with(self.marker):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{pid}/fd/1") == log:
                    return pid
        raise AssertionError(f"rank {number} has no process")

    def assert_gone(self) -> None:
        """Agents of a raylet that was killed have longer."""
        assert left_over(self.marker, self.run_dir, GONE_WITHIN_S) == []


def wait_for_ends(children: Sequence[ChildProcess], within_s: float) -> list[int]:
    """Those that live for longer."""
    deadline = time.monotonic() + within_s
    while left := [
        child.pid for child in children if read_process_state(child.pid) not in ("", "Z")
    ]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.05)
    return []


@pytest.fixture
def start(launch: Any) -> Any:
    """start(settings, variable=value)."""

    def begin(settings: dict[str, Any], **more: str) -> Run:
        return launch(
            Run, [sys.executable, "-m", "rlhf_megatron", "train"], RAY | SHORT | settings, **more
        )

    return begin


def test_it_listens_to_its_machine_only_and_sigterm_saves_and_the_same_command_goes_on(
    start,
) -> None:
    run = start(ENDLESS)
    run.wait_for_steps(3)
    pids = processes_with(run.marker)
    addresses = {address for pid in pids for address in listening(pid)}
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in pids]
    assert len(addresses) >= 8, "Ray's servers, the ranks', the store, an engine"
    assert all(is_loopback(address) for address in addresses), sorted(addresses)
    assert not any(address.endswith(" 8265") for address in addresses), "no dashboard"
    (token,) = {
        variable
        for pid in pids
        for variable in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        if variable.startswith("RAY_AUTH_TOKEN=")
    }
    assert not any(token.partition("=")[2] in command for command in commands), (
        "no other user sees it"
    )
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == STOPPED_EXIT_CODE, run.console()
    run.assert_gone()
    assert "SIGTERM to the controller" in run.console() and "Traceback" not in run.console()
    done = run.steps()
    assert (run.run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{done[-1]:06d}"
    again = start(ENDLESS | {"trainer.total_training_steps": done[-1] + 1})
    assert again.wait() == 0, again.console()
    assert again.steps() == list(range(1, done[-1] + 2)), "each step once"
    again.assert_gone()


def test_a_killed_rank_ends_the_run_and_the_same_command_goes_on(start) -> None:
    run = start(ENDLESS)
    run.wait_for_steps(3)
    rank1 = run.rank(1)
    os.kill(rank1, signal.SIGKILL)
    assert run.wait() == 1
    run.assert_gone()
    assert f"HostLostError: [actor dp0 pp0 tp1] (process {rank1}) died" in run.console()
    assert (run.run_dir / "logs" / "ray" / "raylet.out").stat().st_size > 0, (
        "Ray's own words are kept"
    )
    again = start(ENDLESS | {"trainer.total_training_steps": len(run.steps()) + 1})
    assert again.wait() == 0, again.console()
    assert again.steps() == list(range(1, again.steps()[-1] + 1)), "each step once"


def test_an_exception_on_one_rank_is_told_with_its_coordinates(start, tmp_path: Path) -> None:
    plan = {"RLHF_MEGATRON_FAULTS": "fail@actor.before_optimizer_step:who=rank1,nth=2"}
    run = start({}, **plan, RLHF_MEGATRON_FAULTS_DIR=str(tmp_path / "faults"))
    assert run.wait() == 1
    run.assert_gone()
    told = "[actor dp0 pp0 tp1] actor.update: RuntimeError: injected at actor.before_optimizer_step"
    assert told in run.console()
    assert run.steps() == [1]


def test_nothing_is_left_when_the_driver_is_killed(start) -> None:
    run = start(ENDLESS)
    run.wait_for_steps(1)
    os.kill(run.process.pid, signal.SIGKILL)
    assert run.wait() == -signal.SIGKILL
    run.assert_gone()


@pytest.mark.parametrize("servers", [("raylet",), ("raylet", "gcs_server")])
def test_a_cluster_that_lost_a_server_does_not_hold_up_the_end(
    start, servers: tuple[str, ...]
) -> None:
    """Calls do not go through Ray, so the run can go on; Ray itself would be waited
    for without end.
    """
    run = start(ENDLESS)
    run.wait_for_steps(1)
    named = {
        pid: Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes_with(run.marker)
    }
    raylets = [pid for pid, name in named.items() if name == "raylet"]
    children = [child for raylet in raylets for child in find_children(raylet)]
    names = [Path(f"/proc/{child.pid}/cmdline").read_text() for child in children]
    assert {"ray::DashboardAgent", "ray::RuntimeEnvAgent"} <= {name.rstrip("\0 ") for name in names}
    for pid, name in named.items():
        if name in servers:
            os.kill(pid, signal.SIGKILL)
    time.sleep(3.0)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() in (1, STOPPED_EXIT_CODE), run.console()
    assert wait_for_ends(children, 10.0) == []  # without Ray's own minute
    run.assert_gone()


def test_engines_take_turns_with_the_ranks_of_their_machine(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Weights through memory of each machine: the numbers of one machine, bit for bit."""
    settings = (
        DP2
        | SHORT
        | {"trainer.deterministic": True, "rollout.num_engines": 2, "rollout.colocated": True}
    )
    alone = train(write_config(tmp_path_factory.mktemp("alone")), settings)
    assert alone.exit_code == 0, alone.console
    spread = {
        "trainer.runtime": "ray",
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "ray.placement": "spread",
    }
    with running_cluster(num_machines=2) as environment:
        two = train(
            write_config(tmp_path_factory.mktemp("two")), settings | spread, env=environment
        )
    assert two.exit_code == 0, two.console
    assert "engines by machine: machine 0: engine0; machine 1: engine1" in two.console
    found, expected = (
        [{key: row[key] for key in row if not key.startswith("memory/")} for row in numbers(run)]
        for run in (two, alone)
    )
    assert found == expected


@pytest.mark.skipif(not has_namespaces(), reason="needs unprivileged network namespaces")
def test_drivers_ask_the_engines_of_their_machines(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two machines with a rank and an engine each. The second one's driver dies before it tells
    what was answered.
    """
    settings = (
        DP2
        | SHORT
        | {"trainer.deterministic": True, "rollout.num_engines": 2, "rollout.colocated": True}
    )
    alone = train(write_config(tmp_path_factory.mktemp("alone")), settings)
    assert alone.exit_code == 0, alone.console
    spread = {
        "trainer.runtime": "ray",
        "trainer.nnodes": 2,
        "trainer.n_gpus_per_node": 1,
        "ray.placement": "spread",
    }
    plan = {
        PLAN_ENV: "kill@driver.before_reply:who=driver1,nth=2",
        DIRECTORY_ENV: str(tmp_path / "faults"),
    }
    drivers = {"rollout.num_drivers": 1}
    config = write_config(tmp_path)
    program = SUPPORT / "ray_machine.sh"
    machines = Machines(
        config, settings | spread | drivers, 2, program=program, PYTHON=sys.executable, **plan
    )
    try:
        assert machines.wait() == [0, 0], machines.consoles()
    finally:
        machines.end()
    run = Finished(tmp_path, tmp_path / "runs" / "tiny", 0, machines.console(0), "")
    assert "driver1 at 10.77.0.2:" in run.console, run.console
    assert sum(row["rollout/driver_restarts"] for row in run.rows("step")) == 1
    left_out = ("memory/", "rollout/driver_restarts", "rollout/requests_reissued")
    found, expected = (
        [{key: row[key] for key in row if not key.startswith(left_out)} for row in numbers(each)]
        for each in (run, alone)
    )
    assert found == expected, "bit for bit"


def test_a_record_trains_to_the_same_bits_under_every_launcher(tmp_path: Path) -> None:
    """One rank inline, under torchrun and Ray; four under torchrun and Ray."""
    small = ("data.train_batch_size=16", "actor.mini_batch_size=64")
    recorded = launchers.record(launchers.CONFIG, "record", small, 2, tmp_path)
    start = [*launchers.weights(launchers.start_weights(recorded)), *small]
    rows = launchers.replay_all(recorded, start, ["one_rank", "tp2_pp2"], 2, tmp_path)
    print(launchers.table(rows))
    assert [row.different for row in rows] == [()] * 10
    assert all(
        row.num_figures > 40 and float.fromhex(row.shown["actor/grad_norm"]) > 0 for row in rows
    )
