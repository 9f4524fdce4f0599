"""Planned faults of engines (`faults`): the first one that lives is killed or stopped, with its process group."""

from __future__ import annotations

import signal
from collections.abc import Callable

from rlhf_megatron import faults
from rlhf_megatron.rollout.attach import AttachedEngines
from rlhf_megatron.rollout.process import EngineServers


def register_engine_faults(servers: EngineServers | AttachedEngines) -> None:
    """The actions kill_engine and stop_engine of this process's plan; nothing without one."""
    faults.add_action("kill_engine", _signal_first(servers, signal.SIGKILL))
    faults.add_action("stop_engine", _signal_first(servers, signal.SIGSTOP))


def _signal_first(servers: EngineServers | AttachedEngines, number: int) -> Callable[[faults.Fault], None]:
    def act(fault: faults.Fault) -> None:
        live = [process for process in servers.processes if process.exit_code is None]
        if live:
            live[0].send_signal(number)

    return act
