"""Core attention over packed documents, for all layer specs.

CUDA in half precision: a kernel of flash attention (models.flash), where one is there and takes the head's dimension.
Elsewhere: scaled_dot_product_attention, all documents of one length in one call, so that a micro-batch of hundreds of
short documents costs a handful of calls. Positions are applied here as well, from tables made once a micro-batch.

Under context parallelism a rank has the queries of its share of each document (models.document_order) and gathers the
keys and values of all: one collective forward, its reduce-scatter backward, for any mix of documents.

Legend: T tokens of this rank in a micro-batch, D documents, N heads of this rank, d head dimension, v that of values:
d, or less in latent attention.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhf_megatron.models.document_order import (
    ByLength,
    Order,
    Run,
    chunk_positions,
    group_by_length,
    prefix_keys,
    prompt_keys,
)
from rlhf_megatron.models.flash import Borders, Call, flash_kernel
from rlhf_megatron.models.rotary import Rotary, rotary_tables, rotate


@dataclass
class PackedDocuments(PackedSeqParams):
    """megatron's packing parameters of one micro-batch, with what is derived from them once for all layers."""

    positions: Tensor = None  # type: ignore[assignment]  # [T] int64, from 0 in each document, or on from its prompt's
    cp: int = 1  # ranks that share the documents
    cp_rank: int = 0  # this one among them
    prompts: Tensor | None = None  # [D] int64, the document that each goes on from, -1 of none; None: of none at all
    num_keys: int = 0  # tokens of all documents, each with its prompt; where there are prompts
    rotary_cache: dict[Any, Any] = field(default_factory=dict)
    mask_cache: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    @cached_property
    def by_length(self) -> ByLength:
        return group_by_length(self.cu_seqlens_q, self.cp, self.prompts)

    @cached_property
    def prefixes(self) -> tuple[Tensor, Tensor, Tensor]:
        """The result of `document_order.prefix_keys`, made on the device of `cu_seqlens` without a wait."""
        if self.prompts is not None:
            return self.cu_seqlens_q, *prompt_keys(self.cu_seqlens_q, self.prompts, self.num_keys)
        return prefix_keys(self.cu_seqlens_q, self.positions.numel() * self.cp, self.cp, self.cp_rank)

    def mask(self, length: int, window: int | None = None, num_before: int = 0) -> Tensor:
        """[length / cp, keys] which keys of a document of `length` tokens each of its queries here sees; of these the
        last `window`, its own with them. `num_before`: further keys in front, of its prompt."""
        if (length, window, num_before) not in self.mask_cache:
            queries = chunk_positions(length, self.cp, self.cp_rank) if self.cp > 1 else torch.arange(length)
            queries = queries + num_before
            before = queries[:, None] - torch.arange(int(queries[-1]) + 1)
            mask = before >= 0 if window is None else (before >= 0) & (before < window)
            self.mask_cache[length, window, num_before] = mask.to(self.cu_seqlens_q.device)
        return self.mask_cache[length, window, num_before]

    def rotary(self, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim / 2] of this micro-batch's positions."""
        key = (head_dim, rotary, dtype)
        if key not in self.rotary_cache:
            self.rotary_cache[key] = rotary_tables(self.positions, head_dim, rotary, dtype)
        found: tuple[Tensor, Tensor] = self.rotary_cache[key]
        return found


def packed_documents(
    cu_seqlens: Tensor,
    max_seqlen: int,
    positions: Tensor,
    cp_group: ProcessGroup | None = None,
    prompts: Tensor | None = None,
    num_keys: int = 0,
) -> PackedDocuments:
    """Make the `packed_seq_params` of a model's call for one micro-batch.

    `cu_seqlens` [D + 1] int32, borders of the documents; `max_seqlen` tokens of the longest; `positions` [T] or [1, T]
    int64. Make it once a micro-batch. Fast where documents of equal length lie together.

    With a `cp_group` of more than one rank, `cu_seqlens` and `max_seqlen` count whole documents, each a multiple of
    2 cp tokens, while `positions` and all that the model takes are this rank's share (models.document_order).

    With `prompts` [D] int64 document d goes on from document prompts[d], if that is not -1: its tokens see that
    document's too, which stands once for all that go on from it. `num_keys`: tokens of all documents, each with its
    prompt; `max_seqlen` counts that as well. Not together with a `cp_group` of more than one rank.
    """
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        cp_group=cp_group,
        positions=positions.reshape(-1),
        cp=1 if cp_group is None else cp_group.size(),
        cp_rank=0 if cp_group is None else cp_group.rank(),
        prompts=prompts,
        num_keys=num_keys,
    )


