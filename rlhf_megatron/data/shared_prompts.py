"""Samples of one prompt that are forwarded behind one copy of it: which they are, and how they are
dealt together.

    two samples  p q r a b   and   p q r c        what is forwarded of them: all but the
                                                  last token of each
    apart        p q r a | p q r                  7 tokens
    shared       p q r | a                        4: the prompt once, then what is each sample's own

The last token of the prompt predicts the first token of each of its samples. Attention gives what
is a sample's own the keys of the prompt (`ranks.models.document_token_order`); all else works
token by token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from rlhf_megatron.data.batch import TokenBatch


@dataclass(frozen=True)
class SamplePrompts:
    """The prompt of each sample, and how many of the prompt's tokens the sample may share."""

    prompt_numbers: tuple[int, ...]  # the same for samples of one prompt
    # tokens that can be shared; 0: of a sample without a prompt, or that trains nothing
    prompt_lengths: tuple[int, ...]


def find_sample_prompts(batch: TokenBatch) -> SamplePrompts:
    """Return each sample's prompt number and the length of its prompt: the tokens before its first
    token that trains. Samples with equal prompt tokens get the same number.
    """
    trains = batch.response_mask.numpy()
    token_ids = batch.token_ids.numpy()
    known = dict[bytes, int]()
    numbers = []
    lengths = []
    for start, stop in pairwise(batch.offsets.tolist()):
        # to the first that trains; 0 where none does
        length = int(trains[start:stop].argmax()) if stop > start else 0
        lengths.append(length)
        numbers.append(known.setdefault(token_ids[start : start + length].tobytes(), len(known)))
    return SamplePrompts(tuple(numbers), tuple(lengths))


def count_shared_tokens(
    sample_prompts: SamplePrompts, micro_batches: Iterable[Iterable[int]]
) -> int:
    """Return the number of prompt tokens that need no forward pass, because another sample of the
    same micro-batch has the same prompt.
    """
    count = 0
    for samples in micro_batches:
        known: set[int] = set()
        for number, length in (
            (sample_prompts.prompt_numbers[sample], sample_prompts.prompt_lengths[sample])
            for sample in samples
        ):
            count += length if number in known else 0
            known.add(number)
    return count


class PromptUnit(NamedTuple):
    """Some samples of one prompt; they go to one micro-batch."""

    samples: tuple[int, ...]
    length: int  # tokens
    cost: int


def split_into_prompt_units(
    lengths: Sequence[int],
    sample_prompts: SamplePrompts,
    num_parts: int,
    bin_capacity: int,
    attention_length: int,
) -> Iterator[PromptUnit]:
    """Yield units of samples that cover all samples. The samples of a prompt are split into
    `num_parts` units of about as many samples, or into more where a unit would be longer than
    `bin_capacity`; samples without a shared prompt are units of their own.

    A unit's cost is as in `plan_replicas`: `attention_length` is the number of tokens at which
    attention costs as much as everything else, and a sample's own tokens attend to its prompt as
    well. A further sample without own tokens counts as one token: it has a row in the head.
    """
    by_prompt: dict[int, list[int]] = {}
    for sample, number in enumerate(sample_prompts.prompt_numbers):
        by_prompt.setdefault(number, []).append(sample)
    for members in by_prompt.values():
        shared = sample_prompts.prompt_lengths[members[0]]
        most = -(-len(members) // num_parts) if shared else 1
        alone = PromptUnit((), shared, shared * (attention_length + shared))
        unit = alone
        for sample in members:
            own = lengths[sample] - shared
            if unit.samples and (
                len(unit.samples) == most or unit.length + max(own, 1) > bin_capacity
            ):
                yield unit
                unit = alone
            own = max(own, 1) if unit.samples else own
            cost = unit.cost + own * (attention_length + own + 2 * shared)
            unit = PromptUnit((*unit.samples, sample), unit.length + own, cost)
        yield unit
