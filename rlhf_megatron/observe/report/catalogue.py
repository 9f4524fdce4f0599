"""Which charts a report has, in the order in which an engineer wants them. A new chart is one entry here.

A key may have one part in angle brackets, which stands for any text: every metric of that form becomes a line of the
chart, named by that text. Units and meanings come from the lists of metric names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from rlhf_megatron.observe.metrics.names import find


@dataclass(frozen=True)
class Spec:
    """A chart, before any run is known.

    `band`: "interval" is the 95 % interval of the mean over the samples of a step; "range" goes from <prefix>/min to
    <prefix>/max of a key <prefix>/mean; otherwise a pair of keys (low, high).
    """

    name: str
    title: str
    keys: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)  # key -> name of its line, where the key says too little
    band: str | tuple[str, str] = ""
    kind: str = "lines"  # or "stack": shares of a whole; "points": few measurements
    row: str = "step"  # kind of line of metrics.jsonl that has the keys
    is_log: bool = False
    is_wide: bool = False
    from_zero: bool = False
    note: str = ""
    hidden: str = ""  # what the brackets of a key stand for in a line that is left out


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    short: str  # in the bar at the top
    charts: tuple[Spec, ...]


_INTERVAL_NOTE = "Band: 95 % interval of the mean over the samples of a step, taken as independent."

SECTIONS = (
    Section(
        "reward",
        "Reward and held-out accuracy",
        "Reward",
        (
            Spec("reward", "Reward", ("critic/rewards/mean",), band="interval", is_wide=True, note=_INTERVAL_NOTE),
            Spec(
                "held_out",
                "Held-out accuracy",
                ("val/accuracy",),
                band=("val/accuracy_low", "val/accuracy_high"),
                kind="points",
                row="evaluation",
                is_wide=True,
                from_zero=True,
                note="Band: 95 % interval over the held-out items.",
            ),
            Spec("reward_source", "Reward by source", ("reward/source/<source>/mean",)),
            Spec(
                "held_out_source",
                "Held-out score by source",
                ("val/<source>/mean@N",),
                band=("val/<source>/low", "val/<source>/high"),
                kind="points",
                row="evaluation",
                from_zero=True,
            ),
            Spec(
                "held_out_best",
                "Held-out score, best of N",
                ("val/<source>/best@N",),
                kind="points",
                row="evaluation",
                from_zero=True,
            ),
            Spec(
                "held_out_majority",
                "Held-out score, majority of N",
                ("val/<source>/maj@N",),
                kind="points",
                row="evaluation",
                from_zero=True,
            ),
            Spec("reward_part", "Parts of the reward", ("reward/part/<part>",)),
            Spec(
                "reward_status",
                "Rewards whose status is not ok",
                ("reward/status/<status>",),
                hidden="ok",
                kind="stack",
                note="The rest is ok.",
            ),
            Spec("reward_range", "Range of rewards", ("critic/rewards/mean",), band="range"),
            Spec(
                "groups",
                "Groups that teach",
                ("reward/mixed_groups", "reward/masked"),
                labels={"reward/mixed_groups": "groups of mixed reward", "reward/masked": "masked samples"},
                from_zero=True,
            ),
            Spec("advantages", "Advantages", ("critic/advantages/mean",), band="range"),
        ),
    ),
    Section(
        "policy",
        "KL, entropy and the policy's update",
        "Policy",
        (
            Spec(
                "reference_kl",
                "KL against the reference",
                ("actor/reward_kl_penalty", "actor/kl_loss"),
                labels={"actor/reward_kl_penalty": "in the reward", "actor/kl_loss": "in the loss"},
            ),
            Spec(
                "entropy",
                "Entropy",
                ("actor/entropy", "actor/entropy_loss"),
                labels={"actor/entropy": "before the update", "actor/entropy_loss": "during the update"},
                from_zero=True,
            ),
            Spec(
                "clip",
                "Clip fractions",
                ("actor/pg_clipfrac", "actor/pg_clipfrac_lower"),
                labels={"actor/pg_clipfrac": "ratio clip", "actor/pg_clipfrac_lower": "dual clip"},
                from_zero=True,
            ),
            Spec("grad_norm", "Gradient norm", ("actor/grad_norm",), is_log=True),
            Spec("ppo_kl", "KL of the update", ("actor/ppo_kl",)),
            Spec("kl_coefficient", "Coefficient of the KL in the reward", ("actor/reward_kl_penalty_coeff",)),
            Spec("lr", "Learning rate", ("actor/lr",), from_zero=True),
            Spec(
                "loss",
                "Policy loss",
                ("actor/pg_loss", "actor/loss"),
                labels={"actor/pg_loss": "policy term", "actor/loss": "whole loss"},
            ),
        ),
    ),
    Section(
        "critic",
        "Critic",
        "Critic",
        (
            Spec("vf_loss", "Value loss", ("critic/vf_loss",), from_zero=True),
            Spec("explained", "Explained variance", ("critic/vf_explained_var",)),
            Spec(
                "values_returns",
                "Values against returns",
                ("critic/values/mean", "critic/returns/mean", "critic/vpred_mean"),
                labels={
                    "critic/values/mean": "values",
                    "critic/returns/mean": "returns",
                    "critic/vpred_mean": "values during the update",
                },
            ),
            Spec("values", "Range of values", ("critic/values/mean",), band="range"),
            Spec("returns", "Range of returns", ("critic/returns/mean",), band="range"),
            Spec("vf_clip", "Value clip fraction", ("critic/vf_clipfrac",), from_zero=True),
            Spec("critic_grad_norm", "Gradient norm of the critic", ("critic/grad_norm",), is_log=True),
            Spec("critic_lr", "Learning rate of the critic", ("critic/lr",), from_zero=True),
        ),
    ),
    Section(
        "lengths",
        "Lengths",
        "Lengths",
        (
            Spec("response_length", "Response length", ("response_length/mean",), band="range", from_zero=True),
            Spec("cut", "Responses cut by the length limit", ("response_length/clip_ratio",), from_zero=True),
            Spec("prompt_length", "Prompt length", ("prompt_length/mean",), band="range", from_zero=True),
            Spec(
                "held_out_length",
                "Response length on held-out items",
                ("val/response_length",),
                kind="points",
                row="evaluation",
                from_zero=True,
            ),
        ),
    ),
    Section(
        "time",
        "Time",
        "Time",
        (
            Spec("stages", "Stages of a step", ("timing_s/<stage>",), kind="stack", is_wide=True),
            Spec(
                "tokens_per_s",
                "Throughput",
                ("perf/tokens_per_s", "perf/tokens_per_s/generate", "perf/tokens_per_s/update"),
                labels={
                    "perf/tokens_per_s": "whole step",
                    "perf/tokens_per_s/generate": "generate",
                    "perf/tokens_per_s/update": "update",
                },
                from_zero=True,
            ),
            Spec("device_rate", "Throughput of a device", ("perf/throughput",), from_zero=True),
            Spec(
                "mfu",
                "Model FLOPs utilisation",
                ("perf/mfu/actor", "perf/mfu/critic", "perf/mfu/actor_infer"),
                labels={
                    "perf/mfu/actor": "actor's updates",
                    "perf/mfu/critic": "critic's updates",
                    "perf/mfu/actor_infer": "log-probs",
                },
                from_zero=True,
            ),
            Spec("step_time", "Time of a step", ("timing_s/step",), from_zero=True),
            Spec("tokens", "Tokens of a step", ("perf/total_num_tokens",), from_zero=True),
        ),
    ),
    Section(
        "engine",
        "Engine",
        "Engine",
        (
            Spec("generation", "Throughput of generation", ("perf/tokens_per_s/generate",), from_zero=True),
            Spec("finish_reason", "How samples ended", ("rollout/finish_reason/<reason>",), kind="stack"),
            Spec("cached", "Prompt tokens from the prefix cache", ("rollout/cached_token_share",), from_zero=True),
            Spec("retractions", "Retractions", ("rollout/num_retractions",), from_zero=True),
            Spec(
                "several_versions",
                "Samples of several policy versions",
                ("rollout/samples_of_several_versions",),
                from_zero=True,
            ),
            Spec(
                "trouble",
                "Engines that failed",
                ("rollout/engine_failures", "rollout/engine_restarts", "rollout/requests_reissued"),
                labels={
                    "rollout/engine_failures": "failures",
                    "rollout/engine_restarts": "restarts",
                    "rollout/requests_reissued": "prompts asked for again",
                },
                from_zero=True,
            ),
            Spec("sync", "Weight sync", ("sync/seconds",), from_zero=True),
            Spec(
                "sync_bytes",
                "Bytes of a weight sync",
                ("sync/num_bytes", "sync/bytes_moved", "sync/bytes_needed"),
                labels={
                    "sync/num_bytes": "weights",
                    "sync/bytes_moved": "moved",
                    "sync/bytes_needed": "needed",
                },
                from_zero=True,
            ),
            Spec("turns", "Trainer and engines change places", ("timing_s/turns",), from_zero=True),
            Spec("memory_device", "Trainer on its device", ("memory/<phase>_device_bytes",), from_zero=True),
            Spec("memory_engine", "Engine", ("memory/<phase>_engine_bytes",), from_zero=True),
            Spec("memory_offloaded", "Trainer in host memory", ("memory/<phase>_offloaded_bytes",), from_zero=True),
            Spec("memory_used", "Device, all processes", ("memory/<phase>_used_bytes",), from_zero=True),
            Spec("memory_host", "A rank's process in host memory", ("memory/<phase>_host_bytes",), from_zero=True),
        ),
    ),
    Section(
        "mismatch",
        "Engine against trainer",
        "Mismatch",
        (
            Spec(
                "difference",
                "Log-prob difference, engine against trainer",
                (
                    "training/rollout_log_probs_diff_p50",
                    "training/rollout_log_probs_diff_p99",
                    "training/rollout_log_probs_diff_max",
                ),
                labels={
                    "training/rollout_log_probs_diff_p50": "median",
                    "training/rollout_log_probs_diff_p99": "99th percentile",
                    "training/rollout_log_probs_diff_max": "largest",
                },
                is_log=True,
                is_wide=True,
            ),
            Spec("mismatch_kl", "KL of engine and trainer", ("training/rollout_kl",), is_log=True),
            Spec(
                "probs_difference",
                "Probability difference",
                ("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max"),
                labels={"training/rollout_probs_diff_mean": "mean", "training/rollout_probs_diff_max": "largest"},
                is_log=True,
            ),
            Spec("lag", "Policy lag", ("policy/lag",), from_zero=True),
        ),
    ),
    Section(
        "warmup",
        "Warm-up",
        "Warm-up",
        (
            Spec("warmup_loss", "Supervised loss", ("warmup/loss",), row="warmup", from_zero=True),
            Spec("warmup_accuracy", "Sampled accuracy", ("warmup/accuracy",), row="warmup", kind="points"),
            Spec("warmup_grad_norm", "Gradient norm", ("warmup/grad_norm",), row="warmup", is_log=True),
        ),
    ),
)


@cache
def pattern(key: str) -> re.Pattern[str]:
    """Matches the metrics that a key of a Spec stands for; group "name" is what the brackets stand for."""
    before, bracket, rest = key.partition("<")
    after = rest.partition(">")[2]
    name = "(?P<name>.+)" if bracket else "(?P<name>)"
    return re.compile(re.escape(before) + name + re.escape(after).replace("@N", r"@\d+") + r"\Z")


def metric(key: str) -> tuple[str, str]:
    """(unit, meaning) of a metric; empty texts for one that no list has."""
    found = find(key)
    return (found.unit, found.meaning) if found else ("", "")
