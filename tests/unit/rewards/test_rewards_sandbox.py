"""Hostile programs in the full set of layers, and in the set that a container without
namespaces allows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hostile_programs import PROGRAMS

from rlhf_megatron.rewards.process_tree import iterate_descendants
from rlhf_megatron.rewards.sandbox.local_sandbox import LocalSandbox, SandboxSettings
from rlhf_megatron.rewards.sandbox.sandbox_layers import (
    LANDLOCK,
    LAYERS,
    NAMESPACES,
    SECCOMP,
    SandboxLimits,
)
from rlhf_megatron.rewards.sandbox.sandbox_protocol import ProgramResult, SandboxProgram

SECRET = "SEKRET_7f3a"
VICTIM = """
import signal, sys, time
for number in (10, 12, 23):
    signal.signal(number, lambda *_: open(sys.argv[1] + "/signalled", "w").close())
print("ready", flush=True)
while True:
    time.sleep(1)
"""
OLD_KERNEL = """
import fcntl, os, signal, socket, sys, threading
from rlhf_megatron.rewards.sandbox import sandbox_layers as layers
path, (ours, theirs) = sys.argv[1], socket.socketpair()
layers.forbid_new_privileges()
layers.apply_seccomp_filter(denies_metadata=True, denies_signals=True)
for attempt in (
    lambda: fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid()),
    lambda: fcntl.ioctl(ours, 0x8901, os.getppid().to_bytes(4, "little")),
    lambda: os.truncate(path, 0),
    lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
    lambda: os.open(path, 3 | os.O_TRUNC),
):
    try:
        print("not refused", attempt())
    except PermissionError:
        print("refused")
with open(path, "r+") as file:
    file.truncate(2)
