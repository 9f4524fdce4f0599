"""TritonTileOps against TorchTileOps, element by element: under triton's interpreter, and on CUDA
where there is one.

Both compute in float32 in their own order: maxima, targets and what follows from one element are
equal bit for bit, sums within the rounding of a sum, 16-bit results within one unit of the last
place (the interpreter cuts bfloat16 off where a device rounds).
"""

# R rows, C columns of a tile

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton_interpreter import TritonInterpreter

from rlhf_megatron.ranks.kernels.logit_tile_ops import (
    MIN_LOGIT,
    STASH_SCALE,
    RowGradientInputs,
    RowStatistics,
    TileOps,
    TorchTileOps,
)

Pairs = dict[str, tuple[Tensor, Tensor]]  # what Triton found, what torch did


@dataclass(frozen=True)
class Case:
    """Two tiles of one row each after the other; the second one's logits are `growth`
    times as large.
    """

    num_rows: int
    num_columns: int
    growth: float = 1.5  # below 1: the first tile keeps the maximum
    has_temperature: bool = True
    has_entropy: bool = True
    has_squares: bool = True
    has_rest: bool = True
    has_stash: bool = True
    grad_dtype: torch.dtype = torch.float32
    logits_dtype: torch.dtype = torch.float32
    # "rows": a part of wider memory; "columns": every other column of it; "torch": float32
    layout: str = "dense"


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tile(case: Case, factor: float, device: str) -> Tensor:
    """The same values in every layout. What lies around them is NaN: nobody may read it."""
    logits_RC = (5.0 * factor * randn(case.num_rows, case.num_columns, seed=1)).to(
        device, case.logits_dtype
    )
    if case.layout == "torch":
        return logits_RC.float()
    wide_RC = torch.full(
        (case.num_rows, 2 * case.num_columns + 3), torch.nan, dtype=case.logits_dtype, device=device
    )
    views = {
        "rows": wide_RC[:, 3 : 3 + case.num_columns],
        "columns": wide_RC[:, 1 : 1 + 2 * case.num_columns : 2],
    }
    if case.layout == "dense":
        return logits_RC
    views[case.layout].copy_(logits_RC)
    return views[case.layout]


