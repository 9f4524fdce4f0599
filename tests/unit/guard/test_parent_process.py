"""Processes end with the process that started them, and not with a thread of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

CHILD = """
import os, signal, sys, time
from rlhf_megatron.parent_process import {imports}
{call}
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(60)
"""
PARENT = """
import subprocess, sys, threading, time
child = []
def start():
    child.append(subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]]))
    {wait}
thread = threading.Thread(target=start)
thread.start()
thread.join()
time.sleep(60)
"""
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_for(condition: object, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def start_family(tmp_path: Path, imports: str, call: str, wait: str) -> tuple[int, int]:
    """Return the pids of a parent and of its child, which has made `call` in a thread of the
    parent; the thread ends when `wait` is over.
    """
    pid_file = tmp_path / "pid"
    child = CHILD.format(imports=imports, call=call)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(wait=wait), child, str(pid_file)], cwd=tmp_path
    )
    assert wait_for(lambda: pid_file.exists() and pid_file.read_text())
    return parent.pid, int(pid_file.read_text())


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("end_with_parent", "end_with_parent(signal.SIGTERM, os.getppid())"),
        ("end_with_parent", "end_with_parent(signal.SIGKILL)"),
        (
            "exit_if_orphaned_on_signal",
            "exit_if_orphaned_on_signal(signal.SIGUSR2, os.getppid())",
        ),
    ],
)
def test_the_child_ends_when_its_parent_is_killed(tmp_path: Path, imports: str, call: str) -> None:
    parent, child = start_family(tmp_path, imports, call, "time.sleep(60)")
    try:
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert wait_for(lambda: not is_running(child))
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_the_end_of_a_thread_does_not_end_a_careful_child(tmp_path: Path) -> None:
    wait = (
        "[time.sleep(0.01) for _ in iter(lambda: __import__('os').path.exists(sys.argv[2]), True)]"
    )
    call = "exit_if_orphaned_on_signal(signal.SIGUSR2, os.getppid())"
    parent, child = start_family(tmp_path, "exit_if_orphaned_on_signal", call, wait)
    try:
        time.sleep(1.0)
        assert is_running(child)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
        assert wait_for(lambda: not is_running(child))
    finally:
        if is_running(child):
            os.kill(child, signal.SIGKILL)


def test_a_child_whose_parent_is_gone_already_ends_at_once(tmp_path: Path) -> None:
    for call, code in (
        ("end_with_parent(signal.SIGTERM, 1)", -signal.SIGTERM),
        ("exit_if_orphaned_on_signal(signal.SIGUSR2, 1)", 1),
    ):
        program = CHILD.format(imports=call.partition("(")[0], call=call)
        done = subprocess.run([sys.executable, "-c", program, "unused"], cwd=tmp_path, timeout=60)
        assert done.returncode == code


def test_a_child_may_outlive_its_parent(tmp_path: Path) -> None:
    call = "end_with_parent(signal.SIGKILL); outlive_parent()"
    parent, child = start_family(
        tmp_path, "end_with_parent, outlive_parent", call, "time.sleep(60)"
    )
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    time.sleep(0.5)
    assert is_running(child)
    os.kill(child, signal.SIGKILL)
