"""Durations of a run that nobody has measured: its planned products and bytes, at shares of what
makers of GPUs state.

These shares, lengths and what is left out are told as assumed. The figures compare schedules and
splits; measured ones are to take their place (`--write FILE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.expert_rules import read_num_experts
from rlhf_megatron.config.rules.run_rules import count_actor_ranks, count_critic_ranks, has_critic
from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, RunConfig
from rlhf_megatron.controller.observe.metrics.performance_metrics import (
    FORWARD_PASSES,
    TRAINING_PASSES,
    count_model_flops,
    find_peak_tflops,
)
from rlhf_megatron.planning.network_cost import (
    NETWORKS,
    EngineGroup,
    NetworkBandwidths,
    compute_sync_cost,
)
from rlhf_megatron.planning.plan.gpu_memory import (
    GB,
    GPU_MEMORY_GB,
    EngineGpuMemory,
    plan_engine_memory,
)
from rlhf_megatron.planning.simulator.durations import (
    ARGUMENTS_SUBJECT,
    DecodeConfig,
    EngineDurations,
    LengthsConfig,
    RunDurations,
    SyncDurations,
    TrainerDurations,
)
from rlhf_megatron.planning.simulator.simulation_plan import count_rollout_engines
from rlhf_megatron.ranks.workers.peak_memory import (
    ModelElementCounts,
    TrainedModelSpec,
    estimate_state_bytes,
)
from rlhf_megatron.weights.bucket_manifest import DTYPE_BYTES
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from rlhf_megatron.weights.shard_plan import EngineLayout, compute_stage_link_bytes
from rlhf_megatron.weights.weight_table import WeightRule

# shares of the makers' FLOP/s and bytes/s
COMPUTE_SHARE = 0.4
MEMORY_SHARE = 0.7
_HOST_BYTES_PER_S = 25e9  # between a GPU and its machine, a direction
_MAX_SLOTS = 1024
_LENGTH_SIGMA = 0.8


@dataclass(frozen=True)
class MedianSample:
    """Holds the tokens of a sample of median length."""

    num_prompt_tokens: int
    num_response_tokens: int

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and response together."""
        return self.num_prompt_tokens + self.num_response_tokens


