"""gpu_kernel_checks.py on CUDA; and on the CPU, without Triton, so that its lines are
held there too.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_checks
import gpu_kernel_checks
import pytest
import torch

NAMES = list(gpu_kernel_checks.CHECKS)
ON_A_CPU = [name for name in NAMES if "triton" not in name]


def run(name: str, device: str, dtype: torch.dtype, record: Callable[[str, object], None]) -> None:
    try:
        figures = gpu_kernel_checks.CHECKS[name](torch.device(device), dtype)
    except gpu_checks.MissingPackageError as error:
        pytest.skip(str(error))
    for key, value in figures.items():
        record(key, value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_on_cuda(
    name: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    run(name, "cuda", dtype, record_property)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ON_A_CPU)
def test_on_the_cpu(
    name: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    run(name, "cpu", dtype, record_property)


def test_the_head_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = gpu_kernel_checks.exact_head

    def shifted(problem: gpu_kernel_checks.HeadProblem) -> list[torch.Tensor]:
        log_probs_R, *others = exact(problem)
        return [log_probs_R + 1e-3, *others]

    monkeypatch.setattr(gpu_kernel_checks, "exact_head", shifted)
    with pytest.raises(AssertionError, match="log_prob_error"):
        gpu_kernel_checks.check_head(torch.device("cpu"), torch.float32)
