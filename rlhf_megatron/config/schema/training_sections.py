"""The sections of the models that train or are trained against: the policy, its critic, its
reference, the warm-up, the supervised job.
"""

# ruff: noqa: RUF009  (doc() makes a field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_megatron.config.schema.setting_fields import (
    BELOW_ONE,
    COUNT,
    EPOCHS,
    FACTOR,
    FRACTION,
    MEBIBYTES,
    POSITIVE,
    PROCESSES,
    RANKS,
    SAMPLES,
    SEED,
    SHARE,
    TOKENS,
    WEIGHT,
    Interval,
    declare_setting,
)


@dataclass(frozen=True)
class ModelConfig:
    path: str = declare_setting(
        "directory with config.json, tokenizer.json and *.safetensors (Hugging Face layout)", ""
    )
    tokenizer_path: str | None = declare_setting(
        "directory of tokenizer.json; null: model.path", None
    )
    dtype: Literal["float32", "bfloat16"] = declare_setting(
        "type of parameters and activations in the trainer", "bfloat16"
    )
    init_seed: int | None = declare_setting(
        "null: load weights; a number: random weights from config.json with this seed", None, SEED
    )


@dataclass(frozen=True)
class MegatronConfig:
    tensor_model_parallel_size: int = declare_setting("ranks that split each layer", 1, RANKS)
    pipeline_model_parallel_size: int = declare_setting(
        "ranks that split the stack of layers", 1, RANKS
    )
    virtual_pipeline_model_parallel_size: int | None = declare_setting(
        "model chunks a pipeline rank has; null: one",
        None,
        Interval(2, 1000, "a chunk is a layer at least"),
    )
    context_parallel_size: int = declare_setting("ranks that split each sample", 1, RANKS)
    sequence_parallel: bool = declare_setting(
        "tensor-parallel ranks also split norms and residuals, by token", False
    )
    share_prompts: bool = declare_setting(
        "compute a prompt once for all its samples that are in one micro-batch", False
    )
    expert_model_parallel_size: int = declare_setting(
        "ranks that share the experts of a layer out", 1, COUNT
    )
    expert_tensor_parallel_size: int | None = declare_setting(
        "ranks that split each expert; null: tensor_model_parallel_size", None, COUNT
    )
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = declare_setting(
        (
            "how tokens reach the ranks of their experts: each to these, or all to all; flex: each"
            " to these, in DeepEP's kernels"
        ),
        "alltoall",
    )
    moe_grouped_gemm: bool = declare_setting(
        (
            "multiply all experts of a rank at once, not one after the other: in Transformer"
            " Engine's grouped layers, or with transformer_impl local by"
            " torch.nn.functional.grouped_mm, whose weight gradients go through autograd, whatever"
            " gradient_accumulation_fusion says"
        ),
        False,
    )
    moe_permute_fusion: bool = declare_setting(
        (
            "sort tokens by expert, and back, in kernels of Transformer Engine 2.1 or newer;"
            " false: in torch's"
        ),
        False,
    )
    moe_shared_expert_overlap: bool = declare_setting(
        "run shared experts, which every token meets, while tokens go to the others and come back",
        False,
    )
    moe_router_load_balancing_type: Literal["none", "seq_aux_loss", "global_aux_loss"] = (
        declare_setting(
            (
                "load-balancing loss of routers: of each sample, or of the whole mini-batch, which"
                " costs one more forward pass"
            ),
            "none",
        )
    )
    moe_aux_loss_coeff: float = declare_setting("weight of the load-balancing loss", 0.0, FACTOR)
    moe_z_loss_coeff: float | None = declare_setting(
        "weight of the routers' z loss; null: none", None, FACTOR
    )
    moe_router_bias_update_rate: float = declare_setting(
        (
            "how far an optimizer step moves each bias by which routers pick experts,"
            " towards even loads"
        ),
        0.0,
        BELOW_ONE,
    )
    num_layers_in_first_pipeline_stage: int | None = declare_setting(
        "layers of the first stage; null: as many as others", None, COUNT
    )
    num_layers_in_last_pipeline_stage: int | None = declare_setting(
        "layers of the last stage; null: as many as others", None, COUNT
    )
    pipeline_model_parallel_layout: str | None = declare_setting(
        (
            "layers of each model chunk in megatron-core's language, such as Et*3|t*4|t*3L; null:"
            " as the keys above say"
        ),
        None,
    )
    use_distributed_optimizer: bool | None = declare_setting(
        (
            "split optimizer state over replicas and context-parallel ranks; null: on GPUs, where"
            " there are several"
        ),
        None,
    )
    optimizer_cpu_offload: bool = declare_setting(
        (
            "keep moments and float32 parameters in host memory; a step brings them to the device"
            " piece by piece"
        ),
        False,
    )
    use_precision_aware_optimizer: bool = declare_setting(
        (
            "keep 16 bits of a float32 parameter beside the bfloat16 one, and moments in"
            " exp_avg_dtype and exp_avg_sq_dtype; steps are in float32"
        ),
        False,
    )
    exp_avg_dtype: Literal["float32", "bfloat16"] = declare_setting(
        "type of the first moment between steps", "float32"
    )
    exp_avg_sq_dtype: Literal["float32", "bfloat16"] = declare_setting(
        "type of the second moment between steps", "float32"
    )
    overlap_grad_reduce: bool = declare_setting(
        "reduce gradients while the backward pass runs", False
    )
    overlap_param_gather: bool = declare_setting(
        "gather updated parameters while the next forward pass runs", False
    )
    recompute_granularity: Literal["full", "selective", "none"] | None = declare_setting(
        (
            "full: keep only layer inputs for the backward pass; selective: recompute"
            " recompute_modules; none: keep all; null: full on GPUs that would be too"
            " small, else none"
        ),
        None,
    )
    recompute_method: Literal["uniform", "block"] | None = declare_setting(
        (
            "with full recompute: uniform groups of recompute_num_layers, or only the"
            " first recompute_num_layers"
        ),
        None,
    )
    recompute_num_layers: int | None = declare_setting(
        "layers of full recompute (see recompute_method)", None, COUNT
    )
    recompute_modules: tuple[
        Literal["core_attn", "layernorm", "mlp", "moe", "mla_up_proj"], ...
    ] = declare_setting("with selective recompute: the modules to compute again", ("core_attn",))
    transformer_impl: Literal["auto", "local", "transformer_engine"] = declare_setting(
        (
            "layers of a model: megatron-core's own, or Transformer Engine's (on a CPU: plain torch"
            " under its names); auto: Transformer Engine where it is installed and the"
            " device is a GPU"
        ),
        "auto",
    )
    gradient_accumulation_fusion: bool | None = declare_setting(
        (
            "linear layers add their weight gradients to the float32 buffers as they multiply;"
            " null: on a GPU, where Transformer Engine, Apex or torch 2.10 can"
        ),
        None,
    )


