"""Generalized advantage estimation: by hand, and against a plain loop over generated
ragged batches.
"""

import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs, AdvantageOutputs
from rlhf_megatron.algorithms.advantages.gae import GAEParams, gae
from rlhf_megatron.algorithms.advantages.response_tokens import RunningMoments
from rlhf_megatron.algorithms.metric_names import METRICS

gae_module = sys.modules[gae.__module__]  # the package has the function under the module's name

PLAIN = GAEParams(gamma=1.0, lam=1.0, whiten=False)


def inputs_of(
    lengths: list[int],
    mask: list[int],
    token_rewards: list[float] | Tensor,
    values: list[float] | Tensor,
    valid: list[bool] | None = None,
) -> AdvantageInputs:
    count = len(lengths)
    return AdvantageInputs(
        rewards_B=torch.full((count,), math.nan),  # must not be read
        group_ids_B=torch.zeros(count, dtype=torch.int64),
        is_valid_B=torch.tensor([True] * count if valid is None else valid, dtype=torch.bool),
        response_mask_T=torch.tensor(mask, dtype=torch.bool),
        offsets=torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0),
        token_rewards_T=torch.as_tensor(token_rewards, dtype=torch.float32),
        values_T=torch.as_tensor(values, dtype=torch.float32),
    )


