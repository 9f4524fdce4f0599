"""Cases of test_check_memory.py: what is planned for them, and what the ranks of real actors
and critics hold.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from places import ROOT
from table_samples import LLAMA3_ROPE, SMALL_LLAMA, SMALL_QWEN2, SMALL_QWEN3, THREE_KV_HEADS, tied
from torch import Tensor

from benchmarks.parity.layouts import Axes
from rlhf_megatron.config.schema import ActorConfig, CriticConfig, OptimConfig
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.weight_table import HeadKind

HF_CONFIGS = {
    "qwen3": SMALL_QWEN3,
    "tied qwen3": tied(SMALL_QWEN3),
    "llama": {**SMALL_LLAMA, "rope_parameters": LLAMA3_ROPE},
    "tied qwen2": tied(SMALL_QWEN2),
    "three kv heads": {**SMALL_LLAMA, **THREE_KV_HEADS, "head_dim": 4},
}


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    model: str
    dtype: str
    axes: Axes
    bucket_size: int | None = None  # parameters, for small models to have several buckets
    head: HeadKind = "vocabulary"

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {self.axes.name}" + (
            " critic" if self.head == "value" else ""
        )


CASES = (
    Case("qwen3", "bfloat16", Axes(dp=2)),
    Case("qwen3", "bfloat16", Axes(dp=2, distributed=True, overlap=True), bucket_size=3000),
    Case("qwen3", "bfloat16", Axes(dp=2, distributed=True, in_few_bits=True)),
    Case("three kv heads", "float32", Axes(dp=2, distributed=True)),
    Case("llama", "bfloat16", Axes(cp=2, distributed=True)),
    Case(
        "qwen3", "bfloat16", Axes(tp=2, sequence_parallel=True, impl="transformer_engine")
    ),  # 21 tokens: padded to 22
    Case("tied qwen3", "float32", Axes(pp=2)),
    Case("tied qwen2", "bfloat16", Axes(pp=2, vpp=2)),
    Case(
        "llama",
        "bfloat16",
        Axes(tp=2, dp=2, sequence_parallel=True, distributed=True, overlap=True),
        2000,
    ),
    Case("tied qwen3", "bfloat16", Axes(pp=2, vpp=2, dp=2, distributed=True, overlap=True), 2000),
    Case("tied qwen2", "float32", Axes(pp=2, cp=2, distributed=True)),
    Case("tied qwen3", "bfloat16", Axes(pp=2), head="value"),
    Case("qwen3", "bfloat16", Axes(tp=2, sequence_parallel=True), head="value"),
    Case("llama", "bfloat16", Axes(dp=2, distributed=True, overlap=True), 2000, head="value"),
)


def held(world: World, case: Case) -> dict[str, int]:
    """Bytes of the tensors that this rank of a real actor or critic holds, counted by
    their storage.
    """
    from rlhf_megatron.ranks.workers import data_parallel

    data_parallel.DDP_BUCKET_SIZE = case.bucket_size
    try:
        trained = make_worker(world, case).backend
    finally:
        data_parallel.DDP_BUCKET_SIZE = None
    parameters = [parameter for chunk in trained.chunks for parameter in chunk.parameters()]
    model_storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    adams = [part.optimizer for part in trained.optimizer.megatron_optimizer.chained_optimizers]
    trained = [
        parameter for adam in adams for group in adam.param_groups for parameter in group["params"]
    ]
    states = [state for adam in adams for state in adam.state.values()]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    mains = [state["fp32_param"] for state in states if "fp32_param" in state]
    mains += [
        p for p in trained if p.untyped_storage().data_ptr() not in model_storages and not mains
    ]
    return {
        "num_parameters": sum(parameter.numel() for parameter in parameters),
        "parameters": storage_bytes(parameters),
        "gradients": storage_bytes(parameter.main_grad for parameter in parameters),
        "main_parameters": sum(p.numel() * p.element_size() for p in mains),
        "moments": sum(tensor.numel() * tensor.element_size() for tensor in moments),
    }


def make_worker(world: World, case: Case) -> Any:
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.critic import CriticModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase
    from rlhf_megatron.weights.weight_source import make_random_source

    hf_config = HF_CONFIGS[case.model]
    optim = OptimConfig()
    megatron = case.axes.megatron
    common = (hf_config, make_random_source(hf_config, 1), world, getattr(torch, case.dtype))
    phases = {"rl": TrainingPhase(optim, 10)}
    backend = MegatronBackend(*common, megatron, case.head)
    if case.head == "value":
        return CriticModel(backend, CriticConfig(optim=optim), phases, seed=1)
    return ActorModel(backend, ActorConfig(megatron=megatron, optim=optim), phases)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Each storage once, whole: padding counts."""
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()
    )


def planned() -> list[list[dict[str, Any]]]:
    """The plan of every case, by stage; in a process of its own, since it makes worlds and
    patches megatron-core.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def main() -> None:
    from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron

    prepare_megatron()
    from rlhf_megatron.ranks.workers import data_parallel
    from rlhf_megatron.ranks.workers.memory_plan import plan_layout_memory

    plans = []
    for case in CASES:
        data_parallel.DDP_BUCKET_SIZE = case.bucket_size
        stages = plan_layout_memory(
            HF_CONFIGS[case.model],
            case.axes.megatron,
            case.axes.num_ranks,
            getattr(torch, case.dtype),
            case.head,
        )
        plans.append([asdict(stage) for stage in stages])
    print(json.dumps(plans))


if __name__ == "__main__":
    main()
