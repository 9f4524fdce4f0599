"""Weights of token losses against hand-computed numbers, and independence of how a
mini-batch is split.
"""

import pytest
import torch

from rlhf_megatron.algorithms import loss_aggregation
from rlhf_megatron.algorithms.loss_aggregation import (
    AGGREGATIONS,
    compute_loss_weights,
    compute_metric_weights,
    sum_by_sequence,
)

# Three sequences of 3, 4 and 2 tokens with 2, 3 and 0 response tokens: N = 5, S = 3.
OFFSETS = torch.tensor([0, 3, 7, 9])
MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 0], dtype=torch.bool)


@pytest.mark.parametrize(
    ("mode", "first", "second"),
    [
        ("token-mean", 1 / 5, 1 / 5),
        ("token-sum", 1.0, 1.0),
        ("seq-mean-token-sum", 1 / 3, 1 / 3),
        ("seq-mean-token-sum-norm", 1 / 24, 1 / 24),  # 3 sequences, factor 8
        ("seq-mean-token-mean", 1 / 6, 1 / 9),
    ],
)
def test_weights_by_hand(mode: str, first: float, second: float) -> None:
    expected = torch.tensor([0, first, first, 0, second, second, second, 0, 0])
    weights = compute_loss_weights(mode, MASK, OFFSETS, 5, 3, scale_factor=8)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, atol=0, rtol=1e-7)


@pytest.mark.parametrize("block", [1, 3, 4, 8])
@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_blocks_change_no_weight(mode: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compute_loss_weights(mode, MASK, OFFSETS, 50, 30, 8)
    monkeypatch.setattr(loss_aggregation, "BLOCK_TOKENS", block)
    assert torch.equal(compute_loss_weights(mode, MASK, OFFSETS, 50, 30, 8), whole)


def test_global_counts_divide_and_not_local_ones() -> None:
    assert compute_loss_weights("token-mean", MASK, OFFSETS, 50, 30)[1] == pytest.approx(1 / 50)
    assert compute_loss_weights("seq-mean-token-sum", MASK, OFFSETS, 50, 30)[1] == pytest.approx(
        1 / 30
    )
    assert compute_loss_weights("seq-mean-token-mean", MASK, OFFSETS, 50, 30)[4] == pytest.approx(
        1 / 90
    )


def test_metric_weights_give_the_token_mean() -> None:
    metric = torch.arange(9.0)
    assert (metric * compute_metric_weights(MASK, 5)).sum().item() == pytest.approx(
        (1 + 2 + 4 + 5 + 6) / 5
    )


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_empty_masks_and_empty_parts_weigh_nothing(mode: str) -> None:
    nothing = compute_loss_weights(mode, torch.zeros(9, dtype=torch.bool), OFFSETS, 0, 3, 8)
    assert torch.equal(nothing, torch.zeros(9))
    no_samples = compute_loss_weights(
        mode, torch.zeros(0, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 0, 0, 8
    )
    assert no_samples.shape == (0,)
    assert torch.equal(compute_metric_weights(torch.zeros(2, dtype=torch.bool), 0), torch.zeros(2))


def test_counts_that_do_not_cover_the_part_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 response tokens.*5 tokens"):
        compute_loss_weights("token-mean", MASK, OFFSETS, 4, 3)
    with pytest.raises(ValueError, match="2 sequences"):
        compute_loss_weights("token-mean", MASK, OFFSETS, 5, 2)
    with pytest.raises(ValueError, match=r"'mean'.*token-mean"):
        compute_loss_weights("mean", MASK, OFFSETS, 5, 3)


@pytest.mark.parametrize("factor", [None, 0.0, -1.0])
def test_a_norm_without_a_factor_is_refused(factor: float | None) -> None:
    with pytest.raises(
        ValueError, match=r"loss_scale_factor \(.*\) must be positive for seq-mean-token-sum-norm"
    ):
        compute_loss_weights("seq-mean-token-sum-norm", MASK, OFFSETS, 5, 3, factor)


def test_sequence_sums() -> None:
    assert sum_by_sequence(torch.arange(9.0), OFFSETS).tolist() == [3.0, 18.0, 15.0]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_any_split_gives_the_loss_and_gradient_of_the_whole(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 40, (23,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = int(offsets[-1])
    mask = torch.rand(total, generator=generator) < 0.6
    scores = torch.randn(total, generator=generator, dtype=torch.float64)
    num_tokens = int(mask.sum())

    def part_loss(samples: list[int], leaf: torch.Tensor) -> torch.Tensor:
        index = torch.cat([torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in samples])
        part_offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[samples].cumsum(0)])
        weights = compute_loss_weights(
            mode, mask[index], part_offsets, num_tokens, len(lengths), 40
        )
        return (leaf[index].square() * weights).sum()

    whole_leaf = scores.clone().requires_grad_()
    whole = part_loss(list(range(len(lengths))), whole_leaf)
    whole.backward()
    for num_parts in (2, 5, 23):
        order = torch.randperm(len(lengths), generator=generator).tolist()
        leaf = scores.clone().requires_grad_()
        losses = [part_loss(order[k::num_parts], leaf) for k in range(num_parts)]
        torch.stack(losses).sum().backward()
        torch.testing.assert_close(torch.stack(losses).sum(), whole, rtol=1e-14, atol=0)
        assert torch.equal(leaf.grad, whole_leaf.grad)


def test_splitting_sequences_keeps_the_loss_once_weights_exist() -> None:
    """Context parallelism cuts inside sequences: weights are made before, then only summed."""
    weights = compute_loss_weights("seq-mean-token-mean", MASK, OFFSETS, 5, 3).double()
    loss = torch.linspace(-1, 1, 9, dtype=torch.float64)
    whole = (loss * weights).sum()
    for cut in range(10):
        assert (
            (loss * weights)[:cut].sum() + (loss * weights)[cut:].sum()
        ).item() == pytest.approx(whole.item(), 1e-14)


@pytest.mark.parametrize("block", [1, 3, 4, 100])
def test_sums_of_sequences_by_hand_in_blocks_of_any_size(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_aggregation, "BLOCK_TOKENS", block)
    offsets = torch.tensor([0, 0, 3, 7, 7, 7, 8, 8])
    found = sum_by_sequence(torch.tensor([1.0, 2, 4, 8, 16, 32, 64, 128]), offsets)
    assert found.dtype == torch.float64 and found.tolist() == [0, 7, 120, 0, 0, 128, 0]
