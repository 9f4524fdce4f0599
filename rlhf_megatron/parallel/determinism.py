"""What makes the hosts of a run repeat bit for bit on one layout (`trainer.deterministic`)."""

from __future__ import annotations

import torch

ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS: one workspace a stream, so that the same algorithm runs
    "NCCL_ALGO": "^NVLS",  # sums in the switch come in no fixed order
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # attention of Transformer Engine
}
"""To be set before CUDA and NCCL are used, where nobody has set another value."""


def make_deterministic() -> None:
    """From now on an operation that torch cannot repeat bit for bit raises RuntimeError and says which it is."""
    torch.use_deterministic_algorithms(True)
    # Filling is for programs that read what they never wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
