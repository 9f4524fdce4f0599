"""Logits of some tokens beside the targets, and the likeliest tokens of a place, from hidden states
and the head's weight, also cut over tensor-parallel ranks. A student and a
teacher exchange these.

Products are float32 also of 16-bit operands, as in `compute_linear_log_probs`, and no [R, V] tensor
is made.
"""

# S tokens of a sequence (this tp rank's part where it is split), R rows, V vocabulary shard (with
# padding), H hidden, N chosen tokens of a row, K likeliest ones, C columns of a tile, G ranks
# of the tp group

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from rlhf_megatron.ranks.kernels.head_exchange import PendingGradientSum, gather_sequence
from rlhf_megatron.ranks.kernels.matrix_products import (
    WeightGradSink,
    choose_accumulator_dtype,
    choose_operand_dtype,
    multiply_matrices,
)

ROWS = 256  # of which the chosen rows of the weight are gathered at once, [ROWS, N, H]


@dataclass(frozen=True)
class HeadShard:
    """A rank's shard of the head and the group that shares it. The fields are as
    in `compute_linear_log_probs`.
    """

    vocab_start: int
    vocab_size: int
    tp_group: ProcessGroup | None
    is_sequence_split: bool = False
    weight_grad_sink: WeightGradSink | None = None

    @property
    def exchange_group(self) -> ProcessGroup | None:
        """Return the tp group to exchange with; None where there is nothing to exchange."""
        return self.tp_group if self.tp_group is not None and self.tp_group.size() > 1 else None

    def count_unpadded_columns(self, weight_VH: Tensor) -> int:
        """Return the number of rows of the weight that are no padding."""
        return min(max(self.vocab_size - self.vocab_start, 0), weight_VH.shape[0])

    def gather_hidden_states(self, hidden_SH: Tensor) -> Tensor:
        """Return the hidden states of all tokens, gathered over the tp group where the sequence is
        split.
        """
        return (
            gather_sequence(hidden_SH, self.exchange_group)
            if self.is_sequence_split and self.exchange_group
            else hidden_SH
        )


def compute_chosen_logits(
    hidden_SH: Tensor, weight_VH: Tensor, ids_RN: Tensor, rows_R: Tensor, shard: HeadShard
) -> Tensor:
    """Return [R, N] with grad: hidden[rows] . weight[ids], float32 (float64 for such operands), the
    same on all tp ranks. All ranks of the group must call it, with the same rows.

    `ids_RN` holds ids of the whole vocabulary, each in [0, vocab_size). The gradient of the weight
    goes to the sink, where there is one, and autograd then gets none: `compute_linear_log_probs` of
    the same rows must be in the same graph, because it marks the weight as having a gradient.
    """
    out: Tensor = _ChosenLogitsFunction.apply(hidden_SH, weight_VH, ids_RN, rows_R, shard)
    return out


