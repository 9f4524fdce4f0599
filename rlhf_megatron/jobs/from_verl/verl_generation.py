"""Translates verl's jobs without training (main_generation, main_generation_server, main_eval) to
what `generate` and `evaluate` read. Their settings have defaults that are not those of
verl's RL jobs.
"""

from __future__ import annotations

from rlhf_megatron.jobs.from_verl.config_draft import (
    ConfigDraft,
    is_off_value,
    translate_unknown_settings,
)
from rlhf_megatron.jobs.from_verl.settings_reader import ValueProblem
from rlhf_megatron.jobs.from_verl.verl_data import (
    expand_home,
    set_prompt_encoding,
    translate_dtype_name,
    translate_model,
    translate_reward,
)
from rlhf_megatron.jobs.from_verl.verl_engines import ARGS, OFF
from rlhf_megatron.jobs.from_verl.verl_sft import use_written_value

DEFAULTS = {
    "generation": {
        "n": 5,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.7,
        "prompt": 1536,
        "response": 512,
        "tp": 1,
    },
    "generation_server": {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "prompt": 512,
        "response": 512,
        "tp": 2,
    },
}
NO_MATTER = (
    *(
        "data.batch_size",
        "data.train_batch_size",
        "data.max_prompt_length",
        "data.max_response_length",
    ),
    *(
        "model.external_lib",
        "model.trust_remote_code",
        "actor.*",
        "ray_init.*",
        "ray_kwargs.*",
        "rollout.mode",
    ),
    *(
        "rollout.calculate_log_probs",
        "rollout.do_sample",
        "rollout.max_num_batched_tokens",
        "rollout.max_model_len",
    ),
    *(
        "rollout.enable_chunked_prefill",
        "rollout.free_cache_engine",
        "rollout.load_format",
        "rollout.disable_log_stats",
    ),
    *(
        "rollout.log_prob_micro_batch_size",
        "rollout.log_prob_micro_batch_size_per_gpu",
        "trainer.logger",
    ),
    *("trainer.project_name", "trainer.experiment_name", "trainer.device"),
)
"""How verl computes."""


def translate_generation_job(draft: ConfigDraft, job: str) -> None:
    """Translate all settings of a job that writes answers. `job` is a key of DEFAULTS, "generation"
    or "generation_server".
    """
    g = draft.verl_settings
    default = DEFAULTS[job]
    translate_model(draft)
    source = "data.path" if job == "generation" else "data.train_files"
    given = use_written_value(draft, source, [])
    files = [expand_home(draft, file) for file in (given if isinstance(given, list) else [given])]
    for name in ("data.train_files", "data.val_files"):
        draft.set_value(name, files, (source,))
    _translate_row_keys(draft)
    for name in ("prompt", "response"):
        sources = (f"rollout.{name}_length", f"data.max_{name}_length")
        length = next(
            (g.use_whole_number(key) for key in sources if g.is_written(key)), default[name]
        )
        draft.set_value(f"data.max_{name}_length", length, sources)
    count = "data.n_samples" if job == "generation" else "rollout.n"
    draft.set_value(
        "rollout.val_kwargs.n",
        use_written_value(draft, count, default["n"]),
        (count,),
        "answers a prompt",
    )
    temperature = use_written_value(draft, "rollout.temperature", default["temperature"])
    greedy = g.is_written("rollout.do_sample") and not g.use_flag("rollout.do_sample")
    draft.set_value(
        "rollout.val_kwargs.temperature", 0.0 if greedy else temperature, ("rollout.temperature",)
    )
    for name, off in OFF.items():
        key = f"rollout.{name}"
        value = use_written_value(draft, f"rollout.{name}", default.get(name, off[0]))
        if name == "top_k" and job == "generation_server":
            g.notes.append(
                "rollout.top_k is left out: that server is not told of it, in verl either."
            )
        elif value not in off and temperature and not greedy:
            draft.set_value(f"rollout.val_kwargs.{name}", value, (key,))
    _translate_generation_engines(draft, int(default["tp"]))
    out = use_written_value(draft, "data.output_path", None)
    words = f" --out {expand_home(draft, out)}" if out else ""
    g.notes.append(
        f"run it: rlhf-megatron generate THIS_FILE{words}; it goes on where a former call ended."
    )
    _report_remaining_settings(draft)


