"""Machines in network namespaces: engines on each of them, machines with engines alone, and
one that is lost.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import DP2, Finished, train, write_config
from launch_tools import MARKER, processes_with
from namespaces import Machines, has_namespaces
from reward_model_tools import Scored
from sglang_tools import CPU_ARGUMENTS, CPU_ENV, STARTUP_S, TWO_RANKS, needs_sglang, sglang_python
from test_launch_nodes import QUICK, numbers

from rlhf_megatron.faults import DIRECTORY_ENV, PLAN_ENV

pytestmark = [
    pytest.mark.dist,
    pytest.mark.long,
    pytest.mark.skipif(not has_namespaces(), reason="needs unprivileged network namespaces"),
]
AXES = ("tensor_model", "pipeline_model")
RANK_EACH = {
    "trainer.n_gpus_per_node": 1,
    **{f"actor.megatron.{axis}_parallel_size": 1 for axis in AXES},
}
SHORT = RANK_EACH | {"warmup.max_steps": 0, "trainer.deterministic": True}
ENDLESS = QUICK | RANK_EACH | {"trainer.total_training_steps": 100_000, "trainer.save_freq": 1}
TWO = {"rollout.num_engines": 2}
TP2 = {"trainer.n_gpus_per_node": 2, "actor.megatron.tensor_model_parallel_size": 2}
FOUR_OF_TWO = TP2 | {"rollout.num_engines": 4, "trainer.nnodes": 4}
ON_TWO_MACHINES = {
    "rollout.engine": "sglang",
    "rollout.sglang.python": str(sglang_python()),
    "rollout.sglang.args": {**CPU_ARGUMENTS, "context_length": 64, "tp_size": 2, "nnodes": 2},
    "rollout.sglang.env": CPU_ENV | TWO_RANKS,
    "rollout.startup_timeout_s": STARTUP_S,
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Machines] = []

    def begin(
        settings: dict[str, Any], num_machines: int, num_spares: int = 0, **variables: str
    ) -> Machines:
        started.append(
            Machines(write_config(tmp_path), settings, num_machines, num_spares, **variables)
        )
        return started[-1]

    yield begin
    for machines in started:
        machines.end()


def finished(machines: Machines) -> Finished:
    codes = machines.wait()
    assert codes == [0] * machines.num_machines, machines.consoles()
    assert machines.left_over() == []
    return Finished(
        machines.directory, machines.directory / "runs" / "tiny", 0, machines.console(0), ""
    )


def learned(run: Finished) -> list[dict[str, Any]]:
    """All numbers but those of the processes' memory,
    which a colocated run tells, and of drivers.
    """
    left_out = ("memory/", "rollout/driver_restarts", "rollout/requests_reissued")
    return [
        {key: value for key, value in row.items() if not key.startswith(left_out)}
        for row in numbers(run)
    ]


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """On one machine, with four engines."""
    settings = SHORT | TP2 | {"trainer.n_gpus_per_node": 8, "rollout.num_engines": 4}
    return train(write_config(tmp_path_factory.mktemp("alone")), settings)


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_four_machines_of_two_ranks_give_the_numbers_of_one(
    start, eight_ranks: Finished, colocated: bool
) -> None:
    assert eight_ranks.exit_code == 0, eight_ranks.console
    run = finished(start(SHORT | FOUR_OF_TWO | {"rollout.colocated": colocated}, 4))
    spread = "; ".join(f"machine {number}: engine{number}" for number in range(4))
    assert f"engines by machine: {spread}" in run.console
    assert learned(run) == learned(eight_ranks), "bit for bit"


@needs_sglang
@pytest.mark.sglang
@pytest.mark.parametrize("transport", ["process_group", "disk"])
def test_a_server_on_two_machines_is_one_engine_and_is_started_again_whole(
    start, tmp_path: Path, transport: str
) -> None:
    """Stock SGLang with nnodes 2. After the first step its part on machine 1 is killed."""
    steps = {
        "trainer.total_training_steps": 3,
        "trainer.nnodes": 2,
        "rollout.weight_transport": transport,
        "rollout.transfer_dir": str(tmp_path),
    }
    machines = start(QUICK | RANK_EACH | ON_TWO_MACHINES | steps, 2)
    metrics = machines.directory / "runs" / "tiny" / "metrics.jsonl"
    machines.wait_for(lambda: metrics.exists() and '"step"' in metrics.read_text())
    os.kill(server_of(machines, "engine0-part1.yaml"), signal.SIGKILL)
    run = finished(machines)
    assert "engines by machine: machine 0: engine0; machine 1: engine0-part1" in run.console
    steps = run.rows("step")
    assert [row["step"] for row in steps] == [1, 2, 3]
    # The trainer's log-probs of what SGLang sampled with those weights.
    assert all(row["training/rollout_log_probs_diff_max"] < 1e-4 for row in steps), steps
    assert sum(row["rollout/engine_restarts"] for row in steps) == 1
    assert "engine0 is down: it exited with code -9; the end of" in run.console
    assert "engine0-part1.log" in run.console, "who ended is named"


@needs_sglang
@pytest.mark.sglang
def test_servers_of_the_reward_model_stand_on_another_machine(start, tmp_path: Path) -> None:
    """Machine 1 has no rank. After the first step the server there is killed, and comes back."""
    scored = Scored(tmp_path / "judge")
    settings = (
        QUICK
        | RANK_EACH
        | scored.settings()
        | {"trainer.nnodes": 1, "trainer.total_training_steps": 4}
    )
    machines = start(
        settings | {"reward_model.served.machines": [1], "rollout.health_interval_s": 1.0}, 2
    )
    metrics = machines.directory / "runs" / "tiny" / "metrics.jsonl"
    machines.wait_for(lambda: metrics.exists() and '"step"' in metrics.read_text())
    os.kill(server_of(machines, "reward0.yaml"), signal.SIGKILL)
    run = finished(machines)
    steps = run.rows("step")
    assert [row["step"] for row in steps] == [1, 2, 3, 4] and steps[-1][
        "reward/server_restarts"
    ] == 1, run.console
    assert sum(scored.assert_scored(run.run_dir, row["step"]) for row in steps) > 0


def server_of(machines: Machines, settings_file: str) -> int:
    """Process id of the server that was started with that file."""
    for pid in processes_with(f"{MARKER}={machines.marker}"):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"sglang.launch_server" in words and any(
                word.endswith(settings_file.encode()) for word in words
            ):
                return pid
    raise AssertionError(f"no server has {settings_file}")


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_engines_on_two_machines_give_the_numbers_of_one(
    start, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, colocated: bool
) -> None:
    """Each machine has a driver for its engine; the second one's dies before it tells what its
    engine has answered.
    """
    settings = SHORT | TWO | {"rollout.colocated": colocated}
    alone = train(
        write_config(tmp_path_factory.mktemp("alone")),
        DP2 | settings | {"trainer.n_gpus_per_node": 2},
    )
    assert alone.exit_code == 0, alone.console
    plan = {
        PLAN_ENV: "kill@driver.before_reply:who=driver1,nth=2",
        DIRECTORY_ENV: str(tmp_path / "faults"),
    }
    run = finished(start(settings | {"trainer.nnodes": 2, "rollout.num_drivers": 1}, 2, **plan))
    assert "engines by machine: machine 0: engine0; machine 1: engine1" in run.console
    assert (run.run_dir / "logs" / "engines1.log").read_text().count("driver1 is process") == 2
    assert sum(row["rollout/driver_restarts"] for row in run.rows("step")) == 1
    assert learned(run) == learned(alone), "bit for bit"


def test_machines_with_engines_alone_serve_a_trainer_on_one(start) -> None:
    """Weights reach them as files; /dev/shm of the trainer's machine is not theirs."""
    apart = {
        "rollout.engine_machines": [1, 2],
        "rollout.weight_transport": "disk",
        "trainer.nnodes": 1,
    }
    run = finished(start(SHORT | TWO | apart, 3))
    assert "engines by machine: machine 1: engine0; machine 2: engine1" in run.console
    assert len(run.rows("step")) == 2


