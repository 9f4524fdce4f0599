"""Durations of a run that nobody has measured: its planned products and bytes, at shares of what makers of GPUs state.

These shares, lengths and what is left out are told as assumed. The figures compare schedules and splits; measured ones
are to take their place (`--write FILE`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.errors import ConfigError
from rlhf_megatron.config.rules.experts import num_experts
from rlhf_megatron.config.rules.run import actor_ranks, critic_ranks, has_critic
from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.table import Rule
from rlhf_megatron.observe.metrics.rates import FORWARD, TRAINING, model_flops, peak_tflops
from rlhf_megatron.parallel.layout import Layout, layout_of
from rlhf_megatron.proof.plan.gpus import GB, GPUS, EngineMemory, engine_memory
from rlhf_megatron.resharding.manifest import DTYPE_BYTES
from rlhf_megatron.resharding.network import NETWORKS, Engines, Network, cost_of
from rlhf_megatron.resharding.quantised import engine_table
from rlhf_megatron.resharding.shards import EngineLayout, stage_links
from rlhf_megatron.simulator.durations import (
    ARGUMENTS,
    DecodeConfig,
    Durations,
    EngineDurations,
    LengthsConfig,
    SyncDurations,
    TrainerDurations,
)
from rlhf_megatron.simulator.plan import num_engines
from rlhf_megatron.workers.activations import Sizes, Trained, state_bytes

COMPUTE, MEMORY = 0.4, 0.7  # shares of the makers' FLOP/s and bytes/s
_HOST_BYTES_S = 25e9  # between a GPU and its machine, a direction
_MOST_SLOTS = 1024
_SIGMA = 0.8


@dataclass(frozen=True)
class Sample:
    """Holds the tokens of a sample of median length."""

    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.response


def planned_durations(config: RunConfig, gpu: str, median: int | None) -> Durations:
    """Plans them for a run on GPUs of that name (`proof.plan.gpus`). `median`: of the responses' lengths; None: a
    quarter of `data.max_response_length`. Raises ConfigError, ValueError."""
    if config.rollout.engine != "sglang":
        raise ConfigError(
            [f"--gpu ({gpu}) plans engines of sglang; rollout.engine is {config.rollout.engine}."], ARGUMENTS
        )
    hf_config = read_hf_config(Path(config.model.path))
    network = next(found for name, found in NETWORKS.items() if name.partition("-")[0] == gpu.partition("-")[0])
    tflops = peak_tflops(gpu.partition("-")[0].upper())
    assert tflops is not None, f"{gpu} has no FLOP/s"
    speed = COMPUTE * tflops * 1e12
    sample = Sample(max(1, config.data.max_prompt_length // 2), median or max(1, config.data.max_response_length // 4))
    layout, dtype = layout_of(config.actor.megatron, actor_ranks(config)), config.rollout.dtype or config.model.dtype
    table = engine_table(table_for(hf_config, layout.tp), dtype, config.rollout.quantization)
    engine = EngineLayout.of(config.rollout)
    arguments = config.rollout.sglang.args
    memory = engine_memory(table, hf_config, dtype, config.rollout, GPUS[gpu] * GB)
    slots = int(arguments.get("max_running_requests") or max(1, min(_MOST_SLOTS, memory.num_tokens // sample.tokens)))
    decoded = _Decoded(hf_config, table, dtype, memory, engine)
    forward_s = _flops(hf_config, sample.tokens, FORWARD) / (speed * engine.tp)
    engines = Engines(engine, num_engines(config.rollout), config.rollout.colocated)
    of_critic = (config.critic.path, critic_ranks(config)) if has_critic(config) else None
    stages = stage_links(table, layout, engine, dtype)
    return Durations(
        lengths=LengthsConfig("lognormal", median=sample.response, sigma=_SIGMA),
        prompts=LengthsConfig("constant", median=sample.prompt),
        engine=EngineDurations(
            DecodeConfig(points=_decode(decoded, network, forward_s, sample, slots)),
            prefill_tokens_per_s=1 / forward_s,
            slots=slots,
        ),
        trainer=_trainer(config.actor, of_critic, hf_config, layout, sample.tokens, speed),
        sync=SyncDurations(
            seconds=cost_of(stages, layout, engines, network).floor().seconds,
            turns_s=(
                _turns_s(config.actor.megatron, config.model.dtype, hf_config, layout)
                if config.rollout.colocated
                else None
            ),
        ),
        source=f"planned for {gpu}, not measured",
        assumed=(
            f"products at {COMPUTE:.0%} and memory at {MEMORY:.0%} of what the maker says, the network at all of it",
            f"responses lognormal, median {sample.response} (--median), sigma {_SIGMA}; prompts {sample.prompt} tokens",
            "rewards, kernel launches and collectives of an engine take no time",
        ),
    )


def _flops(hf_config: Mapping[str, Any], tokens: int, passes: int, head_size: int | None = None) -> float:
    """Returns those of a token in a sample of so many."""
    found = model_flops(hf_config, torch.tensor([tokens]), tokens, passes, head_size)
    if found is None:
        raise ValueError(f"products of model_type {hf_config.get('model_type')!r} are not known; give --durations.")
    return found / tokens


def _decode(
    decoded: _Decoded, network: Network, forward_s: float, sample: Sample, slots: int
) -> tuple[tuple[int, float], ...]:
    """Returns (responses, seconds a token): a GPU reads weights and cache, or computes where that takes longer."""
    bytes_s = MEMORY * 2 * network.memory  # reading alone
    context = sample.prompt + sample.response // 2
    counts = [*(1 << n for n in range(slots.bit_length()) if 1 << n < slots), slots]
    return tuple((n, max(decoded.num_bytes(n, context) / bytes_s, n * forward_s)) for n in counts)


@dataclass(frozen=True)
class _Decoded:
    """Tells what an engine reads of a model."""

    hf_config: Mapping[str, Any]
    table: tuple[Rule, ...]
    dtype: str
    memory: EngineMemory
    engine: EngineLayout

    def num_bytes(self, count: int, context: int) -> float:
        """Returns what one GPU reads for a token of each of `count` responses: of experts those met, drawn evenly."""
        experts = self._experts / self.engine.tp
        chosen = int(self.hf_config.get("num_experts_per_tok") or 0) / max(1, num_experts(self.hf_config))
        met = 1 - (1 - chosen) ** count
        return self.memory.weights - experts * (1 - met) + count * context * self.memory.token_bytes

    @cached_property
    def _experts(self) -> int:
        rules = (rule for rule in self.table if rule.expert is not None)
        return sum(prod(hf.shape) * DTYPE_BYTES[rule.type_of(hf, self.dtype)] for rule in rules for hf in rule.hf)


def _trainer(
    actor: ActorConfig,
    critic: tuple[str | None, int] | None,
    hf_config: Mapping[str, Any],
    layout: Layout,
    tokens: int,
    speed: float,
) -> TrainerDurations:
    """All ranks compute, but for the bubble of a mini-batch; what is computed again is a further forward pass.
    `critic`: its path and own ranks."""
    micro_batches = max(1, actor.mini_batch_size * tokens // (layout.dp * layout.cp * actor.ppo_max_token_len_per_gpu))
    busy = micro_batches * layout.vpp / (micro_batches * layout.vpp + layout.pp - 1)
    again = actor.megatron.recompute_granularity == "full"
    forward = layout.world_size * speed / _flops(hf_config, tokens, FORWARD)
    found = TrainerDurations(
        update_tokens_per_s=busy * forward / (TRAINING + again),
        annotate_tokens_per_s=busy * forward,
        reference_tokens_per_s=busy * forward,
    )
    if critic is None:
        return found
    path, num_ranks = critic
    of_critic = read_hf_config(Path(path)) if path else hf_config
    ranks = num_ranks or layout.world_size
    forward = busy * ranks * speed / _flops(of_critic, tokens, FORWARD, head_size=1)
    return replace(found, critic_tokens_per_s=forward, critic_update_tokens_per_s=forward / TRAINING)


def _turns_s(megatron: MegatronConfig, dtype: str, hf_config: Mapping[str, Any], layout: Layout) -> float:
    """The trainer's states go to the machine's memory and come back; engines' weights come by the sync."""
    model = Trained(hf_config, getattr(torch, dtype), 1)
    sizes = Sizes.of(model)
    states = max(state_bytes(model, megatron, layout, stage, sizes) for stage in range(layout.pp))
    return 2 * states / _HOST_BYTES_S
