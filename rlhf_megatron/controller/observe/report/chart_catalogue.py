"""Which charts a report has, in the order in which an engineer wants them. A new chart is one
line of _TABLE.

A key may have one part in angle brackets, which stands for any text: every metric of that form
becomes a line of the chart, named by that text. Units and meanings come from the lists
of metric names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric

CHART_NOTES = {
    "reward": "Band: 95 % interval of the mean over the samples of a step, taken as independent.",
    "held_out": "Band: 95 % interval over the held-out items.",
    "reward_status": "The rest is ok.",
}


@dataclass(frozen=True)
class ChartSpec:
    """A chart, before any run is known.

    `band`: "interval" is the 95 % interval of the mean over the samples of a step; "range" goes
    from <prefix>/min to <prefix>/max of a key <prefix>/mean; otherwise a pair of keys (low, high).
    """

    name: str
    title: str
    metric_keys: tuple[str, ...]
    # key -> name of its line, where the key says too little
    labels: Mapping[str, str] = field(default_factory=dict)
    band: str | tuple[str, str] = ""
    kind: str = "lines"  # or "stack": shares of a whole; "points": few measurements
    row_kind: str = "step"  # kind of line of metrics.jsonl that has the keys
    is_log: bool = False
    is_wide: bool = False
    is_from_zero: bool = False
    note: str = ""
    hidden_label: str = ""  # what the brackets of a key stand for in a line that is left out


@dataclass(frozen=True)
class ReportSection:
    name: str
    title: str
    short_title: str  # in the bar at the top
    charts: tuple[ChartSpec, ...]


_CHART_TABLE = """
# reward | Reward and held-out score | Reward
reward | Reward | critic/rewards/mean | wide interval
held_out | Held-out score | val/accuracy | wide zero points evaluation \
band=val/accuracy_low,val/accuracy_high
reward_source | Reward by source | reward/source/<source>/mean
held_out_source | Held-out score by source | val/<source>/mean@N | zero points evaluation
  band=val/<source>/low,val/<source>/high
held_out_best | Held-out score, best of N | val/<source>/best@N | zero points evaluation
held_out_majority | Held-out score, majority of N | val/<source>/maj@N | zero points evaluation
reward_part | Parts of the reward | reward/part/<part>
reward_status | Rewards whose status is not ok | reward/status/<status> | stack hidden=ok
reward_range | Range of rewards | critic/rewards/mean | range
groups | Groups that teach | reward/mixed_groups: groups of mixed reward; \
reward/masked: masked samples | zero
advantages | Advantages | critic/advantages/mean | range
# policy | KL, entropy and the policy's update | Policy
reference_kl | KL against the reference | actor/reward_kl_penalty: in the reward; \
actor/kl_loss: in the loss
entropy | Entropy | actor/entropy: before the update; actor/entropy_loss: during the update | zero
clip | Clip fractions | actor/pg_clipfrac: ratio clip; actor/pg_clipfrac_lower: dual clip | zero
grad_norm | Gradient norm | actor/grad_norm | log
ppo_kl | KL of the update | actor/ppo_kl
kl_coefficient | Coefficient of the KL in the reward | actor/reward_kl_penalty_coeff
lr | Learning rate | actor/lr | zero
loss | Policy loss | actor/pg_loss: policy term; actor/loss: whole loss
# critic | Critic | Critic
vf_loss | Value loss | critic/vf_loss | zero
explained | Explained variance | critic/vf_explained_var
values_returns | Values against returns | critic/values/mean: values; \
critic/returns/mean: returns; critic/vpred_mean:
  values during the update
values | Range of values | critic/values/mean | range
returns | Range of returns | critic/returns/mean | range
vf_clip | Value clip fraction | critic/vf_clipfrac | zero
critic_grad_norm | Gradient norm of the critic | critic/grad_norm | log
critic_lr | Learning rate of the critic | critic/lr | zero
# lengths | Lengths | Lengths
response_length | Response length | response_length/mean | zero range
cut | Responses cut by the length limit | response_length/clip_ratio | zero
prompt_length | Prompt length | prompt_length/mean | zero range
held_out_length | Response length on held-out items | val/response_length | zero points evaluation
# time | Time | Time
stages | Stages of a step | timing_s/<stage> | wide stack
tokens_per_s | Throughput | perf/tokens_per_s: whole step; perf/tokens_per_s_generate: generate;
  perf/tokens_per_s_update: update | zero
device_rate | Throughput of a device | perf/throughput | zero
mfu | Model FLOPs utilisation | perf/mfu/actor: actor's updates; perf/mfu/critic: critic's updates;
  perf/mfu/actor_infer: log-probs | zero
