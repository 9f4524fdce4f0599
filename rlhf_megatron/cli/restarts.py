"""Start a run again after a crash:
`python -m rlhf_megatron.cli.restarts NUM COMMAND ... JOB CONFIG ...`.

COMMAND is what launch/torchrun.sh runs without MAX_RESTARTS. After an end that another attempt may
avoid it is started again, at most NUM times; the run goes on from its newest checkpoint and its
journal. Two attempts in a row without a new checkpoint or journal record are enough. On several
machines each does this for itself, and all must see the run directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.cli.main import USAGE_ERROR, parse_arguments
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.import_folders import make_import_environment
from rlhf_megatron.runtime.process_control import AGENTS_PARENT_ENV
from rlhf_megatron.stop import STOPPED_EXIT_CODE

NONFINITE_EXIT_CODE = 17
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
RUN_LOCK_FILE = "run.lock"  # of the run directory, held by every process of an attempt
FINAL_EXIT_CODES = {
    0,
    USAGE_ERROR,
    NONFINITE_EXIT_CODE,
    STOPPED_EXIT_CODE,
    *(128 + number for number in FORWARDED_SIGNALS),
}
MAX_IDLE_ATTEMPTS = 2
CONNECT_TIMEOUT_S = 3.0
ADDRESS_POLL_S = 1.0
# for what an attempt has left to end: its controller, where the agent was killed
LOCK_RELEASE_TIMEOUT_S = 30.0
_CHECKPOINT_PATTERN = re.compile(r"step_(\d+)")
_JOURNAL_RECORD_PATTERN = re.compile(r"step_(\d+)\.(groups|scored|train)")
_JOURNAL_STAGES = ("groups", "scored", "train")
_JOURNAL_GROUP_PATTERN = re.compile(r"group_(\d+)\.samples")  # of a schedule that generates ahead

# step, stage in it (-1: nothing yet), bytes, or groups of the run so far
RunProgress = tuple[int, int, int]


@dataclass(frozen=True)
class RestartableRun:
    """A run that goes on where it was when it is started again."""

    command: tuple[str, ...]
    restart_command: tuple[str, ...]  # the command of later attempts
    run_dir: Path

    def read_progress(self) -> RunProgress:
        """Return the progress of the run, read from its checkpoints and journal. The value grows,
        also while checkpoints replace the journal.
        """
        return max(_iter_progress(self.run_dir), default=(0, -1, 0))


def _iter_progress(run_dir: Path) -> Iterator[RunProgress]:
    """Yield the progress that the newest checkpoint shows, and that of each journal record and
    group; the largest counts.
    """
    next_step = 0
    for entry in _list_entries(run_dir / "checkpoints"):
        if match := _CHECKPOINT_PATTERN.fullmatch(entry.name):
            next_step = max(next_step, int(match[1]) + 1)
    yield next_step, -1, 0
    for entry in _list_entries(run_dir / "journal"):
        if match := _JOURNAL_GROUP_PATTERN.fullmatch(entry.name):
            yield next_step, 0, int(match[1]) + 1
        elif match := _JOURNAL_RECORD_PATTERN.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):
                yield int(match[1]), _JOURNAL_STAGES.index(match[2]), entry.stat().st_size


def _list_entries(directory: Path) -> list[Path]:
    """Return the entries of a directory; an empty list if it does not exist."""
    return list(directory.iterdir()) if directory.is_dir() else []


def parse_restartable_run(command: Sequence[str]) -> RestartableRun:
    """Return the run that a command starts. Raise ConfigError if a second attempt would not
    continue the first: without checkpoints, or with --replay.
    """
    at = next(i for i, word in enumerate(command) if word in ("train", "sft", "reward-model"))
    args = parse_arguments(command[at:])
    trainer = load_run_config(args.config, args.overrides).config.trainer
    problems = []
    if not trainer.save_freq:
        problems.append(
            "MAX_RESTARTS needs trainer.save_freq above 0, or every attempt begins at the"
            " first step."
        )
    if getattr(args, "replay", None) is not None:
        problems.append(
            "MAX_RESTARTS does not go with --replay, which has no checkpoints; leave it out."
        )
    if problems:
        raise ConfigError(problems)
    # What starts anew, or from elsewhere, is for the first attempt.
    again = [word for word in command if word != "--fresh"]
    again += ["trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    return RestartableRun(
        tuple(command), tuple(again), Path(trainer.default_local_dir) / trainer.experiment_name
    )


def _wait_until_lock_is_free(lock_path: Path) -> None:
    """Wait until no process holds the lock file, or the file is gone; at most 30 seconds."""
    deadline = time.monotonic() + LOCK_RELEASE_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with lock_path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except FileNotFoundError:
            return
        except OSError:  # held
            time.sleep(0.2)


class RestartSupervisor:
    """Runs a command, one attempt at a time. Signals are forwarded to the command; after a signal
    `is_stop_requested` is True and the command should not be started again.
    """

    def __init__(self) -> None:
        """Install the handler that forwards signals to the command."""
        self.is_stop_requested = False
        self._process: subprocess.Popen[bytes] | None = None
        for number in FORWARDED_SIGNALS:
            signal.signal(number, self._forward_signal)

    def run_command(self, command: Sequence[str]) -> int:
        """Run the command once and return its exit code, or 128 + n if signal n has ended it. Where
        MASTER_ADDR lists several addresses, replace the list by the address of node 0, in the
        environment and in the command. Where no address of node 0 is found, do not run the command,
        and return the code of a stop or of wrong usage.
        """
        environment = make_import_environment(os.environ)
        environment[AGENTS_PARENT_ENV] = str(os.getpid())
        given = os.environ.get("MASTER_ADDR", "")
        if "," in given:
            found = self._find_master_address(
                given.split(","), "--node-rank 0 " in f"{' '.join(command)} "
            )
            if not found:
                return STOPPED_EXIT_CODE if self.is_stop_requested else USAGE_ERROR
            environment["MASTER_ADDR"] = found
            command = [found if word == given else word for word in command]
        self._process = subprocess.Popen(command, env=environment)
        code = self._process.wait()
        return 128 - code if code < 0 else code

    def _find_master_address(self, addresses: Sequence[str], is_node_0: bool) -> str:
        """Return the address of node 0 of this attempt among several; a spare machine may have
        taken its place.

        With `is_node_0`, return the address that this machine has, or "" with a message if it has
        none. Else wait until one address answers at MASTER_PORT. Return "" also after a stop
        request.
        """
        port = int(os.environ["MASTER_PORT"])
        while not self.is_stop_requested:
            for address in addresses:
                with contextlib.suppress(OSError):
                    if is_node_0:
                        socket.create_server((address, 0)).close()
                    else:
                        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
                    return address
            if is_node_0:
                sys.stderr.write(
                    f"MASTER_ADDR ({','.join(addresses)}) has no address of this node 0; add it\n"
                )
                return ""
            time.sleep(ADDRESS_POLL_S)
        return ""

    def _forward_signal(self, signal_number: int, frame: object) -> None:
        """Handle a signal: send it to the running command, and set `is_stop_requested`."""
        self.is_stop_requested = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal_number)


def main(arguments: Sequence[str]) -> int:
    """Run the command in `arguments[1:]` until it ends with a final exit code, makes no progress
    twice in a row, or has been started again arguments[0] times. Return the exit code of the last
    attempt, or 2 for a command that cannot be restarted.
    """
    max_restarts = int(arguments[0])
    command = list(arguments[1:])
    try:
        run = parse_restartable_run(command)
    except ConfigError as error:
        sys.stderr.write("\n".join(error.problems) + "\n")
        return USAGE_ERROR
    attempts = RestartSupervisor()
    before = run.read_progress()
    num_idle = 0
    for number in range(max_restarts + 1):
        code = attempts.run_command(run.restart_command if number else run.command)
        if code in FINAL_EXIT_CODES or attempts.is_stop_requested:
            return code
        now = run.read_progress()
        num_idle = 0 if now > before else num_idle + 1
        before = max(before, now)
        said = f"attempt {number + 1} ended with exit code {code} in step {now[0]}"
        if num_idle == MAX_IDLE_ATTEMPTS:
            sys.stderr.write(
                f"{said}; {num_idle} in a row made no progress: the run is not started again\n"
            )
            return code
        if number == max_restarts:
            sys.stderr.write(f"{said}; MAX_RESTARTS ({max_restarts}) is used up\n")
            return code
        sys.stderr.write(f"{said}; the run is started again ({number + 1} of {max_restarts})\n")
        _wait_until_lock_is_free(run.run_dir / RUN_LOCK_FILE)
        if attempts.is_stop_requested:
            return code
    raise AssertionError("the last attempt returns")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
