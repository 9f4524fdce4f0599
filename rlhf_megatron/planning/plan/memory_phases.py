"""What a GPU holds in each phase of a step: the models of the trainer, and the engine that is on
it or on others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.planning.check.memory_table import RunMemory
from rlhf_megatron.planning.plan.gpu_memory import GIB, EngineGpuMemory, plan_engine_memory
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.fp8_engine_weights import make_engine_table

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
# pixels: height of a bar, width of a GPU, where bars begin
_BAR = 22
_SCALE = 560
_LEFT = 190


@dataclass(frozen=True)
class MemoryPhase:
    """Bytes of one GPU, by what they are of."""

    name: str
    bytes_by_use: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all uses together."""
        return sum(self.bytes_by_use.values())


def plan_run_engine_memory(
    rollout: RolloutConfig, default_dtype: str, hf_config: Mapping[str, Any], gpu_bytes: int
) -> EngineGpuMemory | None:
    """Return the memory of one GPU of an engine; None for an engine that is not SGLang, which runs
    on CPUs or is small. `default_dtype` is used where `rollout` has no dtype.
    """
    if rollout.engine != "sglang":
        return None
    default_dtype = rollout.dtype or default_dtype
    table = make_engine_table(make_weight_table(hf_config), default_dtype, rollout.quantization)
    return plan_engine_memory(table, hf_config, default_dtype, rollout, gpu_bytes)


def list_step_phases(
    memory: RunMemory, stage: int, engine: EngineGpuMemory | None, is_colocated: bool
) -> list[MemoryPhase]:
    """Return what a rank of this stage of the actor holds in each phase of a step. Colocated
    engines and trainer take turns (docs/colocated.md).
    """
    own = memory.stages[stage]
    traffic = memory.sync_traffic[stage]
    optimizer = {"main parameters": max(own.main_parameters), "moments": max(own.moments)}
    states = {
        "parameters": own.parameters,
        "gradients": own.gradients,
        **({} if own.is_optimizer_on_host else optimizer),
    }
    has_critic = bool(memory.critic_stages) and not memory.has_critic_pool
    if has_critic:
        states["critic"] = max(memory.critic_stages[stage].totals)
    stays = (
        {"reference": memory.reference_bytes[stage]}
        if memory.reference_bytes and not memory.is_reference_on_host
        else {}
    )
    comes = {"reference": memory.reference_bytes[stage]} if memory.reference_bytes else {}
    if memory.has_reward_model_on_actor_ranks:
        states["reward model"] = memory.reward_model_bytes[stage]
    is_last = stage == len(memory.stages) - 1
    head = (
        {"head": memory.head_memory.peak_bytes}
        if memory.head_memory is not None and is_last
        else {}
    )
    of_update = {"activations": memory.activation_bytes[stage], **head}
    # they take turns
    if has_critic and memory.critic_activation_bytes[stage] > sum(of_update.values()):
        of_update = {"critic's activations": memory.critic_activation_bytes[stage]}
    update = MemoryPhase("update", {**states, **stays, **of_update})
    log_probs = MemoryPhase("log-probs", {**states, **comes, **head})
    scores = []
    if memory.is_reward_model_on_host:
        scores.append(
            MemoryPhase(
                "rewards", {**states, **stays, "reward model": memory.reward_model_bytes[stage]}
            )
        )
    weights = {"engine weights": engine.weight_bytes} if engine is not None else {}
    cache = {"engine cache": max(0, engine.cache_bytes)} if engine is not None else {}
    buffers = {"sync buffers": traffic.peak_buffer_bytes}
    if not is_colocated:
        return [
            MemoryPhase("generate", {**states, **stays}),
            *scores,
            log_probs,
            update,
            MemoryPhase("sync", {**states, **stays, **buffers}),
        ]
    synced = MemoryPhase("sync", {"parameters": own.parameters, **weights, **buffers})
    return [MemoryPhase("generate", {**weights, **cache}), *scores, log_probs, update, synced]


