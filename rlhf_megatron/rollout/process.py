"""Server processes: a log file each, awaited until healthy, stopped with their children on every exit path."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rlhf_megatron.rollout.engine import EngineAddress, EngineError, EngineTimeoutError
from rlhf_megatron.rollout.local_client import LocalEngine

Progress = Callable[[str, float, str], None]
"""Called about once a second while a server starts: its name, seconds waited, the last line of its log."""

_TERM_GRACE_S = 5.0
_POLL_S = 0.05
_TAIL_LINES = 20
_running: weakref.WeakSet[ServerProcess] = weakref.WeakSet()


class ServerProcess:
    """A child in a process group of its own; stdout and stderr go to `log`."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **env},
                start_new_session=True,
            )
        _running.add(self)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def tail(self, num_lines: int = _TAIL_LINES) -> str:
        """The last lines of its log."""
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])
        except OSError:
            return ""

    def request_stop(self) -> None:
        """SIGTERM to the group; does not wait."""
        if self not in _running:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGTERM)
            os.killpg(self.pid, signal.SIGCONT)  # a stopped process would not see it

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL to what is left after a grace period. Safe to call twice."""
        if self not in _running:
            return  # its number may belong to somebody else by now
        self.request_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_GRACE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        _running.discard(self)


def stop_together(processes: Iterable[ServerProcess]) -> None:
    """Stop all; they use the grace period at the same time."""
    processes = list(processes)
    for process in processes:
        process.request_stop()
    for process in processes:
        process.stop()


@atexit.register
def _stop_all() -> None:
    stop_together(_running)


class EngineServers:
    """Servers that were started together. A context manager: they stop when it ends."""

    def __init__(self, processes: Sequence[ServerProcess], addresses: Sequence[EngineAddress]) -> None:
        self.processes = tuple(processes)
        self.addresses = tuple(addresses)

    def __enter__(self) -> EngineServers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Safe to call twice."""
        stop_together(self.processes)


def await_ready(
    process: ServerProcess, is_ready: Callable[[], bool], deadline: float, progress: Progress | None = None
) -> None:
    """Poll `is_ready` until it is true. `deadline`: of time.monotonic().

    Raises EngineError with the end of the server's log when it exits, EngineTimeoutError at the deadline.
    """
    start = reported = time.monotonic()
    while not is_ready():
        now = time.monotonic()
        if process.exit_code is not None:
            raise EngineError(
                f"{process.name} exited with code {process.exit_code} before it was ready; the end of {process.log}:\n"
                f"{process.tail()}"
            )
        if now > deadline:
            raise EngineTimeoutError(
                f"{process.name} was not ready after {now - start:.0f} s (rollout.startup_timeout_s); the end of"
                f" {process.log}:\n{process.tail()}"
            )
        if progress is not None and now - reported >= 1.0:
            reported = now
            progress(process.name, now - start, process.tail(1))
        time.sleep(_POLL_S)


def write_token(path: Path) -> str:
    """A fresh random token in a file that only this user can read."""
    token = secrets.token_urlsafe(32)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(token)
    return token


def start_local_engines(
    model_path: Path | str,
    num_engines: int,
    run_dir: Path | str,
    *,
    transfer_dir: Path | str | None,
    dtype: str = "float32",
    device: str = "cpu",
    load_weights: bool = True,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 131072,
    startup_timeout_s: float = 600.0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    progress: Progress | None = None,
) -> EngineServers:
    """Start `num_engines` bundled servers and wait until all are healthy.

    Logs, tokens and ready files lie in `run_dir`/engines. `env`: for all servers, or one mapping a server (e.g. with
    CUDA_VISIBLE_DEVICES). Raises EngineError with the end of a server's log; no server is left running then.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + startup_timeout_s
    envs = [env] * num_engines if isinstance(env, Mapping) else list(env) or [{}] * num_engines
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if device == "cpu" else {}
    servers: list[tuple[ServerProcess, Path, str]] = []
    try:
        for index, extra in zip(range(num_engines), envs, strict=True):
            name = f"engine{index}"
            token_file, ready = folder / f"{name}.token", folder / f"{name}.ready.json"
            ready.unlink(missing_ok=True)
            token = write_token(token_file)
            command = [sys.executable, "-m", "rlhf_megatron.rollout.local.server", "--model", str(model_path)]
            command += ["--token-file", str(token_file), "--ready-file", str(ready), "--dtype", dtype]
            command += ["--device", device, "--load-weights", str(load_weights).lower()]
            command += ["--max-num-seqs", str(max_num_seqs), "--parent-pid", str(os.getpid())]
            command += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
            command += ["--transfer-dir", str(transfer_dir)] if transfer_dir is not None else []
            process = ServerProcess(name, command, folder / f"{name}.log", {**threads, **extra})
            servers.append((process, ready, token))
        addresses = [_await_local(*server, deadline, progress) for server in servers]
    except BaseException:
        stop_together(process for process, _, _ in servers)
        raise
    return EngineServers([process for process, _, _ in servers], addresses)


def _await_local(
    process: ServerProcess, ready: Path, token: str, deadline: float, progress: Progress | None
) -> EngineAddress:
    await_ready(process, ready.is_file, deadline, progress)
    port = json.loads(ready.read_text())["port"]
    address = EngineAddress(process.name, "local", f"http://127.0.0.1:{port}", token)
    engine = LocalEngine(address)
    engine.health(max(1.0, deadline - time.monotonic()))
    engine.close()
    return address
