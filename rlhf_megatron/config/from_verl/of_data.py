"""Section data: files, prompts, lengths, batch."""

from __future__ import annotations

from typing import Any

from rlhf_megatron.config.from_verl.draft import Draft


def data(draft: Draft) -> None:
    g = draft.given
    for name in ("train_files", "val_files"):
        key = f"data.{name}"
        if g.get(key) is not None:
            value = g.get(key)
            files = value if isinstance(value, list) else [value]
            draft.put(key, [at_home(draft, file) for file in files], (key,))
    draft.copy("data.prompt_key")
    note = "where verl's rows have the answer; a key with points is looked up in nested objects"
    draft.put("data.label_key", "reward_model.ground_truth", (), note)
    draft.put("data.apply_chat_template", True, (), "verl puts every prompt into the tokenizer's chat template")
    for name in ("max_prompt_length", "max_response_length", "train_batch_size", "shuffle"):
        draft.copy(f"data.{name}")
    if g.look("data.gen_batch_size") in (None, g.look("data.train_batch_size")):
        g.ignore("data.gen_batch_size")


def at_home(draft: Draft, path: Any) -> Any:
    """A path without its leading ~, which is the shell's."""
    is_short = isinstance(path, str) and (path == "~" or path.startswith("~/"))
    return draft.told.home + path[1:] if is_short and draft.told.home else path


def model(draft: Draft) -> None:
    g = draft.given
    for key, source in (("model.path", "model.path"), ("model.tokenizer_path", "model.tokenizer_path")):
        if g.get(source) is not None:
            note = "must be a directory: fetch the model first" if key == "model.path" and is_hub_name(g, key) else ""
            draft.put(key, at_home(draft, g.get(source)), (source,), note)
    if g.get("actor.megatron.dtype") is not None:
        draft.put("model.dtype", dtype(g.get("actor.megatron.dtype")), ("actor.megatron.dtype",))
    if g.get("rollout.dtype") is not None:
        draft.put("rollout.dtype", dtype(g.get("rollout.dtype")), ("rollout.dtype",))


def is_hub_name(given: Any, key: str) -> bool:
    path = given.look(key)
    return isinstance(path, str) and path.count("/") == 1 and not path.startswith((".", "/", "~"))


def dtype(value: Any) -> Any:
    return {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}.get(str(value), value)
