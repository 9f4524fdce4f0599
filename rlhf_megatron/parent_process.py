"""Processes that end with the process that started them, however that one ends. Pure.

Linux sends a signal of choice when a parent ends (prctl, PR_SET_PDEATHSIG). Two things make this
less simple than it sounds. The parent may be gone before the child asks for the signal, so the
child looks once afterwards. And the signal comes when the *thread* that forked the child ends,
although the parent may live on; a process that a thread may have started takes
`exit_if_orphaned_on_signal`, which looks before it ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from types import FrameType

_PR_SET_PDEATHSIG = 1
NO_SIGNAL = 0


def is_orphan(parent_pid: int) -> bool:
    """Return whether the parent of this process is no longer `parent_pid`: that process ended."""
    return os.getppid() != parent_pid


def end_with_parent(signal_number: int, parent_pid: int | None = None) -> None:
    """Make the kernel send this process `signal_number` when the thread that started it ends, with
    its process or alone. Send the signal at once where the parent is not `parent_pid` any more.

    `parent_pid` None: whoever is the parent now. Call it again after a change of user or group,
    which clears the setting. Other systems than Linux only have the look at the parent. Raise
    OSError where the kernel refuses.
    """
    expected = os.getppid() if parent_pid is None else parent_pid
    _set_parent_death_signal(signal_number)
    if is_orphan(expected):
        os.kill(os.getpid(), signal_number)


def outlive_parent() -> None:
    """Undo `end_with_parent`: this process ends in another way from here on."""
    _set_parent_death_signal(NO_SIGNAL)


def exit_if_orphaned_on_signal(signal_number: int, parent_pid: int) -> None:
    """Exit this process, with code 1, when `parent_pid` ends; exit now where it is gone already.

    The end of a thread of the parent does nothing. `signal_number` must be of no other use in this
    process. Call it on the main thread.
    """

    def exit_if_orphaned(number: int, frame: FrameType | None) -> None:
        """Exit where the parent process has changed."""
        if is_orphan(parent_pid):
            os._exit(1)

    signal.signal(signal_number, exit_if_orphaned)
    _set_parent_death_signal(signal_number)
    exit_if_orphaned(signal_number, None)


def _set_parent_death_signal(signal_number: int) -> None:
    """Set the signal that the kernel sends at the end of the thread that started this process, on
    Linux. Raise OSError where the kernel refuses.
    """
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
