"""The directory through which buckets travel on one host: made by the controller, removed at
the end of a run.

A run that was killed leaves its directory behind, in memory. Each holds a lock that its owner keeps
while it lives, so the next run tells an abandoned directory from a live one and removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "rlhf-megatron-"
_LOCK = "owner.lock"
_SHARED_MEMORY = Path("/dev/shm")


class TransferDirectory:
    """A transfer directory, which only this user can read; a context manager that removes it at its
    end.
    """

    def __init__(self, path: Path, lock_descriptor: int) -> None:
        """Own the directory at `path`, whose lock is held through `lock_descriptor`."""
        self.path = path
        self._lock_descriptor: int | None = lock_descriptor

    def remove_directory(self) -> None:
        """Remove the directory and release its lock. Safe to call twice."""
        if self._lock_descriptor is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock_descriptor)
            self._lock_descriptor = None

    def __enter__(self) -> TransferDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_directory()


def get_default_parent() -> Path:
    """Return the parent of transfer directories where the user sets none: shared memory where this
    user can write to it, else the temporary directory. Room is not checked.
    """
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def make_transfer_directory(parent: str | Path | None, num_bytes: int) -> TransferDirectory:
    """Make a new directory under `parent`; None: under /dev/shm where `num_bytes` (of all senders'
    buffers) are free, else under the temporary directory. Remove abandoned directories of earlier
    runs there. Raise ValueError when there is no room.
    """
    candidates = (
        [Path(parent)] if parent is not None else [_SHARED_MEMORY, Path(tempfile.gettempdir())]
    )
    room = {}
    for candidate in candidates:
        if not candidate.is_dir() or not os.access(candidate, os.W_OK):
            continue
        remove_abandoned_directories(candidate)
        room[candidate] = shutil.disk_usage(candidate).free
        if room[candidate] >= num_bytes:
            path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=candidate))
            return TransferDirectory(path, _create_owner_lock(path))
    found = (
        ", ".join(f"{path} has {free} bytes free" for path, free in room.items())
        or "not a writable directory"
    )
    raise ValueError(
        f"weight buffers need {num_bytes} bytes in {' or '.join(map(str, candidates))}: {found}."
        " Set rollout.transfer_dir to a directory with room; where rollout.weight_transport is"
        " tensor, or lower rollout.update_weights_bucket_megabytes."
    )


def make_transfer_directory_at(path: Path) -> TransferDirectory | None:
    """Make the run's transfer directory at this path on a machine other than the controller's, or
    take over an abandoned one; return None where a live process has made it, as on a shared file
    system. Raise OSError.
    """
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        lock = _take_abandoned_lock(path)
        return None if lock is None else TransferDirectory(path, lock)
    return TransferDirectory(path, _create_owner_lock(path))


def _take_abandoned_lock(path: Path) -> int | None:
    """Take the lock of a directory whose owner has ended and return its descriptor; None where the
    owner lives, or is making or removing the directory now.
    """
    try:
        descriptor = os.open(path / _LOCK, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    except BlockingIOError:
        os.close(descriptor)
        return None


def remove_abandoned_directories(parent: Path) -> None:
    """Remove the transfer directories of this user under `parent` whose owner is gone."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = _take_abandoned_lock(path) if path.stat().st_uid == os.getuid() else None
        except OSError:
            continue  # it is not for this process, or was removed
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _create_owner_lock(path: Path) -> int:
    """Create the lock file of a new directory, locked by this process, and return its
    descriptor.
    """
    # Locked under another name first: a lock file that others can see is always held.
    hidden = path / f".{_LOCK}"
    descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(hidden, path / _LOCK)
    return descriptor
