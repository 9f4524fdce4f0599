"""The environment in which a process takes the CUDA code path without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

HOST = Path(__file__).parent / "host"
REPOSITORY = Path(__file__).parents[2]
BRANCHES_ENV = "CUDA_REHEARSAL_BRANCHES"  # for host/sitecustomize.py


def on_cpu() -> dict[str, str]:
    """The environment of a run that a rehearsal is compared with."""
    own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    given = {name: value for name, value in os.environ.items() if name != BRANCHES_ENV}
    return {**given, **own, "PYTHONPATH": python_path(REPOSITORY)}


def python_path(*places: Path) -> str:
    """`places`, before what lies on this process's path: packages may have come as wheels."""
    return os.pathsep.join([*map(str, places), *filter(None, [os.environ.get("PYTHONPATH")])])


def environment(
    built: Path, has_numbers: bool, num_devices: int, is_alone: bool = False
) -> dict[str, str]:
    """`built`: what build.py made. `has_numbers`: the host computes each kernel, and one that it
    does not is an error; else kernels do nothing, and torch's own CUDA kernels check what they are
    given. `is_alone`: NCCL has no peers.
    """
    return {
        **on_cpu(),
        **({BRANCHES_ENV: os.environ[BRANCHES_ENV]} if BRANCHES_ENV in os.environ else {}),
        "LD_PRELOAD": str(built / "libcuda.so.1"),
        "LD_LIBRARY_PATH": f"{built}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "TRITON_LIBCUDA_PATH": str(built),
        "NULLCUDA_DEVICES": str(num_devices),
        "NULLCUDA_KERNELS": "refuse" if has_numbers else "skip",
        **({"NULLCUDA_NCCL": "alone"} if is_alone else {}),
        "TORCHDYNAMO_DISABLE": "1",  # what it compiles for CUDA, the host could not run
        "PYTHONPATH": python_path(HOST, built, REPOSITORY)
        if has_numbers
        else python_path(REPOSITORY),
    }