@dataclass(frozen=True)
class FSDPConfig:
    """Settings of a pool under the backend fsdp: every rank is a replica and holds a piece of
    each parameter.
    """

    attn_implementation: str = declare_setting(
        "attention of transformers: sdpa, eager, flash_attention_2, ...", "sdpa"
    )
    reshard_after_forward: bool = declare_setting(
        "let gathered layers go between forward and backward pass", True
    )
    activation_checkpointing: bool = declare_setting(
        "keep only layer inputs for the backward pass", False
    )
    cpu_offload: bool = declare_setting(
        "keep parameters, gradients and optimizer in host memory, a layer at a time on the GPU",
        False,
    )


@dataclass(frozen=True)
class LoRAConfig:
    """The actor trains small matrices beside its linear layers, whose own weights stay as they are
    (backend fsdp).
    """

    rank: int = declare_setting(
        "rank of the matrices; 0: all weights train", 0, Interval(0, 4096, "no layer is so wide")
    )
    alpha: float = declare_setting(
        "the matrices' product counts alpha / rank times", 16.0, POSITIVE
    )
    target_modules: tuple[str, ...] = declare_setting(
        (
            "last names of linear layers (q_proj, ...); all-linear: all of the decoder's layers, no"
            " routers or experts"
        ),
        ("all-linear",),
    )
    path: str | None = declare_setting(
        "directory of an adapter in peft's format to start from; null: a fresh one", None
    )


