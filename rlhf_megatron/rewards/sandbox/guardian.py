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
import resource
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_megatron.import_folders import filter_import_folders
from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.rewards.process_tree import iterate_descendants
from rlhf_megatron.rewards.sandbox import harness, sandbox_layers
from rlhf_megatron.rewards.sandbox.disk_usage import is_disk_over_limits
from rlhf_megatron.rewards.sandbox.program_clock import (
    ProgramClock,
    TreeTimes,
    can_read_waits,
    read_tree_times,
)
from rlhf_megatron.rewards.sandbox.sandbox_layers import (
    LANDLOCK,
    NAMESPACES,
    SECCOMP,
    SandboxLimits,
)

LOOK_S = 0.02  # between two looks at the working sandbox
END_S = 5.0  # in which a killed one must be gone
START_S = 20.0
MESSAGE_BYTES = 1 << 16
PAGE = os.sysconf("SC_PAGE_SIZE")
NO_HOME = "/nonexistent"
# reasons to end a sandbox, which are endings of a run
TIMEOUT = "timeout"
FILES = "files"


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


def remove_folder(folder: str) -> None:
    """Remove a folder with everything in it, also where a program has taken away permissions, or
    made folders deeper than Python recurses. Errors are ignored.
    """
    for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
        # where the machine has no room for a process, the folder goes with the one around it
        with contextlib.suppress(OSError):
            subprocess.run([*command, "--", folder], check=False, capture_output=True)