class _ChosenLogitsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        ids_RN: Tensor,
        rows_R: Tensor,
        shard: HeadShard,
    ) -> Tensor:
        """Return the logits [R, N], summed over the tp group."""
        dtype = choose_accumulator_dtype(hidden_SH, weight_VH)
        is_mine_RN, places_RN = _locate_weight_rows(ids_RN, weight_VH, shard)
        hidden_RH = shard.gather_hidden_states(hidden_SH).index_select(0, rows_R)
        out_RN = torch.zeros(ids_RN.shape, dtype=dtype, device=hidden_SH.device)
        for rows in _split_row_blocks(len(rows_R)):
            chosen_RNH = weight_VH[places_RN[rows]].to(dtype)
            out_RN[rows] = (
                torch.bmm(chosen_RNH, hidden_RH[rows, :, None].to(dtype))[..., 0] * is_mine_RN[rows]
            )
        if shard.exchange_group is not None and len(rows_R):
            # the others' are zero: nothing is rounded
            dist.all_reduce(out_RN, group=shard.exchange_group)
        ctx.save_for_backward(hidden_SH, weight_VH, ids_RN, rows_R)
        ctx.shard = shard
        return out_RN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the hidden states and, without a sink, of the weight; with a sink
        add the weight's gradient to its buffer.
        """
        hidden_SH, weight_VH, ids_RN, rows_R = ctx.saved_tensors
        shard: HeadShard = ctx.shard
        dtype = choose_accumulator_dtype(hidden_SH, weight_VH)
        is_mine_RN, places_RN = _locate_weight_rows(ids_RN, weight_VH, shard)
        grad_RN = grad_RN.to(dtype) * is_mine_RN
        whole_SH = shard.gather_hidden_states(hidden_SH)
        to_hidden_SH = torch.zeros(whole_SH.shape, dtype=dtype, device=whole_SH.device)
        buffer_VH = None
        if ctx.needs_input_grad[1]:
            own = (
                torch.zeros(weight_VH.shape, dtype=dtype, device=weight_VH.device)
                if shard.weight_grad_sink is None
                else None
            )
            buffer_VH = (
                own if shard.weight_grad_sink is None else shard.weight_grad_sink.get_buffer_VH()
            )
        for rows in _split_row_blocks(len(rows_R)):
            chosen_RNH = weight_VH[places_RN[rows]].to(dtype)
            to_hidden_SH.index_add_(
                0, rows_R[rows], torch.bmm(grad_RN[rows, None], chosen_RNH)[:, 0]
            )
            if buffer_VH is not None:
                hidden_RH = whole_SH.index_select(0, rows_R[rows]).to(dtype)
                products_MH = (grad_RN[rows, :, None] * hidden_RH[:, None]).flatten(0, 1)
                buffer_VH.index_add_(0, places_RN[rows].flatten(), products_MH.to(buffer_VH.dtype))
        group = shard.exchange_group if len(rows_R) else None
        if group is None and shard.is_sequence_split:
            to_hidden_SH = to_hidden_SH[: hidden_SH.shape[0]]  # no rows, or one rank
        hidden_grad = (
            PendingGradientSum.start_reduction(to_hidden_SH, group, shard.is_sequence_split)
            .wait_for_sum()
            .to(hidden_SH.dtype)
        )
        weight_grad = (
            buffer_VH.to(weight_VH.dtype)
            if buffer_VH is not None and shard.weight_grad_sink is None
            else None
        )
        return hidden_grad, weight_grad, None, None, None


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap x tanh(logits / softcap), or the logits themselves where `softcap` is None."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


@torch.no_grad()
def find_likeliest_tokens(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    top_k: int,
    rows_R: Tensor,
    shard: HeadShard,
    temperature: float = 1.0,
    chunk_size: int = 8192,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ([R, K] int64 ids, [R, K] float32 log-probs) of the `top_k` likeliest tokens of
    softmax(logits / temperature), the likeliest first, the same on all tp ranks, which must all
    call it. float64 operands give float64 log-probs.

    `chunk_size` is the number of vocabulary columns handled at a time. `softcap` is as in
    `compute_linear_log_probs`. Raise ValueError where the vocabulary has fewer than `top_k` tokens.
    """
    if top_k > shard.vocab_size:
        raise ValueError(
            f"top_k ({top_k}) must be at most the vocabulary's {shard.vocab_size} tokens; use 16."
        )
    hidden_RH = shard.gather_hidden_states(hidden_SH).index_select(0, rows_R)
    operand = choose_operand_dtype(hidden_RH, weight_VH)
    dtype = choose_accumulator_dtype(hidden_RH, weight_VH)
    hidden_RH = hidden_RH.to(operand)
    best_RK = torch.full((len(rows_R), top_k), -torch.inf, dtype=dtype, device=hidden_RH.device)
    ids_RK = torch.zeros(best_RK.shape, dtype=torch.int64, device=hidden_RH.device)
    log_z_R1 = best_RK.new_full((len(rows_R), 1), -torch.inf)
    num_columns = shard.count_unpadded_columns(weight_VH)
    for first in range(0, num_columns, chunk_size):
        tile_CH = weight_VH[first : min(first + chunk_size, num_columns)].to(operand)
        logits_RC = best_RK.new_empty(len(rows_R), len(tile_CH))
        logits_RC = apply_softcap(multiply_matrices(hidden_RH, tile_CH.T, logits_RC), softcap).div_(
            temperature
        )
        log_z_R1 = torch.logaddexp(log_z_R1, logits_RC.logsumexp(-1, keepdim=True))
        tile_best_RK, at_RK = logits_RC.topk(min(top_k, len(tile_CH)), -1)
        best_RK, ids_RK = _select_top_k_tokens(
            torch.cat([best_RK, tile_best_RK], -1),
            torch.cat([ids_RK, at_RK + shard.vocab_start + first], -1),
            top_k,
        )
    if shard.exchange_group is not None and len(rows_R):
        (best_RK, ids_RK), log_z_R1 = _merge_shard_candidates(
            best_RK, ids_RK, log_z_R1, shard.exchange_group
        )
    return ids_RK, (best_RK - log_z_R1).to(torch.promote_types(torch.float32, dtype))


def _merge_shard_candidates(
    best_RK: Tensor, ids_RK: Tensor, log_z_R1: Tensor, tp_group: ProcessGroup
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return ((best values [R, K], their ids [R, K]), the log of the sum over the whole vocabulary
    [R, 1]) from the candidates of all shards. All ranks must call it; it makes one exchange,
    without rounding ids.
    """
    count = best_RK.shape[1]
    num_ranks = tp_group.size()
    # double holds all ids and floats
    mine = torch.cat([best_RK.double(), ids_RK.double(), log_z_R1.double()], -1)
    gathered = mine.new_empty(num_ranks * mine.shape[0], mine.shape[1])
    dist.all_gather_into_tensor(gathered, mine, group=tp_group)
    by_rank = gathered.view(num_ranks, *mine.shape).transpose(0, 1)  # [R, G, 2 K + 1]
    values = by_rank[..., :count].flatten(1).to(best_RK.dtype)
    ids = by_rank[..., count : 2 * count].flatten(1).long()
    return _select_top_k_tokens(values, ids, count), by_rank[..., -1].logsumexp(
        -1, keepdim=True
    ).to(best_RK.dtype)


def _select_top_k_tokens(values_RC: Tensor, ids_RC: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return the `top_k` largest values of each row and their ids."""
    best_RK, at_RK = values_RC.topk(top_k, -1)
    return best_RK, ids_RC.gather(-1, at_RK)


def _locate_weight_rows(
    ids_RN: Tensor, weight_VH: Tensor, shard: HeadShard
) -> tuple[Tensor, Tensor]:
    """Return (whether this shard has each token, the token's row in the weight, or 0 where the
    shard lacks the token).
    """
    places_RN = ids_RN - shard.vocab_start
    is_mine_RN = (places_RN >= 0) & (places_RN < shard.count_unpadded_columns(weight_VH))
    return is_mine_RN, places_RN.where(is_mine_RN, 0)


def _split_row_blocks(num_rows: int) -> list[slice]:
    """Return slices of ROWS rows each that cover all rows."""
    return [slice(first, first + ROWS) for first in range(0, num_rows, ROWS)]
