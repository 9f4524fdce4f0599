"""What the processes of a sandbox hold on disk, where the sandbox has no file system of its own.

Two kinds of files count: those in the sandbox's folder, and those that have no name any more and
that a process still holds, open or mapped into its memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rlhf_megatron.rewards.sandbox.sandbox_layers import SandboxLimits

MAX_DEPTH = 50  # of folders in the program's own
BLOCK_BYTES = 512  # of st_blocks, whatever the file system's own are
DELETED_MARK = b"(deleted)"  # ends a line of /proc/PID/maps


class DiskOverLimitsError(Exception):
    """A program has more on disk than the limits allow."""


def is_disk_over_limits(folder: str, pids: Iterable[int], limits: SandboxLimits) -> bool:
    """Return whether a program has more files or more bytes on disk than the limits allow, in its
    folder or without a name in its processes, or whether its folder is deeper than MAX_DEPTH or has
    a folder that this process may not list.

    The cost is bounded: the count ends at the first file above a limit.
    """
    count = DiskCount(limits)
    try:
        count.add_folder(folder, None, 0)
        device = os.stat(folder).st_dev
        for pid in pids:
            count.add_nameless_files(pid, device)
    except DiskOverLimitsError:
        return True
    except OSError:
        return False  # the folder is gone, with the sandbox
    return False


@dataclass
class DiskCount:
    """Counts files while a program changes them."""

    limits: SandboxLimits
    num_files: int = 0
    num_bytes: int = 0  # on disk
    _nameless_inodes: set[int] = field(default_factory=set)

    def add_folder(self, name: str, parent_fd: int | None, depth: int) -> None:
        """Count all that is in the folder `name` of the open folder `parent_fd`. Raise
        DiskOverLimitsError where that is too much.

        Each folder is opened from the one above, and no link is followed: a path has 4,096
        characters at most, which 17 nested folders with long names exceed.
        """
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            folder_fd = os.open(name, flags, dir_fd=parent_fd)
        except PermissionError as error:
            # what is in such a folder counts nowhere, and an ordinary program makes none
            raise DiskOverLimitsError from error
        except OSError:
            return  # the program has removed the folder, or put something else in its place
        try:
            with os.scandir(folder_fd) as entries:
                for entry in entries:
                    self._add_entry(entry, folder_fd, depth)
        except OSError:
            return  # the program has removed the folder
        finally:
            os.close(folder_fd)

    def _add_entry(self, entry: os.DirEntry[str], folder_fd: int, depth: int) -> None:
        """Count one entry of an open folder, with all that is below the entry."""
        num_bytes = 0
        with contextlib.suppress(OSError):
            num_bytes = entry.stat(follow_symlinks=False).st_blocks * BLOCK_BYTES
        self._add_file(num_bytes)
        if depth > MAX_DEPTH:
            raise DiskOverLimitsError
        if entry.is_dir(follow_symlinks=False):
            self.add_folder(entry.name, folder_fd, depth + 1)

    def _add_file(self, num_bytes: int) -> None:
        """Count one file. Raise DiskOverLimitsError where it is one too many, or too large."""
        self.num_files += 1
        self.num_bytes += num_bytes
        is_too_large = self.num_bytes > self.limits.file_mib << 20
        if self.num_files > self.limits.files or is_too_large:
            raise DiskOverLimitsError

    def add_nameless_files(self, pid: int, device: int) -> None:
        """Count the files of this file system that the process holds and that have no name. Raise
        DiskOverLimitsError where that is too much.

        The size of a file that is mapped and not open cannot be read; such a file counts as the
        largest that a program may make. (Python's mmap keeps its file open.)
        """
        for status in _iterate_open_files(pid):
            if status.st_dev == device and status.st_nlink == 0:
                self._add_nameless_file(status.st_ino, status.st_blocks * BLOCK_BYTES)
        for inode in _iterate_deleted_mappings(pid, device):
            self._add_nameless_file(inode, self.limits.file_mib << 20)

    def _add_nameless_file(self, inode: int, num_bytes: int) -> None:
        """Count a file without a name, once for all processes that hold it."""
        if inode not in self._nameless_inodes:
            self._nameless_inodes.add(inode)
            self._add_file(num_bytes)


def _iterate_open_files(pid: int) -> Iterator[os.stat_result]:
    """Yield the status of each file that the process has open; nothing where it has ended."""
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.stat(f"{folder}/{number}")


def _iterate_deleted_mappings(pid: int, device: int) -> Iterator[int]:
    """Yield the inodes of this file system's files that are mapped into the process's memory and
    have no name; nothing where the process has ended.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            if line.rstrip().endswith(DELETED_MARK):
                # addresses, rights, offset, device as major:minor, inode, name
                major, _, minor = line.split()[3].partition(b":")
                if os.makedev(int(major, 16), int(minor, 16)) == device:
                    yield int(line.split()[4])
