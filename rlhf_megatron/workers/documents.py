"""Turns samples into the documents that a pass forwards: whole ones, or shared prompts and what goes on from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.shared_prompts import find_prompts


class Rows(NamedTuple):
    """The places whose next token is in the response mask, document by document."""

    places: Tensor  # [R] among the packed tokens
    documents: Tensor  # [R] whose they are
    predicted: Tensor  # [R] the shard's token that each predicts


@dataclass(frozen=True)
class Documents:
    """The documents of micro-batch after micro-batch: shared prompts before samples, and each kind by length."""

    samples: Tensor  # [D] the sample of each; of a shared prompt, one that has it
    lengths: Tensor  # [D] tokens; 0 where nothing but the prompt of a sample is forwarded
    sizes: Tensor  # documents of each micro-batch
    num_prompts: Tensor  # of each micro-batch, those that are shared
    starts: Tensor  # [D] the first token in its sample: 0, or what its shared prompt has
    prompts: Tensor | None = None  # [D] the document that each goes on from, -1 of none; None: -1

    def behind_prompts(self, documents: slice, num_filler: int) -> dict[str, Any]:
        """Return what a MicroBatch says of prompts, for these documents behind fillers of one token each."""
        if self.prompts is None:
            return {}
        is_there = self.lengths[documents] > 0
        own, keys = self.prompts[documents][is_there], (self.lengths + self.starts)[documents][is_there]
        own = torch.cat([own.new_full((num_filler,), -1), own.where(own < 0, own - documents.start + num_filler)])
        return {"prompts": own, "num_keys": num_filler + int(keys.sum())}

    def with_first_rows(self, rows: Rows, offsets: Tensor) -> Rows:
        """Give each document behind a shared prompt a first row, the prompt's last token, which has none itself."""
        if self.prompts is None:
            return rows
        behind = (self.prompts >= 0).nonzero().flatten()
        prompts = self.prompts[behind]
        is_own = torch.ones(len(self.prompts), dtype=torch.bool).index_fill_(0, prompts, False)[rows.documents]
        first = Rows(self.lengths.cumsum(0)[prompts] - 1, behind, (offsets[self.samples] + self.starts)[behind])
        joined = [torch.cat([new, old[is_own]]) for new, old in zip(first, rows, strict=True)]
        order = joined[1].argsort(stable=True)
        return Rows(*(column[order] for column in joined))


def forwarded_lengths(lengths: Tensor) -> Tensor:
    """[D] tokens of each document -> [D] tokens of it that a pass runs on: all but the last, and one at least."""
    return (lengths - 1).clamp(min=1)


def whole_documents(batch: TokenBatch, order: Tensor, sizes: Tensor) -> Documents:
    """Take the samples in `order`, as many for each micro-batch as `sizes` says, and sort them there by length."""
    micro = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    lengths = forwarded_lengths(batch.lengths)[order]
    place = _sorted_by(batch.lengths[order], micro)
    return Documents(order[place], lengths[place], sizes, torch.zeros_like(sizes), torch.zeros_like(order))


def documents_behind_prompts(batch: TokenBatch, order: Tensor, sizes: Tensor) -> Documents:
    """Do as `whole_documents`, but make a prompt that several samples of a micro-batch have one document, and what is
    left of each of these samples another."""
    found = find_prompts(batch)
    micro = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    before, number = torch.tensor(found.lengths)[order], torch.tensor(found.numbers)[order]
    _, kind, counts = (micro * len(batch) + number).unique(return_inverse=True, return_counts=True)
    starts = before.where(counts[kind] > 1, 0)
    first = torch.full_like(counts, len(order)).scatter_reduce(0, kind, torch.arange(len(order)), "amin")
    is_shared = starts[first] > 0
    sharing = first[is_shared]  # of each shared prompt, the first sample
    num_prompts = len(sharing)
    prompts = torch.full_like(counts, -1).masked_scatter(is_shared, torch.arange(num_prompts))[kind]

    lengths = torch.cat([before[sharing], forwarded_lengths(batch.lengths)[order] - starts])
    micro, starts = torch.cat([micro[sharing], micro]), torch.cat([starts.new_zeros(num_prompts), starts])
    prompts = torch.cat([prompts.new_full((num_prompts,), -1), prompts])
    place = _sorted_by(lengths, starts, torch.arange(len(lengths)) >= num_prompts, micro)
    moved_to = place.argsort()
    prompts = torch.where(prompts >= 0, moved_to[prompts.clamp(min=0)], -1)
    samples = torch.cat([order[sharing], order])
    of_micro = torch.bincount(micro[:num_prompts], minlength=len(sizes))
    return Documents(samples[place], lengths[place], sizes + of_micro, of_micro, starts[place], prompts[place])


def _sorted_by(*keys: Tensor) -> Tensor:
    """Return the order by these keys, of which the last counts most."""
    order = torch.arange(len(keys[0]))
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order
