"""How much of a step's gradient is signal: cheap proxies without a second backward pass. Pure.

The square of a sample's gradient is about A^2 w: A its mean advantage, w the sum over its tokens of
1 - 2 p + sum over the vocabulary of p^2, the square of a token's gradient with respect to its logits (arXiv 2602.07078
weighs a baseline with it). The mean of N gradients then has the variance (E[A^2 w] - |mean gradient|^2) / (N - 1).
"""

# T packed tokens, B samples

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregate import sequence_sums
from rlhf_megatron.data.batch import TrainBatch
from rlhf_megatron.scheduler.batch_metrics import response_lengths, valid_samples


def variance_metrics(batch: TrainBatch, metrics: Mapping[str, float]) -> dict[str, float]:
    """Empty where no estimator or loss asked for the sums of squared probabilities. `metrics`: of the update."""
    if batch.sum_squares is None or batch.old_log_probs is None:
        return {}
    found = variance_proxies(batch, batch.sum_squares)
    if found and (grad_norm := metrics.get("actor/grad_norm")) is not None:
        num_samples = int(valid_samples(batch).sum())
        found |= signal_and_noise(found["variance_proxy/proxy2_total_power"], grad_norm, num_samples)
    return found


def variance_proxies(batch: TrainBatch, sum_squares_T: Tensor) -> dict[str, float]:
    """What the samples say; over those whose reward counts. `sum_squares_T`: sum of the squared probabilities."""
    assert batch.old_log_probs is not None
    is_valid_B = valid_samples(batch)
    if not bool(is_valid_B.any()):
        return {}
    weights_T = batch.old_log_probs.exp().mul_(-2.0).add_(sum_squares_T).add_(1.0).mul_(batch.response_mask)
    w_B = _sums(weights_T, batch.offsets)[is_valid_B]
    sums_B = _sums(batch.advantages, batch.offsets)  # advantages are 0 outside of the response
    squares_B = (sums_B / response_lengths(batch).clamp(min=1)).square()[is_valid_B]
    return {
        "variance_proxy/proxy2_total_power": (squares_B * w_B).mean().item(),
        "variance_proxy/expected_a_squared": squares_B.mean().item(),
        "variance_proxy/expected_w": w_B.mean().item(),
    }


def signal_and_noise(total_power: float, grad_norm: float, num_samples: float) -> dict[str, float]:
    """With the gradient norm of the update: `total_power` is proxy 2. No noise can be told from a single sample."""
    signal = grad_norm**2
    metrics = {"variance_proxy/proxy1_signal_strength": signal}
    if num_samples > 1:
        metrics["variance_proxy/proxy3_pure_noise"] = max(0.0, total_power - signal) / (num_samples - 1)
    return metrics


def _sums(column_T: Tensor, offsets: Tensor) -> Tensor:
    """[B] float64. numpy takes a tenth of the time of `sequence_sums`, for samples that have tokens."""
    if not bool((offsets.diff() > 0).all()):
        return sequence_sums(column_T, offsets)
    return torch.from_numpy(np.add.reduceat(column_T.numpy(), offsets[:-1].numpy(), dtype=np.float64))
