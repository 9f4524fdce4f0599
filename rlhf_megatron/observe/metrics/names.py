"""The catalogue of metrics: every one that a run writes, by area. To add one: see algorithms/metric_names.py.

Metrics of losses, estimators and corrections stand in algorithms/metric_names.py.
"""

from __future__ import annotations

from rlhf_megatron.algorithms.metric_names import (
    GROUPS,
    SAMPLES,
    SEQUENCES,
    STEP,
    TOKENS,
    VALID_SAMPLES,
    VALID_TOKENS,
    Metric,
    find_in,
)
from rlhf_megatron.algorithms.metric_names import METRICS as ALGORITHM_METRICS

RANKS = "ranks"
REPLICAS = "data-parallel replicas of the actor"
RUN = "the run so far"
SYNC = "a weight sync"

ENGINES: dict[str, Metric] = {
    "rollout/finish_reason/<reason>": Metric("share", "samples that ended for this reason", "share", SAMPLES),
    "rollout/cached_token_share": Metric(
        "share", "prompt tokens that the engines found in their prefix caches", "ratio", SAMPLES, "higher"
    ),
    "rollout/num_retractions": Metric(
        "count",
        "times an engine dropped the key-value cache of a sample and computed it again: memory was short, or a pause",
        "sum",
        SAMPLES,
        "lower",
    ),
    "rollout/samples_of_several_versions": Metric(
        "share", "samples whose tokens are of more than one policy version", "share", SAMPLES, "lower"
    ),
    "rollout/engine_failures": Metric(
        "count", "times an engine stopped serving: dead, hung, STALE or failing its requests", "count", STEP, "lower"
    ),
    "rollout/engine_restarts": Metric(
        "count", "engines started again in place of one that was dead or hung", "count", STEP, "lower"
    ),
    "rollout/requests_reissued": Metric(
        "count", "prompts asked for again, with the same seeds, after an engine failed", "count", STEP, "lower"
    ),
    "sync/num_bytes": Metric("bytes", "weights sent to each engine", "sum", SYNC),
    "sync/bytes_moved": Metric("bytes", "read by all ranks of all engines", "sum", SYNC, "lower"),
    "sync/bytes_needed": Metric(
        "bytes", "of what then stands in all ranks of all engines: the least that has to be moved", "sum", SYNC
    ),
    "sync/seconds": Metric("s", "begin, gather, send, load, verify, commit", "sum", SYNC, "lower"),
}
MEMORY: dict[str, Metric] = {
    "memory/<phase>_device_bytes": Metric(
        "bytes", "colocated: of a rank's trainer on its device at the end of the phase", "max", RANKS, "lower"
    ),
    "memory/<phase>_host_bytes": Metric(
        "bytes", "colocated: resident memory of a rank's process", "max", RANKS, "lower"
    ),
    "memory/<phase>_offloaded_bytes": Metric(
        "bytes", "colocated: host memory of a rank for what leaves its device", "max", RANKS, "lower"
    ),
    "memory/<phase>_engine_bytes": Metric(
        "bytes", "colocated: weights and key-value cache of a local engine", "max", "engines", "lower"
    ),
    "memory/<phase>_used_bytes": Metric(
        "bytes", "colocated: of a device by all processes; not on a CPU", "max", RANKS, "lower"
    ),
    "perf/max_memory_allocated_gb": Metric(
        "GiB", "most that torch had allocated on a device since its process began; not on a CPU", "max", RANKS, "lower"
    ),
    "perf/max_memory_reserved_gb": Metric(
        "GiB", "most that torch had reserved on a device since its process began; not on a CPU", "max", RANKS, "lower"
    ),
    "perf/cpu_memory_used_gb": Metric(
        "GiB", "resident memory of a rank's process after the update", "max", RANKS, "lower"
    ),
}
TIMES: dict[str, Metric] = {
    "timing_s/step": Metric("s", "wall time of a step", "sum", STEP, "lower"),
    "timing_s/turns": Metric(
        "s", "colocated: trainer and engines change places, without the sending of weights", "sum", STEP, "lower"
    ),
    "timing_s/desync": Metric(
        "s", "comparison of what several ranks hold, every trainer.desync_freq steps", "sum", STEP, "lower"
    ),
    "timing_s/<stage>": Metric("s", "wall time of a stage", "sum", STEP, "lower"),
    "timing_per_token_ms/gen": Metric("ms", "stage generate, a response token", "ratio", STEP, "lower"),
    "timing_per_token_ms/adv": Metric("ms", "stage advantages, a token", "ratio", STEP, "lower"),
    "timing_per_token_ms/old_log_prob": Metric("ms", "the actor's log-probs, a token", "ratio", STEP, "lower"),
    "timing_per_token_ms/ref": Metric("ms", "the reference's log-probs, a token", "ratio", STEP, "lower"),
    "timing_per_token_ms/values": Metric("ms", "the critic's values, a token", "ratio", STEP, "lower"),
    "timing_per_token_ms/update_actor": Metric(
        "ms", "all epochs of the actor, a token of the step", "ratio", STEP, "lower"
    ),
    "timing_per_token_ms/update_critic": Metric(
        "ms", "all epochs of the critic, a token of the step", "ratio", STEP, "lower"
    ),
    "checkpoint/step": Metric("count", "step of the checkpoint that was committed last", "last", RUN),
    "checkpoint/seconds": Metric(
        "s", "from the request of a checkpoint to its commit; steps go on meanwhile", "last", RUN, "lower"
    ),
    "checkpoint/num_bytes": Metric("bytes", "files of the checkpoint that was committed last", "last", RUN),
    "checkpoint/num_failed": Metric(
        "count", "checkpoints of this attempt that could not be written", "count", "an attempt", "lower"
    ),
}
RATES: dict[str, Metric] = {
    "perf/total_num_tokens": Metric("tokens", "prompt and response tokens", "sum", STEP),
    "perf/throughput": Metric(
        "tokens/s/GPU",
        "prompt and response tokens over the wall time and the devices: ranks of the trainer, and those of engines that"
        " do not share them; a CPU process counts as one",
        "ratio",
        STEP,
        "higher",
    ),
    "perf/tokens_per_s": Metric("tokens/s", "prompt and response tokens over the wall time", "ratio", STEP, "higher"),
    "perf/tokens_per_s/generate": Metric(
        "tokens/s", "response tokens over the time of `generate`", "ratio", STEP, "higher"
    ),
    "perf/tokens_per_s/update": Metric(
        "tokens/s", "tokens x epochs over the time of `update`", "ratio", STEP, "higher"
    ),
    "perf/peak_tflops": Metric(
        "TFLOP/s",
        "dense bfloat16 peak of a device, trainer.device_peak_tflops or by its name: what perf/mfu is a share of",
        "last",
        RUN,
    ),
    "perf/mfu/actor": Metric(
        "share",
        "FLOPs of the policy x 3 (forward and backward) x epochs over seconds of actor.update, without waiting, x ranks"
        " of the actor x peak. FLOPs: 2 a weight and token, 4 x heads x head size for each pair of attention (causal),"
        " the head on response tokens; what is computed again, padding and experts are not counted",
        "ratio",
        STEP,
        "higher",
    ),
    "perf/mfu/actor_infer": Metric(
        "share",
        "FLOPs of the policy (forward) over seconds of actor.log_probs x ranks of the actor x peak",
        "ratio",
        STEP,
        "higher",
    ),
    "perf/mfu/critic": Metric(
        "share",
        "FLOPs of the critic x 3 x its epochs over seconds of critic.update x ranks of the critic x peak",
        "ratio",
        STEP,
        "higher",
    ),
    "perf/num_head_fallbacks": Metric(
        "count",
        "times a rank gave up a backend of the LM head that failed its self-check, actor and reference together",
        "count",
        RUN,
        "lower",
    ),
    "perf/ettr": Metric(
        "share",
        "effective training time: time in steps, evaluations and warm-up that count / since the first launch",
        "ratio",
        RUN,
        "higher",
    ),
    "global_seqlen/mean": Metric("tokens", "of a replica", "mean", REPLICAS),
    "global_seqlen/max": Metric("tokens", "of a replica, were samples dealt in their order", "max", REPLICAS),
    "global_seqlen/min": Metric("tokens", "of a replica, were samples dealt in their order", "min", REPLICAS),
    "global_seqlen/minmax_diff": Metric("tokens", "max - min", "ratio", REPLICAS),
    "global_seqlen/balanced_max": Metric(
        "tokens", "of a replica as samples are dealt for the log-probs", "max", REPLICAS
    ),
    "global_seqlen/balanced_min": Metric(
        "tokens", "of a replica as samples are dealt for the log-probs", "min", REPLICAS
    ),
}
SCHEDULE: dict[str, Metric] = {
    "schedule/wait_s": Metric(
        "s",
        "the trainer waited for samples of the step, without log-probs that it made meanwhile",
        "sum",
        STEP,
        "lower",
    ),
    "schedule/generating": Metric("count", "groups that were generated when the batch was complete", "last", STEP),
    "schedule/dropped_lag": Metric(
        "count", "groups that had become too old to train, since the batch before", "count", "groups", "lower"
    ),
    "schedule/dropped_no_signal": Metric(
        "count", "groups that algorithm.filter_groups left out, since the batch before", "count", "groups", "lower"
    ),
    "schedule/dropped_tail": Metric(
        "count", "groups given up because the batch was complete without them", "count", "groups", "lower"
    ),
    "schedule/started_again": Metric(
        "count", "groups that had become too old and were generated anew", "count", "groups", "lower"
    ),
}
MADE_STEPS = "optimizer steps that were made"
ITEMS = "held-out items of a set"
PROMPTS = "prompts of the samples of a step"
PROMPTS_SCORED = "prompts whose greedy sample counts"

