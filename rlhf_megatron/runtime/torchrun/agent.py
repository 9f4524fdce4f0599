"""torch.distributed.run, with the run's own exit code and without the noise.

Started as `python -m rlhf_megatron.runtime.torchrun.agent`.

torchrun exits with 1 and prints a table whatever a rank's exit code was; the controller has said
what went wrong. torchrun kills the ranks soon after a signal; here they get it and end by
themselves, when the run's state is saved (`runtime.stop_signals`), and what is left after
STOP_LIMIT_ENV seconds is killed. On one machine (--standalone) the control channel's secret is
drawn here and all sockets are on the loopback interface. On several, gloo takes the interface that
leads to node 0, the store listens on MASTER_ADDR only, and an agent ends when another
has (`runtime.torchrun.node_watch`).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import FrameType

# what comes while torch is imported waits until `LocalRanks.forward_signals`
if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT))

# Read when torch is imported. A store that goes away is an ordinary end here, no reason for a
# stack trace in C++.
_LOG_LEVEL_ENV = "TORCH_CPP_LOG_LEVEL"
_HAS_LOG_LEVEL = _LOG_LEVEL_ENV in os.environ
os.environ.setdefault(_LOG_LEVEL_ENV, "ERROR")

from torch.distributed import DistNetworkError, DistStoreError  # noqa: E402
from torch.distributed.elastic.multiprocessing import api as elastic_processes  # noqa: E402
from torch.distributed.elastic.multiprocessing.api import SignalException  # noqa: E402
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: E402
from torch.distributed.run import parse_args, run  # noqa: E402

from rlhf_megatron.parent_process import end_with_parent  # noqa: E402
from rlhf_megatron.rollout.socket_limits import find_interface_towards  # noqa: E402
from rlhf_megatron.rollout.transports.transfer_dir import make_transfer_directory  # noqa: E402
from rlhf_megatron.runtime.message_channel import (  # noqa: E402
    SECRET_ENV,
    SECRET_FILE_ENV,
    generate_secret,
)
from rlhf_megatron.runtime.process_control import (  # noqa: E402
    AGENT_ENV,
    AGENTS_PARENT_ENV,
    find_children_with_variable,
)
from rlhf_megatron.runtime.stop_signals import SIGNALS, STOP_LIMIT_ENV  # noqa: E402
from rlhf_megatron.runtime.torchrun.node_watch import (  # noqa: E402
    OtherNodesWatcher,
    format_early_exit,
)
from rlhf_megatron.runtime.torchrun.torchrun_stores import bind_torchrun_stores  # noqa: E402
from rlhf_megatron.stop import STOPPED_EXIT_CODE, get_startup_exit_code  # noqa: E402

ELASTIC = "torch.distributed.elastic"
USAGE_EXIT_CODE = 2
STOP_LIMIT_S = 1800.0  # where STOP_LIMIT_ENV does not say
OTHERS_ENDED_LIMIT_S = 30.0  # the same when another node has ended


class LocalRanks:
    """The ranks of this machine, for signals to them."""

    def __init__(self, stop_limit_s: float, list_pids: Callable[[], list[int]]) -> None:
        """`list_pids` returns the pids of the ranks that run; `stop_limit_s` is the time from a
        signal to their kill.
        """
        self._stop_limit_s = stop_limit_s
        self._list_pids = list_pids
        self._is_kill_scheduled = False

    def forward_signals(self) -> None:
        """Forward signals to the ranks from now on; the agent goes on until the ranks have ended.
        Must be called on the main thread.

        Every version of torch sets its own handler when it starts the ranks, and looks for it in
        its module: that handler is replaced.
        """
        assert hasattr(elastic_processes, "_terminate_process_handler"), (
            "this torch takes signals in another way"
        )
        self._torch_handler = elastic_processes._terminate_process_handler
        # mypy sees a function
        setattr(elastic_processes, "_terminate_process_handler", self._forward_signal)  # noqa: B010
        # torch sets those that it knows once more; SIGUSR1 only newer versions do
        for number in SIGNALS:
            signal.signal(number, self._forward_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def request_end(self) -> None:
        """Send this agent SIGTERM, and shorten the time until the ranks are killed, because the run
        is over on another node. Any thread may call it.
        """
        self._stop_limit_s = OTHERS_ENDED_LIMIT_S
        os.kill(os.getpid(), signal.SIGTERM)

    def _forward_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Send the signal to the ranks, and schedule their kill after the stop limit. Exit where no
        rank runs.
        """
        if signal_number not in SIGNALS:
            self._torch_handler(signal_number, frame)
        pids = self._list_pids()
        if not pids:  # not started yet, or all ended
            os._exit(get_startup_exit_code(signal_number))
        _send_signal(pids, signal_number)
        if not self._is_kill_scheduled:
            self._is_kill_scheduled = True
            timer = threading.Timer(self._stop_limit_s, self._kill_late_ranks)
            timer.daemon = True
            timer.start()

    def kill_ranks(self) -> None:
        """Kill the ranks at once. Any thread may call it."""
        _send_signal(self._list_pids(), signal.SIGKILL)

    def _kill_late_ranks(self) -> None:
        """Write to stderr that the ranks have not ended in time, and kill them."""
        pids = self._list_pids()
        sys.stderr.write(
            f"the ranks {pids} have not ended within {self._stop_limit_s:g} s of a signal; they"
            " are killed\n"
        )
        _send_signal(pids, signal.SIGKILL)


