"""Programs that cheat the limits of time and disk, as root and as an ordinary user, in the full
set of layers and in the set that a container without namespaces allows; and right programs on a
busy machine, none of which may be over its limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from escaping_programs import PAID, PROGRAMS
from program_runner import ORDINARY_UID, SYSTEM_PYTHON, ProgramRunner, RunReport

from rlhf_megatron.rewards.sandbox.disk_usage import is_disk_over_limits
from rlhf_megatron.rewards.sandbox.program_clock import ProgramClock, TreeTimes, read_tree_times
from rlhf_megatron.rewards.sandbox.sandbox_layers import LANDLOCK, LAYERS, SECCOMP, SandboxLimits

LAYER_SETS = {"full": LAYERS, "container": (LANDLOCK, SECCOMP)}
USERS = {"same_user": os.geteuid(), "ordinary_user": ORDINARY_UID}
LIMITS = SandboxLimits(memory_mib=600, cpu_s=2)
TIMEOUT_S = 1.0
MAX_OVERRUN_S = 0.3  # of the limit, by the clock that counts
QUICK = (
    "vfork_that_sleeps",
    "vfork_of_a_sibling_that_sleeps",
    "vfork_of_a_sibling_that_stops",
    "chain_of_vforks_of_siblings",
    "name_that_looks_like_a_state",
    "leader_that_has_ended",
    "stop_the_harness",
    "stop_of_the_next_run",
    "kill_all",
    "children_ignored_by_hand",
    "children_not_waited_for",
    "orphans_in_turn",
    "disk_below_long_paths",
    "disk_at_once",
    "disk_in_files_without_names",
    "disk_hidden_from_the_guardian",
)


@pytest.fixture(
    scope="module",
    params=[
        (layer_set, user)
        if user == "same_user"
        else pytest.param((layer_set, user), marks=pytest.mark.long)
        for layer_set in LAYER_SETS
        for user in USERS
    ],
    ids=lambda pair: "-".join(pair),
)
def runner(request: pytest.FixtureRequest) -> Iterator[ProgramRunner]:
    layer_set, user = request.param
    if user == "ordinary_user" and (os.geteuid() != 0 or not Path(SYSTEM_PYTHON).exists()):
        pytest.skip(f"needs root, and {SYSTEM_PYTHON} for another user")
    runner = ProgramRunner(USERS[user], LAYER_SETS[layer_set], TIMEOUT_S, LIMITS)
    if set(runner.active_layers) != set(LAYER_SETS[layer_set]):
        runner.close()
        pytest.skip(f"this kernel gives {runner.active_layers} only: {runner.layers_note}")
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in PROGRAMS]
)
def test_no_escaping_program_is_paid_or_masked(runner: ProgramRunner, name: str) -> None:
    program = PROGRAMS[name]
    report = runner.run(program.code, program.num_runs)
    is_paid = report.ending == "exit" and report.exit_code == 0 and PAID in report.stdout
    assert not is_paid, report
    assert report.ending in program.endings, report
    assert report.counted_s < TIMEOUT_S + MAX_OVERRUN_S, report
    assert report.took_s < 10 * TIMEOUT_S + 30, "on a machine that others use too"


def test_the_table_is_large_enough() -> None:
    assert len(PROGRAMS) >= 90
    assert set(QUICK) <= set(PROGRAMS)


# ---- right programs, each of which alone needs half of its limit ----

BURN = """
import os, subprocess, sys, threading, time
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
"""
RIGHT_PROGRAMS = {
    "computes": "burn(0.5)",
    "sleeps": "time.sleep(0.5)",
    "computes and sleeps": "burn(0.25); time.sleep(0.25)",
    "computes in a thread": "t = threading.Thread(target=burn, args=(0.5,)); t.start(); t.join()",
    "computes in a child": "if os.fork() == 0: burn(0.5); os._exit(0)\nos.wait()",
}
NUM_RUNS = 200
NUM_RUNNERS = 4
LOAD = 8
SPIN = "while True: pass"


def run_right_programs(layer_set: str, num_runs: int) -> list[tuple[str, RunReport]]:
    """Run the right programs in turn in one sandbox, and return (name, report) for each run."""
    runner = ProgramRunner(os.geteuid(), LAYER_SETS[layer_set], TIMEOUT_S, LIMITS)
    names = [list(RIGHT_PROGRAMS)[i % len(RIGHT_PROGRAMS)] for i in range(num_runs)]
    reports = [
        (name, runner.run(f"{BURN}{RIGHT_PROGRAMS[name]}\nprint('right')")) for name in names
    ]
    runner.close()
    return reports


@pytest.mark.long
@pytest.mark.parametrize("layer_set", LAYER_SETS)
def test_no_right_program_times_out_at_a_load_of_eight(layer_set: str) -> None:
    """Spinning processes make the load; the programs come on top."""
    spinners = [subprocess.Popen([sys.executable, "-S", "-c", SPIN]) for _ in range(LOAD)]
    reports: list[tuple[str, RunReport]] = []
    threads = [
        threading.Thread(
            target=lambda: reports.extend(run_right_programs(layer_set, NUM_RUNS // NUM_RUNNERS))
        )
        for _ in range(NUM_RUNNERS)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
    assert len(reports) == NUM_RUNS
    slowest = max(report.took_s for _, report in reports)
    most_counted = max(report.counted_s for _, report in reports)
    print(f"{layer_set}: slowest {slowest:.2f} s, most counted {most_counted:.2f} s")
    failed = [pair for pair in reports if pair[1].stdout != "right\n"]
    assert failed == []


# ---- the clock, by hand ----


def test_a_run_counts_wall_time_less_the_longest_wait_of_one_task() -> None:
    before = TreeTimes(cpu_s=5.0, wait_s_by_task={10: 2.0})
    clock = ProgramClock(limit_s=1.0, started_at=0.0, times_at_start=before)
    clock.add_times(TreeTimes(5.2, {10: 2.1, 11: 0.8, 12: 0.8}))
    assert clock.count_s(1.5) == pytest.approx(0.7), "0.8 of one task, and not 1.7 of all"
    clock.add_times(TreeTimes(5.1, {10: 2.1}))
    assert clock.count_s(1.5) == pytest.approx(0.7), "task 11 has ended; its wait was one"
    assert not clock.is_over(1.5)
    assert clock.is_over(1.9), "1.9 - 0.8"
    assert clock.is_over(1.5, cpu_s=1.01), "CPU time counts where it is more"
    clock.add_times(TreeTimes(6.1, {}))
    assert clock.count_s(1.5) == pytest.approx(1.1), "CPU time of children, too"


def test_ten_times_the_limit_in_wall_time_ends_a_run() -> None:
    clock = ProgramClock(limit_s=1.0, started_at=0.0, times_at_start=TreeTimes(0.0, {}))
    clock.add_times(TreeTimes(0.1, {1: 10.5}))
    assert not clock.is_over(9.9)
    assert clock.is_over(10.1)


def test_a_number_that_the_kernel_uses_again_is_another_task() -> None:
    clock = ProgramClock(1.0, 0.0, TreeTimes(0.0, {7: 3.0}))
    clock.add_times(TreeTimes(0.0, {7: 0.4}))
    assert clock.longest_wait_s == pytest.approx(0.4)


def test_times_of_a_tree_are_those_of_the_kernel() -> None:
    times = read_tree_times([os.getpid()])
    used = os.times()
    cpu_s = used.user + used.system + used.children_user + used.children_system
    assert times.cpu_s == pytest.approx(cpu_s, abs=0.2)
    assert threading.get_native_id() in times.wait_s_by_task
    assert read_tree_times([2**22 + 1]) == TreeTimes(0.0, {}), "nobody has this number"


# ---- what is on disk ----


def test_files_below_paths_that_no_call_takes_count(tmp_path: Path) -> None:
    limits = SandboxLimits(file_mib=1, files=100)
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=place)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = below
    assert not is_disk_over_limits(str(tmp_path), [], limits), "20 folders of 4 KiB"
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=place)
    os.write(file, bytes(1 << 20))
    os.close(file)
    os.close(place)
    assert is_disk_over_limits(str(tmp_path), [], limits)
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_files_without_names_count_once(tmp_path: Path) -> None:
    limits = SandboxLimits(file_mib=3, files=100)
    path = tmp_path / "file"
    with open(path, "wb") as file:
        file.write(bytes(2 << 20))
        file.flush()
        duplicate = os.dup(file.fileno())
        path.unlink()
        assert not is_disk_over_limits(str(tmp_path), [os.getpid()], limits), "2 MiB, held twice"
        file.write(bytes(2 << 20))
        file.flush()
        assert is_disk_over_limits(str(tmp_path), [os.getpid()], limits)
        os.close(duplicate)
    assert not is_disk_over_limits(str(tmp_path), [os.getpid()], limits)


def test_a_sandbox_serves_on_after_its_runs_were_ended() -> None:
    runner = ProgramRunner(os.geteuid(), LAYERS, TIMEOUT_S, LIMITS)
    start = time.monotonic()
    assert runner.run("import time; time.sleep(60)").ending == "timeout"
    assert time.monotonic() - start < 30
    assert runner.run("print(6 * 7)").stdout == "42\n"
    assert runner.run("print(6 * 7)", num_runs=3).stdout == "42\n"
    runner.close()
