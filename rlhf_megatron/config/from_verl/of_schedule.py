"""Who works when: verl's fully asynchronous recipe (section async_training), its modes of trainer.v1, one step off."""

from __future__ import annotations

import math

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.given import Given

ASYNC, V1, SAMPLER = "async_training", "trainer.v1", "trainer.v1.sampler"
MODE, ROUNDS, BATCHES = f"{V1}.trainer_mode", f"{ASYNC}.trigger_parameter_sync_step", f"{ASYNC}.require_batches"
STALENESS, ENGINES_LOG_PROBS = f"{ASYNC}.staleness_threshold", f"{ASYNC}.use_rollout_log_probs"
AGAIN = tuple(f"{ASYNC}.{name}" for name in ("recompute_old_log_prob", "compute_prox_log_prob"))
CORRECTION = "algorithm.rollout_correction"


def is_apart(given: Given) -> bool:
    """Whether engines have devices of their own, which rollout.nnodes and n_gpus_per_node count."""
    nodes = given.look("rollout.nnodes")
    return given.has_below(ASYNC) or (isinstance(nodes, int) and nodes > 0)


def as_steps(given: Given) -> None:
    """Of the fully asynchronous recipe: what lies between two syncs, as the step of a loop, which it has not.

    It is what the other settings of batches and lengths are then read by.
    """
    if not given.has_below(ASYNC):
        return
    rounds, batches = (given.whole(key) or 1 if given.has(key) else 1 for key in (ROUNDS, BATCHES))
    if not given.has(ROUNDS):
        rounds = 4  # the recipe's default
    mini = given.whole("actor.ppo_mini_batch_size")
    if mini is None:
        return
    size = rounds * batches * mini
    given.assume("data.train_batch_size", size, ROUNDS)
    given.notes.append(
        f"a step is what verl's recipe trains between two syncs: data.train_batch_size {size} prompts ="
        f" trigger_parameter_sync_step {rounds} x require_batches {batches} x ppo_mini_batch_size {mini}."
    )
    total = "rollout.total_rollout_steps"
    if given.has(total) and (prompts := given.whole(total)) is not None:
        given.assume("trainer.total_training_steps", max(1, prompts // size), total)
    if given.has("rollout.test_freq"):
        given.assume("trainer.test_freq", given.get("rollout.test_freq"), "rollout.test_freq")
    is_clip = given.look("actor.policy_loss.loss_mode") in ("vanilla", "ppo_clip")
    if is_clip and _has_engines_log_probs(given) and not given.has(f"{CORRECTION}.bypass_mode"):
        given.assume(f"{CORRECTION}.bypass_mode", True, ENGINES_LOG_PROBS)


def schedule(draft: Draft) -> None:
    """After the correction: a schedule with old tokens wants one chosen."""
    g = draft.given
    mode = g.look(MODE)
    if g.has_below(ASYNC):
        _fully_async(draft)
    elif mode == "separate_async":
        _separate_async(draft)
    elif mode not in (None, "sync"):
        draft.leave(
            MODE,
            "who shares devices takes turns here, and old groups wait for nobody; engines of their own can have"
            " schedule.name asynchronous",
            learns=True,
        )
        g.ignore(MODE)
    elif is_apart(g):
        note = "engines of their own, without async_training: one step off"
        draft.put("schedule.name", "one_step_off", ("rollout.nnodes",), note)
    if is_apart(g):
        g.ignore("rollout.nnodes", "rollout.n_gpus_per_node")
    chosen = any(key.startswith(CORRECTION) for key in draft.values)
    name = draft.values.get("schedule.name")
    if name is not None and name.value in ("one_step_off", "asynchronous") and not chosen:
        note = "nothing is corrected there; decoupled_token_is weighs old tokens"
        draft.put(f"{CORRECTION}.preset", "disabled", (), note)


def _fully_async(draft: Draft) -> None:
    g = draft.given
    g.ignore(ROUNDS, BATCHES, ENGINES_LOG_PROBS, *AGAIN, f"{ASYNC}.partial_rollout", "data.gen_batch_size")
    share = g.number(STALENESS) if g.has(STALENESS) else 0.1  # the recipe's default
    if not share:
        note = "no old tokens (staleness_threshold 0): engines and trainer wait for each other"
        draft.put("schedule.name", "streaming", (STALENESS,), note)
    else:
        draft.put("schedule.name", "asynchronous", (STALENESS,))
        lag = max(1, math.ceil(share))
        note = f"in whole syncs: {share:g} of a step's prompts there" if lag != share else ""
        draft.put("schedule.params.max_lag", lag, (STALENESS,), note)
        partial = f"{ASYNC}.partial_rollout"
        draft.put("schedule.params.partial_rollouts", g.flag(partial) if g.has(partial) else True, (partial,))
    loss = g.look("actor.policy_loss.loss_mode")
    if _has_engines_log_probs(g) and loss not in ("vanilla", "ppo_clip"):
        draft.leave(
            ENGINES_LOG_PROBS,
            f"{loss} with the engine's log-probs for old ones: {CORRECTION}.mode bypass has ppo_clip and reinforce",
            learns=True,
        )
    for key in [key for key in g.rest() if key.startswith(f"{ASYNC}.")]:
        g.ignore(key)
        draft.num_off += 1  # how weights are carried over, and where advantages are computed


def _separate_async(draft: Draft) -> None:
    """So many batches are begun ahead there, and a bound beyond says what is dropped; here one number is both."""
    g = draft.given
    ahead, bound = f"{V1}.separate_async.num_warmup_batches", f"{SAMPLER}.max_off_policy_threshold"
    lag = g.whole(ahead, low=0) if g.has(ahead) else 1
    limit = g.whole(bound) if g.has(bound) else 8
    if lag is None or limit is None:
        return
    draft.put("schedule.name", "asynchronous", (MODE,))
    note = "batches begun ahead; it is the bound, too"
    draft.put("schedule.params.max_lag", max(1, min(lag, limit)), (ahead, bound), note)
    strategy = f"{SAMPLER}.max_off_policy_strategy"
    late = g.look(strategy) or "drop"
    if late in ("drop", "wait"):
        draft.put("schedule.params.late", late, (strategy,))
    else:
        draft.leave(strategy, "groups that are late wait, are dropped, or begun again", learns=True)
    g.ignore("trainer.use_v1", f"{V1}.separate_async.*", f"{SAMPLER}.*", f"{V1}.sync.*", f"{V1}.colocate_async.*")


def _has_engines_log_probs(given: Given) -> bool:
    """The recipe's default: those are the old ones."""
    if any(given.look(key) in (True, "true", "True") for key in AGAIN):
        return False
    return given.flag(ENGINES_LOG_PROBS) if given.has(ENGINES_LOG_PROBS) else True
