"""Stock sglang-router as a child: its arguments, ports and key. Awaited until it answers, stopped on every exit."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.process import ServerProcess, await_ready, keep_log, write_private, write_token
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.sglang.environment import absolute_env, ask, find_python
from rlhf_megatron.rollout.sglang.meeting import Ports
from rlhf_megatron.rollout.sglang.process import PORT_ATTEMPTS, search_path

logger = logging.getLogger(__name__)

OLDEST, TOO_NEW = "0.3.2", "0.4"  # its verbs and options are not promised from one minor version to the next
WORKER_STARTUP_S = 10  # an engine that is handed to it answers already
_POLL_TIMEOUT_S = 5.0
_VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang-router'))"
_PORT_LOST = re.compile(r"Address already in use", re.IGNORECASE)
_OTHERWISE = "or remove rollout.router: the run spreads requests itself."


@dataclass
class RouterProcess:
    """One router, which may be started several times. Listens on 127.0.0.1 only."""

    python: str
    env: dict[str, str]
    folder: Path  # log, key and arguments
    startup_timeout_s: float
    ports: Ports = field(default_factory=Ports)
    process: ServerProcess | None = None
    address: EngineAddress | None = None

    def start(self) -> EngineAddress:
        """A new process with another port and key; the log so far is kept under a number. Blocks until it answers.

        A port that another process took meanwhile is tried again with another. Raises EngineError with the end of its
        log; it does not run then.
        """
        self.stop()
        log = self.folder / "router.log"
        keep_log(log)
        deadline = time.monotonic() + self.startup_timeout_s
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.process = self._launch(log)
            try:
                await_ready(self.process, self._is_up, deadline)
                self.process.hide_token()
                return self._address
            except EngineError:
                is_lost = self.process.exit_code is not None and _PORT_LOST.search(self.process.text())
                self.stop()
                if attempt == PORT_ATTEMPTS or not is_lost:
                    raise
            except BaseException:
                self.stop()
                raise
            logger.warning("the router lost its port to another process; it is started again with another")
            keep_log(log)
        raise AssertionError("the last attempt returns or raises")

    def ending(self) -> str | None:
        """How it ended; None while it runs."""
        if self.process is None or self.process.exit_code is None:
            return None
        return f"it exited with code {self.process.exit_code}; the end of {self.process.log}:\n{self.process.tail(3)}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """Safe to call twice."""
        if self.process is not None:
            self.process.stop()

    @property
    def _address(self) -> EngineAddress:
        assert self.address is not None, "start comes before"
        return self.address

    def _launch(self, log: Path) -> ServerProcess:
        token, api_key = write_token(self.folder / "router.token"), secrets.token_hex(32)
        port, metrics_port = self.ports.take(), self.ports.take()
        self.address = EngineAddress("router", "sglang", f"http://127.0.0.1:{port}", token, api_key=api_key)
        path = write_private(self.folder / "router.args", "\n".join(arguments(port, metrics_port, token, api_key)))
        env = {
            "HF_ENDPOINT": "http://127.0.0.1:9",  # or it looks on the network for a tokenizer that nobody needs
            **self.env,
            "PYTHONPATH": search_path(self.env),
        }
        command = [self.python, "-m", "rlhf_megatron.rollout.sglang.server.router", str(path)]
        return ServerProcess("router", command, log, env, token)

    def _is_up(self) -> bool:
        try:  # with the key of this run: not another server on the port
            HttpClient(self._address).get("/workers", _POLL_TIMEOUT_S)
        except EngineError:
            return False
        return True


def arguments(port: int, metrics_port: int, token: str, api_key: str) -> list[str]:
    """Arguments of sglang-router. It only picks the worker of a group: the supervisor says who serves, and the
    fleet asks again for what failed, and counts it. `token`: to change its workers; `api_key`: to generate, which it
    passes on to them."""
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),  # by default on all addresses
        *("--api-key", api_key, "--control-plane-api-keys", f"run:run:admin:{token}"),
        # By key, not by prefix: groups that begin with the same template would all go to one worker, and be torn apart
        # where that gets too much.
        *("--policy", "manual", "--assignment-mode", "min_load", "--max-idle-secs", "600"),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        *("--worker-startup-timeout-secs", str(WORKER_STARTUP_S), "--worker-startup-check-interval", "1"),
        *("--request-timeout-secs", "86400", "--shutdown-grace-period-secs", "1"),  # the client has the deadline
        *("--log-level", "warn"),  # or two lines a sample
    ]


def prepare_router(
    python: str | None, env: Mapping[str, str], run_dir: Path | str, startup_timeout_s: float
) -> RouterProcess:
    """Prepare a router without starting it. Its log, key and arguments lie in `run_dir`/engines. `python` None: this
    interpreter.

    Raises ValueError with the fix: no sglang-router in that environment, or another version of it.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    check_router(python, env)
    return RouterProcess(find_python(python), absolute_env(env), folder, startup_timeout_s)


def check_router(python: str | None, env: Mapping[str, str]) -> None:
    """Is it in that environment, and of a version that is known. Raises ValueError with the fix."""
    python = find_python(python)
    absent = (
        f"rollout.router (sglang) needs sglang-router, which is not installed for {python} (rollout.sglang.python);"
        f" install it there (pip install --no-deps 'sglang-router>={OLDEST},<{TOO_NEW}'), {_OTHERWISE}"
    )
    version = ask(python, _VERSION_CODE, absolute_env(env), absent)
    if not Version(OLDEST) <= Version(version) < Version(TOO_NEW):
        raise ValueError(
            f"sglang-router in {python} is {version}, which must be {OLDEST} or newer and below {TOO_NEW}; install such"
            f" a one there, {_OTHERWISE}"
        )
