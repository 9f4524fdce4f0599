"""Every metric that algorithms/ hands out: key -> (unit, meaning). Names are the field's own where one exists."""

from __future__ import annotations

METRICS: dict[str, tuple[str, str]] = {
    # Per token, averaged by the caller with metric weights over the response tokens of a mini-batch.
    "actor/loss": ("1", "the whole loss, summed with the loss weights of actor.loss_agg_mode"),
    "actor/pg_loss": ("1", "policy loss before KL and entropy terms"),
    "actor/pg_clipfrac": ("share", "tokens whose loss the ratio clip replaced"),
    "actor/pg_clipfrac_lower": ("share", "tokens of negative advantage whose loss the dual clip replaced"),
    "actor/ppo_kl": ("nats", "k1 estimate of KL(old || current), old_log_probs - log_probs clamped to +-20"),
    "actor/kl_loss": ("nats", "KL estimate against the reference, before kl_loss_coef"),
    "actor/entropy_loss": ("nats", "entropy of the policy during the update, before entropy_coeff"),
    "actor/sft_loss": ("nats", "negative log-prob of the target tokens"),
    "critic/vf_loss": ("1", "value loss: half the squared distance to the returns, clipped"),
    "critic/vf_clipfrac": ("share", "tokens whose value loss the clip replaced"),
    "critic/vpred_mean": ("1", "value during the update"),
    # Of a step: the critic and KL in the reward, over the response tokens of valid samples.
    "critic/vf_explained_var": ("1", "1 - Var(returns - values) / Var(returns); 1: perfect, 0: as good as a constant"),
    "actor/reward_kl_penalty": ("nats", "KL estimate against the reference in the reward, a token, before its weight"),
    "actor/reward_kl_penalty_coeff": ("1", "weight of that term in this step's rewards"),
    # Of a step: engine against trainer on the sampled tokens (algorithms/mismatch.py).
    "training/rollout_log_probs_diff_max": ("nats", "largest |log-prob of the trainer - of the engine|"),
    "training/rollout_log_probs_diff_p50": ("nats", "median of it"),
    "training/rollout_log_probs_diff_p99": ("nats", "99th percentile of it"),
    "training/rollout_log_probs_diff_mean": ("nats", "mean of it"),
    "training/rollout_kl": ("nats", "mean k3 estimate of KL(engine || trainer)"),
    "training/rollout_probs_diff_valid": ("0 or 1", "1: there were tokens to compare"),
    "training/rollout_probs_diff_max": ("1", "largest |probability of the trainer - of the engine|"),
    "training/rollout_probs_diff_mean": ("1", "mean of it"),
    "training/rollout_probs_diff_std": ("1", "standard deviation of it (unbiased; 0 for a single token)"),
}
