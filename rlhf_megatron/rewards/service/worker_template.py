"""The process that workers are forked off. It has imported what the rewards need: a new worker
costs milliseconds.

    python -m rlhf_megatron.rewards.service.worker_template CONTROL_FD PARENT_PID

Started by the pool, with a socket to the controller and no other open file but its log. It has one
thread, as a process that forks must. The first message names the rewards; then it forks, kills and
buries workers as it is told.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.import_folders import protect_imports
from rlhf_megatron.parent_process import end_with_parent
from rlhf_megatron.plugins import load_plugins
from rlhf_megatron.rewards.process_tree import list_children
from rlhf_megatron.rewards.reward_endpoint import divide_endpoint_limits
from rlhf_megatron.rewards.scorers import REWARDS
from rlhf_megatron.rewards.scorers.reward_types import PreparedParams
from rlhf_megatron.rewards.service.reward_worker import (
    LoadedReward,
    adopt_orphans,
    format_traceback_end,
    serve_reward_tasks,
)
from rlhf_megatron.rewards.service.worker_messages import CONTROL_BYTES, encode_json_line

MAX_PROBLEM_CHARS = 4000


def load_rewards(
    reward_specs: Sequence[Mapping[str, Any]],
) -> tuple[list[LoadedReward], list[str], list[str]]:
    """Load and prepare the rewards. Return the loaded rewards, the problems of the others, and the
    notes that `prepare` returned.
    """
    loaded: list[LoadedReward] = []
    problems: list[str] = []
    notes: list[str] = []
    for one in reward_specs:
        entry = REWARDS.get(one["name"])
        try:
            params = (
                build_params(entry.params, one["params"], f"{one['key']}.params")
                if entry.params
                else None
            )
            note = params.prepare() if isinstance(params, PreparedParams) else None
            notes += [note] if note else []
            loaded.append(LoadedReward(entry.build, params))
        except ConfigError as error:
            problems += error.problems
        except ValueError as error:
            problems.append(f"{one['key']}.params: {error}")
        except (Exception, SystemExit) as error:  # somebody else's module
            problems.append(
                f"{one['key']} ({one['name']}) cannot be loaded:\n{format_traceback_end(error)}"
            )
    return loaded, problems, notes


class WorkerTemplate:
    """Forks workers and ends them."""

    def __init__(
        self, serve_connection: Callable[[socket.socket], None], control: socket.socket
    ) -> None:
        """Set up the signal handlers of this process, and adopt the orphans of its workers. A
        worker calls `serve_connection` with its socket to the controller, and ends when that
        returns.
        """
        self._serve_connection = serve_connection
        self.control = control
        self.worker_pids: set[int] = set()
        self.wake_read_fd, self._wake_write_fd = os.pipe()  # a byte a signal
        os.set_blocking(self._wake_write_fd, False)
        signal.set_wakeup_fd(self._wake_write_fd, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        # not SIGKILL: there are children to end
        end_with_parent(signal.SIGTERM)

    def serve_controller(self) -> None:
        """Fork and kill workers on request until the controller closes the control socket, or ends;
        then kill all children.
        """
        try:
            # It has gone while this process had something to say, or had said what it did not read.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._handle_requests()
        finally:
            self._kill_all_children()

    def _handle_requests(self) -> None:
        """Handle requests and ended children until the controller closes the control socket."""
        while True:
            readable, _, _ = select.select([self.control.fileno(), self.wake_read_fd], [], [])
            if self.wake_read_fd in readable:
                os.read(self.wake_read_fd, CONTROL_BYTES)
                self._reap_ended_processes()
            if self.control.fileno() in readable:
                data = self.control.recv(CONTROL_BYTES)
                if not data:
                    return
                message = json.loads(data)
                for _ in range(message.get("fork", 0)):
                    self._fork_worker()
                if "kill" in message:
                    self._kill_worker(message["kill"])

    def _fork_worker(self) -> None:
        """Fork a worker and send the controller its pid and its socket."""
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(ours, theirs, parent)
        theirs.close()
        self.worker_pids.add(pid)
        socket.send_fds(self.control, [encode_json_line({"worker": pid})], [ours.fileno()])
        ours.close()

    def _become_worker(
        self, controller_connection: socket.socket, connection: socket.socket, parent_pid: int
    ) -> None:
        """Serve the controller in this fork, in a process group of its own. Does not return."""
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            for descriptor in (self.wake_read_fd, self._wake_write_fd):
                os.close(descriptor)
            os.setpgid(0, 0)  # a group of its own, so that what it starts is killed with it
            end_with_parent(signal.SIGKILL, parent_pid)
            controller_connection.close()
            self.control.close()
            self._serve_connection(connection)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _kill_worker(self, pid: int) -> None:
        """Kill a worker and its process group, unless the worker has been reaped."""
        if pid in self.worker_pids:  # not yet buried, so the number is still its own
            # a worker that has not got to setpgid has no group yet
            for end in (os.killpg, os.kill):
                try:
                    end(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def _reap_ended_processes(self) -> None:
        """Reap children that have ended, kill the process groups of workers among them, and report
        those workers' exit codes to the controller.
        """
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                # what it has started and left behind, while the number is still its own
                self._kill_worker(ended.si_pid)
                pid, status = os.waitpid(ended.si_pid, 0)
                if pid in self.worker_pids:
                    self.worker_pids.discard(pid)
                    self.control.send(
                        encode_json_line({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
                    )

    def _kill_all_children(self) -> None:
        """Kill all workers, and the processes that become children of this one because their
        parents were killed.
        """
        for pid in self.worker_pids:
            self._kill_worker(pid)
        with contextlib.suppress(OSError):  # none is left; or there is no /proc
            while found := list_children(os.getpid()):
                for child in found:
                    os.kill(child, signal.SIGKILL)
                os.waitpid(-1, 0)


def main() -> None:
    """Run the template: load the rewards that the first message names, report problems or
    readiness, and serve the controller. sys.argv has the control socket's descriptor and the
    parent's pid.
    """
    control_fd, parent = map(int, sys.argv[1:])
    # the controller answers to them, and ends this process
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL, parent)
    faulthandler.enable()
    protect_imports()
    control = socket.socket(fileno=control_fd)
    message = json.loads(control.recv(CONTROL_BYTES))
    divide_endpoint_limits(message["num_machines"])
    load_plugins(message["plugins"])  # the controller has run them too, so they can be
    rewards, problems, notes = load_rewards(message["rewards"])
    if problems:
        control.send(
            encode_json_line(
                {"problems": [problem[:MAX_PROBLEM_CHARS] for problem in problems[:8]]}
            )
        )
        return
    gc.collect()
    gc.freeze()  # keeps the memory that workers share from being copied for nothing
    sys.stdout.flush()
    control.send(encode_json_line({"ready": True, "notes": notes}))
    WorkerTemplate(partial(serve_reward_tasks, rewards), control).serve_controller()


if __name__ == "__main__":
    main()
