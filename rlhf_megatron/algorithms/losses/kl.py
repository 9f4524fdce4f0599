"""Estimators of KL(policy || reference) from one sampled token (Schulman, http://joschu.net/blog/kl-approx.html).

With d = log_probs - ref_log_probs:

    k1 = d                      unbiased value; as a loss its expected gradient is 0, so it regularises nothing
    abs = |d|                   on average no less than it; its expected gradient is that of twice the total variation
    k2 = d^2 / 2                biased value, low variance; its expected gradient is the true one's
    k3 = exp(-d) + d - 1        unbiased value, low variance, never negative; clamps: d to +-20, k3 to +-10

The clamps are the field's. A clamped token has gradient 0.

k1+, k2+, k3+, abs+, of a loss: straight through, the value of that estimator and the gradient of k2, also where a clamp
holds the value. So what k1+ and k3+ report is an unbiased estimate, and what trains is the one whose expected gradient
is right (k2+ is k2).
"""

# T tokens

from __future__ import annotations

from typing import Literal

from rlhf_megatron.algorithms.losses.scratch import Scratch
from rlhf_megatron.lazy import Tensor, torch

KLType = Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"]  # of a loss
KLPenaltyType = Literal["k1", "k2", "k3", "abs"]  # of a reward
KL_TYPES = ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")
STRAIGHT = "+"  # ends the names of the straight-through forms
MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8 is far past any clip and far from overflow
MAX_K3 = 10.0


def kl_estimate(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: KLType | KLPenaltyType) -> Tensor:
    """[T] nats, differentiable in both arguments. Raises ValueError for an unknown kind."""
    diff_T = log_probs_T - ref_log_probs_T
    if kind in KL_TYPES and kind.endswith(STRAIGHT):
        value_T = _plain_estimate(diff_T.detach(), kind.removesuffix(STRAIGHT))
        guide_T = 0.5 * diff_T.square()
        return value_T + (guide_T - guide_T.detach())
    return _plain_estimate(diff_T, kind)


def _plain_estimate(diff_T: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return diff_T
    if kind == "abs":
        return diff_T.abs()
    if kind == "k2":
        return 0.5 * diff_T.square()
    if kind == "k3":
        log_ratio_T = (-diff_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (log_ratio_T.expm1() - log_ratio_T).clamp(-MAX_K3, MAX_K3)
    raise ValueError(f"unknown KL estimator {kind!r}; known: {', '.join(KL_TYPES)}.")


def kl_explicit(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: KLType, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """(`kl_estimate`, its gradient with respect to `log_probs_T`), both in tensors of `scratch`."""
    diff_T = torch.sub(log_probs_T, ref_log_probs_T, out=scratch.take())
    if kind in KL_TYPES and kind.endswith(STRAIGHT):
        grad_T = scratch.take().copy_(diff_T)
        return _plain_explicit(diff_T, kind.removesuffix(STRAIGHT), scratch)[0], grad_T
    return _plain_explicit(diff_T, kind, scratch)


def _plain_explicit(diff_T: Tensor, kind: str, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """May write over `diff_T`."""
    if kind == "k1":
        return diff_T, scratch.take().fill_(1.0)
    if kind == "abs":
        grad_T = torch.sign(diff_T, out=scratch.take())
        return diff_T.abs_(), grad_T
    if kind == "k2":
        return torch.mul(diff_T, diff_T, out=scratch.take()).mul_(0.5), diff_T
    if kind == "k3":
        log_ratio_T = diff_T.neg_().clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        grad_T = torch.expm1(log_ratio_T, out=scratch.take())
        raw_T = torch.sub(grad_T, log_ratio_T, out=log_ratio_T)
        kl_T = torch.clamp(raw_T, -MAX_K3, MAX_K3, out=scratch.take())
        is_inside_T = raw_T.eq_(kl_T)  # where the first clamp bites, this one does: k3(+-20) is over 10
        return kl_T, grad_T.mul_(is_inside_T).neg_()
    raise ValueError(f"unknown KL estimator {kind!r} of a loss; known: {', '.join(KL_TYPES)}.")
