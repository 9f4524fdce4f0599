"""The training prompts or documents of a run in an order that a seed fixes, from one source or
several weighted ones.

Which of the weighted sources a position takes its prompt from involves no chance.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache, reduce
from math import gcd
from typing import Generic, Protocol, TypeVar

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import PromptBatch
from rlhf_megatron.data.prompt_items import PromptItem, PromptSource, make_prompt_batch

MAX_PERIOD = 65_536


@dataclass(frozen=True)
class SourceMixture:
    """A pattern of sources that repeats. A period has `source_counts[s]` prompts of source s."""

    source_counts: tuple[int, ...]
    source_indices: tuple[int, ...]  # of each position of the period
    draw_ranks: tuple[int, ...]  # how many earlier positions of the period have the same source

    def locate_draw(self, position: int) -> tuple[int, int]:
        """Return (source, number of earlier draws from it) of a position of the stream; positions
        count from 0.
        """
        period, index = divmod(position, len(self.source_indices))
        source = self.source_indices[index]
        return source, period * self.source_counts[source] + self.draw_ranks[index]


def make_source_mixture(weights: Sequence[float]) -> SourceMixture:
    """Return the repeating pattern in which sources have the shares of `weights` (positive). The
    shares are exact where the weights have a common denominator that gives at most 65536 prompts a
    period.
    """
    counts = compute_period_counts(weights)
    sources = _interleave_sources(counts)
    ranks = []
    seen = [0] * len(counts)
    for source in sources:
        ranks.append(seen[source])
        seen[source] += 1
    return SourceMixture(tuple(counts), tuple(sources), tuple(ranks))


def compute_period_counts(weights: Sequence[float]) -> list[int]:
    """Return the prompts of each source in a period: the shortest one with exact shares, or one of
    65536 by largest remainder where that is longer.
    """
    fractions = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth
    assert fractions and min(fractions) > 0, "weights must be positive"
    scale = reduce(lambda a, b: a * b // gcd(a, b), (f.denominator for f in fractions))
    whole = [int(f * scale) for f in fractions]
    divisor = reduce(gcd, whole)
    counts = [count // divisor for count in whole]
    if sum(counts) <= MAX_PERIOD:
        return counts
    total = sum(counts)
    shares = [Fraction(count * MAX_PERIOD, total) for count in counts]
    rounded = [max(1, int(share)) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda s: rounded[s] - shares[s])
    for s in by_remainder[: max(0, MAX_PERIOD - sum(rounded))]:
        rounded[s] += 1
    return rounded


def _interleave_sources(counts: Sequence[int]) -> list[int]:
    """Return the source of each position of a period. The j-th prompt (from 0) of source s, of c in
    a period of n, gets a position in [floor(j n / c), ceil((j + 1) n / c)).
    """
    length = sum(counts)
    later = [(0, s, 0) for s in range(len(counts))]  # (first position of the window, source, j)
    ready: list[tuple[int, int, int]] = []  # (end of the window, source, j)
    order = []
    for position in range(length):
        while later and later[0][0] <= position:
            _, s, j = heapq.heappop(later)
            heapq.heappush(ready, (-(-(j + 1) * length // counts[s]), s, j))
        _, s, j = heapq.heappop(ready)
        order.append(s)
        if j + 1 < counts[s]:
            heapq.heappush(later, ((j + 1) * length // counts[s], s, j + 1))
    return order


@codec.register("PromptCursor")
@dataclass(frozen=True)
class StreamCursor:
    """The position of a stream, and which stream it belongs to."""

    num_drawn: int  # prompts
    batch_size: int
    order: str  # digest of items, weights, seed and shuffling


class ItemSource(Protocol):
    """Items that share a weight. The repr of `items` tells which they are."""

    @property
    def name(self) -> str:
        """The name of the source, as the configuration has it."""

    @property
    def weight(self) -> float:
        """The share of the source's items in the stream, before normalisation."""

    @property
    def items(self) -> Sized:
        """The items, in their own order."""


SourceType = TypeVar("SourceType", bound=ItemSource)


