"""Numbers that are not finite, as the controller sees them: found, counted, kept in a
capsule, run again.
"""

from __future__ import annotations

import json
import math
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from capsule_jobs import facts_of, left_out, skipped_updates
from dist_pool import DistPool
from end_to_end_tools import ONE_RANK, train, write_config
from places import MODEL
from scheduler_samples import train_batch

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    KLControlConfig,
    ModelConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    RunConfig,
    TrainerConfig,
)
from rlhf_megatron.config.show import render_config_yaml
from rlhf_megatron.controller.observe.metrics.batch_metrics import (
    NonFiniteColumn,
    describe_non_finite_columns,
    find_non_finite_columns,
)
from rlhf_megatron.controller.recovery.nonfinite_skips import (
    NonFiniteNumbers,
    NonFiniteSkips,
    merge_rank_findings,
    summarise_skipped_update,
)
from rlhf_megatron.controller.recovery.run_checkpointer import (
    ReplicasDiffer,
    require_equal_replicas,
)
from rlhf_megatron.controller.recovery.skip_capsule import CapsuleStore, read_skip_capsule
from rlhf_megatron.controller.scheduler.advantage_stage import AdvantageStage
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup
from rlhf_megatron.controller.scheduler.model_updates import RoleUpdate, run_role_updates
from rlhf_megatron.data.batch import MiniBatch, TrainBatch
from rlhf_megatron.data.replica_plan import ReplicaPlan
from rlhf_megatron.ranks.workers.rank_reports import (
    BadTensor,
    NonFiniteReport,
    ReplicaDifference,
    ReplicaReport,
)
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.role_proxies import RoleProxies
from rlhf_megatron.weights.parallel_layout import ParallelLayout

CONFIG = RunConfig(
    model=ModelConfig(path=str(MODEL), init_seed=3),
    actor=ActorConfig(mini_batch_size=5, ppo_max_token_len_per_gpu=16),
    critic=CriticConfig(),
    algorithm=AlgorithmConfig(adv_estimator="gae"),
    trainer=TrainerConfig(
        runtime="inline", n_gpus_per_node=1, device="cpu", max_consecutive_skips=3, capsules_kept=1
    ),
)


def with_nan(batch: TrainBatch, column: str, *tokens: int) -> TrainBatch:
    values = getattr(batch, column).clone()
    values[list(tokens)] = math.nan
    return replace(batch, **{column: values})


def test_columns_that_are_not_finite_are_named_with_their_samples() -> None:
    """Samples start at tokens 0, 2, 5, 9, 14; each first token is a prompt's,
    which nobody reads.
    """
    batch = train_batch()
    assert find_non_finite_columns(batch) == ()
    assert find_non_finite_columns(with_nan(batch, "old_log_probs", 0, 2, 5)) == ()
    masked = replace(batch, reward_statuses=("ok",) * 3 + ("masked:gone",) + ("ok",) * 6)
    found = find_non_finite_columns(
        with_nan(with_nan(masked, "old_log_probs", 3, 4, 10), "advantages", 1)
    )
    assert found == (
        NonFiniteColumn("old_log_probs", (1, 3), 3),
        NonFiniteColumn("advantages", (0,), 1),
    )
    assert describe_non_finite_columns(found, batch) == (
        "old_log_probs (3 tokens of sample 1 '1', sample 3 '3'); advantages (1 tokens of"
        " sample 0 '0')"
    )


def test_a_nan_does_not_reach_the_weight_of_the_kl_term() -> None:
    control = KLControlConfig("adaptive", kl_coef=0.5, target_kl=0.4, horizon=1000)
    entry = ADV_ESTIMATORS.get("grpo")
    parts = AlgorithmSetup(entry.build, entry.params(), needs_reference=True)
    stage = AdvantageStage(AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=control), parts)
    batch = replace(train_batch(), ref_log_probs=torch.zeros(65))
    train, _ = stage(with_nan(batch, "old_log_probs", 3))
    assert stage.kl_controller is not None and stage.kl_controller.state() == {"coef": 0.5}
    assert [column.name for column in find_non_finite_columns(train)] == ["old_log_probs"]


