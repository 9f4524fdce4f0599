"""Advantages and returns of `algorithms.advantages.gae` in one Triton kernel, for columns that are on a GPU.

The trainer's are on the controller's CPU and do not come here. A program has a sample and goes over it in blocks, from
its end on, with an associative scan within a block. What a token hands to the one in front of it is one number,

    C_t = gamma (1 - lam) V_t + gamma lam R_t        R_t = r_t + C_{t+1}        A_t = R_t - V_t        C = 0 at the end

and tokens that do not train hand on what they got: nothing is compacted. Scans and carries are float64 and no order
depends on the device's: the same input gives the same bits. Each token is read once from memory, with 9 bytes, and
gets 8.
"""

# B samples, T packed tokens, N tokens of a block, from the back

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.algorithms.advantages.base import AdvantageInputs

BLOCK = 1024  # tokens: 8 a thread in 4 warps


def advantages_and_returns(inputs: AdvantageInputs, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """[T] float32 each: as the estimator gives them, not whitened. All columns on one device."""
    rewards_T, values_T, mask_T = inputs.token_rewards_T, inputs.values_T, inputs.response_mask_T
    assert rewards_T is not None and values_T is not None, "gae needs token_rewards and values"
    assert rewards_T.dtype == values_T.dtype == torch.float32 and mask_T.dtype == torch.bool, "types of a batch"
    advantages_T, returns_T = torch.empty_like(values_T), torch.empty_like(values_T)
    # As a tensor, since a float argument would become float32.
    weights = torch.tensor([gamma * lam, gamma * (1 - lam)], dtype=torch.float64, device=values_T.device)
    num_samples = inputs.is_valid_B.numel()
    if num_samples:
        _gae_kernel[(num_samples,)](
            rewards_T.contiguous(),
            values_T.contiguous(),
            mask_T.contiguous().view(torch.uint8),
            inputs.is_valid_B.contiguous().view(torch.uint8),
            inputs.offsets,
            weights,
            advantages_T,
            returns_T,
            BLOCK=BLOCK,
            enable_fp_fusion=True,  # stated, since versions differ in what they do unasked
        )
    return advantages_T, returns_T


@triton.jit
def _then(factor, term, next_factor, next_term):
    """x -> factor x + term, and then x -> next_factor x + next_term."""
    return factor * next_factor, next_factor * term + next_term


@triton.jit
def _gae_kernel(
    rewards_T,
    values_T,
    mask_T,
    is_valid_B,
    offsets,
    weights,
    advantages_T,
    returns_T,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(0)
    start, end = tl.load(offsets + sample), tl.load(offsets + sample + 1)
    is_valid = tl.load(is_valid_B + sample) != 0
    return_weight, value_weight = tl.load(weights), tl.load(weights + 1)
    steps_N = tl.arange(0, BLOCK)
    carry = return_weight * 0.0  # what the block behind hands over: to its foremost token's predecessor
    for behind in range(0, end - start, BLOCK):
        place_N = end - 1 - behind - steps_N
        is_token_N = place_N >= start
        is_next_N = is_token_N & (place_N + 1 < end)
        next_N = place_N + 1
        trains_next_N = is_valid & (tl.load(mask_T + next_N, is_next_N, other=0) != 0)
        next_rewards_N = tl.load(rewards_T + next_N, is_next_N, other=0.0).to(tl.float64)
        next_values_N = tl.load(values_T + next_N, is_next_N, other=0.0).to(tl.float64)
        handed_N = value_weight * next_values_N + return_weight * next_rewards_N
        factor_N, term_N = tl.associative_scan(
            (tl.where(trains_next_N, return_weight, 1.0), tl.where(trains_next_N, handed_N, 0.0)), 0, _then
        )
        got_N = factor_N * carry + term_N
        carry = tl.sum(tl.where(steps_N == BLOCK - 1, got_N, 0.0))

        in_mask_N = tl.load(mask_T + place_N, is_token_N, other=0) != 0
        values_N = tl.load(values_T + place_N, is_token_N, other=0.0)
        found_N = tl.load(rewards_T + place_N, is_token_N, other=0.0).to(tl.float64) + got_N
        trained_N = (found_N - values_N.to(tl.float64)).to(tl.float32)
        tl.store(advantages_T + place_N, tl.where(in_mask_N & is_valid, trained_N, 0.0), is_token_N)
        return_N = tl.where(is_valid, found_N.to(tl.float32), values_N)
        tl.store(returns_T + place_N, tl.where(in_mask_N, return_N, 0.0), is_token_N)
