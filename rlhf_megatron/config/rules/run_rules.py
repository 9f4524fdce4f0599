"""Rules on the run as a whole: ranks and pools, sampling, optimizer schedules,
checkpoints, deadlines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from rlhf_megatron.config.errors import ConfigProblem
from rlhf_megatron.config.rules import (
    NAME_RULE,
    IdleSettings,
    OptionalProblems,
    is_valid_name,
    make_problem_if,
    register_idle_rule,
    register_rl_rule,
    register_rule,
)
from rlhf_megatron.config.rules.part_rules import find_registered_part, has_engine_setting
from rlhf_megatron.config.schema import MegatronConfig, OptimConfig, RunConfig, TeacherTermConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig
from rlhf_megatron.registry import load_registry

TP = "actor.megatron.tensor_model_parallel_size"
PP = "actor.megatron.pipeline_model_parallel_size"
CP = "actor.megatron.context_parallel_size"
NODES = "trainer.nnodes"
GPUS = "trainer.n_gpus_per_node"
LENGTHS = ("data.max_prompt_length", "data.max_response_length")
FILE_KEYS = ("data.prompt_key", "data.label_key", "data.extra_columns", "data.skip_bad_rows")
STAGES = (
    "next",
    "generate",
    "score",
    "take",
    "annotate",
    "advantages",
    "update",
    "sync",
    "evaluate",
)
SAVE_FREQ = "trainer.save_freq"
RESUME_MODE = "trainer.resume_mode"
RESUME_FROM = "trainer.resume_from_path"
STAGE_TIMEOUTS = "trainer.stage_timeouts_s"


def compute_world_size(config: RunConfig) -> int:
    """Return the number of ranks of the job, over all nodes and pools."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def count_actor_ranks(config: RunConfig) -> int:
    """Return the number of ranks of the actor's pool, the first of the job: all ranks less those of
    the other pools. The number can be 0 or negative where the settings contradict each other.
    """
    return (
        compute_world_size(config)
        - count_critic_ranks(config)
        - count_reward_model_ranks(config)
        - count_reference_ranks(config)
    )


def count_critic_ranks(config: RunConfig) -> int:
    """Return the number of ranks of the critic's own pool, which follows the actor's; 0 where there
    is no critic or it shares the actor's pool.
    """
    return config.critic.num_ranks if has_critic(config) else 0


def count_reward_model_ranks(config: RunConfig) -> int:
    """Return the number of ranks of the reward model's own pool, which follows the critic's; 0
    where there is no reward model on ranks or it shares the actor's pool.
    """
    return config.reward_model.num_ranks if has_reward_model(config) else 0


def count_reference_ranks(config: RunConfig) -> int:
    """Return the number of ranks of the own pool of the reference or teacher, the last of the job;
    0 where there is none or it shares the actor's pool.
    """
    return config.reference.num_ranks if needs_reference(config) else 0


def list_learning_pool_layouts(config: RunConfig) -> Iterator[tuple[str, MegatronConfig, int]]:
    """Yield (key of the megatron section, the section, number of ranks) for each pool whose model
    learns: the actor's, and the critic's if it has ranks of its own.
    """
    yield "actor.megatron", config.actor.megatron, count_actor_ranks(config)
    if count_critic_ranks(config) > 0:
        yield "critic.megatron", config.critic.megatron, count_critic_ranks(config)


def list_pool_layouts(config: RunConfig) -> Iterator[tuple[str, MegatronConfig, int]]:
    """Yield (key of the megatron section, the section, number of ranks) for each pool of the job,
    the actor's first. Models that share the actor's ranks have no entry.
    """
    yield from list_learning_pool_layouts(config)
    if count_reward_model_ranks(config) > 0:
        yield (
            "reward_model.megatron",
            config.reward_model.megatron,
            count_reward_model_ranks(config),
        )
    if count_reference_ranks(config) > 0:
        yield "reference.megatron", config.reference.megatron, count_reference_ranks(config)


def has_critic(config: RunConfig) -> bool:
    """Return whether the run has a critic, because the advantage estimator needs values."""
    entry = find_registered_part("advantage estimator", config.algorithm.adv_estimator)
    return entry is not None and "values" in entry.needs


