"""Jobs of test_models_*.py: packed batches, and forward and backward through megatron's
own schedules.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters, load_hf_weights
from rlhf_megatron.ranks.models.megatron_model_builder import MegatronModel, build_megatron_model
from rlhf_megatron.ranks.models.output_heads import gather_sequence_parts, get_head_weight
from rlhf_megatron.ranks.models.packed_attention import make_packed_documents
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import ParallelLayout
from rlhf_megatron.weights.weight_source import RandomWeightSource

LENGTHS = [[6, 6, 9, 4], [7, 3, 7], [11, 6], [2, 5, 2]]  # documents of each micro-batch
# some shorter than their 2 cp chunks
RAGGED = [[1, 37, 2, 3, 14], [40, 1], [3, 3, 2, 3, 1, 25], [5, 4, 3, 2, 1]]
EQUAL = [[6] * 9, [6] * 8, [6] * 9, [6] * 2]


def hf_config(model_type: str = "qwen3", is_tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 37,  # odd: padded under tp
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "tie_word_embeddings": is_tied,
    }


def loaded_model(
    config: dict[str, Any], world: World, megatron: MegatronConfig | None = None
) -> MegatronModel:
    model = build_megatron_model(config, world, torch.float32, megatron)
    table = make_weight_table(config, world.layout.tp, model.impl)
    source = RandomWeightSource(seed=3, std=0.15)
    load_hf_weights(model.chunks, table, source, world.coordinates.tp, world.layout.tp)
    return model


@dataclass(frozen=True)
class Batch:
    """One rank's share of a micro-batch. Rows: the tokens that have a next token
    in their document.
    """

    ids: Tensor  # [1, T / cp]
    positions: Tensor  # [1, T / cp]
    borders: Tensor  # of whole documents
    longest: int
    length: int  # T
    rows: Tensor  # places of this share's rows
    row_numbers: Tensor  # which rows of the micro-batch these are
    targets: Tensor
    weights: Tensor


def micro_batches(
    layout: ParallelLayout, lengths: list[list[int]], cp_rank: int = 0
) -> list[Batch]:
    """Micro-batches of one length: documents padded as the layout demands, then a tail document
    that nothing reads.
    """
    generator = torch.Generator().manual_seed(0)
    multiple = layout.document_multiple
    padded = [[-(-n // multiple) * multiple for n in batch] for batch in lengths]
    total = -(-(max(map(sum, padded)) + 1) // layout.packed_multiple) * layout.packed_multiple
    return [
        _batch(true, [*whole, total - sum(whole)], layout, cp_rank, generator)
        for true, whole in zip(lengths, padded, strict=True)
    ]


def _batch(
    true: list[int],
    padded: list[int],
    layout: ParallelLayout,
    cp_rank: int,
    generator: torch.Generator,
) -> Batch:
    tokens = torch.randint(37, (sum(true),), generator=generator).split(true)
    weights = torch.randn(sum(true) - len(true), generator=generator)
    ids = []
    targets = []
    numbers = []
    positions = []
    share = []
    row = start = 0
    for place, length in enumerate(padded):
        document = tokens[place].tolist() if place < len(true) else []
        fill = [0] * (length - len(document))
        num_rows = max(len(document) - 1, 0)
        ids += document + fill
        targets += document[1:] + [0] * (length - num_rows)
        numbers += [*range(row, row + num_rows), *[-1] * (length - num_rows)]
        positions += range(length)
        share += [start + at for at in share_of_document(length, layout.cp, cp_rank)]
        row = row + num_rows
        start = start + length
    here = torch.tensor(numbers)[share]
    rows = (here >= 0).nonzero()[:, 0]
    return Batch(
        ids=torch.tensor(ids)[share][None],
        positions=torch.tensor(positions)[share][None],
        borders=torch.tensor([0, *padded]).cumsum(0, dtype=torch.int32),
        longest=max(padded),
        length=sum(padded),
        rows=rows,
        row_numbers=here[rows],
        targets=torch.tensor(targets)[share][rows],
        weights=weights[here[rows]],
    )


def share_of_document(length: int, cp: int, cp_rank: int) -> list[int]:
    """Written out, apart from the package's own arithmetic:
    the rank-th chunk and its mirror image.
    """
    if cp == 1:
        return list(range(length))
    size = length // (2 * cp)
    chunks = [list(range(i * size, (i + 1) * size)) for i in range(2 * cp)]
    return chunks[cp_rank] + chunks[-1 - cp_rank]


def log_probs(hidden: Tensor, batch: Batch, model: MegatronModel, world: World) -> Tensor:
    """log softmax over the true vocabulary, written with megatron's collectives."""
    whole = (
        gather_sequence_parts(hidden[0], world.tp_group)
        if world.layout.sequence_parallel
        else hidden[0]
    )
    rows = whole[batch.rows]
    if world.layout.tp > 1:
        rows = _SumGradient.apply(rows, world.tp_group)
    logits = gather_from_tensor_model_parallel_region(
        rows @ get_head_weight(model.chunks[-1]).T, group=world.tp_group
    )
    return F.log_softmax(logits[:, : model.vocab_size], -1).gather(1, batch.targets[:, None])[:, 0]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_tensor_model_parallel_region(grad.contiguous(), group=ctx.group), None


