"""What is kept of the logits: its error bound, its budget, when, and what a second
backward pass does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from head_tools import WHOLE, problem
from torch import Tensor

from rlhf_megatron.ranks.kernels import log_prob_chunked, tile_stash
from rlhf_megatron.ranks.kernels.log_prob import compute_linear_log_probs
from rlhf_megatron.ranks.kernels.logit_tile_ops import (
    STASH_SCALE,
    RowGradientInputs,
    RowStatistics,
    TorchTileOps,
)
from rlhf_megatron.ranks.kernels.tile_stash import StashedChunk, TileStash

ENOUGH = 2**30


def gradients(
    stash_bytes: int, dtype: torch.dtype, scale: float, entropy_weight: float
) -> tuple[Tensor, ...]:
    hidden_TH, weight_VH, targets_T = problem(64, 64, 6000, 6000, torch.float32, scale)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden_TH, weight_VH)]
    outputs = compute_linear_log_probs(
        *leaves, targets_T, **WHOLE, vocab_size=6000, chunk_size=2048, stash_bytes=stash_bytes
    )
    assert outputs.entropies_R is not None
    token_weights_T = torch.linspace(-1, 2, 64, dtype=dtype)
    loss = ((outputs.log_probs_R + entropy_weight * outputs.entropies_R) * token_weights_T).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("scale", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.01, 1.0])
def test_hidden_gradients_are_within_1e_4_of_float64(scale: float, entropy_weight: float) -> None:
    """Flat, usual and peaked distributions. It is an approximation: without a stash the
    error is 1e-6.
    """
    exact = gradients(0, torch.float64, scale, entropy_weight)
    stashed = gradients(ENOUGH, torch.float32, scale, entropy_weight)
    recomputed = gradients(0, torch.float32, scale, entropy_weight)
    for found, again, expected in zip(stashed, recomputed, exact, strict=True):
        assert (found.double() - expected).norm() < 1e-4 * expected.norm()
        assert (again.double() - expected).norm() < 2e-6 * expected.norm()


def tile_error(z_RC: Tensor, columns_R: Tensor) -> Tensor:
    """Of each row, the error of d log p / d z by the stash alone, relative to it (2-norm). All
    else is float64.
    """
    z_RC = z_RC.double()
    num_rows = len(z_RC)
    zero_R = z_RC.new_zeros(num_rows)
    one_R = z_RC.new_ones(num_rows)
    statistics = RowStatistics(-1e30 * one_R, zero_R, zero_R.clone(), None, None)
    stash_RC = z_RC.to(torch.float16)
    max_R = zero_R.clone()
    ops = TorchTileOps()
    ops.update_statistics(z_RC.clone(), None, columns_R, statistics, stash_RC, max_R)
    rows = RowGradientInputs(z_RC.logsumexp(1), None, one_R, None, None)
    found_RC = ops.compute_logit_gradient_from_stash(
        stash_RC, max_R, columns_R, rows, torch.float64
    )
    expected_RC = -z_RC.softmax(1)
    is_target_RC = torch.arange(z_RC.shape[1]) == columns_R[:, None]
    # 1 - p of the target as the sum of the others: no cancellation where it is certain.
    others_R = expected_RC.masked_fill(is_target_RC, 0.0).sum(1)
    expected_RC = torch.where(is_target_RC, -others_R[:, None], expected_RC)
    return (found_RC - expected_RC).norm(dim=1) / expected_RC.norm(dim=1)


def test_the_documented_bound_of_a_row_holds_and_is_nearly_reached() -> None:
    """2^-11 / sqrt 2, whatever the distribution; of two tokens, one just above a power of two, it
    is nearly that.
    """
    generator = torch.Generator().manual_seed(0)
    bound = 2.0**-11 / math.sqrt(2)
    for scale in (0.1, 1.0, 3.0, 8.0):
        z_RC = scale * torch.randn(200, 40, generator=generator)
        assert tile_error(z_RC, torch.randint(0, 40, (200,), generator=generator)).max() < bound
        assert tile_error(z_RC, z_RC.argmax(1)).max() < bound
    halfway = math.log(0.5 * (1 + 2.0**-11 * 0.99))
    worst = tile_error(
        torch.tensor([[0.0, halfway]], dtype=torch.float64), torch.tensor([0])
    ).item()
    assert 0.95 * bound < worst < bound


def test_what_a_tile_keeps_by_hand() -> None:
    """2^15 e^(z - max): 1, a half, and what float16 cannot tell from nothing."""
    z_RC = torch.tensor([[3.0, 3.0 - math.log(2), -25.0, -100.0]])
    statistics = RowStatistics(torch.full((1,), -1e30), torch.zeros(1), torch.zeros(1), None, None)
    stash_RC = torch.empty(1, 4, dtype=torch.float16)
    max_R = torch.empty(1)
    TorchTileOps().update_statistics(z_RC, None, torch.tensor([-1]), statistics, stash_RC, max_R)
    assert max_R.tolist() == [3.0]
    assert stash_RC[0].tolist() == [STASH_SCALE, STASH_SCALE / 2, 0.0, 0.0]  # e^-28 is below 2^-40
    rows = RowGradientInputs(
        torch.tensor([3.5]), None, torch.tensor([1.0]), torch.tensor([0.7]), torch.tensor([0.2])
    )
    found = TorchTileOps().compute_logit_gradient_from_stash(
        stash_RC, max_R, torch.tensor([-1]), rows, torch.float32
    )
    p = math.exp(-0.5)
    half = math.exp(-0.5) / 2
    expected = [-q * (1.0 + 0.2 * (math.log(q) + 0.7)) for q in (p, half)]
    assert found[0].tolist() == pytest.approx([*expected, 0.0, 0.0], rel=1e-5)


class Watched(TileStash):
    """Records what it has room for, and what is read: first columns of chunks, those of
    logits negative.
    """

    kept: tuple[int, ...] = ()
    read: tuple[int, ...] = ()

    def allocate_chunk(
        self, first_column: int, num_rows: int, num_columns: int, logits_like: Tensor
    ) -> StashedChunk | None:
        chunk = super().allocate_chunk(first_column, num_rows, num_columns, logits_like)
        Watched.kept += named(first_column, chunk)
        return chunk

    def pop_chunk(self, first_column: int) -> StashedChunk | None:
        chunk = super().pop_chunk(first_column)
        Watched.read += named(first_column, chunk)
        return chunk


def named(first: int, chunk: StashedChunk | None) -> tuple[int, ...]:
    if chunk is None:
        return ()
    assert chunk.values_RC.dtype == (torch.float32 if chunk.max_R is None else torch.float16)
    return (-first,) if chunk.max_R is None else (first,)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    monkeypatch.setattr(log_prob_chunked, "TileStash", Watched)
    monkeypatch.setattr(Watched, "kept", ())
    monkeypatch.setattr(Watched, "read", ())
    return Watched


def call(stash_bytes: int, *leaves: Tensor) -> Tensor:
    kwargs: dict[str, Any] = {**WHOLE, "vocab_size": 40, "chunk_size": 10}
    return compute_linear_log_probs(*leaves, **kwargs, stash_bytes=stash_bytes).log_probs_R


@pytest.mark.parametrize(
    ("stash_bytes", "exact_bytes", "kept"),
    [
        (0, 0, ()),
        (167, 0, ()),
        (168, 0, (0,)),
        (335, 0, (0,)),
        (400, 0, (0, 10)),
        (10**6, 0, (0, 10, 20, 30)),
        (0, 279, ()),
        (0, 600, (0, -10)),  # 0 has no sign: both are logits
        (168, 280, (0, -10)),
        (168, 10**6, (0, -10, -20, -30)),
    ],
)
def test_chunks_are_kept_while_they_fit(
    watched: type[Watched],
    monkeypatch: pytest.MonkeyPatch,
    stash_bytes: int,
    exact_bytes: int,
    kept: tuple[int, ...],
) -> None:
    """Of a chunk, 7 rows x (10 columns x 2 bytes + 4 bytes for the maximum) = 168 bytes, or 7
    x 10 x 4 = 280.
    """
    monkeypatch.setitem(tile_stash._EXACT_BYTES, "cpu", exact_bytes)
    leaves = problem(7, 8, 40, 40, torch.float32)
    call(stash_bytes, *leaves).sum().backward()
    assert watched.kept == watched.read == kept


def test_nothing_is_kept_where_nothing_needs_a_gradient(watched: type[Watched]) -> None:
    hidden_TH, weight_VH, targets_T = problem(7, 8, 40, 40, torch.float32)
    with torch.no_grad():
        call(ENOUGH, hidden_TH, weight_VH, targets_T)
    call(ENOUGH, hidden_TH.detach(), weight_VH.detach(), targets_T)
    assert watched.kept == ()
    call(ENOUGH, hidden_TH.detach(), weight_VH, targets_T).sum().backward()
    assert watched.kept == watched.read == (0, 10, 20, 30)


@pytest.mark.parametrize("num_without", [0, 3])
def test_logits_that_are_kept_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, num_without: int
) -> None:
    """The same products, whether they wait or are made twice; not quite those of fewer rows."""
    found = []
    for exact_bytes in (0, 500, 10**6):
        monkeypatch.setitem(tile_stash._EXACT_BYTES, "cpu", exact_bytes)
        leaves = problem(7, 8, 40, 40, torch.float64 if num_without else torch.float32)
        log_probs_T = call(0, *leaves)
        found.append(torch.autograd.grad(log_probs_T[num_without:].sum(), leaves[:2]))
    for others in found[1:]:
        for value, expected in zip(others, found[0], strict=True):
            if num_without:
                torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
            else:
                assert torch.equal(value, expected)


def test_a_second_backward_pass_computes_the_logits_again() -> None:
    hidden_TH, weight_VH, targets_T = problem(7, 8, 40, 40, torch.float32)
    leaves = [hidden_TH, weight_VH]
    exact = torch.autograd.grad(call(0, *leaves, targets_T).sum(), leaves)
    loss = call(ENOUGH, *leaves, targets_T).sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    for stashed, again, expected in zip(first, second, exact, strict=True):
        assert torch.equal(again, expected) and not torch.equal(stashed, expected)
        assert (stashed - expected).norm() < 1e-3 * expected.norm()


def test_repeats_bit_for_bit() -> None:
    for first, second in zip(
        *(gradients(ENOUGH, torch.float32, 3.0, 0.1) for _ in range(2)), strict=True
    ):
        assert torch.equal(first, second)
