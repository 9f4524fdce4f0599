"""Which experts each token meets on the ranks of a layout,
put together as the reference has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlhf_megatron.data.batch import TokenBatch
from rlhf_megatron.data.replica_plan import NO_OP, ReplicaPlan
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.sequence_packing import pack_batch


@contextmanager
def watched(
    chunks: Sequence[Any], world: World, batch: TokenBatch, plan: ReplicaPlan
) -> Iterator[list[Tensor]]:
    """Filled by one forward pass over `batch`: rows (sample of the whole batch, position, layer,
    sorted experts).
    """
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)
    ]
    packed = pack_batch(batch, plan, world.layout, world.coordinates.cp, with_documents=True)
    calls = [0] * len(routers)
    rows: list[Tensor] = []

    def see(number: int, layer: int, routing_map: Tensor) -> None:
        micro = packed.micro_batches[calls[number]]
        group = plan.micro_batches[calls[number]]
        calls[number] += 1
        by_length = sorted(group, key=lambda sample: int(batch.lengths[sample]))
        samples = torch.tensor([plan.samples[sample] for sample in by_length])
        documents = micro.documents
        positions = micro.position_ids[0]
        if world.layout.sequence_parallel:
            documents, positions = (
                x.chunk(world.layout.tp)[world.coordinates.tp] for x in (documents, positions)
            )
        place = torch.stack(
            [samples[documents.clamp(min=0)], positions, torch.full_like(positions, layer)], 1
        )
        experts = routing_map.cpu().nonzero()[:, 1].view(len(positions), -1)
        rows.append(torch.cat([place, experts], 1)[documents >= 0])

    hooks = [
        router.register_forward_hook(
            lambda module, given, out, number=number: see(number, module.layer_number - 1, out[1])
        )
        for number, router in enumerate(routers)
    ]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()
    assert NO_OP not in [int(row[0]) for part in rows for row in part]


def assembled(rows: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """[T, layers with experts, top_k] as the reference's, from the rows of all ranks; -1 where
    there is no row.

    Raises AssertionError where ranks that route the same token disagree.
    """
    table = torch.cat(list(rows))
    layers = sorted(set(table[:, 2].tolist()))
    index = torch.tensor(
        [layers.index(layer) if layer in layers else -1 for layer in range(max(layers) + 1)]
    )
    found = torch.full((int(offsets[-1]), len(layers), table.shape[1] - 3), -1, dtype=torch.int64)
    token = offsets[table[:, 0]] + table[:, 1]
    layer = index[table[:, 2]]
    experts = table[:, 3:]
    found[token, layer] = experts
    assert torch.equal(found[token, layer], experts), "ranks disagree about the experts of a token"
    return found
