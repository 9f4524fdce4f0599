"""Every environment variable of CUDA and NCCL that this package sets, and why. What the user's
shell sets wins, except over `trainer.device: cpu`.

| variable | set for | why |
|---|---|---|
| NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0 | ranks and engines | a weight sync puts both into one
  communicator, which hangs or crashes where they differ; SGLang sets 0, or 1 where its arguments
  say so: ranks follow |
| CUDA_DEVICE_MAX_CONNECTIONS=1 | ranks with tp or cp above 1 | one queue into the device starts
  communication that was issued first ahead of computation, which megatron-core's overlap relies on;
  not on Blackwell and later, where it only hurts; SGLang sets its own |
| CUDA_VISIBLE_DEVICES= (none) | trainer.device: cpu | torch and megatron-core take a GPU wherever
  they find one |
| CUBLAS_WORKSPACE_CONFIG=:4096:8 | trainer.deterministic | cuBLAS has one workspace a stream, so
  that the same algorithm runs |
| NCCL_ALGO=^NVLS | trainer.deterministic | sums in the switch come in no fixed order |
| NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 | trainer.deterministic | attention of Transformer Engine |
| PYTORCH_CUDA_ALLOC_CONF, PYTORCH_ALLOC_CONF | engines, without expandable_segments |
  see `remove_expandable_segments` |

CUDA and NCCL read them when they are first used. `TrainJob.start` sets them in every process of
every launcher, and engines inherit them; Ray's processes get them
from `runtime.ray.ray_environment`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from rlhf_megatron.config.schema import MegatronConfig, RolloutConfig, TrainerConfig

DETERMINISM = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "^NVLS",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
}
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
_COMMUNICATORS = {  # variable -> SGLang's arguments that make it 1
    "NCCL_CUMEM_ENABLE": ("enable-symm-mem",),
    "NCCL_NVLS_ENABLE": ("enable-symm-mem", "enable-nccl-nvls"),
}
_ONE_QUEUE_HURTS = ("B", "GB")  # names of GPUs, as NVIDIA and Ray have them, that begin so
_DRIVER = Path("/proc/driver/nvidia/gpus")

ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def set_missing_variables(
    environment: MutableMapping[str, str],
    trainer: TrainerConfig,
    rollout: RolloutConfig,
    megatron_configs: Sequence[MegatronConfig],
) -> None:
    """Set in `environment` the variables of CUDA and NCCL that it lacks, for a process on this
    machine, and hide GPUs from a run on CPUs. `megatron_configs` are the layouts of the pools.
    Raise ValueError where ranks and engines would get different values.
    """
    wanted = choose_communicator_variables(rollout, environment)
    if trainer.deterministic:
        wanted |= DETERMINISM
    # Ray's driver is no rank; its GPUs may be of another kind
    if trainer.runtime != "ray" and trainer.device != "cpu":
        wanted |= choose_queue_variables(megatron_configs, read_local_gpu_names())
    for name, value in wanted.items():
        environment.setdefault(name, value)
    hide_gpus(environment, trainer)


def hide_gpus(environment: MutableMapping[str, str], trainer: TrainerConfig) -> None:
    """Set CUDA_VISIBLE_DEVICES to nothing in `environment` if the run is on CPUs and not under Ray.
    Call this before torch looks for CUDA, or a fork could not run.
    """
    if trainer.device == "cpu" and trainer.runtime != "ray":
        environment.update(NO_GPUS)


def choose_communicator_variables(
    rollout: RolloutConfig, environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the NCCL variables that ranks and engines must have alike, with the values that the
    environment or `rollout.sglang` sets, else "0". Raise ValueError where these contradict each
    other.
    """
    sglang = rollout.sglang if rollout.engine == "sglang" else type(rollout.sglang)()
    switched_on = {name.replace("_", "-") for name, value in sglang.args.items() if value is True}
    found = {}
    for name, arguments in _COMMUNICATORS.items():
        forced = next((argument for argument in arguments if argument in switched_on), None)
        places = {
            "the environment": environment.get(name),
            f"rollout.sglang.env.{name}": sglang.env.get(name),
            f"rollout.sglang.args.{forced}": forced and "1",
        }
        said = {place: value for place, value in places.items() if value is not None}
        if len(set(said.values())) > 1:
            words = ", but ".join(f"{value} from {place}" for place, value in said.items())
            raise ValueError(
                f"{name} must be the same for ranks and engines, which share a communicator in"
                f" weight syncs; it is {words}. Remove all but one of them."
            )
        found[name] = next(iter(said.values()), "0")
    return found


def choose_queue_variables(
    megatron_configs: Sequence[MegatronConfig], gpu_names: Sequence[str]
) -> dict[str, str]:
    """Return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if a layout has tensor or context parallelism and
    no GPU is of a kind that the variable slows down (Blackwell), else {}. `gpu_names` are names
    without the maker's name ("H100 80GB HBM3").
    """
    is_split = any(
        m.tensor_model_parallel_size > 1 or m.context_parallel_size > 1 for m in megatron_configs
    )
    return (
        dict(ONE_QUEUE)
        if is_split and not any(name.startswith(_ONE_QUEUE_HURTS) for name in gpu_names)
        else {}
    )


def read_local_gpu_names() -> list[str]:
    """Return the names of this machine's GPUs without "NVIDIA", read from the driver's files; an
    empty list without a driver. Asking CUDA would make it read the environment too early.
    """
    files = sorted(_DRIVER.glob("*/information")) if _DRIVER.is_dir() else []
    lines = [
        line
        for file in files
        for line in file.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return [line.removeprefix("Model:").strip().removeprefix("NVIDIA ") for line in lines]


def remove_expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment for engines, without the allocator's option
    expandable_segments: such memory can neither be shared with engines nor released by them
    (torch_memory_saver raises).
    """
    found = dict(environment)
    for name in ALLOCATOR_SETTINGS:
        parts = [part for part in found.pop(name, "").split(",") if part]
        if kept := [part for part in parts if not part.strip().startswith("expandable_segments")]:
            found[name] = ",".join(kept)
    return found
