"""Configurations of verl as its users have them:
a printed PPO job, and a script that starts GRPO.
"""

PPO_YAML = """
hydra: {run: {dir: outputs}}
defaults: [model_engine: megatron, _self_]
actor_rollout_ref:
  hybrid_engine: true
  nccl_timeout: 600
  model:
    _target_: verl.workers.config.HFModelConfig
    path: /models/Qwen2.5-7B
    tokenizer_path: null
    trust_remote_code: false
    custom_chat_template: null
    external_lib: null
    override_config: {model_config: {}, moe_config: {freeze_moe_router: false}}
    enable_gradient_checkpointing: true
    use_remove_padding: true
    use_fused_kernels: false
    fused_kernel_options: {impl_backend: torch}
    lora: {type: lora, merge: false, rank: 0, alpha: 32, dropout: 0.0, target_modules: \
[linear_qkv, linear_proj]}
    mtp: {enable: false, mtp_loss_scaling_factor: 0.1, num_speculative_tokens: 1}
  actor:
    strategy: megatron
    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
    ppo_mini_batch_size: 64
    ppo_micro_batch_size: null
    ppo_micro_batch_size_per_gpu: null
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 12288
    clip_ratio: 0.2
    clip_ratio_low: 0.15
    clip_ratio_high: 0.28
    clip_ratio_c: 5.0
    tau_pos: 1.0
    tau_neg: 1.05
    policy_loss: {loss_mode: vanilla, clip_cov_ratio: 0.0002, clip_cov_lb: 1.0, clip_cov_ub: 5.0, \
ppo_kl_coef: 0.1}
    loss_agg_mode: seq-mean-token-mean
    loss_scale_factor: null
    entropy_coeff: 0.001
    use_kl_loss: false
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    ppo_epochs: 2
    shuffle: true
    data_loader_seed: 42
    use_torch_compile: true
    checkpoint:
      {save_contents: [model, optimizer, extra, hf_model], load_contents: "${.save_contents}", \
async_save: true}
    router_replay: {mode: disabled, record_file: null, replay_file: null}
    profiler: {tool: null, enable: false, tool_config: {npu: {level: level0, analysis: true}}}
    optim:
      _target_: verl.workers.config.McoreOptimizerConfig
      optimizer: adam
      lr: 2.0e-06
      total_training_steps: -1
      lr_warmup_steps: -1
      lr_warmup_steps_ratio: 0.05
      lr_warmup_init: 0.0
      lr_decay_steps: null
      lr_decay_style: cosine
      min_lr: 2.0e-07
      weight_decay: 0.1
      weight_decay_incr_style: constant
      lr_wsd_decay_style: exponential
      lr_wsd_decay_steps: null
      betas: [0.9, 0.98]
      clip_grad: 0.5
      override_optimizer_config: {}
    megatron:
      param_offload: true
      grad_offload: true
      optimizer_offload: true
      tensor_model_parallel_size: 2
      pipeline_model_parallel_size: 2
      virtual_pipeline_model_parallel_size: null
      context_parallel_size: 1
      expert_model_parallel_size: 1
      expert_tensor_parallel_size: null
      sequence_parallel: true
      use_distributed_optimizer: true
      use_dist_checkpointing: false
      dist_checkpointing_path: null
      seed: 1234
      override_ddp_config: {overlap_grad_reduce: true}
      override_transformer_config:
        recompute_granularity: selective
        recompute_modules: [core_attn, mlp]
        recompute_method: null
        recompute_num_layers: null
        attention_backend: flash
      override_mcore_model_config: {}
      use_mbridge: true
      vanilla_mbridge: true
      use_remove_padding: true
      dtype: bfloat16
  ref:
    strategy: megatron
    log_prob_use_dynamic_bsz: ${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}
    log_prob_max_token_len_per_gpu: 24576
    megatron:
      param_offload: true
      tensor_model_parallel_size: \
${oc.select:actor_rollout_ref.actor.megatron.tensor_model_parallel_size,1}
      pipeline_model_parallel_size: \
${oc.select:actor_rollout_ref.actor.megatron.pipeline_model_parallel_size,1}
      override_transformer_config: \
${oc.select:actor_rollout_ref.actor.megatron.override_transformer_config,{}}
  rollout:
    name: sglang
    mode: async
    temperature: 0.9
    top_k: -1
    top_p: 1
    n: 2
    prompt_length: ${oc.select:data.max_prompt_length,512}
    response_length: ${oc.select:data.max_response_length,512}
    dtype: bfloat16
    gpu_memory_utilization: 0.6
    ignore_eos: false
    enforce_eager: true
    free_cache_engine: true
    tensor_model_parallel_size: 4
    data_parallel_size: 1
    pipeline_model_parallel_size: 1
    load_format: dummy
    do_sample: true
    log_prob_use_dynamic_bsz: true
    log_prob_max_token_len_per_gpu: 12288
    calculate_log_probs: true
    engine_kwargs: {vllm: {}, sglang: {attention_backend: fa3}}
    val_kwargs: {top_k: -1, top_p: 0.7, temperature: 0.6, n: 4, do_sample: true}
    multi_turn: {enable: false, max_parallel_calls: 1, format: hermes}
    agent: {num_workers: 8, default_agent_loop: single_turn_agent, custom_async_server: {path: \
null, name: null}}
    checkpoint_engine: {backend: naive, update_weights_bucket_megabytes: 2048, engine_kwargs: {}}
    prometheus: {enable: false, port: 9090}
    trace: {backend: null, token2text: false}
    quantization: null
    layer_name_map: {qkv_layer_name: qkv, gate_proj_layer_name: gate_up}
data:
  tokenizer: null
  train_files: /data/train.parquet
  val_files: [/data/a.parquet, /data/b.parquet]
  train_max_samples: -1
  prompt_key: prompt
  reward_fn_key: data_source
  max_prompt_length: 1024
  max_response_length: 3072
  train_batch_size: 256
  gen_batch_size: ${data.train_batch_size}
  val_batch_size: null
  return_raw_chat: true
  shuffle: true
  seed: 7
  filter_overlong_prompts: true
  truncation: left
  image_key: images
  custom_cls: {path: null, name: null}
  sampler: {class_path: null, class_name: null}
  apply_chat_template_kwargs: {enable_thinking: false}
critic:
  enable: null
  strategy: megatron
  rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}
  model: {path: /models/critic, tokenizer_path: "${oc.select:actor_rollout_ref.model.path,null}", \
external_lib: null}
  optim:
    {lr: 1.0e-05, lr_warmup_steps: 4, lr_decay_style: constant, weight_decay: 0.01, betas: [0.9, \
0.999], clip_grad: 1.0}
  megatron: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: \
true, seed: 1234}
  ppo_mini_batch_size: 128
  use_dynamic_bsz: true
  ppo_max_token_len_per_gpu: 32768
  forward_max_token_len_per_gpu: ${.ppo_max_token_len_per_gpu}
  ppo_epochs: 1
  shuffle: true
  cliprange_value: 0.2
  loss_agg_mode: token-mean
reward_model:
  {enable: false, reward_manager: naive, model: {path: /models/rm}, sandbox_fusion: {url: null, \
max_concurrent: 64}}
custom_reward_function: {path: rewards/score.py, name: compute, reward_kwargs: {strict: true}}
algorithm:
  adv_estimator: gae
  gamma: 0.99
  lam: 0.95
  norm_adv_by_std_in_grpo: true
  use_kl_in_reward: true
  kl_penalty: low_var_kl
  kl_ctrl: {type: adaptive, kl_coef: 0.02, horizon: 20000, target_kl: 0.05}
  use_pf_ppo: false
  pf_ppo: {reweight_method: pow, weight_pow: 2.0}
  rollout_correction: {rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, bypass_mode: \
false}
trainer:
  balance_batch: true
  total_epochs: 30
  total_training_steps: 200
  project_name: math
  experiment_name: ppo_7b
  logger: [console, wandb, clearml]
  nnodes: 1
  n_gpus_per_node: 8
  save_freq: 20
  test_freq: -1
  val_before_train: false
  critic_warmup: 5
  resume_mode: disable
  default_local_dir: /ckpt/${trainer.project_name}/${trainer.experiment_name}
  max_actor_ckpt_to_keep: 2
  max_critic_ckpt_to_keep: 3
  rollout_data_dir: null
  device: cuda
global_profiler: {tool: null, save_path: outputs/profile, global_tool_config: {nsys: {discrete: \
false}}}
transfer_queue: {enable: false}
ray_kwargs: {ray_init: {num_cpus: null}, timeline_json_file: null}
"""

