"""How micro-batches are dealt to replicas, as many for each, so that all replicas cost the same. Pure integers.

Greedy, then mended by exchanges of whole bins and, where those are too coarse, of documents.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

EVEN = 1.005  # dearest replica over the mean: evener than this is not looked for
MAX_EXCHANGES = 300
MAX_PARTNERS = 8  # replicas that the dearest one is compared with, the cheapest first
MAX_PAIRS = 250_000  # of documents of two replicas; beyond it whole bins are fine enough


@dataclass(frozen=True)
class Bin:
    """A micro-batch in the making."""

    documents: tuple[int, ...]  # indices, in ascending order; none where there are fewer documents than bins
    cost: int
    length: int

    @staticmethod
    def of(documents: Sequence[int], lengths: Sequence[int], costs: Sequence[int]) -> Bin:
        return Bin(tuple(sorted(documents)), sum(costs[i] for i in documents), sum(lengths[i] for i in documents))


Share = list[Bin]  # of a replica


def deal(bins: Sequence[Bin], num_replicas: int) -> list[Share]:
    """To the cheapest replica that has not all of its bins, dearest bin first; then whole bins are exchanged."""
    num_each = len(bins) // num_replicas
    assert num_each * num_replicas == len(bins), f"{len(bins)} bins for {num_replicas} replicas"
    shares: list[Share] = [[] for _ in range(num_replicas)]
    heap = [(0, index) for index in range(num_replicas)]  # cost, replica
    for each in sorted(bins, key=lambda b: (-b.cost, b.documents)):
        cost, index = heapq.heappop(heap)
        shares[index].append(each)
        if len(shares[index]) < num_each:
            heapq.heappush(heap, (cost + each.cost, index))
    for _ in range(MAX_EXCHANGES):
        if imbalance(shares) <= EVEN or not _exchange_bins(shares):
            break
    return shares


def exchange_documents(shares: list[Share], lengths: Sequence[int], costs: Sequence[int], room: int) -> None:
    """Make replicas evener in place. No bin gets longer than `room`, and none empty."""
    for _ in range(MAX_EXCHANGES):
        if imbalance(shares) <= EVEN or not _exchange_documents_once(shares, lengths, costs, room):
            return


def totals_of(shares: Sequence[Share]) -> list[int]:
    return [sum(each.cost for each in share) for share in shares]


def imbalance(shares: Sequence[Share]) -> float:
    """Cost of the dearest replica over the mean; 1 where nothing costs anything."""
    totals = totals_of(shares)
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _exchange_bins(shares: list[Share]) -> bool:
    """Swap a bin of the dearest replica for one of the cheapest. False: that makes the dearer of the two no cheaper."""
    totals = totals_of(shares)
    dearest, cheapest = totals.index(max(totals)), totals.index(min(totals))
    gap = totals[dearest] - totals[cheapest]
    dear = np.array([each.cost for each in shares[dearest]])
    cheap = np.array([each.cost for each in shares[cheapest]])
    left = np.abs(gap - 2 * (dear[:, None] - cheap[None, :]))
    best = int(left.argmin())
    if left.flat[best] >= gap:
        return False
    mine, theirs = divmod(best, len(cheap))
    shares[dearest][mine], shares[cheapest][theirs] = shares[cheapest][theirs], shares[dearest][mine]
    return True


def _exchange_documents_once(shares: list[Share], lengths: Sequence[int], costs: Sequence[int], room: int) -> bool:
    """Swap a document of the dearest replica for a cheaper one, or none, of one of the cheapest. False: none fits."""
    totals = totals_of(shares)
    dearest = totals.index(max(totals))
    mine = _Documents(shares[dearest], lengths, costs, with_gaps=False)
    for partner in sorted(range(len(shares)), key=lambda index: (totals[index], index))[:MAX_PARTNERS]:
        gap = totals[dearest] - totals[partner]
        theirs = _Documents(shares[partner], lengths, costs, with_gaps=True)
        if gap == 0 or len(mine.document) * len(theirs.document) > MAX_PAIRS:
            return False
        moved = mine.length[:, None] - theirs.length[None, :]
        fits = (theirs.bin_length[None, :] + moved <= room) & (mine.bin_length[:, None] - moved <= room)
        fits &= (mine.bin_count[:, None] > 1) | (theirs.document[None, :] >= 0)
        left = np.where(fits, np.abs(gap - 2 * (mine.cost[:, None] - theirs.cost[None, :])), gap)
        best = int(left.argmin())
        if left.flat[best] < gap:
            a, b = divmod(best, len(theirs.document))
            given, got = int(mine.document[a]), int(theirs.document[b])
            _replace(shares[dearest], int(mine.bin[a]), given, got, lengths, costs)
            _replace(shares[partner], int(theirs.bin[b]), got, given, lengths, costs)
            return True
    return False


class _Documents:
    """Of a replica, as arrays; `with_gaps`: also nothing (-1), once in each bin."""

    def __init__(self, share: Share, lengths: Sequence[int], costs: Sequence[int], with_gaps: bool) -> None:
        entries = [(index, document) for index, each in enumerate(share) for document in each.documents]
        if with_gaps:
            entries += [(index, -1) for index in range(len(share))]
        self.bin, self.document = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        self.length = np.array([lengths[i] if i >= 0 else 0 for i in self.document], dtype=np.int64)
        self.cost = np.array([costs[i] if i >= 0 else 0 for i in self.document], dtype=np.int64)
        self.bin_length = np.array([each.length for each in share])[self.bin]
        self.bin_count = np.array([len(each.documents) for each in share])[self.bin]


def _replace(share: Share, index: int, old: int, new: int, lengths: Sequence[int], costs: Sequence[int]) -> None:
    """-1: nothing."""
    kept = [document for document in (*share[index].documents, new) if document not in (old, -1)]
    share[index] = Bin.of(kept, lengths, costs)
