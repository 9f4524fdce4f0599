"""Estimators of single tokens: by hand, and against plain padded loops over generated
ragged batches.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS, AdvantageInputs
from rlhf_megatron.algorithms.advantages import optimal_token_baseline as otb
from rlhf_megatron.algorithms.advantages.optimal_token_baseline import OptimalTokenBaselineParams
from rlhf_megatron.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlusParams

OTB = "optimal_token_baseline"
TIR = "tir_optimal_token_baseline"
NO_TAIL_RULE = OptimalTokenBaselineParams(handle_zero_tail=False)


def inputs_of(
    masks: list[list[int]],
    token_rewards: list[float],
    groups: list[int] | None = None,
    **columns: Any,
) -> AdvantageInputs:
    """`masks`: the response mask of each sample. Unless `columns` say more: pi is 1/2, and
    so the engine's.
    """
    flat = [entry for mask in masks for entry in mask]
    count = len(masks)
    num_tokens = len(flat)
    half = [math.log(0.5)] * num_tokens
    greedy = columns.pop("greedy", None)
    return AdvantageInputs(
        rewards_B=torch.full((count,), math.nan),  # must not be read
        group_ids_B=torch.tensor([0] * count if groups is None else groups, dtype=torch.int64),
        is_valid_B=torch.tensor(columns.pop("valid", [True] * count), dtype=torch.bool),
        response_mask_T=torch.tensor(flat, dtype=torch.bool),
        offsets=torch.tensor([0, *map(len, masks)]).cumsum(0),
        token_rewards_T=torch.tensor(token_rewards, dtype=torch.float32),
        greedy_rewards_B=None if greedy is None else torch.tensor(greedy),
        log_probs_T=torch.tensor(columns.pop("log_probs", half)),
        rollout_log_probs_T=torch.tensor(columns.pop("rollout_log_probs", half)),
        sum_squares_T=torch.tensor(columns.pop("sum_squares", [0.5] * num_tokens)),
        **columns,
    )


def advantages(name: str, inputs: AdvantageInputs, params: Any = None) -> list[float]:
    entry = ADV_ESTIMATORS.get(name)
    outputs = entry.build(
        inputs, params if params is not None or entry.params is None else entry.params()
    )
    assert outputs.advantages_T.dtype == torch.float32 and outputs.returns_T is None
    assert outputs.advantages_T[~inputs.response_mask_T].eq(0).all()
    return outputs.advantages_T.tolist()


def test_reinforce_plus_plus_by_hand() -> None:
    # gamma 1/2: to go 8, 16 and, past a tool's token with a reward of its own, 1 + 4 / 2 = 3, 4.
    inputs = inputs_of([[0, 1, 1], [0, 1, 0, 1]], [9, 0, 16, 9, 1, 50, 4])
    # 8, 16, 3, 4: mean 7.75, squares 0.0625 + 68.0625 + 22.5625 + 14.0625 = 104.75, unbiased
    # variance 104.75 / 3
    scale = (104.75 / 3 + 1e-8) ** -0.5
    expected = [0, 0.25, 8.25, 0, -4.75, 0, -3.75]
    found = advantages("reinforce_plus_plus", inputs, ReinforcePlusPlusParams(gamma=0.5))
    assert found == pytest.approx([scale * value for value in expected], rel=1e-6)


def test_reinforce_plus_plus_without_masked_samples_and_with_one_token_or_none() -> None:
    bad = [math.nan, math.inf]
    among = inputs_of([[0, 1], [1, 1], [0, 1, 1]], [0, 2, *bad, 0, 1, 3], valid=[True, False, True])
    alone = inputs_of([[0, 1], [0, 1, 1]], [0, 2, 0, 1, 3])
    found = advantages("reinforce_plus_plus", among)
    assert found[2:4] == [0, 0] and found[:2] + found[4:] == advantages(
        "reinforce_plus_plus", alone
    )
    assert advantages("reinforce_plus_plus", inputs_of([[0, 1]], [0, 5])) == [0, 5]
    assert advantages("reinforce_plus_plus", inputs_of([[0, 0]], [0, 5])) == [0, 0]
    assert advantages("reinforce_plus_plus", inputs_of([], [])) == []
    # equal: nothing
    assert advantages("reinforce_plus_plus", inputs_of([[0, 1, 1]], [0, 0, 0.1])) == [0, 0, 0]
    with pytest.raises(ValueError, match=r"gamma \(1.5\) must be"):
        ReinforcePlusPlusParams(gamma=1.5)


def test_reinforce_plus_plus_does_not_notice_a_shift_of_the_scores_nor_their_scale() -> None:
    plain = inputs_of([[0, 1, 1], [0, 1]], [0, 0, 1, 0, 3])
    moved = inputs_of([[0, 1, 1], [0, 1]], [0, 0, 64 * 1 + 512, 0, 64 * 3 + 512])
    found = advantages("reinforce_plus_plus", moved)
    assert found == pytest.approx(advantages("reinforce_plus_plus", plain), rel=1e-5)


def test_remax_by_hand() -> None:
    # To go 7, 4 less the greedy 3; a tool's token is none. No baseline for the second, no statistic
    # for the third.
    inputs = inputs_of(
        [[0, 1, 0, 1], [0, 1], [0, 1], [0, 1]],
        [9, 3, 50, 4, 0, 5, 0, math.nan, 0, -2],
        greedy=[3.0, math.nan, 3.0, -1.0],
        valid=[True, True, False, True],
    )
    assert advantages("remax", inputs) == [0, 4, 0, 1, 0, 0, 0, 0, 0, -1]


def test_remax_does_not_notice_a_shift_of_all_scores() -> None:
    plain = inputs_of([[0, 1, 1], [0, 1]], [0, 0, 1, 0, 3], greedy=[2.0, 0.0])
    moved = inputs_of([[0, 1, 1], [0, 1]], [0, 0, 513, 0, 515], greedy=[514.0, 512.0])
    assert advantages("remax", plain) == advantages("remax", moved) == [0, -1, -1, 0, 3]
    single = inputs_of([[0, 1]], [0, 5], greedy=[2.0])  # needs no group
    assert advantages("remax", single) == [0, 3]


def test_otb_by_hand() -> None:
    # pi = 1/2 and sum of squares 1/2: w = 1 - 1 + 1/2 = 1/2 on each token of the first sample.
    # Second: pi = 1/4, squares 1/4: w = 1 - 1/2 + 1/4 = 3/4. W: 1/2, 1 and 3/4, 3/2. To go
    # 10, 4 and 2, 2.
    inputs = inputs_of(
        [[0, 1, 1], [0, 1, 1]],
        [9, 6, 4, 9, 0, 2],
        log_probs=[0.0, math.log(0.5), math.log(0.5), 0.0, math.log(0.25), math.log(0.25)],
        sum_squares=[9, 0.5, 0.5, 9, 0.25, 0.25],
    )
    first = (10 * 0.5 + 2 * 0.75) / 1.25  # 5.2
    second = (4 * 1 + 2 * 1.5) / 2.5  # 2.8
    expected = [0, 10 - first, 4 - second, 0, 2 - first, 2 - second]
    assert advantages(OTB, inputs) == pytest.approx(expected, rel=1e-6)
    assert advantages(TIR, inputs) == advantages(OTB, inputs)


def test_otb_behind_the_second_longest_sample() -> None:
    # Lengths 3 and 1: from the second token on there is nobody to compare with.
    inputs = inputs_of([[0, 1, 1, 1], [0, 1]], [0, 0, 0, 6, 0, 2])
    assert advantages(OTB, inputs) == advantages(TIR, inputs) == [0, 2, 6, 6, 0, -2]
    assert (
        advantages(OTB, inputs, NO_TAIL_RULE)
        == advantages(TIR, inputs, NO_TAIL_RULE)
        == [0, 2, 0, 0, 0, -2]
    )
    two = inputs_of([[1, 1], [1, 1], [1]], [0, 3, 0, 5, 1])  # two are the longest: no tail
    assert advantages(OTB, two)[1] == advantages(OTB, two, NO_TAIL_RULE)[1] == -1


def test_otb_positions_with_a_tool_s_tokens() -> None:
    # First sample: tokens at positions 0, 3 (two of a tool between); second: 0, 1. To go 4, 4 and
    # 0, 0; W 1/2, 1.
    inputs = inputs_of([[0, 1, 0, 0, 1], [0, 1, 1]], [0, 0, 9, 9, 4, 0, 0, 0])
    # All positions: 0 has both (baseline 2), 1 only the second sample, 3 is behind the second
    # longest (span 2).
    assert advantages(OTB, inputs) == [0, 2, 0, 0, 4, 0, -2, 0]
    assert advantages(OTB, inputs, NO_TAIL_RULE) == [0, 2, 0, 0, 0, 0, -2, 0]
    # Without the tool's tokens both have positions 0 and 1.
    assert advantages(TIR, inputs) == [0, 2, 0, 0, 2, 0, -2, -2]


def test_otb_without_company_is_nothing() -> None:
    """Alone in the group; or the others have no tokens, or are masked. Not the return itself."""
    for name in (OTB, TIR):
        assert advantages(name, inputs_of([[0, 1, 1]], [0, 1, 4])) == [0, 0, 0]
        assert advantages(name, inputs_of([[0, 1, 1], [0, 0], [0]], [0, 1, 4, 0, 0, 0])) == [0] * 6
        assert (
            advantages(name, inputs_of([[0, 1], [0, 1]], [0, 4, 0, math.nan], valid=[True, False]))
            == [0] * 4
        )
        assert advantages(name, inputs_of([[0, 1], [0], [0, 1]], [0, 4, 0, 0, 2])) == [
            0,
            1,
            0,
            0,
            -1,
        ]
        assert advantages(name, inputs_of([], [])) == [] and advantages(
            name, inputs_of([[0], [0]], [0, 0])
        ) == [0, 0]


def test_otb_where_every_token_was_certain() -> None:
    """All weights 0: a plain mean, not the return itself. Squares rounded below pi^2 make no
    negative weight.
    """
    certain = inputs_of([[1, 1], [1, 1]], [0, 4, 0, 0], log_probs=[0.0] * 4, sum_squares=[1.0] * 4)
    rounded = inputs_of(
        [[1, 1], [1, 1]], [0, 4, 0, 0], log_probs=[0.0] * 4, sum_squares=[1 - 1e-6, 1.0] * 2
    )
    for name in (OTB, TIR):
        assert advantages(name, certain) == advantages(name, rounded) == [2, 2, -2, -2]


def test_otb_weights_of_tiny_energy_count() -> None:
    """Probabilities of 1 - 1e-5 and 1 - 2e-5 of two words: w = 2e-10 and 8e-10, far below the
    epsilon of others.
    """
    first = math.log1p(-1e-5)
    second = math.log1p(-2e-5)
    squares = [(1 - 1e-5) ** 2 + 1e-10, (1 - 2e-5) ** 2 + 4e-10]
    inputs = replace(
        inputs_of([[1], [1]], [5.0, 0.0]),
        log_probs_T=torch.tensor([first, second], dtype=torch.float64),
        sum_squares_T=torch.tensor(squares, dtype=torch.float64),
    )
    assert advantages(OTB, inputs) == pytest.approx([4, -1], rel=1e-5)


@pytest.mark.parametrize("name", [OTB, TIR])
def test_otb_importance_weights(name: str) -> None:
    # Ratios 1/2 to 1/8 = 4, truncated to 2, and 1/2 to 1 = 1/2. w = 1/2: W = 2 and 1/8.
    rollout = [math.log(0.125), 0.0]
    inputs = inputs_of([[1], [1]], [17.0, 0.0], rollout_log_probs=rollout)
    assert advantages(name, inputs) == [8.5, -8.5]
    params = OptimalTokenBaselineParams(rollout_is_threshold=2.0)
    assert advantages(name, inputs, params) == pytest.approx([17 - 16, -16], rel=1e-6)
    for extreme in ([-50.0, -50.0], [math.log(0.5) - 50, math.log(0.5) + 50]):
        far = inputs_of([[1], [1]], [17.0, 0.0], rollout_log_probs=extreme)
        assert all(math.isfinite(value) for value in advantages(name, far, params))
    with pytest.raises(ValueError, match=r"rollout_is_threshold \(0.0\) must be above 0"):
        OptimalTokenBaselineParams(rollout_is_threshold=0.0)


@pytest.mark.parametrize("name", [OTB, TIR])
def test_otb_does_not_notice_a_shift_where_there_is_company(name: str) -> None:
    masks = [[0, 1, 1, 1], [0, 1, 1, 1], [0, 1, 1, 1]]
    log_probs = torch.randn(12, generator=torch.Generator().manual_seed(0)).abs().neg().tolist()
    plain = inputs_of(masks, [0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0, -4], log_probs=log_probs)
    moved = inputs_of(masks, [0, 0, 0, 513, 0, 0, 0, 515, 0, 0, 0, 508], log_probs=log_probs)
    assert advantages(name, moved) == pytest.approx(advantages(name, plain), rel=1e-5)


def padded_loop(
    name: str, inputs: AdvantageInputs, params: OptimalTokenBaselineParams
) -> list[float]:
    """The formula over rows of equal length, position by position, in Python floats."""
    assert inputs.token_rewards_T is not None and inputs.log_probs_T is not None
    assert inputs.sum_squares_T is not None and inputs.rollout_log_probs_T is not None
    offsets = inputs.offsets.tolist()
    valid = inputs.is_valid_B.tolist()
    width = int(inputs.offsets.diff().max()) if valid else 0
    rows = []  # of each sample: (place or None, to go, W) at each position
    for i in range(len(valid)):
        places = [
            t for t in range(offsets[i], offsets[i + 1]) if inputs.response_mask_T[t] and valid[i]
        ]
        row: list[tuple[int, float, float] | None] = [None] * width
        energy = 0.0
        for n, t in enumerate(places):
            to_go = math.fsum(inputs.token_rewards_T[s].item() for s in places[n:])
            log_prob = inputs.log_probs_T[t].item()
            w = 1 - 2 * math.exp(log_prob) + inputs.sum_squares_T[t].item()
            if params.rollout_is_threshold is not None:
                ratio = math.exp(log_prob - inputs.rollout_log_probs_T[t].item())
                w *= min(ratio, params.rollout_is_threshold) ** 2
            energy += w
            row[n if name == TIR else t - places[0]] = (t, to_go, energy)
        rows.append(row)
    found = [0.0] * offsets[-1]
    spans = [
        max((p + 1 for p, entry in enumerate(row) if entry is not None), default=0) for row in rows
    ]
    groups = inputs.group_ids_B.tolist()
    for group in set(groups):
        members = [i for i in range(len(valid)) if groups[i] == group and spans[i] > 0]
        if len(members) < 2:
            continue
        second = sorted(spans[i] for i in members)[-2]
        for p in range(width):
            entries = [entry for i in members if (entry := rows[i][p]) is not None]
            total = math.fsum(energy for _, _, energy in entries)
            baseline = (
                math.fsum(to_go * energy for _, to_go, energy in entries) / total if total else 0.0
            )
            for t, to_go, _ in entries:
                found[t] = to_go if params.handle_zero_tail and p >= second else to_go - baseline
    return found


@st.composite
def batches(draw: st.DrawFn) -> AdvantageInputs:
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=6))
    count = len(masks)
    num_tokens = sum(map(len, masks))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    probs = torch.rand(num_tokens, generator=generator) * 0.9 + 0.05
    squares = probs.square() + torch.rand(num_tokens, generator=generator) * (1 - probs).square()
    return inputs_of(
        [[0, *mask] for mask in masks],
        [0.0] * (num_tokens + count),
        draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count)),
        valid=draw(st.lists(st.booleans(), min_size=count, max_size=count)),
        log_probs=_with_prompts(probs.log(), masks),
        sum_squares=_with_prompts(squares, masks),
        rollout_log_probs=_with_prompts(-2 * torch.rand(num_tokens, generator=generator), masks),
    )


def _with_prompts(column: torch.Tensor, masks: list[list[int]]) -> list[float]:
    parts = column.split([len(mask) for mask in masks]) if masks else []
    return [entry for part in parts for entry in (math.nan, *part.tolist())]


@pytest.mark.parametrize("name", [OTB, TIR])
@pytest.mark.parametrize("threshold", [None, 1.5])
@pytest.mark.parametrize("tail", [True, False])
@given(inputs=batches(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_otb_equals_a_padded_loop(
    name: str, threshold: float | None, tail: bool, inputs: AdvantageInputs, seed: int
) -> None:
    rewards = torch.randn(
        inputs.response_mask_T.numel(), generator=torch.Generator().manual_seed(seed)
    )
    inputs = replace(inputs, token_rewards_T=rewards)
    params = OptimalTokenBaselineParams(tail, threshold)
    found = advantages(name, inputs, params)
    assert found == pytest.approx(padded_loop(name, inputs, params), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", [OTB, TIR])
@given(inputs=batches(), seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_otb_of_some_groups_at_a_time_is_that_of_all_bit_for_bit(
    name: str, inputs: AdvantageInputs, seed: int
) -> None:
    rewards = torch.randn(
        inputs.response_mask_T.numel(), generator=torch.Generator().manual_seed(seed)
    )
    inputs = replace(inputs, token_rewards_T=rewards, group_ids_B=inputs.group_ids_B.sort().values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otb, "PART_TOKENS", 4)
        found = advantages(name, inputs)
    assert found == advantages(name, inputs)


def padded(inputs: AdvantageInputs) -> tuple[torch.Tensor, torch.Tensor, list[list[int]]]:
    """(rewards [B, W] float64 and mask [B, W] of rows with a column for each response token of a
    valid sample; the places of these in the packed columns).
    """
    assert inputs.token_rewards_T is not None
    spans = zip(
        inputs.offsets.tolist(),
        inputs.offsets[1:].tolist(),
        inputs.is_valid_B.tolist(),
        strict=False,
    )
    places = [
        [t for t in range(a, b) if is_valid and inputs.response_mask_T[t]]
        for a, b, is_valid in spans
    ]
    width = max(map(len, places), default=0)
    rewards = torch.zeros(len(places), width, dtype=torch.float64)
    mask = torch.zeros(len(places), width)
    for i, of_sample in enumerate(places):
        rewards[i, : len(of_sample)] = inputs.token_rewards_T[of_sample].double()
        mask[i, : len(of_sample)] = 1
    return rewards, mask, places


def rewards_to_go(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """G_t = r_t + gamma G_{t+1}, column by column from the last on."""
    found = torch.zeros_like(rewards)
    behind = torch.zeros(len(rewards), dtype=torch.float64)
    for t in reversed(range(rewards.shape[1])):
        behind = (rewards[:, t] + gamma * behind) * mask[:, t]
        found[:, t] = behind
    return found


def packed(rows: torch.Tensor, places: list[list[int]], num_tokens: int) -> list[float]:
    found = [0.0] * num_tokens
    for row, of_sample in zip(rows.tolist(), places, strict=True):
        for t, value in zip(of_sample, row, strict=False):
            found[t] = value
    return found


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
@given(inputs=batches(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_reinforce_plus_plus_equals_a_padded_loop(
    gamma: float, inputs: AdvantageInputs, seed: int
) -> None:
    """(G_t - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the mask."""
    rewards = torch.randn(
        inputs.response_mask_T.numel(), generator=torch.Generator().manual_seed(seed)
    )
    inputs = replace(inputs, token_rewards_T=rewards)
    table, mask, places = padded(inputs)
    to_go = rewards_to_go(table, mask, gamma)
    count = float(mask.sum())
    if count > 1:
        centered = (to_go - (to_go * mask).sum() / count) * mask
        to_go = centered / (centered.square().sum() / (count - 1) + 1e-8).sqrt()
    found = advantages("reinforce_plus_plus", inputs, ReinforcePlusPlusParams(gamma))
    assert found == pytest.approx(packed(to_go, places, len(rewards)), rel=1e-5, abs=1e-5)


@given(inputs=batches(), seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_remax_equals_a_padded_loop(inputs: AdvantageInputs, seed: int) -> None:
    """G_t - the reward of the greedy sample of the prompt; 0 where that is masked."""
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(inputs.response_mask_T.numel(), generator=generator)
    greedy = torch.randn(5, generator=generator)[inputs.group_ids_B]  # alike in a group
    greedy[inputs.group_ids_B == 2] = math.nan
    inputs = replace(inputs, token_rewards_T=rewards, greedy_rewards_B=greedy)
    table, mask, places = padded(inputs)
    rows = rewards_to_go(table, mask, 1.0) - greedy.double()[:, None]
    rows[greedy.isnan()] = 0.0
    assert advantages("remax", inputs) == pytest.approx(
        packed(rows, places, len(rewards)), rel=1e-5, abs=1e-6
    )
