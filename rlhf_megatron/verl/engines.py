"""Translates parallel layouts, the section rollout (engines, sampling) and the order of work.

The order of work is that of verl's fully asynchronous recipe (section async_training), of trainer.v1, or one step off.
"""

from __future__ import annotations

import math

from rlhf_megatron.config.keys import field_types
from rlhf_megatron.config.schema import MegatronConfig
from rlhf_megatron.verl.draft import Draft, is_off
from rlhf_megatron.verl.given import Given
from rlhf_megatron.verl.trainer import SIZES

RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
FREE = "override_transformer_config"
SHARED = (*SIZES, "virtual_pipeline_model_parallel_size")


def actor_layout(draft: Draft) -> None:
    g = draft.given
    g.ignore("actor.strategy", "reference.strategy", "critic.strategy")
    ulysses = "actor.ulysses_sequence_parallel_size"
    if is_fsdp(g):
        _fsdp(draft)
    else:
        if str(g.look("actor.strategy") or "megatron") != "megatron":
            g.notes.append(
                f"actor.strategy is {g.look('actor.strategy')} and splits samples ({ulysses}), which only Megatron does"
                " here: choose actor.megatron.tensor_model_parallel_size and its neighbours for memory."
            )
        if g.get(ulysses) not in (None, 1):
            draft.put("actor.megatron.context_parallel_size", g.whole(ulysses), (ulysses,), "ranks that split a sample")
        _layout(draft, "actor.megatron")
        grouper = "actor.use_prefix_grouper"
        if g.has(grouper) and g.flag(grouper):
            draft.put("actor.megatron.share_prompts", True, (grouper,), "a prompt is computed once for its samples")
    lora(draft)
    replay = "actor.router_replay.mode"
    mode = str(g.look(replay) or "disabled").lower()
    if mode in ("r2", "r3"):
        draft.put("actor.router_replay", mode, (replay,))
    if mode in ("r3", "disabled"):
        g.ignore("rollout.enable_rollout_routing_replay")  # which it says again


def is_fsdp(given: Given) -> bool:
    """Whether the backend fsdp trains: where verl's FSDP is asked for by name and no sample is split, and for LoRA."""
    is_named = given.has("actor.strategy") and str(given.look("actor.strategy")) in ("fsdp", "fsdp2")
    is_split = given.look("actor.ulysses_sequence_parallel_size") not in (None, 1)
    return has_lora(given) or (is_named and not is_split)


def has_lora(given: Given) -> bool:
    """Whether verl's FSDP section asks for LoRA. Its Megatron has another section for it."""
    return not is_off(given.look("model.lora_rank")) or given.look("model.lora_adapter_path") is not None


def _fsdp(draft: Draft) -> None:
    g, section = draft.given, "actor.fsdp_config"
    draft.put("actor.backend", "fsdp", ("actor.strategy",))
    ulysses = "actor.ulysses_sequence_parallel_size"
    if g.get(ulysses) not in (None, 1):
        g.notes.append(
            f"{ulysses} ({g.look(ulysses)}): the backend fsdp splits no sample; a rank must hold the longest."
        )
    for source, name in (
        (f"{section}.reshard_after_forward", "reshard_after_forward"),
        (f"{section}.offload_policy", "cpu_offload"),
        ("model.enable_gradient_checkpointing", "activation_checkpointing"),
    ):
        if g.has(source):
            draft.put(f"actor.fsdp.{name}", g.flag(source), (source,))
    g.ignore("actor.megatron.*", f"{section}.*")


def lora(draft: Draft) -> None:
    """Adapters of verl's FSDP, where there are some."""
    g = draft.given
    if not has_lora(g):
        g.ignore(*(f"model.{name}" for name in ("lora_rank", "lora_alpha", "target_modules", "lora_adapter_path")))
        return
    for name, ours in (("lora_rank", "rank"), ("lora_alpha", "alpha"), ("lora_adapter_path", "path")):
        if g.has(f"model.{name}") and g.look(f"model.{name}") is not None:
            draft.take(f"model.{name}", f"actor.lora.{ours}")
    if is_off(g.look("model.lora_rank")):
        draft.ask("actor.lora.rank: the adapter of model.lora_adapter_path has one; give r of its adapter_config.json")
    modules = g.get("model.target_modules") if g.has("model.target_modules") else "all-linear"
    if modules not in (None, "all-linear"):
        named = modules if isinstance(modules, list) else [modules]
        draft.put("actor.lora.target_modules", named, ("model.target_modules",))
    g.ignore("model.target_modules")


def critic_layout(draft: Draft) -> None:
    """Put the critic into the actor's pool, as verl does, unless the user gives it ranks of its own."""
    _shares_layout(draft, "critic", "the critic has the actor's ranks and layout; for others give it critic.num_ranks")


