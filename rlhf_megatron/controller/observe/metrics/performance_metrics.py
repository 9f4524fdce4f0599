"""Throughput, time a token, model FLOPs utilisation (MFU), balance and memory of a step.

A Workload holds what the rates refer to (devices, layouts, models) and does not change during a
run. The watches at the end ask the ranks after each update; all else is pure.
"""
# B samples

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlhf_megatron.config.rules.engine_rules import count_engines
from rlhf_megatron.config.rules.expert_rules import read_num_experts
from rlhf_megatron.config.rules.part_rules import count_ranks_per_engine
from rlhf_megatron.config.rules.run_rules import (
    compute_world_size,
    count_actor_ranks,
    count_critic_ranks,
    has_critic,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.controller.observe.metrics.batch_metrics import count_sampled_tokens
from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import NO_OP, ReplicaPlan
from rlhf_megatron.data.shared_prompts import count_shared_tokens, find_sample_prompts
from rlhf_megatron.ranks.workers.rank_reports import MemoryReport
from rlhf_megatron.runtime.call_dispatch import plan_scattered_call
from rlhf_megatron.runtime.rank_pools import build_pool_specs
from rlhf_megatron.runtime.role_proxies import ActorProxy, ReferenceProxy, RoleProxies
from rlhf_megatron.weights.families.family_lookup import find_model_family
from rlhf_megatron.weights.families.latent_attention import (
    make_latent_rules,
    read_latent_dimensions,
)
from rlhf_megatron.weights.families.model_family import FAMILIES
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout

# Dense bfloat16 with float32 sums, TFLOP/s, as the vendors' data sheets have them
# (without sparsity).
PEAK_TFLOPS: Mapping[str, float] = {
    "H200": 989.4,
    "GH200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "L40S": 362.05,
    "L40": 181.05,
    "L4": 121.0,
    "A10": 125.0,
}
# passes, in units of a forward pass
FORWARD_PASSES = 1
TRAINING_PASSES = 3

MIN_SECONDS = 1e-9  # s; no time is taken as shorter
CALL_BY_METRIC_NAME = {  # the field's name -> the call to the hosts that is meant
    "old_log_prob": "actor.log_probs",
    "ref": "reference.log_probs",
    "values": "critic.values",
    "reward_model": "reward_model.values",
    "update_actor": "actor.update",
    "update_critic": "critic.update",
}

GIB = float(1 << 30)


def find_peak_tflops(device_name: str) -> float | None:
    """Return the peak TFLOP/s of a device, or None where the table does not have it. The longest
    name in the table whose words are all in the device's name counts.
    """
    words = set(device_name.replace("-", " ").split())
    known = [name for name in PEAK_TFLOPS if set(name.split()) <= words]
    return PEAK_TFLOPS[max(known, key=len)] if known else None


def count_model_flops(
    hf_config: Mapping[str, Any],
    lengths_B: Tensor,
    num_head_tokens: int,
    num_forward_passes: int,
    head_size: int | None = None,
) -> float | None:
    """Return the FLOPs of `num_forward_passes` over whole samples, or None for an unknown model.
    `num_head_tokens` tokens pass the head; `head_size` is the number of its outputs (1 for a
    critic; None: the vocabulary).

    For a model with experts the weights that a token meets count.
    """
    if "hidden_size" not in hf_config or (
        read_num_experts(hf_config) and str(hf_config.get("model_type")) not in FAMILIES
    ):
        return None
    hidden = hf_config["hidden_size"]
    num_heads = hf_config["num_attention_heads"]
    attention, width = _measure_attention_layer(hf_config)
    weights = hf_config["num_hidden_layers"] * attention + _count_mlp_weights(hf_config)
    lengths = lengths_B.double()
    head = 2.0 * hidden * (head_size or hf_config["vocab_size"]) * num_head_tokens
    scores = 2.0 * num_heads * width * _count_attention_pairs(hf_config, lengths)
    return num_forward_passes * (2.0 * weights * float(lengths.sum()) + scores + head)


def _count_attention_pairs(hf_config: Mapping[str, Any], lengths_B: Tensor) -> float:
    """Return the number of pairs of tokens that attend to each other, over all layers; in some
    layers a token may see `sliding_window` tokens only.
    """
    kinds = hf_config.get("layer_types") or []
    sliding = kinds.count("sliding_attention") if hf_config.get("sliding_window") else 0
    pairs = (hf_config["num_hidden_layers"] - sliding) * lengths_B.square() / 2
    if sliding:
        window = hf_config["sliding_window"]
        near_B = lengths_B.clamp(max=window)
        pairs = pairs + sliding * (near_B.square() / 2 + (lengths_B - near_B) * window)
    return float(pairs.sum())


def _measure_attention_layer(hf_config: Mapping[str, Any]) -> tuple[int, int]:
    """Return (the weights of a layer's attention matrices, the sum of the widths of a head's keys
    and values).
    """
    hidden = hf_config["hidden_size"]
    num_heads = hf_config["num_attention_heads"]
    if hf_config.get("kv_lora_rank"):
        latent = read_latent_dimensions(hf_config)
        rules = make_latent_rules(latent, num_heads, hidden, 0)
        weights = sum(
            math.prod(rule.megatron_shape) for rule in rules if len(rule.megatron_shape) == 2
        )
        return weights, latent.nope_dim + latent.rope_dim + latent.value_dim
    head_dim = hf_config.get("head_dim") or hidden // num_heads
    num_kv_heads = hf_config.get("num_key_value_heads") or num_heads
    return hidden * head_dim * (2 * num_heads + 2 * num_kv_heads), 2 * head_dim


def _count_mlp_weights(hf_config: Mapping[str, Any]) -> int:
    """Return the number of MLP weights that a token meets in all layers; in layers with experts,
    the weights of the router and of the experts that the token is sent to.
    """
    arguments = {
        "num_layers": hf_config["num_hidden_layers"],
        "ffn_hidden_size": hf_config["intermediate_size"],
    }
    if read_num_experts(hf_config):
        arguments = find_model_family(hf_config).make_transformer_arguments(hf_config)
    hidden = hf_config["hidden_size"]
    with_experts = sum(arguments.get("moe_layer_freq", ()))
    dense = 3 * hidden * arguments["ffn_hidden_size"] * (arguments["num_layers"] - with_experts)
    if not with_experts:
        return dense
    active = arguments["moe_router_topk"] * arguments["moe_ffn_hidden_size"]
    shared = arguments.get("moe_shared_expert_intermediate_size") or 0
    return dense + with_experts * hidden * (arguments["num_moe_experts"] + 3 * (active + shared))


@dataclass(frozen=True)
class PerformanceBasis:
    """Counts are of ranks: of GPUs, or of processes on a machine without."""

    num_devices: int  # of the trainer, and of engines that have devices of their own
    num_actor_ranks: int
    num_critic_ranks: int  # those of the actor where the critic has none of its own
    actor_layout: ParallelLayout
    token_budget: int  # of a micro-batch of the log-probs, on one rank
    max_prompt_length: int
    num_critic_epochs: int
    # its config.json; empty: not known
    policy_hf_config: Mapping[str, Any] = field(default_factory=dict)
    critic_hf_config: Mapping[str, Any] = field(default_factory=dict)
    device_peak_tflops: float | None = None  # as the configuration says; None: by the device's name


def make_performance_basis(config: RunConfig) -> PerformanceBasis:
    """Collect what the rates of a run refer to: devices, ranks, layouts and model configurations.
    Raise ValueError for a bad layout.
    """
    actor = config.actor
    critic = config.critic
    rollout = config.rollout
    has_own_devices = config.job == "train" and not rollout.colocated
    engine_ranks = count_engines(config) * count_ranks_per_engine(rollout) if has_own_devices else 0
    return PerformanceBasis(
        num_devices=compute_world_size(config) + engine_ranks,
        num_actor_ranks=count_actor_ranks(config),
        num_critic_ranks=count_critic_ranks(config) or count_actor_ranks(config),
        actor_layout=build_pool_specs(config)[0].layout,
        token_budget=actor.ppo_max_token_len_per_gpu,
        max_prompt_length=config.data.max_prompt_length,
        num_critic_epochs=critic.ppo_epochs or actor.ppo_epochs,
        policy_hf_config=_read_hf_config_if_present(config.model.path),
        critic_hf_config=_read_hf_config_if_present(critic.path or config.model.path)
        if has_critic(config)
        else {},
        device_peak_tflops=config.trainer.device_peak_tflops,
    )


def _read_hf_config_if_present(model_dir: str) -> Mapping[str, Any]:
    """Return config.json of a model directory, {} where it has none."""
    return read_hf_config(Path(model_dir)) if (Path(model_dir) / "config.json").is_file() else {}


def compute_throughput(
    metrics: Mapping[str, float], num_devices: int | None = None
) -> dict[str, float]:
    """Return tokens per second of the whole step, per device where their number is known, and of
    the stages generate and update.
    """
    tokens = metrics["perf/total_num_tokens"]
    rates = {"perf/tokens_per_s": tokens / max(MIN_SECONDS, metrics["timing_s/step"])}
    if num_devices is not None:
        rates["perf/throughput"] = rates["perf/tokens_per_s"] / num_devices
    if "timing_s/generate" in metrics:
        rates["perf/tokens_per_s_generate"] = _count_response_tokens(metrics) / max(
            MIN_SECONDS, metrics["timing_s/generate"]
        )
    if "timing_s/update" in metrics:
        trained = tokens * metrics["actor/num_epochs"]
        rates["perf/tokens_per_s_update"] = trained / max(MIN_SECONDS, metrics["timing_s/update"])
    return rates


def compute_time_per_token(
    metrics: Mapping[str, float], call_seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return milliseconds per token of stages and calls. `call_seconds`: seconds of the calls in
    this step, by call ("actor.update"), without the time that a call waited.
    """
    tokens = max(1.0, metrics["perf/total_num_tokens"])
    found = {
        name: call_seconds[call] / tokens
        for name, call in CALL_BY_METRIC_NAME.items()
        if call in call_seconds
    }
    if "timing_s/generate" in metrics:
        found["gen"] = metrics["timing_s/generate"] / max(1.0, _count_response_tokens(metrics))
    if "timing_s/advantages" in metrics:
        found["adv"] = metrics["timing_s/advantages"] / tokens
    return {f"timing_per_token_ms/{name}": 1e3 * seconds for name, seconds in found.items()}


def compute_flops_utilisation(
    metrics: Mapping[str, float],
    call_seconds: Mapping[str, float],
    batch: TokenBatch,
    basis: PerformanceBasis,
) -> dict[str, float]:
    """Return the MFU of the log-probs and updates: model FLOPs over (seconds of the call x ranks of
    its pool x peak of a device); and that peak, in TFLOP/s.

    The peak is the configuration's, or the peak that `metrics` has by the device's name; return {}
    where neither is known, as on a CPU.
    """
    tflops = basis.device_peak_tflops or metrics.get("perf/peak_tflops", 0.0)
    if not tflops:
        return {}
    peak = 1e12 * tflops
    num_trained = int(count_sampled_tokens(batch).sum())
    of_policy = count_model_flops(
        basis.policy_hf_config, batch.lengths, num_trained, FORWARD_PASSES
    )
    of_critic = count_model_flops(
        basis.critic_hf_config, batch.lengths, num_trained, FORWARD_PASSES, head_size=1
    )
    cases = (
        ("actor_infer", "actor.log_probs", of_policy, FORWARD_PASSES, basis.num_actor_ranks),
        (
            "actor",
            "actor.update",
            of_policy,
            TRAINING_PASSES * metrics["actor/num_epochs"],
            basis.num_actor_ranks,
        ),
        (
            "critic",
            "critic.update",
            of_critic,
            TRAINING_PASSES * basis.num_critic_epochs,
            basis.num_critic_ranks,
        ),
    )
    return {"perf/peak_tflops": tflops} | {
        f"perf/mfu/{name}": passes
        * flops
        / (max(MIN_SECONDS, call_seconds[call]) * num_ranks * peak)
        for name, call, flops, passes, num_ranks in cases
        if flops is not None and call in call_seconds
    }


def compute_replica_balance(batch: TokenBatch, basis: PerformanceBasis) -> dict[str, float]:
    """Return metrics of the tokens of the actor's replicas: dealt in the order of the samples, and
    as the log-prob call deals them; where prompts are shared, also the tokens that need no forward
    pass.
    """
    lengths = batch.lengths
    num_replicas = basis.actor_layout.dp
    has_shared = basis.actor_layout.shares_prompts
    total = float(lengths.sum())
    in_order = [float(part.sum()) for part in lengths.tensor_split(num_replicas)]
    balanced = [total]
    plans: Sequence[ReplicaPlan] = ()
    if num_replicas > 1 or has_shared:
        plans = plan_scattered_call(batch, basis.actor_layout, basis.token_budget)
        balanced = [float(lengths[[i for i in plan.samples if i != NO_OP]].sum()) for plan in plans]
    low = min(in_order)
    high = max(in_order)
    found = {"mean": total / num_replicas, "max": high, "min": low, "minmax_diff": high - low}
    found |= {"balanced_max": max(balanced), "balanced_min": min(balanced)}
    if has_shared:
        real = (
            [plan.samples[i] for i in group if plan.samples[i] != NO_OP]
            for plan in plans
            for group in plan.micro_batches
        )
        found["shared"] = float(count_shared_tokens(find_sample_prompts(batch), real))
    return {f"global_seqlen/{name}": value for name, value in found.items()}


def _count_response_tokens(metrics: Mapping[str, float]) -> float:
    """Return the number of response tokens of the step, from its metrics."""
    return metrics["response_length/mean"] * metrics["rollout/num_samples"]


class MemoryWatch:
    """Asks one role a pool: what it tells is of a whole process."""

    def __init__(self, workers: RoleProxies) -> None:
        """Make a watch over the memory of all ranks, of which one role a pool is asked."""
        self._workers = workers

    def collect_metrics(self) -> dict[str, float]:
        """Ask all ranks for their memory, and return the metrics. Call it after a step's update."""
        calls = [worker.memory_report() for worker in self._workers.map_proxies_by_pool().values()]
        return compute_memory_metrics([report for call in calls for report in call.result()])


def compute_memory_metrics(reports: Iterable[MemoryReport]) -> dict[str, float]:
    """Return the largest memory of each kind over `reports` (at least one), in GiB, and the
    smallest peak TFLOP/s, where the peak of every device is known.
    """
    found = list(reports)
    metrics = {"perf/cpu_memory_used_gb": max(r.resident_bytes for r in found) / GIB}
    names = {report.device_name for report in found}
    if names == {""}:
        return metrics
    metrics["perf/max_memory_allocated_gb"] = max(r.peak_allocated_bytes for r in found) / GIB
    metrics["perf/max_memory_reserved_gb"] = max(r.peak_reserved_bytes for r in found) / GIB
    peaks = [peak for name in names if (peak := find_peak_tflops(name)) is not None]
    return metrics | ({"perf/peak_tflops": min(peaks)} if len(peaks) == len(names) else {})


class LmHeadWatch:
    """Asks the ranks of `policies` after each step, until their self-checks are over."""

    def __init__(
        self, policies: Sequence[ActorProxy | ReferenceProxy], show_note: Callable[[str], None]
    ) -> None:
        """Make a watch over the LM heads of `policies`; `show_note` shows a line to the person who
        watches.
        """
        self._policies = policies
        self._show_note = show_note
        self._shown_lines: set[str] = set()
        self._num_fallbacks = 0
        self._is_finished = False

    def collect_metrics(self) -> dict[str, float]:
        """Ask the ranks which LM-head backend they use, until all their self-checks are over, and
        show each new answer as a note. Return the number of fallbacks as a metric. Call it after a
        step's update.
        """
        if not self._is_finished:
            calls = {policy.role: policy.head_report() for policy in self._policies}
            reports = {
                role: [found for found in call.result() if found is not None]
                for role, call in calls.items()
            }
            self._num_fallbacks = sum(
                len(report.notices) for of_role in reports.values() for report in of_role
            )
            self._is_finished = not any(
                report.num_checks_left for of_role in reports.values() for report in of_role
            )
            for role, of_role in reports.items():
                lines = [f"head of the {role}: {report.choice}" for report in of_role]
                lines += [
                    f"[{report.rank_name}] {notice}"
                    for report in of_role
                    for notice in report.notices
                ]
                for text in dict.fromkeys(lines):  # ranks that chose alike are one line
                    if text not in self._shown_lines:
                        self._show_note(text)
                self._shown_lines.update(lines)
        return {"perf/num_head_fallbacks": float(self._num_fallbacks)}
