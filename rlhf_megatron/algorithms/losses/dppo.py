"""DPPO, by KL divergence (`dppo_kl`) or total variation (`dppo_tv`): a divergence takes tokens out
of the update.

"Rethinking the Trust Region in LLM Reinforcement Learning" (arXiv 2602.04879, equations 11 and 12).
With p and p_old the token's probabilities, the importance ratio r, its logarithm held in +-20, and
sg the value without gradient:

    loss = -A sg(min(r, c)) log_probs    of a token that is inside, or moves back
           0                             of a token that has gone too far in the direction
                                         of its advantage

How far is too far is told by the divergence between two coins, of p and of p_old heads: the sampled
token, or another. PPO's clip asks for the ratio instead, which is large where a rare token moves a
little and small where a frequent one moves much. The truncation at c is that of the authors' code.

p_old is the trainer's policy at the start of the update. The paper measures from the engine's:
bypass mode has that. The divergence of `dppo_kl` is KL(old || current) of the two coins, that of
`dppo_tv` is |p - p_old|.
"""
# T tokens

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.algorithms.losses.importance_ratio import (
    compute_clamped_log_ratio,
    make_ppo_kl_metric,
)
from rlhf_megatron.algorithms.losses.policy_loss import (
    POLICY_LOSSES,
    PolicyLossInputs,
    PolicyLossOutputs,
)
from rlhf_megatron.lazy import Tensor, torch

LARGEST_LOG_P = -1e-8


@dataclass(frozen=True)
class DPPOTVParams:
    # a token of negative advantage is out below p_old - clip_ratio_low
    clip_ratio_low: float = 0.15
    clip_ratio_high: float = 0.15  # one of positive advantage above p_old + clip_ratio_high
    clip_ratio_c: float = 20.0  # bound on the importance weight

    def __post_init__(self) -> None:
        """Raise ValueError for a bound out of range."""
        for name, value in (
            ("clip_ratio_low", self.clip_ratio_low),
            ("clip_ratio_high", self.clip_ratio_high),
        ):
            if not value > 0:
                usual = type(self).clip_ratio_low  # of the authors' runs
                raise ValueError(
                    f"{name} ({value}) must be positive, a bound of the divergence;"
                    f" {usual} is usual."
                )
        if not self.clip_ratio_c > 1:
            raise ValueError(f"clip_ratio_c ({self.clip_ratio_c}) must be above 1; 20 is usual.")


@dataclass(frozen=True)
class DPPOKLParams(DPPOTVParams):
    # nats: a token of negative advantage that became rarer is out beyond
    clip_ratio_low: float = 0.05
    # nats: one of positive advantage that became likelier is out beyond
    clip_ratio_high: float = 0.05


def _compute_divergence_loss(
    inputs: PolicyLossInputs, prob_change_T: Tensor, divergence_T: Tensor, params: DPPOTVParams
) -> PolicyLossOutputs:
    """Return the loss of each token, 0 for tokens that have gone too far in the direction of their
    advantage. `prob_change_T`: above 0 where the token became likelier; `divergence_T`: how far it
    went, at least 0.
    """
    advantages_T = inputs.advantages_T
    is_out_T = torch.where(
        advantages_T > 0,
        (prob_change_T > 0) & (divergence_T > params.clip_ratio_high),
        (prob_change_T < 0) & (divergence_T > params.clip_ratio_low),
    )
    weight_T = (
        compute_clamped_log_ratio(inputs)
        .detach()
        .exp()
        .clamp(max=params.clip_ratio_c)
        .masked_fill(is_out_T, 0.0)
    )
    metrics = {**make_ppo_kl_metric(inputs), "actor/pg_clipfrac": is_out_T.to(weight_T.dtype)}
    return PolicyLossOutputs(-advantages_T * weight_T * inputs.log_probs_T, metrics)


def _compute_prob_change(inputs: PolicyLossInputs) -> Tensor:
    """Return p - p_old of each token, [T], without grad."""
    return inputs.log_probs_T.detach().exp() - inputs.old_log_probs_T.exp()


@POLICY_LOSSES.register("dppo_kl", DPPOKLParams, needs=("advantages", "old_log_probs"))
def dppo_kl(inputs: PolicyLossInputs, params: DPPOKLParams) -> PolicyLossOutputs:
    """Return the loss of each token, which the KL divergence bounds, with metrics actor/ppo_kl and
    actor/pg_clipfrac (1 where the token was taken out).
    """
    log_p_T = inputs.log_probs_T.detach().clamp(max=LARGEST_LOG_P)
    log_p_old_T = inputs.old_log_probs_T.clamp(max=LARGEST_LOG_P)
    heads_T = log_p_old_T.exp() * (log_p_old_T - log_p_T)
    rest_T = -log_p_T.expm1()
    rest_old_T = -log_p_old_T.expm1()
    divergence_T = heads_T + rest_old_T * (rest_old_T.log() - rest_T.log())
    return _compute_divergence_loss(inputs, _compute_prob_change(inputs), divergence_T, params)


@POLICY_LOSSES.register("dppo_tv", DPPOTVParams, needs=("advantages", "old_log_probs"))
def dppo_tv(inputs: PolicyLossInputs, params: DPPOTVParams) -> PolicyLossOutputs:
    """Return the loss of each token, which the total variation bounds, with metrics actor/ppo_kl
    and actor/pg_clipfrac (1 where the token was taken out).
    """
    moved_T = _compute_prob_change(inputs)
    return _compute_divergence_loss(inputs, moved_T, moved_T.abs(), params)
