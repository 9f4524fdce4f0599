"""What a GPU holds in each phase of a step: the models of the trainer, and the engine that is on it or on others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rlhf_megatron.config.schema import RolloutConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.proof.check.memory_table import Memory
from rlhf_megatron.proof.plan.gpus import GB, EngineMemory, engine_memory
from rlhf_megatron.resharding.quantised import engine_table

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")
_BAR, _SCALE, _LEFT = 22, 560, 190  # pixels: height of a bar, width of a GPU, where bars begin


@dataclass(frozen=True)
class Phase:
    """Bytes of one GPU, by what they are of."""

    name: str
    parts: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def engine_of(rollout: RolloutConfig, dtype: str, hf_config: Mapping[str, Any], gpu_bytes: int) -> EngineMemory | None:
    """Return an engine's memory; None for an engine that is not SGLang: those run on CPUs or are small. `dtype`: where
    `rollout` has none."""
    if rollout.engine != "sglang":
        return None
    dtype = rollout.dtype or dtype
    table = engine_table(table_for(hf_config), dtype, rollout.quantization)
    return engine_memory(table, hf_config, dtype, rollout, gpu_bytes)


def phases_of(memory: Memory, stage: int, engine: EngineMemory | None, is_colocated: bool) -> list[Phase]:
    """Return the phases of a rank of an actor's stage. Colocated engines and trainer take turns (docs/colocated.md)."""
    own, traffic = memory.stages[stage], memory.traffic[stage]
    optimizer = {"main parameters": max(own.main_parameters), "moments": max(own.moments)}
    states = {
        "parameters": own.parameters,
        "gradients": own.gradients,
        **({} if own.is_optimizer_on_host else optimizer),
    }
    has_critic = bool(memory.critic) and not memory.has_critic_pool
    if has_critic:
        states["critic"] = max(memory.critic[stage].totals)
    stays = {"reference": memory.reference[stage]} if memory.reference and not memory.is_reference_on_host else {}
    comes = {"reference": memory.reference[stage]} if memory.reference else {}
    if memory.has_reward_model_here:
        states["reward model"] = memory.reward_model[stage]
    is_last = stage == len(memory.stages) - 1
    head = {"head": memory.head.peak} if memory.head is not None and is_last else {}
    of_update = {"activations": memory.activations[stage], **head}
    if has_critic and memory.critic_activations[stage] > sum(of_update.values()):  # they take turns
        of_update = {"critic's activations": memory.critic_activations[stage]}
    update = Phase("update", {**states, **stays, **of_update})
    log_probs = Phase("log-probs", {**states, **comes, **head})
    scores = []
    if memory.is_reward_model_on_host:
        scores.append(Phase("rewards", {**states, **stays, "reward model": memory.reward_model[stage]}))
    weights = {"engine weights": engine.weights} if engine is not None else {}
    cache = {"engine cache": max(0, engine.cache)} if engine is not None else {}
    buffers = {"sync buffers": traffic.peak_buffer}
    if not is_colocated:
        return [
            Phase("generate", {**states, **stays}),
            *scores,
            log_probs,
            update,
            Phase("sync", {**states, **stays, **buffers}),
        ]
    synced = Phase("sync", {"parameters": own.parameters, **weights, **buffers})
    return [Phase("generate", {**weights, **cache}), *scores, log_probs, update, synced]


def of_other_pools(memory: Memory, has_own_judge: bool) -> Iterator[tuple[str, Phase]]:
    """Return (model and stage, what a rank holds at most) of a critic, a reference or teacher, and a reward model with
    ranks of their own."""
    if memory.has_critic_pool:
        for own, kept in zip(memory.critic, memory.critic_activations, strict=True):
            parts = {"critic": max(own.totals), "critic's activations": kept}
            yield f"critic stage {own.stage} ({own.num_ranks} ranks)", Phase("update", parts)
    judge = memory.reward_model if has_own_judge else ()
    for name, sizes in (("reference", memory.reference_pool), ("reward model", judge)):
        for stage, num_bytes in enumerate(sizes):
            yield f"{name} stage {stage}", Phase("forward", {name: num_bytes})


def host_bytes(rollout: RolloutConfig, ranks: int, memory: Memory) -> dict[str, int]:
    """Bound a machine's host memory: state that leaves the GPUs, copies of what a checkpoint writes, weight buckets.
    `ranks`: of the machine."""
    optimizer = max(max(s.main_parameters) + max(s.moments) for s in memory.stages)
    parameters = max(s.parameters for s in memory.stages)
    states = max(s.parameters + max(s.main_parameters) + max(s.moments) for s in memory.stages)
    is_on_host = any(s.is_optimizer_on_host for s in memory.stages)
    found = {"a checkpoint's copies": ranks * states}
    if is_on_host:
        found["optimizer"] = ranks * optimizer
    if rollout.colocated:
        found["trainer while engines generate"] = ranks * (parameters if is_on_host else states)
    if memory.reference and memory.is_reference_on_host:
        found["reference"] = ranks * max(memory.reference)
    if memory.is_reward_model_on_host:
        found["reward model"] = ranks * max(memory.reward_model)
    if rollout.weight_transport != "process_group":
        found["weight buckets"] = 2 * len(memory.stages) * rollout.update_weights_bucket_megabytes << 20
    return found


def picture(rows: Sequence[tuple[str, Phase]], gpu_bytes: int, title: str) -> str:
    """Stacked bars as an SVG, with the GPU's memory as a line."""
    names = list(dict.fromkeys(name for _, phase in rows for name in phase.parts))
    colour = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}
    widest = max(gpu_bytes, *(phase.total for _, phase in rows))
    height, body = 60 + (len(rows) + 1) * _BAR, list[str]()
    for number, (label, phase) in enumerate(rows):
        top, left = 40 + number * _BAR, float(_LEFT)
        body.append(f'<text x="4" y="{top + 14}">{escape(label)}</text>')
        for name, num_bytes in phase.parts.items():
            width = num_bytes / widest * _SCALE
            shape = f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR - 4}" fill="{colour[name]}">'
            body.append(f"{shape}<title>{escape(name)} {num_bytes / GB:.2f} GB</title></rect>")
            left += width
        body.append(f'<text x="{left + 4:.1f}" y="{top + 14}">{phase.total / GB:.1f}</text>')
    line = _LEFT + gpu_bytes / widest * _SCALE
    body.append(f'<path d="M{line:.1f} 36V{height - 24}" stroke="black" stroke-dasharray="4"/>')
    for number, name in enumerate(names):
        left = 4 + number * 110
        body.append(f'<rect x="{left}" y="{height - 16}" width="10" height="10" fill="{colour[name]}"/>')
        body.append(f'<text x="{left + 13}" y="{height - 7}">{escape(name)}</text>')
    size = f'width="{_LEFT + _SCALE + 160}" height="{height}" font-family="sans-serif" font-size="11"'
    head = f'<text x="4" y="20" font-size="14">{escape(title)}</text>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{head}{"".join(body)}</svg>\n'
