"""Section rollout: engines, sampling, evaluation's sampling."""

from __future__ import annotations

from rlhf_megatron.config.from_verl.draft import Draft
from rlhf_megatron.config.from_verl.of_schedule import is_apart

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
        if g.has(f"rollout.{source}") and g.get(f"rollout.{source}") is not None:
            draft.put(f"{ARGS}.{argument}", g.get(f"rollout.{source}"), (f"rollout.{source}",))
    if g.has("rollout.enforce_eager") and g.flag("rollout.enforce_eager"):
        draft.put(f"{ARGS}.disable_cuda_graph", True, ("rollout.enforce_eager",))
    for argument, value in g.below("rollout.engine_kwargs.sglang").items():
        if value is not None:
            draft.put(f"{ARGS}.{argument}", value, (f"rollout.engine_kwargs.sglang.{argument}",))
    bucket = "rollout.checkpoint_engine.update_weights_bucket_megabytes"
    if g.get(bucket) is not None:
        draft.put("rollout.update_weights_bucket_megabytes", g.get(bucket), (bucket,))


def _servers(draft: Draft) -> None:
    """verl's hybrid engine: as many engines as fit on the trainer's devices, which take turns with it."""
    g = draft.given
    sizes = [g.whole(f"rollout.{name}_parallel_size") for name in ("tensor_model", "data", "pipeline_model")]
    section = "rollout" if is_apart(g) else "trainer"
    nnodes, gpus = (g.whole(f"{section}.{name}") for name in ("nnodes", "n_gpus_per_node"))
    if is_apart(g):  # the recipes' defaults
        nnodes, gpus = nnodes or 1, gpus or 8
    for role in ("actor", "critic"):
        g.ignore(*(f"{role}.{kind}.{name}" for kind in ("megatron", "fsdp_config") for name in OFFLOADS))
    is_hybrid = (g.flag("hybrid_engine") if g.has("hybrid_engine") else True) and not is_apart(g)
    is_hybrid = is_hybrid and draft.values.get("schedule.name") is None
    if sizes[0] is None or sizes[1] is None or sizes[2] is None or nnodes is None or gpus is None:
        return
    names = ("tp_size", "dp_size", "pp_size")
    for argument, size, kind in zip(names, sizes, ("tensor_model", "data", "pipeline_model"), strict=True):
        if size != 1:
            draft.put(f"{ARGS}.{argument}", size, (f"rollout.{kind}_parallel_size",))
    num = max(1, gpus // (sizes[0] * sizes[1] * sizes[2]))
    note = f"{gpus} devices / {sizes[0] * sizes[1] * sizes[2]} an engine, on the first machine"
    draft.put("rollout.num_engines", num, (f"{section}.n_gpus_per_node", "rollout.tensor_model_parallel_size"), note)
    if nnodes == 1 and is_hybrid:
        note = "trainer and engines take turns with the devices, and each is in host memory between its turns"
        draft.put("rollout.colocated", True, (), note)
        if g.look("actor.use_kl_loss") is True or g.look("algorithm.use_kl_in_reward") is True:
            draft.put("reference.param_offload", True, (), "colocated needs it")
    else:
        draft.put("rollout.weight_transport", "process_group", (), "to engines on devices of their own")
        if nnodes > 1:
            g.notes.append(
                f"{nnodes} machines: engines cannot take turns with the trainer's devices here, as verl's do; they need"
                " devices of their own (rollout.endpoints for servers on other machines)."
            )