class LatentPositions(torch.nn.Module):
    """Stands where latent attention has `rotary_pos_emb`, which makes the angles: it gives cosines and sines of each
    token here, made once a micro-batch, where megatron's layer would go from document to document."""

    def __init__(self, angles: Any, config: Any) -> None:
        super().__init__()
        self.angles = angles
        self.key = (config.rope_type, config.rotary_base, config.rotary_scaling_factor, config.qk_pos_emb_head_dim)

    def get_rotary_seq_len(self, *arguments: Any) -> PackedDocuments:
        """The last argument, of which the layer hands the result to `forward`."""
        documents = arguments[-1]
        assert isinstance(documents, PackedDocuments), "the model needs packed_seq_params made by packed_documents()"
        return documents

    def forward(self, documents: PackedDocuments, packed_seq: bool = True) -> Tensor | tuple[Tensor, float]:
        """[T, 2, 1, d], of which the layer takes T rows; of YaRN with a further factor, which is in them already."""
        if self.key not in documents.rotary_cache:
            made = self.angles.get_emb(documents.max_seqlen_q)
            angles, scale = made if isinstance(made, tuple) else (made, 1.0)
            angles = angles[:, 0].index_select(0, documents.positions)
            documents.rotary_cache[self.key] = torch.stack([angles.cos() * scale, angles.sin() * scale], 1)
        tables: Tensor = documents.rotary_cache[self.key]
        return tables if self.key[0] == "rope" else (tables, 1.0)


class PackedAttention(MegatronModule):
    """Causal attention inside each document. Stands where megatron's specs have `core_attention`."""

    rotary: Rotary | None = None  # set by build_model; None: of latent attention, which has turned them

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        """`layer_number`: in the whole model, from 1."""
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout ({config.attention_dropout}) must be 0.")
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] + 1 if has_window else None  # tokens, a query's own with them
        self.tp_group = None if pg_collection is None else pg_collection.tp
        self.softmax_offset: Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = Parameter(torch.zeros(heads, dtype=config.params_dtype))
            # Without the mark the gradient norm counts the heads of tp rank 0 only.
            self.softmax_offset.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedDocuments | None = None,
    ) -> Tensor:
        """query [T, N, d], key [T, N / group, d], value [T, N / group, v] -> [T, N, v]."""
        if not isinstance(packed_seq_params, PackedDocuments):
            raise ValueError(
                "the model needs packed_seq_params made by packed_documents(); padded batches are not taken."
            )
        documents = packed_seq_params
        assert documents.cp == self.config.context_parallel_size, "packed_documents() was not given the cp group"
        if self.rotary is not None:
            turned = int(query.shape[-1] * self.rotary.share)
            cos, sin = documents.rotary(turned, self.rotary, query.dtype)
            query, key = (_turn_first(x, turned, cos, sin) for x in (query, key))
        if documents.cp > 1:
            key, value = _gather(key, value, documents.cp_group)
        if (flash := self._flash(query)) is not None:
            return _varlen(query, key, value, documents, self.softmax_scale, flash)
        return _by_length(query, key, value, documents, self.softmax_scale, self.window, self.softmax_offset)

    def _flash(self, query: Tensor) -> Call | None:
        """The kernel of these queries, where one takes them."""
        kernel = flash_kernel(query.device, query.dtype, query.shape[-1], self.softmax_offset is not None)
        if self.softmax_offset is None:
            assert kernel.call is None or self.window is None, "windows come with sinks"
            return kernel.call
        if kernel.with_sinks is None:
            return None
        return partial(kernel.with_sinks, window=self.window, sinks=self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The sinks in megatron-core's checkpoints, under its name: the heads of all tp ranks as one tensor."""
        if self.softmax_offset is None:
            return {}
        assert metadata is not None, "metadata has the group of the copies"
        named, groups = {"softmax_offset": self.softmax_offset}, (self.tp_group, metadata["dp_cp_group"])
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            named, prefix, {"softmax_offset": 0}, sharded_offsets, "_extra_state", *groups
        )
        return sharded