def translate_evaluation_job(draft: ConfigDraft) -> None:
    """Translate all settings of a job that scores a file of answers."""
    g = draft.verl_settings
    _translate_row_keys(draft)
    if (key := use_written_value(draft, "data.response_key", "responses")) != "responses":
        draft.leave_untranslated(
            "data.response_key",
            f"answers are read under responses: rename {key}",
            "data",
        )
    translate_reward(draft)
    path = expand_home(draft, use_written_value(draft, "data.path", "FILE"))
    g.notes.append(f"run it: rlhf-megatron evaluate {path} --config THIS_FILE")
    if is_off_value(g.peek_value("data.last_user_msg_template")):
        g.mark_used("data.last_user_msg_template")
    _report_remaining_settings(draft)


def _translate_row_keys(draft: ConfigDraft) -> None:
    """Translate the keys of the prompt, label and source in a row, and set the chat template that
    verl always uses.
    """
    draft.set_value(
        "data.prompt_key",
        use_written_value(draft, "data.prompt_key", "prompt"),
        ("data.prompt_key",),
    )
    label = f"{use_written_value(draft, 'data.reward_model_key', 'reward_model')}.ground_truth"
    draft.set_value(
        "data.label_key", label, ("data.reward_model_key",), "where verl's rows have the answer"
    )
    if (name := use_written_value(draft, "data.data_source_key", "data_source")) != "data_source":
        draft.leave_untranslated(
            "data.data_source_key",
            f"sources are read under data_source: rename {name}",
            "data",
        )
    set_prompt_encoding(draft)


def _translate_generation_engines(draft: ConfigDraft, default_tp_size: int) -> None:
    """Set the number and size of the engines of a job that writes answers, and their arguments.
    `default_tp_size` is verl's default tensor-parallel size for the job.
    """
    g = draft.verl_settings
    name = use_written_value(draft, "rollout.name", "vllm")
    note = f"{name} is not there: stock SGLang servers generate" if name != "sglang" else ""
    draft.set_value("rollout.engine", "sglang", ("rollout.name",), note)
    if g.is_written("rollout.dtype"):
        draft.convert_setting("rollout.dtype", convert_value=translate_dtype_name)
    nodes = use_written_value(draft, "trainer.nnodes", 1)
    gpus = use_written_value(draft, "trainer.n_gpus_per_node", 8)
    size = use_written_value(draft, "rollout.tensor_model_parallel_size", default_tp_size)
    source = ("rollout.tensor_model_parallel_size",)
    if not all(isinstance(value, int) for value in (nodes, gpus, size)):
        message = (
            "trainer.nnodes, n_gpus_per_node and tensor_model_parallel_size must be whole numbers."
        )
        g.problems.append(ValueProblem("trainer.nnodes", message))
        return
    of_engine = min(size, gpus)
    if of_engine > 1:
        draft.set_value(
            f"{ARGS}.tp_size",
            of_engine,
            source,
            f"{size} there, over machines" if size > gpus else "",
        )
    note = f"{gpus} devices / {of_engine} an engine, on the first machine"
    draft.set_value(
        "rollout.num_engines", max(1, gpus // of_engine), ("trainer.n_gpus_per_node", *source), note
    )
    if nodes > 1:
        g.notes.append(
            f"{nodes} machines: servers on the others are named in rollout.endpoints"
            " (engine start)."
        )
    for key, argument in (
        ("gpu_memory_utilization", "mem_fraction_static"),
        ("max_num_seqs", "max_running_requests"),
    ):
        if g.is_written(f"rollout.{key}"):
            draft.convert_setting(f"rollout.{key}", f"{ARGS}.{argument}")
    if g.is_written("rollout.enforce_eager") and g.use_flag("rollout.enforce_eager"):
        draft.set_value(f"{ARGS}.disable_cuda_graph", True, ("rollout.enforce_eager",))


def _report_remaining_settings(draft: ConfigDraft) -> None:
    """Record the settings that no translation has used as untranslated, except for settings of how
    verl computes.
    """
    for key in NO_MATTER:
        draft.verl_settings.mark_used(key)
    translate_unknown_settings(draft)
