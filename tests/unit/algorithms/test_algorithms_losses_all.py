"""Every registered policy loss x aggregation: packed, against its formula on one sequence at a time
and its finite differences in float64; what extreme log-ratios, single tokens and no tokens do to
it; correction weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_waits import DeviceWaits
from loss_tools import AGGREGATIONS, FORMULAS, PARAMS, Response
from scheduler_samples import train_batch
from torch import Tensor

from rlhf_megatron.algorithms.loss_aggregation import AGGREGATIONS as REGISTERED
from rlhf_megatron.algorithms.loss_aggregation import compute_loss_weights
from rlhf_megatron.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.total_token_loss import (
    RegularizerParams,
    compute_total_token_loss,
)
from rlhf_megatron.algorithms.metric_names import METRICS
from rlhf_megatron.algorithms.row_sequences import RowSequences
from rlhf_megatron.controller.scheduler.mini_batches import make_actor_mini_batch

# Prompt tokens, and a tool's tokens inside of responses, are no response tokens: 1, 4, 0
# and 6 of those.
MASK = torch.tensor([0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
OFFSETS = torch.tensor([0, 3, 9, 11, 19])
OWNER = torch.arange(4).repeat_interleave(OFFSETS.diff())
STEP = 1e-6


def params_of(name: str) -> Any:
    params = POLICY_LOSSES.get(name).params
    return params(**PARAMS.get(name, {})) if params is not None else None


def make_inputs(dtype: torch.dtype = torch.float64) -> PolicyLossInputs:
    """Ratios between about 0.4 and 2.5; what stands outside of the mask must not matter."""
    generator = torch.Generator().manual_seed(11)
    old = -0.2 - 2 * torch.rand(19, generator=generator, dtype=torch.float64)
    log_probs = (old + 0.4 * torch.randn(19, generator=generator, dtype=torch.float64)).clamp(
        max=-0.01
    )
    advantages = torch.tensor([1.3, -0.7, 0.5, 0.9], dtype=torch.float64)[OWNER]
    noise = 7 * torch.randn(2, 19, generator=generator, dtype=torch.float64)
    return PolicyLossInputs(
        log_probs_T=log_probs.where(MASK, noise[0]).to(dtype).requires_grad_(),
        old_log_probs_T=old.where(MASK, noise[1]).to(dtype),
        advantages_T=(advantages * MASK).to(dtype),
        response_mask_T=MASK,
        sequences=RowSequences(OWNER, 4),
        is_picked_T=MASK & (torch.arange(19) % 3 == 1),
    )


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_sample_of_masked_status_has_no_share_in_any_term(name: str) -> None:
    """Its advantages are 0, as estimators make them; KL, entropy and DRO's quadratic term do not
    look at these.
    """
    part = replace(
        train_batch(4), offsets=OFFSETS, token_ids=torch.zeros(19, dtype=torch.int64),
        response_mask=MASK,
        reward_statuses=("ok", "masked:x", "ok", "malformed"),
    )  # fmt: skip
    kept = make_actor_mini_batch(part, "token-mean").loss_weights
    counted = MASK & (OWNER != 1)
    assert kept[counted].tolist() == pytest.approx([1 / 11] * 7), "it stays in the denominator"
    entropies = torch.ones(19, dtype=torch.float64, requires_grad=True)
    made = make_inputs()
    inputs = replace(
        made,
        advantages_T=made.advantages_T * (OWNER != 1),
        ref_log_probs_T=made.old_log_probs_T - 0.3,
        entropies_T=entropies,
    )
    total = compute_total_token_loss(
        POLICY_LOSSES.get(name).build, params_of(name), inputs, RegularizerParams(0.2, "k3", 0.1)
    )
    (total.token_loss_T * kept).sum().backward()
    for leaf in (inputs.log_probs_T, entropies):
        assert leaf.grad is not None and leaf.grad[counted].all() and not leaf.grad[~counted].any()


def objective(name: str, mode: str, inputs: PolicyLossInputs, log_probs: Tensor) -> float:
    """By the formulas, at `log_probs`; stop-gradients stand at those of `inputs`."""
    losses = []
    for start, stop in zip(OFFSETS.tolist(), OFFSETS[1:].tolist(), strict=False):
        kept = MASK[start:stop]
        columns = (
            log_probs,
            inputs.old_log_probs_T,
            inputs.advantages_T,
            inputs.log_probs_T,
            inputs.is_picked_T,
        )
        parts = [column[start:stop][kept].tolist() for column in columns if column is not None]
        losses.append(FORMULAS[name](Response(*parts)) if parts[0] else [])
    return AGGREGATIONS[mode](losses)


def packed(name: str, inputs: PolicyLossInputs) -> PolicyLossOutputs:
    return compute_total_token_loss(
        POLICY_LOSSES.get(name).build, params_of(name), inputs, RegularizerParams()
    )


def test_every_loss_and_mode_has_a_formula() -> None:
    assert set(FORMULAS) == set(POLICY_LOSSES) and set(AGGREGATIONS) == set(REGISTERED)


@pytest.mark.parametrize("mode", REGISTERED)
@pytest.mark.parametrize("name", FORMULAS)
def test_value_and_gradient_are_those_of_the_formula(name: str, mode: str) -> None:
    inputs = make_inputs()
    weights = compute_loss_weights(mode, MASK, OFFSETS, int(MASK.sum()), 4, scale_factor=8).double()
    outputs = packed(name, inputs)
    loss = (outputs.token_loss_T * weights).sum()
    assert loss.item() == pytest.approx(
        objective(name, mode, inputs, inputs.log_probs_T.detach()), rel=2e-7
    )
    (found,) = torch.autograd.grad(loss, inputs.log_probs_T)
    expected = torch.zeros(19, dtype=torch.float64)
    for i in MASK.nonzero().flatten().tolist():
        up, down = (inputs.log_probs_T.detach().clone() for _ in range(2))
        up[i] += STEP
        down[i] -= STEP
        difference = objective(name, mode, inputs, up) - objective(name, mode, inputs, down)
        expected[i] = difference / (2 * STEP)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9 * float(weights.max()))
    assert expected.count_nonzero() >= 5, "most of the gradient is clipped away"


@pytest.mark.parametrize("name", FORMULAS)
def test_metrics_are_listed_and_have_no_gradient(name: str) -> None:
    outputs = packed(name, make_inputs())
    assert set(outputs.metrics) <= set(METRICS) and {"actor/pg_loss", "actor/ppo_kl"} <= set(
        outputs.metrics
    )
    assert all(
        metric.shape == (19,) and not metric.requires_grad for metric in outputs.metrics.values()
    )
    for key in ("actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_picked"):
        assert set(outputs.metrics.get(key, torch.zeros(1)).tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FORMULAS)
def test_extreme_log_ratios_leave_numbers(name: str, dtype: torch.dtype) -> None:
    """A certain token that was impossible, an impossible one that was certain, and both for
    advantages of either sign, in sequences of their own and in one together.
    """
    log_probs = torch.tensor(
        [0.0, -50.0, 0.0, -50.0, 0.0, -50.0, 0.0, 0.0], dtype=dtype, requires_grad=True
    )
    old = torch.tensor([-50.0, 0.0, -50.0, 0.0, -50.0, 0.0, 0.0, 1e-7], dtype=dtype)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 2.0, -1.0, 0.0], dtype=dtype)
    ids = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6])
    inputs = PolicyLossInputs(
        log_probs,
        old,
        advantages,
        torch.ones(8, dtype=torch.bool),
        sequences=RowSequences(ids, 7),
        is_picked_T=ids % 2 > 0,
    )
    outputs = packed(name, inputs)
    (grad,) = torch.autograd.grad(outputs.token_loss_T.sum(), log_probs)
    assert outputs.token_loss_T.dtype == dtype == grad.dtype
    bound = 1e9 + 1  # e^20 times an advantage
    for column in (outputs.token_loss_T, grad, *outputs.metrics.values()):
        assert bool(column.isfinite().all()) and float(column.detach().abs().max()) <= bound
    assert outputs.metrics["actor/ppo_kl"].tolist() == pytest.approx(
        [-20, 20, -20, 20, -20, 20, 0, 1e-7], abs=1e-6
    )


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("name", FORMULAS)
def test_no_token_and_a_single_one(name: str, num_tokens: int) -> None:
    """At a ratio of 1 the gradient is -A, whatever the loss."""
    log_probs = torch.full((num_tokens,), -0.5, dtype=torch.float64, requires_grad=True)
    none = torch.zeros(num_tokens, dtype=torch.int64)
    inputs = PolicyLossInputs(
        log_probs,
        log_probs.detach(),
        torch.full((num_tokens,), 2.0, dtype=torch.float64),
        none == 0,
        sequences=RowSequences(none, 3),
        is_picked_T=none > 0,
    )
    outputs = packed(name, inputs)
    assert outputs.token_loss_T.shape == (num_tokens,)
    (grad,) = torch.autograd.grad(outputs.token_loss_T.sum(), log_probs)
    assert grad.tolist() == pytest.approx([-2.0] * num_tokens, rel=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
def test_correction_weights_multiply_the_loss_of_every_kind(name: str) -> None:
    """In one place; a sequence's ratio is over all its tokens, those of weight 0 too."""
    inputs = make_inputs()
    weights = torch.linspace(0, 2, 19, dtype=torch.float64)
    plain = packed(name, inputs)
    corrected = packed(name, replace(inputs, correction_weights_T=weights))
    assert torch.equal(corrected.token_loss_T, plain.token_loss_T * weights)
    assert torch.equal(corrected.metrics["actor/pg_loss"], (plain.token_loss_T * weights).detach())
    grads = [
        torch.autograd.grad(outputs.token_loss_T.sum(), inputs.log_probs_T)[0]
        for outputs in (plain, corrected)
    ]
    torch.testing.assert_close(grads[1], grads[0] * weights, rtol=1e-12, atol=0)


