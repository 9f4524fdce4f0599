"""PPO through the command line: a run whose critic has a pool of its own, and replays of it
in either place.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from end_to_end_tools import ONE_RANK, Finished, train, write_config
from places import ROOT
from safetensors.torch import load_file

from rlhf_megatron.controller.observe.metrics import metric_catalogue as metric_names
from rlhf_megatron.controller.observe.metrics.batch_metrics import count_sampled_tokens
from rlhf_megatron.controller.recovery.rollout_recorder import RolloutRecorder
from rlhf_megatron.data.batch import ScoredBatch

pytestmark = pytest.mark.dist
CRITIC_LR = 1e-4
NUM_STEPS = 3
SETTINGS = {
    "trainer.total_training_steps": NUM_STEPS,
    "trainer.critic_warmup": 1,
    "critic.optim.lr": CRITIC_LR,
    "algorithm.params": {"gamma": 1.0, "lam": 0.95},
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0.2, "target_kl": 1e-6, "horizon": 160},
}
# the critic at tp 2, as in the configuration
OWN_POOL = {"trainer.n_gpus_per_node": 4, "tp": 1, "pp": 2}
SAME_POOL = ONE_RANK | {"critic.num_ranks": 0}
COMPARED = (
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "critic/vf_loss",
    "critic/vpred_mean",
    "critic/grad_norm",
)


def finished(run: Finished) -> Finished:
    assert run.exit_code == 0, run.console
    return run


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """configs/quickstart_ppo_pool.yaml made small: actor pp2, critic tp2 on ranks of its own, KL
    in the reward.
    """
    config = write_config(
        tmp_path_factory.mktemp("ppo"), base=ROOT / "configs" / "quickstart_ppo_pool.yaml"
    )
    settings = SETTINGS | OWN_POOL | {"warmup.save_hf": True, "trainer.save_hf": True}
    return finished(train(config, settings, "--record"))


def replay(run: Finished, settings: dict) -> Finished:
    words = ("--replay", str(NUM_STEPS), "--replay-from", str(run.run_dir))
    return finished(train(run.directory / "tiny.yaml", SETTINGS | settings, *words))


def recorded(run: Finished, step: int) -> ScoredBatch:
    return RolloutRecorder(run.run_dir / "record").read_step(step)


def test_all_ranks_of_both_pools_end_well(ppo: Finished) -> None:
    assert ppo.left_over() == [] and "Traceback" not in ppo.console
    assert "actor tp1 pp2 dp1 on 2 ranks and critic tp2 pp1 dp1 on 2 ranks" in ppo.console
    rows = [row for kind in ("step", "evaluation", "warmup") for row in ppo.rows(kind)]
    written = {key for row in rows for key in row} - {"kind", "step", "seconds"}
    assert {"critic/vf_explained_var", "critic/returns/mean", "actor/reward_kl_penalty"} <= written
    assert [key for key in sorted(written) if metric_names.find_metric(key) is None] == []


def test_the_critic_learns_alone_first_and_the_policy_version_counts_syncs(ppo: Finished) -> None:
    """Sync 1 for the accuracy of the warm-up, sync 2 before the loop; none after the
    critic's step alone.
    """
    steps = ppo.rows("step")
    assert [row["actor/num_optimizer_steps"] for row in steps] == [
        0,
        1,
        1,
    ] and "actor/loss" not in steps[0]
    assert [row["critic/num_optimizer_steps"] for row in steps] == [1, 1, 1]
    assert [row["policy/version"] for row in steps] == [2, 3, 4] and [
        row["policy/lag"] for row in steps
    ] == [0, 0, 0]
    assert [set(recorded(ppo, step).policy_versions.tolist()) for step in (1, 2, 3)] == [
        {2},
        {2},
        {3},
    ]
    assert ["sync/num_bytes" in row for row in steps] == [False, True, True]
    assert all(row["training/rollout_log_probs_diff_max"] <= 1e-4 for row in steps)


def test_the_first_value_loss_by_hand(ppo: Finished) -> None:
    """All values are 0 at first and the policy is the reference: with discount 1 and lambda 0.95
    the token that has k tokens of its response behind it has the return 0.95^k times the reward;
    the loss is half the mean square.
    """
    batch = recorded(ppo, 1)
    row = ppo.rows("step")[0]
    assert batch.rewards.unique().tolist() == [0.0, 1.0], "choose other labels"
    returns = torch.cat(
        [
            reward * 0.95 ** torch.arange(length - 1, -1, -1)
            for reward, length in zip(
                batch.rewards.tolist(), count_sampled_tokens(batch).tolist(), strict=True
            )
        ]
    )
    assert row["critic/values/min"] == row["critic/values/max"] == 0
    assert row["critic/returns/mean"] == pytest.approx(returns.mean().item(), rel=1e-4)
    assert row["critic/vf_loss"] == pytest.approx(0.5 * returns.square().mean().item(), rel=1e-4)
    assert row["critic/lr"] == CRITIC_LR and row["critic/grad_norm"] > 0
    assert ppo.rows("step")[1]["critic/values/mean"] != 0


def test_kl_in_the_reward_grows_with_the_policys_distance(ppo: Finished) -> None:
    """Far above its target of 1e-6 nats: the weight grows by 0.2 x 16 samples / 160 = 2 % after
    such a step, and falls as much after one without any KL. The policy moves in step 2 for
    the first time.
    """
    first, second, third = ppo.rows("step")
    assert (
        abs(first["actor/reward_kl_penalty"]) < 1e-8
        and abs(second["actor/reward_kl_penalty"]) < 1e-8
    )
    assert abs(third["actor/reward_kl_penalty"]) > 1e-6
    weights = [row["actor/reward_kl_penalty_coeff"] for row in (first, second, third)]
    assert weights == pytest.approx([0.2, 0.2 * 0.98, 0.2 * 0.98**2])


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """A file a pipeline stage."""
    return {
        name: value
        for file in directory.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


def test_the_critic_starts_as_the_warmed_up_policy(ppo: Finished) -> None:
    """Adam moves a weight by about its learning rate a step at most: three small steps from the
    policy after the warm-up, whose own three steps were fifty times as large.
    """
    critic, warm, policy = (
        tensors_of(ppo.run_dir / name) for name in ("hf_critic", "warm_model", "hf")
    )
    assert critic.pop("score.weight").shape == (1, 128) and critic.pop("score.bias").shape == (1,)
    assert critic.keys() == warm.keys() == policy.keys()
    moved = [(critic[name] - warm[name]).abs().max().item() for name in warm]
    assert 0 < max(moved) < 2 * NUM_STEPS * CRITIC_LR
    apart = [(critic[name] - policy[name]).abs().max().item() for name in warm]
    assert max(apart) > 0


def test_a_replay_with_both_pools_gives_the_same_numbers_bit_for_bit(ppo: Finished) -> None:
    again = replay(ppo, OWN_POOL)
    assert not (again.run_dir / "warm_model").exists(), (
        "it was kept only until the critic had read it"
    )
    for before, after in zip(ppo.rows("step"), again.rows("step"), strict=True):
        same = {
            key
            for key in before
            if key.startswith(("actor/", "training/", "critic/", "policy/", "reward/"))
        }
        same -= {"training/epoch"}  # a replay has no prompts
        assert {key: after[key] for key in same} == {key: before[key] for key in same}


def test_a_critic_in_the_actors_pool_on_one_rank_has_the_same_losses(ppo: Finished) -> None:
    one = replay(ppo, SAME_POOL)
    assert one.summary()["layout"] == "tp1 pp1 dp1"
    for step, (two, one_rank) in enumerate(
        zip(ppo.rows("step"), one.rows("step"), strict=True), start=1
    ):
        compared = [key for key in COMPARED if key in two]
        assert len(compared) == (3 if step == 1 else 6)
        for key in compared:
            assert one_rank[key] == pytest.approx(two[key], rel=1e-4, abs=2e-5), (step, key)
