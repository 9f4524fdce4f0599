"""The policy loss in one pass: by hand in every branch, against the eager loss, finite
differences, no waiting.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from device_waits import DeviceWaits
from torch import Tensor

from benchmarks.kernels.eager import eager_policy
from rlhf_megatron.algorithms.losses import PolicyLossInputs
from rlhf_megatron.algorithms.losses.kl_estimators import KLType
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams, ppo_clip
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
from rlhf_megatron.ranks.kernels import weighted_row_loss
from rlhf_megatron.ranks.kernels.policy_row_loss import PolicyRowLoss

PARAMS = PPOClipParams(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
GRADED = ("log_probs_T", "entropies_T")
COLUMNS = ("old_log_probs_T", "advantages_T", "ref_log_probs_T", "correction_weights_T")
Results = dict[str, Tensor]  # "loss", gradients by column, sums by metric


def make_inputs(seed: int, num_rows: int, dtype: torch.dtype, **without: None) -> PolicyLossInputs:
    """Random rows, of which some lie far outside of every range. `without`: columns that
    are not there.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(num_rows, generator=generator, dtype=torch.float64)

    old = -3 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
    far = torch.tensor([30.0, -30.0, 19.0, -19.0, 11.0, -9.5], dtype=torch.float64)
    log_probs = old + normal(0.4)
    log_probs[: len(far)] += far[:num_rows]
    advantages = normal(1.0)
    advantages[::7] = 0.0
    columns: dict[str, Any] = {
        "log_probs_T": log_probs,
        "old_log_probs_T": old,
        "advantages_T": advantages,
        "entropies_T": 2 * torch.rand(num_rows, generator=generator, dtype=torch.float64),
        "ref_log_probs_T": old + normal(0.3),
        "correction_weights_T": 2 * torch.rand(num_rows, generator=generator, dtype=torch.float64),
        **without,
    }
    mask = torch.ones(num_rows, dtype=torch.bool)
    return in_dtype(PolicyLossInputs(**columns, response_mask_T=mask), dtype)


