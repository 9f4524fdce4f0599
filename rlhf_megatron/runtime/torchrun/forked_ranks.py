"""A run on one machine without accelerators: its ranks are forks of the agent, its controller is
one of rank 0.

Importing what a rank needs takes 3.5 s of CPU, and a fork 0.02. The launcher imports once, while a
fork of it makes the checks, and becomes the agent. Ranks are forked while it has a single thread;
each waits for the environment that torchrun gives it. Engines begin with an interpreter, and so
does every process where FORKS_ENV is "0".
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf_megatron.config.cuda_environment import read_local_gpu_names

FORKS_ENV = "RLHF_MEGATRON_FORKS"
PR_SET_NAME = 15
_LOG_LEVEL_ENV = "TORCH_CPP_LOG_LEVEL"  # read when torch is imported; `agent` says why it is set
_is_fork_of_agent = False


def can_fork_ranks(device: str) -> bool:
    """Return whether this process may become the agent of ranks that are its forks: Linux, no
    accelerator in use, one thread, not under torchrun, not switched off by FORKS_ENV. `device` is
    the configured trainer.device.
    """
    has_driver = bool(read_local_gpu_names()) or Path("/dev/nvidiactl").exists()
    has_accelerator = device == "cuda" or (device == "auto" and has_driver)
    is_wanted = os.environ.get(FORKS_ENV) != "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_wanted and sys.platform == "linux" and not has_accelerator and _count_threads() == 1


def is_forked_rank() -> bool:
    """Return whether this process is a forked rank, with its controller's modules imported."""
    return _is_fork_of_agent


def import_while_checking(
    run_checks: Callable[[], object], modules: Sequence[str], num_processes: int
) -> bool:
    """Import torch, megatron-core and `modules` while `run_checks` runs in a fork. Return whether
    `run_checks` raised nothing.

    The exception of `run_checks` is lost in the fork; the caller calls `run_checks` again to see
    it. Set OMP_NUM_THREADS where it is not set.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    log_level = os.environ.get(_LOG_LEVEL_ENV)
    os.environ[_LOG_LEVEL_ENV] = log_level or "ERROR"
    importlib.import_module("torch")
    if log_level is None:
        del os.environ[_LOG_LEVEL_ENV]
    checks = ForkedProcess("checks", partial(_run_check, run_checks))
    # each rank finds it again, and tells it with its coordinates
    with contextlib.suppress(Exception):
        importlib.import_module("rlhf_megatron.ranks.parallel.megatron_setup").prepare_megatron()
        for name in modules:
            importlib.import_module(name)
    return checks.wait() == 0


def _run_check(run_checks: Callable[[], object]) -> int:
    """Return 0 where the checks raise nothing, else 1."""
    try:
        run_checks()
    except Exception:
        return 1
    return 0


class ForkedProcess(subprocess.Popen[bytes]):
    """A fork of this process which runs a function and exits with the code that the function
    returns.
    """

    def __init__(
        self,
        name: str,
        run_child: Callable[[], int],
        kept_descriptors: Sequence[int] = (),
        is_session_leader: bool = False,
    ) -> None:
        """Fork this process and call `run_child` in the fork, which exits with the code that
        `run_child` returns. `name` is the process name that `ps -o comm` shows. The child keeps
        `kept_descriptors` beside the standard ones. `is_session_leader` gives it a session of its
        own.
        """
        self._run_child = run_child
        self._kept_descriptors = kept_descriptors
        self._is_session_leader = is_session_leader
        super().__init__([name])

    def _execute_child(self, *popen_arguments: Any) -> None:
        """Fork in place of the exec that subprocess.Popen makes."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_and_exit(partial(self._run_in_child, str(self.args[0])))  # type: ignore[index]
        self._child_created = True

    def _run_in_child(self, name: str) -> int:
        """Prepare the fork (session, descriptors, signal handlers, logging, name), call `run_child`
        and return its exit code.
        """
        if self._is_session_leader:
            os.setsid()
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2 and int(entry) not in self._kept_descriptors:
                with contextlib.suppress(OSError):
                    os.close(int(entry))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger().handlers.clear()
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        return self._run_child()


