"""Layouts of a model on so many GPUs: which of them fit, and what each costs. Pure arithmetic over the weight table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.kernels.head_memory import HeadShape, head_memory
from rlhf_megatron.models.families.base import family_for, padded_vocab_size
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.proof.plan.gpus import GB
from rlhf_megatron.workers.activations import FITS, Sizes, Trained, kept_bytes, state_bytes

GPUS_A_NODE = 8
_WIDTHS, _DEPTHS, _CONTEXTS = (1, 2, 4, 8), (1, 2, 4, 8, 12, 16, 24, 32), (1, 2, 4, 8, 16)
_HEAD_CHUNK = 4096  # columns, as actor.log_prob_chunk_size


@dataclass(frozen=True)
class Plan:
    """A layout, and what a step of it takes."""

    layout: Layout
    is_recomputed: bool  # layers are computed again in the backward pass
    states: int  # bytes of the fullest rank: weights, gradients, optimizer
    activations: int
    head: int
    bubble: float  # share of a step in which a stage waits for others
    tp_bytes: int  # that a rank sends over tensor-parallel links for one sample
    ep_bytes: int  # to the ranks of other experts
    pp_bytes: int  # to the next stage and back
    dp_bytes: int  # gradients and weights of an optimizer step

    @property
    def peak(self) -> int:
        return self.states + self.activations + self.head

    @property
    def num_split(self) -> int:
        """Ranks that share one copy of what is not an expert."""
        return self.layout.replica_size


@dataclass(frozen=True)
class Question:
    """The question that a plan answers."""

    model: Trained  # `tokens`: of one sample
    sizes: Sizes
    num_gpus: int
    gpu_bytes: int
    num_samples: int  # of an optimizer step

    @property
    def limit(self) -> int:
        return int(FITS * self.gpu_bytes)


def plans(question: Question) -> Iterator[Plan]:
    """Yield every layout that the model allows, without recomputation and with it."""
    for layout in _layouts(question):
        for is_recomputed in (False, True):
            yield _plan(question, layout, is_recomputed)


def best(found: Sequence[Plan], limit: int) -> list[Plan]:
    """Return the plans that fit, one a layout (the one that recomputes least), fewest ranks a copy first."""
    fits: dict[str, Plan] = {}
    for plan in found:
        if plan.peak <= limit:
            fits.setdefault(str(plan.layout), plan)
    return sorted(fits.values(), key=lambda plan: (plan.num_split, plan.is_recomputed, plan.bubble, plan.peak))


def refusal(question: Question, found: Sequence[Plan]) -> str:
    """Why nothing fits, and what is nearest."""
    if not found:
        return f"no layout divides this model over {question.num_gpus} GPUs; try a power of two."
    least = min(found, key=lambda plan: plan.peak)
    return (
        f"nothing fits into {question.limit / GB:.1f} GB a GPU ({FITS:.0%} of {question.gpu_bytes / GB:.0f} GB): the"
        f" nearest is {least.layout} with {least.peak / GB:.1f} GB ({least.states / GB:.1f} GB of states). Take more or"
        " larger GPUs, or shorter samples."
    )


def _layouts(question: Question) -> Iterator[Layout]:
    arguments = family_for(question.model.hf_config).transformer_arguments(question.model.hf_config)
    groups = int(arguments.get("num_query_groups") or arguments["num_attention_heads"])
    experts, num_layers = int(arguments.get("num_moe_experts") or 1), int(arguments["num_layers"])
    for tp in _WIDTHS:
        if groups % tp or int(arguments["ffn_hidden_size"]) % tp:
            continue
        for pp in _DEPTHS:
            ends = _ends(num_layers, pp)
            for cp in _CONTEXTS if ends is not None else ():
                if question.num_gpus % (tp * pp * cp) or question.model.tokens % (2 * cp * tp):
                    continue
                stage = question.num_gpus // pp
                for ep in [n for n in range(1, experts + 1) if experts % n == 0 and n & (n - 1) == 0]:
                    if stage % ep == 0:
                        etp, (first, last) = int(experts > 1), ends or (0, 0)
                        yield Layout(question.num_gpus, tp, pp, cp, 1, tp > 1, ep, etp, first, last)


def _ends(num_layers: int, pp: int) -> tuple[int, int] | None:
    """Layers of the first and the last stage where the others have as many as can be; (0, 0): all alike."""
    if num_layers % pp == 0:
        return 0, 0
    each = -(-num_layers // pp)
    left = num_layers - each * (pp - 2)
    return ((left + 1) // 2, left // 2) if pp > 1 and left >= 2 else None


def _plan(question: Question, layout: Layout, is_recomputed: bool) -> Plan:
    model = question.model
    megatron = MegatronConfig(
        use_distributed_optimizer=True,
        recompute_granularity="full" if is_recomputed else "none",
        recompute_method="uniform" if is_recomputed else None,
        recompute_num_layers=1 if is_recomputed else None,
    )
    on_rank = Trained(model.hf_config, model.dtype, model.tokens // layout.cp, model.head)
    stages = range(layout.pp)
    states = [state_bytes(on_rank, megatron, layout, stage, question.sizes) for stage in stages]
    kept = [kept_bytes(on_rank, megatron, layout, "transformer_engine", stage) for stage in stages]
    head = [_head_bytes(on_rank, layout) if stage == layout.pp - 1 else 0 for stage in stages]
    fullest = max(stages, key=lambda stage: states[stage] + kept[stage] + head[stage])
    micro_batches = max(1, question.num_samples // layout.dp)
    return Plan(
        layout,
        is_recomputed,
        states[fullest],
        kept[fullest],
        head[fullest],
        (layout.pp - 1) / (micro_batches + layout.pp - 1),
        *_traffic(question, layout, is_recomputed),
    )


def _head_bytes(model: Trained, layout: Layout) -> int:
    vocabulary = int(model.hf_config["vocab_size"])
    shape = HeadShape(
        num_tokens=model.tokens,
        num_rows=model.tokens,
        hidden_size=int(model.hf_config["hidden_size"]),
        num_columns=min(vocabulary, padded_vocab_size(vocabulary, layout.tp) // layout.tp),
        chunk_size=_HEAD_CHUNK,
        dtype=model.dtype,
        device_type="cuda",
        num_parts=layout.tp if layout.sequence_parallel else 1,
        stash_bytes=0,
        backend="triton",
    )
    return head_memory(shape).peak


def _traffic(question: Question, layout: Layout, is_recomputed: bool) -> tuple[int, int, int, int]:
    """Bytes that the busiest rank sends: (tp, ep, pp) for one sample, forward and backward, and dp."""
    model, sizes = question.model, question.sizes
    arguments: Mapping[str, Any] = family_for(model.hf_config).transformer_arguments(model.hf_config)
    depth = max(Counter(layout.stage_of_layers(len(sizes.layers))).values())
    passes = 3 if is_recomputed else 2
    token = int(arguments["hidden_size"]) * model.dtype.itemsize
    hidden = token * (model.tokens // layout.cp)
    # Sequence parallelism: two gathers and two scatters a layer and pass.
    tp_bytes = 4 * depth * passes * hidden * (layout.tp - 1) // layout.tp
    with_experts = depth if arguments.get("num_moe_experts") else 0
    choices = int(arguments.get("moe_router_topk") or 0)
    ep_bytes = 2 * with_experts * passes * choices * hidden // layout.tp * (layout.ep - 1) // layout.ep
    pp_bytes = 2 * hidden // layout.tp * (layout.pp > 1)
    experts, others = (max(counts) for counts in zip(*_counts(sizes, layout), strict=True))
    gradient, weight = torch.float32.itemsize, model.dtype.itemsize
    copies = layout.dp * layout.cp
    dp_bytes = (gradient + weight) * (
        others * (copies - 1) // copies + experts * (layout.edp - 1) // max(1, layout.edp)
    )
    return tp_bytes, ep_bytes, pp_bytes, dp_bytes


def _counts(sizes: Sizes, layout: Layout) -> list[tuple[int, int]]:
    return [sizes.of_stage(layout, stage) for stage in range(layout.pp)]
