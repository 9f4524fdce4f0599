"""A replica's shard as packed micro-batches, and the results back. Pack once, unpack once; no Python per document.

A document's last token predicts nothing and is left out, here and where `runtime.dispatch` counts lengths.

    two documents  a b c d | e f g     response tokens c d | g         packed to 7 tokens
    token_ids      0 0 e f a b c       cu_seqlens 0 1 2 4 7: filler documents of one token, which nothing reads,
    positions      0 0 0 1 0 1 2       then the documents by length, as attention wants them
    rows                 ^   ^ ^       positions that predict a response token: the head runs on these only
    targets              g   c d

Legend: T tokens of the shard, S packed length, D documents, R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.plan import ReplicaPlan


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass reads. Columns are gathered at the target tokens."""

    token_ids: Tensor  # [1, S] int64
    position_ids: Tensor  # [1, S] int64, from 0 in each document
    cu_seqlens: Tensor  # [D + 1] int32, filler documents included; lengths ascend
    max_seqlen: int  # tokens of the longest document
    rows: Tensor  # [R] int64, positions in 0 .. S - 1 whose next token is in response_mask
    targets: Tensor  # [R] int64, the token after each row
    columns: dict[str, Tensor]  # column name -> [R]


@dataclass(frozen=True)
class Packed:
    """All micro-batches of a call, and where their rows belong."""

    micro_batches: tuple[MicroBatch, ...]
    token_index: Tensor  # [sum of R] int64: the shard's token that each row of each micro-batch, in order, predicts
    num_tokens: int  # T
    seq_length: int  # S where the micro-batches share one length; else the largest

    def unpack(self, rows: Sequence[Tensor]) -> Tensor:
        """Per-row results of each micro-batch, [R] each -> one token column [T] float32 on the CPU, zero elsewhere."""
        values = torch.cat([part.detach() for part in rows]).to(device="cpu", dtype=torch.float32)
        return torch.zeros(self.num_tokens).index_put_((self.token_index,), values)


def pack(
    batch: TokenBatch,
    plan: ReplicaPlan,
    columns: Sequence[str] = (),
    fill: bool = True,
    device: str | torch.device = "cpu",
) -> Packed:
    """Pack the shard `batch` (on the CPU) as `plan` says and move the result to `device`.

    `columns`: token columns of `batch` to gather; a column that is None there is left out. `fill`: every micro-batch
    gets plan.packed_length tokens, as pipeline stages need that agree on one length.

    Raises ValueError when the plan and the shard do not belong together.
    """
    sizes = torch.tensor([len(group) for group in plan.micro_batches])
    order = torch.tensor([sample for group in plan.micro_batches for sample in group], dtype=torch.int64)
    _check(batch, order)
    order = _by_length(order, batch.lengths, sizes)
    lengths = forwarded_lengths(batch.lengths)[order]
    starts = lengths.cumsum(0) - lengths  # of each document in the concatenation of all micro-batches
    positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
    source = torch.repeat_interleave(batch.offsets[order], lengths) + positions  # packed token -> token of the shard
    token_ids = batch.token_ids[source]
    is_row = batch.response_mask.roll(-1)[source]  # the next token trains; no sample's first token does
    row_index = is_row.nonzero().flatten()
    predicted = source[row_index] + 1  # the shard's token that each row predicts
    targets = batch.token_ids[predicted]
    gathered = {name: getattr(batch, name)[predicted] for name in columns if getattr(batch, name) is not None}

    document_ends = sizes.cumsum(0).tolist()
    token_ends = lengths.cumsum(0)[sizes.cumsum(0) - 1].tolist()
    row_ends = torch.searchsorted(row_index, torch.tensor(token_ends)).tolist()
    micro_batches = []
    for documents, tokens, rows in zip(_spans(document_ends), _spans(token_ends), _spans(row_ends), strict=True):
        num_filler = _num_filler(tokens, plan.packed_length) if fill else 0
        micro_batches.append(
            MicroBatch(
                token_ids=pad(token_ids[tokens], (num_filler, 0))[None].to(device),
                position_ids=pad(positions[tokens], (num_filler, 0))[None].to(device),
                cu_seqlens=_cu_seqlens(lengths[documents], num_filler).to(device),
                max_seqlen=int(lengths[documents.stop - 1]),
                rows=(row_index[rows] + (num_filler - tokens.start)).to(device),
                targets=targets[rows].to(device),
                columns={name: column[rows].to(device) for name, column in gathered.items()},
            )
        )
    return Packed(
        micro_batches=tuple(micro_batches),
        token_index=predicted,
        num_tokens=batch.num_tokens,
        seq_length=max(micro.token_ids.numel() for micro in micro_batches),
    )


def forwarded_lengths(lengths: Tensor) -> Tensor:
    """[D] tokens of each document -> [D] tokens of it that a pass runs on: all but the last, and one at least."""
    return (lengths - 1).clamp(min=1)


def token_columns(kind: type[TokenBatch]) -> tuple[str, ...]:
    """Names of the token columns that `kind` has beside those of a TokenBatch."""
    base = {f.name for f in fields(TokenBatch)}
    return tuple(f.name for f in fields(kind) if f.metadata.get("axis") == "token" and f.name not in base)


def _by_length(order: Tensor, lengths: Tensor, sizes: Tensor) -> Tensor:
    """`order` with the documents of each micro-batch sorted by length."""
    group = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    by_length = lengths[order].argsort(stable=True)
    return order[by_length[group[by_length].argsort(stable=True)]]


def _spans(ends: list[int]) -> list[slice]:
    return [slice(start, stop) for start, stop in zip([0, *ends[:-1]], ends, strict=True)]


def _num_filler(tokens: slice, packed_length: int) -> int:
    num_tokens = tokens.stop - tokens.start
    if num_tokens > packed_length:
        raise ValueError(
            f"a micro-batch has {num_tokens} tokens but the plan's packed_length is {packed_length}; make the plan with"
            " the lengths of these samples."
        )
    return packed_length - num_tokens


def _cu_seqlens(lengths: Tensor, num_filler: int) -> Tensor:
    """[D + 1] int32: the borders of `num_filler` documents of one token and of documents of these lengths."""
    return torch.cat([torch.arange(num_filler + 1), num_filler + lengths.cumsum(0)]).to(torch.int32)


def _check(batch: TokenBatch, order: Tensor) -> None:
    if not torch.equal(order.sort().values, torch.arange(len(batch))):
        raise ValueError(
            f"the plan's micro-batches name {order.numel()} samples but the shard has {len(batch)}: every sample must"
            " be in exactly one micro-batch. Make the plan with plan_replicas and the shard with its samples."
        )
    if bool((batch.lengths < 1).any()):
        raise ValueError("a sample has no tokens; every sample needs at least one.")
    if bool(batch.response_mask[batch.offsets[:-1]].any()):
        raise ValueError("response_mask is True on the first token of a sample, which nothing predicts; make it False.")
