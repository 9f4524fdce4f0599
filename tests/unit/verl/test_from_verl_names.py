"""Every key that users of verl know has a place here, a rule, or an entry that says why not."""

from __future__ import annotations

import random

import pytest

from rlhf_megatron.config.key_paths import list_leaf_keys
from rlhf_megatron.config.schema import RunConfig
from rlhf_megatron.config.verl_names import VERL_NAMES, find_verl_key, suggest_setting
from rlhf_megatron.config.yaml_nodes import MappingNode, parse_yaml
from rlhf_megatron.jobs.from_verl.config_draft import UserFacts
from rlhf_megatron.jobs.from_verl.settings_reader import VerlSetting, WrittenSettings
from rlhf_megatron.jobs.from_verl.translate_config import translate_verl_config
from rlhf_megatron.jobs.from_verl.verl_settings import normalize_key

OPTIM = """lr lr_warmup_steps lr_warmup_steps_ratio lr_decay_style min_lr weight_decay betas \
optimizer clip_grad
 override_optimizer_config.optimizer_cpu_offload \
override_optimizer_config.optimizer_offload_fraction
 override_optimizer_config.overlap_cpu_optimizer_d2h_h2d \
override_optimizer_config.use_precision_aware_optimizer"""
MEGATRON = """tensor_model_parallel_size pipeline_model_parallel_size \
virtual_pipeline_model_parallel_size
 context_parallel_size expert_model_parallel_size expert_tensor_parallel_size sequence_parallel
 use_distributed_optimizer param_offload grad_offload optimizer_offload use_mbridge vanilla_mbridge
 use_dist_checkpointing dist_checkpointing_path dynamic_context_parallel dtype
 override_transformer_config.recompute_granularity override_transformer_config.recompute_method
 override_transformer_config.recompute_num_layers override_transformer_config.recompute_modules
 override_transformer_config.attention_backend override_transformer_config.moe_grouped_gemm
 override_transformer_config.moe_token_dispatcher_type override_ddp_config.overlap_grad_reduce"""
PPO = """ppo_mini_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz \
ppo_max_token_len_per_gpu ppo_epochs shuffle
 loss_agg_mode checkpoint.save_contents checkpoint.load_contents checkpoint.async_save"""
SAMPLING = "temperature top_p top_k n do_sample"
BLOCKS = {
    "data": """train_files val_files prompt_key max_prompt_length max_response_length \
train_batch_size gen_batch_size
 truncation filter_overlong_prompts shuffle seed return_raw_chat custom_cls.path custom_cls.name
 apply_chat_template_kwargs.enable_thinking""",
    "actor_rollout_ref.actor": f"""{PPO} clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c \
tau_pos tau_neg
 loss_scale_factor entropy_coeff use_kl_loss kl_loss_coef kl_loss_type policy_loss.loss_mode \
policy_loss.kl_cov_ratio
 policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.ppo_kl_coef
 router_replay.mode""",
    "actor_rollout_ref.actor.megatron": MEGATRON,
    "actor_rollout_ref.ref.megatron": MEGATRON,
    "critic.megatron": MEGATRON,
    "actor_rollout_ref.actor.optim": OPTIM,
    "critic.optim": OPTIM,
    "actor_rollout_ref.ref": """log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz
 log_prob_max_token_len_per_gpu""",
    "actor_rollout_ref.rollout": """name mode n temperature top_p top_k tensor_model_parallel_size \
data_parallel_size
 expert_parallel_size pipeline_model_parallel_size gpu_memory_utilization free_cache_engine \
calculate_log_probs
 log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu \
max_num_seqs
 max_num_batched_tokens enforce_eager load_format checkpoint_engine.backend
 checkpoint_engine.update_weights_bucket_megabytes multi_turn.enable multi_turn.format \
agent.num_workers
 agent.default_agent_loop engine_kwargs.sglang.attention_backend quantization \
enable_rollout_routing_replay
 disaggregation.enable""",
    "actor_rollout_ref.rollout.val_kwargs": SAMPLING,
    "actor_rollout_ref.model": """path use_remove_padding use_fused_kernels lora.rank lora.alpha \
mtp.enable
 trust_remote_code""",
    "critic": f"enable cliprange_value {PPO}",
    "reward": """num_workers custom_reward_function.path custom_reward_function.name \
reward_manager.source
 reward_manager.name reward_model.enable reward_model.enable_resource_pool reward_model.model_path
 reward_model.rollout.name reward_kwargs.overlong_buffer_cfg.enable reward_kwargs.max_resp_len \
sandbox_fusion.url
 sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb""",
    "algorithm": """adv_estimator gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty \
kl_ctrl.type
 kl_ctrl.kl_coef kl_ctrl.target_kl kl_ctrl.horizon filter_groups.enable filter_groups.metric
 rollout_correction.rollout_is rollout_correction.rollout_is_threshold rollout_correction.rollout_rs
 rollout_correction.rollout_rs_threshold rollout_correction.rollout_is_batch_normalize
 rollout_correction.bypass_mode rollout_correction.loss_type gdpo_reward_keys gdpo_reward_weights \
use_pf_ppo
 pf_ppo.reweight_method pf_ppo.weight_pow""",
    "trainer": """total_epochs total_training_steps nnodes n_gpus_per_node save_freq test_freq \
val_before_train
 resume_mode default_local_dir balance_batch critic_warmup logger rollout_data_dir \
validation_data_dir
 max_actor_ckpt_to_keep use_v1 v1.trainer_mode v1.sampler.max_off_policy_threshold
 v1.sampler.max_off_policy_strategy v1.separate_async.num_warmup_batches project_name \
experiment_name""",
    "async_training": """staleness_threshold trigger_parameter_sync_step require_batches \
partial_rollout
 use_rollout_log_probs compute_prox_log_prob checkpoint_engine.enable""",
    "global_profiler": "tool steps save_path",
    "skip": "enable dump_dir",
    "ray_kwargs": "ray_init.num_cpus timeline_json_file",
    "transfer_queue": "enable",
    "distillation": "enabled teacher_model.model_path",
}
KNOWN = [f"{block}.{name}" for block, names in BLOCKS.items() for name in names.split()]


