"""Two recorded steps trained on one rank and at tp2: the losses and gradient norms that a run
reports must agree.

Of PPO: with the critic in the pool of the actor, and at tp2 in a pool of its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import replay_layouts
from benchmarks.parity.layouts import LAYOUTS
from benchmarks.replay_layouts import (
    CONFIG,
    PPO_CONFIG,
    PPO_SETTINGS,
    Placement,
    Row,
    compare,
    mean_abs_advantage,
    replay_all,
)
from rlhf_megatron.config.load import read_run_config
from rlhf_megatron.config.rules.validate import validate_config
from rlhf_megatron.controller.recovery.rollout_recorder import RecordedStart, RolloutRecorder
from rlhf_megatron.data.batch import ScoredBatch, compute_offsets

GROUPS = 8
GROUP_SIZE = 4
PROMPT = 6
SMALL = [
    f"data.train_batch_size={GROUPS}",
    f"rollout.n={GROUP_SIZE}",
    "actor.mini_batch_size=16",
    "actor.ppo_max_token_len_per_gpu=96",
]


def rollouts(seed: int) -> ScoredBatch:
    """Random answers of 1 to 4 tokens. In every group the first sample is right, the
    last one wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    count = GROUPS * GROUP_SIZE
    lengths = PROMPT + torch.randint(1, 5, (count,), generator=generator)
    offsets = compute_offsets(lengths)
    mask = torch.cat([torch.arange(length) >= PROMPT for length in lengths.tolist()])
    rewards = torch.randint(0, 2, (count,), generator=generator).float().view(GROUPS, GROUP_SIZE)
    rewards[:, 0] = 1.0
    rewards[:, -1] = 0.0
    texts = ("",) * count
    return ScoredBatch(
        offsets=offsets,
        token_ids=torch.randint(2, 16, (int(offsets[-1]),), generator=generator),
        response_mask=mask,
        rollout_log_probs=torch.zeros(mask.numel()),
        group_ids=torch.arange(GROUPS).repeat_interleave(GROUP_SIZE),
        sample_ids=torch.arange(count),
        policy_versions=torch.ones(count, dtype=torch.int64),
        finish_reasons=("length",) * count,
        prompts=texts,
        responses=texts,
        labels=texts,
        sources=texts,
        extras=("",) * len(texts),
        rewards=rewards.flatten(),
        reward_statuses=("ok",) * count,
    )


def make_record(directory: Path, num_steps: int) -> Path:
    """A run directory with a record, as `--record` leaves it."""
    recorder = RolloutRecorder(directory / "record")
    recorder.write_start(RecordedStart(num_warmup_steps=0, policy_version=1))
    for step in range(1, num_steps + 1):
        recorder.write_step(step, rollouts(step))
    return directory


START = [
    *replay_layouts.weights(replay_layouts.WARM_MODEL),
    *SMALL,
    "checks.log_prob_max_abs_diff=100",
]


@pytest.mark.dist
def test_two_steps_agree_at_tp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_layouts, "TIMEOUT_S", 240.0)
    record = make_record(tmp_path / "made", 2)
    advantages = [mean_abs_advantage(record, step) for step in (1, 2)]
    rows = replay_all(CONFIG, record, START, [Placement(LAYOUTS["tp2"])], advantages, tmp_path)
    assert [(row.layout, row.step) for row in rows] == [("tp2", 1)] * 3 + [("tp2", 2)] * 3
    assert not [row for row in rows if not row.ok], replay_layouts.table(rows)
    assert all(0.5 < advantage < 1.5 for advantage in advantages)
    norms = [row.value for row in rows if row.quantity == "actor/grad_norm"]
    assert min(norms) > 0.01 and norms[0] != norms[1], (
        "the steps must train something, and not the same thing"
    )