def reference_layout(draft: Draft) -> None:
    g = draft.given
    for source in ("reference.megatron.param_offload", "reference.fsdp_config.param_offload"):
        if g.get(source) is not None:
            draft.put("reference.param_offload", g.flag(source), (source,))
    _shares_layout(draft, "reference", "the reference shares the actor's layout")


def _shares_layout(draft: Draft, role: str, reason: str) -> None:
    g = draft.given
    for name in SHARED:
        key, of_actor = f"{role}.megatron.{name}", f"actor.megatron.{name}"
        if g.has(key) and (g.look(key) or 1) != (g.look(of_actor) or 1):
            draft.leave(key, reason)
    g.ignore(f"{role}.megatron.*")


def _layout(draft: Draft, section: str) -> None:
    g = draft.given
    for name in SIZES:
        draft.copy(f"{section}.{name}")
    virtual = f"{section}.virtual_pipeline_model_parallel_size"
    if g.get(virtual) not in (None, 1):
        draft.put(virtual, g.whole(virtual), (virtual,))
    parallel, tp = f"{section}.sequence_parallel", g.whole(f"{section}.tensor_model_parallel_size")
    g.ignore(parallel)
    if tp is not None and tp > 1:
        draft.put(parallel, g.flag(parallel), (parallel,))
    shared = f"{section}.use_distributed_optimizer"
    draft.copy(shared, value=g.flag(shared))
    known = field_types(MegatronConfig)
    for free in ("override_transformer_config", "override_ddp_config"):
        for name in known:
            source, key = f"{section}.{free}.{name}", f"{section}.{name}"
            if g.get(source) is not None and not g.has(key):
                draft.put(key, g.get(source), (source,))
    _checkpointing(draft, section)


