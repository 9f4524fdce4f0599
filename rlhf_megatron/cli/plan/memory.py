"""`rlhf-megatron plan memory RUN.yaml --gpu NAME`: what each GPU of a run holds, by phase, before there is one."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rlhf_megatron.checkpoint.hf_reader import read_hf_config
from rlhf_megatron.config.load import load_run_config
from rlhf_megatron.config.rules.run import reward_model_ranks
from rlhf_megatron.parallel.prepare import prepare_megatron
from rlhf_megatron.proof.plan.gpus import GB, GPUS
from rlhf_megatron.proof.plan.phases import Phase, engine_of, host_bytes, of_other_pools, phases_of, picture


def memory(args: argparse.Namespace) -> int:
    """Print the plan. Returns 1 where a phase does not fit. Raises ConfigError, ValueError."""
    prepare_megatron()
    from rlhf_megatron.proof.check import memory_table
    from rlhf_megatron.runtime.roles import RoleBuilder
    from rlhf_megatron.workers.activations import FITS

    loaded = load_run_config(args.config, args.overrides, with_files=False).config
    gpu_bytes = GPUS[args.gpu] * GB
    trainer = loaded.trainer if loaded.trainer.device != "cpu" else replace(loaded.trainer, device="cuda")
    config = RoleBuilder(replace(loaded, trainer=trainer)).settled(gpu_bytes).config
    policy = read_hf_config(Path(config.model.path))
    critic = read_hf_config(Path(config.critic.path)) if config.critic.path is not None else policy
    found = memory_table.plan(config, policy, critic)
    engine = engine_of(config.rollout, config.model.dtype, policy, gpu_bytes)
    rows: list[tuple[str, Phase]] = []
    print(f"{args.gpu}: {gpu_bytes / GB:.0f} GB; GB of 10^9 bytes on the fullest rank of each stage")
    phases = [
        (f"stage {stage} ({own.num_ranks} ranks)", phase)
        for stage, own in enumerate(found.stages)
        for phase in phases_of(found, stage, engine, config.rollout.colocated)
    ]
    for place, phase in (*phases, *of_other_pools(found, reward_model_ranks(config) > 0)):
        rows.append((f"{place.partition(' (')[0]} {phase.name}", phase))
        parts = ", ".join(f"{name} {num_bytes / GB:.2f}" for name, num_bytes in phase.parts.items() if num_bytes)
        print(f"  {place} {phase.name:<9} {phase.total / GB:7.2f}: {parts}")
    if engine is not None:
        where = "on the trainer's GPUs" if config.rollout.colocated else "on GPUs of their own"
        print(
            f"engines {where}: weights {engine.weights / GB:.2f}, cache {engine.cache / GB:.2f}, which is"
            f" {engine.num_tokens} tokens of {engine.token_bytes} bytes"
        )
    for name, num_bytes in host_bytes(config.rollout, config.trainer.n_gpus_per_node, found).items():
        print(f"host memory of a machine: {name} {num_bytes / GB:.1f}")
    if args.picture is not None:
        args.picture.write_text(picture(rows, gpu_bytes, f"{args.config} on {args.gpu}"))
        print(f"picture: {args.picture}")
    wrong = [f"{label} needs {p.total / GB:.1f} GB" for label, p in rows if p.total > _limit(p, gpu_bytes, FITS)]
    if engine is not None and engine.num_tokens < config.data.max_prompt_length + config.data.max_response_length:
        wrong.append(f"the cache of an engine ({engine.cache / GB:.1f} GB) does not hold one sample")
    if wrong:
        print(f"does not fit: {'; '.join(wrong)}; rlhf-megatron plan layout lists layouts that do")
    return int(bool(wrong))


def _limit(phase: Phase, gpu_bytes: int, share: float) -> float:
    """Engines take the share that they are told; beside the trainer's states there must be room for NCCL and others."""
    return gpu_bytes if "engine cache" in phase.parts else share * gpu_bytes
