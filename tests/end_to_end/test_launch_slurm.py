"""launch/slurm.sbatch with Slurm's commands replaced (fake_slurm); launch/torchrun.sh and the
runs are real.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_tools import TIMEOUT_S, Started
from places import ROOT, SUPPORT
from test_launch_nodes import ENDLESS, QUICK, TWO_NODES

from rlhf_megatron.stop import STOPPED_EXIT_CODE

SAVED = {"trainer.save_freq": 1000}
SCRIPT = ROOT / "launch" / "slurm.sbatch"
FAKES = SUPPORT / "fake_slurm"
JOB = "4711"


class Job(Started):
    """One attempt of the job, whose script the test signals as Slurm would."""

    def slurm(self, command: str) -> list[Any]:
        """What Slurm's commands were asked for, over all attempts."""
        lines = [
            json.loads(line) for line in (self.directory / "slurm.log").read_text().splitlines()
        ]
        return [line[command] for line in lines if command in line]


def slurm_variables(directory: Path) -> dict[str, str]:
    """The environment of a script that Slurm starts, with our commands in the place of Slurm's."""
    return {
        "SLURM_JOB_ID": JOB,
        "SLURM_JOB_NODELIST": "127.0.0.2,127.0.0.3",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "FAKE_SLURM_LOG": str(directory / "slurm.log"),
        "PATH": f"{FAKES}:{os.environ['PATH']}",
        "HOME": str(directory),
    }


@pytest.fixture
def submit(launch: Any, tmp_path: Path) -> Iterator[Any]:
    """Start an attempt: submit(settings, variable=value)."""
    jobs: list[Job] = []

    def start(settings: dict[str, Any], **more: str) -> Job:
        variables = slurm_variables(tmp_path) | more
        jobs.append(launch(Job, ["bash", str(SCRIPT)], TWO_NODES | settings, **variables))
        return jobs[-1]

    yield start
    for job in jobs:
        job.seconds_until_gone(20.0)


@pytest.mark.dist
@pytest.mark.long
def test_a_run_whose_time_is_up_is_stopped_requeued_once_and_goes_on(
    submit, tmp_path: Path
) -> None:
    first = submit(ENDLESS | SAVED)
    first.wait_for_steps(1)
    first.process.send_signal(signal.SIGUSR1)
    first.process.send_signal(signal.SIGUSR1)
    assert first.wait() == STOPPED_EXIT_CODE, first.console()
    assert first.slurm("scancel") == [["SIGUSR1", JOB]] and first.slurm("requeue") == [JOB]
    assert "Traceback" not in first.console() and "Error" not in first.console()
    assert list((tmp_path / "transfer").iterdir()) == [], "the controller has cleaned up"
    run_dir = tmp_path / "runs" / "tiny"
    num_steps = len(first.steps())
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == f"step_{num_steps:06d}"

    total = {"trainer.total_training_steps": num_steps + 1}
    second = submit(QUICK | SAVED | total, SLURM_RESTART_COUNT="1")
    assert second.wait() == 0, second.console()
    assert second.slurm("requeue") == [JOB], "no further one"
    assert (
        "attempt 1 on 2 node(s)" in second.console()
        and "attempt 2 on 2 node(s)" in second.console()
    )
    assert (run_dir / "summary.json").exists()
    assert second.steps() == list(range(1, num_steps + 2)), "each step once"
    assert not (tmp_path / "runs" / "tiny.1").exists()

    attempts = second.slurm("srun")
    assert [seen["address"] for seen in attempts] == ["127.0.0.2", "127.0.0.2"]
    assert (
        attempts[0]["port"] != attempts[1]["port"]
        and attempts[0]["secret"] != attempts[1]["secret"]
    )
    for seen in attempts:
        assert (seen["secret_mode"], seen["directory_mode"], len(seen["secret"])) == (
            "0o600",
            "0o700",
            64,
        )
    assert list((tmp_path / ".rlhf_megatron").iterdir()) == [], "the secrets are gone"


@pytest.mark.parametrize(
    ("code", "signals", "settings", "is_requeued"),
    [
        (75, (), {}, True),  # one of its processes was told to stop
        (75, (), {"REQUEUE": "0"}, False),
        (75, (signal.SIGTERM,), {}, False),  # cancelled
        (1, (), {}, False),
        (1, (signal.SIGUSR1,), {}, True),  # the time was up, and it did not manage to stop
        (143, (signal.SIGUSR1,), {"REQUEUE": "0"}, False),
        (17, (signal.SIGUSR1,), {}, False),
        (0, (signal.SIGUSR1,), {}, False),
    ],
)
def test_which_ends_are_requeued(
    submit,
    tmp_path: Path,
    code: int,
    signals: tuple[int, ...],
    settings: dict[str, str],
    is_requeued: bool,
) -> None:
    """The run itself is replaced: it says that it runs, waits to be told to end, and
    ends with `code`.
    """
    launch = tmp_path / "launch.sh"
    launch.write_text(f"""#!/bin/sh
trap '' USR1 TERM
touch {tmp_path}/began$NODE_RANK
while [ ! -e {tmp_path}/end ]; do sleep 0.05; done
exit {code}
""")
    launch.chmod(0o700)
    job = submit({}, LAUNCH=str(launch), **settings)
    wait_for(lambda: (tmp_path / "began0").exists() and (tmp_path / "began1").exists())
    for number in signals:
        job.process.send_signal(number)
    if signal.SIGUSR1 in signals:
        wait_for(lambda: job.slurm("scancel"))
    elif signals:
        time.sleep(0.5)
    (tmp_path / "end").touch()
    assert job.wait() == code, job.console()
    assert job.slurm("requeue") == ([JOB] if is_requeued else [])


def wait_for(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.dist
def test_a_run_that_fails_keeps_its_exit_code_and_is_not_requeued(submit, tmp_path: Path) -> None:
    job = submit(QUICK | {"actor.mini_batch_size": 15})
    assert job.wait() == 2
    assert "actor.mini_batch_size (15 samples) must divide" in job.console()
    assert job.slurm("scancel") == [] and job.slurm("requeue") == []


def test_it_explains_how_it_is_started(tmp_path: Path) -> None:
    def run(*arguments: str, **variables: str) -> tuple[int, str]:
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), **variables}
        done = subprocess.run(
            ["bash", str(SCRIPT), *arguments], env=env, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    assert run("x.yaml")[0] != 0 and "start this script with sbatch" in run("x.yaml")[1]
    slurm = {"SLURM_JOB_ID": JOB, "SLURM_SUBMIT_DIR": str(tmp_path)}
    assert run(**slurm) == (2, "usage: sbatch launch/slurm.sbatch CONFIG [key=value ...]\n")
    code, message = run("x.yaml", **slurm)
    assert code == 2 and message == (
        f"{tmp_path}/launch/torchrun.sh is not there: submit the job from the folder in which"
        " launch/ lies, or set LAUNCH; `rlhf-megatron launch-scripts launch` writes that folder.\n"
    )


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_scripts_parse_and_stop_at_errors(name: str) -> None:
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    assert "\nset -euo pipefail\n" in path.read_text() and os.access(path, os.X_OK)
