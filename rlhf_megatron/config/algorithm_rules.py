"""The rules of the section `algorithm`: contradictions, and settings that would be ignored."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from rlhf_megatron.config.errors import Problem
from rlhf_megatron.config.provenance import Loaded
from rlhf_megatron.config.schema import RunConfig

ESTIMATOR, KEYS, TERMS = "algorithm.adv_estimator", "algorithm.params.gdpo_reward_keys", "reward.terms"
SWITCH = "algorithm.use_kl_in_reward"
COEF, TARGET, HORIZON, TYPE = (f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "target_kl", "horizon", "type"))
FILTER = "algorithm.filter_groups"
METRIC, MAX_BATCHES = f"{FILTER}.metric", f"{FILTER}.max_num_gen_batches"
PF_PPO = "algorithm.pf_ppo"
METHOD, POWER = f"{PF_PPO}.reweight_method", f"{PF_PPO}.weight_pow"
MAX_ERROR = 0.2  # the largest step of the adaptive controller, see algorithms/kl_in_reward.py


def idle_settings(config: RunConfig) -> Iterator[tuple[bool, tuple[str, ...], str, str]]:
    """(whether the settings are idle, the settings, the switch that decides, how to make them act)."""
    algorithm = config.algorithm
    is_off = not algorithm.use_kl_in_reward
    yield is_off, ("algorithm.kl_ctrl", "algorithm.kl_penalty"), SWITCH, "set it to true"
    is_fixed = not is_off and algorithm.kl_ctrl.type == "fixed"
    yield is_fixed, (TARGET, HORIZON), TYPE, "set that to adaptive"
    yield not algorithm.filter_groups.enable, (METRIC, MAX_BATCHES), f"{FILTER}.enable", "set it to true"
    draws = algorithm.pf_ppo
    yield not draws.enable, (METHOD, POWER), f"{PF_PPO}.enable", "set it to true"
    yield draws.enable and draws.reweight_method != "pow", (POWER,), METHOD, "set that to pow"


def kl_weight(loaded: Loaded) -> Iterator[Problem]:
    """A weight of 0 costs a forward pass of the reference and does nothing; the adaptive one would stay there."""
    algorithm = loaded.config.algorithm
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield Problem(
            f"{COEF} (0) must be above 0 with {SWITCH}, or the reference is run for nothing; give it a weight such as"
            f" 0.001 or set use_kl_in_reward: false.",
            (COEF, SWITCH),
        )


def kl_horizon(loaded: Loaded) -> Iterator[Problem]:
    """coef *= 1 +- 0.2 samples / horizon must keep its sign."""
    c = loaded.config
    control, samples = c.algorithm.kl_ctrl, c.data.train_batch_size * c.rollout.n
    if not c.algorithm.use_kl_in_reward or control.type != "adaptive" or control.horizon < 1:
        return
    if MAX_ERROR * samples >= control.horizon:
        yield Problem(
            f"{HORIZON} ({control.horizon} samples) must be above {MAX_ERROR} x the samples of a step"
            f" (data.train_batch_size x rollout.n = {c.data.train_batch_size} x {c.rollout.n} = {samples}), or one step"
            f" can turn the sign of the KL term; use {10 * samples}.",
            (HORIZON, "data.train_batch_size", "rollout.n"),
        )


def group_filter(loaded: Loaded) -> Iterator[Problem]:
    """A group of one has no spread; a metric that no reward of the run has would filter by nothing."""
    c = loaded.config
    chosen = c.algorithm.filter_groups
    if not chosen.enable:
        return
    if c.rollout.n == 1:
        yield Problem(
            f"rollout.n (1) must be at least 2 with {FILTER}.enable: alone in its group, a sample has no other to"
            " differ from, and every group would be left out; use 8.",
            ("rollout.n", f"{FILTER}.enable"),
        )
    known = ["reward", *reward_parts(c)]
    if chosen.metric.partition("/")[0] not in known:
        near = difflib.get_close_matches(chosen.metric, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; name one of them."
        yield Problem(
            f"{METRIC} ({chosen.metric!r}) must be one of {', '.join(map(repr, known))}{hint}", (METRIC, "reward")
        )


def several_rewards(loaded: Loaded) -> Iterator[Problem]:
    """gdpo reads the parts of the reward, not the reward: what is only in that would train nothing."""
    c = loaded.config
    if c.algorithm.adv_estimator != "gdpo":
        return
    if c.algorithm.use_kl_in_reward:
        yield Problem(
            f"{SWITCH} (true) would be ignored: {ESTIMATOR} gdpo normalises the parts of the reward, and the KL term is"
            " none of them; set it to false, or use actor.use_kl_loss.",
            (SWITCH, ESTIMATOR),
        )
    keys = c.algorithm.params.get("gdpo_reward_keys")
    if not isinstance(keys, list | tuple) or not keys:
        return  # the estimator's own parameters say it
    parts = reward_parts(c)
    for key in keys:
        if str(key).partition("/")[0] not in parts:
            near = difflib.get_close_matches(str(key), parts, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else "; rename it, or add that reward to reward.terms."
            yield Problem(
                f"{KEYS} has {key!r}, but the rewards of this run are {', '.join(map(repr, parts))}{hint}",
                (KEYS, "reward"),
            )
    yield from _terms_without_effect(c, {str(key).partition("/")[0] for key in keys})


def _terms_without_effect(c: RunConfig, used: set[str]) -> Iterator[Problem]:
    has_weights = bool(c.algorithm.params.get("gdpo_reward_weights"))
    for i, (part, term) in enumerate(zip(term_parts(c), c.reward.terms, strict=True)):
        key = f"reward.terms[{i}].weight ({term.weight:g}) of {part!r}"
        if part not in used and term.weight != 0:
            yield Problem(
                f"{key} would be ignored: {KEYS} ({', '.join(sorted(used))}) does not name it; add it there, or set"
                " the weight to 0 to log it only.",
                (TERMS, KEYS),
            )
        elif part in used and term.weight != 1 and not has_weights:
            yield Problem(
                f"{key} would be ignored: gdpo weighs what it has normalised; give"
                " algorithm.params.gdpo_reward_weights.",
                (TERMS, KEYS),
            )


def reward_parts(config: RunConfig) -> list[str]:
    """Names under which the scores of a run's rewards are parts of a sample's reward."""
    r = config.reward
    return sorted({r.name, *(one.name for one in r.by_source.values()), *term_parts(config)})


def term_parts(config: RunConfig) -> list[str]:
    """Of the terms, in order: a name that is taken gets a number (reward_service/components.py)."""
    r = config.reward
    taken, parts = {r.name, *(one.name for one in r.by_source.values())}, []
    for term in r.terms:
        part, number = term.name, 2
        while part in taken:
            part, number = f"{term.name}_{number}", number + 1
        taken.add(part)
        parts.append(part)
    return parts


RULES: tuple[Callable[[Loaded], Iterator[Problem]], ...] = (kl_weight, kl_horizon, group_filter, several_rewards)