def has_reward_model(config: RunConfig) -> bool:
    """Return whether a frozen reward model on the job's own ranks scores the samples of a step. A
    model that servers run does not count.
    """
    return (
        config.job == "train"
        and config.reward_model.path is not None
        and not has_served_model(config)
    )


def has_served_model(config: RunConfig) -> bool:
    """Return whether servers that the run starts score samples with a reward model, as a term of
    the reward.
    """
    chosen = config.reward_model
    return config.job == "train" and chosen.path is not None and chosen.served.num_servers > 0


def learns_from_pairs(config: RunConfig) -> bool:
    """Return whether the job is supervised and learns from pairs of a chosen and a
    rejected answer.
    """
    return config.job != "train" and config.sft.loss_mode != "sft" and not has_teacher(config)


def has_teacher(config: RunConfig) -> bool:
    """Return whether the job learns from the distributions of a teacher model, which takes the
    place of the reference.
    """
    if config.job == "train":
        return config.actor.distillation.loss_mode is not None
    return config.sft.loss_mode in load_registry("distillation loss")


def get_teacher_term(config: RunConfig) -> tuple[str, TeacherTermConfig]:
    """Return the key of the section that configures the distillation loss, and that configuration:
    actor.distillation for the job "train", else one made of the section `sft`.
    """
    if config.job == "train":
        return "actor.distillation", config.actor.distillation
    return "sft", TeacherTermConfig(config.sft.loss_mode, params=config.sft.params)


def uses_reference_kl(config: RunConfig) -> bool:
    """Return whether the run computes the reference's log-probs of the sampled tokens, for a KL
    loss or a KL term in the reward.
    """
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_reference(config: RunConfig) -> bool:
    """Return whether the job runs a frozen reference or teacher model: for a KL term, a preference
    loss that compares with it, or distillation from a model.
    """
    if config.job != "train":
        entry = (
            find_registered_part("preference loss", config.sft.loss_mode)
            if learns_from_pairs(config)
            else None
        )
        asks_teacher = has_teacher(config) and config.sft.teacher_key is None
        return asks_teacher or (entry is not None and "ref_log_probs" in entry.needs)
    return has_teacher(config) or uses_reference_kl(config)


def compute_model_parallel_size(megatron: MegatronConfig) -> int:
    """Return the number of ranks that hold one copy of a model and share its samples: tensor x
    pipeline x context size.
    """
    return (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * megatron.context_parallel_size
    )


