"""The weight table: which Megatron tensor is which Hugging Face tensors, how they convert, how
they are sharded.

One table of a model serves loading, exporting, the conversion CLI, resharding to the engines and
digests. Pure tensors:
no process group, no Megatron. `to_megatron(to_hf(w)) == w` and `join(split(w)) == w`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.weights.parallel_layout import ParallelLayout

TensorSplit = Literal["replicated", "rows", "columns", "gated_rows", "pieces"]
"""How tp (of an expert: etp) shards a full Megatron tensor: not at all; dim 0; dim 1; dim 0 of each
half (gate, up) apart. "pieces" is FSDP2's: dim 0 in pieces of one size, of which the last may be
smaller, and further ones empty.
"""

StageOwner = Literal["embedding", "layer", "head"]
"""Which pipeline stage has the tensor: the first, the one of its layer, the last."""

HeadKind = Literal["vocabulary", "value", "unbiased_value"]
"""What stands behind the final norm: the output layer of a policy, the value head of a critic, with
weight and bias, or the value head of a reward model, which has no bias unless the run asks for one.
"""

VALUE_HEADS: frozenset[HeadKind] = frozenset({"value", "unbiased_value"})
"""The heads with one number a token."""

LayerImpl = Literal["local", "transformer_engine"]
"""Whose names the modules of a Megatron model have. Tables, and files on disk, are made under
the "local" ones.
"""

LayerPart = Literal["self_attention", "mlp"]
"""Of a layer, under megatron-core's names."""

_INPUT_NORM = "input_layernorm.weight"
_MLP_NORM = "pre_mlp_layernorm.weight"
_QUERY_NORM = "self_attention.q_layernorm.weight"
_KEY_NORM = "self_attention.kv_layernorm.weight"
FUSED_NORMS = {
    _INPUT_NORM: "self_attention.linear_qkv.layer_norm_weight",
    _MLP_NORM: "mlp.linear_fc1.layer_norm_weight",
    _QUERY_NORM: "self_attention.linear_q_up_proj.layer_norm_weight",
    _KEY_NORM: "self_attention.linear_kv_up_proj.layer_norm_weight",
}
"""In a layer: Transformer Engine has the norm in the matrix behind it, where that is one matrix."""


@dataclass(frozen=True)
class StackedEntry:
    """The place of a tensor that files keep as one entry, along a further first axis, of a
    larger tensor.
    """

    name: str  # of the larger one: "model.layers.3.mlp.experts.down_proj"
    index: int
    num_entries: int  # entries of it


@dataclass(frozen=True)
class HFTensor:
    """A tensor of the Hugging Face layout."""

    name: str  # "model.layers.3.self_attn.q_proj.weight"
    shape: tuple[int, ...]
    entry: StackedEntry | None = None  # None: files have it under its own name
    # in engines that hold it quantised, or a scale of it; None: as the others of its rule
    dtype: str | None = None

    @property
    def stored_name(self) -> str:
        """Return the name of the tensor in files that holds this one: its own name or, for an
        entry, that of the larger tensor.
        """
        return self.name if self.entry is None else self.entry.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of the tensor in files that holds this one."""
        return self.shape if self.entry is None else (self.entry.num_entries, *self.shape)


@dataclass(frozen=True)
class TensorSpan:
    """Entries start .. start + count - 1 of a tensor along an axis."""

    dim: int
    start: int
    num_entries: int

    @staticmethod
    def cover_whole_tensor(hf_tensor: HFTensor) -> TensorSpan:
        """Return the span of all entries of a tensor along axis 0."""
        return TensorSpan(0, 0, hf_tensor.shape[0])

    def shape_within(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of `shape`."""
        return (*shape[: self.dim], self.num_entries, *shape[self.dim + 1 :])


@dataclass(frozen=True)
class WeightRule:
    """One Megatron tensor and the Hugging Face tensors that it is made of."""

    # global: layers and experts counted over the whole model: "decoder.layers.3.mlp.router.weight"
    megatron_name: str
    megatron_shape: tuple[int, ...]  # full, not sharded; vocabulary padded
    hf_tensors: tuple[HFTensor, ...]
    to_megatron: Callable[..., Tensor]  # (*hf tensors) -> full Megatron tensor
    # full Megatron tensor -> hf tensors, in the order of `hf_tensors`
    to_hf: Callable[[Tensor], tuple[Tensor, ...]]
    split: TensorSplit
    owner: StageOwner
    layer: int | None  # global layer number for owner "layer"
    fusion_group: str  # tensors that an engine loads together: one bucket must hold the whole group
    # indivisible blocks along the split dimension (KV groups); None: as its size divides
    num_blocks: int | None = None
    # whose tensor it is; None: not of an expert, so that tp shards it and not etp
    expert: int | None = None
    num_experts: int = 0  # of the layer, where it is an expert's
    # of a buffer, whatever the model's type and that of a sync are; None: a parameter
    dtype: str | None = None
    is_transposed: bool = False  # the Hugging Face tensor has its input as the first axis

    def get_sent_dtype(self, hf_tensor: HFTensor, engine_dtype: str) -> str:
        """Return the type in which one of `hf_tensors` is sent to engines whose weight type is
        `engine_dtype`: the tensor's own, a buffer's, or else the engine's.
        """
        return hf_tensor.dtype or self.dtype or engine_dtype

    @property
    def hf_split_dim(self) -> int:
        """Return the axis along which shards cut the Hugging Face tensors, for a rule that is
        split.
        """
        return int((self.split == "columns") != self.is_transposed)


