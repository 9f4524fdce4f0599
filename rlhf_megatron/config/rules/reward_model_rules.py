"""Rules of the section `reward_model`: a frozen model that scores the samples of a step as
they are annotated.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
)
from rlhf_megatron.config.rules.batch_rules import check_holds_longest_sample
from rlhf_megatron.config.rules.part_rules import (
    MAIN_REWARD,
    MODEL_PART,
    NO_MAIN_REWARD,
    find_registered_part,
)
from rlhf_megatron.config.rules.run_rules import (
    count_reward_model_ranks,
    has_reward_model,
    has_served_model,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

PATH = "reward_model.path"
SERVERS = "reward_model.served.num_servers"
OF_SERVERS = "reward_model.served.machines"
JUDGE = "reward_model.served.judge"
GRANULARITY = "reward_model.granularity"
BUDGET = "reward_model.max_token_len_per_gpu"
OF_RANKS = tuple(
    f"reward_model.{name}"
    for name in (
        *(
            "granularity",
            "step_separator",
            "step_reduction",
            "num_ranks",
            "megatron",
            "param_offload",
        ),
        "max_token_len_per_gpu",
    )
)
FILTER = "algorithm.filter_groups.enable"
METRIC = "algorithm.filter_groups.metric"


@register_idle_rule
def list_idle_reward_model_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield an entry for each group of settings of the section `reward_model`; its first value says
    whether the configuration ignores that group.
    """
    chosen = config.reward_model
    is_served = has_served_model(config)
    yield (
        not has_reward_model(config) and not is_served,
        ("reward_model",),
        PATH,
        "name a model in {switch}",
    )
    names = ("judge", "dtype", "ending", "skip_special_tokens", "python", "args", "env", "machines")
    of_served = tuple(f"reward_model.served.{name}" for name in names)
    yield (
        is_served and config.trainer.runtime != "torchrun",
        (OF_SERVERS,),
        "trainer.runtime",
        "set {switch} to torchrun",
    )
    yield not is_served, of_served, SERVERS, "give {switch} a number of servers"
    yield is_served, OF_RANKS, SERVERS, "set {switch} to 0"
    of_numbers = (
        "reward_model.mean",
        "reward_model.std",
        "reward_model.activation",
        "reward_model.served.ending",
        "reward_model.served.skip_special_tokens",
    )
    yield (
        is_served and chosen.served.judge is not None,
        of_numbers,
        JUDGE,
        "set {switch} to null: a verdict is from 0 to 1",
    )
    yield (
        chosen.num_ranks == 0,
        ("reward_model.megatron",),
        "reward_model.num_ranks",
        "give the model ranks of its own",
    )
    fix = "set {switch} to step"
    yield chosen.granularity != "step", ("reward_model.step_separator",), GRANULARITY, fix
    yield chosen.granularity == "response", ("reward_model.step_reduction",), GRANULARITY, fix


@register_rl_rule
def check_reward_model(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of a reward model that a run serves or keeps on ranks. A model on ranks
    scores after the reward stage, so the group filter and estimators with greedy samples, which
    read rewards in that stage, would miss its score.
    """
    c = loaded.config
    if has_served_model(c):
        yield from _check_served_reward_model(c)
    if not has_reward_model(c):
        return
    chosen = c.reward_model
    yield make_problem_if(
        chosen.granularity == "step" and not chosen.step_separator,
        (
            "reward_model.step_separator ('') must be the text that ends a step; write a line"
            " break, or what the model was trained with."
        ),
        ("reward_model.step_separator",),
    )
    metric = c.algorithm.filter_groups.metric.partition("/")[0]
    main_names = {c.reward.name, *(one.name for one in c.reward.by_source.values())}
    # where the main reward is zero, the filter reads the whole reward
    reads_model = metric in ("reward", MODEL_PART) or (
        metric == MAIN_REWARD and NO_MAIN_REWARD in main_names
    )
    decisive_name = MAIN_REWARD if NO_MAIN_REWARD not in main_names else "exact_match"
    yield make_problem_if(
        c.algorithm.filter_groups.enable and reads_model,
        (
            f"{METRIC} ({c.algorithm.filter_groups.metric}) is read before the model of {PATH}"
            f" scores; name the reward of `reward` that decides, such as {decisive_name},"
            " or serve the model and name it in reward.terms."
        ),
        (METRIC, FILTER, PATH),
    )
    entry = find_registered_part("advantage estimator", c.algorithm.adv_estimator)
    yield make_problem_if(
        entry is not None and "greedy_rewards" in entry.needs,
        (
            f"algorithm.adv_estimator ({c.algorithm.adv_estimator}) compares with greedy samples,"
            f" which the model of {PATH} does not score; use another estimator, or serve the model"
            " and name it in reward.terms."
        ),
        ("algorithm.adv_estimator", PATH),
    )
    yield _check_reward_name_clash(c)
    has_pool = count_reward_model_ranks(c) > 0
    section = "reward_model.megatron" if has_pool else "actor.megatron"
    budget = chosen.max_token_len_per_gpu or c.actor.ppo_max_token_len_per_gpu
    megatron = chosen.megatron if has_pool else c.actor.megatron
    yield from check_holds_longest_sample(
        c, BUDGET, budget, section, megatron, num_trailing_places=1
    )
    yield make_problem_if(
        c.rollout.colocated and not chosen.param_offload,
        (
            "reward_model.param_offload (false) must be true with rollout.colocated: the model"
            " would keep memory that the engines need; set reward_model.param_offload to"
            " true."
        ),
        ("reward_model.param_offload", "rollout.colocated"),
    )


def _check_reward_name_clash(config: RunConfig) -> ConfigProblem | None:
    """Return a problem if a reward of the run is named "reward_model", the name under which the
    scores of the reward model are logged; else None.
    """
    names = {
        config.reward.name,
        *(one.name for one in (*config.reward.by_source.values(), *config.reward.terms)),
    }
    return make_problem_if(
        MODEL_PART in names,
        f"a reward named {MODEL_PART} would share its metrics with the model of {PATH}; rename"
        " the reward.",
        ("reward", PATH),
    )


def _check_served_reward_model(config: RunConfig) -> OptionalProblems:
    """Yield the problems of a reward model on servers: a name clash, deterministic mode, server
    settings in the judge's parameters, and a machine that is named twice. Its score is a term of
    the reward, so all parts that read rewards see the score.
    """
    yield _check_reward_name_clash(config)
    yield make_problem_if(
        config.trainer.deterministic,
        (
            f"{SERVERS} ({config.reward_model.served.num_servers}): what a server scores beside a"
            " text changes the last bits of its score, so a run with trainer.deterministic would"
            f" not repeat; set {SERVERS} to 0."
        ),
        (SERVERS, "trainer.deterministic"),
    )
    own = sorted(
        {"server", "servers", "model"}.intersection(config.reward_model.served.judge or ())
    )
    yield make_problem_if(
        bool(own),
        (
            f"{JUDGE} must not have {', '.join(own)}: the run starts its servers; remove"
            f" {' and '.join(own)}."
        ),
        (JUDGE,),
    )
    given = config.reward_model.served.machines
    yield make_problem_if(
        len(set(given)) < len(given),
        (
            f"{OF_SERVERS} ({list(given)}) must name each machine once, where servers are started"
            " in turns; correct it."
        ),
        (OF_SERVERS,),
    )
