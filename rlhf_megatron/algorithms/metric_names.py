"""Every metric that algorithms/ hands out. Names are the field's own where one exists.

To add one: a line `"area/name": Metric(unit, meaning, reduction, over, better)`, see algorithms/metric.py (`better`
only where there is a direction), in the block of what hands it out.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.metric import OPTIMIZER_STEPS, STEP, TOKENS, VALID_TOKENS, Metric
from rlhf_megatron.algorithms.rollout_correction.metric_names import METRICS as CORRECTION_METRICS

HAVE_PART = "samples whose reward counts and has the part"
METRICS: dict[str, Metric] = {
    # Per token, averaged by the caller with metric weights over the response tokens of a mini-batch.
    "actor/loss": Metric(
        "1", "the whole loss, summed with the loss weights of actor.loss_agg_mode", "sum", OPTIMIZER_STEPS
    ),
    "actor/pg_loss": Metric("1", "policy loss before KL and entropy terms", "mean", OPTIMIZER_STEPS),
    "actor/pg_clipfrac": Metric(
        "share", "tokens whose loss a clip of the ratio replaced, or a divergence took out", "mean", OPTIMIZER_STEPS
    ),
    "actor/pg_clipfrac_lower": Metric(
        "share", "tokens of negative advantage whose loss the dual clip replaced", "mean", OPTIMIZER_STEPS
    ),
    "actor/pg_picked": Metric(
        "share", "tokens that the loss picked for their covariance: no gradient, or a KL term", "mean", OPTIMIZER_STEPS
    ),
    "actor/sapo_gate": Metric(
        "share", "gradient that the soft gate lets through; 1: all, as at a ratio of 1", "mean", OPTIMIZER_STEPS
    ),
    "actor/ppo_kl": Metric(
        "nats", "k1 estimate of KL(old || current), old_log_probs - log_probs clamped to +-20", "mean", OPTIMIZER_STEPS
    ),
    "actor/kl_loss": Metric("nats", "KL estimate against the reference, before kl_loss_coef", "mean", OPTIMIZER_STEPS),
    "actor/entropy_loss": Metric(
        "nats", "entropy of the policy during the update, before entropy_coeff", "mean", OPTIMIZER_STEPS
    ),
    "actor/sft_loss": Metric("nats", "negative log-prob of the target tokens", "mean", OPTIMIZER_STEPS, "lower"),
    "critic/vf_loss": Metric(
        "1", "value loss: half the squared distance to the returns, clipped", "mean", OPTIMIZER_STEPS, "lower"
    ),
    "critic/vf_clipfrac": Metric("share", "tokens whose value loss the clip replaced", "mean", OPTIMIZER_STEPS),
    "critic/vpred_mean": Metric("1", "value during the update", "mean", OPTIMIZER_STEPS),
    # Of a step: the critic and KL in the reward.
    "critic/vf_explained_var": Metric(
        "1",
        "1 - Var(returns - values) / Var(returns); 1: perfect, 0: as good as a constant",
        "ratio",
        VALID_TOKENS,
        "higher",
    ),
    "actor/reward_kl_penalty": Metric(
        "nats", "KL estimate against the reference in the reward, a token, before its weight", "mean", VALID_TOKENS
    ),
    "actor/reward_kl_penalty_coeff": Metric("1", "weight of that term in this step's rewards", "last", STEP),
    # Of a step: reward parts as estimator gdpo sees them, before it normalises.
    "gdpo/<name>/mean": Metric("score", "a reward part of algorithm.params.gdpo_reward_keys", "mean", HAVE_PART),
    "gdpo/<name>/std": Metric("score", "spread of it (unbiased); 0 for a single one", "std", HAVE_PART),
    "gdpo/<name>/max": Metric("score", "largest of it", "max", HAVE_PART),
    "gdpo/<name>/min": Metric("score", "smallest of it", "min", HAVE_PART),
    # Of a step: engine against trainer on the sampled tokens (algorithms/mismatch.py).
    "training/rollout_log_probs_diff_max": Metric(
        "nats",
        "largest |log-prob of the trainer - of the engine|; this and the next: of tokens of the policy that trains,"
        " left out where older ones have sampled all",
        "max",
        TOKENS,
        "lower",
    ),
    "training/rollout_log_probs_diff_p50": Metric("nats", "median of it", "quantile", TOKENS, "lower"),
    "training/rollout_log_probs_diff_p99": Metric("nats", "99th percentile of it", "quantile", TOKENS, "lower"),
    "training/rollout_log_probs_diff_mean": Metric("nats", "mean of it", "mean", TOKENS, "lower"),
    "training/rollout_kl": Metric("nats", "k3 estimate of KL(engine || trainer)", "mean", TOKENS, "lower"),
    "training/rollout_probs_diff_valid": Metric("0 or 1", "1: there were tokens to compare", "last", STEP),
    "training/rollout_probs_diff_max": Metric(
        "1", "largest |probability of the trainer - of the engine|", "max", TOKENS, "lower"
    ),
    "training/rollout_probs_diff_mean": Metric("1", "mean of it", "mean", TOKENS, "lower"),
    "training/rollout_probs_diff_std": Metric(
        "1", "standard deviation of it (unbiased; 0 for a single token)", "std", TOKENS, "lower"
    ),
    **CORRECTION_METRICS,
}
