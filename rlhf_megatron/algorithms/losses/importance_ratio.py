"""Importance ratios of tokens and of whole sequences, as the policy losses use them."""

# T tokens

from __future__ import annotations

from rlhf_megatron.algorithms.losses.kl_estimators import MAX_LOG_RATIO
from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs
from rlhf_megatron.lazy import Tensor, torch


def compute_clamped_log_ratio(inputs: PolicyLossInputs) -> Tensor:
    """Return log_probs - old_log_probs, [T], with grad, clamped to +-20, where the gradient is
    0.
    """
    return (inputs.log_probs_T - inputs.old_log_probs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def make_ppo_kl_metric(inputs: PolicyLossInputs) -> dict[str, Tensor]:
    """Return the metric actor/ppo_kl: old_log_probs - log_probs of each token, clamped to +-20,
    without grad.
    """
    return {"actor/ppo_kl": -compute_clamped_log_ratio(inputs).detach()}


def compute_sequence_ratio(inputs: PolicyLossInputs, log_ratio_T: Tensor) -> Tensor:
    """Return [T] exp of the mean of `log_ratio_T` over the response tokens of each token's whole
    sequence, the mean held in +-20.

    The value is that of the sequence. The gradient of row t is ratio * d log_ratio_t: that of the
    ratio itself, times the number n of the sequence's response tokens. So the mean over a
    sequence's rows has the value of the ratio and its gradient, and rows may be anywhere (other
    micro-batches hold none of the sequence, other ranks may).
    """
    assert inputs.sequences is not None, "a loss of whole sequences needs them"
    sequences = inputs.sequences
    mask_T = inputs.response_mask_T
    sum_S, count_S = sequences.sum_by_sequence(
        log_ratio_T.detach().masked_fill(~mask_T, 0.0), mask_T
    )
    mean_S = sum_S / count_S.clamp(min=1)
    held_S = mean_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = held_S.exp()[sequences.ids_T].to(log_ratio_T.dtype)
    has_gradient_T = (held_S == mean_S)[sequences.ids_T]
    return ratio_T * (1 + torch.where(has_gradient_T, log_ratio_T - log_ratio_T.detach(), 0.0))


def compute_clipped_loss(
    advantages_T: Tensor, ratio_T: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """Return PPO's loss without the dual clip, max(-A r, -A clip(r, 1 - low, 1 + high)), and True
    where the clip replaced the loss.

    A token whose loss is not replaced by a larger one has all of its gradient, on the borders too.
    """
    free_T = -advantages_T * ratio_T
    clipped_T = -advantages_T * ratio_T.clamp(1 - low, 1 + high)
    is_clipped_T = clipped_T > free_T
    return torch.where(is_clipped_T, clipped_T, free_T), is_clipped_T


def check_clip_range(clip_ratio_low: float, clip_ratio_high: float, usual_bounds: str) -> None:
    """Raise ValueError where 1 - low and 1 + high are no range around 1. `usual_bounds`: text for
    the message.
    """
    if not 0 < clip_ratio_low <= 1:
        raise ValueError(
            f"clip_ratio_low ({clip_ratio_low}) must be in (0, 1]; usual (low,"
            f" high): {usual_bounds}."
        )
    if not clip_ratio_high > 0:
        raise ValueError(
            f"clip_ratio_high ({clip_ratio_high}) must be positive; usual (low,"
            f" high): {usual_bounds}."
        )
