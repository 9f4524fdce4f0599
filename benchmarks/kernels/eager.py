"""What autograd makes of ppo_clip, its regularizers and the value loss: to compare with."""

# T tokens

from __future__ import annotations

import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses.kl_estimators import (
    MAX_K3,
    MAX_LOG_RATIO,
    STRAIGHT_THROUGH_SUFFIX,
)
from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams


def eager_ppo_clip(inputs: PolicyLossInputs, params: PPOClipParams) -> PolicyLossOutputs:
    advantages_T = inputs.advantages_T
    log_ratio_T = (inputs.log_probs_T - inputs.old_log_probs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = log_ratio_T.exp()
    free_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - params.clip_ratio_low, 1 + params.clip_ratio_high)
    is_clipped_T = clipped_T > free_T
    worse_T = torch.where(is_clipped_T, clipped_T, free_T)
    bound_T = -advantages_T * params.clip_ratio_c
    is_bound_T = (advantages_T < 0) & (worse_T > bound_T)
    metrics = {
        "actor/ppo_kl": -log_ratio_T.detach(),
        "actor/pg_clipfrac": is_clipped_T.to(ratio_T.dtype),
        "actor/pg_clipfrac_lower": is_bound_T.to(ratio_T.dtype),
    }
    return PolicyLossOutputs(torch.where(is_bound_T, bound_T, worse_T), metrics)


def eager_kl(log_probs_T: Tensor, ref_log_probs_T: Tensor, kind: str) -> Tensor:
    diff_T = log_probs_T - ref_log_probs_T
    if kind.endswith(STRAIGHT_THROUGH_SUFFIX):
        guide_T = 0.5 * diff_T.square()
        return (
            eager_kl(
                log_probs_T.detach(), ref_log_probs_T, kind.removesuffix(STRAIGHT_THROUGH_SUFFIX)
            )
            + guide_T
            - guide_T.detach()
        )
    if kind == "k3":
        log_ratio_T = (-diff_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return (log_ratio_T.expm1() - log_ratio_T).clamp(-MAX_K3, MAX_K3)
    return {"k1": diff_T, "abs": diff_T.abs(), "k2": 0.5 * diff_T.square()}[kind]


def eager_policy(
    inputs: PolicyLossInputs, params: PPOClipParams, regularizers: RegularizerParams
) -> PolicyLossOutputs:
    """As `compose.total_token_loss` of ppo_clip."""
    policy = eager_ppo_clip(inputs, params)
    loss_T = policy.token_loss_T
    if inputs.correction_weights_T is not None:
        loss_T = loss_T * inputs.correction_weights_T
    metrics = {**policy.metrics, "actor/pg_loss": loss_T.detach()}
    if inputs.ref_log_probs_T is not None:
        kl_T = eager_kl(inputs.log_probs_T, inputs.ref_log_probs_T, regularizers.kl_loss_type)
        metrics["actor/kl_loss"] = kl_T.detach()
        if regularizers.kl_loss_coef != 0:
            loss_T = loss_T + regularizers.kl_loss_coef * kl_T
    if inputs.entropies_T is not None:
        metrics["actor/entropy_loss"] = inputs.entropies_T.detach()
        if regularizers.entropy_coeff != 0:
            loss_T = loss_T - regularizers.entropy_coeff * inputs.entropies_T
    return PolicyLossOutputs(loss_T, metrics)


def eager_value(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, cliprange_value: float
) -> PolicyLossOutputs:
    """As `value_loss`."""
    token_loss_T = 0.5 * (values_T - returns_T).square()
    is_clipped_T = torch.zeros_like(token_loss_T, dtype=torch.bool)
    if cliprange_value > 0:
        near_T = values_T.clamp(old_values_T - cliprange_value, old_values_T + cliprange_value)
        clipped_T = 0.5 * (near_T - returns_T).square()
        is_clipped_T = clipped_T > token_loss_T
        token_loss_T = torch.where(is_clipped_T, clipped_T, token_loss_T)
    metrics = {
        "critic/vf_loss": token_loss_T.detach(),
        "critic/vf_clipfrac": is_clipped_T.to(values_T.dtype),
        "critic/vpred_mean": values_T.detach(),
    }
    return PolicyLossOutputs(token_loss_T, metrics)
