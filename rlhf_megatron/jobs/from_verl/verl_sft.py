"""Translates verl's supervised jobs (fsdp_sft_trainer, sft_trainer, sft_trainer_ray)
to the job sft.

Their settings have sections of their own (optim, engine), and defaults that are not those of
verl's RL jobs.
"""

from __future__ import annotations

from typing import Any

from rlhf_megatron.jobs.from_verl.config_draft import (
    ConfigDraft,
    is_off_value,
    translate_unknown_settings,
)
from rlhf_megatron.jobs.from_verl.verl_data import (
    expand_home,
    set_prompt_encoding,
    translate_dtype_name,
    translate_model,
)
from rlhf_megatron.jobs.from_verl.verl_engines import has_lora, translate_lora
from rlhf_megatron.jobs.from_verl.verl_trainer import (
    STYLES,
    explain_too_few_rows,
    translate_loggers,
    translate_run_names,
)

BATCH = 256  # samples
LENGTH = 1024  # tokens
TOKENS = 8192  # tokens of a micro-batch
WARMUP = 0.1  # share of the steps
AXES = (
    "tensor_model",
    "pipeline_model",
    "virtual_pipeline_model",
    "context",
    "expert_model",
    "expert_tensor",
)
NO_MATTER = (
    *(
        "engine",
        "optim",
        "use_remove_padding",
        "engine.strategy",
        "engine.fsdp_size",
        "engine.use_mbridge",
    ),
    *(
        "engine.vanilla_mbridge",
        "model.strategy",
        "model.use_liger",
        "model.enable_gradient_checkpointing",
    ),
    *(
        "model.use_remove_padding",
        "model.trust_remote_code",
        "model.fsdp_config.*",
        "data.pad_mode",
        "data.num_workers",
    ),
    *("data.use_dynamic_bsz", "data.balance_dp_token"),
    *(
        "engine.data_parallel_mode",
        "engine.data_parallel_size",
    ),
    *(
        "engine.model_dtype",
        "data.micro_batch_size",
        "data.micro_batch_size_per_gpu",
        "data.max_token_len_per_gpu",
    ),
    *(
        "trainer.checkpoint.*",
        "checkpoint.*",
        "trainer.default_hdfs_dir",
        "engine.use_remove_padding",
    ),
    *(
        "data.multiturn.enable",
        "data.chat_template",
        "model.external_lib",
        "trainer.profile_interval",
        "profiler.*",
    ),
)
"""How verl computes, and what it writes."""


def translate_supervised_job(draft: ConfigDraft) -> None:
    """Translate all settings of a supervised job."""
    g = draft.verl_settings
    draft.set_value("job", "sft", (), "rlhf-megatron sft runs it")
    if g.is_written("model.partial_pretrain"):
        g.assume_value(
            "model.path", g.use_value("model.partial_pretrain"), "model.partial_pretrain"
        )
    translate_model(draft)
    draft.values.pop("rollout.dtype", None)
    if g.is_written("engine.dtype"):
        draft.set_value(
            "model.dtype", translate_dtype_name(g.use_value("engine.dtype")), ("engine.dtype",)
        )
    _translate_sft_data(draft)
    _translate_sft_layout(draft)
    _translate_sft_optimizer(draft)
    _translate_sft_trainer(draft)
    translate_lora(draft)
    for key in NO_MATTER:
        g.mark_used(key)
    translate_unknown_settings(draft)


def use_written_value(draft: ConfigDraft, key: str, default: Any) -> Any:
    """Return the value that the file sets, else `default`, and mark the setting as dealt with.
    verl's RL defaults are not used: they do not apply to these jobs.
    """
    draft.verl_settings.mark_used(key)
    return draft.verl_settings.peek_value(key) if draft.verl_settings.is_written(key) else default


