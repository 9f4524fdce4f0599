"""Batches for gpu_checks.py, and what the plain model makes of them."""

from __future__ import annotations

from typing import Any

import plain_model
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CONFIG = plain_model.CONFIG
VALUE_CLIP = 0.5


def make_batch() -> Any:
    """A MiniBatch of ragged samples with random tokens and advantages, token-mean weights."""
    from rlhf_megatron.data.batch import MiniBatch, compute_offsets

    generator = torch.Generator().manual_seed(7)
    lengths = torch.tensor([2, 5, 5, 12, 40, 41, 64, 90])
    mask = torch.cat([torch.arange(length) >= max(1, length // 4) for length in lengths.tolist()])
    weights = mask / mask.sum()
    return MiniBatch(
        offsets=compute_offsets(lengths),
        token_ids=torch.randint(0, CONFIG["vocab_size"], (mask.numel(),), generator=generator),
        response_mask=mask,
        loss_weights=weights,
        metric_weights=weights,
        advantages=torch.randn(mask.numel(), generator=generator) * mask,
        old_log_probs=torch.zeros(mask.numel()),
    )


def sampled_batch(prompts: list[tuple[int, ...]], groups: list[list[Any]]) -> tuple[Any, Tensor]:
    """What an engine sampled as a TokenBatch, and the log-probs that it reported, [T]."""
    from rlhf_megatron.data.batch import TokenBatch, compute_offsets

    token_ids = []
    mask = []
    log_probs = []
    lengths = []
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            token_ids += [*prompt, *sample.token_ids]
            mask += [False] * len(prompt) + [True] * len(sample.token_ids)
            log_probs += [0.0] * len(prompt) + list(sample.log_probs)
            lengths.append(len(prompt) + len(sample.token_ids))
    batch = TokenBatch(
        compute_offsets(torch.tensor(lengths)), torch.tensor(token_ids), torch.tensor(mask)
    )
    return batch, torch.tensor(log_probs)


def share(batch: Any, token_budget: int = 160) -> tuple[Any, Any]:
    """The only replica's shard and plan, of several micro-batches."""
    from rlhf_megatron.data.replica_plan import plan_replicas, take_replica_shard

    plan = plan_replicas(batch.lengths.tolist(), 1, token_budget)[0]
    return take_replica_shard(batch, plan), plan


def restored(result: Any, plan: Any, batch: Any) -> Any:
    from rlhf_megatron.data.replica_plan import restore_sample_order

    return restore_sample_order([result], [plan], batch.offsets)


def rounded_weights(
    dtype: torch.dtype, kept_as: torch.dtype = torch.float32, hf_config: dict[str, Any] = CONFIG
) -> dict[str, Tensor]:
    """HF name -> the weights that an actor in `dtype` starts from, as `kept_as`."""
    from rlhf_megatron.weights.weight_source import generate_random_hf_tensors

    return {
        name: tensor.to(dtype).to(kept_as)
        for name, tensor in generate_random_hf_tensors(hf_config, 1)
    }


def reference_log_probs(weights: dict[str, Tensor], batch: Any) -> Tensor:
    """[T] of the plain model, zero outside of response_mask."""
    parts = []
    for start, stop in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        log_probs = plain_model.token_log_probs(weights, batch.token_ids[start:stop])
        parts.append(torch.cat([log_probs.new_zeros(1), log_probs]))
    return torch.cat(parts) * batch.response_mask


def make_value_batch(values: Tensor) -> Any:
    """`make_batch` with returns, and old values that differ from `values`, so that
    some are clipped.
    """
    from rlhf_megatron.data.batch import ValueMiniBatch

    batch = make_batch()
    noise, returns = (
        torch.randn(2, values.numel(), generator=torch.Generator().manual_seed(6))
        * batch.response_mask
    )
    return ValueMiniBatch(
        batch.offsets,
        batch.token_ids,
        batch.response_mask,
        loss_weights=batch.loss_weights,
        metric_weights=batch.metric_weights,
        old_values=values + 0.6 * noise,
        returns=returns,
    )


def rounded_critic_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    """HF name -> the weights that a critic in `dtype` starts from, as float32."""
    from rlhf_megatron.weights.weight_source import make_random_source
    from rlhf_megatron.weights.weight_table import HFTensor

    head = HFTensor("score.weight", (1, CONFIG["hidden_size"]))
    weight = make_random_source(CONFIG, 1).make_random_tensor(head).to(dtype).float()
    return {**rounded_weights(dtype), "score.weight": weight, "score.bias": torch.zeros(1)}


def reference_values(weights: dict[str, Tensor], batch: Any) -> Tensor:
    """[T] of the plain model and a linear layer, zero outside of response_mask."""
    parts = []
    for start, stop in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        hidden = plain_model.hidden_states(weights, batch.token_ids[start:stop])
        after = hidden @ weights["score.weight"][0] + weights["score.bias"]
        parts.append(torch.cat([after.new_zeros(1), after[:-1]]))
    return torch.cat(parts) * batch.response_mask


def value_loss(values: Tensor, batch: Any) -> Tensor:
    """The larger one of the squared distances to the returns, free and clipped around the old
    values; halved.
    """
    moved = (values - batch.old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    free = (values - batch.returns) ** 2
    clipped = (batch.old_values + moved - batch.returns) ** 2
    return (0.5 * torch.maximum(free, clipped) * batch.loss_weights).sum()


def with_noise(log_probs: Tensor, mask: Tensor) -> Tensor:
    """An old policy from which some ratios are clipped."""
    return (
        log_probs + 0.3 * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(5))
    ) * mask


def policy_loss(log_probs: Tensor, batch: Any) -> Tensor:
    """PPO clip 0.2 with dual clip 3, written out."""
    ratio = (log_probs - batch.old_log_probs).exp()
    worse = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    bounded = torch.where(
        batch.advantages < 0, torch.minimum(worse, -3.0 * batch.advantages), worse
    )
    return (bounded * batch.loss_weights).sum()


def attention_by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    sinks: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """[T, heads, d] each -> [T, heads, d]. `sinks` [heads]: logits in the softmax for no key;
    `window`: tokens that each sees, itself with them.
    """
    parts = []
    for pieces in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        if sinks is not None:
            queries, keys, values = (piece.transpose(0, 1) for piece in pieces)
            keys, values = (x.repeat_interleave(len(queries) // len(x), 0) for x in (keys, values))
            places = torch.arange(queries.shape[1])
            before = places[:, None] - places
            scores = queries @ keys.transpose(1, 2) / queries.shape[-1] ** 0.5
            scores = scores.masked_fill(
                (before < 0) | (before >= (window or len(places))), -torch.inf
            )
            both = torch.cat([scores, sinks[:, None, None].expand(-1, len(places), 1)], -1)
            parts.append((both.softmax(-1)[..., :-1] @ values).transpose(0, 1))
            continue
        heads_first = (piece.transpose(0, 1)[None] for piece in pieces)
        parts.append(
            scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)[
                0
            ].transpose(0, 1)
        )
    return torch.cat(parts)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """L2 norm of the difference over the L2 norm of `truth`."""
    value = value.detach().double().cpu()
    truth = truth.detach().double()
    return float((value - truth).norm() / truth.norm())