REWARDS: dict[str, Metric] = {
    "critic/rewards/mean": Metric("score", "reward, without KL terms", "mean", VALID_SAMPLES, "higher"),
    "critic/rewards/max": Metric("score", "largest reward", "max", VALID_SAMPLES),
    "critic/rewards/min": Metric("score", "smallest reward", "min", VALID_SAMPLES),
    "critic/rewards/std": Metric("score", "spread of rewards (unbiased); 0 for a single one", "std", VALID_SAMPLES),
    "reward/mixed_groups": Metric(
        "share", "groups whose samples have different rewards: the ones that teach", "share", GROUPS, "higher"
    ),
    "reward/uniform_groups": Metric(
        "share",
        "groups of several samples that count, whose rewards all agree: without signal",
        "share",
        GROUPS,
        "lower",
    ),
    "reward/solve_all": Metric("share", "of these the groups whose rewards are all 1 or more", "share", GROUPS),
    "reward/solve_none": Metric("share", "of these the groups whose rewards are all 0 or less", "share", GROUPS),
    "reward/masked": Metric(
        "share", "samples left out because their reward could not be computed", "share", SAMPLES, "lower"
    ),
    "reward/part/<name>": Metric("score", "a named component of the reward", "mean", "samples that count and have it"),
    "reward/status/<status>": Metric("share", "samples whose reward has this status", "share", SAMPLES),
    "reward/source/<source>/mean": Metric(
        "score", "reward of the samples of a data source", "mean", VALID_SAMPLES, "higher"
    ),
    "reward/source/<source>/count": Metric("count", "samples of a data source", "count", VALID_SAMPLES),
    "filter_groups/num_gen_batches": Metric(
        "count", "batches of prompts that a step generated", "count", STEP, "lower"
    ),
    "filter_groups/kept": Metric(
        "share", "generated groups that stayed, of algorithm.filter_groups", "share", "groups generated in a step"
    ),
    "filter_groups/num_groups": Metric("count", "groups that the step trains on", "count", STEP, "higher"),
    "greedy/rewards/mean": Metric("score", "reward of the greedy sample of a prompt", "mean", PROMPTS_SCORED, "higher"),
    "greedy/rewards/max": Metric("score", "largest of them", "max", PROMPTS_SCORED),
    "greedy/rewards/min": Metric("score", "smallest of them", "min", PROMPTS_SCORED),
    "greedy/masked": Metric("share", "greedy samples whose reward could not be computed", "share", PROMPTS, "lower"),
    "greedy/response_length/mean": Metric("tokens", "greedy response", "mean", PROMPTS),
    "greedy/response_length/max": Metric("tokens", "longest greedy response", "max", PROMPTS),
    "greedy/response_length/min": Metric("tokens", "shortest greedy response", "min", PROMPTS),
}
SIGNALS: dict[str, Metric] = {
    "critic/advantages/mean": Metric("1", "token advantage", "mean", TOKENS),
    "critic/advantages/max": Metric("1", "largest token advantage", "max", TOKENS),
    "critic/advantages/min": Metric("1", "smallest token advantage", "min", TOKENS),
    "critic/values/mean": Metric("score", "value before the update", "mean", VALID_TOKENS),
    "critic/values/max": Metric("score", "largest value before the update", "max", VALID_TOKENS),
    "critic/values/min": Metric("score", "smallest value before the update", "min", VALID_TOKENS),
    "critic/returns/mean": Metric("score", "what the critic is to learn", "mean", VALID_TOKENS),
    "critic/returns/max": Metric("score", "largest return", "max", VALID_TOKENS),
    "critic/returns/min": Metric("score", "smallest return", "min", VALID_TOKENS),
    "variance_proxy/proxy1_signal_strength": Metric(
        "1", "square of actor/grad_norm: of the mean gradient", "mean", MADE_STEPS
    ),
    "variance_proxy/proxy2_total_power": Metric(
        "1", "(a sample's mean advantage)^2 x w: mean square of a sample's gradient", "mean", VALID_SAMPLES
    ),
    "variance_proxy/proxy3_pure_noise": Metric(
        "1",
        "(proxy2 - proxy1) / (samples - 1), 0 at least: variance of the mean gradient",
        "ratio",
        VALID_SAMPLES,
        "lower",
    ),
    "variance_proxy/expected_a_squared": Metric("1", "(a sample's mean advantage)^2", "mean", VALID_SAMPLES),
    "variance_proxy/expected_w": Metric(
        "1",
        "w: sum over a sample's tokens of 1 - 2 p + sum of p^2, p the probability of the token",
        "mean",
        VALID_SAMPLES,
    ),
}
LENGTHS: dict[str, Metric] = {
    "response_length/mean": Metric("tokens", "response length", "mean", SAMPLES),
    "response_length/max": Metric("tokens", "longest response", "max", SAMPLES),
    "response_length/min": Metric("tokens", "shortest response", "min", SAMPLES),
    "response_length/clip_ratio": Metric(
        "share", "responses that ended by the length limit", "share", SAMPLES, "lower"
    ),
    "response_length_non_aborted/mean": Metric("tokens", "response length", "mean", SEQUENCES),
    "response_length_non_aborted/max": Metric("tokens", "longest response", "max", SEQUENCES),
    "response_length_non_aborted/min": Metric("tokens", "shortest response", "min", SEQUENCES),
    "response_length_non_aborted/clip_ratio": Metric(
        "share", "responses that ended by the length limit", "share", SEQUENCES, "lower"
    ),
    "response/aborted_ratio": Metric("share", "samples that ended by abort", "share", SAMPLES, "lower"),
    "prompt_length/mean": Metric("tokens", "prompt length", "mean", SAMPLES),
    "prompt_length/max": Metric("tokens", "longest prompt", "max", SAMPLES),
    "prompt_length/min": Metric("tokens", "shortest prompt", "min", SAMPLES),
    "prompt_length/clip_ratio": Metric(
        "share", "prompts as long as data.max_prompt_length, so perhaps cut to it", "share", PROMPTS, "lower"
    ),
    "num_turns/mean": Metric("count", "stretches that the policy wrote; where a sample has several", "mean", SAMPLES),
    "num_turns/max": Metric("count", "most turns", "max", SAMPLES),
    "num_turns/min": Metric("count", "fewest turns", "min", SAMPLES),
    "rollout/num_samples": Metric("count", "prompts x rollout.n", "count", SAMPLES),
}
UPDATES: dict[str, Metric] = {
    "actor/entropy": Metric("nats", "entropy of the policy before the update", "mean", TOKENS),
    "<role>/grad_norm": Metric("1", "global gradient norm before clipping", "mean", MADE_STEPS),
    "<role>/lr": Metric("1", "learning rate", "last", "optimizer steps of a step"),
    "<role>/num_epochs": Metric("count", "passes over the samples; 0 where the role was not trained", "last", STEP),
    "<role>/num_optimizer_steps": Metric("count", "optimizer steps, with those that were skipped", "count", STEP),
    "<role>/num_skipped_steps": Metric(
        "count", "optimizer steps skipped on all ranks for a number that is not finite", "count", STEP, "lower"
    ),
    "policy/version": Metric(
        "count", "weight syncs so far; a step that leaves the policy as it was makes none", "last", STEP
    ),
    "pf_ppo/distinct_samples": Metric(
        "share", "samples that were drawn to train on, each once, with algorithm.pf_ppo", "share", SAMPLES
    ),
    "policy/lag": Metric("count", "version at training minus version at sampling", "mean", SAMPLES, "lower"),
    "training/off_policy/trajectory_staleness/mean": Metric(
        "count", "version at training minus that of a sample's oldest token", "mean", SAMPLES, "lower"
    ),
    "training/off_policy/trajectory_staleness/max": Metric("count", "largest of it", "max", SAMPLES, "lower"),
    "training/off_policy/trajectory_staleness/min": Metric("count", "smallest of it", "min", SAMPLES, "lower"),
    "training/off_policy/trajectory_spans/mean": Metric(
        "count", "policy versions of a sample", "mean", SAMPLES, "lower"
    ),
    "training/off_policy/trajectory_spans/max": Metric("count", "most of them", "max", SAMPLES, "lower"),
    "training/off_policy/trajectory_spans/min": Metric("count", "fewest of them", "min", SAMPLES, "lower"),
    "health/<verdict>": Metric(
        "0 or 1",
        "1: trouble, see docs/monitoring.md; left out where it cannot be told",
        "verdict",
        "the last steps",
        "lower",
    ),
}
VALIDATION: dict[str, Metric] = {
    "val/accuracy": Metric(
        "score", "score of all held-out items; a share where it is 0 or 1", "mean", "held-out items", "higher"
    ),
    "val/accuracy_low": Metric("share", "lower end of its 95 % interval", "quantile", "held-out items"),
    "val/accuracy_high": Metric("share", "upper end of its 95 % interval", "quantile", "held-out items"),
    "val/num_items": Metric("count", "held-out items", "count", "an evaluation"),
    "val/response_length": Metric("tokens", "response length on the held-out items", "mean", "held-out samples"),
    "val/<source>/mean@<N>": Metric("score", "mean score of an item's N samples", "mean", ITEMS, "higher"),
    "val/<source>/std@<N>": Metric("score", "standard deviation of an item's scores", "mean", ITEMS),
    "val/<source>/best@<k>": Metric(
        "score", "expected best of k samples of an item; for 0/1 scores pass@k", "mean", ITEMS, "higher"
    ),
    "val/<source>/worst@<k>": Metric("score", "expected worst of k samples of an item", "mean", ITEMS, "higher"),
    "val/<source>/maj@<k>": Metric(
        "score",
        "expected score of the most common answer among k samples of an item; an answer is what stands in the last"
        " \\boxed{...} of a response, or after its last ####, or else all of it; equally common ones count as their mean",  # noqa: E501
        "mean",
        ITEMS,
        "higher",
    ),
    "val/<source>/best@<k>/low": Metric("score", "lower end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/best@<k>/high": Metric("score", "upper end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/worst@<k>/low": Metric("score", "lower end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/worst@<k>/high": Metric("score", "upper end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/maj@<k>/low": Metric("score", "lower end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/maj@<k>/high": Metric("score", "upper end of its 95 % interval (bootstrap)", "quantile", ITEMS),
    "val/<source>/low": Metric("score", "lower end of the 95 % interval of mean@N", "quantile", ITEMS),
    "val/<source>/high": Metric("score", "upper end of the 95 % interval of mean@N", "quantile", ITEMS),
    "val/<source>/num_items": Metric("count", "items with a sample that counts", "count", "an evaluation"),
    "val/<source>/num_masked": Metric(
        "count", "samples left out because their reward could not be computed", "count", "an evaluation", "lower"
    ),
    "val/<source>/response_length": Metric("tokens", "response length", "mean", "held-out samples of a set"),
}
WARMUP: dict[str, Metric] = {
    "warmup/loss": Metric("nats", "supervised loss", "mean", "answer tokens of a warm-up step", "lower"),
    "warmup/grad_norm": Metric("1", "global gradient norm before clipping", "last", "a warm-up step"),
    "warmup/accuracy": Metric(
        "share", "sampled held-out accuracy during the warm-up", "mean", "held-out items", "higher"
    ),
}
SECTIONS: tuple[tuple[str, dict[str, Metric]], ...] = (
    ("Rewards", REWARDS),
    ("Advantages, values, returns", SIGNALS),
    ("Lengths", LENGTHS),
    ("Updates, versions, health", UPDATES),
    ("Losses, estimators, corrections", ALGORITHM_METRICS),
    ("Evaluations", VALIDATION),
    ("Warm-up", WARMUP),
    ("Engines and weight syncs", ENGINES),
    ("Schedules in the background", SCHEDULE),
    ("Time and checkpoints", TIMES),
    ("Throughput and balance", RATES),
    ("Memory", MEMORY),
)
CATALOGUE: dict[str, Metric] = {key: metric for _, metrics in SECTIONS for key, metric in metrics.items()}


def find(key: str) -> Metric | None:
    """Return the metric of a key as a run writes it, such as "reward/part/format"; None where it is not listed."""
    return find_in(CATALOGUE, key)
