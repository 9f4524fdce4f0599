"""Translates the section trainer of verl, mini-batches (prompts there, samples here), token budgets
and optimizers.

verl's learning-rate schedules move once a step of the loop, ours at each optimizer step.
"""

from __future__ import annotations

from rlhf_megatron.jobs.from_verl.config_draft import ConfigDraft
from rlhf_megatron.jobs.from_verl.verl_data import expand_home
from rlhf_megatron.jobs.from_verl.verl_settings import VerlSettings
from rlhf_megatron.registry import load_registry

LOGGERS = {"file": "jsonl", "jsonl": "jsonl"}

SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")

STYLES = {"inverse_square_root": "inverse-square-root"}
UNIT = "optimizer steps here, steps of the loop there"


def compute_total_steps(draft: ConfigDraft) -> int | None:
    """Return the steps of verl's loop: the number in the file, or epochs over the number of rows
    that the user has given. Return None where neither is known or valid.
    """
    g = draft.verl_settings
    steps = g.peek_value("trainer.total_training_steps")
    if steps is not None:
        return steps if isinstance(steps, int) and steps > 0 else None
    epochs = g.peek_value("trainer.total_epochs")
    size = g.peek_value("data.train_batch_size")
    rows = draft.user_facts.num_train_rows
    if rows is None or not all(isinstance(value, int) and value > 0 for value in (epochs, size)):
        return None
    return rows // size * epochs or None


def explain_too_few_rows(draft: ConfigDraft, batch_size: object) -> str:
    """Return why the rows that the user has given make no step of `batch_size`; "" where they do,
    or where one of the two is not known.
    """
    rows = draft.user_facts.num_train_rows
    if rows is None or not isinstance(batch_size, int) or rows >= batch_size:
        return ""
    return (
        f"data.train_batch_size ({batch_size}) is more than the {rows} rows of --train-rows, and"
        " verl drops a batch that is not full: it would make no step; give a smaller"
        " data.train_batch_size, or trainer.total_training_steps=N."
    )


def translate_trainer(draft: ConfigDraft) -> None:
    """Translate the section trainer: length, nodes, saving and testing, resuming, names, loggers,
    and the dumps of batches.
    """
    g = draft.verl_settings
    _translate_run_length(draft)
    for name in ("nnodes", "n_gpus_per_node", "val_before_train", "resume_mode"):
        draft.copy_setting(f"trainer.{name}")
    for name in ("save_freq", "test_freq"):
        value = (
            -1
            if g.peek_value(f"trainer.{name}") is False
            else g.use_whole_number(f"trainer.{name}", minimum=-1)
        )
        if value is not None:
            never = "never: 0 here, -1 there" if value == -1 else ""
            draft.copy_setting(f"trainer.{name}", value=max(value, 0), note=never)
    if g.use_value("trainer.resume_from_path") not in (None, False):
        note = "a directory that this trainer wrote: checkpoints of verl are not read"
        draft.set_value(
            "trainer.resume_from_path",
            g.use_value("trainer.resume_from_path"),
            ("trainer.resume_from_path",),
            note,
        )
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        key = f"trainer.{name}"
        if g.use_value(key) is not None:
            sizes = [
                g.use_whole_number(f"trainer.max_{role}_ckpt_to_keep", minimum=0) or 0
                for role in ("actor", "critic")
            ]
            draft.set_value(
                "trainer.max_ckpt_to_keep",
                max(sizes),
                (key,),
                "one checkpoint holds actor and critic",
            )
    draft.convert_setting("actor.megatron.seed", "trainer.seed")
    g.mark_used("critic.megatron.seed", "reference.megatron.seed")
    translate_run_names(draft)
    translate_loggers(draft)
    _translate_checkpoint_settings(draft)
    dumps = [
        name
        for name in ("rollout_data_dir", "validation_data_dir")
        if g.use_value(f"trainer.{name}")
    ]
    if dumps:
        note = "batches of each step, under the run directory"
        draft.set_value("trainer.record", True, tuple(f"trainer.{name}" for name in dumps), note)
    if g.use_value("trainer.device") not in (None, "cuda", "cpu"):
        draft.leave_untranslated("trainer.device", "devices are cuda and cpu")
    elif g.is_written("trainer.device"):
        draft.copy_setting("trainer.device")


