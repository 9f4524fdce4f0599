"""Stock sglang-router as a child: its arguments, ports and key. Awaited until it answers, stopped
on every exit.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineKilledError
from rlhf_megatron.rollout.fleet.server_process import (
    ServerProcess,
    archive_log,
    await_server_ready,
    write_private_file,
    write_token_file,
)
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.rendezvous import PortAllocator
from rlhf_megatron.rollout.sglang.sglang_environment import (
    find_interpreter,
    make_search_paths_absolute,
    run_in_interpreter,
)
from rlhf_megatron.rollout.sglang.sglang_launch import PORT_ATTEMPTS, make_python_path

logger = logging.getLogger(__name__)

# its verbs and options are not promised from one minor version to the next
OLDEST_ROUTER = "0.3.2"
FIRST_UNTESTED_ROUTER = "0.4"
WORKER_STARTUP_S = 10  # an engine that is handed to it answers already
_POLL_TIMEOUT_S = 5.0
_VERSION_CODE = "import importlib.metadata as m; print(m.version('sglang-router'))"
_PORT_LOST_PATTERN = re.compile(r"Address already in use", re.IGNORECASE)
_OTHERWISE = "or remove rollout.router: the run spreads requests itself."


@dataclass
class RouterProcess:
    """The process of one sglang-router, which may be started several times. It listens on 127.0.0.1
    only.
    """

    python: str
    server_env: dict[str, str]
    folder: Path  # log, key and arguments
    startup_timeout_s: float
    port_allocator: PortAllocator = field(default_factory=PortAllocator)
    process: ServerProcess | None = None
    address: EngineAddress | None = None

    def start_router(self) -> EngineAddress:
        """Stop the router where it runs, start a new process with another port and key, wait until
        it answers, and return its address. The old log is kept under a number.

        Where another process takes the port meanwhile, or the router is killed, try again with
        another port. Raise EngineError with the end of the log; the router does not run then.
        """
        self.stop_router()
        log = self.folder / "router.log"
        archive_log(log)
        deadline = time.monotonic() + self.startup_timeout_s
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self.process = self._launch_process(log)
            try:
                await_server_ready(self.process, self._is_answering, deadline)
                self.process.hide_token_in_log()
                return self._current_address
            except EngineError as error:
                is_killed = isinstance(error, EngineKilledError)
                is_port_lost = self.process.exit_code is not None and _PORT_LOST_PATTERN.search(
                    self.process.read_log()
                )
                self.stop_router()
                if attempt == PORT_ATTEMPTS or not (is_port_lost or is_killed):
                    raise
                cause = "was killed while it started" if is_killed else "lost its port to another"
            except BaseException:
                self.stop_router()
                raise
            logger.warning("the router %s; it is started again with another port", cause)
            archive_log(log)
        raise AssertionError("the last attempt returns or raises")

    def describe_exit(self) -> str | None:
        """Return how the router ended, with the end of its log; None while it runs or before its
        start.
        """
        if self.process is None or self.process.exit_code is None:
            return None
        return (
            f"it exited with code {self.process.exit_code}; the end of"
            f" {self.process.log}:\n{self.process.read_log_tail(3)}"
        )

    def kill_router(self) -> None:
        """Kill the router at once, where it runs."""
        if self.process is not None:
            self.process.kill()

    def stop_router(self) -> None:
        """Stop the router where it runs, and wait for its end. Safe to call twice."""
        if self.process is not None:
            self.process.stop()

    @property
    def _current_address(self) -> EngineAddress:
        """Return the address of the current process."""
        assert self.address is not None, "start comes before"
        return self.address

    def _launch_process(self, log: Path) -> ServerProcess:
        """Start a router process with new ports, a new token and a new API key, and set `address`;
        do not wait.
        """
        token = write_token_file(self.folder / "router.token")
        api_key = secrets.token_hex(32)
        port = self.port_allocator.reserve_ports()
        metrics_port = self.port_allocator.reserve_ports()
        self.address = EngineAddress(
            "router", "sglang", f"http://127.0.0.1:{port}", token, api_key=api_key
        )
        path = write_private_file(
            self.folder / "router.args",
            "\n".join(make_router_arguments(port, metrics_port, token, api_key)),
        )
        env = {
            # or it looks on the network for a tokenizer that nobody needs
            "HF_ENDPOINT": "http://127.0.0.1:9",
            **self.server_env,
            "PYTHONPATH": make_python_path(self.server_env),
        }
        command = [self.python, "-m", "rlhf_megatron.rollout.sglang.server.router_main", str(path)]
        return ServerProcess("router", command, log, env, token)

    def _is_answering(self) -> bool:
        """Return whether this run's router answers on its port."""
        try:  # with the key of this run: not another server on the port
            HttpClient(self._current_address).get("/workers", _POLL_TIMEOUT_S)
        except EngineError:
            return False
        return True


def make_router_arguments(port: int, metrics_port: int, token: str, api_key: str) -> list[str]:
    """Return the arguments of sglang-router. The router only picks the worker of a group: the
    supervisor decides which engines serve, and the fleet repeats and counts failed requests.
    `token` is the key to change its workers; `api_key` is the key to generate.
    """
    return [
        *("--host", "127.0.0.1", "--port", str(port)),
        *(
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(metrics_port),
        ),  # by default on all addresses
        *("--api-key", api_key, "--control-plane-api-keys", f"run:run:admin:{token}"),
        # By key, not by prefix: groups that begin with the same template would all go to one
        # worker, and be torn apart where that gets too much.
        *("--policy", "manual", "--assignment-mode", "min_load", "--max-idle-secs", "600"),
        *("--disable-retries", "--disable-circuit-breaker", "--disable-health-check"),
        *(
            "--worker-startup-timeout-secs",
            str(WORKER_STARTUP_S),
            "--worker-startup-check-interval",
            "1",
        ),
        *(
            "--request-timeout-secs",
            "86400",
            "--shutdown-grace-period-secs",
            "1",
        ),  # the client has the deadline
        *("--log-level", "warn"),  # or two lines a sample
    ]


def prepare_router(
    python: str | None, env: Mapping[str, str], run_dir: Path | str, startup_timeout_s: float
) -> RouterProcess:
    """Check sglang-router and return its process without starting it. Its log, key and arguments
    lie in `run_dir`/engines. `python` None: this interpreter.

    Raise ValueError, with the fix, where that environment has no sglang-router, or another version.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    check_router(python, env)
    return RouterProcess(
        find_interpreter(python), make_search_paths_absolute(env), folder, startup_timeout_s
    )


def check_router(python: str | None, env: Mapping[str, str]) -> None:
    """Raise ValueError, with the fix, unless sglang-router in a known version is installed for this
    interpreter (None: the running one).
    """
    python = find_interpreter(python)
    absent = (
        f"rollout.router (sglang) needs sglang-router, which is not installed for {python}"
        " (rollout.sglang.python); install it there (pip install --no-deps"
        f" 'sglang-router>={OLDEST_ROUTER},<{FIRST_UNTESTED_ROUTER}'), {_OTHERWISE}"
    )
    version = run_in_interpreter(python, _VERSION_CODE, make_search_paths_absolute(env), absent)
    if not Version(OLDEST_ROUTER) <= Version(version) < Version(FIRST_UNTESTED_ROUTER):
        raise ValueError(
            f"sglang-router in {python} is {version}, which must be {OLDEST_ROUTER} or newer and"
            f" below {FIRST_UNTESTED_ROUTER}; install such a one there, {_OTHERWISE}"
        )