@dataclass(frozen=True)
class OptimConfig:
    optimizer: Literal["adam"] = declare_setting("AdamW", "adam")
    lr: float = declare_setting("peak learning rate", 1e-6, BELOW_ONE)
    lr_warmup_steps: int = declare_setting("optimizer steps of linear warm-up", 0)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = (
        declare_setting("shape of the decay after warm-up", "constant")
    )
    lr_decay_steps: int | None = declare_setting(
        "optimizer steps of warm-up and decay, min_lr from then on; null: all of the run",
        None,
        COUNT,
    )
    lr_decay_ends: Literal["after_last_step", "at_last_step"] = declare_setting(
        (
            "where linear and cosine reach min_lr: one step after the last one, which still trains,"
            " or at the last one (as runs did that began with an earlier version)"
        ),
        "after_last_step",
    )
    min_lr: float = declare_setting("floor of the schedule", 0.0, BELOW_ONE)
    weight_decay: float = declare_setting("decoupled; norms and biases are exempt", 0.01, FRACTION)
    weight_decay_end: float | None = declare_setting(
        "linear weight-decay schedule to this value over the run; null: constant", None, FRACTION
    )
    betas: tuple[float, float] = declare_setting("Adam betas", (0.9, 0.95), BELOW_ONE)
    eps: float = declare_setting("Adam epsilon", 1e-8, SHARE)
    clip_grad: float = declare_setting("maximum global gradient norm; 0: off", 1.0, FACTOR)


@dataclass(frozen=True)
class PolicyLossConfig:
    loss_mode: str = declare_setting("name of a registered policy loss", "ppo_clip")
    params: dict[str, Any] = declare_setting(
        "parameters of the loss, see its dataclass", factory=dict
    )


@dataclass(frozen=True)
class KernelsConfig:
    """Kernels of the actor's and the reference's head, and of the actor's loss."""

    backend: Literal["auto", "reference", "chunked", "triton"] = declare_setting(
        (
            "log-probs and entropies from hidden states: plain torch that makes all logits, plain"
            " torch by tiles, or tiles with Triton kernels; auto: triton on a GPU that has it,"
            " else chunked"
        ),
        "auto",
    )
    stash_megabytes: int | None = declare_setting(
        (
            "MiB of logits that a micro-batch may keep as float16 for its backward pass instead of"
            " computing them again; null: 512 for a half-precision model, else 0"
        ),
        None,
        Interval(0, MEBIBYTES.high, MEBIBYTES.high_reason),
    )
    num_self_checks: int = declare_setting(
        (
            "calls at the start of a run that compare the backend with the reference on some"
            " rows; 0: none"
        ),
        2,
    )
    fused_loss: bool = declare_setting(
        "ppo_clip in one Triton kernel, where there is a GPU; false: in plain torch", True
    )


@dataclass(frozen=True)
class TeacherTermConfig:
    """A divergence from the teacher at reference.path, at the tokens that the policy
    sampled. docs/sft.md.
    """

    loss_mode: str | None = declare_setting(
        "a registered distillation loss: forward_kl or reverse_kl; null: no teacher", None
    )
    coef: float = declare_setting("weight of the divergence in the loss", 1.0, FACTOR)
    others_coef: float = declare_setting(
        "weight of all other terms of the loss; 0: the teacher alone", 1.0, FACTOR
    )
    params: dict[str, Any] = declare_setting(
        "parameters of the divergence: top_k, has_tail", factory=dict
    )