def results(ops: TileOps, case: Case, device: str) -> dict[str, Tensor]:
    num_rows = case.num_rows
    num_columns = case.num_columns
    inv_temperature_R = (
        (0.5 + randn(num_rows, seed=2).abs()).to(device) if case.has_temperature else None
    )
    # half of them elsewhere
    columns_R = (torch.arange(num_rows) * 7919 % (2 * num_columns) - num_columns // 2).to(device)
    columns_R[:2] = torch.tensor([0, num_columns - 1])[:num_rows]
    running = torch.zeros(5, num_rows, device=device)
    running[0] = MIN_LOGIT
    running[2] = -torch.inf
    max_R, sum_R, target_R, weighted_R, squares_R = running
    statistics = RowStatistics(
        max_R,
        sum_R,
        target_R,
        weighted_R if case.has_entropy else None,
        squares_R if case.has_squares else None,
    )
    stash_RC = torch.full((num_rows, num_columns), torch.nan, dtype=torch.float16, device=device)
    stash_max_R = torch.full((num_rows, 3), torch.nan, device=device)[:, 1]
    stash = (stash_RC, stash_max_R) if case.has_stash else (None, None)
    ops.update_statistics(tile(case, 1.0, device), inv_temperature_R, columns_R, statistics)
    second = tile(case, case.growth, device)
    ops.update_statistics(
        second, inv_temperature_R, columns_R, statistics, *stash, first_column=num_columns // 3
    )

    log_z_R = max_R + sum_R.log()
    entropies_R = 0.5 * log_z_R
    grad_entropies_R = randn(num_rows, seed=4).to(device)
    rows = RowGradientInputs(
        log_z_R,
        inv_temperature_R,
        randn(num_rows, seed=3).to(device),
        entropies_R if case.has_entropy else None,
        grad_entropies_R if case.has_entropy else None,
        0.2 * randn(num_rows, seed=6).to(device) if case.has_rest else None,
    )
    found = {name: x_R for name, x_R in vars(statistics).items() if x_R is not None}
    found["grad"] = ops.compute_logit_gradient(
        tile(case, 1.0, device), columns_R, rows, case.grad_dtype, first_column=num_columns // 5
    )
    if case.has_stash:
        found |= {"stash": stash_RC.clone(), "stash max": stash_max_R.clone()}
        of_rows = (columns_R, rows, case.grad_dtype, num_columns // 3)
        found["grad from stash"] = ops.compute_logit_gradient_from_stash(
            stash_RC, stash_max_R, *of_rows
        )
    return found


def both(case: Case, device: str, max_block: int | None = None) -> Pairs:
    from rlhf_megatron.ranks.kernels import log_prob_triton

    usual = log_prob_triton.MAX_BLOCK
    log_prob_triton.MAX_BLOCK = max_block or usual
    try:
        found = results(log_prob_triton.TritonTileOps(), case, device)
    finally:
        log_prob_triton.MAX_BLOCK = usual
    expected = results(TorchTileOps(), replace(case, layout="torch"), device)
    return {name: (found[name].cpu(), expected[name].cpu()) for name in expected}


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Calls a function of this file with `device=`, where Triton's kernels run."""
    if request.param == "cuda":
        yield lambda job, *args, **kwargs: job(*args, device="cuda", **kwargs)
        return
    interpreter: TritonInterpreter = request.getfixturevalue("triton_interpreter")
    yield lambda job, *args, **kwargs: interpreter.run(job, *args, device="cpu", **kwargs)


def check(pairs: Pairs) -> None:
    for name, (found, expected) in pairs.items():
        assert found.dtype == expected.dtype and found.shape == expected.shape, name
        if name in ("max_R", "target_R", "stash max"):
            assert torch.equal(found, expected), name
            continue
        info = torch.finfo(found.dtype)
        is_float32 = found.dtype == torch.float32
        rtol = 2e-6 if is_float32 else 1.01 * info.eps
        step = info.smallest_normal * info.eps  # of float16 below 6e-5
        # differences cancel to less than their terms
        atol = 1.01 * step + 1e-6 * expected.float().abs().max().item()
        assert (found.double() - expected.double()).abs().sub(
            rtol * expected.double().abs()
        ).max() <= atol, name
        assert expected.abs().max() > 0.01, f"{name}: nothing was compared"


BLOCK = 64  # in place of 8192, so that small rows have several blocks


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1),
        Case(3, 5, growth=0.5),
        Case(33, 40, has_temperature=False),
        Case(9, 200, layout="rows"),
        Case(9, 130, growth=0.5, grad_dtype=torch.float16, layout="columns"),
        Case(
            5, 64, grad_dtype=torch.bfloat16, has_temperature=False, has_rest=False, layout="rows"
        ),
        Case(6, 193, has_entropy=False, has_squares=False, grad_dtype=torch.bfloat16),
        Case(6, 129, has_entropy=False, has_stash=False, has_rest=False),
        Case(6, 65, has_squares=False, has_stash=False, logits_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_equals_torch(run: Callable[..., Any], case: Case) -> None:
    """Rows of one block and of several, the last one cut; 33 rows of 40 columns are several
    rows a program.
    """
    check(run(both, case, max_block=BLOCK))


@pytest.mark.parametrize(
    "num_columns",
    [8200, *(pytest.param(size, marks=pytest.mark.long) for size in (1000, 8192, 20000))],
)
def test_equals_torch_with_real_blocks(run: Callable[..., Any], num_columns: int) -> None:
    check(run(both, Case(2, num_columns, grad_dtype=torch.bfloat16)))


def by_hand(device: str) -> Pairs:
    from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps

    ops = TritonTileOps()
    running = torch.tensor([[MIN_LOGIT], [0.0], [-torch.inf], [0.0], [0.0]], device=device)
    stash_RC = torch.empty(1, 3, dtype=torch.float16, device=device)
    stash_max_R = torch.empty(1, device=device)
    logits_RC = torch.tensor([[1.0, 2.0, 5.0]], device=device).log()
    columns_R = torch.tensor([1], device=device)
    half_R = torch.tensor([0.5], device=device)
    statistics = RowStatistics(*running.unbind())
    ops.update_statistics(2.0 * logits_RC, half_R, columns_R, statistics, stash_RC, stash_max_R)
    log_z_R = statistics.max_R + statistics.sum_R.log()
    rows = RowGradientInputs(log_z_R, half_R, torch.tensor([4.0], device=device), None, None)
    p_RC = torch.tensor([[1 / 8, 2 / 8, 5 / 8]])
    grad_RC = 2.0 * torch.tensor([[-1 / 8, 6 / 8, -5 / 8]])
    mean_z = (p_RC * p_RC.log()).sum()
    stash = (STASH_SCALE * p_RC / p_RC.max()).half()
    log_5 = torch.tensor([5.0]).log()
    pairs = {
        "max": (statistics.max_R, log_5),
        "sum": (statistics.sum_R, torch.tensor([8 / 5])),
        "target": (statistics.target_R, torch.tensor([2.0]).log()),
        "weighted": (statistics.weighted_R, (mean_z - p_RC.max().log()).reshape(1) * 8 / 5),
        "squares": (statistics.squares_R, torch.tensor([(1 + 4 + 25) / 25])),
        "stash": (stash_RC.clone(), stash),
        "stash max": (stash_max_R, log_5),
        "grad": (
            ops.compute_logit_gradient(2.0 * logits_RC, columns_R, rows, torch.float32),
            grad_RC,
        ),
        "grad from stash": (
            ops.compute_logit_gradient_from_stash(
                stash_RC, stash_max_R, columns_R, rows, torch.float32
            ),
            grad_RC,
        ),
    }
    return {
        name: (found.cpu().float(), expected.float()) for name, (found, expected) in pairs.items()
    }


def test_by_hand(run: Callable[..., Any]) -> None:
    """Probabilities 1/8, 2/8, 5/8 at temperature 2; an upstream gradient of 4 for the second."""
    for name, (found, expected) in run(by_hand).items():
        torch.testing.assert_close(
            found, expected, rtol=3e-4 if "stash" in name else 1e-6, atol=1e-7, msg=name
        )


def special(device: str) -> dict[str, Any]:
    """float64, and no rows."""
    from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps

    ops = TritonTileOps()
    exact = {}
    for name, candidate in {"triton": ops, "torch": TorchTileOps()}.items():
        running = torch.zeros(5, 4, dtype=torch.float64, device=device)
        running[0] = MIN_LOGIT
        logits_RC = randn(4, 9, seed=5).double().to(device)
        columns_R = torch.arange(4, device=device)
        candidate.update_statistics(
            logits_RC.clone(), None, columns_R, RowStatistics(*running.unbind())
        )
        rows = RowGradientInputs(
            running[0] + running[1].log(), None, running[2], running[3], running[4]
        )
        exact[name] = torch.cat(
            [
                running.flatten(),
                candidate.compute_logit_gradient(
                    logits_RC, columns_R, rows, torch.float64
                ).flatten(),
            ]
        )
    none_R = torch.empty(0, device=device)
    empty_RC = torch.empty(0, 7, device=device)
    ops.update_statistics(
        empty_RC, none_R, none_R.long(), RowStatistics(none_R, none_R, none_R, none_R, none_R)
    )
    rows = RowGradientInputs(none_R, none_R, none_R, None, None)
    return {
        "float64": torch.equal(exact["triton"], exact["torch"])
        and exact["torch"].dtype == torch.float64,
        "no rows": tuple(
            ops.compute_logit_gradient(empty_RC, none_R.long(), rows, torch.bfloat16).shape
        ),
    }


def test_float64_is_left_to_torch_and_no_rows_to_nobody(run: Callable[..., Any]) -> None:
    assert run(special) == {"float64": True, "no rows": (0, 7)}


@pytest.mark.gpu
def test_repeats_bit_for_bit_and_compiles_once_on_cuda() -> None:
    """Other numbers of rows, and of columns up to the same power of two and of the same alignment:
    the same kernels.
    """
    from rlhf_megatron.ranks.kernels import log_prob_triton

    def num_compiled() -> int:
        kernels = (
            log_prob_triton._update_statistics_kernel,
            log_prob_triton._logit_gradient_kernel,
        )
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    ops = log_prob_triton.TritonTileOps()
    first = results(ops, Case(300, 8192, grad_dtype=torch.bfloat16), "cuda")
    second = results(ops, Case(300, 8192, grad_dtype=torch.bfloat16), "cuda")
    assert all(torch.equal(first[name], second[name]) for name in first)
    num_before = num_compiled()
    for num_rows, num_columns in ((17, 8192), (1, 8192), (8191, 8192), (64, 4480), (2048, 4112)):
        results(ops, Case(num_rows, num_columns, grad_dtype=torch.bfloat16), "cuda")
    assert num_compiled() == num_before


@pytest.mark.gpu
@pytest.mark.long
def test_offsets_beyond_32_bits_on_cuda() -> None:
    """2^31 elements and more: 9 GB of logits, 4 GB of gradients; the last row by the formulas."""
    from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps

    num_rows = 2**14 + 8
    num_columns = 2**17
    logits_RC = torch.zeros(num_rows, num_columns, device="cuda")
    logits_RC[-1] = 3.0 * randn(num_columns, seed=8).cuda()
    columns_R = torch.full((num_rows,), num_columns - 1, device="cuda")
    running = torch.zeros(3, num_rows, device="cuda")
    running[0] = MIN_LOGIT
    max_R, sum_R, target_R = running
    ops = TritonTileOps()
    ops.update_statistics(
        logits_RC, None, columns_R, RowStatistics(max_R, sum_R, target_R, None, None)
    )
    log_z_R = max_R + sum_R.log()
    last_C = logits_RC[-1].double()
    assert (
        target_R[-1] == logits_RC[-1, -1] and abs(log_z_R[-1].double() - last_C.logsumexp(0)) < 1e-5
    )
    rows = RowGradientInputs(log_z_R, None, torch.ones(num_rows, device="cuda"), None, None)
    grad_RC = ops.compute_logit_gradient(logits_RC, columns_R, rows, torch.bfloat16)
    expected_C = -last_C.softmax(0)
    expected_C[-1] += 1.0
    torch.testing.assert_close(grad_RC[-1].double(), expected_C, rtol=2**-8, atol=1e-7)
    assert grad_RC[0, 0].item() == pytest.approx(-(2.0**-17), rel=1e-2)
