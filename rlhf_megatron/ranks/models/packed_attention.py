"""Core attention over packed documents, for all layer specs.

CUDA in half precision: a kernel of flash attention (flash_attention), where one is there and takes
the head's dimension. Elsewhere: scaled_dot_product_attention, all documents of one length in one
call, so that a micro-batch of hundreds of short documents costs a handful of calls. Positions are
applied here as well, from tables made once a micro-batch.

Under context parallelism a rank has the queries of its share of each document
(document_token_order) and gathers the keys and values of all: one collective forward, its
reduce-scatter backward, for any mix of documents.

Legend: T tokens of this rank in a micro-batch, D documents, N heads of this rank, d head dimension,
v that of values:
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
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.nn.functional import pad, scaled_dot_product_attention

from rlhf_megatron.ranks.models.document_token_order import (
    DocumentRun,
    LengthGroups,
    TokenOrder,
    compute_chunk_positions,
    group_documents_by_length,
    locate_prefix_keys,
    locate_prompt_keys,
)
from rlhf_megatron.ranks.models.flash_attention import (
    FlashAttentionCall,
    SequenceBorders,
    choose_flash_kernel,
)
from rlhf_megatron.ranks.models.rotary_embedding import (
    RotaryConfig,
    make_rotary_tables,
    rotate_pairs,
)


@dataclass
class PackedDocuments(PackedSeqParams):
    """megatron's packing parameters of one micro-batch, with tables derived from them once for all
    layers.
    """

    # [T] int64, from 0 in each document, or on from its prompt's
    positions: Tensor = None  # type: ignore[assignment]
    cp: int = 1  # ranks that share the documents
    cp_rank: int = 0  # this one among them
    # [D] int64, the document that each goes on from, -1 of none; None: of none at all
    prompt_documents: Tensor | None = None
    num_keys: int = 0  # tokens of all documents, each with its prompt; where there are prompts
    rotary_cache: dict[Any, Any] = field(default_factory=dict)
    mask_cache: dict[tuple[int, int | None, int], Tensor] = field(default_factory=dict)

    @cached_property
    def length_groups(self) -> LengthGroups:
        """Return the documents in groups of equal length, computed once."""
        return group_documents_by_length(self.cu_seqlens_q, self.cp, self.prompt_documents)

    @cached_property
    def prefix_key_layout(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (query borders, key borders, place of each key): the result of
        `document_token_order.locate_prefix_keys`, or of `locate_prompt_keys` where prompts are
        shared, made on the device of `cu_seqlens` without a wait.
        """
        if self.prompt_documents is not None:
            return self.cu_seqlens_q, *locate_prompt_keys(
                self.cu_seqlens_q, self.prompt_documents, self.num_keys
            )
        return locate_prefix_keys(
            self.cu_seqlens_q, self.positions.numel() * self.cp, self.cp, self.cp_rank
        )

    def get_attention_mask(
        self, length: int, window: int | None = None, num_prompt_keys: int = 0
    ) -> Tensor:
        """Return [length / cp, keys]: whether each query that this rank holds of a document of
        `length` tokens sees each key. A query sees only the last `window` keys, its own included;
        `num_prompt_keys` further keys in front belong to its prompt.
        """
        if (length, window, num_prompt_keys) not in self.mask_cache:
            queries = (
                compute_chunk_positions(length, self.cp, self.cp_rank)
                if self.cp > 1
                else torch.arange(length)
            )
            queries = queries + num_prompt_keys
            before = queries[:, None] - torch.arange(int(queries[-1]) + 1)
            mask = before >= 0 if window is None else (before >= 0) & (before < window)
            self.mask_cache[length, window, num_prompt_keys] = mask.to(self.cu_seqlens_q.device)
        return self.mask_cache[length, window, num_prompt_keys]

    def get_rotary_tables(
        self, head_dim: int, rotary: RotaryConfig, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [T, 1, head_dim / 2], of this micro-batch's positions."""
        key = (head_dim, rotary, dtype)
        if key not in self.rotary_cache:
            self.rotary_cache[key] = make_rotary_tables(self.positions, head_dim, rotary, dtype)
        found: tuple[Tensor, Tensor] = self.rotary_cache[key]
        return found


def make_packed_documents(
    cu_seqlens: Tensor,
    max_seqlen: int,
    positions: Tensor,
    cp_group: ProcessGroup | None = None,
    prompt_documents: Tensor | None = None,
    num_keys: int = 0,
) -> PackedDocuments:
    """Return the `packed_seq_params` of a model's call for one micro-batch.

    `cu_seqlens` [D + 1] int32 holds the borders of the documents, `max_seqlen` the tokens of the
    longest, `positions` [T] or [1, T] int64. Make it once for each micro-batch. Attention is fast
    where documents of equal length lie together.

    With a `cp_group` of more than one rank, `cu_seqlens` and `max_seqlen` count whole documents,
    each a multiple of 2 cp tokens, while `positions` and all inputs of the model are this rank's
    share (ranks.models.document_token_order).

    With `prompt_documents` [D] int64, document d continues document prompt_documents[d], unless
    that is -1: its tokens also see that document's tokens, which are there once for all documents
    that continue it. `num_keys` is the number of tokens of all documents, each with its prompt;
    `max_seqlen` counts prompts as well. Not together with a `cp_group` of more than one rank.
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
        prompt_documents=prompt_documents,
        num_keys=num_keys,
    )


class LatentRotaryEmbedding(torch.nn.Module):
    """Takes the place of `rotary_pos_emb` in latent attention, which makes angles: this module
    returns the cosines and sines of each token, made once a micro-batch, where megatron's layer
    would go from document to document.
    """

    def __init__(self, angles: Any, config: Any) -> None:
        super().__init__()
        self.angles = angles
        self.cache_key = (
            config.rope_type,
            config.rotary_base,
            config.rotary_scaling_factor,
            config.qk_pos_emb_head_dim,
        )

    def get_rotary_seq_len(self, *arguments: Any) -> PackedDocuments:
        """Return the last argument, the PackedDocuments, which the layer hands to `forward`."""
        documents = arguments[-1]
        assert isinstance(documents, PackedDocuments), (
            "the model needs packed_seq_params made by make_packed_documents()"
        )
        return documents

    def forward(
        self, documents: PackedDocuments, packed_seq: bool = True
    ) -> Tensor | tuple[Tensor, float]:
        """Return the cosines and sines [T, 2, 1, d] of the documents' tokens. With YaRN return also
        the factor 1.0, because the tables contain YaRN's factor already.
        """
        if self.cache_key not in documents.rotary_cache:
            made = self.angles.get_emb(documents.max_seqlen_q)
            angles, scale = made if isinstance(made, tuple) else (made, 1.0)
            angles = angles[:, 0].index_select(0, documents.positions)
            documents.rotary_cache[self.cache_key] = torch.stack(
                [angles.cos() * scale, angles.sin() * scale], 1
            )
        tables: Tensor = documents.rotary_cache[self.cache_key]
        return tables if self.cache_key[0] == "rope" else (tables, 1.0)


class PackedAttention(MegatronModule):
    """Causal attention inside each document. Takes the place of
    `core_attention` in megatron's layer specs.
    """

    # set by build_megatron_model; None: of latent attention, which has turned them
    rotary: RotaryConfig | None = None

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        """Raise ValueError for an attention dropout. `layer_number` counts in the whole model, from
        1.
        """
        super().__init__(config=config)
        if config.attention_dropout:
            raise ValueError(f"attention_dropout ({config.attention_dropout}) must be 0.")
        self.softmax_scale = (
            1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        )
        has_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # tokens, a query's own with them
        self.window: int | None = config.window_size[0] + 1 if has_window else None
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
        """Return attention [T, N, v] of query [T, N, d], key [T, N / group, d] and value [T, N /
        group, v], after applying rotary positions. Raise ValueError where `packed_seq_params` are
        not PackedDocuments.
        """
        if not isinstance(packed_seq_params, PackedDocuments):
            raise ValueError(
                "the model needs packed_seq_params made by make_packed_documents(); padded batches"
                " are not taken."
            )
        documents = packed_seq_params
        assert documents.cp == self.config.context_parallel_size, (
            "make_packed_documents() was not given the cp group"
        )
        if self.rotary is not None:
            turned = int(query.shape[-1] * self.rotary.rotated_share)
            cos, sin = documents.get_rotary_tables(turned, self.rotary, query.dtype)
            query, key = (_rotate_first_dims(x, turned, cos, sin) for x in (query, key))
        if documents.cp > 1:
            key, value = _gather_keys_and_values(key, value, documents.cp_group)
        if (flash := self._choose_flash_call(query)) is not None:
            return _attend_with_flash(query, key, value, documents, self.softmax_scale, flash)
        return _attend_by_length(
            query, key, value, documents, self.softmax_scale, self.window, self.softmax_offset
        )

    def _choose_flash_call(self, query: Tensor) -> FlashAttentionCall | None:
        """Return the flash attention call for these queries, with window and sinks bound; None
        where no kernel accepts them.
        """
        kernel = choose_flash_kernel(
            query.device, query.dtype, query.shape[-1], self.softmax_offset is not None
        )
        if self.softmax_offset is None:
            assert kernel.attention_call is None or self.window is None, "windows come with sinks"
            return kernel.attention_call
        if kernel.sink_attention_call is None:
            return None
        return partial(kernel.sink_attention_call, window=self.window, sinks=self.softmax_offset)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the sinks for megatron-core's checkpoints, under its name, the heads of all tp
        ranks as one tensor; {} without sinks.
        """
        if self.softmax_offset is None:
            return {}
        assert metadata is not None, "metadata has the group of the copies"
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            "_extra_state",
            self.tp_group,
            metadata["dp_cp_group"],
        )
        return sharded


