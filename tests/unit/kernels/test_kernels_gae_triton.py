"""Advantages and returns in one Triton kernel against the recurrence in float64, and against the estimator.

Under triton's interpreter, and on CUDA where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_interpreter import TritonInterpreter

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs

BLOCK = 8  # in place of 1024, so that small samples have several blocks


def batch(lengths: list[int], share: float, seed: int, scale: float = 1.0) -> AdvantageInputs:
    """A `share` of the tokens is in the mask, every third sample invalid. Rewards that do not count are NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask_T = torch.rand(total, generator=generator) < share
    rewards_T, values_T = (scale * torch.randn(total, generator=generator) for _ in range(2))
    return AdvantageInputs(
        rewards_B=torch.zeros(len(lengths)),
        group_ids_B=torch.zeros(len(lengths), dtype=torch.int64),
        is_valid_B=torch.arange(len(lengths)) % 3 != 2,
        response_mask_T=mask_T,
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        token_rewards_T=rewards_T.masked_fill(~mask_T, torch.nan),
        values_T=values_T,
    )


def recurrence(inputs: AdvantageInputs, gamma: float, lam: float) -> tuple[list[float], list[float]]:
    assert inputs.token_rewards_T is not None and inputs.values_T is not None
    rewards, values, mask = inputs.token_rewards_T.tolist(), inputs.values_T.tolist(), inputs.response_mask_T.tolist()
    advantages, returns = [0.0] * len(values), [0.0] * len(values)
    borders = inputs.offsets.tolist()
    for sample, is_valid in enumerate(inputs.is_valid_B.tolist()):
        next_value = advantage = 0.0
        for t in range(borders[sample + 1] - 1, borders[sample] - 1, -1):
            if mask[t] and is_valid:
                advantage = rewards[t] + gamma * next_value - values[t] + gamma * lam * advantage
                next_value = values[t]
                advantages[t], returns[t] = advantage, advantage + values[t]
            elif mask[t]:
                returns[t] = values[t]
    return advantages, returns


def run_kernel(inputs: AdvantageInputs, gamma: float, lam: float, device: str, block: int) -> Any:
    from rlhf_megatron.kernels import gae_triton

    moved = {name: value.to(device) for name, value in vars(inputs).items() if isinstance(value, torch.Tensor)}
    usual = gae_triton.BLOCK
    gae_triton.BLOCK = block
    try:
        found = gae_triton.advantages_and_returns(AdvantageInputs(**moved), gamma, lam)
        again = gae_triton.advantages_and_returns(AdvantageInputs(**moved), gamma, lam)
    finally:
        gae_triton.BLOCK = usual
    bits = [(one.view(torch.int32), other.view(torch.int32)) for one, other in zip(found, again, strict=True)]
    assert all(torch.equal(*pair) for pair in bits), "not repeatable"
    return tuple(column.cpu() for column in found)


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Calls `run_kernel` where Triton's kernels run."""
    if request.param == "cuda":
        yield lambda *args: run_kernel(*args, device="cuda", block=BLOCK)
        return
    interpreter: TritonInterpreter = request.getfixturevalue("triton_interpreter")
    yield lambda *args: interpreter.run(run_kernel, *args, device="cpu", block=BLOCK)


def test_by_hand(run: Callable[..., Any]) -> None:
    """A prompt token, two response tokens, a tool's, one more: values 1, 2, 4; rewards 0, 0, 10; gamma = lam = 1/2."""
    inputs = replace(
        batch([5], 1.0, seed=0),
        response_mask_T=torch.tensor([False, True, True, False, True]),
        token_rewards_T=torch.tensor([9.0, 0, 0, 50, 10]),
        values_T=torch.tensor([7.0, 1, 2, 99, 4]),
    )
    advantages_T, returns_T = run(inputs, 0.5, 0.5)
    # deltas 0 + 1 - 1, 0 + 2 - 2, 10 - 4 = 0, 0, 6; A = 6/16, 6/4, 6
    assert advantages_T.tolist() == [0, 0.375, 1.5, 0, 6]
    assert returns_T.tolist() == [0, 1.375, 3.5, 0, 10]


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (1.0, 1.0), (0.9, 1.0), (1.0, 0.0), (0.0, 0.5)])
@pytest.mark.parametrize("share", [0.6, 1.0])
def test_ragged_samples(run: Callable[..., Any], gamma: float, lam: float, share: float) -> None:
    """Empty ones, one token, a block less one, a block, a block and one, several; tools; invalid samples."""
    inputs = batch([0, 1, 8, BLOCK - 1, 0, BLOCK, BLOCK + 1, 3 * BLOCK, 1, 29], share, seed=1, scale=1e4)
    found = run(inputs, gamma, lam)
    for column, expected in zip(found, recurrence(inputs, gamma, lam), strict=True):
        torch.testing.assert_close(column, torch.tensor(expected), rtol=2e-7, atol=1e-6)


def test_nothing_trains_and_no_samples(run: Callable[..., Any]) -> None:
    for inputs in (batch([4, 0, 7], 0.0, seed=2), batch([], 1.0, seed=2)):
        for column in run(inputs, 1.0, 0.95):
            assert column.tolist() == [0.0] * int(inputs.offsets[-1])


def test_nothing_crosses_from_one_sample_to_another(run: Callable[..., Any]) -> None:
    inputs = batch([5, 9], 1.0, seed=3)
    assert inputs.values_T is not None
    broken = replace(inputs, values_T=torch.cat([inputs.values_T[:5], torch.full((9,), torch.nan)]))
    for whole, other in zip(run(inputs, 1.0, 0.95), run(broken, 1.0, 0.95), strict=True):
        assert torch.equal(whole[:5], other[:5]) and whole[:5].abs().max() > 0
