"""Translates the sections model, data and reward of verl. verl's choice of a scorer by data_source must be told."""

from __future__ import annotations

import re
from typing import Any

from rlhf_megatron.models.families import FAMILIES
from rlhf_megatron.rewards.scorers import REWARDS
from rlhf_megatron.verl.draft import Draft
from rlhf_megatron.verl.given import BUFFER


def data(draft: Draft) -> None:
    g = draft.given
    for name in ("train_files", "val_files"):
        draft.take(f"data.{name}", as_ours=lambda value: [at_home(draft, file) for file in _listed(value)])
    draft.copy("data.prompt_key")
    note = "where verl's rows have the answer; a key with points is looked up in nested objects"
    draft.put("data.label_key", "reward_model.ground_truth", (), note)
    draft.put("data.apply_chat_template", True, (), "verl puts every prompt into the tokenizer's chat template")
    for name in ("max_prompt_length", "max_response_length", "train_batch_size", "shuffle"):
        draft.copy(f"data.{name}")
    generated, is_filtered = "data.gen_batch_size", g.is_on("algorithm.filter_groups.enable")
    if g.look(generated) is not None and not is_filtered and not g.has_below("async_training"):
        note = "what is generated is what is trained: nothing is filtered"
        draft.put("data.train_batch_size", g.whole(generated), (generated, "data.train_batch_size"), note)
    side, is_dropped = g.look("data.truncation"), g.is_on("data.filter_overlong_prompts")
    if side in ("left", "right", "middle") and is_dropped:
        g.ignore("data.truncation")
        draft.num_off += 1
    elif side == "right":
        note = "truncation right there cuts the place where the answer begins; here such prompts are left out"
        draft.put("data.filter_overlong_prompts", True, ("data.filter_overlong_prompts", "data.truncation"), note)
    elif side in ("left", "middle"):
        draft.put("data.truncation", side, ("data.truncation",), "cuts the rendered chat's tokens, as there")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def at_home(draft: Draft, path: Any) -> Any:
    """A path without its leading ~, which is the shell's."""
    is_short = isinstance(path, str) and (path == "~" or path.startswith("~/"))
    return draft.told.home + path[1:] if is_short and draft.told.home else path


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


def model(draft: Draft) -> None:
    path = draft.given.look("model.path")
    name = str(path).rstrip("/").rpartition("/")[2].lower()
    family = next((family for family, pattern in FAMILIES_BY_NAME if re.search(pattern, name)), None)
    if IMAGES.search(name):
        draft.leave("model.path", "it is a job with images: prompts are text here", learns=True)
    elif family is not None and family not in FAMILIES:
        known = ", ".join(FAMILIES)
        draft.leave("model.path", f"by its name a model of {family}, which is not supported; there are {known}", True)
    is_hub_name = isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))
    note = "fetched from the model hub where it is not here" if is_hub_name else ""
    draft.take("model.path", as_ours=lambda value: at_home(draft, value), note=note)
    draft.take("model.tokenizer_path", as_ours=lambda value: at_home(draft, value))
    draft.take("actor.megatron.dtype", "model.dtype", dtype)
    draft.take("rollout.dtype", as_ours=dtype)


def dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(str(value), value)


FUNCTION, MANAGER, KWARGS = "reward.custom_reward_function", "reward.reward_manager", "reward.reward_kwargs"
PLAIN = ("naive", "dapo", "batch", "prime", "gdpo", "remote", "rate_limited")
SANDBOX, MODEL = "reward.sandbox_fusion", "reward.reward_model"
LIMITS = ("max_rpm", "max_tpm", "max_concurrent", "estimated_tokens_per_request")  # of the manager rate_limited
RIGHT_OR_WRONG = ("exact_match", "math_verify")


