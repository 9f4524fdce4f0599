"""The bytes that the run's own layout needs, those of the weight sync included, as rows for people and scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.rules.run import (
    actor_ranks,
    critic_ranks,
    has_critic,
    has_reward_model,
    needs_reference,
    reference_ranks,
    reward_model_ranks,
)
from rlhf_megatron.config.schema import ActorConfig, MegatronConfig, RunConfig
from rlhf_megatron.kernels.head_memory import HeadMemory, HeadShape, head_memory
from rlhf_megatron.models.families.base import padded_vocab_size, table_for
from rlhf_megatron.models.table import Impl
from rlhf_megatron.parallel.layout import layout_of
from rlhf_megatron.resharding.plan import StageTraffic, stage_traffic
from rlhf_megatron.resharding.quantised import engine_table
from rlhf_megatron.rollout.fleet.start import MIB, EngineSetup
from rlhf_megatron.workers.activations import Trained, kept_bytes
from rlhf_megatron.workers.head_backend import stash_bytes_of
from rlhf_megatron.workers.memory_plan import StageMemory, plan_memory

NOT_INCLUDED = (
    "Not included: temporary tensors of other kernels and of collectives, the runtime of the device, engines."
)
GPU_BYTES = 80 * 10**9  # for what a configuration leaves to us: a common GPU's memory
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
HEADER = (
    *("model", "stage", "ranks", "parameters", "gradients", "main parameters", "moments"),
    *("a rank", "activations", "head", "peak", "reference", "weight sync"),
)


@dataclass(frozen=True)
class Memory:
    """Exact bytes of the run's own layout."""

    stages: tuple[StageMemory, ...]  # of the actor
    critic: tuple[StageMemory, ...]  # empty: the run has none
    has_critic_pool: bool  # else the critic is on the actor's ranks, stage by stage
    reference: tuple[int, ...]  # of the frozen reference model, by stage, bytes a rank; empty: the run has none
    is_reference_on_host: bool  # it is on the device during its forward pass only
    traffic: tuple[StageTraffic, ...]  # of the weight sync, by stage: the sender of each
    head: HeadMemory | None  # of the actor's last stage in an update; None: the reference backend makes all logits
    activations: tuple[int, ...]  # that a rank's layers keep in an update, by stage of the actor
    critic_activations: tuple[int, ...]
    reward_model: tuple[int, ...] = ()  # of a reward model on the actor's ranks, or its own; by stage, bytes a rank
    has_reward_model_here: bool = False  # on the actor's ranks, and on the device between its passes
    reference_pool: tuple[int, ...] = ()  # of a reference on ranks of its own, by stage, bytes a rank
    is_reward_model_on_host: bool = False  # of the actor's ranks; it is on the device during its forward pass only

    def peak(self, stage: int) -> int:
        """Bytes of an actor's rank in an update: all of its models' states, and what the update needs beside them."""
        has_critic = bool(self.critic) and not self.has_critic_pool
        states = max(self.stages[stage].totals) + (max(self.critic[stage].totals) if has_critic else 0)
        states += self.reference[stage] if self.reference and not self.is_reference_on_host else 0
        states += self.reward_model[stage] if self.has_reward_model_here else 0
        of_head = self.head.peak if self.head is not None and stage == len(self.stages) - 1 else 0
        return states + max(self.activations[stage] + of_head, self.critic_activations[stage] if has_critic else 0)

    @property
    def total(self) -> int:
        """All ranks: parameters, gradients and optimizer."""
        return sum(sum(s.totals) * (s.num_ranks // len(s.totals)) for s in (*self.stages, *self.critic))


def plan(config: RunConfig, hf_config: Mapping[str, Any], critic_config: Mapping[str, Any]) -> Memory:
    """Plan the memory of all models. `hf_config`: of model.path; `critic_config`: of critic.path.

    A reference that cannot be read is assumed to be like the policy. Raises ValueError for a model or layout that is
    not supported.
    """
    megatron, dtype = config.actor.megatron, getattr(torch, config.model.dtype)
    stages = plan_memory(hf_config, megatron, actor_ranks(config), dtype)
    critic: tuple[StageMemory, ...] = ()
    if has_critic(config):
        layout = _place(config.critic.megatron, critic_ranks(config), megatron, actor_ranks(config))
        critic = plan_memory(critic_config, *layout, dtype, "value")
    reference: tuple[int, ...] = ()
    if needs_reference(config):
        path = config.reference.path
        known = path is not None and (Path(path) / "config.json").is_file()
        where = _place(config.reference.megatron, reference_ranks(config), megatron, actor_ranks(config))
        other = plan_memory(read_hf_config(Path(path)), *where, dtype) if known and path else stages
        reference = tuple(stage.reference for stage in other)
    # Virtual stages change which layers a stage sends, not how many of what size in which order.
    engine_dtype, table = EngineSetup.of(config).dtype, table_for(hf_config, megatron.tensor_model_parallel_size)
    traffic = stage_traffic(
        engine_table(table, engine_dtype, config.rollout.quantization),
        layout_of(megatron, actor_ranks(config)),
        engine_dtype,
        config.rollout.update_weights_bucket_megabytes * MIB,
    )
    head = head_of(config.actor, hf_config, dtype, config.trainer.device == "cpu")
    has_critic_pool, is_on_host = critic_ranks(config) > 0, config.reference.param_offload
    model = Trained(hf_config, dtype, config.actor.ppo_max_token_len_per_gpu)
    activations = _activations(model, megatron, actor_ranks(config))
    of_critic: tuple[int, ...] = ()
    if critic:
        tokens = config.critic.ppo_max_token_len_per_gpu or config.actor.ppo_max_token_len_per_gpu
        of_critic = _activations(Trained(critic_config, dtype, tokens, "value"), *layout)
    judge: tuple[int, ...] = ()
    is_here = is_away = False
    if has_reward_model(config):
        chosen, num_ranks = config.reward_model, reward_model_ranks(config)
        judge = _reward_model(chosen.path, *_place(chosen.megatron, num_ranks, megatron, actor_ranks(config)), dtype)
        is_of_actor = bool(judge) and not num_ranks
        is_here, is_away = is_of_actor and not chosen.param_offload, is_of_actor and chosen.param_offload
    has_pool = reference_ranks(config) > 0
    return Memory(
        *(stages, critic, has_critic_pool, () if has_pool else reference, is_on_host, traffic, head, activations),
        *(of_critic, judge, is_here, reference if has_pool else (), is_away),
    )


def _place(own: MegatronConfig, num_ranks: int, actor: MegatronConfig, actor_ranks: int) -> tuple[MegatronConfig, int]:
    """Return the layout and the ranks of a model: its own where it has ranks, else the actor's."""
    return (own, num_ranks) if num_ranks else (actor, actor_ranks)


def _reward_model(path: str | None, megatron: MegatronConfig, num_ranks: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return its bytes a rank by stage; () where it cannot be read."""
    if path is None or not (Path(path) / "config.json").is_file():
        return ()
    stages = plan_memory(read_hf_config(Path(path)), megatron, num_ranks, dtype, "value")
    return tuple(stage.reference for stage in stages)


def _activations(model: Trained, megatron: MegatronConfig, num_ranks: int) -> tuple[int, ...]:
    impl: Impl = "transformer_engine" if megatron.transformer_impl == "transformer_engine" else "local"
    layout = layout_of(megatron, num_ranks)
    return tuple(kept_bytes(model, megatron, layout, impl, stage) for stage in range(layout.pp))


def head_of(actor: ActorConfig, hf_config: Mapping[str, Any], dtype: torch.dtype, is_cpu: bool) -> HeadMemory | None:
    """Memory of a micro-batch that fills the token budget with response tokens."""
    tp, backend = actor.megatron.tensor_model_parallel_size, actor.kernels.backend
    if backend == "reference":
        return None
    if backend == "auto":
        backend = "chunked" if is_cpu else "triton"
    tokens = actor.ppo_max_token_len_per_gpu
    vocab_size = int(hf_config["vocab_size"])
    return head_memory(
        HeadShape(
            num_tokens=tokens,
            num_rows=tokens,
            hidden_size=int(hf_config["hidden_size"]),
            num_columns=min(vocab_size, padded_vocab_size(vocab_size, tp) // tp),
            chunk_size=actor.log_prob_chunk_size,
            dtype=dtype,
            device_type="cpu" if is_cpu else "cuda",
            num_parts=tp if actor.megatron.sequence_parallel else 1,
            stash_bytes=stash_bytes_of(actor.kernels, dtype),
            backend=backend,
        )
    )


def rows(memory: Memory) -> list[Sequence[str]]:
    """Return one row a model and stage, under HEADER. Optimizer shards of several sizes are shown as a range."""
    found: list[Sequence[str]] = []
    unit = _unit(memory)
    for index, (stage, traffic) in enumerate(zip(memory.stages, memory.traffic, strict=True)):
        reference = _text(memory.reference[index], unit) if memory.reference else "-"
        is_last = index == len(memory.stages) - 1
        head = _text(memory.head.peak, unit) if memory.head is not None and is_last else "-"
        peak, activations = _text(memory.peak(index), unit), _text(memory.activations[index], unit)
        cells = (activations, head, peak, reference, _text(traffic.peak_buffer, unit))
        found.append((*_cells("actor", stage, unit), *cells))
    for stage, kept in zip(memory.critic, memory.critic_activations, strict=True):
        peak = _text(max(stage.totals) + kept, unit) if memory.has_critic_pool else "-"
        found.append((*_cells("critic", stage, unit), _text(kept, unit), "-", peak, "-", "-"))
    return found


def _cells(model: str, stage: StageMemory, unit: str) -> Sequence[str]:
    main, moments, total = (_range(column, unit) for column in (stage.main_parameters, stage.moments, stage.totals))
    fixed = (str(stage.stage), str(stage.num_ranks), _text(stage.parameters, unit), _text(stage.gradients, unit))
    return (model, *fixed, main, moments, total)


def notes(memory: Memory) -> list[str]:
    """Explain the columns."""
    unit = _unit(memory)
    lines = [f"{unit} on each rank of a pipeline stage. `a rank`: parameters, gradients, main parameters and moments."]
    if any(stage.is_optimizer_on_host for stage in (*memory.stages, *memory.critic)):
        lines.append("Main parameters and moments under optimizer_cpu_offload are in host memory, not in `a rank`.")
    every = [f"{_range(totals, unit)} {unit} {where}" for where, totals in _by_rank(memory)]
    ranks = sum(stage.num_ranks for stage in (*memory.stages, *(memory.critic if memory.has_critic_pool else ())))
    lines.append(f"{'; '.join(every)}; {_text(memory.total, unit)} {unit} on {ranks} ranks.")
    lines.append(
        "`activations`: what layers keep in an update of micro-batches of ppo_max_token_len_per_gpu tokens, with flash"
        " attention; `peak`: of an update, all of a rank's models together."
    )
    lines.append(
        "`weight sync`: the largest buffers of the one rank of a stage that sends, two of them in shared memory."
    )
    if memory.head is not None:
        parts = [_text(part, unit) for part in (memory.head.tile, memory.head.hidden_gradient, memory.head.stash)]
        lines.append(
            "`head`: the most that the last stage needs for log-probs in an update, on a micro-batch of"
            f" actor.ppo_max_token_len_per_gpu response tokens: tile {parts[0]}, gradient of hidden states {parts[1]},"
            f" stash {parts[2]}, and rows; beside `a rank`."
        )
    if memory.reference:
        where = "in host memory, and on the device while it is used" if memory.is_reference_on_host else "on the device"
        lines.append(f"`reference`: the frozen reference model, {where}; beside `a rank`.")
    for name, num_bytes in (("reward model", memory.reward_model), ("reference", memory.reference_pool)):
        if num_bytes:
            sizes = _range(num_bytes, unit)
            lines.append(f"The {name}'s parameters: {sizes} {unit} on each of its ranks; beside `a rank`.")
    return [*lines, NOT_INCLUDED]


def _by_rank(memory: Memory) -> list[tuple[str, list[int]]]:
    """(which ranks, bytes on each kind of them), all models of a rank together."""
    actor = [total for stage in memory.stages for total in stage.totals]
    critic = [total for stage in memory.critic for total in stage.totals]
    if not critic:
        return [("a rank", actor)]
    if memory.has_critic_pool:
        return [("a rank of the actor", actor), ("a rank of the critic", critic)]
    return [("a rank, actor and critic together", [a + c for a, c in zip(actor, critic, strict=True)])]


def _unit(memory: Memory) -> str:
    return "GiB" if max(max(stage.totals) for stage in memory.stages) >= UNITS["GiB"] else "MiB"


def _text(num_bytes: int, unit: str) -> str:
    return f"{num_bytes / UNITS[unit]:.3f}"


def _range(values: Sequence[int], unit: str) -> str:
    low, high = _text(min(values), unit), _text(max(values), unit)
    return low if low == high else f"{low} to {high}"