step_time | Time of a step | timing_s/step | zero
tokens | Tokens of a step | perf/total_num_tokens | zero
# engine | Engine | Engine
generation | Throughput of generation | perf/tokens_per_s_generate | zero
finish_reason | How samples ended | rollout/finish_reason/<reason> | stack
cached | Prompt tokens from the prefix cache | rollout/cached_token_share | zero
retractions | Retractions | rollout/num_retractions | zero
several_versions | Samples of several policy versions | rollout/samples_of_several_versions | zero
trouble | Engines that failed | rollout/engine_failures: failures; \
rollout/engine_restarts: restarts;
  rollout/driver_restarts: restarts of drivers; rollout/requests_reissued: prompts asked for again \
| zero
sync | Weight sync | sync/seconds | zero
sync_bytes | Bytes of a weight sync | sync/num_bytes: weights; sync/bytes_moved: moved; \
sync/bytes_needed: needed |
  zero
turns | Trainer and engines change places | timing_s/turns | zero
memory_device | Trainer on its device | memory/<phase>_device_bytes | zero
memory_engine | Engine | memory/<phase>_engine_bytes | zero
memory_offloaded | Trainer in host memory | memory/<phase>_offloaded_bytes | zero
memory_used | Device, all processes | memory/<phase>_used_bytes | zero
memory_host | A rank's process in host memory | memory/<phase>_host_bytes | zero
# mismatch | Engine against trainer | Mismatch
difference | Log-prob difference, engine against trainer | training/rollout_log_probs_diff_p50: \
median;
  training/rollout_log_probs_diff_p99: 99th percentile; training/rollout_log_probs_diff_max: \
largest | wide log
mismatch_kl | KL of engine and trainer | training/rollout_kl | log
probs_difference | Probability difference | training/rollout_probs_diff_mean: mean; \
training/rollout_probs_diff_max:
  largest | log
lag | Policy lag | policy/lag | zero
lost_update | Update that rounding keeps from the engines | policy/lost_update_share | zero
# sft | Supervised and preference training | SFT
sft_loss | Loss | sft/loss | wide
sft_held_out | Held-out loss | val/loss | points evaluation
sft_source | Held-out loss by source | val/<source>/loss | points evaluation
sft_right | Pairs in the right order | rewards/accuracies | zero
sft_rewards | Implicit rewards | rewards/chosen; rewards/rejected; rewards/margins
sft_tokens | Trained tokens a step | sft/num_trained_tokens
# warmup | Warm-up | Warm-up
warmup_loss | Supervised loss | warmup/loss | zero warmup
warmup_accuracy | Sampled held-out score | warmup/accuracy | points warmup
warmup_grad_norm | Gradient norm | warmup/grad_norm | log warmup
"""


def _parse_chart_spec(line: str) -> ChartSpec:
    """Parse a line of the table, "name | title | keys | options"."""
    name, title, keys, *rest = line.split(" | ")
    words = rest[0].split() if rest else []
    options = dict(word.split("=") for word in words if "=" in word)
    pairs = [key.partition(": ") for key in keys.split("; ")]
    low, comma, high = options.get("band", "").partition(",")

    def find_option(*choices: str, default: str) -> str:
        """Return the first option that is one of `choices`, else the default."""
        return next((word for word in words if word in choices), default)

    return ChartSpec(
        name=name,
        title=title,
        metric_keys=tuple(key for key, _, _ in pairs),
        labels={key: label for key, _, label in pairs if label},
        band=(low, high) if comma else find_option("interval", "range", default=""),
        kind=find_option("stack", "points", default="lines"),
        row_kind=find_option("evaluation", "warmup", default="step"),
        is_log="log" in words,
        is_wide="wide" in words,
        is_from_zero="zero" in words,
        note=CHART_NOTES.get(name, ""),
        hidden_label=options.get("hidden", ""),
    )


def _parse_report_sections(table: str) -> Iterator[ReportSection]:
    """Yield the sections of the table. A section begins with "# name | title | title in the bar";
    then each line is a chart: name | title | keys | options.

    Keys are separated by semicolons, each with its label behind a colon where it has one.
    """
    for part in table.replace("\n  ", " ").split("\n# ")[1:]:
        head, *lines = part.strip().splitlines()
        name, title, short = head.split(" | ")
        yield ReportSection(name, title, short, tuple(map(_parse_chart_spec, lines)))


REPORT_SECTIONS = tuple(_parse_report_sections(_CHART_TABLE))


@cache
def compile_key_pattern(key_form: str) -> re.Pattern[str]:
    """Return the pattern of the metrics that a key of a ChartSpec stands for; group "name" matches
    the part in angle brackets, "" for a key without.
    """
    before, bracket, rest = key_form.partition("<")
    after = rest.partition(">")[2]
    name = "(?P<name>.+)" if bracket else "(?P<name>)"
    return re.compile(re.escape(before) + name + re.escape(after).replace("@N", r"@\d+") + r"\Z")


def describe_metric(metric_key: str) -> tuple[str, str]:
    """Return (unit, meaning) of a metric; ("", "") for a metric that is not in the catalogue."""
    found = find_metric(metric_key)
    return (found.unit, found.meaning) if found else ("", "")
