"""Turns samples into the documents that a pass forwards: whole ones, or shared prompts and what
goes on from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.shared_prompts import find_sample_prompts


class TargetRows(NamedTuple):
    """The packed tokens whose next token is in the response mask, document by document."""

    token_indices: Tensor  # [R] among the packed tokens
    document_indices: Tensor  # [R] whose they are
    predicted_tokens: Tensor  # [R] the shard's token that each predicts


@dataclass(frozen=True)
class ForwardedDocuments:
    """The documents of all micro-batches, one micro-batch after the other: in each, shared prompts
    before samples, and both sorted by length.
    """

    sample_indices: Tensor  # [D] the sample of each; of a shared prompt, one that has it
    token_counts: Tensor  # [D] tokens; 0 where nothing but the prompt of a sample is forwarded
    num_documents: Tensor  # documents of each micro-batch
    num_prompts: Tensor  # of each micro-batch, those that are shared
    start_offsets: Tensor  # [D] the first token in its sample: 0, or what its shared prompt has
    # [D] the document that each goes on from, -1 of none; None: -1
    prompt_indices: Tensor | None = None

    def make_prompt_fields(self, document_range: slice, num_fillers: int) -> dict[str, Any]:
        """Return the MicroBatch fields prompts and num_keys for these documents behind
        `num_fillers` filler documents of one token each; {} where no prompts are shared.
        """
        if self.prompt_indices is None:
            return {}
        is_there = self.token_counts[document_range] > 0
        own = self.prompt_indices[document_range][is_there]
        keys = (self.token_counts + self.start_offsets)[document_range][is_there]
        own = torch.cat(
            [
                own.new_full((num_fillers,), -1),
                own.where(own < 0, own - document_range.start + num_fillers),
            ]
        )
        return {"prompts": own, "num_keys": num_fillers + int(keys.sum())}

    def add_rows_after_shared_prompts(self, rows: TargetRows, sample_offsets: Tensor) -> TargetRows:
        """Return the rows with a first row added for each document that continues a shared prompt,
        at the prompt's last token, in place of the prompt's own row.
        """
        if self.prompt_indices is None:
            return rows
        behind = (self.prompt_indices >= 0).nonzero().flatten()
        prompts = self.prompt_indices[behind]
        is_own = torch.ones(len(self.prompt_indices), dtype=torch.bool).index_fill_(
            0, prompts, False
        )[rows.document_indices]
        first = TargetRows(
            self.token_counts.cumsum(0)[prompts] - 1,
            behind,
            (sample_offsets[self.sample_indices] + self.start_offsets)[behind],
        )
        joined = [torch.cat([new, old[is_own]]) for new, old in zip(first, rows, strict=True)]
        order = joined[1].argsort(stable=True)
        return TargetRows(*(column[order] for column in joined))


def count_forwarded_tokens(document_lengths: Tensor) -> Tensor:
    """Return, for each document length [D], the number of tokens that a pass runs on: all but the
    last, at least one.
    """
    return (document_lengths - 1).clamp(min=1)


def split_into_whole_documents(
    batch: TokenBatch, sample_order: Tensor, micro_batch_sizes: Tensor
) -> ForwardedDocuments:
    """Return one document for each sample. The samples come in `sample_order`, `micro_batch_sizes`
    of them in each micro-batch, where they are sorted by length.
    """
    micro = torch.repeat_interleave(torch.arange(micro_batch_sizes.numel()), micro_batch_sizes)
    lengths = count_forwarded_tokens(batch.lengths)[sample_order]
    place = _lexsort_indices(batch.lengths[sample_order], micro)
    return ForwardedDocuments(
        sample_order[place],
        lengths[place],
        micro_batch_sizes,
        torch.zeros_like(micro_batch_sizes),
        torch.zeros_like(sample_order),
    )


def split_off_shared_prompts(
    batch: TokenBatch, sample_order: Tensor, micro_batch_sizes: Tensor
) -> ForwardedDocuments:
    """Return documents as `split_into_whole_documents` does, but make a prompt that several samples
    of a micro-batch share one document, and the rest of each of these samples another.
    """
    found = find_sample_prompts(batch)
    micro = torch.repeat_interleave(torch.arange(micro_batch_sizes.numel()), micro_batch_sizes)
    before = torch.tensor(found.prompt_lengths)[sample_order]
    number = torch.tensor(found.prompt_numbers)[sample_order]
    _, kind, counts = (micro * len(batch) + number).unique(return_inverse=True, return_counts=True)
    starts = before.where(counts[kind] > 1, 0)
    first = torch.full_like(counts, len(sample_order)).scatter_reduce(
        0, kind, torch.arange(len(sample_order)), "amin"
    )
    is_shared = starts[first] > 0
    sharing = first[is_shared]  # of each shared prompt, the first sample
    num_prompts = len(sharing)
    prompts = torch.full_like(counts, -1).masked_scatter(is_shared, torch.arange(num_prompts))[kind]

    lengths = torch.cat(
        [before[sharing], count_forwarded_tokens(batch.lengths)[sample_order] - starts]
    )
    micro = torch.cat([micro[sharing], micro])
    starts = torch.cat([starts.new_zeros(num_prompts), starts])
    prompts = torch.cat([prompts.new_full((num_prompts,), -1), prompts])
    place = _lexsort_indices(lengths, starts, torch.arange(len(lengths)) >= num_prompts, micro)
    moved_to = place.argsort()
    prompts = torch.where(prompts >= 0, moved_to[prompts.clamp(min=0)], -1)
    samples = torch.cat([sample_order[sharing], sample_order])
    of_micro = torch.bincount(micro[:num_prompts], minlength=len(micro_batch_sizes))
    return ForwardedDocuments(
        samples[place],
        lengths[place],
        micro_batch_sizes + of_micro,
        of_micro,
        starts[place],
        prompts[place],
    )


def _lexsort_indices(*sort_keys: Tensor) -> Tensor:
    """Return the indices that sort by these keys; the last key counts most."""
    order = torch.arange(len(sort_keys[0]))
    for key in sort_keys:
        order = order[key[order].argsort(stable=True)]
    return order
