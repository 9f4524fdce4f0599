"""Whatever is registered trains: each estimator and each policy loss, three recorded steps at tp2
pp2 in one world.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import DistPool
from scheduler_shelf_jobs import train_all
from test_replay_layouts import GROUP_SIZE, SMALL, rollouts

from benchmarks import replay_layouts
from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.losses import POLICY_LOSSES
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.config.schema import PolicyLossConfig, RunConfig
from rlhf_megatron.controller.recovery.rollout_recorder import RecordedStart, RolloutRecorder
from rlhf_megatron.controller.scheduler.algorithm_setup import load_algorithm_setup

STEPS = 3
SETTINGS = [
    *replay_layouts.weights(replay_layouts.WARM_MODEL),
    *SMALL,
    "checks.log_prob_max_abs_diff=1000",
    "trainer.desync_freq=0",
    "trainer.device=cpu",
    "actor.optim.lr=1e-3",
]
# Of what has parameters without a default. A part that is not here trains with its own.
ESTIMATOR_PARAMS: dict[str, dict[str, Any]] = {"gdpo": {"gdpo_reward_keys": ["exact_match"]}}
LOSS_PARAMS: dict[str, dict[str, Any]] = {
    "dro": {"dro_beta": 1.0},
    "ppo_clip": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28},
}
AGGREGATIONS = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "seq-mean-token-mean",
}


def config_of(estimator: str = "grpo", loss: str = "ppo_clip", *more: str) -> RunConfig:
    is_ppo = "values" in ADV_ESTIMATORS.get(estimator).needs
    run_file = replay_layouts.PPO_CONFIG if is_ppo else replay_layouts.CONFIG
    loaded = read_run_config(
        run_file, [*SETTINGS, *(["trainer.critic_warmup=0"] if is_ppo else []), *more]
    )
    config = loaded.config
    actor = config.actor
    algorithm = config.algorithm
    policy_loss = PolicyLossConfig(loss, LOSS_PARAMS.get(loss, {}))
    agg_mode = AGGREGATIONS.get(loss, actor.loss_agg_mode)
    config = replace(
        config,
        actor=replace(actor, policy_loss=policy_loss, loss_agg_mode=agg_mode),
        algorithm=replace(
            algorithm, adv_estimator=estimator, params=ESTIMATOR_PARAMS.get(estimator, {})
        ),
    )
    assert validate_config(replace(loaded, config=config)) == []
    load_algorithm_setup(config)
    return config


def make_record(directory: Path) -> Path:
    """Steps as `--record` leaves them, with the parts of the reward and the rewards of
    greedy samples.
    """
    recorder = RolloutRecorder(directory / "record")
    recorder.write_start(RecordedStart(num_warmup_steps=0, policy_version=1))
    for step in range(1, STEPS + 1):
        batch = rollouts(step)
        greedy = (torch.arange(len(batch)) // GROUP_SIZE % 2).float()
        recorder.write_step(
            step,
            replace(
                batch, reward_parts={"exact_match": batch.rewards.clone()}, greedy_rewards=greedy
            ),
        )
    return directory / "record"


def shelf() -> dict[str, RunConfig]:
    configs = {f"estimator {name}": config_of(estimator=name) for name in ADV_ESTIMATORS}
    configs |= {f"loss {name}": config_of(loss=name) for name in POLICY_LOSSES}
    return configs | {"pf_ppo": config_of("rloo", "ppo_clip", "algorithm.pf_ppo.enable=true")}


def test_the_shelf_can_be_written_as_configurations() -> None:
    """Rules and registries agree: nothing that is registered is refused at start."""
    names = {f"estimator {name}" for name in ADV_ESTIMATORS} | {
        f"loss {name}" for name in POLICY_LOSSES
    }
    assert set(shelf()) == names | {"pf_ppo"} and len(names) >= 24


@pytest.mark.dist
@pytest.mark.long
def test_everything_on_the_shelf_trains(dist_pool: DistPool, tmp_path: Path) -> None:
    configs = shelf()
    record = make_record(tmp_path)
    ranks = dist_pool.run(
        train_all, tp=2, pp=2, configs=configs, record=str(record), num_steps=STEPS, timeout_s=900
    )
    for name in configs:
        runs = [rank[name] for rank in ranks]
        assert all(run.metrics == runs[0].metrics for run in runs[1:]), name
        for step, metrics in enumerate(runs[0].metrics, start=1):
            found = {key: metrics[key] for key in ("actor/loss", "actor/grad_norm")}
            assert all(map(isfinite, found.values())), (name, step, found)
            assert found["actor/grad_norm"] > 0, (name, step, found)
            assert (
                metrics["actor/num_optimizer_steps"] == 2
                and metrics["actor/num_skipped_steps"] == 0
            ), (name, step)
        for rank, run in enumerate(runs):
            assert all(1e-5 < change < 1.0 for change in run.moved.values()), (
                name,
                rank,
                run.moved,
            )
    assert set(ranks[0]["estimator gae"].moved) == {"actor", "critic"}
    assert all(0 < metrics["pf_ppo/distinct_samples"] < 1 for metrics in ranks[0]["pf_ppo"].metrics)
