"""Rules on the sections `algorithm` and `critic`, and on the policy loss with its aggregation."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
)
from rlhf_megatron.config.rules.batch_rules import (
    check_divides_samples,
    check_holds_longest_sample,
    check_occupies_all_replicas,
)
from rlhf_megatron.config.rules.part_rules import (
    MAIN_REWARD,
    MODEL_PART,
    find_registered_part,
    try_build_params,
)
from rlhf_megatron.config.rules.run_rules import (
    check_lr_schedule,
    compute_model_parallel_size,
    count_actor_ranks,
    count_critic_ranks,
    format_near_multiples,
    has_critic,
    list_pool_layouts,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.registry import load_registry

ESTIMATOR = "algorithm.adv_estimator"
TERMS = "reward.terms"
SWITCH = "algorithm.use_kl_in_reward"
COEF, TARGET, HORIZON, TYPE = (
    f"algorithm.kl_ctrl.{name}" for name in ("kl_coef", "target_kl", "horizon", "type")
)
FILTER = "algorithm.filter_groups"
METRIC = f"{FILTER}.metric"
MAX_BATCHES = f"{FILTER}.max_num_gen_batches"
PF_PPO = "algorithm.pf_ppo"
METHOD = f"{PF_PPO}.reweight_method"
POWER = f"{PF_PPO}.weight_pow"
MAX_ERROR = 0.2  # the largest step of the adaptive controller, see algorithms/kl_in_reward.py

LOSS = "actor.policy_loss.loss_mode"
MODE = "actor.loss_agg_mode"
FACTOR = "actor.loss_scale_factor"

MINI_BATCH = "critic.mini_batch_size"
BUDGET = "critic.ppo_max_token_len_per_gpu"
NUM_RANKS = "critic.num_ranks"
SIZES = tuple(
    f"critic.megatron.{axis}_parallel_size"
    for axis in ("tensor_model", "pipeline_model", "context")
)


@register_idle_rule
def list_idle_algorithm_settings(config: RunConfig) -> Iterable[IdleSettings]:
    """Return an entry for each group of settings of the KL controller, the group filter and PF-PPO;
    the first value of an entry says whether the configuration ignores that group.
    """
    algorithm = config.algorithm
    draws = config.algorithm.pf_ppo
    has_kl = algorithm.use_kl_in_reward
    return (
        (not has_kl, ("algorithm.kl_ctrl", "algorithm.kl_penalty"), SWITCH, "set {switch} to true"),
        (
            has_kl and algorithm.kl_ctrl.type == "fixed",
            (TARGET, HORIZON),
            TYPE,
            "set {switch} to adaptive",
        ),
        (
            not algorithm.filter_groups.enable,
            (METRIC, MAX_BATCHES),
            f"{FILTER}.enable",
            "set {switch} to true",
        ),
        (not draws.enable, (METHOD, POWER), f"{PF_PPO}.enable", "set {switch} to true"),
        (draws.enable and draws.reweight_method != "pow", (POWER,), METHOD, "set {switch} to pow"),
    )


@register_rl_rule
def check_kl_weight(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the KL term is in the reward with a weight of 0: the weight costs a
    forward pass of the reference and does nothing, and the adaptive controller would stay at 0.
    """
    algorithm = loaded.config.algorithm
    yield make_problem_if(
        algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0,
        (
            f"{COEF} (0) must be above 0 with {SWITCH}, or the reference is run for nothing; give"
            f" {COEF} a weight such as 0.001 or set use_kl_in_reward: false."
        ),
        (COEF, SWITCH),
    )