@dataclass
class SandboxLane:
    """A sandbox, which is made, handed out once, and ended."""

    pid: int
    work_dir: str | None  # of its own on disk, where it has no file system of its own
    connection: socket.socket | None  # until it is handed out
    clock: ProgramClock | None = None  # of the run that it works at
    end_reason: str | None = None  # the guardian ended it
    peak_bytes: int = 0
    counted_s: float = 0.0  # of its last run
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
        """Fork a process that becomes a sandbox and waits for a program. Return its lane. Raise
        OSError where the machine has no room for one more process or folder.
        """
        ours, theirs = socket.socketpair()
        gate, their_gate = socket.socketpair()
        has_own_files = NAMESPACES in self.active_layers
        folder = None if has_own_files else tempfile.mkdtemp(dir=self.work_dir)
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError:
            for end in (ours, theirs, gate, their_gate):
                end.close()
            if folder is not None:
                os.rmdir(folder)
            raise
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
            # where memory runs out, the kernel ends a program, and none of those who watch it
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
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
            has_own_root = NAMESPACES in self.active_layers
            # Programs on the guardian's disk let the guardian read which files they hold. No other
            # program reads that, where there are Landlock and seccomp.
            is_dumpable = not has_own_root and {LANDLOCK, SECCOMP} <= set(self.active_layers)
            harness.serve_programs(connection, self.limits.output_bytes, has_own_root, is_dumpable)
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
            pause_s = LOOK_S if self.working_lane else 1.0
            readable, _, _ = select.select([self.control], [], [], pause_s)
            self._reap_children()
            if readable:
                data = self.control.recv(MESSAGE_BYTES)
                if not data:
                    return
                self._answer_request(json.loads(data))
            if self.working_lane is not None:
                self._check_lane_limits(self.working_lane)
            if not select.select([self.control], [], [], 0.0)[0]:
                self.refill_waiting_lanes()

    def refill_waiting_lanes(self) -> None:
        """Replace waiting sandboxes that have ended, and make sandboxes until `num_warm` wait.

        The program that works may have used up what a new sandbox needs (processes, room on the
        disk); then there is one the next time.
        """
        for lane in [lane for lane in self.waiting_lanes if lane.has_ended]:
            self.waiting_lanes.remove(lane)
            self._release_lane(lane)
        with contextlib.suppress(OSError):
            while len(self.waiting_lanes) < self.num_warm:
                self.waiting_lanes.append(self.make_lane())

    def _answer_request(self, message: dict[str, Any]) -> None:
        """Answer a request: "take" a sandbox, "run" a program in it, "finish" the run, or "end" the
        sandbox.
        """
        if "take" in message:
            self._hand_out_lane()
        elif "run" in message:
            self._start_clock(**message["run"])
        elif "finish" in message:
            self._finish_run(**message["finish"])
        elif self.working_lane is not None:
            lane = self.working_lane
            self.working_lane = None
            self.end_lane(lane)
            peak_mib = lane.peak_bytes >> 20
            answer = {"why": lane.end_reason, "peak_mib": peak_mib, "counted_s": lane.counted_s}
            self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        """Send an answer to the other side."""
        self.control.send(json.dumps(message).encode())

    def _hand_out_lane(self) -> None:
        """Send the pid and the socket of a sandbox, which becomes the working one; an error where
        the machine has no room for a sandbox.
        """
        assert self.working_lane is None, "one program at a time"
        try:
            lane = self.waiting_lanes.pop(0) if self.waiting_lanes else self.make_lane()
        except OSError as error:
            self._send({"error": str(error)})
            return
        self.working_lane = lane
        assert lane.connection is not None
        socket.send_fds(
            self.control, [json.dumps({"lane": lane.pid}).encode()], [lane.connection.fileno()]
        )
        lane.connection.close()
        lane.connection = None

    def _start_clock(self, started_at: float, limit_s: float) -> None:
        """Start the clock of a run in the working sandbox."""
        if self.working_lane is not None:
            self.working_lane.clock = ProgramClock(limit_s, started_at, self._read_working_times())

    def _finish_run(self, took_s: float, cpu_s: float) -> None:
        """Stop the clock of the run, whose answer has come, and send whether the run was over a
        limit, and whether its sandbox is gone.

        The harness has measured when the program ended. This process may have been kept waiting
        meanwhile: then its own clock has gone on for too long, or it has looked too late.
        """
        lane = self.working_lane
        assert lane is not None and lane.clock is not None, "a run is finished once"
        clock = lane.clock
        lane.clock = None
        clock.add_times(self._read_working_times())
        reason = None if lane.end_reason == TIMEOUT else lane.end_reason
        lane.counted_s = clock.count_s(took_s, cpu_s)
        if reason is None and clock.is_over(took_s, cpu_s):
            reason = TIMEOUT
        if reason is None and self._is_disk_over_limits(lane):
            reason = FILES
        lane.end_reason = lane.end_reason or reason
        self._send({"why": reason, "is_gone": lane.end_reason is not None})

    def _list_working_pids(self) -> list[int]:
        """Return the pids of all descendants of this process, without those of waiting sandboxes,
        which may be starting theirs.
        """
        return list(iterate_descendants(os.getpid(), {lane.pid for lane in self.waiting_lanes}))

    def _read_working_times(self) -> TreeTimes:
        """Return the times of the working processes, with the CPU time of those that this process
        has reaped: whoever has lost its parent ends as a child of this process.
        """
        times = read_tree_times(self._list_working_pids())
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = times.cpu_s + reaped.ru_utime + reaped.ru_stime
        return TreeTimes(cpu_s, times.wait_s_by_task)

    def _is_disk_over_limits(self, lane: SandboxLane) -> bool:
        """Return whether the sandbox has more on disk than the limits allow; False where it has a
        file system of its own, of limited size.
        """
        return lane.work_dir is not None and is_disk_over_limits(
            lane.work_dir, self._list_working_pids(), self.limits
        )

    def _check_lane_limits(self, lane: SandboxLane) -> None:
        """Kill the processes of the working sandbox where they use too much memory, too many
        processes, too much time or, in every third check, too many files; record the reason and the
        peak memory.
        """
        tree = self._list_working_pids()
        resident = sum(map(read_resident_bytes, tree))
        lane.peak_bytes = max(lane.peak_bytes, resident)
        # with those that stand around the program
        max_threads = self.limits.processes + 3
        reason = None
        if resident > self.limits.memory_mib << 20:
            reason = "memory"
        elif sum(map(count_process_threads, tree)) > max_threads:
            reason = "processes"
        elif self._is_over_time(lane):
            reason = TIMEOUT
        elif self.num_checks % 3 == 0 and self._is_disk_over_limits(lane):
            reason = FILES
        lane.end_reason = lane.end_reason or reason
        self.num_checks += 1
        if lane.end_reason:
            self._kill_working_processes()

    def _is_over_time(self, lane: SandboxLane) -> bool:
        """Look at the times of the working processes, and return whether the run is over its
        limit.
        """
        if lane.clock is None or lane.end_reason is not None:
            return False
        lane.clock.add_times(self._read_working_times())
        wall_s = time.monotonic() - lane.clock.started_at
        lane.counted_s = lane.clock.count_s(wall_s)
        return lane.clock.is_over(wall_s)

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
        """Kill all sandboxes and remove their folders. `main` removes the folder around them."""
        lanes = self.waiting_lanes
        self.waiting_lanes = []
        self._kill_working_processes()
        for lane in (*lanes, *filter(None, [self.working_lane])):
            self._release_lane(lane)


