"""Log-probability, entropy and sum of squared probabilities of rows, from hidden states and the LM head's weight.

The one door to the head for actor, reference and warm-up. What it computes is specified by `log_prob_reference`; the
other backends never make a [R, V] float32 tensor and work on a vocabulary-sharded weight.
"""

# S tokens of a sequence (this tp rank's part where it is split), R rows, V vocabulary shard (with padding), H hidden

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.kernels.log_prob_chunked import chunked_linear_log_prob
from rlhf_megatron.kernels.log_prob_reference import reference_linear_log_prob

Backend = Literal["reference", "chunked", "triton"]


class HeadOutputs(NamedTuple):
    """Of each row, float32 (float64 for float64 inputs); equal bit for bit on all ranks of the tp group."""

    log_probs_R: Tensor  # log softmax(z) at the target, nats
    entropies_R: Tensor | None  # -sum p log p, nats; None unless asked for
    sum_squares_R: Tensor | None  # sum p^2, without gradient; None unless asked for


class WeightGradSink(Protocol):
    """Where the weight's gradient goes instead of into a tensor that autograd adds up."""

    def buffer_VH(self) -> Tensor:
        """The float32 tensor that it is added to. Asked for in the backward pass."""
        ...

    def gradient(self) -> Tensor | None:
        """What autograd gets for the weight once the buffer has it all. Called in every backward pass, without rows
        too, so that hooks fire."""
        ...


def linear_log_prob(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    *,
    temperature: float | Tensor,
    vocab_start: int,
    vocab_size: int,
    tp_group: ProcessGroup | None,
    chunk_size: int,
    with_entropy: bool,
    with_sum_squares: bool = False,
    rows_R: Tensor | None = None,
    is_sequence_split: bool = False,
    sink: WeightGradSink | None = None,
    stash_bytes: int = 0,
    backend: Backend = "chunked",
) -> HeadOutputs:
    """Statistics of softmax(hidden[rows] @ weight.T / temperature) and its log at `targets_R`.

    Args:
        hidden_SH: float32, bfloat16, float16 or float64; the same on every rank of `tp_group`, or its part of the
            sequence where `is_sequence_split`.
        weight_VH: this rank's rows of the head; row i stands for token `vocab_start + i`.
        targets_R: int64 token ids in [0, vocab_size), ids of the whole vocabulary. A target that no rank owns gives
            a log-probability of -inf.
        temperature: divides the logits; the engine's sampling temperature, or one a row, [R] float32.
        vocab_start: token id of the first row of `weight_VH`.
        vocab_size: true size of the vocabulary; rows at and beyond it are padding: no probability, zero gradient.
        tp_group: ranks that hold the shards; None: `weight_VH` is whole. All its ranks must call, with the same rows.
        chunk_size: vocabulary rows handled at a time; bounds the memory of a tile.
        with_entropy: also return entropies, with their gradient.
        with_sum_squares: also return the sum of the squared probabilities of each row, without gradient.
        rows_R: int64, distinct indices of the whole sequence; the head runs on these only. None: on all. May be empty:
            the results are then empty and still carry a gradient function, so that backward hooks fire.
        is_sequence_split: `hidden_SH` is part `tp_group.rank()` of the sequence: it is gathered, only the part is
            kept for the backward pass, and its gradient is summed over the group and split again.
        sink: where the weight's gradient is added, in float32; None: autograd gets it, in the weight's type.
        stash_bytes: how much may be kept of the logits as float16, relative to the largest of their row and tile, so
            that the backward pass need not compute them again. What does not fit is computed again.

    The gradient of `hidden_SH` is complete on every rank: the sum over `tp_group` is done in here, as Megatron's
    ColumnParallelLinear does. Rows whose upstream gradients are all zero cost nothing in the backward pass.

    Raises ValueError for a temperature or chunk size that is not positive and for shapes that do not fit.
    """
    if is_sequence_split or sink is not None or stash_bytes or with_sum_squares or torch.is_tensor(temperature):
        raise NotImplementedError("coming in the next commits")
    hidden_TH = hidden_SH if rows_R is None else hidden_SH.index_select(0, rows_R)
    targets_T = targets_R
    assert isinstance(temperature, (float, int))
    if temperature <= 0:
        raise ValueError(f"temperature ({temperature}) must be positive; greedy sampling trains with temperature 1.")
    if chunk_size <= 0:
        raise ValueError(f"chunk_size ({chunk_size}) must be positive; 4096 or 8192 are good values.")
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_TH.shape)} and weight {tuple(weight_VH.shape)} must be [T, H] and [V, H]."
        )
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"targets {tuple(targets_T.shape)} must have one entry for each of {hidden_TH.shape[0]} rows.")
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    if backend == "reference":
        if group is not None:
            raise ValueError("the reference backend takes a whole weight only; use backend='chunked' under tp > 1.")
        found = reference_linear_log_prob(
            hidden_TH, weight_VH, targets_T, temperature, vocab_start, vocab_size, with_entropy
        )
        return HeadOutputs(*found, None)
    if backend == "chunked":
        found = chunked_linear_log_prob(
            hidden_TH, weight_VH, targets_T, temperature, vocab_start, vocab_size, group, chunk_size, with_entropy
        )
        return HeadOutputs(*found, None)
    raise ValueError(f"unknown backend {backend!r}; use 'chunked', 'triton' or 'reference'.")
