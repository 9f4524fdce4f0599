"""Every metric that a run writes: key -> (unit, meaning). Those of losses stand in algorithms/metric_names.py."""

from __future__ import annotations

import re

from rlhf_megatron.algorithms.metric_names import METRICS as ALGORITHM_METRICS

METRICS: dict[str, tuple[str, str]] = {
    "critic/rewards/mean": ("score", "mean reward of the samples of a step, masked statuses left out"),
    "critic/rewards/max": ("score", "largest reward of a step"),
    "critic/rewards/min": ("score", "smallest reward of a step"),
    "critic/rewards/std": ("score", "standard deviation (unbiased) of the rewards of a step; 0 for a single one"),
    "critic/advantages/mean": ("1", "mean token advantage over response tokens"),
    "critic/advantages/max": ("1", "largest token advantage"),
    "critic/advantages/min": ("1", "smallest token advantage"),
    "critic/values/mean": ("score", "mean value before the update, over response tokens of samples that count"),
    "critic/values/max": ("score", "largest value before the update"),
    "critic/values/min": ("score", "smallest value before the update"),
    "critic/returns/mean": ("score", "mean of what the critic is to learn, over the same tokens"),
    "critic/returns/max": ("score", "largest return"),
    "critic/returns/min": ("score", "smallest return"),
    "critic/grad_norm": (
        "1",
        "global gradient norm of the critic before clipping, mean over the optimizer steps that were made",
    ),
    "critic/lr": ("1", "learning rate of the critic's last optimizer step"),
    "critic/num_epochs": ("count", "passes of the critic over the samples of a step"),
    "critic/num_optimizer_steps": ("count", "optimizer steps of the critic in a step"),
    "critic/num_skipped_steps": ("count", "optimizer steps of the critic skipped for a number that is not finite"),
    "reward/mixed_groups": ("share", "groups whose samples have different rewards: the ones that teach"),
    "reward/masked": ("share", "samples left out because their reward could not be computed"),
    "reward/part/<name>": ("score", "mean of a named component of the reward over the valid samples that have it"),
    "reward/status/<status>": ("share", "samples whose reward has this status"),
    "reward/source/<source>/mean": ("score", "mean reward of the samples of a data source, masked statuses left out"),
    "reward/source/<source>/count": ("count", "samples of a data source whose reward counts"),
    "response_length/mean": ("tokens", "mean response length"),
    "response_length/max": ("tokens", "longest response"),
    "response_length/min": ("tokens", "shortest response"),
    "response_length/clip_ratio": ("share", "responses that ended by the length limit"),
    "prompt_length/mean": ("tokens", "mean prompt length"),
    "prompt_length/max": ("tokens", "longest prompt"),
    "prompt_length/min": ("tokens", "shortest prompt"),
    "rollout/num_samples": ("count", "samples of a step: prompts x rollout.n"),
    "rollout/finish_reason/<reason>": ("share", "samples that ended for this reason: stop, length or abort"),
    "rollout/cached_token_share": ("share", "prompt tokens that the engines found in their prefix caches"),
    "rollout/num_retractions": (
        "count",
        "times an engine dropped the key-value cache of a sample and computed it again: memory was short, or a pause",
    ),
    "rollout/samples_of_several_versions": ("share", "samples whose tokens are of more than one policy version"),
    "rollout/engine_failures": ("count", "times an engine stopped serving: dead, hung, STALE or failing its requests"),
    "rollout/engine_restarts": ("count", "engines started again in place of one that was dead or hung"),
    "rollout/requests_reissued": ("count", "prompts asked for again, with the same seeds, after an engine failed"),
    "actor/entropy": ("nats", "mean entropy of the policy on response tokens, before the update"),
    "actor/grad_norm": ("1", "global gradient norm before clipping, mean over the optimizer steps that were made"),
    "actor/lr": ("1", "learning rate of the last optimizer step"),
    "actor/num_epochs": ("count", "passes over the samples of a step; 0 in a step that trains the critic only"),
    "actor/num_optimizer_steps": ("count", "optimizer steps of a step"),
    "actor/num_skipped_steps": ("count", "optimizer steps skipped on all ranks for a number that is not finite"),
    "policy/version": ("count", "weight syncs so far; a step that leaves the policy as it was makes none"),
    "policy/lag": ("count", "version at training minus version at sampling, mean"),
    "sync/num_bytes": ("bytes", "weights sent to each engine"),
    "sync/bytes_moved": ("bytes", "read by all ranks of all engines in a weight sync"),
    "sync/bytes_needed": ("bytes", "of what then stands in all ranks of all engines: the least that has to be moved"),
    "sync/seconds": ("s", "whole weight sync: begin, gather, send, load, verify, commit"),
    "memory/<phase>_device_bytes": (
        "bytes",
        "colocated: largest of a rank's trainer on its device at the end of training, in the sync, in generation",
    ),
    "memory/<phase>_host_bytes": ("bytes", "colocated: largest resident memory of a rank's process"),
    "memory/<phase>_offloaded_bytes": ("bytes", "colocated: largest host memory of a rank for what leaves its device"),
    "memory/<phase>_engine_bytes": ("bytes", "colocated: weights and key-value cache of a local engine, the largest"),
    "memory/<phase>_used_bytes": ("bytes", "colocated: of a device by all processes, the most; not on a CPU"),
    "timing_s/turns": ("s", "colocated: trainer and engines change places, without the sending of weights"),
    "checkpoint/step": ("count", "step of the checkpoint that was committed last"),
    "checkpoint/seconds": ("s", "from the request of a checkpoint to its commit; steps go on meanwhile"),
    "checkpoint/num_bytes": ("bytes", "files of the checkpoint that was committed last"),
    "checkpoint/num_failed": ("count", "checkpoints of this attempt that could not be written"),
    "timing_s/<stage>": ("s", "wall time of a stage"),
    "timing_s/step": ("s", "wall time of a step"),
    "timing_s/desync": ("s", "comparison of what several ranks hold, every trainer.desync_freq steps"),
    "perf/total_num_tokens": ("tokens", "prompt and response tokens of a step"),
    "perf/tokens_per_s": ("tokens/s", "prompt and response tokens of a step over its wall time"),
    "perf/tokens_per_s/generate": ("tokens/s", "response tokens over the time of `generate`"),
    "perf/tokens_per_s/update": ("tokens/s", "tokens x epochs over the time of `update`"),
    "perf/num_head_fallbacks": (
        "count",
        "times a rank gave up a backend of the LM head that failed its self-check, actor and reference together",
    ),
    "perf/ettr": (
        "share",
        "effective training time: time in steps, evaluations and warm-up that count / since the first launch",
    ),
    "val/accuracy": ("share", "mean score of the held-out items"),
    "val/accuracy_low": ("share", "lower end of its 95 % interval"),
    "val/accuracy_high": ("share", "upper end of its 95 % interval"),
    "val/num_items": ("count", "held-out items"),
    "val/response_length": ("tokens", "mean response length on the held-out items"),
    "val/<source>/mean@<N>": (
        "score",
        "of an evaluation set: mean over items of the mean score of an item's N samples",
    ),
    "val/<source>/std@<N>": ("score", "mean over items of the standard deviation of an item's scores"),
    "val/<source>/best@<k>": ("score", "mean over items of the expected best of k samples; for 0/1 scores pass@k"),
    "val/<source>/low": ("score", "lower end of the 95 % interval of mean@N"),
    "val/<source>/high": ("score", "upper end of the 95 % interval of mean@N"),
    "val/<source>/num_items": ("count", "items with a sample that counts"),
    "val/<source>/num_masked": ("count", "samples left out because their reward could not be computed"),
    "val/<source>/response_length": ("tokens", "mean response length"),
    "warmup/loss": ("nats", "supervised loss of a warm-up step, mean over answer tokens"),
    "warmup/grad_norm": ("1", "global gradient norm before clipping"),
    "warmup/accuracy": ("share", "sampled held-out accuracy during the warm-up"),
}


def find(key: str) -> tuple[str, str] | None:
    """(unit, meaning) of a key as a run writes it, "reward/part/format" too; None where it is not listed."""
    listed = METRICS | ALGORITHM_METRICS
    if key in listed:
        return listed[key]
    for pattern, entry in listed.items():
        if "<" in pattern and re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(pattern)), key):
            return entry
    return None
