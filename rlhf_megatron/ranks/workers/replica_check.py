"""Do the ranks that hold the same tensors hold the same bits? Digests, compared within each group
of such ranks.

What is compared: every parameter over data and context parallel ranks, that of an expert over the
ranks that hold the same experts; those that tensor parallelism does not split (norms, a value head)
over its ranks; a tied embedding between first and last pipeline stage; moments and float32
parameters alike, where they are replicated: a distributed optimizer shares them out over
data-parallel ranks.

A difference is one bit. Nothing that Megatron does makes replicas differ: what they add up comes
out of an all-reduce.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp

from rlhf_megatron.ranks.checkpoint.model_weights import (
    collect_named_parameters,
    collect_named_weights,
)
from rlhf_megatron.ranks.models.output_heads import get_head_weight
from rlhf_megatron.ranks.parallel.mcore_fixes import is_expert_parameter
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.megatron_optimizer import MegatronStepOptimizer
from rlhf_megatron.ranks.workers.nonfinite import find_bad_tensors
from rlhf_megatron.ranks.workers.optimizer_state import iterate_parameter_states
from rlhf_megatron.ranks.workers.rank_reports import ReplicaDifference, ReplicaReport

SCHEDULE_ENTRY = "schedule"  # stands for the optimizer's schedules among the names of tensors
MAX_MEASURED_DIFFERENCES = 8  # differences of which the size is found out
_WORD = 8  # bytes
_ROW = 8192  # words that share a factor
_FACTOR = -7046029254386353131  # odd: what is multiplied by it stays distinct modulo 2^64
_POSITIVE = (1 << 62) - 1
_ABSENT = -(1 << 62)


def compute_tensor_digest(tensor: Tensor) -> Tensor:
    """Return a digest, [] int64 on the tensor's device: the sum mod 2^64 of the tensor's 64-bit
    words, with another factor for each row of words.

    Any change within one word changes the digest. The speed is the speed of reading the memory.
    """
    data = tensor.detach().contiguous().view(-1)
    if data.data_ptr() % _WORD or data.storage_offset() * data.element_size() % _WORD:
        data = data.clone()
    data = data.view(torch.uint8)
    end = data.numel() // _WORD * _WORD
    words = data[:end].view(torch.int64)
    tail = (
        data[end:]
        .to(torch.int64)
        .mul(torch.arange(1, data.numel() - end + 1, device=data.device))
        .sum()
    )
    whole = words.numel() // _ROW * _ROW
    rows = torch.cat(
        [words[:whole].view(whole // _ROW, _ROW).sum(1), words[whole:].sum()[None], tail[None]]
    )
    factors = torch.arange(1, rows.numel() + 1, device=data.device).mul_(2).add_(1).mul_(_FACTOR)
    return rows.mul_(factors).sum()


def compare_replicas(
    chunks: Sequence[nn.Module], optimizer: MegatronStepOptimizer, world: World
) -> ReplicaReport:
    """Compare the tensors that this rank holds alike with other ranks, and return the report; the
    first rank of a group reports its differences. All ranks of the pool must call it, with
    parameters gathered.
    """
    start = time.monotonic()
    parameters = collect_named_parameters(chunks)
    weights = collect_named_weights(chunks)
    whole, shards = _collect_optimizer_state(parameters, optimizer)
    tensors = {
        **weights,
        **whole,
        **shards,
        SCHEDULE_ENTRY: _make_schedule_tensor(optimizer, world),
    }
    unsplit = {
        name
        for name, weight in weights.items()
        if not getattr(weight, "tensor_model_parallel", False)
    }
    copied = [*weights, *whole, SCHEDULE_ENTRY]
    of_experts = [name for name in copied if is_expert_parameter(name)]
    groups = {
        "data parallel": (
            world.dp_cp_group,
            [name for name in copied if not is_expert_parameter(name)],
        ),
        "expert data parallel": (world.expert_dp_group, of_experts),
        "tensor parallel": (
            world.tp_group,
            [name for name in tensors if name.split(" ")[0] in {*unsplit, SCHEDULE_ENTRY}],
        ),
    }
    groups = {
        what: found
        for what, found in groups.items()
        if found[1] and dist.get_world_size(found[0]) > 1
    }
    compared = dict.fromkeys(name for _, names in groups.values() for name in names)
    comparison = _GroupComparison(
        world, tensors, {name: compute_tensor_digest(tensors[name]) for name in compared}
    )
    differences = [
        difference
        for what, (group, names) in groups.items()
        for difference in comparison(what, group, names)
    ]
    return ReplicaReport(
        rank_name=str(world),
        num_tensors=len(compared),
        num_bytes=sum(tensors[name].numel() * tensors[name].element_size() for name in compared),
        seconds=time.monotonic() - start,
        differences=(*differences, *_compare_tied_embeddings(chunks, world)),
        bad_parameters=find_bad_tensors(weights),
    )


def split_by_majority(values: Sequence[int]) -> tuple[int | None, list[int]]:
    """Return (the value of more than half of the entries, or None; the positions of the other
    entries, which are all positions without a majority).
    """
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return None, list(range(len(values)))
    return value, [position for position, other in enumerate(values) if other != value]


@dataclass(frozen=True)
class _GroupComparison:
    """A function that returns the differences within a group, on its first rank. All ranks of the
    group must call it with the same names.
    """

    world: World
    tensors: Mapping[str, Tensor]
    digests: Mapping[str, Tensor]

    def __call__(
        self, group_kind: str, process_group: ProcessGroup, tensor_names: Sequence[str]
    ) -> list[ReplicaDifference]:
        """Return the differences between the group's ranks over these tensors, on the group's first
        rank; [] elsewhere. All ranks of the group must call it with the same names.
        """
        mine = (
            torch.stack([self.digests[name].to(self.world.device) for name in tensor_names])
            & _POSITIVE
        )
        differing = _find_differing_positions(mine, process_group)
        found = []
        for number, position in enumerate(differing):
            values = _all_gather_value(mine[position], process_group)
            _, odd = split_by_majority(values)
            ranks = dist.get_process_group_ranks(process_group)
            source = next((rank for at, rank in enumerate(ranks) if at not in odd), ranks[0])
            name = tensor_names[position]
            is_measured = number < MAX_MEASURED_DIFFERENCES and name in self.tensors
            size = (
                self._measure_max_difference(self.tensors[name], source, process_group)
                if is_measured
                else None
            )
            if dist.get_rank(process_group) == 0:
                found.append(
                    ReplicaDifference(
                        name,
                        group_kind,
                        _name_ranks(self.world, process_group, odd),
                        len(ranks),
                        size,
                    )
                )
        return found

    def _measure_max_difference(
        self, tensor: Tensor, source_rank: int, process_group: ProcessGroup
    ) -> float:
        """Return the largest absolute difference of any rank of the group from the rank
        `source_rank`.
        """
        tensor = tensor.detach().to(self.world.device)
        theirs = tensor.contiguous().clone()
        dist.broadcast(theirs, source_rank, group=process_group)
        largest = (
            (tensor.double() - theirs.double()).abs().max() if tensor.numel() else torch.zeros(())
        )
        largest = largest.to(self.world.device, torch.float32).reshape(1)
        dist.all_reduce(largest, ReduceOp.MAX, group=process_group)
        return float(largest)


def _find_differing_positions(local_digests: Tensor, process_group: ProcessGroup) -> list[int]:
    """Return the positions of the digests [N] that differ between the ranks of the group that have
    one (not _ABSENT). All ranks of the group must call it.
    """
    absent = local_digests == _ABSENT
    bounds = torch.stack([local_digests, torch.where(absent, local_digests, -local_digests)])
    # the largest, and minus the smallest
    dist.all_reduce(bounds, ReduceOp.MAX, group=process_group)
    return ((bounds[0] != -bounds[1]) & (bounds[0] != _ABSENT)).nonzero().flatten().tolist()


def _all_gather_value(local_value: Tensor, process_group: ProcessGroup) -> list[int]:
    """Return the value of each rank of the group, by rank."""
    gathered = [
        torch.empty_like(local_value.reshape(1)) for _ in range(dist.get_world_size(process_group))
    ]
    dist.all_gather(gathered, local_value.reshape(1).contiguous(), group=process_group)
    return [int(other) for other in gathered]


def _name_ranks(
    world: World, process_group: ProcessGroup, group_positions: Sequence[int]
) -> tuple[str, ...]:
    """Return the coordinates of the ranks at these positions of the group, as text."""
    ranks = dist.get_process_group_ranks(process_group)
    return tuple(str(world.layout.locate_rank(ranks[position])) for position in group_positions)


def _collect_optimizer_state(
    parameters: Mapping[str, nn.Parameter], optimizer: MegatronStepOptimizer
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return (the tensors that each data-parallel rank holds whole, the shards that the ranks hold
    a part of), by "parameter name, kind of state". The ranks of a tp group shard alike, because
    their buffers have one layout.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    whole: dict[str, Tensor] = {}
    shards: dict[str, Tensor] = {}
    for held in iterate_parameter_states(optimizer.megatron_optimizer):
        for kind, tensor in held.get_stored_tensors().items():
            (whole if held.element_range is None else shards)[
                f"{names[id(held.model_param)]} {kind}"
            ] = tensor
    return whole, shards


def _make_schedule_tensor(optimizer: MegatronStepOptimizer, world: World) -> Tensor:
    """Return the optimizer's number of steps and its learning rates as a tensor, to be compared."""
    groups = optimizer.megatron_optimizer.param_groups
    numbers = [
        float(optimizer.scheduler.num_steps),
        *sorted({float(group["lr"]) for group in groups}),
    ]
    return torch.tensor(numbers, dtype=torch.float64, device=world.device)


