"""Stock SGLang servers: started with a settings file each, awaited until healthy, stopped with all
children. A server that does not start is reported with its own error and what to do.
`make_shell_command` starts one by hand.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.config.rules.engine_machines import format_engine_part_name
from rlhf_megatron.install_hints import format_sglang_cpu_hint
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError, EngineKilledError
from rlhf_megatron.rollout.fleet.server_process import (
    LOOPBACK,
    EngineServers,
    LaunchPlacement,
    ServerLaunch,
    ServerProcess,
    ServerSeat,
    StartProgress,
    await_server_ready,
    launch_here,
    translate_error_of_killed_server,
    write_private_file,
    write_token_file,
)
from rlhf_megatron.rollout.fleet.spanning_server import SpanningServerLaunch
from rlhf_megatron.rollout.http_client import HttpClient
from rlhf_megatron.rollout.sglang.rendezvous import (
    INIT_METHOD,
    PortAllocator,
    RendezvousFiles,
    make_loopback_environment,
)
from rlhf_megatron.rollout.sglang.server.loader import LOAD_FORMAT, TRANSFER_DIR_VARIABLE
from rlhf_megatron.rollout.sglang.sglang_arguments import DETERMINISTIC
from rlhf_megatron.rollout.sglang.sglang_client import SGLangEngine
from rlhf_megatron.rollout.sglang.sglang_environment import (
    DP_ATTENTION,
    MachineGpus,
    SGLangEnvironment,
    check_sglang_environment,
)
from rlhf_megatron.rollout.socket_limits import find_interface_towards
from rlhf_megatron.weights.quantised_weights import FP8_BLOCK

_ERROR_LINE = re.compile(
    r"^(\[[^]]*\] *)*([\w.]+: error: |([\w.]+\.)?\w*(Error|Exception): ).*\S", re.MULTILINE
)
_ERRORS_SHOWN = 3
_ADVICE_BY_ERROR = (
    (
        (
            r"leave no GPU memory for the KV cache|Not enough memory\. Please try to"
            r" increase --mem-fraction-static"
        ),
        (
            "weights and key-value cache do not fit into rollout.sglang.args.mem_fraction_static of"
            " a device: raise it, use a larger tp_size, or give the servers devices of their own."
        ),
    ),
    (
        r"OutOfMemoryError|out of memory\b|can't allocate memory|exit code: -9\b",
        (
            "a device, or the machine, is full: see what else uses it (a trainer on the same"
            " devices keeps what it holds without rollout.colocated), use a larger tp_size, or"
            " lower rollout.sglang.args.mem_fraction_static."
        ),
    ),
    (
        r"Model architectures \[.*\] are not supported",
        (
            "this sglang does not serve the model of model.path: use another version, or"
            " rollout.engine: local."
        ),
    ),
    (
        r"No module named '(triton|sgl_kernel|flashinfer)",
        "SGLang's CUDA packages are not there: on a machine without a GPU take rollout.sglang from"
        f" configs/quickstart_sglang.yaml ({format_sglang_cpu_hint()}).",
    ),
)

POLL_TIMEOUT_S = 5.0
# another process can take a port between the look for it and the server's own bind
PORT_ATTEMPTS = 3
PACKAGE_ROOT = Path(__file__).resolve().parents[3]  # the loader runs in the server from here
# a process of the server that something else ended
_CHILD_KILLED = re.compile(r"exit ?code: -9\b", re.IGNORECASE)
# it hangs then, and does not end
_BIND_FAILED = re.compile(r"error while attempting to bind on address", re.IGNORECASE)
_PORT_LOST = re.compile(
    r"address already in use|EADDRINUSE|port \S+ is already in use|port\w* at \d+ is not available",
    re.IGNORECASE,
)
# from the meeting's on: ranks under DP attention listen to some up to the 13th behind it
_NUM_RENDEZVOUS_PORTS = 14

MODEL_OVERRIDE = "json-model-override-args"

KEY_FILE = "engine.key"
SETTINGS_FILE = "engine-key.yaml"


def extract_server_errors(log_text: str) -> str:
    """Return the last distinct error lines of a server's log, which later output can have pushed
    out of the tail, with advice where the cause is known; "" where there is none.
    """
    found = list(dict.fromkeys(match.group(0).strip() for match in _ERROR_LINE.finditer(log_text)))
    lines = found[-_ERRORS_SHOWN:]
    if not lines:
        return ""
    advice = next(
        (fix for cause, fix in _ADVICE_BY_ERROR if re.search(cause, "\n".join(lines))), None
    )
    return "\n".join(["\nIts errors:", *lines, *([f"What to do: {advice}"] if advice else [])])


def make_start_error(error: EngineError, log_text: str) -> EngineError:
    """Return the error of a start with the errors that the server logged. It is an
    EngineKilledError where a signal ended the server or one of its processes: a server that fails
    by itself kills itself too, but tells why before.
    """
    server_errors = extract_server_errors(log_text)
    is_killed = isinstance(error, EngineKilledError) and not server_errors
    if is_killed or _CHILD_KILLED.search(log_text):
        return EngineKilledError(f"{error}{server_errors}")
    return EngineError(f"{error}{server_errors}")


logger = logging.getLogger(__name__)


def start_sglang_engines(
    model_path: Path | str,
    num_engines: int,
    run_dir: Path | str,
    *,
    python: str | None,
    transfer_dir: Path,
    dtype: str,
    quantization: str | None = None,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    startup_timeout_s: float,
    max_restarts: int = 0,
    is_deterministic: bool = False,
    machine_gpus: MachineGpus | None = None,
    is_one_machine: bool = True,
    shared_key: str | None = None,
    progress: StartProgress | None = None,
    placement: LaunchPlacement = launch_here,
) -> EngineServers:
    """Start servers with `python -m sglang.launch_server` and wait until all answer.

    `arguments` are SGLang server arguments without the leading dashes; they win over the arguments
    set here. `python` None: this interpreter. `machine_gpus`: the GPUs that servers can have.
    `max_restarts`: how often servers that are killed while they start are started again, over all
    servers. `is_one_machine`: all ranks that send weights are on this machine. `shared_key`: one
    key for all servers; None: a new one for each. Keys go through the settings file, which only
    this user can read. Raise ValueError for what a user can fix before a start, EngineError with
    the server's own error and the end of its log.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    installed = check_sglang_environment(
        python,
        arguments,
        env,
        is_deterministic=is_deterministic,
        num_engines=num_engines,
        machine_gpus=machine_gpus,
    )
    _log_environment_warnings(installed)
    settings = make_server_settings(installed, model_path, dtype, quantization)
    ports = PortAllocator()
    meeting_place = RendezvousFiles()
    launches: list[ServerLaunch] = []
    for index, devices in enumerate(installed.device_arguments):
        parts = [
            placement(
                SGLangServerLaunch(
                    name=format_engine_part_name(index, part),
                    folder=folder,
                    environment=installed,
                    settings={**settings, **devices},
                    server_env={**installed.server_env, TRANSFER_DIR_VARIABLE: str(transfer_dir)},
                    interface_env=make_loopback_environment(env, os.environ, is_one_machine),
                    transfer_dir=transfer_dir,
                    port_allocator=ports,
                    rendezvous_files=meeting_place,
                    shared_key=shared_key,
                    part_index=part,
                    quantization=quantization,
                )
            )
            for part in range(int(str(installed.arguments.value_by_option.get("nnodes", 1))))
        ]
        launches.append(parts[0] if len(parts) == 1 else SpanningServerLaunch(parts))
    return EngineServers(launches, startup_timeout_s, progress, max_restarts)