@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_no_key_that_users_know_is_unknown(estimator: str) -> None:
    """Each alone is mapped, switched off, or listed with its own reason."""
    written = WrittenSettings()
    for key in KNOWN:
        written.add(VerlSetting(key, None, "run.yaml:1"))
    for key, value in (("algorithm.adv_estimator", estimator), ("trainer.total_training_steps", 3)):
        written.settings[key] = VerlSetting(key, value, "run.yaml:1")
    for key in KNOWN:
        if (
            key.partition(".")[0] not in ("data", "algorithm", "trainer")
            and written.settings[key].value is None
        ):
            written.settings[key] = VerlSetting(key, "something", "run.yaml:1")
    result = translate_verl_config(written, "run.yaml", UserFacts(), {})
    unknown = [one.name for one in result.untranslated if one.reason.startswith("unknown")]
    assert not unknown
    assert all(one.reason for one in result.untranslated) and len(result.untranslated) > 40


ODD = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        -5,
        2.5,
        10**20,
        float("nan"),
        float("inf"),
        [],
        [1, "a"],
        {},
        [[]],
    ),
    *("x", "64", "1e-3", "a\nb: #c", "\x07", "???", "${x}", "${oc.select:a,[1}"),
)


@pytest.mark.parametrize("seed", range(12))
def test_odd_values_are_told_and_end_nothing(seed: int) -> None:
    rng = random.Random(seed)
    written = WrittenSettings()
    for key in rng.sample(KNOWN, (1, 5, 20, 80)[seed % 4]):
        written.add(VerlSetting(key, rng.choice(ODD), "run.yaml:1"))
    result = translate_verl_config(written, "run.yaml", UserFacts(100, 100), {})
    assert isinstance(parse_yaml(result.yaml_text, "result", 0), MappingNode)
    assert not any("Traceback" in problem for problem in result.problems)


def test_keys_have_an_entry_a_rule_or_the_same_name() -> None:
    """What is in neither is dealt with by a rule, which the other test runs."""
    assert len(KNOWN) > 230 and len(set(KNOWN)) == len(KNOWN)
    same = [key for key in KNOWN if normalize_key(key) in list_leaf_keys(RunConfig)]
    listed = [key for key in KNOWN if find_verl_key(normalize_key(key)) is not None]
    assert len({*same, *listed}) > 200


def test_a_switch_is_of_its_own_section_and_every_reason_says_something() -> None:
    for entry in VERL_NAMES:
        assert entry.note or entry.target, entry
        if entry.switch_key:
            assert entry.switch_key.split(".")[0] == entry.name.split(".")[0], entry


def test_the_critic_has_the_hints_of_the_actor() -> None:
    assert suggest_setting("critic.megatron.override_ddp_config.overlap_grad_reduce").text == (
        "Here it is critic.megatron.overlap_grad_reduce."
    )
    assert "rollout.colocated" in suggest_setting("critic.megatron.param_offload").text
