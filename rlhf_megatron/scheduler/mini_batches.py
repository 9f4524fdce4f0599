"""A step's samples as mini-batches, each with its loss weights under one global denominator. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_megatron.algorithms.aggregate import loss_weights, metric_weights
from rlhf_megatron.algorithms.losses import PICKS, POLICY_LOSSES, PickInputs
from rlhf_megatron.config.schema import PolicyLossConfig
from rlhf_megatron.config.typed import params_from_mapping
from rlhf_megatron.data.batch import MiniBatch, TokenBatch, TrainBatch, ValueMiniBatch, token_index
from rlhf_megatron.data.seeds import derive_seed
from rlhf_megatron.observe.metrics.batch import valid_tokens


def weigh(batch: TokenBatch, mode: str, scale_factor: float | None = None) -> tuple[Tensor, Tensor]:
    """(loss weights [T], metric weights [T]); the counts are those of `batch`, which is a whole mini-batch."""
    num_tokens = int(batch.response_mask.sum())
    weights = loss_weights(mode, batch.response_mask, batch.offsets, num_tokens, len(batch), scale_factor)
    return weights, metric_weights(batch.response_mask, num_tokens)


def of_epochs(
    num_samples: int, num_epochs: int, mini_batch_size: int, use_shuffle: bool, seed: int, step: int
) -> Iterator[list[int]]:
    """The samples of each mini-batch of a step, over all epochs: in an order of (seed, step, epoch)."""
    for epoch in range(num_epochs):
        order = list(range(num_samples))
        if use_shuffle:
            generator = torch.Generator().manual_seed(derive_seed(seed, step, epoch, 7))
            order = torch.randperm(num_samples, generator=generator).tolist()
        yield from (order[start : start + mini_batch_size] for start in range(0, num_samples, mini_batch_size))


def picked(part: TrainBatch, loss: PolicyLossConfig, seed: int, step: int, number: int) -> Tensor | None:
    """[T] bool: what `loss` chooses of mini-batch `number` of a step; None for a loss that chooses nothing."""
    if loss.loss_mode not in PICKS:
        return None
    assert part.old_log_probs is not None, "a choice is made from the old policy's log-probs"
    cls = POLICY_LOSSES.get(loss.loss_mode).params
    params = params_from_mapping(cls, loss.params, "actor.policy_loss.params") if cls is not None else None
    generator = torch.Generator().manual_seed(derive_seed(seed, step, number, 11))
    by_id = token_index(part.offsets, part.sample_ids.argsort(stable=True).tolist())
    noise = torch.empty(part.num_tokens, dtype=torch.float64)
    noise[by_id] = torch.rand(part.num_tokens, dtype=torch.float64, generator=generator)
    inputs = PickInputs(part.old_log_probs, part.advantages, valid_tokens(part), noise)
    return PICKS.get(loss.loss_mode).build(inputs, params)


def weighed(
    part: TrainBatch,
    mode: str,
    scale_factor: float | None = None,
    is_picked: Tensor | None = None,
    is_bypass: bool = False,
) -> MiniBatch:
    """`part` as a mini-batch of the actor. `is_picked`: see `picked`; `is_bypass`: the engine's log-probs are the old
    ones.

    What is rejected, and samples of masked status, have loss weight 0 in every term; they count in the denominators,
    and in metrics, as any token.
    """
    weights, for_metrics = weigh(part, mode, scale_factor)
    weights.mul_(valid_tokens(part))
    if part.is_kept is not None:
        weights.mul_(part.is_kept)
    return MiniBatch(
        offsets=part.offsets,
        token_ids=part.token_ids,
        response_mask=part.response_mask,
        loss_weights=weights,
        metric_weights=for_metrics,
        advantages=part.advantages,
        old_log_probs=part.rollout_log_probs if is_bypass else part.old_log_probs,
        ref_log_probs=part.ref_log_probs,
        rollout_log_probs=part.rollout_log_probs,
        correction_weights=part.correction_weights,
        is_picked=is_picked,
        teacher_ids=part.teacher_ids,
        teacher_log_probs=part.teacher_log_probs,
        sample_ids=part.sample_ids,
        routes=part.routes,
    )


def weighed_values(part: TrainBatch, mode: str, scale_factor: float | None = None) -> ValueMiniBatch:
    """`part` as a mini-batch of the critic.

    A sample of masked status has no return to learn: its weights are 0. It counts in the denominator of the loss, as
    it does in the actor's.
    """
    assert part.values is not None and part.returns is not None, "a critic's update needs values and returns"
    weights, _ = weigh(part, mode, scale_factor)
    is_valid = valid_tokens(part)
    return ValueMiniBatch(
        offsets=part.offsets,
        token_ids=part.token_ids,
        response_mask=part.response_mask,
        loss_weights=weights.mul_(is_valid),
        metric_weights=metric_weights(is_valid, int(is_valid.sum())),
        old_values=part.values,
        returns=part.returns,
    )


def supervised_mini_batch(
    batch: TokenBatch,
    mode: str = "token-mean",
    scale_factor: float | None = None,
    sample_weights: Tensor | None = None,
) -> MiniBatch:
    """A mini-batch for the loss "sft" over what trains in `batch`. `sample_weights`: [B], 1 each where None; they
    multiply the loss of a sample and leave the denominators, which count tokens and samples, as they are.
    """
    weights, for_metrics = weigh(batch, mode, scale_factor)
    if sample_weights is not None:
        weights = weights * torch.repeat_interleave(sample_weights, batch.lengths)
    return MiniBatch(
        offsets=batch.offsets,
        token_ids=batch.token_ids,
        response_mask=batch.response_mask,
        loss_weights=weights,
        metric_weights=for_metrics,
    )
