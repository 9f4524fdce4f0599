"""Python programs of this project as processes that are forked off one that has
imported everything.

    warm.install()                                    # in conftest.py, on a machine without CUDA
    subprocess.Popen([sys.executable, "-m", "rlhf_megatron", "train", ...])
        # forked; its ranks and engines too

Importing megatron-core and transformers costs 5 CPU seconds a process, a fork 0.02. The processes
are the real ones otherwise: children of their starter with the command line, environment, files,
session and signals that they would have had. They are never forked off their starter, whose state
they would inherit, but off a template that has imported modules and done nothing else: that of the
tests, or the copy of it that a forked program gets when it begins. A command that is not known
(another interpreter, another PYTHONPATH, a shell) starts as ever; so does any in `cold()`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rlhf_megatron.runtime.torchrun.forked_ranks import run_and_exit

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
PR_SET_PDEATHSIG = 1
PR_SET_MM = 35
PR_SET_CHILD_SUBREAPER = 36
MM_ARG_END = 9
MM_ENV_END = 11
ROOM = 32768  # bytes for the command line of a forked process, and as many for its environment
HIGH = 700  # descriptors from here on are free
TOY = "runtime_toy"
WORKER = "dist_worker"
AGENT = "rlhf_megatron.runtime.torchrun.agent"
ENGINE = "rlhf_megatron.rollout.local.local_server"
MODULES = ("rlhf_megatron", AGENT, ENGINE, TOY)
SCRIPTS = (
    *(
        f"{WORKER}.py",
        "check_tools.py",
        "check_memory_jobs.py",
        "forked_runs.py",
        "stacks_of_a_run.py",
    ),
    "engine_starter.py",
)
PRELOADED = (
    *(
        f"rlhf_megatron.{name}"
        for name in ("cli.main", "cli.train_command", "cli.check_command", "controller.preflight")
    ),
    *(
        f"rlhf_megatron.{name}"
        for name in ("controller.scheduler.run_replay", "controller.scheduler.training_run")
    ),
    *(
        f"rlhf_megatron.{name}"
        for name in ("runtime.inline_worker_group", "runtime.rank_roles", "ranks.parallel.world")
    ),
    *(
        f"rlhf_megatron.{name}"
        for name in ("rollout.local.batch_generator", "ranks.workers.actor", "ranks.workers.critic")
    ),
    *(
        f"rlhf_megatron.{name}"
        for name in (
            "ranks.models.megatron_model_builder",
            "ranks.checkpoint.sharded_checkpoint",
            "controller.observe.report.report_writer",
        )
    ),
    *(
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.llama.modeling_llama",
        "matplotlib.pyplot",
    ),
    *(
        "megatron.core.optimizer",
        "megatron.core.dist_checkpointing",
        "megatron.core.models.gpt.gpt_model",
    ),
    *("torch.utils.tensorboard", "numpy", "pytest", AGENT, ENGINE, TOY),
)
HANDLED = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
)
WATCHED = ("/bin/sh", "-c")

_libc = ctypes.CDLL(None, use_errno=True)
_execve = os.execve
_execute_child: Callable[..., None] = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_arguments = inspect.signature(_execute_child)
_template: _Template | None = None
_is_cold = False


def install() -> None:
    """From now on this process forks what it can.
    Its template is started when it is first needed.
    """
    global _template
    if sys.platform == "linux" and "RLHF_MEGATRON_COLD" not in os.environ:
        os.environ["RLHF_MEGATRON_FORKS"] = "0"  # launchers do not fork by themselves
        _template = _Template(None)
        subprocess.Popen._execute_child = _execute_warm_child  # type: ignore[attr-defined]


def renew() -> None:
    """In a fork of a warm process, which has done nothing else yet: it forks what it can, too."""
    global _template
    if _template is not None:
        _template = _Template(_copy())


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """A process that this one starts in the meantime begins with an interpreter of its own, and so
    do all of its.
    """
    global _is_cold
    before = _is_cold
    _is_cold = True
    try:
        yield
    finally:
        _is_cold = before


def _execute_warm_child(process: Any, *given: Any) -> None:
    """`subprocess.Popen._execute_child`, which forks a known program."""
    call = _arguments.bind(process, *given).arguments
    words = (
        []
        if isinstance(call["args"], str | bytes | os.PathLike)
        else [os.fspath(word) for word in call["args"]]
    )
    environment = dict(os.environ if call["env"] is None else call["env"])
    is_strange = (
        call["shell"]
        or call["preexec_fn"]
        or call["executable"]
        or call.get("process_group", -1) != -1
    )
    template = None if is_strange else _template_for(words, environment)
    if template is None:
        return _execute_child(process, *given)
    ends = [
        call[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    ]
    standard = [
        default if fd == -1 else fd for fd, default in ((ends[0], 0), (ends[3], 1), (ends[5], 2))
    ]
    passed = list(call["pass_fds"])
    request = {
        "words": words,
        "environment": environment,
        "directory": os.getcwd() if call["cwd"] is None else os.fspath(call["cwd"]),
        "is_leader": bool(call["start_new_session"]),
        "ignored": [number for number in HANDLED if signal.getsignal(number) == signal.SIG_IGN],
        "descriptors": [0, 1, 2, *passed],
    }
    try:
        process.pid = template.start(request, [*standard, *passed])
        process._child_created = True
    finally:
        process._close_pipe_fds(*ends)
    return None


def _template_for(words: Sequence[str], environment: Mapping[str, str]) -> _Template | None:
    """Where such a process can be forked; None: nowhere."""
    if _is_cold or _template is None or _template.owner != os.getpid() or program_of(words) is None:
        return None
    known = {str(ROOT), str(SUPPORT), *_paths(os.environ)}
    has_known_modules = all(path in known or _customizes_only(path) for path in _paths(environment))
    is_small = max(_size(words), _size(environment)) < ROOM
    return (
        _template
        if is_small and has_known_modules and environment.get("OMP_NUM_THREADS") == "1"
        else None
    )


def _paths(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _customizes_only(path: str) -> bool:
    return Path(path).is_dir() and {entry.name for entry in Path(path).iterdir()} <= {
        "sitecustomize.py",
        "__pycache__",
    }


def _size(strings: Sequence[str] | Mapping[str, str]) -> int:
    texts = (
        [f"{key}={value}" for key, value in strings.items()]
        if isinstance(strings, Mapping)
        else strings
    )
    return sum(len(os.fsencode(text)) + 1 for text in texts)


def program_of(words: Sequence[str]) -> list[str] | None:
    """["-m", module, ...] or [script, ...] of a command that is known; None of another."""
    words = _without_shell(words)
    if not words or words[0] != sys.executable:
        return None
    words = words[2:] if words[1:2] == ["-u"] else words[1:]
    # Workers of Ray are told the place of their driver, whose libraries start threads: it begins
    # with an interpreter.
    is_of_ray = words[1:3] == [TOY, "ray"] or 'trainer.runtime="ray"' in words
    is_module = words[:1] == ["-m"] and words[1] in MODULES and not is_of_ray
    is_script = bool(words) and Path(words[0]) in [SUPPORT / name for name in SCRIPTS]
    return words if is_module or is_script else None


def _without_shell(words: Sequence[str]) -> list[str]:
    """A command without what rollout/fleet/server_process.py puts before it."""
    is_watched = tuple(words[:2]) == WATCHED and len(words) > 4 and 'exec "$@"' in words[2]
    return list(words[4:] if is_watched else words)


class _Template:
    """The process that forks for this one. `connection`: to one that runs."""

    def __init__(self, connection: socket.socket | None) -> None:
        self.connection = connection
        self.owner = os.getpid()
        self._lock = threading.Lock()

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of a child of this process."""
        with self._lock:
            if self.connection is None:
                self.connection = _first_template()
            # a grandchild of the template is a child of ours at once
            _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self.connection, [json.dumps(request).encode()], descriptors)
                answer = self.connection.recv(64)
            finally:
                _libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the template of warm processes has ended"
        return int(answer)


