"""What users of verl look for, and how it is called here. Used for hints at unknown keys and for the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    learns: bool = False  # left out, it changes what is learnt
    switch: str = ""  # verl's key without which it asks for nothing
    off: tuple[object, ...] = ()  # values that ask for nothing, beside null, false, 0, -1, "", [] and {}


_BUDGET = "micro-batches are always cut by token budget"
_NOT_YET = "not supported yet; remove it"
_TURNS = "while engines generate all of the trainer is in host memory; not within the trainer's turn"
_ATTENTION = "the backend is chosen with transformer_impl; remove it"
_FUSIONS = "fused where it can be; remove it"
_BATCH_SIZES = ("ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")
_LOGITS = (
    *("entropy_from_logits_with_chunking", "entropy_checkpointing"),
    *("calculate_sum_pi_squared", "sum_pi_squared_checkpointing"),
)
_ROLES = ("actor", "critic", "reference", "rollout", "reward.reward_model")
_WATCHING = (("trace", "backend"), ("prometheus", "enable"))
_OF_ENGINES = (
    *("enforce_eager", "cudagraph_capture_sizes", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode"),
    *("scheduling_policy", "disable_log_stats", "skip_tokenizer_init", "multi_stage_wake_up", "limit_images"),
    *("cast_to_rollout_dtype", "use_block_quant_rollout", "nccl_timeout"),
)
_OPTIMIZER_PLACE = "the optimizer works where its parameters are; remove it"
_NO_WSD = "warm-up, stable and decay phases are not there; use another lr_decay_style"
_ENGINES_OWN = "it is the engine's own business; see rollout.sglang.args"
_NO_IMAGES = "prompts are text; remove it"
_VERLS_OWN = "it belongs to how verl is built; remove it"
_NO_EXPERTS = "models with experts are not supported yet; remove it"
_TABLE = "weights are always converted by the weight table; remove it"
_WEIGHTS = "weights are read from a directory in Hugging Face layout"
_FORCED = "it follows from the layout, since other values fail silently; remove it"
_RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
VERL_NAMES = (
    VerlName(
        "actor.ppo_mini_batch_size",
        "actor.mini_batch_size",
        "it counts samples (prompts x rollout.n), where verl counts prompts: multiply by rollout.n",
    ),
    *(VerlName(f"actor.{name}", "actor.ppo_max_token_len_per_gpu", _BUDGET) for name in _BATCH_SIZES),
    VerlName("actor.clip_ratio", "actor.policy_loss.params.clip_ratio_low", "and clip_ratio_high beside it"),
    *(
        VerlName(f"actor.clip_ratio_{side}", f"actor.policy_loss.params.clip_ratio_{side}")
        for side in ("low", "high", "c")
    ),
    VerlName("actor.grad_clip", "actor.optim.clip_grad"),
    VerlName("actor.optim.lr_warmup_steps_ratio", "actor.optim.lr_warmup_steps", "in optimizer steps"),
    *(
        VerlName(f"actor.optim.override_optimizer_config.{name}", None, _OPTIMIZER_PLACE)
        for name in ("optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")
    ),
    VerlName("actor.optim.override_optimizer_config.use_precision_aware_optimizer", None, _OPTIMIZER_PLACE),
    VerlName("actor.optim.override_optimizer_config.*", None, _NOT_YET, learns=True),
    VerlName("actor.optim.total_training_steps", "trainer.total_training_steps"),
    VerlName("actor.optim.lr_warmup_init", None, "warm-up begins at 0; remove it", learns=True),
    VerlName("actor.optim.weight_decay_incr_style", "actor.optim.weight_decay_end", "linear", off=("constant",)),
    VerlName("actor.optim.lr_wsd_decay_style", None, _NO_WSD, learns=True, switch="actor.optim.lr_wsd_decay_steps"),
    VerlName("actor.optim.lr_wsd_decay_steps", None, _NO_WSD, learns=True),
    VerlName("actor.optim.use_checkpoint_opt_param_scheduler", None, "a resumed run goes on with its own; remove it"),
    VerlName("actor.optim.lr_scheduler_type", "actor.optim.lr_decay_style"),
    VerlName("actor.optim.warmup_style", "actor.optim.lr_decay_style"),
    VerlName("actor.optim.min_lr_ratio", "actor.optim.min_lr", "as a rate, not as a share of lr"),
    VerlName("actor.optim.num_cycles", None, "the cosine falls once; remove it", learns=True, off=(0.5,)),
    VerlName("actor.optim.optimizer_impl", None, "the optimizer is Megatron's; remove it", off=("torch.optim",)),
    VerlName("actor.strategy", None, "the trainer is always Megatron; remove it"),
    VerlName("actor.checkpoint.async_save", "trainer.async_save"),
    VerlName("actor.checkpoint.*", "trainer.save_hf"),
    VerlName("actor.router_replay.*", None, _NO_EXPERTS, learns=True, switch="actor.router_replay.mode"),
    VerlName("actor.policy_loss.*", "actor.policy_loss.params", "where the loss has it", learns=True),
    VerlName("actor.tau_pos", "actor.policy_loss.params", "tau_pos, of sapo"),
    VerlName("actor.tau_neg", "actor.policy_loss.params", "tau_neg, of sapo"),
    VerlName("actor.freeze_vision_tower", None, _NO_IMAGES),
    VerlName("actor.data_loader_seed", "trainer.seed", off=(42,)),
    VerlName("actor.use_fused_kernels", "actor.kernels"),
    VerlName("actor.calculate_entropy", None, "entropies are always measured; remove it"),
    *(
        VerlName(f"actor.{name}", None, _VERLS_OWN, off=(True, 600))
        for name in ("use_torch_compile", "load_weight", "nccl_timeout", "use_prefix_grouper")
    ),
    *(VerlName(f"actor.{name}", "actor.kernels", "no logits are kept") for name in _LOGITS),
    VerlName("actor.fsdp_config.*", "actor.megatron", "the trainer is always Megatron: choose parallel sizes"),
    *(VerlName(f"{role}.profiler.*", None, _NOT_YET, switch=f"{role}.profiler.enable") for role in _ROLES),
    *(
        VerlName(f"{role}.{name}", None, _VERLS_OWN, off=(True, 600))
        for role in ("critic", "reference")
        for name in ("load_weight", "nccl_timeout", "use_torch_compile")
    ),
    *(VerlName(f"{role}.rollout_n", "rollout.n") for role in ("actor", "critic", "reference")),
    VerlName("critic.data_loader_seed", "trainer.seed", off=(42,)),
    VerlName("critic.model.override_config.*", None, "the model is as in its config.json; change that", learns=True),
    VerlName("critic.model.lora.*", None, _NOT_YET, learns=True, switch="critic.model.lora.rank"),
    VerlName("critic.model.external_lib", None, "no code is run from a model; remove it", learns=True),
    VerlName("critic.model.trust_remote_code", None, "no code is run from a model directory; remove it"),
    VerlName("reference.strategy", None, "the trainer is always Megatron; remove it", off=("megatron",)),
    VerlName("reference.router_replay.*", None, _NO_EXPERTS, switch="reference.router_replay.mode"),
    VerlName("reference.fsdp_config.*", "reference.param_offload"),
    VerlName("reference.ulysses_sequence_parallel_size", "actor.megatron.context_parallel_size"),
    VerlName("reference.log_prob_micro_batch_size", "reference.max_token_len_per_gpu", _BUDGET),
    *(VerlName(f"actor.megatron.{name}mbridge", None, _TABLE, off=(True,)) for name in ("use_", "vanilla_")),
    VerlName("actor.megatron.dtype", "model.dtype"),
    *(
        VerlName(f"actor.megatron.{name}_offload", "rollout.colocated", _TURNS)
        for name in ("param", "grad", "optimizer")
    ),
    VerlName("actor.megatron.expert_model_parallel_size", None, _NO_EXPERTS, off=(1,)),
    VerlName("actor.megatron.expert_tensor_parallel_size", None, _NO_EXPERTS, off=(1,)),
    VerlName("actor.megatron.dynamic_context_parallel", "actor.megatron.context_parallel_size", "one size for all"),
    VerlName("actor.megatron.use_dist_checkpointing", "model.path", _WEIGHTS),
    *(VerlName(f"actor.megatron.dist_checkpointing_{name}", "model.path", _WEIGHTS) for name in ("path", "prefix")),
    VerlName("actor.megatron.seed", "trainer.seed"),
    VerlName("actor.megatron.forward_only", None, "each role knows whether it trains; remove it"),
    *(
        VerlName(f"actor.megatron.override_transformer_config.{name}", f"actor.megatron.{name}")
        for name in (*_RECOMPUTE, "transformer_impl", "sequence_parallel", "gradient_accumulation_fusion")
    ),
    *(
        VerlName(f"actor.megatron.override_transformer_config.{name}", None, note)
        for name, note in (
            ("attention_backend", _ATTENTION),
            ("apply_rope_fusion", _FUSIONS),
            ("masked_softmax_fusion", _FUSIONS),
            ("bias_activation_fusion", _FUSIONS),
            ("bias_dropout_fusion", _FUSIONS),
            ("persist_layer_norm", _FUSIONS),
            ("moe_grouped_gemm", _NO_EXPERTS),
            ("moe_permute_fusion", _NO_EXPERTS),
            ("moe_enable_deepep", _NO_EXPERTS),
            ("moe_router_dtype", _NO_EXPERTS),
            ("account_for_loss_in_pipeline_split", "all stages have as many layers; remove it"),
            ("account_for_embedding_in_pipeline_split", "all stages have as many layers; remove it"),
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
    VerlName("actor.megatron.override_transformer_config.*", None, "the rest is as in config.json", learns=True),
    VerlName("actor.megatron.override_ddp_config.*", None, "it follows from the layout; remove it"),
    VerlName("actor.megatron.override_mcore_model_config.*", None, _NOT_YET, learns=True),
    VerlName("actor.megatron.use_remove_padding", None, "samples are always packed; remove it", off=(True,)),
    VerlName(
        "actor.megatron.num_layers_per_virtual_pipeline_stage",
        "actor.megatron.virtual_pipeline_model_parallel_size",
        "the number of chunks, not of layers",
    ),
    VerlName("actor.megatron.activation_checkpointing", "actor.megatron.recompute_granularity", "as full"),
    VerlName("actor.ulysses_sequence_parallel_size", "actor.megatron.context_parallel_size"),
    VerlName("model.enable_gradient_checkpointing", "actor.megatron.recompute_granularity", "as full"),
    VerlName("model.enable_activation_offload", None, _NOT_YET),
    VerlName("model.override_config.*", None, "the model is as in its config.json; change that", learns=True),
    VerlName("model.custom_chat_template", "model.tokenizer_path", "its directory holds the template", learns=True),
    VerlName("model.mtp.*", None, _NOT_YET, learns=True, switch="model.mtp.enable"),
    *(
        VerlName(f"model.{name}", None, _NOT_YET, learns=True, switch="model.lora_rank")
        for name in ("lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
    ),
    VerlName("model.external_lib", None, "no code is run from a model; remove it", learns=True),
    VerlName("model.hf_config_path", "model.path", "config.json is beside the weights"),
    VerlName("model.use_shm", None, _VERLS_OWN),
    VerlName("model.use_liger", "actor.kernels"),
    VerlName("model.fused_kernel_options.*", "actor.kernels", switch="model.use_fused_kernels"),
    VerlName("model.tiled_mlp.*", None, _NOT_YET, switch="model.tiled_mlp.enabled"),
    VerlName("reference.megatron.param_offload", "reference.param_offload"),
    VerlName("reference.megatron.*", "actor.megatron", "the reference shares the actor's layout"),
    VerlName("reference.log_prob_max_token_len_per_gpu", "reference.max_token_len_per_gpu"),
    VerlName("reference.log_prob_micro_batch_size_per_gpu", "reference.max_token_len_per_gpu", _BUDGET),
    VerlName("reference.log_prob_use_dynamic_bsz", "reference.max_token_len_per_gpu", _BUDGET),
    VerlName("reference.model.path", "reference.path"),
    VerlName("rollout.name", "rollout.engine"),
    VerlName("rollout.mode", None, "engines are always servers; remove it", off=("async", "sync")),
    VerlName("rollout.tensor_model_parallel_size", "rollout.sglang.args", "as tp-size"),
    VerlName("rollout.gpu_memory_utilization", "rollout.sglang.args", "as mem-fraction-static"),
    VerlName("rollout.engine_kwargs.*", "rollout.sglang.args"),
    VerlName("rollout.calculate_log_probs", None, "the engine's log-probs are always kept; remove it", off=(True,)),
    VerlName("rollout.log_prob_max_token_len_per_gpu", "actor.ppo_max_token_len_per_gpu"),
    VerlName("rollout.log_prob_micro_batch_size_per_gpu", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("rollout.log_prob_use_dynamic_bsz", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("rollout.free_cache_engine", "rollout.colocated", off=(True,)),
    VerlName(
        "rollout.load_format",
        None,
        "engines always get their weights from the trainer; remove it",
        off=("dummy", "dummy_megatron", "auto"),
    ),
    VerlName("rollout.prompt_length", "data.max_prompt_length"),
    VerlName("rollout.response_length", "data.max_response_length"),
    VerlName("rollout.checkpoint_engine.update_weights_bucket_megabytes", "rollout.update_weights_bucket_megabytes"),
    VerlName("rollout.val_kwargs.do_sample", "rollout.val_kwargs.temperature", "0 is greedy"),
    VerlName("rollout.multi_turn.*", None, _NOT_YET, learns=True, switch="rollout.multi_turn.enable"),
    VerlName("rollout.agent.num_workers", None, _VERLS_OWN, off=(8,)),
    VerlName("rollout.agent.default_agent_loop", None, _NOT_YET, learns=True, off=("single_turn_agent",)),
    VerlName("rollout.agent.*", None, _NOT_YET, learns=True),
    VerlName("rollout.ignore_eos", None, "a response ends at the end-of-sequence token; remove it", learns=True),
    VerlName("rollout.do_sample", "rollout.temperature", "training always samples", off=(True,)),
    VerlName("rollout.quantization", None, _NOT_YET, learns=True),
    VerlName("rollout.quantization_config_file", None, _NOT_YET, learns=True),
    VerlName("rollout.enable_rollout_routing_replay", None, _NO_EXPERTS, learns=True),
    VerlName("rollout.disaggregation.*", None, _NOT_YET, switch="rollout.disaggregation.enable"),
    VerlName("rollout.mtp.*", None, _NOT_YET, switch="rollout.mtp.enable"),
    VerlName("rollout.skip.*", "trainer.record", "and train --replay", switch="rollout.skip.enable"),
    VerlName("rollout.skip_rollout", "trainer.record", "and train --replay", learns=True),
    VerlName("rollout.skip_dump_dir", "trainer.record", "and train --replay", switch="rollout.skip_rollout"),
    VerlName("rollout.over_sample_rate", None, "a step has the samples it asked for; remove it", learns=True),
    VerlName("rollout.checkpoint_engine.backend", "rollout.weight_transport", off=("naive",)),
    VerlName("rollout.checkpoint_engine.*", "rollout.weight_transport"),
    VerlName("rollout.expert_parallel_size", None, _NO_EXPERTS, off=(1,)),
    VerlName("rollout.data_parallel_size", "rollout.sglang.args", "as dp-size"),
    VerlName("rollout.pipeline_model_parallel_size", "rollout.sglang.args", "as pp-size"),
    VerlName("rollout.max_model_len", "data.max_response_length", "and data.max_prompt_length"),
    VerlName("rollout.log_prob_micro_batch_size", "actor.ppo_max_token_len_per_gpu", _BUDGET),
    VerlName("rollout.layer_name_map.*", None, _VERLS_OWN, off=("qkv", "gate_up")),
    *(
        VerlName(f"rollout.{section}.*", None, _NOT_YET, switch=f"rollout.{section}.{key}")
        for section, key in _WATCHING
    ),
    *(VerlName(f"rollout.{name}", None, _ENGINES_OWN) for name in _OF_ENGINES),
    VerlName("model.use_remove_padding", None, "samples are always packed; remove it", off=(True,)),
    VerlName("model.use_fused_kernels", "actor.log_prob_chunk_size", "log-probs never hold all logits at once"),
    VerlName("model.lora.*", None, _NOT_YET, learns=True, switch="model.lora.rank"),
    VerlName("model.trust_remote_code", None, "no code is run from a model directory; remove it"),
    VerlName("data.gen_batch_size", "data.train_batch_size", learns=True),
    VerlName("data.custom_cls.*", "data.task", "register a task", learns=True, switch="data.custom_cls.path"),
    VerlName("data.sampler.*", "data.sources", "with weights", learns=True, switch="data.sampler.class_path"),
    VerlName("data.datagen.*", "data.task", "register a task", learns=True, switch="data.datagen.path"),
    VerlName("data.tokenizer", "model.tokenizer_path", learns=True),
    VerlName("data.train_max_samples", "data.train_files", "name a file with so many rows", learns=True),
    VerlName("data.val_max_samples", "trainer.test_samples"),
    VerlName("data.val_batch_size", "trainer.test_samples", "all of them are evaluated at once"),
    VerlName("data.validation_shuffle", None, "the order of evaluation does not matter; remove it"),
    VerlName("data.trust_remote_code", None, "no code is run from a model directory; remove it"),
    VerlName("data.return_raw_chat", "data.apply_chat_template", off=(True,)),
    VerlName("data.tool_config_path", None, _NOT_YET, learns=True),
    *(
        VerlName(f"data.{name}", None, _NO_IMAGES, off=off)
        for name, off in (
            ("image_patch_size", (14,)),
            ("image_key", ("images",)),
            ("video_key", ("videos",)),
            ("return_multi_modal_inputs", (True,)),
        )
    ),
    *(
        VerlName(f"data.{name}", None, _VERLS_OWN)
        for name in (
            *("return_raw_input_ids", "return_full_prompt", "use_shm", "dataloader_num_workers"),
            "filter_overlong_prompts_workers",
        )
    ),
    VerlName("data.reward_fn_key", "data.label_key", off=("data_source",)),
    VerlName("custom_reward_function.*", "reward.params", "reward.name: function, params: {path: module:function}"),
    VerlName(
        "reward.custom_reward_function.*", "reward.params", "reward.name: function, params: {path: module:function}"
    ),
    VerlName("reward.sandbox_fusion.*", None, _NOT_YET, learns=True, switch="reward.sandbox_fusion.url"),
    VerlName("reward_manager.*", "reward.name"),
    VerlName("reward.reward_kwargs.*", "reward.terms", "name: overlong", learns=True),
    VerlName("reward.reward_manager.*", "reward.name"),
    VerlName("reward_model.*", "reward.name", "reward models are not supported yet"),
    VerlName(
        "reward.reward_model.*",
        "reward.name",
        "reward models are not supported yet",
        learns=True,
        switch="reward.reward_model.enable",
    ),
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
    VerlName("critic.strategy", None, "the trainer is always Megatron; remove it", off=("megatron",)),
    VerlName("critic.checkpoint.async_save", "trainer.async_save"),
    VerlName("critic.checkpoint.*", "trainer.save_hf"),
    VerlName("critic.optim.lr_warmup_steps_ratio", "critic.optim.lr_warmup_steps", "in optimizer steps"),
    VerlName("algorithm.norm_adv_by_std_in_grpo", "algorithm.params.norm_adv_by_std_in_grpo"),
    VerlName("algorithm.gamma", "algorithm.params", "where the estimator has it"),
    VerlName("algorithm.lam", "algorithm.params", "where the estimator has it"),
    VerlName("algorithm.use_pf_ppo", "algorithm.pf_ppo.enable", learns=True),
    VerlName("algorithm.gdpo_reward_keys", "algorithm.params", "of gdpo", learns=True),
    VerlName("algorithm.gdpo_reward_weights", "algorithm.params", "of gdpo", learns=True),
    VerlName("algorithm.rollout_correction.debug_rollout_actor_probs", None, "always measured; remove it"),
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
    VerlName("trainer.balance_batch", None, "replicas are always balanced; remove it", off=(True,)),
    VerlName("trainer.use_v1", None, _VERLS_OWN, off=(True,)),
    VerlName("trainer.v1.trainer_mode", "schedule.name", learns=True, off=("sync",)),
    VerlName("trainer.v1.sampler.max_off_policy_threshold", "schedule.params", "as max_lag"),
    VerlName("trainer.v1.sampler.max_off_policy_strategy", "schedule.params", "as late"),
    VerlName("trainer.v1.*", None, _VERLS_OWN),
    VerlName("async_training.staleness_threshold", "schedule.params", "as max_lag, in whole syncs", learns=True),
    VerlName("async_training.partial_rollout", "schedule.params", "as partial_rollouts"),
    VerlName("async_training.trigger_parameter_sync_step", "data.train_batch_size", "times as many", learns=True),
    VerlName("async_training.require_batches", "data.train_batch_size", "times as many", learns=True),
    VerlName("async_training.use_rollout_log_probs", "algorithm.rollout_correction.mode", "as bypass", learns=True),
    VerlName("async_training.*", None, _VERLS_OWN),
    VerlName("rollout.nnodes", "rollout.num_engines", "engines of schedules other than synchronous"),
    VerlName("rollout.n_gpus_per_node", "rollout.num_engines", "engines of schedules other than synchronous"),
    VerlName("rollout.total_rollout_steps", "trainer.total_training_steps", "prompts there", learns=True),
    VerlName("rollout.test_freq", "trainer.test_freq"),
    VerlName("trainer.use_legacy_worker_impl", None, _VERLS_OWN, off=("auto", "disable", "enable")),
    VerlName("trainer.log_val_generations", "trainer.samples_kept"),
    VerlName("trainer.default_hdfs_dir", "trainer.default_local_dir"),
    VerlName("trainer.esi_redundant_time", "trainer.stop_grace_s", "a run saves when it is told to stop"),
    VerlName("trainer.ray_wait_register_center_timeout", None, _VERLS_OWN, off=(300,)),
    VerlName("hybrid_engine", "rollout.colocated", off=(True,)),
    VerlName("actor_rollout_ref.hybrid_engine", "rollout.colocated", off=(True,)),
    VerlName("actor_rollout_ref.nccl_timeout", "trainer.stage_timeout_s", off=(600,)),
    VerlName("nccl_timeout", "trainer.stage_timeout_s", off=(600,)),
    VerlName("skip.*", "trainer.record", "and train --replay", switch="skip.enable"),
    VerlName("transfer_queue.*", None, _VERLS_OWN),
    VerlName("distillation.*", None, _NOT_YET, learns=True, switch="distillation.enabled"),
    VerlName("ray_kwargs.*", "trainer.runtime"),
    VerlName("global_profiler.*", None, _NOT_YET, switch="global_profiler.tool"),
)


def current_path(key: str) -> str:
    """The key under today's name of its section: "actor_rollout_ref.actor.x" is "actor.x"."""
    for old, new in RENAMED_SECTIONS:
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return key


