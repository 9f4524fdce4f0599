"""Translates the section trainer of verl, mini-batches (prompts there, samples here), token budgets and optimizers.

verl's learning-rate schedules move once a step of the loop, ours at each optimizer step.
"""

from __future__ import annotations

from rlhf_megatron.registry import parts_of
from rlhf_megatron.verl.data import at_home
from rlhf_megatron.verl.draft import Draft
from rlhf_megatron.verl.given import Given

LOGGERS = {"file": "jsonl", "jsonl": "jsonl"}


def total_steps(draft: Draft) -> int | None:
    """Return the steps of verl's loop: the number in the file, or epochs over the rows that the user named."""
    g = draft.given
    steps = g.look("trainer.total_training_steps")
    if steps is not None:
        return steps if isinstance(steps, int) and steps > 0 else None
    epochs, size, rows = g.look("trainer.total_epochs"), g.look("data.train_batch_size"), draft.told.train_rows
    if rows is None or not all(isinstance(value, int) and value > 0 for value in (epochs, size)):
        return None
    return rows // size * epochs or None


def trainer(draft: Draft) -> None:
    g = draft.given
    _length(draft)
    for name in ("nnodes", "n_gpus_per_node", "val_before_train", "resume_mode"):
        draft.copy(f"trainer.{name}")
    for name in ("save_freq", "test_freq"):
        value = -1 if g.look(f"trainer.{name}") is False else g.whole(f"trainer.{name}", low=-1)
        if value is not None:
            never = "never: 0 here, -1 there" if value == -1 else ""
            draft.copy(f"trainer.{name}", value=max(value, 0), note=never)
    if g.get("trainer.resume_from_path") not in (None, False):
        note = "a directory that this trainer wrote: checkpoints of verl are not read"
        draft.put("trainer.resume_from_path", g.get("trainer.resume_from_path"), ("trainer.resume_from_path",), note)
    for name in ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"):
        key = f"trainer.{name}"
        if g.get(key) is not None:
            sizes = [g.whole(f"trainer.max_{role}_ckpt_to_keep", low=0) or 0 for role in ("actor", "critic")]
            draft.put("trainer.max_ckpt_to_keep", max(sizes), (key,), "one checkpoint holds actor and critic")
    draft.take("actor.megatron.seed", "trainer.seed")
    g.ignore("critic.megatron.seed", "reference.megatron.seed")
    names(draft)
    loggers(draft)
    _checkpoints(draft)
    dumps = [name for name in ("rollout_data_dir", "validation_data_dir") if g.get(f"trainer.{name}")]
    if dumps:
        note = "batches of each step, under the run directory"
        draft.put("trainer.record", True, tuple(f"trainer.{name}" for name in dumps), note)
    if g.get("trainer.device") not in (None, "cuda", "cpu"):
        draft.leave("trainer.device", "devices are cuda and cpu")
    elif g.has("trainer.device"):
        draft.copy("trainer.device")


def _length(draft: Draft) -> None:
    g, key = draft.given, "trainer.total_training_steps"
    g.ignore(key, "trainer.total_epochs")
    steps = total_steps(draft)
    if steps is None:
        if g.look(key) is not None:
            g.whole(key)
        epochs = f"{g.look('trainer.total_epochs')} epochs"
        source = "" if g.has("trainer.total_epochs") else " (verl's default)"
        draft.ask(
            f"trainer.total_training_steps: {epochs}{source} of a file whose rows are not known; tell them with"
            " --train-rows N, or give trainer.total_training_steps=N."
        )
    elif g.look(key) is not None:
        draft.put(key, steps, (key,))
    else:
        epochs, size = g.look("trainer.total_epochs"), g.look("data.train_batch_size")
        note = f"{draft.told.train_rows} rows // data.train_batch_size {size}, x {epochs} epochs"
        draft.put(key, steps, ("trainer.total_epochs",), note)


def names(draft: Draft) -> None:
    """Translate the names of the run, its project and its directory."""
    g = draft.given
    name = g.text("trainer.experiment_name") if g.get("trainer.experiment_name") is not None else None
    if name is not None:
        plain = name.strip("/").replace("/", "_")
        note = "a directory name: / became _" if plain != name else ""
        draft.put("trainer.experiment_name", plain, ("trainer.experiment_name",), note)
    draft.take("trainer.project_name", as_ours=lambda _: g.text("trainer.project_name"))
    parent = g.text("trainer.default_local_dir") if g.get("trainer.default_local_dir") is not None else None
    if parent is not None:
        note = "experiment_name is put below it"
        short = parent.rstrip("/")
        if name and short.endswith(f"/{name}"):
            short = short.removesuffix(f"/{name}")
        draft.put("trainer.default_local_dir", at_home(draft, short), ("trainer.default_local_dir",), note)