class Group:
    """Hosts of one rank: the outcome of each actor update is given; whatever else was asked
    of them is kept.
    """

    def __init__(self, *are_skipped: bool, reports: list[ReplicaReport] | None = None) -> None:
        self.layouts = {"actor": ParallelLayout(1)}
        self.outcomes = list(are_skipped)
        self.skips: list[NonFiniteReport] = []
        self.sent: list[Any] = []
        self.reports = reports or []

    def scatter_call(
        self, method: str, batch: Any, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        is_skipped = self.outcomes[len(self.sent)]
        self.sent.append(arguments["capsule"])
        if is_skipped:
            bad = BadTensor("a.weight", len(self.skips) + 1, 0, 8)
            self.skips.append(
                NonFiniteReport("dp0 pp0 tp0", math.nan, (bad,), (), (), (), 0, has_weights=True)
            )
        return done(
            UpdateResult({"actor/loss": 1.0}, math.nan if is_skipped else 2.0, 0.1, is_skipped)
        )

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        if method.endswith("check_replicas"):
            return done(self.reports)
        assert method == "actor.take_skip_reports", method
        taken = self.skips
        self.skips = []
        return done([taken])


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def updates_of(group: Any, count: int) -> list[RoleUpdate]:
    """Mini-batch i is sample i."""
    batch = train_batch()

    def mini_batch(number: int) -> MiniBatch:
        mask = torch.tensor([False, True])
        return MiniBatch(
            torch.tensor([0, 2]), torch.tensor([number, number]), mask, mask.float(), mask.float()
        )

    def samples_of(number: int) -> TrainBatch:
        from rlhf_megatron.data.batch import select_samples

        return select_samples(batch, [number])

    actor = RoleProxies(group).actor
    return [
        RoleUpdate(
            actor,
            partial(actor.update, loss="policy"),
            1,
            100,
            lambda: map(mini_batch, range(count)),
            samples_of,
        )
    ]


def test_skips_are_counted_over_steps_and_a_step_that_is_made_ends_the_row() -> None:
    skips = NonFiniteSkips(TrainerConfig(max_consecutive_skips=3))
    metrics = run_role_updates(updates_of(Group(False, True, True), 3), 1, skips)
    assert (
        metrics["actor/num_skipped_steps"],
        metrics["actor/grad_norm"],
        skips.num_consecutive,
    ) == (2, 2.0, 2)
    run_role_updates(updates_of(Group(False), 1), 2, skips)
    assert skips.num_consecutive == 0
    metrics = run_role_updates(updates_of(Group(True, True), 2), 3, skips)
    assert metrics["actor/num_skipped_steps"] == 2 and math.isnan(metrics["actor/loss"])
    resumed = NonFiniteSkips(TrainerConfig(max_consecutive_skips=3))
    resumed.restore_count(skips.num_consecutive)
    assert resumed.num_consecutive == 2
    with pytest.raises(
        NonFiniteNumbers, match=r"3 skips in a row \(trainer.max_consecutive_skips = 3\).*step 4"
    ):
        run_role_updates(updates_of(Group(True), 1), 4, resumed)


def test_a_role_that_makes_steps_does_not_hide_one_that_does_not() -> None:
    skips = NonFiniteSkips(TrainerConfig(max_consecutive_skips=3))
    for _ in range(2):
        skips.count_optimizer_step("actor", is_skipped=True)
        skips.count_optimizer_step("critic", is_skipped=False)
    assert skips.num_consecutive == 2


def test_nothing_is_sent_past_the_limit_and_the_capsule_has_the_first_mini_batch(
    tmp_path: Path,
) -> None:
    """Of 8 mini-batches the second is the first skip; two calls are under way when the
    limit of 2 is seen.
    """
    notes: list[str] = []
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, max_consecutive_skips=2))
    skips = NonFiniteSkips(
        config.trainer,
        CapsuleStore(tmp_path, render_config_yaml(config), 3, notes.append),
        notes.append,
    )
    group = Group(False, *[True] * 7)
    path = tmp_path / "capsules" / "step_000012_actor"
    with pytest.raises(NonFiniteNumbers, match=rf"(?s)a.weight \(1 NaN of 8\).*--replay {path}$"):
        run_role_updates(updates_of(group, 8), 12, skips)
    unfinished = tmp_path / "capsules" / ".step_000012_actor.partial"
    assert group.sent == [unfinished] * 5 and not unfinished.exists()
    capsule = read_skip_capsule(path)
    assert capsule.mini_batch is not None and capsule.mini_batch.token_ids.tolist() == [1, 1]
    assert capsule.samples.sample_ids.tolist() == [1]
    facts = capsule.facts
    assert (facts["step"], facts["role"], facts["mini_batch"], facts["num_skipped"]) == (
        12,
        "actor",
        1,
        4,
    )
    assert facts["ranks"] == [
        {"where": "dp0 pp0 tp0", "gradients": ["a.weight (1 NaN of 8)"], "parameters": []}
    ]
    assert "experiment_name: run" in (path / "config.yaml").read_text()