def entry_of(key: str) -> VerlName | None:
    """The entry of a key of verl in today's layout. What is true of the actor's engine is true of the critic's."""
    for entry in VERL_NAMES:
        stem = entry.name.removesuffix(".*")
        if key == stem or (entry.name.endswith(".*") and key.startswith(stem + ".")):
            return entry
    section = ".".join(key.split(".")[:2])
    if section in ("critic.megatron", "critic.optim", "critic.fsdp_config", "critic.profiler"):
        entry_of_actor = entry_of("actor" + key.removeprefix("critic"))
        if entry_of_actor is not None:
            target = entry_of_actor.target
            is_own = target is not None and target.startswith(("actor.megatron", "actor.optim"))
            return replace(entry_of_actor, target="critic" + str(target)[5:] if is_own else target)
    return None


def suggest(key: str) -> Suggestion:
    """What an unknown key of a run may have meant."""
    path = current_path(key)
    known = (*leaf_keys(RunConfig), *section_keys(RunConfig))
    if path != key and path in known:
        return Suggestion(f"Here it is {path}.", (path,))
    entry = entry_of(path)
    if entry is None:
        return nearest(path, [name for name in known if not path.startswith(name + ".")])
    if entry.target is None:
        return Suggestion(f"{entry.note[0].upper()}{entry.note[1:]}.")
    text = f"Here it is {entry.target}"
    return Suggestion(f"{text} ({entry.note})." if entry.note else f"{text}.", (entry.target,))


def has_known_below(key: str) -> bool:
    """Whether an unknown section is one of verl's whose entries deserve a hint each."""
    path = current_path(key)
    below = any(entry.name.startswith(path + ".") and entry.name != f"{path}.*" for entry in VERL_NAMES)
    entry = entry_of(path)
    if entry is not None:  # what stands for a section says enough, but where it only says that the rest has no place
        return below and entry.target is None and entry.name == f"{path}.*"
    return below or path in section_keys(RunConfig) or any(old.startswith(key + ".") for old, _ in RENAMED_SECTIONS)
