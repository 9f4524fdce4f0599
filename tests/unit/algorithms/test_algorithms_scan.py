"""Discounted sums within segments: by hand, and against the recurrence, entry by entry, over
generated segments.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_megatron.algorithms.advantages import response_tokens as scan
from rlhf_megatron.algorithms.advantages.response_tokens import compute_discounted_sums_

DECAYS = [0.0, 1e-300, 1e-3, 0.5, 0.9405, 0.99999, 1.0]


def discounted(terms: list[float] | Tensor, lengths: list[int], decay: float) -> Tensor:
    """[N]. The scratch entry is NaN: nothing may come from it."""
    column = torch.cat(
        [torch.as_tensor(terms, dtype=torch.float64), torch.tensor([math.nan], dtype=torch.float64)]
    )
    compute_discounted_sums_(column, torch.tensor(lengths, dtype=torch.int64), decay)
    return column[:-1]


def recurrence(terms: Tensor, lengths: list[int], decay: float) -> Tensor:
    sums = [0.0] * len(terms)
    column = terms.tolist()
    end = len(terms)
    for length in reversed(lengths):
        carried = 0.0
        for t in range(end - 1, end - length - 1, -1):
            carried = column[t] + (decay * carried if t < end - 1 else 0.0)
            sums[t] = carried
        end -= length
    return torch.tensor(sums, dtype=torch.float64)


def test_by_hand() -> None:
    assert discounted([1, 2, 4, 8, 16], [3, 0, 2], 0.5).tolist() == pytest.approx(
        [3, 4, 4, 16, 16], rel=1e-15
    )
    assert discounted([1, 2, 4, 8, 16], [3, 2], 1.0).tolist() == [7, 6, 4, 24, 16]
    assert discounted([1, 2, 4, 8, 16], [3, 2], 0.0).tolist() == [1, 2, 4, 8, 16]
    assert discounted([], [], 0.5).tolist() == discounted([], [0, 0], 0.5).tolist() == []
    assert discounted([1e4], [1], 0.5).tolist() == pytest.approx([1e4], rel=1e-15)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_segments_equal_the_recurrence(data: st.DataObject) -> None:
    """Rows and groups are made so small that segments have several rows, of several groups, in
    all proportions.
    """
    row = data.draw(st.integers(1, 9))
    group = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(0, 30), max_size=8))
    decay = data.draw(st.sampled_from(DECAYS) | st.floats(0, 1))
    floats = st.floats(-1e4, 1e4, width=32)
    terms = torch.tensor(
        data.draw(st.lists(floats, min_size=sum(lengths), max_size=sum(lengths))),
        dtype=torch.float64,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "MAX_ROW_ENTRIES", row)
        patch.setattr(scan, "MAX_BATCH_ENTRIES", group)
        found = discounted(terms, lengths, decay)
    # Sums of at most 30 x 1e4, rounded at most 30 times: the recurrence itself is no more exact.
    torch.testing.assert_close(
        found, recurrence(terms, lengths, decay), rtol=1e-13, atol=3e5 * 30 * 2.0**-52
    )


@pytest.mark.parametrize("decay", [1e-3, 0.9405, 1.0])
@pytest.mark.parametrize(
    "length", [scan.MAX_ROW_ENTRIES - 1, scan.MAX_ROW_ENTRIES, scan.MAX_ROW_ENTRIES + 1, 32768]
)
def test_a_segment_that_ends_where_a_row_does(length: int, decay: float) -> None:
    """Between two others, values up to 1e4: the longest response there is loses nothing."""
    generator = torch.Generator().manual_seed(length)
    lengths = [3, length, 5]
    terms = (torch.rand(sum(lengths), generator=generator, dtype=torch.float64) * 2 - 0.9) * 1e4
    expected = recurrence(terms, lengths, decay)
    torch.testing.assert_close(discounted(terms, lengths, decay), expected, rtol=1e-11, atol=1e-7)
    largest = expected.abs().max().item()
    assert (discounted(terms, lengths, decay) - expected).abs().max().item() <= 1e-12 * largest


@pytest.mark.parametrize("decay", [0.5, 0.95, 1.0])
def test_a_segment_s_sums_do_not_depend_on_its_neighbours(decay: float) -> None:
    """Bit for bit, also beside NaN, infinity and segments of any length."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.randn(700, generator=generator, dtype=torch.float64)
    alone = discounted(middle, [700], decay)
    for before, behind in (([1], [1]), ([5000, 3], [40]), ([0, 700], [9000, 0, 1])):
        terms = torch.full((sum(before) + 700 + sum(behind),), math.nan, dtype=torch.float64)
        terms[sum(before) + 700 :] = math.inf
        terms[sum(before) : sum(before) + 700] = middle
        found = discounted(terms, [*before, 700, *behind], decay)
        assert torch.equal(found[sum(before) : sum(before) + 700], alone)


def test_what_is_not_finite_reaches_only_what_comes_before_it() -> None:
    found = discounted([1, 2, math.nan, 4, 8, 1], [5, 1], 0.5)
    assert found[:3].isnan().all() and found[3:].tolist() == pytest.approx([8, 8, 1], rel=1e-15)