def test_so_many_steps_have_capsules_as_are_to_be_kept(tmp_path: Path) -> None:
    directory = tmp_path / "capsules"
    (directory / "step_000004_actor").mkdir(parents=True)
    (directory / ".step_000003_actor.partial").mkdir()
    capsules = CapsuleStore(tmp_path, render_config_yaml(CONFIG), 2, print)
    assert not (directory / ".step_000003_actor.partial").exists()
    assert capsules.choose_partial_directory(4, "actor") is None
    assert (
        capsules.choose_partial_directory(4, "critic") == directory / ".step_000004_critic.partial"
    )
    assert capsules.choose_partial_directory(9, "actor") == directory / ".step_000009_actor.partial"
    (directory / "step_000009_actor").mkdir()
    assert (
        capsules.choose_partial_directory(10, "actor") is None
        and capsules.choose_partial_directory(9, "critic") is not None
    )
    assert capsules.find_newest() == directory / "step_000009_actor"


def test_a_disk_that_refuses_costs_the_capsule_only(tmp_path: Path) -> None:
    notes: list[str] = []
    (tmp_path / "capsules").write_text("not a directory")
    skips = NonFiniteSkips(
        CONFIG.trainer,
        CapsuleStore(tmp_path, render_config_yaml(CONFIG), 3, notes.append),
        notes.append,
    )
    metrics = run_role_updates(updates_of(Group(True, False), 2), 1, skips)
    assert metrics["actor/num_skipped_steps"] == 1
    assert notes[0].startswith("no capsule of step 1: ") and len(notes) == 2


def test_directories_that_are_no_capsules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not a capsule: it has no capsule.json"):
        read_skip_capsule(tmp_path)
    (tmp_path / "capsule.json").write_text(
        '{"format": "rlhf_megatron capsule", "format_version": 2}'
    )
    with pytest.raises(
        ValueError, match="capsule of format 2; this version of the package reads 1"
    ):
        read_skip_capsule(tmp_path)
    (tmp_path / "capsule.json").write_text("[1]")
    with pytest.raises(ValueError, match="not the file of a capsule"):
        read_skip_capsule(tmp_path)


def test_what_ranks_saw_is_told_in_samples_of_the_mini_batch() -> None:
    """Two replicas of two cp ranks. Samples 0, 1, 2 have 2, 3, 4 tokens; the second replica has a
    no-op sample (2).

    Replica 0 holds samples 2 and 0: its tokens 3 and 5 are the last of sample 2 and the
    last of sample 0.
    """
    batch = train_batch(3)
    plans = (ReplicaPlan((2, 0), ((0,), (1,)), 8), ReplicaPlan((1, -1), ((0,), (1,)), 8))
    layout = ParallelLayout(4, cp=2)  # ranks: dp0 cp0, dp0 cp1, dp1 cp0, dp1 cp1

    def rank(
        where: str, losses: tuple[float, ...], tokens: tuple[int, ...], first: str = ""
    ) -> NonFiniteReport:
        return NonFiniteReport(where, math.nan, (), (), losses, tokens, len(tokens), first)

    found = merge_rank_findings(
        batch,
        layout,
        plans,
        [
            rank("dp0 pp0 tp0", (1.0, math.nan), (5,), "gradient of the output of b"),
            rank("dp0 pp0 cp1 tp0", (0.5, 2.0), (3,)),
            rank("dp1 pp0 tp0", (0.25, 0.0), (), "loss"),
            rank("dp1 pp0 cp1 tp0", (0.25, 0.0), ()),
        ],
    )
    assert found["micro_batches"] == [
        {"replica": 0, "micro_batch": 0, "loss": 1.5, "samples": [2]},
        {"replica": 0, "micro_batch": 1, "loss": "nan", "samples": [0]},
        {"replica": 1, "micro_batch": 0, "loss": 0.5, "samples": [1]},
        {"replica": 1, "micro_batch": 1, "loss": 0.0, "samples": []},
    ]
    assert [(entry["sample"], entry["positions"]) for entry in found["tokens"]] == [
        (0, [1]),
        (2, [3]),
    ]
    assert found["num_bad_tokens"] == 2 and found["first"] == "[dp1 pp0 tp0] loss"
    assert summarise_skipped_update(found) == (
        "gradient norm nan; 1 micro-batches with such a loss (samples 0);"
        " log-probs or values of 2 tokens (samples 0, 2)"
    )


