"""Prompts as token ids, ready to be asked, and the batches that are made of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rlhf_megatron.data.batch import PromptBatch, TokenBatch, offsets_from_lengths
from rlhf_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptItem:
    """One question, ready to be asked."""

    prompt_ids: tuple[int, ...]
    prompt: str  # the same as text
    label: str
    source: str
    extra: str = ""  # JSON object of what else a reward may read


@dataclass(frozen=True)
class PromptSource:
    """Training prompts that share a weight."""

    name: str
    weight: float  # relative to the other sources
    items: tuple[PromptItem, ...]


def prompt_batch(items: Sequence[PromptItem], first_group_id: int = 0) -> PromptBatch:
    """The items in order, their group ids counting from `first_group_id`. Makes the held-out batches of a run too."""
    return PromptBatch(
        prompt_ids=tuple(item.prompt_ids for item in items),
        prompts=tuple(item.prompt for item in items),
        labels=tuple(item.label for item in items),
        sources=tuple(item.source for item in items),
        group_ids=tuple(range(first_group_id, first_group_id + len(items))),
        extras=tuple(item.extra for item in items),
    )


def supervised_batch(items: Sequence[PromptItem], tokenizer: Tokenizer) -> TokenBatch:
    """Prompt, label and end-of-sequence token of each item; `response_mask` is True on the last two."""
    responses = [(*ids, tokenizer.eos_token_id) for ids in tokenizer.encode_all([item.label for item in items])]
    token_ids: list[int] = []
    mask: list[bool] = []
    for item, response in zip(items, responses, strict=True):
        token_ids += [*item.prompt_ids, *response]
        mask += [False] * len(item.prompt_ids) + [True] * len(response)
    lengths = [len(item.prompt_ids) + len(response) for item, response in zip(items, responses, strict=True)]
    return TokenBatch(
        offsets=offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)),
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
    )


@dataclass(frozen=True)
class WeightedItems:
    """The items of all sources behind one range of integers, in which a source has the room of its weight.

    An integer drawn from `range(len(...))` with equal chances is an item of source s with the chance w_s / len(s).
    With one source the integers are its items.
    """

    sources: tuple[PromptSource, ...]

    RESOLUTION = 1 << 30

    def __len__(self) -> int:
        return len(self.sources[0].items) if len(self.sources) == 1 else self.RESOLUTION

    def __getitem__(self, index: int) -> PromptItem:
        if len(self.sources) == 1:
            return self.sources[0].items[index]
        ends = [0.0, *accumulate(source.weight for source in self.sources)]
        point = index / self.RESOLUTION * ends[-1]
        s = min(bisect_right(ends, point) - 1, len(self.sources) - 1)
        items = self.sources[s].items
        return items[min(len(items) - 1, int((point - ends[s]) / (ends[s + 1] - ends[s]) * len(items)))]