@dataclass(frozen=True)
class ActorConfig:
    backend: Literal["megatron", "fsdp"] = declare_setting(
        (
            "trainer of actor, critic and reference: Megatron-Core, or transformers' models"
            " under FSDP2"
        ),
        "megatron",
    )
    megatron: MegatronConfig = declare_setting(
        "parallel layout of the actor's pool (backend megatron)", factory=MegatronConfig
    )
    fsdp: FSDPConfig = declare_setting("how models are sharded (backend fsdp)", factory=FSDPConfig)
    lora: LoRAConfig = declare_setting("low-rank adapters (backend fsdp)", factory=LoRAConfig)
    optim: OptimConfig = declare_setting("optimizer and schedules", factory=OptimConfig)
    policy_loss: PolicyLossConfig = declare_setting("policy loss", factory=PolicyLossConfig)
    mini_batch_size: int = declare_setting(
        "samples (prompts x rollout.n) an optimizer step, over all ranks", 1024, SAMPLES
    )
    ppo_epochs: int = declare_setting("passes over the samples of a step", 1, EPOCHS)
    ppo_max_token_len_per_gpu: int = declare_setting(
        "token budget of a micro-batch on one rank; context-parallel ranks pool theirs",
        16384,
        TOKENS,
    )
    loss_agg_mode: str = declare_setting(
        "registered aggregation of token losses; its denominator is global", "token-mean"
    )
    loss_scale_factor: float | None = declare_setting(
        (
            "tokens, divisor of seq-mean-token-sum-norm; null: data.max_response_length, or all"
            " tokens that an episode may have"
        ),
        None,
        POSITIVE,
    )
    entropy_coeff: float = declare_setting("weight of the entropy bonus", 0.0, BELOW_ONE)
    use_kl_loss: bool = declare_setting(
        "add a KL term against the reference to the loss (needs the reference role)", False
    )
    kl_loss_coef: float = declare_setting("weight of the KL term", 0.001, FACTOR)
    kl_loss_type: Literal["k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"] = declare_setting(
        "estimator of the KL term; with +: its value, and the gradient of k2", "k3"
    )
    distillation: TeacherTermConfig = declare_setting(
        "term of the loss by which the policy learns from a teacher", factory=TeacherTermConfig
    )
    shuffle: bool = declare_setting("shuffle samples before they are cut into mini-batches", True)
    router_replay: Literal["none", "r2", "r3"] = declare_setting(
        (
            "experts that tokens meet in updates: as routers pick then; r2: as they did for"
            " old_log_probs; r3: as the engine's did, for old_log_probs too"
        ),
        "none",
    )
    log_prob_chunk_size: int = declare_setting(
        "vocabulary columns that the head handles at a time", 8192, COUNT
    )
    kernels: KernelsConfig = declare_setting(
        "how head and loss are computed", factory=KernelsConfig
    )


@dataclass(frozen=True)
class CriticConfig:
    """There is a critic where the advantage estimator needs values."""

    path: str | None = declare_setting(
        "Hugging Face directory that the critic starts from; null: the policy as RL starts", None
    )
    value_head_init_std: float = declare_setting(
        "deviation of the value head's first weights, where path has none; 0: zeros", 0.0, BELOW_ONE
    )
    num_ranks: int = declare_setting(
        "ranks of a pool of its own, the last of the job; 0: in the actor's pool and layout",
        0,
        Interval(0, RANKS.high, RANKS.high_reason),
    )
    megatron: MegatronConfig = declare_setting(
        "parallel layout of its own pool (num_ranks > 0)", factory=MegatronConfig
    )
    optim: OptimConfig = declare_setting(
        "optimizer and schedules", factory=lambda: OptimConfig(lr=1e-5)
    )
    mini_batch_size: int | None = declare_setting(
        "samples an optimizer step, over all ranks; null: the actor's", None, SAMPLES
    )
    ppo_epochs: int | None = declare_setting(
        "passes over the samples of a step; null: the actor's", None, EPOCHS
    )
    ppo_max_token_len_per_gpu: int | None = declare_setting(
        "token budget of a micro-batch on one rank; null: the actor's", None, TOKENS
    )
    cliprange_value: float = declare_setting(
        "values move at most this far from those before the update; 0: no clip", 0.5, FACTOR
    )
    loss_agg_mode: str | None = declare_setting(
        "name of a registered aggregation; null: the actor's", None
    )


