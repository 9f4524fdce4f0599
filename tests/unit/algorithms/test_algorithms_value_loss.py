"""The critic's clipped loss: values by hand, gradients in float64."""

import pytest
import torch
from loss_tools import VALUE_LOSSES as TABLE
from torch import Tensor

from rlhf_megatron.algorithms.losses.policy_loss import attach_gradient
from rlhf_megatron.algorithms.losses.value_loss import compute_value_loss
from rlhf_megatron.algorithms.metric_names import METRICS


@pytest.mark.parametrize(("value", "old", "target", "loss", "grad", "clipped"), TABLE)
def test_by_hand(
    value: float, old: float, target: float, loss: float, grad: float, clipped: int
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    outputs = compute_value_loss(
        values, torch.tensor([old]).double(), torch.tensor([target]).double(), 0.5
    )
    assert outputs.token_loss_T.item() == pytest.approx(loss, rel=1e-12)
    found = outputs.grad_T
    assert found is not None
    assert found.item() == pytest.approx(grad, rel=1e-12, abs=1e-15)
    assert outputs.metrics["critic/vf_loss"].item() == outputs.token_loss_T.item()
    assert outputs.metrics["critic/vf_clipfrac"].item() == clipped
    assert outputs.metrics["critic/vpred_mean"].item() == value
    assert set(outputs.metrics) <= set(METRICS)
    assert not any(metric.requires_grad for metric in outputs.metrics.values())


@pytest.mark.parametrize(("value", "old", "target"), [row[:3] for row in TABLE])
def test_range_zero_is_no_clip(value: float, old: float, target: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    outputs = compute_value_loss(
        values, torch.tensor([old]).double(), torch.tensor([target]).double(), 0.0
    )
    assert outputs.token_loss_T.item() == pytest.approx((value - target) ** 2 / 2, rel=1e-12)
    found = outputs.grad_T
    assert found is not None
    assert found.item() == pytest.approx(value - target, rel=1e-12, abs=1e-15)
    assert outputs.metrics["critic/vf_clipfrac"].item() == 0


def test_a_tie_has_the_free_gradient() -> None:
    """Past the return by as much as the held value lacks: neither is larger, and
    nothing was clipped.
    """
    values = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    outputs = compute_value_loss(
        values, torch.tensor([0.5]).double(), torch.tensor([1.5]).double(), 0.5
    )
    found = outputs.grad_T
    assert found is not None
    assert found.item() == 0.5 and outputs.metrics["critic/vf_clipfrac"].item() == 0


def test_the_gradient_is_that_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(5)
    old, target = (torch.randn(96, generator=generator, dtype=torch.float64) for _ in range(2))
    values = (
        old + 0.5 * torch.randn(96, generator=generator, dtype=torch.float64)
    ).requires_grad_()

    def loss(values_T: Tensor) -> Tensor:
        outputs = compute_value_loss(values_T, old, target, 0.3)
        assert outputs.grad_T is not None
        return attach_gradient(outputs.token_loss_T, outputs.grad_T, values_T)

    assert torch.autograd.gradcheck(loss, (values,))
    moved = (values - old).detach()
    towards = torch.where(moved > 0, target > values.detach(), target < values.detach())
    is_held = (moved.abs() > 0.3) & (
        towards | ((old + 0.3 * moved.sign() - target).abs() > (values - target).abs())
    )
    assert 10 < int(is_held.sum()) < 86
    (found,) = torch.autograd.grad(loss(values).sum(), values)
    torch.testing.assert_close(
        found, (values.detach() - target).masked_fill(is_held, 0.0), rtol=1e-12, atol=1e-15
    )
    assert torch.equal(
        compute_value_loss(values, old, target, 0.3).metrics["critic/vf_clipfrac"], is_held.double()
    )


def test_no_tokens_and_a_negative_range() -> None:
    nothing = compute_value_loss(torch.zeros(0), torch.zeros(0), torch.zeros(0), 0.5)
    assert nothing.token_loss_T.shape == (0,) and all(
        metric.shape == (0,) for metric in nothing.metrics.values()
    )
    with pytest.raises(AssertionError, match=r"-0\.5 is negative"):
        compute_value_loss(torch.zeros(1), torch.zeros(1), torch.zeros(1), -0.5)