def _first_template() -> socket.socket:
    """Beginning with an interpreter, and with room for other command lines and
    environments than its own.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * ROOM)
    paths = [str(ROOT), str(SUPPORT), *_paths(os.environ)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "MPLBACKEND": "Agg",
    }
    environment |= {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    with theirs:
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), str(os.getpid()), "-" * ROOM],
            env={**environment, "WARM_ROOM": "-" * ROOM},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )
    return ours


def _serve(connection: socket.socket, starter: int) -> NoReturn:
    """Fork what is asked for, until the process that asks has ended."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != starter:
        os._exit(0)
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 4 * ROOM, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() == 0:
                while os.getppid() == between:
                    time.sleep(0.0002)
                run_and_exit(partial(_become, json.loads(message), descriptors, connection))
            os._exit(0)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(
    request: dict[str, Any], received: Sequence[int], connection: socket.socket
) -> int | str | None:
    """In the new process: everything that exec would do, then the program. Returns what
    it exits with.
    """
    global _template
    program = program_of(request["words"])
    assert program is not None
    if request["is_leader"]:
        os.setsid()
    os.chdir(request["directory"])
    held = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in received]
    answer = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD, HIGH)
    os.closerange(0, HIGH)
    for descriptor, target in zip(held, request["descriptors"], strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    for number in HANDLED:
        is_ignored = number in request["ignored"] or (
            request["words"][0] == "/bin/sh" and number == signal.SIGUSR1
        )
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if is_ignored else default)
    _rename(_without_shell(request["words"]), request["environment"])
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    if request["words"][0] == "/bin/sh":
        _await_word()
    _template = None
    if (
        program[:2] not in (["-m", ENGINE],)
        and WORKER not in program[0]
        and os.environ.get("RANK", "0") == "0"
    ):
        _template = _Template(_copy())
        subprocess.Popen._execute_child = _execute_warm_child  # type: ignore[attr-defined]
        os.execve = _become_another  # type: ignore[assignment]
    return _execute(program)