def make_plain_rule(
    name: str,
    tensor: HFTensor,
    split: TensorSplit,
    layer: int | None,
    num_blocks: int | None = None,
) -> WeightRule:
    """Return the rule of a Megatron tensor that equals one Hugging Face tensor. `layer` None: the
    tensor belongs to the last stage. `num_blocks`: indivisible blocks along the split axis.
    """
    return WeightRule(
        megatron_name=name,
        megatron_shape=tensor.shape,
        hf_tensors=(tensor,),
        to_megatron=_keep_tensor,
        to_hf=_wrap_tensor_in_tuple,
        split=split,
        owner="head" if layer is None else "layer",
        layer=layer,
        fusion_group=tensor.name,
        num_blocks=num_blocks,
    )


def _keep_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor as it is."""
    return tensor


def _wrap_tensor_in_tuple(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the tensor in a tuple of one."""
    return (tensor,)


def concatenate_tensors(*tensors: Tensor) -> Tensor:
    """Return the tensors joined along axis 0, such as gate and up."""
    return torch.cat(tensors)


def collect_stored_shapes(tensors: Iterable[HFTensor]) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of each stored tensor that holds one of these, each once."""
    return {hf.stored_name: hf.stored_shape for hf in tensors}


def split_into_halves(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the two halves of a tensor along axis 0: the inverse of `concatenate_tensors` of
    two.
    """
    return tuple(tensor.chunk(2))


def rename_rules_for_impl(impl: LayerImpl, table: Iterable[WeightRule]) -> tuple[WeightRule, ...]:
    """Return the rules of a table that was made under local names, with the module names of `impl`:
    the same tensors in the same order.

    Transformer Engine has a norm fused into the matrix behind it. In front of latent attention and
    of experts there are several matrices, so that their norms stay apart.
    """
    rules = tuple(table)
    if impl == "local":
        return rules
    of_experts = {rule.layer for rule in rules if rule.expert is not None}
    latent = {rule.layer for rule in rules if rule.megatron_name.endswith(f".{_KEY_NORM}")}

    def rename_fused_norm(rule: WeightRule) -> WeightRule:
        """Return the rule of a norm under its fused name where the layer fuses the norm, else the
        rule as it is.
        """
        _, _, name = rule.megatron_name.partition(f".{rule.layer}.")
        has_experts = rule.layer in of_experts
        is_latent = rule.layer in latent
        is_fused = {
            _INPUT_NORM: not is_latent,
            _MLP_NORM: not has_experts,
            _QUERY_NORM: is_latent,
            _KEY_NORM: True,
        }
        if not is_fused.get(name, False):
            return rule
        return replace(
            rule, megatron_name=rule.megatron_name.removesuffix(name) + FUSED_NORMS[name]
        )

    return tuple(rename_fused_norm(rule) for rule in rules)


