"""Packs documents into bins of one size, and deals micro-batches to replicas so that all cost the
same. Pure integers.

Bin packing is hard; these are greedy ways and a bound on what any way could do. 16 000 documents
take some tens of milliseconds, and the same input gives the same result.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_EVEN_IMBALANCE = 1.005  # dearest replica over the mean: evener than this is not looked for
MAX_EXCHANGES = 300
MAX_PARTNERS = 8  # replicas that the dearest one is compared with, the cheapest first
MAX_DOCUMENT_PAIRS = 250_000  # of documents of two replicas; beyond it whole bins are fine enough

# full bins looked at for each document, on the average, before `_pack_by_even_cost` gives up
MAX_DETOURS = 2


@dataclass(frozen=True)
class DocumentBin:
    """A micro-batch in the making."""

    # indices, in ascending order; none where there are fewer documents than bins
    documents: tuple[int, ...]
    cost: int
    length: int

    @staticmethod
    def from_documents(
        documents: Sequence[int], lengths: Sequence[int], costs: Sequence[int]
    ) -> DocumentBin:
        """Return the bin of these documents, with their total cost and length."""
        return DocumentBin(
            tuple(sorted(documents)),
            sum(costs[i] for i in documents),
            sum(lengths[i] for i in documents),
        )


ReplicaShare = list[DocumentBin]  # of a replica


def deal_bins(bins: Sequence[DocumentBin], num_replicas: int) -> list[ReplicaShare]:
    """Return the bins of each replica, as many for each: deal the bins, dearest first, each to the
    cheapest replica that still lacks bins; then exchange whole bins to even out the costs.
    """
    num_each = len(bins) // num_replicas
    assert num_each * num_replicas == len(bins), f"{len(bins)} bins for {num_replicas} replicas"
    shares: list[ReplicaShare] = [[] for _ in range(num_replicas)]
    heap = [(0, index) for index in range(num_replicas)]  # cost, replica
    for each in sorted(bins, key=lambda b: (-b.cost, b.documents)):
        cost, index = heapq.heappop(heap)
        shares[index].append(each)
        if len(shares[index]) < num_each:
            heapq.heappush(heap, (cost + each.cost, index))
    for _ in range(MAX_EXCHANGES):
        if compute_imbalance(shares) <= MAX_EVEN_IMBALANCE or not _exchange_bins_once(shares):
            break
    return shares


def exchange_documents(
    replica_shares: list[ReplicaShare],
    lengths: Sequence[int],
    costs: Sequence[int],
    bin_capacity: int,
) -> None:
    """Even out the replicas' costs in place by exchanging documents. Each bin stays within
    `bin_capacity` and keeps at least one document.
    """
    for _ in range(MAX_EXCHANGES):
        if compute_imbalance(replica_shares) <= MAX_EVEN_IMBALANCE or not _exchange_documents_once(
            replica_shares, lengths, costs, bin_capacity
        ):
            return


def sum_replica_costs(replica_shares: Sequence[ReplicaShare]) -> list[int]:
    """Return the total cost of each replica."""
    return [sum(each.cost for each in share) for share in replica_shares]


def compute_imbalance(replica_shares: Sequence[ReplicaShare]) -> float:
    """Return the cost of the dearest replica over the mean; 1 where nothing costs anything."""
    totals = sum_replica_costs(replica_shares)
    return max(totals) * len(totals) / sum(totals) if sum(totals) else 1.0


def _exchange_bins_once(replica_shares: list[ReplicaShare]) -> bool:
    """Swap, in place, a bin of the dearest replica for one of the cheapest. Return False, with no
    swap, if none makes the dearer of the two cheaper.
    """
    totals = sum_replica_costs(replica_shares)
    dearest = totals.index(max(totals))
    cheapest = totals.index(min(totals))
    gap = totals[dearest] - totals[cheapest]
    dear = np.array([each.cost for each in replica_shares[dearest]])
    cheap = np.array([each.cost for each in replica_shares[cheapest]])
    left = np.abs(gap - 2 * (dear[:, None] - cheap[None, :]))
    best = int(left.argmin())
    if left.flat[best] >= gap:
        return False
    mine, theirs = divmod(best, len(cheap))
    replica_shares[dearest][mine], replica_shares[cheapest][theirs] = (
        replica_shares[cheapest][theirs],
        replica_shares[dearest][mine],
    )
    return True


def _exchange_documents_once(
    replica_shares: list[ReplicaShare],
    lengths: Sequence[int],
    costs: Sequence[int],
    bin_capacity: int,
) -> bool:
    """Swap, in place, a document of the dearest replica for a cheaper one, or for none, of one of
    the cheapest replicas. Return False, with no swap, if none helps and fits.
    """
    totals = sum_replica_costs(replica_shares)
    dearest = totals.index(max(totals))
    mine = _ReplicaDocumentColumns(replica_shares[dearest], lengths, costs, with_gaps=False)
    for partner in sorted(range(len(replica_shares)), key=lambda index: (totals[index], index))[
        :MAX_PARTNERS
    ]:
        gap = totals[dearest] - totals[partner]
        theirs = _ReplicaDocumentColumns(replica_shares[partner], lengths, costs, with_gaps=True)
        if gap == 0 or len(mine.document_index) * len(theirs.document_index) > MAX_DOCUMENT_PAIRS:
            return False
        moved = mine.length[:, None] - theirs.length[None, :]
        fits = (theirs.bin_length[None, :] + moved <= bin_capacity) & (
            mine.bin_length[:, None] - moved <= bin_capacity
        )
        fits &= (mine.bin_count[:, None] > 1) | (theirs.document_index[None, :] >= 0)
        left = np.where(fits, np.abs(gap - 2 * (mine.cost[:, None] - theirs.cost[None, :])), gap)
        best = int(left.argmin())
        if left.flat[best] < gap:
            a, b = divmod(best, len(theirs.document_index))
            given = int(mine.document_index[a])
            got = int(theirs.document_index[b])
            _replace_document(
                replica_shares[dearest], int(mine.bin_index[a]), given, got, lengths, costs
            )
            _replace_document(
                replica_shares[partner], int(theirs.bin_index[b]), got, given, lengths, costs
            )
            return True
    return False


class _ReplicaDocumentColumns:
    """The documents of a replica as arrays. `with_gaps`: each bin also has one gap (-1)."""

    def __init__(
        self,
        replica_share: ReplicaShare,
        lengths: Sequence[int],
        costs: Sequence[int],
        with_gaps: bool,
    ) -> None:
        """Make one entry for each document of the replica and, with `with_gaps`, one gap (-1) for
        each bin.
        """
        entries = [
            (index, document)
            for index, each in enumerate(replica_share)
            for document in each.documents
        ]
        if with_gaps:
            entries += [(index, -1) for index in range(len(replica_share))]
        self.bin_index, self.document_index = np.array(entries, dtype=np.int64).reshape(-1, 2).T
        self.length = np.array(
            [lengths[i] if i >= 0 else 0 for i in self.document_index], dtype=np.int64
        )
        self.cost = np.array(
            [costs[i] if i >= 0 else 0 for i in self.document_index], dtype=np.int64
        )
        self.bin_length = np.array([each.length for each in replica_share])[self.bin_index]
        self.bin_count = np.array([len(each.documents) for each in replica_share])[self.bin_index]


def _replace_document(
    replica_share: ReplicaShare,
    bin_index: int,
    old_document: int,
    new_document: int,
    lengths: Sequence[int],
    costs: Sequence[int],
) -> None:
    """Replace one document of a bin, in place, by another; -1 means no document."""
    kept = [
        document
        for document in (*replica_share[bin_index].documents, new_document)
        if document not in (old_document, -1)
    ]
    replica_share[bin_index] = DocumentBin.from_documents(kept, lengths, costs)


BinContents = list[list[int]]  # documents of each bin


def pack_documents(
    lengths: Sequence[int],
    costs: Sequence[int],
    num_replicas: int,
    bins_multiple: int,
    bin_capacity: int,
) -> list[ReplicaShare]:
    """Return the bins of each replica, dearest first: as many for each, a multiple of
    `bins_multiple`, as few as can be found.

    No bin is longer than `bin_capacity`; no document may be either. Bins are of even length where
    that leaves replicas of even cost, and else of even cost; where they have to be full, documents
    are fitted in. A bin is empty only where there are fewer documents than bins.
    """
    # ties: lowest index first
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)

    def round_up_num_bins(count: int) -> int:
        """Return `count` rounded up so that each replica gets the same multiple of `bins_multiple`
        bins.
        """
        return num_replicas * bins_multiple * max(1, -(-count // (num_replicas * bins_multiple)))

    num_bins = round_up_num_bins(compute_bin_lower_bound(lengths, bin_capacity))
    contents = _pack_by_even_length(order, lengths, num_bins, bin_capacity)
    if contents is None:
        fitted = _pack_best_fit(order, lengths, bin_capacity)
        if len(fitted) > num_bins:
            fitted = min(fitted, _pack_first_fit(order, lengths, bin_capacity), key=len)
            num_bins = round_up_num_bins(len(fitted))
            contents = _pack_by_even_length(order, lengths, num_bins, bin_capacity)
        contents = contents or _fill_empty_bins(fitted, num_bins)
    shares = deal_bins(
        [DocumentBin.from_documents(documents, lengths, costs) for documents in contents],
        num_replicas,
    )
    if compute_imbalance(shares) > MAX_EVEN_IMBALANCE:
        by_cost = _pack_by_even_cost(order, lengths, costs, num_bins, bin_capacity)
        if by_cost is not None:
            other = deal_bins(
                [DocumentBin.from_documents(documents, lengths, costs) for documents in by_cost],
                num_replicas,
            )
            shares = min(shares, other, key=compute_imbalance)
        exchange_documents(shares, lengths, costs, bin_capacity)
    return [sorted(share, key=lambda b: (-b.cost, b.documents)) for share in shares]


def compute_bin_lower_bound(lengths: Sequence[int], bin_capacity: int) -> int:
    """Return a number of bins that no packing can undercut (Martello and Toth, "Lower bounds and
    reduction procedures for the bin packing problem", 1990, bound L2).

    For any t: documents above half a bin are in bins of their own, and to those above room - t
    nothing of at least t can be added. What the others of at least t need beyond the room that is
    left beside the large ones needs new bins.
    """
    ascending = np.sort(np.asarray(lengths, dtype=np.int64))
    sums = np.concatenate([[0], ascending.cumsum()])
    first_large = int(np.searchsorted(ascending, bin_capacity // 2, side="right"))
    num_large = len(ascending) - first_large
    # small documents from here on count; t is the length of the first of them
    start = np.arange(first_large + 1)
    least = np.append(ascending[:first_large], bin_capacity // 2 + 1)
    # large ones from here on have no room for t
    end = np.searchsorted(ascending, bin_capacity - least, side="right")
    end = np.maximum(end, first_large)
    left_beside = (end - first_large) * bin_capacity - (sums[end] - sums[first_large])
    excess = sums[first_large] - sums[start] - left_beside
    return num_large + max(0, int((-(-excess // bin_capacity)).max()))


def _pack_by_even_length(
    document_order: list[int], lengths: Sequence[int], num_bins: int, bin_capacity: int
) -> BinContents | None:
    """Put each document into the emptiest bin. Return None where a document does not fit there."""
    contents: BinContents = [[] for _ in range(num_bins)]
    heap = list(range(num_bins))  # length * num_bins + bin
    for document in document_order:
        length, index = divmod(heap[0], num_bins)
        if length + lengths[document] > bin_capacity:
            return None
        contents[index].append(document)
        heapq.heapreplace(heap, heap[0] + lengths[document] * num_bins)
    return contents


def _pack_by_even_cost(
    document_order: list[int],
    lengths: Sequence[int],
    costs: Sequence[int],
    num_bins: int,
    bin_capacity: int,
) -> BinContents | None:
    """Put each document into the cheapest bin with room for it. Return None where no bin has room,
    or where bins are so full that the search takes long.
    """
    contents: BinContents = [[] for _ in range(num_bins)]
    heap = [(0, 0, index) for index in range(num_bins)]  # cost, length, bin
    detours = MAX_DETOURS * len(document_order)
    for document in document_order:
        full = []
        while heap and heap[0][1] + lengths[document] > bin_capacity:
            full.append(heapq.heappop(heap))
        detours -= len(full)
        if not heap or detours < 0:
            return None
        cost, length, index = heap[0]
        contents[index].append(document)
        heapq.heapreplace(heap, (cost + costs[document], length + lengths[document], index))
        for entry in full:
            heapq.heappush(heap, entry)
    return contents


def _pack_best_fit(
    document_order: list[int], lengths: Sequence[int], bin_capacity: int
) -> BinContents:
    """Put each document into the fullest bin with room for it, else into a new one."""
    contents: BinContents = []
    stride = len(document_order) + 1
    rooms: list[int] = []  # ascending: room * stride + bin
    for document in document_order:
        length = lengths[document]
        place = bisect_left(rooms, length * stride)
        if place == len(rooms):
            insort(rooms, (bin_capacity - length) * stride + len(contents))
            contents.append([document])
        else:
            left = rooms.pop(place)
            contents[left % stride].append(document)
            insort(rooms, left - length * stride)
    return contents


def _pack_first_fit(
    document_order: list[int], lengths: Sequence[int], bin_capacity: int
) -> BinContents:
    """Put each document into the first bin with room for it, else into a new one."""
    contents: BinContents = []
    rooms = np.full(len(document_order), bin_capacity)
    for document in document_order:
        length = lengths[document]
        index = (
            len(contents)
            if 2 * length > bin_capacity
            else int((rooms[: len(contents) + 1] >= length).argmax())
        )
        if index == len(contents):
            contents.append([])
        contents[index].append(document)
        rooms[index] -= length
    return contents


def _fill_empty_bins(bin_contents: BinContents, num_bins: int) -> BinContents:
    """Return `num_bins` bins: each empty one gets the last document, the shortest, of the bin with
    the most documents.
    """
    bin_contents = bin_contents + [[] for _ in range(num_bins - len(bin_contents))]
    heap = [
        (-len(documents), index)
        for index, documents in enumerate(bin_contents)
        if len(documents) > 1
    ]
    heapq.heapify(heap)
    for empty in (documents for documents in bin_contents if not documents):
        if not heap:
            break
        _, index = heapq.heappop(heap)
        empty.append(bin_contents[index].pop())
        if len(bin_contents[index]) > 1:
            heapq.heappush(heap, (-len(bin_contents[index]), index))
    return bin_contents
