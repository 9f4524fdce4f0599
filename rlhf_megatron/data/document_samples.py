"""What supervised and preference jobs train on: samples of documents, as tokens.

A sample is one document, or two of a preference pair: the chosen one, then the rejected one. A set
holds its tokens in three tensors, 5 bytes a token.
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

from rlhf_megatron.data.assistant_turns import TokenDocument
from rlhf_megatron.data.batch import (
    TokenBatch,
    TopLogProbs,
    compute_offsets,
    concat_batches,
    select_samples,
)
from rlhf_megatron.data.teacher_top_tokens import TeacherTopTokens


@dataclass(frozen=True)
class DocumentSample:
    """One document, or the chosen and the rejected one of a pair."""

    documents: tuple[TokenDocument, ...]
    source: str
    weight: float = 1.0  # in the loss
    # of what trains in the document, where rows bring a teacher's log-probs
    teacher_top_tokens: TeacherTopTokens | None = None


class InMemorySampleSet(Sequence[DocumentSample]):
    """Samples of one source. Its repr is a digest of all that trains, which names the
    data of a run.
    """

    def __init__(self, samples: Iterable[DocumentSample]) -> None:
        """Join the tokens of all samples into three tensors."""
        ids = array("i")
        mask = bytearray()
        lengths = array("q")
        weights = array("f")
        sources = []
        told: list[TeacherTopTokens] = []
        self.documents_per_sample = 1  # documents a sample
        for sample in samples:
            self.documents_per_sample = len(sample.documents)
            weights.append(sample.weight)
            sources.append(sample.source)
            told += () if sample.teacher_top_tokens is None else (sample.teacher_top_tokens,)
            for document in sample.documents:
                ids.extend(document.token_ids)
                lengths.append(len(document.token_ids))
                trains = bytearray(len(document.token_ids))
                for begin, end in document.trained_spans:
                    trains[begin:end] = b"\1" * (end - begin)
                mask += trains
        self.weights = torch.tensor(weights, dtype=torch.float32)
        self.sources = tuple(sources)
        self.tokens = TokenBatch(
            compute_offsets(torch.tensor(lengths, dtype=torch.int64)),
            torch.tensor(ids, dtype=torch.int32),
            torch.frombuffer(mask, dtype=torch.bool).clone()
            if mask
            else torch.zeros(0, dtype=torch.bool),
        )

        self.teacher_columns = _join_teacher_top_tokens(told)

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: Any) -> Any:
        """Return one sample, without the teacher's log-probs."""
        documents = []
        for row in range(
            index * self.documents_per_sample, (index + 1) * self.documents_per_sample
        ):
            one = select_samples(self.tokens, [row])
            edges = (
                torch.cat([torch.zeros(1), one.response_mask.float(), torch.zeros(1)])
                .diff()
                .nonzero()
                .flatten()
            )
            documents.append(
                TokenDocument(
                    tuple(one.token_ids.tolist()), tuple(map(tuple, edges.view(-1, 2).tolist()))
                )
            )
        return DocumentSample(tuple(documents), self.sources[index], float(self.weights[index]))

    def __repr__(self) -> str:
        """Return a digest of everything that trains."""
        return self._content_digest

    @cached_property
    def _content_digest(self) -> str:
        """Return the sha256 of everything that trains."""
        found = hashlib.sha256(repr((self.documents_per_sample, self.sources)).encode())
        told = (
            ()
            if self.teacher_columns is None
            else (self.teacher_columns.teacher_ids, self.teacher_columns.teacher_log_probs)
        )
        tokens = self.tokens
        for tensor in (tokens.offsets, tokens.token_ids, tokens.response_mask, self.weights, *told):
            found.update(tensor.numpy().data)
        return found.hexdigest()

    def make_batch(self, indices: Sequence[int]) -> DocumentSampleBatch:
        """Return the samples with these indices, in order; the two documents of a pair follow one
        another.
        """
        rows = [
            index * self.documents_per_sample + k
            for index in indices
            for k in range(self.documents_per_sample)
        ]
        found = select_samples(self.tokens, rows)
        tokens = replace(found, token_ids=found.token_ids.long())
        names = tuple(self.sources[i] for i in indices)
        return DocumentSampleBatch(
            tokens,
            self.weights[list(indices)],
            names,
            self._select_teacher_columns(tokens, indices),
        )

    @cached_property
    def _teacher_row_offsets(self) -> Tensor:
        """Return the number of trained tokens before each document, [documents + 1] int64: the row
        at which the document's teacher log-probs begin.
        """
        trained = torch.cat(
            [torch.zeros(1, dtype=torch.int64), self.tokens.response_mask.cumsum(0)]
        )
        return trained[self.tokens.offsets]

    def _select_teacher_columns(
        self, tokens: TokenBatch, indices: Sequence[int]
    ) -> TopLogProbs | None:
        """Return the teacher's log-probs of these samples as columns of their tokens, 0 where a
        token does not train; None where there is no teacher.
        """
        if self.teacher_columns is None:
            return None
        places = torch.cat(
            [torch.arange(*self._teacher_row_offsets[i : i + 2].tolist()) for i in indices]
        )
        columns = []
        for told in (self.teacher_columns.teacher_ids, self.teacher_columns.teacher_log_probs):
            column = told.new_zeros(tokens.num_tokens, told.shape[1])
            column[tokens.response_mask] = told[places]
            columns.append(column)
        teacher_ids, teacher_log_probs = columns
        return TopLogProbs(teacher_ids, teacher_log_probs)


