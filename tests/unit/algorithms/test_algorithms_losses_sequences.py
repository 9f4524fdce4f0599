"""Losses of whole sequences: by hand, and the same when the rows of a sequence are on
several ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlhf_megatron.algorithms.losses import PolicyLossInputs
from rlhf_megatron.algorithms.losses.geo_mean import GeoMeanParams, geo_mean
from rlhf_megatron.algorithms.losses.gspo import GSPOParams, gspo
from rlhf_megatron.algorithms.row_sequences import RowSequences

GSPO = GSPOParams(clip_ratio_low=0.2, clip_ratio_high=0.3)


def inputs_of(
    log_ratios: list[float], advantages: list[float], ids: list[int], num: int
) -> PolicyLossInputs:
    old = torch.full((len(ids),), -1.0, dtype=torch.float64)
    return PolicyLossInputs(
        (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_(),
        old,
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones(len(ids), dtype=torch.bool),
        sequences=RowSequences(torch.tensor(ids, dtype=torch.int64), num),
    )


def grad_of(token_loss: Tensor, inputs: PolicyLossInputs) -> list[float]:
    (grad,) = torch.autograd.grad(token_loss.sum(), inputs.log_probs_T)
    return grad.tolist()  # type: ignore[no-any-return]


def test_sums_and_means_of_sequences() -> None:
    sequences = RowSequences(torch.tensor([2, 0, 2, 2]), 3)
    first, second = sequences.sum_by_sequence(
        torch.tensor([1.0, 2.0, 3.0, 5.0]), torch.tensor([True, True, False, True])
    )
    assert (
        first.tolist() == [2.0, 0.0, 9.0]
        and second.tolist() == [1.0, 0.0, 2.0]
        and first.dtype == torch.float64
    )
    assert sequences.mean_by_sequence(torch.tensor([1.0, 2.0, 3.0, 5.0])).tolist() == [
        2.0,
        0.0,
        3.0,
    ]


def test_gspo_by_hand() -> None:
    """Three sequences, interleaved: mean log-ratios ln 1.1, ln 1.5 and ln 1.5."""
    up = math.log(1.1)
    far = math.log(1.5)
    inputs = inputs_of(
        [up + 0.6, far - 0.1, up - 0.6, far + 0.1, far],
        [2.0, 1.0, 2.0, 1.0, -1.0],
        [0, 1, 0, 1, 2],
        4,
    )
    outputs = gspo(inputs, GSPO)
    # 1.1 is inside, though its tokens' own ratios are not; 1.5 is clipped to 1.3 for A > 0, and
    # free for A < 0.
    assert outputs.token_loss_T.tolist() == pytest.approx([-2.2, -1.3, -2.2, -1.3, 1.5], rel=1e-12)
    assert grad_of(outputs.token_loss_T, inputs) == pytest.approx(
        [-2.2, 0.0, -2.2, 0.0, 1.5], rel=1e-12
    )
    assert outputs.metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 1, 0]
    assert outputs.metrics["actor/ppo_kl"].tolist() == pytest.approx(
        [-up - 0.6, 0.1 - far, 0.6 - up, -far - 0.1, -far]
    )


def test_gspo_tokens_of_one_sequence_may_have_advantages_of_their_own() -> None:
    inputs = inputs_of([math.log(1.5)] * 2, [1.0, -1.0], [0, 0], 1)
    outputs = gspo(inputs, GSPO)
    assert outputs.token_loss_T.tolist() == pytest.approx([-1.3, 1.5])
    assert grad_of(outputs.token_loss_T, inputs) == pytest.approx([0.0, 1.5])


def test_gspo_bounds_the_mean() -> None:
    inputs = inputs_of([50.0, -50.0, 30.0, -30.0], [-1.0, 1.0, -1.0, -1.0], [0, 1, 2, 2], 3)
    outputs = gspo(inputs, GSPO)
    assert outputs.token_loss_T.tolist() == pytest.approx([math.exp(20), -math.exp(-20), 1.0, 1.0])
    # held: no gradient
    assert grad_of(outputs.token_loss_T, inputs) == pytest.approx([0.0, 0.0, 1.0, 1.0])


def test_geo_mean_by_hand() -> None:
    """Log-ratios 0.6 and -0.2: for A > 0 the first counts as 0.4, so exp(0.1); for A < 0 as it is,
    so exp(0.2). And -0.6 and 0.2 for A < 0: -0.4 and 0.2, so exp(-0.1).
    """
    inputs = inputs_of(
        [0.6, -0.2, 0.6, -0.2, -0.6, 0.2], [2, 2, -2, -2, -1, -1], [0, 0, 1, 1, 2, 2], 3
    )
    outputs = geo_mean(inputs, GeoMeanParams())
    up = 2 * math.exp(0.1)
    free = 2 * math.exp(0.2)
    down = math.exp(-0.1)
    assert outputs.token_loss_T.tolist() == pytest.approx(
        [-up, -up, free, free, down, down], rel=1e-12
    )
    assert grad_of(outputs.token_loss_T, inputs) == pytest.approx(
        [0.0, -up, free, free, 0.0, down], rel=1e-12
    )
    assert outputs.metrics["actor/pg_clipfrac"].tolist() == [1, 0, 0, 0, 1, 0]


def test_geo_mean_bounds_of_their_own() -> None:
    inputs = inputs_of([0.6, -0.6], [1.0, -1.0], [0, 1], 2)
    outputs = geo_mean(inputs, GeoMeanParams(clip_ratio_low=0.1, clip_ratio_high=0.2))
    assert outputs.token_loss_T.tolist() == pytest.approx([-math.exp(0.2), math.exp(-0.1)])


class Ranks:
    """Adds up between ranks that are run one after the other: the first round notes, the
    second one knows.
    """

    def __init__(self) -> None:
        self.noted: list[Tensor] = []
        self.total: Tensor | None = None

    def reduce(self, sums: Tensor) -> Tensor:
        assert sums.dtype == torch.float64
        if self.total is None:
            self.noted.append(sums)
            return sums
        return self.total


@pytest.mark.parametrize(
    "loss",
    [lambda inputs: gspo(inputs, GSPO), lambda inputs: geo_mean(inputs, GeoMeanParams())],
    ids=["gspo", "geo"],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_of_a_sequence_on_several_ranks(
    loss: Callable[[PolicyLossInputs], PolicyLossInputs], num_ranks: int
) -> None:
    """Loss, gradient and metrics of each row; one rank may have no rows at all, and still calls."""
    generator = torch.Generator().manual_seed(num_ranks)
    ids = torch.randint(0, 5, (40,), generator=generator)
    whole = inputs_of(
        torch.randn(40, generator=generator).tolist(),
        torch.randn(40, generator=generator).sign().tolist(),
        ids.tolist(),
        6,
    )
    expected = loss(whole)
    expected_grad = torch.tensor(grad_of(expected.token_loss_T, whole), dtype=torch.float64)
    rank_of = torch.randint(0, num_ranks - 1, (40,), generator=generator)  # none on the last
    ranks = Ranks()
    for _ in range(2):
        outcomes = []
        for rank in range(num_ranks):
            rows = (rank_of == rank).nonzero().flatten()
            part = PolicyLossInputs(
                whole.log_probs_T.detach()[rows].requires_grad_(),
                whole.old_log_probs_T[rows],
                whole.advantages_T[rows],
                whole.response_mask_T[rows],
                sequences=RowSequences(ids[rows], 6, ranks.reduce),
            )
            outcomes.append((rows, part, loss(part)))
        if ranks.total is None:
            assert len(ranks.noted) == num_ranks, "every rank calls once"
            ranks.total = torch.stack(ranks.noted).sum(0)
    for rows, part, outputs in outcomes:
        torch.testing.assert_close(
            outputs.token_loss_T, expected.token_loss_T[rows], rtol=1e-12, atol=0
        )
        grad = torch.tensor(grad_of(outputs.token_loss_T, part), dtype=torch.float64)
        torch.testing.assert_close(grad, expected_grad[rows], rtol=1e-12, atol=0)
        for name, metric in outputs.metrics.items():
            torch.testing.assert_close(metric, expected.metrics[name][rows], rtol=1e-12, atol=0)


def test_a_loss_of_sequences_needs_them() -> None:
    with pytest.raises(AssertionError, match="whole sequences"):
        gspo(replace(inputs_of([0.1], [1.0], [0], 1), sequences=None), GSPO)
