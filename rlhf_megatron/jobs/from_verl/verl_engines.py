"""Translates parallel layouts, the section rollout (engines, sampling) and the order of work.

The order of work is that of verl's fully asynchronous recipe (section async_training), of
trainer.v1, or one step off.
"""

from __future__ import annotations

import math

from rlhf_megatron.config.key_paths import resolve_field_types
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.jobs.from_verl.config_draft import ConfigDraft, is_off_value
from rlhf_megatron.jobs.from_verl.verl_settings import VerlSettings
from rlhf_megatron.jobs.from_verl.verl_trainer import SIZES

RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
FREE = "override_transformer_config"
SHARED = (*SIZES, "virtual_pipeline_model_parallel_size")

ASYNC = "async_training"
V1 = "trainer.v1"
SAMPLER = "trainer.v1.sampler"
MODE = f"{V1}.trainer_mode"
ROUNDS = f"{ASYNC}.trigger_parameter_sync_step"
BATCHES = f"{ASYNC}.require_batches"
STALENESS = f"{ASYNC}.staleness_threshold"
ENGINES_LOG_PROBS = f"{ASYNC}.use_rollout_log_probs"
AGAIN = tuple(f"{ASYNC}.{name}" for name in ("recompute_old_log_prob", "compute_prox_log_prob"))
CORRECTION = "algorithm.rollout_correction"

ARGS = "rollout.sglang.args"
OFF = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0)}
TRANSFER_DIR = "runs/transfer"
TRANSFER_NOTE = (
    "what engines say of a weight sync comes back through this directory: make it where all"
    " machines see it"
)
OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


def translate_actor_layout(draft: ConfigDraft) -> None:
    """Translate the actor's backend and layout, LoRA, shared prompts and router replay."""
    g = draft.verl_settings
    g.mark_used("actor.strategy", "reference.strategy", "critic.strategy")
    ulysses = "actor.ulysses_sequence_parallel_size"
    if uses_fsdp_backend(g):
        _translate_fsdp(draft)
    else:
        if str(g.peek_value("actor.strategy") or "megatron") != "megatron":
            g.notes.append(
                f"actor.strategy is {g.peek_value('actor.strategy')} and splits samples"
                f" ({ulysses}), which only Megatron does here: choose"
                " actor.megatron.tensor_model_parallel_size and its neighbours for memory."
            )
        if g.use_value(ulysses) not in (None, 1):
            draft.set_value(
                "actor.megatron.context_parallel_size",
                g.use_whole_number(ulysses),
                (ulysses,),
                "ranks that split a sample",
            )
        _translate_megatron_layout(draft, "actor.megatron")
        grouper = "actor.use_prefix_grouper"
        if g.is_written(grouper) and g.use_flag(grouper):
            draft.set_value(
                "actor.megatron.share_prompts",
                True,
                (grouper,),
                "a prompt is computed once for its samples",
            )
    translate_lora(draft)
    replay = "actor.router_replay.mode"
    mode = str(g.peek_value(replay) or "disabled").lower()
    if mode in ("r2", "r3"):
        draft.set_value("actor.router_replay", mode, (replay,))
    if mode in ("r3", "disabled"):
        g.mark_used("rollout.enable_rollout_routing_replay")  # which it says again


def uses_fsdp_backend(verl_settings: VerlSettings) -> bool:
    """Return whether the backend fsdp is to train: for LoRA, and where the file names FSDP as
    strategy and splits no sample.
    """
    is_named = verl_settings.is_written("actor.strategy") and str(
        verl_settings.peek_value("actor.strategy")
    ) in ("fsdp", "fsdp2")
    is_split = verl_settings.peek_value("actor.ulysses_sequence_parallel_size") not in (None, 1)
    return has_lora(verl_settings) or (is_named and not is_split)


def has_lora(verl_settings: VerlSettings) -> bool:
    """Return whether verl's FSDP section asks for LoRA; verl's Megatron has another section for
    LoRA.
    """
    return (
        not is_off_value(verl_settings.peek_value("model.lora_rank"))
        or verl_settings.peek_value("model.lora_adapter_path") is not None
    )


