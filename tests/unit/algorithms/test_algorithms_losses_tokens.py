"""Policy losses of single tokens, by hand: loss and gradient on each side of every bound."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlhf_megatron.algorithms.losses import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs

HALF = math.log(0.5)


def token(
    name: str, p_old: float, p: float, advantage: float, picked: bool = False, **params: float
) -> Any:
    """(outputs, gradient) of one token with these probabilities."""
    log_probs = torch.tensor([math.log(p)], dtype=torch.float64, requires_grad=True)
    inputs = PolicyLossInputs(
        log_probs,
        torch.tensor([math.log(p_old)], dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([True]),
        is_picked_T=torch.tensor([picked]),
    )
    entry = POLICY_LOSSES.get(name)
    outputs: PolicyLossOutputs = entry.build(
        inputs, entry.params(**params) if entry.params else None
    )
    (grad,) = torch.autograd.grad(outputs.token_loss_T.sum(), log_probs)
    return outputs, grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "gate"),
    [
        (1.0, 2.0, -4.0, -2.0, 1.0),  # sigmoid(0) 4 = 2, and its slope there 1
        (1.0, -2.0, 4 / 1.05, 2.0, 1.0),
        (2.0, 1.0, -2.9242343, -1.5728954, 0.7864477),  # sigmoid(1) = 0.7310586, slope 0.1966119
        (2.0, -1.0, 2.8219996, 1.5362201, 0.7681100),  # sigmoid(1.05) = 0.7407749, slope 0.1920275
        (0.5, 1.0, -1.5101627, -0.4700074, 0.9400148),  # sigmoid(-0.5) = 0.3775407, slope 0.2350037
        (0.5, 0.0, 0.0, 0.0, 0.9341398),  # tau_neg: sigmoid(-0.525) = 0.3716838
    ],
)
def test_sapo_by_hand(
    ratio: float, advantage: float, loss: float, grad: float, gate: float
) -> None:
    outputs, found = token("sapo", 0.25, 0.25 * ratio, advantage)
    assert outputs.token_loss_T.item() == pytest.approx(loss, abs=1e-6)
    assert found == pytest.approx(grad, abs=1e-6)
    assert outputs.metrics["actor/sapo_gate"].item() == pytest.approx(gate, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "params", "weight", "clipped"),
    [
        (1.0, {}, 1.0, 0),
        (4.0, {}, 4.0, 0),
        (8.0, {}, 5.0, 1),
        (0.01, {}, 0.01, 0),  # no lower bound
        (0.5, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.5}, 0.8, 1),
        (1.6, {"clip_ratio_low": 0.2, "clip_ratio_high": 0.5}, 1.5, 1),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_cispo_by_hand(
    ratio: float, params: dict[str, float], weight: float, clipped: int, advantage: float
) -> None:
    outputs, grad = token("cispo", 0.1, 0.1 * ratio, advantage, **params)
    assert grad == pytest.approx(-weight * advantage)  # clipped or not: every token trains
    assert outputs.token_loss_T.item() == pytest.approx(-weight * advantage * math.log(0.1 * ratio))
    assert outputs.metrics["actor/pg_clipfrac"].item() == clipped


@pytest.mark.parametrize("name", ["reinforce", "gpg"])
def test_plain_policy_gradient_by_hand(name: str) -> None:
    outputs, grad = token(name, 0.1, 0.5, -3.0)
    assert (outputs.token_loss_T.item(), grad) == (pytest.approx(3 * HALF), 3.0)
    assert outputs.metrics["actor/ppo_kl"].item() == pytest.approx(-math.log(5))


def test_dro_by_hand() -> None:
    # log_probs - old = log 2 = 0.6931472, its square 0.4804530
    outputs, grad = token("dro", 0.25, 0.5, 1.0, dro_beta=0.1)
    assert outputs.token_loss_T.item() == pytest.approx(-(HALF - 0.05 * 0.4804530), abs=1e-7)
    assert grad == pytest.approx(-1 + 0.1 * 0.6931472, abs=1e-7)
    assert token("dro", 0.5, 0.25, 0.0, dro_beta=0.1)[1] == pytest.approx(-0.06931472, abs=1e-7)


# probability before and now, advantage, weight that is left; the distances are |p - p_old| and
# KL(old || new)
DIVERGENCES = [
    (0.5, 0.7, 1.0, 0.0, 0.0),  # 0.2; 0.5 ln(5/7) + 0.5 ln(5/3) = 0.0872: too far up
    (0.5, 0.6, 1.0, 1.2, 1.2),  # 0.1; 0.0204
    (0.5, 0.3, 1.0, 0.6, 0.6),  # as far down, and on its way back
    (0.5, 0.3, -1.0, 0.0, 0.0),  # 0.2; 0.0872: too far down
    (0.5, 0.7, -1.0, 1.4, 1.4),
    (
        1e-5,
        1e-3,
        1.0,
        20.0,
        20.0,
    ),  # 0.00099; 0.00094: rare tokens may grow a hundredfold; the weight is cut at 20
    (0.99, 0.8, -1.0, 0.0, 0.0),  # 0.19; 0.181: the ratio, 0.81, would pass PPO's clip
    (
        0.9,
        0.76,
        -1.0,
        0.76 / 0.9,
        0.0,
    ),  # 0.14; 0.9 ln(90/76) + 0.1 ln(10/24) = 0.0646: the two differ
    (0.5, 1.0, 1.0, 0.0, 0.0),  # 0.5; finite though the other outcome became impossible
    (1.0, 1.0, 1.0, 1.0, 1.0),
]


@pytest.mark.parametrize(("p_old", "p", "advantage", "by_tv", "by_kl"), DIVERGENCES)
def test_dppo_by_hand(p_old: float, p: float, advantage: float, by_tv: float, by_kl: float) -> None:
    for name, weight in (("dppo_tv", by_tv), ("dppo_kl", by_kl)):
        outputs, grad = token(name, p_old, p, advantage)
        assert grad == pytest.approx(-advantage * weight), name
        assert outputs.token_loss_T.item() == pytest.approx(-advantage * weight * math.log(p))
        assert outputs.metrics["actor/pg_clipfrac"].item() == (weight == 0)


def test_dppo_bounds_of_their_own_for_both_directions() -> None:
    assert token("dppo_tv", 0.5, 0.7, 1.0, clip_ratio_high=0.21)[1] == pytest.approx(-1.4)
    assert token("dppo_tv", 0.5, 0.7, 1.0, clip_ratio_low=0.21)[1] == 0
    assert token("dppo_tv", 0.5, 0.3, -1.0, clip_ratio_low=0.21)[1] == pytest.approx(0.6)
    assert token("dppo_kl", 0.5, 0.7, 1.0, clip_ratio_high=0.08)[1] == 0
    assert token("dppo_kl", 0.5, 0.7, 1.0, clip_ratio_high=0.09)[1] == pytest.approx(-1.4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "picked", "loss", "grad", "clipped"),
    [
        (1.1, 2.0, False, -2.2, -2.2, 0),
        (1.5, 2.0, False, -2.4, 0.0, 1),
        (0.5, -2.0, False, 1.6, 0.0, 1),
        (5.0, -2.0, False, 10.0, 10.0, 0),  # no dual clip
        (1.1, 2.0, True, 0.0, 0.0, 0),
        (1.5, 2.0, True, 0.0, 0.0, 1),
    ],
)
def test_clip_cov_by_hand(
    ratio: float, advantage: float, picked: bool, loss: float, grad: float, clipped: int
) -> None:
    outputs, found = token("clip_cov", 0.1, 0.1 * ratio, advantage, picked)
    assert (outputs.token_loss_T.item(), found) == (pytest.approx(loss), pytest.approx(grad))
    assert outputs.metrics["actor/pg_clipfrac"].item() == clipped
    assert outputs.metrics["actor/pg_picked"].item() == picked


@pytest.mark.parametrize(
    ("ratio", "advantage", "picked", "loss", "grad"),
    [
        (1.5, 2.0, False, -3.0, -3.0),  # no clip
        (1.5, 2.0, True, -3.0 + 0.5 * 0.4054651, -3.0 + 0.5),
        (0.5, 2.0, True, -1.0 + 0.5 * 0.6931472, -1.0 - 0.5),
        (1.0, 2.0, True, -2.0, -2.0),
        (0.5, -2.0, False, 1.0, 1.0),
    ],
)
def test_kl_cov_by_hand(
    ratio: float, advantage: float, picked: bool, loss: float, grad: float
) -> None:
    outputs, found = token("kl_cov", 0.1, 0.1 * ratio, advantage, picked, ppo_kl_coef=0.5)
    assert outputs.token_loss_T.item() == pytest.approx(loss, abs=1e-7)
    assert (
        found == pytest.approx(grad, abs=1e-12)
        and outputs.metrics["actor/pg_picked"].item() == picked
    )
