"""Spreads the samples of a call over replicas and packs them into micro-batches. Pure integers, on
the controller.

    plan_replicas(lengths=[5, 3, 4], num_replicas=2, token_budget=6)
        replica 0: samples (0, 1)    micro_batches ((0,), (1,))    packed_length 5
        replica 1: samples (2, -1)   micro_batches ((0,), (1,))    packed_length 5
                                     -1: a no-op sample

The caller sends `take_replica_shard(batch, plan)` to each replica and puts what comes back together
with `restore_sample_order`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhf_megatron.data import codec
from rlhf_megatron.data.batch import (
    Batch,
    TokenBatch,
    TokenColumns,
    concat_batches,
    iterate_columns,
    select_samples,
)
from rlhf_megatron.data.bin_packing import (
    MAX_EVEN_IMBALANCE,
    ReplicaShare,
    compute_imbalance,
    pack_documents,
    sum_replica_costs,
)
from rlhf_megatron.data.shared_prompts import PromptUnit, SamplePrompts, split_into_prompt_units

Columns = TypeVar("Columns", bound=TokenColumns)
NO_OP = -1
NO_OP_LENGTH = 2  # one prompt token, one response token that is not in the mask


@codec.register("ReplicaPlan")
@dataclass(frozen=True)
class ReplicaPlan:
    """One replica's share of a call.

    A micro-batch shorter than `packed_length` is filled with masked tokens where all must be
    of one length.
    """

    # indices into the whole batch, in the order of the shard; no-op samples (-1) come last
    samples: tuple[int, ...]
    # indices into the shard; as many for every replica; none is empty
    micro_batches: tuple[tuple[int, ...], ...]
    # tokens that every micro-batch of this call, on every replica, fits in; a packed_multiple
    packed_length: int


def plan_replicas(
    lengths: Sequence[int],
    num_replicas: int,
    token_budget: int,
    document_multiple: int = 1,
    packed_multiple: int = 1,
    micro_batch_multiple: int = 1,
    attention_length: int = 24576,
    sample_prompts: SamplePrompts | None = None,
) -> tuple[ReplicaPlan, ...]:
    """Spread samples of the given lengths (tokens) over replicas and pack them into micro-batches.
    Return the plan of each replica. The same input gives the same plan.

    Replicas get the same number of micro-batches (as few as `bin_packing` finds) and loads balanced
    by cost; micro-batches are of even length where that allows it, so that little is padded up to
    the longest. `attention_length` is the number of tokens at which attention scores cost as much
    as everything else (about 12 x hidden size): a document of n tokens costs n * (attention_length
    + n).

    `token_budget`: tokens of a micro-batch of one replica, over all its context-parallel ranks.
    Each document is padded to a multiple of `document_multiple`, each micro-batch to one of
    `packed_multiple`, both within the budget; each replica has a multiple of `micro_batch_multiple`
    micro-batches (`weights.parallel_layout.ParallelLayout` says why). Where there are fewer samples
    than micro-batches, the rest hold a no-op sample each: index -1, two tokens, masked out, of zero
    weight.

    `sample_prompts`: given where samples share prompts. Then the samples of a prompt stay together,
    in as many parts as make the dearest replica cheapest; `document_multiple` must be 1.

    Raise ValueError when a sample alone is over the budget.
    """
    assert num_replicas >= 1 and document_multiple >= 1 and micro_batch_multiple >= 1
    assert sample_prompts is None or document_multiple == 1, (
        "context-parallel ranks share no prompt: config.rules.layouts"
    )
    packed_multiple = math.lcm(packed_multiple, document_multiple)
    _check_token_budget(lengths, token_budget, packed_multiple, is_pooled=document_multiple > 1)
    room = token_budget // packed_multiple * packed_multiple

    units: list[PromptUnit] | None = None
    if sample_prompts is None:
        padded = [_round_up(length, document_multiple) for length in lengths]
        costs = [length * (attention_length + length) for length in padded]
        shares = pack_documents(padded, costs, num_replicas, micro_batch_multiple, room)
    else:
        units, shares = _pack_by_prompt(
            lengths, sample_prompts, attention_length, num_replicas, micro_batch_multiple, room
        )
    longest = max(
        micro_batch.length or _round_up(NO_OP_LENGTH, document_multiple)
        for micro_batch in chain(*shares)
    )
    packed_length = _round_up(longest, packed_multiple)
    return tuple(_make_replica_plan(share, units, packed_length) for share in shares)


def take_replica_shard(batch: Batch, plan: ReplicaPlan) -> Batch:
    """Return the shard of one replica: the samples of `plan.samples`, in that order, no-op samples
    included.

    Every column of a no-op sample is zero, False or "".
    """
    real = [sample for sample in plan.samples if sample != NO_OP]
    num_no_ops = len(plan.samples) - len(real)
    assert all(sample == NO_OP for sample in plan.samples[len(real) :]), (
        "no-op samples must come last"
    )
    shard = select_samples(batch, real)
    return (
        concat_batches([shard, *[_make_no_op_sample(batch)] * num_no_ops]) if num_no_ops else shard
    )


def encode_replica_shard(batch: TokenBatch, plan: ReplicaPlan) -> codec.MessagePieces:
    """Return `take_replica_shard` as the bytes of a message, without copying long columns."""
    return codec.encode_message_pieces(
        take_replica_shard(batch, plan)
        if NO_OP in plan.samples
        else select_samples(batch, plan.samples, codec.ColumnRuns)
    )


def restore_sample_order(
    replica_results: Sequence[Columns], plans: Sequence[ReplicaPlan], offsets: Tensor
) -> Columns:
    """Undo `take_replica_shard` on the results of all replicas: drop the no-op samples and return
    columns in the order of the whole batch. `offsets`: the offsets of the whole batch.
    """
    borders = offsets.tolist()
    new: dict[str, Tensor] = {}
    for name, _, first in iterate_columns(replica_results[0]):
        whole = first.new_empty(borders[-1], *first.shape[1:])
        for part, plan in zip(replica_results, plans, strict=True):
            column = getattr(part, name)
            begin = 0
            for sample in plan.samples:
                if sample == NO_OP:
                    begin += NO_OP_LENGTH
                    continue
                start = borders[sample]
                stop = borders[sample + 1]
                whole.numpy()[start:stop] = column.numpy()[begin : begin + stop - start]
                begin += stop - start
            assert len(column) == begin, f"{len(column)} results for {begin} tokens of a replica"
        new[name] = whole
    return replace(replica_results[0], **new)


def _round_up(length: int, multiple: int) -> int:
    """Return `length` rounded up to a multiple."""
    return -(-length // multiple) * multiple


def _check_token_budget(
    lengths: Sequence[int], token_budget: int, packed_multiple: int, is_pooled: bool
) -> None:
    """Raise ValueError where a sample, padded to `packed_multiple`, is over the budget, or not even
    a no-op sample fits. `is_pooled`: the budget is that of several context-parallel ranks, which
    the message says.
    """
    setting = "actor.ppo_max_token_len_per_gpu" + (" x context_parallel_size" if is_pooled else "")
    for index, length in enumerate(lengths):
        assert length >= 1, f"sample {index} has {length} tokens"
        needed = _round_up(length, packed_multiple)
        if needed > token_budget:
            padded = (
                f" ({needed} after padding to a multiple of {packed_multiple})"
                if needed != length
                else ""
            )
            raise ValueError(
                f"sample {index} has {length} tokens{padded}, over the budget of {token_budget}"
                f" tokens a micro-batch; raise {setting} to"
                f" {_round_up(max(lengths), packed_multiple)} or more, or lower"
                " data.max_prompt_length or data.max_response_length."
            )
    if token_budget < _round_up(NO_OP_LENGTH, packed_multiple):
        raise ValueError(
            f"the budget of {token_budget} tokens a micro-batch ({setting}) must be at least "
            f"{_round_up(NO_OP_LENGTH, packed_multiple)} in this layout; raise it."
        )


def _pack_by_prompt(
    lengths: Sequence[int],
    sample_prompts: SamplePrompts,
    attention_length: int,
    num_replicas: int,
    bins_multiple: int,
    bin_capacity: int,
) -> tuple[list[PromptUnit], list[ReplicaShare]]:
    """Split each prompt's samples into 1, 2, 4, ... units until the replicas are even or get no
    better, and pack the units. Return the units and the bins of each replica, which hold indices of
    units. `attention_length`: as in `plan_replicas`.
    """
    best: tuple[list[PromptUnit], list[ReplicaShare]] | None = None
    num_parts = 1
    while num_parts <= max(1, len(lengths)):
        units = list(
            split_into_prompt_units(
                lengths, sample_prompts, num_parts, bin_capacity, attention_length
            )
        )
        shares = pack_documents(
            [unit.length for unit in units],
            [unit.cost for unit in units],
            num_replicas,
            bins_multiple,
            bin_capacity,
        )
        if best is not None and max(sum_replica_costs(shares)) >= max(sum_replica_costs(best[1])):
            break
        best = (units, shares)
        num_parts = 2 * num_parts
        if compute_imbalance(shares) <= MAX_EVEN_IMBALANCE:
            break
    assert best is not None
    return best


def _make_replica_plan(
    replica_share: ReplicaShare, units: Sequence[PromptUnit] | None, packed_length: int
) -> ReplicaPlan:
    """Return a replica's micro-batches, the dearest first, as its plan. An empty micro-batch, which
    comes last, holds one no-op sample. `units`: the units that the bins hold; None: the bins hold
    samples.
    """
    samples: list[int] = []
    micro_batches = []
    for micro_batch in replica_share:
        held = micro_batch.documents
        if units is not None:
            held = tuple(sample for unit in held for sample in units[unit].samples)
        held = held or (NO_OP,)
        micro_batches.append(tuple(range(len(samples), len(samples) + len(held))))
        samples += held
    return ReplicaPlan(tuple(samples), tuple(micro_batches), packed_length)


def _make_no_op_sample(batch: Batch) -> Batch:
    """Return one sample of `batch`'s type and columns that trains nothing."""
    new: dict[str, Any] = {"offsets": torch.tensor([0, NO_OP_LENGTH], dtype=torch.int64)}
    for name, axis, value in iterate_columns(batch):
        count = NO_OP_LENGTH if axis == "token" else 1
        if isinstance(value, Tensor):
            new[name] = value.new_zeros((count, *value.shape[1:]))
        elif isinstance(value, dict):
            new[name] = {
                key: column.new_zeros((count, *column.shape[1:])) for key, column in value.items()
            }
        else:
            new[name] = ("",) * count
    return replace(batch, **new)