def _translate_fsdp(draft: ConfigDraft) -> None:
    """Translate the settings of FSDP; the backend fsdp splits no sample, which a note says where
    verl does.
    """
    g = draft.verl_settings
    section = "actor.fsdp_config"
    draft.set_value("actor.backend", "fsdp", ("actor.strategy",))
    ulysses = "actor.ulysses_sequence_parallel_size"
    if g.use_value(ulysses) not in (None, 1):
        g.notes.append(
            f"{ulysses} ({g.peek_value(ulysses)}): the backend fsdp splits no sample; a rank must"
            " hold the longest."
        )
    for source, name in (
        (f"{section}.reshard_after_forward", "reshard_after_forward"),
        (f"{section}.offload_policy", "cpu_offload"),
        ("model.enable_gradient_checkpointing", "activation_checkpointing"),
    ):
        if g.is_written(source):
            draft.set_value(f"actor.fsdp.{name}", g.use_flag(source), (source,))
    g.mark_used("actor.megatron.*", f"{section}.*")


def translate_lora(draft: ConfigDraft) -> None:
    """Translate the LoRA adapters of verl's FSDP if the file asks for them, else mark their
    settings as used. Request the rank where only an adapter's path is given.
    """
    g = draft.verl_settings
    if not has_lora(g):
        g.mark_used(
            *(
                f"model.{name}"
                for name in ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")
            )
        )
        return
    for name, ours in (
        ("lora_rank", "rank"),
        ("lora_alpha", "alpha"),
        ("lora_adapter_path", "path"),
    ):
        if g.is_written(f"model.{name}") and g.peek_value(f"model.{name}") is not None:
            draft.convert_setting(f"model.{name}", f"actor.lora.{ours}")
    if is_off_value(g.peek_value("model.lora_rank")):
        draft.request_missing_fact(
            "actor.lora.rank",
            "the adapter of model.lora_adapter_path has one; give r of its adapter_config.json",
        )
    modules = (
        g.use_value("model.target_modules")
        if g.is_written("model.target_modules")
        else "all-linear"
    )
    if modules not in (None, "all-linear"):
        named = modules if isinstance(modules, list) else [modules]
        draft.set_value("actor.lora.target_modules", named, ("model.target_modules",))
    g.mark_used("model.target_modules")


def translate_critic_layout(draft: ConfigDraft) -> None:
    """Leave a layout of the critic that differs from the actor's untranslated, with advice: as in
    verl, the critic shares the actor's ranks unless the user gives it ranks of its own.
    """
    _translate_shared_layout(
        draft,
        "critic",
        "the critic has the actor's ranks and layout; for others give it critic.num_ranks",
    )


def translate_reference_layout(draft: ConfigDraft) -> None:
    """Translate the reference's offloading, and leave a layout that differs from the actor's
    untranslated.
    """
    g = draft.verl_settings
    for source in ("reference.megatron.param_offload", "reference.fsdp_config.param_offload"):
        if g.use_value(source) is not None:
            draft.set_value("reference.param_offload", g.use_flag(source), (source,))
    _translate_shared_layout(draft, "reference", "the reference shares the actor's layout")


def _translate_shared_layout(draft: ConfigDraft, role: str, reason: str) -> None:
    """Leave each parallel size of a role that differs from the actor's untranslated, with this
    reason, and mark the rest of its layout as used.
    """
    g = draft.verl_settings
    for name in SHARED:
        key = f"{role}.megatron.{name}"
        of_actor = f"actor.megatron.{name}"
        if g.is_written(key) and (g.peek_value(key) or 1) != (g.peek_value(of_actor) or 1):
            draft.leave_untranslated(key, reason)
    g.mark_used(f"{role}.megatron.*")


def _translate_megatron_layout(draft: ConfigDraft, section: str) -> None:
    """Translate the megatron section: parallel sizes, sequence parallelism, distributed optimizer,
    overrides of megatron-core's configuration, and recomputation.
    """
    g = draft.verl_settings
    for name in SIZES:
        draft.copy_setting(f"{section}.{name}")
    virtual = f"{section}.virtual_pipeline_model_parallel_size"
    if g.use_value(virtual) not in (None, 1):
        draft.set_value(virtual, g.use_whole_number(virtual), (virtual,))
    parallel = f"{section}.sequence_parallel"
    tp = g.use_whole_number(f"{section}.tensor_model_parallel_size")
    g.mark_used(parallel)
    if tp is not None and tp > 1:
        draft.set_value(parallel, g.use_flag(parallel), (parallel,))
    shared = f"{section}.use_distributed_optimizer"
    draft.copy_setting(shared, value=g.use_flag(shared))
    known = resolve_field_types(MegatronConfig)
    for free in ("override_transformer_config", "override_ddp_config"):
        for name in known:
            source = f"{section}.{free}.{name}"
            key = f"{section}.{name}"
            if g.use_value(source) is not None and not g.is_written(key):
                draft.set_value(key, g.use_value(source), (source,))
    _translate_gradient_checkpointing(draft, section)


