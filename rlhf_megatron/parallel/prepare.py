"""Readies megatron-core in a process: version, fixes, the CPU platform where needed, and `trainer.deterministic`."""

from __future__ import annotations

import torch

from rlhf_megatron.parallel import cpu_platform, mcore_fixes
from rlhf_megatron.parallel.mcore_patch import check_undeclared_needs, check_version


def prepare_megatron() -> None:
    """Call before the first use of megatron-core; `create_world` does. Safe to call again. Takes seconds (imports).

    Importing megatron beforehand is harmless.
    Raises RuntimeError for an unsupported version of megatron-core, or one that lacks a package.
    """
    check_version()
    check_undeclared_needs()
    cpu_platform.apply()
    mcore_fixes.apply()


ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: one workspace a stream, so that the same algorithm runs
    "NCCL_ALGO": "^NVLS",  # sums in the switch come in no fixed order
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # attention of Transformer Engine
}
"""To be set before CUDA and NCCL are used, where nobody has set another value."""


def make_deterministic() -> None:
    """Make an operation that torch cannot repeat bit for bit raise a RuntimeError that names it."""
    torch.use_deterministic_algorithms(True)
    # Filling is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
