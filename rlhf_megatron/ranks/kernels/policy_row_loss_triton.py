"""`ppo_clip` with its regularizers in one Triton kernel: gradient and sums of a block of
rows a program.

A program writes its sums beside those of the others, and they are added up in a fixed order: the
same input gives the same bits. The gradient is that of `ppo_clip`; exp is the device's, which is a
few float32 roundings off.
"""

# R rows, T rows of a program

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlhf_megatron.algorithms.losses.kl_estimators import (
    MAX_K3,
    MAX_LOG_RATIO,
    STRAIGHT_THROUGH_SUFFIX,
)
from rlhf_megatron.algorithms.losses.policy_loss import PolicyLossInputs
from rlhf_megatron.algorithms.losses.ppo_clip import PPOClipParams
from rlhf_megatron.algorithms.losses.total_token_loss import RegularizerParams
from rlhf_megatron.ranks.kernels.weighted_row_loss import RowLossSums, sum_over_blocks

BLOCK = 512  # rows of a program: 64 programs for 32768 rows
NAMES = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/pg_loss")
KL_NAME = "actor/kl_loss"
ENTROPY_NAME = "actor/entropy_loss"
KL_KINDS = {"k1": 1, "k2": 2, "k3": 3, "abs": 4}

_MAX_LOG_RATIO = tl.constexpr(MAX_LOG_RATIO)
_MAX_K3 = tl.constexpr(MAX_K3)


def compute_ppo_clip_row_sums(
    inputs: PolicyLossInputs,
    params: PPOClipParams,
    regularizers: RegularizerParams,
    loss_weights_R: Tensor,
    metric_weights_R: Tensor,
) -> RowLossSums:
    """Return the sums and the gradient of `PolicyRowLoss.compute_row_sums` with ppo_clip. All
    columns must be float32.
    """
    names: tuple[str, ...] = NAMES
    if inputs.ref_log_probs_T is not None:
        names = (*names, KL_NAME)
    if inputs.entropies_T is not None:
        names = (*names, ENTROPY_NAME)
    required = (
        inputs.log_probs_T,
        inputs.old_log_probs_T,
        inputs.advantages_T,
        loss_weights_R,
        metric_weights_R,
    )
    optional = (inputs.ref_log_probs_T, inputs.entropies_T, inputs.correction_weights_T)
    assert all(
        column is None or column.dtype == torch.float32 for column in (*required, *optional)
    ), "float32 only"
    grad_R = torch.empty_like(loss_weights_R)
    num_rows = grad_R.numel()
    num_blocks = triton.cdiv(num_rows, BLOCK)
    block_sums = grad_R.new_empty(num_blocks, 1 + len(names))
    if num_rows:
        kl_kind = regularizers.kl_loss_type
        arguments: dict[str, Any] = {
            "num_rows": num_rows,
            "low": 1 - params.clip_ratio_low,
            "high": 1 + params.clip_ratio_high,
            "bound": params.clip_ratio_c,
            "kl_coef": regularizers.kl_loss_coef,
            "entropy_coeff": regularizers.entropy_coeff,
            "KL_KIND": KL_KINDS[kl_kind.removesuffix(STRAIGHT_THROUGH_SUFFIX)]
            if inputs.ref_log_probs_T is not None
            else 0,
            "IS_KL_STRAIGHT": kl_kind.endswith(STRAIGHT_THROUGH_SUFFIX),
            "HAS_ENTROPIES": inputs.entropies_T is not None,
            "HAS_CORRECTION": inputs.correction_weights_T is not None,
            "NUM_SUMS": 1 + len(names),
            "BLOCK": BLOCK,
            "enable_fp_fusion": False,
        }
        pointers = [
            column if column is None else column.contiguous() for column in (*required, *optional)
        ]
        absent = pointers[0]  # never read
        _ppo_clip_kernel[(num_blocks,)](
            *(absent if pointer is None else pointer for pointer in pointers),
            grad_R,
            block_sums,
            **arguments,
        )
    return sum_over_blocks(block_sums, grad_R, names)


