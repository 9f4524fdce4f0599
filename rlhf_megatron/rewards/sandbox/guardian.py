"""The process that stands around sandboxes: it makes them ahead, watches the one that works, and ends it whole.

    python -c "...; main()" CONTROL_FD    started by `local.LocalSandbox`, one for each

It has no secrets, and programs do not pass through it: it hands out the socket of a sandbox that waits. Programs are
forked off it, so the standard library is imported once. Orphans become its children, so that no daemon is lost.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.rewards.process_tree import descendants
from rlhf_megatron.rewards.sandbox import harness, layers
from rlhf_megatron.rewards.sandbox.layers import LANDLOCK, NAMESPACES, SECCOMP, Limits

LOOK_S = 0.02  # between two looks at the working sandbox
END_S = 5.0  # in which a killed one must be gone
START_S = 20.0
MAX_DEPTH = 50  # of folders in the program's own
MESSAGE_BYTES = 1 << 16
PAGE = os.sysconf("SC_PAGE_SIZE")


def resident_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def num_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def is_over(folder: str, limits: Limits) -> bool:
    """Whether a folder has too many files, too many bytes on disk, or is too deep to be looked through."""
    count = size = 0
    waiting = [(folder, 0)]
    while waiting:
        place, depth = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, depth + 1))
                if count > limits.files or size > limits.file_mib << 20 or depth > MAX_DEPTH:
                    return True
    return False


def remove(folder: str) -> None:
    """Remove a folder, also one that a program has closed to itself, and folders deeper than Python recurses."""
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], check=False, capture_output=True)


@dataclass
class Lane:
    """A sandbox: made, handed out once, ended."""

    pid: int
    folder: str | None  # of its own on disk, where it has no file system of its own
    connection: socket.socket | None  # until it is handed out
    why: str | None = None  # the guardian ended it
    peak_bytes: int = 0
    has_ended: bool = False


@dataclass
class Guardian:
    control: socket.socket
    limits: Limits
    readable: tuple[str, ...]
    num_warm: int
    in_force: tuple[str, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)  # layer -> why it is not there
    warm: list[Lane] = field(default_factory=list)
    working: Lane | None = None
    folder: str = ""
    num_looks: int = 0

    def choose_layers(self, wanted: Sequence[str]) -> None:
        """Keep those of `wanted` that this kernel gives an ordinary process here: each is tried."""
        self.missing = {name: "not asked for" for name in layers.LAYERS if name not in wanted}
        for name in [name for name in layers.LAYERS if name in wanted]:
            self.in_force = (name,)
            error = self._try()
            if error is not None:
                self.missing[name] = error
        self.in_force = tuple(name for name in layers.LAYERS if name not in self.missing)
        while self.in_force and (error := self._try()) is not None:
            self.missing[self.in_force[0]] = error
            self.in_force = self.in_force[1:]

    def _try(self) -> str | None:
        """Try a sandbox of these layers; return None, or what is wrong with it."""
        lane = self.make()
        assert lane.connection is not None
        lane.connection.settimeout(START_S)
        try:
            said = json.loads(lane.connection.recv(MESSAGE_BYTES) or b'{"error": "it ended"}')
        except (OSError, ValueError) as error:
            said = {"error": str(error)}
        lane.connection.close()
        self.end(lane)
        return said.get("error")

    def make(self) -> Lane:
        ours, theirs = socket.socketpair()
        gate, their_gate = socket.socketpair()
        has_own_files = NAMESPACES in self.in_force
        folder = None if has_own_files else tempfile.mkdtemp(dir=self.folder)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._be_lane(theirs, their_gate, parent, folder)
        theirs.close()
        their_gate.close()
        with gate:
            if has_own_files:
                gate.settimeout(START_S)
                with contextlib.suppress(OSError):
                    if gate.recv(1):
                        layers.map_users(pid)
                        gate.send(b"m")
        return Lane(pid, folder, ours)

    def _be_lane(self, connection: socket.socket, gate: socket.socket, parent: int, folder: str | None) -> None:
        """Does not return."""
        try:
            os.setsid()
            layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            for caught in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(caught, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            kept = sorted((connection.fileno(), gate.fileno()))
            for first, end in zip((3, kept[0] + 1, kept[1] + 1), (*kept, 4096), strict=True):
                os.closerange(first, end)
            if NAMESPACES in self.in_force:
                layers.unshare()
                gate.send(b"u")
                if gate.recv(1) != b"m":
                    raise OSError("this user cannot be mapped into a user namespace")
                init = os.fork()
                if init:
                    connection.close()
                    os.waitpid(init, 0)
                    os._exit(0)
                layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)
                layers.view(self.readable, self.limits)
                layers.become_inside_user()
                layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it
            gate.close()
            self._take_layers(folder)
            harness.serve(connection, self.limits.output_bytes, NAMESPACES in self.in_force)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(
                    connection.fileno(), json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n"
                )
        finally:
            os._exit(0)

    def _take_layers(self, folder: str | None) -> None:
        has_own_root = NAMESPACES in self.in_force
        work = folder or "/tmp"
        os.chdir(work)
        tempfile.tempdir = work
        os.environ["HOME"] = os.environ["TMPDIR"] = work
        layers.set_limits(self.limits, counts_all_of_user=not has_own_root)
        layers.no_new_privileges()
        layers.prctl(layers.PR_SET_DUMPABLE, 0)  # no process of the same user reads or changes this one
        if LANDLOCK in self.in_force:
            proc = ("/proc", "/dev") if has_own_root else ("/dev/urandom", "/dev/random")
            layers.landlock((*self.readable, *proc), ("/dev/null", work))
        if has_own_root or os.getuid() == 0:
            layers.drop_capabilities()
        if SECCOMP in self.in_force:
            scoped = has_own_root or (LANDLOCK in self.in_force and layers.landlock_version() >= 6)
            layers.seccomp(denies_metadata=not has_own_root, denies_signals=not scoped)

    def serve(self) -> None:
        """Until the other side goes."""
        while True:
            self._refill()
            readable, _, _ = select.select([self.control], [], [], LOOK_S if self.working else 1.0)
            self._reap()
            if self.working is not None:
                self._look(self.working)
            if readable:
                data = self.control.recv(MESSAGE_BYTES)
                if not data:
                    return
                self._answer(json.loads(data))

    def _refill(self) -> None:
        for lane in [lane for lane in self.warm if lane.has_ended]:
            self.warm.remove(lane)
            self._forget(lane)
        while len(self.warm) < self.num_warm:
            self.warm.append(self.make())

    def _answer(self, message: dict[str, Any]) -> None:
        if "take" in message:
            assert self.working is None, "one program at a time"
            self.working = lane = self.warm.pop(0) if self.warm else self.make()
            assert lane.connection is not None
            socket.send_fds(self.control, [json.dumps({"lane": lane.pid}).encode()], [lane.connection.fileno()])
            lane.connection.close()
            lane.connection = None
        elif self.working is not None:
            lane, self.working = self.working, None
            self.end(lane)
            told = {"ended": lane.pid, "why": lane.why, "peak_mib": lane.peak_bytes >> 20}
            self.control.send(json.dumps(told).encode())

    def _tree(self) -> list[int]:
        """All processes below this one but those of sandboxes that wait, which may be starting theirs."""
        return list(descendants(os.getpid(), {lane.pid for lane in self.warm}))

    def _look(self, lane: Lane) -> None:
        tree = self._tree()
        resident = sum(map(resident_bytes, tree))
        lane.peak_bytes = max(lane.peak_bytes, resident)
        if resident > self.limits.memory_mib << 20:
            lane.why = lane.why or "memory"
        elif sum(map(num_threads, tree)) > self.limits.processes + 3:  # with those that stand around the program
            lane.why = lane.why or "processes"
        elif lane.folder is not None and self.num_looks % 3 == 0:
            lane.why = lane.why or ("files" if is_over(lane.folder, self.limits) else None)
        self.num_looks += 1
        if lane.why:
            self._kill_tree()

    def _kill_tree(self) -> None:
        """Kill all descendants, also those that fork faster than one look can see and those that have left their
        parents.
        """
        deadline = time.monotonic() + END_S
        while (tree := self._tree()) and time.monotonic() < deadline:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in tree:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
            self._reap()
            time.sleep(0.001)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for lane in (*self.warm, *filter(None, [self.working])):
                    lane.has_ended = lane.has_ended or lane.pid == pid

    def end(self, lane: Lane) -> None:
        """End the working sandbox, and with it all processes that do not belong to a waiting one."""
        self._kill_tree()
        self._forget(lane)

    def _forget(self, lane: Lane) -> None:
        if lane.connection is not None:
            lane.connection.close()
        if lane.folder is not None:
            remove(lane.folder)

    def close(self) -> None:
        lanes, self.warm = self.warm, []
        self._kill_tree()
        for lane in (*lanes, *filter(None, [self.working])):
            self._forget(lane)
        if self.folder:
            remove(self.folder)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    layers.prctl(layers.PR_SET_PDEATHSIG, signal.SIGTERM)
    layers.prctl(layers.PR_SET_CHILD_SUBREAPER, 1)
    message = json.loads(control.recv(MESSAGE_BYTES))
    try:
        for name in (*harness.MODULES, "typing", "traceback", *message["preload"]):
            importlib.import_module(name)
    except ImportError as error:
        control.send(json.dumps({"error": f"preload: {error}"}).encode())
        return
    gc.collect()
    gc.freeze()
    readable = tuple(dict.fromkeys(path for path in message["readable"] if os.path.lexists(path)))
    guardian = Guardian(control, Limits(**message["limits"]), readable, message["num_warm"])
    guardian.folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        guardian.choose_layers(message["layers"])
        if NAMESPACES in guardian.in_force:  # programs have file systems of their own
            remove(guardian.folder)
            guardian.folder = ""
        told = {"in_force": guardian.in_force, "missing": guardian.missing, "landlock": layers.landlock_version()}
        control.send(json.dumps(told).encode())
        guardian.serve()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        guardian.close()
