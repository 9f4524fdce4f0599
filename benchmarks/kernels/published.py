"""Published packages beside our head, where they are installed and run on a CPU; else
why not, by name.

    pip install --no-deps --target DIR liger-kernel cut-cross-entropy
    PYTHONPATH=DIR python -m benchmarks.kernels --only C1

liger-kernel's fused linear GRPO loss is torch and runs here: with CISPO's loss, one sequence,
advantage 1, no reference and no old policy it is -sum(log_probs_T) / T. Its fused linear cross
entropy, and cut-cross-entropy's own kernels, are Triton and need a GPU; cut-cross-entropy's
`torch_compile` runs where a C++ compiler is found.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from benchmarks.kernels.head_problem import Head, Problem, Shape, make_problem

PROBE = Shape(8, 16, 64)


@dataclass(frozen=True)
class Published:
    """`heads`: by name with version, log-probabilities only. `absent`: why, by package and part."""

    heads: dict[str, Head]
    absent: dict[str, str]


def find_published() -> Published:
    """Tries each once on a small problem, which also compiles what needs compiling."""
    heads: dict[str, Head] = {}
    absent: dict[str, str] = {}
    for package, parts in PARTS.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            absent[package] = "not installed"
            continue
        for part, head in parts.items():
            try:
                head(make_problem(PROBE)).backward()
            except Exception as error:  # whatever keeps it from running here is what is told
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                absent[f"{package} {found}, {part}"] = f"does not run on a CPU ({reason})"
            else:
                heads[f"{package} {found}, {part}"] = head
    return Published(heads, absent)


def liger_grpo(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    function = LigerFusedLinearGRPOLoss(
        beta=0.0, use_ref_model=False, loss_type="cispo", epsilon_high=5.0, compiled=False
    )
    mask = torch.ones(1, problem.targets_T.numel())
    loss, _ = function(
        problem.hidden_TH[None],
        problem.weight_VH,
        problem.targets_T[None],
        mask,
        advantages=torch.ones(1),
    )
    return loss


def liger_cross_entropy(problem: Problem) -> Tensor:
    from liger_kernel.transformers.fused_linear_cross_entropy import (
        LigerFusedLinearCrossEntropyLoss,
    )

    return LigerFusedLinearCrossEntropyLoss()(
        problem.weight_VH, problem.hidden_TH, problem.targets_T
    )


def cce(implementation: str) -> Head:
    def head(problem: Problem) -> Tensor:
        from cut_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(
            problem.hidden_TH, problem.weight_VH, problem.targets_T, impl=implementation
        )

    return head


PARTS: dict[str, dict[str, Head]] = {
    "liger-kernel": {
        "fused linear GRPO": liger_grpo,
        "fused linear cross entropy": liger_cross_entropy,
    },
    "cut-cross-entropy": {"torch_compile": cce("torch_compile"), "cce": cce("cce")},
}
