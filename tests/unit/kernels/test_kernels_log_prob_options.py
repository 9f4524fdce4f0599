"""linear_log_prob on one rank: chosen rows, a temperature a row, squares, a sink, rows without a
gradient, errors.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from head_tools import WHOLE, LargestFloat, Sink, problem
from torch import Tensor

from rlhf_megatron.ranks.kernels import log_prob
from rlhf_megatron.ranks.kernels.log_prob import (
    HeadOutputs,
    LogProbBackend,
    compute_linear_log_probs,
)
from rlhf_megatron.ranks.kernels.logit_tile_ops import RowGradientInputs, TorchTileOps

BACKENDS: tuple[LogProbBackend, ...] = ("reference", "chunked")


def loss_of(outputs: HeadOutputs, grads_R: Tensor) -> Tensor:
    assert outputs.entropies_R is not None
    grads_R = grads_R.to(outputs.log_probs_R.dtype)
    return ((outputs.log_probs_R - 0.3 * outputs.entropies_R) * grads_R).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_temperatures_and_squares_by_hand(backend: LogProbBackend) -> None:
    """Logits log 1, log 2, log 5: probabilities 1/8, 2/8, 5/8 at temperature 1; 1/30,
    4/30, 25/30 at 1/2.
    """
    # tokens 0 and 2 are no rows
    hidden_SH = torch.tensor([[7.0], [1.0], [9.0], [1.0]], requires_grad=True)
    weight_VH = torch.tensor([[math.log(1)], [math.log(2)], [math.log(5)]], requires_grad=True)
    outputs = compute_linear_log_probs(
        hidden_SH,
        weight_VH,
        torch.tensor([2, 0]),
        rows_R=torch.tensor([3, 1]),
        **{**WHOLE, "temperature": torch.tensor([1.0, 0.5])},
        vocab_size=3,
        chunk_size=2,
        with_sum_squares=True,
        backend=backend,
    )
    assert outputs.log_probs_R.tolist() == pytest.approx(
        [math.log(5 / 8), math.log(1 / 30)], rel=1e-6
    )
    assert outputs.sum_squares_R is not None and outputs.entropies_R is not None
    assert outputs.sum_squares_R.tolist() == pytest.approx(
        [30 / 64, (1 + 16 + 625) / 900], rel=1e-6
    )
    entropies = [
        -sum(p * math.log(p) for p in row)
        for row in ((1 / 8, 2 / 8, 5 / 8), (1 / 30, 4 / 30, 25 / 30))
    ]
    assert outputs.entropies_R.tolist() == pytest.approx(entropies, rel=1e-6)
    assert not outputs.sum_squares_R.requires_grad

    outputs.log_probs_R.sum().backward()
    # d log p / d logit = (1[target] - p) / temperature; the hidden state is 1, so the weight's
    # gradient is their sum.
    by_token = [[-1 / 8, -2 / 8, 3 / 8], [2 * 29 / 30, -2 * 4 / 30, -2 * 25 / 30]]
    assert weight_VH.grad is not None and hidden_SH.grad is not None
    assert weight_VH.grad[:, 0].tolist() == pytest.approx(
        [a + b for a, b in zip(*by_token, strict=True)], rel=1e-5
    )
    logits = [math.log(1), math.log(2), math.log(5)]
    of_3, of_1 = (sum(g * z for g, z in zip(row, logits, strict=True)) for row in by_token)
    assert hidden_SH.grad[:, 0].tolist() == pytest.approx([0.0, of_1, 0.0, of_3], rel=1e-5)


def test_gradcheck_of_rows_with_a_temperature_each() -> None:
    hidden_SH, weight_VH, _ = problem(6, 4, 13, 11, torch.float64)
    rows_R = torch.tensor([4, 0, 5])
    targets_R = torch.tensor([1, 10, 7])
    temperature_R = torch.tensor([0.5, 1.0, 1.7])

    def function(hidden_SH: Tensor, weight_VH: Tensor) -> Any:
        return compute_linear_log_probs(
            hidden_SH,
            weight_VH,
            targets_R,
            rows_R=rows_R,
            **{**WHOLE, "temperature": temperature_R},
            vocab_size=11,
            chunk_size=5,
        )[:2]

    # A second backward pass makes logits of the rows with a gradient alone: products of fewer rows,
    # other last bits.
    assert torch.autograd.gradcheck(function, (hidden_SH, weight_VH), nondet_tol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_rows_of_some_tokens(backend: LogProbBackend) -> None:
    hidden_SH, weight_VH, _ = problem(5, 4, 10, 10, torch.float32)
    none_R = torch.empty(0, dtype=torch.int64)
    sink = Sink(weight_VH, start=3.0)
    outputs = compute_linear_log_probs(
        hidden_SH,
        weight_VH,
        none_R,
        rows_R=none_R,
        **{**WHOLE, "temperature": torch.empty(0)},
        vocab_size=10,
        chunk_size=4,
        with_sum_squares=True,
        weight_grad_sink=sink,
        stash_bytes=10**6,
        backend=backend,
    )
    assert [None if x is None else x.shape for x in outputs] == [(0,)] * 3
    loss_of(outputs, torch.empty(0)).backward()
    assert hidden_SH.grad is not None and torch.equal(hidden_SH.grad, torch.zeros(5, 4))
    assert sink.num_asked == 1 and torch.equal(sink.buffer, torch.full((10, 4), 3.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "buffer_dtype", "bound"),
    [
        (torch.float64, torch.float64, 1e-12),
        (
            torch.float64,
            torch.float32,
            1e-7,
        ),  # a float64 model whose gradients are kept as float32: rounded once
        (torch.float32, torch.float32, 3e-6),
        (torch.bfloat16, torch.float32, 3e-6),  # the gradient itself is never bfloat16
    ],
)
def test_the_sink_gets_what_autograd_would(
    backend: LogProbBackend, dtype: torch.dtype, buffer_dtype: torch.dtype, bound: float
) -> None:
    hidden_SH, weight_VH, targets_R = problem(600, 16, 70, 65, dtype)  # 600 rows: two blocks
    kwargs: dict[str, Any] = {**WHOLE, "vocab_size": 65, "chunk_size": 16}
    grads_R = torch.linspace(-1, 1, 600)
    leaves = [x.detach().double().requires_grad_() for x in (hidden_SH, weight_VH)]
    loss_of(
        compute_linear_log_probs(*leaves, targets_R, **kwargs, backend="reference"), grads_R
    ).backward()

    sink = Sink(weight_VH, buffer_dtype)
    for num_passes in (1, 2):  # it adds
        loss_of(
            compute_linear_log_probs(
                hidden_SH, weight_VH, targets_R, **kwargs, weight_grad_sink=sink, backend=backend
            ),
            grads_R,
        ).backward()
        expected = num_passes * leaves[1].grad
        # autograd rounds to bfloat16 there
        if not (backend == "reference" and dtype == torch.bfloat16):
            assert (sink.buffer.double() - expected).norm() < bound * expected.norm()
        assert sink.num_asked == num_passes
    assert torch.equal(sink.buffer[65:], torch.zeros(5, 16, dtype=buffer_dtype))
    assert weight_VH.grad is not None


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tied_weight_gets_nothing_from_the_sink(backend: LogProbBackend) -> None:
    hidden_SH, weight_VH, targets_R = problem(5, 4, 10, 10, torch.float32)
    sink = Sink(weight_VH)
    sink.is_tied = True
    kwargs: dict[str, Any] = {
        **WHOLE,
        "vocab_size": 10,
        "chunk_size": 4,
        "weight_grad_sink": sink,
        "backend": backend,
    }
    loss_of(
        compute_linear_log_probs(hidden_SH, weight_VH, targets_R, **kwargs), torch.ones(5)
    ).backward()
    assert weight_VH.grad is None and sink.num_asked == 1 and sink.buffer.abs().sum() > 0


def test_a_sink_of_another_shape_is_refused() -> None:
    hidden_SH, weight_VH, targets_R = problem(5, 4, 10, 10, torch.float32)
    outputs = compute_linear_log_probs(
        hidden_SH,
        weight_VH,
        targets_R,
        **WHOLE,
        vocab_size=10,
        chunk_size=4,
        weight_grad_sink=Sink(torch.zeros(9, 4)),
    )
    with pytest.raises(ValueError, match=r"buffer \(9, 4\) must have the weight's shape \(10, 4\)"):
        loss_of(outputs, torch.ones(5)).backward()


def test_with_a_sink_nothing_of_the_weights_size_is_made() -> None:
    hidden_SH, weight_VH, targets_R = problem(16, 128, 300, 300, torch.float32)
    kwargs: dict[str, Any] = {**WHOLE, "vocab_size": 300, "chunk_size": 50}
    recorded = {}
    for sink in (None, Sink(weight_VH)):
        with LargestFloat() as mode:
            loss_of(
                compute_linear_log_probs(
                    hidden_SH, weight_VH, targets_R, **kwargs, weight_grad_sink=sink
                ),
                torch.ones(16),
            ).backward()
        recorded[sink is not None] = mode.largest
    assert recorded == {False: 300 * 128, True: 16 * 128}  # with: the hidden states' gradient


class Watched(TorchTileOps):
    """Records how many rows each tile of the backward pass has."""

    num_rows: tuple[int, ...] = ()

    def compute_logit_gradient(
        self,
        logits_RC: Tensor,
        columns_R: Tensor,
        gradient_inputs: RowGradientInputs,
        dtype: torch.dtype,
        first_column: int = 0,
    ) -> Tensor:
        Watched.num_rows += (len(logits_RC),)
        return super().compute_logit_gradient(
            logits_RC, columns_R, gradient_inputs, dtype, first_column
        )


@pytest.mark.parametrize("is_selected", [False, True])
def test_rows_without_a_gradient_are_left_out(
    monkeypatch: pytest.MonkeyPatch, is_selected: bool
) -> None:
    """Neither log-prob nor entropy has one: the GEMMs do not see the row. One of the two is
    enough to stay.
    """
    hidden_SH, weight_VH, targets_T = problem(9, 4, 12, 12, torch.float64)
    rows_R = torch.tensor([8, 1, 0, 5, 4]) if is_selected else torch.arange(9)
    targets_R = targets_T[: len(rows_R)]
    grads_2R = torch.zeros(2, len(rows_R), dtype=torch.float64)
    grads_2R[0, 1] = 2.0
    grads_2R[1, 3] = -1.0
    found = []
    for backend in BACKENDS:
        monkeypatch.setattr(log_prob, "TorchTileOps", Watched)
        monkeypatch.setattr(Watched, "num_rows", ())
        outputs = compute_linear_log_probs(
            hidden_SH,
            weight_VH,
            targets_R,
            rows_R=rows_R if is_selected else None,
            **{**WHOLE, "temperature": torch.linspace(0.5, 2, len(rows_R))},
            vocab_size=12,
            chunk_size=6,
            backend=backend,
        )
        assert outputs.entropies_R is not None
        loss = (torch.stack([outputs.log_probs_R, outputs.entropies_R]) * grads_2R).sum()
        found.append(torch.autograd.grad(loss, [hidden_SH, weight_VH]))
    assert Watched.num_rows == (2, 2)
    for value, expected in zip(*found, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)


def test_all_rows_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero gradients, and the hooks of a sink still fire."""
    hidden_SH, weight_VH, targets_R = problem(5, 4, 10, 10, torch.float32)
    monkeypatch.setattr(log_prob, "TorchTileOps", Watched)
    monkeypatch.setattr(Watched, "num_rows", ())
    sink = Sink(weight_VH, start=2.0)
    outputs = compute_linear_log_probs(
        hidden_SH, weight_VH, targets_R, **WHOLE, vocab_size=10, chunk_size=4, weight_grad_sink=sink
    )
    loss_of(outputs, torch.zeros(5)).backward()
    assert hidden_SH.grad is not None and torch.equal(hidden_SH.grad, torch.zeros(5, 4))
    assert (
        sink.num_asked == 1
        and torch.equal(sink.buffer, torch.full((10, 4), 2.0))
        and Watched.num_rows == ()
    )