class ItemStream(Generic[SourceType]):
    """An endless order of items. The batch of a step depends on nothing but the step.

    Each source is shuffled anew in each of its own epochs, in which every item of it comes once.
    In any stretch of the stream each source has its share of the items, to within one item
    (`SourceMixture`). The last batch of an epoch is filled from the next one, so every batch is
    whole.
    """

    def __init__(
        self, sources: Sequence[SourceType], batch_size: int, shuffle: bool, seed: int
    ) -> None:
        """Raise ValueError where a source is empty, there is none, or the batch size is below 1."""
        for source in sources:
            if not source.items:
                raise ValueError(
                    "the dataset is empty; a stream needs a prompt of each"
                    f" source ({source.name!r})."
                )
        if not sources:
            raise ValueError("the dataset is empty; a stream needs at least one prompt.")
        if batch_size < 1:
            raise ValueError(f"data.train_batch_size ({batch_size}) must be at least 1.")
        self.sources = tuple(sources)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self._mixture = make_source_mixture([source.weight for source in sources])
        self._num_drawn = 0
        self._epoch_order = lru_cache(maxsize=2 * len(sources))(self._make_epoch_order)

    def locate_batch_items(self, step: int) -> list[tuple[int, int]]:
        """Return (source, index of its item) of each place in the batch of `step`, which counts
        from 1, and move the stream behind that batch. Raise ValueError for a step below 1.
        """
        if step < 1:
            raise ValueError(f"step ({step}) must be at least 1.")
        self._num_drawn = step * self.batch_size
        return [
            self.locate_item(i) for i in range(self._num_drawn - self.batch_size, self._num_drawn)
        ]

    @property
    def num_drawn(self) -> int:
        """Return the position of the stream: the prompts drawn so far."""
        return self._num_drawn

    @property
    def num_items(self) -> int:
        """Return the items of all sources together."""
        return sum(len(source.items) for source in self.sources)

    def seek_position(self, num_drawn: int) -> None:
        """Move the stream to a position, such as that of a step of an earlier process."""
        self._num_drawn = num_drawn

    def make_cursor(self) -> StreamCursor:
        """Return the position of the stream, with a digest that identifies its order."""
        return StreamCursor(self._num_drawn, self.batch_size, self._order_digest)

    def restore_cursor(self, cursor: StreamCursor) -> None:
        """Move the stream to the position of `cursor`. Raise ValueError when this stream has
        another batch size or order than the stream that made `cursor`.
        """
        if cursor.batch_size != self.batch_size:
            raise ValueError(
                f"data.train_batch_size ({self.batch_size}) must be {cursor.batch_size}, as before"
                " the interruption."
            )
        if cursor.order != self._order_digest:
            raise ValueError(
                "the prompts or their order differ from those before the interruption; "
                "restore the data files, data.seed and data.shuffle, the sources and their"
                " weights, or start a new run."
            )
        self._num_drawn = cursor.num_drawn

    @cached_property
    def _order_digest(self) -> str:
        """Return a digest of seed, shuffling, items and weights, which determine the order."""
        seed = self.seed if self.shuffle else None
        if len(self.sources) == 1:
            text = repr((seed, self.sources[0].items))
        else:
            text = repr(
                (
                    seed,
                    self._mixture.source_counts,
                    [(source.name, source.items) for source in self.sources],
                )
            )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def locate_item(self, position: int) -> tuple[int, int]:
        """Return (source, index of its item) of a position, which counts from 0."""
        source, draw = self._mixture.locate_draw(position)
        epoch, index = divmod(draw, len(self.sources[source].items))
        return source, self._epoch_order(source, epoch)[index]

    def _make_epoch_order(self, source: int, epoch: int) -> Sequence[int]:
        """Return the order of a source's items in one of its epochs."""
        order = array("q", range(len(self.sources[source].items)))  # 8 bytes an item
        if self.shuffle:
            name = f"{self.sources[source].name}/" if len(self.sources) > 1 else ""
            random.Random(f"prompts/{name}{self.seed}/{epoch}").shuffle(order)
        return order


class PromptStream(ItemStream[PromptSource]):
    """Endless batches of prompts."""

    def draw_step_prompts(self, step: int) -> PromptBatch:
        """Return the prompts of `step`, which counts from 1, and move the stream behind them. Group
        ids are unique over the run.
        """
        items = [
            self.sources[source].items[index] for source, index in self.locate_batch_items(step)
        ]
        return make_prompt_batch(items, first_group_id=self._num_drawn - self.batch_size)

    def draw_more_prompts(self) -> PromptBatch:
        """Return the next batch of prompts and move the stream behind it, for a run whose steps
        draw as many batches as they need.
        """
        first = self._num_drawn
        self._num_drawn += self.batch_size
        return make_prompt_batch(
            [self._get_item(i) for i in range(first, self._num_drawn)], first_group_id=first
        )

    def fetch_prompts(self, positions: Sequence[int]) -> PromptBatch:
        """Return the prompts at these positions, which become their group ids. The stream does not
        move.
        """
        return replace(
            make_prompt_batch([self._get_item(position) for position in positions]),
            group_ids=tuple(positions),
        )

    def _get_item(self, position: int) -> PromptItem:
        """Return the item at a position of the stream."""
        source, index = self.locate_item(position)
        return self.sources[source].items[index]
