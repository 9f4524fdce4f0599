"""Policy losses, KL estimates and their sum: values by hand, gradients in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.kl_estimators import estimate_kl
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams, ppo_clip
from rlhf_megatron.algorithms.losses.supervised_loss import compute_sft_loss
from rlhf_megatron.algorithms.losses.total_token_loss import (
    RegularizerParams,
    compute_total_token_loss,
)
from rlhf_megatron.algorithms.metric_names import METRICS


def inputs_of(ratios: list[float], advantages: list[float]) -> PolicyLossInputs:
    """Tokens with the given importance ratios, old probability one half."""
    old = torch.full((len(ratios),), math.log(0.5), dtype=torch.float64)
    log_probs = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones(len(ratios), dtype=torch.bool)
    return PolicyLossInputs(log_probs, old, torch.tensor(advantages, dtype=torch.float64), mask)


# ratio, advantage, loss, d loss / d log-prob (the loss itself where the ratio moves it),
# clipped, dual-clipped
TABLE = [
    (1.0, 2.0, -2.0, -2.0, 0, 0),
    (1.1, 2.0, -2.2, -2.2, 0, 0),
    (1.5, 2.0, -2.56, 0.0, 1, 0),  # above 1.28, would grow: clipped
    (0.5, 2.0, -1.0, -1.0, 0, 0),  # below, moving back is free
    (1.5, -2.0, 3.0, 3.0, 0, 0),  # above, moving back is free
    (0.5, -2.0, 1.6, 0.0, 1, 0),  # below 0.8, would shrink: clipped
    (5.0, -2.0, 6.0, 0.0, 0, 1),  # dual clip: at most 3 x 2
    (5.0, 2.0, -2.56, 0.0, 1, 0),  # no dual clip for a positive advantage
    (1.7, 0.0, 0.0, 0.0, 0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "grad", "clip", "dual"), TABLE)
def test_ppo_clip_by_hand(
    ratio: float, advantage: float, loss: float, grad: float, clip: int, dual: int
) -> None:
    inputs = inputs_of([ratio], [advantage])
    params = PPOClipParams(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    outputs = compute_total_token_loss(ppo_clip, params, inputs, RegularizerParams())
    assert outputs.token_loss_T.item() == pytest.approx(loss, rel=1e-12)
    (found,) = torch.autograd.grad(outputs.token_loss_T.sum(), inputs.log_probs_T)
    assert found.item() == pytest.approx(grad, rel=1e-12)
    assert outputs.metrics["actor/pg_clipfrac"].item() == clip
    assert outputs.metrics["actor/pg_clipfrac_lower"].item() == dual
    assert outputs.metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(ratio), rel=1e-12)
    assert not any(metric.requires_grad for metric in outputs.metrics.values())


def test_ppo_clip_bounds_the_log_ratio() -> None:
    base = inputs_of([1.0, 1.0], [-1.0, 1.0])
    far = replace(
        base, log_probs_T=torch.tensor([90.0, -90.0], dtype=torch.float64, requires_grad=True)
    )
    outputs = compute_total_token_loss(ppo_clip, PPOClipParams(), far, RegularizerParams())
    assert outputs.token_loss_T.tolist() == pytest.approx([3.0, -math.exp(-20)])
    assert outputs.metrics["actor/ppo_kl"].tolist() == [-20.0, 20.0]
    outputs.token_loss_T.sum().backward()
    assert far.log_probs_T.grad is not None and far.log_probs_T.grad.tolist() == [0.0, 0.0]


def test_ppo_clip_gradient_is_that_of_its_formula() -> None:
    generator = torch.Generator().manual_seed(3)
    old = -torch.rand(64, generator=generator, dtype=torch.float64) * 3
    log_probs = (
        old + 0.5 * torch.randn(64, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    advantages = torch.randn(64, generator=generator, dtype=torch.float64)

    def loss(log_probs_T: Tensor) -> Tensor:
        inputs = PolicyLossInputs(log_probs_T, old, advantages, torch.ones(64, dtype=torch.bool))
        return compute_total_token_loss(
            ppo_clip, PPOClipParams(), inputs, RegularizerParams()
        ).token_loss_T

    assert torch.autograd.gradcheck(loss, (log_probs,))
    ratio = (log_probs - old).exp().detach()
    is_free = torch.where(advantages > 0, ratio < 1.2, (ratio > 0.8) & (ratio < 3.0))
    assert 0 < int(is_free.sum()) < 64
    (found,) = torch.autograd.grad(loss(log_probs).sum(), log_probs)
    torch.testing.assert_close(found, -advantages * ratio * is_free, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"clip_ratio_c": 1.0}, r"clip_ratio_c \(1.0\) must be above 1"),
        ({"clip_ratio_low": 0.0}, "clip_ratio_low"),
        ({"clip_ratio_low": 1.5}, "clip_ratio_low"),
        ({"clip_ratio_high": -0.1}, "clip_ratio_high"),
    ],
)
def test_ppo_clip_parameters_are_checked(params: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOClipParams(**params)


def test_kl_estimates_by_hand() -> None:
    log_probs = torch.tensor([math.log(0.5), math.log(0.2)], dtype=torch.float64)
    ref = torch.tensor([math.log(0.25), math.log(0.4)], dtype=torch.float64)
    d = math.log(2)  # the differences are +d and -d
    assert estimate_kl(log_probs, ref, "k1").tolist() == pytest.approx([d, -d])
    assert estimate_kl(log_probs, ref, "k2").tolist() == pytest.approx([d * d / 2, d * d / 2])
    assert estimate_kl(log_probs, ref, "k3").tolist() == pytest.approx([0.5 - 1 + d, 2 - 1 - d])


def test_k3_clamps() -> None:
    log_probs = torch.tensor([0.0, -30.0, 30.0], dtype=torch.float64, requires_grad=True)
    kl = estimate_kl(log_probs, torch.tensor([-4.0, 0.0, 0.0], dtype=torch.float64), "k3")
    # third: exp(-20) + 19, cut to 10
    assert kl.tolist() == pytest.approx([math.exp(-4) + 3, 10.0, 10.0])
    kl.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == pytest.approx(
        [1 - math.exp(-4), 0.0, 0.0]
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_gradients(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    ref = torch.randn(20, generator=generator, dtype=torch.float64)
    log_probs = (
        ref + 0.5 * torch.randn(20, generator=generator, dtype=torch.float64)
    ).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate_kl(x, ref, kind), (log_probs,))  # type: ignore[arg-type]
    (found,) = torch.autograd.grad(estimate_kl(log_probs, ref, kind).sum(), log_probs)  # type: ignore[arg-type]
    d = log_probs.detach() - ref
    torch.testing.assert_close(
        found, {"k1": torch.ones(20).double(), "k2": d, "k3": 1 - (-d).exp()}[kind]
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_straight_through_has_the_value_of_the_estimate_and_the_gradient_of_k2(kind: str) -> None:
    differences = torch.tensor([0.3, -0.7, 0.0, 11.5, -50.0, 50.0], dtype=torch.float64)
    log_probs = torch.full((6,), -1.0, dtype=torch.float64, requires_grad=True)
    ref = log_probs.detach() - differences
    kl = estimate_kl(log_probs, ref, f"{kind}+")  # type: ignore[arg-type]
    assert torch.equal(kl.detach(), estimate_kl(log_probs, ref, kind).detach())  # type: ignore[arg-type]
    kl.sum().backward()
    torch.testing.assert_close(log_probs.grad, differences, rtol=1e-12, atol=1e-15)


def test_k2_and_k3_estimate_the_divergence_and_k1_loss_has_no_gradient_on_average() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.1, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    probs = log_probs.exp().detach()
    exact = (log_probs.exp() * (log_probs - ref)).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for kind in ("k1", "k3", "k1+", "k3+"):
        assert (probs * estimate_kl(log_probs, ref, kind)).sum().item() == pytest.approx(
            exact.item()
        )  # type: ignore[arg-type]
    grads = {
        kind: torch.autograd.grad(
            (probs * estimate_kl(log_probs, ref, kind)).sum(), logits, retain_graph=True
        )[0]  # type: ignore[arg-type]
        for kind in ("k1", "k2", "k1+", "k3+")
    }
    for straight in ("k1+", "k3+"):
        torch.testing.assert_close(grads[straight], exact_grad)
    torch.testing.assert_close(grads["k2"], exact_grad)
    torch.testing.assert_close(grads["k1"], torch.zeros(4, dtype=torch.float64), atol=1e-15, rtol=0)


def test_abs_as_a_loss_has_the_gradient_of_twice_the_total_variation() -> None:
    logits = torch.tensor([0.3, -0.2, 1.0, 0.1], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.1, 0.9, 0.0], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad(
        (log_probs.exp() - ref.exp()).abs().sum(), logits, retain_graph=True
    )
    mean = (log_probs.exp().detach() * estimate_kl(log_probs, ref, "abs")).sum()
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], exact)
    assert exact.abs().max() > 0.01


def test_unknown_kl_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'full'.*k1, k2, k3"):
        estimate_kl(torch.zeros(1), torch.zeros(1), "full")  # type: ignore[arg-type]


def test_sft_loss() -> None:
    log_probs = torch.tensor([-0.5, -2.0], requires_grad=True)
    outputs = compute_sft_loss(log_probs)
    assert outputs.token_loss_T.tolist() == [0.5, 2.0]
    outputs.token_loss_T.sum().backward()
    assert log_probs.grad is not None and log_probs.grad.tolist() == [-1.0, -1.0]
    assert outputs.metrics["actor/sft_loss"].tolist() == [0.5, 2.0]
    assert not outputs.metrics["actor/sft_loss"].requires_grad


def with_columns() -> PolicyLossInputs:
    inputs = inputs_of([1.1, 0.9], [1.0, -1.0])
    return replace(
        inputs,
        entropies_T=torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True),
        ref_log_probs_T=inputs.log_probs_T.detach() - math.log(2),
    )


def test_composed_loss_by_hand() -> None:
    inputs = with_columns()
    outputs = compute_total_token_loss(
        ppo_clip, PPOClipParams(), inputs, RegularizerParams(0.1, "k3", 0.01)
    )
    k3 = 0.5 - 1 + math.log(2)
    assert outputs.token_loss_T.tolist() == pytest.approx(
        [-1.1 + 0.1 * k3 - 0.007, 0.9 + 0.1 * k3 - 0.013]
    )
    assert outputs.metrics["actor/pg_loss"].tolist() == pytest.approx([-1.1, 0.9])
    assert outputs.metrics["actor/kl_loss"].tolist() == pytest.approx([k3, k3])
    assert outputs.metrics["actor/entropy_loss"].tolist() == [0.7, 1.3]
    assert "actor/pg_clipfrac" in outputs.metrics
    assert not any(metric.requires_grad for metric in outputs.metrics.values())

    grads = torch.autograd.grad(
        outputs.token_loss_T.sum(), [inputs.log_probs_T, inputs.entropies_T]
    )
    assert grads[0].tolist() == pytest.approx([-1.1 + 0.1 * 0.5, 0.9 + 0.1 * 0.5])
    assert grads[1].tolist() == pytest.approx([-0.01, -0.01])


def test_terms_without_weight_are_measured_and_not_added() -> None:
    outputs = compute_total_token_loss(
        ppo_clip, PPOClipParams(), with_columns(), RegularizerParams()
    )
    assert torch.equal(outputs.token_loss_T, outputs.metrics["actor/pg_loss"])
    assert {"actor/kl_loss", "actor/entropy_loss"} <= set(outputs.metrics)


def test_weights_without_their_column_are_refused() -> None:
    inputs = inputs_of([1.0], [1.0])
    with pytest.raises(ValueError, match=r"kl_loss_coef \(0.1\) needs ref_log_probs"):
        compute_total_token_loss(
            ppo_clip, PPOClipParams(), inputs, RegularizerParams(kl_loss_coef=0.1)
        )
    with pytest.raises(ValueError, match=r"entropy_coeff \(0.1\) needs entropies"):
        compute_total_token_loss(
            ppo_clip, PPOClipParams(), inputs, RegularizerParams(entropy_coeff=0.1)
        )


def test_every_metric_is_listed() -> None:
    outputs = compute_total_token_loss(
        ppo_clip, PPOClipParams(), with_columns(), RegularizerParams()
    )
    assert set(outputs.metrics) | set(compute_sft_loss(torch.zeros(1)).metrics) <= set(METRICS)


def test_registered_with_its_parameters_and_needs() -> None:
    entry = POLICY_LOSSES.get("ppo_clip")
    assert entry.build is ppo_clip and entry.params is PPOClipParams
    assert set(entry.needs) == {"advantages", "old_log_probs"}
    with pytest.raises(ValueError, match=r"policy loss .ppo_clop.*ppo_clip"):
        POLICY_LOSSES.get("ppo_clop")


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_empty_and_single_token_micro_batches(num_tokens: int) -> None:
    outputs: PolicyLossOutputs = compute_total_token_loss(
        ppo_clip,
        PPOClipParams(),
        inputs_of([1.0] * num_tokens, [1.0] * num_tokens),
        RegularizerParams(),
    )
    assert outputs.token_loss_T.tolist() == [-1.0] * num_tokens
    assert all(metric.shape == (num_tokens,) for metric in outputs.metrics.values())