def test_no_loss_waits_for_the_device() -> None:
    inputs = make_inputs()
    with DeviceWaits() as waits:
        for name in FORMULAS:
            torch.autograd.grad(packed(name, inputs).token_loss_T.sum(), inputs.log_probs_T)
    assert waits.found == []


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("gspo", {"clip_ratio_low": 0.0}, r"clip_ratio_low \(0.0\) must be in \(0, 1\].*0.0003"),
        ("gspo", {"clip_ratio_high": 0.0}, r"clip_ratio_high \(0.0\) must be positive"),
        ("geo_mean", {"clip_ratio_low": -0.4}, r"clip_ratio_low \(-0.4\) must be positive"),
        ("geo_mean", {"clip_ratio_high": math.nan}, r"clip_ratio_high \(nan\) must be positive"),
        ("sapo", {"tau_neg": 0.0}, r"tau_neg \(0.0\) must be positive"),
        ("dro", {"dro_beta": 0.0}, r"dro_beta \(0.0\) must be positive.*reinforce"),
        ("cispo", {"clip_ratio_low": 1.5}, r"clip_ratio_low \(1.5\)"),
        ("cispo", {"clip_ratio_high": -1.0}, r"clip_ratio_high \(-1.0\)"),
        ("dppo_tv", {"clip_ratio_high": 0.0}, r"clip_ratio_high \(0.0\) must be positive.*0.15"),
        ("dppo_kl", {"clip_ratio_low": 0.0}, r"clip_ratio_low \(0.0\) must be positive.*0.05"),
        ("dppo_kl", {"clip_ratio_c": 1.0}, r"clip_ratio_c \(1.0\) must be above 1"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, r"clip_cov_ratio \(0.0\) must be in \(0, 1\]"),
        (
            "clip_cov",
            {"clip_cov_lb": 5.0},
            r"clip_cov_lb \(5.0\) must be below clip_cov_ub \(5.0\)",
        ),
        ("kl_cov", {"kl_cov_ratio": 1.5}, r"kl_cov_ratio \(1.5\)"),
        ("kl_cov", {"ppo_kl_coef": 0.0}, r"ppo_kl_coef \(0.0\) must be positive"),
    ],
)
def test_parameters_are_checked(name: str, params: dict[str, float], message: str) -> None:
    kind = POLICY_LOSSES.get(name).params
    assert kind is not None
    with pytest.raises(ValueError, match=message):
        kind(**params)
