"""The supervised loss: negative log-prob of the target tokens. Not a policy loss, so it is not
registered as one.
"""

# T tokens

from __future__ import annotations

from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossOutputs
from rlhf_megatron.lazy import Tensor


def compute_sft_loss(log_probs_T: Tensor) -> PolicyLossOutputs:
    """Return the negative log-prob of each token as its loss, in nats, with metric
    actor/sft_loss.
    """
    token_loss_T = -log_probs_T
    return PolicyLossOutputs(token_loss_T, {"actor/sft_loss": token_loss_T.detach()})
