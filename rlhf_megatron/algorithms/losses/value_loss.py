"""The critic's loss: half the squared distance to the returns, clipped around the values
before the update.

As in the authors' code for "Proximal Policy Optimization Algorithms" (arXiv 1707.06347; the paper
has no value clip):
the larger of the free and the clipped distance, so that a value that has moved far enough towards
its return has no gradient, and one that has moved away has all of it.

    loss = 0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2)

Not a policy loss, so it is not registered as one.
"""

# T tokens

from __future__ import annotations

from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossOutputs
from rlhf_megatron.lazy import Tensor, torch


def compute_value_loss(
    values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, cliprange_value: float
) -> PolicyLossOutputs:
    """Return the critic's loss of each token with its gradient with respect to the values;
    `cliprange_value` 0: no clip.

    Metrics: critic/vf_loss, critic/vf_clipfrac (1 where the clipped distance was the larger one),
    critic/vpred_mean.
    """
    assert cliprange_value >= 0, f"cliprange_value {cliprange_value} is negative"
    values_T = values_T.detach()
    distance_T = values_T - returns_T
    token_loss_T = distance_T.square().mul_(0.5)
    if cliprange_value > 0:
        lower_T = old_values_T - cliprange_value
        upper_T = old_values_T + cliprange_value
        near_T = torch.clamp(values_T, lower_T, upper_T, out=upper_T)
        clipped_T = near_T.sub_(returns_T).square_().mul_(0.5)
        # the held value has no gradient
        distance_T.mul_(torch.le(clipped_T, token_loss_T, out=lower_T))
        is_clipped_T = torch.gt(clipped_T, token_loss_T, out=lower_T)
        torch.maximum(token_loss_T, clipped_T, out=token_loss_T)
    else:
        is_clipped_T = torch.zeros_like(token_loss_T)
    metrics = {
        "critic/vf_loss": token_loss_T,
        "critic/vf_clipfrac": is_clipped_T,
        "critic/vpred_mean": values_T,
    }
    return PolicyLossOutputs(token_loss_T, metrics, distance_T)
