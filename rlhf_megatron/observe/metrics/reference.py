"""Prints the catalogue of metrics: `python -m rlhf_megatron.observe.metrics.reference`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from rlhf_megatron.algorithms.metric_names import PLACEHOLDERS, Metric
from rlhf_megatron.observe.metrics.names import CATALOGUE, SECTIONS

VERL_NAMES: Mapping[str, tuple[str, str]] = {  # verl's name -> (ours, what differs)
    "critic/score/mean": ("critic/rewards/mean", "what the reward says; the same for max and min"),
    "critic/rewards/mean": (
        "critic/rewards/mean",
        "KL in the reward is not subtracted; left out are samples of masked status, there those without tokens",
    ),
    "actor/reward_kl_penalty": ("actor/reward_kl_penalty", "over tokens; there the mean of each response's mean"),
    "actor/pg_loss": ("actor/pg_loss", "this and other losses: over response tokens; there by loss_agg_mode"),
    "variance_proxy/proxy2_total_power": (
        "variance_proxy/proxy2_total_power",
        "of samples whose reward counts, as sampled; there times the squared weights of a rollout correction",
    ),
    "training/off_policy/trajectory_staleness_worst/max": (
        "training/off_policy/trajectory_staleness/max",
        "here staleness is that of a sample's oldest token",
    ),
    "actor/kl_coef": ("actor/reward_kl_penalty_coeff", "that of the reward; actor.kl_loss_coef does not change"),
    "timing_s/gen": ("timing_s/generate", ""),
    "timing_s/reward": ("timing_s/score", ""),
    "timing_s/old_log_prob": ("timing_s/annotate", "with the reference's log-probs and the values"),
    "timing_s/adv": ("timing_s/advantages", ""),
    "timing_s/update_actor": ("timing_s/update", "with the critic's update"),
    "timing_s/update_weights": ("timing_s/sync", ""),
    "perf/time_per_step": ("timing_s/step", ""),
    "training/rollout_actor_probs_pearson_corr": (
        "training/rollout_kl",
        "a KL, and quantiles of the differences: a correlation hides a shift",
    ),
    "val-core/<source>/reward/mean@<N>": ("val/<source>/mean@<N>", "one tree, val/"),
    "val-core/<source>/reward/best@<k>/mean": (
        "val/<source>/best@<k>",
        "expected value, drawn without replacement, in closed form; its interval is over items, by bootstrap",
    ),
    "val-core/<source>/reward/maj@<k>/mean": ("val/<source>/maj@<k>", "ties count as the mean of the tied answers"),
    "agent_loop/num_preempted/mean": ("rollout/num_retractions", "a sum"),
    "filter_groups/<option>": ("reward/uniform_groups", "the share before any group is left out"),
}
HEAD = "# Metrics\n"


def reference() -> str:
    """Return the catalogue as Markdown."""
    parts = [HEAD, _table(("in a name", "stands for"), [(f"`<{k}>`", what) for k, (_, what) in _used().items()])]
    heads = ("metric", "unit", "meaning", "reduction")
    for title, metrics in SECTIONS:
        rows: list[tuple[str, ...]] = [(f"`{name}`", m.unit, m.meaning, _reduction(m)) for name, m in metrics.items()]
        parts += [f"## {title}\n", _table(heads, rows)]
    names: list[tuple[str, ...]] = [(f"`{verl}`", f"`{ours}`", what) for verl, (ours, what) in VERL_NAMES.items()]
    parts += ["## Names of verl that are others here\n", _table(("verl", "here", "what differs"), names)]
    return "\n".join(parts)


def _used() -> dict[str, tuple[str, str]]:
    names = {name for key in CATALOGUE for name in re.findall(r"<(\w+)>", key)}
    return {name: entry for name, entry in PLACEHOLDERS.items() if name in names}


def _reduction(metric: Metric) -> str:
    mark = {"higher": " ▲", "lower": " ▼", "": ""}[metric.better]
    return f"{metric.reduction}, {metric.over}{mark}"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(reference())
