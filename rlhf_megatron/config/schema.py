"""The typed sections of a run. Field defaults stand here and nowhere else; call sites never supply a fallback.

Field names are the field's own where one exists (see docs/config.md). Parameters of registered parts (estimators,
losses, rewards, tasks) are free mappings here and are checked against the part's own dataclass before anything starts.
"""

# ruff: noqa: RUF009  (doc() makes a field)
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


def doc(text: str, default: Any = ..., factory: Any = None) -> Any:
    """A dataclass field with a one-line description (shown by `config show` and in the reference)."""
    if factory is not None:
        return field(default_factory=factory, metadata={"doc": text})
    if default is ...:
        return field(metadata={"doc": text})
    return field(default=default, metadata={"doc": text})


@dataclass(frozen=True)
class ModelConfig:
    path: str = doc("directory with config.json, tokenizer.json and *.safetensors (Hugging Face layout)", "")
    tokenizer_path: str | None = doc("directory of tokenizer.json; null: model.path", None)
    dtype: Literal["float32", "bfloat16"] = doc("type of parameters and activations in the trainer", "bfloat16")
    init_seed: int | None = doc("null: load weights; a number: random weights from config.json with this seed", None)


@dataclass(frozen=True)
class FewShotConfig:
    num_shots: int = doc("solved training rows in front of each prompt; they are neither trained on nor held out", 0)
    template: str = doc("of a solved row; {prompt} and {label} stand in it", "{prompt}{label}\n")
    seed: int = doc("of the choice of rows", 0)


@dataclass(frozen=True)
class SourceConfig:
    """One of several data sources. What is null is as in the section `data`."""

    name: str = doc("of the source, in metrics and tables")
    weight: float = doc("share of the training prompts, relative to the other sources", 1.0)
    task: str | None = doc("name of a registered generated task; null: files", None)
    task_params: dict[str, Any] = doc("parameters of the task, see its dataclass", factory=dict)
    train_files: tuple[str, ...] = doc("JSONL or parquet files with training prompts", ())
    val_files: tuple[str, ...] = doc("JSONL or parquet files with held-out prompts", ())
    prompt_template: str | None = doc("around the text of each prompt; {prompt} stands in it", None)
    few_shot: FewShotConfig | None = doc("solved rows in front of each prompt", None)


@dataclass(frozen=True)
class DataConfig:
    task: str | None = doc("name of a registered generated task (addition, few_shot_addition); null: files", None)
    task_params: dict[str, Any] = doc("parameters of the task, see its dataclass", factory=dict)
    train_files: tuple[str, ...] = doc("JSONL or parquet files with training prompts", ())
    val_files: tuple[str, ...] = doc("JSONL or parquet files with held-out prompts", ())
    sources: tuple[SourceConfig, ...] = doc("several weighted sources, in place of task or files", ())
    prompt_key: str = doc("key of the prompt in a row: text, or a list of chat messages", "prompt")
    label_key: str = doc("key of the reference answer in a row", "answer")
    prompt_template: str = doc("around the text of each prompt; {prompt} stands in it", "{prompt}")
    few_shot: FewShotConfig = doc("solved rows in front of each prompt", factory=FewShotConfig)
    apply_chat_template: bool = doc("make a prompt a chat in the tokenizer's template, ready for the answer", False)
    system_prompt: str | None = doc("first message of each chat; null: what the template does", None)
    apply_chat_template_kwargs: dict[str, Any] = doc("further variables of the chat template", factory=dict)
    max_prompt_length: int = doc("longest prompt, tokens", 512)
    max_response_length: int = doc("longest response, tokens", 512)
    filter_overlong_prompts: bool = doc("true: drop prompts over max_prompt_length; false: see truncation", False)
    truncation: Literal["error", "left", "right", "middle"] = doc(
        "prompts over max_prompt_length: refuse, or cut tokens off that side", "error"
    )
    skip_bad_rows: bool = doc("true: count and skip malformed rows; false: they are an error", False)
    train_batch_size: int = doc("prompts a step", 256)
    shuffle: bool = doc("shuffle the prompts anew in each epoch", True)
    seed: int | None = doc("seed of the order of prompts; null: trainer.seed", None)