def _turn_first(x: Tensor, size: int, cos: Tensor, sin: Tensor) -> Tensor:
    """The first `size` dimensions of each head turned, the others as they are."""
    if size == x.shape[-1]:
        return rotate(x, cos, sin)
    return torch.cat([rotate(x[..., :size].contiguous(), cos, sin), x[..., size:]], -1)


def _gather(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Keys and values of all cp ranks, in rank order; their gradients are summed and scattered.

    Each layer keeps them for its backward pass, T cp tokens, unless core_attn is computed again.
    """
    both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
    return both.split([key.shape[-1], value.shape[-1]], -1)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scale: float, flash: Call) -> Tensor:
    """Flash attention over document borders that stay on the device.

    Under cp, the two chunks that a rank has of a document are sequences of their own, with keys from the document's
    start to the chunk's end; a document behind a shared prompt has the prompt's keys before its own. The kernels align
    the causal mask at the last query and the last key of each sequence.
    """
    borders = Borders(documents.cu_seqlens_q, documents.cu_seqlens_q, documents.max_seqlen_q, documents.max_seqlen_q)
    if documents.cp > 1 or documents.prompts is not None:
        query_borders, key_borders, places = documents.prefixes
        key, value = key.index_select(0, places), value.index_select(0, places)
        borders = borders._replace(queries=query_borders, keys=key_borders)
    if documents.cp > 1:
        longest_query = documents.max_seqlen_q // (2 * documents.cp)
        longest_key = longest_query * (2 * documents.cp - documents.cp_rank)
        borders = borders._replace(longest_query=longest_query, longest_key=longest_key)
    width = value.shape[-1]
    if width < query.shape[-1]:  # kernels take values as wide as keys
        value = pad(value, (0, query.shape[-1] - width))
    return flash(query, key, value, borders, scale)[..., :width]


def _by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One call for all documents of a length; documents are brought together first where they are not.

    `sinks` [N]: a logit a head that every query has besides those of keys.
    """
    grouped = documents.by_length
    query, key, value = (
        _permute(query, grouped.queries),
        _permute(key, grouped.keys),
        _permute(value, grouped.keys),
    )
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for run in grouped.runs:
        q, whole = _heads_first(query, run), run.times(documents.cp)
        k, v = (_heads_first(tensor, whole) for tensor in (key, value))
        before = 0
        if run.prompt is not None and run.prompts is not None:
            before = run.prompt.length
            prompts = (_heads_first(tensor, run.prompt).index_select(0, run.prompts) for tensor in (key, value))
            k, v = (torch.cat(parts, 2) for parts in zip(prompts, (k, v), strict=True))
        if documents.cp > 1 or window is not None or sinks is not None or before:
            mask = documents.mask(whole.length, window, before)
            k, v = (tensor[:, :, : mask.shape[1]] for tensor in (k, v))
            if sinks is not None:
                k, v, mask = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1)), _with_sinks(mask, sinks)
            out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped)
        else:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
        outputs.append(out.transpose(1, 2).reshape(run.stop - run.start, -1, value.shape[-1]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _permute(out, grouped.queries, undo=True)


def _with_sinks(mask: Tensor, sinks: Tensor) -> Tensor:
    """[queries, keys], [N] -> [N, queries, keys + 1], what is added to the logits: a sink is one more key, of zeros."""
    added = sinks.new_zeros(mask.shape).masked_fill(~mask, -math.inf).expand(len(sinks), -1, -1)
    return torch.cat([added, sinks[:, None, None].expand(-1, len(mask), 1)], -1)


def _heads_first(tensor: Tensor, run: Run) -> Tensor:
    """[T, N, d] -> [documents of the run, N, length, d], a view."""
    return tensor[run.start : run.stop].unflatten(0, (-1, run.length)).transpose(1, 2)


def _permute(tensor: Tensor, order: Order | None, undo: bool = False) -> Tensor:
    if order is None:
        return tensor
    there, back = (order.places, order.tokens) if undo else (order.tokens, order.places)
    return _Permute.apply(tensor, there, back)


class _Permute(torch.autograd.Function):
    """tensor[order]; the gradient is a gather too, where indexing would scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return tensor.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
