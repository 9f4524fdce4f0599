"""Experts as grouped products, against one product after the other."""

from __future__ import annotations

import pytest
import torch

from rlhf_megatron.models.grouped_experts import filled_groups, grouped_linear


def test_groups_are_filled_up_to_sixteens() -> None:
    """3, 0, 16 and 17 tokens: groups of 16, 16, 16 and 32 rows."""
    places, ends = filled_groups(torch.tensor([3, 0, 16, 17]), 36)
    assert ends.tolist() == [16, 32, 48, 80] and ends.dtype == torch.int32
    assert places.tolist() == [*range(3), *range(32, 48), *range(48, 65)]


@pytest.mark.parametrize("counts", [(5, 0, 20, 7), (0, 0, 0, 0)], ids=["an expert without tokens", "no tokens"])
def test_products_and_gradients_are_those_of_each_expert(counts: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    num_tokens = sum(counts)
    tokens = torch.randn(num_tokens, 8, requires_grad=True)
    weights = [torch.randn(12, 8, requires_grad=True) for _ in counts]
    places, ends = filled_groups(torch.tensor(counts), num_tokens)
    filled = torch.zeros(int(ends[-1]) + 16, 8).index_copy(0, places, tokens)
    found = grouped_linear(filled, ends, weights).index_select(0, places)
    expected = torch.cat([x @ w.t() for x, w in zip(tokens.split(counts), weights, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    cotangent = torch.randn_like(found)
    of_found, of_expected = (torch.autograd.grad(y, [tokens, *weights], cotangent) for y in (found, expected))
    for one, other, count in zip(of_found, of_expected, (1, *counts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert count or not one.any(), "exactly zero where no token came"
