"""The bytes that a rank holds at the peak of an update, by arithmetic: weights, optimizer, and the
tensors that layers keep for the backward pass. `resolve_memory_settings` decides by these bytes the
settings that the configuration leaves open.

Bytes kept of a token in a layer, measured with hooks on saved tensors
(tests/unit/workers/test_workers_activations.py) and under a counting CUDA allocator: 2.25 GiB a
layer of Qwen3-8B at 16,384 tokens, 2.10 with Transformer Engine.
"""

# H hidden, F ffn, N heads, K key-value heads, d head dimension; of one rank, where tp splits them

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.workers.optimizer_state_format import OptimizerStateFormat
from rlhf_megatron.weights.families.family_lookup import find_model_family, make_weight_table
from rlhf_megatron.weights.families.model_family import HFConfig
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from rlhf_megatron.weights.weight_table import VALUE_HEADS, HeadKind, LayerImpl

# of a device's memory: the rest is for NCCL, fragments, collectives and what engines keep
USABLE_MEMORY_SHARE = 0.75
_FLOAT32 = 4


@dataclass(frozen=True)
class TrainedModelSpec:
    """A model that learns on the ranks of a pool."""

    hf_config: HFConfig
    dtype: torch.dtype
    num_tokens: int  # of a micro-batch, on one rank
    head: HeadKind = "vocabulary"


def estimate_layer_activation_bytes(
    model: TrainedModelSpec, layout: ParallelLayout, impl: LayerImpl, has_experts: bool = False
) -> int:
    """Return the bytes that a layer keeps for the backward pass of a micro-batch, with nothing
    recomputed, flash attention and fused SwiGLU.

    For a layer with experts, tokens are taken to be routed evenly.
    """
    arguments = find_model_family(model.hf_config).make_transformer_arguments(model.hf_config)
    tp = layout.tp
    sequence = layout.tp if layout.sequence_parallel else 1
    hidden = arguments["hidden_size"]
    kept = 4 * hidden / sequence  # both residuals and their norms
    if arguments.get("multi_latent_attention"):
        kept += _count_latent_attention_elements(arguments, layout)
    else:
        kept += _count_grouped_attention_elements(arguments, layout, impl)
    # each choice of a token: as it came to its expert, and gate, up and product there
    if has_experts:
        choices = arguments["moe_router_topk"] * layout.etp / sequence
        kept += choices * (hidden + 3 * arguments["moe_ffn_hidden_size"] / layout.etp)
    else:
        kept += 3 * arguments["ffn_hidden_size"] / tp
    return math.ceil(kept * model.num_tokens * model.dtype.itemsize)


def _count_grouped_attention_elements(
    arguments: Mapping[str, Any], layout: ParallelLayout, impl: LayerImpl
) -> float:
    """Return the elements that grouped-query attention keeps of a token."""
    tp = layout.tp
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups", heads)
    dim = arguments["kv_channels"]
    has_norm = arguments.get("qk_layernorm", False)
    # attention's output; queries and keys with positions
    kept = (heads * dim + (heads + groups) * dim) / tp
    # the whole q, k, v for their norms, or values
    kept += ((heads + 2 * groups) if has_norm else groups) * dim / tp
    if has_norm and impl == "local":  # queries are copied for the norm, values for attention
        kept += (heads + groups) * dim / tp
    if layout.cp > 1:  # keys and values of the other ranks
        kept += 2 * groups * dim / tp * layout.cp
    return float(kept)


def _count_latent_attention_elements(arguments: Mapping[str, Any], layout: ParallelLayout) -> float:
    """Return the elements that latent attention keeps of a token; flash attention takes its values
    as wide as the keys.
    """
    sequence = layout.tp if layout.sequence_parallel else 1
    heads = arguments["num_attention_heads"] / layout.tp
    width = arguments["kv_channels"]
    turned = arguments["qk_pos_emb_head_dim"]
    narrow = (arguments["q_lora_rank"] or 0) + arguments["kv_lora_rank"]
    # the narrow vectors before and after their norms; the keys' position part
    kept = (2 * narrow + turned) / sequence
    # queries, keys, values, attention's output, and that cut
    kept += heads * (4 * width + arguments["v_head_dim"])
    if layout.cp > 1:  # keys and values of the other ranks
        kept += heads * (width + arguments["v_head_dim"]) * layout.cp
    return float(kept)


