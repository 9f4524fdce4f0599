"""Corrections, group filter, greedy samples and resampling over kills and records: bit for bit the
run that was left alone, and its own record run again.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from end_to_end_tools import write_config, write_rows
from forked_runs import Attempt, ForkServer, asked_seeds

from rlhf_megatron.data.seeds import derive_seed

pytestmark = [pytest.mark.dist, pytest.mark.long]

FILTERED = {
    "algorithm.filter_groups": {"enable": True, "max_num_gen_batches": 3},
    "data.train_batch_size": 4,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy samples, filter, decoupled": {
        **FILTERED,
        "algorithm.adv_estimator": "remax",
        "algorithm.rollout_correction": {
            "preset": "decoupled_k3_rs_token_tis",
            "rollout_is_batch_normalize": True,
            "rollout_rs_threshold": ["1e-13"],
            "rollout_rs": ["seq_mean_k3"],
            "rollout_token_veto_threshold": 1e-4,
        },
    },
    "filter, bypass": {
        **FILTERED,
        "actor.policy_loss": {"loss_mode": "reinforce", "params": {}},
        "actor.mini_batch_size": 8,
        "algorithm.rollout_correction": {
            "preset": "bypass_pg_geo_rs_seq_tis",
            "rollout_is_batch_normalize": True,
            "rollout_rs": ["seq_mean_k1"],
            "rollout_rs_threshold": ["0.98_1.02"],
        },
    },
    "resampled, bypass": {
        "algorithm.pf_ppo": {"enable": True},
        "actor.mini_batch_size": 8,
        "algorithm.rollout_correction": {"preset": "bypass_ppo_clip_k3_rs"},
    },
    "resampled, KL in the reward": {
        "algorithm.pf_ppo": {"enable": True, "reweight_method": "max_random"},
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl": {
            "type": "adaptive",
            "kl_coef": 0.05,
            "target_kl": 0.01,
            "horizon": 100,
        },
        "algorithm.rollout_correction": {"preset": "decoupled_seq_is"},
    },
}
KILLS = [
    "loop.after_score:step=1",
    "rollout.mid_generate:step=2",
    "rollout.after_generate:step=3",
    "loop.after_advantages:step=3",
    "actor.after_optimizer_step:step=4",
    "journal.before_write:step=5,nth=2",
    "sync.before_commit:step=5",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with ForkServer(tmp_path_factory.mktemp("consoles")) as server:
        yield server


def make_config(directory: Path) -> Path:
    directory.mkdir()
    train = write_rows(directory / "train.jsonl", 64, seed=1)
    val = write_rows(directory / "val.jsonl", 20, seed=2)
    return write_config(
        directory, {"task": None, "train_files": [str(train)], "val_files": [str(val)]}
    )


def steps_of(attempt: Attempt) -> list[dict[str, Any]]:
    return [row for row in attempt.rows() if row["kind"] == "step"]


@pytest.mark.parametrize("name", CASES)
def test_killed_again_and_again_and_run_from_its_record(
    server: ForkServer, name: str, tmp_path: Path
) -> None:
    settings = {**CASES[name], "trainer.test_freq": 0, "trainer.save_hf": True}
    alone_config = make_config(tmp_path / "alone")
    alone = server.train(alone_config, settings, "--record")
    assert alone.code == 0, alone.console
    acts(name, steps_of(alone))

    config = make_config(tmp_path / "killed")
    attempts = server.until_it_ends(
        config, settings, faults="; ".join(f"kill@{point}" for point in KILLS)
    )
    last = attempts[-1]
    assert last.code == 0, last.console
    codes = [attempt.code for attempt in attempts[:-1]]
    assert codes and set(codes) == {-signal.SIGKILL}
    fired = len(list((tmp_path / "killed" / "faults").iterdir()))
    assert fired == len(codes) >= len(KILLS) - 1, "a fault did not act"
    assert last.rows() == alone.rows()
    assert last.weights() == alone.weights()
    for file in ("samples.jsonl", "mismatch.jsonl"):
        assert (last.run_dir / file).read_bytes() == (alone.run_dir / file).read_bytes()
    asked = asked_seeds(config)
    needed = asked_seeds(alone_config)
    for step in (1, 3, 4):  # in steps 2 and 5 groups were under way
        seeds = [derive_seed(1, step, group, i) for group in range(64) for i in range(4)]
        assert any(needed[seed] for seed in seeds)
        assert all(asked[seed] == needed[seed] for seed in seeds), (
            "what the journal holds is not generated again"
        )

    replay = ("--replay", "5", "--replay-from", str(alone.run_dir))
    replayed = server.train(alone_config, {**settings, "trainer.experiment_name": "tiny"}, *replay)
    assert replayed.code == 0, replayed.console
    rows = [
        json.loads(line)
        for line in (tmp_path / "alone/runs/tiny-replay/metrics.jsonl").read_text().splitlines()
    ]
    for before, after in zip(
        steps_of(alone), [row for row in rows if row["kind"] == "step"], strict=True
    ):
        same = {
            key
            for key in before
            if key.startswith(("actor/", "rollout_corr/", "critic/", "pf_ppo/", "reward/"))
        }
        assert len(same) > 20
        assert {key: after.get(key) for key in same} == {key: before[key] for key in same}


def acts(name: str, steps: list[dict[str, Any]]) -> None:
    """What the case is about happens in its run."""
    assert len(steps) == 5 and sum(row["actor/grad_norm"] > 0 for row in steps) >= 3
    if "filter" in name:
        assert max(row["filter_groups/num_gen_batches"] for row in steps) > 1, (
            "no further batch was generated"
        )
    if "greedy" in name:
        assert all(
            "greedy/rewards/mean" in row and "greedy/response_length/mean" in row for row in steps
        )
        assert any(0 < row["rollout_corr/rollout_rs_masked_fraction"] < 1 for row in steps)
    if "bypass" in name:
        assert all("actor/rollout_rs_masked_fraction" in row for row in steps)
    if "resampled" in name:
        assert all(row["pf_ppo/distinct_samples"] < 1 for row in steps)
    if "KL" in name:
        assert len({row["actor/reward_kl_penalty_coeff"] for row in steps}) > 1, "the weight adapts"
