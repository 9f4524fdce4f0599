"""A run at tp2 pp2 whose processes are killed at random times, again and again, against one that
was left alone.

Any process may be the victim, and the time may fall into the start, the resumption, a step, a save
or the end. Each launch has another number of drivers; the run that was left alone has none.
RLHF_MEGATRON_TEST_KILLS: number of kills (30).
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from benchmarks.chaos.compare import differences
from benchmarks.chaos.matrix import LAUNCH_S, tail
from benchmarks.chaos.program import Launch
from benchmarks.chaos.task import LAYOUTS, NUM_STEPS, overrides, place, run_dir_of, write_task
from rlhf_megatron.controller.recovery.checkpoint_store import CheckpointStore
from rlhf_megatron.stop import STOPPED_EXIT_CODE

pytestmark = [pytest.mark.dist, pytest.mark.long]
NUM_KILLS = int(os.environ.get("RLHF_MEGATRON_TEST_KILLS", "30"))
SEED = 22
END_S = 30.0  # for the last process of a launch to be gone
VICTIMS = [
    "controller",
    "controller",
    "rank0",
    "rank1",
    "rank2",
    "rank3",
    "agent",
    "engine0",
    "driver0",
    "driver1",
]
DRIVERS = (0, 1, 2, 5)  # the first is meant most


def start(config: Path, directory: Path, num_drivers: int) -> Launch:
    directory.mkdir(exist_ok=True)
    values = {**LAYOUTS["tp2_pp2"], **place(directory), "rollout.num_drivers": num_drivers}
    return Launch([str(config), *overrides(values)], directory, directory / "console", {})


def state_of(run_dir: Path) -> dict[str, str]:
    """File of the last checkpoint -> digest: parameters, moments, random states."""
    found = CheckpointStore(run_dir / "checkpoints").find_newest()
    assert found is not None and found.manifest.step == NUM_STEPS
    return {r.path: r.sha256 for r in found.manifest.files if r.path.startswith(("actor/", "rng/"))}


def killed(launch: Launch, after_s: float, victims: list[str]) -> str | None:
    """Who was killed after so long; None where the run had all of its steps by then."""
    launch.wait(after_s)
    while launch.exit_code is None:
        for victim in victims:  # some do not live yet
            process = launch.find(victim)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                    return victim
        time.sleep(0.05)
    assert launch.exit_code == 0, tail(launch.console)
    return None


def test_a_run_that_is_killed_at_random_times_ends_as_the_one_that_was_left_alone(
    tmp_path: Path,
) -> None:
    config = write_task(tmp_path / "task")
    launch = start(config, tmp_path / "alone", 0)
    try:
        assert launch.wait(LAUNCH_S) == 0, tail(launch.console)
        whole_s = launch.seconds
    finally:
        launch.kill()
    alone = run_dir_of(tmp_path / "alone")
    draw = random.Random(SEED)
    done = []
    number = 0
    while True:
        directory = tmp_path / f"killed{number}"
        num_drivers = draw.choice(DRIVERS)
        launch = start(config, directory, num_drivers)
        try:
            victim = None
            if len(done) < NUM_KILLS:
                victims = draw.sample(VICTIMS, len(VICTIMS))
                victim = killed(launch, draw.uniform(0.0, whole_s), victims)
            code = launch.wait(LAUNCH_S)
            left = launch.left_over(END_S)
        finally:
            launch.kill()
        assert code not in (None, STOPPED_EXIT_CODE) and not left, (
            victim,
            code,
            left,
            tail(launch.console),
        )
        if victim is not None:
            done.append(victim)
            print(
                (
                    f"kill {len(done)}: {victim} after {launch.seconds:.1f} s, {num_drivers}"
                    f" drivers, exit code {code}"
                ),
                flush=True,
            )
        if code == 0:
            assert differences(alone, run_dir_of(directory), is_bitwise=True) == []
            assert state_of(run_dir_of(directory)) == state_of(alone)
            print(f"run {number} is the one that was left alone", flush=True)
            whole_s = min(whole_s, launch.seconds)
            number += 1
            if len(done) >= NUM_KILLS:
                break
    assert len(done) == NUM_KILLS