def main() -> None:
    """Run the guardian of the control socket whose descriptor is in sys.argv: read the settings,
    choose the layers, report them, and serve requests until the other side goes.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # the kernel adds the CPU time of children to nobody's where their parent ignores this signal
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    end_with_parent(signal.SIGTERM)
    sandbox_layers.invoke_prctl(sandbox_layers.PR_SET_CHILD_SUBREAPER, 1)
    message = json.loads(control.recv(MESSAGE_BYTES))
    work_dir = tempfile.mkdtemp(prefix="sandbox-")
    # others can read and write /tmp, and modules read settings below HOME when they are imported
    os.environ["HOME"] = work_dir
    try:
        if error := import_modules(message["preload"], message["user_site"]):
            control.send(json.dumps({"error": error}).encode())
            return
        guardian = start_guardian(control, message, work_dir)
        try:
            guardian.refill_waiting_lanes()
            guardian.serve_requests()
        finally:
            guardian.close()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        remove_folder(work_dir)


def import_modules(preload: Sequence[str], user_site: str | None) -> str:
    """Import what programs find imported, also from the user's own site folder where that is given.
    Return an error, or "".
    """
    if user_site is not None:
        site.addsitedir(user_site)
    # a package that is installed as editable has its folder elsewhere
    sys.path[:] = filter_import_folders(sys.path)
    try:
        for name in (*harness.MODULES, "typing", "traceback", *preload):
            importlib.import_module(name)
    except ImportError as error:
        return f"preload: {error}"
    gc.collect()
    gc.freeze()
    return ""


def start_guardian(
    control: socket.socket, message: dict[str, Any], work_dir: str
) -> SandboxGuardian:
    """Return the guardian of these settings, and report on `control` which layers it has."""
    readable = tuple(dict.fromkeys(path for path in message["readable"] if os.path.lexists(path)))
    guardian = SandboxGuardian(
        control, SandboxLimits(**message["limits"]), readable, message["num_warm"]
    )
    guardian.work_dir = work_dir
    try:
        guardian.choose_layers(message["layers"])
        if NAMESPACES in guardian.active_layers:
            # programs have file systems of their own, and a guardian that is killed leaves nothing
            remove_folder(work_dir)
            os.environ["HOME"] = NO_HOME
        layers = {
            "in_force": guardian.active_layers,
            "missing": guardian.missing_layers,
            "landlock": sandbox_layers.query_landlock_version(),
            "can_read_waits": can_read_waits(),
        }
        control.send(json.dumps(layers).encode())
    except BaseException:
        guardian.close()
        raise
    return guardian
