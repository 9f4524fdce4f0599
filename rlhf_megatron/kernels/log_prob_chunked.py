"""`linear_log_prob` in vocabulary chunks: plain GEMMs and one-pass row statistics, recomputed in the backward pass.

For each row the forward keeps four numbers over the columns seen so far, z = logit / temperature (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867, extended by the entropy's sum):

    m = max z      s = sum e^(z-m)      b = sum (z-m) e^(z-m)      g = z at the target
    log p(target) = g - m - log s       H = log s - b / s

and the backward, with p = e^(z - m - log s) and upstream gradients u (log-prob) and w (entropy):

    d loss / d z_j = u (1[j = target] - p_j) - w p_j (log p_j + H)

A tile is [R rows, C columns]; the vocabulary is the outer loop, so that each row of the weight's gradient is written
once. Under tensor parallelism one all-gather of the packed [4, T] statistics is the only exchange of the forward, and
one all-reduce of the hidden states' gradient the only one of the backward.
"""

# T tokens, R rows of a tile, V vocabulary shard (with padding), C columns of a tile, H hidden, G ranks of the tp group

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_MIN = -1e30  # running maximum before the first column: finite, so that a shard of padding only combines to 0, not NaN
_ROWS = {
    "cpu": 512,
    "cuda": 8192,
}  # rows of a tile: cache-sized on a CPU; on a GPU enough to keep the GEMM at full rate
_HAS_MM_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def chunked_linear_log_prob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    temperature: float,
    vocab_start: int,
    vocab_size: int,
    tp_group: ProcessGroup | None,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """See `log_prob.linear_log_prob`, which checks the arguments."""
    num_columns = min(max(vocab_size - vocab_start, 0), weight_VH.shape[0])  # the rest of the shard is padding
    out: tuple[Tensor, Tensor | None] = _LinearLogProb.apply(
        hidden_TH,
        weight_VH,
        targets_T - vocab_start,
        1.0 / temperature,
        num_columns,
        tp_group,
        chunk_size,
        with_entropy,
    )  # type: ignore[no-untyped-call]
    return out


class _LinearLogProb(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        columns_T: Tensor,
        inv_temperature: float,
        num_columns: int,
        tp_group: ProcessGroup | None,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """`columns_T`: the target's column in this shard; outside of [0, num_columns) where another shard has it."""
        stats_4T = _local_statistics(
            hidden_TH, weight_VH, columns_T, inv_temperature, num_columns, chunk_size, with_entropy
        )
        if tp_group is not None and hidden_TH.shape[0] > 0:
            stats_4T = _combine(stats_4T, tp_group)
        max_T, sum_T, weighted_T, target_T = stats_4T
        log_sum_T = sum_T.log()
        log_z_T = max_T + log_sum_T
        entropies_T = log_sum_T - weighted_T / sum_T if with_entropy else None
        ctx.save_for_backward(hidden_TH, weight_VH, columns_T, log_z_T, entropies_T)
        ctx.inv_temperature, ctx.num_columns = inv_temperature, num_columns
        ctx.tp_group, ctx.chunk_size = tp_group, chunk_size
        ctx.set_materialize_grads(False)
        return (target_T - max_T) - log_sum_T, entropies_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs_T: Tensor | None, grad_entropies_T: Tensor | None) -> tuple[Any, ...]:
        hidden_TH, weight_VH, columns_T, log_z_T, entropies_T = ctx.saved_tensors
        grad_T = torch.zeros_like(log_z_T) if grad_log_probs_T is None else grad_log_probs_T * ctx.inv_temperature
        grad_entropies_T = None if grad_entropies_T is None else grad_entropies_T * ctx.inv_temperature
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_TH = torch.zeros_like(hidden_TH, dtype=log_z_T.dtype) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        for first, last, weight_CH in _weight_chunks(weight_VH, ctx.num_columns, ctx.chunk_size):
            grad_chunk_CH = None
            for rows in _row_blocks(hidden_TH):
                hidden_RH = _operand(hidden_TH[rows])
                z_RC = _matmul(hidden_RH, weight_CH.T).mul_(ctx.inv_temperature)
                grad_RC = _grad_logits(
                    z_RC.sub_(log_z_T[rows, None]),
                    columns_T[rows] - first,
                    grad_T[rows],
                    None if entropies_T is None else entropies_T[rows],
                    None if grad_entropies_T is None else grad_entropies_T[rows],
                ).to(hidden_RH.dtype)
                if grad_hidden_TH is not None:
                    grad_hidden_TH[rows] += _matmul(grad_RC, weight_CH)
                if grad_weight_VH is not None:
                    part_CH = _matmul(grad_RC.T, hidden_RH)
                    grad_chunk_CH = part_CH if grad_chunk_CH is None else grad_chunk_CH.add_(part_CH)
            if grad_weight_VH is not None and grad_chunk_CH is not None:
                grad_weight_VH[first:last] = grad_chunk_CH
        if grad_hidden_TH is not None:
            if ctx.tp_group is not None and hidden_TH.shape[0] > 0:
                dist.all_reduce(grad_hidden_TH, group=ctx.tp_group)
            grad_hidden_TH = grad_hidden_TH.to(hidden_TH.dtype)
        return grad_hidden_TH, grad_weight_VH, None, None, None, None, None, None