def _compare_tied_embeddings(chunks: Sequence[nn.Module], world: World) -> list[ReplicaDifference]:
    """Compare the embedding of the first stage with the copy on the last stage, and return a
    difference on the group's first rank; [] elsewhere. All ranks of the pipeline group must call
    this function.
    """
    if world.layout.pp == 1:
        return []
    model = collect_named_parameters(chunks)
    mine: Tensor | None = None
    if world.is_first_stage:
        mine = model.get("embedding.word_embeddings.weight")
    elif world.is_last_stage and "output_layer.weight" in model:
        mine = get_head_weight(chunks[-1])
    is_shared = mine is not None and getattr(mine, "shared_embedding", False)
    value = (
        compute_tensor_digest(mine) & _POSITIVE
        if mine is not None and is_shared
        else torch.tensor(_ABSENT)
    )
    value = value.to(world.device).reshape(1)
    if not _find_differing_positions(value, world.pp_group):
        return []
    present = [
        position
        for position, other in enumerate(_all_gather_value(value, world.pp_group))
        if other != _ABSENT
    ]
    if dist.get_rank(world.pp_group) != 0:
        return []
    places = _name_ranks(world, world.pp_group, present)
    return [
        ReplicaDifference(
            "embedding.word_embeddings.weight", "tied embedding", places, len(places), None
        )
    ]
