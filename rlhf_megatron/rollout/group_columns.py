"""The samples of a group as few columns: what a driver hands over, and what the journal keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import VersionSpans
from rlhf_megatron.rollout.engine_interface import GeneratedSample, TokenColumn, VersionSpan

Kind = TypeVar("Kind", bound="GroupColumns")


@codec.register("GroupColumns")
@dataclass(frozen=True)
class GroupColumns:
    """The samples of one prompt."""

    # which is what an engine's numbers are on the controller
    LOG_PROB_DTYPE: ClassVar[type[np.generic]] = np.float64

    lengths: Tensor  # [samples] int64, tokens
    token_ids: Tensor  # int32, of all samples, one after the other
    log_probs: Tensor  # of type LOG_PROBS
    finish_reasons: tuple[str, ...]
    policy_versions: tuple[int, ...]
    # this and the next two: () in a journal of an earlier version
    version_spans: tuple[VersionSpans, ...] = ()
    num_cached_tokens: tuple[int, ...] = ()
    num_retractions: tuple[int, ...] = ()
    routes: tuple[str, ...] = ()  # files; likewise

    @classmethod
    def from_samples(
        cls: type[Kind], samples: Sequence[GeneratedSample], **subclass_fields: Any
    ) -> Kind:
        """Make the columns of these samples. `subclass_fields` are the fields that a subclass
        adds.
        """
        return cls(
            lengths=torch.tensor([len(sample.token_ids) for sample in samples], dtype=torch.int64),
            token_ids=_concatenate_columns([sample.token_ids for sample in samples], np.int32),
            log_probs=_concatenate_columns(
                [sample.log_probs for sample in samples], cls.LOG_PROB_DTYPE
            ),
            finish_reasons=tuple(sample.finish_reason for sample in samples),
            policy_versions=tuple(sample.policy_version for sample in samples),
            version_spans=tuple(make_plain_version_spans(sample) for sample in samples),
            num_cached_tokens=tuple(sample.num_cached_tokens for sample in samples),
            num_retractions=tuple(sample.num_retractions for sample in samples),
            routes=tuple(sample.routes for sample in samples),
            **subclass_fields,
        )

    def to_samples(self) -> list[GeneratedSample]:
        """Return the samples of these columns. Their token ids and log-probs are views where the
        types allow.
        """
        lengths = self.lengths.tolist()
        columns = zip(
            self.token_ids.split(lengths),
            self.log_probs.split(lengths),
            self.finish_reasons,
            self.policy_versions,
            self.version_spans or [()] * len(lengths),
            self.num_cached_tokens or [0] * len(lengths),
            self.num_retractions or [0] * len(lengths),
            self.routes or [""] * len(lengths),
            strict=True,
        )
        return [
            GeneratedSample(
                TokenColumn(ids.to(torch.int32).numpy()),
                TokenColumn(log_probs.numpy()),
                reason,
                version,
                tuple(VersionSpan(span_version, start, end) for span_version, start, end in spans),
                num_cached,
                num_retractions,
                routes,
            )
            for (
                ids,
                log_probs,
                reason,
                version,
                spans,
                num_cached,
                num_retractions,
                routes,
            ) in columns
        ]


def make_plain_version_spans(sample: GeneratedSample) -> VersionSpans:
    """Return the sample's version spans as (version, start, end) tuples, because `data` knows no
    engines.
    """
    return tuple((span.version, span.start, span.end) for span in sample.version_spans)


def _concatenate_columns(columns: Sequence[Sequence[Any]], dtype: type[np.generic]) -> Tensor:
    """Return the columns one after the other as one tensor of this type; an empty one without
    columns.
    """
    return torch.from_numpy(
        np.concatenate([np.zeros(0, dtype), *(np.asarray(column, dtype) for column in columns)])
    )