def run(
    world: World, model: MegatronModel, forward_only: bool, lengths: list[list[int]] = LENGTHS
) -> list[tuple[Tensor, Tensor]]:
    """(row numbers, log-probs) of each micro-batch on the last stage; the schedule reads megatron's
    global groups.
    """
    batches = micro_batches(world.layout, lengths, world.coordinates.cp)
    cp_group = world.cp_group if world.layout.cp > 1 else None

    def forward_step(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        documents = make_packed_documents(batch.borders, batch.longest, batch.positions, cp_group)
        hidden = chunk(batch.ids, batch.positions, None, packed_seq_params=documents)
        return hidden, partial(loss, batch)

    def loss(batch: Batch, hidden: Tensor) -> tuple[Tensor, int, tuple[Tensor, Tensor]]:
        parts = world.layout.cp * (world.layout.tp if world.layout.sequence_parallel else 1)
        assert hidden.shape == (1, batch.length // parts, 32)
        got = log_probs(hidden, batch, model, world)
        return (got * batch.weights).sum(), 0, (batch.row_numbers, got.detach())

    iterators = [iter(batches) for _ in model.chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(model.chunks) > 1 else iterators[0],
        model=model.chunks if len(model.chunks) > 1 else model.chunks[0],
        num_microbatches=len(batches),
        seq_length=batches[0].length,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def with_gradient_buffers(model: MegatronModel, world: World) -> None:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model.chunks = [
        DistributedDataParallel(
            model.transformer_config, settings, chunk, pg_collection=world.pg_collection
        )
        for chunk in model.chunks
    ]
    for chunk in model.chunks:
        chunk.zero_grad_buffer()


def forward_and_backward(
    world: World,
    is_tied: bool,
    lengths: list[list[int]] = LENGTHS,
    megatron: MegatronConfig | None = None,
    model_type: str = "qwen3",
) -> dict[str, Any]:
    """What this rank has: log-probs with and without gradient, summed gradients by name, marks of
    what tp shards.
    """
    model = loaded_model(hf_config(model_type, is_tied), world, megatron)
    marks = {
        n: getattr(p, "tensor_model_parallel", False)
        for n, p in collect_named_parameters(model.chunks).items()
    }
    with torch.no_grad():
        evaluated = run(world, model, True, lengths)
    with_gradient_buffers(model, world)
    trained = run(world, model, False, lengths)
    gradients = {
        name: p.main_grad.clone() for name, p in collect_named_parameters(model.chunks).items()
    }
    return {
        "coordinates": world.coordinates,
        "evaluated": evaluated,
        "trained": trained,
        "gradients": gradients,
        "marks": marks,
    }