def _rotate_first_dims(x: Tensor, num_rotated_dims: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x with the first `num_rotated_dims` dimensions of each head rotated, and the others as
    they are.
    """
    if num_rotated_dims == x.shape[-1]:
        return rotate_pairs(x, cos, sin)
    return torch.cat(
        [rotate_pairs(x[..., :num_rotated_dims].contiguous(), cos, sin), x[..., num_rotated_dims:]],
        -1,
    )


def _gather_keys_and_values(
    key: Tensor, value: Tensor, cp_group: ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all cp ranks, in rank order; their gradients are summed and
    scattered.

    Each layer keeps them for its backward pass, T cp tokens, unless core_attn is recomputed.
    """
    both = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=cp_group)
    return both.split([key.shape[-1], value.shape[-1]], -1)


def _attend_with_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    scale: float,
    flash_call: FlashAttentionCall,
) -> Tensor:
    """Return flash attention over document borders that stay on the device.

    Under cp, the two chunks that a rank holds of a document are sequences of their own, with keys
    from the document's start to the chunk's end; a document behind a shared prompt has the prompt's
    keys before its own. The kernels align the causal mask at the last query and the last key of
    each sequence.
    """
    borders = SequenceBorders(
        documents.cu_seqlens_q,
        documents.cu_seqlens_q,
        documents.max_seqlen_q,
        documents.max_seqlen_q,
    )
    if documents.cp > 1 or documents.prompt_documents is not None:
        query_borders, key_borders, places = documents.prefix_key_layout
        key = key.index_select(0, places)
        value = value.index_select(0, places)
        borders = borders._replace(query_borders=query_borders, key_borders=key_borders)
    if documents.cp > 1:
        longest_query = documents.max_seqlen_q // (2 * documents.cp)
        longest_key = longest_query * (2 * documents.cp - documents.cp_rank)
        borders = borders._replace(longest_query=longest_query, longest_key=longest_key)
    width = value.shape[-1]
    if width < query.shape[-1]:  # kernels take values as wide as keys
        value = pad(value, (0, query.shape[-1] - width))
    return flash_call(query, key, value, borders, scale)[..., :width]


