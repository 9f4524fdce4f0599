"""REINFORCE: the plain policy gradient.

"Simple statistical gradient-following algorithms for connectionist reinforcement learning"
(Williams 1992):

    loss = -A log_probs

GPG's loss is the same ("GPG: A Simple and Strong Reinforcement Learning Baseline for Model
Reasoning", arXiv 2504.02546, equation 6): what makes GPG is the estimator gpg, which scales by the
share of groups with signal.

There is no ratio and no clip: right where the samples are of the current policy (one optimizer step
on each), or where correction weights multiply it. Its value means nothing; its gradient is all.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.losses.importance_ratio import make_ppo_kl_metric
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)


@POLICY_LOSSES.register("gpg", needs=("advantages",))
@POLICY_LOSSES.register("reinforce", needs=("advantages",))
def reinforce(inputs: PolicyLossInputs, params: None) -> PolicyLossOutputs:
    """Return the loss of each token, -advantage * log_prob, with metric actor/ppo_kl."""
    return PolicyLossOutputs(-inputs.advantages_T * inputs.log_probs_T, make_ppo_kl_metric(inputs))
