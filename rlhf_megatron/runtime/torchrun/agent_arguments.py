"""What the agent of torchrun is started with, for ranks that are processes and for ranks
that are forks.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_megatron.runtime.stop_signals import CLEANUP_S, HOST_SLACK_S


def make_agent_arguments(num_processes: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return torchrun's command-line arguments to run `python -m module arguments` on
    `num_processes` ranks of one machine.
    """
    place = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(num_processes)]
    return [*place, "-m", module, *arguments]


def format_stop_limit(stop_s: float) -> str:
    """Return the value of STOP_LIMIT_ENV, in seconds, for an agent whose run may take `stop_s` to
    stop.
    """
    return str(stop_s + CLEANUP_S + 3 * HOST_SLACK_S)
