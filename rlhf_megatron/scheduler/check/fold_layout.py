"""Smaller layouts that keep what a large one is made of, for a machine with few processes. Pure integers.

The first layout keeps the shape of a replica: tp, pp, vpp, cp and all switches are the run's own; two replicas stand
for any larger number where the processes suffice, else one. Where even one replica has too many ranks its axes are made
smaller in the order cp, tp, pp: first down to 2, and only when that is not enough down to 1.

Where the first layout has no room for a second replica but the run has several, a second layout has two, with the axes
made smaller in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rlhf_megatron.config.schema import MegatronConfig

AXES = {"cp": "context_parallel_size", "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size"}
"""In the order in which they are made smaller."""

UNSHARDED = MegatronConfig(transformer_impl="local")
"""One rank, megatron-core's own layers, nothing computed again: what every layout must equal."""


@dataclass(frozen=True)
class Folded:
    """A layout to run on this machine."""

    name: str  # of its files: "shape", "replicas"
    megatron: MegatronConfig
    dp: int
    differences: tuple[str, ...]  # from the run's own layout, a sentence each

    @property
    def num_ranks(self) -> int:
        return self.dp * replica_size(self.megatron)


def replica_size(megatron: MegatronConfig) -> int:
    """Ranks that hold one copy of the model."""
    m = megatron
    return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size


def fold_layouts(megatron: MegatronConfig, num_ranks: int, max_processes: int) -> tuple[Folded, ...]:
    """One layout, or two where the first has no room for the replicas of a run that has several.

    Raises ValueError when `max_processes` is below 1.
    """
    if max_processes < 1:
        raise ValueError(f"--max-processes is {max_processes}; it must be at least 1.")
    true_dp = num_ranks // replica_size(megatron)
    smaller = _made_smaller(megatron, max_processes)
    dp = 2 if true_dp > 1 and 2 * replica_size(smaller) <= max_processes else 1
    layouts = [_folded("shape", smaller, dp, megatron, true_dp)]
    if true_dp > 1 and dp == 1 and max_processes > 1:
        layouts.append(_folded("replicas", _made_smaller(megatron, max_processes // 2), 2, megatron, true_dp))
    return tuple(layouts)


def _made_smaller(megatron: MegatronConfig, max_ranks: int) -> MegatronConfig:
    for floor in (2, 1):
        for name in AXES.values():
            size, others = getattr(megatron, name), replica_size(megatron) // getattr(megatron, name)
            fitting = [n for n in range(floor, size) if size % n == 0 and n * others <= max_ranks]
            if size > floor and size * others > max_ranks:
                megatron = _changed(megatron, name, max(fitting, default=floor))
    return megatron


def _folded(name: str, megatron: MegatronConfig, dp: int, true: MegatronConfig, true_dp: int) -> Folded:
    differences = [
        f"{axis} is {getattr(megatron, key)} instead of {getattr(true, key)}"
        for axis, key in AXES.items()
        if getattr(megatron, key) != getattr(true, key)
    ]
    if dp != true_dp:
        differences.append(f"dp is {dp} instead of {true_dp}")
    for names, off, needed in _impossible(megatron, dp):
        is_on = [key for key in names if getattr(megatron, key) != off]
        if is_on:
            differences.append(f"{' and '.join(is_on)} off, for want of {needed}")
        for key in is_on:
            megatron = _changed(megatron, key, off)
    return Folded(name, megatron, dp, tuple(differences))


def _impossible(megatron: MegatronConfig, dp: int) -> list[tuple[tuple[str, ...], bool | None, str]]:
    """(settings, their value when off, what they need) of what a smaller layout cannot have."""
    found: list[tuple[tuple[str, ...], bool | None, str]] = []
    if megatron.pipeline_model_parallel_size == 1:
        found.append((("virtual_pipeline_model_parallel_size",), None, "two pipeline stages"))
    if megatron.tensor_model_parallel_size == 1:
        found.append((("sequence_parallel",), False, "two tensor-parallel ranks"))
    if dp * megatron.context_parallel_size == 1:
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        found.append((names, False, "two ranks with the same shard"))
    return found


def _changed(megatron: MegatronConfig, name: str, value: Any) -> MegatronConfig:
    changes: dict[str, Any] = {name: value}
    return replace(megatron, **changes)