def _attend_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: PackedDocuments,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention by one call for all documents of a length, which are brought together first
    where they are not.

    `sinks` [N] holds a logit for each head, which every query has besides the logits of its keys.
    """
    grouped = documents.length_groups
    query = _permute_tokens(query, grouped.query_order)
    key = _permute_tokens(key, grouped.key_order)
    value = _permute_tokens(value, grouped.key_order)
    is_grouped = query.shape[1] != key.shape[1]
    outputs = []
    for run in grouped.document_runs:
        q = _view_heads_first(query, run)
        whole = run.multiply_parts(documents.cp)
        k, v = (_view_heads_first(tensor, whole) for tensor in (key, value))
        before = 0
        if run.prompt_run is not None and run.prompt_indices is not None:
            before = run.prompt_run.length
            prompts = (
                _view_heads_first(tensor, run.prompt_run).index_select(0, run.prompt_indices)
                for tensor in (key, value)
            )
            k, v = (torch.cat(parts, 2) for parts in zip(prompts, (k, v), strict=True))
        if documents.cp > 1 or window is not None or sinks is not None or before:
            mask = documents.get_attention_mask(whole.length, window, before)
            k, v = (tensor[:, :, : mask.shape[1]] for tensor in (k, v))
            if sinks is not None:
                k = pad(k, (0, 0, 0, 1))
                v = pad(v, (0, 0, 0, 1))
                mask = _append_sinks_to_mask(mask, sinks)
            out = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, scale=scale, enable_gqa=is_grouped
            )
        else:
            out = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped
            )
        outputs.append(out.transpose(1, 2).reshape(run.stop - run.start, -1, value.shape[-1]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _permute_tokens(out, grouped.query_order, is_inverse=True)


def _append_sinks_to_mask(mask: Tensor, sinks: Tensor) -> Tensor:
    """Return [N, queries, keys + 1]: the numbers to add to the logits, from a boolean mask
    [queries, keys] and sinks [N]. A sink is one more key, of zeros.
    """
    added = sinks.new_zeros(mask.shape).masked_fill(~mask, -math.inf).expand(len(sinks), -1, -1)
    return torch.cat([added, sinks[:, None, None].expand(-1, len(mask), 1)], -1)


def _view_heads_first(tensor: Tensor, document_run: DocumentRun) -> Tensor:
    """Return a view [documents of the run, N, length, d] of a tensor [T, N, d]."""
    return (
        tensor[document_run.start : document_run.stop]
        .unflatten(0, (-1, document_run.length))
        .transpose(1, 2)
    )


def _permute_tokens(
    tensor: Tensor, token_order: TokenOrder | None, is_inverse: bool = False
) -> Tensor:
    """Return the tensor with its tokens put in the order, or back with `is_inverse`; None leaves
    the tensor as it is.
    """
    if token_order is None:
        return tensor
    there, back = (
        (token_order.inverse, token_order.tokens)
        if is_inverse
        else (token_order.tokens, token_order.inverse)
    )
    return _PermuteTokens.apply(tensor, there, back)


class _PermuteTokens(torch.autograd.Function):
    """tensor[order], whose gradient is a gather too, where indexing would scatter."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Return the tensor with its tokens in `order`."""
        ctx.save_for_backward(inverse)
        return tensor.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the tokens' original order."""
        return grad.index_select(0, ctx.saved_tensors[0]), None, None
