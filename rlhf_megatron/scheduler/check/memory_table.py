"""Memory of the true layout, with what the weight sync needs, as rows for people and for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.rules import world_size
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.models.families.base import table_for
from rlhf_megatron.resharding.plan import StageTraffic, stage_traffic
from rlhf_megatron.scheduler.engines import MIB, engine_dtype
from rlhf_megatron.workers.memory_plan import StageMemory, plan_memory

NOT_INCLUDED = (
    "Not included: activations, temporary tensors of kernels and collectives, the runtime of the device, engines."
)
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
HEADER = (
    "stage",
    "ranks",
    "parameters",
    "gradients",
    "main parameters",
    "moments",
    "a rank",
    "reference",
    "weight sync",
)


@dataclass(frozen=True)
class Memory:
    """Exact bytes of the true layout."""

    stages: tuple[StageMemory, ...]
    reference: tuple[int, ...]  # of the frozen reference model, by stage, bytes a rank; empty: the run has none
    is_reference_on_host: bool  # it is on the device during its forward pass only
    traffic: tuple[StageTraffic, ...]  # of the weight sync, by stage: the sender of each

    @property
    def total(self) -> int:
        """All ranks: parameters, gradients and optimizer."""
        return sum(sum(s.totals) * (s.num_ranks // len(s.totals)) for s in self.stages)


def plan(config: RunConfig, hf_config: Mapping[str, Any]) -> Memory:
    """`hf_config`: of model.path. The reference is taken to be the same where it cannot be read.

    Raises ValueError for a model or layout that is not supported.
    """
    megatron, dtype = config.actor.megatron, getattr(torch, config.model.dtype)
    stages = plan_memory(hf_config, megatron, world_size(config), dtype)
    reference: tuple[int, ...] = ()
    if config.actor.use_kl_loss:
        path = config.reference.path
        known = path is not None and (Path(path) / "config.json").is_file()
        other = (
            plan_memory(read_hf_config(Path(path)), megatron, world_size(config), dtype) if known and path else stages
        )
        reference = tuple(stage.reference for stage in other)
    # Virtual stages change which layers a stage sends, not how many of what size in which order.
    traffic = stage_traffic(
        table_for(hf_config, megatron.tensor_model_parallel_size),
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        engine_dtype(config),
        config.rollout.update_weights_bucket_megabytes * MIB,
    )
    return Memory(stages, reference, config.reference.param_offload, traffic)


def rows(memory: Memory) -> list[Sequence[str]]:
    """One row a pipeline stage, under HEADER; a range where the optimizer's shards are not of one size."""
    found: list[Sequence[str]] = []
    unit = _unit(memory)
    for index, (stage, traffic) in enumerate(zip(memory.stages, memory.traffic, strict=True)):
        reference = _text(memory.reference[index], unit) if memory.reference else "-"
        columns = (stage.main_parameters, stage.moments, stage.totals)
        main, moments, total = (_range(column, unit) for column in columns)
        sync = _text(traffic.peak_buffer, unit)
        fixed = (str(stage.stage), str(stage.num_ranks), _text(stage.parameters, unit), _text(stage.gradients, unit))
        found.append((*fixed, main, moments, total, reference, sync))
    return found


def notes(memory: Memory) -> list[str]:
    """What the columns mean."""
    every = [total for stage in memory.stages for total in stage.totals]
    ranks = sum(stage.num_ranks for stage in memory.stages)
    unit = _unit(memory)
    lines = [
        f"{unit} on each rank of a pipeline stage. `a rank`: parameters, gradients, main parameters and moments.",
        f"From {_text(min(every), unit)} to {_text(max(every), unit)} {unit} a rank;"
        f" {_text(memory.total, unit)} {unit} on {ranks} ranks.",
        "`weight sync`: the largest buffers of the one rank of a stage that sends, two of them in shared memory.",
    ]
    if memory.reference:
        where = "in host memory, and on the device while it is used" if memory.is_reference_on_host else "on the device"
        lines.append(f"`reference`: the frozen reference model, {where}; beside `a rank`.")
    return [*lines, NOT_INCLUDED]


def _unit(memory: Memory) -> str:
    return "GiB" if max(max(stage.totals) for stage in memory.stages) >= UNITS["GiB"] else "MiB"


def _text(num_bytes: int, unit: str) -> str:
    return f"{num_bytes / UNITS[unit]:.3f}"


def _range(values: Sequence[int], unit: str) -> str:
    low, high = _text(min(values), unit), _text(max(values), unit)
    return low if low == high else f"{low} to {high}"
