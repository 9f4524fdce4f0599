"""The catalogue of metrics: every one that a run writes, by area. `python -m
rlhf_megatron.controller.observe.metrics.metric_catalogue` prints it.

Metrics of losses, estimators and corrections stand in algorithms/metric_names.py. To add one: a
line here or there.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rlhf_megatron.algorithms.metric_names import (
    GROUPS,
    PLACEHOLDERS,
    SAMPLES,
    SEQUENCES,
    STEP,
    TOKENS,
    VALID_SAMPLES,
    VALID_TOKENS,
    MetricDescription,
    compile_name_pattern,
    find_matching_metric,
    mark_reserved_part,
)
from rlhf_megatron.algorithms.metric_names import METRICS as ALGORITHM_METRICS

RANKS = "ranks"
REPLICAS = "data-parallel replicas of the actor"
RUN_SO_FAR = "the run so far"
WEIGHT_SYNC = "a weight sync"
MADE_STEPS = "optimizer steps that were made"
HELD_OUT_ITEMS = "held-out items of a set"
PROMPTS = "prompts of the samples of a step"
EPISODES = "episodes of a step"
PROMPTS_SCORED = "prompts whose greedy sample counts"


_METRIC_TABLE = f"""
# Rewards
critic/rewards/mean | score | mean | {VALID_SAMPLES} + | reward, without KL terms
critic/rewards/max | score | max | {VALID_SAMPLES} | largest reward
critic/rewards/min | score | min | {VALID_SAMPLES} | smallest reward
critic/rewards/std | score | std | {VALID_SAMPLES} | spread of rewards (unbiased); \
0 for a single one
reward/mixed_groups | share | share | {GROUPS} + | groups whose samples have different rewards: \
the ones that teach
reward/uniform_groups | share | share | {GROUPS} - | groups of several samples that count, whose \
rewards all agree:
  without signal
reward/solve_all | share | share | {GROUPS} | groups of several samples that count, whose main \
rewards agree and are 1 or more
reward/solve_none | share | share | {GROUPS} | the same of groups whose main rewards are 0 or less
reward/masked | share | share | {SAMPLES} - | samples left out because their reward could not be \
computed
reward/part/<name> | score | mean | samples that count and have it | \
a named component of the reward; \
of
  latencies also the quantiles _p50, _p95 and _max. "/" in its name is ":" here, as in gdpo/ and \
of a status
reward/servers | count | last | {STEP} | servers of the reward model that run
reward/server_restarts | count | last | {STEP} - | times that one of them was started again
reward/status/<status> | share | share | {SAMPLES} | samples whose reward has this status
reward/source/<source>/mean | score | mean | {VALID_SAMPLES} + | \
reward of the samples of a data source
reward/source/<source>/count | count | count | {VALID_SAMPLES} | samples of a data source
reward/source/<source>/status/<status> | share | share | samples of a data source, with several | \
samples whose reward
  has this status, which is not ok
reward/source/<source>/masked | share | share | samples of a data source - | \
left out because their reward could not be
  computed
filter_groups/num_gen_batches | count | count | {STEP} - | batches of prompts that a step generated
filter_groups/kept | share | share | groups generated in a step | generated groups that stayed, of
  algorithm.filter_groups
