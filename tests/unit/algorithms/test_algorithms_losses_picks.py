"""Which tokens of a mini-batch clip_cov and kl_cov choose, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rlhf_megatron.algorithms.losses import PICKS, POLICY_LOSSES, TokenPickInputs
from rlhf_megatron.algorithms.losses.clip_cov import ClipCovParams, pick_clip_cov_tokens
from rlhf_megatron.algorithms.losses.kl_cov import KLCovParams, pick_kl_cov_tokens
from rlhf_megatron.algorithms.losses.token_covariance import compute_token_covariances

# The first and the fourth do not train. The others: log-probs with mean -3, advantages with mean 0,
# covariances 2 x 1 = 2, 1 x -1 = -1, 0 x 2 = 0, -3 x -2 = 6.
TOKENS = TokenPickInputs(
    old_log_probs_T=torch.tensor([-90.0, -1.0, -2.0, 0.0, -3.0, -6.0]),
    advantages_T=torch.tensor([50.0, 1.0, -1.0, 0.0, 2.0, -2.0]),
    trains_T=torch.tensor([0, 1, 1, 0, 1, 1], dtype=torch.bool),
    noise_T=torch.tensor([0.0, 0.9, 0.2, 0.1, 0.5, 0.3], dtype=torch.float64),
)


def test_covariances_over_the_tokens_that_train() -> None:
    index, covariances = compute_token_covariances(TOKENS)
    assert (index.tolist(), covariances.tolist()) == ([1, 2, 4, 5], [2.0, -1.0, 0.0, 6.0])


@pytest.mark.parametrize(
    ("share", "expected"),
    [(1e-4, [5]), (0.25, [5]), (0.5, [1, 5]), (0.99, [1, 4, 5]), (1.0, [1, 2, 4, 5])],
)
def test_kl_cov_takes_the_largest(share: float, expected: list[int]) -> None:
    assert (
        pick_kl_cov_tokens(TOKENS, KLCovParams(kl_cov_ratio=share)).nonzero().flatten().tolist()
        == expected
    )


def test_noise_decides_among_equals() -> None:
    equal = replace(TOKENS, old_log_probs_T=torch.full((6,), -1.0))
    assert pick_kl_cov_tokens(
        equal, KLCovParams(kl_cov_ratio=0.5)
    ).nonzero().flatten().tolist() == [2, 5]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [1]),  # between 1 and 5 there is one
        ({"clip_cov_lb": 2.0}, []),  # bounds are open
        ({"clip_cov_lb": -2.0}, [2]),  # one of 1, 2, 4: that of the least noise
        ({"clip_cov_lb": -2.0, "clip_cov_ratio": 0.5}, [2, 4]),  # half of all tokens that train
        ({"clip_cov_lb": -2.0, "clip_cov_ub": 7.0, "clip_cov_ratio": 0.5}, [2, 5]),
        ({"clip_cov_lb": -2.0, "clip_cov_ratio": 1.0}, [1, 2, 4]),
    ],
)
def test_clip_cov_draws_between_its_bounds(params: dict[str, float], expected: list[int]) -> None:
    assert (
        pick_clip_cov_tokens(TOKENS, ClipCovParams(**params)).nonzero().flatten().tolist()
        == expected
    )


@pytest.mark.parametrize("name", PICKS)
def test_nothing_is_picked_where_nothing_trains(name: str) -> None:
    kind = POLICY_LOSSES.get(name).params
    assert kind is not None
    nothing = replace(TOKENS, trains_T=torch.zeros(6, dtype=torch.bool))
    is_picked = PICKS.get(name).build(nothing, kind())
    assert is_picked.dtype == torch.bool and is_picked.tolist() == [False] * 6
    alone = replace(TOKENS, trains_T=torch.arange(6) == 2)  # no covariance with itself
    assert PICKS.get(name).build(alone, kind()).tolist() == [
        name == "kl_cov" and i == 2 for i in range(6)
    ]


def test_every_loss_that_reads_picks_has_a_choice() -> None:
    assert {name for name in POLICY_LOSSES if "is_picked" in POLICY_LOSSES.get(name).needs} == set(
        PICKS
    )
