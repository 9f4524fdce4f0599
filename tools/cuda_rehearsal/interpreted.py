"""The Triton kernels on device cuda, their programs run by Triton's interpreter: head and policy
loss against float64, and an actor that takes both against the plain model. No run takes interpreted
kernels; that rule is lifted here.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --cases triton
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is made
sys.path += [str(Path(__file__).parents[2] / "tests" / place) for place in ("gpu", "support")]

import gpu_checks
import gpu_kernel_checks
import torch

from rlhf_megatron.ranks.kernels import log_prob_triton, policy_row_loss_triton

DEVICE = torch.device("cuda", 0)
Figures = dict[str, float]


def head(dtype: torch.dtype, stash: int = 0) -> Figures:
    """Forward and backward, over three tiles and a part of one."""
    return gpu_kernel_checks.check_head(DEVICE, dtype, "triton", stash, (40, 64, 787, 13), 256)


CHECKS: dict[str, tuple[Callable[[], Figures], tuple[str, ...]]] = {
    "head": (partial(head, torch.bfloat16), ("head",)),
    "head with a stash": (partial(head, torch.float32, gpu_kernel_checks.STASH_BYTES), ("head",)),
    "policy loss": (partial(gpu_kernel_checks.check_policy_loss, DEVICE, torch.float32), ("loss",)),
    "actor": (
        partial(gpu_checks.check_training_step, DEVICE, torch.float32, num_samples=4),
        ("head", "loss"),
    ),
}
"""What is checked, and the kernels that it must have launched."""


def main() -> int:
    """Prints what each check measured."""
    ops = log_prob_triton.TritonTileOps
    loss = policy_row_loss_triton
    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(log_prob_triton, "is_triton_interpreted", return_value=False)
        )
        launched = {
            "head": patches.enter_context(
                mock.patch.object(
                    ops, "update_statistics", autospec=True, side_effect=ops.update_statistics
                )
            ),
            "loss": patches.enter_context(
                mock.patch.object(
                    loss, "compute_ppo_clip_row_sums", wraps=loss.compute_ppo_clip_row_sums
                )
            ),
        }
        for name, (check, kernels) in CHECKS.items():
            for kernel in kernels:
                launched[kernel].reset_mock()
            figures = {what: f"{value:.1e}" for what, value in check().items()}
            counts = {kernel: launched[kernel].call_count for kernel in kernels}
            assert all(counts.values()), f"{name} took another path than Triton's kernels: {counts}"
            print(f"{name}: launches {counts}, {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