def check_tensor_parallel_split(
    table: Sequence[WeightRule], tp_size: int, etp_size: int | None = None
) -> None:
    """Raise ValueError, naming the first tensor, when some rule cannot be split over `tp_size`
    ranks, or an expert's over `etp_size` ranks (None: also `tp_size`).
    """
    bad = []
    for rule in table:
        if rule.split in ("replicated", "pieces"):
            continue
        size = rule.megatron_shape[1 if rule.split == "columns" else 0]
        blocks = rule.num_blocks or (size // 2 if rule.split == "gated_rows" else size)
        ways = tp_size if rule.expert is None or etp_size is None else etp_size
        if blocks % ways != 0:
            bad.append((rule, blocks, ways))
    if bad:
        rule, blocks, ways = bad[0]
        raise ValueError(
            f"tensor parallel size {ways} does not divide {len(bad)} tensors, first"
            f" {rule.megatron_name} {rule.megatron_shape} with {blocks} blocks (key-value groups,"
            f" or rows); it must divide {blocks}."
        )


def find_hf_spans(rule: WeightRule, num_shards: int, shard_index: int) -> tuple[TensorSpan, ...]:
    """Return, in the order of `hf_tensors`, the parts of a rule's Hugging Face tensors that `to_hf`
    makes of Megatron shard `shard_index`. Where `to_hf` leaves rows of a padded vocabulary in, they
    come after the entries of the span.

    Asserts that the rule's split is not "pieces": pieces end anywhere in a head or an expert, so
    they have no such parts.
    """
    assert rule.split != "pieces", f"{rule.megatron_name}: pieces have no parts"
    if rule.split == "replicated" or num_shards == 1:
        return tuple(map(TensorSpan.cover_whole_tensor, rule.hf_tensors))
    axis = rule.hf_split_dim
    own_axis = 1 if rule.split == "columns" else 0
    spans = []
    for hf in rule.hf_tensors:
        size = hf.shape[axis]
        each = (size if len(rule.hf_tensors) > 1 else rule.megatron_shape[own_axis]) // num_shards
        start = min(shard_index * each, size)
        spans.append(TensorSpan(axis, start, min(each, size - start)))
    return tuple(spans)


def find_holder_places(rule: WeightRule, layout: ParallelLayout) -> range:
    """Return the places in a pipeline stage of the ranks that hold the shards of a rule, in shard
    order, in the first copy (`ParallelLayout.copy_size`); for a tensor that is not split, the first
    of its holders only.
    """
    first = 0
    ways = layout.tp
    if rule.expert is not None:
        first = rule.expert // (rule.num_experts // layout.ep) * layout.etp
        ways = layout.etp
    return range(first, first + (1 if rule.split == "replicated" else ways))


def slice_piece(dim_size: int, piece_index: int, num_pieces: int) -> slice:
    """Return the slice of rows of one of `num_pieces` pieces of a dimension of `dim_size`; the last
    pieces may be shorter or empty.
    """
    each = -(-dim_size // num_pieces)
    return slice(min(piece_index * each, dim_size), min((piece_index + 1) * each, dim_size))


def compute_shard_shape(rule: WeightRule, num_shards: int, shard_index: int = 0) -> tuple[int, ...]:
    """Return the shape of shard `shard_index` of `num_shards`. All shards have the same shape,
    except "pieces".
    """
    shape = list(rule.megatron_shape)
    if rule.split == "pieces":
        rows = slice_piece(shape[0], shard_index, num_shards)
        shape[0] = rows.stop - rows.start
    elif rule.split != "replicated":
        shape[1 if rule.split == "columns" else 0] //= num_shards
    return tuple(shape)


def select_stage_rules(
    table: Sequence[WeightRule], stage: int, layout: ParallelLayout
) -> tuple[WeightRule, ...]:
    """Return the rules whose tensors belong to pipeline stage `stage`. Raise ValueError where the
    layers do not divide, as `ParallelLayout.split_layers_into_chunks` does.
    """
    num_layers = 1 + max((rule.layer for rule in table if rule.layer is not None), default=-1)
    stage_of = layout.map_layers_to_stages(num_layers)
    owners = {"embedding": 0, "head": layout.pp - 1}
    return tuple(
        rule
        for rule in table
        if (owners[rule.owner] if rule.layer is None else stage_of[rule.layer]) == stage
    )


def split_tensor(rule_split: TensorSplit, full_tensor: Tensor, num_shards: int) -> list[Tensor]:
    """Return the shards of a full Megatron tensor in rank order, as views where possible; a
    replicated tensor is returned `num_shards` times. Raise ValueError when a dimension does not
    divide.
    """
    if rule_split == "replicated" or num_shards == 1:
        return [full_tensor] * num_shards
    if rule_split == "pieces":
        return [
            full_tensor[slice_piece(len(full_tensor), number, num_shards)]
            for number in range(num_shards)
        ]
    dim = 1 if rule_split == "columns" else 0
    parts = 2 if rule_split == "gated_rows" else 1
    if full_tensor.shape[dim] % (num_shards * parts) != 0:
        raise ValueError(
            f"dimension {dim} of shape {tuple(full_tensor.shape)} must be a multiple of"
            f" {num_shards * parts} to be split over tensor parallel size {num_shards}."
        )
    if rule_split != "gated_rows":
        return list(full_tensor.chunk(num_shards, dim))
    gate, up = full_tensor.chunk(2, 0)
    return [
        torch.cat(pair)
        for pair in zip(gate.chunk(num_shards, 0), up.chunk(num_shards, 0), strict=True)
    ]


def join_shards(rule_split: TensorSplit, shards: list[Tensor]) -> Tensor:
    """Return the full Megatron tensor made of its shards: the inverse of `split_tensor`."""
    if rule_split == "replicated" or len(shards) == 1:
        return shards[0]
    if rule_split == "gated_rows":
        halves = [shard.chunk(2, 0) for shard in shards]
        return torch.cat([gate for gate, _ in halves] + [up for _, up in halves])
    return torch.cat(shards, 1 if rule_split == "columns" else 0)
