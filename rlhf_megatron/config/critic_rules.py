"""The rules of the section `critic`: contradictions, and settings that would be ignored."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.rules import (
    actor_ranks,
    critic_ranks,
    divides_the_samples,
    gives_all_work,
    has_critic,
    holds_the_longest,
    model_parallel_size,
    near_multiples,
    optim_schedule,
)
from rlhf_megatron.config.schema import MegatronConfig, RunConfig

MINI_BATCH, BUDGET, NUM_RANKS = "critic.mini_batch_size", "critic.ppo_max_token_len_per_gpu", "critic.num_ranks"
SIZES = tuple(f"critic.megatron.{axis}_parallel_size" for axis in ("tensor_model", "pipeline_model", "context"))


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    is_there, estimator = has_critic(config), "algorithm.adv_estimator"
    yield not is_there, ("critic", "trainer.critic_warmup"), estimator, "use one that needs values: gae"
    shares = is_there and config.critic.num_ranks == 0
    yield shares, ("critic.megatron",), NUM_RANKS, "give the critic ranks of its own"


def own_pool(loaded: Loaded) -> Iterator[Problem]:
    """Whole replicas of the critic on its ranks. What is left for the actor, `rules.layout` looks at."""
    c = loaded.config
    num_ranks, replica = critic_ranks(c), _replica_size(c.critic.megatron)
    if num_ranks < 1 or replica < 1:
        return
    if c.trainer.runtime == "inline":
        yield Problem(
            f"{NUM_RANKS} ({num_ranks}) needs several processes, but trainer.runtime (inline) has one; set it to 0 or"
            " use runtime: torchrun.",
            (NUM_RANKS, "trainer.runtime"),
        )
    if num_ranks % replica:
        m = c.critic.megatron
        sizes = f"{m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size} x {m.context_parallel_size}"
        yield Problem(
            f"{NUM_RANKS} ({num_ranks}) must be a multiple of {SIZES[0]} x pipeline_model_parallel_size x"
            f" context_parallel_size ({sizes} = {replica}); use {near_multiples(num_ranks, replica)} ranks or another"
            " layout.",
            (NUM_RANKS, *SIZES),
        )


def batches(loaded: Loaded) -> Iterator[Problem]:
    """What is null is the actor's: that it divides the samples, `rules.batches` says."""
    c = loaded.config
    if not has_critic(c):
        return
    if c.critic.mini_batch_size is not None:
        yield from divides_the_samples(c, MINI_BATCH, c.critic.mini_batch_size)
    size, replicas = c.critic.mini_batch_size or c.actor.mini_batch_size, _num_replicas(c)
    if critic_ranks(c) > 0 or c.critic.mini_batch_size is not None:
        yield from gives_all_work(MINI_BATCH, size, replicas, ("actor.mini_batch_size", NUM_RANKS, *SIZES))


def token_budget(loaded: Loaded) -> Iterator[Problem]:
    """Samples are padded as the layout of the critic's pool demands, also where the budget is the actor's."""
    c = loaded.config
    budget = c.critic.ppo_max_token_len_per_gpu
    if critic_ranks(c) > 0:
        budget = c.actor.ppo_max_token_len_per_gpu if budget is None else budget
        yield from holds_the_longest(c, BUDGET, budget, "critic.megatron", c.critic.megatron)
    elif has_critic(c) and budget is not None:
        yield from holds_the_longest(c, BUDGET, budget, "actor.megatron", c.actor.megatron)


def steps(loaded: Loaded) -> Iterator[Problem]:
    c = loaded.config
    if not has_critic(c):
        return
    alone, total = c.trainer.critic_warmup, c.trainer.total_training_steps
    if 0 < total <= alone:
        yield Problem(
            f"trainer.critic_warmup ({alone}) must be below trainer.total_training_steps ({total}), or the policy is"
            f" never trained; use {total - 1} or less.",
            ("trainer.critic_warmup", "trainer.total_training_steps"),
        )
    size = c.critic.mini_batch_size or c.actor.mini_batch_size
    if size > 0:
        a_step = c.data.train_batch_size * c.rollout.n // size * (c.critic.ppo_epochs or c.actor.ppo_epochs)
        yield from optim_schedule("critic.optim", c.critic.optim, total * a_step, "trainer.total_training_steps")


def _replica_size(m: MegatronConfig) -> int:
    return m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size


def _num_replicas(c: RunConfig) -> int:
    """Of the critic; 0 where other rules find its sizes impossible."""
    if critic_ranks(c) > 0:
        return critic_ranks(c) // max(1, _replica_size(c.critic.megatron))
    return actor_ranks(c) // max(1, model_parallel_size(c))


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (own_pool, batches, token_budget, steps)
