"""MAX_RESTARTS of launch/torchrun.sh: what is started again, how often, and with which words."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import overrides, write_config
from places import ROOT

from rlhf_megatron.cli.restarts import MAX_IDLE_ATTEMPTS, parse_restartable_run
from rlhf_megatron.config.errors import ConfigError

# An attempt as the plan has it: files that it leaves in the run directory, and its end.
ATTEMPT = """
import json, os, pathlib, signal, sys, time
here = pathlib.Path(sys.argv[1])
log = here / "attempts"
number = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    file.write(json.dumps(sys.argv[2:]) + "\\n")
made, end = json.loads((here / "plan").read_text())[number]
for name, size in made.items():
    path = here / "runs" / "tiny" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size)) if size else path.mkdir()
if end == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    (here / "waits").touch()
    time.sleep(60)
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
CHECKPOINT_2 = {"checkpoints/step_000002": 0}
CHECKPOINT_4 = {"checkpoints/step_000004": 0}
GROUPS_3 = {"journal/step_000003.groups": 10}
MORE_GROUPS_3 = {"journal/step_000003.groups": 20}
FINISHED_70 = {"journal/group_00000070.samples": 10}
FINISHED_71 = {"journal/group_00000071.samples": 5}
TRAIN_3 = {"journal/step_000003.train": 5}
UNFINISHED = {"checkpoints/.step_000009.partial": 0}

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(number of restarts, plan, more words): the supervisor over attempts that do as
    the plan says.
    """
    config = write_config(tmp_path)
    (tmp_path / "attempt.py").write_text(ATTEMPT)

    def begin(
        max_restarts: int, plan: list[Any], *words: str, save_freq: int = 2
    ) -> subprocess.Popen[str]:
        (tmp_path / "plan").write_text(json.dumps(plan))
        command = [
            sys.executable,
            str(tmp_path / "attempt.py"),
            str(tmp_path),
            "train",
            str(config),
        ]
        command += [*overrides({"trainer.save_freq": save_freq}), *words]
        supervisor = [
            sys.executable,
            "-m",
            "rlhf_megatron.cli.restarts",
            str(max_restarts),
            *command,
        ]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            supervisor, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
        )

    return begin


def attempts(directory: Path) -> list[list[str]]:
    return [json.loads(line) for line in (directory / "attempts").read_text().splitlines()]


@pytest.mark.parametrize(
    ("plan", "code", "num_attempts", "said"),
    [
        # Each attempt is further than all before: a checkpoint, groups, more of them, a later
        # stage, a checkpoint.
        (
            [
                [CHECKPOINT_2, 1],
                [GROUPS_3, -9],
                [MORE_GROUPS_3, 1],
                [TRAIN_3, 1],
                [CHECKPOINT_4, -6],
                [{}, 0],
            ],
            0,
            6,
            "ended with exit code 134 in step 5; the run is started again (5 of 5)",
        ),
        # Of a schedule that generates ahead: a group is finished, then a later one; the same again
        # is no progress.
        (
            [[CHECKPOINT_2, 1], [FINISHED_70, 1], [FINISHED_71, 1], [FINISHED_70, 3], [{}, 0]],
            0,
            5,
            "3 of 5",
        ),
        (
            [[CHECKPOINT_2, 1], [FINISHED_71, 1], [FINISHED_70, 1], [{}, 4]],
            4,
            4,
            "2 in a row made no progress",
        ),
        (
            [[CHECKPOINT_2, 1], [UNFINISHED, 1], [{}, 3], [{}, 0]],
            3,
            3,
            "2 in a row made no progress",
        ),
        (
            [[CHECKPOINT_2, 1], [{}, 1], [CHECKPOINT_4, 1], [{}, 1], [{}, 1]],
            1,
            5,
            "2 in a row made no progress",
        ),
        (
            [[{f"checkpoints/step_{n:06d}": 0}, 1] for n in range(1, 8)],
            1,
            6,
            "MAX_RESTARTS (5) is used up",
        ),
        ([[CHECKPOINT_2, 75]], 75, 1, ""),
        ([[CHECKPOINT_2, 17]], 17, 1, ""),
    ],
)
def test_how_often_a_run_is_started(
    start: Start, tmp_path: Path, plan: list[Any], code: int, num_attempts: int, said: str
) -> None:
    assert MAX_IDLE_ATTEMPTS == 2
    process = start(5, plan)
    _, errors = process.communicate(timeout=240)
    assert (process.returncode, len(attempts(tmp_path))) == (code, num_attempts), errors
    assert said in errors


def test_what_starts_anew_is_for_the_first_attempt(start: Start, tmp_path: Path) -> None:
    process = start(1, [[CHECKPOINT_2, 1], [{}, 0]], "--fresh", "trainer.resume_mode=disable")
    assert process.wait(120) == 0
    first, second = attempts(tmp_path)
    assert first[-2:] == ["--fresh", "trainer.resume_mode=disable"]
    assert "--fresh" not in second
    assert second[-2:] == ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]


def test_a_run_that_is_told_to_stop_is_not_started_again(start: Start, tmp_path: Path) -> None:
    process = start(3, [[CHECKPOINT_2, "wait"], [{}, 0]])
    deadline = time.monotonic() + 120
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 1, "the attempt got the signal, and its code is the run's"
    assert len(attempts(tmp_path)) == 1


def test_a_run_without_checkpoints_is_not_started(start: Start, tmp_path: Path) -> None:
    process = start(3, [[{}, 0]], save_freq=0)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and errors.startswith(
        "MAX_RESTARTS needs trainer.save_freq above 0"
    )
    assert not (tmp_path / "attempts").exists()
    with pytest.raises(ConfigError, match="does not go with --replay"):
        command = [
            "x",
            "train",
            str(tmp_path / "tiny.yaml"),
            "trainer.save_freq=2",
            "--replay",
            "3",
        ]
        parse_restartable_run([*command, "--replay-from", "runs/x"])


def test_the_next_attempt_waits_for_what_the_last_has_left(start: Start, tmp_path: Path) -> None:
    """A process that holds run.lock for two seconds more."""
    lock = tmp_path / "runs" / "tiny" / "run.lock"
    lock.parent.mkdir(parents=True)
    hold = (
        f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX);"
        " print(1, flush=True)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{hold}; time.sleep(2)"], stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline()
    process = start(1, [[CHECKPOINT_2, -9], [{}, 0]])
    deadline = time.monotonic() + 120
    while True:
        num_attempts = len(attempts(tmp_path)) if (tmp_path / "attempts").exists() else 0
        if holder.poll() is not None:
            break
        assert time.monotonic() < deadline and num_attempts <= 1
        time.sleep(0.05)
    assert process.wait(120) == 0 and len(attempts(tmp_path)) == 2


RUN_ONCE = """
import sys
from rlhf_megatron.cli.restarts import RestartSupervisor
sys.exit(RestartSupervisor().run_command(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("node", "addresses", "found"),
    [
        (0, "203.0.113.1,127.0.0.3", "127.0.0.3"),  # its own
        (1, "127.0.0.2,127.0.0.3", "127.0.0.3"),  # that which answers
        (0, "127.0.0.2", "127.0.0.2"),
        (
            0,
            "203.0.113.1,203.0.113.2",
            "MASTER_ADDR (203.0.113.1,203.0.113.2) has no address of this node 0; add it",
        ),
    ],
)
def test_an_attempt_is_told_where_node_0_is_now(node: int, addresses: str, found: str) -> None:
    with socket.create_server(("127.0.0.3", 0)) as server:
        agent = [
            sys.executable,
            "-c",
            "import os, sys; print(os.environ['MASTER_ADDR'], sys.argv[-1])",
        ]
        words = [*agent, "--node-rank", str(node), "--master-addr", addresses]
        given = {
            "MASTER_ADDR": addresses,
            "MASTER_PORT": str(server.getsockname()[1]),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", RUN_ONCE, *words]
        done = subprocess.run(
            command, env=os.environ | given, capture_output=True, text=True, timeout=120
        )
    is_found = done.returncode == 0
    assert (done.stdout if is_found else done.stderr).strip() == (
        f"{found} {found}" if is_found else found
    )