PPO_BY_HAND = {
    "model.path": "/models/Qwen2.5-7B",
    "model.dtype": "bfloat16",
    "data.train_files": ["/data/train.parquet"],
    "data.val_files": ["/data/a.parquet", "/data/b.parquet"],
    "data.prompt_key": "prompt",
    "data.label_key": "reward_model.ground_truth",
    "data.apply_chat_template": True,
    "data.add_special_tokens": False,
    "data.apply_chat_template_kwargs.enable_thinking": False,
    "data.max_prompt_length": 1024,
    "data.max_response_length": 3072,
    "data.filter_overlong_prompts": True,
    "data.train_batch_size": 256,
    "data.shuffle": True,
    "data.seed": 7,
    "actor.megatron.tensor_model_parallel_size": 2,
    "actor.megatron.pipeline_model_parallel_size": 2,
    "actor.megatron.context_parallel_size": 1,
    "actor.megatron.expert_model_parallel_size": 1,
    "actor.megatron.sequence_parallel": True,
    "actor.megatron.use_distributed_optimizer": True,
    "actor.megatron.overlap_grad_reduce": True,
    "actor.megatron.recompute_granularity": "selective",
    "actor.megatron.recompute_modules": ["core_attn", "mlp"],
    "actor.optim.lr": 2e-6,
    # 0.05 x 200 = 10 steps of the loop; each has 256 / 64 x 2 = 8 optimizer steps
    "actor.optim.lr_warmup_steps": 80,
    "actor.optim.lr_decay_style": "cosine",
    "actor.optim.min_lr": 2e-7,
    "actor.optim.weight_decay": 0.1,
    "actor.optim.betas": [0.9, 0.98],
    "actor.optim.clip_grad": 0.5,
    "actor.policy_loss.loss_mode": "ppo_clip",
    "actor.policy_loss.params.clip_ratio_low": 0.15,
    "actor.policy_loss.params.clip_ratio_high": 0.28,
    "actor.policy_loss.params.clip_ratio_c": 5.0,
    "actor.mini_batch_size": 128,  # 64 prompts x 2
    "actor.ppo_epochs": 2,
    "actor.ppo_max_token_len_per_gpu": 12288,
    "actor.loss_agg_mode": "seq-mean-token-mean",
    "actor.entropy_coeff": 0.001,
    "actor.use_kl_loss": False,
    "actor.shuffle": True,
    "critic.path": "/models/critic",
    "critic.optim.lr": 1e-5,
    # 4 steps of the loop, each with 256 / 128 x 1 = 2 optimizer steps
    "critic.optim.lr_warmup_steps": 8,
    "critic.optim.lr_decay_style": "constant",
    "critic.optim.weight_decay": 0.01,
    "critic.optim.betas": [0.9, 0.999],
    "critic.optim.clip_grad": 1.0,
    "critic.mini_batch_size": 256,  # 128 prompts x 2
    "critic.ppo_epochs": 1,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.cliprange_value": 0.2,
    "critic.loss_agg_mode": "token-mean",
    "reference.param_offload": True,
    "reference.max_token_len_per_gpu": 24576,
    "rollout.engine": "sglang",
    "rollout.num_engines": 2,  # 8 devices, 4 an engine
    "rollout.colocated": True,
    "rollout.dtype": "bfloat16",
    "rollout.n": 2,
    "rollout.temperature": 0.9,
    "rollout.val_kwargs.temperature": 0.6,
    "rollout.val_kwargs.n": 4,
    "rollout.val_kwargs.top_p": 0.7,
    "rollout.update_weights_bucket_megabytes": 2048,
    "rollout.sglang.args.tp_size": 4,
    "rollout.sglang.args.mem_fraction_static": 0.6,
    "rollout.sglang.args.disable_cuda_graph": True,
    "rollout.sglang.args.attention_backend": "fa3",
    "reward.name": "function",
    "reward.params.path": "rewards/score.py:compute",
    "reward.params.kwargs.strict": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.params.gamma": 0.99,
    "algorithm.params.lam": 0.95,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_penalty": "k3",
    "algorithm.kl_ctrl.type": "adaptive",
    "algorithm.kl_ctrl.kl_coef": 0.02,
    "algorithm.kl_ctrl.target_kl": 40.0,  # 0.05 nats a token x 800 tokens
    "algorithm.kl_ctrl.horizon": 20000,
    "trainer.total_training_steps": 200,
    "trainer.project_name": "math",
    "trainer.experiment_name": "ppo_7b",
    "trainer.default_local_dir": "/ckpt/math",
    "trainer.logger": ["console", "wandb", "jsonl"],
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": 20,
    "trainer.test_freq": 0,
    "trainer.val_before_train": False,
    "trainer.critic_warmup": 5,
    "trainer.resume_mode": "disable",
    "trainer.max_ckpt_to_keep": 3,
    "trainer.save_hf": True,
    "trainer.async_save": True,
    "trainer.seed": 1234,
    "trainer.device": "cuda",
}

