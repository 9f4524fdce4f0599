"""gpu_checks.py on CUDA in bfloat16; and on the CPU in both types, so that the same lines are
held there too.
"""

from __future__ import annotations

from collections.abc import Callable

import gpu_checks
import pytest
import torch

WITHOUT_SERVER = [name for name in gpu_checks.CHECKS if name != "sync"]


def run(name: str, device: str, dtype: torch.dtype, record: Callable[[str, object], None]) -> None:
    try:
        figures = gpu_checks.CHECKS[name](torch.device(device), dtype)
    except gpu_checks.MissingPackageError as error:
        pytest.skip(str(error))
    for key, value in figures.items():
        record(key, value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_checks.CHECKS)
def test_on_cuda(name: str, record_property: Callable[[str, object], None]) -> None:
    run(name, "cuda", torch.bfloat16, record_property)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("name", WITHOUT_SERVER)
def test_on_the_cpu(
    name: str, dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    run(name, "cpu", dtype, record_property)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sync_on_the_cpu(
    dtype: torch.dtype, record_property: Callable[[str, object], None]
) -> None:
    run("sync", "cpu", dtype, record_property)


def test_the_comparison_can_fail() -> None:
    expected = torch.tensor([-1.0, -2.0, -3.0])
    bounds = gpu_checks.BOUNDS[torch.float32]
    shifted = expected + torch.tensor([0.0, 2e-4, 0.0])
    with pytest.raises(AssertionError, match=r"log_prob_max 0\.0002 is over 0\.0001"):
        gpu_checks.compare_log_probs(shifted, expected, torch.tensor([True, True, True]), bounds)
    assert (
        gpu_checks.compare_log_probs(shifted, expected, torch.tensor([True, False, True]), bounds)[
            "mean_kl"
        ]
        == 0
    )


def test_a_missing_package_is_named() -> None:
    with pytest.raises(gpu_checks.MissingPackageError, match=r"needs no_such_package$"):
        gpu_checks.need("torch", "no_such_package")
