"""Children of a process, and their end: never that of a later process with the same pid."""

import os
import signal
import subprocess
from dataclasses import replace

from rlhf_megatron.runtime.process_control import find_children


def test_a_child_is_found_and_ended_and_a_namesake_is_not() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        (child,) = [child for child in find_children(os.getpid()) if child.pid == process.pid]
        replace(child, start_ticks=str(int(child.start_ticks) - 1)).kill()
        assert process.poll() is None
        child.kill()
        assert process.wait(60) == -signal.SIGKILL
    child.kill()  # gone: nothing
    assert process.pid not in [child.pid for child in find_children(os.getpid())]