@dataclass(frozen=True)
class DocumentSampleBatch:
    """B samples. `tokens` has B documents, or 2 B of pairs."""

    tokens: TokenBatch
    weights: Tensor  # [B] float32
    sources: tuple[str, ...]
    teacher_columns: TopLogProbs | None = None  # by tokens, where rows bring what a teacher told

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.sources)


def gather_samples(
    sources: Sequence[SampleSource], item_locations: Iterable[tuple[int, int]]
) -> DocumentSampleBatch:
    """Return the samples at these (source, index of its item) as one batch, grouped by source."""
    by_source: dict[int, list[int]] = {}
    for source, index in item_locations:
        by_source.setdefault(source, []).append(index)
    parts = [
        sources[source].items.make_batch(indices) for source, indices in sorted(by_source.items())
    ]
    told = [part.teacher_columns for part in parts if part.teacher_columns is not None]
    return DocumentSampleBatch(
        concat_batches([part.tokens for part in parts]),
        torch.cat([part.weights for part in parts]),
        tuple(name for part in parts for name in part.sources),
        TopLogProbs(
            *(
                torch.cat(c)
                for c in zip(*((t.teacher_ids, t.teacher_log_probs) for t in told), strict=True)
            )
        )
        if told
        else None,
    )


def _join_teacher_top_tokens(teacher_rows: Sequence[TeacherTopTokens]) -> TopLogProbs | None:
    """Return the teacher's log-probs of all samples, in order, [N, K]; None where there are
    none.
    """
    if not teacher_rows:
        return None
    ids = array("i")
    log_probs = array("f")
    for one in teacher_rows:
        ids.extend(one.token_ids)
        log_probs.extend(one.log_probs)
    width = teacher_rows[0].top_k
    return TopLogProbs(
        torch.tensor(ids, dtype=torch.int32).view(-1, width),
        torch.tensor(log_probs, dtype=torch.float32).view(-1, width),
    )


class SampleSet(Protocol):
    """Samples of one source, held or read when they are drawn. The repr names all that trains."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> Any: ...
    def make_batch(self, indices: Sequence[int]) -> DocumentSampleBatch:
        """Return the samples with these indices, in order."""


@dataclass(frozen=True)
class SampleSource:
    """Samples that share a weight, as a stream draws them."""

    name: str
    weight: float  # relative to the other sources
    items: SampleSet
