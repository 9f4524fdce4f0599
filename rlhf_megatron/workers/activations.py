"""What a rank holds at the peak of an update, by arithmetic: weights, optimizer, and what layers keep for the backward
pass. And what the settings that are left to us become by it (`settled`).

Bytes kept of a token in a layer, measured with hooks on saved tensors (tests/unit/workers/test_workers_activations.py)
and under a counting CUDA allocator: 2.25 GiB a layer of Qwen3-8B at 16,384 tokens, 2.10 with Transformer Engine.
"""

# H hidden, F ffn, N heads, K key-value heads, d head dimension; of one rank, where tp splits them

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.models.families.base import HFConfig, family_for, table_for
from rlhf_megatron.models.table import Head, Impl
from rlhf_megatron.parallel.layout import Layout, layout_of
from rlhf_megatron.workers.kept_state import Kept

FITS = 0.75  # of a device's memory: the rest is for NCCL, fragments, collectives and what engines keep
_FLOAT32 = 4


@dataclass(frozen=True)
class Trained:
    """A model that learns on the ranks of a pool."""

    hf_config: HFConfig
    dtype: torch.dtype
    tokens: int  # of a micro-batch, on one rank
    head: Head = "vocabulary"


def layer_bytes(model: Trained, layout: Layout, impl: Impl, has_experts: bool = False) -> int:
    """Return the bytes that a layer keeps of a micro-batch, with nothing recomputed, flash attention and fused
    SwiGLU.

    Of one with experts: where tokens are routed evenly.
    """
    arguments = family_for(model.hf_config).transformer_arguments(model.hf_config)
    tp, sequence = layout.tp, layout.tp if layout.sequence_parallel else 1
    hidden = arguments["hidden_size"]
    kept = 4 * hidden / sequence  # both residuals and their norms
    if arguments.get("multi_latent_attention"):
        kept += _latent_elements(arguments, layout)
    else:
        kept += _grouped_elements(arguments, layout, impl)
    if has_experts:  # each choice of a token: as it came to its expert, and gate, up and product there
        choices = arguments["moe_router_topk"] * layout.etp / sequence
        kept += choices * (hidden + 3 * arguments["moe_ffn_hidden_size"] / layout.etp)
    else:
        kept += 3 * arguments["ffn_hidden_size"] / tp
    return math.ceil(kept * model.tokens * model.dtype.itemsize)


def _grouped_elements(arguments: Mapping[str, Any], layout: Layout, impl: Impl) -> float:
    """Count the elements of a token in grouped-query attention."""
    tp, heads = layout.tp, arguments["num_attention_heads"]
    groups, dim = arguments.get("num_query_groups", heads), arguments["kv_channels"]
    has_norm = arguments.get("qk_layernorm", False)
    kept = (heads * dim + (heads + groups) * dim) / tp  # attention's output; queries and keys with positions
    kept += ((heads + 2 * groups) if has_norm else groups) * dim / tp  # the whole q, k, v for their norms, or values
    if has_norm and impl == "local":  # queries are copied for the norm, values for attention
        kept += (heads + groups) * dim / tp
    if layout.cp > 1:  # keys and values of the other ranks
        kept += 2 * groups * dim / tp * layout.cp
    return float(kept)


def _latent_elements(arguments: Mapping[str, Any], layout: Layout) -> float:
    """Count the elements of a token in latent attention, whose values flash attention takes as wide as keys."""
    sequence, heads = layout.tp if layout.sequence_parallel else 1, arguments["num_attention_heads"] / layout.tp
    width, turned = arguments["kv_channels"], arguments["qk_pos_emb_head_dim"]
    narrow = (arguments["q_lora_rank"] or 0) + arguments["kv_lora_rank"]
    kept = (2 * narrow + turned) / sequence  # the narrow vectors before and after their norms; the keys' position part
    kept += heads * (4 * width + arguments["v_head_dim"])  # queries, keys, values, attention's output, and that cut
    if layout.cp > 1:  # keys and values of the other ranks
        kept += heads * (width + arguments["v_head_dim"]) * layout.cp
    return float(kept)