open(path, "w").close()
"""
LIBC = ctypes.CDLL(None)
QUEUE = b"/sandbox_canary"
IPC_STAT = 2
IPC_REMOVE = 0
SETS = {"full": LAYERS, "container": (LANDLOCK, SECCOMP)}
LIMITS = SandboxLimits(memory_mib=600, cpu_s=2)
TIMEOUT_S = 1.0
QUICK = (
    *(
        "fork_bomb",
        "memory",
        "rabbit",
        "kill_victim",
        "environ_of_others",
        "tcp",
        "path_unix",
        "write_file",
    ),
    *(
        "chmod_outside",
        "many_files",
        "inherited_fd",
        "kernel_surface",
        "result_forgery",
        "limits_of_victim",
    ),
    *(
        "memory_not_resident",
        "datagram_by_path",
        "message_queue",
        "shared_memory_by_id",
        "lease",
        "blocks_at_once",
    ),
    *("vfork_sleep", "sync_storm", "shared_zero_pages"),
)


@dataclass
class Outside:
    """What a hostile program would reach."""

    folder: Path
    victim: subprocess.Popen[str]
    tcp: socket.socket
    udp: socket.socket
    datagrams: socket.socket  # by path
    segment: int  # of shared memory; below 0: the system gives none
    has_queue: bool  # of messages

    def text_of(self, program: str) -> str:
        ports = {"PORT": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1]}
        for name, value in {
            "VICTIM": self.victim.pid,
            "CANARY": self.folder,
            "SECRET": SECRET,
            "SEGMENT": self.segment,
            **ports,
        }.items():
            program = program.replace(name, str(value))
        return program

    def harm(self, ended: float) -> list[str]:
        """What has happened to it, and is mended for the next program."""
        found = []
        for listening in (self.udp, self.datagrams):
            with contextlib.suppress(BlockingIOError):
                listening.recv(99)
                found.append("a datagram arrived")
        if (
            self.segment >= 0
            and LIBC.shmctl(self.segment, IPC_STAT, ctypes.create_string_buffer(256)) < 0
        ):
            found.append("shared memory is gone")
        if self.has_queue and (queue := LIBC.mq_open(QUEUE, os.O_RDWR)) >= 0:
            os.close(queue)
        elif self.has_queue:
            found.append("a queue is gone")
        heartbeat = self.folder / "open" / "heartbeat"
        if heartbeat.exists() and heartbeat.stat().st_mtime > ended:
            found.append("it lives on")
        if (self.folder / "open" / "signalled").exists() or self.victim.poll() is not None:
            found.append("the victim was signalled")
        if (
            not (self.folder / "open" / "tree" / "f").exists()
            or (self.folder / "open" / "file").read_text() != "canary"
        ):
            found.append("files changed")
        if (self.folder / "open" / "file").stat().st_mode & 0o777 != 0o600:
            found.append("the mode of a file changed")
        return found


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    folder = tmp_path_factory.mktemp("canary")
    (folder / "open" / "tree").mkdir(parents=True)
    (folder / "open" / "tree" / "f").touch()
    (folder / "open" / "file").write_text("canary")
    (folder / "open" / "file").chmod(0o600)
    (folder / "secret.txt").write_text("canary")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        open(folder / "secret.txt") as inherited,
    ):
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        abstract.bind("\0sandbox_canary")
        by_path.bind(os.path.relpath(folder / "open" / "sock"))
        datagrams.bind(os.path.relpath(folder / "open" / "datagrams"))
        datagrams.setblocking(False)
        for listening in (abstract, by_path):
            listening.listen(50)
        os.set_inheritable(inherited.fileno(), True)
        command = [sys.executable, "-c", VICTIM, str(folder / "open")]
        with subprocess.Popen(
            command, env={"KEY": SECRET}, stdout=subprocess.PIPE, text=True
        ) as victim:
            assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
            os.environ["SANDBOX_TEST_KEY"] = SECRET
            segment = LIBC.shmget(0, 4096, 0o1600)
            queue = (
                LIBC.mq_open(QUEUE, os.O_CREAT | os.O_RDWR, 0o600, None)
                if hasattr(LIBC, "mq_open")
                else -1
            )
            yield Outside(folder, victim, tcp, udp, datagrams, segment, queue >= 0)
            LIBC.shmctl(segment, IPC_REMOVE, None)
            if queue >= 0:
                os.close(queue)
                LIBC.mq_unlink(QUEUE)
            del os.environ["SANDBOX_TEST_KEY"]
            victim.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module", params=SETS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(
        SandboxSettings(limits=LIMITS, layers=SETS[request.param], allow_open=True), TIMEOUT_S
    )
    sandbox.start_guardian()
    if set(sandbox.active_layers) != set(SETS[request.param]):
        sandbox.close()
        pytest.skip(f"this kernel gives {sandbox.active_layers} only: {sandbox.layers_note}")
    yield sandbox
    sandbox.close()


def run(sandbox: LocalSandbox, code: str) -> ProgramResult:
    with sandbox.open_session(SandboxProgram(code)) as session:
        return session.run_program()


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.long) for n in sorted(PROGRAMS)]
)
def test_a_hostile_program_is_contained(sandbox: LocalSandbox, outside: Outside, name: str) -> None:
    start = time.monotonic()
    result = run(sandbox, outside.text_of(PROGRAMS[name]))
    ended = time.time()
    took = time.monotonic() - start
    time.sleep(0.12)
    assert outside.harm(ended + 0.05) == []
    counts_threads_late = NAMESPACES not in sandbox.active_layers and name in (
        "fork_bomb",
        "thread_bomb",
    )
    assert sandbox.peak_mib < 1000 or counts_threads_late, (
        "a page that forked processes share counts in each of them"
    )
    assert "ESCAPED" not in result.stdout or counts_threads_late, result
    assert took < 300, "killed by the clock, on a machine that others use too"
    assert name != "vfork_sleep" or result.ending == "timeout", (
        "whoever waits for a child is not held up by the machine"
    )
    assert run(sandbox, "print(6 * 7)").stdout == "42\n", "the sandbox works on"


def test_what_landlock_of_older_kernels_lets_through(tmp_path: Path) -> None:
    """SIGIO or SIGKILL by the owner of a file (before kernel 6.12), truncating without
    opening (before 6.2).
    """
    probe = LocalSandbox(SandboxSettings(layers=(SECCOMP,), allow_open=True), TIMEOUT_S)
    probe.start_guardian()
    probe.close()
    if SECCOMP not in probe.active_layers:
        pytest.skip(f"this kernel gives no seccomp: {probe.layers_note}")
    path = tmp_path / "file"
    path.write_text("canary")
    command = [sys.executable, "-c", OLD_KERNEL, str(path)]
    assert (
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
        == "refused\n" * 5
    )
    assert path.read_text() == "", "by a file that it has opened for writing"


def test_a_waiting_sandbox_is_left_out_with_what_it_starts() -> None:
    """However late it forks: it is cut off at its root, and not by a list made before."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo; wait"], stdout=subprocess.PIPE, start_new_session=True
    ) as waiting:
        assert waiting.stdout is not None and waiting.stdout.readline() == b"\n"
        assert len(list(iterate_descendants(waiting.pid))) == 1
        assert {waiting.pid, *iterate_descendants(waiting.pid)} <= set(
            iterate_descendants(os.getpid())
        )
        assert not {waiting.pid, *iterate_descendants(waiting.pid)} & set(
            iterate_descendants(os.getpid(), {waiting.pid})
        )
        os.killpg(waiting.pid, signal.SIGKILL)
