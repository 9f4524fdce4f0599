"""How long the optimizers of actor and critic train, counted by hand."""

from __future__ import annotations

from dataclasses import replace

from rlhf_megatron.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    RolloutConfig,
    RunConfig,
    TrainerConfig,
    WarmupConfig,
)
from rlhf_megatron.runtime.rank_roles import RoleBuilder

PPO = RunConfig(
    data=DataConfig(train_batch_size=16),
    rollout=RolloutConfig(n=4),
    actor=ActorConfig(mini_batch_size=32, ppo_epochs=3),
    critic=CriticConfig(mini_batch_size=16),
    algorithm=AlgorithmConfig(adv_estimator="gae"),
    trainer=TrainerConfig(total_training_steps=10, critic_warmup=2),
)
"""64 samples a step: 2 mini-batches of the actor, 4 of the critic; 3 epochs each."""


def test_the_actor_does_not_learn_while_the_critic_warms_up() -> None:
    assert {name: phase.num_steps for name, phase in RoleBuilder(PPO).actor_phases.items()} == {
        "rl": (10 - 2) * 3 * 2
    }
    grpo = replace(PPO, algorithm=AlgorithmConfig())
    assert RoleBuilder(grpo).actor_phases["rl"].num_steps == 10 * 3 * 2, (
        "its setting is not in use without a critic"
    )
    warm = RoleBuilder(replace(PPO, warmup=WarmupConfig(max_steps=7))).actor_phases
    assert [(name, phase.num_steps) for name, phase in warm.items()] == [("warmup", 7), ("rl", 48)]


def test_the_critic_learns_in_every_step_of_the_loop() -> None:
    (phase,) = RoleBuilder(PPO).critic_phases.values()
    assert (phase.num_steps, phase.optim) == (10 * 3 * 4, PPO.critic.optim)
    as_actor = replace(PPO, critic=CriticConfig())
    assert RoleBuilder(as_actor).critic_phases["rl"].num_steps == 10 * 3 * 2
    assert (
        RoleBuilder(replace(PPO, critic=CriticConfig(ppo_epochs=1))).critic_phases["rl"].num_steps
        == 10 * 1 * 2
    )
