"""Translates verl's supervised jobs (fsdp_sft_trainer, sft_trainer, sft_trainer_ray) to the job sft.

Their settings have sections of their own (optim, engine), and defaults that are not those of verl's RL jobs.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.verl.data import at_home, dtype, model
from rlhf_megatron.verl.draft import Draft, is_off
from rlhf_megatron.verl.engines import has_lora, lora
from rlhf_megatron.verl.trainer import STYLES, loggers, names

BATCH, LENGTH, TOKENS, WARMUP = 256, 1024, 8192, 0.1  # samples, tokens, tokens of a micro-batch, share of the steps
AXES = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
NO_MATTER = (
    *("engine", "optim", "use_remove_padding", "engine.strategy", "engine.fsdp_size", "engine.use_mbridge"),
    *("engine.vanilla_mbridge", "model.strategy", "model.use_liger", "model.enable_gradient_checkpointing"),
    *(
        "model.use_remove_padding",
        "model.trust_remote_code",
        "model.fsdp_config.*",
        "data.pad_mode",
        "data.num_workers",
    ),
    *("data.use_dynamic_bsz", "data.balance_dp_token"),
    *("optim.lr_warmup_init", "optim.optimizer", "engine.data_parallel_mode", "engine.data_parallel_size"),
    *("engine.model_dtype", "data.micro_batch_size", "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu"),
    *("trainer.checkpoint.*", "checkpoint.*", "trainer.default_hdfs_dir", "engine.use_remove_padding"),
    *("data.multiturn.enable", "data.chat_template", "model.external_lib", "trainer.profile_interval", "profiler.*"),
)
"""How verl computes, and what it writes."""


def supervised(draft: Draft) -> None:
    """All sections of a supervised job."""
    g = draft.given
    draft.put("job", "sft", (), "rlhf-megatron sft runs it")
    if g.has("model.partial_pretrain"):
        g.assume("model.path", g.get("model.partial_pretrain"), "model.partial_pretrain")
    model(draft)
    draft.values.pop("rollout.dtype", None)
    if g.has("engine.dtype"):
        draft.put("model.dtype", dtype(g.get("engine.dtype")), ("engine.dtype",))
    _data(draft)
    _layout(draft)
    _optim(draft)
    _trainer(draft)
    lora(draft)
    g.ignore(*NO_MATTER)
    for key in g.rest():
        draft.leave(key, "unknown", learns=not is_off(g.look(key)) and key.split(".")[0] != "trainer")


def value_of(draft: Draft, key: str, default: Any) -> Any:
    """Return the value in the file, else `default`: verl's RL defaults do not apply to SFT."""
    draft.given.ignore(key)
    return draft.given.look(key) if draft.given.has(key) else default