def loggers(draft: Draft) -> None:
    """Keep the loggers that exist here, and always jsonl."""
    key = "trainer.logger"
    value = draft.given.get(key)
    if value is None:
        return
    known = list(parts_of("logger"))
    names = [LOGGERS.get(str(name), str(name)) for name in (value if isinstance(value, list) else [value])]
    kept = list(dict.fromkeys(name for name in names if name in known))
    lost = [name for name in names if name not in known]
    if lost:
        reason = f"{', '.join(map(repr, lost))}: there are {', '.join(known)}, and a logger of your own (plugins:)"
        draft.leave(key, reason)
    if "jsonl" not in kept:
        kept.append("jsonl")  # reports and resumed runs read it
    draft.put(key, kept, (key,))


def _checkpoints(draft: Draft) -> None:
    g, is_async = draft.given, "actor.checkpoint.async_save"
    draft.take(is_async, "trainer.async_save", lambda _: g.flag(is_async))
    for role in ("actor", "critic"):
        contents = f"{role}.checkpoint.save_contents"
        if role == "actor" and isinstance(g.look(contents), list) and "hf_model" in g.look(contents):
            draft.put("trainer.save_hf", True, (contents,), "at the end of the run; checkpoints are always whole")
        g.ignore(f"{role}.checkpoint.*")


SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def actor_batches(draft: Draft) -> None:
    _mini_batch(draft, "actor")
    draft.copy("actor.ppo_epochs")
    draft.copy("actor.shuffle")
    _budget(draft, "actor", "ppo", "actor.ppo_max_token_len_per_gpu")
    g, tokens = draft.given, "rollout.log_prob_max_token_len_per_gpu"
    if g.look(tokens) not in (None, g.look("actor.ppo_max_token_len_per_gpu")):
        draft.leave(tokens, "the pass for old log-probs has the actor's budget")
    g.ignore(tokens)
    g.ignore(*(f"rollout.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size")))
    g.ignore("rollout.log_prob_use_dynamic_bsz")


def critic_batches(draft: Draft) -> None:
    """Translate the critic's batches. A size that is not given is the actor's, in verl as here."""
    g = draft.given
    if g.has("critic.ppo_mini_batch_size") and g.look("critic.ppo_mini_batch_size") is not None:
        _mini_batch(draft, "critic")
    if g.has("critic.ppo_epochs") and g.look("critic.ppo_epochs") is not None:
        draft.copy("critic.ppo_epochs")
    _budget(draft, "critic", "ppo", "critic.ppo_max_token_len_per_gpu")
    g.ignore("critic.forward_micro_batch_size_per_gpu", "critic.forward_micro_batch_size")
    if g.look("critic.forward_max_token_len_per_gpu") in (None, g.look("critic.ppo_max_token_len_per_gpu")):
        g.ignore("critic.forward_max_token_len_per_gpu")


def reference_batches(draft: Draft) -> None:
    _budget(draft, "reference", "log_prob", "reference.max_token_len_per_gpu")


