"""The form of a line in the catalogue of metrics, and every metric that algorithms/ hands out.

To add one: a line `"area/name": Metric(unit, meaning, reduction, over, better)` (`better` only where there is a
direction), in the block of what hands it out. Names are the field's own where one exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "std", "quantile", "share", "ratio", "last", "count", "verdict"]

# What is reduced, in the words that the reference shows.
OPTIMIZER_STEPS = "response tokens of a mini-batch, then optimizer steps"
TOKENS = "response tokens of a step"
VALID_TOKENS = "response tokens of samples whose reward counts"
SAMPLES = "samples of a step"
VALID_SAMPLES = "samples whose reward counts"
SEQUENCES = "whole responses of a step"
GROUPS = "groups of a step"
STEP = "a step"

PLACEHOLDERS: Mapping[str, tuple[str, str]] = {  # name -> (regular expression, what it stands for)
    "stage": (
        r"[a-z_]+",
        "a stage of the step: next, generate, score or take, annotate, advantages, update, sync, evaluate",
    ),
    "role": (r"actor|critic", "actor or critic"),
    "phase": (r"training|sync|generation", "training, sync or generation"),
    "source": (r".+", "a data source, or the name of an evaluation set"),
    "status": (r".+", "a status of a reward: ok, malformed, timeout, masked:<why>"),
    "reason": (r".+", "stop, length or abort"),
    "name": (r".+", "a name that the reward gives"),
    "option": (r"[a-z0-9_]+", "an entry of a list in the configuration"),
    "verdict": (r"[a-z_]+", "a health verdict"),
    "N": (r"\d+|N", "rollout.val_kwargs.n, the samples of an item"),
    "k": (r"\d+|N", "2, 4, 8 .. and N"),
}


@dataclass(frozen=True)
class Metric:
    """One line: `reduction` of many numbers, `over` these, made the one that is written."""

    unit: str  # "share" is a number from 0 to 1, "1" has no unit
    meaning: str
    reduction: Reduction
    over: str
    better: Literal["", "higher", "lower"] = ""  # the direction in which a run is better off, where there is one


@cache
def _pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"<(\w+)>", name)
    return re.compile("".join(f"(?:{PLACEHOLDERS[p][0]})" if i % 2 else re.escape(p) for i, p in enumerate(parts)))


def find_in(metrics: Mapping[str, Metric], key: str) -> Metric | None:
    """The line of a key as a run writes it, "reward/part/format" too; the first that fits, None where none does."""
    if key in metrics:
        return metrics[key]
    return next((metric for name, metric in metrics.items() if "<" in name and _pattern(name).fullmatch(key)), None)


RESPONSES = "whole responses of samples whose reward counts"
ENTRIES = "response tokens, or whole responses where it is of sequences; of samples whose reward counts"


def _divergence() -> dict[str, Metric]:
    found = {
        "training_ppl": Metric("1", "perplexity under the trainer: exp(-mean log-prob)", "mean", RESPONSES),
        "training_log_ppl": Metric("nats", "its logarithm", "mean", RESPONSES),
        "rollout_ppl": Metric("1", "perplexity under the engine", "mean", RESPONSES),
        "rollout_log_ppl": Metric("nats", "its logarithm", "mean", RESPONSES),
        "log_ppl_diff": Metric("nats", "logarithm of perplexity under trainer / engine", "mean", RESPONSES),
        "log_ppl_abs_diff": Metric("nats", "absolute value of it", "mean", RESPONSES, "lower"),
        "log_ppl_diff_max": Metric("nats", "largest of it", "max", RESPONSES),
        "log_ppl_diff_min": Metric("nats", "smallest of it", "min", RESPONSES),
        "ppl_ratio": Metric("1", "perplexity under trainer / engine", "mean", RESPONSES),
        "kl": Metric("nats", "k1 estimate of KL(engine || trainer), -log r", "mean", VALID_TOKENS, "lower"),
        "k3_kl": Metric("nats", "k3 estimate of it, r - 1 - log r", "mean", VALID_TOKENS, "lower"),
        "chi2_token": Metric("1", "chi-squared divergence, mean of r^2 - 1", "mean", VALID_TOKENS, "lower"),
        "chi2_seq": Metric(
            "1", "the same of the product of a response's r, its logarithm clamped to +-20", "mean", RESPONSES, "lower"
        ),
    }
    return {f"rollout_corr/{name}": metric for name, metric in found.items()}


def _sequences(name: str, what: str) -> dict[str, Metric]:
    """Of each response's mean."""
    return {
        f"{name}_seq_mean": Metric("1", f"a response's mean {what}", "mean", RESPONSES),
        f"{name}_seq_std": Metric("1", "standard deviation of it", "std", RESPONSES),
        f"{name}_seq_max": Metric("1", "largest of it", "max", RESPONSES),
        f"{name}_seq_min": Metric("1", "smallest of it", "min", RESPONSES),
        f"{name}_seq_max_deviation": Metric("1", "largest distance of it from where r is 1", "max", RESPONSES, "lower"),
        f"{name}_seq_fraction_high": Metric("share", "responses where it is above the upper bound", "share", RESPONSES),
        f"{name}_seq_fraction_low": Metric("share", "responses where it is below the lower bound", "share", RESPONSES),
    }


