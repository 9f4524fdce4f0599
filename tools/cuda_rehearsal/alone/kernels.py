"""Compiles the Triton kernels that a run launches, by their own launch code, for three kinds of
GPU, and reads what each takes of a processor. One that keeps registers in memory, or wants more
shared memory than there is, fails.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --alone kernels
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tools.cuda_rehearsal.alone.children import in_children

# bytes that a block of threads can have, by architecture
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
COLUMNS = (8192, 4096, 4480)  # of a tile, and of the last tile of 151,936 columns


@dataclass(frozen=True)
class Usage:
    """Of one compiled kernel."""

    kernel: str
    registers: int
    spilled: int  # bytes of a thread that went to memory for want of registers
    shared: int

    def problems(self, capability: int) -> list[str]:
        words = [f"spills {self.spilled} bytes a thread"] if self.spilled else []
        if self.shared > SHARED[capability]:
            words.append(
                f"wants {self.shared} bytes of shared memory, a block has {SHARED[capability]}"
            )
        return [f"{self.kernel} {word} on sm_{capability}" for word in words]


def usage_of(capability: int, launches: Callable[[], Any]) -> list[Usage]:
    """Of the kernels that `launches` compiles for a GPU of that kind. In a process that has not
    used CUDA yet.
    """
    os.environ["NULLCUDA_SM"] = str(capability)
    from triton.compiler.compiler import CompiledKernel

    made: list[Any] = []
    init = CompiledKernel.__init__

    def noted(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    with mock.patch.object(CompiledKernel, "__init__", noted):
        launches()
    return sorted({_usage(kernel) for kernel in made}, key=str)


def _usage(kernel: Any) -> Usage:
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        said = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return Usage(kernel.name, found["REG"], found["STACK"] + found["LOCAL"], kernel.metadata.shared)


def launch_all() -> None:
    """Every variant of every kernel that the head and the policy loss launch."""
    from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs
    from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams
    from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
    from rlhf_megatron.ranks.kernels.policy_row_loss_triton import compute_ppo_clip_row_sums

    for columns in COLUMNS:
        for has_entropy in (True, False):
            launch_head(columns, has_entropy)
    rows = [torch.zeros(1000, device="cuda") for _ in range(8)]
    for others in (rows[3:6], [None] * 3):
        inputs = PolicyLossInputs(
            log_probs_T=rows[0],
            old_log_probs_T=rows[1],
            advantages_T=rows[2],
            response_mask_T=torch.ones(1000, dtype=torch.bool, device="cuda"),
            entropies_T=others[0],
            ref_log_probs_T=others[1],
            rollout_log_probs_T=None,
            correction_weights_T=others[2],
            is_picked_T=None,
        )
        terms = RegularizerParams(kl_loss_coef=0.1, kl_loss_type="k3", entropy_coeff=0.01)
        compute_ppo_clip_row_sums(inputs, PPOClipParams(), terms, rows[6], rows[7])


def launch_head(num_columns: int, has_entropy: bool, num_rows: int = 64) -> None:
    """The passes over a tile, with a stash and without."""
    from rlhf_megatron.ranks.kernels.head_exchange import PackedStatistics
    from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps
    from rlhf_megatron.ranks.kernels.logit_tile_ops import RowGradientInputs

    ops = TritonTileOps()
    device = torch.device("cuda")
    tile = torch.zeros(num_rows, num_columns, device=device)
    ones = torch.ones(num_rows, device=device)
    stash = torch.zeros(num_rows, num_columns, device=device, dtype=torch.float16)
    columns = torch.zeros(num_rows, dtype=torch.int64, device=device)
    entropy = ones if has_entropy else None
    for kept in ((stash, ones), (None, None)):
        packed = PackedStatistics.make_empty(
            num_rows, has_entropy, has_entropy, torch.float32, device
        )
        ops.update_statistics(tile, ones, columns, packed.select_rows(), *kept)
    rows = RowGradientInputs(ones, ones, ones, entropy, entropy, ones)
    ops.compute_logit_gradient(tile, columns, rows, torch.bfloat16)
    ops.compute_logit_gradient_from_stash(stash, ones, columns, rows, torch.bfloat16)


def compiled(capability: int) -> list[dict[str, Any]]:
    return [vars(usage) for usage in usage_of(capability, launch_all)]


def main(only: list[str]) -> int:
    """Prints a line a kernel; the number of those with problems."""
    num_failed = 0
    wanted = [(capability,) for capability in SHARED if not only or str(capability) in only]
    for (capability,), found in in_children(compiled, wanted):
        if isinstance(found, str):
            print(f"FAILED sm_{capability}: {found}", flush=True)
            num_failed += 1
            continue
        for usage in (Usage(**row) for row in found):
            problems = usage.problems(capability)
            num_failed += bool(problems)
            print(
                f"{'FAILED' if problems else 'ok':7}sm_{capability} {vars(usage)}",
                *problems,
                flush=True,
            )
    return num_failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
