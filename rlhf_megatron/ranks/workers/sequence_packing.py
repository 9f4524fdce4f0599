"""A replica's shard as packed micro-batches, and the results back. Pack once, unpack once; no
Python per document.

A document's last token predicts nothing and is left out, here and where `runtime.call_dispatch`
counts lengths.

    two documents  a b c d | e f g     response tokens c d | g         packed to 7 tokens
    token_ids      0 0 e f a b c       cu_seqlens 0 1 2 4 7: filler documents of one token, which
                                       nothing reads,
    positions      0 0 0 1 0 1 2       then the documents by length, as attention wants them
    rows                 ^   ^ ^       positions that predict a response token: the head
                                       runs on these only
    targets              g   c d
    sequence_ids         0   1 1       of the documents as they are packed, fillers not counted

Under context parallelism each document is padded to 2 cp chunks of one size, of which rank r has
chunks r and 2 cp - 1 - r: every rank has as much causal attention to do. The same documents at cp
2, packed to 12 tokens:

    padded         0 0 0 0 | e f . . | a b c .
                   cu_seqlens 0 4 8 12, of the whole documents, on every rank
    rank 0         0 0       e     .   a     .     positions 0 3 0 3 0 3
                   no row: g and c d are predicted elsewhere
    rank 1           0 0       f .       b c       positions 1 2 1 2 1 2
                     rows 2 4 5, targets g c d
                                                   sequence_ids 0 1 1, as on any rank

Targets are taken before the documents are cut.

Where the layout shares prompts, those that several samples of a micro-batch have are documents of
their own, behind the fillers, and what is left of such a sample goes on from its prompt's
(`data.shared_prompts`), whose last token is a row of each of them.

Legend: T tokens of the shard, S packed length, D documents, R rows of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import NO_OP, ReplicaPlan
from rlhf_megatron.device import copy_tensors_to_device
from rlhf_megatron.ranks.workers.forwarded_documents import (
    TargetRows,
    split_into_whole_documents,
    split_off_shared_prompts,
)
from rlhf_megatron.weights.parallel_layout import ParallelLayout

MICRO_BATCH_TENSORS = (
    "token_ids",
    "position_ids",
    "cu_seqlens",
    "rows",
    "targets",
    "sequence_ids",
)  # of every micro-batch


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass. Columns are gathered at the target tokens."""

    token_ids: Tensor  # [1, S / cp] int64, this rank's share
    position_ids: Tensor  # [1, S / cp] int64, from 0 in each document, or on from its prompt's
    # [D + 1] int32 of whole documents, padding and filler documents included; by length
    cu_seqlens: Tensor
    max_seqlen: int  # tokens of the longest document, with its prompt
    # [R] int64, indices into this rank's share whose next token is in response_mask; some
    # more than once
    rows: Tensor
    targets: Tensor  # [R] int64, the token after each row
    # [R] int64, the sample of each row, in [0, num_sequences); the same on all cp ranks
    sequence_ids: Tensor
    num_sequences: int  # samples
    columns: dict[str, Tensor]  # column name -> [R]
    # [S / cp] int64, the document of each token, -1 of none; where requested
    documents: Tensor | None = None
    # [S / cp] int64, the shard's token that each is, -1 of none; where requested
    source_tokens: Tensor | None = None
    # experts that tokens are to meet: RoutedTokens of ranks.models.router_replay
    routes: tuple[Tensor, Tensor] | None = None
    # Where prompts are shared.
    prompts: Tensor | None = None  # [D] int64, the document that each goes on from, -1 of none
    num_keys: int = 0  # tokens of all documents, each with its prompt


@dataclass(frozen=True)
class PackedBatch:
    """All micro-batches of a call, and the tokens to which their rows belong."""

    micro_batches: tuple[MicroBatch, ...]
    # [sum of R] int64: the shard's token that each row of each micro-batch, in order, predicts
    token_index: Tensor
    num_tokens: int  # T
    seq_length: int  # S where the micro-batches share one length; else the largest
    # tokens and documents of real samples, over all cp ranks
    forwarded_counts: tuple[int, int] = 0, 0

    def unpack_rows(self, row_values: Sequence[Tensor]) -> Tensor:
        """Return one token column [T] float32 on the CPU from per-row results of each micro-batch,
        [R] each; tokens without a row are zero.

        The columns of all cp ranks add up to the column of the shard.
        """
        values = torch.cat([part.detach() for part in row_values]).to(
            device="cpu", dtype=torch.float32
        )
        return torch.zeros(self.num_tokens).index_put_((self.token_index,), values)


