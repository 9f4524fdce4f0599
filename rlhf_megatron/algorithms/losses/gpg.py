"""GPG: the policy gradient of a group's advantages, without ratio, clip and KL.

"GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning" (arXiv 2504.02546, equation 6):

    loss = -A log_probs

The loss of `reinforce`. What makes GPG is the advantage estimator gpg, which scales by the share of groups with signal;
with another estimator this is REINFORCE.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.losses.base import POLICY_LOSSES, PolicyLossInputs, PolicyLossOutputs
from rlhf_megatron.algorithms.losses.ratio import ppo_kl


@POLICY_LOSSES.register("gpg", needs=("advantages",))
def gpg(inputs: PolicyLossInputs, params: None) -> PolicyLossOutputs:
    """Per-token loss; metric actor/ppo_kl."""
    return PolicyLossOutputs(-inputs.advantages_T * inputs.log_probs_T, ppo_kl(inputs))