def _checkpointing(draft: Draft, section: str) -> None:
    """verl's one switch, where no granularity is given beside it."""
    source, granularity = "model.enable_gradient_checkpointing", f"{section}.recompute_granularity"
    is_wanted = draft.given.has(source) and draft.given.flag(source)
    draft.given.ignore(source)
    if is_wanted and granularity not in draft.values and not draft.given.has(f"{section}.{FREE}.{RECOMPUTE[0]}"):
        values = ("full", "uniform", 1)
        for name, value in zip(RECOMPUTE[:3], values, strict=True):
            draft.put(f"{section}.{name}", value, (source,), "each layer by itself" if name == RECOMPUTE[0] else "")


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
    """Turn verl's fully asynchronous recipe, which has no steps, into steps: one between each two weight syncs.

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
    """Translate the schedule. Call it after the correction: a schedule with old tokens needs one."""
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


ARGS = "rollout.sglang.args"
OFF = {"top_p": (1, 1.0), "top_k": (-1, 0), "min_p": (0, 0.0)}
OFFLOADS = ("param_offload", "grad_offload", "optimizer_offload")


def sampling(draft: Draft) -> None:
    g = draft.given
    for name in ("n", "temperature"):
        draft.copy(f"rollout.{name}")
    for name, off in OFF.items():
        key = f"rollout.{name}"
        if g.get(key) is not None and g.look(key) not in off:
            draft.leave(key, "off here: the trainer's log-probs are those of the full distribution", learns=True)
    if g.has("rollout.do_sample") and not g.flag("rollout.do_sample"):
        draft.leave(
            "rollout.do_sample", "training needs samples; greedy decoding is for rollout.val_kwargs", learns=True
        )
    for name in ("prompt", "response"):
        key, ours = f"rollout.{name}_length", f"data.max_{name}_length"
        if g.get(key) is not None and g.look(key) != g.look(ours):
            draft.leave(key, f"one limit for data and engines: {ours}", learns=True)
    g.ignore("rollout.max_model_len")
    _of_evaluation(draft)


def _of_evaluation(draft: Draft) -> None:
    g, section = draft.given, "rollout.val_kwargs"
    is_drawn = g.flag(f"{section}.do_sample") and bool(g.look(f"{section}.temperature"))
    temperature = g.number(f"{section}.temperature")
    for name in OFF:
        g.ignore(f"{section}.{name}")
        if is_drawn and g.look(f"{section}.{name}") is not None and g.look(f"{section}.{name}") not in OFF[name]:
            draft.put(f"{section}.{name}", g.get(f"{section}.{name}"), (f"{section}.{name}",))
    sources = (f"{section}.temperature", f"{section}.do_sample")
    if is_drawn:
        draft.put(f"{section}.temperature", temperature, sources)
    elif any(map(g.has, sources)):
        draft.put(f"{section}.temperature", 0.0, sources, "greedy: do_sample is false, or the temperature 0")
    n = g.whole(f"{section}.n") if g.look(f"{section}.n") is not None else None
    if n is not None and (is_drawn or n == 1) and g.has(f"{section}.n"):
        draft.put(f"{section}.n", n, (f"{section}.n",))
    elif n is not None and n > 1:
        draft.leave(f"{section}.n", "greedy samples of one prompt are all equal: 1")


def engines(draft: Draft) -> None:
    g = draft.given
    name = g.get("rollout.name")
    if name is not None:
        note = f"{name} is not there: stock SGLang servers generate" if name != "sglang" else ""
        draft.put("rollout.engine", "sglang", ("rollout.name",), note)
    _servers(draft)
    sources = (("gpu_memory_utilization", "mem_fraction_static"), ("max_num_seqs", "max_running_requests"))
    for source, argument in sources:
        if g.has(f"rollout.{source}"):
            draft.take(f"rollout.{source}", f"{ARGS}.{argument}")
    if g.has("rollout.enforce_eager") and g.flag("rollout.enforce_eager"):
        draft.put(f"{ARGS}.disable_cuda_graph", True, ("rollout.enforce_eager",))
    for argument in g.below("rollout.engine_kwargs.sglang"):
        draft.take(f"rollout.engine_kwargs.sglang.{argument}", f"{ARGS}.{argument}")
    name = "update_weights_bucket_megabytes"
    draft.take(f"rollout.checkpoint_engine.{name}", f"rollout.{name}")


def _servers(draft: Draft) -> None:
    """verl's hybrid engine: as many engines as fit on the trainer's devices, which take turns with it."""
    g = draft.given
    sizes = [g.whole(f"rollout.{name}_parallel_size") for name in ("tensor_model", "pipeline_model")]
    section = "rollout" if is_apart(g) else "trainer"
    nnodes, gpus = (g.whole(f"{section}.{name}") for name in ("nnodes", "n_gpus_per_node"))
    if is_apart(g):  # the recipes' defaults
        nnodes, gpus = nnodes or 1, gpus or 8
    for role in ("actor", "critic"):
        g.ignore(*(f"{role}.{kind}.{name}" for kind in ("megatron", "fsdp_config") for name in OFFLOADS))
    is_hybrid = (g.flag("hybrid_engine") if g.has("hybrid_engine") else True) and not is_apart(g)
    is_hybrid = is_hybrid and draft.values.get("schedule.name") is None
    if is_hybrid and nnodes == 1 and is_fsdp(g):
        g.notes.append("the backend fsdp does not take turns with engines: they need devices of their own.")
        is_hybrid = False
    if sizes[0] is None or sizes[1] is None or nnodes is None or gpus is None:
        return
    g.ignore("rollout.data_parallel_size")  # copies of the model are engines of their own
    for argument, size, kind in zip(("tp_size", "pp_size"), sizes, ("tensor_model", "pipeline_model"), strict=True):
        if size != 1:
            draft.put(f"{ARGS}.{argument}", size, (f"rollout.{kind}_parallel_size",))
    num = max(1, gpus // (sizes[0] * sizes[1]))
    note = f"{gpus} devices / {sizes[0] * sizes[1]} an engine, on the first machine"
    takes_turns = is_hybrid and (nnodes == 1 or (not is_fsdp(g) and _holds_copies(draft, gpus)))
    if takes_turns and nnodes > 1:
        num, note = num * nnodes, f"{nnodes} x {gpus} devices / {sizes[0] * sizes[1]} an engine"
    draft.put("rollout.num_engines", num, (f"{section}.n_gpus_per_node", "rollout.tensor_model_parallel_size"), note)
    if takes_turns:
        note = "trainer and engines take turns with the devices, and each is in host memory between its turns"
        draft.put("rollout.colocated", True, (), note)
        if g.look("actor.use_kl_loss") is True or g.look("algorithm.use_kl_in_reward") is True:
            draft.put("reference.param_offload", True, (), "colocated needs it")
    else:
        draft.put("rollout.weight_transport", "process_group", (), "to engines on devices of their own")
        if nnodes > 1:
            g.notes.append(
                f"{nnodes} machines: engines get devices of their own here. They take turns with the trainer's, as"
                " verl's do, where each copy of the actor lies within a machine (rollout.colocated, docs/launching.md)."
            )


def _holds_copies(draft: Draft, gpus: int) -> bool:
    """Whether every machine of so many devices holds the actor whole, perhaps several times."""

    def size(axis: str, default: int) -> int:
        found = draft.values.get(f"actor.megatron.{axis}_parallel_size")
        return int(found.value) if found is not None and found.value is not None else default

    tp = size("tensor_model", 1)
    experts = size("expert_model", 1) * size("expert_tensor", tp)
    return size("pipeline_model", 1) == 1 and gpus % math.lcm(tp, experts) == 0