def _log_environment_warnings(environment: SGLangEnvironment) -> None:
    """Log the warning about the version, and one where sampling is not deterministic."""
    if environment.warning is not None:
        logger.warning("%s", environment.warning)
    if not environment.arguments.value_by_option.get(DETERMINISTIC, False):
        logger.warning(
            "sglang ignores the seed of a sample without"
            " rollout.sglang.args.enable_deterministic_inference: samples of a group differ, but a"
            " run does not repeat."
        )


def make_server_settings(
    environment: SGLangEnvironment,
    model_path: Path | str,
    dtype: str,
    quantization: str | None = None,
) -> dict[str, object]:
    """Return the contents of each server's settings file: the run's settings, overridden by the
    user's. Raise ValueError where both change the model's configuration.
    """
    own = {
        "model-path": str(Path(model_path).absolute()),
        "host": "127.0.0.1",
        "dtype": dtype,
        "load-format": "dummy",
        "skip-tokenizer-init": True,
        "custom-weight-loader": [LOAD_FORMAT],
    }
    of_user = environment.arguments.value_by_option
    if quantization is not None:
        if MODEL_OVERRIDE in of_user:
            raise ValueError(
                f"rollout.sglang.args.{MODEL_OVERRIDE} ({of_user[MODEL_OVERRIDE]!r}) cannot be set"
                f" beside rollout.quantization ({quantization}), which needs it; remove one, or"
                " change config.json of model.path."
            )
        blocks = {"weight_block_size": FP8_BLOCK, "activation_scheme": "dynamic", "fmt": "e4m3"}
        own[MODEL_OVERRIDE] = json.dumps(
            {"quantization_config": {"quant_method": quantization, **blocks}}
        )
    return {
        name: value for name, value in own.items() if name not in of_user
    } | environment.arguments.file_settings


