"""The specification of `compute_linear_log_probs`: plain torch, whole vocabulary,
autograd for the gradient.

Materialises [R, V]; for tests, for the self-check and for reading. Feed float64 to get one of
reference quality. Under tensor parallelism it gathers the logits of all shards.
"""

# S tokens of a sequence (this rank's part where it is split), R rows, V vocabulary shard (with
# padding), H hidden

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rlhf_megatron.ranks.kernels.head_exchange import gather_sequence
from rlhf_megatron.ranks.kernels.matrix_products import WeightGradSink, choose_accumulator_dtype


def compute_reference_log_probs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    targets_R: Tensor,
    rows_R: Tensor | None,
    temperature: float | Tensor,
    vocab_start: int,
    vocab_size: int,
    tp_group: ProcessGroup | None,
    is_sequence_split: bool,
    weight_grad_sink: WeightGradSink | None,
    with_entropy: bool,
    with_sum_squares: bool,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return (log p at the targets, the entropy H = -sum p log p in nats or None, sum p^2 or None)
    with p = softmax(logits / temperature) over the columns that are no padding, and logits =
    hidden[rows] @ weight.T, or softcap x tanh(logits / softcap).

    Results are computed and returned in float32, or in float64 for float64 inputs. Raise ValueError
    when the weight does not begin at token 0 and there is no `tp_group`.
    """
    dtype = choose_accumulator_dtype(hidden_SH, weight_VH)
    if tp_group is None and vocab_start != 0:
        raise ValueError(
            f"vocab_start ({vocab_start}) must be 0: without a tp_group the reference takes a"
            " whole weight."
        )
    if weight_grad_sink is not None:
        weight_VH = _route_gradient_to_sink(weight_VH, weight_grad_sink)
    if tp_group is not None:
        hidden_SH = _gather_whole_sequence(hidden_SH, tp_group, is_sequence_split)
    hidden_RH = hidden_SH if rows_R is None else hidden_SH.index_select(0, rows_R)
    num_columns = min(max(vocab_size - vocab_start, 0), weight_VH.shape[0])
    logits_RV = hidden_RH.to(dtype) @ weight_VH[:num_columns].to(dtype).T
    if tp_group is not None:
        logits_RV = _gather_whole_vocabulary(logits_RV, vocab_start, tp_group)
    if softcap is not None:
        logits_RV = (logits_RV / softcap).tanh() * softcap
    z_RV = logits_RV / (
        temperature.to(dtype)[:, None] if isinstance(temperature, Tensor) else temperature
    )
    log_p_RV = z_RV.log_softmax(-1)
    is_owned_R = targets_R < z_RV.shape[1]
    found_R = log_p_RV.gather(-1, torch.where(is_owned_R, targets_R, 0)[:, None])[:, 0]
    log_probs_R = torch.where(is_owned_R, found_R, -torch.inf)
    entropies_R = -(log_p_RV.exp() * log_p_RV).sum(-1) if with_entropy else None
    sum_squares_R = (2 * log_p_RV.detach()).exp().sum(-1) if with_sum_squares else None
    return log_probs_R, entropies_R, sum_squares_R


def _gather_whole_sequence(
    hidden_SH: Tensor, tp_group: ProcessGroup, is_sequence_split: bool
) -> Tensor:
    """Return the hidden states of all tokens; their gradient is summed over the group, and split
    again where the sequence is split.
    """
    out: Tensor = _GatherWholeSequence.apply(hidden_SH, tp_group, is_sequence_split)
    return out


class _GatherWholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_SH: Tensor, tp_group: ProcessGroup, is_sequence_split: bool
    ) -> Tensor:
        """Return the whole sequence, gathered where it is split."""
        ctx.tp_group = tp_group
        ctx.is_split = is_sequence_split
        return (
            gather_sequence(hidden_SH, tp_group)
            if is_sequence_split
            else hidden_SH.view_as(hidden_SH)
        )

    @staticmethod
    def backward(ctx: Any, grad_SH: Tensor) -> tuple[Tensor, None, None]:
        """Return this rank's part of the gradient summed over the group."""
        total = grad_SH.to(torch.promote_types(grad_SH.dtype, torch.float32), copy=True)
        dist.all_reduce(total, group=ctx.tp_group)
        if ctx.is_split:
            total = total.chunk(ctx.tp_group.size())[ctx.tp_group.rank()]
        return total.to(grad_SH.dtype), None, None


def _gather_whole_vocabulary(logits_RC: Tensor, vocab_start: int, tp_group: ProcessGroup) -> Tensor:
    """Return the logits of all shards side by side. Every rank receives the whole gradient and
    takes its own part.
    """
    out: Tensor = _GatherWholeVocabulary.apply(logits_RC, vocab_start, tp_group)
    return out


class _GatherWholeVocabulary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_RC: Tensor, vocab_start: int, tp_group: ProcessGroup) -> Tensor:
        """Return the logits [R, V] of all shards, each shard's columns from `vocab_start` on."""
        ctx.columns = slice(vocab_start, vocab_start + logits_RC.shape[1])
        end = torch.tensor([ctx.columns.stop if logits_RC.shape[1] else 0], device=logits_RC.device)
        dist.all_reduce(end, dist.ReduceOp.MAX, group=tp_group)
        whole_RV = logits_RC.new_zeros(logits_RC.shape[0], int(end.item()))
        whole_RV[:, ctx.columns] = logits_RC
        # the others' columns are zero here: nothing is rounded
        dist.all_reduce(whole_RV, group=tp_group)
        return whole_RV

    @staticmethod
    def backward(ctx: Any, grad_RV: Tensor) -> tuple[Tensor, None, None]:
        """Return this shard's columns of the gradient."""
        return grad_RV[:, ctx.columns], None, None


def _route_gradient_to_sink(weight_VH: Tensor, weight_grad_sink: WeightGradSink) -> Tensor:
    """Return the weight with its gradient redirected: the backward pass adds it to the sink's
    buffer.
    """
    out: Tensor = _RouteGradientToSink.apply(weight_VH, weight_grad_sink)
    return out


class _RouteGradientToSink(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, weight_grad_sink: WeightGradSink) -> Tensor:
        """Return a view of the weight."""
        ctx.weight_grad_sink = weight_grad_sink
        return weight_VH.view_as(weight_VH)

    @staticmethod
    def backward(ctx: Any, grad_VH: Tensor) -> tuple[Tensor | None, None]:
        """Add the gradient to the sink's buffer, and return the sink's stand-in for autograd."""
        ctx.weight_grad_sink.get_buffer_VH().add_(grad_VH)
        return ctx.weight_grad_sink.make_autograd_gradient(), None
