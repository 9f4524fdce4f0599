"""Models of Transformer Engine's own modules: each parameter has the name and shape that the weight
table says, and all that checkpoints and optimizers read of it is as in plain torch under its names,
which the tests run.

    .venv-cuda/bin/python -m tools.cuda_rehearsal --alone names
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

from benchmarks.parity.cases import FAMILIES
from benchmarks.parity.layouts import TE, Axes, divides
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.weights.families.family_lookup import make_weight_table
from rlhf_megatron.weights.parallel_layout import make_parallel_layout
from rlhf_megatron.weights.weight_table import HeadKind, compute_shard_shape
from tools.cuda_rehearsal.alone import stub
from tools.cuda_rehearsal.alone.children import num_failed
from tools.cuda_rehearsal.alone.world import alone

LAYOUTS = {
    axes.name: axes
    for axes in (
        Axes(impl=TE),
        Axes(impl=TE, tp=2, sequence_parallel=True),
        Axes(impl=TE, pp=2),
        Axes(impl=TE, ep=2, dp=2),
        Axes(impl=TE, ep=2, dp=2, is_grouped=True),
        Axes(impl=TE, tp=2, sequence_parallel=True, ep=2, etp=1, is_grouped=True),
    )
}
# tied: of a last stage, a copy of the embedding, which the rule is of
OUTPUT_LAYER = "output_layer.weight"
MARKS = {"sequence_parallel": False, "tensor_model_parallel": False, "allreduce": True}
"""What optimizers read of a parameter, and what it means where it is not there."""


def cells() -> list[tuple[str, str, HeadKind]]:
    found = [
        (name, family)
        for family, one in FAMILIES.items()
        for name, axes in LAYOUTS.items()
        if divides(axes, one)
    ]
    return [(*cell, "vocabulary") for cell in found] + [
        (*cell, "value") for cell in found if cell[1] == "qwen3_tied"
    ]


def compare(layout_name: str, family: str, head: HeadKind) -> list[str]:
    """The last rank's differences, in words."""
    from rlhf_megatron.ranks.models import layer_specs

    axes = LAYOUTS[layout_name]
    hf_config = FAMILIES[family]
    layout = make_parallel_layout(axes.megatron, axes.num_ranks)
    with alone(layout, axes.num_ranks - 1, hf_config) as world:
        theirs, their_keys = look(hf_config, world, axes, head)
        problems = against_table(theirs, hf_config, world, axes, head)
        on_cpu = torch.device("cpu")
        spec = layer_specs._make_layer_and_norm
        experts = layer_specs._make_grouped_experts_spec
        with (
            mock.patch.object(
                layer_specs,
                "_make_layer_and_norm",
                lambda impl, config, n, _: spec(impl, config, n, on_cpu),
            ),
            mock.patch.object(layer_specs, "_make_grouped_experts_spec", lambda _: experts(on_cpu)),
        ):
            ours, our_keys = look(hf_config, world, axes, head)
    problems += unlike("parameter", theirs, ours)
    return problems + unlike("key of a checkpoint", their_keys, our_keys)


def look(
    hf_config: Any, world: World, axes: Axes, head: HeadKind
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters by their global names, tensors of a checkpoint by their keys), and what
    is read of each.
    """
    from rlhf_megatron.ranks.checkpoint.model_weights import collect_named_parameters
    from rlhf_megatron.ranks.models.megatron_model_builder import build_megatron_model
    from rlhf_megatron.ranks.workers.megatron_backend import drop_extra_state

    chunks = build_megatron_model(hf_config, world, torch.bfloat16, axes.megatron, head).chunks
    parameters = {
        name: [
            list(p.shape),
            str(p.dtype),
            p.device.type,
            [getattr(p, mark, none) for mark, none in MARKS.items()],
        ]
        for name, p in collect_named_parameters(chunks).items()
    }
    metadata = {"dp_cp_group": world.dp_cp_group}
    stored = {
        key: [
            tensor.key,
            list(tensor.global_shape),
            list(tensor.global_offset),
            list(tensor.replica_id),
        ]
        for chunk in chunks
        for key, tensor in drop_extra_state(chunk.sharded_state_dict(metadata=metadata)).items()
        if hasattr(tensor, "global_shape")
    }
    return parameters, stored


def against_table(
    found: Mapping[str, Any], hf_config: Any, world: World, axes: Axes, head: HeadKind
) -> list[str]:
    """Names that no rule has, and shapes that are no shard of one."""
    rules = {rule.megatron_name: rule for rule in make_weight_table(hf_config, axes.tp, TE, head)}
    problems = [
        f"parameter {name} has no rule" for name in found if name not in {*rules, OUTPUT_LAYER}
    ]
    if world.layout.world_size == 1:
        wanted = {name for name, rule in rules.items() if rule.dtype is None}
        problems += [f"no parameter {name}" for name in sorted(wanted - found.keys())]
    for name, (shape, *_) in found.items():
        ways = world.layout.etp if name in rules and rules[name].expert is not None else axes.tp
        if name in rules and tuple(shape) != compute_shard_shape(rules[name], ways):
            problems.append(
                f"parameter {name} is {shape}, a shard of its"
                f" rule {compute_shard_shape(rules[name], ways)}"
            )
    return problems


def unlike(kind: str, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    return [
        (
            f"{kind} {name}: {theirs.get(name, 'none')} of Transformer Engine,"
            f" {ours.get(name, 'none')} of plain torch"
        )
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def main(only: list[str]) -> int:
    """Print a line a cell; return the number of those with problems."""
    stub.install()  # before megatron-core is imported, which looks for it
    return num_failed(compare, [cell for cell in cells() if not only or cell[0] in only])


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
