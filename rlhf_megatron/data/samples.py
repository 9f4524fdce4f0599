"""What supervised and preference jobs train on: samples of documents, as tokens.

A sample is one document, or two of a preference pair: the chosen one, then the rejected one. A set holds its tokens in
three tensors, 5 bytes a token.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch, TopLogProbs, concat, offsets_from_lengths, select
from rlhf_megatron.data.taught import Taught
from rlhf_megatron.data.turns import Document


@dataclass(frozen=True)
class Sample:
    """One document, or the chosen and the rejected one of a pair."""

    documents: tuple[Document, ...]
    source: str
    weight: float = 1.0  # in the loss
    taught: Taught | None = None  # of what trains in the document, where rows bring a teacher's log-probs


class Documents(Sequence[Sample]):
    """Samples of one source. Its repr is a digest of all that trains, which names the data of a run."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        ids, mask, lengths = array("i"), bytearray(), array("q")
        weights, sources = array("f"), []
        told: list[Taught] = []
        self.width = 1  # documents a sample
        for sample in samples:
            self.width = len(sample.documents)
            weights.append(sample.weight)
            sources.append(sample.source)
            told += () if sample.taught is None else (sample.taught,)
            for document in sample.documents:
                ids.extend(document.token_ids)
                lengths.append(len(document.token_ids))
                trains = bytearray(len(document.token_ids))
                for begin, end in document.trained:
                    trains[begin:end] = b"\1" * (end - begin)
                mask += trains
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self.sources = tuple(sources)
        self.tokens = TokenBatch(
            offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)),
            torch.tensor(ids, dtype=torch.int32),
            torch.frombuffer(mask, dtype=torch.bool).clone() if mask else torch.zeros(0, dtype=torch.bool),
        )

        self.taught = _columns(told)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        documents = []
        for row in range(index * self.width, (index + 1) * self.width):
            one = select(self.tokens, [row])
            edges = torch.cat([torch.zeros(1), one.response_mask.float(), torch.zeros(1)]).diff().nonzero().flatten()
            documents.append(Document(tuple(one.token_ids.tolist()), tuple(map(tuple, edges.view(-1, 2).tolist()))))
        return Sample(tuple(documents), self.sources[index], float(self.weights[index]))

    def __repr__(self) -> str:
        return self._digest

    @cached_property
    def _digest(self) -> str:
        found = hashlib.sha256(repr((self.width, self.sources)).encode())
        told = () if self.taught is None else (self.taught.teacher_ids, self.taught.teacher_log_probs)
        tokens = self.tokens
        for tensor in (tokens.offsets, tokens.token_ids, tokens.response_mask, self.weights, *told):
            found.update(tensor.numpy().data)
        return found.hexdigest()

    def batch(self, indices: Sequence[int]) -> SampleBatch:
        """The samples with these indices, in order; documents of a pair stand beside each other."""
        rows = [index * self.width + k for index in indices for k in range(self.width)]
        found = select(self.tokens, rows)
        tokens = replace(found, token_ids=found.token_ids.long())
        names = tuple(self.sources[i] for i in indices)
        return SampleBatch(tokens, self.weights[list(indices)], names, self._taught(tokens, indices))

    @cached_property
    def _first_taught(self) -> Tensor:
        """[B + 1] int64: how many places are told of before each sample."""
        trained = torch.cat([torch.zeros(1, dtype=torch.int64), self.tokens.response_mask.cumsum(0)])
        return trained[self.tokens.offsets]

    def _taught(self, tokens: TokenBatch, indices: Sequence[int]) -> TopLogProbs | None:
        """Return what the teacher said of these samples, as columns of their tokens."""
        if self.taught is None:
            return None
        places = torch.cat([torch.arange(*self._first_taught[i : i + 2].tolist()) for i in indices])
        columns = []
        for told in (self.taught.teacher_ids, self.taught.teacher_log_probs):
            column = told.new_zeros(tokens.num_tokens, told.shape[1])
            column[tokens.response_mask] = told[places]
            columns.append(column)
        return TopLogProbs(*columns)


@dataclass(frozen=True)
class SampleBatch:
    """B samples. `tokens` has B documents, or 2 B of pairs."""

    tokens: TokenBatch
    weights: Tensor  # [B] float32
    sources: tuple[str, ...]
    taught: TopLogProbs | None = None  # by tokens, where rows bring what a teacher told

    def __len__(self) -> int:
        return len(self.sources)


def drawn(sources: Sequence[DocumentSource], places: Iterable[tuple[int, int]]) -> SampleBatch:
    """The samples at (source, index of its item) as one batch, by source."""
    by_source: dict[int, list[int]] = {}
    for source, index in places:
        by_source.setdefault(source, []).append(index)
    parts = [sources[source].items.batch(indices) for source, indices in sorted(by_source.items())]
    told = [part.taught for part in parts if part.taught is not None]
    return SampleBatch(
        concat([part.tokens for part in parts]),
        torch.cat([part.weights for part in parts]),
        tuple(name for part in parts for name in part.sources),
        TopLogProbs(*(torch.cat(c) for c in zip(*((t.teacher_ids, t.teacher_log_probs) for t in told), strict=True)))
        if told
        else None,
    )


def _columns(told: Sequence[Taught]) -> TopLogProbs | None:
    """Join the teacher's log-probs of all samples, in their order."""
    if not told:
        return None
    ids, log_probs = array("i"), array("f")
    for one in told:
        ids.extend(one.ids)
        log_probs.extend(one.log_probs)
    width = told[0].width
    return TopLogProbs(
        torch.tensor(ids, dtype=torch.int32).view(-1, width),
        torch.tensor(log_probs, dtype=torch.float32).view(-1, width),
    )


class SampleSet(Protocol):
    """Samples of one source, held or read when they are drawn. The repr names all that trains."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def batch(self, indices: Sequence[int]) -> SampleBatch: ...


@dataclass(frozen=True)
class DocumentSource:
    """Samples that share a weight, as a stream draws them."""

    name: str
    weight: float  # relative to the other sources
    items: SampleSet