def _translate_run_length(draft: ConfigDraft) -> None:
    """Translate the number of training steps, or of epochs if the number of training rows is known;
    request it otherwise.
    """
    g = draft.verl_settings
    key = "trainer.total_training_steps"
    g.mark_used(key, "trainer.total_epochs")
    steps = compute_total_steps(draft)
    if steps is None:
        if g.peek_value(key) is not None:
            g.use_whole_number(key)
        epochs = f"{g.peek_value('trainer.total_epochs')} epochs"
        source = "" if g.is_written("trainer.total_epochs") else " (verl's default)"
        reason = explain_too_few_rows(draft, g.peek_value("data.train_batch_size")) or (
            f"{epochs}{source} of a file whose rows are not known;"
            " tell them with --train-rows N, or give trainer.total_training_steps=N."
        )
        draft.request_missing_fact("trainer.total_training_steps", reason, "trainer.total_epochs")
    elif g.peek_value(key) is not None:
        draft.set_value(key, steps, (key,))
    else:
        epochs = g.peek_value("trainer.total_epochs")
        size = g.peek_value("data.train_batch_size")
        note = (
            f"{draft.user_facts.num_train_rows} rows // data.train_batch_size {size}, x"
            f" {epochs} epochs"
        )
        draft.set_value(key, steps, ("trainer.total_epochs",), note)


def translate_run_names(draft: ConfigDraft) -> None:
    """Translate the names of the run, its project and its directory; a slash in the run's name
    becomes an underscore.
    """
    g = draft.verl_settings
    name = (
        g.use_text("trainer.experiment_name")
        if g.use_value("trainer.experiment_name") is not None
        else None
    )
    if name is not None:
        plain = name.strip("/").replace("/", "_")
        note = "a directory name: / became _" if plain != name else ""
        draft.set_value("trainer.experiment_name", plain, ("trainer.experiment_name",), note)
    draft.convert_setting(
        "trainer.project_name", convert_value=lambda _: g.use_text("trainer.project_name")
    )
    parent = (
        g.use_text("trainer.default_local_dir")
        if g.use_value("trainer.default_local_dir") is not None
        else None
    )
    if parent is not None:
        note = "experiment_name is put below it"
        short = parent.rstrip("/")
        if name and short.endswith(f"/{name}"):
            short = short.removesuffix(f"/{name}")
        draft.set_value(
            "trainer.default_local_dir",
            expand_home(draft, short),
            ("trainer.default_local_dir",),
            note,
        )


def translate_loggers(draft: ConfigDraft) -> None:
    """Translate the loggers that exist here, leave the others untranslated, and always add jsonl,
    which reports and resumed runs read. Do nothing where the file has none.
    """
    key = "trainer.logger"
    value = draft.verl_settings.use_value(key)
    if value is None:
        return
    known = list(load_registry("logger"))
    names = [
        LOGGERS.get(str(name), str(name))
        for name in (value if isinstance(value, list) else [value])
    ]
    kept = list(dict.fromkeys(name for name in names if name in known))
    lost = [name for name in names if name not in known]
    if lost:
        reason = (
            f"{', '.join(map(repr, lost))}: there are {', '.join(known)}, and a logger of your"
            " own (plugins:)"
        )
        draft.leave_untranslated(key, reason)
    if "jsonl" not in kept:
        kept.append("jsonl")  # reports and resumed runs read it
    draft.set_value(key, kept, (key,))