@dataclass(frozen=True)
class ReferenceConfig:
    path: str | None = declare_setting(
        "weights of the reference; null: model.path as it was before training", None
    )
    num_ranks: int = declare_setting(
        "ranks of a pool of its own, the last of the job; 0: in the actor's pool and layout",
        0,
        Interval(0, RANKS.high, RANKS.high_reason),
    )
    megatron: MegatronConfig = declare_setting(
        "parallel layout of its own pool (num_ranks > 0)", factory=MegatronConfig
    )
    param_offload: bool = declare_setting("keep its weights in host memory between uses", False)
    max_token_len_per_gpu: int | None = declare_setting(
        "token budget of a micro-batch; null: the actor's", None, TOKENS
    )


@dataclass(frozen=True)
class ServedRewardModelConfig:
    num_servers: int = declare_setting(
        "SGLang servers of the reward model to start, which score text; 0: ranks score tokens",
        0,
        Interval(0, PROCESSES.high, PROCESSES.high_reason),
    )
    judge: dict[str, Any] | None = declare_setting(
        (
            "parameters of the reward llm_judge but server, servers and model: the model writes a"
            " verdict, which is its score; {}: all as they are by default; null: the model has one"
            " label, and gives numbers"
        ),
        None,
    )
    dtype: Literal["float32", "bfloat16"] | None = declare_setting(
        "type of the servers' weights; null: model.dtype", None
    )
    ending: str = declare_setting(
        "text behind a response that the model was trained to score at, such as <|im_end|>", ""
    )
    skip_special_tokens: bool = declare_setting(
        (
            "the model reads responses without their special tokens; false: with them, but for the"
            " one that ended a response, in whose place `ending` stands"
        ),
        True,
    )
    python: str | None = declare_setting(
        "interpreter of the environment that has sglang; null: this one", None
    )
    args: dict[str, Any] = declare_setting(
        "SGLang server arguments, without the leading dashes", factory=dict
    )
    env: dict[str, str] = declare_setting("environment of the server processes", factory=dict)
    machines: tuple[int, ...] = declare_setting(
        (
            "numbers of the machines on which they are started in turns, as"
            " rollout.engine_machines; (): the controller's"
        ),
        (),
    )


@dataclass(frozen=True)
class RewardModelConfig:
    """A frozen model that scores the samples of a step, beside `reward`. docs/rewards.md."""

    path: str | None = declare_setting(
        (
            "Hugging Face directory of a model with one label, such as the job reward-model"
            " writes; null: none"
        ),
        None,
    )
    weight: float = declare_setting(
        "its score is multiplied by this and added to that of `reward`", 1.0, WEIGHT
    )
    granularity: Literal["response", "step", "token"] = declare_setting(
        (
            "what it scores: the response at its last token, each step of it at the step's last"
            " token, or each token"
        ),
        "response",
    )
    step_separator: str = declare_setting(
        "with granularity step: the text that ends a step, as the response's end does", "\n\n"
    )
    step_reduction: Literal["mean", "sum"] = declare_setting(
        (
            "with step and token: how a sample's scores become its reward; the reward of each token"
            " is its share of that"
        ),
        "mean",
    )
    activation: Literal["none", "sigmoid"] = declare_setting(
        "sigmoid: a score s becomes 1 / (1 + exp(-s))", "none"
    )
    mean: float = declare_setting("subtracted from a score, before the activation", 0.0, WEIGHT)
    std: float = declare_setting(
        "a score is then divided by this, before the activation", 1.0, POSITIVE
    )
    num_ranks: int = declare_setting(
        "ranks of a pool of its own, the last of the job; 0: in the actor's pool and layout",
        0,
        Interval(0, RANKS.high, RANKS.high_reason),
    )
    megatron: MegatronConfig = declare_setting(
        "parallel layout of its own pool (num_ranks > 0)", factory=MegatronConfig
    )
    param_offload: bool = declare_setting("keep its weights in host memory between uses", False)
    max_token_len_per_gpu: int | None = declare_setting(
        "token budget of a micro-batch; null: the actor's", None, TOKENS
    )
    served: ServedRewardModelConfig = declare_setting(
        "the model behind SGLang servers of the run, not on ranks", factory=ServedRewardModelConfig
    )


