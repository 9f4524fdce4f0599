"""Runs a server, and kills its process group when the process that asked for it is gone.

    python -I -S guard.py PARENT_PID COMMAND...

For servers that do not look after that themselves. Nothing but the standard library is imported: it starts in
milliseconds, and any interpreter will do. The exit code is the server's, 128 + the number where a signal ended it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

POLL_S = 0.5


def main(argv: list[str]) -> int:
    parent, command = int(argv[0]), argv[1:]
    for number in (signal.SIGTERM, signal.SIGINT):  # the whole group gets it, and the server decides what it means
        signal.signal(number, lambda number, frame: None)
    server = subprocess.Popen(command)
    while True:
        try:
            code = server.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != parent:
                os.killpg(0, signal.SIGKILL)  # this process too
        else:
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
