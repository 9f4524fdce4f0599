"""The process that stands around sandboxes: it makes them ahead, watches the one that works, and
ends it whole.

    python -c "...; main()" CONTROL_FD    started by `local.LocalSandbox`, one for each

It has no secrets, and programs do not pass through it: it hands out the socket of a sandbox that
waits. Programs are forked off it, so the standard library is imported once. Orphans become its
children, so that no daemon is lost.
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

from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.rewards.process_tree import iterate_descendants
from rlhf_megatron.rewards.sandbox import harness, sandbox_layers
from rlhf_megatron.rewards.sandbox.sandbox_layers import (
    LANDLOCK,
    NAMESPACES,
    SECCOMP,
    SandboxLimits,
)

LOOK_S = 0.02  # between two looks at the working sandbox
END_S = 5.0  # in which a killed one must be gone
START_S = 20.0
MAX_DEPTH = 50  # of folders in the program's own
MESSAGE_BYTES = 1 << 16
PAGE = os.sysconf("SC_PAGE_SIZE")


def read_resident_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes, or 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * PAGE
    except (OSError, IndexError):
        return 0


def count_process_threads(pid: int) -> int:
    """Return the number of threads of a process, or 0 where it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def is_folder_over_limits(folder: str, limits: SandboxLimits) -> bool:
    """Return whether a folder has more files or more bytes on disk than the limits allow, or is
    deeper than MAX_DEPTH.
    """
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


def remove_folder(folder: str) -> None:
    """Remove a folder with everything in it, also where a program has taken away permissions, or
    made folders deeper than Python recurses. Errors are ignored.
    """
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        subprocess.run([*command, "--", folder], check=False, capture_output=True)


@dataclass
class SandboxLane:
    """A sandbox, which is made, handed out once, and ended."""

    pid: int
    work_dir: str | None  # of its own on disk, where it has no file system of its own
    connection: socket.socket | None  # until it is handed out
    end_reason: str | None = None  # the guardian ended it
    peak_bytes: int = 0
    has_ended: bool = False


