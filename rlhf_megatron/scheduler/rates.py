"""Throughput, time a token, MFU and balance of a step: what its times and counts come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_megatron.data.batch import TokenBatch, TrainBatch
from rlhf_megatron.data.plan import NO_OP
from rlhf_megatron.runtime.dispatch import plan_call
from rlhf_megatron.scheduler.batch_metrics import response_lengths
from rlhf_megatron.scheduler.flops import FORWARD, TRAINING, model_flops
from rlhf_megatron.scheduler.workload import Workload

SHORTEST = 1e-9  # s; no time is taken as shorter
CALLS = {  # the field's name -> the call to the hosts that is meant
    "old_log_prob": "actor.log_probs",
    "ref": "reference.log_probs",
    "values": "critic.values",
    "update_actor": "actor.update",
    "update_critic": "critic.update",
}


def throughput(metrics: Mapping[str, float], num_devices: int | None = None) -> dict[str, float]:
    """Tokens per second of the whole step, a device, and of its two large stages."""
    tokens = metrics["perf/total_num_tokens"]
    rates = {"perf/tokens_per_s": tokens / max(SHORTEST, metrics["timing_s/step"])}
    if num_devices is not None:
        rates["perf/throughput"] = rates["perf/tokens_per_s"] / num_devices
    if "timing_s/generate" in metrics:
        rates["perf/tokens_per_s/generate"] = _num_response_tokens(metrics) / max(
            SHORTEST, metrics["timing_s/generate"]
        )
    if "timing_s/update" in metrics:
        trained = tokens * metrics["actor/num_epochs"]
        rates["perf/tokens_per_s/update"] = trained / max(SHORTEST, metrics["timing_s/update"])
    return rates


def time_per_token(metrics: Mapping[str, float], call_seconds: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds. `call_seconds`: in this step, by call ("actor.update"), without the time that it waited."""
    tokens = max(1.0, metrics["perf/total_num_tokens"])
    found = {name: call_seconds[call] / tokens for name, call in CALLS.items() if call in call_seconds}
    if "timing_s/generate" in metrics:
        found["gen"] = metrics["timing_s/generate"] / max(1.0, _num_response_tokens(metrics))
    if "timing_s/advantages" in metrics:
        found["adv"] = metrics["timing_s/advantages"] / tokens
    return {f"timing_per_token_ms/{name}": 1e3 * seconds for name, seconds in found.items()}


def utilisation(
    metrics: Mapping[str, float], call_seconds: Mapping[str, float], batch: TrainBatch, work: Workload
) -> dict[str, float]:
    """Model FLOPs over seconds of the call x ranks of its pool x peak of a device, and that peak.

    The peak is the configuration's, or that of the device's name (`metrics`); empty where neither is known, as on a
    CPU.
    """
    tflops = work.device_peak_tflops or metrics.get("perf/peak_tflops", 0.0)
    if not tflops:
        return {}
    peak = 1e12 * tflops
    num_trained = int(response_lengths(batch).sum())
    of_policy = model_flops(work.policy, batch.lengths, num_trained, FORWARD)
    of_critic = model_flops(work.critic, batch.lengths, num_trained, FORWARD, head_size=1)
    cases = (
        ("actor_infer", "actor.log_probs", of_policy, FORWARD, work.num_actor_ranks),
        ("actor", "actor.update", of_policy, TRAINING * metrics["actor/num_epochs"], work.num_actor_ranks),
        ("critic", "critic.update", of_critic, TRAINING * work.critic_epochs, work.num_critic_ranks),
    )
    return {"perf/peak_tflops": tflops} | {
        f"perf/mfu/{name}": passes * flops / (max(SHORTEST, call_seconds[call]) * num_ranks * peak)
        for name, call, flops, passes, num_ranks in cases
        if flops is not None and call in call_seconds
    }


def balance(batch: TokenBatch, work: Workload) -> dict[str, float]:
    """Tokens of the actor's replicas: dealt in the samples' order, and as the log-probs' call deals them."""
    lengths, num_replicas = batch.lengths, work.actor_layout.dp
    total = float(lengths.sum())
    in_order = [float(part.sum()) for part in lengths.tensor_split(num_replicas)]
    balanced = [total]
    if num_replicas > 1:
        plans = plan_call(batch, work.actor_layout, work.token_budget)
        balanced = [float(lengths[[i for i in plan.samples if i != NO_OP]].sum()) for plan in plans]
    low, high = min(in_order), max(in_order)
    found = {"mean": total / num_replicas, "max": high, "min": low, "minmax_diff": high - low}
    found |= {"balanced_max": max(balanced), "balanced_min": min(balanced)}
    return {f"global_seqlen/{name}": value for name, value in found.items()}


def _num_response_tokens(metrics: Mapping[str, float]) -> float:
    return metrics["response_length/mean"] * metrics["rollout/num_samples"]