def test_a_gradient_that_is_no_number_is_not_left_out() -> None:
    hidden_SH, weight_VH, targets_R = problem(5, 4, 10, 10, torch.float32)
    outputs = compute_linear_log_probs(
        hidden_SH, weight_VH, targets_R, **WHOLE, vocab_size=10, chunk_size=4
    )
    loss_of(outputs, torch.tensor([0.0, math.nan, 0.0, 0.0, 0.0])).backward()
    assert hidden_SH.grad is not None and weight_VH.grad is not None
    assert hidden_SH.grad.isnan().all(1).tolist() == [False, True, False, False, False]
    assert weight_VH.grad.isnan().all()


@pytest.mark.parametrize("offset", [0.0, -200.0, 200.0])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_errors_are_those_of_naive_float32_or_smaller(offset: float, temperature: float) -> None:
    """Against float64: log-probs to 1e-5 at logits around 0, gradients at most twice as far off
    as naive ones.
    """
    hidden_TH, weight_VH, targets_T = problem(128, 64, 3000, 3000, torch.float32, scale=2.0)
    with torch.no_grad():
        hidden_TH[:, 0] = 1.0
        weight_VH[:, 0] = offset
    kwargs: dict[str, Any] = {
        **WHOLE,
        "temperature": temperature,
        "vocab_size": 3000,
        "chunk_size": 1024,
    }
    grads_T = torch.linspace(-1, 2, 128)

    def run(backend: LogProbBackend, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden_TH, weight_VH)]
        outputs = compute_linear_log_probs(*leaves, targets_T, **kwargs, backend=backend)
        return [
            x.double()
            for x in (*outputs[:2], *torch.autograd.grad(loss_of(outputs, grads_T), leaves))
            if x is not None
        ]

    exact = run("reference", torch.float64)
    naive = run("reference", torch.float32)
    found = run("chunked", torch.float32)
    for value, other, expected in zip(found[:2], naive[:2], exact[:2], strict=True):
        if offset == 0:
            assert (value - expected).abs().max() < 1e-5
        assert (value - expected).abs().max() < 2 * (other - expected).abs().max()
    for value, other, expected in zip(found[2:], naive[2:], exact[2:], strict=True):
        assert (value - expected).norm() < 2 * (other - expected).norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": torch.tensor([1.0, 0.0, 2.0])}, r"temperature \(0.0\) must be positive"),
        (
            {"temperature": torch.tensor([1.0, math.nan, 2.0])},
            r"temperature \(nan\) must be positive",
        ),
        (
            {"temperature": torch.ones(2)},
            r"temperature \(2,\) must be one number, or one for each of 3 rows",
        ),
        ({"stash_bytes": -1}, r"stash_bytes \(-1\) must not be negative"),
        ({"softcap": 0.0}, r"softcap \(0.0\) must be positive"),
        (
            {"rows_R": torch.tensor([0, 1])},
            r"targets \(3,\) must have one entry for each of 2 rows",
        ),
    ],
)
def test_bad_options_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        **WHOLE,
        "targets_R": torch.zeros(3, dtype=torch.int64),
        "vocab_size": 5,
        "chunk_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        compute_linear_log_probs(torch.zeros(3, 2), torch.zeros(5, 2), **{**arguments, **changes})