@register_idle_rule
def list_idle_run_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield an entry for each group of settings that a switch elsewhere in the configuration can
    make useless (losses, reference, engines, data, warmup, checks, recomputation, saving); its
    first value says whether the configuration ignores that group.
    """
    of_loss = ("actor.kl_loss_coef", "actor.kl_loss_type")
    yield not config.actor.use_kl_loss, of_loss, "actor.use_kl_loss", "set {switch} to true"
    teacher = "actor.distillation.loss_mode"
    of_teacher = tuple(f"actor.distillation.{name}" for name in ("coef", "others_coef", "params"))
    yield (
        config.job == "train" and not has_teacher(config),
        of_teacher,
        teacher,
        "set {switch} to reverse_kl",
    )
    switch = "actor.use_kl_loss"
    fix = "set {switch} or algorithm.use_kl_in_reward to true"
    if config.job != "train":
        switch = "sft.loss_mode"
        fix = "set {switch} to a preference loss, such as dpo"
    if has_teacher(config) and config.job != "train":
        switch = "sft.teacher_key"
        fix = "set {switch} to null, and the teacher is asked"
    yield not needs_reference(config), ("reference",), switch, fix
    own = "reference.num_ranks"
    yield (
        config.reference.num_ranks == 0,
        ("reference.megatron",),
        own,
        "give the reference ranks of its own",
    )
    yield (
        config.reference.num_ranks > 0,
        ("reference.param_offload",),
        own,
        "set {switch} to 0: the reference has no other use for ranks",
    )
    engines = load_registry("engine")
    for setting in sorted(
        {key for name in engines for key in engines.get(name).build.setting_keys}
    ):
        others = " or ".join(
            name for name in engines if setting in engines.get(name).build.setting_keys
        )
        is_idle = config.rollout.engine in engines and not has_engine_setting(
            config.rollout, setting
        )
        yield is_idle, (setting,), "rollout.engine", f"set {{switch}} to {others}"
    yield config.data.task is not None, FILE_KEYS, "data.task", "use files (task: null)"
    yield config.data.task is None, ("data.task_params",), "data.task", "name a task"
    warmup = ("batch_size", "stop_accuracy", "test_freq", "test_samples", "save_hf", "optim")
    keys = tuple(f"warmup.{name}" for name in warmup)
    yield config.warmup.max_steps == 0, keys, "warmup.max_steps", "give {switch} a number of steps"
    for section, optim in (
        ("actor", config.actor.optim),
        ("warmup", config.warmup.optim),
        ("critic", config.critic.optim),
    ):
        keys = (f"{section}.optim.min_lr", f"{section}.optim.lr_decay_steps")
        switch = f"{section}.optim.lr_decay_style"
        yield optim.lr_decay_style == "constant", keys, switch, "choose a style that decays"
        yield (
            optim.lr_decay_style not in ("linear", "cosine"),
            (f"{section}.optim.lr_decay_ends",),
            switch,
            "choose linear or cosine",
        )
    bounds = tuple(
        f"checks.log_prob_{name}" for name in ("p50_abs_diff", "p99_abs_diff", "mean_kl")
    )
    yield (
        config.is_float32_throughout,
        bounds,
        "model.dtype",
        "bound checks.log_prob_max_abs_diff, which float32 is held to",
    )
    decides = "model.dtype" if config.model.dtype == "bfloat16" else "rollout.dtype"
    decides = "rollout.quantization" if config.rollout.quantization else decides
    fix = (
        "bound checks.log_prob_p50_abs_diff, log_prob_p99_abs_diff and log_prob_mean_kl, which"
        " other types are held to"
    )
    yield not config.is_float32_throughout, ("checks.log_prob_max_abs_diff",), decides, fix
    for section, m, _ in list_pool_layouts(config):
        granularity = f"{section}.recompute_granularity"
        of_full = (f"{section}.recompute_method", f"{section}.recompute_num_layers")
        yield m.recompute_granularity != "full", of_full, granularity, "set {switch} to full"
        of_selective = (f"{section}.recompute_modules",)
        yield (
            m.recompute_granularity != "selective",
            of_selective,
            granularity,
            "set {switch} to selective",
        )
    is_never = config.trainer.test_freq > config.trainer.total_training_steps
    yield (
        is_never,
        ("trainer.test_freq",),
        "trainer.total_training_steps",
        "set trainer.test_freq to {switch} or less",
    )
    of_saving = ("trainer.async_save", "trainer.max_ckpt_to_keep", "trainer.save_failure")
    yield (
        not config.trainer.save_freq and config.trainer.save_last != "state",
        of_saving,
        SAVE_FREQ,
        "give {switch} a number of steps",
    )
    yield (
        not config.trainer.save_freq,
        ("trainer.keep_best",),
        SAVE_FREQ,
        "give {switch} a number of steps",
    )
    fix = "set {switch} to resume_path"
    yield config.trainer.resume_mode != "resume_path", (RESUME_FROM,), RESUME_MODE, fix


@register_rule
def check_actor_layout(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if the inline runtime is to have more than one rank, if other pools leave too
    few ranks for the actor, or if the actor's ranks are not a multiple of its model-parallel size.
    """
    c = loaded.config
    m = loaded.config.actor.megatron
    world = count_actor_ranks(c)
    ranks = compute_model_parallel_size(c.actor.megatron)
    if compute_world_size(c) < 1 or ranks < 1:
        return  # `ranges` says it
    yield make_problem_if(
        c.trainer.runtime == "inline" and compute_world_size(c) != 1,
        (
            "trainer.runtime (inline) has one rank, but trainer.nnodes x n_gpus_per_node is"
            f" {compute_world_size(c)}; set both to 1 or use runtime: torchrun."
        ),
        ("trainer.runtime", GPUS, NODES),
    )
    if count_actor_ranks(c) < compute_world_size(c):
        if c.trainer.runtime != "inline":  # else `check_separate_pools` says it
            yield from _check_actor_pool_size(c)
        return
    if world % ranks:
        near = format_near_multiples(world, ranks)
        sizes = (
            f"{m.tensor_model_parallel_size} x {m.pipeline_model_parallel_size} x"
            f" {m.context_parallel_size}"
        )
        yield ConfigProblem(
            (
                f"trainer.nnodes x n_gpus_per_node ({c.trainer.nnodes} x"
                f" {c.trainer.n_gpus_per_node} = {world}) must be a multiple of {TP} x"
                f" pipeline_model_parallel_size x context_parallel_size ({sizes} = {ranks}); use"
                f" {near} ranks or another layout."
            ),
            (GPUS, NODES, TP, PP, CP),
        )


