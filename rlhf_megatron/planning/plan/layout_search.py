"""Layouts of a model on so many GPUs: which of them fit, and what each costs. Pure arithmetic over
the weight table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.planning.plan.gpu_memory import GB, GIB
from rlhf_megatron.ranks.kernels.head_memory import HeadCallShape, compute_head_memory_bound
from rlhf_megatron.ranks.workers.peak_memory import (
    USABLE_MEMORY_SHARE,
    ModelElementCounts,
    TrainedModelSpec,
    estimate_stage_activation_bytes,
    estimate_state_bytes,
)
from rlhf_megatron.weights.families.family_lookup import find_model_family
from rlhf_megatron.weights.families.model_family import pad_vocab_size
from rlhf_megatron.weights.parallel_layout import ParallelLayout

GPUS_PER_NODE = 8
_WIDTHS = (1, 2, 4, 8)
_DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32)
_CONTEXTS = (1, 2, 4, 8, 16)
_HEAD_CHUNK = 4096  # columns, as actor.log_prob_chunk_size


@dataclass(frozen=True)
class LayoutPlan:
    """A layout, and what a step of it takes."""

    layout: ParallelLayout
    is_recomputed: bool  # layers are computed again in the backward pass
    state_bytes: int  # bytes of the fullest rank: weights, gradients, optimizer
    activation_bytes: int
    head_bytes: int
    bubble_fraction: float  # share of a step in which a stage waits for others
    tp_bytes: int  # that a rank sends over tensor-parallel links for one sample
    ep_bytes: int  # to the ranks of other experts
    pp_bytes: int  # to the next stage and back
    dp_bytes: int  # gradients and weights of an optimizer step

    @property
    def peak_bytes(self) -> int:
        """Return the bytes of the fullest rank: states, activations and head."""
        return self.state_bytes + self.activation_bytes + self.head_bytes

    @property
    def ranks_per_copy(self) -> int:
        """Return the number of ranks that share one copy of the weights outside of experts."""
        return self.layout.replica_size


@dataclass(frozen=True)
class LayoutRequest:
    """The question that a plan answers."""

    model: TrainedModelSpec  # `tokens`: of one sample
    element_counts: ModelElementCounts
    num_gpus: int
    gpu_bytes: int
    num_samples: int  # of an optimizer step

    @property
    def max_rank_bytes(self) -> int:
        """Return the bytes of a GPU that a rank may use."""
        return int(USABLE_MEMORY_SHARE * self.gpu_bytes)


def iterate_layout_plans(request: LayoutRequest) -> Iterator[LayoutPlan]:
    """Yield a plan for every layout that the model allows, without recomputation and with it,
    whether it fits or not.
    """
    for layout in _iterate_layouts(request):
        for is_recomputed in (False, True):
            yield _plan_one_layout(request, layout, is_recomputed)


def select_fitting_plans(plans: Sequence[LayoutPlan], max_rank_bytes: int) -> list[LayoutPlan]:
    """Return the plans that fit, one for each layout (the one that recomputes least), fewest ranks
    a copy first.
    """
    fits: dict[str, LayoutPlan] = {}
    for plan in plans:
        if plan.peak_bytes <= max_rank_bytes:
            fits.setdefault(str(plan.layout), plan)
    return sorted(
        fits.values(),
        key=lambda plan: (
            plan.ranks_per_copy,
            plan.is_recomputed,
            plan.bubble_fraction,
            plan.peak_bytes,
        ),
    )


def explain_no_fit(request: LayoutRequest, plans: Sequence[LayoutPlan]) -> str:
    """Return a message that says why nothing fits, and which plan is nearest."""
    if not plans:
        return f"no layout divides this model over {request.num_gpus} GPUs; try a power of two."
    least = min(plans, key=lambda plan: plan.peak_bytes)
    return (
        f"nothing fits into {request.max_rank_bytes / GIB:.1f} GiB a GPU ({USABLE_MEMORY_SHARE:.0%}"
        f" of {request.gpu_bytes / GB:.0f} GB): the nearest is {least.layout} with"
        f" {least.peak_bytes / GIB:.1f} GiB ({least.state_bytes / GIB:.1f} GiB of states)."
        " Take more or larger GPUs, or shorter samples."
    )


def _iterate_layouts(request: LayoutRequest) -> Iterator[ParallelLayout]:
    """Yield every layout that divides the model and its samples over the GPUs."""
    arguments = find_model_family(request.model.hf_config).make_transformer_arguments(
        request.model.hf_config
    )
    groups = int(arguments.get("num_query_groups") or arguments["num_attention_heads"])
    experts = int(arguments.get("num_moe_experts") or 1)
    num_layers = int(arguments["num_layers"])
    for tp in _WIDTHS:
        if groups % tp or int(arguments["ffn_hidden_size"]) % tp:
            continue
        for pp in _DEPTHS:
            ends = _split_end_stages(num_layers, pp)
            for cp in _CONTEXTS if ends is not None else ():
                if request.num_gpus % (tp * pp * cp) or request.model.num_tokens % (2 * cp * tp):
                    continue
                stage = request.num_gpus // pp
                for ep in [
                    n for n in range(1, experts + 1) if experts % n == 0 and n & (n - 1) == 0
                ]:
                    if stage % ep == 0:
                        etp = int(experts > 1)
                        first, last = ends or (0, 0)
                        yield ParallelLayout(
                            request.num_gpus, tp, pp, cp, 1, tp > 1, ep, etp, first, last
                        )


def _split_end_stages(num_layers: int, num_stages: int) -> tuple[int, int] | None:
    """Return the layers of the first and the last stage where the other stages have as many as
    possible; (0, 0): all stages have the same number; None: there is no such split.
    """
    if num_layers % num_stages == 0:
        return 0, 0
    each = -(-num_layers // num_stages)
    left = num_layers - each * (num_stages - 2)
    return ((left + 1) // 2, left // 2) if num_stages > 1 and left >= 2 else None


def _plan_one_layout(
    request: LayoutRequest, layout: ParallelLayout, is_recomputed: bool
) -> LayoutPlan:
    """Return the memory and traffic of one layout."""
    model = request.model
    megatron = MegatronConfig(
        use_distributed_optimizer=True,
        recompute_granularity="full" if is_recomputed else "none",
        recompute_method="uniform" if is_recomputed else None,
        recompute_num_layers=1 if is_recomputed else None,
    )
    on_rank = TrainedModelSpec(
        model.hf_config, model.dtype, model.num_tokens // layout.cp, model.head
    )
    stages = range(layout.pp)
    states = [
        estimate_state_bytes(on_rank, megatron, layout, stage, request.element_counts)
        for stage in stages
    ]
    kept = [
        estimate_stage_activation_bytes(on_rank, megatron, layout, "transformer_engine", stage)
        for stage in stages
    ]
    head = [
        _estimate_head_bytes(on_rank, layout) if stage == layout.pp - 1 else 0 for stage in stages
    ]
    fullest = max(stages, key=lambda stage: states[stage] + kept[stage] + head[stage])
    micro_batches = max(1, request.num_samples // layout.dp)
    return LayoutPlan(
        layout,
        is_recomputed,
        states[fullest],
        kept[fullest],
        head[fullest],
        (layout.pp - 1) / (micro_batches + layout.pp - 1),
        *_estimate_traffic_bytes(request, layout, is_recomputed),
    )


def _estimate_head_bytes(model: TrainedModelSpec, layout: ParallelLayout) -> int:
    """Return the most bytes that the LM head needs in an update, on one rank."""
    vocabulary = int(model.hf_config["vocab_size"])
    shape = HeadCallShape(
        num_tokens=model.num_tokens,
        num_rows=model.num_tokens,
        hidden_size=int(model.hf_config["hidden_size"]),
        num_columns=min(vocabulary, pad_vocab_size(vocabulary, layout.tp) // layout.tp),
        chunk_size=_HEAD_CHUNK,
        dtype=model.dtype,
        device_type="cuda",
        num_sequence_parts=layout.tp if layout.sequence_parallel else 1,
        stash_bytes=0,
        backend="triton",
    )
    return compute_head_memory_bound(shape).peak_bytes


def _estimate_traffic_bytes(
    request: LayoutRequest, layout: ParallelLayout, is_recomputed: bool
) -> tuple[int, int, int, int]:
    """Return the bytes that the busiest rank sends: (tp, ep, pp) for one sample, forward and
    backward, and dp for an optimizer step.
    """
    model = request.model
    sizes = request.element_counts
    arguments: Mapping[str, Any] = find_model_family(model.hf_config).make_transformer_arguments(
        model.hf_config
    )
    depth = max(Counter(layout.map_layers_to_stages(len(sizes.layer_counts))).values())
    passes = 3 if is_recomputed else 2
    token = int(arguments["hidden_size"]) * model.dtype.itemsize
    hidden = token * (model.num_tokens // layout.cp)
    # Sequence parallelism: two gathers and two scatters a layer and pass.
    tp_bytes = 4 * depth * passes * hidden * (layout.tp - 1) // layout.tp
    with_experts = depth if arguments.get("num_moe_experts") else 0
    choices = int(arguments.get("moe_router_topk") or 0)
    ep_bytes = (
        2 * with_experts * passes * choices * hidden // layout.tp * (layout.ep - 1) // layout.ep
    )
    pp_bytes = 2 * hidden // layout.tp * (layout.pp > 1)
    experts, others = (
        max(counts) for counts in zip(*_count_elements_by_stage(sizes, layout), strict=True)
    )
    gradient = torch.float32.itemsize
    weight = model.dtype.itemsize
    copies = layout.dp * layout.cp
    dp_bytes = (gradient + weight) * (
        others * (copies - 1) // copies + experts * (layout.edp - 1) // max(1, layout.edp)
    )
    return tp_bytes, ep_bytes, pp_bytes, dp_bytes


def _count_elements_by_stage(
    element_counts: ModelElementCounts, layout: ParallelLayout
) -> list[tuple[int, int]]:
    """Return (elements of experts, other elements) of a rank of each stage."""
    return [element_counts.count_stage_elements(layout, stage) for stage in range(layout.pp)]
