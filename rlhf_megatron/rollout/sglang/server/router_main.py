"""`python -m rlhf_megatron.rollout.sglang.server.router_main FILE`: stock sglang-router with the
arguments that stand in a file, one a line. They hold a key, and a command line is seen by everybody
on the machine. Runs in sglang's environment.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def main() -> None:
    """Raise the limit of open files, and run sglang-router with the arguments of the file that the
    command line names.
    """
    arguments = Path(sys.argv[1]).read_text().splitlines()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # two connections a sample
    from sglang_router import launch_router

    sys.argv[1:] = arguments
    launch_router.main()


if __name__ == "__main__":
    main()