def report(*differences: ReplicaDifference, bad: tuple[BadTensor, ...] = ()) -> ReplicaReport:
    return ReplicaReport("dp0 pp0 tp0", 10, 100, 0.1, differences, bad)


def test_replicas_that_differ_end_the_run_with_tensor_and_rank() -> None:
    assert list(
        require_equal_replicas([RoleProxies(Group(reports=[report(), report()])).actor])
    ) == ["timing_s/desync"]
    difference = ReplicaDifference("a.weight", "data parallel", ("dp2 pp0 tp0",), 3, 1e-3)
    with pytest.raises(
        ReplicasDiffer, match=r"\[actor\] a.weight: dp2 pp0 tp0 differs from the other 2 .*0.001"
    ):
        require_equal_replicas([RoleProxies(Group(reports=[report(difference), report()])).actor])
    with pytest.raises(ReplicasDiffer, match=r"\[actor dp0 pp0 tp0\] a.weight \(1 Inf of 4\)"):
        require_equal_replicas(
            [RoleProxies(Group(reports=[report(bad=(BadTensor("a.weight", 0, 1, 4),))])).actor]
        )


@pytest.mark.dist
def test_a_mini_batch_is_skipped_kept_and_run_again(dist_pool: DistPool, tmp_path: Path) -> None:
    """Sample 5 is in one of two mini-batches: each step skips one,
    so that two in a row never come.
    """
    (result,) = dist_pool.run(skipped_updates, config=CONFIG, run_dir=tmp_path, timeout_s=300)
    assert result.error == "" and [
        metrics["actor/num_skipped_steps"] for metrics in result.metrics
    ] == [1, 1, 1]
    assert all(math.isfinite(metrics["actor/loss"]) for metrics in result.metrics)
    assert [path.name for path in (tmp_path / "capsules").iterdir()] == ["step_000001_actor"]
    path = tmp_path / "capsules" / "step_000001_actor"
    assert (path / "weights" / "metadata.json").exists() and (
        path / "rng" / "rank0.safetensors"
    ).exists()
    facts = facts_of(path)
    (bad,) = [entry for entry in facts["micro_batches"] if isinstance(entry["loss"], str)]
    assert 5 in bad["samples"] and len(facts["micro_batches"]) > 1
    again = result.replays["as it was"]
    mended = result.replays["mended"]
    assert again.is_reproduced and again.pass_facts["first"] == "[dp0 pp0 tp0] loss"
    assert again.pass_facts["micro_batches"] == facts["micro_batches"], (
        "the same losses, to the last bit"
    )
    assert again.report_lines[-1].startswith("reproduced: ") and again.report_lines[0].startswith(
        "capsule of step 1, actor,"
    )
    assert not mended.is_reproduced and mended.report_lines[-1].startswith("not reproduced: ")
    assert math.isfinite(mended.pass_facts["grad_norm"])


