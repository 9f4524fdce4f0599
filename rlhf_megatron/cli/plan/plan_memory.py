"""`rlhf-megatron plan memory RUN.yaml --gpu NAME`: what each GPU of a run holds, by phase,
before there is one.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.batch_rules import compute_longest_rollout
from rlhf_megatron.config.rules.run_rules import count_reward_model_ranks
from rlhf_megatron.planning.plan.gpu_memory import GB, GIB, GPU_MEMORY_GB
from rlhf_megatron.planning.plan.memory_phases import (
    MemoryPhase,
    draw_memory_chart,
    estimate_host_bytes,
    iterate_other_pool_phases,
    list_step_phases,
    plan_run_engine_memory,
)
from rlhf_megatron.ranks.parallel.megatron_setup import prepare_megatron
from rlhf_megatron.weights.hf_reader import read_hf_config
from rlhf_megatron.write_errors import write_text_file


def run_plan_memory_command(args: argparse.Namespace) -> int:
    """Print the planned memory of each GPU and machine of a run by phase, and draw --picture.
    Return 1 where a phase does not fit or an engine's cache does not hold a sample, else 0. Raise
    ConfigError or ValueError for a configuration or model that cannot be planned.
    """
    prepare_megatron()
    from rlhf_megatron.planning.check import memory_table
    from rlhf_megatron.ranks.workers.peak_memory import USABLE_MEMORY_SHARE
    from rlhf_megatron.runtime.rank_roles import RoleBuilder

    loaded = load_run_config(args.config, args.overrides, with_files=False).config
    gpu_bytes = GPU_MEMORY_GB[args.gpu] * GB
    trainer = (
        loaded.trainer if loaded.trainer.device != "cpu" else replace(loaded.trainer, device="cuda")
    )
    config = RoleBuilder(replace(loaded, trainer=trainer)).with_settled_layouts(gpu_bytes).config
    policy = read_hf_config(Path(config.model.path))
    critic = read_hf_config(Path(config.critic.path)) if config.critic.path is not None else policy
    found = memory_table.plan_run_memory(config, policy, critic)
    engine = plan_run_engine_memory(config.rollout, config.model.dtype, policy, gpu_bytes)
    rows: list[tuple[str, MemoryPhase]] = []
    print(
        f"{args.gpu}: {gpu_bytes / GB:.0f} GB, which are {gpu_bytes / GIB:.1f} GiB; GiB on the"
        " fullest rank of each stage"
    )
    phases = [
        (f"stage {stage} ({own.num_ranks} ranks)", phase)
        for stage, own in enumerate(found.stages)
        for phase in list_step_phases(found, stage, engine, config.rollout.colocated)
    ]
    for place, phase in (
        *phases,
        *iterate_other_pool_phases(found, count_reward_model_ranks(config) > 0),
    ):
        rows.append((f"{place.partition(' (')[0]} {phase.name}", phase))
        parts = ", ".join(
            f"{name} {num_bytes / GIB:.2f}"
            for name, num_bytes in phase.bytes_by_use.items()
            if num_bytes
        )
        print(f"  {place} {phase.name:<9} {phase.total_bytes / GIB:7.2f}: {parts}")
    if engine is not None:
        where = "on the trainer's GPUs" if config.rollout.colocated else "on GPUs of their own"
        print(
            f"engines {where}: weights {engine.weight_bytes / GIB:.2f}, cache"
            f" {engine.cache_bytes / GIB:.2f}, which is {engine.num_cache_tokens} tokens of"
            f" {engine.bytes_per_token} bytes"
        )
    for name, num_bytes in estimate_host_bytes(
        config.rollout, config.trainer.n_gpus_per_node, found
    ).items():
        print(f"host memory of a machine: {name} {num_bytes / GIB:.1f}")
    if args.picture is not None:
        write_text_file(
            args.picture, draw_memory_chart(rows, gpu_bytes, f"{args.config} on {args.gpu}")
        )
        print(f"picture: {args.picture}")
    wrong = [
        f"{label} needs {p.total_bytes / GIB:.1f} GiB"
        for label, p in rows
        if p.total_bytes > _get_phase_limit_bytes(p, gpu_bytes, USABLE_MEMORY_SHARE)
    ]
    if engine is not None and engine.num_cache_tokens < compute_longest_rollout(config):
        wrong.append(
            f"the cache of an engine ({engine.cache_bytes / GIB:.1f} GiB) does not hold one sample"
        )
    if wrong:
        print(f"does not fit: {'; '.join(wrong)}; rlhf-megatron plan layout lists layouts that do")
    return int(bool(wrong))


def _get_phase_limit_bytes(phase: MemoryPhase, gpu_bytes: int, usable_share: float) -> float:
    """Return how many bytes of a GPU a phase may take: all of it with an engine's cache, since the
    engine takes a set share; else the usable share, which leaves room for NCCL and others.
    """
    return gpu_bytes if "engine cache" in phase.bytes_by_use else usable_share * gpu_bytes
