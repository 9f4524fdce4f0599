"""Estimators of KL(policy || reference) from one sampled token
(Schulman, http://joschu.net/blog/kl-approx.html).

With d = log_probs - ref_log_probs:

    k1 = d                      unbiased value; as a loss its expected gradient is 0, so it
                                regularises nothing
    abs = |d|                   on average no less than it; its expected gradient is that of twice
                                the total variation
    k2 = d^2 / 2                biased value, low variance; its expected gradient is the true one's
    k3 = exp(-d) + d - 1        unbiased value, low variance, never negative; clamps: d to
                                +-20, k3 to +-10

The clamps are the field's. A clamped token has gradient 0.

k1+, k2+, k3+, abs+, of a loss: straight through, the value of that estimator and the gradient of
k2, also where a clamp holds the value. So what k1+ and k3+ report is an unbiased estimate, and what
trains is the one whose expected gradient is right (k2+ is k2).
"""

# T tokens

from __future__ import annotations

from typing import Literal

from rlhf_megatron.algorithms.losses.policy_loss import attach_gradient
from rlhf_megatron.lazy import Tensor, torch

KLType = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]  # of a loss
KLPenaltyType = Literal["k1", "k2", "k3", "abs"]  # of a reward
KL_TYPES: tuple[str, ...] = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
STRAIGHT_THROUGH_SUFFIX = "+"  # ends the names of the straight-through forms
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far past any clip and far from overflow
MAX_K3 = 10.0


def estimate_kl(
    log_probs_T: Tensor, ref_log_probs_T: Tensor, kl_type: KLType | KLPenaltyType
) -> Tensor:
    """Return the KL estimate of each token, [T] nats, differentiable in `log_probs_T`. Raise
    ValueError for an unknown kind.
    """
    return attach_gradient(
        *compute_kl_with_gradient(log_probs_T.detach(), ref_log_probs_T, kl_type), log_probs_T
    )


def compute_kl_with_gradient(
    log_probs_T: Tensor, ref_log_probs_T: Tensor, kl_type: KLType | KLPenaltyType
) -> tuple[Tensor, Tensor]:
    """Return the KL estimate of each token, [T] nats, and its gradient with respect to
    `log_probs_T`, [T]. Raise ValueError for an unknown kind.
    """
    if kl_type not in KL_TYPES:
        raise ValueError(f"unknown KL estimator {kl_type!r}; known: {', '.join(KL_TYPES)}.")
    diff_T = log_probs_T - ref_log_probs_T
    name = kl_type.removesuffix(STRAIGHT_THROUGH_SUFFIX)
    if name == "k1":
        kl_T = diff_T
        grad_T = torch.ones_like(diff_T)
    elif name == "abs":
        kl_T = diff_T.abs()
        grad_T = diff_T.sign()
    elif name == "k2":
        kl_T = diff_T.square().mul_(0.5)
        grad_T = diff_T
    else:
        log_ratio_T = diff_T.neg().clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        grad_T = log_ratio_T.expm1()
        raw_T = torch.sub(grad_T, log_ratio_T, out=log_ratio_T)
        kl_T = raw_T.clamp(-MAX_K3, MAX_K3)
        # where the first clamp bites, this one does: k3(+-20) is over 10
        is_inside_T = raw_T.eq_(kl_T)
        grad_T.mul_(is_inside_T).neg_()
    return kl_T, diff_T if kl_type.endswith(STRAIGHT_THROUGH_SUFFIX) else grad_T