@pytest.mark.dist
@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "section"),
    [
        (
            "ppo_clip",
            RolloutCorrectionConfig("decoupled_seq_is_rs", rollout_is_batch_normalize=True),
        ),
        (
            "reinforce",
            RolloutCorrectionConfig(
                "bypass_pg_is",
                rollout_rs=("seq_mean_k1",),
                rollout_rs_threshold=("0.1_30",),
                rollout_is_threshold="1e8",
            ),
        ),
    ],
)
def test_a_capsule_has_the_correction(
    dist_pool: DistPool, tmp_path: Path, loss: str, section: RolloutCorrectionConfig
) -> None:
    """Columns of the controller, or weights of the policy as it moves: a replay makes the same
    losses of them.
    """
    corrected = replace(
        CONFIG,
        actor=replace(CONFIG.actor, policy_loss=PolicyLossConfig(loss)),
        algorithm=replace(CONFIG.algorithm, rollout_correction=section),
    )
    (result,) = dist_pool.run(skipped_updates, config=corrected, run_dir=tmp_path, timeout_s=300)
    assert [metrics["actor/num_skipped_steps"] for metrics in result.metrics] == [1, 1, 1], (
        result.error
    )
    path = tmp_path / "capsules" / "step_000001_actor"
    capsule = read_skip_capsule(path)
    facts = facts_of(path)
    assert isinstance(capsule.mini_batch, MiniBatch)
    weights = capsule.mini_batch.correction_weights
    assert (weights is not None and weights.unique().numel() > 2) == (loss == "ppo_clip")
    again = result.replays["as it was"]
    mended = result.replays["mended"]
    assert again.is_reproduced and again.pass_facts["micro_batches"] == facts["micro_batches"], (
        "to the last bit"
    )
    assert not mended.is_reproduced
    (plain,) = dist_pool.run(
        skipped_updates, config=CONFIG, run_dir=tmp_path / "plain", timeout_s=300
    )
    assert (
        plain.replays["mended"].pass_facts["micro_batches"] != mended.pass_facts["micro_batches"]
    ), "nothing was corrected"


@pytest.mark.dist
def test_a_step_with_log_probs_that_are_not_finite_is_left_out(
    dist_pool: DistPool, tmp_path: Path
) -> None:
    (result,) = dist_pool.run(left_out, config=CONFIG, run_dir=tmp_path, timeout_s=300)
    (metrics,) = result.metrics
    assert metrics["actor/num_skipped_steps"] == metrics["critic/num_skipped_steps"] == 2
    assert result.notes[0].startswith(
        "step 7 is not trained on: not finite: old_log_probs (55 tokens of sample 0 '0'"
    )
    again = result.replays["it"]
    assert again.is_reproduced and again.pass_facts["columns"] == {"old_log_probs": True}
    assert again.pass_facts["first"] == "[dp0 pp0 tp0] output of decoder.layers.1.mlp.linear_fc2"
    facts = facts_of(tmp_path / "capsules" / "step_000007_actor")
    assert facts["columns"][0]["name"] == "old_log_probs" and facts["kind"] == "batch"


@pytest.mark.dist
@pytest.mark.chaos
def test_a_run_ends_at_the_limit_and_a_race_does_not_show_again(tmp_path: Path) -> None:
    """Three supervised steps, then a NaN that a fault plants in each of two steps: exit code 17, a
    replay's is 3.
    """
    plan = "mark@actor.before_optimizer_step:nth=4;mark@actor.before_optimizer_step:nth=5"
    faults = {"RLHF_MEGATRON_FAULTS": plan, "RLHF_MEGATRON_FAULTS_DIR": str(tmp_path / "faults")}
    settings = {**ONE_RANK, "trainer.max_consecutive_skips": 2, "trainer.val_before_train": False}
    run = train(write_config(tmp_path), settings, env=faults)
    assert run.exit_code == 17, run.console
    capsule = run.run_dir / "capsules" / "step_000001_actor"
    assert f"--replay {capsule}" in run.console.splitlines()[-1]
    assert [row["actor/num_skipped_steps"] for row in run.rows("step")] == [1.0]
    again = train(run.directory / "tiny.yaml", ONE_RANK, "--replay", str(capsule))
    assert again.exit_code == 3, again.console
    assert "it had gradient norm nan" in again.console
    assert json.loads((again.run_dir / "replay.json").read_text())["reproduced"] is False