GRPO_SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
export CUDA_DEVICE_MAX_CONNECTIONS=1 # for megatron; "it's" needed
SCRIPT_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[ -f "${SCRIPT_DIR}/env.sh" ] && source "${SCRIPT_DIR}/env.sh"

adv_estimator=grpo
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
gen_tp=4
train_tp=${TP:-2}
NNODES=${NNODES:-1}
DATA_HOME=${HOME}/data
train_files="['$DATA_HOME/gsm8k.parquet', '$DATA_HOME/math.parquet']"
exp_name="grpo-tp${train_tp}"

DATA=(
    data.train_files="$train_files"   # both (of them)
    data.val_files=$DATA_HOME/test.parquet
    data.train_batch_size=512
    data.max_prompt_length=${max_prompt_length}
    data.max_response_length=${max_response_length}
    data.truncation='error'
)

python3 -m verl.trainer.main_ppo --config-path=config \
    --config-name='ppo_megatron_trainer.yaml'\
    algorithm.adv_estimator=${adv_estimator} \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
    actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${train_tp} \
    actor_rollout_ref.actor.megatron.context_parallel_size=2 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl+ \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=${gen_tp} \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_method=uniform \
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_num_layers=1 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=1024 \
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5 \
    +reward_model.reward_kwargs.max_resp_len=${max_response_length} \
    trainer.logger=['console','wandb'] \
    trainer.experiment_name="${exp_name}" \
    trainer.nnodes="${NNODES}" \
    trainer.total_epochs=15 $@