def estimate_stage_activation_bytes(
    model: TrainedModelSpec,
    megatron: MegatronConfig,
    layout: ParallelLayout,
    impl: LayerImpl,
    stage: int,
) -> int:
    """Return the most bytes that all layers of a stage keep, over the micro-batches that are under
    way there at one time, with the recomputation that is configured. Where no head takes as much at
    its turn, add the gradients of a layer in the backward pass, about as many bytes as the layer
    keeps.
    """
    arguments = find_model_family(model.hf_config).make_transformer_arguments(model.hf_config)
    stage_of = layout.map_layers_to_stages(arguments["num_layers"])
    kinds = arguments.get("moe_layer_freq") or [0] * arguments["num_layers"]
    here = [
        bool(has_experts) for has_experts, own in zip(kinds, stage_of, strict=True) if own == stage
    ]
    whole = [
        estimate_layer_activation_bytes(model, layout, impl, has_experts) for has_experts in here
    ]
    num_layers = len(here)
    gradients = max(whole) if stage < layout.pp - 1 or model.head in VALUE_HEADS else 0
    under_way = layout.pp - stage
    if layout.vpp > 1:  # chunks of layers, in rounds of pp micro-batches
        under_way = math.ceil(
            (2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp
        )
    if megatron.recompute_granularity != "full":
        return sum(whole) * under_way + gradients
    sequence = layout.tp if layout.sequence_parallel else 1
    of_input = arguments["hidden_size"] * model.num_tokens * model.dtype.itemsize // sequence
    group = megatron.recompute_num_layers or 1
    if megatron.recompute_method == "block":  # the others of a chunk keep all
        again = min(num_layers, group * layout.vpp)
        return (again * of_input + sum(whole[again:])) * under_way + max(whole) + gradients
    return -(-num_layers // group) * of_input * under_way + group * max(whole) + gradients


@dataclass(frozen=True)
class ModelElementCounts:
    """The elements of a model's tensors, by the way they are shared: each entry is (of experts, cut
    by tp, whole on each rank).
    """

    layer_counts: tuple[tuple[int, int, int], ...]
    first_stage_counts: tuple[int, int, int]  # of the first stage, beside its layers
    last_stage_counts: tuple[int, int, int]
    vocab_size: int  # rows, before they are padded for tp
    hidden_size: int

    @staticmethod
    def from_model(model: TrainedModelSpec) -> ModelElementCounts:
        """Count the elements of a model's tensors, by reading the whole weight table once."""
        found: dict[int | str, list[int]] = {}
        for rule in make_weight_table(model.hf_config, head=model.head):
            where = found.setdefault(rule.owner if rule.layer is None else rule.layer, [0, 0, 0])
            if rule.expert is not None:
                kind = 0
            else:
                kind = 2 if rule.split == "replicated" else 1
            where[kind] += math.prod(rule.megatron_shape)
        none = [0, 0, 0]
        layers = [
            found[layer] for layer in sorted(layer for layer in found if isinstance(layer, int))
        ]
        entries = [
            tuple(entry)
            for entry in (*layers, found.get("embedding", none), found.get("head", none))
        ]
        *per_layer, first, last = entries
        hf_config = model.hf_config
        return ModelElementCounts(
            tuple(per_layer),  # type: ignore[arg-type]
            first,  # type: ignore[arg-type]
            last,  # type: ignore[arg-type]
            int(hf_config["vocab_size"]),
            int(hf_config["hidden_size"]),
        )

    def count_stage_elements(self, layout: ParallelLayout, stage: int) -> tuple[int, int]:
        """Return (elements of experts, all other elements) on one rank of a stage. A tied embedding
        counts on the first stage only.
        """
        stage_of = layout.map_layers_to_stages(len(self.layer_counts))
        parts = [
            part for part, own in zip(self.layer_counts, stage_of, strict=True) if own == stage
        ]
        padding = (-self.vocab_size % layout.tp) * self.hidden_size
        for is_there, part in (
            (stage == 0, self.first_stage_counts),
            (stage == layout.pp - 1, self.last_stage_counts),
        ):
            has_vocabulary = part[1] == self.vocab_size * self.hidden_size
            parts += [(part[0], part[1] + padding * has_vocabulary, part[2])] * is_there
        experts, cut, whole = (sum(column) for column in zip(*parts, strict=True))
        return experts // layout.etp // layout.ep, cut // layout.tp + whole


def estimate_state_bytes(
    model: TrainedModelSpec,
    megatron: MegatronConfig,
    layout: ParallelLayout,
    stage: int,
    element_counts: ModelElementCounts | None = None,
) -> int:
    """Return the bytes of weights, float32 gradients, main parameters and moments on a rank of a
    stage. A distributed optimizer's state is shared out evenly; optimizer state in host memory does
    not count.
    """
    of_optimizer = (
        0
        if megatron.optimizer_cpu_offload
        else sum(
            OptimizerStateFormat.from_megatron_config(megatron).count_bytes_per_parameter(
                model.dtype
            )
        )
    )
    counts = (element_counts or ModelElementCounts.from_model(model)).count_stage_elements(
        layout, stage
    )
    total = 0
    for count, copies in zip(counts, (layout.edp, layout.dp * layout.cp), strict=True):
        total += count * (model.dtype.itemsize + _FLOAT32)
        total += of_optimizer * count // (copies if megatron.use_distributed_optimizer else 1)
    return total


def resolve_memory_settings(
    megatron: MegatronConfig,
    num_ranks: int,
    trained_models: Sequence[TrainedModelSpec],
    device_bytes: int,
    has_reference: bool = False,
) -> MegatronConfig:
    """Return `megatron` with the settings decided that the configuration leaves open
    (use_distributed_optimizer, recomputation), the same on all ranks of the pool.

    On GPUs optimizer state is shared out where several ranks hold the same shard, and layers are
    recomputed where the peak without recomputation exceeds USABLE_MEMORY_SHARE of a device.
    `trained_models` are all models that learn on these ranks; with `has_reference` the first has a
    frozen copy beside it. `device_bytes` is the memory of the smallest GPU; 0 means a CPU, where
    neither is done.
    """
    layout = make_parallel_layout(megatron, num_ranks)
    if megatron.use_distributed_optimizer is None:
        megatron = replace(
            megatron, use_distributed_optimizer=device_bytes > 0 and layout.dp * layout.cp > 1
        )
    if megatron.recompute_granularity == "none":
        return replace(megatron, recompute_granularity=None)
    if megatron.recompute_granularity is not None or not device_bytes:
        return megatron
    impl: LayerImpl = (
        "transformer_engine" if megatron.transformer_impl == "transformer_engine" else "local"
    )
    sizes = [ModelElementCounts.from_model(model) for model in trained_models]
    for stage in range(layout.pp):
        states = zip(trained_models, sizes, strict=True)
        peak = sum(
            estimate_state_bytes(model, megatron, layout, stage, own) for model, own in states
        )
        peak += max(
            estimate_stage_activation_bytes(model, megatron, layout, impl, stage)
            for model in trained_models
        )
        peak += (
            sum(sizes[0].count_stage_elements(layout, stage))
            * trained_models[0].dtype.itemsize
            * has_reference
        )
        if peak > USABLE_MEMORY_SHARE * device_bytes:
            return replace(
                megatron,
                recompute_granularity="full",
                recompute_method="uniform",
                recompute_num_layers=1,
            )
    return megatron