def plain_loop(
    inputs: AdvantageInputs, gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """(advantages, returns), token by token from the back, in Python floats; nothing whitened."""
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    rewards = inputs.token_rewards_T.tolist()
    values = inputs.values_T.tolist()
    mask = inputs.response_mask_T.tolist()
    valid = inputs.is_valid_B.tolist()
    offsets = inputs.offsets.tolist()
    advantages = [0.0] * len(values)
    returns = [
        value if is_response else 0.0 for value, is_response in zip(values, mask, strict=True)
    ]
    for i in range(len(valid)):
        next_value = 0.0
        advantage = 0.0
        for t in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            if mask[t] and valid[i]:
                advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
                next_value = values[t]
                advantages[t] = advantage
                returns[t] = advantage + values[t]
    return advantages, returns


def test_by_hand() -> None:
    # A prompt token, then three response tokens: values 1, 2, 4; rewards 0, 0, 10;
    # gamma = lam = 1/2.
    outputs = gae(
        inputs_of([4], [0, 1, 1, 1], [9, 0, 0, 10], [7, 1, 2, 4]), GAEParams(0.5, 0.5, whiten=False)
    )
    # deltas 0 + 1 - 1, 0 + 2 - 2, 10 - 4 = 0, 0, 6; A = 6/16, 6/4, 6
    assert outputs.advantages_T.tolist() == [0, 0.375, 1.5, 6]
    assert outputs.returns_T is not None and outputs.returns_T.tolist() == [0, 1.375, 3.5, 10]
    assert outputs.advantages_T.dtype == outputs.returns_T.dtype == torch.float32


def test_a_tool_s_tokens_carry_value_and_advantage_through() -> None:
    """Two tool tokens in the middle, with a wild value and a reward: the result is
    that without them.
    """
    params = GAEParams(0.5, 0.5, whiten=False)
    outputs = gae(
        inputs_of([6], [0, 1, 1, 0, 0, 1], [9, 0, 0, 50, 50, 10], [7, 1, 2, 99, -99, 4]), params
    )
    assert outputs.advantages_T.tolist() == [0, 0.375, 1.5, 0, 0, 6]
    assert outputs.returns_T is not None and outputs.returns_T.tolist() == [0, 1.375, 3.5, 0, 0, 10]


def test_lambda_one_is_the_reward_to_go_and_lambda_zero_one_step() -> None:
    inputs = inputs_of([3, 2], [1] * 5, [1, 2, 4, 8, 16], [3, 5, 7, 11, 13])
    to_go = gae(inputs, PLAIN)
    assert to_go.returns_T is not None and to_go.returns_T.tolist() == [7, 6, 4, 24, 16]
    assert to_go.advantages_T.tolist() == [4, 1, -3, 13, 3]
    one_step = gae(inputs, GAEParams(1.0, 0.0, whiten=False))
    assert one_step.advantages_T.tolist() == [1 + 5 - 3, 2 + 7 - 5, 4 - 7, 8 + 13 - 11, 16 - 13]


def test_masked_samples_train_nothing_and_are_in_no_statistic() -> None:
    """Advantage 0 and return = value on their tokens, whatever they were rewarded; the others
    do not notice.
    """
    kept = inputs_of([2, 2], [0, 1, 1, 1], [0, 1, 2, 4], [9, 1, 2, 3])
    bad = [math.nan, math.inf, -math.inf]
    both = inputs_of(
        [2, 3, 2],
        [0, 1, 1, 1, 1, 1, 1],
        [0, 1, *bad, 2, 4],
        [9, 1, 50, 60, 70, 2, 3],
        [True, False, True],
    )
    for params in (PLAIN, GAEParams()):
        alone = gae(kept, params)
        among = gae(both, params)
        assert alone.returns_T is not None and among.returns_T is not None
        assert among.advantages_T[2:5].tolist() == [0, 0, 0] and among.returns_T[2:5].tolist() == [
            50,
            60,
            70,
        ]
        rest = [0, 1, 5, 6]
        assert torch.equal(among.advantages_T[rest], alone.advantages_T)
        assert torch.equal(among.returns_T[rest], alone.returns_T)
        assert among.metrics == alone.metrics


def test_whitening_by_hand() -> None:
    # Advantages 1, 2, 6 of two samples: mean 3, squares 4 + 1 + 9 = 14, unbiased variance 7.
    inputs = inputs_of([3, 1], [0, 1, 1, 1], [0, 1, 2, 6], [5, 0, 0, 0])
    params = GAEParams(gamma=0.0)
    outputs = gae(inputs, params)
    deviation = math.sqrt(7 + 1e-8)
    expected = [0.0, -2 / deviation, -1 / deviation, 3 / deviation]
    assert outputs.advantages_T.tolist() == pytest.approx(expected, rel=1e-7)
    # Returns are those before: whitened advantages + values would be another target for the critic.
    assert outputs.returns_T is not None and outputs.returns_T.tolist() == [0, 1, 2, 6]


def test_whitening_over_one_token_or_none_changes_nothing() -> None:
    assert gae(inputs_of([2], [0, 1], [0, 5], [0, 2]), GAEParams()).advantages_T.tolist() == [0, 3]
    outputs = gae(inputs_of([2], [0, 0], [0, 5], [0, 2]), GAEParams())
    assert outputs.advantages_T.tolist() == [0, 0] and outputs.metrics == {}
    nothing = gae(inputs_of([], [], [], []), GAEParams())
    assert nothing.advantages_T.shape == (0,) and nothing.metrics == {}


def test_equal_advantages_are_whitened_to_nothing_large() -> None:
    """Epsilon bounds what rounding can become: no division by a variance of 0."""
    equal = inputs_of([1] * 7, [1] * 7, [0.1] * 7, [0.0] * 7)
    assert gae(equal, GAEParams()).advantages_T.abs().max().item() < 1e-11


def test_moments_do_not_depend_on_the_parts() -> None:
    """Far from 0, where the sum of squares less the square of the sum has no digit left; in one
    part and in many.
    """
    generator = torch.Generator().manual_seed(0)
    column = torch.randn(1000, generator=generator, dtype=torch.float64) * 1e-3 + 1e6
    exact = [value - 1e6 for value in column.tolist()]
    mean = math.fsum(exact) / 1000
    variance = math.fsum((value - mean) ** 2 for value in exact) / 999
    for sizes in ([1000], [1, 999], [0, 500, 0, 499, 1], [7] * 142 + [6]):
        moments = RunningMoments()
        for part in column.split(sizes):
            moments = moments.merge_entries(part)
        assert moments.count == 1000 and moments.mean == pytest.approx(1e6 + mean, rel=1e-15)
        assert moments.variance == pytest.approx(variance, rel=1e-6)
    equal = RunningMoments()
    for part in torch.full((100,), 0.1, dtype=torch.float64).split(7):
        equal = equal.merge_entries(part)
    assert equal.variance == 0.0


def test_explained_variance_by_hand() -> None:
    # One token a sample: returns 1, 3, 8 (mean 4, unbiased variance (9 + 1 + 16) / 2 = 13);
    # values 1, 2, 3: advantages 0, 1, 5 (mean 2, variance (4 + 1 + 9) / 2 = 7).
    outputs = gae(inputs_of([1, 1, 1], [1, 1, 1], [1, 3, 8], [1, 2, 3]), GAEParams())
    assert outputs.metrics == {"critic/vf_explained_var": pytest.approx(1 - 7 / 13)}
    assert set(outputs.metrics) <= set(METRICS)


def test_explained_variance_is_left_out_where_returns_do_not_vary() -> None:
    assert gae(inputs_of([1, 1], [1, 1], [2, 2], [1, 5]), PLAIN).metrics == {}


def test_values_and_rewards_of_a_wide_type_are_not_needed() -> None:
    """A large value that cancels: float32 sums would lose the 1 at 2**24."""
    outputs = gae(inputs_of([3], [1, 1, 1], [2.0**24, 1, -(2.0**24)], [0, 0, 0]), PLAIN)
    assert outputs.advantages_T.tolist() == [1, 1 - 2**24, -(2**24)]


@st.composite
def ragged(draw: st.DrawFn) -> AdvantageInputs:
    lengths = draw(st.lists(st.integers(0, 17), max_size=6))
    total = sum(lengths)
    mask = draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    floats = st.lists(st.floats(-4, 4, width=32), min_size=total, max_size=total)
    valid = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    return inputs_of(lengths, mask, draw(floats), draw(floats), valid)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
@settings(max_examples=40, deadline=None)
@given(inputs=ragged())
def test_any_ragged_batch_equals_the_plain_loop(
    inputs: AdvantageInputs, gamma: float, lam: float
) -> None:
    outputs = gae(inputs, GAEParams(gamma, lam, whiten=False))
    advantages, returns = plain_loop(inputs, gamma, lam)
    check(outputs, advantages, returns)


@settings(max_examples=40, deadline=None)
@given(inputs=ragged())
def test_whitening_of_any_ragged_batch_equals_the_formula(inputs: AdvantageInputs) -> None:
    advantages, returns = plain_loop(inputs, 0.95, 0.9)
    trains = inputs.response_mask_T & inputs.is_valid_B.repeat_interleave(inputs.offsets.diff())
    kept = [a for a, is_kept in zip(advantages, trains.tolist(), strict=True) if is_kept]
    if len(kept) > 1:
        mean = math.fsum(kept) / len(kept)
        scale = 1 / math.sqrt(math.fsum((a - mean) ** 2 for a in kept) / (len(kept) - 1) + 1e-8)
        advantages = [
            (a - mean) * scale if k else 0.0
            for a, k in zip(advantages, trains.tolist(), strict=True)
        ]
    check(gae(inputs, GAEParams(0.95, 0.9)), advantages, returns)


def check(outputs: AdvantageOutputs, advantages: list[float], returns: list[float]) -> None:
    """Equal but for the last bits of float32, and for what float64 loses against sums of at
    most 17 x 4 x 2.
    """
    assert outputs.returns_T is not None
    for found, expected in ((outputs.advantages_T, advantages), (outputs.returns_T, returns)):
        torch.testing.assert_close(
            found, torch.tensor(expected, dtype=torch.float32), rtol=2e-7, atol=1e-9
        )


@pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
def test_a_long_batch_is_exact_too(lam: float) -> None:
    """260 000 tokens in several parts, one sample of 70 000 among short and empty ones, tools,
    invalid samples.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = [*torch.randint(0, 900, (280,), generator=generator).tolist(), 70_000, 1, 0]
    lengths.append(260_000 - sum(lengths))
    mask = (torch.rand(260_000, generator=generator) < 0.7).int().tolist()
    rewards, values = (torch.randn(260_000, generator=generator) for _ in range(2))
    valid = (torch.rand(len(lengths), generator=generator) < 0.9).tolist()
    inputs = inputs_of(lengths, mask, rewards * 1e4, values * 1e4, valid)
    advantages, returns = plain_loop(inputs, 1.0, lam)
    found = gae(inputs, GAEParams(1.0, lam, whiten=False))
    assert found.returns_T is not None
    for column, expected in ((found.advantages_T, advantages), (found.returns_T, returns)):
        torch.testing.assert_close(column, torch.tensor(expected), rtol=2e-7, atol=1e-7)


@settings(max_examples=40, deadline=None)
@given(inputs=ragged(), part=st.integers(1, 30))
def test_parts_change_nothing(inputs: AdvantageInputs, part: int) -> None:
    """Samples alone or several at a time: the same, but for the last bits of the statistics."""
    whole = gae(inputs, GAEParams(0.95, 0.9, whiten=False)), gae(inputs, GAEParams(0.95, 0.9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gae_module, "PART_TOKENS", part)
        parts = gae(inputs, GAEParams(0.95, 0.9, whiten=False)), gae(inputs, GAEParams(0.95, 0.9))
    assert torch.equal(parts[0].advantages_T, whole[0].advantages_T)
    for one, other in zip(parts, whole, strict=True):
        assert one.returns_T is not None and other.returns_T is not None
        assert torch.equal(one.returns_T, other.returns_T)
        torch.testing.assert_close(one.advantages_T, other.advantages_T, rtol=2e-7, atol=1e-9)
        assert one.metrics.keys() == other.metrics.keys()


def test_nothing_crosses_from_one_sample_to_another() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 9, 3]
    rewards = torch.randn(18, generator=generator)
    values = torch.randn(18, generator=generator)
    whole = gae(inputs_of(lengths, [1] * 18, rewards, values), PLAIN)
    rewards[6:15] = math.nan
    values[6:15] = math.inf
    broken = gae(inputs_of(lengths, [1] * 18, rewards, values), PLAIN)
    others = [*range(6), *range(15, 18)]
    assert torch.equal(whole.advantages_T[others], broken.advantages_T[others])


def test_registered_with_its_parameters_and_needs() -> None:
    entry = ADV_ESTIMATORS.get("gae")
    assert (
        entry.build is gae
        and entry.params is GAEParams
        and set(entry.needs) == {"token_rewards", "values"}
    )
    for name in ("gamma", "lam"):
        for value in (-0.1, 1.1):
            with pytest.raises(
                ValueError, match=rf"{name} \({value}\) must be at least 0 and at most 1"
            ):
                GAEParams(**{name: value})
    inputs = inputs_of([1], [1], [0], [0])
    for column in ("token_rewards_T", "values_T"):
        with pytest.raises(AssertionError, match="needs token_rewards and values"):
            gae(replace(inputs, **{column: None}), PLAIN)
