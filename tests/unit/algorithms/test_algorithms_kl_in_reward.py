"""KL in the reward: where it stands, what reaches estimators of whole samples, and the controllers
of its weight.
"""

import json
import math

import pytest
import torch

from rlhf_megatron.algorithms import kl_in_reward
from rlhf_megatron.algorithms.advantages.advantage_estimator import (
    AdvantageInputs,
    compute_sample_rewards,
)
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams, grpo
from rlhf_megatron.algorithms.kl_in_reward import (
    KLController,
    MeanKL,
    compute_mean_kl,
    make_token_rewards,
)
from rlhf_megatron.algorithms.losses.kl_estimators import estimate_kl

NAN = math.nan
# Three samples: prompt + 2 response tokens + a tool token; a masked one; a prompt + 1
# response token.
OFFSETS = torch.tensor([0, 4, 6, 8])
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
VALID = torch.tensor([True, False, True])
SCORES = torch.tensor([3.0, NAN, -1.0])
KL = torch.tensor([NAN, 0.5, -0.25, NAN, NAN, NAN, NAN, 4.0])


def test_score_on_the_last_response_token_and_kl_on_each() -> None:
    found = make_token_rewards(SCORES, VALID, MASK, OFFSETS, KL, 0.5)
    assert found.dtype == torch.float32
    assert found.tolist() == [0, -0.25, 3.125, 0, 0, 0, 0, -3.0]


def test_rewards_of_steps_stand_at_their_tokens_and_the_rest_at_the_last() -> None:
    """Sample 0 is paid 3: 2 at its first response token, and so 1 at its last, whatever the
    column says of that.
    """
    process = torch.tensor([9.0, 2.0, 0.5, 9.0, NAN, NAN, 0.0, -1.0])
    found = make_token_rewards(SCORES, VALID, MASK, OFFSETS, None, 0.0, process)
    assert found.tolist() == [0, 2, 1, 0, 0, 0, 0, -1]
    found = make_token_rewards(SCORES, VALID, MASK, OFFSETS, KL, 0.5, process)
    assert found.tolist() == [0, 1.75, 1.125, 0, 0, 0, 0, -3]


def test_blocks_of_any_size_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (1, 3, 8):
        monkeypatch.setattr(kl_in_reward, "BLOCK_TOKENS", size)
        found = make_token_rewards(SCORES, VALID, MASK, OFFSETS, KL, 0.5)
        assert found.tolist() == [0, -0.25, 3.125, 0, 0, 0, 0, -3.0]


def test_without_kl_the_score_alone() -> None:
    assert make_token_rewards(SCORES, VALID, MASK, OFFSETS, None, 0.0).tolist() == [
        0,
        0,
        3,
        0,
        0,
        0,
        0,
        -1,
    ]
    assert make_token_rewards(SCORES, VALID, MASK, OFFSETS, KL, 0.0).tolist() == [
        0,
        0,
        3,
        0,
        0,
        0,
        0,
        -1,
    ]
    with pytest.raises(ValueError, match=r"kl_coef \(0.1\) needs a KL column"):
        make_token_rewards(SCORES, VALID, MASK, OFFSETS, None, 0.1)


def test_a_response_without_tokens_and_a_step_without_samples() -> None:
    offsets = torch.tensor([0, 2, 2, 4])
    mask = torch.tensor([False, False, False, True])
    valid = torch.ones(3, dtype=torch.bool)
    found = make_token_rewards(
        torch.tensor([5.0, 6.0, 7.0]), valid, mask, offsets, torch.full((4,), 2.0), 0.5
    )
    assert found.tolist() == [0, 0, 0, 6]
    empty = make_token_rewards(
        torch.zeros(0), torch.zeros(0).bool(), torch.zeros(0).bool(), torch.tensor([0]), None, 0.0
    )
    assert empty.shape == (0,)


def inputs_of(token_rewards_T: torch.Tensor | None) -> AdvantageInputs:
    """The three samples above and a fourth, valid one whose response has no tokens."""
    return AdvantageInputs(
        rewards_B=torch.cat([SCORES, torch.tensor([0.75])]),
        group_ids_B=torch.zeros(4, dtype=torch.int64),
        is_valid_B=torch.tensor([True, False, True, True]),
        response_mask_T=torch.cat([MASK, torch.tensor([False])]),
        offsets=torch.cat([OFFSETS, torch.tensor([9])]),
        token_rewards_T=token_rewards_T,
    )


def test_a_sample_s_reward_is_the_sum_of_its_token_rewards() -> None:
    plain = inputs_of(None)
    assert compute_sample_rewards(plain).tolist() == [3, 0, -1, 0.75]
    rewards_T = make_token_rewards(
        plain.rewards_B,
        plain.is_valid_B,
        plain.response_mask_T,
        plain.offsets,
        torch.cat([KL, KL[:1]]),
        0.5,
    )
    paid = inputs_of(rewards_T)
    assert compute_sample_rewards(paid).tolist() == [3 - 0.5 * 0.25, 0, -1 - 0.5 * 4, 0.75]
    assert compute_sample_rewards(paid).dtype == torch.float64
    # What stands outside of the response mask is no reward of a token.
    assert compute_sample_rewards(
        inputs_of(rewards_T.masked_fill(~paid.response_mask_T, NAN))
    ).tolist() == [2.875, 0, -3, 0.75]