@triton.jit(do_not_specialize=["num_rows"])
def _ppo_clip_kernel(
    log_probs_R,
    old_log_probs_R,
    advantages_R,
    loss_weights_R,
    metric_weights_R,
    ref_log_probs_R,
    entropies_R,
    correction_weights_R,
    grad_R,
    block_sums,
    num_rows,
    low,
    high,
    bound,
    kl_coef,
    entropy_coeff,
    KL_KIND: tl.constexpr,
    IS_KL_STRAIGHT: tl.constexpr,
    HAS_ENTROPIES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the gradient of a block of rows, and the block's partial sums of the loss and the
    metrics.
    """
    row_T = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_row_T = row_T < num_rows
    log_probs_T = tl.load(log_probs_R + row_T, is_row_T, other=0.0)
    advantages_T = tl.load(advantages_R + row_T, is_row_T, other=0.0)
    loss_weights_T = tl.load(loss_weights_R + row_T, is_row_T, other=0.0)
    metric_weights_T = tl.load(metric_weights_R + row_T, is_row_T, other=0.0)
    sums = block_sums + tl.program_id(0).to(tl.int64) * NUM_SUMS

    raw_T = log_probs_T - tl.load(old_log_probs_R + row_T, is_row_T, other=0.0)
    log_ratio_T = _clamp_keeping_nan(raw_T, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    free_T = advantages_T * tl.exp(log_ratio_T)
    upper_T = tl.maximum(advantages_T * low, advantages_T * high)
    lower_T = tl.minimum(advantages_T * bound, 0.0)
    kept_T = _clamp_keeping_nan(free_T, lower_T, upper_T)
    loss_T = -kept_T
    # Where NaN came in, it goes out: 0.0 x NaN.
    grad_T = -free_T * ((kept_T == free_T) & (raw_T == log_ratio_T)).to(tl.float32)
    if HAS_CORRECTION:
        correction_T = tl.load(correction_weights_R + row_T, is_row_T, other=0.0)
        loss_T *= correction_T
        grad_T *= correction_T
    tl.store(sums + 1, tl.sum(-log_ratio_T * metric_weights_T))
    tl.store(sums + 2, tl.sum((kept_T < free_T).to(tl.float32) * metric_weights_T))
    tl.store(sums + 3, tl.sum((kept_T > free_T).to(tl.float32) * metric_weights_T))
    tl.store(sums + 4, tl.sum(loss_T * metric_weights_T))

    if KL_KIND != 0:
        diff_T = log_probs_T - tl.load(ref_log_probs_R + row_T, is_row_T, other=0.0)
        if KL_KIND == 1:
            kl_T = diff_T
            kl_grad_T = tl.full([BLOCK], 1.0, tl.float32)
        elif KL_KIND == 2:
            kl_T = 0.5 * diff_T * diff_T
            kl_grad_T = diff_T
        elif KL_KIND == 4:
            kl_T = tl.abs(diff_T)
            kl_grad_T = (diff_T > 0).to(tl.float32) - (diff_T < 0).to(tl.float32)
        else:
            log_ratio_T = _clamp_keeping_nan(-diff_T, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            raw_T = _compute_exp_minus_two_terms(log_ratio_T)
            kl_T = _clamp_keeping_nan(raw_T, -_MAX_K3, _MAX_K3)
            kl_grad_T = -(raw_T + log_ratio_T) * (raw_T == kl_T).to(tl.float32)
        if IS_KL_STRAIGHT:
            kl_grad_T = diff_T
        tl.store(sums + 5, tl.sum(kl_T * metric_weights_T))
        if kl_coef != 0.0:  # 0 x infinity would be NaN
            loss_T += kl_coef * kl_T
            grad_T += kl_coef * kl_grad_T
    if HAS_ENTROPIES:
        entropies_T = tl.load(entropies_R + row_T, is_row_T, other=0.0)
        tl.store(sums + NUM_SUMS - 1, tl.sum(entropies_T * metric_weights_T))
        if entropy_coeff != 0.0:
            loss_T -= entropy_coeff * entropies_T
    tl.store(sums, tl.sum(loss_T * loss_weights_T))
    tl.store(grad_R + row_T, grad_T * loss_weights_T, is_row_T)


@triton.jit
def _clamp_keeping_nan(x_T, low, high):
    """Clamp as torch.clamp does: NaN stays NaN, whereas `tl.minimum` treats NaN as missing."""
    x_T = tl.where(x_T < low, low, x_T)
    return tl.where(x_T > high, high, x_T)


@triton.jit
def _compute_exp_minus_two_terms(x_T):
    """Return e^x - 1 - x to a few roundings of the result: near 0 by its series, where the
    difference would cancel.
    """
    term_T = 1.0 + x_T / 9.0
    term_T = 1.0 + x_T / 8.0 * term_T
    term_T = 1.0 + x_T / 7.0 * term_T
    term_T = 1.0 + x_T / 6.0 * term_T
    term_T = 1.0 + x_T / 5.0 * term_T
    term_T = 1.0 + x_T / 4.0 * term_T
    term_T = 1.0 + x_T / 3.0 * term_T
    series_T = 0.5 * x_T * x_T * term_T
    return tl.where(tl.abs(x_T) < 0.5, series_T, tl.exp(x_T) - 1.0 - x_T)
