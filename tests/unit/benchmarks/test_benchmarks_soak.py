"""The soak's parts: its mix of troubles, its verdict on rows and samples,
what it counts as leaked.
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_tools import SOAK_PROMPTS_BY_STEP, soak_rows

from benchmarks.chaos import trouble
from benchmarks.chaos.echo import echo
from benchmarks.chaos.leaks import FileCounts, listening_ports
from benchmarks.chaos.program import Process
from benchmarks.chaos.schedules import draw_faults
from benchmarks.chaos.stand import PACES
from benchmarks.chaos.trouble import KINDS, schedule
from benchmarks.chaos.verdict import conservation, total


def test_a_fifth_of_the_troubles_ends_the_launch_and_all_kinds_take_turns() -> None:
    troubles = schedule(600.0, 20, seed=1)
    assert len(troubles) == 20 and [t.at_s for t in troubles] == sorted(t.at_s for t in troubles)
    assert all(27 * i <= t.at_s < 27 * (i + 1) for i, t in enumerate(troubles)), (
        "one in each 20th of nine minutes"
    )
    counts = Counter(t.kind for t in troubles)
    endings = {kind: counts[kind] for kind in KINDS if KINDS[kind].ends_launch}
    others = {kind: counts[kind] for kind in KINDS if not KINDS[kind].ends_launch}
    assert sum(endings.values()) == 4 and max(endings.values()) - min(endings.values()) <= 1
    assert sum(others.values()) == 16 and max(others.values()) - min(others.values()) <= 1


def test_a_seed_gives_one_schedule() -> None:
    assert schedule(600.0, 20, seed=3) == schedule(600.0, 20, seed=3) != schedule(600.0, 20, seed=4)
    first, again, other = (draw_faults(seed, PACES["local"], can_end=True) for seed in (5, 5, 6))
    assert first == again != other


def test_the_reward_by_hand_and_its_outage(tmp_path: Path) -> None:
    outage = tmp_path / "outage"
    assert echo("37+12=", "3333", str(outage)) == 1.0
    assert echo("37+12=", "3a33extra", str(outage)) == 0.75
    assert echo("37+12=", "33", str(outage)) == 0.5, "what is not there is not right"
    outage.touch()
    failed = 0
    for i in range(400):
        try:
            echo("37+12=", f"{i}", str(outage))
        except ConnectionError:
            failed += 1
    assert 25 <= failed <= 75, "one in eight of 400, give or take"


def test_an_undisturbed_run_is_conserved() -> None:
    rows, samples = soak_rows()
    assert list(conservation(rows, samples, SOAK_PROMPTS_BY_STEP)) == []


def test_a_lost_sample_is_told() -> None:
    rows, samples = soak_rows()
    found = list(conservation(rows, samples[:-1], SOAK_PROMPTS_BY_STEP))
    assert found == ["step 3: its 127 samples are not those of its prompts"]


def test_a_sample_of_an_old_version_is_told() -> None:
    rows, samples = soak_rows()
    samples[5]["policy_version"] = 0
    assert list(conservation(rows, samples, SOAK_PROMPTS_BY_STEP)) == [
        "step 1: samples of versions [0], not 1"
    ]


def test_a_step_that_is_missing_or_repeated_is_told() -> None:
    rows, samples = soak_rows()
    assert list(conservation([rows[0], rows[2]], samples, SOAK_PROMPTS_BY_STEP)) == [
        "steps are not 1 .. 2: missing [2], repeated []"
    ]
    assert list(conservation([*rows, rows[2]], samples, SOAK_PROMPTS_BY_STEP)) == [
        "steps are not 1 .. 4: missing [], repeated [3]"
    ]


def test_a_version_that_falls_back_is_told() -> None:
    rows, samples = soak_rows()
    rows[2]["policy/version"] = 3.0
    assert "versions do not go up by one a step: [2, 3, 3]" in list(
        conservation(rows, samples, SOAK_PROMPTS_BY_STEP)
    )


def test_a_counter_that_begins_again_with_each_launch_is_added_up() -> None:
    assert total([0.0, 1.0, 1.0, 3.0, 0.0, 2.0, 2.0]) == 5.0


def test_descriptors_that_pile_up_are_told() -> None:
    counts = FileCounts()
    for second in range(60):
        steady = 20 + second % 3
        leaking = 20 + second // 2
        processes = [
            Process(1, "rank0", "", steady),
            Process(2, "controller", "", leaking),
            Process(second, "other", "", 9),
        ]
        counts.add(processes, float(second))
    assert counts.problems() == ["controller had 20 open files at first and 45 at last"]
    assert [row["role"] for row in counts.table()] == ["rank0", "controller"], (
        "a short life says nothing"
    )


def test_ports_of_a_process_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports([os.getpid()]) and port in listening_ports(None)
    assert port not in listening_ports([os.getpid()])


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """A process that writes a file of two bytes for each line that it reads, and says
    what came of it.
    """
    code = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        with open(line.strip(), 'wb', buffering=0) as file: print(file.write(b'ab') =="
        " 2, flush=True)\n"
        "    except OSError as error: print(error.strerror, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_a_disk_is_full_for_a_while(child: subprocess.Popen[str], tmp_path: Path) -> None:
    """The kernel itself refuses the bytes, and the process goes on when there is room again."""
    assert child.stdin is not None and child.stdout is not None

    def write() -> str:
        child.stdin.write(f"{tmp_path / 'file'}\n")
        child.stdin.flush()
        return child.stdout.readline().strip()

    assert write() == "True"
    trouble.limit_files(child.pid, 0)
    assert write() == "File too large"
    trouble.limit_files(child.pid, resource.RLIM_INFINITY)
    assert write() == "True"