def reward(draft: Draft) -> None:
    g, chosen = draft.given, draft.told.reward
    path = g.get(f"{FUNCTION}.path")
    if path and chosen in ("", "function"):
        _function(draft, str(at_home(draft, path)))
    elif g.has(f"{MODEL}.enable") and g.flag(f"{MODEL}.enable") and chosen in ("", "zero"):
        g.ignore(f"{FUNCTION}.*")
        _reward_model(draft)
    elif g.look(f"{SANDBOX}.url") and chosen in ("", "code"):
        g.ignore(f"{FUNCTION}.*")
        _sandbox(draft)
    else:
        g.ignore(f"{FUNCTION}.*")
        draft.ask(
            "reward.name: verl chooses a scorer by each row's data_source, which the file does not say (gsm8k for"
            " openai/gsm8k, math for MATH, math_dapo for math* and aime*, short_answer for searchR1_*, code for apps,"
            " taco and codecontests); choose one with"
            f" --set reward.name=NAME ({', '.join(REWARDS)}), for some sources with reward.by_source."
        )
    for replaced in ("reward.reward_model.enable", f"{SANDBOX}.url", f"{FUNCTION}.path"):
        if chosen not in ("", "function") and g.look(replaced) and not (chosen == "code" and SANDBOX in replaced):
            draft.leave(replaced, f"reward.name {chosen}, given with --set, is in its place")
            g.ignore(f"{replaced.rpartition('.')[0]}.*")
    manager = g.get(f"{MANAGER}.name")
    if manager == "dapo" and not path:
        scale = "math_dapo, which verl chooses for data of the sources math* and aime*, scores 1 and -1"
        if chosen in RIGHT_OR_WRONG:
            draft.put("reward.params.wrong_score", -1.0, (f"{MANAGER}.name",), scale)
        else:
            others = " and ".join(RIGHT_OR_WRONG)
            g.notes.append(f"{scale}, as reward.name math_dapo does, and {others} with reward.params.wrong_score -1.")
    if (manager is not None and manager not in PLAIN) or g.look(f"{MANAGER}.source") == "importlib":
        draft.leave(f"{MANAGER}.name", "a reward is a function of one sample: reward.name function", learns=True)
    if manager == "batch" and path:
        draft.leave(f"{MANAGER}.name", "its function takes lists there, and one sample here: rewrite it", learns=True)
    g.ignore(f"{MANAGER}.*")
    is_limited = manager == "rate_limited" and draft.values.get("reward.params.path") is not None
    if is_limited:
        _limits(draft)
    for name in () if is_limited else LIMITS:
        if g.look(f"reward.{name}") is not None:
            why = "limits are those of a server: requests_per_s and concurrency of llm_judge, reward_server and code"
            draft.leave(f"reward.{name}", f"{why}; a function of your own keeps to its own")
    _overlong(draft)
    if not is_limited:
        draft.take("reward.timeout", "reward.timeout_s", note="seconds of work; waiting for a CPU does not count")
    draft.take("reward.num_workers", note="processes for rewards that run in processes of their own, of all the run")


def _function(draft: Draft, path: str) -> None:
    g = draft.given
    name = g.get(f"{FUNCTION}.name") or "compute_score"
    note = "it gets solution_str, ground_truth, data_source and extra_info, one sample at a time"
    draft.put("reward.name", "function", (f"{FUNCTION}.path",), note)
    path = path.removeprefix("file://").removeprefix("pkg://")
    draft.put("reward.params.path", f"{path}:{name}", (f"{FUNCTION}.path", f"{FUNCTION}.name"))
    for key, value in g.below(f"{FUNCTION}.reward_kwargs").items():
        draft.put(f"reward.params.kwargs.{key}", value, (f"{FUNCTION}.reward_kwargs.{key}",))


def _limits(draft: Draft) -> None:
    """Those of the manager rate_limited are of each of verl's processes; a sample over its time scores 0 there."""
    g, ours = draft.given, "reward.params.server"
    draft.put(f"{ours}.url", "http://reward", (f"{MANAGER}.name",), "a name of the limits: the function asks by itself")
    requests, tokens, each = (g.number(f"reward.{name}") for name in ("max_rpm", "max_tpm", LIMITS[-1]))
    rates = [rate for rate in (requests, tokens and tokens / (each or 2000.0)) if rate]
    if rates:
        sources = ("reward.max_rpm", "reward.max_tpm", f"reward.{LIMITS[-1]}")
        draft.put(f"{ours}.requests_per_s", min(rates) / 60, sources, "over all workers of a machine")
    draft.put(f"{ours}.concurrency", g.whole("reward.max_concurrent") or 1, ("reward.max_concurrent",))
    draft.put(f"{ours}.patience_s", g.number("reward.timeout") or 300.0, ("reward.timeout",), "masked then, 0 there")


