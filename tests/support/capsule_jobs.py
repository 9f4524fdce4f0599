"""What a worker process runs in the tests of capsules: real roles in one process, real files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from checkpointer_jobs import hosts
from scheduler_samples import train_batch

from rlhf_megatron.config.rollout_correction_rules import is_bypass_mode
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    find_non_finite_columns,
    make_valid_sample_mask,
)
from rlhf_megatron.controller.recovery.nonfinite_skips import NonFiniteNumbers, NonFiniteSkips
from rlhf_megatron.controller.recovery.skip_capsule import CapsuleStore
from rlhf_megatron.controller.scheduler.advantage_stage import compute_correction_columns
from rlhf_megatron.controller.scheduler.model_updates import (
    UpdateSettings,
    plan_actor_update,
    plan_critic_update,
    run_role_updates,
    skip_step_with_bad_columns,
)
from rlhf_megatron.controller.scheduler.run_replay import CapsuleReplayResult, replay_capsule
from rlhf_megatron.data.batch import TrainBatch
from rlhf_megatron.data.codec import read_message_file, write_message_file
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.ranks.workers.actor_losses import parse_correction_params
from rlhf_megatron.runtime.role_proxies import RoleProxies


def small_batch() -> TrainBatch:
    """`train_batch` with ids of the tiny model, and what a critic needs."""
    batch = train_batch()
    mask = batch.response_mask.float()
    old = -3.0 * mask
    return replace(
        batch,
        token_ids=batch.token_ids % 13,
        old_log_probs=old,
        rollout_log_probs=old,
        advantages=(batch.advantages - 4) * mask,
        values=0.1 * mask,
        returns=0.5 * mask,
    )


@dataclass(frozen=True)
class Skipped:
    """What came of a run with skips."""

    metrics: list[dict[str, float]]
    notes: list[str]
    error: str
    replays: dict[str, CapsuleReplayResult]


def corrected(config: RunConfig, batch: TrainBatch) -> TrainBatch:
    """With the columns of the rollout correction that the controller makes, where the
    configuration has one.
    """
    section = config.algorithm.rollout_correction
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(1))
    if section != type(section)():
        batch = replace(
            batch, rollout_log_probs=batch.rollout_log_probs + 0.1 * noise * batch.response_mask
        )
    params = parse_correction_params(section)
    return replace(
        batch,
        **compute_correction_columns(
            batch, make_valid_sample_mask(batch), params, is_bypass_mode(section)
        )[0],
    )


def skipped_updates(world: World, config: RunConfig, run_dir: Path) -> Skipped:
    """Three steps whose sample 5 has an advantage without bound, in one of two mini-batches;
    replays of the first.
    """
    batch = corrected(config, small_batch())
    advantages = batch.advantages.clone()
    advantages[int(batch.offsets[6]) - 1] = torch.inf
    bad = replace(batch, advantages=advantages)
    notes: list[str] = []
    metrics = []
    error = ""
    skips = NonFiniteSkips(
        config.trainer,
        CapsuleStore(
            run_dir, render_config_yaml(config), config.trainer.capsules_kept, notes.append
        ),
        notes.append,
    )
    with hosts(config) as (group, _):
        try:
            for step in (1, 2, 3):
                metrics.append(
                    run_role_updates(
                        [
                            plan_actor_update(
                                RoleProxies(group),
                                UpdateSettings.from_run_config(config),
                                step,
                                bad,
                            )
                        ],
                        step,
                        skips,
                    )
                )
        except NonFiniteNumbers as over:
            error = str(over)
    path = run_dir / "capsules" / "step_000001_actor"
    replays = {"as it was": replay(config, run_dir, path)}
    mended = replace(read_message_file(path / "mini_batch.batch"))
    write_message_file(
        path / "mini_batch.batch",
        replace(mended, advantages=mended.advantages.nan_to_num(posinf=1.0)),
    )
    replays["mended"] = replay(config, run_dir, path)
    return Skipped(metrics, notes, error, replays)


def replay(config: RunConfig, run_dir: Path, path: Path) -> CapsuleReplayResult:
    """In a world of its own, as the program does it."""
    with hosts(config) as (group, _):
        kept_open = group.close
        group.close = lambda: None  # type: ignore[method-assign]
        try:
            return replay_capsule(config, lambda: group, run_dir, path)
        finally:
            group.close = kept_open  # type: ignore[method-assign]


def left_out(world: World, config: RunConfig, run_dir: Path) -> Skipped:
    """A policy whose weights make no number: its log-probs are found before they are trained on."""
    notes: list[str] = []
    skips = NonFiniteSkips(
        config.trainer,
        CapsuleStore(
            run_dir, render_config_yaml(config), config.trainer.capsules_kept, notes.append
        ),
        notes.append,
    )
    batch = small_batch()
    with hosts(config) as (group, roles):
        parameters = roles["actor"].backend.named_parameters()
        parameters["decoder.layers.1.mlp.linear_fc2.weight"].data[0, 0] = torch.inf
        found = group.scatter_call(
            "actor.log_probs", batch, token_budget=1000, temperature=1.0, with_entropy=False
        ).result()
        batch = replace(batch, old_log_probs=found.log_probs)
        workers = RoleProxies(group)
        updates = [
            plan_critic_update(workers, UpdateSettings.from_run_config(config), 7, batch),
            plan_actor_update(workers, UpdateSettings.from_run_config(config), 7, batch),
        ]
        metrics = skip_step_with_bad_columns(
            workers, updates, 7, skips, batch, find_non_finite_columns(batch)
        )
    return Skipped(
        [metrics],
        notes,
        "",
        {"it": replay(config, run_dir, run_dir / "capsules" / "step_000007_actor")},
    )


def facts_of(path: Path) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads((path / "capsule.json").read_text())
    return found
