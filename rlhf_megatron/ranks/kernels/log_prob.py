"""Log-probability, entropy and sum of squared probabilities of rows, from hidden states and the LM
head's weight.

The one door to the head for actor, reference and warm-up. What it computes is specified by
`log_prob_reference`; the other backends never make a [R, V] float32 tensor and work on a
vocabulary-sharded weight.
"""

# S tokens of a sequence (this tp rank's part where it is split), R rows, V vocabulary shard (with
# padding), H hidden

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.ranks.kernels.log_prob_chunked import HeadCallSettings, compute_chunked_log_probs
from rlhf_megatron.ranks.kernels.log_prob_reference import compute_reference_log_probs
from rlhf_megatron.ranks.kernels.logit_tile_ops import TileOps, TorchTileOps
from rlhf_megatron.ranks.kernels.matrix_products import WeightGradSink, choose_accumulator_dtype

__all__ = ["HeadOutputs", "LogProbBackend", "WeightGradSink", "compute_linear_log_probs"]

LogProbBackend = Literal["reference", "chunked", "triton"]


class HeadOutputs(NamedTuple):
    """The head's outputs of each row, float32 (float64 for float64 inputs); equal bit for bit on
    all ranks of the tp group.
    """

    log_probs_R: Tensor  # log softmax(z) at the target, nats
    entropies_R: Tensor | None  # -sum p log p, nats; None unless requested
    sum_squares_R: Tensor | None  # sum p^2, without gradient; None unless requested


def compute_linear_log_probs(
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
    has_repeated_rows: bool = False,
    is_sequence_split: bool = False,
    weight_grad_sink: WeightGradSink | None = None,
    stash_bytes: int = 0,
    softcap: float | None = None,
    backend: LogProbBackend = "chunked",
) -> HeadOutputs:
    """Return the log of softmax(logits / temperature) at `targets_R`, with logits = hidden[rows] @
    weight.T, and, on request, the entropy and the sum of the squared probabilities of each row.

    Args:
        hidden_SH: float32, bfloat16, float16 or float64; the same on every rank of `tp_group`, or
            its part of the sequence where `is_sequence_split`.
        weight_VH: this rank's rows of the head; row i stands for token `vocab_start + i`.
        targets_R: int64 token ids of the whole vocabulary, in [0, vocab_size). A target that no
            rank owns gives a log-probability of -inf.
        temperature: divides the logits: the engine's sampling temperature, or a temperature for
            each row, [R] float32.
        vocab_start: token id of the first row of `weight_VH`.
        vocab_size: true size of the vocabulary; rows at and beyond it are padding: no probability,
            zero gradient.
        tp_group: ranks that hold the shards; None where `weight_VH` is whole. All its ranks must
            call, with the same rows.
        chunk_size: vocabulary rows handled at a time; bounds the memory of a tile.
        with_entropy: also return entropies, with their gradient.
        with_sum_squares: also return the sum of the squared probabilities of each row,
            without gradient.
        rows_R: int64, indices of the whole sequence; the head runs on these rows only. None means
            all rows. May be empty: the results are then empty and still carry a gradient function,
            so that backward hooks fire.
        has_repeated_rows: `rows_R` may have an index more than once; the gradients of such rows are
            added up.
        is_sequence_split: `hidden_SH` is part `tp_group.rank()` of the sequence: it is gathered,
            only the part is kept for the backward pass, and its gradient is summed over the group
            and split again.
        weight_grad_sink: the float32 buffer to which the weight's gradient is added; with None
            autograd receives the gradient, in the weight's type.
        stash_bytes: bytes of probabilities that may be kept as float16, relative to the largest of
            their row and tile, so that the backward pass need not compute the logits again. Tiles
            that do not fit are computed again. Nothing is kept where nothing needs a gradient. For
            the errors, and the logits that a CPU keeps in any case, see `tile_stash`.
        softcap: c, where logits become c tanh(logits / c) before the temperature divides them
            (Gemma 2). No probabilities are kept then, because the slope of tanh at an unlikely
            target does not follow from them.
        backend: "reference" (the specification: needs [R, V] floats), "chunked" (torch, any
            device), "triton".

    The gradient of `hidden_SH` is complete on every rank: this function sums it over `tp_group`,
    as Megatron's ColumnParallelLinear does. On a CPU rows whose upstream gradients are all zero are
    left out of the backward pass; those gradients must be the same on all ranks of the group, as
    they are wherever the loss is computed from these outputs.

    Raise ValueError for a temperature (other than a tensor on a GPU, which is not checked), softcap
    or chunk size that is not positive, for a negative stash_bytes, and for shapes that do not fit.
    """
    group = tp_group if tp_group is not None and tp_group.size() > 1 else None
    is_sequence_split = is_sequence_split and group is not None
    _check_shapes(hidden_SH, weight_VH, targets_R, rows_R, group if is_sequence_split else None)
    _check_temperature(temperature, targets_R)
    if chunk_size <= 0:
        raise ValueError(
            f"chunk_size ({chunk_size}) must be positive; 4096 or 8192 are good values."
        )
    if stash_bytes < 0:
        raise ValueError(f"stash_bytes ({stash_bytes}) must not be negative; 0 keeps nothing.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap ({softcap}) must be positive; None caps nothing.")
    if backend == "reference":
        return HeadOutputs(
            *compute_reference_log_probs(
                hidden_SH,
                weight_VH,
                targets_R,
                rows_R,
                temperature,
                vocab_start,
                vocab_size,
                group,
                is_sequence_split,
                weight_grad_sink,
                with_entropy,
                with_sum_squares,
                softcap,
            )
        )
    has_gradient = torch.is_grad_enabled() and (hidden_SH.requires_grad or weight_VH.requires_grad)
    call = HeadCallSettings(
        num_columns=min(max(vocab_size - vocab_start, 0), weight_VH.shape[0]),
        tp_group=group,
        is_sequence_split=is_sequence_split,
        has_repeated_rows=has_repeated_rows,
        chunk_size=chunk_size,
        with_entropy=with_entropy,
        with_sum_squares=with_sum_squares,
        weight_grad_sink=weight_grad_sink,
        stash_bytes=stash_bytes if softcap is None else 0,
        needs_gradient=has_gradient,
        tile_ops=_make_tile_ops(backend, softcap),
    )
    inv_temperature_R = _invert_temperature(
        temperature, targets_R, choose_accumulator_dtype(hidden_SH, weight_VH)
    )
    columns_R = targets_R - vocab_start
    return HeadOutputs(
        *compute_chunked_log_probs(hidden_SH, weight_VH, columns_R, rows_R, inv_temperature_R, call)
    )


