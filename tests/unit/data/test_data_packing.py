"""Bins: never too long, as few as promised, dealt evenly; exchanges by hand; how good plans of
real sizes are.
"""

import math
import random
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data import bin_packing
from rlhf_megatron.data.bin_packing import (
    MAX_EVEN_IMBALANCE,
    DocumentBin,
    ReplicaShare,
    _pack_first_fit,
    compute_bin_lower_bound,
    compute_imbalance,
    deal_bins,
    exchange_documents,
    pack_documents,
)
from rlhf_megatron.data.replica_plan import NO_OP, plan_replicas


def fewest_by_trying(lengths: list[int], room: int) -> int:
    """Bins of the best packing there is: all assignments, first document first."""
    best = len(lengths)

    def place(index: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best and index < len(lengths):
            return
        if index == len(lengths):
            best = min(best, len(bins))
            return
        for i in range(len(bins)):
            if bins[i] + lengths[index] <= room:
                place(index + 1, [*bins[:i], bins[i] + lengths[index], *bins[i + 1 :]])
        place(index + 1, [*bins, lengths[index]])

    place(0, [])
    return best


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 20).flatmap(
        lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=7))
    )
)
def test_the_bound_is_never_above_the_best_packing(case: tuple[int, list[int]]) -> None:
    room, lengths = case
    bound = compute_bin_lower_bound(lengths, room)
    assert -(-sum(lengths) // room) <= bound <= fewest_by_trying(lengths, room)


def test_the_bound_by_hand() -> None:
    """Three of 6 take a bin of 10 each; 5 goes nowhere beside them. By volume two bins and a
    half would do.
    """
    assert compute_bin_lower_bound([6, 6, 6, 5], 10) == 4 and -(-23 // 10) == 3
    # 3 x 7 leaves three holes of 3: of 4 + 4 + 4 + 1 only the 1 fits into them, and 12 need
    # two more bins.
    assert compute_bin_lower_bound([7, 7, 7, 4, 4, 4, 1], 10) == 5
    assert compute_bin_lower_bound([], 10) == 0


def costs_of(lengths: list[int]) -> list[int]:
    return [length * (7 + length) for length in lengths]


def documents_of(shares: list[ReplicaShare]) -> list[int]:
    return sorted(document for share in shares for each in share for document in each.documents)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_exchanges_keep_every_document_and_the_room(data: st.DataObject) -> None:
    """And make replicas no less even, whatever they began with."""
    room = data.draw(st.integers(4, 30))
    num_replicas = data.draw(st.integers(1, 4))
    num_each = 2
    lengths = data.draw(st.lists(st.integers(1, 10), max_size=24))
    costs = costs_of(lengths)
    contents: list[list[int]] = [[] for _ in range(num_replicas * num_each)]
    for document in range(len(lengths)):
        contents[data.draw(st.integers(0, len(contents) - 1))].append(document)
    room = max([room, *(sum(lengths[i] for i in documents) for documents in contents)])
    shares = deal_bins(
        [DocumentBin.from_documents(documents, lengths, costs) for documents in contents],
        num_replicas,
    )
    before = compute_imbalance(shares)
    num_empty = sum(not each.documents for share in shares for each in share)
    exchange_documents(shares, lengths, costs, room)
    assert documents_of(shares) == list(range(len(lengths)))
    assert compute_imbalance(shares) <= before
    bins = [each for share in shares for each in share]
    assert [len(share) for share in shares] == [num_each] * num_replicas
    assert all(
        each == DocumentBin.from_documents(each.documents, lengths, costs) and each.length <= room
        for each in bins
    )
    assert sum(not each.documents for each in bins) <= num_empty


def test_exchanges_by_hand() -> None:
    """Costs are lengths. Whole bins: 9 and 2 against 5 and 4 leave a gap of 2, which no swap of
    bins makes smaller.

    Documents: 9 + 1 and 5 + 1 against 4 + 2 and 3 leave a gap of 7; what a swap moves must be 3 or
    4, and there is one.
    """
    bins = [DocumentBin.from_documents((i,), [9, 5, 4, 2], [9, 5, 4, 2]) for i in range(4)]
    shares = deal_bins(bins, 2)  # dealt: 9 and 2, 5 and 4
    assert sorted(sum(each.cost for each in share) for share in shares) == [9, 11]

    # the one that is moved may be the first
    for lengths in ([9, 1, 5, 1, 4, 2, 3], [5, 1, 9, 1, 4, 2, 3]):
        shares = [
            [
                DocumentBin.from_documents((0, 1), lengths, lengths),
                DocumentBin.from_documents((2, 3), lengths, lengths),
            ],
            [
                DocumentBin.from_documents((4, 5), lengths, lengths),
                DocumentBin.from_documents((6,), lengths, lengths),
            ],
        ]
        exchange_documents(shares, lengths, lengths, bin_capacity=10)
        assert sorted(sum(each.cost for each in share) for share in shares) == [12, 13], (
            "25 cannot be dealt more evenly"
        )
        assert max(each.length for share in shares for each in share) <= 10


def test_full_bins_are_not_searched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three full bins are cheaper than those with room: the last document finds its bin behind
    them, or gives up.
    """
    lengths = [10, 10, 10, 1, 1, 1, 1]
    costs = [1, 1, 1, 5, 5, 5, 5]
    assert bin_packing._pack_by_even_cost(list(range(7)), lengths, costs, 6, 10) == [
        [0],
        [1],
        [2],
        [3, 6],
        [4],
        [5],
    ]
    monkeypatch.setattr(bin_packing, "MAX_DETOURS", 0)
    assert bin_packing._pack_by_even_cost(list(range(7)), lengths, costs, 6, 10) is None
    shares = pack_documents(lengths, costs, 2, 1, 10)
    assert documents_of(shares) == list(range(7))


def lognormal(num: int, longest: int) -> list[int]:
    generator = random.Random(0)
    return [
        max(16, min(longest, int(generator.lognormvariate(0, 1) * longest / 12)))
        for _ in range(num)
    ]


def bimodal(num: int, longest: int) -> list[int]:
    generator = random.Random(0)
    modes = ((0.06, 0.02), (0.6, 0.15))
    return [
        max(16, min(longest, int(generator.gauss(*modes[generator.random() > 0.7]) * longest)))
        for _ in range(num)
    ]


@pytest.mark.parametrize(
    ("draw", "dp", "multiples"),
    [
        (draw, dp, multiples)
        for draw, dp in product((lognormal, bimodal), (1, 8, 64))
        for multiples in ((1, 1), (8, 16))
    ],
)
def test_plans_of_real_sizes_are_even_and_full(draw, dp: int, multiples: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    """4096 samples up to 30000 tokens into 32768: no more micro-batches than the bound demands
    where it is by volume, replicas within 2 % of their mean, less than 3 % of padding where that
    many tokens could be without.
    """
    lengths = draw(4096, 30000)
    plans = plan_replicas(lengths, dp, 32768, *multiples)
    padded = [-(-length // multiples[0]) * multiples[0] for length in lengths]
    costs = [length * (24576 + length) for length in padded]
    totals = [sum(costs[i] for i in plan.samples if i != NO_OP) for plan in plans]
    assert max(totals) <= 1.02 * sum(totals) / dp
    num_bins = sum(len(plan.micro_batches) for plan in plans)
    least = math.ceil(compute_bin_lower_bound(padded, 32768) / dp) * dp
    assert num_bins <= least * 1.01 + dp
    floor = 1 - sum(lengths) / (num_bins * max(max(padded), sum(padded) / num_bins))
    assert 1 - sum(lengths) / (num_bins * plans[0].packed_length) <= max(0.03, floor + 0.02)


def test_documents_go_into_the_first_bin_with_room() -> None:
    assert _pack_first_fit([0, 1, 2, 3], [6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert _pack_first_fit([0, 1, 2], [5, 5, 1], 10) == [[0, 1], [2]]


def test_few_samples_a_replica_are_evened_out_by_exchanges() -> None:
    """Eight samples a replica, in two nearly full micro-batches each: dealing alone leaves 13 %."""
    lengths = bimodal(512, 32768)
    plans = plan_replicas(lengths, 64, 32768)
    totals = [sum(lengths[i] * (24576 + lengths[i]) for i in plan.samples) for plan in plans]
    assert (
        len(plans[0].micro_batches) == 2
        and max(totals) <= MAX_EVEN_IMBALANCE * 1.01 * sum(totals) / 64
    )