filter_groups/num_groups | count | count | {STEP} + | groups that the step trains on
greedy/rewards/mean | score | mean | {PROMPTS_SCORED} + | reward of the greedy sample of a prompt
greedy/rewards/max | score | max | {PROMPTS_SCORED} | largest of them
greedy/rewards/min | score | min | {PROMPTS_SCORED} | smallest of them
greedy/masked | share | share | {PROMPTS} - | greedy samples whose reward could not be computed
greedy/response_length/* | tokens | * | {PROMPTS} | length of a greedy response
# Advantages, values, returns
critic/advantages/* | 1 | * | {TOKENS} | token advantage
critic/values/* | score | * | {VALID_TOKENS} | value before the update
critic/returns/* | score | * | {VALID_TOKENS} | return: what the critic is to learn
variance_proxy/proxy1_signal_strength | 1 | mean | {MADE_STEPS} | \
square of actor/grad_norm: of the mean gradient
variance_proxy/proxy2_total_power | 1 | mean | {VALID_SAMPLES} | \
(a sample's mean advantage)^2 x w: mean square of a
  sample's gradient
variance_proxy/proxy3_pure_noise | 1 | ratio | {VALID_SAMPLES} - | \
(proxy2 - proxy1) / (samples - 1), 0 at least:
  variance of the mean gradient
variance_proxy/expected_a_squared | 1 | mean | {VALID_SAMPLES} | (a sample's mean advantage)^2
variance_proxy/expected_w | 1 | mean | {VALID_SAMPLES} | w: sum over a sample's tokens of 1 - 2 p \
+ sum of p^2, p the
  probability of the token
# Lengths
response_length/* | tokens | * | {SAMPLES} | response length
response_length/clip_ratio | share | share | {SAMPLES} - | responses that ended by the length limit
response_length_non_aborted/* | tokens | * | {SEQUENCES} | response length
response_length_non_aborted/clip_ratio | share | share | {SEQUENCES} - | \
responses that ended by the length limit
response/aborted_ratio | share | share | {SAMPLES} - | samples that ended by abort
prompt_length/* | tokens | * | {SAMPLES} | prompt length
prompt_length/clip_ratio | share | share | {PROMPTS} - | prompts as long as \
data.max_prompt_length, so perhaps cut to
  it
num_turns/* | count | * | {SAMPLES} | stretches that the policy wrote; where a sample has several
rollout/num_samples | count | count | {SAMPLES} | prompts x rollout.n
# Updates, versions, health
actor/entropy | nats | mean | {TOKENS} | entropy of the policy before the update
<role>/grad_norm | 1 | mean | {MADE_STEPS} | global gradient norm before clipping
<role>/load_balancing_loss | 1 | mean | {MADE_STEPS} - | load-balancing loss of the routers \
without its weight, mean of
  the layers with experts; 1 where all experts meet as many tokens
<role>/lr | 1 | last | optimizer steps of a step | learning rate
<role>/num_epochs | count | last | {STEP} | passes over the samples; \
0 where the role was not trained
<role>/num_optimizer_steps | count | count | {STEP} | optimizer steps, with those that were skipped
<role>/num_skipped_steps | count | count | {STEP} - | optimizer steps skipped on all ranks for a \
number that is not
  finite
actor/router_changed_share | share | mean | {MADE_STEPS} - | \
of tokens and layers with a replayed route, those whose
  router would now pick other experts
actor/router_fetched_mb | MB | mean | {MADE_STEPS} | routes that all ranks fetched from other \
machines for an optimizer
  step, the first of a step also for log-probs
actor/router_load_max_over_mean | 1 | mean | {MADE_STEPS} - | \
tokens of the most loaded expert over the mean of its
  layer, in the layer where that is most; where routing is replayed
actor/router_unrouted_share | share | mean | {MADE_STEPS} - | \
of tokens and layers, those without a route to replay
<role>/z_loss | 1 | mean | {MADE_STEPS} | z loss of the routers without its weight, mean of the \
layers with experts
training/global_step | count | last | {STEP} | number of the step, from 1
training/epoch | 1 | last | {STEP} | place in the stream of the last prompt that was trained on, \
over the number of
  training prompts; not in a replay
policy/version | count | last | {STEP} | weight syncs so far; \
a step that leaves the policy as it was makes none
pf_ppo/distinct_samples | share | share | {SAMPLES} | samples that were drawn to train on, each \
once, with
  algorithm.pf_ppo
policy/lost_update_share | 1 | ratio | {WEIGHT_SYNC} - | \
|(sent now - sent before) - d| / |d|: what rounding
  to the engines' type loses of d, the change of the float32 weights. Adapters: all merged \
weights, since the
  weights without adapters. Else: 16 matrices, since the last sync; can be above 1, since a value \
that changes at
  all moves by a whole unit of its last place. Left out where nothing is rounded or changed
policy/lag | count | mean | {SAMPLES} - | version at training minus version at sampling
training/off_policy/trajectory_staleness/* | count | * | {SAMPLES} - | \
version at training minus that of a sample's
  oldest token
training/off_policy/trajectory_spans/* | count | * | {SAMPLES} - | policy versions of a sample
health/<verdict> | 0 or 1 | verdict | the last steps - | 1: trouble, see docs/monitoring.md; \
left out where it cannot
  be told
# Losses, estimators, corrections
# Evaluations
val/accuracy | score | mean | held-out items + | main reward of all held-out items, without \
terms; a share where it is 0 or 1
val/binary_scores | 0 or 1 | verdict | an evaluation | 1: every score is 0 or 1, so that \
val/accuracy is a share of right
  answers
val/reward | score | mean | held-out items + | whole reward of all held-out items, where it is \
more than the main reward
val/<source>/reward | score | mean | {HELD_OUT_ITEMS} + | the same of one set
val/accuracy_low | share | quantile | held-out items | lower end of its 95 % interval
val/accuracy_high | share | quantile | held-out items | upper end of its 95 % interval
val/num_items | count | count | an evaluation | held-out items
val/response_length | tokens | mean | held-out samples | response length on the held-out items
val/<source>/mean@<N> | score | mean | {HELD_OUT_ITEMS} + | mean score (main \
reward) of an item's N samples
val/<source>/std@<N> | score | mean | {HELD_OUT_ITEMS} | standard deviation of an item's scores
val/<source>/best@<k> | score | mean | {HELD_OUT_ITEMS} + | expected best of k samples of an item; \
for 0/1 scores pass@k
val/<source>/worst@<k> | score | mean | {HELD_OUT_ITEMS} + | expected worst of k samples of an item
val/<source>/maj@<k> | score | mean | {HELD_OUT_ITEMS} + | expected score of the most common \
answer among k samples of an item;
  an answer is what stands in the last \\boxed{{...}} of a response, or after its last ####, or \
else all of it;
  equally common ones count as their mean
val/<source>/best@<k>_low | score | quantile | {HELD_OUT_ITEMS} | \
lower end of its 95 % interval (bootstrap)
val/<source>/best@<k>_high | score | quantile | {HELD_OUT_ITEMS} | \
upper end of its 95 % interval (bootstrap)
val/<source>/worst@<k>_low | score | quantile | {HELD_OUT_ITEMS} | \
lower end of its 95 % interval (bootstrap)
val/<source>/worst@<k>_high | score | quantile | {HELD_OUT_ITEMS} | \
upper end of its 95 % interval (bootstrap)
val/<source>/maj@<k>_low | score | quantile | {HELD_OUT_ITEMS} | \
lower end of its 95 % interval (bootstrap)
val/<source>/maj@<k>_high | score | quantile | {HELD_OUT_ITEMS} | \
upper end of its 95 % interval (bootstrap)
val/<source>/low | score | quantile | {HELD_OUT_ITEMS} | lower end of the 95 % interval of mean@N
val/<source>/high | score | quantile | {HELD_OUT_ITEMS} | upper end of the 95 % interval of mean@N
val/<source>/num_items | count | count | an evaluation | items with a sample that counts
val/<source>/num_masked | count | count | an evaluation - | \
samples left out because their reward could not be
  computed
val/<source>/response_length | tokens | mean | held-out samples of a set | response length
# Supervised and preference training
sft/loss | nats | mean | a step - | what the step made smaller: the loss of the job, with the \
samples' weights
sft/num_samples | count | count | {STEP} | samples, or pairs, that trained
sft/num_trained_tokens | tokens | count | {STEP} | tokens that the loss is on
rewards/chosen | 1 | mean | pairs of a step + | implicit reward of the better answer
rewards/rejected | 1 | mean | pairs of a step - | implicit reward of the worse answer
rewards/margins | 1 | mean | pairs of a step + | difference of the two
rewards/accuracies | share | share | pairs of a step + | pairs whose better answer has the larger \
reward
logps/chosen | nats | mean | pairs of a step | log-prob of the better answer
logps/rejected | nats | mean | pairs of a step | log-prob of the worse answer
val/loss | nats | mean | held-out tokens, or pairs - | supervised or preference loss, without the \
samples' weights
val/perplexity | 1 | mean | held-out tokens - | exp of the supervised loss
val/<source>/loss | nats | mean | held-out tokens, or pairs of a set - | the same of a set
val/<source>/perplexity | 1 | mean | held-out tokens of a set - | the same of a set
val/rewards/<name> | 1 | mean | held-out pairs | as rewards/<name>
val/logps/<name> | nats | mean | held-out pairs | as logps/<name>
val/<source>/rewards/<name> | 1 | mean | held-out pairs of a set | as rewards/<name>
val/<source>/logps/<name> | nats | mean | held-out pairs of a set | as logps/<name>
# Warm-up
warmup/loss | nats | mean | answer tokens of a warm-up step - | supervised loss
warmup/grad_norm | 1 | last | a warm-up step | global gradient norm before clipping
warmup/accuracy | share | mean | held-out items + | sampled held-out accuracy during the warm-up
# Engines and weight syncs
rollout/finish_reason/<reason> | share | share | {SAMPLES} | samples that ended for this reason
rollout/cached_token_share | share | ratio | {SAMPLES} + | prompt tokens that the engines found in \
their prefix caches
rollout/num_retractions | count | sum | {SAMPLES} - | times an engine dropped the key-value cache \
of a sample and
  computed it again: memory was short, or a pause
rollout/samples_of_several_versions | share | share | {SAMPLES} - | \
samples whose tokens are of more than one policy
  version
rollout/engine_failures | count | count | {STEP} - | times an engine stopped serving: dead, hung, \
STALE or failing its
  requests
rollout/driver_restarts | count | count | {STEP} - | drivers started again in place of one that \
was dead or hung
rollout/routes_memory_gb | GB | last | {STEP} | files of routes where the step's are, what memory \
has of them
rollout/routes_spilled_gb | GB | last | {STEP} - | files of routes where the step's are, what the \
disk alone has
rollout/engine_restarts | count | count | {STEP} - | engines started again in place of one that \
was dead or hung
rollout/requests_reissued | count | count | {STEP} - | prompts asked for again, with the same \
seeds, after an engine
  failed
sync/num_bytes | bytes | sum | {WEIGHT_SYNC} | weights sent to each engine
sync/bytes_moved | bytes | sum | {WEIGHT_SYNC} - | read by all ranks of all engines
sync/bytes_needed | bytes | sum | {WEIGHT_SYNC} | of what then stands in all ranks of all engines: \
the least that has to be
  moved
sync/seconds | s | sum | {WEIGHT_SYNC} - | begin, gather, send, load, verify, commit
# Episodes
agents/num_episodes | count | count | {EPISODES} | episodes of the step, also those that are masked
agents/turns/mean | turns | mean | {EPISODES} | turns of the policy in an episode
agents/turns/max | turns | max | {EPISODES} | most turns of an episode
agents/episode_seconds/mean | s | mean | {EPISODES} - | from an episode's start to its end
agents/episode_seconds/max | s | max | {EPISODES} - | the longest episode
agents/sampled_tokens/mean | tokens | mean | {EPISODES} | tokens that the policy sampled in \
an episode
agents/environment_tokens/mean | tokens | mean | {EPISODES} | tokens behind the first prompt \
that the environment brought
agents/turn_tokens/mean | tokens | mean | turns of the step | tokens of a turn
agents/turn_seconds/mean | s | mean | turns of the step - | a turn at an engine
agents/environment_seconds/mean | s | mean | turns of the step - | the environment's code before a \
turn, and the way to it
agents/restarts | count | sum | {EPISODES} - | episodes that began again because \
their worker was lost
agents/joins_refused | count | count | {EPISODES} - | episodes that ended because new messages \
had no exact join
agents/ends/<end> | share | share | {EPISODES} | episodes that ended so
agents/environment/<name> | 1 | mean | episodes that have it | a number that environments report
# Schedules in the background
schedule/wait_s | s | sum | {STEP} - | the trainer waited for samples of the step, without \
log-probs that it made
  meanwhile
schedule/generating | count | last | {STEP} | groups that were generated when the batch was complete
schedule/dropped_lag | count | count | groups - | groups that had become too old to train, since \
the batch before
schedule/dropped_no_signal | count | count | groups - | groups that algorithm.filter_groups left \
out, since the batch
  before
schedule/dropped_tail | count | count | groups - | groups given up because the batch was complete \
without them
schedule/started_again | count | count | groups - | groups that had become too old and were \
generated anew
# Time and checkpoints
timing_s/step | s | sum | {STEP} - | wall time of a step
timing_s/turns | s | sum | {STEP} - | colocated: trainer and engines change places, without the \
sending of weights
timing_s/desync | s | sum | {STEP} - | comparison of what several ranks hold, every \
trainer.desync_freq steps
timing_s/<stage> | s | sum | {STEP} - | wall time of a stage
timing_per_token_ms/gen | ms | ratio | {STEP} - | stage generate, a response token
timing_per_token_ms/adv | ms | ratio | {STEP} - | stage advantages, a token
timing_per_token_ms/old_log_prob | ms | ratio | {STEP} - | the actor's log-probs, a token
timing_per_token_ms/ref | ms | ratio | {STEP} - | the reference's log-probs, a token
timing_per_token_ms/reward_model | ms | ratio | {STEP} - | the scores of the reward model on the \
hosts, a token
timing_per_token_ms/values | ms | ratio | {STEP} - | the critic's values, a token
timing_per_token_ms/update_actor | ms | ratio | {STEP} - | all epochs of the actor, a token of the \
step
timing_per_token_ms/update_critic | ms | ratio | {STEP} - | \
all epochs of the critic, a token of the step
checkpoint/step | count | last | {RUN_SO_FAR} | step of the checkpoint that was committed last
checkpoint/seconds | s | last | {RUN_SO_FAR} - | from the request of a checkpoint to its commit; \
steps go on meanwhile
checkpoint/num_bytes | bytes | last | {RUN_SO_FAR} | files of the checkpoint that was committed last
checkpoint/num_failed | count | count | an attempt - | checkpoints of this attempt that could not \
be written
# Throughput and balance
perf/total_num_tokens | tokens | sum | {STEP} | prompt and response tokens
perf/throughput | tokens/s/GPU | ratio | {STEP} + | prompt and response tokens over the wall time \
and the devices:
  ranks of the trainer, and those of engines that do not share them; a CPU process counts as one
perf/tokens_per_s | tokens/s | ratio | {STEP} + | prompt and response tokens over the wall time
perf/tokens_per_s_generate | tokens/s | ratio | {STEP} + | response tokens over the time of \
`generate`
perf/tokens_per_s_update | tokens/s | ratio | {STEP} + | tokens x epochs over the time of `update`
perf/peak_tflops | TFLOP/s | last | {RUN_SO_FAR} | dense bfloat16 peak of a device, \
trainer.device_peak_tflops or by its
  name: what perf/mfu is a share of
perf/mfu/actor | share | ratio | {STEP} + | FLOPs of the policy x 3 (forward and backward) x \
epochs over seconds of
  actor.update, without waiting, x ranks of the actor x peak. FLOPs: 2 a weight and token, 4 x \
heads x head size for
  each pair of attention (causal), the head on response tokens; \
of experts those that a token meets; what is computed
  again and padding are not counted
perf/mfu/actor_infer | share | ratio | {STEP} + | FLOPs of the policy (forward) over seconds of \
actor.log_probs x
  ranks of the actor x peak
perf/mfu/critic | share | ratio | {STEP} + | FLOPs of the critic x 3 x its epochs over seconds of \
critic.update x
  ranks of the critic x peak
perf/num_head_fallbacks | count | count | {RUN_SO_FAR} - | times a rank gave up a backend of the \
LM head that failed its
  self-check, actor and reference together
perf/ettr | share | ratio | {RUN_SO_FAR} + | effective training time: time in steps, evaluations \
and warm-up that count /
  since the first launch
global_seqlen/mean | tokens | mean | {REPLICAS} | of a replica
global_seqlen/max | tokens | max | {REPLICAS} | of a replica, were samples dealt in their order
global_seqlen/min | tokens | min | {REPLICAS} | of a replica, were samples dealt in their order
global_seqlen/minmax_diff | tokens | ratio | {REPLICAS} | max - min
global_seqlen/balanced_max | tokens | max | {REPLICAS} | of a replica as samples are dealt for the \
log-probs
global_seqlen/balanced_min | tokens | min | {REPLICAS} | of a replica as samples are dealt for the \
log-probs
global_seqlen/shared | tokens | sum | {STEP} + | with share_prompts: what the log-probs need not \
forward, since another
  sample of the micro-batch has the same prompt
# Memory
memory/<phase>_device_bytes | bytes | max | {RANKS} - | colocated: of a rank's trainer on its \
device at the end of the
  phase
memory/<phase>_host_bytes | bytes | max | {RANKS} - | colocated: resident memory of a rank's process
memory/<phase>_offloaded_bytes | bytes | max | {RANKS} - | colocated: host memory of a rank for \
what leaves its device
memory/<phase>_engine_bytes | bytes | max | engines - | colocated: weights and key-value cache of \
a local engine
memory/<phase>_used_bytes | bytes | max | {RANKS} - | colocated: of a device by all processes; \
not on a CPU
perf/max_memory_allocated_gb | GiB | max | {RANKS} - | most that torch had allocated on a device \
since its process
  began; not on a CPU
perf/max_memory_reserved_gb | GiB | max | {RANKS} - | most that torch had reserved on a device \
since its process
  began; not on a CPU
perf/cpu_memory_used_gb | GiB | max | {RANKS} - | resident memory of a rank's process after the \
update
"""


def _parse_metric_sections(table: str) -> Iterator[tuple[str, dict[str, MetricDescription]]]:
    """Yield (title, metrics by name) of each section of the table. A section is a line "# title",
    then lines `name | unit | reduction | over what | meaning`; + or - at the end of "over what":
    better when higher or lower. A section without lines has the metrics of the algorithms.

    `name/*` means mean, max and min. A line that begins with blanks continues the line before.
    """
    for part in table.replace("\n  ", " ").split("\n# ")[1:]:
        title, *lines = part.strip().splitlines()
        found = {} if lines else dict(ALGORITHM_METRICS)
        for line in lines:
            name, unit, reduction, over, meaning = line.split(" | ", 4)
            better: Any = {"+": "higher", "-": "lower"}.get(over[-1], "")
            over = over.removesuffix(" +").removesuffix(" -")
            if reduction != "*":
                # a test looks
                found[name] = MetricDescription(
                    unit,
                    meaning,
                    reduction,  # type: ignore[arg-type]
                    over,
                    better,
                )
                continue
            for end, words in (
                ("mean", meaning),
                ("max", f"largest: {meaning}"),
                ("min", f"smallest: {meaning}"),
            ):
                found[name[:-1] + end] = MetricDescription(
                    unit,
                    words,
                    end,  # type: ignore[arg-type]
                    over,
                    better,
                )
        yield title, found


METRIC_SECTIONS = tuple(_parse_metric_sections(_METRIC_TABLE))
METRIC_CATALOGUE: dict[str, MetricDescription] = {
    key: metric for _, metrics in METRIC_SECTIONS for key, metric in metrics.items()
}


def find_metric(metric_key: str) -> MetricDescription | None:
    """Return the metric of a key as a run writes it, such as "reward/part/format"; None where the
    catalogue does not have the key.
    """
    return find_matching_metric(METRIC_CATALOGUE, metric_key)


_SOURCE_FOLDERS = ("val/", "reward/source/")  # of the metrics of a data source


@cache
def _compile_reserved_source_parts() -> re.Pattern[str]:
    """Return the pattern of the parts that the catalogue's names have where a source may stand, or
    behind a source, and of the parts that a path of a file cannot have.
    """
    names = [
        name.removeprefix(folder)
        for name in METRIC_CATALOGUE
        for folder in _SOURCE_FOLDERS
        if name.startswith(folder)
    ]
    parts = {part for name in names for part in name.split("/") if not _IS_PLACEHOLDER.match(part)}
    return re.compile("|".join([r"\.*", *(compile_name_pattern(p).pattern for p in sorted(parts))]))


_IS_PLACEHOLDER = re.compile(r"<\w+>\Z")


def make_source_key_part(source: str) -> str:
    """Return the name of a data source, or of an evaluation set, as it stands in a metric's key: as
    it is, "openai/gsm8k", but for parts that metrics of sources have themselves. A source
    "accuracy" is "accuracy_": it would make the metric val/accuracy a folder.
    """
    reserved = _compile_reserved_source_parts()
    return "/".join(mark_reserved_part(part, reserved) for part in source.split("/"))


_VERL_TABLE = """
critic/score/mean | critic/rewards/mean | what the reward says; the same for max and min
critic/rewards/mean | critic/rewards/mean | KL in the reward is not subtracted; \
left out are samples of masked status,
  there those without tokens
actor/reward_kl_penalty | actor/reward_kl_penalty | over tokens; \
there the mean of each response's mean
actor/pg_loss | actor/pg_loss | this and other losses: over response tokens; there by loss_agg_mode
variance_proxy/proxy2_total_power | variance_proxy/proxy2_total_power | \
of samples whose reward counts, as sampled;
  there times the squared weights of a rollout correction
training/off_policy/trajectory_staleness_worst/max | training/off_policy/trajectory_staleness/max \
| here staleness is
  that of a sample's oldest token
actor/kl_coef | actor/reward_kl_penalty_coeff | that of the reward; \
actor.kl_loss_coef does not change
timing_s/gen | timing_s/generate |
timing_s/reward | timing_s/score |
timing_s/old_log_prob | timing_s/annotate | with the reference's log-probs and the values
timing_s/adv | timing_s/advantages |
timing_s/update_actor | timing_s/update | with the critic's update
timing_s/update_weights | timing_s/sync |
perf/time_per_step | timing_s/step |
training/rollout_actor_probs_pearson_corr | training/rollout_kl | \
a KL, and quantiles of the differences: a
  correlation hides a shift
val-core/<source>/reward/mean@<N> | val/<source>/mean@<N> | one tree, val/
val-core/<source>/reward/best@<k>/mean | val/<source>/best@<k> | \
expected value, drawn without replacement, in closed
  form; its interval is over items, by bootstrap
val-core/<source>/reward/maj@<k>/mean | val/<source>/maj@<k> | \
ties count as the mean of the tied answers
agent_loop/num_preempted/mean | rollout/num_retractions | a sum
filter_groups/<option> | reward/uniform_groups | the share before any group is left out
"""
"""verl's name | ours | what differs"""
VERL_NAMES: Mapping[str, tuple[str, str]] = {
    verl: (ours.strip(), differs.strip())
    for verl, ours, differs in (
        line.split(" |", 2) for line in _VERL_TABLE.replace("\n  ", " ").strip().splitlines()
    )
}


def format_metric_reference() -> str:
    """Return the catalogue as Markdown."""
    parts = [
        "# Metrics\n",
        _format_markdown_table(
            ("in a name", "stands for"),
            [(f"`<{k}>`", what) for k, (_, what) in _select_used_placeholders().items()],
        ),
    ]
    heads = ("metric", "unit", "meaning", "reduction")
    for title, metrics in METRIC_SECTIONS:
        rows: list[tuple[str, ...]] = [
            (f"`{name}`", m.unit, m.meaning, _format_reduction(m)) for name, m in metrics.items()
        ]
        parts += [f"## {title}\n", _format_markdown_table(heads, rows)]
    names: list[tuple[str, ...]] = [
        (f"`{verl}`", f"`{ours}`", what) for verl, (ours, what) in VERL_NAMES.items()
    ]
    parts += [
        "## Names of verl that are others here\n",
        _format_markdown_table(("verl", "here", "what differs"), names),
    ]
    return "\n".join(parts)


def _select_used_placeholders() -> dict[str, tuple[str, str]]:
    """Return the placeholders, such as <source>, that the names of the catalogue use."""
    names = {name for key in METRIC_CATALOGUE for name in re.findall(r"<(\w+)>", key)}
    return {name: entry for name, entry in PLACEHOLDERS.items() if name in names}


def _format_reduction(metric: MetricDescription) -> str:
    """Return the reduction of a metric, what it is over, and a mark for better when higher or
    lower.
    """
    mark = {"higher": " ▲", "lower": " ▼", "": ""}[metric.better_direction]
    return f"{metric.reduction}, {metric.reduced_over}{mark}"


def _format_markdown_table(headings: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown, with | escaped in its cells."""
    lines = [headings, tuple("---" for _ in headings), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines
    )


if __name__ == "__main__":
    sys.stdout.write(format_metric_reference())
