"""How token losses become one number: weights per token, divided by a denominator of the
whole mini-batch.

`loss = sum(token_loss * weights)`. As the weights carry the global count, the sum may be cut
anywhere (micro-batches, replicas, context parallelism) and nothing divides afterwards.

    mode                       weight of response token t of sequence i; N response tokens, S
                               sequences, n_i tokens in i
    token-mean                 1 / N
    token-sum                  1
    seq-mean-token-sum         1 / S
    seq-mean-token-sum-norm    1 / (S scale_factor)
                               Dr. GRPO (arXiv 2503.20783): a constant
    seq-mean-token-mean        1 / (S n_i)

The constant is a setting and no length of the batch at hand, which would make the learning rate
follow the longest response. With token-sum the gradient grows with the mini-batch. A sequence
without response tokens counts in S. All counts are those before any rejection: a caller that
rejects tokens passes the mask from before, and multiplies the weights with what it keeps.
"""

# B sequences, T packed tokens

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rlhf_megatron.lazy import Tensor, torch
from rlhf_megatron.registry import Registry, name_attributes

BLOCK_TOKENS = 131072  # tokens


@dataclass(frozen=True)
class AggregationInputs:
    """A mini-batch, or a part of it with the counts of the whole."""

    mask_T: Tensor  # float64, 1 on response tokens, else 0
    offsets: Tensor  # [B + 1] int64; sequence i owns tokens offsets[i] : offsets[i + 1]
    num_response_tokens: int  # N, over all replicas, at least 1
    num_sequences: int  # S, likewise
    # actor.loss_scale_factor in tokens, for one that needs "scale_factor"
    scale_factor: float | None


Aggregation = Callable[[AggregationInputs], Tensor]  # [T] float64 weights, 0 where the mask is
AGGREGATIONS: Registry[Aggregation] = Registry(
    "aggregation", call_arguments=("inputs",), attributes_by_name=name_attributes(AggregationInputs)
)


@AGGREGATIONS.register("token-mean")
def weigh_by_token_mean(inputs: AggregationInputs) -> Tensor:
    """Return weights 1 / N on response tokens, [T] float64."""
    return inputs.mask_T / inputs.num_response_tokens


@AGGREGATIONS.register("token-sum")
def weigh_by_token_sum(inputs: AggregationInputs) -> Tensor:
    """Return weights 1 on response tokens, [T] float64."""
    return inputs.mask_T


@AGGREGATIONS.register("seq-mean-token-sum")
def weigh_by_seq_mean_token_sum(inputs: AggregationInputs) -> Tensor:
    """Return weights 1 / S on response tokens, [T] float64."""
    return inputs.mask_T / inputs.num_sequences


@AGGREGATIONS.register("seq-mean-token-sum-norm", needs=("scale_factor",))
def weigh_by_seq_mean_token_sum_norm(inputs: AggregationInputs) -> Tensor:
    """Return weights 1 / (S scale_factor) on response tokens, [T] float64. Raise ValueError for a
    scale factor that is missing or not positive.
    """
    if inputs.scale_factor is None or not inputs.scale_factor > 0:
        raise ValueError(
            f"loss_scale_factor ({inputs.scale_factor}) must be positive for"
            " seq-mean-token-sum-norm; use the longest response, in tokens."
        )
    return inputs.mask_T / (inputs.num_sequences * inputs.scale_factor)


@AGGREGATIONS.register("seq-mean-token-mean")
def weigh_by_seq_mean_token_mean(inputs: AggregationInputs) -> Tensor:
    """Return weights 1 / (S n_i) on response tokens, [T] float64."""
    counts_B = sum_by_sequence(inputs.mask_T, inputs.offsets).clamp(min=1)
    return inputs.mask_T / (
        inputs.num_sequences * counts_B.repeat_interleave(inputs.offsets.diff())
    )


def compute_loss_weights(
    mode: str,
    response_mask_T: Tensor,
    offsets: Tensor,
    num_response_tokens: int,
    num_sequences: int,
    scale_factor: float | None = None,
) -> Tensor:
    """Return the weight of each token in the loss, [T] float32, 0 outside of `response_mask_T`.
    `mode`: a registered aggregation. `num_response_tokens` and `num_sequences` count the whole
    mini-batch over all replicas, before any rejection.

    Raise ValueError for an unknown mode, a missing scale factor, and a global count below that of
    this part.
    """
    num_here = int(response_mask_T.sum())
    if num_here > num_response_tokens or offsets.numel() - 1 > num_sequences:
        raise ValueError(
            f"global counts ({num_response_tokens} response tokens, {num_sequences} sequences)"
            f" must cover this part ({num_here} tokens, {offsets.numel() - 1} sequences); count"
            " the whole mini-batch, before any rejection."
        )
    make_inputs = partial(
        AggregationInputs,
        num_response_tokens=max(num_response_tokens, 1),
        num_sequences=max(num_sequences, 1),
        scale_factor=scale_factor,
    )
    compute_weights = AGGREGATIONS.get(mode).build
    if _fits_one_block(response_mask_T):
        mask_T = response_mask_T.to(torch.float64)
        return compute_weights(make_inputs(mask_T, offsets)).to(torch.float32)
    weights_T = torch.empty(response_mask_T.numel())
    for _, tokens, block_offsets in _iterate_sequence_blocks(offsets):
        mask_N = response_mask_T[tokens].to(torch.float64)
        weights_T[tokens] = compute_weights(make_inputs(mask_N, block_offsets))
    return weights_T


def compute_metric_weights(response_mask_T: Tensor, num_response_tokens: int) -> Tensor:
    """Return weights, [T] float32, with which sum(metric * weights) over the mini-batch is the mean
    over its `num_response_tokens` tokens.
    """
    return response_mask_T.to(torch.float32).mul_(1.0 / max(num_response_tokens, 1))


def sum_by_sequence(column_T: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of a token column over each sequence, [B] float64."""
    if _fits_one_block(column_T):
        return _sum_segments(column_T, offsets)
    sums_B = torch.empty(offsets.numel() - 1, dtype=torch.float64)
    for sequences, tokens, of_block in _iterate_sequence_blocks(offsets):
        sums_B[sequences] = _sum_segments(column_T[tokens], of_block)
    return sums_B


def _fits_one_block(column_T: Tensor) -> bool:
    """Return whether a column is computed at once: a short one, or one that is not on the CPU."""
    return column_T.numel() <= BLOCK_TOKENS or column_T.device.type != "cpu"


def _iterate_sequence_blocks(offsets: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (slice of whole sequences, slice of their tokens, their offsets from 0) of blocks that
    stay in a cache, where memory is several times faster.
    """
    first = 0
    while first < offsets.numel() - 1:
        start = int(offsets[first])
        last = max(
            first + 1, int(torch.searchsorted(offsets, start + BLOCK_TOKENS, right=True)) - 1
        )
        of_block = offsets[first : last + 1]
        yield slice(first, last), slice(start, int(of_block[-1])), of_block - start
        first = last


def _sum_segments(column_T: Tensor, offsets: Tensor) -> Tensor:
    """Return the sum of a column over each segment, [B] float64."""
    return torch.segment_reduce(
        column_T.to(torch.float64), "sum", lengths=offsets.diff(), unsafe=True
    )