def _translate_gradient_checkpointing(draft: ConfigDraft, section: str) -> None:
    """Translate verl's switch for gradient checkpointing to full recomputation of each layer, if
    the file sets no granularity beside it.
    """
    source = "model.enable_gradient_checkpointing"
    granularity = f"{section}.recompute_granularity"
    is_wanted = draft.verl_settings.is_written(source) and draft.verl_settings.use_flag(source)
    draft.verl_settings.mark_used(source)
    if (
        is_wanted
        and granularity not in draft.values
        and not draft.verl_settings.is_written(f"{section}.{FREE}.{RECOMPUTE[0]}")
    ):
        values = ("full", "uniform", 1)
        for name, value in zip(RECOMPUTE[:3], values, strict=True):
            draft.set_value(
                f"{section}.{name}",
                value,
                (source,),
                "each layer by itself" if name == RECOMPUTE[0] else "",
            )


def has_separate_engines(verl_settings: VerlSettings) -> bool:
    """Return whether engines have devices of their own, which rollout.nnodes and n_gpus_per_node
    count.
    """
    nodes = verl_settings.peek_value("rollout.nnodes")
    return verl_settings.is_written_below(ASYNC) or (isinstance(nodes, int) and nodes > 0)


def convert_async_recipe_to_steps(verl_settings: VerlSettings) -> None:
    """Turn verl's fully asynchronous recipe, which has no steps, into steps, in place: a step is
    the training between two weight syncs.

    The settings of batches, lengths and tests are then read in these steps. Do nothing for other
    files.
    """
    if not verl_settings.is_written_below(ASYNC):
        return
    rounds, batches = (
        verl_settings.use_whole_number(key) or 1 if verl_settings.is_written(key) else 1
        for key in (ROUNDS, BATCHES)
    )
    if not verl_settings.is_written(ROUNDS):
        rounds = 4  # the recipe's default
    mini = verl_settings.use_whole_number("actor.ppo_mini_batch_size")
    if mini is None:
        return
    size = rounds * batches * mini
    verl_settings.assume_value("data.train_batch_size", size, ROUNDS)
    verl_settings.notes.append(
        f"a step is what verl's recipe trains between two syncs: data.train_batch_size {size}"
        f" prompts = trigger_parameter_sync_step {rounds} x require_batches {batches} x"
        f" ppo_mini_batch_size {mini}."
    )
    total = "rollout.total_rollout_steps"
    if (
        verl_settings.is_written(total)
        and (prompts := verl_settings.use_whole_number(total)) is not None
    ):
        verl_settings.assume_value("trainer.total_training_steps", max(1, prompts // size), total)
    if verl_settings.is_written("rollout.test_freq"):
        verl_settings.assume_value(
            "trainer.test_freq", verl_settings.use_value("rollout.test_freq"), "rollout.test_freq"
        )
    is_clip = verl_settings.peek_value("actor.policy_loss.loss_mode") in ("vanilla", "ppo_clip")
    if (
        is_clip
        and _uses_engine_log_probs(verl_settings)
        and not verl_settings.is_written(f"{CORRECTION}.bypass_mode")
    ):
        verl_settings.assume_value(f"{CORRECTION}.bypass_mode", True, ENGINES_LOG_PROBS)


def translate_schedule(draft: ConfigDraft) -> None:
    """Translate the order of work to a schedule. Call this after the rollout correction: a schedule
    with old tokens gets the preset "disabled" where none is set.
    """
    g = draft.verl_settings
    mode = g.peek_value(MODE)
    if g.is_written_below(ASYNC):
        _translate_fully_async(draft)
    elif mode == "separate_async":
        _translate_separate_async(draft)
    elif mode not in (None, "sync"):
        draft.leave_untranslated(
            MODE,
            (
                "who shares devices takes turns here, and old groups wait for nobody; engines of"
                " their own can have schedule.name asynchronous"
            ),
            "schedule",
        )
        g.mark_used(MODE)
    elif has_separate_engines(g):
        note = "engines of their own, without async_training: one step off"
        draft.set_value("schedule.name", "one_step_off", ("rollout.nnodes",), note)
    if has_separate_engines(g):
        g.mark_used("rollout.nnodes", "rollout.n_gpus_per_node")
    chosen = any(key.startswith(CORRECTION) for key in draft.values)
    name = draft.values.get("schedule.name")
    if name is not None and name.value in ("one_step_off", "asynchronous") and not chosen:
        note = "nothing is corrected there; decoupled_token_is weighs old tokens"
        draft.set_value(f"{CORRECTION}.preset", "disabled", (), note)


def _translate_fully_async(draft: ConfigDraft) -> None:
    """Translate verl's fully asynchronous recipe to the schedule asynchronous with a lag, or
    streaming where its staleness is 0.
    """
    g = draft.verl_settings
    for key in (
        ROUNDS,
        BATCHES,
        ENGINES_LOG_PROBS,
        *AGAIN,
        f"{ASYNC}.partial_rollout",
        "data.gen_batch_size",
    ):
        g.mark_used(key)
    share = g.use_number(STALENESS) if g.is_written(STALENESS) else 0.1  # the recipe's default
    if not share:
        note = "no old tokens (staleness_threshold 0): engines and trainer wait for each other"
        draft.set_value("schedule.name", "streaming", (STALENESS,), note)
    else:
        draft.set_value("schedule.name", "asynchronous", (STALENESS,))
        lag = max(1, math.ceil(share))
        note = f"in whole syncs: {share:g} of a step's prompts there" if lag != share else ""
        draft.set_value("schedule.params.max_lag", lag, (STALENESS,), note)
        partial = f"{ASYNC}.partial_rollout"
        draft.set_value(
            "schedule.params.partial_rollouts",
            g.use_flag(partial) if g.is_written(partial) else True,
            (partial,),
        )
    loss = g.peek_value("actor.policy_loss.loss_mode")
    if _uses_engine_log_probs(g) and loss not in ("vanilla", "ppo_clip"):
        draft.leave_untranslated(
            ENGINES_LOG_PROBS,
            (
                f"{loss} with the engine's log-probs for old ones: {CORRECTION}.mode bypass has"
                " ppo_clip and reinforce"
            ),
            "schedule",
        )
    for key in [key for key in g.list_unused_keys() if key.startswith(f"{ASYNC}.")]:
        draft.drop_setting(
            key, "how weights are carried over, and where advantages are computed, in verl"
        )


def _translate_separate_async(draft: ConfigDraft) -> None:
    """Translate verl's trainer mode separate_async to the schedule asynchronous. In verl one number
    says how many batches are begun ahead and another which ones are dropped; here one lag is both.
    """
    g = draft.verl_settings
    ahead = f"{V1}.separate_async.num_warmup_batches"
    bound = f"{SAMPLER}.max_off_policy_threshold"
    lag = g.use_whole_number(ahead, minimum=0) if g.is_written(ahead) else 1
    limit = g.use_whole_number(bound) if g.is_written(bound) else 8
    if lag is None or limit is None:
        return
    draft.set_value("schedule.name", "asynchronous", (MODE,))
    note = "batches begun ahead; it is the bound, too"
    draft.set_value("schedule.params.max_lag", max(1, min(lag, limit)), (ahead, bound), note)
    strategy = f"{SAMPLER}.max_off_policy_strategy"
    late = g.peek_value(strategy) or "drop"
    if late in ("drop", "wait"):
        draft.set_value("schedule.params.late", late, (strategy,))
    else:
        draft.leave_untranslated(
            strategy,
            "groups that are late wait, are dropped, or begun again",
            "schedule",
        )
    g.mark_used(
        "trainer.use_v1",
        f"{V1}.separate_async.*",
        f"{SAMPLER}.*",
        f"{V1}.sync.*",
        f"{V1}.colocate_async.*",
    )


def _uses_engine_log_probs(verl_settings: VerlSettings) -> bool:
    """Return whether the asynchronous recipe takes the engine's log-probs as the old ones, which is
    its default.
    """
    if any(verl_settings.peek_value(key) in (True, "true", "True") for key in AGAIN):
        return False
    return (
        verl_settings.use_flag(ENGINES_LOG_PROBS)
        if verl_settings.is_written(ENGINES_LOG_PROBS)
        else True
    )


def translate_sampling(draft: ConfigDraft) -> None:
    """Translate the sampling of training and evaluation. Settings that restrict training samples
    (top_p, top_k, min_p, greedy) stay untranslated, since the trainer's log-probs are those of the
    full distribution.
    """
    g = draft.verl_settings
    for name in ("n", "temperature"):
        draft.copy_setting(f"rollout.{name}")
    for name, off in OFF.items():
        key = f"rollout.{name}"
        if g.use_value(key) is not None and g.peek_value(key) not in off:
            draft.leave_untranslated(
                key,
                "off here: the trainer's log-probs are those of the full distribution",
                "sampling",
            )
    if g.is_written("rollout.do_sample") and not g.use_flag("rollout.do_sample"):
        draft.leave_untranslated(
            "rollout.do_sample",
            "training needs samples; greedy decoding is for rollout.val_kwargs",
            "sampling",
        )
    for name in ("prompt", "response"):
        key = f"rollout.{name}_length"
        ours = f"data.max_{name}_length"
        if g.use_value(key) is not None and g.peek_value(key) != g.peek_value(ours):
            draft.leave_untranslated(key, f"one limit for data and engines: {ours}", "set_by_hand")
    g.mark_used("rollout.max_model_len")
    _translate_val_kwargs(draft)


def _translate_val_kwargs(draft: ConfigDraft) -> None:
    """Translate rollout.val_kwargs. With do_sample false, or temperature 0, set temperature 0 and
    leave several samples a prompt untranslated.
    """
    g = draft.verl_settings
    section = "rollout.val_kwargs"
    is_drawn = g.use_flag(f"{section}.do_sample") and bool(g.peek_value(f"{section}.temperature"))
    temperature = g.use_number(f"{section}.temperature")
    for name in OFF:
        g.mark_used(f"{section}.{name}")
        if (
            is_drawn
            and g.peek_value(f"{section}.{name}") is not None
            and g.peek_value(f"{section}.{name}") not in OFF[name]
        ):
            draft.set_value(
                f"{section}.{name}", g.use_value(f"{section}.{name}"), (f"{section}.{name}",)
            )
    sources = (f"{section}.temperature", f"{section}.do_sample")
    if is_drawn:
        draft.set_value(f"{section}.temperature", temperature, sources)
    elif any(map(g.is_written, sources)):
        draft.set_value(
            f"{section}.temperature",
            0.0,
            sources,
            "greedy: do_sample is false, or the temperature 0",
        )
    n = g.use_whole_number(f"{section}.n") if g.peek_value(f"{section}.n") is not None else None
    if n is not None and (is_drawn or n == 1) and g.is_written(f"{section}.n"):
        draft.set_value(f"{section}.n", n, (f"{section}.n",))
    elif n is not None and n > 1:
        draft.leave_untranslated(f"{section}.n", "greedy samples of one prompt are all equal: 1")


def translate_engines(draft: ConfigDraft) -> None:
    """Translate the engines: the engine is always SGLang, with the arguments that correspond to
    verl's, and the number and place of its servers.
    """
    g = draft.verl_settings
    name = g.use_value("rollout.name")
    if name is not None:
        note = f"{name} is not there: stock SGLang servers generate" if name != "sglang" else ""
        draft.set_value("rollout.engine", "sglang", ("rollout.name",), note)
    _translate_engine_servers(draft)
    sources = (
        ("gpu_memory_utilization", "mem_fraction_static"),
        ("max_num_seqs", "max_running_requests"),
    )
    for source, argument in sources:
        if g.is_written(f"rollout.{source}"):
            draft.convert_setting(f"rollout.{source}", f"{ARGS}.{argument}")
    if g.is_written("rollout.enforce_eager") and g.use_flag("rollout.enforce_eager"):
        draft.set_value(f"{ARGS}.disable_cuda_graph", True, ("rollout.enforce_eager",))
    for argument in g.use_values_below("rollout.engine_kwargs.sglang"):
        draft.convert_setting(f"rollout.engine_kwargs.sglang.{argument}", f"{ARGS}.{argument}")
    replay = draft.values.get("actor.router_replay")
    if replay is not None and replay.value == "r3":
        note = "router replay r3 asks servers which experts tokens met"
        draft.set_value(f"{ARGS}.enable_return_routed_experts", True, (), note)
    name = "update_weights_bucket_megabytes"
    draft.convert_setting(f"rollout.checkpoint_engine.{name}", f"rollout.{name}")


def _translate_engine_servers(draft: ConfigDraft) -> None:
    """Set the number, size and place of the engines. For verl's hybrid engine these are as many as
    fit on the trainer's devices, which take turns with the trainer; else they have devices of their
    own.
    """
    g = draft.verl_settings
    sizes = [
        g.use_whole_number(f"rollout.{name}_parallel_size")
        for name in ("tensor_model", "pipeline_model")
    ]
    section = "rollout" if has_separate_engines(g) else "trainer"
    nnodes, gpus = (
        g.use_whole_number(f"{section}.{name}") for name in ("nnodes", "n_gpus_per_node")
    )
    if has_separate_engines(g):  # the recipes' defaults
        nnodes = nnodes or 1
        gpus = gpus or 8
    for role in ("actor", "critic"):
        g.mark_used(
            *(f"{role}.{kind}.{name}" for kind in ("megatron", "fsdp_config") for name in OFFLOADS)
        )
    is_hybrid = (
        g.use_flag("hybrid_engine") if g.is_written("hybrid_engine") else True
    ) and not has_separate_engines(g)
    is_hybrid = is_hybrid and draft.values.get("schedule.name") is None
    if is_hybrid and nnodes == 1 and uses_fsdp_backend(g):
        g.notes.append(
            "the backend fsdp does not take turns with engines: they need devices of their own."
        )
        is_hybrid = False
    if sizes[0] is None or sizes[1] is None or nnodes is None or gpus is None:
        return
    g.mark_used("rollout.data_parallel_size")  # copies of the model are engines of their own
    for argument, size, kind in zip(
        ("tp_size", "pp_size"), sizes, ("tensor_model", "pipeline_model"), strict=True
    ):
        if size != 1:
            draft.set_value(f"{ARGS}.{argument}", size, (f"rollout.{kind}_parallel_size",))
    num = max(1, gpus // (sizes[0] * sizes[1]))
    note = f"{gpus} devices / {sizes[0] * sizes[1]} an engine, on the first machine"
    takes_turns = is_hybrid and (
        nnodes == 1 or (not uses_fsdp_backend(g) and _do_machines_hold_actor_copies(draft, gpus))
    )
    if takes_turns and nnodes > 1:
        num = num * nnodes
        note = f"{nnodes} x {gpus} devices / {sizes[0] * sizes[1]} an engine"
    num_trainer_nodes = g.peek_value("trainer.nnodes")
    if nnodes > 1 or (isinstance(num_trainer_nodes, int) and num_trainer_nodes > 1):
        draft.set_value("rollout.transfer_dir", TRANSFER_DIR, (), TRANSFER_NOTE)
    draft.set_value(
        "rollout.num_engines",
        num,
        (f"{section}.n_gpus_per_node", "rollout.tensor_model_parallel_size"),
        note,
    )
    if takes_turns:
        note = (
            "trainer and engines take turns with the devices, and each is in host memory"
            " between its turns"
        )
        draft.set_value("rollout.colocated", True, (), note)
        if (
            g.peek_value("actor.use_kl_loss") is True
            or g.peek_value("algorithm.use_kl_in_reward") is True
        ):
            draft.set_value("reference.param_offload", True, (), "colocated needs it")
    else:
        draft.set_value(
            "rollout.weight_transport", "process_group", (), "to engines on devices of their own"
        )
        if nnodes > 1:
            g.notes.append(
                f"{nnodes} machines: engines get devices of their own here. They take turns with"
                " the trainer's, as verl's do, where each copy of the actor lies within a machine"
                " (rollout.colocated, docs/launching.md)."
            )


def _do_machines_hold_actor_copies(draft: ConfigDraft, gpus_per_machine: int) -> bool:
    """Return whether every machine with this many devices holds one or more whole copies of the
    actor, in the layout of the draft.
    """

    def read_parallel_size(axis: str, default: int) -> int:
        """Return a parallel size of the actor from the draft, or the default."""
        found = draft.values.get(f"actor.megatron.{axis}_parallel_size")
        return int(found.value) if found is not None and found.value is not None else default

    tp = read_parallel_size("tensor_model", 1)
    experts = read_parallel_size("expert_model", 1) * read_parallel_size("expert_tensor", tp)
    return (
        read_parallel_size("pipeline_model", 1) == 1
        and gpus_per_machine % math.lcm(tp, experts) == 0
    )