def _reward_model(draft: Draft) -> None:
    """One that is the only reward. Where the file names a function too, that is the reward, and may ask the model."""
    sources = tuple(f"{MODEL}.{name}" for name in ("enable", "model.path", "model_path"))
    path = draft.given.look(sources[1]) or draft.given.look(sources[2])
    if not isinstance(path, str):
        draft.leave(sources[0], "name the model: reward_model.path", learns=True)
        return
    draft.put("reward.name", "zero", (), "verl takes the model's scores alone")
    g, is_served = draft.given, draft.given.has_below(f"{MODEL}.rollout")
    is_served = is_served and g.look(f"{MODEL}.use_reward_loop") is not False  # the section of 0.6, not in use
    note = "with one label; a model that writes needs served.judge" if is_served else "with one label"
    draft.put("reward_model.path", at_home(draft, path), sources, note)
    (_model_servers if is_served else _model_ranks)(draft)
    g.ignore(f"{MODEL}.*")


def _pool(draft: Draft) -> tuple[int | None, tuple[str, ...]]:
    """(devices of the model's own pool, the settings that say so); None: it shares the trainer's."""
    g, sources = draft.given, tuple(f"{MODEL}.{name}" for name in ("enable_resource_pool", "n_gpus_per_node", "nnodes"))
    if not g.is_on(sources[0]):
        return None, ()
    return (g.whole(sources[1]) or 8) * (g.whole(sources[2]) or 1), sources


def _model_servers(draft: Draft) -> None:
    g, section, ours = draft.given, f"{MODEL}.rollout", "reward_model.served"
    devices, sources = _pool(draft)
    shared = (g.whole("trainer.n_gpus_per_node") or 1) * (g.whole("trainer.nnodes") or 1)
    size = g.whole(f"{section}.tensor_model_parallel_size") or 1
    note = f"{devices or shared} devices / {size} a server"
    draft.put(f"{ours}.num_servers", max(1, (devices or shared) // size), sources, note)
    if size > 1:
        draft.put(f"{ours}.args.tp_size", size, (f"{section}.tensor_model_parallel_size",))
    draft.take(f"{section}.gpu_memory_utilization", f"{ours}.args.mem_fraction_static")
    draft.take(f"{section}.dtype", f"{ours}.dtype", dtype)


def _model_ranks(draft: Draft) -> None:
    g = draft.given
    devices, sources = _pool(draft)
    if devices is not None:
        draft.put("reward_model.num_ranks", devices, sources, "of the job's ranks, the last ones")
        for name in ("tensor_model", "pipeline_model", "context", "expert_model"):
            key = f"megatron.{name}_parallel_size"
            draft.take(f"{MODEL}.{key}", f"reward_model.{key}")
    if g.is_on(f"{MODEL}.use_dynamic_bsz"):
        draft.take(f"{MODEL}.forward_max_token_len_per_gpu", "reward_model.max_token_len_per_gpu")
    offloads = tuple(f"{MODEL}.{name}.param_offload" for name in ("megatron", "fsdp_config", "model.fsdp_config"))
    written = tuple(filter(g.is_on, offloads))
    if written or "rollout.colocated" in draft.values:
        draft.put("reward_model.param_offload", True, written, "" if written else "colocated needs it")


def _sandbox(draft: Draft) -> None:
    note = "verl sends programs of its code sources there; name the rewards of other sources in reward.by_source"
    draft.put("reward.name", "code", (), note)
    names = {"url": "server.url", "max_concurrent": "server.concurrency", "memory_limit_mb": "memory_mib"}
    for name, ours in names.items():
        if (value := draft.given.get(f"{SANDBOX}.{name}")) is not None:
            draft.put(f"reward.params.{ours}", value, (f"{SANDBOX}.{name}",))


def _overlong(draft: Draft) -> None:
    g = draft.given
    is_on = g.has(f"{BUFFER}.enable") and g.flag(f"{BUFFER}.enable")
    sources = tuple(f"{BUFFER}.{name}" for name in ("enable", "len", "penalty_factor"))
    g.ignore(*sources, f"{BUFFER}.log", f"{KWARGS}.max_resp_len")
    if not is_on:
        return
    length = g.whole(f"{KWARGS}.max_resp_len") or g.whole("data.max_response_length")
    buffer, factor = g.whole(f"{BUFFER}.len"), g.number(f"{BUFFER}.penalty_factor")
    if length is None or buffer is None:
        draft.leave(f"{BUFFER}.len", "tokens over which the penalty grows: give it a number", learns=True)
        return
    term = {"name": "overlong", "weight": 1.0 if factor is None else factor}
    term["params"] = {"max_len": length, "buffer": buffer}
    draft.put("reward.terms", [term], sources)