def _local_statistics(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    columns_T: Tensor,
    inv_temperature: float,
    num_columns: int,
    chunk_size: int,
    with_entropy: bool,
) -> Tensor:
    """[4, T]: m, s, b (0 unless `with_entropy`) and g (-inf where another shard has the target) of this shard."""
    dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
    stats_4T = torch.zeros(4, hidden_TH.shape[0], dtype=dtype, device=hidden_TH.device)
    stats_4T[0] = _MIN
    stats_4T[3] = -torch.inf
    for first, last, weight_CH in _weight_chunks(weight_VH, num_columns, chunk_size):
        for rows in _row_blocks(hidden_TH):
            z_RC = _matmul(_operand(hidden_TH[rows]), weight_CH.T).mul_(inv_temperature)
            max_R, sum_R, weighted_R, target_R = stats_4T[:, rows]
            column_R = columns_T[rows] - first
            is_here_R = (column_R >= 0) & (column_R < last - first)
            found_R = z_RC.gather(1, column_R.clamp(0, last - first - 1)[:, None])[:, 0]
            target_R.copy_(torch.where(is_here_R, found_R, target_R))

            new_max_R = torch.maximum(max_R, z_RC.amax(1))
            shift_R = max_R - new_max_R
            scale_R = shift_R.exp()
            z_RC.sub_(new_max_R[:, None])
            if with_entropy:
                exp_RC = z_RC.exp()
                weighted_R.add_(shift_R * sum_R).mul_(scale_R).add_(z_RC.mul_(exp_RC).sum(1))
            else:
                exp_RC = z_RC.exp_()
            sum_R.mul_(scale_R).add_(exp_RC.sum(1))
            max_R.copy_(new_max_R)
    return stats_4T


def _combine(stats_4T: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Statistics of the whole vocabulary. Summed in rank order everywhere: equal bits on all ranks."""
    gathered = stats_4T.new_empty(tp_group.size() * 4, stats_4T.shape[1])
    dist.all_gather_into_tensor(gathered, stats_4T, group=tp_group)
    max_GT, sum_GT, weighted_GT, target_GT = gathered.view(tp_group.size(), *stats_4T.shape).unbind(1)
    max_T = max_GT.amax(0)
    shift_GT = max_GT - max_T
    scale_GT = shift_GT.exp()
    sum_T = (sum_GT * scale_GT).sum(0)
    weighted_T = ((weighted_GT + shift_GT * sum_GT) * scale_GT).sum(0)
    return torch.stack([max_T, sum_T, weighted_T, target_GT.amax(0)])


def _grad_logits(
    log_p_RC: Tensor, column_R: Tensor, grad_R: Tensor, entropy_R: Tensor | None, grad_entropy_R: Tensor | None
) -> Tensor:
    """d loss / d z of one tile, made in place of `log_p_RC`; `column_R`: the target's column, or outside of it."""
    if entropy_R is None or grad_entropy_R is None:
        grad_RC = log_p_RC.exp_().mul_(-grad_R[:, None])
    else:
        p_RC = log_p_RC.exp()
        grad_RC = log_p_RC.add_(entropy_R[:, None]).mul_(-grad_entropy_R[:, None]).sub_(grad_R[:, None]).mul_(p_RC)
    num_columns = log_p_RC.shape[1]
    is_here_R = (column_R >= 0) & (column_R < num_columns)
    index_R1 = column_R.clamp(0, num_columns - 1)[:, None]
    at_target_R1 = grad_RC.gather(1, index_R1) + torch.where(is_here_R, grad_R, 0.0)[:, None]
    return grad_RC.scatter_(1, index_R1, at_target_R1)


def _weight_chunks(weight_VH: Tensor, num_columns: int, chunk_size: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first, last, weight rows first:last as a GEMM operand) over the rows that are not padding."""
    for first in range(0, num_columns, chunk_size):
        last = min(first + chunk_size, num_columns)
        yield first, last, _operand(weight_VH[first:last])


def _row_blocks(hidden_TH: Tensor) -> Iterator[slice]:
    num_rows = hidden_TH.shape[0]
    size = _ROWS.get(hidden_TH.device.type, num_rows or 1)
    for first in range(0, num_rows, size):
        yield slice(first, min(first + size, num_rows))


def _operand(x: Tensor) -> Tensor:
    """As it goes into a GEMM with a float32 result: 16-bit only where the device keeps the float32 accumulator."""
    if x.dtype in (torch.bfloat16, torch.float16) and not (x.is_cuda and _HAS_MM_OUT_DTYPE):
        return x.float()
    return x


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with the accumulator's precision: rounding logits to bfloat16 costs 2e-2 in the log-probability."""
    if a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b
