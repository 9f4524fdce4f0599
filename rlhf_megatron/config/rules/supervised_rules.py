"""Rules on the section `sft`, and on what the supervised jobs read of the other sections."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_megatron.config.rules import (
    IdleSettings,
    OptionalProblems,
    make_problem_if,
    register_idle_rule,
    register_rule,
)
from rlhf_megatron.config.rules.batch_rules import check_occupies_all_replicas
from rlhf_megatron.config.rules.run_rules import (
    CP,
    GPUS,
    LENGTHS,
    NODES,
    PP,
    TP,
    check_lr_schedule,
    compute_model_parallel_size,
    count_actor_ranks,
    find_registered_part,
    has_teacher,
    learns_from_pairs,
)
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.yaml_nodes import LoadedConfig

LOSS = "sft.loss_mode"
MESSAGES = "sft.messages_key"
TEXT = "sft.text_key"
CHAT = "data.apply_chat_template"
TEACHER = "sft.teacher_key"
ROWS = ("data.prompt_key", "data.label_key", "data.prompt_template", "data.few_shot")
OF_RL = (
    *(
        "rollout",
        "reward",
        "reward_model",
        "algorithm",
        "critic",
        "warmup",
        "checks",
        "schedule",
        *LENGTHS,
        "data.extra_columns",
    ),
    *(
        f"actor.{name}"
        for name in ("policy_loss", "mini_batch_size", "ppo_epochs", "entropy_coeff", "use_kl_loss")
    ),
    *(
        f"actor.{name}"
        for name in ("kl_loss_coef", "kl_loss_type", "shuffle", "router_replay", "distillation")
    ),
    *(f"trainer.{name}" for name in ("critic_warmup", "samples_kept", "record", "capsules_kept")),
    *(
        "actor.kernels.fused_loss",
        "ray.num_cpus_per_engine",
        "ray.reward_actors",
        "ray.num_cpus_per_reward_actor",
    ),
)
"""What only reinforcement learning reads."""


@register_idle_rule
def list_idle_job_settings(config: RunConfig) -> Iterator[IdleSettings]:
    """Yield an entry for each group of settings that only some jobs or losses read: the section
    `sft`, the settings of RL, pairs, conversations and teachers. Its first value says whether the
    configuration ignores that group.
    """
    yield config.job == "train", ("sft",), "job", "set job: sft or reward-model"
    if config.job == "train":
        return
    yield True, OF_RL, "job", "set job: train"
    yield config.job != "reward-model", ("sft.use_head_bias",), "job", "set job: reward-model"
    yield (
        not learns_from_pairs(config) and not has_teacher(config),
        ("sft.params",),
        LOSS,
        "name a loss with parameters in {switch}",
    )
    yield (
        not learns_from_pairs(config),
        ("sft.chosen_key", "sft.rejected_key"),
        LOSS,
        "name a preference loss in {switch}",
    )
    yield (
        learns_from_pairs(config),
        (MESSAGES, TEXT, "data.label_key", "actor.loss_agg_mode"),
        LOSS,
        "set {switch} to sft",
    )
    yield (
        config.sft.messages_key is None,
        ("sft.tools_key", TEACHER),
        MESSAGES,
        "name the key of conversations",
    )
    yield not has_teacher(config), (TEACHER,), LOSS, "set {switch} to forward_kl or reverse_kl"
    yield config.sft.messages_key is not None, (*ROWS, TEXT), MESSAGES, "set {switch} to null"
    yield config.sft.text_key is not None, (*ROWS, CHAT), TEXT, "set {switch} to null"


@register_rule
def check_supervised_job(loaded: LoadedConfig) -> OptionalProblems:
    """Yield the problems of a supervised job (sft or reward-model): learning rate schedule, batch
    size, a loss of the other job, and data that the loss or the conversations cannot read. Yield
    nothing for the job train.
    """
    c = loaded.config
    if c.job == "train":
        return
    steps = c.trainer.total_training_steps
    yield from check_lr_schedule(
        "actor.optim", c.actor.optim, steps, "trainer.total_training_steps"
    )
    size = c.data.train_batch_size
    ranks = compute_model_parallel_size(c.actor.megatron)
    if size >= 1 and ranks >= 1:
        yield from check_occupies_all_replicas(
            "data.train_batch_size", size, count_actor_ranks(c) // ranks, (GPUS, NODES, TP, PP, CP)
        )
    entry = find_registered_part("preference loss", c.sft.loss_mode)
    yield make_problem_if(
        (entry is not None and "rewards" in entry.needs) != (c.job == "reward-model"),
        (
            f"{LOSS} ({c.sft.loss_mode}) is not a loss of job: {c.job}; use bradley_terry or"
            " regression for a reward model, sft, dpo, forward_kl or reverse_kl for the job sft."
        ),
        (LOSS, "job"),
    )
    tasks = [
        task
        for task in (c.data.task, *(source.task for source in c.data.sources))
        if task is not None
    ]
    reads_other_rows = (
        learns_from_pairs(c) or c.sft.messages_key is not None or c.sft.text_key is not None
    )
    yield make_problem_if(
        tasks and reads_other_rows,
        (
            f"data.task ({', '.join(tasks)}) makes rows of prompt and answer, and {LOSS}"
            f" ({c.sft.loss_mode}) with {MESSAGES} ({c.sft.messages_key}) and {TEXT}"
            f" ({c.sft.text_key}) reads others from files; name files, or set {LOSS}: sft,"
            f" {MESSAGES}: null and {TEXT}: null."
        ),
        ("data.task", LOSS, MESSAGES, TEXT),
    )
    yield make_problem_if(
        learns_from_pairs(c)
        and (c.data.few_shot.num_shots or any(s.few_shot for s in c.data.sources)),
        f"data.few_shot is not read by {LOSS} {c.sft.loss_mode}; remove data.few_shot.",
        ("data.few_shot", LOSS),
    )
    yield make_problem_if(
        c.sft.messages_key is not None and not c.data.apply_chat_template,
        (
            f"{MESSAGES} ({c.sft.messages_key}) reads conversations, which the tokenizer's chat"
            f" template writes; set {CHAT}: true."
        ),
        (MESSAGES, CHAT),
    )
    files = [
        *c.data.train_files,
        *(file for source in c.data.sources for file in source.train_files),
    ]
    tables = [file for file in files if file.endswith(".parquet")]
    yield make_problem_if(
        not c.sft.in_memory and (tables or not reads_other_rows),
        (
            "sft.in_memory (false) reads conversations, plain texts or pairs of JSONL"
            f" files{f', not {tables[0]}' if tables else ''}; set sft.in_memory to true, or"
            f" name {MESSAGES} or {TEXT}, and JSONL files."
        ),
        ("sft.in_memory", MESSAGES, TEXT),
    )
    if c.sft.weight_key is not None:
        yield make_problem_if(
            not c.sft.weight_key,
            "sft.weight_key ('') must be a key of the rows; name it.",
            ("sft.weight_key",),
        )