def _data(draft: Draft) -> None:
    g = draft.given
    for name in ("train_files", "val_files"):
        value = value_of(draft, f"data.{name}", None)
        if value is not None:
            files = [at_home(draft, file) for file in (value if isinstance(value, list) else [value])]
            draft.put(f"data.{name}", files, (f"data.{name}",))
    has_messages = g.is_on("data.multiturn.enable") or not (g.has("data.response_key") or g.has("data.prompt_key"))
    if has_messages:
        key = value_of(draft, "data.multiturn.messages_key", None) or value_of(draft, "data.messages_key", "messages")
        draft.put("sft.messages_key", key, ("data.multiturn.messages_key", "data.messages_key"))
        tools = value_of(draft, "data.multiturn.tools_key", None) or value_of(draft, "data.tools_key", "tools")
        draft.put("sft.tools_key", tools, ("data.multiturn.tools_key", "data.tools_key"))
        g.ignore(*(f"data.{name}" for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")))
    else:
        for name, ours in (("prompt", "prompt_key"), ("response", "label_key")):
            sources = (f"data.{name}_key", f"data.{name}_dict_keys")
            inside = value_of(draft, sources[1], None)
            inside = inside if isinstance(inside, list) else [inside] if inside else []
            key = ".".join([str(value_of(draft, sources[0], name)), *map(str, inside)])
            draft.put(f"data.{ours}", key, sources)
        g.ignore("data.multiturn.*")
    draft.put("data.apply_chat_template", True, (), "verl puts every prompt into the tokenizer's chat template")
    draft.put("data.train_batch_size", value_of(draft, "data.train_batch_size", BATCH), ("data.train_batch_size",))
    length = value_of(draft, "data.max_length", LENGTH)
    draft.put("sft.max_length", length, ("data.max_length",))
    side = value_of(draft, "data.truncation", "error")
    if side != "error":
        draft.put("data.truncation", side, ("data.truncation",))
    tokens = value_of(draft, "data.max_token_len_per_gpu", TOKENS)
    if isinstance(length, int) and isinstance(tokens, int):
        note = "tokens of a micro-batch, into which documents are packed"
        draft.put("actor.ppo_max_token_len_per_gpu", max(tokens, length), ("data.max_token_len_per_gpu",), note)


def _layout(draft: Draft) -> None:
    g = draft.given
    splits = ("ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size", "engine.ulysses_parallel_size")
    split = next((key for key in splits if value_of(draft, key, 1) not in (None, 1)), None)
    strategies = [value_of(draft, f"{section}.strategy", None) for section in ("model", "engine")]
    if has_lora(g) or (split is None and any(strategy in ("fsdp", "fsdp2") for strategy in strategies)):
        draft.put("actor.backend", "fsdp", ("engine.strategy", "model.strategy"))
        if split is not None:
            g.notes.append(
                f"{split} ({g.look(split)}): the backend fsdp splits no sample; a rank must hold the longest."
            )
        g.ignore("engine.*")
        return
    for axis in AXES:
        key = f"engine.{axis}_parallel_size"
        value = value_of(draft, key, None)
        if value not in (None, "null", 1):
            draft.put(f"actor.megatron.{axis}_parallel_size", value, (key,))
    if split is not None:
        draft.put("actor.megatron.context_parallel_size", g.whole(split), (split,), "ranks that split a sample")
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "sequence_parallel"):
        if g.has(f"engine.{name}"):
            draft.put(f"actor.megatron.{name}", g.get(f"engine.{name}"), (f"engine.{name}",))


def _optim(draft: Draft) -> None:
    g, steps = draft.given, _steps(draft)
    draft.put("actor.optim.lr", value_of(draft, "optim.lr", 1e-5), ("optim.lr",))
    for name in ("weight_decay", "betas", "clip_grad"):
        if g.has(f"optim.{name}"):
            draft.put(f"actor.optim.{name}", g.get(f"optim.{name}"), (f"optim.{name}",))
    styles = ("optim.lr_decay_style", "optim.lr_scheduler_type", "optim.lr_scheduler", "optim.warmup_style")
    style = next((str(g.look(key)) for key in styles if g.has(key)), "cosine")
    if style.lower() == "wsd":
        draft.leave(next(filter(g.has, styles)), "warm-up, stable and decay phases are not there", learns=True)
        g.ignore(*styles)
    else:
        draft.put("actor.optim.lr_decay_style", STYLES.get(style, style), styles)
    floors = ("optim.min_lr", "optim.lr_min")
    floor = next((g.number(key) for key in floors if g.has(key)), None)
    if floor:
        draft.put("actor.optim.min_lr", floor, floors)
    elif (share := value_of(draft, "optim.min_lr_ratio", 0)) and isinstance(
        lr := value_of(draft, "optim.lr", 1e-5), float
    ):
        draft.put("actor.optim.min_lr", float(f"{share * lr:.12g}"), ("optim.min_lr_ratio",), f"{share} x lr {lr}")
    ratios, given = (
        ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio"),
        value_of(draft, "optim.lr_warmup_steps", -1),
    )
    g.ignore(*ratios, *floors)
    ratio = next((g.number(key) for key in ratios if g.has(key)), WARMUP)
    if isinstance(given, int) and given > 0:
        draft.put("actor.optim.lr_warmup_steps", given, ("optim.lr_warmup_steps",))
    elif ratio and steps is not None and int(ratio * steps):
        draft.put("actor.optim.lr_warmup_steps", int(ratio * steps), ratios, f"{ratio} x {steps} steps")


def _steps(draft: Draft) -> int | None:
    """Optimizer steps: as written, or epochs over so many rows as the user told."""
    g, rows = draft.given, draft.told.train_rows
    steps = value_of(draft, "trainer.total_training_steps", None)
    if isinstance(steps, int):
        return steps
    size, epochs = value_of(draft, "data.train_batch_size", BATCH), value_of(draft, "trainer.total_epochs", 4)
    if rows is None or not isinstance(size, int) or not isinstance(epochs, int):
        return None
    g.ignore("trainer.total_epochs")
    return max(1, rows // size) * epochs


def _trainer(draft: Draft) -> None:
    g, steps = draft.given, _steps(draft)
    g.ignore("trainer.total_epochs")
    if steps is None:
        draft.ask("trainer.total_training_steps: give it, or the rows of the training files with --train-rows")
    else:
        source = "trainer.total_training_steps" if g.has("trainer.total_training_steps") else "trainer.total_epochs"
        draft.put("trainer.total_training_steps", steps, (source,))
    names(draft)
    loggers(draft)
    for name in ("nnodes", "n_gpus_per_node", "seed", "resume_mode", "device"):
        if g.has(f"trainer.{name}"):
            draft.put(f"trainer.{name}", g.get(f"trainer.{name}"), (f"trainer.{name}",))
    if not g.has("trainer.n_gpus_per_node"):
        g.notes.append("trainer.n_gpus_per_node is not said: torchrun's --nproc-per-node there; give it with --set.")
    for name in ("save_freq", "test_freq"):
        value = value_of(draft, f"trainer.{name}", -1)
        if isinstance(value, int):
            draft.put(
                f"trainer.{name}", max(value, 0), (f"trainer.{name}",), "never: 0 here, -1 there" if value < 0 else ""
            )
    if g.has("trainer.max_ckpt_to_keep"):
        draft.put("trainer.max_ckpt_to_keep", g.get("trainer.max_ckpt_to_keep"), ("trainer.max_ckpt_to_keep",))
