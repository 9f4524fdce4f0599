"""launch/ray_cluster.sh and launch/slurm_ray.sbatch: real clusters of this machine, with ssh and
Slurm replaced.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from end_to_end_tools import MARKER, overrides, write_config
from launch_tools import TIMEOUT_S, Started, environment
from places import ROOT
from ray_leftovers import end, left_over, processes_of, short_directory
from test_launch_slurm import JOB, Job, slurm_variables

from rlhf_megatron.stop import STOPPED_EXIT_CODE

CLUSTER = ROOT / "launch" / "ray_cluster.sh"
SBATCH = ROOT / "launch" / "slurm_ray.sbatch"
RAY = Path(sys.executable).parent / "ray"
ONE_RANK = {"trainer.n_gpus_per_node": 1, "tp": 1, "pp": 1}
ENDLESS = {**ONE_RANK, "trainer.total_training_steps": 100_000}
PORTS = 20000 + os.getpid() % 10 * 1000
needs_ray = pytest.mark.skipif(not RAY.exists(), reason="the package ray is not installed")


class Script:
    """Calls of ray_cluster.sh with a state directory of their own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.marker = uuid.uuid4().hex

    def __call__(
        self, *words: str, ports: int = PORTS, **more: str
    ) -> subprocess.CompletedProcess[str]:
        state = self.directory / "state"
        own = {
            "STATE_DIR": str(state),
            "TOKEN_FILE": str(self.directory / "token"),
            "RAY": str(RAY),
            "NUM_CPUS": "4",
        }
        given = environment(self.marker, **own, PORTS=str(ports), HOME=str(self.directory), **more)
        given.pop("RAY_ADDRESS", None)
        return subprocess.run(
            ["bash", str(CLUSTER), *words],
            env=given,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            cwd=ROOT,
        )

    def processes(self) -> list[int]:
        return processes_of(f"{MARKER}={self.marker}", self.directory)

    def left_over(self) -> list[str]:
        return left_over(f"{MARKER}={self.marker}", self.directory, 40)


@pytest.fixture
def script() -> Iterator[Script]:
    with short_directory() as directory:
        made = Script(directory)
        yield made
        end(f"{MARKER}={made.marker}", directory)


def listening(ports: range) -> set[tuple[str, int]]:
    """(address, port) of all listening sockets of this machine at these ports."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            address, _, port = line.split()[1].rpartition(":")
            if line.split()[3] == "0A" and int(port, 16) in ports:
                found.add((address, int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    """As /proc/net has it: 127.0.0.0/8, plain or inside of IPv6."""
    return address.endswith("7F") and (
        len(address) == 8 or address.startswith("0000000000000000FFFF0000")
    )


@needs_ray
@pytest.mark.long
@pytest.mark.dist
def test_a_cluster_of_one_machine(script: Script, tmp_path: Path) -> None:
    """It listens on the loopback alone, a run joins it, strangers do not, and it ends."""
    began = script("head")
    assert began.returncode == 0, began.stderr
    assert (
        "Ray head on 127.0.0.1"
        f" (process {(script.directory / 'state' / f'{PORTS}.pid').read_text().strip()}"
    ) in (began.stdout)
    sockets = listening(range(PORTS, PORTS + 900))
    assert {address for address, _ in sockets if not is_loopback(address)} == set()
    pinned = {port for _, port in sockets if PORTS <= port < PORTS + 100}
    assert {PORTS, PORTS + 1, PORTS + 2} <= pinned, "GCS, node manager, object manager"
    assert PORTS + 7 not in pinned, "no dashboard"
    said = {int(port) for port in re.findall(r"127\.0\.0\.1\]?:(\d+)  ", began.stdout)}
    assert said == pinned, "what is said is what listens"
    token = script.directory / "token"
    assert token.stat().st_mode & 0o777 == 0o600 and re.fullmatch("[0-9a-f]{64}", token.read_text())
    assert (script.directory / "state").stat().st_mode & 0o777 == 0o700

    again = script("head")
    assert again.returncode == 2 and f"one runs here at PORTS={PORTS}" in again.stderr

    config = write_config(tmp_path)
    to_source = script("env").stdout.strip()
    assert to_source == f"{script.directory}/state/{PORTS}.env"
    run = f"source {to_source} && exec {sys.executable} -m rlhf_megatron train {config}"
    words = overrides({**ONE_RANK, "trainer.runtime": "ray"})
    done = subprocess.run(
        ["bash", "-c", run + ' "$@"', "bash", *words],
        cwd=tmp_path,
        env=environment(script.marker),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert Started(tmp_path, None, "").steps() == [1, 2]

    status = [str(RAY), "status", "--address", f"127.0.0.1:{PORTS}"]
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    stranger = environment(
        script.marker, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(wrong), **loopback
    )
    refused = subprocess.run(status, env=stranger, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "auth" in (refused.stdout + refused.stderr).lower()
    friend = {**stranger, "RAY_AUTH_TOKEN_PATH": str(token)}
    welcome = subprocess.run(status, env=friend, capture_output=True, text=True, timeout=120)
    assert welcome.returncode == 0 and "/4.0 CPU" in welcome.stdout, welcome.stderr

    ended = script("stop")
    assert "no head runs here" in script("env").stderr
    assert ended.returncode == 0 and f"Ray at PORTS={PORTS} has ended here" in ended.stdout
    assert script.left_over() == []
    assert "nothing runs here" in script("stop").stdout


@needs_ray
@pytest.mark.long
@pytest.mark.dist
def test_two_machines_by_ssh(script: Script) -> None:
    """Two nodes of Ray, both on this machine: a command in place of ssh gives the second
    one other ports.
    """
    own = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    if not own:
        pytest.skip("this machine has no address but the loopback")
    ssh = script.directory / "ssh"
    ssh.write_text(f"""#!/bin/bash
