"""Estimators of whole samples: numbers worked out by hand,
and what all estimators of groups share.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs
from rlhf_megatron.algorithms.advantages.gdpo import GDPOParams
from rlhf_megatron.algorithms.advantages.gpg import GPGParams
from rlhf_megatron.algorithms.advantages.grpo import GRPOParams

PARAMS: dict[str, Any] = {
    "gdpo": GDPOParams(("part",)),
    "gpg": GPGParams(),
    "grpo": ADV_ESTIMATORS.get("grpo").params(),
    "grpo_passk": GRPOParams(),
    "opo": None,
    "reinforce_plus_plus_baseline": None,
    "rloo": None,
}
OTB = ("optimal_token_baseline", "tir_optimal_token_baseline")
OF_GROUPS = {**PARAMS, **{name: ADV_ESTIMATORS.get(name).params() for name in OTB}}
WHITENED = ("gdpo", "reinforce_plus_plus_baseline")


def inputs_of(
    rewards: list[float],
    groups: list[int],
    lengths: list[int] | None = None,
    valid: list[bool] | None = None,
) -> AdvantageInputs:
    """A prompt token and `lengths` response tokens a sample (or 1 each), rewarded at the last
    one; pi is 1/2.
    """
    count = len(rewards)
    lengths = [1] * count if lengths is None else lengths
    offsets = torch.tensor([0, *(length + 1 for length in lengths)]).cumsum(0)
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    mask[offsets[:-1]] = False
    rewards_B = torch.tensor(rewards, dtype=torch.float32)
    token_rewards = torch.zeros(mask.numel())
    has_tokens = torch.tensor(lengths) > 0
    token_rewards[offsets[1:][has_tokens] - 1] = rewards_B[has_tokens]
    return AdvantageInputs(
        rewards_B=rewards_B,
        group_ids_B=torch.tensor(groups, dtype=torch.int64),
        is_valid_B=torch.tensor([True] * count if valid is None else valid, dtype=torch.bool),
        response_mask_T=mask,
        offsets=offsets,
        token_rewards_T=token_rewards,
        reward_parts={"part": rewards_B},
        log_probs_T=torch.full((mask.numel(),), -math.log(2)),
        rollout_log_probs_T=torch.full((mask.numel(),), -math.log(2)),
        sum_squares_T=torch.full((mask.numel(),), 0.5),
    )


def of_samples(name: str, inputs: AdvantageInputs, params: Any = None) -> list[float]:
    """The advantage of each sample (nan without tokens); the same on all its tokens, 0
    on its prompt.
    """
    params = OF_GROUPS[name] if params is None else params
    outputs = ADV_ESTIMATORS.get(name).build(inputs, params)
    assert outputs.advantages_T.dtype == torch.float32 and outputs.returns_T is None
    found = []
    for start, end in zip(inputs.offsets.tolist(), inputs.offsets[1:].tolist(), strict=False):
        on_tokens = outputs.advantages_T[start + 1 : end].tolist()
        assert outputs.advantages_T[start] == 0 and len(set(on_tokens)) <= 1
        found.append(on_tokens[0] if on_tokens else math.nan)
    return found


def test_rloo_by_hand() -> None:
    # 6, 3, 0: the others' means are 1.5, 3, 4.5. A group of two, in between: each
    # against the other.
    assert of_samples("rloo", inputs_of([6, 10, 3, 4, 0], [1, 2, 1, 2, 1])) == [4.5, 6, 0, -6, -4.5]


def test_passk_by_hand() -> None:
    # 4, 9, 1: the best leads by 5. Without division 5; deviation of 4, 9, 1: mean 14/3, (4 +
    # 169 + 121) / 9 / 2.
    inputs = inputs_of([4, 9, 1, 7, 7, 2], [0, 0, 0, 1, 1, 1])
    assert of_samples("grpo_passk", inputs, GRPOParams(False)) == [0, 5, 0, 0, 0, 0]
    deviation = math.sqrt((4 + 169 + 121) / 9 / 2)
    found = of_samples("grpo_passk", inputs)
    assert found == pytest.approx([0, 5 / (deviation + 1e-6), 0, 0, 0, 0], rel=1e-6)


def test_passk_with_negative_rewards_and_two_samples() -> None:
    assert of_samples("grpo_passk", inputs_of([-3, -1], [0, 0]), GRPOParams(False)) == [0, 2]


def test_opo_by_hand() -> None:
    # lengths 1, 3 and rewards 8, 0: baseline (8 + 0) / 4 = 2. The second group: (2 * 6 +
    # 2 * 0) / 4 = 3.
    assert of_samples("opo", inputs_of([8, 0, 6, 0], [0, 0, 1, 1], [1, 3, 2, 2])) == [6, -2, 3, -3]


def test_opo_counts_response_tokens_and_not_a_tool_s() -> None:
    inputs = inputs_of([8, 0], [0, 0], [1, 5])
    mask = inputs.response_mask_T.clone()
    # of the second sample's 5 tokens (3 .. 7), 2 are a tool's: lengths 1 and 3 as above
    mask[4:6] = False
    outputs = ADV_ESTIMATORS.get("opo").build(replace(inputs, response_mask_T=mask), None)
    assert outputs.advantages_T.tolist() == [0, 6, 0, -2, 0, 0, -2, -2]


def test_gpg_by_hand() -> None:
    # 1, 0 teach; 1, 1 and the single one do not: alpha = 5 / 2. Centered +-0.5.
    inputs = inputs_of([1, 0, 1, 1, 3], [0, 0, 1, 1, 2])
    assert of_samples("gpg", inputs) == [1.25, -1.25, 0, 0, 0]
    assert of_samples("gpg", inputs, GPGParams(f_norm=5.0)) == [0.25, -0.25, 0, 0, 0]


def test_gpg_counts_valid_samples_only() -> None:
    # The masked ones are no samples: 4 are left, 2 of them teach.
    inputs = inputs_of([1, 0, 1, 1, 7, 9], [0, 0, 1, 1, 0, 2], valid=[True] * 4 + [False] * 2)
    assert of_samples("gpg", inputs) == [1, -1, 0, 0, 0, 0]
    assert of_samples("gpg", inputs_of([2, 2], [0, 0])) == [0, 0]


def test_gpg_counts_a_sample_at_the_mean_of_its_group_as_one_that_teaches() -> None:
    # 0, 1, 2: the middle one has advantage 0, but its group has spread: alpha = 5 / 3.
    assert of_samples("gpg", inputs_of([0, 1, 2, 4, 4], [0, 0, 0, 1, 1])) == pytest.approx(
        [-5 / 3, 0, 5 / 3, 0, 0]
    )


def test_reinforce_plus_plus_baseline_by_hand() -> None:
    # Centered 2, -2 (lengths 1, 3) and 1, -1 (lengths 2, 2): 8 tokens, sum 2 - 6 + 2 - 2 = -4, mean
    # -1/2. Squares about the mean: 6.25 + 3 * 2.25 + 2 * 2.25 + 2 * 0.25 = 18; unbiased
    # variance 18 / 7.
    inputs = inputs_of([5, 1, 3, 1], [0, 0, 1, 1], [1, 3, 2, 2])
    scale = (18 / 7 + 1e-8) ** -0.5
    expected = [2.5 * scale, -1.5 * scale, 1.5 * scale, -0.5 * scale]
    assert of_samples("reinforce_plus_plus_baseline", inputs) == pytest.approx(expected, rel=1e-6)


def test_whitening_of_one_token_or_none_changes_nothing() -> None:
    # Of the two samples only the first has a token: its centered reward stands.
    assert of_samples("reinforce_plus_plus_baseline", inputs_of([5, 1], [0, 0], [1, 0]))[0] == 2
    nothing = ADV_ESTIMATORS.get("reinforce_plus_plus_baseline").build(
        inputs_of([5, 1], [0, 0], [0, 0]), None
    )
    assert nothing.advantages_T.tolist() == [0, 0]


def test_gdpo_by_hand() -> None:
    # a: 2, 0 | 1, 1 -> centered 1, -1 | 0, 0; b: 0, 4 | 3, 1 -> -2, 2 | 1, -1. Weights 1 and 1/2:
    # 0, 0 | 0.5, -0.5. Mean 0, unbiased variance 0.5 / 3.
    inputs = replace(
        inputs_of([9, 9, 9, 9], [0, 0, 1, 1]),
        reward_parts={"a": torch.tensor([2.0, 0, 1, 1]), "b": torch.tensor([0.0, 4, 3, 1])},
    )
    params = GDPOParams(("a", "b"), (1.0, 0.5), norm_adv_by_std_in_grpo=False)
    scale = (0.5 / 3 + 1e-8) ** -0.5
    assert of_samples("gdpo", inputs, params) == pytest.approx(
        [0, 0, 0.5 * scale, -0.5 * scale], rel=1e-6
    )
    # Divided by deviations sqrt(2), 2 sqrt(2) | -, sqrt(2): a +-1/sqrt(2), b -+1/sqrt(2) |
    # +-1/sqrt(2); sum 0, 0 | ...
    divided = of_samples("gdpo", inputs, GDPOParams(("a", "b")))
    third = (2 * 0.5 / 3 + 1e-8) ** -0.5
    assert divided == pytest.approx(
        [0, 0, math.sqrt(0.5) * third, -math.sqrt(0.5) * third], rel=1e-5, abs=1e-6
    )


def test_gdpo_tells_mixes_apart_that_grpo_does_not() -> None:
    """The paper's point: who wins in both parts gets twice what a winner in one gets; as a sum
    they look alike.
    """
    parts = {"a": torch.tensor([0.0, 1, 0, 1]), "b": torch.tensor([0.0, 1, 0, 0])}
    inputs = replace(inputs_of([0, 2, 0, 1], [0, 0, 1, 1]), reward_parts=parts)
    by_sum = of_samples("grpo", inputs)
    assert by_sum[1] == pytest.approx(by_sum[3], rel=1e-5)
    apart = of_samples("gdpo", inputs, GDPOParams(("a", "b")))
    assert apart[1] == pytest.approx(2 * apart[3], rel=1e-6)


def test_gdpo_with_parts_that_some_samples_do_not_have() -> None:
    """Another source's: nan. It adds nothing, and the others of the step do not notice."""
    nan = math.nan
    statistics_of_0_and_1 = {"mean": 0.5, "std": math.sqrt(0.5), "max": 1.0, "min": 0.0}
    parts = {"a": torch.tensor([1.0, 0, nan, nan]), "b": torch.tensor([nan, nan, 0.0, 1])}
    inputs = replace(inputs_of([0] * 4, [0, 0, 1, 1]), reward_parts=parts)
    params = GDPOParams(("a", "b"), norm_adv_by_std_in_grpo=False)
    found = of_samples("gdpo", inputs, params)
    assert ADV_ESTIMATORS.get("gdpo").build(inputs, params).metrics == pytest.approx(
        {
            f"gdpo/{key}/{name}": value
            for key in "ab"
            for name, value in statistics_of_0_and_1.items()
        }
    )
    scale = (4 * 0.25 / 3 + 1e-8) ** -0.5
    assert found == pytest.approx([0.5 * scale, -0.5 * scale, -0.5 * scale, 0.5 * scale], rel=1e-6)
    # A source that is not in this step at all has no column.
    assert (
        of_samples("gdpo", inputs, GDPOParams(("a", "b", "c"), norm_adv_by_std_in_grpo=False))
        == found
    )


