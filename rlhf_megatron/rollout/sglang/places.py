"""Which GPUs of the machine each server takes: some of its own, or those of the trainer with which it takes turns.

Servers see all devices that the run sees, and count from `base-gpu-id`: a device has one number in trainer and engine,
and an engine can open memory that a trainer rank shares.

Also: Where the processes of a started SGLang server listen, and where its ranks meet: on this machine only, at ports
that
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_megatron.rollout.engine import EngineError

VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"
BASE = "base-gpu-id"


@dataclass(frozen=True)
class Machine:
    """GPUs of the machine that the servers run on."""

    num_visible: int = 0  # to this process; 0: none, or only the servers' environment knows of them
    num_trainer: int = 0  # of those, the first: one a rank of the trainer
    is_shared: bool = False  # rollout.colocated: trainer and servers take turns


def on_cpu(arguments: Mapping[str, object], env: Mapping[str, str]) -> bool:
    """`arguments`: of the server, by name; `env`: that the user gives it."""
    return arguments.get("device") == "cpu" or env.get(CPU_ENGINE) == "1"


def place(
    arguments: Mapping[str, object], env: Mapping[str, str], num_engines: int, machine: Machine
) -> list[dict[str, object]]:
    """Per server the arguments that give it devices; empty where the user says which, or where there are none.

    Raises ValueError where there are too few.
    """
    nothing: list[dict[str, object]] = [{} for _ in range(num_engines)]
    if on_cpu(arguments, env) or BASE in arguments:
        return nothing
    given = env.get(VISIBLE)
    num_visible = len([part for part in given.split(",") if part.strip()]) if given is not None else machine.num_visible
    if num_visible == 0:
        return nothing
    start = 0 if given is not None or machine.is_shared else machine.num_trainer
    span = _whole(arguments, "tp-size") * _whole(arguments, "gpu-id-step")
    if start + num_engines * span > num_visible:
        raise ValueError(_too_few(span, num_engines, num_visible, start, given))
    return [{BASE: start + index * span} for index in range(num_engines)]


def _whole(arguments: Mapping[str, object], name: str) -> int:
    return int(str(arguments.get(name, 1)))


def _too_few(span: int, num_engines: int, num_visible: int, start: int, given: str | None) -> str:
    needed = f"rollout.num_engines ({num_engines}) x tp-size ({span}) = {num_engines * span} GPUs"
    if given is not None:
        return (
            f"{needed} are more than rollout.sglang.env.{VISIBLE} ({given}) names; name as many, or lower either (or"
            " set rollout.sglang.args.base_gpu_id for servers that share devices)."
        )
    of_trainer = f" beside the trainer's {start} (trainer.n_gpus_per_node)" if start else ""
    shared = " let both take turns (rollout.colocated: true)," if start else ""
    return (
        f"{needed} are needed{of_trainer}, but {num_visible} are visible; lower either,{shared} or name the devices in"
        f" rollout.sglang.env.{VISIBLE}."
    )


INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def loopback(env: Mapping[str, str], inherited: Mapping[str, str], is_one_machine: bool) -> dict[str, str]:
    """What makes the ranks of a server listen to this machine only. Not where others must reach them, nor over what
    somebody has set."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {name: "lo" for name in names if is_one_machine and name not in env and name not in inherited}


class MeetingPlace:
    """Where the ranks of each server find one another: a file. SGLang's own way is a TCP store, which torch binds to
    all addresses of the machine, at a port that another process can have taken."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rlhf-engines-", ignore_cleanup_errors=True)

    def __reduce__(self) -> tuple[type[MeetingPlace], tuple[()]]:
        """In another process: another place."""
        return MeetingPlace, ()

    def env(self, name: str, port: int) -> dict[str, str]:
        """Of a fresh file for the server of that name."""
        path = Path(self._folder.name) / f"{name}-{port}"
        path.unlink(missing_ok=True)
        # SGLang names segments of shared memory after the port, where there is one.
        return {INIT_METHOD: f"file://{path}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Ports:
    """Free loopback ports below the range from which the kernel gives out ports by itself; none twice. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        self._next = 20000 + os.getpid() * 37 % max(1, low - 21000)

    def __reduce__(self) -> tuple[type[Ports], tuple[()]]:
        """In another process: those of its machine."""
        return Ports, ()

    def take(self) -> int:
        """Raises EngineError when a thousand in a row are taken."""
        with self._lock:
            for port in range(self._next, self._next + 1000):
                with socket.socket() as probe:
                    try:
                        probe.bind(("127.0.0.1", port))
                    except OSError:
                        continue
                self._next = port + 1
                return port
        raise EngineError(f"no free port on 127.0.0.1 in {self._next}..{self._next + 999}; end what uses them.")
