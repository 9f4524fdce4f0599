"""What the models on the hosts say about a step's samples before the update: log-probs, entropies, values."""

from __future__ import annotations

from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.data.batch import AnnotatedBatch, ScoredBatch, TokenBatch, gain
from rlhf_megatron.runtime.proxies import Workers
from rlhf_megatron.scheduler.parts import Parts


def annotate(
    workers: Workers, config: RunConfig, parts: Parts, scored: ScoredBatch, has_actor: bool = True
) -> AnnotatedBatch:
    """Columns of the actor (without `has_actor` none) and, where estimator and loss need them, of the critic and the
    reference.

    All calls are made before the first result is awaited: pools of their own work at the same time. In one pool they
    run in the order actor, critic, reference.
    """
    tokens = TokenBatch(scored.offsets, scored.token_ids, scored.response_mask)
    budget, temperature = config.actor.ppo_max_token_len_per_gpu, config.rollout.temperature
    asked = {"with_sum_squares": True} if parts.needs_sum_squares else {}
    actor = critic = reference = None
    if has_actor:
        actor = workers.actor.log_probs(tokens, budget, temperature=temperature, with_entropy=True, **asked)
    if parts.needs_values:
        critic = workers.critic.values(tokens, config.critic.ppo_max_token_len_per_gpu or budget)
    if parts.needs_reference:
        reference_budget = config.reference.max_token_len_per_gpu or budget
        reference = workers.reference.log_probs(tokens, reference_budget, temperature=temperature, with_entropy=False)
    by_actor = actor.result() if actor else None
    return gain(
        AnnotatedBatch,
        scored,
        old_log_probs=by_actor.log_probs if by_actor else None,
        entropies=by_actor.entropies if by_actor else None,
        sum_squares=by_actor.sum_squares if by_actor else None,
        values=critic.result().values if critic else None,
        ref_log_probs=reference.result().log_probs if reference else None,
    )