"""

GRPO_BY_HAND = {
    "model.path": "Qwen/Qwen2.5-7B-Instruct",
    "data.train_files": ["/home/me/data/gsm8k.parquet", "/home/me/data/math.parquet"],
    "data.val_files": ["/home/me/data/test.parquet"],
    "data.label_key": "reward_model.ground_truth",
    "data.apply_chat_template": True,
    "data.add_special_tokens": False,
    "data.max_prompt_length": 2048,
    "data.max_response_length": 8192,
    "data.truncation": "error",
    "reward.params.wrong_score": -1.0,
    "data.train_batch_size": 512,
    "actor.megatron.tensor_model_parallel_size": 2,
    "actor.megatron.pipeline_model_parallel_size": 2,
    "actor.megatron.context_parallel_size": 2,
    "actor.megatron.sequence_parallel": True,  # verl's default
    "actor.megatron.use_distributed_optimizer": True,  # verl's default
    "actor.megatron.recompute_granularity": "full",
    "actor.megatron.recompute_method": "uniform",
    "actor.megatron.recompute_num_layers": 1,
    "actor.optim.lr": 1e-6,
    "actor.optim.lr_warmup_steps": 40,  # 10 steps of the loop, each with 512 / 128 optimizer steps
    "actor.optim.betas": [0.9, 0.999],  # verl's default
    "actor.policy_loss.params.clip_ratio_high": 0.28,
    "actor.mini_batch_size": 640,  # 128 prompts x 5
    "actor.ppo_max_token_len_per_gpu": 10240,  # 2 samples x 10240 tokens / context parallel 2
    "actor.use_kl_loss": True,
    "actor.kl_loss_coef": 0.002,
    "actor.kl_loss_type": "k3+",
    "actor.shuffle": False,  # verl's default
    "reference.max_token_len_per_gpu": 20480,  # 4 samples x 10240 / 2
    "reference.param_offload": True,  # colocated needs it
    "rollout.engine": "sglang",
    "rollout.num_engines": 2,
    "rollout.colocated": True,
    "rollout.n": 5,
    "rollout.sglang.args.tp_size": 4,
    "reward.terms": [
        {"name": "overlong", "weight": 0.5, "params": {"max_len": 8192, "buffer": 1024}}
    ],
    "algorithm.adv_estimator": "grpo",
    "trainer.experiment_name": "grpo-tp2",
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 210,  # 7473 // 512 = 14 steps an epoch, x 15
    "trainer.test_freq": 0,  # verl's default: never
    "trainer.logger": ["console", "wandb", "jsonl"],
    "reward.name": "math_verify",  # told
}