@dataclass
class SandboxGuardian:
    control: socket.socket
    limits: SandboxLimits
    readable_paths: tuple[str, ...]
    num_warm: int
    active_layers: tuple[str, ...] = ()
    missing_layers: dict[str, str] = field(default_factory=dict)  # layer -> why it is not there
    waiting_lanes: list[SandboxLane] = field(default_factory=list)
    working_lane: SandboxLane | None = None
    work_dir: str = ""
    num_checks: int = 0

    def choose_layers(self, requested_layers: Sequence[str]) -> None:
        """Try each of `requested_layers` with a sandbox, and set `active_layers` to the layers that
        the kernel gives here, and `missing_layers` to the reasons for the others.
        """
        self.missing_layers = {
            name: "not asked for" for name in sandbox_layers.LAYERS if name not in requested_layers
        }
        for name in [name for name in sandbox_layers.LAYERS if name in requested_layers]:
            self.active_layers = (name,)
            error = self._try_layers()
            if error is not None:
                self.missing_layers[name] = error
        self.active_layers = tuple(
            name for name in sandbox_layers.LAYERS if name not in self.missing_layers
        )
        while self.active_layers and (error := self._try_layers()) is not None:
            self.missing_layers[self.active_layers[0]] = error
            self.active_layers = self.active_layers[1:]

    def _try_layers(self) -> str | None:
        """Make and end a sandbox of the active layers. Return None if it worked, else its error."""
        lane = self.make_lane()
        assert lane.connection is not None
        lane.connection.settimeout(START_S)
        try:
            said = json.loads(lane.connection.recv(MESSAGE_BYTES) or b'{"error": "it ended"}')
        except (OSError, ValueError) as error:
            said = {"error": str(error)}
        lane.connection.close()
        self.end_lane(lane)
        return said.get("error")

    def make_lane(self) -> SandboxLane:
        """Fork a process that becomes a sandbox and waits for a program. Return its lane."""
        ours, theirs = socket.socketpair()
        gate, their_gate = socket.socketpair()
        has_own_files = NAMESPACES in self.active_layers
        folder = None if has_own_files else tempfile.mkdtemp(dir=self.work_dir)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_lane(theirs, their_gate, parent, folder)
        theirs.close()
        their_gate.close()
        with gate:
            if has_own_files:
                gate.settimeout(START_S)
                with contextlib.suppress(OSError):
                    if gate.recv(1):
                        sandbox_layers.map_namespace_users(pid)
                        gate.send(b"m")
        return SandboxLane(pid, folder, ours)

    def _become_lane(
        self, connection: socket.socket, gate: socket.socket, parent_pid: int, work_dir: str | None
    ) -> None:
        """Turn this fork into a sandbox and serve programs in it. Write an error of the layers to
        `connection`. Does not return.
        """
        try:
            os.setsid()
            end_with_parent(signal.SIGKILL, parent_pid)
            signal.set_wakeup_fd(-1)
            for caught in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(caught, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            kept = sorted((connection.fileno(), gate.fileno()))
            for first, end in zip((3, kept[0] + 1, kept[1] + 1), (*kept, 4096), strict=True):
                os.closerange(first, end)
            if NAMESPACES in self.active_layers:
                sandbox_layers.unshare_namespaces()
                gate.send(b"u")
                if gate.recv(1) != b"m":
                    raise OSError("this user cannot be mapped into a user namespace")
                init = os.fork()
                if init:
                    connection.close()
                    os.waitpid(init, 0)
                    os._exit(0)
                end_with_parent(signal.SIGKILL)
                sandbox_layers.enter_private_root(self.readable_paths, self.limits)
                sandbox_layers.become_inside_user()
                # a change of user clears it
                end_with_parent(signal.SIGKILL)
            gate.close()
            self._apply_layers(work_dir)
            harness.serve_programs(
                connection, self.limits.output_bytes, NAMESPACES in self.active_layers
            )
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.write(
                    connection.fileno(),
                    json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n",
                )
        finally:
            os._exit(0)

    def _apply_layers(self, work_dir: str | None) -> None:
        """Apply limits, Landlock, capabilities and seccomp to this process, as far as they are
        active, and work in `work_dir` (None: /tmp).
        """
        has_own_root = NAMESPACES in self.active_layers
        work = work_dir or "/tmp"
        os.chdir(work)
        tempfile.tempdir = work
        os.environ["HOME"] = os.environ["TMPDIR"] = work
        sandbox_layers.set_resource_limits(self.limits, counts_all_of_user=not has_own_root)
        sandbox_layers.forbid_new_privileges()
        # no process of the same user reads or changes this one
        sandbox_layers.invoke_prctl(sandbox_layers.PR_SET_DUMPABLE, 0)
        if LANDLOCK in self.active_layers:
            proc = ("/proc", "/dev") if has_own_root else ("/dev/urandom", "/dev/random")
            sandbox_layers.apply_landlock((*self.readable_paths, *proc), ("/dev/null", work))
        if has_own_root or os.getuid() == 0:
            sandbox_layers.drop_capabilities()
        if SECCOMP in self.active_layers:
            scoped = has_own_root or (
                LANDLOCK in self.active_layers and sandbox_layers.query_landlock_version() >= 6
            )
            sandbox_layers.apply_seccomp_filter(
                denies_metadata=not has_own_root, denies_signals=not scoped
            )

    def serve_requests(self) -> None:
        """Answer requests on the control socket, keep warm sandboxes ready, and enforce limits,
        until the other side closes the socket.
        """
        while True:
            self._refill_waiting_lanes()
            readable, _, _ = select.select(
                [self.control], [], [], LOOK_S if self.working_lane else 1.0
            )
            self._reap_children()
            if self.working_lane is not None:
                self._check_lane_limits(self.working_lane)
            if readable:
                data = self.control.recv(MESSAGE_BYTES)
                if not data:
                    return
                self._answer_request(json.loads(data))

    def _refill_waiting_lanes(self) -> None:
        """Replace waiting sandboxes that have ended, and make sandboxes until `num_warm` wait."""
        for lane in [lane for lane in self.waiting_lanes if lane.has_ended]:
            self.waiting_lanes.remove(lane)
            self._release_lane(lane)
        while len(self.waiting_lanes) < self.num_warm:
            self.waiting_lanes.append(self.make_lane())

    def _answer_request(self, message: dict[str, Any]) -> None:
        """Answer a request: for "take" send the pid and the socket of a sandbox, which becomes the
        working one; else end the working sandbox and send why it was ended before, if so, and its
        peak memory.
        """
        if "take" in message:
            assert self.working_lane is None, "one program at a time"
            self.working_lane = lane = (
                self.waiting_lanes.pop(0) if self.waiting_lanes else self.make_lane()
            )
            assert lane.connection is not None
            socket.send_fds(
                self.control, [json.dumps({"lane": lane.pid}).encode()], [lane.connection.fileno()]
            )
            lane.connection.close()
            lane.connection = None
        elif self.working_lane is not None:
            lane = self.working_lane
            self.working_lane = None
            self.end_lane(lane)
            told = {"ended": lane.pid, "why": lane.end_reason, "peak_mib": lane.peak_bytes >> 20}
            self.control.send(json.dumps(told).encode())

    def _list_working_pids(self) -> list[int]:
        """Return the pids of all descendants of this process, without those of waiting sandboxes,
        which may be starting theirs.
        """
        return list(iterate_descendants(os.getpid(), {lane.pid for lane in self.waiting_lanes}))

    def _check_lane_limits(self, lane: SandboxLane) -> None:
        """Kill the processes of the working sandbox where they use too much memory, too many
        processes or, in every third check, too many files; record the reason and the peak memory.
        """
        tree = self._list_working_pids()
        resident = sum(map(read_resident_bytes, tree))
        lane.peak_bytes = max(lane.peak_bytes, resident)
        if resident > self.limits.memory_mib << 20:
            lane.end_reason = lane.end_reason or "memory"
        elif (
            sum(map(count_process_threads, tree)) > self.limits.processes + 3
        ):  # with those that stand around the program
            lane.end_reason = lane.end_reason or "processes"
        elif lane.work_dir is not None and self.num_checks % 3 == 0:
            lane.end_reason = lane.end_reason or (
                "files" if is_folder_over_limits(lane.work_dir, self.limits) else None
            )
        self.num_checks += 1
        if lane.end_reason:
            self._kill_working_processes()

    def _kill_working_processes(self) -> None:
        """Kill all descendants but the waiting sandboxes, within END_S, also descendants that fork
        faster than one look can see or that have left their parents.
        """
        deadline = time.monotonic() + END_S
        while (tree := self._list_working_pids()) and time.monotonic() < deadline:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in tree:
                    with contextlib.suppress(OSError):
                        os.kill(pid, number)
            self._reap_children()
            time.sleep(0.001)

    def _reap_children(self) -> None:
        """Reap children that have ended, and mark the sandboxes among them as ended."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                for lane in (*self.waiting_lanes, *filter(None, [self.working_lane])):
                    lane.has_ended = lane.has_ended or lane.pid == pid

    def end_lane(self, lane: SandboxLane) -> None:
        """Kill the working processes, which are all that belong to no waiting sandbox, and free the
        lane's socket and folder.
        """
        self._kill_working_processes()
        self._release_lane(lane)

    def _release_lane(self, lane: SandboxLane) -> None:
        """Close the lane's socket and remove its folder, if it has them."""
        if lane.connection is not None:
            lane.connection.close()
        if lane.work_dir is not None:
            remove_folder(lane.work_dir)

    def close(self) -> None:
        """Kill all sandboxes and remove their folders."""
        lanes = self.waiting_lanes
        self.waiting_lanes = []
        self._kill_working_processes()
        for lane in (*lanes, *filter(None, [self.working_lane])):
            self._release_lane(lane)
        if self.work_dir:
            remove_folder(self.work_dir)


def main() -> None:
    """Run the guardian of the control socket whose descriptor is in sys.argv: read the settings,
    choose the layers, report them, and serve requests until the other side goes.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    end_with_parent(signal.SIGTERM)
    sandbox_layers.invoke_prctl(sandbox_layers.PR_SET_CHILD_SUBREAPER, 1)
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
    guardian = SandboxGuardian(
        control, SandboxLimits(**message["limits"]), readable, message["num_warm"]
    )
    guardian.work_dir = tempfile.mkdtemp(prefix="sandbox-")
    try:
        guardian.choose_layers(message["layers"])
        if NAMESPACES in guardian.active_layers:  # programs have file systems of their own
            remove_folder(guardian.work_dir)
            guardian.work_dir = ""
        told = {
            "in_force": guardian.active_layers,
            "missing": guardian.missing_layers,
            "landlock": sandbox_layers.query_landlock_version(),
        }
        control.send(json.dumps(told).encode())
        guardian.serve_requests()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        guardian.close()