def _send_signal(pids: Sequence[int], signal_number: int) -> None:
    """Send the signal to the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def main(arguments: Sequence[str], list_rank_pids: Callable[[], list[int]] | None = None) -> int:
    """Run torchrun with `arguments`, and return the exit code: the controller's where a rank has
    it, 128 + n for signal n, 0 when no rank failed.

    `list_rank_pids` returns the pids of the ranks, where the ranks are forks; None finds them by
    their environment.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(ELASTIC):  # each of them has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not _HAS_LOG_LEVEL:
        del os.environ[_LOG_LEVEL_ENV]  # it is for this process, not for the ranks
    pids = list_rank_pids or (lambda: find_children_with_variable("TORCHELASTIC_RUN_ID"))
    ranks = LocalRanks(float(os.environ.pop(STOP_LIMIT_ENV, STOP_LIMIT_S)), pids)
    ranks.forward_signals()
    if parent := os.environ.pop(AGENTS_PARENT_ENV, None):
        end_with_parent(signal.SIGTERM, int(parent))
    os.environ[AGENT_ENV] = str(os.getpid())
    bind_torchrun_stores()
    parsed = parse_args(list(arguments))
    others = None
    if parsed.standalone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if SECRET_FILE_ENV not in os.environ:
            os.environ[SECRET_ENV] = generate_secret()
    else:
        if interface := find_interface_towards(parsed.master_addr):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        others = OtherNodesWatcher(
            parsed.master_addr,
            parsed.master_port,
            parsed.node_rank,
            ranks.request_end,
            ranks.kill_ranks,
        )
    code = _run_with_temporary_log_dir(parsed)
    if others is not None:
        others.report_exit(code)
        if others.early_exit is not None:
            reason, code = others.early_exit
            sys.stderr.write(format_early_exit(reason))
    return code


def _run_with_temporary_log_dir(torchrun_args: argparse.Namespace) -> int:
    """Run torchrun and return its exit code. Without --log-dir the error files go to a directory
    that is removed with the agent, or when the next agent starts.
    """
    if torchrun_args.log_dir is not None:
        return _run_torchrun(torchrun_args)
    with make_transfer_directory(tempfile.gettempdir(), 0) as aside:
        torchrun_args.log_dir = str(aside.path)
        return _run_torchrun(torchrun_args)


def _run_torchrun(torchrun_args: argparse.Namespace) -> int:
    """Run torchrun to the end and return the exit code: of the first rank of this node that failed,
    128 + n for a signal, USAGE_EXIT_CODE (with a message) where there is no rendezvous.
    """
    try:
        run(torchrun_args)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        codes = [failures.exitcode for _, failures in sorted(error.failures.items())]
        # A rank that was killed may have ended first; the first rank of the node has the
        # controller's code.
        code: int = codes[0] if codes[0] > 0 else failure.exitcode
        if code == STOPPED_EXIT_CODE and failure.exitcode < 0:  # torchrun told the others to end
            code = failure.exitcode
        if -code in SIGNALS:  # a rank that can tell the controller of a signal takes it
            return get_startup_exit_code(-code)
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + error.sigval
    except (DistNetworkError, DistStoreError) as error:
        place = f"{torchrun_args.master_addr}:{torchrun_args.master_port}"
        sys.stderr.write(
            f"no rendezvous at {place} (MASTER_ADDR:MASTER_PORT): {str(error).splitlines()[0]}\n"
            "On node 0 the port must be free; on the others it must be reachable. Set MASTER_PORT"
            " to another port.\n"
        )
        return USAGE_EXIT_CODE
    return 0


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # a thread of torch's store that is in C++ while the interpreter shuts down aborts the process
    os._exit(exit_code)
