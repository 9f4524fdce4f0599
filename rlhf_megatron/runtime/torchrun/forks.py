"""A run on one machine without accelerators: its ranks are forks of the agent, its controller is one of rank 0.

Importing what a rank needs takes 3.5 s of CPU, and a fork 0.02. The launcher imports once, while a fork of it makes the
checks, and becomes the agent. Ranks are forked while it has a single thread; each waits for the environment that
torchrun gives it. Engines begin with an interpreter, and so does every process where FORKS_ENV is "0".
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

from rlhf_megatron.parallel.environment import gpus_here

FORKS_ENV = "RLHF_MEGATRON_FORKS"
PR_SET_NAME = 15
_LOG_LEVEL_ENV = "TORCH_CPP_LOG_LEVEL"  # read when torch is imported; `agent` says why it is set
_is_fork_of_agent = False


def can_fork(device: str) -> bool:
    """Whether this process may become the agent of ranks that are its forks. `device`: as in the configuration."""
    has_driver = bool(gpus_here()) or Path("/dev/nvidiactl").exists()
    has_accelerator = device == "cuda" or (device == "auto" and has_driver)
    is_wanted = os.environ.get(FORKS_ENV) != "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    return is_wanted and sys.platform == "linux" and not has_accelerator and _num_threads() == 1


def is_fork() -> bool:
    """Whether this process is a rank that was forked: it has imported what its controller needs."""
    return _is_fork_of_agent


def check_and_import(check: Callable[[], object], modules: Sequence[str], num_processes: int) -> bool:
    """Import torch, megatron-core and `modules`, while `check` runs in a fork. Returns whether it raised nothing.

    What it raises is not told: the caller calls it here, too.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    log_level = os.environ.get(_LOG_LEVEL_ENV)
    os.environ[_LOG_LEVEL_ENV] = log_level or "ERROR"
    importlib.import_module("torch")
    if log_level is None:
        del os.environ[_LOG_LEVEL_ENV]
    checks = Fork("checks", partial(_tells, check))
    with contextlib.suppress(Exception):  # each rank finds it again, and tells it with its coordinates
        importlib.import_module("rlhf_megatron.parallel.prepare").prepare_megatron()
        for name in modules:
            importlib.import_module(name)
    return checks.wait() == 0


def _tells(check: Callable[[], object]) -> int:
    try:
        check()
    except Exception:
        return 1
    return 0


class Fork(subprocess.Popen[bytes]):
    """A fork of this process which runs a function and exits with what that returns."""

    def __init__(self, name: str, live: Callable[[], int], kept: Sequence[int] = (), is_leader: bool = False) -> None:
        """`name`: as `ps -o comm` shows it. `kept`: descriptors that it has beside the standard ones.
        `is_leader`: of a session of its own."""
        self._live, self._kept, self._is_leader = live, kept, is_leader
        super().__init__([name])

    def _execute_child(self, *given: Any) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            exit_with(partial(self._begin, str(self.args[0])))  # type: ignore[index]
        self._child_created = True

    def _begin(self, name: str) -> int:
        if self._is_leader:
            os.setsid()
        for entry in os.listdir("/proc/self/fd"):
            if int(entry) > 2 and int(entry) not in self._kept:
                with contextlib.suppress(OSError):
                    os.close(int(entry))
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logging.getLogger().handlers.clear()
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)
        return self._live()


class Rank:
    """A rank that was forked early, and waits for its environment. It ends with this process."""

    def __init__(self, local_rank: int, arguments: Sequence[str]) -> None:
        self.has_begun = False
        read_end, self._write_end = os.pipe()
        live = partial(_live_as_rank, read_end, arguments)
        self.process = Fork(f"rank {local_rank}", live, [read_end], is_leader=True)
        os.close(read_end)

    def begin(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Return its process, which goes on."""
        self.has_begun = True
        with open(self._write_end, "w", encoding="utf-8") as file:
            json.dump(dict(environment), file)
        return self.process


def _live_as_rank(read_end: int, arguments: Sequence[str]) -> int:
    global _is_fork_of_agent
    with open(read_end, encoding="utf-8") as file:
        environment = file.read()
    if not environment:  # the agent has ended
        return 1
    _is_fork_of_agent = True
    return live_as_program(arguments, json.loads(environment))


def live_as_program(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Do, in a fork, what `python -m MODULE ARGUMENTS`, in `arguments`, does in that environment. Returns its exit
    code.
    """
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments[2:]
    importlib.import_module("torch").set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return 0


def launch(arguments: Sequence[str], num_processes: int, stop_s: float) -> NoReturn:
    """Become `launch_single_node`'s agent, after `check_and_import`."""
    from torch.distributed.elastic.multiprocessing import api as elastic_processes
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    from rlhf_megatron.runtime.torchrun import agent, launcher

    signal.pthread_sigmask(signal.SIG_BLOCK, launcher.SIGNALS)  # until the agent takes them
    os.environ[launcher.STOP_LIMIT_ENV] = launcher.stop_limit(stop_s)
    command = ["-m", "rlhf_megatron", *arguments]
    gc.collect()
    gc.freeze()  # a collection would copy what is shared
    ranks = [Rank(local_rank, command) for local_rank in range(num_processes)]

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
            return ranks[self.local_rank_id].begin(env)

    setattr(elastic_processes, "get_subprocess_handler", Handler)  # noqa: B010  mypy sees a function
    code = agent.main(launcher.agent_arguments(num_processes, "rlhf_megatron", arguments), partial(_running, ranks))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the agent does


def _running(ranks: Sequence[Rank]) -> list[int]:
    return [rank.process.pid for rank in ranks if rank.has_begun and rank.process.poll() is None]


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task")) if sys.platform == "linux" else threading.active_count()


def exit_with(function: Callable[[], Any]) -> NoReturn:
    """Call `function`, the rest of the life of this process, and end as an interpreter does."""
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
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
