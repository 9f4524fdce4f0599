"""Every environment variable that this package sets for Ray, and why. What the user's shell sets
wins everywhere.

| variable | set for | where, and why |
|---|---|---|
| RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 | a cluster of this machine | Ray's only switch that makes the
  machine's address 127.0.0.1, and so all its servers listen there; the name is of its first use |
| RAY_AUTH_MODE=token, RAY_AUTH_TOKEN | a cluster of this machine | other users of the machine reach
  127.0.0.1, and who reaches a cluster runs code in it; a token for each run, never
  written to a file |
| RAY_USAGE_STATS_ENABLED=0 | a cluster of this machine | Ray would report its use
  over the network |
| RAY_memory_monitor_refresh_ms=0 | a cluster of this machine | Ray would kill a rank when other
  programs fill the memory; a lost rank ends the run, so that is left to the kernel |
| RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 | all | a process that takes no GPU from Ray sees those that
  it is told to (colocated engines); otherwise Ray hides all |
| OMP_NUM_THREADS | ranks | Ray would say ray.num_cpus_per_rank, rounded down; on one machine it is
  what the torchrun launcher says, so that sums have the same order |
| those of `config.cuda_environment` | ranks; NCCL's: engines too | as under other launchers |
| GLOO_SOCKET_IFNAME | ranks | lo on one machine, else the interface that leads to the driver: gloo
  would take that of the host's name |
| LOCAL_RANK | ranks | which of the devices that it sees is this rank's |

Left alone: RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES (each rank sees its own device only; where a
shell sets it, LOCAL_RANK follows), TOKENIZERS_PARALLELISM (ranks use no tokenizer).

Machines of a running cluster have environments of their own: of the driver's, what FORWARDED names
goes to the ranks.
"""

from __future__ import annotations

import importlib.metadata
import os
import secrets
from collections.abc import Mapping, Sequence

from rlhf_megatron.config.cuda_environment import (
    DETERMINISM,
    NO_GPUS,
    ONE_QUEUE,
    choose_queue_variables,
)
from rlhf_megatron.config.rules.engine_rules import OLDEST_RAY, describe_ray_address_problem
from rlhf_megatron.config.schema import MegatronConfig, RayConfig, TrainerConfig

ADDRESS_ENV = "RAY_ADDRESS"  # set by Ray in a submitted job
FORWARDED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "NVTE_", "UCX_", "FI_")
FORWARDED = (
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "RLHF_MEGATRON_FAULTS",
    "RLHF_MEGATRON_FAULTS_DIR",
    *DETERMINISM,
    *ONE_QUEUE,
)
_OF_ALL = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_OF_OWN_CLUSTER = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


def find_cluster_address(ray_config: RayConfig, environment: Mapping[str, str]) -> str | None:
    """Return the address of the cluster to join, from ray.address or RAY_ADDRESS; None where the
    run makes a cluster. Raise ValueError for a RAY_ADDRESS that is no address, or that contradicts
    ray.dashboard.
    """
    if ray_config.address is not None:
        return ray_config.address
    found = environment.get(ADDRESS_ENV) or None
    if found is not None and (problem := describe_ray_address_problem(ADDRESS_ENV, found)):
        raise ValueError(problem)
    if found is not None and ray_config.dashboard:
        raise ValueError(
            f"ray.dashboard (true) is of a cluster that the run makes, but {ADDRESS_ENV} ({found})"
            f" names one that runs; remove the setting, or unset {ADDRESS_ENV}."
        )
    return found


def check_ray_version() -> None:
    """Raise ValueError where ray is not installed or is too old."""
    wanted = ".".join(map(str, OLDEST_RAY))
    command = f'pip install "ray>={wanted}"'
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"trainer.runtime (ray) needs the package ray, which is not installed; run {command},"
            " or set trainer.runtime to torchrun."
        ) from None
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST_RAY:
        raise ValueError(
            f"trainer.runtime (ray) needs ray {wanted} or newer, but {version} is installed;"
            f" run {command}."
        )


def set_ray_defaults(address: str | None, environment: dict[str, str] | os._Environ[str]) -> None:
    """Set the variables of Ray that `environment` does not have yet; Ray reads them when it is
    imported. `address` itself is not set: None means a cluster of the run's own, which also gets
    token authentication and no RAY_ADDRESS.
    """
    wanted = dict(_OF_ALL)
    if address is None:
        wanted |= _OF_OWN_CLUSTER
        if "RAY_AUTH_MODE" not in environment:
            wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment.pop(ADDRESS_ENV, None)  # empty
    for name, value in wanted.items():
        environment.setdefault(name, value)


def make_rank_environment(
    environment: Mapping[str, str],
    trainer: TrainerConfig,
    ray_config: RayConfig,
    megatron_sections: Sequence[MegatronConfig],
    *,
    is_one_machine: bool,
    uses_gpus: bool,
    accelerator_types: Sequence[str],
) -> dict[str, str]:
    """Return the environment variables to set for the processes of the ranks: threads, network
    interface and GPU queues, and the variables that the driver forwards, which win.

    `environment` is the driver's. `megatron_sections` are the pools' layouts. `accelerator_types`
    are the accelerators of the cluster under Ray's names. With `is_one_machine` gloo uses the
    loopback interface.
    """
    cores = (os.cpu_count() or 1) // trainer.n_gpus_per_node
    threads = cores if is_one_machine else int(ray_config.num_cpus_per_rank)
    wanted = {"OMP_NUM_THREADS": str(max(1, threads))}
    if is_one_machine:
        wanted["GLOO_SOCKET_IFNAME"] = "lo"
    wanted |= choose_queue_variables(megatron_sections, accelerator_types) if uses_gpus else NO_GPUS
    return wanted | select_forwarded_variables(environment)


def make_engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver's `environment` to set for processes that start servers;
    the servers set OMP_NUM_THREADS themselves.
    """
    return {
        name: value
        for name, value in select_forwarded_variables(environment).items()
        if name != "OMP_NUM_THREADS"
    }


def select_forwarded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the driver's `environment` that processes on all machines get."""
    return {
        name: value
        for name, value in environment.items()
        if name in FORWARDED or name.startswith(FORWARDED_PREFIXES)
    }


def find_visible_device_index(device: str, visible_devices: str) -> int:
    """Return the index of `device`, which Ray gave this process, in `visible_devices`, the value of
    CUDA_VISIBLE_DEVICES. Return 0 for a device that is not listed.
    """
    seen = [name.strip() for name in visible_devices.split(",")] if visible_devices else []
    if seen:
        return seen.index(device) if device in seen else 0
    return int(device) if device.isdecimal() else 0
