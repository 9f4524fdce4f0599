"""Log-probs and values of groups while others of their batch are still awaited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, concat, select
from rlhf_megatron.scheduler.filter_groups import alike
from rlhf_megatron.scheduler.supply.base import Scored

Annotate = Callable[[int, ScoredBatch], AnnotatedBatch]  # step that trains on the samples, samples


class EarlyAnnotations:
    """Of the groups of one step: what the models say holds until one of them is trained. Used by the main thread.

    `min_samples`: fewer are not sent to the hosts while more may come.
    """

    def __init__(self, annotate: Annotate, min_samples: int) -> None:
        self._annotate = annotate
        self._min_samples = min_samples
        self._by_group: dict[int, AnnotatedBatch] = {}

    def piece(self, groups: Sequence[Scored]) -> list[Scored]:
        """Those of `groups` that are to be annotated now; none while they are too few."""
        new = [group for group in groups if group.number not in self._by_group]
        return new if sum(len(group.batch) for group in new) >= self._min_samples else []

    def add(self, step: int, groups: Sequence[Scored]) -> None:
        annotated = self._annotate(step, concat(alike([group.batch for group in groups])))
        begin = 0
        for group in groups:
            self._by_group[group.number] = select(annotated, range(begin, begin + len(group.batch)))
            begin += len(group.batch)

    def missing(self, groups: Sequence[Scored]) -> list[Scored]:
        """What is left of a batch; all of it where nothing was made early."""
        return [group for group in groups if group.number not in self._by_group]

    def collect(self, groups: Sequence[Scored]) -> AnnotatedBatch:
        """A batch of which none is missing, in the order of `groups`."""
        return concat(alike([self._by_group[group.number] for group in groups]))

    def clear(self) -> None:
        """A model has been trained."""
        self._by_group.clear()