@register_rl_rule
def check_kl_horizon(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the horizon of the adaptive KL controller is so short that a step, coef *=
    1 +- 0.2 samples / horizon, can change the sign of the coefficient.
    """
    c = loaded.config
    control = c.algorithm.kl_ctrl
    samples = c.data.train_batch_size * c.rollout.n
    if not c.algorithm.use_kl_in_reward or control.type != "adaptive" or control.horizon < 1:
        return
    yield make_problem_if(
        MAX_ERROR * samples >= control.horizon,
        (
            f"{HORIZON} ({control.horizon} samples) must be above {MAX_ERROR} x the samples of a"
            f" step (data.train_batch_size x rollout.n = {c.data.train_batch_size} x {c.rollout.n}"
            f" = {samples}), or one step can turn the sign of the KL term; use {10 * samples}."
        ),
        (HORIZON, "data.train_batch_size", "rollout.n"),
    )


@register_rl_rule
def check_group_filter(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the group filter is on and a group has one sample, which has no spread, or
    if the filter's metric is no reward of this run.
    """
    c = loaded.config
    chosen = c.algorithm.filter_groups
    if not chosen.enable:
        return
    yield make_problem_if(
        c.rollout.n == 1,
        (
            f"rollout.n (1) must be at least 2 with {FILTER}.enable: alone in its group, a sample"
            " has no other to differ from, and every group would be left out; use 8."
        ),
        ("rollout.n", f"{FILTER}.enable"),
    )
    known = [MAIN_REWARD, "reward", *list_reward_parts(c)]
    if chosen.metric.partition("/")[0] not in known:
        near = difflib.get_close_matches(chosen.metric, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "; name one of them."
        yield ConfigProblem(
            f"{METRIC} ({chosen.metric!r}) must be one of {', '.join(map(repr, known))}{hint}",
            (METRIC, "reward"),
        )


@register_rl_rule
def check_reward_part_estimator(loaded: LoadedConfig) -> OptionalProblems:
    """For an advantage estimator that reads reward parts only, yield a problem for each setting
    that the estimator would ignore: the KL term in the reward, a part name that the run does not
    have, and reward terms or weights that the estimator does not use.
    """
    c = loaded.config
    name = loaded.config.algorithm.adv_estimator
    entry = find_registered_part("advantage estimator", name)
    if (
        entry is None
        or "reward_parts" not in entry.needs
        or {"rewards", "token_rewards"} & set(entry.needs)
    ):
        return
    yield make_problem_if(
        c.algorithm.use_kl_in_reward,
        (
            f"{SWITCH} (true) would be ignored: {ESTIMATOR} {name} reads the parts of the reward,"
            f" and the KL term is none of them; set {SWITCH} to false, or use actor.use_kl_loss."
        ),
        (SWITCH, ESTIMATOR),
    )
    keys = getattr(
        try_build_params("advantage estimator", name, c.algorithm.params), "reward_keys", None
    )
    if not keys:
        return
    parts = list_reward_parts(c)
    setting = f"algorithm.params.{keys.setting}"
    for key in keys.names:
        if key.partition("/")[0] not in parts:
            near = difflib.get_close_matches(key, parts, n=1)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; rename {key!r}, or add a reward of that name to reward.terms."
            )
            yield ConfigProblem(
                (
                    f"{setting} has {key!r}, but the rewards of this run"
                    f" are {', '.join(map(repr, parts))}{hint}"
                ),
                (setting, "reward"),
            )
    yield from _find_ignored_reward_terms(
        c, setting, {key.partition("/")[0] for key in keys.names}, keys.weights
    )


def _find_ignored_reward_terms(
    config: RunConfig, setting: str, used_parts: set[str], weights_parameter: str
) -> OptionalProblems:
    """Yield a problem for each reward term whose weight an estimator of reward parts would ignore:
    a term that `setting` does not name but has a weight, or a used term whose own weight is not 1
    although the estimator weighs the parts itself. `weights_parameter` is the estimator's parameter
    for these weights, or "" where the configuration gives the parameter.
    """
    name = config.algorithm.adv_estimator
    for i, (part, term) in enumerate(
        zip(name_reward_term_parts(config), config.reward.terms, strict=True)
    ):
        key = f"reward.terms[{i}].weight ({term.weight:g}) of {part!r}"
        if part not in used_parts and term.weight != 0:
            yield ConfigProblem(
                (
                    f"{key} would be ignored: {setting} ({', '.join(sorted(used_parts))}) does not"
                    " name it; add it there, or set the weight to 0 to log it only."
                ),
                (TERMS, setting),
            )
        elif part in used_parts and term.weight != 1 and weights_parameter:
            yield ConfigProblem(
                (
                    f"{key} would be ignored: {name} has weights of its own;"
                    f" give algorithm.params.{weights_parameter}."
                ),
                (TERMS, setting),
            )


def list_reward_parts(config: RunConfig) -> list[str]:
    """Return the sorted names of all parts that the reward of a sample can have in this run: the
    main reward, the rewards by source, the reward terms, and the reward model if there is one.
    """
    r = config.reward
    of_model = [MODEL_PART] if config.reward_model.path is not None else []
    return sorted(
        {
            r.name,
            *(one.name for one in r.by_source.values()),
            *name_reward_term_parts(config),
            *of_model,
        }
    )


def name_reward_term_parts(config: RunConfig) -> list[str]:
    """Return the part name of each entry of `reward.terms`, in order. A term whose name is taken
    gets a number, as in `reward_2`; rewards/service/reward_components.py names the parts alike.
    """
    r = config.reward
    taken = {MAIN_REWARD, r.name, *(one.name for one in r.by_source.values())}
    parts = []
    for term in r.terms:
        part = term.name
        number = 2
        while part in taken:
            part = f"{term.name}_{number}"
            number = number + 1
        taken.add(part)
        parts.append(part)
    return parts


@register_idle_rule
def list_idle_loss_scale_factor(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield exactly one entry. Its first value says whether actor.loss_scale_factor has no effect,
    because no aggregation mode of the actor or the critic uses the factor.
    """
    modes = [
        config.actor.loss_agg_mode,
        config.critic.loss_agg_mode if has_critic(config) else None,
    ]
    known = load_registry("aggregation")
    needed = [mode for mode in known if "scale_factor" in known.get(mode).needs]
    is_idle = all(mode in known and mode not in needed for mode in modes if mode is not None)
    yield is_idle, (FACTOR,), MODE, f"set {{switch}} to {' or '.join(needed)}"


@register_rl_rule
def check_loss_aggregation(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the aggregation mode is the default, nobody wrote it into the
    configuration, and the chosen policy loss is defined with another mode. A mode that the
    configuration states is accepted.
    """
    name = loaded.config.actor.policy_loss.loss_mode
    mode = loaded.config.actor.loss_agg_mode
    entry = find_registered_part("policy loss", name)
    own = mode if entry is None or entry.aggregation is None else entry.aggregation
    yield make_problem_if(
        mode != own and not loaded.is_set(MODE),
        (
            f"{MODE} ({mode}, the default) must be chosen for {LOSS} {name}, which its paper"
            f" defines with {own}; set {MODE}: {own}, or write {mode} where that is meant."
        ),
        (LOSS, MODE),
    )


@register_idle_rule
def list_idle_critic_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield two entries. The first says whether all settings of the critic are ignored, because the
    estimator needs no values; the second says whether critic.megatron is ignored, because the
    critic shares the actor's ranks.
    """
    is_there = has_critic(config)
    estimator = "algorithm.adv_estimator"
    known = load_registry("advantage estimator")
    of_values = " or ".join(name for name in known if "values" in known.get(name).needs)
    yield (
        not is_there,
        ("critic", "trainer.critic_warmup"),
        estimator,
        f"set {{switch}} to one that needs values: {of_values}",
    )
    shares = is_there and config.critic.num_ranks == 0
    yield shares, ("critic.megatron",), NUM_RANKS, "give the critic ranks of its own"


@register_rl_rule
def check_separate_pools(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems for a critic, reward model or reference with ranks of its own: the inline
    runtime has only one process, and the ranks must be a multiple of the pool's model-parallel
    size. The layout rules check the ranks that remain for the actor.
    """
    c = loaded.config
    for section, m, num_ranks in list_pool_layouts(c):
        key = section.replace("megatron", "num_ranks")
        replica = compute_model_parallel_size(m)
        if section == "actor.megatron" or replica < 1:
            continue
        yield make_problem_if(
            c.trainer.runtime == "inline",
            (
                f"{key} ({num_ranks}) needs several processes, but trainer.runtime (inline) has"
                f" one; set {key} to 0 or use runtime: torchrun."
            ),
            (key, "trainer.runtime"),
        )
        if num_ranks % replica:
            sizes = (
                f"{m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size} x"
                f" {m.context_parallel_size}"
            )
            axes = tuple(
                f"{section}.{axis}_parallel_size"
                for axis in ("tensor_model", "pipeline_model", "context")
            )
            yield ConfigProblem(
                (
                    f"{key} ({num_ranks}) must be a multiple of {axes[0]} x"
                    f" pipeline_model_parallel_size x context_parallel_size ({sizes} = {replica});"
                    f" use {format_near_multiples(num_ranks, replica)} ranks or another layout."
                ),
                (key, *axes),
            )


@register_rl_rule
def check_critic_batches(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if the critic's mini-batch does not divide the samples of a step, or does not
    give each critic replica a sample. A mini-batch size of null means the actor's size, which
    `check_actor_batches` checks.
    """
    c = loaded.config
    if not has_critic(c):
        return
    if c.critic.mini_batch_size is not None:
        yield from check_divides_samples(c, MINI_BATCH, c.critic.mini_batch_size)
    size = c.critic.mini_batch_size or c.actor.mini_batch_size
    replicas = _count_critic_replicas(c)
    if count_critic_ranks(c) > 0 or c.critic.mini_batch_size is not None:
        yield from check_occupies_all_replicas(
            MINI_BATCH, size, replicas, ("actor.mini_batch_size", NUM_RANKS, *SIZES)
        )


@register_rl_rule
def check_critic_token_budget(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the critic's tokens per micro-batch cannot hold the longest sample, padded
    as the layout of the critic's pool demands. This also applies where the critic takes the actor's
    budget.
    """
    c = loaded.config
    budget = c.critic.ppo_max_token_len_per_gpu
    if count_critic_ranks(c) > 0:
        budget = c.actor.ppo_max_token_len_per_gpu if budget is None else budget
        yield from check_holds_longest_sample(
            c, BUDGET, budget, "critic.megatron", c.critic.megatron
        )
    elif has_critic(c) and budget is not None:
        yield from check_holds_longest_sample(c, BUDGET, budget, "actor.megatron", c.actor.megatron)


@register_rl_rule
def check_critic_steps(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if trainer.critic_warmup leaves no step in which the policy trains, or if the
    critic's learning rate schedule does not fit its number of optimizer steps.
    """
    c = loaded.config
    if not has_critic(c):
        return
    alone = c.trainer.critic_warmup
    total = c.trainer.total_training_steps
    yield make_problem_if(
        0 < total <= alone,
        (
            f"trainer.critic_warmup ({alone}) must be below trainer.total_training_steps ({total}),"
            f" or the policy is never trained; use {total - 1} or less."
        ),
        ("trainer.critic_warmup", "trainer.total_training_steps"),
    )
    size = c.critic.mini_batch_size or c.actor.mini_batch_size
    if size > 0:
        a_step = (
            c.data.train_batch_size
            * c.rollout.n
            // size
            * (c.critic.ppo_epochs or c.actor.ppo_epochs)
        )
        yield from check_lr_schedule(
            "critic.optim", c.critic.optim, total * a_step, "trainer.total_training_steps"
        )


def _count_critic_replicas(config: RunConfig) -> int:
    """Return the number of the critic's data-parallel replicas, on its own ranks or on the actor's;
    0 where the sizes are impossible, which other rules report.
    """
    if count_critic_ranks(config) > 0:
        return count_critic_ranks(config) // max(
            1, compute_model_parallel_size(config.critic.megatron)
        )
    return count_actor_ranks(config) // max(1, compute_model_parallel_size(config.actor.megatron))