def _translate_checkpoint_settings(draft: ConfigDraft) -> None:
    """Translate the settings of checkpoints: asynchronous saving, and weights in Hugging Face
    layout at the end. Mark all others as dealt with.
    """
    g = draft.verl_settings
    is_async = "actor.checkpoint.async_save"
    draft.convert_setting(is_async, "trainer.async_save", lambda _: g.use_flag(is_async))
    for role in ("actor", "critic"):
        contents = f"{role}.checkpoint.save_contents"
        if (
            role == "actor"
            and isinstance(g.peek_value(contents), list)
            and "hf_model" in g.peek_value(contents)
        ):
            draft.set_value(
                "trainer.save_hf",
                True,
                (contents,),
                "at the end of the run; checkpoints are always whole",
            )
        g.mark_used(f"{role}.checkpoint.*")


def translate_actor_batches(draft: ConfigDraft) -> None:
    """Translate the actor's mini-batch size, epochs, shuffling and token budget."""
    _translate_mini_batch_size(draft, "actor")
    draft.copy_setting("actor.ppo_epochs")
    draft.copy_setting("actor.shuffle")
    _translate_token_budget(draft, "actor", "ppo", "actor.ppo_max_token_len_per_gpu")
    g = draft.verl_settings
    tokens = "rollout.log_prob_max_token_len_per_gpu"
    if g.peek_value(tokens) not in (None, g.peek_value("actor.ppo_max_token_len_per_gpu")):
        draft.leave_untranslated(tokens, "the pass for old log-probs has the actor's budget")
    g.mark_used(tokens)
    g.mark_used(
        *(f"rollout.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size"))
    )
    g.mark_used("rollout.log_prob_use_dynamic_bsz")


def translate_critic_batches(draft: ConfigDraft) -> None:
    """Translate the critic's mini-batch size, epochs and token budget. A size that the file does
    not give is the actor's, in verl as here.
    """
    g = draft.verl_settings
    if (
        g.is_written("critic.ppo_mini_batch_size")
        and g.peek_value("critic.ppo_mini_batch_size") is not None
    ):
        _translate_mini_batch_size(draft, "critic")
    if g.is_written("critic.ppo_epochs") and g.peek_value("critic.ppo_epochs") is not None:
        draft.copy_setting("critic.ppo_epochs")
    _translate_token_budget(draft, "critic", "ppo", "critic.ppo_max_token_len_per_gpu")
    g.mark_used("critic.forward_micro_batch_size_per_gpu", "critic.forward_micro_batch_size")
    if g.peek_value("critic.forward_max_token_len_per_gpu") in (
        None,
        g.peek_value("critic.ppo_max_token_len_per_gpu"),
    ):
        g.mark_used("critic.forward_max_token_len_per_gpu")


def translate_reference_token_budget(draft: ConfigDraft) -> None:
    """Translate the token budget of the reference's log-prob pass."""
    _translate_token_budget(draft, "reference", "log_prob", "reference.max_token_len_per_gpu")


