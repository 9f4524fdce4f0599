"""Translates the sections model, data and reward of verl. verl's choice of a scorer by data_source must be told."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.verl.draft import Draft


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
    if g.look("data.gen_batch_size") in (None, g.look("data.train_batch_size")):
        g.ignore("data.gen_batch_size")


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def at_home(draft: Draft, path: Any) -> Any:
    """A path without its leading ~, which is the shell's."""
    is_short = isinstance(path, str) and (path == "~" or path.startswith("~/"))
    return draft.told.home + path[1:] if is_short and draft.told.home else path


def model(draft: Draft) -> None:
    path = draft.given.look("model.path")
    is_hub_name = isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))
    note = "must be a directory: fetch the model first" if is_hub_name else ""
    draft.take("model.path", as_ours=lambda value: at_home(draft, value), note=note)
    draft.take("model.tokenizer_path", as_ours=lambda value: at_home(draft, value))
    draft.take("actor.megatron.dtype", "model.dtype", dtype)
    draft.take("rollout.dtype", as_ours=dtype)


def dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(str(value), value)


FUNCTION, MANAGER, KWARGS = "reward.custom_reward_function", "reward.reward_manager", "reward.reward_kwargs"
PLAIN = ("naive", "dapo", "batch", "prime", "gdpo", "remote", "rate_limited")
BUFFER = f"{KWARGS}.overlong_buffer_cfg"


def reward(draft: Draft) -> None:
    g = draft.given
    path = g.get(f"{FUNCTION}.path")
    if path:
        _function(draft, str(at_home(draft, path)))
    else:
        g.ignore(f"{FUNCTION}.*")
        draft.ask(
            "reward.name: verl chooses a scorer by each row's data_source, which the file does not say; choose one with"
            f" --set reward.name=NAME ({', '.join(draft.parts.rewards)}), for some sources with reward.by_source."
        )
    manager = g.get(f"{MANAGER}.name")
    if (manager is not None and manager not in PLAIN) or g.look(f"{MANAGER}.source") == "importlib":
        draft.leave(f"{MANAGER}.name", "a reward is a function of one sample: reward.name function", learns=True)
    g.ignore(f"{MANAGER}.*")
    _overlong(draft)
    draft.take("reward.num_workers", note="processes for rewards that run in processes of their own, of all the run")


def _function(draft: Draft, path: str) -> None:
    g = draft.given
    name = g.get(f"{FUNCTION}.name") or "compute_score"
    note = (
        "it gets prompt, response, label, source, extra, finish_reason, num_tokens by name, not solution_str,"
        " ground_truth, data_source, extra_info: rename its arguments"
    )
    draft.put("reward.name", "function", (f"{FUNCTION}.path",), note)
    draft.put("reward.params.path", f"{path.removeprefix('file://')}:{name}", (f"{FUNCTION}.path", f"{FUNCTION}.name"))
    for key, value in g.below(f"{FUNCTION}.reward_kwargs").items():
        draft.put(f"reward.params.kwargs.{key}", value, (f"{FUNCTION}.reward_kwargs.{key}",))


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
    term["params"] = {"max_len": length, "buffer": buffer}  # type: ignore[assignment]
    draft.put("reward.terms", [term], sources)
