"""GSPO: PPO's clip on the importance ratio of whole sequences.

"Group Sequence Policy Optimization" (arXiv 2507.18071, equations 5 to 7), in the form of its
equation 14, which lets tokens of one sequence have different advantages. With the n response tokens
of a sequence:

    s    = exp((1 / n) sum_t (log_probs_t - old_log_probs_t))        the mean held in +-20
    loss = max(-A s, -A clip(s, 1 - low, 1 + high))

of every token, where s has the gradient s d log_probs_t. Under seq-mean-token-mean that is the
paper's objective, value and gradient; any other `actor.loss_agg_mode` weighs sequences otherwise.
Nothing is forced: a run whose settings leave that mode at its default is refused.

The ranges are those of the paper, about a thousandth of PPO's: a mean over tokens moves little.
"""

# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    check_clip_range,
    compute_clipped_loss,
    compute_sequence_ratio,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)


@dataclass(frozen=True)
class GSPOParams:
    clip_ratio_low: float = 3e-4  # the sequence's ratio is clipped to 1 - clip_ratio_low from below
    clip_ratio_high: float = 4e-4  # and to 1 + clip_ratio_high from above

    def __post_init__(self) -> None:
        """Raise ValueError for bounds that are no range around 1."""
        check_clip_range(self.clip_ratio_low, self.clip_ratio_high, "0.0003, 0.0004")


@POLICY_LOSSES.register(
    "gspo",
    GSPOParams,
    needs=("advantages", "old_log_probs", "sequences"),
    aggregation="seq-mean-token-mean",
)
def gspo(inputs: PolicyLossInputs, params: GSPOParams) -> PolicyLossOutputs:
    """Return the loss of each token, with metrics actor/ppo_kl (of tokens) and actor/pg_clipfrac (1
    on all tokens of a clipped sequence).
    """
    ratio_T = compute_sequence_ratio(inputs, inputs.log_probs_T - inputs.old_log_probs_T)
    token_loss_T, is_clipped_T = compute_clipped_loss(
        inputs.advantages_T, ratio_T, params.clip_ratio_low, params.clip_ratio_high
    )
    return PolicyLossOutputs(
        token_loss_T,
        {**make_ppo_kl_metric(inputs), "actor/pg_clipfrac": is_clipped_T.to(ratio_T.dtype)},
    )
