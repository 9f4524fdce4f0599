"""Translates verl's jobs without training (main_generation, main_generation_server, main_eval) to what `generate` and
`evaluate` read. Their settings have defaults that are not those of verl's RL jobs.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.verl.data import at_home, dtype, model, reward
from rlhf_megatron.verl.draft import Draft, is_off
from rlhf_megatron.verl.engines import ARGS, OFF
from rlhf_megatron.verl.sft import value_of

DEFAULTS = {
    "generation": {"n": 5, "temperature": 1.0, "top_k": 50, "top_p": 0.7, "prompt": 1536, "response": 512, "tp": 1},
    "generation_server": {"n": 1, "temperature": 1.0, "top_p": 1.0, "prompt": 512, "response": 512, "tp": 2},
}
NO_MATTER = (
    *("data.batch_size", "data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
    *("model.external_lib", "model.trust_remote_code", "actor.*", "ray_init.*", "ray_kwargs.*", "rollout.mode"),
    *("rollout.calculate_log_probs", "rollout.do_sample", "rollout.max_num_batched_tokens", "rollout.max_model_len"),
    *(
        "rollout.enable_chunked_prefill",
        "rollout.free_cache_engine",
        "rollout.load_format",
        "rollout.disable_log_stats",
    ),
    *("rollout.log_prob_micro_batch_size", "rollout.log_prob_micro_batch_size_per_gpu", "trainer.logger"),
    *("trainer.project_name", "trainer.experiment_name", "trainer.device"),
)
"""How verl computes."""


def generation(draft: Draft, job: str) -> None:
    """All sections of a job that writes answers. `job`: a key of DEFAULTS."""
    g, default = draft.given, DEFAULTS[job]
    model(draft)
    source = "data.path" if job == "generation" else "data.train_files"
    given = value_of(draft, source, [])
    files = [at_home(draft, file) for file in (given if isinstance(given, list) else [given])]
    for name in ("data.train_files", "data.val_files"):
        draft.put(name, files, (source,))
    _rows(draft)
    for name in ("prompt", "response"):
        sources = (f"rollout.{name}_length", f"data.max_{name}_length")
        length = next((g.whole(key) for key in sources if g.has(key)), default[name])
        draft.put(f"data.max_{name}_length", length, sources)
    count = "data.n_samples" if job == "generation" else "rollout.n"
    draft.put("rollout.val_kwargs.n", value_of(draft, count, default["n"]), (count,), "answers a prompt")
    temperature = value_of(draft, "rollout.temperature", default["temperature"])
    greedy = g.has("rollout.do_sample") and not g.flag("rollout.do_sample")
    draft.put("rollout.val_kwargs.temperature", 0.0 if greedy else temperature, ("rollout.temperature",))
    for name, off in OFF.items():
        key, value = f"rollout.{name}", value_of(draft, f"rollout.{name}", default.get(name, off[0]))
        if name == "top_k" and job == "generation_server":
            g.notes.append("rollout.top_k is left out: that server is not told of it, in verl either.")
        elif value not in off and temperature and not greedy:
            draft.put(f"rollout.val_kwargs.{name}", value, (key,))
    _engines(draft, int(default["tp"]))
    out = value_of(draft, "data.output_path", None)
    words = f" --out {at_home(draft, out)}" if out else ""
    g.notes.append(f"run it: rlhf-megatron generate THIS_FILE{words}; it goes on where a former call ended.")
    _rest(draft)


def evaluation(draft: Draft) -> None:
    """All sections of a job that scores a file of answers."""
    g = draft.given
    _rows(draft)
    if (key := value_of(draft, "data.response_key", "responses")) != "responses":
        draft.leave("data.response_key", f"answers are read under responses: rename {key}", learns=True)
    reward(draft)
    path = at_home(draft, value_of(draft, "data.path", "FILE"))
    g.notes.append(f"run it: rlhf-megatron evaluate {path} --config THIS_FILE")
    if is_off(g.look("data.last_user_msg_template")):
        g.ignore("data.last_user_msg_template")
    _rest(draft)


def _rows(draft: Draft) -> None:
    draft.put("data.prompt_key", value_of(draft, "data.prompt_key", "prompt"), ("data.prompt_key",))
    label = f"{value_of(draft, 'data.reward_model_key', 'reward_model')}.ground_truth"
    draft.put("data.label_key", label, ("data.reward_model_key",), "where verl's rows have the answer")
    if (name := value_of(draft, "data.data_source_key", "data_source")) != "data_source":
        draft.leave("data.data_source_key", f"sources are read under data_source: rename {name}", learns=True)
    draft.put("data.apply_chat_template", True, (), "verl puts every prompt into the tokenizer's chat template")


def _engines(draft: Draft, tp: int) -> None:
    g = draft.given
    name = value_of(draft, "rollout.name", "vllm")
    note = f"{name} is not there: stock SGLang servers generate" if name != "sglang" else ""
    draft.put("rollout.engine", "sglang", ("rollout.name",), note)
    if g.has("rollout.dtype"):
        draft.take("rollout.dtype", as_ours=dtype)
    nodes, gpus = value_of(draft, "trainer.nnodes", 1), value_of(draft, "trainer.n_gpus_per_node", 8)
    size = value_of(draft, "rollout.tensor_model_parallel_size", tp)
    source = ("rollout.tensor_model_parallel_size",)
    if not all(isinstance(value, int) for value in (nodes, gpus, size)):
        g.problems.append("trainer.nnodes, n_gpus_per_node and tensor_model_parallel_size must be whole numbers.")
        return
    of_engine = min(size, gpus)
    if of_engine > 1:
        draft.put(f"{ARGS}.tp_size", of_engine, source, f"{size} there, over machines" if size > gpus else "")
    note = f"{gpus} devices / {of_engine} an engine, on the first machine"
    draft.put("rollout.num_engines", max(1, gpus // of_engine), ("trainer.n_gpus_per_node", *source), note)
    if nodes > 1:
        g.notes.append(f"{nodes} machines: servers on the others are named in rollout.endpoints (engine start).")
    for key, argument in (("gpu_memory_utilization", "mem_fraction_static"), ("max_num_seqs", "max_running_requests")):
        if g.has(f"rollout.{key}"):
            draft.take(f"rollout.{key}", f"{ARGS}.{argument}")
    if g.has("rollout.enforce_eager") and g.flag("rollout.enforce_eager"):
        draft.put(f"{ARGS}.disable_cuda_graph", True, ("rollout.enforce_eager",))


def _rest(draft: Draft) -> None:
    draft.given.ignore(*NO_MATTER)
    for key in draft.given.rest():
        value: Any = draft.given.look(key)
        draft.leave(key, "unknown", learns=not is_off(value) and key.split(".")[0] != "trainer")