def _translate_sft_data(draft: ConfigDraft) -> None:
    """Translate the files, the keys of messages or of prompt and answer, batch size, lengths and
    token budget of a supervised job.
    """
    g = draft.verl_settings
    for name in ("train_files", "val_files"):
        value = use_written_value(draft, f"data.{name}", None)
        if value is not None:
            files = [
                expand_home(draft, file) for file in (value if isinstance(value, list) else [value])
            ]
            draft.set_value(f"data.{name}", files, (f"data.{name}",))
    has_messages = g.is_true("data.multiturn.enable") or not (
        g.is_written("data.response_key") or g.is_written("data.prompt_key")
    )
    if has_messages:
        key = use_written_value(draft, "data.multiturn.messages_key", None) or use_written_value(
            draft, "data.messages_key", "messages"
        )
        draft.set_value(
            "sft.messages_key", key, ("data.multiturn.messages_key", "data.messages_key")
        )
        tools = use_written_value(draft, "data.multiturn.tools_key", None) or use_written_value(
            draft, "data.tools_key", "tools"
        )
        draft.set_value("sft.tools_key", tools, ("data.multiturn.tools_key", "data.tools_key"))
        g.mark_used(
            *(
                f"data.{name}"
                for name in ("prompt_key", "response_key", "prompt_dict_keys", "response_dict_keys")
            )
        )
    else:
        for name, ours in (("prompt", "prompt_key"), ("response", "label_key")):
            sources = (f"data.{name}_key", f"data.{name}_dict_keys")
            inner_keys = use_written_value(draft, sources[1], None)
            if not isinstance(inner_keys, list):
                inner_keys = [inner_keys] if inner_keys else []
            outer_key = str(use_written_value(draft, sources[0], name))
            key = ".".join([outer_key, *map(str, inner_keys)])
            draft.set_value(f"data.{ours}", key, sources)
        g.mark_used("data.multiturn.*")
    set_prompt_encoding(draft)
    draft.set_value(
        "data.train_batch_size",
        use_written_value(draft, "data.train_batch_size", BATCH),
        ("data.train_batch_size",),
    )
    length = use_written_value(draft, "data.max_length", LENGTH)
    draft.set_value("sft.max_length", length, ("data.max_length",))
    side = use_written_value(draft, "data.truncation", "error")
    if side != "error":
        draft.set_value("data.truncation", side, ("data.truncation",))
    tokens = use_written_value(draft, "data.max_token_len_per_gpu", TOKENS)
    if isinstance(length, int) and isinstance(tokens, int):
        note = "tokens of a micro-batch, into which documents are packed"
        draft.set_value(
            "actor.ppo_max_token_len_per_gpu",
            max(tokens, length),
            ("data.max_token_len_per_gpu",),
            note,
        )


def _translate_sft_layout(draft: ConfigDraft) -> None:
    """Translate the backend and the parallel sizes of a supervised job: fsdp for LoRA, and for FSDP
    that splits no sample; else megatron.
    """
    g = draft.verl_settings
    splits = (
        "ulysses_sequence_parallel_size",
        "engine.ulysses_sequence_parallel_size",
        "engine.ulysses_parallel_size",
    )
    split = next((key for key in splits if use_written_value(draft, key, 1) not in (None, 1)), None)
    strategies = [
        use_written_value(draft, f"{section}.strategy", None) for section in ("model", "engine")
    ]
    if has_lora(g) or (
        split is None and any(strategy in ("fsdp", "fsdp2") for strategy in strategies)
    ):
        draft.set_value("actor.backend", "fsdp", ("engine.strategy", "model.strategy"))
        if split is not None:
            g.notes.append(
                f"{split} ({g.peek_value(split)}): the backend fsdp splits no sample; a rank must"
                " hold the longest."
            )
        g.mark_used("engine.*")
        return
    for axis in AXES:
        key = f"engine.{axis}_parallel_size"
        value = use_written_value(draft, key, None)
        if value not in (None, "null", 1):
            draft.set_value(f"actor.megatron.{axis}_parallel_size", value, (key,))
    if split is not None:
        draft.set_value(
            "actor.megatron.context_parallel_size",
            g.use_whole_number(split),
            (split,),
            "ranks that split a sample",
        )
    for name in (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "sequence_parallel",
    ):
        if g.is_written(f"engine.{name}"):
            draft.set_value(
                f"actor.megatron.{name}", g.use_value(f"engine.{name}"), (f"engine.{name}",)
            )