class ForkedRank:
    """A rank that was forked early, and waits for its environment. It ends with this process."""

    def __init__(self, local_rank: int, arguments: Sequence[str]) -> None:
        """Fork the process of the rank, which waits for its environment."""
        self.has_begun = False
        read_end, self._write_end = os.pipe()
        live = partial(_run_as_rank, read_end, arguments)
        self.process = ForkedProcess(f"rank {local_rank}", live, [read_end], is_session_leader=True)
        os.close(read_end)

    def continue_with_environment(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Send the waiting fork its environment, with which it goes on as the rank, and return the
        process.
        """
        self.has_begun = True
        with open(self._write_end, "w", encoding="utf-8") as file:
            json.dump(dict(environment), file)
        return self.process


def _run_as_rank(read_end: int, arguments: Sequence[str]) -> int:
    """Wait in the fork for the environment, then run the program of the rank. Return the exit code;
    1 where the agent ended first.
    """
    global _is_fork_of_agent
    with open(read_end, encoding="utf-8") as file:
        environment = file.read()
    if not environment:  # the agent has ended
        return 1
    _is_fork_of_agent = True
    return run_as_program(arguments, json.loads(environment))


def run_as_program(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run, in a fork, the program that `arguments` (["-m", MODULE, ...]) name, with that
    environment, as `python -m MODULE ...` would. Return 0; the program's own SystemExit passes
    through.
    """
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments[2:]
    importlib.import_module("torch").set_num_threads(
        int(os.environ["OMP_NUM_THREADS"].split(",")[0])
    )
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return 0


def run_agent_with_forks(arguments: Sequence[str], num_processes: int, stop_s: float) -> NoReturn:
    """Fork the ranks and run as their torchrun agent, after `import_while_checking`. Does not
    return.
    """
    from torch.distributed.elastic.multiprocessing import api as elastic_processes
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from rlhf_megatron.runtime.stop_signals import SIGNALS, STOP_LIMIT_ENV
    from rlhf_megatron.runtime.torchrun import agent
    from rlhf_megatron.runtime.torchrun.agent_arguments import (
        format_stop_limit,
        make_agent_arguments,
    )

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the agent takes them
    os.environ[STOP_LIMIT_ENV] = format_stop_limit(stop_s)
    command = ["-m", "rlhf_megatron", *arguments]
    gc.collect()
    gc.freeze()  # a collection would copy what is shared
    ranks = [ForkedRank(local_rank, command) for local_rank in range(num_processes)]

    class ForkedRankHandler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            """Return the process of the forked rank, which goes on with the environment `env`."""
            return ranks[self.local_rank_id].continue_with_environment(env)

    # mypy sees a function
    setattr(elastic_processes, "get_subprocess_handler", ForkedRankHandler)  # noqa: B010
    code = agent.main(
        make_agent_arguments(num_processes, "rlhf_megatron", arguments),
        partial(_list_running_pids, ranks),
    )
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the agent does


def _list_running_pids(ranks: Sequence[ForkedRank]) -> list[int]:
    """Return the pids of the ranks that got their environment and have not ended."""
    return [rank.process.pid for rank in ranks if rank.has_begun and rank.process.poll() is None]


def _count_threads() -> int:
    """Return the number of threads of this process."""
    return (
        len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()
    )


def run_and_exit(function: Callable[[], Any]) -> NoReturn:
    """Call `function`, the rest of the life of this process, and exit as an interpreter does, with
    the code that it returns or that its SystemExit carries. Does not return.
    """
    code: Any = 1
    try:
        code = function()
    except SystemExit as error:
        code = error.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if isinstance(code, int):
        os._exit(code)
    os._exit(0 if code is None else 1)
