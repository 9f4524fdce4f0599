"""Translates the sections model, data and reward of verl. verl's choice of a scorer by
data_source must be told.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_megatron.jobs.from_verl.config_draft import ConfigDraft
from rlhf_megatron.jobs.from_verl.verl_settings import BUFFER
from rlhf_megatron.rewards.scorers import REWARDS
from rlhf_megatron.weights.families import FAMILIES

IMAGES = re.compile(r"(?i)[-_]vl\b|[-_]vl[-_]|\bvl\d|\dv[-_.]|minicpm-?[ov]|-omni|llava")
FAMILIES_BY_NAME = (
    ("qwen3_moe", r"qwen3.*-a\d+b"),
    ("qwen2_moe", r"qwen.*(moe|-a\d+b)"),
    ("deepseek_v3", r"deepseek-?(v3|r1(?!-distill))|dsv3|671b|moonlight|kimi"),
    ("deepseek_v2", r"deepseek-?v2"),
    ("mixtral", r"mixtral"),
    ("mistral", r"mistral|mathstral"),
    ("gpt_oss", r"gpt-?oss"),
    ("seed_oss", r"seed-?oss"),
    ("gemma", r"gemma"),
    ("glm4_moe", r"glm-?4\.[5-9]"),
    ("glm", r"glm"),
    ("mimo", r"mimo-"),
    ("internlm", r"internlm"),
    ("phi", r"\bphi-?\d"),
)

FUNCTION = "reward.custom_reward_function"
MANAGER = "reward.reward_manager"
KWARGS = "reward.reward_kwargs"
PLAIN = ("naive", "dapo", "batch", "prime", "gdpo", "remote", "rate_limited")
SANDBOX = "reward.sandbox_fusion"
MODEL = "reward.reward_model"
# of the manager rate_limited
LIMITS = "max_rpm", "max_tpm", "max_concurrent", "estimated_tokens_per_request"
RIGHT_OR_WRONG = ("exact_match", "math_verify")


def set_prompt_encoding(draft: ConfigDraft) -> None:
    """Set how text becomes token ids: every prompt is a chat, and no text gets further tokens."""
    draft.set_value(
        "data.apply_chat_template",
        True,
        (),
        "verl puts every prompt into the tokenizer's chat template",
    )
    draft.set_value(
        "data.add_special_tokens",
        False,
        (),
        "verl adds no tokens to a text; the chat template writes its own",
    )


def translate_data(draft: ConfigDraft) -> None:
    """Translate the files, keys, lengths, batch size and truncation of the section data."""
    g = draft.verl_settings
    for name in ("train_files", "val_files"):
        draft.convert_setting(
            f"data.{name}",
            convert_value=lambda value: [expand_home(draft, file) for file in _wrap_in_list(value)],
        )
    draft.copy_setting("data.prompt_key")
    note = "where verl's rows have the answer; a key with points is looked up in nested objects"
    draft.set_value("data.label_key", "reward_model.ground_truth", (), note)
    set_prompt_encoding(draft)
    for name in ("max_prompt_length", "max_response_length", "train_batch_size", "shuffle"):
        draft.copy_setting(f"data.{name}")
    generated = "data.gen_batch_size"
    is_filtered = g.is_true("algorithm.filter_groups.enable")
    if (
        g.peek_value(generated) is not None
        and not is_filtered
        and not g.is_written_below("async_training")
    ):
        note = "what is generated is what is trained: nothing is filtered"
        draft.set_value(
            "data.train_batch_size",
            g.use_whole_number(generated),
            (generated, "data.train_batch_size"),
            note,
        )
    side = g.peek_value("data.truncation")
    is_dropped = g.is_true("data.filter_overlong_prompts")
    if side in ("left", "right", "middle") and is_dropped:
        draft.drop_setting("data.truncation", "data.filter_overlong_prompts leaves nothing to cut")
    elif side == "right":
        note = (
            "truncation right there cuts the place where the answer begins; here such prompts"
            " are left out"
        )
        draft.set_value(
            "data.filter_overlong_prompts",
            True,
            ("data.filter_overlong_prompts", "data.truncation"),
            note,
        )
    elif side in ("left", "middle"):
        draft.set_value(
            "data.truncation",
            side,
            ("data.truncation",),
            "cuts the rendered chat's tokens, as there",
        )


def _wrap_in_list(value: Any) -> list[Any]:
    """Return a list unchanged, and any other value as a list with that value."""
    return value if isinstance(value, list) else [value]


def expand_home(draft: ConfigDraft, path: Any) -> Any:
    """Return a path with a leading ~ replaced by the user's home directory, if that is known; any
    other value unchanged.
    """
    is_short = isinstance(path, str) and (path == "~" or path.startswith("~/"))
    return (
        draft.user_facts.home_directory + path[1:]
        if is_short and draft.user_facts.home_directory
        else path
    )


def translate_model(draft: ConfigDraft) -> None:
    """Translate the paths and dtypes of the model. Leave a model untranslated, besides, whose name
    says that it reads images or is of an unsupported family.
    """
    path = draft.verl_settings.peek_value("model.path")
    name = str(path).rstrip("/").rpartition("/")[2].lower()
    family = next(
        (family for family, pattern in FAMILIES_BY_NAME if re.search(pattern, name)), None
    )
    if IMAGES.search(name):
        draft.leave_untranslated(
            "model.path", "it is a job with images: prompts are text here", "images"
        )
    elif family is not None and family not in FAMILIES:
        known = ", ".join(FAMILIES)
        draft.leave_untranslated(
            "model.path",
            f"by its name a model of {family}, which is not supported; there are {known}",
            "model_family",
        )
    is_hub_name = (
        isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))
    )
    note = "fetched from the model hub where it is not here" if is_hub_name else ""
    draft.convert_setting(
        "model.path", convert_value=lambda value: expand_home(draft, value), note=note
    )
    draft.convert_setting(
        "model.tokenizer_path", convert_value=lambda value: expand_home(draft, value)
    )
    draft.convert_setting("actor.megatron.dtype", "model.dtype", translate_dtype_name)
    draft.convert_setting("rollout.dtype", convert_value=translate_dtype_name)


def translate_dtype_name(value: Any) -> Any:
    """Return our name of a dtype: bfloat16 for bf16, float32 for fp32 and float; other values
    unchanged.
    """
    return {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(str(value), value)


def translate_reward(draft: ConfigDraft) -> None:
    """Translate the reward: a function, a reward model, a sandbox, or else a request to name one,
    since verl chooses a scorer by each row's data_source. Also translate the reward manager, its
    limits, and the penalty for long responses.
    """
    g = draft.verl_settings
    chosen = draft.user_facts.reward_name
    path = g.use_value(f"{FUNCTION}.path")
    if path and chosen in ("", "function"):
        _translate_reward_function(draft, str(expand_home(draft, path)))
    elif (
        g.is_written(f"{MODEL}.enable") and g.use_flag(f"{MODEL}.enable") and chosen in ("", "zero")
    ):
        g.mark_used(f"{FUNCTION}.*")
        _translate_reward_model(draft)
    elif g.peek_value(f"{SANDBOX}.url") and chosen in ("", "code"):
        g.mark_used(f"{FUNCTION}.*")
        _translate_sandbox(draft)
    else:
        g.mark_used(f"{FUNCTION}.*")
        draft.request_missing_fact(
            "reward.name",
            "verl chooses a scorer by each row's data_source, which the file does not"
            " say (gsm8k for openai/gsm8k, math for MATH, math_dapo for math* and aime*,"
            " short_answer for searchR1_*, code with reward.params.compare allclose for apps, taco"
            " and codecontests); choose one with"
            f" --set reward.name=NAME ({', '.join(REWARDS)}), for some sources"
            " with reward.by_source.",
        )
        if chosen == "code":
            _set_comparison(draft)
    for replaced in ("reward.reward_model.enable", f"{SANDBOX}.url", f"{FUNCTION}.path"):
        if (
            chosen not in ("", "function")
            and g.peek_value(replaced)
            and not (chosen == "code" and SANDBOX in replaced)
        ):
            draft.leave_untranslated(
                replaced, f"reward.name {chosen}, given with --set, is in its place"
            )
            g.mark_used(f"{replaced.rpartition('.')[0]}.*")
    manager = g.use_value(f"{MANAGER}.name")
    if manager == "dapo" and not path:
        scale = (
            "math_dapo, which verl chooses for data of the sources math* and aime*, scores 1 and -1"
        )
        if chosen in RIGHT_OR_WRONG:
            draft.set_value("reward.params.wrong_score", -1.0, (f"{MANAGER}.name",), scale)
        else:
            others = " and ".join(RIGHT_OR_WRONG)
            g.notes.append(
                f"{scale}, as reward.name math_dapo does, and {others} with"
                " reward.params.wrong_score -1."
            )
    if (manager is not None and manager not in PLAIN) or g.peek_value(
        f"{MANAGER}.source"
    ) == "importlib":
        draft.leave_untranslated(
            f"{MANAGER}.name",
            "a reward is a function of one sample: reward.name function",
            "reward",
        )
    if manager == "batch" and path:
        draft.leave_untranslated(
            f"{MANAGER}.name",
            "its function takes lists there, and one sample here: rewrite it",
            "reward",
        )
    g.mark_used(f"{MANAGER}.*")
    is_limited = manager == "rate_limited" and draft.values.get("reward.params.path") is not None
    if is_limited:
        _translate_rate_limits(draft)
    for name in () if is_limited else LIMITS:
        if g.peek_value(f"reward.{name}") is not None:
            why = (
                "limits are those of a server: requests_per_s and concurrency of llm_judge,"
                " reward_server and code"
            )
            draft.leave_untranslated(
                f"reward.{name}", f"{why}; a function of your own keeps to its own"
            )
    _translate_overlong_penalty(draft)
    if not is_limited:
        draft.convert_setting(
            "reward.timeout",
            "reward.timeout_s",
            note="seconds of work; waiting for a CPU does not count",
        )
    draft.convert_setting(
        "reward.num_workers",
        note="processes for rewards that run in processes of their own, of all the run",
    )


def _translate_reward_function(draft: ConfigDraft, path: str) -> None:
    """Translate a custom reward function in the file `path`, with its name and keyword
    arguments.
    """
    g = draft.verl_settings
    name = g.use_value(f"{FUNCTION}.name") or "compute_score"
    note = "it gets solution_str, ground_truth, data_source and extra_info, one sample at a time"
    draft.set_value("reward.name", "function", (f"{FUNCTION}.path",), note)
    path = path.removeprefix("file://").removeprefix("pkg://")
    draft.set_value(
        "reward.params.path", f"{path}:{name}", (f"{FUNCTION}.path", f"{FUNCTION}.name")
    )
    for key, value in g.use_values_below(f"{FUNCTION}.reward_kwargs").items():
        draft.set_value(f"reward.params.kwargs.{key}", value, (f"{FUNCTION}.reward_kwargs.{key}",))


def _translate_rate_limits(draft: ConfigDraft) -> None:
    """Translate the limits of the reward manager rate_limited. In verl they hold for each process,
    and a sample over its time scores 0; here they hold for all workers of a machine, and the sample
    is masked.
    """
    g = draft.verl_settings
    ours = "reward.params.server"
    draft.set_value(
        f"{ours}.url",
        "http://reward",
        (f"{MANAGER}.name",),
        "a name of the limits: the function asks by itself",
    )
    requests, tokens, each = (
        g.use_number(f"reward.{name}") for name in ("max_rpm", "max_tpm", LIMITS[-1])
    )
    rates = [rate for rate in (requests, tokens and tokens / (each or 2000.0)) if rate]
    if rates:
        sources = ("reward.max_rpm", "reward.max_tpm", f"reward.{LIMITS[-1]}")
        draft.set_value(
            f"{ours}.requests_per_s", min(rates) / 60, sources, "over all workers of a machine"
        )
    draft.set_value(
        f"{ours}.concurrency",
        g.use_whole_number("reward.max_concurrent") or 1,
        ("reward.max_concurrent",),
    )
    draft.set_value(
        f"{ours}.patience_s",
        g.use_number("reward.timeout") or 300.0,
        ("reward.timeout",),
        "masked then, 0 there",
    )


def _translate_reward_model(draft: ConfigDraft) -> None:
    """Translate a reward model that is the only reward, on servers or on ranks. If the file names a
    reward function too, this is not called: the function is the reward, and may ask the model.
    Without a path, leave the model untranslated.
    """
    sources = tuple(f"{MODEL}.{name}" for name in ("enable", "model.path", "model_path"))
    path = draft.verl_settings.peek_value(sources[1]) or draft.verl_settings.peek_value(sources[2])
    if not isinstance(path, str):
        draft.leave_untranslated(sources[0], "name the model: reward_model.path", "missing")
        return
    draft.set_value("reward.name", "zero", (), "verl takes the model's scores alone")
    g = draft.verl_settings
    is_served = draft.verl_settings.is_written_below(f"{MODEL}.rollout")
    # the section of 0.6, not in use
    is_served = is_served and g.peek_value(f"{MODEL}.use_reward_loop") is not False
    note = (
        "with one label; a model that writes needs served.judge" if is_served else "with one label"
    )
    draft.set_value("reward_model.path", expand_home(draft, path), sources, note)
    (_translate_reward_model_servers if is_served else _translate_reward_model_ranks)(draft)
    g.mark_used(f"{MODEL}.*")


def _find_reward_model_pool(draft: ConfigDraft) -> tuple[int | None, tuple[str, ...]]:
    """Return (number of devices of the reward model's own pool, the settings that say so); (None,
    ()) if it shares the trainer's devices.
    """
    g = draft.verl_settings
    sources = tuple(
        f"{MODEL}.{name}" for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes")
    )
    if not g.is_true(sources[0]):
        return None, ()
    return (g.use_whole_number(sources[1]) or 8) * (g.use_whole_number(sources[2]) or 1), sources


def _translate_reward_model_servers(draft: ConfigDraft) -> None:
    """Translate a reward model that servers run: their number, size, memory share and dtype."""
    g = draft.verl_settings
    section = f"{MODEL}.rollout"
    ours = "reward_model.served"
    devices, sources = _find_reward_model_pool(draft)
    shared = (g.use_whole_number("trainer.n_gpus_per_node") or 1) * (
        g.use_whole_number("trainer.nnodes") or 1
    )
    size = g.use_whole_number(f"{section}.tensor_model_parallel_size") or 1
    note = f"{devices or shared} devices / {size} a server"
    draft.set_value(f"{ours}.num_servers", max(1, (devices or shared) // size), sources, note)
    if size > 1:
        draft.set_value(f"{ours}.args.tp_size", size, (f"{section}.tensor_model_parallel_size",))
    draft.convert_setting(f"{section}.gpu_memory_utilization", f"{ours}.args.mem_fraction_static")
    draft.convert_setting(f"{section}.dtype", f"{ours}.dtype", translate_dtype_name)


def _translate_reward_model_ranks(draft: ConfigDraft) -> None:
    """Translate a reward model on ranks: its own ranks and layout, token budget and offloading."""
    g = draft.verl_settings
    devices, sources = _find_reward_model_pool(draft)
    if devices is not None:
        draft.set_value(
            "reward_model.num_ranks", devices, sources, "of the job's ranks, the last ones"
        )
        for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
            key = f"megatron.{name}_parallel_size"
            draft.convert_setting(f"{MODEL}.{key}", f"reward_model.{key}")
    if g.is_true(f"{MODEL}.use_dynamic_bsz"):
        draft.convert_setting(
            f"{MODEL}.forward_max_token_len_per_gpu", "reward_model.max_token_len_per_gpu"
        )
    offloads = tuple(
        f"{MODEL}.{name}.param_offload" for name in ("megatron", "fsdp_config", "model.fsdp_config")
    )
    written = tuple(filter(g.is_true, offloads))
    if written or "rollout.colocated" in draft.values:
        draft.set_value(
            "reward_model.param_offload", True, written, "" if written else "colocated needs it"
        )


def _translate_sandbox(draft: ConfigDraft) -> None:
    """Translate a code sandbox to the reward code with its server."""
    note = (
        "verl sends programs of its code sources there; name the rewards of other sources"
        " in reward.by_source"
    )
    draft.set_value("reward.name", "code", (), note)
    _set_comparison(draft)
    names = {
        "url": "server.url",
        "max_concurrent": "server.concurrency",
        "memory_limit_mb": "memory_mib",
    }
    for name, ours in names.items():
        if (value := draft.verl_settings.use_value(f"{SANDBOX}.{name}")) is not None:
            draft.set_value(f"reward.params.{ours}", value, (f"{SANDBOX}.{name}",))


def _set_comparison(draft: ConfigDraft) -> None:
    """Let the reward code compare as verl's scorer of programs does."""
    note = (
        "as verl's prime_code (its sandbox client compares text); the default here, close, allows"
        " 1e-6 for every decimal"
    )
    draft.set_value("reward.params.compare", "allclose", (), note)


def _translate_overlong_penalty(draft: ConfigDraft) -> None:
    """Translate the penalty for overlong responses to a term of the reward, if it is on; leave it
    untranslated without a length.
    """
    g = draft.verl_settings
    is_on = g.is_written(f"{BUFFER}.enable") and g.use_flag(f"{BUFFER}.enable")
    sources = tuple(f"{BUFFER}.{name}" for name in ("enable", "len", "penalty_factor"))
    for key in (*sources, f"{BUFFER}.log", f"{KWARGS}.max_resp_len"):
        g.mark_used(key)
    if not is_on:
        return
    length = g.use_whole_number(f"{KWARGS}.max_resp_len") or g.use_whole_number(
        "data.max_response_length"
    )
    buffer = g.use_whole_number(f"{BUFFER}.len")
    factor = g.use_number(f"{BUFFER}.penalty_factor")
    if length is None or buffer is None:
        draft.leave_untranslated(
            f"{BUFFER}.len",
            "tokens over which the penalty grows: give it a number",
            "missing",
        )
        return
    term = {"name": "overlong", "weight": 1.0 if factor is None else factor}
    term["params"] = {"max_len": length, "buffer": buffer}
    draft.set_value("reward.terms", [term], sources)