def _await_word() -> None:
    """As a shell that waits for its `ChildReaper` (rollout/fleet/server_process.py): a line, then
    nothing more to read.
    """
    while (byte := os.read(0, 1)) != b"\n":
        if not byte:
            os._exit(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _copy() -> socket.socket:
    """A template for this process, forked while it has done nothing yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * ROOM)
    me = os.getpid()
    if os.fork() == 0:
        ours.close()
        held = fcntl.fcntl(theirs.detach(), fcntl.F_DUPFD, HIGH)
        os.closerange(0, HIGH)
        for _ in range(3):
            os.open(os.devnull, os.O_RDWR)
        run_and_exit(lambda: _serve(socket.socket(fileno=held), me))
    theirs.close()
    held = fcntl.fcntl(ours.detach(), fcntl.F_DUPFD_CLOEXEC, HIGH)
    return socket.socket(fileno=held)


def _become_another(path: Any, words: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """`os.execve` in a forked program: the same process goes on with another program."""
    program = program_of(words)
    template = _template_for(words, environment)
    if path != sys.executable or program is None or template is None or template.connection is None:
        _execve(path, words, environment)
    assert program is not None and template is not None and template.connection is not None
    kept = template.connection.fileno()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) != kept and fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))
    for number in HANDLED:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.default_int_handler):
            signal.signal(number, signal.SIG_DFL)
    logging.getLogger().handlers.clear()
    _rename(words, environment)
    run_and_exit(lambda: _execute(program))


def _rename(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """Command line and environment, for this process and for those who look into /proc."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it was looked up under the template's TMPDIR
    sys.orig_argv[:] = words
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arg_start, _, env_start, _ = map(int, numbers[45:49])
    variables = [f"{key}={value}" for key, value in environment.items()]
    for start, texts, end in ((arg_start, words, MM_ARG_END), (env_start, variables, MM_ENV_END)):
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        ctypes.memset(start, 0, ROOM)
        ctypes.memmove(start, data, len(data))
        # with the right to; else zeros follow
        _libc.prctl(PR_SET_MM, end, ctypes.c_ulong(start + len(data)), 0, 0)


def _execute(program: Sequence[str]) -> int | str | None:
    """Run a module or a script as `__main__`."""
    is_unbuffered = "PYTHONUNBUFFERED" in os.environ or "-u" in sys.orig_argv[1:2]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=is_unbuffered, line_buffering=os.isatty(1))
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True, write_through=is_unbuffered)
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    sys.__stderr__ = sys.stderr  # type: ignore[misc]
    is_module = program[0] == "-m"
    if is_module:
        is_package = importlib.util.find_spec(program[1]).submodule_search_locations is not None  # type: ignore[union-attr]
        spec = importlib.util.find_spec(program[1] + (".__main__" if is_package else ""))
    else:
        spec = importlib.util.spec_from_file_location("__main__", program[0])
    assert spec is not None and spec.loader is not None
    sys.argv[:] = [str(spec.origin), *program[2 if is_module else 1 :]]
    first = os.getcwd() if is_module else str(Path(program[0]).parent)
    sys.path[:] = list(dict.fromkeys([first, *_paths(os.environ), *_standard_path]))
    importlib.invalidate_caches()
    for path in _paths(os.environ):
        if (customize := Path(path, "sitecustomize.py")).is_file():
            exec(compile(customize.read_text(), customize, "exec"), {"__name__": "sitecustomize"})
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=spec.origin, __spec__=spec if is_module else None, __package__=spec.parent
    )
    module.__dict__.update(__builtins__=__builtins__, __loader__=spec.loader)
    sys.modules["__main__"] = module
    code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
    exec(code, module.__dict__)
    return None


_standard_path = list(sys.path)


def main(descriptor: int, starter: int) -> None:
    """A first template: imports everything, then serves."""
    known = {str(ROOT), str(SUPPORT), *_paths(os.environ)}
    _standard_path[:] = [path for path in sys.path if path not in known]
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # it costs time only; a test says which
            importlib.import_module(name)
    sys.modules["warm"] = sys.modules["__main__"]
    assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1, (
        "forks need a single thread"
    )
    gc.collect()
    gc.freeze()
    _serve(socket.socket(fileno=descriptor), starter)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