@dataclass(frozen=True)
class WarmupConfig:
    max_steps: int = declare_setting(
        "supervised optimizer steps before the first RL step; 0: none", 0
    )
    batch_size: int = declare_setting("samples an optimizer step, over all ranks", 64, SAMPLES)
    stop_accuracy: float = declare_setting(
        "stop when sampled held-out accuracy reaches this", 1.0, SHARE
    )
    test_freq: int = declare_setting("steps between evaluations", 20, COUNT)
    test_samples: int = declare_setting("held-out items of these evaluations", 512, COUNT)
    save_hf: bool = declare_setting(
        "write the warmed-up weights in Hugging Face layout under the run directory", False
    )
    optim: OptimConfig = declare_setting(
        "optimizer of the warm-up; RL starts with a fresh one", factory=OptimConfig
    )


@dataclass(frozen=True)
class SFTConfig:
    """Settings of the jobs `sft` and `reward-model`. data.train_batch_size: samples of an optimizer
    step, over all ranks.
    """

    loss_mode: str = declare_setting(
        (
            "sft, the answers' negative log-probs; forward_kl or reverse_kl, towards the teacher at"
            " reference.path; or a registered preference loss, such as dpo; of a reward model"
            " bradley_terry or regression"
        ),
        "sft",
    )
    params: dict[str, Any] = declare_setting(
        "parameters of the loss, see its dataclass", factory=dict
    )
    max_length: int = declare_setting(
        "longest document, tokens; longer ones: data.filter_overlong_prompts and data.truncation",
        4096,
        TOKENS,
    )
    in_memory: bool = declare_setting(
        (
            "hold the tokens of all documents, 5 bytes each; false: hold the places of rows in"
            " JSONL files, 14 bytes each, and read a row when it is drawn (conversations and pairs)"
        ),
        True,
    )
    messages_key: str | None = declare_setting(
        (
            "key of a conversation, whose assistant turns train; null: rows of data.prompt_key"
            " and data.label_key"
        ),
        None,
    )
    text_key: str | None = declare_setting(
        (
            "key of a plain text, every token of which trains; null: rows of data.prompt_key and"
            " data.label_key, or of sft.messages_key"
        ),
        None,
    )
    tools_key: str = declare_setting(
        "key of the tools that a conversation may call, where a row has some", "tools"
    )
    weight_key: str | None = declare_setting(
        "key of a sample's weight in the loss; null: 1 each", None
    )
    teacher_key: str | None = declare_setting(
        (
            "with forward_kl and reverse_kl: key of the teacher's tokens of a conversation, so that"
            " it need not run; null: ask the model at reference.path"
        ),
        None,
    )
    chosen_key: str = declare_setting(
        "with a preference loss: key of the better answer, text or messages", "chosen"
    )
    rejected_key: str = declare_setting(
        "with a preference loss: key of the worse answer, text or messages", "rejected"
    )
    use_head_bias: bool = declare_setting(
        (
            "of a reward model: train a bias of the head, which transformers' sequence classifiers"
            " do not have; the model is then written as a ...ForTokenClassification"
        ),
        False,
    )
