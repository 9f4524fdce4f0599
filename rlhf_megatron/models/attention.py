"""Core attention over packed documents, for layer specs without Transformer Engine.

CPU (and float32 anywhere): scaled_dot_product_attention, all documents of one length in one call, so that a micro-batch
of hundreds of short documents costs a handful of calls. CUDA in half precision: torch's varlen flash attention.
Positions are applied here as well, from tables made once a micro-batch.

Legend: T tokens of a micro-batch, D documents, N heads of this rank, d head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlhf_megatron.models.rotary import Rotary, rotary_tables, rotate

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Run:
    """Consecutive documents of one length."""

    start: int  # first token
    stop: int  # after the last token
    length: int  # tokens of each document


@dataclass
class PackedDocuments(PackedSeqParams):
    """megatron's packing parameters of one micro-batch, with what is derived from them once for all layers."""

    positions: Tensor = None  # type: ignore[assignment]  # [T] int64, from 0 in each document
    rotary_cache: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def _plan(self) -> tuple[tuple[Run, ...], Tensor | None, Tensor | None]:
        borders = self.cu_seqlens_q.to(device="cpu", dtype=torch.int64)
        lengths = borders.diff()
        runs = _runs(lengths)
        if len(runs) == lengths.unique().numel():
            return runs, None, None
        by_length = lengths.argsort(stable=True)
        sizes = lengths[by_length]
        starts = torch.repeat_interleave(borders[by_length] - (sizes.cumsum(0) - sizes), sizes)
        order = (starts + torch.arange(int(borders[-1]))).to(self.cu_seqlens_q.device)
        return _runs(sizes), order, order.argsort()

    @property
    def runs(self) -> tuple[Run, ...]:
        """Documents grouped by length; token positions count after `order` is applied."""
        return self._plan[0]

    @property
    def order(self) -> Tensor | None:
        """[T] the token at each place once documents are sorted by length; None where equal lengths lie together."""
        return self._plan[1]

    @property
    def inverse(self) -> Tensor | None:
        """[T] undoes `order`."""
        return self._plan[2]

    def rotary(self, head_dim: int, rotary: Rotary, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim / 2] of this micro-batch's positions."""
        key = (head_dim, rotary, dtype)
        if key not in self.rotary_cache:
            self.rotary_cache[key] = rotary_tables(self.positions, head_dim, rotary, dtype)
        return self.rotary_cache[key]


def packed_documents(cu_seqlens: Tensor, max_seqlen: int, positions: Tensor) -> PackedDocuments:
    """What `model(..., packed_seq_params=...)` takes for one micro-batch.

    `cu_seqlens` [D + 1] int32, borders of the documents, the last is T; `max_seqlen` tokens of the longest;
    `positions` [T] or [1, T] int64. Make it once a micro-batch. Fast where documents of equal length lie together.
    """
    return PackedDocuments(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
        positions=positions.reshape(-1),
    )


class PackedAttention(MegatronModule):
    """Causal attention inside each document. Stands where megatron's specs have `core_attention`."""

    rotary: Rotary | None = None  # set by build_model; None: queries and keys come with their positions

    def __init__(
        self, config: Any, softmax_scale: float | None = None, pg_collection: Any = None, **unused: Any
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size ({config.context_parallel_size}) must be 1: this attention needs"
                " whole documents on a rank. Use tensor_model_parallel_size to save memory."
            )
        if config.attention_dropout:
            raise ValueError(f"attention_dropout ({config.attention_dropout}) must be 0.")
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

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
        """query [T, N, d], key and value [T, N / group, d] -> [T, N, d]."""
        if not isinstance(packed_seq_params, PackedDocuments):
            raise ValueError(
                "the model needs packed_seq_params made by packed_documents(); padded batches are not taken."
            )
        documents = packed_seq_params
        if self.rotary is not None:
            cos, sin = documents.rotary(query.shape[-1], self.rotary, query.dtype)
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and varlen_attn is not None:
            return _varlen(query, key, value, documents, self.softmax_scale)
        return _by_length(query, key, value, documents, self.softmax_scale)


def _varlen(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scale: float) -> Tensor:
    """Flash attention over document borders that stay on the device."""
    borders, longest = documents.cu_seqlens_q, documents.max_seqlen_q
    return varlen_attn(  # type: ignore[return-value]
        query.contiguous(),
        key.contiguous(),
        value.contiguous(),
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=(-1, 0),  # causal
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_length(query: Tensor, key: Tensor, value: Tensor, documents: PackedDocuments, scale: float) -> Tensor:
    """One call for all documents of a length; documents are brought together first where they are not."""
    order, inverse = documents.order, documents.inverse
    if order is not None and inverse is not None:
        query, key, value = (_Permute.apply(tensor, order, inverse) for tensor in (query, key, value))
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for run in documents.runs:
        q, k, v = (_heads_first(tensor, run) for tensor in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
        outputs.append(out.transpose(1, 2).reshape(run.stop - run.start, *query.shape[1:]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if order is None else _Permute.apply(out, inverse, order)


def _heads_first(tensor: Tensor, run: Run) -> Tensor:
    """[T, N, d] -> [documents of the run, N, length, d], a view."""
    return tensor[run.start : run.stop].unflatten(0, (-1, run.length)).transpose(1, 2)


class _Permute(torch.autograd.Function):
    """tensor[order]; the gradient is a gather too, where indexing would scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return tensor.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None


def _runs(lengths: Tensor) -> tuple[Run, ...]:
    """Maximal runs of equal lengths. Documents without tokens are left out."""
    values, counts = lengths.unique_consecutive(return_counts=True)
    runs, start = [], 0
    for length, count in zip(values.tolist(), counts.tolist(), strict=True):
        if length:
            runs.append(Run(start, start + length * count, length))
        start += length * count
    return tuple(runs)
