"""What users of verl look for, and how it is called here. Used for hints at unknown keys and for the reference."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_megatron.config.keys import Suggestion, leaf_keys, nearest, section_keys
from rlhf_megatron.config.schema import RunConfig

RENAMED_SECTIONS = (
    ("actor_rollout_ref.actor", "actor"),
    ("actor_rollout_ref.rollout", "rollout"),
    ("actor_rollout_ref.ref", "reference"),
    ("actor_rollout_ref.model", "model"),
    ("ref", "reference"),
)


@dataclass(frozen=True)
class VerlName:
    """`name` is verl's key after RENAMED_SECTIONS; one that ends in ".*" covers all below. `target` is ours."""

    name: str
    target: str | None
    note: str = ""


_BUDGET = "micro-batches are always cut by token budget"
_NOT_YET = "not supported yet; remove it"
_TURNS = "while engines generate all of the trainer is in host memory; not within the trainer's turn"
_NO_EXPERTS = "models with experts are not supported yet; remove it"
_WEIGHTS = "weights are read from a directory in Hugging Face layout"
_FORCED = "it follows from the layout, since other values fail silently; remove it"
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
VERL_NAMES = (
    VerlName(
        "actor.ppo_mini_batch_size",
        "actor.mini_batch_size",
        "it counts samples (prompts x rollout.n), where verl counts prompts: multiply by rollout.n",
    ),
    VerlName("actor.ppo_micro_batch_size", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("actor.ppo_micro_batch_size_per_gpu", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("actor.use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("actor.clip_ratio", "actor.policy_loss.params.clip_ratio_low", "and clip_ratio_high beside it"),
    VerlName("actor.clip_ratio_low", "actor.policy_loss.params.clip_ratio_low"),
    VerlName("actor.clip_ratio_high", "actor.policy_loss.params.clip_ratio_high"),
    VerlName("actor.clip_ratio_c", "actor.policy_loss.params.clip_ratio_c"),
    VerlName("actor.grad_clip", "actor.optim.clip_grad"),
    VerlName("actor.optim.lr_warmup_steps_ratio", "actor.optim.lr_warmup_steps", "in optimizer steps"),
    VerlName("actor.optim.override_optimizer_config.*", None, _NOT_YET),
    VerlName("actor.strategy", None, "the trainer is always Megatron; remove it"),
    VerlName("actor.checkpoint.async_save", "trainer.async_save"),
    VerlName("actor.checkpoint.*", "trainer.save_hf"),
    VerlName("actor.router_replay.*", None, _NOT_YET),
    VerlName("actor.megatron.use_mbridge", None, "weights are always converted by the weight table; remove it"),
    VerlName("actor.megatron.vanilla_mbridge", None, "weights are always converted by the weight table; remove it"),
    VerlName("actor.megatron.dtype", "model.dtype"),
    VerlName("actor.megatron.param_offload", "rollout.colocated", _TURNS),
    VerlName("actor.megatron.grad_offload", "rollout.colocated", _TURNS),
    VerlName("actor.megatron.optimizer_offload", "rollout.colocated", _TURNS),
    VerlName("actor.megatron.expert_model_parallel_size", None, _NO_EXPERTS),
    VerlName("actor.megatron.expert_tensor_parallel_size", None, _NO_EXPERTS),
    VerlName("actor.megatron.dynamic_context_parallel", "actor.megatron.context_parallel_size", "one size for all"),
    VerlName("actor.megatron.use_dist_checkpointing", "model.path", _WEIGHTS),
    VerlName("actor.megatron.dist_checkpointing_path", "model.path", _WEIGHTS),
    VerlName("actor.megatron.dist_checkpointing_prefix", "model.path", _WEIGHTS),
    VerlName("actor.megatron.seed", "trainer.seed"),
    VerlName("actor.megatron.forward_only", None, "each role knows whether it trains; remove it"),
    *(
        VerlName(f"actor.megatron.override_transformer_config.{name}", f"actor.megatron.{name}")
        for name in (*_RECOMPUTE, "transformer_impl", "sequence_parallel", "gradient_accumulation_fusion")
    ),
    *(
        VerlName(f"actor.megatron.override_transformer_config.{name}", None, note)
        for name, note in (
            ("attention_backend", "the backend is chosen with transformer_impl; remove it"),
            ("variable_seq_lengths", "the micro-batches of a call have one length; remove it"),
            ("deallocate_pipeline_outputs", _FORCED),
            ("overlap_p2p_comm", _FORCED),
            ("batch_p2p_comm", _FORCED),
            ("moe_token_dispatcher_type", _NO_EXPERTS),
            ("num_layers_in_first_pipeline_stage", "all stages have as many layers; remove it"),
            ("num_layers_in_last_pipeline_stage", "all stages have as many layers; remove it"),
        )
    ),
    *(
        VerlName(f"actor.megatron.override_ddp_config.{name}", f"actor.megatron.{name}")
        for name in ("overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer")
    ),
    VerlName("actor.megatron.override_ddp_config.grad_reduce_in_fp32", None, "gradients are always float32; remove it"),
    VerlName("actor.megatron.override_mcore_model_config.*", None, _NOT_YET),
    VerlName(
        "actor.megatron.num_layers_per_virtual_pipeline_stage",
        "actor.megatron.virtual_pipeline_model_parallel_size",
        "the number of chunks, not of layers",
    ),
    VerlName("actor.megatron.activation_checkpointing", "actor.megatron.recompute_granularity", "as full"),
    VerlName("actor.ulysses_sequence_parallel_size", "actor.megatron.context_parallel_size"),
    VerlName("model.enable_gradient_checkpointing", "actor.megatron.recompute_granularity", "as full"),
    VerlName("model.enable_activation_offload", None, _NOT_YET),
    VerlName("reference.megatron.param_offload", "reference.param_offload"),
    VerlName("reference.megatron.*", "actor.megatron", "the reference shares the actor's layout"),
    VerlName("reference.log_prob_max_token_len_per_gpu", "reference.max_token_len_per_gpu"),
    VerlName("reference.log_prob_micro_batch_size_per_gpu", "reference.max_token_len_per_gpu", _BUDGET),
    VerlName("reference.log_prob_use_dynamic_bsz", "reference.max_token_len_per_gpu", _BUDGET),
    VerlName("reference.model.path", "reference.path"),
    VerlName("rollout.name", "rollout.engine"),
    VerlName("rollout.mode", None, "engines are always servers; remove it"),
    VerlName("rollout.tensor_model_parallel_size", "rollout.sglang.args", "as tp-size"),
    VerlName("rollout.gpu_memory_utilization", "rollout.sglang.args", "as mem-fraction-static"),
    VerlName("rollout.engine_kwargs.*", "rollout.sglang.args"),
    VerlName("rollout.calculate_log_probs", None, "the engine's log-probs are always kept; remove it"),
    VerlName("rollout.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu"),
    VerlName("rollout.log_prob_micro_batch_size_per_gpu", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("rollout.log_prob_use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("rollout.free_cache_engine", "rollout.colocated"),
    VerlName("rollout.load_format", None, "engines always get their weights from the trainer; remove it"),
    VerlName("rollout.prompt_length", "data.max_prompt_length"),
    VerlName("rollout.response_length", "data.max_response_length"),
    VerlName("rollout.checkpoint_engine.update_weights_bucket_megabytes", "rollout.update_weights_bucket_megabytes"),
    VerlName("rollout.val_kwargs.do_sample", "rollout.val_kwargs.temperature", "0 is greedy"),
    VerlName("rollout.multi_turn.*", None, _NOT_YET),
    VerlName("rollout.agent.*", None, _NOT_YET),
    VerlName("model.use_remove_padding", None, "samples are always packed; remove it"),
    VerlName("model.use_fused_kernels", "actor.log_prob_chunk_size", "log-probs never hold all logits at once"),
    VerlName("model.lora.*", None, _NOT_YET),
    VerlName("model.trust_remote_code", None, "no code is run from a model directory; remove it"),
    VerlName("data.gen_batch_size", "data.train_batch_size"),
    VerlName("data.custom_cls.*", "data.task", "register a task"),
    VerlName("data.reward_fn_key", "data.label_key"),
    VerlName("custom_reward_function.*", "reward.params", "reward.name: function, params: {path: module:function}"),
    VerlName(
        "reward.custom_reward_function.*", "reward.params", "reward.name: function, params: {path: module:function}"
    ),
    VerlName("reward.sandbox_fusion.*", None, _NOT_YET),
    VerlName("reward.reward_kwargs.*", "reward.terms", "name: overlong"),
    VerlName("reward.reward_manager.*", "reward.name"),
    VerlName("reward_model.*", "reward.name", "reward models are not supported yet"),
    VerlName("reward.reward_model.*", "reward.name", "reward models are not supported yet"),
    VerlName("critic.enable", "algorithm.adv_estimator", "there is a critic where the estimator needs values, as gae"),
    VerlName("critic.model.path", "critic.path"),
    VerlName("critic.model.tokenizer_path", "model.tokenizer_path"),
    VerlName("critic.model.enable_gradient_checkpointing", "critic.megatron.recompute_granularity", "as full"),
    VerlName(
        "critic.ppo_mini_batch_size",
        "critic.mini_batch_size",
        "it counts samples (prompts x rollout.n), where verl counts prompts: multiply by rollout.n",
    ),
    VerlName("critic.ppo_micro_batch_size", "critic.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("critic.ppo_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("critic.forward_micro_batch_size_per_gpu", "critic.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    VerlName("critic.use_dynamic_bsz", "critic.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("critic.grad_clip", "critic.optim.clip_grad"),
    VerlName("critic.shuffle", "actor.shuffle", "the critic's samples are shuffled as the actor's"),
    VerlName("critic.strategy", None, "the trainer is always Megatron; remove it"),
    VerlName("critic.checkpoint.async_save", "trainer.async_save"),
    VerlName("critic.checkpoint.*", "trainer.save_hf"),
    VerlName("critic.optim.lr_warmup_steps_ratio", "critic.optim.lr_warmup_steps", "in optimizer steps"),
    VerlName("algorithm.norm_adv_by_std_in_grpo", "algorithm.params.norm_adv_by_std_in_grpo"),
    VerlName("algorithm.gamma", "algorithm.params", "where the estimator has it"),
    VerlName("algorithm.lam", "algorithm.params", "where the estimator has it"),
    VerlName("algorithm.filter_groups.*", None, _NOT_YET),
    VerlName(
        "algorithm.rollout_correction.bypass_mode", "algorithm.rollout_correction.mode", "bypass where it is true"
    ),
    VerlName(
        "algorithm.rollout_correction.use_policy_gradient", "algorithm.rollout_correction.loss_type", "as reinforce"
    ),
    VerlName(
        "algorithm.rollout_correction.rollout_rs_threshold_lower",
        "algorithm.rollout_correction.rollout_rs_threshold",
        "as LOW_HIGH",
    ),
    VerlName("trainer.total_epochs", "trainer.total_training_steps", "in steps of the loop"),
    VerlName("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    VerlName("trainer.max_critic_ckpt_to_keep", "trainer.max_ckpt_to_keep"),
    VerlName("trainer.del_local_ckpt_after_load", "trainer.max_ckpt_to_keep"),
    VerlName("trainer.rollout_data_dir", "trainer.record"),
    VerlName("trainer.validation_data_dir", "trainer.record"),
    VerlName("trainer.balance_batch", None, "replicas are always balanced; remove it"),
    VerlName("ray_kwargs.*", "trainer.runtime"),
    VerlName("global_profiler.*", None, _NOT_YET),
)


def current_path(key: str) -> str:
    """The key under today's name of its section: "actor_rollout_ref.actor.x" is "actor.x"."""
    for old, new in RENAMED_SECTIONS:
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key


def _entry(key: str) -> VerlName | None:
    for entry in VERL_NAMES:
        stem = entry.name.removesuffix(".*")
        if key == stem or (entry.name.endswith(".*") and key.startswith(stem + ".")):
            return entry
    return None


def suggest(key: str) -> Suggestion:
    """What an unknown key of a run may have meant."""
    path = current_path(key)
    known = (*leaf_keys(RunConfig), *section_keys(RunConfig))
    if path != key and path in known:
        return Suggestion(f"Here it is {path}.", (path,))
    entry = _entry(path)
    if entry is None:
        return nearest(path, [name for name in known if not path.startswith(name + ".")])
    if entry.target is None:
        return Suggestion(f"{entry.note[0].upper()}{entry.note[1:]}.")
    text = f"Here it is {entry.target}"
    return Suggestion(f"{text} ({entry.note})." if entry.note else f"{text}.", (entry.target,))


def has_known_below(key: str) -> bool:
    """Whether an unknown section is one of verl's whose entries deserve a hint each."""
    path = current_path(key)
    if _entry(path) is not None:
        return False
    below = any(entry.name.startswith(path + ".") for entry in VERL_NAMES)
    return below or path in section_keys(RunConfig) or any(old.startswith(key + ".") for old, _ in RENAMED_SECTIONS)