@dataclass(frozen=True)
class MegatronConfig:
    tensor_model_parallel_size: int = doc("ranks that split each layer", 1)
    pipeline_model_parallel_size: int = doc("ranks that split the stack of layers", 1)
    virtual_pipeline_model_parallel_size: int | None = doc("model chunks a pipeline rank has; null: one", None)
    context_parallel_size: int = doc("ranks that split each sample", 1)
    sequence_parallel: bool = doc("tensor-parallel ranks also split norms and residuals, by token", False)
    use_distributed_optimizer: bool = doc("split optimizer state over replicas and context-parallel ranks", False)
    overlap_grad_reduce: bool = doc("reduce gradients while the backward pass runs", False)
    overlap_param_gather: bool = doc("gather updated parameters while the next forward pass runs", False)
    recompute_granularity: Literal["full", "selective"] | None = doc(
        "full: keep only layer inputs for the backward pass; selective: recompute recompute_modules; null: keep all",
        None,
    )
    recompute_method: Literal["uniform", "block"] | None = doc(
        "of full recompute: uniform groups of recompute_num_layers, or only the first recompute_num_layers", None
    )
    recompute_num_layers: int | None = doc("of full recompute, layers (see recompute_method)", None)
    recompute_modules: tuple[Literal["core_attn", "layernorm", "mlp"], ...] = doc(
        "of selective recompute: what is computed again", ("core_attn",)
    )
    transformer_impl: Literal["auto", "local", "transformer_engine"] = doc(
        "layers of a model: megatron-core's own, or Transformer Engine's (on a CPU: plain torch under its names);"
        " auto: Transformer Engine where it is installed and the device is a GPU",
        "auto",
    )
    gradient_accumulation_fusion: bool | None = doc(
        "linear layers add their weight gradients to the float32 buffers as they multiply; null: on a GPU, where"
        " Transformer Engine, Apex or torch 2.10 can",
        None,
    )


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adam"] = doc("AdamW", "adam")
    lr: float = doc("peak learning rate", 1e-6)
    lr_warmup_steps: int = doc("optimizer steps of linear warm-up", 0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = doc("after warm-up", "constant")
    lr_decay_steps: int | None = doc("optimizer steps until min_lr; null: all of the run", None)
    min_lr: float = doc("floor of the schedule", 0.0)
    weight_decay: float = doc("decoupled; norms and biases are exempt", 0.01)
    weight_decay_end: float | None = doc(
        "linear weight-decay schedule to this value over the run; null: constant", None
    )
    betas: tuple[float, float] = doc("Adam betas", (0.9, 0.95))
    eps: float = doc("Adam epsilon", 1e-8)
    clip_grad: float = doc("maximum global gradient norm; 0: off", 1.0)


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = doc("name of a registered policy loss", "ppo_clip")
    params: dict[str, Any] = doc("parameters of the loss, see its dataclass", factory=dict)


@dataclass(frozen=True)
class KernelsConfig:
    """Of the actor's and the reference's head, and of the actor's loss."""

    backend: Literal["auto", "reference", "chunked", "triton"] = doc(
        "log-probs and entropies from hidden states: plain torch that makes all logits, plain torch by tiles, or tiles"
        " with Triton kernels; auto: triton on a GPU that has it, else chunked",
        "auto",
    )
    stash_megabytes: int | None = doc(
        "MiB of logits that a micro-batch may keep as float16 for its backward pass instead of computing them again;"
        " null: 512 for a half-precision model, else 0",
        None,
    )
    num_self_checks: int = doc(
        "calls at the start of a run that compare the backend with the reference on some rows; 0: none", 2
    )
    fused_loss: bool = doc("loss, gradient and metrics of ppo_clip in one pass with an explicit gradient", True)


@dataclass(frozen=True)
class ActorConfig:
    megatron: MegatronConfig = doc("parallel layout of the actor's pool", factory=MegatronConfig)
    optim: OptimConfig = doc("optimizer and schedules", factory=OptimConfig)
    policy_loss: PolicyLossConfig = doc("policy loss", factory=PolicyLossConfig)
    mini_batch_size: int = doc("samples (prompts x rollout.n) an optimizer step, over all ranks", 1024)
    ppo_epochs: int = doc("passes over the samples of a step", 1)
    ppo_max_token_len_per_gpu: int = doc(
        "token budget of a micro-batch on one rank; context-parallel ranks pool theirs", 16384
    )
    loss_agg_mode: LossAggMode = doc("how token losses become one number; the denominator is global", "token-mean")
    loss_scale_factor: float | None = doc(
        "tokens, divisor of seq-mean-token-sum-norm; null: data.max_response_length", None
    )
    entropy_coeff: float = doc("weight of the entropy bonus", 0.0)
    use_kl_loss: bool = doc("add a KL term against the reference to the loss (needs the reference role)", False)
    kl_loss_coef: float = doc("weight of the KL term", 0.001)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = doc(
        "estimator of the KL term; with +: its value, and the gradient of k2", "k3"
    )
    shuffle: bool = doc("shuffle samples before they are cut into mini-batches", True)
    log_prob_chunk_size: int = doc("vocabulary columns that the head handles at a time", 8192)
    kernels: KernelsConfig = doc("how head and loss are computed", factory=KernelsConfig)


@dataclass(frozen=True)
class CriticConfig:
    """There is a critic where the advantage estimator needs values."""

    path: str | None = doc("Hugging Face directory that it starts from; null: the policy as RL starts", None)
    value_head_init_std: float = doc("of the value head's first weights, where path has none; 0: zeros", 0.0)
    num_ranks: int = doc("ranks of a pool of its own, the last of the job; 0: in the actor's pool and layout", 0)
    megatron: MegatronConfig = doc("parallel layout of its own pool (num_ranks > 0)", factory=MegatronConfig)
    optim: OptimConfig = doc("optimizer and schedules", factory=lambda: OptimConfig(lr=1e-5))
    mini_batch_size: int | None = doc("samples an optimizer step, over all ranks; null: the actor's", None)
    ppo_epochs: int | None = doc("passes over the samples of a step; null: the actor's", None)
    ppo_max_token_len_per_gpu: int | None = doc("token budget of a micro-batch on one rank; null: the actor's", None)
    cliprange_value: float = doc("values move at most this far from those before the update; 0: no clip", 0.5)
    loss_agg_mode: LossAggMode | None = doc("how token losses become one number; null: the actor's", None)


@dataclass(frozen=True)
class ReferenceConfig:
    path: str | None = doc("weights of the reference; null: model.path as it was before training", None)
    param_offload: bool = doc("keep its weights in host memory between uses", False)
    max_token_len_per_gpu: int | None = doc("token budget of a micro-batch; null: the actor's", None)


@dataclass(frozen=True)
class SamplingConfig:
    temperature: float = doc("0: greedy", 1.0)
    n: int = doc("samples a prompt", 1)
    top_p: float = doc("draw among the likeliest tokens that hold this share of the probability; 1: off", 1.0)
    top_k: int = doc("draw among so many of the likeliest tokens; -1: off", -1)
    min_p: float = doc("leave out tokens less likely than this share of the likeliest one; 0: off", 0.0)


@dataclass(frozen=True)
class SGLangConfig:
    python: str | None = doc("interpreter of the environment that has sglang; null: this one", None)
    args: dict[str, Any] = doc("SGLang server arguments, without the leading dashes", factory=dict)
    env: dict[str, str] = doc("environment of the server processes", factory=dict)
    api_key_file: str | None = doc("of running servers (rollout.endpoints): file with their --api-key", None)
    admin_api_key_file: str | None = doc("the same for --admin-api-key; null: as api_key_file", None)


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["local", "sglang"] = doc("bundled server, or stock SGLang", "sglang")
    num_engines: int = doc("engine servers to start", 1)
    endpoints: tuple[str, ...] = doc("URLs of running SGLang servers to use instead of starting some", ())
    router: Literal["balancer", "sglang"] = doc(
        "who spreads requests over engines: the run itself, or sglang-router", "balancer"
    )
    colocated: bool = doc("engines and trainer take turns with the same devices", False)
    dtype: Literal["float32", "bfloat16"] | None = doc("type of the engine's weights; null: model.dtype", None)
    n: int = doc("samples a prompt (the group size)", 8)
    temperature: float = doc("sampling temperature; the trainer's log-probs use the same", 1.0)
    top_p: float = doc("must be 1: the trainer's log-probs are those of the full distribution", 1.0)
    top_k: int = doc("must be -1 (off), for the same reason", -1)
    min_p: float = doc("must be 0 (off), for the same reason", 0.0)
    stop: tuple[str, ...] = doc("strings of one token each that end a response, beside the end-of-sequence token", ())
    max_num_seqs: int = doc("sequences a local engine decodes at once", 256)
    max_num_batched_tokens: int = doc("tokens of key-value cache that a local engine may hold", 131072)
    val_kwargs: SamplingConfig = doc("sampling for evaluation", factory=lambda: SamplingConfig(temperature=0.0))
    request_timeout_s: float = doc("deadline of one generate request, seconds", 600.0)
    request_retries: int = doc("times a failed request is sent again, to another engine where there is one", 2)
    startup_timeout_s: float = doc("deadline for a server to become healthy, seconds", 600.0)
    health_interval_s: float = doc("seconds between health checks of an engine while it generates", 10.0)
    health_timeout_s: float = doc("an engine that does not answer a health check for so long is killed, seconds", 30.0)
    max_engine_restarts: int = doc("engines started again in a run, counted over all of them", 3)
    update_weights_bucket_megabytes: int = doc("size of one of the two weight-sync buffers a sender has, MiB", 512)
    weight_transport: Literal["tensor", "process_group", "disk"] = doc(
        "how weights get to the engines: memory of the same host, broadcasts over the network, or files", "tensor"
    )
    transfer_dir: str | None = doc(
        "directory of weight buckets; null: /dev/shm where it is large enough, under disk: the run directory", None
    )
    sglang: SGLangConfig = doc("used when engine is sglang", factory=SGLangConfig)


@dataclass(frozen=True)
class RewardTermConfig:
    name: str = doc("name of a registered reward")
    weight: float = doc("its score is multiplied by this", 1.0)
    params: dict[str, Any] = doc("parameters of the reward, see its dataclass", factory=dict)


@dataclass(frozen=True)
class RewardConfig:
    name: str = doc("name of a registered reward", "exact_match")
    params: dict[str, Any] = doc("parameters of the reward, see its dataclass", factory=dict)
    by_source: dict[str, RewardTermConfig] = doc("data source -> the reward of its samples instead", factory=dict)
    terms: tuple[RewardTermConfig, ...] = doc("further rewards, added to that one for every sample", ())
    num_workers: int = doc("processes for rewards that run in processes of their own, which can be killed", 32)
    timeout_s: float = doc("limit of one sample in such a process, seconds; waiting for a CPU does not count", 2.0)
    max_error_rate: float = doc(
        "stop when more than this share of a step's rewards failed, the policy not to blame", 0.1
    )


@dataclass(frozen=True)
class KLControlConfig:
    type: Literal["fixed", "adaptive"] = doc("adaptive: the coefficient follows target_kl", "fixed")
    kl_coef: float = doc("weight of the KL term, at first", 0.001)
    target_kl: float = doc("of adaptive: nats a response", 0.1)
    horizon: int = doc("of adaptive: samples over which the coefficient moves", 10000)


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance weights and rejection for tokens that another policy sampled: r = trainer / engine probability.

    What is null is as in the preset.
    """

    preset: str = doc("name of a combination of the settings below; disabled: metrics only", "disabled")
    mode: Literal["decoupled", "bypass"] | None = doc(
        "decoupled: the trainer's own log-probs are the old policy; bypass: the engine's are, and r follows the policy",
        None,
    )
    loss_type: Literal["ppo_clip", "reinforce"] | None = doc(
        "of bypass: what actor.policy_loss.loss_mode must be", None
    )
    rollout_is: Literal["token", "sequence"] | None = doc("importance weights of tokens or of whole sequences", None)
    rollout_is_threshold: str | None = doc(
        "one number: weights are cut there; LOW_HIGH: weights outside are 0 (IcePop)", None
    )
    rollout_is_batch_normalize: bool | None = doc("divide the weights by their mean over the step", None)
    rollout_rs: tuple[str, ...] | None = doc(
        "rejection filters, all must pass: token_k1, token_k2, token_k3, seq_sum_k1 .. k3, seq_mean_k1 .. k3,"
        " seq_max_k2, seq_max_k3",
        None,
    )
    rollout_rs_threshold: tuple[str, ...] | None = doc(
        "one a filter: of k1 bounds of the ratio itself, LOW_HIGH (one number x: 1/x_x); of k2, k3 an upper bound", None
    )
    rollout_token_veto_threshold: float | None = doc("a token with r below it drops its sequence", None)


@dataclass(frozen=True)
class FilterGroupsConfig:
    enable: bool = doc("leave out groups whose samples all have the same metric, and generate others (DAPO)", False)
    metric: str = doc("reward, or the name of one of its parts; where a sample lacks that: its reward", "reward")
    max_num_gen_batches: int = doc("batches of data.train_batch_size prompts that a step may generate", 10)


@dataclass(frozen=True)
class PFPPOConfig:
    enable: bool = doc("draw the samples that train with replacement, by their reward (PF-PPO)", False)
    reweight_method: Literal["pow", "max_min", "max_random"] = doc("how rewards become chances", "pow")
    weight_pow: float = doc("of pow: exponent of |reward|", 2.0)


@dataclass(frozen=True)
class AlgorithmConfig:
    adv_estimator: str = doc("name of a registered advantage estimator", "grpo")
    params: dict[str, Any] = doc("parameters of the estimator, see its dataclass", factory=dict)
    use_kl_in_reward: bool = doc("subtract a KL term against the reference from each token's reward", False)
    kl_penalty: Literal["k1", "abs", "k2", "k3"] = doc("estimator of that term", "k1")
    kl_ctrl: KLControlConfig = doc("weight of that term", factory=KLControlConfig)
    rollout_correction: RolloutCorrectionConfig = doc("off-policy tokens", factory=RolloutCorrectionConfig)
    filter_groups: FilterGroupsConfig = doc("groups without signal", factory=FilterGroupsConfig)
    pf_ppo: PFPPOConfig = doc("resampling by reward", factory=PFPPOConfig)


@dataclass(frozen=True)
class WarmupConfig:
    max_steps: int = doc("supervised optimizer steps before the first RL step; 0: none", 0)
    batch_size: int = doc("samples an optimizer step, over all ranks", 64)
    stop_accuracy: float = doc("stop when sampled held-out accuracy reaches this", 1.0)
    test_freq: int = doc("steps between evaluations", 20)
    test_samples: int = doc("held-out items of these evaluations", 512)
    save_hf: bool = doc("write the warmed-up weights in Hugging Face layout under the run directory", False)
    optim: OptimConfig = doc("optimizer of the warm-up; RL starts with a fresh one", factory=OptimConfig)


@dataclass(frozen=True)
class CheckConfig:
    """Engine against trainer on the sampled tokens at step 0. A run stops past a threshold."""

    log_prob_max_abs_diff: float = doc("float32: bound on the largest |difference|, nats", 1e-4)
    log_prob_p50_abs_diff: float = doc("bfloat16: bound on the median |difference|, nats", 2e-2)
    log_prob_p99_abs_diff: float = doc("bfloat16: bound on the 99th percentile of |difference|, nats", 0.3)
    log_prob_mean_kl: float = doc("bfloat16: bound on the mean k3 estimate of KL(engine || trainer), nats", 1e-2)
    probe_prompts: int = doc("after a sync, for an engine without digests: prompts that engine and trainer score", 4)


@dataclass(frozen=True)
class TrainerConfig:
    experiment_name: str = doc("name of the run; its directory is default_local_dir/experiment_name", "run")
    project_name: str = doc("project of the run in Weights & Biases", "rlhf_megatron")
    default_local_dir: str = doc("parent of the run directory", "runs")
    runtime: Literal["inline", "torchrun", "ray"] = doc(
        "one process; one process a rank; or the same as actors of a Ray cluster", "torchrun"
    )
    nnodes: int = doc("machines", 1)
    n_gpus_per_node: int = doc("ranks (GPUs, or processes on a machine without) a machine", 8)
    device: Literal["auto", "cpu", "cuda"] = doc("auto: cuda where available", "auto")
    device_peak_tflops: float | None = doc(
        "dense bfloat16 peak of a device, TFLOP/s, that perf/mfu is a share of; null: of known devices by their name,"
        " and no perf/mfu on others",
        None,
    )
    seed: int = doc("seed of everything that is random", 1)
    total_training_steps: int = doc("steps of the loop", 100)
    critic_warmup: int = doc("first steps of the loop in which only the critic is updated", 0)
    val_before_train: bool = doc("evaluate before the first step", True)
    test_freq: int = doc("steps between evaluations; 0: only before and after", 10)
    test_samples: int | None = doc("held-out items of an evaluation between steps; null: all", None)
    save_hf: bool = doc("write the trained weights in Hugging Face layout at the end", False)
    save_freq: int = doc("steps between checkpoints; 0: none, and the run cannot be resumed", 0)
    async_save: bool = doc("write a checkpoint's files while the run goes on", True)
    max_ckpt_to_keep: int = doc("newest checkpoints that are kept; 0: all", 3)
    save_failure: Literal["continue", "stop"] = doc("after a checkpoint that could not be written", "continue")
    resume_mode: Literal["auto", "disable", "resume_path"] = doc(
        "auto: go on from the newest good checkpoint of the run directory, where there is one; disable: start anew;"
        " resume_path: start a new run directory from resume_from_path",
        "auto",
    )
    resume_from_path: str | None = doc("checkpoint directory of resume_mode resume_path", None)
    stop_grace_s: float = doc("after SIGTERM or SIGUSR1: time for the step at hand and a checkpoint, seconds", 60.0)
    deterministic: bool = doc(
        "repeat bit for bit, also over a resume on one layout: closed decoding batches, deterministic torch algorithms",
        False,
    )
    max_consecutive_skips: int = doc("stop after this many optimizer steps in a row with non-finite gradients", 3)
    capsules_kept: int = doc("steps with non-finite numbers whose weights and batch are kept for --replay", 1)
    desync_freq: int = doc("steps between comparisons of parameters that several ranks hold; 0: never", 10)
    logger: tuple[Literal["console", "jsonl", "tensorboard", "wandb"], ...] = doc(
        "where metrics go", ("console", "jsonl", "tensorboard")
    )
    samples_kept: int = doc("samples of a step in samples.jsonl: best, worst and random ones", 6)
    record: bool = doc("write every step's batches under the run directory, for --replay", False)
    stage_timeout_s: float = doc("deadline of one call to the hosts, and of a stage of a step, seconds", 1800.0)
    stage_timeouts_s: dict[str, float] = doc("stage of a step -> its own deadline, seconds", factory=dict)


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = doc("who works when: synchronous, streaming, one_step_off or asynchronous", "synchronous")
    params: dict[str, Any] = doc("parameters of the schedule, see its dataclass", factory=dict)


@dataclass(frozen=True)
class RayConfig:
    """Of trainer.runtime ray."""

    address: str | None = doc(
        "of a running cluster (HOST:PORT, or auto); null: the one that this job was submitted to, else one made here",
        None,
    )
    num_cpus_per_rank: float = doc("CPUs that Ray reserves for a rank", 1.0)
    num_cpus_per_engine: float = doc("CPUs that Ray reserves for an engine", 1.0)
    placement: Literal["pack", "spread"] = doc(
        "ranks of a pool on as few machines as there may be, or on as many", "pack"
    )
    start_timeout_s: float = doc("deadline for the cluster to have a place for every pool, seconds", 600.0)
    dashboard: bool = doc("of a cluster of this machine: start Ray's dashboard, on the loopback address", False)


@dataclass(frozen=True)
class RunConfig:
    """Everything that one run is made of."""

    model: ModelConfig = doc("the policy", factory=ModelConfig)
    data: DataConfig = doc("prompts", factory=DataConfig)
    actor: ActorConfig = doc("policy training", factory=ActorConfig)
    critic: CriticConfig = doc("value model, where the advantage estimator needs values", factory=CriticConfig)
    reference: ReferenceConfig = doc("frozen reference model", factory=ReferenceConfig)
    rollout: RolloutConfig = doc("generation", factory=RolloutConfig)
    reward: RewardConfig = doc("scoring", factory=RewardConfig)
    algorithm: AlgorithmConfig = doc("advantages", factory=AlgorithmConfig)
    warmup: WarmupConfig = doc("supervised steps before RL", factory=WarmupConfig)
    checks: CheckConfig = doc("stop thresholds", factory=CheckConfig)
    schedule: ScheduleConfig = doc("who works when", factory=ScheduleConfig)
    trainer: TrainerConfig = doc("the run", factory=TrainerConfig)
    ray: RayConfig = doc("the cluster, where trainer.runtime is ray", factory=RayConfig)
