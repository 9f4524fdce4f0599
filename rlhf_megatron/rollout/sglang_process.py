"""Stock SGLang servers: started with a settings file each, awaited until healthy, stopped with all children."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from rlhf_megatron.rollout.engine import EngineAddress, EngineError
from rlhf_megatron.rollout.http import HttpClient
from rlhf_megatron.rollout.process import (
    EngineServers,
    Progress,
    ServerProcess,
    await_ready,
    stop_together,
    write_token,
)
from rlhf_megatron.rollout.sglang_server.loader import LOAD_FORMAT, TRANSFER_DIR

POLL_TIMEOUT_S = 5.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]  # the loader runs in the server from here


def start_sglang_engines(
    model_path: Path | str,
    num_engines: int,
    run_dir: Path | str,
    *,
    python: str,
    transfer_dir: Path,
    dtype: str,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    startup_timeout_s: float,
    progress: Progress | None = None,
) -> EngineServers:
    """Start servers with `python -m sglang.launch_server` and wait until all answer.

    `arguments`: SGLang server arguments without the leading dashes; they win over the ones set here. The admin key goes
    through the settings file, which only this user can read. Raises EngineError with the end of a server's log.
    """
    folder = Path(run_dir) / "engines"
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + startup_timeout_s
    search_path = [env.get("PYTHONPATH", ""), str(PACKAGE_ROOT)]
    full_env = {**env, TRANSFER_DIR: str(transfer_dir), "PYTHONPATH": ":".join(p for p in search_path if p)}
    started: list[tuple[ServerProcess, EngineAddress]] = []
    try:
        for index in range(num_engines):
            name = f"engine{index}"
            token = write_token(folder / f"{name}.token")
            port = free_port()
            settings = {
                "model-path": str(model_path),
                "host": "127.0.0.1",
                "port": port,
                "dtype": dtype,
                "load-format": "dummy",
                "skip-tokenizer-init": True,
                "admin-api-key": token,
                "custom-weight-loader": [LOAD_FORMAT],
                **{key.replace("_", "-"): value for key, value in arguments.items()},
            }
            path = write_private(folder / f"{name}.yaml", yaml.safe_dump(settings))
            command = [python, "-m", "sglang.launch_server", "--config", str(path)]
            process = ServerProcess(name, command, folder / f"{name}.log", full_env)
            tp_size = int(settings.get("tp-size", 1))
            started.append((process, EngineAddress(name, "sglang", f"http://127.0.0.1:{port}", token, tp_size)))
        for process, address in started:
            await_ready(process, lambda at=address: _answers(at), deadline, progress)  # type: ignore[misc]
    except BaseException:
        stop_together([process for process, _ in started])
        raise
    return EngineServers([process for process, _ in started], [address for _, address in started])


def free_port() -> int:
    """A loopback port that is free now, below the range from which the kernel gives out ports by itself."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    start = 20000 + os.getpid() * 37 % max(1, low - 21000)
    for port in range(start, start + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise EngineError(f"no free port on 127.0.0.1 in {start}..{start + 999}; end what uses them.")


def write_private(path: Path, text: str) -> Path:
    """A file that only this user can read."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text)
    return path


def _answers(address: EngineAddress) -> bool:
    client = HttpClient(address)
    try:
        client.get("/health", POLL_TIMEOUT_S)
    except EngineError:
        return False
    finally:
        client.close()
    return True
