"""A program that starts two bundled engines, prints their pids, ends the second with SIGTERM and
prints its exit code.

python tests/support/engine_starter.py MODEL DIRECTORY
"""

from __future__ import annotations

import os
import signal
import sys
import time

from rlhf_megatron.rollout.local.local_launch import start_local_engines

if __name__ == "__main__":
    processes = start_local_engines(sys.argv[1], 2, sys.argv[2], transfer_dir=None).processes
    print(*(process.pid for process in processes), flush=True)
    os.kill(processes[1].pid, signal.SIGTERM)
    print(processes[1]._process.wait(60), flush=True)
    time.sleep(600)