def test_machines_with_engines_alone_go_on_with_a_run_that_is_started_again(start) -> None:
    apart = {
        "rollout.engine_machines": [1],
        "rollout.weight_transport": "disk",
        "trainer.nnodes": 1,
    }
    steps = {"trainer.total_training_steps": 60, "trainer.save_last": "none"}
    machines = start(ENDLESS | apart | steps, 2, MAX_RESTARTS="1")
    metrics = machines.directory / "runs" / "tiny" / "metrics.jsonl"
    machines.wait_for(lambda: metrics.exists() and "step" in metrics.read_text())
    os.kill(machines.host_of(0), signal.SIGKILL)
    assert machines.wait() == [0, 0], machines.consoles()
    assert all(
        "the run is started again (1 of 1)" in machines.console(number) for number in range(2)
    )
    run = Finished(
        machines.directory, machines.directory / "runs" / "tiny", 0, machines.console(0), ""
    )
    assert [row["step"] for row in run.rows("step")] == list(range(1, 61))
    assert machines.left_over() == []


def lose(machines: Machines, machine: int) -> None:
    """It loses its network, and then its power, after the first checkpoint."""
    checkpoints = machines.directory / "runs" / "tiny" / "checkpoints"
    machines.wait_for(lambda: list(checkpoints.glob("step_*")))
    machines.cut(machine)
    for pid in processes_with(f"{MARKER}={machines.marker}"):
        with contextlib.suppress(OSError):  # it has ended with its parent
            if f"NODE_RANK={machine}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(
                b"\0"
            ):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("colocated", [False, True], ids=["apart", "colocated"])
