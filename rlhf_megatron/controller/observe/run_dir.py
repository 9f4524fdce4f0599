"""The directory of a run: who may write to it, and whether a former run in it goes on or
is moved aside.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_megatron.controller.observe.line_file import write_file_atomically

LOCK_FILE = "run.lock"
_LOCK_ATTEMPTS = 5  # while others move the directory aside


class RunLock:
    """Held as long as any process has `descriptors` open: also by a child that inherited them, when
    its parent is dead.

    Locked are run.lock, where file systems of the network have locks, and the directory itself,
    whose lock nobody can delete.
    """

    def __init__(
        self, run_dir: Path, descriptors: Sequence[int], acquired_at: float | None = None
    ) -> None:
        """Hold the lock of `run_dir` by its open `descriptors`: run.lock, then the directory.
        `acquired_at`: unix seconds at which the lock was acquired; None: read them from run.lock.
        """
        self.run_dir = run_dir
        self.descriptors = list(descriptors)
        self.acquired_at = (
            float(_read_lock_owner(self.descriptors[0]).get("since", time.time()))
            if acquired_at is None
            else acquired_at
        )

    @staticmethod
    def take_over_inherited(run_dir: Path, descriptors: Sequence[int]) -> RunLock:
        """Return the lock in a child process that inherited its descriptors. Processes that the
        child starts do not inherit them.
        """
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return RunLock(run_dir, descriptors)

    def release(self) -> None:
        """Close the lock's descriptors; call it once. A child process that inherited them keeps the
        lock.
        """
        for descriptor in self.descriptors:
            os.close(descriptor)

    def verify_ownership(self) -> None:
        """Create run.lock again, locked, where it was deleted. Raise ValueError where the directory
        is not this run's any more.
        """
        path = self.run_dir / LOCK_FILE
        file, directory = self.descriptors
        if not _is_same_file(self.run_dir, directory):
            raise ValueError(
                f"{self.run_dir} was moved or deleted while this run had it; the run ends."
            )
        if _is_same_file(path, file):
            return
        again = _open_lock_file(path)
        if not _try_flock(again):
            raise ValueError(
                f"{path} was deleted while this run had it, and another run has taken it;"
                " this one ends."
            )
        os.close(file)
        self.descriptors[0] = again
        _write_lock_owner(again, self.acquired_at)


def acquire_run_lock(run_dir: Path) -> RunLock:
    """Lock the directory of a run, creating it where it does not exist. Raise ValueError, with
    process, host and start time of the holder, when another run has the directory.

    On file systems without locks over the network (some NFS) the lock guards against runs on the
    same machine only.
    """
    path = run_dir / LOCK_FILE
    for _ in range(_LOCK_ATTEMPTS):
        run_dir.mkdir(parents=True, exist_ok=True)
        _refuse_links_and_other_users(run_dir)
        with ExitStack() as opened:
            try:
                descriptors = [
                    _open_lock_file(path),
                    os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC),
                ]
            except FileNotFoundError:  # the directory was moved aside in between
                continue
            opened.callback(RunLock(run_dir, descriptors, 0.0).release)
            if not all(map(_try_flock, descriptors)):
                holder = _read_lock_owner(descriptors[0])
                raise ValueError(
                    f"{run_dir} is in use by process {holder.get('pid', '?')} on"
                    f" {holder.get('host', '?')}, since {holder.get('started', '?')}; wait until"
                    " that run has ended, end it, or set another trainer.experiment_name."
                )
            if _is_same_file(path, descriptors[0]) and _is_same_file(run_dir, descriptors[1]):
                opened.pop_all()
                return RunLock(run_dir, descriptors, _write_lock_owner(descriptors[0], time.time()))
    raise ValueError(
        f"{run_dir} is moved aside by others again and again; set another trainer.experiment_name."
    )


def _open_lock_file(path: Path) -> int:
    """Open run.lock, creating it, and return the descriptor. A link is refused (OSError)."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)


def _try_flock(descriptor: int) -> bool:
    """Lock the descriptor without waiting. Return False where another process holds the lock; True
    also where the file system cannot lock a directory.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):  # NFS has no locks of directories
            raise
    return True


def _refuse_links_and_other_users(run_dir: Path) -> None:
    """Raise ValueError where run.lock is a link, or where the directory or run.lock belongs to
    another user: an owner of the directory could put links where this run writes.
    """
    for path in (run_dir, run_dir / LOCK_FILE):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat() if path.name == LOCK_FILE else path.stat()
            if stat.S_ISLNK(found.st_mode):
                raise ValueError(
                    f"{path} is a link; remove it, or set another trainer.default_local_dir."
                )
            if os.getuid() not in (0, found.st_uid):
                raise ValueError(
                    f"{path} belongs to another user (id {found.st_uid}); set another"
                    " trainer.default_local_dir. A checkpoint in it can be gone on from with"
                    " trainer.resume_mode: resume_path."
                )


def _write_lock_owner(descriptor: int, acquired_at: float) -> float:
    """Write process, host and start time of the holder to run.lock, and return `acquired_at`."""
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(acquired_at))
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": started,
        "since": acquired_at,
    }
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(owner).encode() + b"\n", 0)
    return acquired_at


def _read_lock_owner(descriptor: int) -> dict[str, Any]:
    """Return what the holder wrote to run.lock; {} where it has not yet."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether the path still is the file that is open as `descriptor`."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@dataclass(frozen=True)
class LockedRunDir:
    """A locked directory that is ready to be written to."""

    path: Path
    lock: RunLock
    former_run_path: Path | None  # where a former run was moved to


def open_run_dir(parent: str, name: str, can_continue: Callable[[Path], bool]) -> LockedRunDir:
    """Lock and return the directory `parent`/`name`. A former run in it stays where
    `can_continue(directory)` is true; else it is moved aside.

    Raise ValueError when another run has the directory; that run is not touched.
    """
    path = Path(parent) / name
    if path.is_file():
        move_to_numbered_name(path)
    lock = acquire_run_lock(path)
    moved = None
    if any(entry.name != LOCK_FILE for entry in path.iterdir()) and not can_continue(path):
        moved = move_to_numbered_name(path)
        (moved / LOCK_FILE).unlink()
        lock.release()
        lock = acquire_run_lock(path)
    (path / "logs").mkdir(exist_ok=True)
    return LockedRunDir(path, lock, moved)


def create_fresh_run_dir(parent: str, name: str) -> tuple[Path, Path | None]:
    """Return (the new empty directory, the path where a former one was moved to or None), without a
    lock.
    """
    path = Path(parent) / name
    moved = (
        move_to_numbered_name(path)
        if path.is_file() or (path.is_dir() and any(path.iterdir()))
        else None
    )
    (path / "logs").mkdir(parents=True, exist_ok=True)
    return path, moved


def move_to_numbered_name(path: Path) -> Path:
    """Rename a directory and return its new path: `runs/x` becomes `runs/x.1`, `runs/x.2` ..."""
    number = 1
    while (moved := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(moved)
    return moved


def write_json_atomically(path: Path, value: dict[str, Any]) -> None:
    """Write `value` as JSON to the file, which appears by rename when it is complete. Raise
    OSError.
    """
    write_text_atomically(path, json.dumps(value, indent=2) + "\n")


def write_text_atomically(path: Path, text: str) -> None:
    """Write the text to the file, which appears by rename when it is complete. Raise OSError."""
    write_file_atomically(path, text.encode())
