"""The losses of rows against autograd over the same formulas, with the same metrics; none
waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from device_waits import DeviceWaits
from loss_tools import VALUE_LOSSES
from test_kernels_policy_loss import small_blocks  # noqa: F401, a fixture
from torch import Tensor

from benchmarks.kernels.eager import eager_value
from benchmarks.kernels.policy_loss import eager_sums
from rlhf_megatron.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.kl_estimators import KLType
from rlhf_megatron.algorithms.losses.policy_loss import LOSSES_WITH_GRADIENT, mark_returns_gradient
from rlhf_megatron.algorithms.metric_names import METRICS
from rlhf_megatron.config.schema import ActorConfig, PolicyLossConfig
from rlhf_megatron.ranks.kernels.policy_row_loss import PolicyRowLoss
from rlhf_megatron.ranks.kernels.weighted_row_loss import (
    LossAndMetricSums,
    compute_value_loss_sums,
    weigh_loss_terms,
)
from rlhf_megatron.ranks.workers.actor_losses import make_policy_row_loss, make_row_losses

FULL = ActorConfig(entropy_coeff=0.03, use_kl_loss=True, kl_loss_coef=0.1)


def make_columns(num_rows: int, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(num_rows)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_rows, generator=generator, dtype=torch.float64)

    old = -normal(1.0).abs()
    columns = {
        "log_probs": old + normal(0.4),
        "entropies": normal(1.0).abs(),
        "old_log_probs": old,
        "ref_log_probs": old + normal(0.3),
        "rollout_log_probs": old + normal(0.01),
        "advantages": normal(1.0),
        "values": normal(1.0),
        "old_values": normal(1.0),
        "returns": normal(1.0),
        "loss_weights": normal(1.0).abs() / max(num_rows, 1),
        "metric_weights": normal(1.0).abs() / max(num_rows, 1),
    }
    return {name: column.to(device, dtype) for name, column in columns.items()}


RowSums = Callable[[Tensor, Tensor | None, dict[str, Tensor]], LossAndMetricSums]


def run(
    row_loss: RowSums, columns: dict[str, Tensor], has_entropies: bool = True
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """(loss and metrics, gradients of log-probs and entropies)."""
    leaves = [columns[name].clone().requires_grad_() for name in ("log_probs", "entropies")]
    value, sums = row_loss(leaves[0], leaves[1] if has_entropies else None, columns)
    value.backward()
    return {"value": value.detach(), **sums}, [
        leaf.grad for leaf in leaves if leaf.grad is not None
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", get_args(KLType))
@pytest.mark.parametrize("num_rows", [0, 70])
def test_fused_and_eager_give_the_same(
    kind: KLType,
    num_rows: int,
    dtype: torch.dtype,
    small_blocks: None,  # noqa: F811
) -> None:
    columns = make_columns(num_rows, dtype)
    fused = make_policy_row_loss(replace(FULL, kl_loss_type=kind))
    found, grads = run(fused, columns)
    expected, expected_grads = run(partial(eager_sums, fused), columns)
    assert (
        list(found) == list(expected)
        and set(found) <= {"value", *METRICS}
        and "actor/kl_loss" in found
    )
    assert torch.equal(found["value"], found["actor/loss"])
    relative, absolute = (1e-5, 1e-6) if dtype == torch.float32 else (1e-12, 1e-14)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=relative, atol=absolute, msg=name)
    assert len(grads) == len(expected_grads) == 2
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=relative, atol=absolute / 100)


@pytest.fixture
def new_loss() -> Iterator[PolicyRowLoss]:
    """A policy loss that tells its gradient, registered for the time of a test."""

    @POLICY_LOSSES.register("newest", needs=("advantages",))
    @mark_returns_gradient
    def newest(inputs: PolicyLossInputs, params: None) -> PolicyLossOutputs:
        assert not inputs.log_probs_T.requires_grad or not torch.is_grad_enabled()
        grad_T = -inputs.advantages_T
        return PolicyLossOutputs(grad_T * inputs.log_probs_T, {}, grad_T)

    yield make_policy_row_loss(replace(FULL, policy_loss=PolicyLossConfig("newest")))
    LOSSES_WITH_GRADIENT.remove(newest)
    del POLICY_LOSSES._entries["newest"]


def test_a_new_loss_brings_its_gradient(new_loss: PolicyRowLoss) -> None:
    columns = make_columns(30, torch.float32)

    def newest(inputs: PolicyLossInputs, params: None) -> PolicyLossOutputs:
        return PolicyLossOutputs(-inputs.advantages_T * inputs.log_probs_T, {})

    found, grads = run(new_loss, columns)
    expected, expected_grads = run(replace(new_loss, loss=newest), columns)
    assert "actor/pg_clipfrac" not in found and list(found) == list(expected)
    for one, other in zip(
        [*found.values(), *grads], [*expected.values(), *expected_grads], strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_correction_weights_are_read_where_there_are_some(loss: str) -> None:
    columns = make_columns(20, torch.float32)
    twice = {**columns, "correction_weights": torch.full((20,), 2.0)}
    row_loss = make_policy_row_loss(ActorConfig(policy_loss=PolicyLossConfig(loss)))
    (found, grads), (once, grads_once) = (
        run(row_loss, read, has_entropies=False) for read in (twice, columns)
    )
    torch.testing.assert_close(found["actor/loss"], 2 * once["actor/loss"])
    torch.testing.assert_close(grads[0], 2 * grads_once[0])
    assert torch.equal(found["actor/ppo_kl"], once["actor/ppo_kl"])


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_rows", [0, 90])
def test_value_loss_equals_eager(
    clip: float,
    dtype: torch.dtype,
    num_rows: int,
    small_blocks: None,  # noqa: F811
) -> None:
    columns = make_columns(num_rows, dtype)
    read = [columns[name] for name in ("old_values", "returns")]
    values = [columns["values"].clone().requires_grad_() for _ in range(2)]
    found, sums = compute_value_loss_sums(values[0], columns, clip)
    expected, expected_sums = weigh_loss_terms(eager_value(values[1], *read, clip), columns)
    found.backward()
    expected.backward()
    tolerance = (
        {"rtol": 1e-12, "atol": 1e-15} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-6}
    )
    assert list(sums) == list(expected_sums) and set(sums) <= set(METRICS)
    assert (
        num_rows == 0
        or clip == 0
        or 0 < sums["critic/vf_clipfrac"] < columns["metric_weights"].sum()
    )
    for one, other in zip(
        [found, *sums.values()], [expected, *expected_sums.values()], strict=True
    ):
        torch.testing.assert_close(one, other, **tolerance)
    torch.testing.assert_close(values[0].grad, values[1].grad, **tolerance)


@pytest.mark.parametrize(("value", "old", "target", "loss", "grad", "clipped"), VALUE_LOSSES)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, grad: float, clipped: int
) -> None:
    columns = [
        torch.tensor([number], dtype=torch.float64) for number in (value, old, target, 0.5, 0.25)
    ]
    values, *others = columns
    values.requires_grad_()
    names = ("old_values", "returns", "loss_weights", "metric_weights")
    found, sums = compute_value_loss_sums(values, dict(zip(names, others, strict=True)), 0.5)
    found.backward()
    assert values.grad is not None
    assert found.item() == pytest.approx(0.5 * loss, rel=1e-12)
    assert values.grad.item() == pytest.approx(0.5 * grad, rel=1e-12, abs=1e-15)
    expected = {"critic/vf_loss": loss, "critic/vf_clipfrac": clipped, "critic/vpred_mean": value}
    assert {name: 4 * metric.item() for name, metric in sums.items()} == pytest.approx(
        expected, rel=1e-12
    )


def every_loss(columns: dict[str, Tensor]) -> Iterator[Tensor]:
    """Forward and backward of all that workers sum over rows; the gradients."""
    row_losses = make_row_losses(FULL)
    for name in ("policy", "sft"):
        yield from run(row_losses[name], columns, has_entropies=name == "policy")[1]
    values = columns["values"].clone().requires_grad_()
    compute_value_loss_sums(values, columns, 0.5)[0].backward()
    assert values.grad is not None
    yield values.grad


def test_no_loss_of_rows_waits_for_the_device() -> None:
    columns = make_columns(60, torch.float32)
    with DeviceWaits() as waits:
        grads = list(every_loss(columns))
    assert waits.found == []
    assert len(grads) == 4 and all(bool(grad.any()) for grad in grads)


def test_waiting_is_seen() -> None:
    is_odd = torch.tensor([False, True])
    for read in (
        lambda: torch.ones(1).item(),
        lambda: bool(is_odd.any()),
        lambda: is_odd.nonzero(),
    ):
        with DeviceWaits() as waits:
            read()
        assert len(waits.found) == 1
    with DeviceWaits() as waits:
        torch.ones(2)[is_odd] = torch.ones(2)[is_odd]
    assert waits.found == ["index in ", "index_put_ in "]


@pytest.mark.gpu
def test_no_loss_of_rows_waits_for_a_gpu() -> None:
    columns = make_columns(60, torch.float32, "cuda")
    expected = list(every_loss(columns))  # compiles, and tries Triton
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = list(every_loss(columns))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), "not repeatable"