def pack_batch(
    batch: TokenBatch,
    plan: ReplicaPlan,
    layout: ParallelLayout,
    cp_rank: int = 0,
    columns: Sequence[str] = (),
    device: str | torch.device = "cpu",
    with_documents: bool = False,
    with_source_tokens: bool = False,
) -> PackedBatch:
    """Pack the shard `batch` (on the CPU) as `plan` says, cut out the share of `cp_rank` and move
    it to `device`.

    `columns` names the token columns of `batch` to gather; a column that is None there is left out.
    `with_documents` adds the document of each token; tokens of no-op samples, padding and filler
    get -1. `with_source_tokens` adds the shard's token of each packed token, likewise, on the CPU.
    Under pipeline parallelism every micro-batch gets plan.packed_length tokens, since stages agree
    on one length; else each gets only the next multiple of layout.packed_multiple.

    Raise ValueError when the plan and the shard do not belong together.
    """
    sizes = torch.tensor([len(group) for group in plan.micro_batches])
    order = torch.tensor(
        [sample for group in plan.micro_batches for sample in group], dtype=torch.int64
    )
    _check_plan_covers_batch(batch, order)
    assert not (layout.shares_prompts and (with_documents or with_source_tokens)), (
        "config.rules.experts refuses these"
    )
    parts = (split_off_shared_prompts if layout.shares_prompts else split_into_whole_documents)(
        batch, order, sizes
    )
    order = parts.sample_indices
    lengths = parts.token_counts
    padded = -(-lengths // layout.document_multiple) * layout.document_multiple
    document, positions = _select_cp_share(padded, layout.cp, cp_rank)
    is_token = positions < lengths[document]
    positions = positions + parts.start_offsets[document]
    # packed token -> token of the shard
    source = batch.offsets[order][document] + positions.where(is_token, 0)
    token_ids = batch.token_ids[source].to(torch.int64).where(is_token, 0)
    is_real = torch.tensor(plan.samples)[order] != NO_OP
    # the next token trains; no sample's first token does
    is_row = batch.response_mask.roll(-1)[source] & is_token
    places = is_row.nonzero().flatten()
    of_rows = parts.add_rows_after_shared_prompts(
        TargetRows(places, document[places], source[places] + 1), batch.offsets
    )
    targets = batch.token_ids[of_rows.predicted_tokens].to(torch.int64)
    gathered = {
        name: getattr(batch, name)[of_rows.predicted_tokens]
        for name in columns
        if getattr(batch, name) is not None
    }

    ends = parts.num_documents.cumsum(0)
    token_ends = (padded.cumsum(0)[ends - 1] // layout.cp).tolist()
    row_ends = torch.searchsorted(of_rows.document_indices, ends).tolist()
    # positions of a filler document
    filler = _select_cp_share(torch.tensor([layout.document_multiple]), layout.cp, cp_rank)[1]
    is_used = is_token & is_real[document]
    micro_batches = []
    seq_length = 0
    spans = (_make_slices(ends.tolist()), _make_slices(token_ends), _make_slices(row_ends))
    for documents, tokens, rows, num_prompts in zip(
        *spans, parts.num_prompts.tolist(), strict=True
    ):
        num_tokens = int(padded[documents].sum())
        length = _compute_packed_length(num_tokens, plan, layout)
        num_filler = (length - num_tokens) // layout.document_multiple
        seq_length = max(seq_length, length)
        filler_positions = filler.repeat(num_filler)
        micro_batches.append(
            MicroBatch(
                token_ids=torch.cat([torch.zeros_like(filler_positions), token_ids[tokens]])[None],
                position_ids=torch.cat([filler_positions, positions[tokens]])[None],
                cu_seqlens=_make_cu_seqlens(
                    padded[documents], num_filler, layout.document_multiple
                ),
                max_seqlen=int((padded + parts.start_offsets)[documents].max()),
                rows=of_rows.token_indices[rows] + (filler_positions.numel() - tokens.start),
                targets=targets[rows],
                sequence_ids=of_rows.document_indices[rows] - (documents.start + num_prompts),
                num_sequences=documents.stop - documents.start - num_prompts,
                columns={name: column[rows] for name, column in gathered.items()},
                documents=_mask_unused_tokens(
                    document - documents.start, is_used, tokens, filler_positions
                )
                if with_documents
                else None,
                source_tokens=_mask_unused_tokens(source, is_used, tokens, filler_positions)
                if with_source_tokens
                else None,
                **parts.make_prompt_fields(documents, num_filler),
            )
        )
    num_forwarded = int(lengths[is_real].sum()), int(is_real.sum()) - int(parts.num_prompts.sum())
    found = _move_micro_batches(micro_batches, torch.device(device))
    return PackedBatch(found, of_rows.predicted_tokens, batch.num_tokens, seq_length, num_forwarded)


def _move_micro_batches(
    micro_batches: Sequence[MicroBatch], device: torch.device
) -> tuple[MicroBatch, ...]:
    """Move all tensors of the micro-batches to the device in one transfer, except `source_tokens`,
    which stay on the CPU.
    """
    further = [
        name for name in ("documents", "prompts") if getattr(micro_batches[0], name) is not None
    ]
    own = (*MICRO_BATCH_TENSORS, *further)
    named = [
        {name: getattr(micro, name) for name in own} | micro.columns for micro in micro_batches
    ]
    there = iter(
        copy_tensors_to_device([tensor for tensors in named for tensor in tensors.values()], device)
    )
    found: list[dict[str, Any]] = [{name: next(there) for name in tensors} for tensors in named]
    return tuple(
        replace(micro, **{name: tensors.pop(name) for name in own}, columns=tensors)
        for micro, tensors in zip(micro_batches, found, strict=True)
    )


def list_token_columns(batch_type: type[TokenBatch]) -> tuple[str, ...]:
    """Return the names of the token columns that `batch_type` has beside the fields of a
    TokenBatch.
    """
    base = {f.name for f in fields(TokenBatch)}
    return tuple(
        f.name
        for f in fields(batch_type)
        if f.metadata.get("axis") == "token" and f.name not in base
    )


def _select_cp_share(document_lengths: Tensor, cp_size: int, cp_rank: int) -> tuple[Tensor, Tensor]:
    """Return (document, position in the document) of each token that `cp_rank` holds, in order, for
    documents of these padded lengths.
    """
    document = torch.repeat_interleave(document_lengths)
    positions = (
        torch.arange(document.numel()) - (document_lengths.cumsum(0) - document_lengths)[document]
    )
    if cp_size == 1:
        return document, positions
    chunk = positions // (document_lengths // (2 * cp_size))[document]
    is_mine = (chunk == cp_rank) | (chunk == 2 * cp_size - 1 - cp_rank)
    return document[is_mine], positions[is_mine]


def _mask_unused_tokens(
    token_column: Tensor, is_used: Tensor, token_range: slice, filler_positions: Tensor
) -> Tensor:
    """Return a micro-batch's part of a column of packed tokens, with -1 for fillers and for tokens
    of no sample.
    """
    return torch.cat(
        [
            torch.full_like(filler_positions, -1),
            token_column[token_range].where(is_used[token_range], -1),
        ]
    )


def _make_slices(end_positions: list[int]) -> list[slice]:
    """Return the slices between consecutive end positions, from 0."""
    return [
        slice(start, stop)
        for start, stop in zip([0, *end_positions[:-1]], end_positions, strict=True)
    ]


def _compute_packed_length(num_tokens: int, plan: ReplicaPlan, layout: ParallelLayout) -> int:
    """Return the number of tokens, over all cp ranks, to which a micro-batch is filled;
    `num_tokens` counts its padded documents. Raise ValueError where they exceed the plan's
    packed_length.
    """
    if num_tokens > plan.packed_length:
        raise ValueError(
            f"a micro-batch has {num_tokens} tokens but the plan's packed_length is"
            f" {plan.packed_length}; make the plan with the lengths of these samples and the"
            " multiples of this layout."
        )
    if layout.pp == 1:
        return -(-num_tokens // layout.packed_multiple) * layout.packed_multiple
    assert plan.packed_length % layout.packed_multiple == 0, (
        f"plan for another layout: {plan.packed_length} tokens"
    )
    return plan.packed_length


def _make_cu_seqlens(document_lengths: Tensor, num_fillers: int, filler_length: int) -> Tensor:
    """Return the borders [D + 1] int32 of `num_fillers` documents of `filler_length`, followed by
    documents of these lengths; documents without tokens are left out.
    """
    filler = torch.arange(num_fillers + 1) * filler_length
    return torch.cat([filler, filler[-1] + document_lengths[document_lengths > 0].cumsum(0)]).to(
        torch.int32
    )


def _check_plan_covers_batch(batch: TokenBatch, sample_order: Tensor) -> None:
    """Raise ValueError unless the plan has every sample exactly once, every sample has a token, and
    no sample's first token is in the response mask.
    """
    if not torch.equal(sample_order.sort().values, torch.arange(len(batch))):
        raise ValueError(
            f"the plan's micro-batches name {sample_order.numel()} samples but the shard has"
            f" {len(batch)}: every sample must be in exactly one micro-batch. Make the plan with"
            " plan_replicas and the shard with its samples."
        )
    if bool((batch.lengths < 1).any()):
        raise ValueError("a sample has no tokens; every sample needs at least one.")
    if bool(batch.response_mask[batch.offsets[:-1]].any()):
        raise ValueError(
            "response_mask is True on the first token of a sample, which nothing predicts;"
            " make it False."
        )