def test_gdpo_refuses_a_part_that_its_reward_does_not_return() -> None:
    inputs = replace(
        inputs_of([1, 0], [0, 0]), reward_parts={"f": torch.ones(2), "f/good": torch.ones(2)}
    )
    with pytest.raises(
        ValueError, match=r"'f/god', but reward 'f' returned no part 'god'.*one of f, f/good"
    ):
        of_samples("gdpo", inputs, GDPOParams(("f/god",)))
    of_samples("gdpo", inputs, GDPOParams(("f/good",)))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: GDPOParams(()), r"gdpo_reward_keys \(\[\]\) must be distinct names"),
        (lambda: GDPOParams(("a", "a")), "must be distinct"),
        (
            lambda: GDPOParams(("a", "b"), (1.0,)),
            r"gdpo_reward_weights \(\[1.0\]\) must be one a key \(2: a, b\)",
        ),
        (lambda: GDPOParams(("a",), (0.0,)), "not all 0"),
        (lambda: GDPOParams(("a",), (math.nan,)), "must be numbers"),
        (lambda: GDPOParams(("a",), epsilon=-1.0), "epsilon"),
        (lambda: GPGParams(f_norm=0.0), r"f_norm \(0.0\) must be above 0"),
        (lambda: GPGParams(f_norm=math.inf), "f_norm"),
        (lambda: GRPOParams(epsilon=-1.0), "epsilon"),
    ],
)
def test_wrong_parameters(make: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize("name", OF_GROUPS)
def test_a_group_with_one_valid_sample_gets_nothing(name: str) -> None:
    """Beside a group that teaches, in which all estimators find something; also where others of
    it are masked.
    """
    inputs = inputs_of(
        [1, 0, 5, 7, math.nan, math.inf],
        [0, 0, 1, 2, 2, 3],
        [2, 1, 3, 1, 1, 1],
        [True] * 4 + [False] * 2,
    )
    outputs = ADV_ESTIMATORS.get(name).build(inputs, OF_GROUPS[name])
    # Samples own tokens 0..2, 3..4, 5..8, 9..10, 11..12, 13..14.
    assert outputs.advantages_T[5:].tolist() == [0.0] * 10
    assert outputs.advantages_T[1] > 0 >= outputs.advantages_T[4]


@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_rewards_get_exactly_nothing(name: str) -> None:
    # The sum of seven times 0.1, divided by seven, is not the 0.1 of the samples.
    inputs = inputs_of([0.1] * 7 + [1e6 + 0.3] * 3, [0] * 7 + [1] * 3)
    outputs = ADV_ESTIMATORS.get(name).build(inputs, OF_GROUPS[name])
    assert outputs.advantages_T.tolist() == [0.0] * 20


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_steps_with_nothing_in_them(name: str, count: int) -> None:
    estimator = ADV_ESTIMATORS.get(name).build
    for inputs in (
        inputs_of([3.0] * count, [0] * count, [0] * count),
        inputs_of([3.0] * count, [0] * count, [2] * count, [False] * count),
    ):
        assert estimator(inputs, OF_GROUPS[name]).advantages_T.eq(0).all()


@pytest.mark.parametrize("name", OF_GROUPS)
def test_masked_samples_are_in_no_statistic(name: str) -> None:
    """With wild values in the middle: the others get the same bits as without them."""
    estimator = ADV_ESTIMATORS.get(name).build
    alone = inputs_of([1, 0, 2, 4, 1], [0, 0, 0, 1, 1], [2, 1, 1, 2, 3])
    among = inputs_of(
        [1, 0, math.nan, 2, 4, math.inf, 1],
        [0, 0, 0, 0, 1, 1, 1],
        [2, 1, 4, 1, 2, 1, 3],
        [True, True, False, True, True, False, True],
    )
    for column in (among.log_probs_T, among.sum_squares_T):
        assert column is not None
        column[5:10] = math.nan  # the tokens of the first masked sample
    expected = estimator(alone, OF_GROUPS[name]).advantages_T
    found = estimator(among, OF_GROUPS[name]).advantages_T
    is_theirs = among.is_valid_B.repeat_interleave(among.offsets.diff())
    assert torch.equal(found[is_theirs], expected) and found[~is_theirs].eq(0).all()


SAMPLES = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, 3), st.integers(0, 4), st.booleans()), max_size=12
)


