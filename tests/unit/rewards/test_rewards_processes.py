"""What is known of processes below a process: which there are, and the CPU time that
they have used.
"""

from __future__ import annotations

import builtins
import os
import subprocess
import sys
import time
from typing import Any

import pytest

from rlhf_megatron.rewards import process_tree
from rlhf_megatron.rewards.process_stopwatch import ProcessStopwatch
from rlhf_megatron.rewards.process_tree import iterate_descendants, list_children
from rlhf_megatron.rewards.sandbox.remote_sandbox import insert_prelude

BURNING = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.2: pass"
sys.stdin.readline()
for _ in range(3):
    subprocess.run([sys.executable, "-S", "-c", burn], check=True)
print("done", flush=True)
sys.stdin.readline()
"""


def test_cpu_time_of_children_that_have_ended_counts() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BURNING], stdin=-1, stdout=-1, text=True, bufsize=1
    ) as program:
        watch = ProcessStopwatch(program.pid)
        watch.update_counted_s()
        assert program.stdin is not None and program.stdout is not None
        program.stdin.write("go\n")
        assert program.stdout.readline() == "done\n"
        assert watch.update_counted_s() >= 0.5, (
            "three children of 0.2 s each, of which one tick each may be cut off"
        )
        program.stdin.write("end\n")


SLEEPING_LIKE_A_DISK = """
import ctypes, os, time
LIBC = ctypes.CDLL(None)
if os.fork() == 0:
    # the parent of the child that sleeps is this process's parent
    if LIBC.syscall(56, 0x4000 | 0x8000 | 17, 0, 0, 0, 0) == 0:
        LIBC.usleep(3000000)
    LIBC._exit(0)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of clone(2)")
def test_a_descendant_that_seems_to_wait_for_a_disk_is_asleep() -> None:
    """It waits for a child of vfork, which has another parent."""
    with subprocess.Popen([sys.executable, "-c", SLEEPING_LIKE_A_DISK], stdout=-1) as program:
        assert program.stdout is not None and program.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        watch = ProcessStopwatch(program.pid)
        watch.update_counted_s()
        states = {
            process_tree.read_stat_fields(pid)[0] for pid in process_tree.list_children(program.pid)
        }
        assert b"D" in states
        for _ in range(20):
            time.sleep(0.05)
            watch.update_counted_s()
        assert watch.update_counted_s() > 0.8
        program.kill()


def test_kernels_without_lists_of_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parents of all processes say the same."""
    shell = ["sh", "-c", "sleep 60 & echo $!; wait"]
    with subprocess.Popen(shell, stdout=-1, text=True) as program:
        assert program.stdout is not None
        grandchild = int(program.stdout.readline())
        assert list_children(program.pid) == [grandchild] and program.pid in list_children(
            os.getpid()
        )
        opened = builtins.open

        def without_lists(path: Any, *arguments: Any) -> Any:
            if str(path).endswith("/children"):
                raise FileNotFoundError(path)
            return opened(path, *arguments)

        monkeypatch.setattr(process_tree, "open", without_lists, raising=False)
        assert list_children(program.pid) == [grandchild]
        assert set(iterate_descendants(os.getpid())) >= {program.pid, grandchild}
        assert set(iterate_descendants(os.getpid(), {program.pid})).isdisjoint(
            {program.pid, grandchild}
        )
        os.kill(grandchild, 9)
        program.wait()
        assert list_children(program.pid) == []


FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize(
    "code", [f"{FUTURE}x: No = 1\nprint(x)", f"'A text.'\n{FUTURE}x: No = 1; print(x)", "print(1)"]
)
def test_the_prelude_stands_behind_future_imports(code: str) -> None:
    code = code.replace("\n", "\r\n")
    done = subprocess.run(
        [sys.executable, "-c", insert_prelude(code + "\nprint(gcd(4, 6))")],
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["1", "2"], done.stderr


def test_a_program_that_does_not_parse_is_the_servers_to_tell() -> None:
    assert insert_prelude("def f(:").endswith("\ndef f(:")