def iterate_other_pool_phases(
    memory: RunMemory, has_reward_model_pool: bool
) -> Iterator[tuple[str, MemoryPhase]]:
    """Yield (model and stage, the most that a rank holds) of a critic, a reference or teacher, and
    a reward model with ranks of their own.
    """
    if memory.has_critic_pool:
        for own, kept in zip(memory.critic_stages, memory.critic_activation_bytes, strict=True):
            parts = {"critic": max(own.totals), "critic's activations": kept}
            yield f"critic stage {own.stage} ({own.num_ranks} ranks)", MemoryPhase("update", parts)
    judge = memory.reward_model_bytes if has_reward_model_pool else ()
    for name, sizes in (("reference", memory.reference_pool_bytes), ("reward model", judge)):
        for stage, num_bytes in enumerate(sizes):
            yield f"{name} stage {stage}", MemoryPhase("forward", {name: num_bytes})


def estimate_host_bytes(
    rollout: RolloutConfig, num_ranks: int, memory: RunMemory
) -> dict[str, int]:
    """Return upper bounds of a machine's host memory, in bytes by use: state that leaves the GPUs,
    copies of what a checkpoint writes, weight buckets. `num_ranks`: the ranks of the machine.
    """
    optimizer = max(max(s.main_parameters) + max(s.moments) for s in memory.stages)
    parameters = max(s.parameters for s in memory.stages)
    states = max(s.parameters + max(s.main_parameters) + max(s.moments) for s in memory.stages)
    is_on_host = any(s.is_optimizer_on_host for s in memory.stages)
    found = {"a checkpoint's copies": num_ranks * states}
    if is_on_host:
        found["optimizer"] = num_ranks * optimizer
    if rollout.colocated:
        found["trainer while engines generate"] = num_ranks * (parameters if is_on_host else states)
    if memory.reference_bytes and memory.is_reference_on_host:
        found["reference"] = num_ranks * max(memory.reference_bytes)
    if memory.is_reward_model_on_host:
        found["reward model"] = num_ranks * max(memory.reward_model_bytes)
    if rollout.weight_transport != "process_group":
        found["weight buckets"] = (
            2 * len(memory.stages) * rollout.update_weights_bucket_megabytes << 20
        )
    return found


def draw_memory_chart(
    labelled_phases: Sequence[tuple[str, MemoryPhase]], gpu_bytes: int, title: str
) -> str:
    """Return an SVG with a stacked bar for each phase, and the GPU's memory as a line."""
    names = list(dict.fromkeys(name for _, phase in labelled_phases for name in phase.bytes_by_use))
    colour = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    widest = max(gpu_bytes, *(phase.total_bytes for _, phase in labelled_phases))
    height = 60 + (len(labelled_phases) + 1) * _BAR
    body = list[str]()
    for number, (label, phase) in enumerate(labelled_phases):
        top = 40 + number * _BAR
        left = float(_LEFT)
        body.append(f'<text x="4" y="{top + 14}">{escape(label)}</text>')
        for name, num_bytes in phase.bytes_by_use.items():
            width = num_bytes / widest * _SCALE
            shape = (
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}"'
                f' height="{_BAR - 4}" fill="{colour[name]}">'
            )
            body.append(f"{shape}<title>{escape(name)} {num_bytes / GIB:.2f} GiB</title></rect>")
            left += width
        body.append(f'<text x="{left + 4:.1f}" y="{top + 14}">{phase.total_bytes / GIB:.1f}</text>')
    line = _LEFT + gpu_bytes / widest * _SCALE
    body.append(f'<path d="M{line:.1f} 36V{height - 24}" stroke="black" stroke-dasharray="4"/>')
    for number, name in enumerate(names):
        left = 4 + number * 110
        body.append(
            f'<rect x="{left}" y="{height - 16}" width="10" height="10" fill="{colour[name]}"/>'
        )
        body.append(f'<text x="{left + 13}" y="{height - 7}">{escape(name)}</text>')
    size = (
        f'width="{_LEFT + _SCALE + 160}" height="{height}" font-family="sans-serif" font-size="11"'
    )
    head = f'<text x="4" y="20" font-size="14">{escape(title)}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{head}{"".join(body)}</svg>\n'