def kept_bytes(model: Trained, megatron: MegatronConfig, layout: Layout, impl: Impl, stage: int) -> int:
    """Return the most that all layers of a stage keep, over the micro-batches under way there at one time. And, where
    no head takes as much in its turn, the gradients of a layer while it is passed backward: about what it keeps."""
    arguments = family_for(model.hf_config).transformer_arguments(model.hf_config)
    stage_of = layout.stage_of_layers(arguments["num_layers"])
    kinds = arguments.get("moe_layer_freq") or [0] * arguments["num_layers"]
    here = [bool(has_experts) for has_experts, own in zip(kinds, stage_of, strict=True) if own == stage]
    whole, num_layers = [layer_bytes(model, layout, impl, has_experts) for has_experts in here], len(here)
    gradients = max(whole) if stage < layout.pp - 1 or model.head == "value" else 0
    under_way = layout.pp - stage
    if layout.vpp > 1:  # chunks of layers, in rounds of pp micro-batches
        under_way = math.ceil((2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1) / layout.vpp)
    if megatron.recompute_granularity != "full":
        return sum(whole) * under_way + gradients
    sequence = layout.tp if layout.sequence_parallel else 1
    of_input = arguments["hidden_size"] * model.tokens * model.dtype.itemsize // sequence
    group = megatron.recompute_num_layers or 1
    if megatron.recompute_method == "block":  # the others of a chunk keep all
        again = min(num_layers, group * layout.vpp)
        return (again * of_input + sum(whole[again:])) * under_way + max(whole) + gradients
    return -(-num_layers // group) * of_input * under_way + group * max(whole) + gradients


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's tensors, by who shares them: each entry is (of experts, cut by tp, whole on each rank)."""

    layers: tuple[tuple[int, int, int], ...]
    first: tuple[int, int, int]  # of the first stage, beside its layers
    last: tuple[int, int, int]
    vocabulary: int  # rows, before they are padded for tp
    hidden: int

    @staticmethod
    def of(model: Trained) -> Sizes:
        """Reads the whole weight table once."""
        found: dict[int | str, list[int]] = {}
        for rule in table_for(model.hf_config, head=model.head):
            where = found.setdefault(rule.owner if rule.layer is None else rule.layer, [0, 0, 0])
            kind = 0 if rule.expert is not None else 2 if rule.split == "replicated" else 1
            where[kind] += math.prod(rule.megatron_shape)
        none = [0, 0, 0]
        layers = [found[layer] for layer in sorted(layer for layer in found if isinstance(layer, int))]
        entries = [tuple(entry) for entry in (*layers, found.get("embedding", none), found.get("head", none))]
        *per_layer, first, last = entries
        hf_config = model.hf_config
        return Sizes(tuple(per_layer), first, last, int(hf_config["vocab_size"]), int(hf_config["hidden_size"]))  # type: ignore[arg-type]

    def of_stage(self, layout: Layout, stage: int) -> tuple[int, int]:
        """Elements on one rank of a stage, of experts and of all else; of a tied embedding those of the first stage."""
        stage_of = layout.stage_of_layers(len(self.layers))
        parts = [part for part, own in zip(self.layers, stage_of, strict=True) if own == stage]
        padding = (-self.vocabulary % layout.tp) * self.hidden
        for is_there, part in ((stage == 0, self.first), (stage == layout.pp - 1, self.last)):
            has_vocabulary = part[1] == self.vocabulary * self.hidden
            parts += [(part[0], part[1] + padding * has_vocabulary, part[2])] * is_there
        experts, cut, whole = (sum(column) for column in zip(*parts, strict=True))
        return experts // layout.etp // layout.ep, cut // layout.tp + whole


def state_bytes(
    model: Trained, megatron: MegatronConfig, layout: Layout, stage: int, sizes: Sizes | None = None
) -> int:
    """Weights, float32 gradients, main parameters and moments of a stage's rank; a distributed optimizer's evenly, and
    none where they stand in host memory."""
    of_optimizer = 0 if megatron.optimizer_cpu_offload else sum(Kept.of(megatron).num_bytes(model.dtype))
    counts = (sizes or Sizes.of(model)).of_stage(layout, stage)
    total = 0
    for count, copies in zip(counts, (layout.edp, layout.dp * layout.cp), strict=True):
        total += count * (model.dtype.itemsize + _FLOAT32)
        total += of_optimizer * count // (copies if megatron.use_distributed_optimizer else 1)
    return total


def settled(
    megatron: MegatronConfig,
    num_ranks: int,
    models: Sequence[Trained],
    device_bytes: int,
    has_reference: bool = False,
) -> MegatronConfig:
    """`megatron` with what it leaves to us decided, alike on all ranks of the pool.

    On GPUs optimizer state is shared out where several ranks hold the same shard, and layers are computed again where
    the peak without that is over FITS of a device. `models`: all that learn on these ranks, the first with a frozen
    copy beside it where there is a reference. `device_bytes`: of the smallest GPU; 0: a CPU, where neither is done.
    """
    layout = layout_of(megatron, num_ranks)
    if megatron.use_distributed_optimizer is None:
        megatron = replace(megatron, use_distributed_optimizer=device_bytes > 0 and layout.dp * layout.cp > 1)
    if megatron.recompute_granularity == "none":
        return replace(megatron, recompute_granularity=None)
    if megatron.recompute_granularity is not None or not device_bytes:
        return megatron
    impl: Impl = "transformer_engine" if megatron.transformer_impl == "transformer_engine" else "local"
    sizes = [Sizes.of(model) for model in models]
    for stage in range(layout.pp):
        states = zip(models, sizes, strict=True)
        peak = sum(state_bytes(model, megatron, layout, stage, own) for model, own in states)
        peak += max(kept_bytes(model, megatron, layout, impl, stage) for model in models)
        peak += sum(sizes[0].of_stage(layout, stage)) * models[0].dtype.itemsize * has_reference
        if peak > FITS * device_bytes:
            return replace(megatron, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return megatron