def optimizer_steps_a_step(given: Given, role: str) -> int | None:
    """mini-batches x passes of a step of verl's loop; None where the batches do not say it."""
    size = given.look("data.train_batch_size")
    mini = given.look(f"{role}.ppo_mini_batch_size") or given.look("actor.ppo_mini_batch_size")
    epochs = given.look(f"{role}.ppo_epochs") or given.look("actor.ppo_epochs")
    is_whole = all(isinstance(value, int) and value > 0 for value in (size, mini, epochs))
    return max(1, size // mini) * epochs if is_whole else None


def replicas(given: Given) -> int | None:
    """Data-parallel size of the actor."""
    ranks = [given.look(key) for key in ("trainer.nnodes", "trainer.n_gpus_per_node")]
    sizes = [given.look(f"actor.megatron.{name}") for name in SIZES]
    if not all(isinstance(value, int) and value > 0 for value in (*ranks, *sizes)):
        return None
    return max(1, ranks[0] * ranks[1] // (sizes[0] * sizes[1] * sizes[2]))


def _mini_batch(draft: Draft, role: str) -> None:
    source = f"{role}.ppo_mini_batch_size"
    size, n = draft.given.whole(source), draft.given.whole("rollout.n")
    if size is not None and n is not None:
        note = f"samples here, prompts there: {size} x rollout.n {n}"
        draft.put(f"{role}.mini_batch_size", size * n, (source, "rollout.n"), note)


def _budget(draft: Draft, role: str, kind: str, key: str) -> None:
    """Tokens of a micro-batch on one rank. Sizes in samples are for the longest ones, which pack to fewer."""
    g = draft.given
    is_actor = kind == "ppo"
    tokens, dynamic = f"{role}.{kind}_max_token_len_per_gpu", f"{role}.{'' if is_actor else 'log_prob_'}use_dynamic_bsz"
    per_gpu, of_all = f"{role}.{kind}_micro_batch_size_per_gpu", f"{role}.{kind}_micro_batch_size"
    g.ignore(tokens, dynamic, per_gpu, of_all)
    is_dynamic = g.flag(dynamic) if g.look(dynamic) is not None else g.flag("actor.use_dynamic_bsz")
    source = next((one for one in (per_gpu, of_all) if g.look(one) is not None), None)
    if is_dynamic or source is None:
        if g.has(tokens) and g.look(tokens) is not None:
            draft.put(key, g.whole(tokens), (tokens,))
        return
    lengths = [g.whole(f"data.max_{one}_length") for one in ("prompt", "response")]
    size, cp, num_replicas = g.whole(source), g.whole("actor.megatron.context_parallel_size"), replicas(g)
    if size is None or cp is None or num_replicas is None or lengths[0] is None or lengths[1] is None:
        return
    of_rank = size if source == per_gpu else max(1, size // num_replicas)
    longest = lengths[0] + lengths[1]
    shared = f" / context_parallel_size {cp}" if cp > 1 else ""
    share = f" (of {size} over {num_replicas} replicas)" if source == of_all else ""
    note = f"micro-batches are cut by tokens: {of_rank}{share} x longest sample {longest}{shared}"
    draft.put(key, -(-of_rank * longest // cp), (source,), note)


STYLES = {"inverse_square_root": "inverse-square-root"}
UNIT = "optimizer steps here, steps of the loop there"


def optim(draft: Draft, role: str) -> None:
    g, section = draft.given, f"{role}.optim"
    for name in ("lr", "weight_decay"):
        draft.copy(f"{section}.{name}", value=g.number(f"{section}.{name}"))
    draft.copy(f"{section}.betas")
    old = f"{role}.grad_clip"
    if g.get(old) is not None and not g.has(f"{section}.clip_grad"):
        draft.put(f"{section}.clip_grad", g.number(old), (old, f"{section}.clip_grad"))
    else:
        draft.copy(f"{section}.clip_grad")
    kind = f"{section}.optimizer"
    if str(g.look(kind)).lower() in ("adam", "adamw"):
        g.ignore(kind)
    else:
        draft.leave(kind, "the optimizer is AdamW", learns=True)
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        source = f"{section}.override_optimizer_config.{name}"
        if role == "actor" and g.flag(source):
            draft.put(f"actor.megatron.{name}", True, (source,))
    _schedule(draft, role, section)


def _schedule(draft: Draft, role: str, section: str) -> None:
    g, per = draft.given, optimizer_steps_a_step(draft.given, role)
    former = next((f"{section}.{n}" for n in ("lr_scheduler_type", "warmup_style") if g.has(f"{section}.{n}")), None)
    style = f"{section}.lr_decay_style"
    if former is not None and not g.has(style):
        draft.put(style, STYLES.get(str(g.get(former)), g.get(former)), (former, style))
    elif str(g.look(style)).lower() == "wsd":
        draft.leave(style, "warm-up, stable and decay phases are not there; use another style", learns=True)
    else:
        draft.copy(style, value=STYLES.get(str(g.get(style)), g.get(style)))
    _warmup(draft, role, section, per)
    decay = f"{section}.lr_decay_steps"
    if g.get(decay) is not None and per is not None and (steps := g.whole(decay, low=-1)) is not None and steps > 0:
        draft.put(decay, steps * per, (decay,), f"{UNIT}: {steps} x {per}")
    draft.copy(f"{section}.min_lr", value=g.number(f"{section}.min_lr"))
    ratio, lr = f"{section}.min_lr_ratio", g.number(f"{section}.lr")
    if g.get(ratio) is not None and (share := g.number(ratio)) is not None and lr is not None:
        draft.put(f"{section}.min_lr", float(f"{share * lr:.12g}"), (ratio,), f"{share} x lr {lr}")


def _warmup(draft: Draft, role: str, section: str, per: int | None) -> None:
    g, source = draft.given, f"{section}.lr_warmup_steps"
    ratio_source, key = f"{section}.lr_warmup_steps_ratio", f"{section}.lr_warmup_steps"
    g.ignore(source, ratio_source)
    steps = g.whole(source, low=-1) if g.look(source) is not None else None
    if per is not None and steps is not None and steps > 0:
        draft.put(key, steps * per, (source,), f"{UNIT}: {steps} x {per}")
        return
    ratio = g.number(ratio_source) if g.look(ratio_source) is not None else None
    if not ratio or per is None:
        return
    decay = g.look(f"{section}.lr_decay_steps")
    end = decay if isinstance(decay, int) and decay > 0 else total_steps(draft)
    if end is None:
        draft.leave(
            ratio_source,
            "a share of the run's steps, which are not known: give trainer.total_training_steps, or --train-rows",
            learns=True,
        )
        return
    steps = int(ratio * end)
    draft.put(key, steps * per, (ratio_source,), f"{UNIT}: {ratio} x {end} = {steps}, x {per}")