def make_weights(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Loss and metric weights that differ from row to row; every fifth row weighs nothing."""
    generator = torch.Generator().manual_seed(num_rows)
    weights = torch.rand(2, num_rows, generator=generator, dtype=torch.float64) / max(num_rows, 1)
    weights[:, 4::5] = 0.0
    loss_weights, metric_weights = weights.to(dtype)
    return loss_weights, metric_weights


def in_dtype(inputs: PolicyLossInputs, dtype: torch.dtype) -> PolicyLossInputs:
    columns = {name: getattr(inputs, name) for name in PolicyLossInputs.__dataclass_fields__}
    return PolicyLossInputs(
        **{k: v if v is None or v.dtype == torch.bool else v.to(dtype) for k, v in columns.items()}
    )


def with_leaves(inputs: PolicyLossInputs) -> PolicyLossInputs:
    leaves = {name: getattr(inputs, name) for name in GRADED}
    return replace(
        inputs,
        **{k: v.detach().clone().requires_grad_() for k, v in leaves.items() if v is not None},
    )


def results(inputs: PolicyLossInputs, loss: Tensor, sums: dict[str, Tensor]) -> Results:
    leaves = {name: getattr(inputs, name) for name in GRADED if getattr(inputs, name) is not None}
    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        "loss": loss.detach(),
        **sums,
        **{k: g for k, g in zip(leaves, grads, strict=True) if g is not None},
    }


def row_loss_of(
    regularizers: RegularizerParams, params: PPOClipParams = PARAMS, use_triton: bool = False
) -> PolicyRowLoss:
    return PolicyRowLoss("ppo_clip", ppo_clip, params, regularizers, use_triton=use_triton)


def fused_sums(
    loss: PolicyRowLoss, inputs: PolicyLossInputs, loss_weights: Tensor, metric_weights: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    columns = {
        name.removesuffix("_T"): getattr(inputs, name)
        for name in COLUMNS
        if getattr(inputs, name) is not None
    }
    columns |= {"loss_weights": loss_weights, "metric_weights": metric_weights}
    value, sums = loss(inputs.log_probs_T, inputs.entropies_T, columns)
    assert sums.pop("actor/loss") is not value
    return value, sums


def fused(
    inputs: PolicyLossInputs,
    weights: tuple[Tensor, Tensor],
    params: PPOClipParams,
    regularizers: RegularizerParams,
) -> Results:
    inputs = with_leaves(inputs)
    return results(inputs, *fused_sums(row_loss_of(regularizers, params), inputs, *weights))


def eager(
    inputs: PolicyLossInputs,
    weights: tuple[Tensor, Tensor],
    params: PPOClipParams,
    regularizers: RegularizerParams,
) -> Results:
    inputs = with_leaves(inputs)
    terms = eager_policy(inputs, params, regularizers)
    sums = {name: (metric * weights[1]).sum() for name, metric in terms.metrics.items()}
    return results(inputs, (terms.token_loss_T * weights[0]).sum(), sums)


def assert_equal(found: Results, expected: Results, relative: float, absolute: float) -> None:
    """`absolute`: of a gradient relative to its largest entry; of a sum, whose terms may
    cancel, as it is.
    """
    assert list(found) == list(expected)
    for name, value in expected.items():
        scale = float(value.abs().max()) if value.dim() and value.numel() else 1.0
        torch.testing.assert_close(
            found[name].to(value.dtype),
            value,
            rtol=relative,
            atol=absolute * max(scale, 1e-30),
            msg=f"{name}: {found[name]} is not {value}",
        )


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighted_row_loss, "CPU_BLOCK", 16)


# log-prob less old one, advantage: loss, d loss / d log-prob, ppo_kl, clipped, dual-clipped; ranges
# 0.8 to 1.28, dual 3
LOG = math.log
BY_HAND = [
    (0.0, 2.0, -2.0, -2.0, 0.0, 0, 0),  # not moved
    (LOG(1.1), 2.0, -2.2, -2.2, -LOG(1.1), 0, 0),  # inside
    (LOG(1.1), -2.0, 2.2, 2.2, -LOG(1.1), 0, 0),
    (LOG(1.5), 2.0, -2.56, 0.0, -LOG(1.5), 1, 0),  # clipped above
    (LOG(0.5), 2.0, -1.0, -1.0, -LOG(0.5), 0, 0),  # below, but moving back is free
    (LOG(0.5), -2.0, 1.6, 0.0, -LOG(0.5), 1, 0),  # clipped below
    (LOG(1.5), -2.0, 3.0, 3.0, -LOG(1.5), 0, 0),  # above, but moving back is free
    (LOG(5.0), -2.0, 6.0, 0.0, -LOG(5.0), 0, 1),  # dual clip
    (LOG(5.0), 2.0, -2.56, 0.0, -LOG(5.0), 1, 0),  # none for a positive advantage
    (25.0, 2.0, -2.56, 0.0, -20.0, 1, 0),  # exponent clamped above
    (25.0, -2.0, 6.0, 0.0, -20.0, 0, 1),
    (
        -25.0,
        2.0,
        -2 * math.exp(-20),
        0.0,
        20.0,
        0,
        0,
    ),  # and below: the loss is free, the gradient still 0
    (
        -20.0,
        2.0,
        -2 * math.exp(-20),
        -2 * math.exp(-20),
        20.0,
        0,
        0,
    ),  # at the clamp itself it is not
    (-25.0, -2.0, 1.6, 0.0, 20.0, 1, 0),
    (LOG(1.7), 0.0, 0.0, 0.0, -LOG(1.7), 0, 0),  # advantage 0: nothing to clip
    (LOG(0.3), 0.0, 0.0, 0.0, -LOG(0.3), 0, 0),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("moved", "advantage", "loss", "grad", "kl", "clipped", "dual"), BY_HAND)
def test_by_hand(
    dtype: torch.dtype,
    moved: float,
    advantage: float,
    loss: float,
    grad: float,
    kl: float,
    clipped: int,
    dual: int,
) -> None:
    def column(value: float) -> Tensor:
        return torch.tensor([value], dtype=dtype)

    inputs = PolicyLossInputs(
        column(moved), column(0.0), column(advantage), torch.ones(1, dtype=torch.bool)
    )
    found = fused(inputs, (column(0.5), column(0.25)), PARAMS, RegularizerParams())
    near = pytest.approx if dtype == torch.float64 else lambda value: pytest.approx(value, rel=1e-5)
    assert found["loss"].item() == near(0.5 * loss)
    assert found["log_probs_T"].tolist() == near([0.5 * grad])
    assert found["actor/pg_loss"].item() == near(0.25 * loss)
    assert found["actor/ppo_kl"].item() == near(0.25 * kl)
    assert found["actor/pg_clipfrac"].item() == 0.25 * clipped
    assert found["actor/pg_clipfrac_lower"].item() == 0.25 * dual
    assert set(found) == {
        "loss", "log_probs_T", "actor/pg_loss", "actor/ppo_kl", "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower"
    }  # fmt: skip


# log-prob less that of the reference: estimate, d estimate / d log-prob
KL_BY_HAND = {
    "k1": [(0.5, 0.5, 1.0), (-30.0, -30.0, 1.0)],
    "abs": [(0.5, 0.5, 1.0), (-30.0, 30.0, -1.0), (0.0, 0.0, 0.0)],
    "abs+": [(0.5, 0.5, 0.5), (-30.0, 30.0, -30.0)],
    "k2": [(0.5, 0.125, 0.5), (-3.0, 4.5, -3.0)],
    "k3": [
        (LOG(2.0), 0.5 - 1 + LOG(2.0), 0.5),
        (-LOG(2.0), 2 - 1 - LOG(2.0), -1.0),
        (1e-3, math.expm1(-1e-3) + 1e-3, -math.expm1(-1e-3)),
        (10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
        (11.5, 10.0, 0.0),  # the estimate is cut at 10
        (-3.0, 10.0, 0.0),
        (-25.0, 10.0, 0.0),  # and the exponent at 20 before
        (25.0, 10.0, 0.0),
    ],
    # Straight through: the value of the one, the gradient of k2, which is the difference.
    "k1+": [(0.5, 0.5, 0.5), (-30.0, -30.0, -30.0)],
    "k2+": [(0.5, 0.125, 0.5), (-3.0, 4.5, -3.0)],
    "k3+": [(LOG(2.0), 0.5 - 1 + LOG(2.0), LOG(2.0)), (11.5, 10.0, 11.5), (-25.0, 10.0, -25.0)],
}


@pytest.mark.parametrize(
    ("kind", "row"), [(kind, row) for kind, rows in KL_BY_HAND.items() for row in rows]
)
def test_regularizers_by_hand(kind: Any, row: tuple[float, float, float]) -> None:
    diff, kl, kl_grad = row

    def column(value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64)

    inputs = PolicyLossInputs(
        column(-1.0),
        column(-1.0),
        column(2.0),
        torch.ones(1, dtype=torch.bool),
        entropies_T=column(0.7),
        ref_log_probs_T=column(-1.0 - diff),
        correction_weights_T=column(1.5),  # of the policy loss only
    )
    found = fused(inputs, (column(0.5), column(0.25)), PARAMS, RegularizerParams(0.1, kind, 0.03))
    assert found["loss"].item() == pytest.approx(0.5 * (-3.0 + 0.1 * kl - 0.03 * 0.7), rel=1e-12)
    assert found["log_probs_T"].item() == pytest.approx(0.5 * (-3.0 + 0.1 * kl_grad), rel=1e-12)
    assert found["entropies_T"].item() == pytest.approx(-0.5 * 0.03, rel=1e-12)
    assert found["actor/pg_loss"].item() == pytest.approx(0.25 * -3.0, rel=1e-12)
    assert found["actor/kl_loss"].item() == pytest.approx(0.25 * kl, rel=1e-9)
    assert found["actor/entropy_loss"].item() == pytest.approx(0.25 * 0.7, rel=1e-12)


REGULARIZERS = [
    RegularizerParams(coef, kind, entropy)
    for kind in get_args(KLType)
    for coef in (0.0, 0.1)
    for entropy in (0.0, 0.03)
]


@pytest.mark.parametrize(
    "without", [{}, {"correction_weights_T": None}], ids=["corrected", "plain"]
)
@pytest.mark.parametrize("regularizers", REGULARIZERS, ids=str)
def test_equals_eager(
    regularizers: RegularizerParams, without: dict[str, None], small_blocks: None
) -> None:
    """Over seven blocks, the last of them ragged."""
    inputs = make_inputs(1, 103, torch.float64, **without)
    weights = make_weights(103, torch.float64)
    exact = eager(inputs, weights, PARAMS, regularizers)
    assert_equal(fused(inputs, weights, PARAMS, regularizers), exact, 1e-12, 1e-15)
    single = in_dtype(inputs, torch.float32)
    # of the rounded columns
    in_single = eager(in_dtype(single, torch.float64), weights, PARAMS, regularizers)
    weights_32 = (weights[0].float(), weights[1].float())
    assert_equal(fused(single, weights_32, PARAMS, regularizers), in_single, 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_without_optional_columns(dtype: torch.dtype) -> None:
    inputs = make_inputs(
        2, 50, dtype, entropies_T=None, ref_log_probs_T=None, correction_weights_T=None
    )
    weights = make_weights(50, dtype)
    found = fused(inputs, weights, PARAMS, RegularizerParams())
    assert "actor/kl_loss" not in found and "actor/entropy_loss" not in found
    assert_equal(
        found,
        eager(inputs, weights, PARAMS, RegularizerParams()),
        1e-5 if dtype == torch.float32 else 1e-12,
        1e-6,
    )


def test_more_rows_than_a_block_give_the_same_as_blocks_of_another_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_rows = weighted_row_loss.CPU_BLOCK + 5
    inputs = make_inputs(3, num_rows, torch.float32)
    weights = make_weights(num_rows, torch.float32)
    regularizers = RegularizerParams(0.1, "k3", 0.03)
    two_blocks = fused(inputs, weights, PARAMS, regularizers)
    monkeypatch.setattr(weighted_row_loss, "CPU_BLOCK", 1000)
    many = fused(inputs, weights, PARAMS, regularizers)
    assert torch.equal(many["log_probs_T"], two_blocks["log_probs_T"])
    assert_equal(many, two_blocks, 1e-6, 1e-6)


def test_finite_differences() -> None:
    inputs = make_inputs(4, 60, torch.float64)
    weights = make_weights(60, torch.float64)
    moved = (inputs.log_probs_T - inputs.old_log_probs_T).exp()
    kl = inputs.ref_log_probs_T - inputs.log_probs_T  # type: ignore[operator]
    borders = [(moved - border).abs() < 1e-3 for border in (0.8, 1.28, 3.0)]
    assert not torch.stack(borders).any() and not ((kl.expm1() - kl - 10).abs() < 1e-3).any(), (
        "not at a kink"
    )
    step = row_loss_of(RegularizerParams(0.1, "k3", 0.03))

    def loss(log_probs_R: Tensor, entropies_R: Tensor) -> Tensor:
        return fused_sums(
            step, replace(inputs, log_probs_T=log_probs_R, entropies_T=entropies_R), *weights
        )[0]

    leaves = with_leaves(inputs)
    assert leaves.entropies_T is not None
    assert torch.autograd.gradcheck(
        loss, (leaves.log_probs_T, leaves.entropies_T), eps=1e-7, atol=1e-8
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("log_ratio", [0.25, -0.2, 1.1])
def test_ties_at_the_borders(dtype: torch.dtype, log_ratio: float) -> None:
    """The ratio is the border to the last bit. Nothing is replaced, so all of the gradient is
    there; as in eager.
    """
    ratio = torch.tensor([log_ratio], dtype=dtype).exp().item()
    borders: dict[float, dict[str, float]] = {
        0.25: {"clip_ratio_high": ratio - 1},
        -0.2: {"clip_ratio_low": 1 - ratio},
        1.1: {"clip_ratio_c": ratio},
    }
    params = PPOClipParams(**borders[log_ratio])
    for advantage in (1.7, -1.7):
        columns = [torch.tensor([value], dtype=dtype) for value in (log_ratio, 0.0, advantage)]
        inputs = PolicyLossInputs(*columns, torch.ones(1, dtype=torch.bool))
        weights = (torch.ones(1, dtype=dtype), torch.ones(1, dtype=dtype))
        found, expected = (
            form(inputs, weights, params, RegularizerParams()) for form in (fused, eager)
        )
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        is_clipped = log_ratio == 1.1 and advantage > 0
        assert (
            found["actor/pg_clipfrac"].item() == is_clipped
            and found["actor/pg_clipfrac_lower"].item() == 0
        )
        if not is_clipped:
            assert found["log_probs_T"].item() == found["loss"].item() != 0, (
                "d(-A r) / d log-prob is -A r"
            )


@pytest.mark.parametrize("num_rows", [0, 1])
def test_no_rows(num_rows: int) -> None:
    """A rank without rows has all metrics, and a gradient for the model behind it."""
    inputs = make_inputs(5, num_rows, torch.float32)
    weights = make_weights(num_rows, torch.float32)
    found = fused(inputs, weights, PARAMS, RegularizerParams(0.1, "k3", 0.03))
    assert set(found) == {"loss", *GRADED, *sums_of_all_metrics()}
    assert found["log_probs_T"].shape == found["entropies_T"].shape == (num_rows,)
    if num_rows == 0:
        assert all(value.sum().item() == 0 for value in found.values())


def sums_of_all_metrics() -> set[str]:
    names = ("pg_loss", "kl_loss", "entropy_loss", "ppo_kl", "pg_clipfrac", "pg_clipfrac_lower")
    return {f"actor/{name}" for name in names}


def test_rows_without_weight_have_no_gradient() -> None:
    inputs = make_inputs(6, 20, torch.float32)
    nothing = torch.zeros(20)
    found = fused(inputs, (nothing, nothing), PARAMS, RegularizerParams(0.1, "k3", 0.03))
    assert all(bool((value == 0).all()) for value in found.values())


def test_half_precision_is_refused() -> None:
    inputs = make_inputs(7, 8, torch.bfloat16)
    with pytest.raises(
        ValueError, match=r"log-probs are torch.bfloat16: .*Compute them in float32"
    ):
        fused(inputs, make_weights(8, torch.float32), PARAMS, RegularizerParams())


def test_columns_of_another_type_are_converted() -> None:
    inputs = make_inputs(8, 40, torch.float32)
    weights = make_weights(40, torch.float32)
    others = replace(in_dtype(inputs, torch.float64), log_probs_T=inputs.log_probs_T)
    regularizers = RegularizerParams(0.1, "k3", 0.03)
    found, expected = (fused(some, weights, PARAMS, regularizers) for some in (others, inputs))
    assert found["log_probs_T"].dtype == torch.float32
    assert all(torch.equal(found[name], expected[name]) for name in found if name != "entropies_T")


def step_of(inputs: PolicyLossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    loss = row_loss_of(RegularizerParams(0.1, "k3", 0.03))
    return fused_sums(
        loss, inputs, *make_weights(inputs.log_probs_T.numel(), inputs.log_probs_T.dtype)
    )


def test_backward_multiplies_and_may_run_twice() -> None:
    inputs = with_leaves(make_inputs(9, 30, torch.float32))
    (once,) = torch.autograd.grad(step_of(inputs)[0], inputs.log_probs_T)
    loss, sums = step_of(inputs)
    kept = loss.item()
    scaled = loss.div_(4)  # as Megatron's schedules do, in place
    for _ in range(2):
        (found,) = torch.autograd.grad(scaled, inputs.log_probs_T, retain_graph=True)
        assert torch.equal(found, once / 4)
    assert loss.item() == kept / 4 and not any(metric.requires_grad for metric in sums.values())


def test_gradients_that_nobody_asks_for() -> None:
    inputs = with_leaves(make_inputs(10, 30, torch.float32))
    assert inputs.entropies_T is not None
    loss, _ = fused_sums(
        row_loss_of(RegularizerParams(0.1, "k3", 0.0)), inputs, *make_weights(30, torch.float32)
    )
    loss.backward()
    assert inputs.entropies_T.grad is None and inputs.log_probs_T.grad is not None
    frozen = replace(inputs, log_probs_T=inputs.log_probs_T.detach())
    loss, _ = step_of(frozen)
    loss.backward()
    assert inputs.entropies_T.grad is not None


def test_a_coefficient_without_its_column_is_refused() -> None:
    weights = make_weights(4, torch.float32)
    for regularizers, message in (
        (RegularizerParams(0.1, "k3", 0.0), r"kl_loss_coef \(0.1\) needs ref_log_probs"),
        (RegularizerParams(0.0, "k3", 0.2), r"entropy_coeff \(0.2\) needs entropies"),
    ):
        inputs = make_inputs(11, 4, torch.float32, ref_log_probs_T=None, entropies_T=None)
        with pytest.raises(ValueError, match=message):
            fused(inputs, weights, PARAMS, regularizers)


def test_what_is_not_a_number_is_seen() -> None:
    """In the loss, and where it came from in the gradient: skipped steps are judged by both."""
    for column in ("log_probs_T", "old_log_probs_T", "advantages_T", "ref_log_probs_T"):
        inputs = make_inputs(12, 40, torch.float32)
        getattr(inputs, column)[17] = math.nan
        found = fused(
            inputs, make_weights(40, torch.float32), PARAMS, RegularizerParams(0.1, "k3", 0.03)
        )
        assert math.isnan(found["loss"].item()), column
        bad = found["log_probs_T"].isnan().nonzero().flatten().tolist()
        assert bad == [17], column


def test_nothing_waits_for_the_device(small_blocks: None) -> None:
    inputs = with_leaves(make_inputs(13, 50, torch.float32))
    with DeviceWaits() as waits:
        loss, _ = step_of(inputs)
        loss.backward()
    assert waits.found == []
    assert inputs.log_probs_T.grad is not None and inputs.log_probs_T.grad.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("use_triton", [False, True])
def test_on_cuda(use_triton: bool) -> None:
    """Plain torch and the kernel give what the CPU gives, without a wait."""
    regularizers = RegularizerParams(0.1, "k3", 0.03)
    for num_rows in (0, 1, 513, 5000):
        inputs = make_inputs(14, num_rows, torch.float64)
        weights = make_weights(num_rows, torch.float64)
        single = in_dtype(inputs, torch.float32)
        expected = eager(in_dtype(single, torch.float64), weights, PARAMS, regularizers)
        columns = {name: getattr(single, name) for name in PolicyLossInputs.__dataclass_fields__}
        there = with_leaves(
            PolicyLossInputs(**{k: None if v is None else v.cuda() for k, v in columns.items()})
        )
        cuda_weights = [weight.float().cuda() for weight in weights]
        step = row_loss_of(regularizers, use_triton=use_triton)
        results(there, *fused_sums(step, there, *cuda_weights))  # compiles, and tries Triton
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = results(there, *fused_sums(step, there, *cuda_weights))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert_equal({name: value.cpu() for name, value in found.items()}, expected, 1e-5, 2e-6)