def _make_tile_ops(backend: LogProbBackend, softcap: float | None) -> TileOps:
    """Return the operations on tiles of the backend "chunked" or "triton"; raise ValueError for any
    other name.
    """
    if backend == "chunked":
        return TorchTileOps(softcap)
    if backend == "triton":
        # it needs triton, which not every machine has
        from rlhf_megatron.ranks.kernels.log_prob_triton import TritonTileOps

        ops: TileOps = TritonTileOps(softcap)
        return ops
    raise ValueError(f"unknown backend {backend!r}; use 'chunked', 'triton' or 'reference'.")


def _invert_temperature(
    temperature: float | Tensor, targets_R: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return 1 / temperature for each row; None where the temperature is 1."""
    if isinstance(temperature, Tensor):
        return temperature.to(device=targets_R.device, dtype=dtype).reciprocal()
    if temperature == 1:
        return None
    return torch.full(targets_R.shape, 1.0 / temperature, dtype=dtype, device=targets_R.device)


def _check_temperature(temperature: float | Tensor, targets_R: Tensor) -> None:
    """Raise ValueError for a temperature that is not positive or whose shape does not fit; the
    values of a tensor on a GPU are not checked, because that would wait for the GPU.
    """
    if isinstance(temperature, Tensor):
        if temperature.shape != targets_R.shape:
            raise ValueError(
                f"temperature {tuple(temperature.shape)} must be one number, or one for each of"
                f" {len(targets_R)} rows."
            )
        # a look would make the CPU wait for the GPU
        if temperature.is_cuda or not len(temperature):
            return
        lowest = temperature.min().item()
    else:
        lowest = temperature
    if not lowest > 0:
        raise ValueError(
            f"temperature ({lowest}) must be positive; greedy sampling trains with temperature 1."
        )


def _check_shapes(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    rows_R: Tensor | None,
    sequence_group: ProcessGroup | None,
) -> None:
    """Raise ValueError where the shapes do not fit each other. `sequence_group` is the tp group
    where the sequence is split.
    """
    if hidden_SH.dim() != 2 or weight_VH.dim() != 2 or hidden_SH.shape[1] != weight_VH.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_SH.shape)} and weight {tuple(weight_VH.shape)} must be [S, H]"
            " and [V, H]."
        )
    num_tokens = hidden_SH.shape[0] * (1 if sequence_group is None else sequence_group.size())
    num_rows = num_tokens if rows_R is None else rows_R.numel()
    if targets_R.shape != (num_rows,) or (rows_R is not None and rows_R.dim() != 1):
        raise ValueError(
            f"targets {tuple(targets_R.shape)} must have one entry for each of {num_rows} rows."
        )