def test_kl_in_the_reward_reaches_a_group_estimator() -> None:
    rewards_T = torch.tensor([0, -0.25, 3.125, 0, 0, 0, 0, -3.0, 0])
    found = grpo(inputs_of(rewards_T), GRPOParams(norm_adv_by_std_in_grpo=False)).advantages_T
    mean = (2.875 - 3 + 0.75) / 3
    expected = [0, 2.875 - mean, 2.875 - mean, 0, 0, 0, 0, -3 - mean, 0]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-7, atol=0)


def test_equal_scores_stay_equal_without_kl() -> None:
    """The detour over tokens is exact: GRPO of a group of equal scores stays exactly 0."""
    plain = inputs_of(None)
    scores = torch.full((4,), 0.1)
    rewards_T = make_token_rewards(
        scores, plain.is_valid_B, plain.response_mask_T, plain.offsets, None, 0.0
    )
    inputs = AdvantageInputs(
        scores, plain.group_ids_B, plain.is_valid_B, plain.response_mask_T, plain.offsets, rewards_T
    )
    assert grpo(inputs, GRPOParams()).advantages_T.tolist() == [0.0] * 9


def test_mean_kl_a_response_and_a_token() -> None:
    # 0.5 - 0.25 in the first sample, 4 in the third: 4.25 nats in two samples of three tokens.
    assert compute_mean_kl(KL, VALID, MASK, OFFSETS) == MeanKL(2.125, 4.25 / 3, 2)
    assert compute_mean_kl(KL, torch.zeros(3).bool(), MASK, OFFSETS) == MeanKL(0.0, 0.0, 0)


def test_absolute_estimate() -> None:
    log_probs = torch.tensor([-1.0, -2.0, -3.0])
    ref = torch.tensor([-1.5, -1.0, -3.0])
    assert estimate_kl(log_probs, ref, "abs").tolist() == [0.5, 1.0, 0.0]


# mean KL over target, samples over horizon, factor
UPDATES = [
    (1.0, 0.1, 1.0),  # on target
    (1.1, 0.1, 1.01),
    (0.9, 0.5, 0.95),
    (9.0, 0.1, 1.02),  # at most a fifth above
    (0.0, 0.1, 0.98),  # and a fifth below
    (-5.0, 1.0, 0.8),  # k1 may be negative
    (math.nextafter(1.2, 2), 1.0, 1.2),
]


@pytest.mark.parametrize(("relative", "share", "factor"), UPDATES)
def test_adaptive_by_hand(relative: float, share: float, factor: float) -> None:
    controller = KLController("adaptive", kl_coef=0.25, target_kl=6.0, horizon=1000)
    controller.update(relative * 6.0, int(share * 1000))
    assert controller.kl_coef == pytest.approx(0.25 * factor, rel=1e-14)


def test_fixed_never_moves() -> None:
    controller = KLController("fixed", 0.25)
    controller.update(1e9, 10**9)
    controller.update(NAN, 1)
    assert controller.kl_coef == 0.25


def test_no_samples_no_change() -> None:
    controller = KLController("adaptive", 0.25)
    controller.update(0.0, 0)
    assert controller.kl_coef == 0.25


@pytest.mark.parametrize("kind", ["fixed", "adaptive"])
def test_state_is_exact_through_json(kind: str) -> None:
    """A run that goes on has bit for bit the weights of one that was not stopped."""
    through, stopped = (KLController(kind, 0.1, 0.3, 700) for _ in range(2))  # type: ignore[arg-type]
    for kl in (0.37, 0.31, 0.29):
        through.update(kl, 64)
        stopped.update(kl, 64)
    resumed = KLController(kind, 0.1, 0.3, 700)  # type: ignore[arg-type]
    resumed.restore(json.loads(json.dumps(stopped.state())))
    for kl in (0.1, 0.34):
        through.update(kl, 64)
        resumed.update(kl, 64)
    assert resumed.kl_coef == through.kl_coef and (through.kl_coef == 0.1) == (kind == "fixed")


def test_a_fixed_weight_is_that_of_the_configuration() -> None:
    controller = KLController("fixed", 0.2)
    controller.restore(KLController("fixed", 0.1).state())
    assert controller.kl_coef == 0.2


def test_what_cannot_control_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'adaptiv'.*fixed, adaptive"):
        KLController("adaptiv", 0.1)  # type: ignore[arg-type]
    for bad in ({"kl_coef": 0.0}, {"target_kl": 0.0}, {"horizon": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            KLController("adaptive", **{"kl_coef": 0.1, "target_kl": 1.0, "horizon": 10, **bad})  # type: ignore[arg-type]
    controller = KLController("adaptive", 0.1, 1.0, 10)
    for kl in (NAN, math.inf):
        with pytest.raises(ValueError, match="must be a number"):
            controller.update(kl, 1)
    with pytest.raises(
        ValueError, match=r"horizon \(10 samples\) must be above 0.2 x the samples of a step \(50\)"
    ):
        controller.update(0.0, 50)
    assert controller.kl_coef == 0.1