def plan_durations(config: RunConfig, gpu_name: str, median_length: int | None) -> RunDurations:
    """Return planned durations for a run on GPUs of this name (`planning.plan.gpu_memory`).
    `median_length`: the median tokens of responses; None: a quarter of `data.max_response_length`.

    Raise ConfigError where the engine is not sglang, and ValueError for a model whose FLOPs are not
    known.
    """
    if config.rollout.engine != "sglang":
        raise ConfigError(
            [
                f"--gpu ({gpu_name}) plans engines of sglang; rollout.engine"
                f" is {config.rollout.engine}."
            ],
            ARGUMENTS_SUBJECT,
        )
    hf_config = read_hf_config(Path(config.model.path))
    network = next(
        found
        for name, found in NETWORKS.items()
        if name.partition("-")[0] == gpu_name.partition("-")[0]
    )
    tflops = find_peak_tflops(gpu_name.partition("-")[0].upper())
    assert tflops is not None, f"{gpu_name} has no FLOP/s"
    speed = COMPUTE_SHARE * tflops * 1e12
    sample = MedianSample(
        max(1, config.data.max_prompt_length // 2),
        median_length or max(1, config.data.max_response_length // 4),
    )
    layout = make_parallel_layout(config.actor.megatron, count_actor_ranks(config))
    dtype = config.rollout.dtype or config.model.dtype
    table = make_engine_table(
        make_weight_table(hf_config, layout.tp), dtype, config.rollout.quantization
    )
    engine = EngineLayout.from_rollout_config(config.rollout)
    arguments = config.rollout.sglang.args
    memory = plan_engine_memory(
        table, hf_config, dtype, config.rollout, GPU_MEMORY_GB[gpu_name] * GB
    )
    slots = int(
        arguments.get("max_running_requests")
        or max(1, min(_MAX_SLOTS, memory.num_cache_tokens // sample.num_tokens))
    )
    decoded = _DecodedModel(hf_config, table, dtype, memory, engine)
    forward_s = _count_token_flops(hf_config, sample.num_tokens, FORWARD_PASSES) / (
        speed * engine.tp
    )
    engines = EngineGroup(engine, count_rollout_engines(config.rollout), config.rollout.colocated)
    of_critic = (config.critic.path, count_critic_ranks(config)) if has_critic(config) else None
    stages = compute_stage_link_bytes(table, layout, engine, dtype)
    return RunDurations(
        lengths=LengthsConfig("lognormal", median=sample.num_response_tokens, sigma=_LENGTH_SIGMA),
        prompts=LengthsConfig("constant", median=sample.num_prompt_tokens),
        engine=EngineDurations(
            DecodeConfig(points=_plan_decode_points(decoded, network, forward_s, sample, slots)),
            prefill_tokens_per_s=1 / forward_s,
            slots=slots,
        ),
        trainer=_plan_trainer_durations(
            config.actor, of_critic, hf_config, layout, sample.num_tokens, speed
        ),
        sync=SyncDurations(
            seconds=compute_sync_cost(stages, layout, engines, network)
            .find_slowest_endpoint()
            .seconds,
            turns_s=(
                _plan_turn_seconds(config.actor.megatron, config.model.dtype, hf_config, layout)
                if config.rollout.colocated
                else None
            ),
        ),
        source=f"planned for {gpu_name}, not measured",
        assumed=(
            (
                f"products at {COMPUTE_SHARE:.0%} and memory at {MEMORY_SHARE:.0%} of what the"
                " maker says, the network at all of it"
            ),
            (
                f"responses lognormal, median {sample.num_response_tokens} (--median), sigma"
                f" {_LENGTH_SIGMA}; prompts {sample.num_prompt_tokens} tokens"
            ),
            "rewards, kernel launches and collectives of an engine take no time",
        ),
    )


def _count_token_flops(
    hf_config: Mapping[str, Any],
    num_tokens: int,
    num_forward_passes: int,
    head_size: int | None = None,
) -> float:
    """Return the FLOPs of one token in a sample of `num_tokens` tokens. Raise ValueError for an
    unknown model.
    """
    found = count_model_flops(
        hf_config, torch.tensor([num_tokens]), num_tokens, num_forward_passes, head_size
    )
    if found is None:
        raise ValueError(
            f"products of model_type {hf_config.get('model_type')!r} are not known;"
            " give --durations."
        )
    return found / num_tokens


def _plan_decode_points(
    decoded_model: _DecodedModel,
    network: NetworkBandwidths,
    forward_s_per_token: float,
    sample: MedianSample,
    num_slots: int,
) -> tuple[tuple[int, float], ...]:
    """Return (responses, seconds a token) at growing numbers of responses: a GPU reads weights and
    cache, or computes where that takes longer.
    """
    bytes_s = MEMORY_SHARE * 2 * network.memory_bytes_per_s  # reading alone
    context = sample.num_prompt_tokens + sample.num_response_tokens // 2
    counts = [*(1 << n for n in range(num_slots.bit_length()) if 1 << n < num_slots), num_slots]
    return tuple(
        (n, max(decoded_model.count_bytes_read(n, context) / bytes_s, n * forward_s_per_token))
        for n in counts
    )


@dataclass(frozen=True)
class _DecodedModel:
    """Tells what an engine reads of a model."""

    hf_config: Mapping[str, Any]
    table: tuple[WeightRule, ...]
    dtype: str
    memory: EngineGpuMemory
    engine: EngineLayout

    def count_bytes_read(self, num_responses: int, num_context_tokens: int) -> float:
        """Return the bytes that one GPU reads for a token of each of `num_responses` responses; of
        experts only those that tokens meet, which are drawn evenly.
        """
        experts = self._expert_bytes / self.engine.tp
        chosen = int(self.hf_config.get("num_experts_per_tok") or 0) / max(
            1, read_num_experts(self.hf_config)
        )
        met = 1 - (1 - chosen) ** num_responses
        return (
            self.memory.weight_bytes
            - experts * (1 - met)
            + num_responses * num_context_tokens * self.memory.bytes_per_token
        )

    @cached_property
    def _expert_bytes(self) -> int:
        """Return the bytes of all experts."""
        rules = (rule for rule in self.table if rule.expert is not None)
        return sum(
            prod(hf.shape) * DTYPE_BYTES[rule.get_sent_dtype(hf, self.dtype)]
            for rule in rules
            for hf in rule.hf_tensors
        )


def _plan_trainer_durations(
    actor: ActorConfig,
    critic_path_and_ranks: tuple[str | None, int] | None,
    hf_config: Mapping[str, Any],
    layout: ParallelLayout,
    num_tokens: int,
    flops_per_s: float,
) -> TrainerDurations:
    """Return the rates of the trainer: all ranks compute, except in the bubble of a mini-batch, and
    full recomputation costs a further forward pass. `critic_path_and_ranks`: the critic's path and
    number of own ranks; None: no critic.
    """
    micro_batches = max(
        1,
        actor.mini_batch_size
        * num_tokens
        // (layout.dp * layout.cp * actor.ppo_max_token_len_per_gpu),
    )
    busy = micro_batches * layout.vpp / (micro_batches * layout.vpp + layout.pp - 1)
    again = actor.megatron.recompute_granularity == "full"
    forward = (
        layout.world_size * flops_per_s / _count_token_flops(hf_config, num_tokens, FORWARD_PASSES)
    )
    found = TrainerDurations(
        update_tokens_per_s=busy * forward / (TRAINING_PASSES + again),
        annotate_tokens_per_s=busy * forward,
        reference_tokens_per_s=busy * forward,
    )
    if critic_path_and_ranks is None:
        return found
    path, num_ranks = critic_path_and_ranks
    of_critic = read_hf_config(Path(path)) if path else hf_config
    ranks = num_ranks or layout.world_size
    forward = (
        busy
        * ranks
        * flops_per_s
        / _count_token_flops(of_critic, num_tokens, FORWARD_PASSES, head_size=1)
    )
    return replace(
        found, critic_tokens_per_s=forward, critic_update_tokens_per_s=forward / TRAINING_PASSES
    )


def _plan_turn_seconds(
    megatron: MegatronConfig, dtype: str, hf_config: Mapping[str, Any], layout: ParallelLayout
) -> float:
    """Return the seconds in which the trainer's states go to the machine's memory and come back;
    the engines' weights come by the sync.
    """
    model = TrainedModelSpec(hf_config, getattr(torch, dtype), 1)
    sizes = ModelElementCounts.from_model(model)
    states = max(
        estimate_state_bytes(model, megatron, layout, stage, sizes) for stage in range(layout.pp)
    )
    return 2 * states / _HOST_BYTES_PER_S
