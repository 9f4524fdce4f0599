"""A step with a critic: order of calls, what each role trains on, the critic's warm-up, KL
in the reward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from data_samples import scored
from replay_tools import replay_stages
from scheduler_samples import train_batch

from rlhf_megatron.algorithms.advantages import ADV_ESTIMATORS
from rlhf_megatron.algorithms.kl_in_reward import KLController
from rlhf_megatron.config.schema import (
    AlgorithmConfig,
    KLControlConfig,
    PFPPOConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
    RunConfig,
)
from rlhf_megatron.controller.recovery.run_journal import StepJournal
from rlhf_megatron.controller.scheduler.advantage_stage import AdvantageStage
from rlhf_megatron.controller.scheduler.algorithm_setup import AlgorithmSetup
from rlhf_megatron.controller.scheduler.log_prob_passes import (
    update_returns_old_log_probs as makes_own,
)
from rlhf_megatron.controller.scheduler.model_rewards import ModelRewardScorer
from rlhf_megatron.controller.scheduler.model_updates import (
    RoleUpdate,
    UpdateSettings,
    plan_actor_update,
    request_annotations,
    run_role_updates,
)
from rlhf_megatron.controller.scheduler.run_replay import ReplayStages
from rlhf_megatron.controller.scheduler.step_stages import StepStages
from rlhf_megatron.controller.sync.weight_sync import PolicySync
from rlhf_megatron.data.batch import (
    AnnotatedBatch,
    CriticValues,
    TokenBatch,
    TokenLogProbs,
    TrainBatch,
    add_columns,
)
from rlhf_megatron.ranks.workers.rank_reports import BadTensor, NonFiniteReport
from rlhf_megatron.ranks.workers.worker_protocols import UpdateResult
from rlhf_megatron.runtime.role_proxies import ActorProxy, CriticProxy, RoleProxies
from rlhf_megatron.weights.parallel_layout import ParallelLayout


class LazyFuture(Future[Any]):
    """Says when somebody waits for it."""

    def __init__(self, events: list[str], name: str, value: Any) -> None:
        super().__init__()
        self.events = events
        self.name = name
        self.value = value

    def result(self, timeout: float | None = None) -> Any:
        self.events.append(f"wait {self.name}")
        return self.value


@dataclass
class SentCall:
    method: str
    batch: Any
    token_budget: int
    arguments: dict[str, Any]


SKIP = NonFiniteReport("dp0 pp0 tp0", nan, (BadTensor("a.weight", 1, 0, 8),), (), (nan,), (), 0)


class FakeGroup:
    """Answers a call with what its role would: an update with its number, an annotation with a
    constant column.
    """

    layout = ParallelLayout(1)

    def __init__(self) -> None:
        self.layouts = {"actor": ParallelLayout(1)}
        self.calls: list[SentCall] = []
        self.events: list[str] = []
        self.counts: dict[str, int] = {}

    def scatter_call(
        self, method: str, batch: TokenBatch, *, token_budget: int, **arguments: Any
    ) -> Future[Any]:
        number = self.counts[method] = self.counts.get(method, 0) + 1
        name = f"{method} {number}"
        self.calls.append(SentCall(method, batch, token_budget, arguments))
        self.events.append(f"send {name}")
        return LazyFuture(self.events, name, self.answer(method, number, batch))

    def broadcast_call(self, method: str, **arguments: Any) -> Future[list[Any]]:
        assert method.endswith(".take_skip_reports"), method
        return LazyFuture(self.events, method, [[SKIP]])

    def close(self) -> None:
        raise AssertionError("close")

    def answer(self, method: str, number: int, batch: TokenBatch) -> Any:
        role, verb = method.split(".")
        if verb == "update":
            own = None
            if getattr(batch, "old_log_probs", self) is None:
                own = TokenLogProbs(-batch.token_ids.float(), 2.0 * batch.token_ids)
            return UpdateResult(
                {f"{role}/x": float(number)}, 10.0 * number, 0.1 * number, number == 2, own
            )
        column = torch.full(
            (batch.num_tokens,),
            {"actor": -1.0, "critic": 0.5, "reference": -3.0, "reward_model": 2.0}[role],
        )
        if verb == "values":
            return CriticValues(column)
        return TokenLogProbs(column, entropies=2 * column)

    @property
    def sent(self) -> list[str]:
        return [call.method for call in self.calls]


def parts_of(estimator: str, needs_reference: bool = False, **params: Any) -> AlgorithmSetup:
    entry = ADV_ESTIMATORS.get(estimator)
    return AlgorithmSetup(
        entry.build,
        entry.params(**params),
        needs_reference,
        needs_values="values" in entry.needs,
        needs_token_rewards="token_rewards" in entry.needs,
    )


def config_of(**sections: dict[str, Any]) -> RunConfig:
    config = RunConfig()
    for name, changes in sections.items():
        config = replace(config, **{name: replace(getattr(config, name), **changes)})
    return config


def with_values(batch: TrainBatch) -> TrainBatch:
    return replace(
        batch, values=torch.zeros(batch.num_tokens), returns=torch.ones(batch.num_tokens)
    )


def numbered(worker: ActorProxy | CriticProxy, count: int) -> RoleUpdate:
    def batches() -> Iterator[TokenBatch]:
        for _ in range(count):
            yield TokenBatch(torch.tensor([0, 1]), torch.tensor([1]), torch.tensor([False]))

    send = partial(worker.update)
    return RoleUpdate(worker, send, 1, 100, batches, lambda number: train_batch())


def stages_of(config: RunConfig, group: FakeGroup) -> ReplayStages:
    return replay_stages(
        config, RoleProxies(group), parts_of("gae"), None, PolicySync(policy_version=4)
    )


def test_roles_take_turns_and_two_calls_of_each_are_under_way() -> None:
    group = FakeGroup()
    workers = RoleProxies(group)
    metrics = run_role_updates([numbered(workers.critic, 2), numbered(workers.actor, 4)])
    assert group.sent == ["critic.update", "actor.update"] * 2 + ["actor.update"] * 2
    assert metrics["critic/x"] == 1.0 and metrics["actor/x"] == pytest.approx(8 / 3), (
        "the second one was skipped"
    )
    assert group.events[:4] == [
        f"send {name} {i}" for i in (1, 2) for name in ("critic.update", "actor.update")
    ]
    assert group.events[4:8] == [
        *("wait actor.update 1", "send actor.update 3"),
        *("wait actor.update 2", "send actor.update 4"),
    ]


def test_what_else_is_to_do_is_done_when_each_role_has_work_and_none_is_awaited() -> None:
    group = FakeGroup()
    workers = RoleProxies(group)
    updates = [numbered(workers.critic, 2), numbered(workers.actor, 2)]
    run_role_updates(updates, on_ranks_busy=lambda: group.events.append("meanwhile"))
    assert group.events[:3] == ["send critic.update 1", "send actor.update 1", "meanwhile"]
    assert group.events.count("meanwhile") == 1


def test_one_mini_batch_stands_at_a_time() -> None:
    """The last is gone before the next is made, whose columns are those that the update reads."""
    group = FakeGroup()
    stood = []
    made = []
    update = plan_actor_update(
        RoleProxies(group),
        UpdateSettings.from_run_config(config_of(actor={"mini_batch_size": 5})),
        1,
        train_batch(),
    )

    def mini_batches() -> Iterator[TokenBatch]:
        for mini_batch in update.make_mini_batches():
            made.append(weakref.ref(mini_batch.token_ids))
            yield mini_batch
            del mini_batch
            stood.append([ref() is not None for ref in made])

    def send(mini_batch: TokenBatch, token_budget: int, capsule: object) -> Future[UpdateResult]:
        future: Future[UpdateResult] = Future()
        future.set_result(UpdateResult({"actor/x": 1.0}, 1.0, 1e-6, False))
        return future

    run_role_updates([replace(update, make_mini_batches=mini_batches, send_update=partial(send))])
    assert stood == [[False], [False, False]]


def test_critic_and_actor_have_sizes_epochs_and_budgets_of_their_own() -> None:
    of_critic = {"mini_batch_size": 2, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 700}
    config = config_of(
        actor={"mini_batch_size": 5, "ppo_epochs": 1, "ppo_max_token_len_per_gpu": 300},
        critic={**of_critic, "loss_agg_mode": "seq-mean-token-sum"},
    )
    group = FakeGroup()
    _, metrics = stages_of(config, group).update_models(1, with_values(train_batch()))
    critic = [call for call in group.calls if call.method == "critic.update"]
    actor = [call for call in group.calls if call.method == "actor.update"]
    assert [len(call.batch) for call in critic] == [2] * 10 and [
        len(call.batch) for call in actor
    ] == [5, 5]
    assert {call.token_budget for call in critic} == {700} and {
        call.token_budget for call in actor
    } == {300}
    assert critic[0].arguments == {"capsule": None}
    assert actor[0].arguments == {"temperature": 1.0, "loss": "policy", "capsule": None}
    assert critic[0].batch.loss_weights.max().item() == 0.5, "seq-mean-token-sum over 2 samples"
    assert metrics == {
        "critic/x": pytest.approx(53 / 9),
        "critic/grad_norm": pytest.approx(530 / 9),
        "critic/lr": pytest.approx(1.0),
        "critic/num_epochs": 2.0,
        "critic/num_optimizer_steps": 10.0,
        "critic/num_skipped_steps": 1.0,
        "actor/x": 1.0,
        "actor/grad_norm": 10.0,
        "actor/lr": pytest.approx(0.2),
        "actor/num_epochs": 1.0,
        "actor/num_optimizer_steps": 2.0,
        "actor/num_skipped_steps": 1.0,
        "rollout/num_samples": 10.0,
        "policy/lag": 3.0,
        **{f"training/off_policy/trajectory_staleness/{of}": 3.0 for of in ("min", "mean", "max")},
        **{f"training/off_policy/trajectory_spans/{of}": 1.0 for of in ("min", "mean", "max")},
    }


def test_the_one_update_of_a_step_tells_the_old_log_probs() -> None:
    """No pass of their own but at the first step, before which engine and trainer are compared.
    Samples are shuffled in the mini-batch, and what it tells comes back to its tokens.
    """
    config = config_of(actor={"mini_batch_size": 10})
    group = FakeGroup()
    stages = stages_of(config, group)
    stages.setup = replace(stages.setup, update_returns_old_log_probs=True, needs_values=False)
    stages.weight_sync = PolicySync(policy_version=1)
    batch = replace(train_batch(), old_log_probs=None, entropies=None)
    assert stages.compute_annotations(2, scored()).old_log_probs is None and not group.calls
    assert stages.compute_annotations(1, scored()).old_log_probs is not None and group.sent == [
        "actor.log_probs"
    ]
    trained, metrics = stages.update_models(2, batch)
    sent = group.calls[-1].batch
    assert sent.old_log_probs is None and not torch.equal(sent.token_ids, batch.token_ids)
    assert torch.equal(trained.old_log_probs, -batch.token_ids.float())
    assert torch.equal(trained.entropies, 2.0 * batch.token_ids)
    assert {"training/rollout_kl", "rollout_corr/kl"} <= metrics.keys()


@pytest.mark.parametrize(
    ("changes", "is_own"),
    [
        ({}, True),
        ({"actor": {"mini_batch_size": 5}}, False),
        ({"actor": {"mini_batch_size": 10, "ppo_epochs": 2}}, False),
        ({"actor": {"mini_batch_size": 10, "router_replay": "r2"}}, False),
        ({"actor": {"mini_batch_size": 10, "policy_loss": PolicyLossConfig("clip_cov")}}, False),
        ({"algorithm": {"use_kl_in_reward": True}}, False),
        ({"algorithm": {"pf_ppo": PFPPOConfig(enable=True)}}, False),
        ({"algorithm": {"adv_estimator": "optimal_token_baseline"}}, False),
        ({"algorithm": {"rollout_correction": RolloutCorrectionConfig(rollout_is="token")}}, False),
    ],
    ids=str,
)
def test_old_log_probs_are_the_updates_own_where_nothing_reads_them_before(
    changes: dict[str, dict[str, Any]], is_own: bool
) -> None:
    config = config_of(**{"actor": {"mini_batch_size": 10}} | changes)
    estimator = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
    assert makes_own(config.actor, config.algorithm, 10, estimator.needs) == is_own


def test_what_the_critic_leaves_out_is_the_actors() -> None:
    settings = {"mini_batch_size": 10, "ppo_epochs": 3, "ppo_max_token_len_per_gpu": 300}
    config = config_of(actor={**settings, "loss_agg_mode": "seq-mean-token-mean"})
    group = FakeGroup()
    stages_of(config, group).update_models(1, with_values(train_batch()))
    critic, actor = (group.calls[i::2] for i in (0, 1))
    assert [call.method for call in critic] == ["critic.update"] * 3
    for of_critic, of_actor in zip(critic, actor, strict=True):
        assert torch.equal(of_critic.batch.token_ids, of_actor.batch.token_ids)
        assert torch.equal(of_critic.batch.loss_weights, of_actor.batch.loss_weights)
        assert of_critic.token_budget == of_actor.token_budget == 300


def test_annotation_asks_everybody_before_it_waits() -> None:
    config = config_of(
        actor={"ppo_max_token_len_per_gpu": 300},
        critic={"ppo_max_token_len_per_gpu": 400},
        reference={"max_token_len_per_gpu": 500},
        rollout={"temperature": 0.5},
    )
    group = FakeGroup()
    batch = request_annotations(
        RoleProxies(group),
        UpdateSettings.from_run_config(config),
        parts_of("gae", needs_reference=True),
        scored(),
    )
    names = ["actor.log_probs", "critic.values", "reference.log_probs"]
    assert group.sent == names and [call.token_budget for call in group.calls] == [300, 400, 500]
    assert group.events == [f"{what} {name} 1" for what in ("send", "wait") for name in names]
    assert (
        group.calls[0].arguments == {"temperature": 0.5, "with_entropy": True}
        and group.calls[1].arguments == {}
    )
    assert type(group.calls[0].batch) is TokenBatch, "texts stay on the controller"
    assert batch.old_log_probs.unique().tolist() == [
        -1.0
    ] and batch.entropies.unique().tolist() == [-2.0]
    assert batch.values.unique().tolist() == [0.5] and batch.ref_log_probs.unique().tolist() == [
        -3.0
    ]


def test_annotation_asks_a_reward_model_and_adds_its_scores() -> None:
    group = FakeGroup()
    config = config_of(reward_model={"path": "model", "weight": 3.0, "max_token_len_per_gpu": 600})
    rewards = ModelRewardScorer(config.reward_model, 600, str)
    batch = request_annotations(
        RoleProxies(group),
        UpdateSettings.from_run_config(config),
        parts_of("grpo"),
        scored(),
        reward_scorer=rewards,
    )
    assert (
        group.sent == ["actor.log_probs", "reward_model.values"]
        and group.calls[1].token_budget == 600
    )
    assert group.events[:2] == ["send actor.log_probs 1", "send reward_model.values 1"]
    assert (batch.rewards - scored().rewards).tolist() == [
        6.0,
        6.0,
        6.0,
    ] and batch.old_log_probs is not None


def test_annotation_asks_nobody_whom_the_run_has_not() -> None:
    group = FakeGroup()
    batch = request_annotations(
        RoleProxies(group), UpdateSettings.from_run_config(RunConfig()), parts_of("grpo"), scored()
    )
    assert (
        group.sent == ["actor.log_probs"] and batch.values is None and batch.ref_log_probs is None
    )


def test_the_critic_learns_alone_in_its_warm_up_and_the_policy_stays() -> None:
    """Samples were drawn with version 1. A step that leaves the policy as it was makes no sync."""
    config = config_of(actor={"mini_batch_size": 10}, trainer={"critic_warmup": 2})
    group = FakeGroup()
    stages = stages_of(config, group)
    seen = []
    for step in (1, 2, 3, 4):
        group.calls.clear()
        stages.update_models(step, with_values(train_batch()))
        metrics = stages.sync_weights()
        seen.append(
            (
                group.sent,
                metrics["actor/num_optimizer_steps"],
                metrics["policy/version"],
                metrics["policy/lag"],
            )
        )
    alone = ["critic.update"]
    both = ["critic.update", "actor.update"]
    assert seen == [(alone, 0, 4, 3), (alone, 0, 4, 3), (both, 1, 5, 3), (both, 1, 6, 4)]


def annotated(**columns: Any) -> AnnotatedBatch:
    """`scored()`: response tokens 1, 2 of the first sample (reward 1), 5 of the third (0.5); the
    second is masked.
    """
    return add_columns(AnnotatedBatch, scored(), **columns)


KL = {
    "old_log_probs": torch.tensor([7.0, -1.0, -2.0, 7.0, 7.0, -3.0]),
    "ref_log_probs": torch.tensor([5.0, -1.5, -1.75, 5.0, 5.0, -3.5]),
}  # k1: 0.5, -0.25 and 0.5: mean a token 0.25, a response 0.375


def test_kl_in_the_reward_reaches_advantages_and_moves_its_weight_once_a_step() -> None:
    """Adaptive: 2 valid samples of horizon 10, KL 0.375 a response against a target of 0.4:
    relative error -0.0625.
    """
    control = KLControlConfig("adaptive", kl_coef=0.5, target_kl=0.4, horizon=10)
    config = AlgorithmConfig(use_kl_in_reward=True, kl_penalty="k1", kl_ctrl=control)
    stage = AdvantageStage(config, parts_of("gae", whiten=False))
    batch = annotated(**KL, values=torch.tensor([9.0, 0.25, 0.5, 9.0, 9.0, 1.0]))
    train, metrics = stage(batch)
    # Token rewards -0.25, 0.125 + 1, -0.25 + 0.5; with gamma and lambda 1 the returns are their
    # sums to the end.
    assert train.returns.tolist() == pytest.approx([0, 0.875, 1.125, 0, 0, 0.25])
    assert train.advantages.tolist() == pytest.approx([0, 0.625, 0.625, 0, 0, -0.75])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.25)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.5 and "critic/vf_explained_var" in metrics
    _, metrics = stage(batch)
    assert metrics["actor/reward_kl_penalty_coeff"] == pytest.approx(0.5 * (1 - 0.0625 * 2 / 10))
    assert isinstance(stage.kl_controller, KLController) and stage.kl_controller.state()[
        "coef"
    ] < 0.5 * (1 - 0.0625 * 2 / 10)


def test_kl_in_the_reward_reaches_group_estimators() -> None:
    """Two samples of one group with rewards 1 and 0.5, KL of 0.25 and 0.5 a response at weight
    2: 0.5 and -0.5.
    """
    config = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=KLControlConfig(kl_coef=2.0))
    batch = replace(annotated(**KL), group_ids=torch.tensor([7, 7, 7]))
    train, _ = AdvantageStage(config, parts_of("grpo", norm_adv_by_std_in_grpo=False))(batch)
    assert (
        train.advantages.tolist() == pytest.approx([0, 0.5, 0.5, 0, 0, -0.5])
        and train.returns is None
    )


def test_rewards_of_steps_reach_estimators_where_they_were_earned() -> None:
    """A reward model pays 0.25 and 0.5 at the two tokens of the first sample, -1 at that of the
    third, beside rules of 1 and 0.5. With gamma 0.5 the returns are 0.25 + (1.75 - 0.25) /
    2, 1.5 and -0.5.
    """
    paid = torch.tensor([0, 0.25, 0.5, 0, 0, -1.0])
    batch = annotated(values=torch.tensor([9.0, 0.5, 0.25, 9.0, 9.0, 1.0]))
    batch = replace(batch, rewards=torch.tensor([1.75, 0.0, -0.5]), process_rewards=paid)
    train, _ = AdvantageStage(AlgorithmConfig(), parts_of("gae", whiten=False, gamma=0.5))(batch)
    assert train.returns.tolist() == pytest.approx([0, 1.0, 1.5, 0, 0, -0.5])
    assert train.advantages.tolist() == pytest.approx([0, 0.5, 1.25, 0, 0, -1.5])
    group = replace(batch, group_ids=torch.tensor([7, 7, 7]))
    train, _ = AdvantageStage(AlgorithmConfig(), parts_of("grpo", norm_adv_by_std_in_grpo=False))(
        group
    )
    assert train.advantages.tolist() == pytest.approx([0, 1.125, 1.125, 0, 0, -1.125]), (
        "the sums: 1.75 and -0.5"
    )


def test_token_rewards_without_kl_are_the_scores() -> None:
    stage = AdvantageStage(AlgorithmConfig(), parts_of("gae", whiten=False, lam=0.0))
    train, metrics = stage(annotated(values=torch.tensor([9.0, 0.25, 0.5, 9.0, 9.0, 1.0])))
    assert train.advantages.tolist() == pytest.approx([0, 0.5 - 0.25, 1 - 0.5, 0, 0, 0.5 - 1])
    assert (
        not [name for name in metrics if name.startswith("actor/reward_kl")]
        and stage.kl_controller is None
    )


def test_a_batch_of_a_former_process_is_recorded_again(tmp_path: Path) -> None:
    """The ids that its ranks had are gone; while the critic learns alone nothing is recorded. Its
    advantages are made again, and the journal keeps what it has.
    """
    config = config_of(actor={"router_replay": "r2"}, trainer={"critic_warmup": 1})
    group = FakeGroup()
    stages = stages_of(config, group)
    batch = train_batch()
    names = AnnotatedBatch.__dataclass_fields__
    stages.journal = StepJournal(tmp_path / "journal", "these")
    of_prompts: Any = None  # nobody is asked
    stages.advantage_stage = lambda given: (batch, {"made": float(len(given))})  # type: ignore[assignment]
    for step in (1, 2):
        stages.journal.begin_batch_write(
            step, AnnotatedBatch(**{name: getattr(batch, name) for name in names}), {}, 0.0
        )
        stages.journal.wait_for_write()
        stages.begin_step()
        annotated = stages.annotate_step(
            step, StepStages.generate_rollout(stages, step, of_prompts)
        )
        assert type(annotated) is AnnotatedBatch and len(group.calls) == step - 1
        written = {path: path.stat().st_mtime_ns for path in stages.journal.directory.iterdir()}
        assert stages.compute_advantages(step, annotated) is batch and stages._step_metrics[
            "made"
        ] == len(batch)
        stages.journal.wait_for_write()
        assert written == {
            path: path.stat().st_mtime_ns for path in stages.journal.directory.iterdir()
        }
    (call,) = group.calls
    assert call.method == "actor.log_probs" and torch.equal(call.batch.sample_ids, batch.sample_ids)
    assert group.events == ["send actor.log_probs 1", "wait actor.log_probs 1"]
    stages_of(config_of(), group).annotate_step(2, batch)
    stages.update_models(2, batch)
    assert [call.batch.sample_ids is None for call in group.calls] == [False] * len(
        group.calls
    ) and len(group.calls) > 1
