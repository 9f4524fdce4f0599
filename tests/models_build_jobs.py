"""Jobs of tests/test_models_build.py: the packed batch, and forward and backward through megatron's own schedules."""

from __future__ import annotations

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

from rlhf_megatron.checkpoint.load_model import load_hf, named_parameters
from rlhf_megatron.checkpoint.random_init import RandomSource
from rlhf_megatron.models.attention import packed_documents
from rlhf_megatron.models.build import MegatronModel, build_model
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.models.head import head_weight
from rlhf_megatron.parallel.world import World

LENGTHS = [[6, 6, 9, 4], [7, 3, 7], [11, 6]]  # documents of each micro-batch
PACKED_LENGTH = 25


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


def loaded_model(config: dict[str, Any], world: World) -> MegatronModel:
    model = build_model(config, world, torch.float32)
    source = RandomSource(seed=3, std=0.15)
    load_hf(model.chunks, table_for(config, world.layout.tp), source, world.coordinates.tp, world.layout.tp)
    return model


def micro_batches() -> list[dict[str, Any]]:
    """Three micro-batches of one length: a tail document that nothing reads fills each."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for lengths in LENGTHS:
        used = sum(lengths)
        filled = [*lengths, PACKED_LENGTH - used] if used < PACKED_LENGTH else lengths
        ids = torch.randint(37, (PACKED_LENGTH,), generator=generator)
        rows = torch.cat([torch.arange(n - 1) + sum(lengths[:i]) for i, n in enumerate(lengths)])
        batches.append(
            {
                "ids": ids[None],
                "positions": torch.cat([torch.arange(n) for n in filled])[None],
                "borders": torch.tensor([0, *filled]).cumsum(0, dtype=torch.int32),
                "longest": max(filled),
                "rows": rows,
                "targets": ids[rows + 1],
                "weights": torch.randn(len(rows), generator=generator),
            }
        )
    return batches


def log_probs(hidden: Tensor, batch: dict[str, Any], model: MegatronModel, world: World) -> Tensor:
    """log softmax over the true vocabulary, written with megatron's collectives."""
    rows = hidden[0, batch["rows"]]
    if world.layout.tp > 1:
        rows = _SumGradient.apply(rows, world.tp_group)
    logits = gather_from_tensor_model_parallel_region(rows @ head_weight(model.chunks[0]).T, group=world.tp_group)
    return F.log_softmax(logits[:, : model.vocab_size], -1).gather(1, batch["targets"][:, None])[:, 0]


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_tensor_model_parallel_region(grad.contiguous(), group=ctx.group), None


def run(world: World, model: MegatronModel, chunk: Any, forward_only: bool) -> list[Tensor]:
    """Log-probs of each micro-batch on the last stage; the schedule reads megatron's global groups here."""

    def forward_step(batches: Any, chunk: Any) -> Any:
        batch = next(batches)
        documents = packed_documents(batch["borders"], batch["longest"], batch["positions"])
        hidden = chunk(batch["ids"], batch["positions"], None, packed_seq_params=documents)
        return hidden, partial(loss, batch)

    def loss(batch: dict[str, Any], hidden: Tensor) -> tuple[Tensor, int, Tensor]:
        assert hidden.shape == (1, PACKED_LENGTH, 32)
        got = log_probs(hidden, batch, model, world)
        return (got * batch["weights"]).sum(), 0, got.detach()

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(micro_batches()),
        model=chunk,
        num_microbatches=len(LENGTHS),
        seq_length=PACKED_LENGTH,
        micro_batch_size=1,
        forward_only=forward_only,
    )


def forward_and_backward(world: World, is_tied: bool) -> dict[str, Any]:
    model = loaded_model(hf_config(is_tied=is_tied), world)
    marks = {n: getattr(p, "tensor_model_parallel", False) for n, p in named_parameters(model.chunks).items()}
    with torch.no_grad():
        evaluated = run(world, model, model.chunks[0], forward_only=True)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(
        model.transformer_config, settings, model.chunks[0], pg_collection=world.pg_collection
    )
    chunk.zero_grad_buffer()
    trained = run(world, model, chunk, forward_only=False)
    gradients = {name: p.main_grad.clone() for name, p in named_parameters([chunk]).items()}
    return {"evaluated": evaluated, "trained": trained, "gradients": gradients, "marks": marks}
