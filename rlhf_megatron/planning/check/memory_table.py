"""The bytes that the run's own layout needs, those of the weight sync included, as rows for
people and scripts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.config.rules.run_rules import (
    count_actor_ranks,
    count_critic_ranks,
    count_reference_ranks,
    count_reward_model_ranks,
    has_critic,
    has_reward_model,
    needs_reference,
)
from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, RunConfig
from rlhf_megatron.ranks.kernels.head_memory import (
    HeadCallShape,
    HeadMemoryBound,
    compute_head_memory_bound,
)
from rlhf_megatron.ranks.workers.head_backend import get_stash_bytes
from rlhf_megatron.ranks.workers.memory_plan import StageMemory, plan_layout_memory
from rlhf_megatron.ranks.workers.peak_memory import (
    TrainedModelSpec,
    estimate_stage_activation_bytes,
)
from rlhf_megatron.rollout.fleet.engine_setup import MIB, EngineSetup
from rlhf_megatron.weights.bucket_plan import StageTraffic, compute_stage_traffic
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.families.model_family import pad_vocab_size
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from rlhf_megatron.weights.weight_table import LayerImpl

NOT_INCLUDED_NOTE = (
    "Not included: temporary tensors of other kernels and of collectives, the runtime of the"
    " device, engines."
)
DEFAULT_GPU_BYTES = 80 * 10**9  # for what a configuration leaves to us: a common GPU's memory
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
HEADER = (
    *("model", "stage", "ranks", "parameters", "gradients", "main parameters", "moments"),
    *("a rank", "activations", "head", "peak", "reference", "weight sync"),
)


@dataclass(frozen=True)
class RunMemory:
    """Exact bytes of the run's own layout."""

    stages: tuple[StageMemory, ...]  # of the actor
    critic_stages: tuple[StageMemory, ...]  # empty: the run has none
    has_critic_pool: bool  # else the critic is on the actor's ranks, stage by stage
    # of the frozen reference model, by stage, bytes a rank; empty: the run has none
    reference_bytes: tuple[int, ...]
    is_reference_on_host: bool  # it is on the device during its forward pass only
    sync_traffic: tuple[StageTraffic, ...]  # of the weight sync, by stage: the sender of each
    # of the actor's last stage in an update; None: the reference backend makes all logits
    head_memory: HeadMemoryBound | None
    # that a rank's layers keep in an update, by stage of the actor
    activation_bytes: tuple[int, ...]
    critic_activation_bytes: tuple[int, ...]
    # of a reward model on the actor's ranks, or its own; by stage, bytes a rank
    reward_model_bytes: tuple[int, ...] = ()
    # on the actor's ranks, and on the device between its passes
    has_reward_model_on_actor_ranks: bool = False
    # of a reference on ranks of its own, by stage, bytes a rank
    reference_pool_bytes: tuple[int, ...] = ()
    # of the actor's ranks; it is on the device during its forward pass only
    is_reward_model_on_host: bool = False

    def compute_peak_bytes(self, stage: int) -> int:
        """Return the bytes of a rank of this stage of the actor in an update: the states of all its
        models, and what the update needs beside them.
        """
        has_critic = bool(self.critic_stages) and not self.has_critic_pool
        states = max(self.stages[stage].totals) + (
            max(self.critic_stages[stage].totals) if has_critic else 0
        )
        states += (
            self.reference_bytes[stage]
            if self.reference_bytes and not self.is_reference_on_host
            else 0
        )
        states += self.reward_model_bytes[stage] if self.has_reward_model_on_actor_ranks else 0
        of_head = (
            self.head_memory.peak_bytes
            if self.head_memory is not None and stage == len(self.stages) - 1
            else 0
        )
        return states + max(
            self.activation_bytes[stage] + of_head,
            self.critic_activation_bytes[stage] if has_critic else 0,
        )

    @property
    def total_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer on all ranks together."""
        return sum(
            sum(s.totals) * (s.num_ranks // len(s.totals))
            for s in (*self.stages, *self.critic_stages)
        )


def plan_run_memory(
    config: RunConfig, hf_config: Mapping[str, Any], critic_hf_config: Mapping[str, Any]
) -> RunMemory:
    """Plan the memory of all models of a run. `hf_config`: config.json of model.path;
    `critic_hf_config`: of critic.path.

    A reference that cannot be read is assumed to be like the policy. Raise ValueError for a model
    or layout that is not supported.
    """
    megatron = config.actor.megatron
    dtype = getattr(torch, config.model.dtype)
    stages = plan_layout_memory(hf_config, megatron, count_actor_ranks(config), dtype)
    critic: tuple[StageMemory, ...] = ()
    if has_critic(config):
        critic_megatron, num_critic_ranks = _choose_layout_and_ranks(
            config.critic.megatron, count_critic_ranks(config), megatron, count_actor_ranks(config)
        )
        critic = plan_layout_memory(
            critic_hf_config, critic_megatron, num_critic_ranks, dtype, "value"
        )
    reference: tuple[int, ...] = ()
    if needs_reference(config):
        path = config.reference.path
        has_config = path is not None and (Path(path) / "config.json").is_file()
        reference_megatron, num_reference_ranks = _choose_layout_and_ranks(
            config.reference.megatron,
            count_reference_ranks(config),
            megatron,
            count_actor_ranks(config),
        )
        other = (
            plan_layout_memory(
                read_hf_config(Path(path)), reference_megatron, num_reference_ranks, dtype
            )
            if has_config and path
            else stages
        )
        reference = tuple(stage.reference for stage in other)
    # Virtual stages change which layers a stage sends, not how many of what size in which order.
    engine_dtype = EngineSetup.from_config(config).dtype
    table = make_weight_table(hf_config, megatron.tensor_model_parallel_size)
    traffic = compute_stage_traffic(
        make_engine_table(table, engine_dtype, config.rollout.quantization),
        make_parallel_layout(megatron, count_actor_ranks(config)),
        engine_dtype,
        config.rollout.update_weights_bucket_megabytes * MIB,
    )
    head = estimate_actor_head_memory(
        config.actor, hf_config, dtype, config.trainer.device == "cpu"
    )
    has_critic_pool = count_critic_ranks(config) > 0
    is_on_host = config.reference.param_offload
    model = TrainedModelSpec(hf_config, dtype, config.actor.ppo_max_token_len_per_gpu)
    activations = _estimate_activations_by_stage(model, megatron, count_actor_ranks(config))
    critic_activations: tuple[int, ...] = ()
    if critic:
        tokens = config.critic.ppo_max_token_len_per_gpu or config.actor.ppo_max_token_len_per_gpu
        critic_activations = _estimate_activations_by_stage(
            TrainedModelSpec(critic_hf_config, dtype, tokens, "value"),
            critic_megatron,
            num_critic_ranks,
        )
    judge: tuple[int, ...] = ()
    is_here = is_away = False
    if has_reward_model(config):
        chosen = config.reward_model
        num_ranks = count_reward_model_ranks(config)
        judge_megatron, num_judge_ranks = _choose_layout_and_ranks(
            chosen.megatron, num_ranks, megatron, count_actor_ranks(config)
        )
        judge = _estimate_reward_model_bytes(chosen.path, judge_megatron, num_judge_ranks, dtype)
        is_of_actor = bool(judge) and not num_ranks
        is_here = is_of_actor and not chosen.param_offload
        is_away = is_of_actor and chosen.param_offload
    has_pool = count_reference_ranks(config) > 0
    return RunMemory(
        stages=stages,
        critic_stages=critic,
        has_critic_pool=has_critic_pool,
        reference_bytes=() if has_pool else reference,
        is_reference_on_host=is_on_host,
        sync_traffic=traffic,
        head_memory=head,
        activation_bytes=activations,
        critic_activation_bytes=critic_activations,
        reward_model_bytes=judge,
        has_reward_model_on_actor_ranks=is_here,
        reference_pool_bytes=reference if has_pool else (),
        is_reward_model_on_host=is_away,
    )


def _choose_layout_and_ranks(
    model_layout: MegatronConfig, num_ranks: int, actor_layout: MegatronConfig, num_actor_ranks: int
) -> tuple[MegatronConfig, int]:
    """Return (layout, number of ranks) of a model: its own where it has ranks, else the actor's."""
    return (model_layout, num_ranks) if num_ranks else (actor_layout, num_actor_ranks)