def _weights() -> dict[str, Metric]:
    name = "rollout_corr/rollout_is"
    return {
        f"{name}_mean": Metric(
            "1", "importance weight before it is cut; 1 where engine and trainer agree", "mean", ENTRIES
        ),
        f"{name}_max": Metric("1", "largest of it", "max", ENTRIES),
        f"{name}_min": Metric("1", "smallest of it", "min", ENTRIES),
        f"{name}_std": Metric("1", "standard deviation of the weights as they act, before batch norm", "std", ENTRIES),
        f"{name}_eff_sample_size": Metric(
            "share", "effective sample size of those weights, (sum w)^2 / (n sum w^2)", "share", ENTRIES, "higher"
        ),
        f"{name}_ratio_fraction_high": Metric("share", "weights above the upper bound", "share", ENTRIES),
        f"{name}_ratio_fraction_low": Metric(
            "share", "weights below the lower bound, of truncation 1 / the upper one", "share", ENTRIES
        ),
        f"{name}_oob_ratio": Metric("share", "weights that IcePop made 0", "share", ENTRIES),
        f"{name}_batch_norm_factor": Metric("1", "mean that the weights were divided by", "last", STEP),
        f"{name}_veto_fraction": Metric("share", "responses that the veto dropped", "share", RESPONSES),
        f"{name}_catastrophic_token_fraction": Metric("share", "tokens below its threshold", "share", VALID_TOKENS),
        **_sequences(name, "weight"),
    }


def _rejection() -> dict[str, Metric]:
    name, option = "rollout_corr/rollout_rs", "rollout_corr/rollout_rs_<option>"
    return {
        f"{name}_masked_fraction": Metric(
            "share", "tokens that are rejected, by a filter or the veto", "share", VALID_TOKENS
        ),
        f"{name}_seq_masked_fraction": Metric("share", "responses with rejected tokens", "share", RESPONSES),
        f"{option}_seq_masked_fraction": Metric(
            "share", "responses with tokens that a filter rejects", "share", RESPONSES
        ),
        f"{option}_masked_fraction": Metric("share", "tokens that a filter rejects", "share", VALID_TOKENS),
        **_sequences(option, "of what a token filter bounds"),
        f"{option}_mean": Metric("1", "what a filter bounds: r (k1), log(r)^2 / 2 or r - 1 - log r", "mean", ENTRIES),
        f"{option}_std": Metric("1", "standard deviation of it", "std", ENTRIES),
        f"{option}_max": Metric("1", "largest of it", "max", ENTRIES),
        f"{option}_min": Metric("1", "smallest of it", "min", ENTRIES),
        f"{option}_fraction_high": Metric("share", "above the upper bound", "share", ENTRIES),
        f"{option}_fraction_low": Metric("share", "below the lower bound", "share", ENTRIES),
    }


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
    # The rollout correction, under verl's names where it has them. r = probability of the trainer / engine.
    "actor/rollout_is_mean": Metric(
        "1", "in bypass mode: importance weight of the moving policy before it is cut", "mean", OPTIMIZER_STEPS
    ),
    "actor/rollout_rs_masked_fraction": Metric(
        "share", "in bypass mode: tokens rejected for the ratio of the moving policy", "mean", OPTIMIZER_STEPS
    ),
    **_divergence(),
    **_weights(),
    **_rejection(),
}