def make_python_path(env: Mapping[str, str]) -> str:
    """Return the PYTHONPATH of a server: the user's entries, and the root of this package for the
    weight loader.
    """
    return ":".join(part for part in (env.get("PYTHONPATH", ""), str(PACKAGE_ROOT)) if part)


@dataclass
class SGLangServerLaunch:
    """The `ServerLaunch` of a server, or of the part of a server on one machine. `is_engine`: it
    generates and takes weights.
    """

    name: str
    folder: Path
    environment: SGLangEnvironment
    settings: dict[str, Any]
    server_env: dict[str, str]
    interface_env: dict[str, str]  # environment of a server that only this machine reaches
    transfer_dir: Path
    port_allocator: PortAllocator
    rendezvous_files: RendezvousFiles
    shared_key: str | None
    part_index: int = 0  # of a server that spans machines
    rendezvous_address: str = ""
    is_engine: bool = True
    quantization: str | None = None
    process: ServerProcess | None = None
    # the only one that will do, where others know its address for good
    fixed_port: int | None = None
    log_start: int = 0  # of this attempt, bytes into the log
    host: str = LOOPBACK
    address: EngineAddress = field(init=False)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def num_parts(self) -> int:
        """Return the number of machines that the server spans."""
        return int(str(self.environment.arguments.value_by_option.get("nnodes", 1)))

    def take_seat(self, seat: ServerSeat) -> None:
        """Take the machine, network interface and device environment of the seat. Raise EngineError
        where the transfer directory is not visible there.
        """
        self.server_env |= seat.env
        if seat.address == LOOPBACK:
            return
        if self.is_engine and not self.transfer_dir.is_dir():
            raise EngineError(
                f"{self.name} was given a place on {seat.address}, where the run's transfer"
                f" directory ({self.transfer_dir}) is not: receipts of weight syncs go through it;"
                " set rollout.transfer_dir to a directory that all machines see."
            )
        self.interface_env = {}
        if interface := find_interface_towards(seat.address):
            self.interface_env["GLOO_SOCKET_IFNAME"] = os.environ.get(
                "GLOO_SOCKET_IFNAME", interface
            )
        self.host = self.settings["host"] = seat.address

    def get_rendezvous_address(self) -> str:
        """Return the HOST:PORT at which the other parts find this one; "" where it has none."""
        return self.rendezvous_address

    def start(self) -> None:
        """Write the settings file, and start a new server process with a new key and port; do not
        wait.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        token = self.shared_key or write_token_file(self.folder / f"{self.name}.token")
        port = self.fixed_port or self.port_allocator.reserve_ports()
        settings = {
            **self.settings,
            "port": port,
            "api-key": token,
            "admin-api-key": token,
            **self._make_part_arguments(),
        }
        path = write_private_file(self.folder / f"{self.name}.yaml", yaml.safe_dump(settings))
        own = {**self._make_rendezvous_environment(port), **self.interface_env}
        env = {**own, **self.server_env, "PYTHONPATH": make_python_path(self.server_env)}
        self.log_start = self.log.stat().st_size if self.log.exists() else 0
        tp_size = int(str(self.environment.arguments.value_by_option.get("tp-size", 1)))
        url = f"http://{LOOPBACK if self.part_index else self.host}:{port}"
        self.address = EngineAddress(
            self.name, "sglang", url, token, tp_size, quantization=self.quantization
        )
        command = [self.environment.python, "-m", "sglang.launch_server", "--config", str(path)]
        self.process = ServerProcess(
            self.name, [*command, *self.environment.arguments.command_words], self.log, env, token
        )

    def _make_part_arguments(self) -> dict[str, object]:
        """Return the arguments of a part of a server that spans machines, whose first part listens
        for the others, and of a server with DP attention, whose ranks would otherwise listen near
        the HTTP port, where other servers of the run are. Empty for other servers.
        """
        if (
            self.num_parts == 1
            and self.environment.arguments.value_by_option.get(DP_ATTENTION) is not True
        ):
            return {}
        if self.part_index == 0:
            self.rendezvous_address = (
                f"{self.host if self.num_parts > 1 else LOOPBACK}:"
                f"{self.port_allocator.reserve_ports(_NUM_RENDEZVOUS_PORTS)}"
            )
        own = {"node-rank": self.part_index, "dist-init-addr": self.rendezvous_address}
        return own | ({"host": LOOPBACK} if self.part_index else {})

    def _make_rendezvous_environment(self, port: int) -> dict[str, str]:
        """Return the environment variables by which the ranks find one another, so that they do not
        use the address of the route to the internet.
        """
        if self.num_parts == 1:
            return self.rendezvous_files.make_environment(self.name, port)
        host, _, number = self.rendezvous_address.rpartition(":")
        return {"MASTER_ADDR": host, "MASTER_PORT": number, "SGLANG_HOST_IP": self.host}

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait until the server answers, check that it has the endpoints that the run needs, and
        return its address. Start it again with another port where another process took its port.
        Raise EngineError with its errors.
        """
        try:
            return self._wait_with_port_retries(deadline, progress)
        finally:
            assert self.process is not None
            # SGLang writes its arguments into the log as it starts, the keys among them
            self.process.hide_token_in_log()

    def _wait_with_port_retries(
        self, deadline: float, progress: StartProgress | None
    ) -> EngineAddress:
        """Wait until the server answers, starting it again after a lost port, at most PORT_ATTEMPTS
        times.
        """
        for attempt in range(1, PORT_ATTEMPTS + 1):
            assert self.process is not None, "wait comes after start"
            try:
                await_server_ready(self.process, self._is_answering, deadline, progress)
                break
            except EngineError as error:
                text = self._read_attempt_log()
                is_lost = _BIND_FAILED.search(text) or (
                    self.process.exit_code is not None and _PORT_LOST.search(text)
                )
                is_known = self.fixed_port is not None or self.num_parts > 1  # to others
                if attempt == PORT_ATTEMPTS or not is_lost or is_known:
                    raise make_start_error(error, text) from error
            logger.warning(
                "%s lost its port to another process; it is started again with another", self.name
            )
            self.process.stop()
            self.process.hide_token_in_log()
            self.start()
        if self.is_engine and self.part_index == 0:
            assert self.process is not None, "wait comes after start"
            with translate_error_of_killed_server(self.process):
                SGLangEngine(self.address, self.transfer_dir).require_endpoints()
        return self.address

    def _is_answering(self) -> bool:
        """Return whether this run's server answers. Raise EngineError where it lost its port and
        hangs.
        """
        lost = _BIND_FAILED.search(self._read_attempt_log())
        if lost is not None:
            raise EngineError(
                f"{self.name}: {lost.group(0)}: the port of {self.address.url} is already in use."
            )
        client = HttpClient(self.address)
        try:
            client.get("/health", POLL_TIMEOUT_S)
            if self.part_index == 0:  # another one answers for its health alone
                # takes the key of this run: not another server on the port
                client.get("/model_info", POLL_TIMEOUT_S)
        except EngineError:
            return False
        return True

    def _read_attempt_log(self) -> str:
        """Return the log since the last start."""
        assert self.process is not None
        return self.process.read_log(self.log_start)