def count_optimizer_steps_per_step(verl_settings: VerlSettings, role: str) -> int | None:
    """Return the number of optimizer steps of a role in a step of verl's loop, mini-batches x
    epochs; None where the batch sizes are not valid numbers.
    """
    size = verl_settings.peek_value("data.train_batch_size")
    mini = verl_settings.peek_value(f"{role}.ppo_mini_batch_size") or verl_settings.peek_value(
        "actor.ppo_mini_batch_size"
    )
    epochs = verl_settings.peek_value(f"{role}.ppo_epochs") or verl_settings.peek_value(
        "actor.ppo_epochs"
    )
    is_whole = all(isinstance(value, int) and value > 0 for value in (size, mini, epochs))
    return max(1, size // mini) * epochs if is_whole else None


def count_actor_replicas(verl_settings: VerlSettings) -> int | None:
    """Return the data-parallel size of the actor; None where ranks or parallel sizes are not valid
    numbers. A number of ranks that the sizes do not divide is rounded down, to 1 at least.
    """
    ranks = [verl_settings.peek_value(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    sizes = [verl_settings.peek_value(f"actor.megatron.{name}") for name in SIZES]
    if not all(isinstance(value, int) and value > 0 for value in (*ranks, *sizes)):
        return None
    return max(1, ranks[0] * ranks[1] // (sizes[0] * sizes[1] * sizes[2]))


def _translate_mini_batch_size(draft: ConfigDraft, role: str) -> None:
    """Translate a role's mini-batch size from prompts to samples, by rollout.n."""
    source = f"{role}.ppo_mini_batch_size"
    size = draft.verl_settings.use_whole_number(source)
    n = draft.verl_settings.use_whole_number("rollout.n")
    if size is not None and n is not None:
        note = f"samples here, prompts there: {size} x rollout.n {n}"
        draft.set_value(f"{role}.mini_batch_size", size * n, (source, "rollout.n"), note)


def _translate_token_budget(draft: ConfigDraft, role: str, verl_prefix: str, key: str) -> None:
    """Set `key` to a role's tokens per micro-batch on one rank. A size in samples becomes that
    number of longest samples, of which a budget can pack more. `verl_prefix` is the prefix of
    verl's names, "ppo" or "log_prob".
    """
    g = draft.verl_settings
    is_actor = verl_prefix == "ppo"
    tokens = f"{role}.{verl_prefix}_max_token_len_per_gpu"
    dynamic = f"{role}.{'' if is_actor else 'log_prob_'}use_dynamic_bsz"
    per_gpu = f"{role}.{verl_prefix}_micro_batch_size_per_gpu"
    of_all = f"{role}.{verl_prefix}_micro_batch_size"
    g.mark_used(tokens, dynamic, per_gpu, of_all)
    is_dynamic = (
        g.use_flag(dynamic)
        if g.peek_value(dynamic) is not None
        else g.use_flag("actor.use_dynamic_bsz")
    )
    source = next((one for one in (per_gpu, of_all) if g.peek_value(one) is not None), None)
    if is_dynamic or source is None:
        if g.is_written(tokens) and g.peek_value(tokens) is not None:
            draft.set_value(key, g.use_whole_number(tokens), (tokens,))
        return
    lengths = [g.use_whole_number(f"data.max_{one}_length") for one in ("prompt", "response")]
    size = g.use_whole_number(source)
    cp = g.use_whole_number("actor.megatron.context_parallel_size")
    num_replicas = count_actor_replicas(g)
    if (
        size is None
        or cp is None
        or num_replicas is None
        or lengths[0] is None
        or lengths[1] is None
    ):
        return
    of_rank = size if source == per_gpu else max(1, size // num_replicas)
    longest = lengths[0] + lengths[1]
    shared = f" / context_parallel_size {cp}" if cp > 1 else ""
    share = f" (of {size} over {num_replicas} replicas)" if source == of_all else ""
    note = f"micro-batches are cut by tokens: {of_rank}{share} x longest sample {longest}{shared}"
    draft.set_value(key, -(-of_rank * longest // cp), (source,), note)


def translate_optimizer(draft: ConfigDraft, role: str) -> None:
    """Translate a role's optimizer settings and learning rate schedule; leave an optimizer other
    than AdamW untranslated.
    """
    g = draft.verl_settings
    section = f"{role}.optim"
    for name in ("lr", "weight_decay"):
        draft.copy_setting(f"{section}.{name}", value=g.use_number(f"{section}.{name}"))
    draft.copy_setting(f"{section}.betas")
    old = f"{role}.grad_clip"
    if g.use_value(old) is not None and not g.is_written(f"{section}.clip_grad"):
        draft.set_value(f"{section}.clip_grad", g.use_number(old), (old, f"{section}.clip_grad"))
    else:
        draft.copy_setting(f"{section}.clip_grad")
    kind = f"{section}.optimizer"
    if str(g.peek_value(kind)).lower() in ("adam", "adamw"):
        g.mark_used(kind)
    else:
        draft.leave_untranslated(kind, "the optimizer is AdamW", "optimizer")
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        source = f"{section}.override_optimizer_config.{name}"
        if role == "actor" and g.use_flag(source):
            draft.set_value(f"actor.megatron.{name}", True, (source,))
    _translate_lr_schedule(draft, role, section)


def _translate_lr_schedule(draft: ConfigDraft, role: str, section: str) -> None:
    """Translate a role's learning rate schedule: style, warm-up, decay and the lowest rate. verl
    counts in steps of its loop, ours in optimizer steps.
    """
    g = draft.verl_settings
    per = count_optimizer_steps_per_step(draft.verl_settings, role)
    former = next(
        (
            f"{section}.{n}"
            for n in ("lr_scheduler_type", "warmup_style")
            if g.is_written(f"{section}.{n}")
        ),
        None,
    )
    style = f"{section}.lr_decay_style"
    if former is not None and not g.is_written(style):
        draft.set_value(
            style, STYLES.get(str(g.use_value(former)), g.use_value(former)), (former, style)
        )
    elif str(g.peek_value(style)).lower() == "wsd":
        draft.leave_untranslated(
            style,
            "warm-up, stable and decay phases are not there; use another style",
            "lr_schedule",
        )
    else:
        draft.copy_setting(style, value=STYLES.get(str(g.use_value(style)), g.use_value(style)))
    _translate_lr_warmup(draft, role, section, per)
    decay = f"{section}.lr_decay_steps"
    if (
        g.use_value(decay) is not None
        and per is not None
        and (steps := g.use_whole_number(decay, minimum=-1)) is not None
        and steps > 0
    ):
        draft.set_value(decay, steps * per, (decay,), f"{UNIT}: {steps} x {per}")
    draft.copy_setting(f"{section}.min_lr", value=g.use_number(f"{section}.min_lr"))
    ratio = f"{section}.min_lr_ratio"
    lr = g.use_number(f"{section}.lr")
    if (
        g.use_value(ratio) is not None
        and (share := g.use_number(ratio)) is not None
        and lr is not None
    ):
        draft.set_value(
            f"{section}.min_lr", float(f"{share * lr:.12g}"), (ratio,), f"{share} x lr {lr}"
        )


def _translate_lr_warmup(
    draft: ConfigDraft, role: str, section: str, optimizer_steps_per_step: int | None
) -> None:
    """Set the warm-up in optimizer steps, from verl's steps or from a share of the run or of the
    decay. Leave a share of an unknown number of steps untranslated.
    """
    g = draft.verl_settings
    source = f"{section}.lr_warmup_steps"
    ratio_source = f"{section}.lr_warmup_steps_ratio"
    key = f"{section}.lr_warmup_steps"
    g.mark_used(source, ratio_source)
    steps = g.use_whole_number(source, minimum=-1) if g.peek_value(source) is not None else None
    if optimizer_steps_per_step is not None and steps is not None and steps > 0:
        draft.set_value(
            key,
            steps * optimizer_steps_per_step,
            (source,),
            f"{UNIT}: {steps} x {optimizer_steps_per_step}",
        )
        return
    ratio = g.use_number(ratio_source) if g.peek_value(ratio_source) is not None else None
    if not ratio or optimizer_steps_per_step is None:
        return
    decay = g.peek_value(f"{section}.lr_decay_steps")
    end = decay if isinstance(decay, int) and decay > 0 else compute_total_steps(draft)
    if end is None:
        draft.leave_untranslated(
            ratio_source,
            (
                "a share of the run's steps, which are not known: give"
                " trainer.total_training_steps, or --train-rows"
            ),
            "missing",
        )
        return
    steps = int(ratio * end)
    draft.set_value(
        key,
        steps * optimizer_steps_per_step,
        (ratio_source,),
        f"{UNIT}: {ratio} x {end} = {steps}, x {optimizer_steps_per_step}",
    )
