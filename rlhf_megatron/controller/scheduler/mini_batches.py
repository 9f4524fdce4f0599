"""A step's samples as mini-batches, each with its loss weights under one global
denominator. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_megatron.algorithms.loss_aggregation import compute_loss_weights, compute_metric_weights
from rlhf_megatron.algorithms.losses import PICKS, POLICY_LOSSES, TokenPickInputs
from rlhf_megatron.config.schema import PolicyLossConfig
from rlhf_megatron.config.type_conversion import build_params
from rlhf_megatron.controller.observe.metrics.batch_metrics import make_valid_token_mask
from rlhf_megatron.data.batch import (
    MiniBatch,
    TokenBatch,
    TrainBatch,
    ValueMiniBatch,
    make_token_index,
)
from rlhf_megatron.data.seeds import derive_seed


def compute_token_weights(
    batch: TokenBatch, loss_agg_mode: str, scale_factor: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return (loss weights [T], metric weights [T]). The counts in the denominators are the counts
    of `batch`, which must be a whole mini-batch.
    """
    num_tokens = int(batch.response_mask.sum())
    weights = compute_loss_weights(
        loss_agg_mode, batch.response_mask, batch.offsets, num_tokens, len(batch), scale_factor
    )
    return weights, compute_metric_weights(batch.response_mask, num_tokens)


def iterate_mini_batch_indices(
    num_samples: int, num_epochs: int, mini_batch_size: int, use_shuffle: bool, seed: int, step: int
) -> Iterator[list[int]]:
    """Yield the sample indices of each mini-batch of a step, epoch after epoch. With `use_shuffle`
    the order of an epoch depends on (seed, step, epoch) only, else the samples keep their order.
    The last mini-batch of an epoch may be smaller.
    """
    for epoch in range(num_epochs):
        order = list(range(num_samples))
        if use_shuffle:
            generator = torch.Generator().manual_seed(derive_seed(seed, step, epoch, 7))
            order = torch.randperm(num_samples, generator=generator).tolist()
        yield from (
            order[start : start + mini_batch_size]
            for start in range(0, num_samples, mini_batch_size)
        )


def make_token_selection_mask(
    mini_batch_samples: TrainBatch,
    loss_config: PolicyLossConfig,
    seed: int,
    step: int,
    mini_batch_number: int,
) -> Tensor | None:
    """Return [T] bool: the tokens that the policy loss of `loss_config` selects in mini-batch
    `mini_batch_number` of a step, or None for a loss that selects no tokens. The random numbers of
    the selection depend on (seed, step, mini_batch_number) and on the sample ids, not on the order
    of the samples.
    """
    if loss_config.loss_mode not in PICKS:
        return None
    assert mini_batch_samples.old_log_probs is not None, (
        "a choice is made from the old policy's log-probs"
    )
    cls = POLICY_LOSSES.get(loss_config.loss_mode).params
    params = (
        build_params(cls, loss_config.params, "actor.policy_loss.params")
        if cls is not None
        else None
    )
    generator = torch.Generator().manual_seed(derive_seed(seed, step, mini_batch_number, 11))
    by_id = make_token_index(
        mini_batch_samples.offsets, mini_batch_samples.sample_ids.argsort(stable=True).tolist()
    )
    noise = torch.empty(mini_batch_samples.num_tokens, dtype=torch.float64)
    noise[by_id] = torch.rand(
        mini_batch_samples.num_tokens, dtype=torch.float64, generator=generator
    )
    inputs = TokenPickInputs(
        mini_batch_samples.old_log_probs,
        mini_batch_samples.advantages,
        make_valid_token_mask(mini_batch_samples),
        noise,
    )
    return PICKS.get(loss_config.loss_mode).build(inputs, params)


def make_actor_mini_batch(
    samples: TrainBatch,
    loss_agg_mode: str,
    scale_factor: float | None = None,
    is_picked: Tensor | None = None,
    is_bypass: bool = False,
) -> MiniBatch:
    """Return `samples` as a mini-batch of the actor. `is_picked` is the mask that
    `make_token_selection_mask` returns. With `is_bypass` the engine's log-probs take the place of
    the old log-probs.

    Rejected tokens and samples of masked status have loss weight 0 in every term; they count in the
    denominators, and in metrics, as any token.
    """
    weights, for_metrics = compute_token_weights(samples, loss_agg_mode, scale_factor)
    weights.mul_(make_valid_token_mask(samples))
    if samples.is_kept is not None:
        weights.mul_(samples.is_kept)
    return MiniBatch(
        offsets=samples.offsets,
        token_ids=samples.token_ids,
        response_mask=samples.response_mask,
        loss_weights=weights,
        metric_weights=for_metrics,
        advantages=samples.advantages,
        old_log_probs=samples.rollout_log_probs if is_bypass else samples.old_log_probs,
        ref_log_probs=samples.ref_log_probs,
        rollout_log_probs=samples.rollout_log_probs,
        correction_weights=samples.correction_weights,
        is_picked=is_picked,
        teacher_ids=samples.teacher_ids,
        teacher_log_probs=samples.teacher_log_probs,
        sample_ids=samples.sample_ids,
        routes=samples.routes,
    )


def make_critic_mini_batch(
    samples: TrainBatch, loss_agg_mode: str, scale_factor: float | None = None
) -> ValueMiniBatch:
    """Return `samples`, which must have values and returns, as a mini-batch of the critic.

    A sample of masked status has no return to learn: its weights are 0. The sample counts in the
    denominator of the loss, as it does in the actor's.
    """
    assert samples.values is not None and samples.returns is not None, (
        "a critic's update needs values and returns"
    )
    weights, _ = compute_token_weights(samples, loss_agg_mode, scale_factor)
    is_valid = make_valid_token_mask(samples)
    return ValueMiniBatch(
        offsets=samples.offsets,
        token_ids=samples.token_ids,
        response_mask=samples.response_mask,
        loss_weights=weights.mul_(is_valid),
        metric_weights=compute_metric_weights(is_valid, int(is_valid.sum())),
        old_values=samples.values,
        returns=samples.returns,
    )


def make_supervised_mini_batch(
    batch: TokenBatch,
    loss_agg_mode: str = "token-mean",
    scale_factor: float | None = None,
    sample_weights: Tensor | None = None,
) -> MiniBatch:
    """Return a mini-batch for the loss "sft" over the tokens of `batch` that train.
    `sample_weights` ([B], 1 for each sample where None) multiply the loss of a sample; the
    denominators, which count tokens and samples, do not change.
    """
    weights, for_metrics = compute_token_weights(batch, loss_agg_mode, scale_factor)
    if sample_weights is not None:
        weights = weights * torch.repeat_interleave(sample_weights, batch.lengths)
    return MiniBatch(
        offsets=batch.offsets,
        token_ids=batch.token_ids,
        response_mask=batch.response_mask,
        loss_weights=weights,
        metric_weights=for_metrics,
    )