# "second" is the second machine: this one by other ports
command=${{2//ADDRESS=second/ADDRESS={own[0]}}}
if [[ $1 == second ]]; then command=${{command//" PORTS={PORTS} "/" PORTS={PORTS + 1000} "}}; fi
exec bash -c "$command"
""")
    ssh.chmod(0o700)
    began = script("up", own[0], "second", SSH=str(ssh))
    assert began.returncode == 0, began.stdout + began.stderr
    assert f"Ray head on {own[0]}" in began.stdout and f"Ray worker on {own[0]}" in began.stdout
    deadline = time.monotonic() + 60
    while True:  # Ray counts what it has every few seconds
        status = subprocess.run(
            ["bash", "-c", f"source {script.directory}/state/{PORTS}.env && {RAY} status"],
            env=environment(script.marker),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if "/8.0 CPU" in status.stdout or time.monotonic() > deadline:
            break
    assert "/8.0 CPU" in status.stdout, status.stdout + status.stderr
    ended = script("down", own[0], "second", SSH=str(ssh))
    assert ended.returncode == 0 and ended.stdout.count("has ended here") == 2, (
        ended.stdout + ended.stderr
    )
    assert script.left_over() == []


def test_what_it_refuses(script: Script, tmp_path: Path) -> None:
    def refusal(*words: str, **more: str) -> str:
        done = script(*words, **more)
        assert done.returncode == 2
        return done.stderr

    for words in ((), ("begin",), ("worker",), ("up",)):
        assert "launch/ray_cluster.sh head" in refusal(*words), words
    assert (
        "a head on 127.0.0.1:6379 is a cluster of one machine; start it with ADDRESS="
        in refusal("worker", "127.0.0.1:6379")
    )
    token = script.directory / "token"
    message = refusal("worker", "10.0.0.1", ADDRESS="10.0.0.2")
    assert (
        f"TOKEN_FILE ({token}) is not there; copy it from the head's machine, mode 0600." in message
    )
    token.write_text("0" * 64)
    token.chmod(0o640)
    assert f"TOKEN_FILE ({token}) can be read by others; chmod 600 it." in refusal("head")
    token.chmod(0o600)
    state = script.directory / "state"
    state.chmod(0o755)
    assert f"{state} must be a directory of yours with mode 700" in refusal("head")
    assert script.processes() == []


def test_the_environment_of_a_job_is_yaml_without_secrets() -> None:
    found = yaml.safe_load((ROOT / "launch" / "runtime_env.yaml").read_text())
    assert set(found) == {"working_dir", "excludes", "env_vars"} and found["working_dir"] == "."
    ignored = set((ROOT / ".gitignore").read_text().split())
    assert {".venv*", "runs/", ".cache/"} <= ignored & set(found["excludes"])
    assert all(isinstance(value, str) for value in found["env_vars"].values()), (
        "Ray takes text only"
    )


@pytest.mark.parametrize("name", ["slurm_ray.sbatch", "ray_cluster.sh"])
def test_scripts_parse_and_stop_at_errors(name: str) -> None:
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert "\nset -euo pipefail\n" in path.read_text() and os.access(path, os.X_OK)


@pytest.fixture
def submit(launch: Any, tmp_path: Path) -> Iterator[Any]:
    """Start an attempt: submit(settings, variable=value). On one node unless SLURM_JOB_NUM_NODES
    says otherwise.
    """
    jobs: list[Job] = []
    one = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "PORTS": str(PORTS),
        "NUM_CPUS": "4",
    }

    def start(settings: dict[str, Any], **more: str) -> Job:
        variables = slurm_variables(tmp_path) | one | more
        jobs.append(launch(Job, ["bash", str(SBATCH)], settings, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        state = state_directory()
        try:
            assert left_over(job.marker, state, 40) == []
        finally:
            end(job.marker, state)


def state_directory() -> Path:
    """Of the job's cluster, which launch/slurm_ray.sbatch removes."""
    return Path(tempfile.gettempdir()) / f"rlhf-ray-{os.getuid()}-{JOB}"


@needs_ray
@pytest.mark.long
@pytest.mark.dist
def test_a_job_whose_time_is_up_is_requeued_and_goes_on(submit, tmp_path: Path) -> None:
    first = submit({**ENDLESS, "trainer.save_freq": 1000})
    first.wait_for_steps(1)
    first.process.send_signal(signal.SIGUSR1)
    assert first.wait() == STOPPED_EXIT_CODE, first.console()
    assert first.slurm("requeue") == [JOB]
    num_steps = len(first.steps())
    assert not state_directory().exists()

    total = {"trainer.total_training_steps": num_steps + 1}
    second = submit({**ONE_RANK, "trainer.save_freq": 1000, **total}, SLURM_RESTART_COUNT="1")
    assert second.wait() == 0, second.console()
    assert second.slurm("requeue") == [JOB], "no further one"
    assert second.steps() == list(range(1, num_steps + 2)), "each step once"
    attempts = second.slurm("srun")
    assert [seen["address"] for seen in attempts] == [f"127.0.0.1:{PORTS}"] * 2
    assert attempts[0]["secret"] != attempts[1]["secret"]
    assert {
        (seen["secret_mode"], seen["directory_mode"], len(seen["secret"])) for seen in attempts
    } == {("0o600", "0o700", 64)}
    assert list((tmp_path / ".rlhf_megatron").iterdir()) == [], "the tokens are gone"


@needs_ray
@pytest.mark.long
@pytest.mark.dist
def test_a_job_on_two_nodes(submit, tmp_path: Path) -> None:
    """Both are this machine; a script between gives the second one other ports."""
    if not subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split():
        pytest.skip("this machine has no address but the loopback")
    cluster = tmp_path / "cluster.sh"
    cluster.write_text(f"""#!/bin/bash
if [[ $1 == worker ]]; then PORTS=$((PORTS + 1000)); fi
exec {CLUSTER} "$@"
""")
    cluster.chmod(0o700)
    nodes = {
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "127.0.0.2,127.0.0.3",
        "NUM_CPUS": "2",
    }
    # Three CPUs: more than either node has.
    job = submit(
        {**ONE_RANK, "trainer.nnodes": 2, "trainer.save_hf": False}, CLUSTER=str(cluster), **nodes
    )
    assert job.wait() == 0, job.console()
    assert job.steps() == [1, 2]
    assert (
        "attempt 1 on 2 node(s)" in job.console()
        and "the run has ended with exit code 0" in job.console()
    )


@needs_ray
@pytest.mark.long
@pytest.mark.dist
def test_a_job_that_fails_keeps_its_exit_code(submit) -> None:
    job = submit({**ONE_RANK, "actor.mini_batch_size": 15})
    assert job.wait() == 2
    assert "actor.mini_batch_size (15 samples) must divide" in job.console()
    assert not (job.directory / "slurm.log").exists() or job.slurm("requeue") == []


def test_the_job_explains_how_it_is_started(tmp_path: Path) -> None:
    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        done = subprocess.run(
            ["bash", str(SBATCH), *arguments], env=env, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    assert run("x.yaml")[0] != 0 and "start this script with sbatch" in run("x.yaml")[1]
    slurm = {"SLURM_JOB_ID": JOB, "SLURM_SUBMIT_DIR": str(tmp_path)}
    assert run(**slurm) == (2, "usage: sbatch launch/slurm_ray.sbatch CONFIG [key=value ...]\n")
    code, message = run("x.yaml", **slurm)
    assert code == 2 and message == (
        f"{tmp_path}/launch/ray_cluster.sh is not there: submit the job from the folder in which"
        " launch/ lies, or set CLUSTER; `rlhf-megatron launch-scripts launch` writes that folder.\n"
    )
