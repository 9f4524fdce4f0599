"""Every layout and every family of the parity list on the null library: ranks of any world, through
all stages of a trainer. An operator's own check of devices, types, shapes or deterministic form
fails the stage that called it.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --alone layouts
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.parity.cases import FAMILIES
from benchmarks.parity.layouts import LAYOUTS, Axes, in_turns
from rlhf_megatron.config.schema import ActorConfig, CriticConfig, KernelsConfig, OptimConfig
from rlhf_megatron.data.batch import MiniBatch, ValueMiniBatch, compute_offsets
from rlhf_megatron.data.replica_plan import plan_replicas, take_replica_shard
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from tools.cuda_rehearsal.alone.children import num_failed
from tools.cuda_rehearsal.alone.world import NoWeights, alone

BUDGET = 96  # tokens of a micro-batch: several of each replica
LENGTHS = (2, 5, 12, 40, 41, 64, 90)
KERNELS = KernelsConfig(num_self_checks=0)  # which look at values
OPTIM = OptimConfig(lr=1e-3)
NEEDS_PACKAGE = "transformer_engine"  # which has no wheel


def cells() -> list[tuple[str, str, int]]:
    """(layout, family, rank): each layout with one family, in turns, and each family in one layout
    at least. Of a pipeline its first and its last rank.
    """
    built = [axes for axes in LAYOUTS.values() if axes.impl != NEEDS_PACKAGE]
    return [
        (axes.name, family, rank)
        for family, axes in in_turns(built, FAMILIES)
        for rank in _ranks(axes)
    ]


def _ranks(axes: Axes) -> list[int]:
    return [0, axes.num_ranks - 1] if axes.pp > 1 else [axes.num_ranks - 1]


def pass_through(layout_name: str, family: str, rank: int) -> list[str]:
    """What failed, by stage."""
    hf_config = FAMILIES[family]
    axes = LAYOUTS[layout_name]
    megatron = replace(axes.megatron, transformer_impl="local")
    problems = []
    with (
        alone(make_parallel_layout(megatron, axes.num_ranks), rank, hf_config) as world,
        TemporaryDirectory() as folder,
    ):
        for name, stage in _stages(hf_config, megatron, world, Path(folder)).items():
            try:
                stage()
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {str(error)[:400]}")
                if name == "build":
                    break
    return problems


def _stages(
    hf_config: dict[str, Any], megatron: Any, world: Any, folder: Path
) -> dict[str, Callable[[], Any]]:
    """By name, in their order. The first makes what the others use."""
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.critic import CriticModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.reference_model import ReferenceModel
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.value_model import add_value_head

    made: dict[str, Any] = {}
    layout = world.layout
    phases = {"rl": TrainingPhase(OPTIM, 100)}
    batch, values, plan = _batches(layout, world.coordinates.dp)

    def build() -> None:
        backend = MegatronBackend(hf_config, NoWeights(), world, torch.bfloat16, megatron)
        config = ActorConfig(
            megatron=megatron, optim=OPTIM, kernels=KERNELS, entropy_coeff=0.01, use_kl_loss=True
        )
        made["actor"] = ActorModel(backend, config, phases)

    def reference() -> None:
        backend = MegatronBackend(
            hf_config, NoWeights(), world, torch.bfloat16, megatron, is_frozen=True
        )
        ReferenceModel(backend, 512, KERNELS, is_offloaded=True).log_probs(batch, plan, 1.0)

    def critic() -> None:
        first = add_value_head(NoWeights(), 0.02, 1)
        backend = MegatronBackend(hf_config, first, world, torch.bfloat16, megatron, "value")
        model = CriticModel(backend, CriticConfig(optim=OPTIM), phases, seed=1)
        model.values(values, plan)
        model.update(values, plan)

    def checkpoint() -> None:
        made["actor"].save(folder / "checkpoint")
        made["actor"].load(folder / "checkpoint")

    return {
        "build": build,
        "log-probs": lambda: made["actor"].log_probs(
            batch, plan, 0.7, with_entropy=True, with_sum_squares=True
        ),
        "update": lambda: made["actor"].update(batch, plan, 1.0),
        "supervised update": lambda: made["actor"].update(batch, plan, 1.0, "sft"),
        "look again": lambda: made["actor"].rerun_forward_backward(batch, plan, 1.0),
        "sync": lambda: _sync(made["actor"], world),
        "offload": lambda: (made["actor"].offload(), made["actor"].onload()),
        "update again": lambda: made["actor"].update(batch, plan, 1.0),
        **(
            {"checkpoint": checkpoint} if layout.world_size == 1 else {}
        ),  # else ranks tell each other what they write
        "critic": critic,
        "reference": reference,
    }


def _sync(actor: Any, world: Any) -> None:
    from rlhf_megatron.ranks.resharding.weight_sender import SendRequest, send_whole_tensors
    from rlhf_megatron.weights.bucket_buffers import make_memory_buffers

    order = SendRequest(1, torch.bfloat16, 1 << 16)
    send_whole_tensors(
        actor.export_shards(),
        world,
        order,
        lambda size, num: make_memory_buffers(world.device, size, num, lambda *_: None),
    )


def _batches(layout: ParallelLayout, dp: int) -> tuple[MiniBatch, ValueMiniBatch, Any]:
    lengths = torch.tensor(LENGTHS * layout.dp)
    num_tokens = int(lengths.sum())
    offsets = compute_offsets(lengths)
    mask = torch.ones(num_tokens, dtype=torch.bool).index_fill_(0, offsets[:-1], False)
    column = torch.full((num_tokens,), 1 / num_tokens)
    common = {
        "offsets": offsets,
        "token_ids": torch.ones(num_tokens, dtype=torch.int64),
        "response_mask": mask,
    }
    common |= {"loss_weights": column, "metric_weights": column}
    batch = MiniBatch(**common, advantages=column, old_log_probs=column, ref_log_probs=column)
    values = ValueMiniBatch(**common, old_values=column, returns=column)
    multiples = (layout.document_multiple, layout.packed_multiple, layout.micro_batch_multiple)
    plan = plan_replicas(lengths.tolist(), layout.dp, BUDGET * layout.cp, *multiples)[dp]
    return take_replica_shard(batch, plan), take_replica_shard(values, plan), plan


def main(only: list[str]) -> int:
    """Print a line a rank; return the number of those with problems."""
    return num_failed(pass_through, [cell for cell in cells() if not only or cell[0] in only])


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
