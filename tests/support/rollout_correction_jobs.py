"""What a worker process runs in the tests of the rollout correction: three recorded steps on one
rank, real roles.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpointer_jobs import hosts
from places import MODEL
from replay_tools import replay_stages
from workers_jobs import CONFIG, make_actor, share
from workers_reference import TEMPERATURE

from rlhf_megatron.algorithms.rollout_correction.correction_params import CorrectionParams
from rlhf_megatron.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CheckConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    RunConfig,
    TrainerConfig,
)
from rlhf_megatron.controller.observe.metrics.metric_catalogue import find_metric
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.controller.scheduler.algorithm_setup import load_algorithm_setup
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import MiniBatch, ScoredBatch, TokenBatch, compute_offsets
from rlhf_megatron.ranks.parallel.world import World
from rlhf_megatron.runtime.inline_worker_group import InlineWorkerGroup
from rlhf_megatron.runtime.role_proxies import RoleProxies

GROUPS = 4
GROUP_SIZE = 4
PROMPT = 6
NUM_STEPS = 3


def config_of(section: dict[str, Any], loss: str, **algorithm: Any) -> RunConfig:
    """One optimizer step a step."""
    return RunConfig(
        model=ModelConfig(path=str(MODEL), dtype="float32", init_seed=3),
        actor=ActorConfig(
            mini_batch_size=GROUPS * GROUP_SIZE,
            ppo_max_token_len_per_gpu=40,
            optim=OptimConfig(lr=1e-4, weight_decay=0.0),
            policy_loss=PolicyLossConfig(loss),
        ),
        algorithm=AlgorithmConfig(
            rollout_correction=RolloutCorrectionConfig(**section), **algorithm
        ),
        checks=CheckConfig(log_prob_max_abs_diff=100.0),
        trainer=TrainerConfig(
            runtime="inline", n_gpus_per_node=1, device="cpu", total_training_steps=NUM_STEPS
        ),
    )


def rollouts(group: InlineWorkerGroup, step: int) -> ScoredBatch:
    """Random answers of 1 to 5 tokens. The engine agrees with the trainer in every other sample;
    else log r is about 0.25.
    """
    generator = torch.Generator().manual_seed(step)
    count = GROUPS * GROUP_SIZE
    lengths = PROMPT + torch.randint(1, 6, (count,), generator=generator)
    mask = torch.cat([torch.arange(length) >= PROMPT for length in lengths.tolist()])
    offsets = compute_offsets(lengths)
    token_ids = torch.randint(2, 16, (mask.numel(),), generator=generator)
    tokens = TokenBatch(offsets, token_ids, mask)
    found = group.scatter_call("actor.log_probs", tokens, token_budget=64, temperature=1.0).result()
    is_off = torch.arange(count).repeat_interleave(lengths) % 2 == 1
    noise = 0.25 * torch.randn(mask.numel(), generator=generator) * is_off * mask
    texts = ("",) * count
    return ScoredBatch(
        offsets=offsets,
        token_ids=token_ids,
        response_mask=mask,
        rollout_log_probs=found.log_probs - noise,
        group_ids=torch.arange(GROUPS).repeat_interleave(GROUP_SIZE),
        sample_ids=torch.arange(count),
        policy_versions=torch.ones(count, dtype=torch.int64),
        finish_reasons=("length",) * count,
        prompts=texts,
        responses=texts,
        labels=texts,
        sources=texts,
        extras=texts,
        rewards=torch.rand(count, generator=generator),
        reward_statuses=("ok",) * (count - 1) + ("masked:lost",),
    )


def three_steps(
    world: World, cases: dict[str, tuple[dict[str, Any], str]], directory: Path
) -> dict[str, Any]:
    """name -> of each step: its metrics, which columns it had, and what of its metrics is not
    listed or not finite.
    """
    found = {}
    recorder = RolloutRecorder(directory / "record")
    for name, (section, loss) in cases.items():
        config = config_of(section, loss)
        with hosts(config) as (group, _):
            group.broadcast_call("actor.reset_optimizer", phase="rl").result()
            if not (directory / "record").exists():
                for step in range(1, NUM_STEPS + 1):
                    recorder.write_step(step, rollouts(group, step))
            found[name] = _steps(config, group, recorder)
    return found


def _steps(
    config: RunConfig, group: InlineWorkerGroup, recorder: RolloutRecorder
) -> list[dict[str, Any]]:
    stages = replay_stages(
        config,
        RoleProxies(group),
        load_algorithm_setup(config),
        recorder,
        PolicySync(policy_version=1),
    )
    steps = []
    for step in range(1, NUM_STEPS + 1):
        scored = stages.score_rollout(
            step, stages.generate_rollout(step, stages.draw_prompts(step))
        )
        train = stages.compute_advantages(step, stages.annotate_step(step, scored))
        train, metrics = stages.update_models(step, train)
        metrics = dict(metrics)
        columns = ("old_log_probs", "entropies", "correction_weights", "is_kept")
        steps.append(
            {
                "metrics": metrics,
                "columns": {name for name in columns if getattr(train, name) is not None},
                "unlisted": [key for key in metrics if find_metric(key) is None],
                "not_finite": [key for key, value in metrics.items() if not math.isfinite(value)],
            }
        )
    return steps


def with_kl_in_reward(world: World, directory: Path) -> list[set[str]]:
    """Columns of each step, in bypass mode."""
    section = {"preset": "bypass_ppo_clip"}
    config = replace(config_of(section, "ppo_clip", use_kl_in_reward=True))
    recorder = RolloutRecorder(directory / "record")
    with hosts(config) as (group, _):
        group.broadcast_call("host.refresh_reference").result()
        for step in range(1, NUM_STEPS + 1):
            recorder.write_step(step, rollouts(group, step))
        return [step["columns"] for step in _steps(config, group, recorder)]


def corrected_update(
    world: World, state: dict[str, Any], batch: MiniBatch, params: CorrectionParams
) -> Any:
    """One update of an actor with the correction in its loss: its result, on leaders."""
    from rlhf_megatron.ranks.workers.actor_losses import CorrectedRowLoss

    config = replace(
        CONFIG, policy_loss=PolicyLossConfig("reinforce"), use_kl_loss=True, entropy_coeff=0.01
    )
    actor = make_actor(world, "llama", state, config)
    actor.row_losses["policy"] = CorrectedRowLoss(actor.row_losses["policy"], params)
    mine, plan = share(world, batch, 40)
    return actor.update(mine, plan, temperature=TEMPERATURE)