def _translate_sft_optimizer(draft: ConfigDraft) -> None:
    """Translate learning rate, decay, warm-up and other settings of the optimizer; a warm-up ratio
    becomes steps where their number is known.
    """
    g = draft.verl_settings
    if str(use_written_value(draft, "optim.optimizer", "adamw")).lower() not in ("adam", "adamw"):
        draft.leave_untranslated("optim.optimizer", "the optimizer is AdamW", "optimizer")
    if not is_off_value(use_written_value(draft, "optim.lr_warmup_init", 0)):
        draft.leave_untranslated("optim.lr_warmup_init", "warm-up begins at 0", "lr_schedule")
    steps = _compute_sft_steps(draft)
    draft.set_value("actor.optim.lr", use_written_value(draft, "optim.lr", 1e-5), ("optim.lr",))
    for name in ("weight_decay", "betas", "clip_grad"):
        if g.is_written(f"optim.{name}"):
            draft.set_value(f"actor.optim.{name}", g.use_value(f"optim.{name}"), (f"optim.{name}",))
    styles = (
        "optim.lr_decay_style",
        "optim.lr_scheduler_type",
        "optim.lr_scheduler",
        "optim.warmup_style",
    )
    style = next((str(g.peek_value(key)) for key in styles if g.is_written(key)), "cosine")
    if style.lower() == "wsd":
        draft.leave_untranslated(
            next(filter(g.is_written, styles)),
            "warm-up, stable and decay phases are not there",
            "lr_schedule",
        )
        for key in styles:
            g.mark_used(key)
    else:
        draft.set_value("actor.optim.lr_decay_style", STYLES.get(style, style), styles)
    floors = ("optim.min_lr", "optim.lr_min")
    floor = next((g.use_number(key) for key in floors if g.is_written(key)), None)
    if floor:
        draft.set_value("actor.optim.min_lr", floor, floors)
    elif (share := use_written_value(draft, "optim.min_lr_ratio", 0)) and isinstance(
        lr := use_written_value(draft, "optim.lr", 1e-5), float
    ):
        draft.set_value(
            "actor.optim.min_lr",
            float(f"{share * lr:.12g}"),
            ("optim.min_lr_ratio",),
            f"{share} x lr {lr}",
        )
    ratios = ("optim.lr_warmup_steps_ratio", "optim.warmup_steps_ratio")
    num_steps = use_written_value(draft, "optim.lr_warmup_steps", -1)
    for key in (*ratios, *floors):
        g.mark_used(key)
    ratio = next((g.use_number(key) for key in ratios if g.is_written(key)), WARMUP)
    if isinstance(num_steps, int) and num_steps > 0:
        draft.set_value("actor.optim.lr_warmup_steps", num_steps, ("optim.lr_warmup_steps",))
    elif ratio and steps is not None and int(ratio * steps):
        draft.set_value(
            "actor.optim.lr_warmup_steps", int(ratio * steps), ratios, f"{ratio} x {steps} steps"
        )


def _compute_sft_steps(draft: ConfigDraft) -> int | None:
    """Return the number of optimizer steps: as written, or from the epochs and the number of rows
    that the user has given; None where these are not known.
    """
    g = draft.verl_settings
    rows = draft.user_facts.num_train_rows
    steps = use_written_value(draft, "trainer.total_training_steps", None)
    if isinstance(steps, int):
        return steps
    size = use_written_value(draft, "data.train_batch_size", BATCH)
    epochs = use_written_value(draft, "trainer.total_epochs", 4)
    if rows is None or not isinstance(size, int) or not isinstance(epochs, int):
        return None
    g.mark_used("trainer.total_epochs")
    return rows // size * epochs or None


def _translate_sft_trainer(draft: ConfigDraft) -> None:
    """Translate steps, names, loggers, ranks, and saving and testing of a supervised job. Request
    the steps where they cannot be computed.
    """
    g = draft.verl_settings
    steps = _compute_sft_steps(draft)
    g.mark_used("trainer.total_epochs")
    if steps is None:
        size = use_written_value(draft, "data.train_batch_size", BATCH)
        draft.request_missing_fact(
            "trainer.total_training_steps",
            explain_too_few_rows(draft, size)
            or "give the number, or the rows of the training files with --train-rows",
        )
    else:
        source = (
            "trainer.total_training_steps"
            if g.is_written("trainer.total_training_steps")
            else "trainer.total_epochs"
        )
        draft.set_value("trainer.total_training_steps", steps, (source,))
    translate_run_names(draft)
    translate_loggers(draft)
    for name in ("nnodes", "n_gpus_per_node", "seed", "resume_mode", "device"):
        if g.is_written(f"trainer.{name}"):
            draft.set_value(f"trainer.{name}", g.use_value(f"trainer.{name}"), (f"trainer.{name}",))
    if not g.is_written("trainer.n_gpus_per_node"):
        g.notes.append(
            "trainer.n_gpus_per_node is not said: torchrun's --nproc-per-node there; give it"
            " with --set."
        )
    for name in ("save_freq", "test_freq"):
        value = use_written_value(draft, f"trainer.{name}", -1)
        if isinstance(value, int):
            draft.set_value(
                f"trainer.{name}",
                max(value, 0),
                (f"trainer.{name}",),
                "never: 0 here, -1 there" if value < 0 else "",
            )
    if g.is_written("trainer.max_ckpt_to_keep"):
        draft.set_value(
            "trainer.max_ckpt_to_keep",
            g.use_value("trainer.max_ckpt_to_keep"),
            ("trainer.max_ckpt_to_keep",),
        )
