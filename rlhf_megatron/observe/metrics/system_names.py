"""Metrics of time, throughput, memory, engines, syncs and checkpoints. To add one: see algorithms/metric_names.py."""

from __future__ import annotations

from rlhf_megatron.algorithms.metric import SAMPLES, STEP, Metric

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
METRICS: dict[str, Metric] = ENGINES | SCHEDULE | MEMORY | TIMES | RATES
