"""Peak bytes of an update, counted by torch's CUDA allocator: one rank of a recipe's world, at
its full depth.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --alone memory     #
        benchmarks/results/peak_memory.json

Pages that no kernel touches take no memory, so a rank that needs 80 GB runs in 2.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.api import load_config
from rlhf_megatron.config.rules.run_rules import count_actor_ranks
from rlhf_megatron.config.schema import KernelsConfig, RunConfig
from rlhf_megatron.data.batch import MiniBatch, compute_offsets
from rlhf_megatron.data.replica_plan import plan_replicas, take_replica_shard
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import ParallelLayout, make_parallel_layout
from tools.cuda_rehearsal.alone.children import in_children
from tools.cuda_rehearsal.alone.world import NoWeights, alone

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
RESULT = Path(__file__).parents[3] / "benchmarks" / "results" / "peak_memory.json"
SHAPES = {
    "8B": "qwen3_8b_dapo",
    "32B": "qwen3_32b_grpo",
    "30B-A3B": "qwen3_30b_a3b_gspo",
    "235B-A22B": "qwen3_235b_a22b_gspo",
    "671B-A37B": "deepseek_v3_grpo",
}
WORLDS: dict[str, dict[str, Any]] = {  # twice the recipes' ranks
    "235B-A22B": {"trainer.nnodes": 32},
    "671B-A37B": {"trainer.nnodes": 64, "actor.megatron.expert_model_parallel_size": 32},
}
RECOMPUTE: dict[str, dict[str, Any]] = {
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "none": {
        "recompute_granularity": "none",
        "recompute_method": None,
        "recompute_num_layers": None,
    },
}


@dataclass(frozen=True)
class Peak:
    """What was counted on a rank."""

    shape: str
    recompute: str  # of RECOMPUTE
    stage: int
    layout: str
    tokens: int  # of a micro-batch
    states: int  # bytes before the update: weights, gradients, optimizer
    peak: int  # bytes in it, at most


def questions() -> list[tuple[str, str, int]]:
    """(shape, recompute, stage) of each that is counted: the first stage, and the last,
    which has the head.
    """
    found = []
    for shape in SHAPES:
        last = config_of(shape, "full").actor.megatron.pipeline_model_parallel_size - 1
        found += [(shape, how, stage) for how in RECOMPUTE for stage in sorted({0, last})]
    return found


def config_of(shape: str, recompute: str) -> RunConfig:
    """The recipe of a shape, with what decides on its activations."""
    settings = {f"actor.megatron.{name}": value for name, value in RECOMPUTE[recompute].items()}
    return load_config(
        RECIPES / f"{SHAPES[shape]}.yaml", {**settings, **WORLDS.get(shape, {})}, with_files=False
    )


def batch_of(num_samples: int, length: int) -> MiniBatch:
    """Samples of one prompt token each: all others train, which needs the most of the head."""
    num_tokens = num_samples * length
    mask = (torch.arange(num_tokens) % length) > 0
    ones = torch.ones(num_tokens)
    columns = {
        "loss_weights": ones,
        "metric_weights": ones,
        "advantages": ones,
        "old_log_probs": ones,
    }
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    offsets = compute_offsets(torch.full((num_samples,), length))
    return MiniBatch(offsets=offsets, token_ids=ids, response_mask=mask, **columns)


def count(shape: str, recompute: str, stage: int) -> Peak:
    """Build the rank, and train it twice: the first pass leaves what stays."""
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.actor_losses import parse_loss_side_correction
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

    config = config_of(shape, recompute)
    hf_config = read_hf_config(Path(config.model.path))
    actor = replace(config.actor, kernels=KernelsConfig(num_self_checks=0), use_kl_loss=False)
    if recompute == "none":
        actor = replace(actor, megatron=replace(actor.megatron, recompute_granularity=None))
    layout = make_parallel_layout(actor.megatron, count_actor_ranks(config))
    tokens = actor.ppo_max_token_len_per_gpu
    with alone(
        layout, layout.compute_rank(dp=0, pp=stage, tp=0), hf_config, loads_weights=False
    ) as world:
        dtype = getattr(torch, config.model.dtype)
        backend = MegatronBackend(hf_config, NoWeights(), world, dtype, actor.megatron)
        phases = {"rl": TrainingPhase(actor.optim, 100)}
        model = ActorModel(
            backend, actor, phases, parse_loss_side_correction(config.algorithm.rollout_correction)
        )
        # as many as are under way at the first stage
        batch = batch_of(layout.pp * layout.dp, tokens * layout.cp)
        plan = plan_replicas(
            batch.lengths.tolist(), layout.dp, tokens * layout.cp, *multiples(layout)
        )[0]
        shard = take_replica_shard(batch, plan)
        model.update(shard, plan, 1.0)
        states = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.update(shard, plan, 1.0)
        return Peak(
            shape, recompute, stage, str(layout), tokens, states, torch.cuda.max_memory_allocated()
        )


def multiples(layout: ParallelLayout) -> tuple[int, int, int]:
    return layout.document_multiple, layout.packed_multiple, layout.micro_batch_multiple


def _row(*question: Any) -> dict[str, Any]:
    return vars(count(*question))


def main(shapes: list[str]) -> int:
    """Prints a line each, and writes those into the file in place of its own; the number of
    those that failed.
    """
    known = {(peak.shape, peak.recompute, peak.stage): peak for peak in recorded()}
    num_failed = 0
    for question, found in in_children(
        _row, [one for one in questions() if not shapes or one[0] in shapes]
    ):
        if isinstance(found, str):
            num_failed += 1
        else:
            known[question] = Peak(**found)  # type: ignore[index]
        print(
            *question,
            found if isinstance(found, str) else f"{found['peak'] / 1e9:.2f} GB",
            flush=True,
        )
    order = [known[question] for question in questions() if question in known]
    RESULT.write_text(json.dumps({"peaks": [vars(peak) for peak in order]}, indent=1) + "\n")
    return num_failed


def recorded() -> list[Peak]:
    """What the file says."""
    return (
        [Peak(**row) for row in json.loads(RESULT.read_text())["peaks"]] if RESULT.is_file() else []
    )


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