def test_a_lost_machine_ends_the_others_and_is_named(start, colocated: bool) -> None:
    machines = start(ENDLESS | FOUR_OF_TWO | {"rollout.colocated": colocated}, 4)
    lose(machines, 1)
    lost = time.monotonic()
    codes = machines.wait()
    print(f"all others have ended {time.monotonic() - lost:.1f} s after the loss")
    assert codes[1] == 137 and all(code == 1 for code in codes[:1] + codes[2:]), machines.consoles()
    assert "HostLostError: the machine machine1 (10.77.0.2) is lost" in machines.console(0)
    assert machines.left_over() == []


def test_a_lost_machine_0_ends_the_others(start) -> None:
    machines = start(ENDLESS | {"trainer.nnodes": 3}, 3)
    lose(machines, 0)
    codes = machines.wait()
    assert codes == [137, 1, 1], machines.consoles()
    assert (
        "node 0 (10.77.0.1) was lost, with no sign for 15 s, before this run was over"
        in machines.console(1)
    )
    assert machines.left_over() == []


def test_a_spare_machine_takes_the_place_of_machine_0(start) -> None:
    """All know its address beforehand."""
    steps = {"trainer.total_training_steps": 20, "trainer.save_last": "none", "trainer.nnodes": 2}
    both = {"MASTER_ADDR": "10.77.0.1,10.77.0.3", "MAX_RESTARTS": "1"}
    machines = start(ENDLESS | TWO | steps, 3, num_spares=1, **both)
    lose(machines, 0)
    machines.join(2, node_rank=0)
    codes = machines.wait()
    assert codes == [137, 0, 0], machines.consoles()
    assert "node 0 (10.77.0.1) was lost" in machines.console(1)
    run = Finished(
        machines.directory, machines.directory / "runs" / "tiny", 0, machines.console(2), ""
    )
    assert [row["step"] for row in run.rows("step")] == list(range(1, 21))
    assert machines.left_over() == []


def test_a_spare_machine_takes_the_place_of_a_lost_one(start) -> None:
    steps = {
        "trainer.total_training_steps": 20,
        "trainer.save_last": "none",
        "rollout.colocated": True,
    }
    machines = start(ENDLESS | FOUR_OF_TWO | steps, 5, num_spares=1, MAX_RESTARTS="1")
    lose(machines, 3)
    machines.join(4, node_rank=3)
    codes = machines.wait()
    assert codes == [0, 0, 0, 137, 0], machines.consoles()
    assert "HostLostError: the machine machine3 (10.77.0.4) is lost" in machines.console(0)
    assert "the run is started again (1 of 1)" in machines.console(0)
    run = Finished(
        machines.directory, machines.directory / "runs" / "tiny", 0, machines.console(0), ""
    )
    assert [row["step"] for row in run.rows("step")] == list(range(1, 21))
    assert machines.left_over() == []
