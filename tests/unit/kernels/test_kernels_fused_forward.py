"""The experimental GEMM with the head's statistics as its epilogue, against the formulas in float64."""

# R rows, V rows of the weight, H hidden

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_megatron.kernels.tile_ops import MIN_LOGIT, RowStatistics

NAMES = ("max_R", "sum_R", "target_R", "weighted_R", "squares_R")


def tensors(num_rows: int, hidden: int, vocab_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden_RH = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    weight_VH = torch.randn(vocab_rows, hidden, generator=generator).to(dtype)
    columns_R = torch.arange(num_rows) * 37 % (vocab_rows + 20) - 10  # some in other shards
    return hidden_RH, weight_VH, columns_R, 0.5 + torch.rand(num_rows, generator=generator)


def formulas(hidden_RH: Tensor, weight_VH: Tensor, columns_R: Tensor, inv_R: Tensor, num_columns: int) -> RowStatistics:
    z_RV = hidden_RH.double() @ weight_VH[:num_columns].double().T * inv_R.double()[:, None]
    max_R = z_RV.amax(1)
    below_RV = z_RV - max_R[:, None]
    is_target_RV = torch.arange(num_columns) == columns_R[:, None]
    target_R = torch.where(is_target_RV, z_RV, -torch.inf).amax(1)
    exp_RV = below_RV.exp()
    return RowStatistics(max_R, exp_RV.sum(1), target_R, (below_RV * exp_RV).sum(1), exp_RV.square().sum(1))


def found(
    sizes: tuple[int, int, int],
    num_columns: int,
    dtype: torch.dtype,
    with_temperature: bool,
    num_programs: int,
) -> RowStatistics:
    """With sizes that are small enough for the interpreter: 256 columns a split, two row blocks a group."""
    from rlhf_megatron.kernels import log_prob_fused_triton as fused

    hidden_RH, weight_VH, columns_R, inv_R = tensors(*sizes, dtype)
    usual = fused._num_processors, fused.ROW_BLOCKS_OF_A_GROUP
    fused._num_processors, fused.ROW_BLOCKS_OF_A_GROUP = lambda _: num_programs, 2
    try:
        return fused.fused_forward(
            hidden_RH, weight_VH, columns_R, inv_R if with_temperature else None, num_columns, (16, 32, 16)
        )
    finally:
        fused._num_processors, fused.ROW_BLOCKS_OF_A_GROUP = usual


def check(value: RowStatistics, expected: RowStatistics) -> None:
    for name in NAMES:
        x, y = getattr(value, name).double(), getattr(expected, name)
        torch.testing.assert_close(x, y, rtol=2e-5, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.fixture
def interpreted(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.getfixturevalue("triton_interpreter").run


@pytest.mark.parametrize(
    ("sizes", "num_columns", "dtype", "with_temperature"),
    [
        ((1, 8, 3), 3, torch.float16, False),
        # 3 row blocks in 2 groups, 3 splits, padding
        pytest.param((40, 40, 600), 560, torch.bfloat16, True, marks=pytest.mark.long),
        ((20, 8, 40), 37, torch.bfloat16, True),
    ],
)
def test_equals_the_formulas(
    interpreted: Callable[..., Any],
    sizes: tuple[int, int, int],
    num_columns: int,
    dtype: torch.dtype,
    with_temperature: bool,
) -> None:
    hidden_RH, weight_VH, columns_R, inv_R = tensors(*sizes, dtype)
    expected = formulas(
        hidden_RH, weight_VH, columns_R, inv_R if with_temperature else torch.ones_like(inv_R), num_columns
    )
    outcomes = [
        interpreted(found, sizes, num_columns, dtype, with_temperature, num_programs) for num_programs in (2, 5)
    ]
    check(outcomes[0], expected)
    for name in NAMES:
        assert torch.equal(getattr(outcomes[0], name), getattr(outcomes[1], name)), "which program does it is no matter"


def refused_and_empty() -> tuple[str, RowStatistics]:
    from rlhf_megatron.kernels.log_prob_fused_triton import fused_forward

    hidden_RH, weight_VH, columns_R, _ = tensors(3, 8, 5, torch.bfloat16)
    nothing = fused_forward(hidden_RH, weight_VH, columns_R, None, 0)
    try:
        fused_forward(hidden_RH.float(), weight_VH, columns_R, None, 5)
    except ValueError as error:
        return str(error), nothing
    return "", nothing


def test_padding_only_and_inputs_that_cannot_be_loaded(interpreted: Callable[..., Any]) -> None:
    message, nothing = interpreted(refused_and_empty)
    assert "hidden (torch.float32" in message and "must be bfloat16 or float16" in message
    assert nothing.max_R.tolist() == [pytest.approx(MIN_LOGIT)] * 3 and nothing.target_R.tolist() == [-torch.inf] * 3
    assert nothing.sum_R.tolist() == nothing.weighted_R.tolist() == nothing.squares_R.tolist() == [0.0] * 3


@pytest.mark.gpu
@pytest.mark.parametrize(("num_rows", "hidden", "vocab_rows"), [(700, 264, 5000), (2500, 512, 20011)])
def test_on_cuda(num_rows: int, hidden: int, vocab_rows: int) -> None:
    from rlhf_megatron.kernels.log_prob_fused_triton import fused_forward

    sizes = (num_rows, hidden, vocab_rows)
    hidden_RH, weight_VH, columns_R, inv_R = tensors(*sizes, torch.bfloat16)
    num_columns = vocab_rows - 7
    expected = formulas(hidden_RH, weight_VH, columns_R, inv_R * hidden**-0.5, num_columns)
    given = [x.cuda() for x in (hidden_RH, weight_VH, columns_R, inv_R * hidden**-0.5)]
    outcomes = [fused_forward(*given, num_columns) for _ in range(2)]
    check(RowStatistics(*(getattr(outcomes[0], name).cpu() for name in NAMES)), expected)
    for name in NAMES:
        assert torch.equal(getattr(outcomes[0], name), getattr(outcomes[1], name)), "repeatable bit for bit"
