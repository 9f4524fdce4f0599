"""Kernel launches (products of matrices among them) of a layer and a micro-batch, by operator; the
host's time on a GPU is about 5 microseconds each.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --alone launches   #
        benchmarks/results/launches.json
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_megatron.config.schema import ActorConfig, KernelsConfig, MegatronConfig, OptimConfig
from rlhf_megatron.data.replica_plan import plan_replicas, take_replica_shard
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from tools.cuda_rehearsal.alone.children import in_children
from tools.cuda_rehearsal.alone.memory import batch_of
from tools.cuda_rehearsal.alone.world import NoWeights, alone

ROOT = Path(__file__).parents[3]
RESULT = ROOT / "benchmarks" / "results" / "launches.json"
SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 8}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@dataclass(frozen=True)
class Subject:
    """A model of `examples/` in a layout; of its layers only some."""

    name: str
    model: str
    num_ranks: int = 1
    megatron: dict[str, Any] | None = None


SUBJECTS = (
    Subject("8B, one rank", "qwen3_8b"),
    Subject("8B, recomputed", "qwen3_8b", 1, FULL),
    Subject("8B, tp2", "qwen3_8b", 2, SEQUENCE),
    Subject("8B, cp2", "qwen3_8b", 2, {"context_parallel_size": 2}),
    Subject("30B-A3B, ep8", "qwen3_30b_a3b", 8, EXPERTS),
    Subject("30B-A3B, ep8, grouped", "qwen3_30b_a3b", 8, {**EXPERTS, "moe_grouped_gemm": True}),
)
LAYERS = (2, 4)
MICRO_BATCHES = (2, 4)
TOKENS = 4096


class ByOperator(TorchDispatchMode):
    """Adds up what each operator launches."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = launched()
        result = func(*args, **(kwargs or {}))
        self.found[str(func).removeprefix("aten.")] += launched() - before
        return result


def launched() -> int:
    """Kernels and products of this process so far."""
    count = ctypes.CDLL(None).nullcuda_count
    count.restype = ctypes.c_long
    return int(count(0) + count(1))


def count(name: str, num_layers: int, num_micro_batches: int) -> dict[str, Counter[str]]:
    """Launches of a whole call, by operator; "" those of all, outside of torch's operators too."""
    from rlhf_megatron.ranks.workers.actor import ActorModel
    from rlhf_megatron.ranks.workers.megatron_backend import MegatronBackend
    from rlhf_megatron.ranks.workers.trained_model import TrainingPhase

    (subject,) = (one for one in SUBJECTS if one.name == name)
    hf_config = {
        **read_hf_config(ROOT / "examples" / subject.model),
        "num_hidden_layers": num_layers,
    }
    megatron = MegatronConfig(**(subject.megatron or {}))
    config = ActorConfig(
        megatron=megatron, optim=OptimConfig(), kernels=KernelsConfig(num_self_checks=0)
    )
    layout = make_parallel_layout(megatron, subject.num_ranks)
    with alone(layout, 0, hf_config, loads_weights=False) as world:
        backend = MegatronBackend(hf_config, NoWeights(), world, torch.bfloat16, megatron)
        actor = ActorModel(backend, config, {"rl": TrainingPhase(config.optim, 100)})
        batch = batch_of(num_micro_batches * layout.dp, TOKENS * layout.cp)
        multiples = (layout.document_multiple, layout.packed_multiple, layout.micro_batch_multiple)
        plan = plan_replicas(batch.lengths.tolist(), layout.dp, TOKENS * layout.cp, *multiples)[0]
        shard = take_replica_shard(batch, plan)
        found = {}
        for call, run in (
            ("log-probs", lambda: actor.log_probs(shard, plan, 1.0)),
            ("update", lambda: actor.update(shard, plan, 1.0)),
        ):
            run()
            before = launched()
            run()
            total = launched() - before
            with ByOperator() as counting:
                run()
            found[call] = counting.found + Counter({"": total})
        return found


def slopes(counts: dict[tuple[int, int], Counter[str]]) -> tuple[Counter[str], Counter[str]]:
    """(of a layer and a micro-batch, of a micro-batch beside its layers), from two depths and two
    numbers of them.
    """
    few, many = LAYERS
    first, last = MICRO_BATCHES
    a_micro_batch = {layers: Counter(counts[layers, last]) for layers in LAYERS}
    for layers in LAYERS:
        a_micro_batch[layers].subtract(counts[layers, first])
    layer = Counter(a_micro_batch[many])
    rest = Counter(a_micro_batch[few])
    layer.subtract(a_micro_batch[few])
    size = (many - few) * (last - first)
    layer = Counter({name: value // size for name, value in layer.items() if value})
    for name, value in layer.items():
        rest[name] -= value * few * (last - first)
    return layer, Counter({name: value // (last - first) for name, value in rest.items() if value})


def main(only: list[str]) -> int:
    subjects = [one for one in SUBJECTS if not only or one.name in only]
    grid = [(layers, number) for layers in LAYERS for number in MICRO_BATCHES]
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for (name, *place), counted in in_children(
        count, [(one.name, *at) for one in subjects for at in grid]
    ):
        if isinstance(counted, str):
            print(f"FAILED {name}: {counted}", flush=True)
            return 1
        found.setdefault(name, {})[tuple(place)] = counted
    told: dict[str, Any] = {}
    for name, counts in found.items():
        for call in ("log-probs", "update"):
            layer, rest = slopes({place: both[call] for place, both in counts.items()})
            told.setdefault(name, {})[call] = {
                "layer": dict(layer.most_common()),
                "rest": dict(rest.most_common()),
            }
            print(
                f"{name}, {call}: {layer['']} a layer and micro-batch, {rest['']} beside them",
                flush=True,
            )
            for what, by_operator in told[name][call].items():
                parts = [
                    f"{operator} {number}" for operator, number in by_operator.items() if operator
                ]
                print(f"    {what}: {', '.join(parts)}", flush=True)
    if not only:
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
