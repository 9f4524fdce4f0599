"""linear_log_prob on one rank: against numbers by hand, against its reference, its gradient, its
largest temporary.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from head_tools import WHOLE, LargestFloat, problem
from torch import Tensor

from rlhf_megatron.ranks.kernels import log_prob_chunked, tile_stash
from rlhf_megatron.ranks.kernels.log_prob import compute_linear_log_probs


def results(
    backend: str, hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, **kwargs: Any
) -> list[Tensor]:
    """Log-probs, entropies, and the gradients of a sum that weighs each token of
    both differently.
    """
    kwargs = {**WHOLE, "vocab_size": weight_VH.shape[0], "chunk_size": 16, **kwargs}
    log_probs_T, entropies_T, _ = compute_linear_log_probs(
        hidden_TH, weight_VH, targets_T, backend=backend, **kwargs
    )
    token_weights_T = torch.linspace(-1.0, 2.0, len(targets_T), dtype=log_probs_T.dtype)
    loss = (log_probs_T * token_weights_T).sum()
    if entropies_T is not None:
        loss = loss + (entropies_T * token_weights_T.flip(0)).sum()
    grads = torch.autograd.grad(loss, [hidden_TH, weight_VH])
    return [log_probs_T, *([] if entropies_T is None else [entropies_T]), *grads]


def test_by_hand() -> None:
    # Logits log 1, log 2, log 5 at temperature 1: probabilities 1/8, 2/8, 5/8.
    hidden_TH = torch.tensor([[1.0], [1.0]])
    weight_VH = torch.tensor([[math.log(1)], [math.log(2)], [math.log(5)]])
    targets_T = torch.tensor([2, 0])
    log_probs_T, entropies_T, _ = compute_linear_log_probs(
        hidden_TH, weight_VH, targets_T, **WHOLE, vocab_size=3, chunk_size=2
    )
    assert log_probs_T.tolist() == pytest.approx([math.log(5 / 8), math.log(1 / 8)], rel=1e-6)
    entropy = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropies_T is not None and entropies_T.tolist() == pytest.approx(
        [entropy] * 2, rel=1e-6
    )


def test_temperature_by_hand() -> None:
    # Logits 0 and 2 log 3 at temperature 2: probabilities 1/4 and 3/4.
    weight_VH = torch.tensor([[0.0], [2 * math.log(3)]])
    found, none, _ = compute_linear_log_probs(
        torch.ones(1, 1),
        weight_VH,
        torch.tensor([1]),
        temperature=2.0,
        vocab_start=0,
        vocab_size=2,
        tp_group=None,
        chunk_size=8,
        with_entropy=False,
    )
    assert found.item() == pytest.approx(math.log(3 / 4)) and none is None


@pytest.mark.parametrize("chunk_size", [1, 5, 11, 13, 64])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradcheck(chunk_size: int, temperature: float) -> None:
    hidden_TH, weight_VH, targets_T = problem(6, 4, 13, 11, torch.float64)

    def function(hidden_TH: Tensor, weight_VH: Tensor, with_entropy: bool) -> Any:
        log_probs_T, entropies_T, _ = compute_linear_log_probs(
            hidden_TH,
            weight_VH,
            targets_T,
            temperature=temperature,
            vocab_start=0,
            vocab_size=11,
            tp_group=None,
            chunk_size=chunk_size,
            with_entropy=with_entropy,
        )
        return log_probs_T if entropies_T is None else (log_probs_T, entropies_T)

    # A second backward pass makes logits of the rows with a gradient alone: products of fewer rows,
    # other last bits.
    assert torch.autograd.gradcheck(
        lambda h, w: function(h, w, True), (hidden_TH, weight_VH), nondet_tol=1e-12
    )
    assert torch.autograd.gradcheck(
        lambda h, w: function(h, w, False), (hidden_TH, weight_VH), nondet_tol=1e-12
    )
    assert torch.autograd.gradcheck(
        lambda h, w: function(h, w, True)[1], (hidden_TH, weight_VH), nondet_tol=1e-12
    )


@pytest.mark.parametrize(
    ("num_tokens", "rows", "chunk_size"),
    [(1, 1, 1), (1, 257, 64), (600, 1003, 128), (31, 97, 4096)],
)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_equals_the_reference_in_float64(
    num_tokens: int, rows: int, chunk_size: int, with_entropy: bool
) -> None:
    """600 tokens are two row blocks, the second a short one."""
    tensors = problem(num_tokens, 24, rows, rows, torch.float64, scale=3.0)
    kwargs: dict[str, Any] = {
        "chunk_size": chunk_size,
        "with_entropy": with_entropy,
        "temperature": 0.8,
    }
    for found, expected in zip(
        results("chunked", *tensors, **kwargs),
        results("reference", *tensors, **kwargs),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_16_and_32_bit_inputs_keep_float32_precision(dtype: torch.dtype) -> None:
    """Error against float64 on the same (rounded) inputs: that of the reference in float32, not
    that of bfloat16.
    """
    tensors = problem(70, 64, 515, 515, dtype, scale=4.0)
    exact = results(
        "reference", *(t.detach().double().requires_grad_() for t in tensors[:2]), tensors[2]
    )
    found = results("chunked", *tensors)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert found[2].dtype == found[3].dtype == dtype
    for value, expected in zip(found[:2], exact[:2], strict=True):
        assert (value - expected).abs().max() < 1e-5
    # the one rounding of the result to bfloat16 is 2^-9
    bound = 2e-6 if dtype == torch.float32 else 3e-3
    for value, expected in zip(found[2:], exact[2:], strict=True):
        assert (value.double() - expected).norm() < bound * expected.norm()


def test_padded_rows_have_no_probability_and_no_gradient() -> None:
    hidden_TH, weight_VH, targets_T = problem(9, 8, 21, 17, torch.float64)
    with torch.no_grad():
        weight_VH[17:] = 100.0 * hidden_TH[0]  # would win if it counted
    found = results("chunked", hidden_TH, weight_VH, targets_T, vocab_size=17, chunk_size=6)
    cut = weight_VH.detach()[:17].requires_grad_()
    expected = results("reference", hidden_TH, cut, targets_T)
    for value, want in zip(found[:3], expected[:3], strict=True):
        torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found[3][:17], expected[3], rtol=1e-12, atol=1e-13)
    assert torch.equal(found[3][17:], torch.zeros(4, 8, dtype=torch.float64))


@pytest.mark.parametrize("offset", [-90.0, -1e4, 90.0, 1e4])
def test_logits_far_from_zero(offset: float) -> None:
    """A common offset changes nothing: neither underflow (a running maximum that starts
    at 0) nor overflow.
    """
    hidden_TH, weight_VH, targets_T = problem(5, 8, 40, 40, torch.float64)
    ones = torch.ones(5, 1, dtype=torch.float64)
    shifted = torch.cat(
        [weight_VH.detach(), torch.full((40, 1), offset, dtype=torch.float64)], dim=1
    )
    far = [
        torch.cat([hidden_TH.detach(), ones], dim=1).float().requires_grad_(),
        shifted.float().requires_grad_(),
    ]
    found = results("chunked", *far, targets_T, chunk_size=7)
    expected = results("reference", hidden_TH, weight_VH, targets_T)
    tolerance = 2e-7 * max(abs(offset), 10.0)  # float32 logits of that size
    for value, want in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(value.double(), want, rtol=0, atol=tolerance)
    torch.testing.assert_close(found[2][:, :8].double(), expected[2], rtol=0, atol=3 * tolerance)


def test_a_certain_token_and_an_impossible_one() -> None:
    weight_VH = torch.tensor([[300.0], [-300.0]], requires_grad=True)
    log_probs_T, entropies_T, _ = compute_linear_log_probs(
        torch.ones(2, 1), weight_VH, torch.tensor([0, 1]), **WHOLE, vocab_size=2, chunk_size=1
    )
    assert log_probs_T.tolist() == [0.0, -600.0]
    assert entropies_T is not None and entropies_T.tolist() == [0.0, 0.0]
    (grad_VH,) = torch.autograd.grad(log_probs_T.sum() + entropies_T.sum(), weight_VH)
    assert grad_VH.tolist() == [[-1.0], [1.0]]


def test_no_rows_still_reach_the_weight() -> None:
    """A replica without response tokens: empty results whose backward gives the hooks a
    zero gradient.
    """
    weight_VH = torch.randn(7, 4, requires_grad=True)
    hidden_TH = torch.empty(0, 4, requires_grad=True)
    log_probs_T, entropies_T, _ = compute_linear_log_probs(
        hidden_TH, weight_VH, torch.empty(0, dtype=torch.int64), **WHOLE, vocab_size=7, chunk_size=3
    )
    assert log_probs_T.shape == (0,) and entropies_T is not None and entropies_T.shape == (0,)
    (log_probs_T.sum() + entropies_T.sum()).backward()
    assert weight_VH.grad is not None and torch.equal(weight_VH.grad, torch.zeros(7, 4))
    assert hidden_TH.grad is not None and hidden_TH.grad.shape == (0, 4)


def test_a_target_that_no_shard_owns_is_minus_infinity() -> None:
    hidden_TH, weight_VH, _ = problem(2, 4, 10, 10, torch.float32)
    targets_T = torch.tensor([3, 9])
    log_probs_T, _, _ = compute_linear_log_probs(
        hidden_TH, weight_VH, targets_T, **WHOLE, vocab_size=9, chunk_size=4
    )
    assert math.isfinite(log_probs_T[0].item()) and log_probs_T[1].item() == -math.inf


def test_only_what_needs_a_gradient_gets_one() -> None:
    hidden_TH, weight_VH, targets_T = problem(5, 4, 10, 10, torch.float64)
    full = results("chunked", hidden_TH, weight_VH, targets_T)
    for frozen in (0, 1):
        leaves = [hidden_TH.detach(), weight_VH.detach()]
        leaves[1 - frozen].requires_grad_()
        log_probs_T, entropies_T, _ = compute_linear_log_probs(
            *leaves, targets_T, **WHOLE, vocab_size=10, chunk_size=16
        )
        assert entropies_T is not None
        token_weights_T = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
        (
            (log_probs_T * token_weights_T).sum() + (entropies_T * token_weights_T.flip(0)).sum()
        ).backward()
        assert leaves[frozen].grad is None
        assert torch.equal(leaves[1 - frozen].grad, full[2 + 1 - frozen])


def test_repeats_bit_for_bit() -> None:
    tensors = problem(64, 16, 301, 301, torch.float32)
    for first, second in zip(
        results("chunked", *tensors), results("chunked", *tensors), strict=True
    ):
        assert torch.equal(first, second)


def test_no_temporary_is_larger_than_a_tile_forward_and_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(log_prob_chunked._TILE_ROWS, "cpu", 32)
    monkeypatch.setitem(tile_stash._EXACT_BYTES, "cpu", 0)
    hidden_TH, weight_VH, targets_T = problem(256, 4, 2048, 2048, torch.float32)
    recorded = {}
    for backend in ("chunked", "reference"):
        with LargestFloat() as mode:
            results(backend, hidden_TH, weight_VH, targets_T, chunk_size=512)
        recorded[backend] = mode.largest
    assert recorded == {"chunked": 32 * 512, "reference": 256 * 2048}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature \(0.0\) must be positive"),
        ({"chunk_size": 0}, r"chunk_size \(0\) must be positive"),
        ({"backend": "fast"}, "unknown backend 'fast'"),
        ({"targets_R": torch.zeros(4, dtype=torch.int64)}, "one entry for each of 3 rows"),
        ({"weight_VH": torch.zeros(5, 3)}, r"hidden \(3, 2\) and weight \(5, 3\)"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "hidden_SH": torch.zeros(3, 2),
        "weight_VH": torch.zeros(5, 2),
        "targets_R": torch.zeros(3, dtype=torch.int64),
        **WHOLE,
        "vocab_size": 5,
        "chunk_size": 2,
    }
    with pytest.raises(ValueError, match=message):
        compute_linear_log_probs(**{**arguments, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype) -> None:
    hidden_TH, weight_VH, targets_T = problem(300, 64, 1003, 1000, dtype, scale=4.0)
    exact = results(
        "reference",
        hidden_TH.detach().double().requires_grad_(),
        weight_VH.detach().double().requires_grad_(),
        targets_T,
        vocab_size=1000,
    )
    leaves = [t.detach().cuda().requires_grad_() for t in (hidden_TH, weight_VH)]
    with torch.device("cuda"):
        found = results("chunked", *leaves, targets_T.cuda(), vocab_size=1000, chunk_size=256)
    for value, expected in zip(found[:2], exact[:2], strict=True):
        assert (value.double().cpu() - expected).abs().max() < 2e-5
    bound = 1e-5 if dtype == torch.float32 else 6e-3  # logit gradients enter the GEMMs in bfloat16
    for value, expected in zip(found[2:], exact[2:], strict=True):
        assert (value.double().cpu() - expected).norm() < bound * expected.norm()