def _estimate_reward_model_bytes(
    model_path: str | None, megatron: MegatronConfig, num_ranks: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Return the reward model's bytes a rank, by stage; () where its config.json cannot be read."""
    if model_path is None or not (Path(model_path) / "config.json").is_file():
        return ()
    stages = plan_layout_memory(
        read_hf_config(Path(model_path)), megatron, num_ranks, dtype, "value"
    )
    return tuple(stage.reference for stage in stages)


def _estimate_activations_by_stage(
    model: TrainedModelSpec, megatron: MegatronConfig, num_ranks: int
) -> tuple[int, ...]:
    """Return the bytes of activations of a rank in an update, by stage."""
    impl: LayerImpl = (
        "transformer_engine" if megatron.transformer_impl == "transformer_engine" else "local"
    )
    layout = make_parallel_layout(megatron, num_ranks)
    return tuple(
        estimate_stage_activation_bytes(model, megatron, layout, impl, stage)
        for stage in range(layout.pp)
    )


def estimate_actor_head_memory(
    actor: ActorConfig, hf_config: Mapping[str, Any], dtype: torch.dtype, is_cpu: bool
) -> HeadMemoryBound | None:
    """Return the LM head's memory for a micro-batch that fills the token budget with response
    tokens; None for the reference backend, which has no bound.
    """
    tp = actor.megatron.tensor_model_parallel_size
    backend = actor.kernels.backend
    if backend == "reference":
        return None
    if backend == "auto":
        backend = "chunked" if is_cpu else "triton"
    tokens = actor.ppo_max_token_len_per_gpu
    vocab_size = int(hf_config["vocab_size"])
    return compute_head_memory_bound(
        HeadCallShape(
            num_tokens=tokens,
            num_rows=tokens,
            hidden_size=int(hf_config["hidden_size"]),
            num_columns=min(vocab_size, pad_vocab_size(vocab_size, tp) // tp),
            chunk_size=actor.log_prob_chunk_size,
            dtype=dtype,
            device_type="cpu" if is_cpu else "cuda",
            num_sequence_parts=tp if actor.megatron.sequence_parallel else 1,
            stash_bytes=get_stash_bytes(actor.kernels, dtype),
            backend=backend,
        )
    )


def make_memory_rows(memory: RunMemory) -> list[Sequence[str]]:
    """Return one table row for each model and stage, under HEADER. Optimizer shards of several
    sizes are shown as a range.
    """
    found: list[Sequence[str]] = []
    unit = _choose_unit(memory)
    for index, (stage, traffic) in enumerate(zip(memory.stages, memory.sync_traffic, strict=True)):
        reference = (
            _format_bytes(memory.reference_bytes[index], unit) if memory.reference_bytes else "-"
        )
        is_last = index == len(memory.stages) - 1
        head = (
            _format_bytes(memory.head_memory.peak_bytes, unit)
            if memory.head_memory is not None and is_last
            else "-"
        )
        peak = _format_bytes(memory.compute_peak_bytes(index), unit)
        activations = _format_bytes(memory.activation_bytes[index], unit)
        cells = (activations, head, peak, reference, _format_bytes(traffic.peak_buffer_bytes, unit))
        found.append((*_make_stage_cells("actor", stage, unit), *cells))
    for stage, kept in zip(memory.critic_stages, memory.critic_activation_bytes, strict=True):
        peak = _format_bytes(max(stage.totals) + kept, unit) if memory.has_critic_pool else "-"
        found.append(
            (
                *_make_stage_cells("critic", stage, unit),
                _format_bytes(kept, unit),
                "-",
                peak,
                "-",
                "-",
            )
        )
    return found


def _make_stage_cells(model_name: str, stage: StageMemory, unit: str) -> Sequence[str]:
    """Return the first cells of a row: model, stage, ranks and bytes of the states."""
    main, moments, total = (
        _format_byte_range(column, unit)
        for column in (stage.main_parameters, stage.moments, stage.totals)
    )
    fixed = (
        str(stage.stage),
        str(stage.num_ranks),
        _format_bytes(stage.parameters, unit),
        _format_bytes(stage.gradients, unit),
    )
    return (model_name, *fixed, main, moments, total)


def make_memory_notes(memory: RunMemory) -> list[str]:
    """Return sentences that explain the columns of the table."""
    unit = _choose_unit(memory)
    lines = [
        f"{unit} on each rank of a pipeline stage. `a rank`: parameters, gradients, main"
        " parameters and moments."
    ]
    if any(stage.is_optimizer_on_host for stage in (*memory.stages, *memory.critic_stages)):
        lines.append(
            "Main parameters and moments under optimizer_cpu_offload are in host memory, not"
            " in `a rank`."
        )
    every = [
        f"{_format_byte_range(totals, unit)} {unit} {where}"
        for where, totals in _list_rank_totals(memory)
    ]
    ranks = sum(
        stage.num_ranks
        for stage in (*memory.stages, *(memory.critic_stages if memory.has_critic_pool else ()))
    )
    lines.append(
        f"{'; '.join(every)}; {_format_bytes(memory.total_bytes, unit)} {unit} on {ranks} ranks."
    )
    lines.append(
        "`activations`: what layers keep in an update of micro-batches of"
        " ppo_max_token_len_per_gpu tokens, with flash attention; `peak`: of an update, all of a"
        " rank's models together."
    )
    lines.append(
        "`weight sync`: the largest buffers of the one rank of a stage that sends, two of them in"
        " shared memory."
    )
    if memory.head_memory is not None:
        parts = [
            _format_bytes(part, unit)
            for part in (
                memory.head_memory.tile_bytes,
                memory.head_memory.hidden_gradient_bytes,
                memory.head_memory.stash_bytes,
            )
        ]
        lines.append(
            "`head`: the most that the last stage needs for log-probs in an update, on a"
            f" micro-batch of actor.ppo_max_token_len_per_gpu response tokens: tile {parts[0]},"
            f" gradient of hidden states {parts[1]}, stash {parts[2]}, and rows; beside `a rank`."
        )
    if memory.reference_bytes:
        where = (
            "in host memory, and on the device while it is used"
            if memory.is_reference_on_host
            else "on the device"
        )
        lines.append(f"`reference`: the frozen reference model, {where}; beside `a rank`.")
    for name, num_bytes in (
        ("reward model", memory.reward_model_bytes),
        ("reference", memory.reference_pool_bytes),
    ):
        if num_bytes:
            sizes = _format_byte_range(num_bytes, unit)
            lines.append(
                f"The {name}'s parameters: {sizes} {unit} on each of its ranks; beside `a rank`."
            )
    return [*lines, NOT_INCLUDED_NOTE]


def _list_rank_totals(memory: RunMemory) -> list[tuple[str, list[int]]]:
    """Return (which ranks, bytes on each kind of these ranks), all models of a rank together."""
    actor = [total for stage in memory.stages for total in stage.totals]
    critic = [total for stage in memory.critic_stages for total in stage.totals]
    if not critic:
        return [("a rank", actor)]
    if memory.has_critic_pool:
        return [("a rank of the actor", actor), ("a rank of the critic", critic)]
    return [
        ("a rank, actor and critic together", [a + c for a, c in zip(actor, critic, strict=True)])
    ]


def _choose_unit(memory: RunMemory) -> str:
    """Return "GiB" where a rank has at least one GiB, else "MiB"."""
    return "GiB" if max(max(stage.totals) for stage in memory.stages) >= UNITS["GiB"] else "MiB"


def _format_bytes(num_bytes: int, unit: str) -> str:
    """Return the bytes as a number in this unit."""
    return f"{num_bytes / UNITS[unit]:.3f}"


def _format_byte_range(values: Sequence[int], unit: str) -> str:
    """Return the smallest and the largest value as "low to high", or one number where they are
    equal.
    """
    low = _format_bytes(min(values), unit)
    high = _format_bytes(max(values), unit)
    return low if low == high else f"{low} to {high}"
