"""Which GPUs of the machine each server takes: some of its own, or those of the trainer with which it takes turns.

Servers see all devices that the run sees, and count from `base-gpu-id`: a device has one number in trainer and engine,
and an engine can open memory that a trainer rank shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