def _check_actor_pool_size(config: RunConfig) -> OptionalProblems:
    """Yield a problem if the ranks that the other pools leave for the actor are not a positive
    multiple of its model-parallel size.
    """
    pools = {
        "critic.num_ranks": count_critic_ranks(config),
        "reward_model.num_ranks": count_reward_model_ranks(config),
    }
    pools["reference.num_ranks"] = count_reference_ranks(config)
    pools = {key: count for key, count in pools.items() if count}
    named = " + ".join(pools) + f" ({' + '.join(map(str, pools.values()))})"
    left = count_actor_ranks(config)
    ranks = compute_model_parallel_size(config.actor.megatron)
    taken = sum(pools.values())
    yield make_problem_if(
        left < ranks or left % ranks,
        (
            f"{named} leaves {left} of trainer.nnodes x n_gpus_per_node"
            f" ({compute_world_size(config)}) ranks for the actor, which must be a multiple of {TP}"
            f" x pipeline_model_parallel_size x context_parallel_size ({ranks}), at least one; use"
            f" {taken + max(1, -(-left // ranks)) * ranks} ranks in all."
        ),
        (*pools, GPUS, NODES, TP, PP, CP),
    )


@register_rl_rule
def check_sampling(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the sampling settings: evaluation that is too cold or greedy with settings
    that greedy ignores, a top_k of 0, bad stop strings, and one sample a group for an estimator
    that compares within groups.
    """
    r = loaded.config.rollout
    coldest = 0.01
    yield make_problem_if(
        0 < r.val_kwargs.temperature < coldest,
        (
            f"rollout.val_kwargs.temperature ({r.val_kwargs.temperature}) must be at least"
            f" {coldest}, or 0 for greedy: float32 has no room for logits divided by less; use 0."
        ),
        ("rollout.val_kwargs.temperature",),
    )
    yield make_problem_if(
        r.val_kwargs.temperature == 0 and r.val_kwargs.n > 1,
        (
            f"rollout.val_kwargs.n ({r.val_kwargs.n}) must be 1 at temperature 0, where all samples"
            " are equal; set n: 1 or a temperature."
        ),
        ("rollout.val_kwargs.n", "rollout.val_kwargs.temperature"),
    )
    of_evaluation = r.val_kwargs
    for name, value, off in (
        ("top_p", of_evaluation.top_p, 1.0),
        ("top_k", of_evaluation.top_k, -1),
        ("min_p", of_evaluation.min_p, 0.0),
    ):
        yield make_problem_if(
            r.val_kwargs.temperature == 0 and value != off,
            (
                f"rollout.val_kwargs.{name} ({value}) would be ignored because"
                " rollout.val_kwargs.temperature is 0 (greedy); remove"
                f" rollout.val_kwargs.{name}, or set a temperature."
            ),
            (f"rollout.val_kwargs.{name}", "rollout.val_kwargs.temperature"),
        )
    yield make_problem_if(
        r.val_kwargs.top_k == 0,
        "rollout.val_kwargs.top_k (0) must be at least 1, or -1 (off); use -1.",
        ("rollout.val_kwargs.top_k",),
    )
    yield make_problem_if(
        len(set(r.stop)) != len(r.stop) or "" in r.stop,
        f"rollout.stop ({list(r.stop)}) must be distinct, non-empty strings.",
        ("rollout.stop",),
    )
    estimator = loaded.config.algorithm.adv_estimator
    entry = find_registered_part("advantage estimator", estimator)
    yield make_problem_if(
        entry is not None and entry.scope == "group" and r.n == 1,
        (
            f"rollout.n (1) must be at least 2 for algorithm.adv_estimator {estimator}: alone in"
            " its group, a sample has advantage 0; use 8."
        ),
        ("rollout.n", "algorithm.adv_estimator"),
    )


@register_rl_rule
def check_term_weights(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if a KL loss or a distillation loss is on with a weight of 0: the reference
    or teacher would run for nothing.
    """
    actor = loaded.config.actor
    yield make_problem_if(
        actor.use_kl_loss and actor.kl_loss_coef == 0,
        (
            "actor.kl_loss_coef (0) must be above 0 with actor.use_kl_loss, or the reference is run"
            " for nothing; give actor.kl_loss_coef a weight such as 0.001, or set use_kl_loss:"
            " false."
        ),
        ("actor.kl_loss_coef", "actor.use_kl_loss"),
    )
    teacher = actor.distillation
    yield make_problem_if(
        teacher.loss_mode is not None and teacher.coef == 0,
        (
            "actor.distillation.coef (0) must be above 0, or the teacher is run for nothing; use 1,"
            " or set actor.distillation.loss_mode: null."
        ),
        ("actor.distillation.coef", "actor.distillation.loss_mode"),
    )


@register_rule
def check_teacher(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the job learns from a teacher without reference.path, or if a reference
    without a path is to have ranks of its own.
    """
    c = loaded.config
    section, term = get_teacher_term(c)
    key = f"{section}.loss_mode"
    yield make_problem_if(
        has_teacher(c) and needs_reference(c) and c.reference.path is None,
        f"{key} ({term.loss_mode}) learns from a teacher; name its directory as reference.path.",
        (key, "reference.path"),
    )
    yield make_problem_if(
        count_reference_ranks(c) > 0 and c.reference.path is None,
        (
            f"reference.num_ranks ({c.reference.num_ranks}) is for a model of reference.path: the"
            " policy as it was stands beside the policy; name a directory, or set"
            " reference.num_ranks to 0."
        ),
        ("reference.num_ranks", "reference.path"),
    )


@register_rule
def check_data_is_named(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems if the data files are named together with a task, or if neither a task,
    sources nor files give training rows and, for RL, evaluation rows.
    """
    d = loaded.config.data
    for name, files in (("train_files", d.train_files), ("val_files", d.val_files)):
        key = f"data.{name}"
        yield make_problem_if(
            d.task is not None and files,
            (
                f"{key} ({list(files)}) and data.task ({d.task}) exclude each other; set task: null"
                f" or {name}: []."
            ),
            (key, "data.task"),
        )
        is_needed = name == "train_files" or loaded.config.job == "train"
        if is_needed and d.task is None and not d.sources and not files:
            other = (
                "name a data.task"
                if name == "train_files"
                else "keep some of the training rows for it"
            )
            yield ConfigProblem(
                f"{key} ([]) must name a JSONL file; give one, or {other}.", (key, "data.task")
            )


@register_rl_rule
def check_optimizer_schedules(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of the learning rate schedules of the actor and of the warmup phase, and a
    problem if the warmup's accuracy would never be tested.
    """
    c = loaded.config
    steps = 0
    if c.actor.mini_batch_size > 0:
        a_step = (
            c.data.train_batch_size * c.rollout.n // c.actor.mini_batch_size * c.actor.ppo_epochs
        )
        steps = (
            c.trainer.total_training_steps - (c.trainer.critic_warmup if has_critic(c) else 0)
        ) * a_step
    yield from check_lr_schedule(
        "actor.optim", c.actor.optim, steps, "trainer.total_training_steps"
    )
    if c.warmup.max_steps > 0:
        yield from check_lr_schedule(
            "warmup.optim", c.warmup.optim, c.warmup.max_steps, "warmup.max_steps"
        )
        yield make_problem_if(
            c.warmup.stop_accuracy < 1 and c.warmup.test_freq > c.warmup.max_steps,
            (
                f"warmup.test_freq ({c.warmup.test_freq}) must be at most warmup.max_steps"
                f" ({c.warmup.max_steps}), or stop_accuracy is never looked at; use"
                f" {c.warmup.max_steps} or less."
            ),
            ("warmup.test_freq", "warmup.max_steps", "warmup.stop_accuracy"),
        )


def check_lr_schedule(
    section: str, optim: OptimConfig, num_steps: int, length_key: str
) -> OptionalProblems:
    """Yield a problem for each rule of megatron-core's OptimizerParamScheduler that the section
    `section` breaks. `num_steps` is the number of optimizer steps of the phase, and `length_key`
    the setting that determines this number.
    """
    yield make_problem_if(
        optim.min_lr > optim.lr,
        f"{section}.min_lr ({optim.min_lr}) must not be above {section}.lr ({optim.lr});"
        f" lower {section}.min_lr.",
        (f"{section}.min_lr", f"{section}.lr"),
    )
    decay = optim.lr_decay_steps
    warmup = optim.lr_warmup_steps
    end, key = (num_steps, length_key) if decay is None else (decay, f"{section}.lr_decay_steps")
    if optim.lr_decay_style != "constant" and end > 0 and warmup >= end:
        name = f"the run's optimizer steps ({end})" if decay is None else f"{key} ({end})"
        yield ConfigProblem(
            (
                f"{section}.lr_warmup_steps ({warmup}) must be below {name} for lr_decay_style"
                f" {optim.lr_decay_style}; warm up for {max(end // 10, 0)} steps or run longer."
            ),
            (f"{section}.lr_warmup_steps", key),
        )
    yield make_problem_if(
        optim.weight_decay_end is not None and optim.weight_decay_end < optim.weight_decay,
        (
            f"{section}.weight_decay_end ({optim.weight_decay_end}) must be at least"
            f" {section}.weight_decay ({optim.weight_decay}): the schedule only rises; swap the"
            f" two, or remove {section}.weight_decay_end."
        ),
        (f"{section}.weight_decay_end", f"{section}.weight_decay"),
    )


@register_rule
def check_output_names(loaded: LoadedConfig) -> OptionalProblems:
    """Yield problems of the names of a run: an experiment name that is no plain directory name, bad
    project names, a logger that is named twice, and an empty model.path.
    """
    trainer = loaded.config.trainer
    name = PurePath(trainer.experiment_name)
    yield make_problem_if(
        len(name.parts) != 1 or name.name in ("", ".", ".."),
        (
            f"trainer.experiment_name ({trainer.experiment_name!r}) must be one plain directory"
            " name; set the parent in trainer.default_local_dir."
        ),
        ("trainer.experiment_name",),
    )
    for key, text in (
        ("experiment_name", trainer.experiment_name),
        ("project_name", trainer.project_name),
    ):
        yield make_problem_if(
            not is_valid_name(text),
            f"trainer.{key} ({text[:40]!r}) {NAME_RULE}.",
            (f"trainer.{key}",),
        )
    yield make_problem_if(
        len(set(trainer.logger)) != len(trainer.logger),
        f"trainer.logger ({list(trainer.logger)}) must differ; name each once.",
        ("trainer.logger",),
    )
    yield make_problem_if(
        not loaded.config.model.path,
        "model.path ('') must name a model directory; give one.",
        ("model.path",),
    )


def format_near_multiples(value: int, factor: int) -> str:
    """Return the multiples of `factor` just below and above `value`, as in "4 or 6"; only the one
    above if the other would be 0. `value` must not be a multiple itself.
    """
    below = value // factor * factor
    return f"{below} or {below + factor}" if below else str(factor)


@register_rule
def check_resume_settings(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem if the resume mode is resume_path and no path is set."""
    trainer = loaded.config.trainer
    yield make_problem_if(
        trainer.resume_mode == "resume_path" and trainer.resume_from_path is None,
        f"{RESUME_MODE} (resume_path) needs {RESUME_FROM}; name a directory like"
        " runs/x/checkpoints/step_000010, or use auto.",
        (RESUME_MODE, RESUME_FROM),
    )


@register_rule
def check_stage_deadlines(loaded: LoadedConfig) -> OptionalProblems:
    """Yield a problem for each name in trainer.stage_timeouts_s that is no stage of the loop."""
    for stage in sorted(loaded.config.trainer.stage_timeouts_s.keys() - set(STAGES)):
        yield ConfigProblem(
            f"{STAGE_TIMEOUTS}: there is no stage {stage!r}; the stages are {', '.join(STAGES)}.",
            (),
        )
