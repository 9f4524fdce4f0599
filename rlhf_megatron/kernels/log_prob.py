"""Log-probability (and entropy) of target tokens straight from hidden states and the LM head's weight.

The one door to the head for actor, reference and warm-up. What it computes is specified by `log_prob_reference`; the
default backend never makes a [T, V] float32 tensor and works on a vocabulary-sharded weight.
"""

# T tokens, V vocabulary shard (with padding), H hidden

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.kernels.log_prob_chunked import chunked_linear_log_prob
from rlhf_megatron.kernels.log_prob_reference import reference_linear_log_prob

Backend = Literal["chunked", "reference"]


def linear_log_prob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: ProcessGroup | None,
    chunk_size: int,
    with_entropy: bool,
    backend: Backend = "chunked",
) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden @ weight.T / temperature) at `targets_T`, and the entropy of that distribution.

    Args:
        hidden_TH: float32, bfloat16 or float64. Under tensor parallelism the same on every rank of `tp_group` (after
            the gather where the sequence is split). Only rows that are needed: the caller drops prompt tokens. T may
            be 0; the result is then empty and still carries a gradient function, so that backward hooks fire.
        weight_VH: this rank's rows of the head; row i stands for token `vocab_start + i`.
        targets_T: int64 token ids in [0, vocab_size), ids of the whole vocabulary. A target that no rank owns gives
            a log-probability of -inf.
        temperature: divides the logits; the engine's sampling temperature.
        vocab_start: token id of the first row of `weight_VH`.
        vocab_size: true size of the vocabulary; rows at and beyond it are padding: no probability, zero gradient.
        tp_group: ranks that hold the shards; None: `weight_VH` is whole. All its ranks must call, with one T.
        chunk_size: vocabulary rows handled at a time; bounds the memory of a tile.
        with_entropy: also return entropies, with their gradient.

    Returns:
        log_probs_T and entropies_T (nats; None unless asked for), float32 (float64 for float64 inputs), equal bit for
        bit on all ranks of `tp_group`.

    The gradient of `hidden_TH` is complete on every rank: the sum over `tp_group` is done in here, as Megatron's
    ColumnParallelLinear does. A caller that gathered a split sequence must therefore use a gather whose backward only
    splits (`tensor_parallel_output_grad=False`). The gradient of `weight_VH` is this shard's, in the weight's type.

    Raises ValueError for a temperature or chunk size that is not positive and for shapes that do not fit.
    """
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
        return reference_linear_log_prob(
            hidden_TH, weight_VH, targets_T, temperature, vocab_start, vocab_size, with_entropy
        )
    if backend == "chunked":
        return chunked_linear_log_prob(
            hidden_TH, weight_VH, targets_T, temperature, vocab_start, vocab_size, group, chunk_size, with_entropy
        )
    raise ValueError(f"unknown backend {backend!r}; use 'chunked' or 'reference'.")