@pytest.mark.dist
def test_a_critic_in_a_pool_of_its_own_learns_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step it learns alone, in the second both do."""
    monkeypatch.setattr(replay_layouts, "TIMEOUT_S", 240.0)
    record = make_record(tmp_path / "made", 2)
    placement = Placement(LAYOUTS["one_rank"], LAYOUTS["tp2"])
    rows = replay_all(
        PPO_CONFIG, record, [*START, *PPO_SETTINGS], [placement], [1.0, 1.0], tmp_path
    )
    of_critic = ["critic/vf_loss", "critic/grad_norm"]
    of_both = ["actor/loss", "actor/pg_loss", "actor/grad_norm", *of_critic]
    expected = [(1, name) for name in of_critic] + [(2, name) for name in of_both]
    assert [(row.step, row.quantity) for row in rows] == expected and {
        row.layout for row in rows
    } == {placement.name}
    assert not [row for row in rows if not row.ok], replay_layouts.table(rows)
    value_losses = [row.value for row in rows if row.quantity == "critic/vf_loss"]
    assert value_losses[1] < 0.9 * value_losses[0], (
        "the critic must learn something in its first step"
    )


def test_mean_abs_advantage_is_that_of_the_groups(tmp_path: Path) -> None:
    """A group of rewards 1 0 has mean 1/2 and standard deviation sqrt(1/2): both advantages are
    sqrt(1/2). A group of equal rewards has 0. With as many response tokens in both, the mean
    is sqrt(1/2) / 2.
    """
    batch = rollouts(0)
    keep = replace(
        batch,
        offsets=torch.arange(0, 9, 2),
        token_ids=batch.token_ids[:8],
        response_mask=torch.tensor([False, True] * 4),
        rollout_log_probs=torch.zeros(8),
        group_ids=torch.tensor([5, 5, 6, 6]),
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        **{
            name: getattr(batch, name)[:4]
            for name in ("sample_ids", "policy_versions", "finish_reasons", "prompts")
        },
        **{
            name: getattr(batch, name)[:4]
            for name in ("responses", "labels", "sources", "extras", "reward_statuses")
        },
    )
    RolloutRecorder(tmp_path / "record").write_step(1, keep)
    assert mean_abs_advantage(tmp_path, 1) == pytest.approx(0.5**0.5 / 2, rel=1e-5)


def test_the_bars_are_those_of_the_comparison() -> None:
    one = {"actor/loss": 0.5, "actor/pg_loss": 0.5, "actor/grad_norm": 2.0, "critic/vf_loss": 0.01}
    near = {
        "actor/loss": 0.50007,
        "actor/pg_loss": 0.50009,
        "actor/grad_norm": 2.00019,
        "critic/vf_loss": 0.0100009,
    }
    far = {
        "actor/loss": 0.50009,
        "actor/pg_loss": 0.50007,
        "actor/grad_norm": 2.00021,
        "critic/vf_loss": 0.0100011,
    }

    def misses(found: dict[str, float]) -> list[str]:
        rows: list[Row] = compare("tp2", [found], [one], [0.8])
        return [row.quantity for row in rows if not row.ok]

    assert misses(near) == ["actor/pg_loss"], "1e-4 x 0.8 is the bar of a loss"
    assert misses(far) == ["actor/loss", "actor/grad_norm", "critic/vf_loss"]
    with pytest.raises(KeyError, match="vf_loss"):  # a step in which only one side has a critic
        compare(
            "tp2",
            [near],
            [{name: value for name, value in one.items() if "critic" not in name}],
            [0.8],
        )


def test_a_placement_is_what_a_user_would_write() -> None:
    found = Placement(LAYOUTS["tp2_pp2"], LAYOUTS["tp2"])
    assert found.name == "tp2_pp2_critic_tp2"
    assert found.settings == [
        "actor.megatron.tensor_model_parallel_size=2",
        "actor.megatron.pipeline_model_parallel_size=2",
        "actor.megatron.use_distributed_optimizer=false",
        'actor.megatron.transformer_impl="local"',
        "critic.megatron.tensor_model_parallel_size=2",
        "critic.megatron.pipeline_model_parallel_size=1",
        "critic.megatron.use_distributed_optimizer=false",
        'critic.megatron.transformer_impl="local"',
        "critic.num_ranks=2",
        "trainer.runtime=torchrun",
        "trainer.n_gpus_per_node=6",
    ]
    for placement in replay_layouts.PPO_REPLAYED:
        settings = [
            *placement.settings,
            *PPO_SETTINGS,
            *replay_layouts.weights(replay_layouts.WARM_MODEL),
        ]
        assert validate_config(read_run_config(PPO_CONFIG, settings)) == [], placement.name