def make_shell_command(
    environment: SGLangEnvironment,
    model_path: Path | str,
    dtype: str,
    quantization: str | None,
    transfer_dir: Path,
    port: int,
) -> str:
    """Return shell lines that start a server by hand: they make a key in a file of mode 0600 (all
    users of a machine can see command lines), then run the server in the foreground. A run on this
    machine attaches with that key file.
    """
    given = {**make_server_settings(environment, model_path, dtype, quantization), "port": port}
    words = [environment.python, "-m", "sglang.launch_server", "--config", SETTINGS_FILE]
    for name, value in given.items():
        words += _format_setting_words(name, value)
    variables = {
        **{name: value for name, value in environment.server_env.items() if name != "PYTHONPATH"},
        "PYTHONPATH": make_python_path(environment.server_env),
        TRANSFER_DIR_VARIABLE: str(transfer_dir),
    }
    return "\n".join(
        [
            (
                f"(umask 077; {shlex.quote(environment.python)} -c 'import secrets;"
                " print(secrets.token_hex(32))' \\"
            ),
            f" > {KEY_FILE}",
            (
                f' printf "api-key: %s\\nadmin-api-key: %s\\n" "$(cat {KEY_FILE})" "$(cat'
                f' {KEY_FILE})" > {SETTINGS_FILE})'
            ),
            f'{INIT_METHOD}="file://$(mktemp -u)" \\',
            *(f"{name}={shlex.quote(value)} \\" for name, value in variables.items()),
            shlex.join([*words, *environment.arguments.command_words]),
        ]
    )


def _format_setting_words(name: str, value: object) -> list[str]:
    """Return a setting as command-line words; none for False."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    items = value if isinstance(value, list) else [value]
    return [f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in items)]