def drawn(
    samples: list[tuple[int, int, int, bool]], shift: float = 0.0, scale: float = 1.0
) -> AdvantageInputs:
    return inputs_of(
        [scale * (reward + shift) for reward, _, _, _ in samples],
        [group for _, group, _, _ in samples],
        [length for _, _, length, _ in samples],
        [is_valid for _, _, _, is_valid in samples],
    )


@pytest.mark.parametrize("name", PARAMS)
@given(samples=SAMPLES)
@settings(max_examples=40, deadline=None)
def test_a_shift_of_all_rewards_changes_nothing(
    name: str, samples: list[tuple[int, int, int, bool]]
) -> None:
    estimator = ADV_ESTIMATORS.get(name).build
    params = PARAMS[name]
    plain, shifted = (
        estimator(drawn(samples, shift), params).advantages_T for shift in (0.0, 1024.0)
    )
    assert shifted.tolist() == pytest.approx(plain.tolist(), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", OF_GROUPS)
@given(samples=SAMPLES)
@settings(max_examples=40, deadline=None)
def test_a_scale_of_all_rewards(name: str, samples: list[tuple[int, int, int, bool]]) -> None:
    """Normalised ones do not change, but for their epsilon; the others scale."""
    counts = Counter(group for _, group, _, is_valid in samples if is_valid)
    num_tokens = sum(
        length for _, group, length, is_valid in samples if is_valid and counts[group] > 1
    )
    assume(num_tokens > 1 or name not in WHITENED)  # a single token is not whitened
    estimator = ADV_ESTIMATORS.get(name).build
    params = OF_GROUPS[name]
    params = replace(params, epsilon=0.0) if hasattr(params, "epsilon") else params
    plain, scaled = (
        estimator(drawn(samples, 0.0, scale), params).advantages_T for scale in (1.0, 1024.0)
    )
    factor = 1.0 if name in (*WHITENED, "grpo", "grpo_passk") else 1024.0
    assert scaled.tolist() == pytest.approx((factor * plain).tolist(), rel=1e-4, abs=1e-6)


def plain_loop(name: str, inputs: AdvantageInputs) -> list[float]:
    """The formulas, sample by sample in Python floats; whitening over a padded list of tokens."""
    rewards = inputs.rewards_B.tolist()
    groups = inputs.group_ids_B.tolist()
    valid = inputs.is_valid_B.tolist()
    lengths = (inputs.offsets.diff() - 1).tolist()
    members = {
        g: [j for j in range(len(rewards)) if groups[j] == g and valid[j]] for g in set(groups)
    }
    lonely = [not valid[i] or len(members[groups[i]]) < 2 for i in range(len(rewards))]
    found = []
    num_flat = sum(
        valid[i] and len({rewards[j] for j in members[groups[i]]}) == 1 for i in range(len(rewards))
    )
    for i, group in enumerate(groups):
        theirs = [rewards[j] for j in members[group]]
        if lonely[i]:
            found.append(0.0)
            continue
        mean = sum(theirs) / len(theirs)
        n = len(theirs)
        std = math.sqrt(sum((r - mean) ** 2 for r in theirs) / (n - 1))
        if name == "rloo":
            found.append(rewards[i] - (sum(theirs) - rewards[i]) / (n - 1))
        elif name == "grpo_passk":
            second, best = sorted(theirs)[-2:]
            found.append((best - second) / (std + 1e-6) if rewards[i] == best else 0.0)
        elif name == "opo":
            weights = [lengths[j] for j in members[group]]
            total = sum(weights)
            found.append(
                rewards[i]
                - (sum(w * r for w, r in zip(weights, theirs, strict=True)) / total if total else 0)
            )
        elif name == "gpg":
            found.append((rewards[i] - mean) * sum(valid) / max(sum(valid) - num_flat, 1))
        elif name == "reinforce_plus_plus_baseline":
            found.append(rewards[i] - mean)
        else:
            found.append((rewards[i] - mean) / (std + 1e-6))
    if name in WHITENED:
        tokens = [found[i] for i in range(len(rewards)) if not lonely[i] for _ in range(lengths[i])]
        if len(tokens) > 1:
            mean = math.fsum(tokens) / len(tokens)
            variance = math.fsum((t - mean) ** 2 for t in tokens) / (len(tokens) - 1)
            found = [
                0.0 if lonely[i] else (found[i] - mean) / math.sqrt(variance + 1e-8)
                for i in range(len(rewards))
            ]
    return found


@pytest.mark.parametrize("name", PARAMS)
@given(samples=SAMPLES)
@settings(max_examples=40, deadline=None)
def test_ragged_batches_equal_a_plain_loop(
    name: str, samples: list[tuple[int, int, int, bool]]
) -> None:
    inputs = drawn(samples)
    found = of_samples(name, inputs)
    expected = plain_loop(name, inputs)
    for has_tokens, ours, theirs in zip(
        (inputs.offsets.diff() > 1).tolist(), found, expected, strict=True
    ):
        if has_tokens:
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)
