"""Start bundled servers: their arguments, token and ready files, and the port that the
kernel gives each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.plugins import list_loaded_plugins
from rlhf_megatron.rollout.engine_interface import EngineAddress, EngineError
from rlhf_megatron.rollout.fleet.server_process import (
    LOOPBACK,
    EngineServers,
    LaunchPlacement,
    ServerProcess,
    ServerSeat,
    StartProgress,
    await_server_ready,
    launch_here,
    translate_error_of_killed_server,
    write_token_file,
)
from rlhf_megatron.rollout.local.local_client import LocalEngine
from rlhf_megatron.rollout.sglang.sglang_environment import VISIBLE_DEVICES


def assign_local_devices(
    num_engines: int, visible_devices: Sequence[str], num_trainer_devices: int, is_shared: bool
) -> list[dict[str, str]]:
    """Return for each server the environment variable that gives it one of a machine's
    `visible_devices`. The trainer's ranks use the first `num_trainer_devices`. The servers share
    the other devices in turns; where there are none, or with `is_shared`, they share the trainer's.
    Each server also sees the trainer's devices behind its own, because it opens memory that the
    ranks share. Without devices the environments are empty.
    """
    of_ranks = list(visible_devices[:num_trainer_devices])
    free = ([] if is_shared else list(visible_devices[num_trainer_devices:])) or of_ranks
    if not free:
        return [{} for _ in range(num_engines)]
    own = [free[index % len(free)] for index in range(num_engines)]
    return [{VISIBLE_DEVICES: ",".join(dict.fromkeys([device, *of_ranks]))} for device in own]


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
    quantization: str | None = None,
    is_deterministic: bool = False,
    startup_timeout_s: float = 600.0,
    max_restarts: int = 0,
    env: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
    progress: StartProgress | None = None,
    placement: LaunchPlacement = launch_here,
) -> EngineServers:
    """Start `num_engines` bundled servers and wait until all are healthy.

    Logs, tokens and ready files lie in `run_dir`/engines. `env` is one mapping for all servers, or
    one mapping for each (e.g. with CUDA_VISIBLE_DEVICES). A server that is killed while it starts
    is started again, `max_restarts` times at most over all servers. Raise EngineError with the end
    of a server's log; no server is left running then.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    envs = [env] * num_engines if isinstance(env, Mapping) else list(env) or [{}] * num_engines
    base = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} if device == "cpu" else {}
    base |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if is_deterministic else {}
    arguments = ["--model", str(model_path), "--dtype", dtype, "--device", device]
    arguments += ["--load-weights", str(load_weights).lower(), "--max-num-seqs", str(max_num_seqs)]
    arguments += ["--max-num-batched-tokens", str(max_num_batched_tokens)]
    transfer_dir = None if transfer_dir is None else Path(transfer_dir)
    arguments += ["--transfer-dir", str(transfer_dir)] if transfer_dir is not None else []
    arguments += ["--deterministic"] if is_deterministic else []
    arguments += ["--quantization", quantization] if quantization is not None else []
    arguments += [word for plugin in list_loaded_plugins() for word in ("--plugin", plugin)]
    launches = [
        placement(
            _LocalServerLaunch(
                f"engine{index}",
                folder,
                arguments,
                {**base, **extra},
                transfer_dir or folder,
                quantization,
            )
        )
        for index, extra in zip(range(num_engines), envs, strict=True)
    ]
    return EngineServers(launches, startup_timeout_s, progress, max_restarts)


@dataclass
class _LocalServerLaunch:
    """The `ServerLaunch` of one bundled server."""

    name: str
    folder: Path
    arguments: Sequence[str]
    env: Mapping[str, str]
    transfer_dir: Path
    quantization: str | None
    host: str = LOOPBACK
    process: ServerProcess | None = None
    token: str = ""
    rendezvous_address: str = ""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def take_seat(self, seat: ServerSeat) -> None:
        """Take the machine and device environment of the seat. Raise EngineError where the transfer
        directory is not visible there.
        """
        if seat.address != LOOPBACK and not self.transfer_dir.is_dir():
            raise EngineError(
                f"{self.name} was given a place on {seat.address}, where the run's transfer"
                f" directory ({self.transfer_dir}) is not; set rollout.transfer_dir to a directory"
                " that all machines see."
            )
        self.host = seat.address
        self.env = {**self.env, **seat.env}

    def get_rendezvous_address(self) -> str:
        """Return "": a bundled server has no parts."""
        return ""

    def start(self) -> None:
        """Start a new server process with a new token, on a port that the kernel picks; do not
        wait.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        token_file = self.folder / f"{self.name}.token"
        self._ready_file.unlink(missing_ok=True)
        self.token = write_token_file(token_file)
        command = [
            sys.executable,
            "-m",
            "rlhf_megatron.rollout.local.local_server",
            "--token-file",
            str(token_file),
        ]
        command += [
            "--ready-file",
            str(self._ready_file),
            "--parent-pid",
            str(os.getpid()),
            *self.arguments,
        ]
        command += ["--host", self.host, "--allow-remote"]
        self.process = ServerProcess(self.name, command, self.log, self.env)

    def wait_until_healthy(self, deadline: float, progress: StartProgress | None) -> EngineAddress:
        """Wait for the ready file, read the port from it, check the health, and return the
        address.
        """
        assert self.process is not None, "wait comes after start"
        await_server_ready(self.process, self._ready_file.is_file, deadline, progress)
        port = json.loads(self._ready_file.read_text())["port"]
        url = f"http://{self.host}:{port}"
        address = EngineAddress(self.name, "local", url, self.token, quantization=self.quantization)
        with translate_error_of_killed_server(self.process):
            LocalEngine(address).check_health(max(1.0, deadline - time.monotonic()))
        return address

    @property
    def _ready_file(self) -> Path:
        """Return the path of the file that the server writes when it listens."""
        return self.folder / f"{self.name}.ready.json"
